"""What a round costs on this machine, measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Iterator, Sequence

import torch

from .adapter import ModelAdapter
from .attention import installed
from .calibration import RoundCost
from .config import RecGuideConfig
from .dense_kv import Forgetful
from .hooks import Hook
from .loop import method_of
from .paged_kv import PagedBatch, PagePool, PageTable
from .rounds import Request, plan_blocks, prefill, run_round
from .structs import ForwardRecord

PAGE_SIZE = 16


class _DraftClock(Hook):
    def __init__(self) -> None:
        self.drafted = 0.0

    def on_draft(self, record: ForwardRecord) -> None:
        self.drafted = time.perf_counter()


def measure_rounds(
    adapter: ModelAdapter,
    loads: Sequence[int],
    block_sizes: Sequence[int],
    contexts: Sequence[int],
    repeats: int = 7,
    done: Collection[tuple[int, int]] = (),
    advance: Callable[[], None] = lambda: None,
) -> Iterator[list[RoundCost]]:
    """
    Time whole rounds, the host's work included: drafting, verifying, bookkeeping; blocks of 1 are plain decoding.

    Sizes take turns in every repetition, so that a noisy moment hits all alike, and the median is kept.

    Args:
        adapter (`ModelAdapter`): the model.
        loads (`Sequence[int]`): requests in a round.
        block_sizes (`Sequence[int]`): of all its requests.
        contexts (`Sequence[int]`): tokens that each request has cached.
        repeats (`int`, defaults to 7): timed rounds of each kind, after one that is not.
        done (`Collection[tuple[int, int]]`): pairs of context and load that were measured before.
        advance (callable, *optional*): called after each pair.

    Yields:
        `list[RoundCost]`: the costs of one context and load, one for each block size.
    """
    for context in contexts:
        for load in loads:
            if (context, load) not in done:
                yield _measure(adapter, load, block_sizes, context, repeats)
            advance()


def _measure(
    adapter: ModelAdapter, load: int, block_sizes: Sequence[int], context: int, repeats: int
) -> list[RoundCost]:
    pool = PagePool(load * -(-(context + max(block_sizes)) // PAGE_SIZE), PAGE_SIZE)
    prompts = _prompts(adapter, load, context + 1)
    tables = [pool.new_table(prompt[:-1]) for prompt in prompts]
    draft: dict[int, list[float]] = {size: [] for size in block_sizes}
    verify: dict[int, list[float]] = {size: [] for size in block_sizes}
    with installed(adapter.model):
        for table in tables:
            _fill(adapter, pool, table, max(block_sizes))
        for repeat in range(repeats + 1):
            for size in block_sizes:
                batch = [_request(adapter, i, prompt, size) for i, prompt in enumerate(prompts)]
                clock = _DraftClock()
                start = time.perf_counter()
                plan_blocks(batch, load)
                run_round(batch, adapter, Forgetful(PagedBatch(pool, tables)), clock)
                end = time.perf_counter()
                drafted = clock.drafted if size > 1 else start
                if repeat:
                    draft[size].append(1000 * (drafted - start))
                    verify[size].append(1000 * (end - drafted))
    return [
        RoundCost(load, size, context, statistics.median(draft[size]), statistics.median(verify[size]))
        for size in block_sizes
    ]


def _prompts(adapter: ModelAdapter, count: int, length: int) -> list[list[int]]:
    """Random tokens: what they are makes no difference to the time."""
    vocabulary = adapter.model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (count, length), generator=generator)
    for excluded in adapter.excluded_token_ids:
        tokens[tokens == excluded] = (excluded + 1) % vocabulary
    prompts: list[list[int]] = tokens.tolist()
    return prompts


def _fill(adapter: ModelAdapter, pool: PagePool, table: PageTable, block_size: int) -> None:
    assert table.reserve(len(table.tokens) + block_size)
    request = _request(adapter, 0, list(table.tokens), 1)
    prefill([request], adapter, PagedBatch(pool, [table]), Hook())
    # Committing gives back the pages behind the prompt; a round needs them.
    assert table.reserve(block_size)


def _request(adapter: ModelAdapter, number: int, tokens: list[int], block_size: int) -> Request:
    config = RecGuideConfig(strategy="linear" if block_size > 1 else "ar", block_size=block_size)
    request = Request(
        id=number,
        tokens=list(tokens),
        max_new_tokens=4 * block_size,
        stop=lambda tokens: None,
        method=method_of(config, frozenset(), adapter),
    )
    # Its newest token is a seed, as after a prefill.
    request.committed = 1
    return request
