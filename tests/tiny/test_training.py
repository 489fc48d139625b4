"""The recipe's parts: fixed shapes, masks as at inference, Muon, resuming."""

import json
from itertools import islice
from pathlib import Path

import pytest
import torch

from recguide import CheckpointError, tiny_path
from recguide.tiny.batches import BLOCK_SIZES, IGNORE, Shape, batches, documents
from recguide.tiny.muon import Muon, orthogonalize
from recguide.tiny.train import Phase, Recipe, train

WEIGHTS = {"math": 1.0, "code": 1.0, "text": 1.0}


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_a_block_sees_what_a_drafter_sees(block_size: int) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_path())
    shape = Shape(rows=2, clean=384, blocks=64)
    stream = documents(tokenizer, WEIGHTS, "train", seed=3)
    source = batches(stream, shape, tokenizer.mask_token_id, tokenizer.pad_token_id, 3, block_sizes=(block_size,))
    for batch in islice(source, 2):
        assert batch.input_ids.shape == batch.labels.shape == (2, 448)
        assert batch.visible.shape == (2, 1, 448, 448)
        assert batch.adapter[0].tolist() == [False] * 384 + [True] * 64
        for row in range(2):
            ids, labels, positions = batch.input_ids[row], batch.labels[row], batch.position_ids[row]
            visible = batch.visible[row, 0]
            for start in range(384, 448, block_size):
                seen = visible[start].nonzero().flatten()
                assert visible[start : start + block_size].eq(visible[start]).all()
                assert seen[seen >= 384].tolist() == list(range(start, start + block_size))
                prefix = seen[seen < 384]
                # The prefix is one document's beginning, up to the block's start.
                assert positions[prefix].tolist() == list(range(len(prefix)))
                assert positions[start : start + block_size].tolist() == list(
                    range(len(prefix), len(prefix) + block_size)
                )
                source_at = int(prefix[-1]) + 1
                for i in range(block_size):
                    if labels[start + i] != IGNORE:
                        assert ids[start + i] == tokenizer.mask_token_id
                        assert labels[start + i] == ids[source_at + i]
            clean = visible[:384, :384]
            assert not clean.triu(1).any()
            assert not visible[:384, 384:].any()
            for at in (labels[:383] != IGNORE).nonzero().flatten().tolist():
                assert labels[at] == ids[at + 1]


def test_orthogonalize_brings_singular_values_near_one() -> None:
    for shape in ((3, 16, 40), (2, 40, 16), (1, 24, 24)):
        values = torch.linalg.svdvals(orthogonalize(torch.randn(shape)))
        assert values.min() > 0.3
        assert values.max() < 1.4


def test_muon_descends() -> None:
    target, weight = torch.randn(12, 8), torch.nn.Parameter(torch.zeros(12, 8))
    optimizer = Muon([weight], lr=0.05)
    for _ in range(120):
        optimizer.zero_grad()
        loss = (weight - target).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert loss.item() < 0.1


def test_a_stopped_run_goes_on_and_ends_in_a_model(tmp_path: Path) -> None:
    phases = (Phase(steps=1, matrix_lr=1e-3, other_lr=1e-3), Phase(steps=1, matrix_lr=1e-3, other_lr=1e-3, blocks=0))
    recipe = Recipe(phases=phases, rows=1, tokenizer_tasks=20)
    train(recipe, tmp_path, stop_after=1)
    assert (tmp_path / "checkpoint.pt").is_file()
    assert not (tmp_path / "model").exists()
    train(recipe, tmp_path)
    assert (tmp_path / "model" / "model.safetensors").is_file()
    assert (tmp_path / "model" / "linear_spec_lora" / "adapter_model.safetensors").is_file()
    history = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert [line["step"] for line in history] == [1, 2]
    assert history[0]["train_draft_loss"] > 0
    assert history[1]["train_draft_loss"] == 0

    with pytest.raises(CheckpointError, match="another recipe"):
        train(Recipe(phases=phases, rows=2, tokenizer_tasks=20), tmp_path)


def test_rates_follow_the_phases() -> None:
    recipe = Recipe(phases=(Phase(10, 1.0, 0.5, warmup=2), Phase(4, 1.0, 1.0, end=0.0)))
    assert recipe.steps == 14
    assert recipe.phase_at(0)[0].rates(0) == (0.5, 0.25)
    assert recipe.phase_at(9) == (recipe.phases[0], 9)
    assert recipe.phase_at(12) == (recipe.phases[1], 2)
    assert recipe.phases[1].rates(2) == (0.5, 0.5)
