"""The layout of one packed forward over pages, as the kernels and their references take it.

Shape letters: R requests, T packed query tokens, H query heads, G key/value heads, D head size, N slots of the cache, W pages of the
longest table, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class PackedRound:
    """
    Which tokens of which request a forward holds, where their prefixes lie, and what each query token sees.

    A query token sees all of its request's prefix, and the packed tokens of its two intervals.

    Args:
        starts (`tuple[int]`): packed index of each request's first token; `starts[R]` is T.
        prefix (`tuple[int]`): cached tokens of each request.
        visible (`torch.Tensor`): integers `[T, 4]`, rows `(a0, a1, b0, b1)`: the intervals `[a0, a1)` and `[b0, b1)` in packed
            indices, disjoint and within the request; an empty one has equal ends.
        tables (`torch.Tensor`): integers `[R, W]`, the pages of each request in order; what lies behind the prefix is not read by
            attention.
        page_size (`int`): tokens a page. Token i of a request lies in slot `tables[r, i // page_size] * page_size + i % page_size`.
    """

    starts: tuple[int, ...]
    prefix: tuple[int, ...]
    visible: Tensor
    tables: Tensor
    page_size: int

    @property
    def requests(self) -> int:
        return len(self.prefix)

    @property
    def query_tokens(self) -> int:
        return self.starts[-1]
