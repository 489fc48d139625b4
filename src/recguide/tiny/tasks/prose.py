"""Passages of the running Python's standard library: text that is neither of the families."""

from __future__ import annotations

import ast
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random

# Tests, vendored packages and generated tables say little that reads like prose or hand-written code.
_SKIPPED = {
    "test", "tests", "lib2to3", "idlelib", "turtledemo", "pip", "ensurepip", "encodings", "pydoc_data",
    "site-packages", "dist-packages", "__pycache__",
}  # fmt: skip
_SHORTEST, _LONGEST = 300, 900


def prose_passages(seed: int = 0) -> Iterator[str]:
    """Passages of 300-900 characters from docstrings and source code, in an order that ``seed`` decides."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(p for p in root.rglob("*.py") if _SKIPPED.isdisjoint(p.relative_to(root).parts))
    rng = Random(f"prose/{seed}")
    rng.shuffle(files)
    for file in files:
        source = file.read_bytes()
        if source.isascii():
            text = source.decode().replace("\r\n", "\n")
            passages = [*_pack(_docstrings(text)), *_pack(text.split("\n\n"))]
            rng.shuffle(passages)
            yield from passages


def _docstrings(source: str) -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tree = ast.parse(source)
        except SyntaxError:
            return
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from (ast.get_docstring(node) or "").split("\n\n")


def _pack(blocks: Iterable[str]) -> Iterator[str]:
    """Join neighbouring blocks into passages; a block too long for one is dropped."""
    passage = ""
    for block in blocks:
        block = block.strip("\n")
        joined = f"{passage}\n\n{block}" if passage else block
        if len(joined) <= _LONGEST:
            passage = joined
        else:
            if _fits(passage):
                yield passage
            passage = block if len(block) <= _LONGEST else ""
    if _fits(passage):
        yield passage


def _fits(passage: str) -> bool:
    return len(passage) >= _SHORTEST
