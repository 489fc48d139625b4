"""Segments and the packed plan: any mixture of prefill, draft, verify and branches as one forward.

What a query token may look at is its request's cached prefix and no more than two intervals of the packed row: one for its
own segment (up to itself if that is causal, all of it if it is bidirectional), one for the part of the verified segment
that a branch takes as given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Segment:
    """
    A run of query tokens of one request.

    Args:
        tokens (`list[int]`): token ids.
        position (`int`): absolute position of the first one; the others follow.
        bidirectional (`bool`): the tokens see each other in both directions; otherwise causally.
        adapter_from (`int`, *optional*): the draft adapter is on from this token of the segment on; `None`: off.
        hypothesis (`int`): how many tokens of the request's first segment it sees besides (0 for that segment itself).
        outputs (`tuple[int, int | None]`): start and stop, as of a slice, of its tokens whose logits are wanted.
    """

    tokens: list[int]
    position: int
    bidirectional: bool = False
    adapter_from: int | None = None
    hypothesis: int = 0
    outputs: tuple[int, int | None] = (0, None)


@dataclass(frozen=True)
class Plan:
    """
    One packed forward, as the attention backends and the model get it.

    Args:
        input_ids, position_ids (`torch.Tensor`): `int64[T]`.
        visible (`torch.Tensor`): `int64[T, 4]`, rows `(a0, a1, b0, b1)`: the two intervals `[a0, a1)` and `[b0, b1)`, in
            packed indices; an empty one is `(0, 0)`.
        adapter (`torch.Tensor`, *optional*): `bool[T]`; `None` where it is off for all.
        output_rows (`torch.Tensor`, *optional*): `int64[N]`, packed indices whose logits are wanted; `None` for all.
        starts (`tuple[int]`): packed index of each batch row's first token; `starts[R]` is T.
        prefix (`tuple[int]`): cached tokens of each batch row.
        outputs (`tuple[tuple[tuple[int, int]]]`): for each batch row and segment, its range `[i, j)` of the output rows.
        causal (`bool`): nothing is cached and every row is one causal segment, as in the prefill of whole prompts.
    """

    input_ids: Tensor
    position_ids: Tensor
    visible: Tensor
    adapter: Tensor | None
    output_rows: Tensor | None
    starts: tuple[int, ...]
    prefix: tuple[int, ...]
    outputs: tuple[tuple[tuple[int, int], ...], ...]
    causal: bool

    @property
    def query_tokens(self) -> int:
        return self.starts[-1]

    def tokens_of(self, row: int) -> int:
        """Query tokens of one batch row."""
        return self.starts[row + 1] - self.starts[row]


def pack(rows: Sequence[Sequence[Segment]], prefix: Sequence[int], device: torch.device) -> Plan:
    """
    Pack the segments of every batch row; a row with none takes no part in the forward.

    Args:
        rows (sequence of sequences of `Segment`): `rows[r]` are row r's segments, the verified one first.
        prefix (`Sequence[int]`): cached tokens of each row.
        device (`torch.device`): where the plan's tensors are put.
    """
    ids: list[int] = []
    positions: list[int] = []
    visible: list[tuple[int, int, int, int]] = []
    adapter: list[bool] = []
    wanted: list[int] = []
    starts, outputs = [0], []
    for segments in rows:
        first = len(ids)
        row_outputs = []
        for segment in segments:
            start, length = len(ids), len(segment.tokens)
            assert segment.hypothesis <= len(segments[0].tokens), "a branch sees more than the verified segment holds"
            end, seen = start + length, (first, first + segment.hypothesis) if segment.hypothesis else (0, 0)
            ids += segment.tokens
            positions += range(segment.position, segment.position + length)
            if segment.bidirectional:
                visible += [(start, end, *seen)] * length
            else:
                visible += [(start, i + 1, *seen) for i in range(start, end)]
            off = length if segment.adapter_from is None else segment.adapter_from
            adapter += [False] * off + [True] * (length - off)
            rows_wanted = range(start, end)[slice(*segment.outputs)]
            row_outputs.append((len(wanted), len(wanted) + len(rows_wanted)))
            wanted += rows_wanted
        starts.append(len(ids))
        outputs.append(tuple(row_outputs))
    columns = torch.tensor([ids, positions], device=device)
    return Plan(
        input_ids=columns[0],
        position_ids=columns[1],
        visible=torch.tensor(visible, device=device),
        adapter=torch.tensor(adapter, device=device) if any(adapter) else None,
        output_rows=None if len(wanted) == len(ids) else torch.tensor(wanted, device=device),
        starts=tuple(starts),
        prefix=tuple(prefix),
        outputs=tuple(outputs),
        causal=not any(prefix) and all(len(s) == 1 and not s[0].bidirectional for s in rows),
    )
