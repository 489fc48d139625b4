"""Draw tasks by (family, split, index) and score outputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from hashlib import sha256
from random import Random

from . import arithmetic, functions, instructions
from .task import FAMILIES, SPLITS, Task, Template

_MODULES = {"math": arithmetic, "code": functions, "text": instructions}
_STREAMS = {"wide": "train", "train": "narrow", "test": "test", "unseen": "unseen"}
"""Names that seed the streams; those of the committed weights' run, so that its tokenizer and data can be drawn again."""
_SCORERS: dict[str, Callable[[Task, str], bool]] = {name: module.score for name, module in _MODULES.items()}


@cache
def templates(family: str, split: str) -> tuple[Template, ...]:
    """The templates that a split of a family draws from."""
    if family not in FAMILIES or split not in SPLITS:
        raise ValueError(f"no tasks for family {family!r}, split {split!r}: choose from {FAMILIES} and {SPLITS}")
    return tuple(t for t in _MODULES[family].templates() if t.split == ("train" if split == "test" else split))


def make_task(family: str, split: str, index: int) -> Task:
    """The task at ``index`` of an endless stream; the same arguments always give the same task.

    Which of training and test an instance belongs to is a property of its prompt, so they never share one.
    """
    choices = templates(family, split)
    rng = Random(f"{family}/{_STREAMS[split]}/{index}")
    template = rng.choice(choices)
    while True:
        task = template.draw(rng)
        if split == "unseen" or _is_test(task.prompt) == (split == "test"):
            return task


def score(task: Task, output: str) -> bool:
    """Whether ``output`` solves ``task``."""
    return _SCORERS[task.family](task, output)


def _is_test(prompt: str) -> bool:
    return sha256(prompt.encode()).digest()[0] % 10 == 0
