"""The task record, the names of families and splits, and the template type all families share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

FAMILIES = ("math", "code", "text")
SPLITS = ("wide", "train", "test", "unseen")


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
    """
    A named way to draw tasks, and the split that it serves.

    `wide` is the first stretch of training: more names, larger numbers, tasks that a small model learns to read long
    before it gets them right. `train` and `test` share templates and differ in seeds; `unseen` has templates of its own.
    """

    name: str
    draw: Callable[[Random], Task]
    split: str = "train"
