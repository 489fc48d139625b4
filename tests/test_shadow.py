"""Shadow rounds commit what a real round of their size would have, and leave everything as it was."""

from __future__ import annotations

import torch

from recguide.adapter import ModelAdapter
from recguide.attention import resolve_backend
from recguide.shadow import RoundRecorder, places, run_shadows
from recguide.structs import Outcome, RoundRecord
from recguide.testing import ScriptedDrafts, toy_model

PROMPT = [7, 9, 11, 6]


def rounds_of(model: object, prompt: list[int], block_size: int, tokens: int = 60) -> list[RoundRecord]:
    recorder = RoundRecorder()
    model.generate(  # type: ignore[attr-defined]
        torch.tensor([prompt]),
        max_new_tokens=tokens,
        generation_strategy="linear",
        recguide_config={"block_size": block_size},
        recguide_hooks=[recorder],
    )
    return recorder.rounds


def test_a_shadow_is_the_round_that_generate_runs_from_there() -> None:
    model = toy_model()
    recorded = rounds_of(model, PROMPT, 32)
    chosen = [0, 3, 4]
    shadows = run_shadows(ModelAdapter(model, resolve_backend()), PROMPT, recorded, chosen, (8, 16))
    text = [*PROMPT, recorded[0].seed, *(token for record in recorded for token in record.committed)]
    assert [(s.index, s.position, s.block_size) for s in shadows] == [
        (i, recorded[i].position, size) for i in chosen for size in (8, 16)
    ]
    for shadow in shadows:
        alone = rounds_of(model, text[: shadow.position], shadow.block_size, shadow.block_size + 2)[0]
        assert (shadow.seed, shadow.committed, shadow.draft.tokens) == (alone.seed, alone.committed, alone.draft.tokens)
        assert shadow.outcome is Outcome.PLAIN


def test_drafts_that_do_not_depend_on_the_block_are_cut_without_bias() -> None:
    model = toy_model()
    plain = rounds_of(model, PROMPT, 1, 60)
    text = [*PROMPT, plain[0].seed, *(token for record in plain for token in record.committed)]
    # Right but for every 13th token.
    adapter = ScriptedDrafts(model, lambda position: (text[position] if position % 13 else 6) if position < 64 else 6)
    starts = (4, 13, 26)
    recorded = [
        RoundRecord(0, i, start, text[start], plain[0].draft, (), (), 0, tuple(text[start + 1 : end + 1]), Outcome.PLAIN, None, 32)
        for i, (start, end) in enumerate(zip(starts, (*starts[1:], 63), strict=True))
    ]  # fmt: skip
    shadows = run_shadows(adapter, PROMPT, recorded, [0, 1, 2], (8, 16))
    wrong = [next(p for p in range(start + 1, 99) if p % 13 == 0 and text[p] != 6) for start in starts]
    assert [len(s.committed) for s in shadows] == [
        min(end - start, size) for start, end in zip(starts, wrong, strict=True) for size in (8, 16)
    ]


def test_nothing_is_chosen_from_what_is_not_whole() -> None:
    model = toy_model()
    recorded = [rounds_of(model, [7, 9, first], 32, 40) for first in (6, 8)]
    whole = [
        [i for i, r in enumerate(rounds) if r.block_size == 32 and r.outcome is Outcome.PLAIN] for rounds in recorded
    ]
    assert places(recorded, 32, 10**6) == whole
    some = places(recorded, 32, 4)
    assert sum(map(len, some)) == 4
    assert all(some), "spread over the prompts"
    assert run_shadows(ModelAdapter(model, resolve_backend()), PROMPT, [], [], (8, 16)) == []
