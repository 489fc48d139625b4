"""The task record, the names of families and splits, and the template type all families share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

FAMILIES = ("math", "code", "text")
SPLITS = ("train", "test", "unseen")


@dataclass(frozen=True)
class Task:
    """One user message, one correct answer to it, and what a scorer must know."""

    family: str
    template: str
    prompt: str
    answer: str
    checks: tuple[str, ...]


@dataclass(frozen=True)
class Template:
    """A named way to draw tasks; a held-out template serves the ``unseen`` split only."""

    name: str
    draw: Callable[[Random], Task]
    held_out: bool = False
