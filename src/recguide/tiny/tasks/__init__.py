"""Endless, deterministic tasks in three families, on which the tiny models are trained and scored."""

from .prose import prose_passages
from .suite import make_task, score, templates
from .task import FAMILIES, SPLITS, Task, Template

__all__ = [
    "FAMILIES",
    "SPLITS",
    "Task",
    "Template",
    "make_task",
    "prose_passages",
    "score",
    "templates",
]
