"""Training batches of fixed shape: packed clean documents, and draft blocks that read them.

A row is `[clean L | blocks N]`. The clean half is causal inside each document. Every block of B tokens starts at a
random token of an answer, sees the document before its start and itself in both directions, as at inference.
Deviation from the published objective: most blocks carry exactly what a drafter meets, a clean seed (or none, the
continuation branch) and MASK elsewhere; a small model sees that pattern too rarely under uniform masking.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .tasks import FAMILIES, make_task, prose_passages

IGNORE = -100
BLOCK_SIZES = (8, 16, 32)
PROSE_SHARE = 0.06


@dataclass(frozen=True)
class Shape:
    """L clean tokens and N block tokens a row, `rows` rows a batch; N is a multiple of the largest block."""

    rows: int = 4
    clean: int = 384
    blocks: int = 192


@dataclass(frozen=True)
class Document:
    tokens: list[int]
    answer_start: int


@dataclass(frozen=True)
class Batch:
    """`[R, L + N]` ids, positions and labels (clean labels shifted, block labels unshifted, -100 ignored), `[R, 1, L+N, L+N]` mask."""

    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    visible: Tensor
    adapter: Tensor

    def to(self, device: torch.device) -> Batch:
        """The same batch on another device."""
        return Batch(*(getattr(self, field.name).to(device) for field in fields(self)))


def documents(tokenizer: Any, family_weights: dict[str, float], split: str, seed: int) -> Iterator[Document]:
    """An endless stream of tokenized documents; the n-th document of a (split, seed) is always the same."""
    rng = np.random.default_rng(seed)
    next_index = dict.fromkeys(FAMILIES, seed * 10_000_000)
    prose = _endless_prose()
    weights = np.array([family_weights[family] for family in FAMILIES], dtype=float)
    weights /= weights.sum()
    while True:
        if split in ("wide", "train") and rng.random() < PROSE_SHARE:
            ids = tokenizer(next(prose)).input_ids[:200]
            yield Document(ids, answer_start=0)
            continue
        family = FAMILIES[int(rng.choice(len(FAMILIES), p=weights))]
        task = make_task(family, split, next_index[family])
        next_index[family] += 1
        yield encode(tokenizer, task.prompt, task.answer)


def encode(tokenizer: Any, prompt: str, answer: str) -> Document:
    head = tokenizer(f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n").input_ids
    tail = tokenizer(f"{answer}<|im_end|>").input_ids
    return Document(head + tail, answer_start=len(head))


def _endless_prose() -> Iterator[str]:
    while True:
        yield from prose_passages()


def batches(
    stream: Iterator[Document],
    shape: Shape,
    mask_id: int,
    pad_id: int,
    seed: int,
    block_sizes: tuple[int, ...] = BLOCK_SIZES,
) -> Iterator[Batch]:
    """Endless batches of `shape` from `stream`. One block size a batch, so that shapes stay fixed."""
    rng = np.random.default_rng(seed)
    waiting: list[Document] = []
    while True:
        rows = [_pack(stream, waiting, shape.clean) for _ in range(shape.rows)]
        block_size = int(rng.choice(block_sizes))
        yield _stack([_row(documents, shape, block_size, mask_id, pad_id, rng) for documents in rows], shape.clean)


def _pack(stream: Iterator[Document], waiting: list[Document], room: int) -> list[Document]:
    """Whole documents into one row, first those left over before; a document longer than the row is dropped."""
    row: list[Document] = []
    while len(waiting) < 12:
        document = next(stream)
        if len(document.tokens) <= room:
            waiting.append(document)
    for document in list(waiting):
        if len(document.tokens) <= room:
            row.append(document)
            waiting.remove(document)
            room -= len(document.tokens)
    return row


def _row(
    documents: list[Document], shape: Shape, block_size: int, mask_id: int, pad_id: int, rng: np.random.Generator
) -> tuple[np.ndarray, ...]:
    length, total = shape.clean, shape.clean + shape.blocks
    ids = np.full(total, pad_id)
    positions = np.zeros(total, dtype=np.int64)
    labels = np.full(total, IGNORE)
    owner = np.full(total, -1)
    starts: list[int] = []
    at = 0
    for number, document in enumerate(documents):
        n = len(document.tokens)
        ids[at : at + n] = document.tokens
        positions[at : at + n] = np.arange(n)
        owner[at : at + n] = number
        first = max(document.answer_start, 1)
        labels[at + first - 1 : at + n - 1] = document.tokens[first:]
        starts.extend(range(at + first, at + n - 1))
        at += n

    index = np.arange(length)
    visible = np.zeros((total, total), dtype=bool)
    clean_owner = owner[:length]
    visible[:length, :length] = (clean_owner[:, None] == clean_owner[None, :]) & (index[None, :] <= index[:, None])
    for b in range(shape.blocks // block_size):
        start = int(starts[rng.integers(len(starts))])
        place = np.arange(length + b * block_size, length + (b + 1) * block_size)
        source = start + np.arange(block_size)
        inside = (source < length) & (clean_owner[np.minimum(source, length - 1)] == clean_owner[start])
        tokens = np.where(inside, ids[np.minimum(source, length - 1)], pad_id)
        masked = np.ones(block_size, dtype=bool)
        kind = rng.random()
        if kind < 0.65:
            masked[0] = False
        elif kind > 0.85:
            masked = rng.random(block_size) < (1 - 1e-3) * rng.random() + 1e-3
        ids[place] = np.where(masked | ~inside, mask_id, tokens)
        positions[place] = positions[start] + np.arange(block_size)
        labels[place] = np.where(masked & inside, tokens, IGNORE)
        visible[place, :length] = (clean_owner == clean_owner[start]) & (index < start)
        visible[place[0] : place[-1] + 1, place[0] : place[-1] + 1] = True
    visible[np.arange(total), np.arange(total)] = True
    return ids, positions, labels, visible


def _stack(rows: list[tuple[np.ndarray, ...]], clean: int) -> Batch:
    ids, positions, labels, visible = (torch.from_numpy(np.stack(column)) for column in zip(*rows, strict=True))
    adapter = (torch.arange(ids.shape[1]) >= clean).expand(ids.shape)
    return Batch(ids, positions, labels, visible[:, None], adapter)
