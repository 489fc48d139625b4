"""Recordings that tables are fitted to: the prompts of a calibration, decoded in several ways."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from ..adapter import ModelAdapter
from ..calibration import BLOCK_SIZES, LARGEST_BLOCK, CostProfile, ProgressTable
from ..policy import BlockPolicy, VerificationGuided
from ..shadow import RoundRecorder, places, run_shadows
from ..structs import RoundRecord
from ..trace import round_of
from .unfinished import Unfinished

Rounds = list[RoundRecord]


def record_rounds(
    model: Any,
    ids: torch.Tensor,
    max_new_tokens: int,
    strategy: str,
    block_size: int,
    policy: str | BlockPolicy = "fixed",
) -> Rounds:
    """One prompt's rounds, decoded greedily; `ids`: `int64[1, T]` on the model's device."""
    recorder = RoundRecorder()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        generation_strategy=strategy,
        recguide_config={"block_size": block_size, "policy": policy},
        recguide_hooks=[recorder],
    )
    return recorder.rounds


class Recordings:
    """
    Each prompt's rounds in several ways. What an interrupted run has recorded is not recorded again.

    Args:
        adapter (`ModelAdapter`): the model.
        prompts (`Sequence[torch.Tensor]`): `int64[1, T]` each, on the model's device.
        max_new_tokens (`int`): of each.
        unfinished (`Unfinished`): what is recorded already.
    """

    def __init__(
        self, adapter: ModelAdapter, prompts: Sequence[torch.Tensor], max_new_tokens: int, unfinished: Unfinished
    ) -> None:
        self._adapter, self._prompts, self._max_new_tokens = adapter, prompts, max_new_tokens
        self._unfinished = unfinished

    def of_largest_blocks(self) -> list[Rounds]:
        """Rounds of LinearSS with blocks of 32."""
        return self._pass("blocks of 32", range(len(self._prompts)), lambda i: self._decode(i, "linear", LARGEST_BLOCK))

    def with_branches(self) -> list[Rounds]:
        """Rounds with continuation branches, of every third prompt."""
        return self._pass("branches", range(0, len(self._prompts), 3), lambda i: self._decode(i, "recguide", 16))

    def of_shadows(self, recorded: Sequence[Rounds], count: int) -> list[Rounds]:
        """Rounds of 8 and of 16 from where rounds of the largest blocks began, at so many places in all."""
        chosen = places(recorded, LARGEST_BLOCK, count)

        def run(number: int) -> Rounds:
            prompt: list[int] = self._prompts[number][0].tolist()
            return run_shadows(self._adapter, prompt, recorded[number], chosen[number], BLOCK_SIZES[:-1])

        return self._pass("shadows", range(len(self._prompts)), run)

    def on_policy(self, table: ProgressTable, costs: CostProfile, load: int) -> list[Rounds]:
        """Rounds with the blocks that `verification_guided` asks for at this load."""
        policy = _AtLoad(VerificationGuided(table, costs), load)
        return self._pass(
            "on policy",
            range(len(self._prompts)),
            lambda i: self._decode(i, "linear", LARGEST_BLOCK, policy),
            policy.replay,
        )

    def _decode(self, number: int, strategy: str, block_size: int, policy: str | BlockPolicy = "fixed") -> Rounds:
        prompt = self._prompts[number]
        return record_rounds(self._adapter.model, prompt, self._max_new_tokens, strategy, block_size, policy)

    def _pass(
        self,
        name: str,
        numbers: Sequence[int],
        record: Callable[[int], Rounds],
        met_again: Callable[[Rounds], None] = lambda rounds: None,
    ) -> list[Rounds]:
        """The rounds of these prompts; `met_again` gets those that were recorded before an interruption, in their turn."""
        found = []
        for number in track(numbers, name, console=Console(stderr=True)):
            step = f"{name}, prompt {number}"
            if step in self._unfinished.done:
                rounds = [round_of(values) for values in self._unfinished.done[step]]
                met_again(rounds)
            else:
                rounds = record(number)
                self._unfinished.add(step, [asdict(one) for one in rounds])
            found.append(rounds)
        return found


class _AtLoad(BlockPolicy):
    """A policy that is asked as if so many requests were under way."""

    def __init__(self, policy: BlockPolicy, load: int) -> None:
        self.max_block = policy.max_block
        self._policy, self._load = policy, load

    def block_size(self, request: int, load: int) -> int:
        return self._policy.block_size(request, self._load)

    def observe(self, record: RoundRecord) -> None:
        self._policy.observe(record)

    def forget(self, request: int) -> None:
        self._policy.forget(request)

    def replay(self, rounds: Rounds) -> None:
        """Bring the policy to where it was after a request's rounds."""
        for record in rounds:
            self.block_size(record.request, self._load)
            self.observe(record)
        for request in {record.request for record in rounds}:
            self.forget(request)
