"""Files that others read while they are made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A file to write in place of `path`: all of it or nothing, so that a reader never sees half a file."""
    partial = path.with_suffix(path.suffix + ".partial")
    yield partial
    partial.replace(path)
