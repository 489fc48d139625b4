"""What a round costs on this machine, measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch

from .adapter import ModelAdapter
from .attention import installed
from .calibration import ForwardCost, RoundCost
from .config import RecGuideConfig
from .dense_kv import Forgetful
from .hooks import Hook
from .loop import method_of
from .paged_kv import PagedBatch, PagePool, PageTable
from .policy import FixedBlock
from .rounds import Method, Request, plan_blocks, prefill, run_round
from .structs import Branch, BranchChoice, BranchKind, Draft, DraftSource, ForwardRecord, Guess

PAGE_SIZE = 16
QUERY_TOKENS = (1, 8, 16, 32, 64, 96)
"""Of a request, in the forwards that are timed by themselves."""


class _DraftClock(Hook):
    def __init__(self) -> None:
        self.drafted = 0.0

    def on_draft(self, record: ForwardRecord) -> None:
        self.drafted = time.perf_counter()


def measure_costs(
    adapter: ModelAdapter,
    loads: Sequence[int],
    block_sizes: Sequence[int],
    contexts: Sequence[int],
    repeats: int = 5,
    done: Collection[tuple[int, int]] = (),
    advance: Callable[[], None] = lambda: None,
) -> Iterator[tuple[list[RoundCost], list[ForwardCost]]]:
    """
    Time whole rounds, the host's work included: drafting, verifying, bookkeeping; blocks of 1 are plain decoding. And rounds of one
    forward, in which a branch rides along, by their query tokens.

    Sizes take turns in every repetition, so that a noisy moment hits all alike, and the median is kept.

    Args:
        adapter (`ModelAdapter`): the model.
        loads (`Sequence[int]`): requests in a round.
        block_sizes (`Sequence[int]`): of all its requests.
        contexts (`Sequence[int]`): tokens that each request has cached.
        repeats (`int`, defaults to 5): timed rounds of each kind, after one that is not.
        done (`Collection[tuple[int, int]]`): pairs of context and load that were measured before.
        advance (callable, *optional*): called after each pair.

    Yields:
        `(list[RoundCost], list[ForwardCost])`: of one context and load, for each block size and each of [`QUERY_TOKENS`].
    """
    for context in contexts:
        for load in loads:
            if (context, load) not in done:
                yield _measure(adapter, load, block_sizes, context, repeats)
            advance()


def _measure(
    adapter: ModelAdapter, load: int, block_sizes: Sequence[int], context: int, repeats: int
) -> tuple[list[RoundCost], list[ForwardCost]]:
    room = max(*block_sizes, *QUERY_TOKENS)
    pool = PagePool(load * -(-(context + room) // PAGE_SIZE), PAGE_SIZE)
    prompts = _prompts(adapter, load, context + 1)
    tables = [pool.new_table(prompt[:-1]) for prompt in prompts]
    draft: dict[int, list[float]] = {size: [] for size in block_sizes}
    verify: dict[int, list[float]] = {size: [] for size in block_sizes}
    fused: dict[int, list[float]] = {tokens: [] for tokens in QUERY_TOKENS}

    def timed(batch: list[Request]) -> tuple[float, float]:
        """Milliseconds until the drafts are there, and from then on."""
        clock = _DraftClock()
        start = time.perf_counter()
        plan_blocks(batch, load)
        run_round(batch, adapter, Forgetful(PagedBatch(pool, tables)), clock)
        end = time.perf_counter()
        drafted = clock.drafted or start
        return 1000 * (drafted - start), 1000 * (end - drafted)

    with installed(adapter.model):
        for table in tables:
            _fill(adapter, pool, table, room)
        for repeat in range(repeats + 1):
            for size in block_sizes:
                method = _block_method(adapter, size)
                times = timed([_request(i, prompt, method) for i, prompt in enumerate(prompts)])
                if repeat:
                    draft[size].append(times[0])
                    verify[size].append(times[1])
            for tokens in QUERY_TOKENS:
                beside = _Beside(max(tokens // 2, 1), tokens - max(tokens // 2, 1))
                method = Method(FixedBlock(tokens), beside, draft_forwards=False)
                times = timed([_request(i, prompt, method, beside.draft) for i, prompt in enumerate(prompts)])
                if repeat:
                    fused[tokens].append(times[1])
    return (
        [
            RoundCost(load, size, context, statistics.median(draft[size]), statistics.median(verify[size]))
            for size in block_sizes
        ],
        [ForwardCost(load, tokens, context, statistics.median(fused[tokens])) for tokens in QUERY_TOKENS],
    )


@dataclass(frozen=True)
class _Beside:
    """A branching rule for measuring: `verified` tokens are, and a branch of `length` rides along."""

    verified: int
    length: int

    @property
    def draft(self) -> Draft:
        guesses = (Guess(0, (), 0.5, 0.5),) * (self.verified - 1)
        return Draft(guesses, DraftSource.BRANCH if guesses else DraftSource.NONE)

    def choose(self, request: int, draft: Draft, remaining: int) -> BranchChoice:
        # A correction, since not every family can predict a branch's first token.
        branch = Branch(BranchKind.CORRECTION, self.verified, self.length, 0)
        return BranchChoice((branch,) if self.length > 1 else (), verified=self.verified)

    def most_tokens(self, block_size: int) -> int:
        return self.verified + self.length


def _prompts(adapter: ModelAdapter, count: int, length: int) -> list[list[int]]:
    """Random tokens: what they are makes no difference to the time."""
    vocabulary = adapter.model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (count, length), generator=generator)
    for excluded in adapter.excluded_token_ids:
        tokens[tokens == excluded] = (excluded + 1) % vocabulary
    prompts: list[list[int]] = tokens.tolist()
    return prompts


def _fill(adapter: ModelAdapter, pool: PagePool, table: PageTable, room: int) -> None:
    assert table.reserve(len(table.tokens) + room)
    request = _request(0, list(table.tokens), _block_method(adapter, 1))
    prefill([request], adapter, PagedBatch(pool, [table]), Hook())
    # Committing gives back the pages behind the prompt; a round needs them.
    assert table.reserve(room)


def _block_method(adapter: ModelAdapter, block_size: int) -> Method:
    config = RecGuideConfig(strategy="linear" if block_size > 1 else "ar", block_size=block_size)
    return method_of(config, frozenset(), adapter)


def _request(number: int, tokens: list[int], method: Method, draft: Draft | None = None) -> Request:
    request = Request(
        id=number,
        tokens=list(tokens),
        max_new_tokens=4 * method.most_tokens,
        stop=lambda tokens: None,
        method=method,
    )
    # Its newest token is a seed, as after a prefill.
    request.committed = 1
    request.draft = draft or Draft()
    return request
