"""Rounds that leave no trace: what a shorter block would have committed where a recorded one began."""

from __future__ import annotations

from collections.abc import Sequence

from .adapter import ModelAdapter
from .attention import installed
from .config import RecGuideConfig
from .dense_kv import DenseKV, Forgetful
from .hooks import Hook
from .loop import method_of
from .rounds import Request, plan_blocks, prefill, run_round
from .structs import Outcome, RoundRecord


class RoundRecorder(Hook):
    """Keeps the rounds that it is told of."""

    def __init__(self) -> None:
        self.rounds: list[RoundRecord] = []

    def on_commit(self, record: RoundRecord) -> None:
        self.rounds.append(record)


def places(prompts: Sequence[Sequence[RoundRecord]], block_size: int, count: int) -> list[list[int]]:
    """For each prompt, which of its recorded rounds get shadows: `count` in all, evenly spread over the whole blocks of one size."""
    whole = [
        (prompt, i)
        for prompt, rounds in enumerate(prompts)
        for i, record in enumerate(rounds)
        if record.outcome is not Outcome.STOPPED and record.block_size == block_size
    ]
    count = min(count, len(whole))
    chosen: list[list[int]] = [[] for _ in prompts]
    for place in range(count):
        prompt, i = whole[place * len(whole) // count]
        chosen[prompt].append(i)
    return chosen


def run_shadows(
    adapter: ModelAdapter,
    prompt: Sequence[int],
    rounds: Sequence[RoundRecord],
    chosen: Sequence[int],
    block_sizes: Sequence[int],
) -> list[RoundRecord]:
    """
    Run rounds of other block sizes from where recorded ones began. Only the recorded ones are committed.

    Args:
        adapter (`ModelAdapter`): the model, greedy.
        prompt (`Sequence[int]`): its tokens.
        rounds (`Sequence[RoundRecord]`): all rounds of its recording, in order.
        chosen (`Sequence[int]`): indices of the rounds that get shadows, ascending.
        block_sizes (`Sequence[int]`): of the shadows.

    Returns:
        `list[RoundRecord]`: one for each chosen round and block size; `index` and `position` are the recorded round's.
    """
    text = [
        *prompt,
        *(record.seed for record in rounds[:1]),
        *(token for record in rounds for token in record.committed),
    ]
    kv, found = DenseKV(1, len(text) + max(block_sizes)), RoundRecorder()
    with installed(adapter.model):
        for record in (rounds[i] for i in chosen):
            for size in block_sizes:
                config = RecGuideConfig(strategy="linear", block_size=size)
                request = Request(
                    id=record.request,
                    tokens=text[: record.position + 1],
                    # More than the block, so that it is not shortened.
                    max_new_tokens=2 * size,
                    # The recording's end is the text's, whatever it was that ended it.
                    stop=lambda tokens: "stop" if len(tokens) >= len(text) else None,
                    method=method_of(config, frozenset(), adapter),
                )
                # Its newest token is a seed, as after a prefill.
                request.committed, request.rounds = 1, record.index
                prefill([request], adapter, kv, Hook())
                plan_blocks([request], load=1)
                run_round([request], adapter, Forgetful(kv), found)
    return found.rounds
