"""`recguide eval lossless`: it passes where outputs are plain decoding's, says where they are not, and goes on after an interruption."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer
from typer.testing import CliRunner

import recguide
from recguide.cli import lossless
from recguide.cli.lossless import Compared, LosslessTest, Run, Variant, variants, wrong
from recguide.cli.main import app
from recguide.testing import toy_model

runner = CliRunner()
PROMPTS = [[7, 8, 9], [10, 11, 12, 13, 14], [6]]


@lru_cache
def model(dtype: str = "float32") -> Any:
    return toy_model(vocab_size=2048).to(getattr(torch, dtype))


def lossless_test(prompts: list[list[int]] = PROMPTS, new: int = 12) -> LosslessTest:
    return LosslessTest(model(), prompts, new, [model().config.mask_token_id])


@pytest.fixture
def _toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The command finds a toy model with the embedded model's tokenizer, and prompts in a file."""
    tokenizer = AutoTokenizer.from_pretrained(recguide.tiny_path())
    monkeypatch.setattr("recguide.cli.evaluation.load", lambda name, dtype, device: (model(dtype), tokenizer))
    monkeypatch.chdir(tmp_path)
    Path("prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("Hi.", "Tell me more.")))


def call(*arguments: str) -> Any:
    command = ("eval", "lossless", "--prompts-file", "prompts.jsonl", "--max-new-tokens", "9", "--block-size", "4")
    return runner.invoke(app, [*command, *arguments], env={"COLUMNS": "200"})


def test_variants_are_plain_decoding_and_each_strategy_at_each_size() -> None:
    found = variants(["ar", "linear", "auto"], [4, 8], [2])
    assert found == [
        Variant("hf-generate", 1, 1),
        Variant("hf-generate", 1, 2),
        Variant("ar", 1, 2),
        Variant("linear", 4, 2),
        Variant("linear", 8, 2),
        Variant("auto", None, 2),
    ]
    assert [variant.label for variant in found[2:]] == ["ar", "linear-4", "linear-8", "auto"]
    with pytest.raises(recguide.ConfigError, match="block_size must be one of"):
        variants(["linear"], [12], [1])


def test_an_output_is_compared_with_the_models_own_choices() -> None:
    """The slow way: the model's choice after every prefix."""
    test = lossless_test()
    (plain,), _ = test.decode(Variant("hf-generate", 1, 1), [0])
    same = test.compare(0, plain, plain)
    assert same == Compared(0, 12, True, 12, 0.0)

    changed = list(plain)
    changed[5] = (plain[5] + 1) % 2048
    gaps = []
    for i, token in enumerate(changed):
        with torch.no_grad():
            logits = model()(input_ids=torch.tensor([PROMPTS[0] + changed[:i]])).logits[0, -1]
        logits[model().config.mask_token_id] = float("-inf")
        gaps.append(float(logits.max() - logits[token]))
        if i == 5:
            top = logits.topk(2).values
    found = test.compare(0, changed, plain)
    assert not found.identical
    assert found.agreed == sum(gap == 0 for gap in gaps) < 12
    assert found.largest_gap == pytest.approx(max(gaps), abs=1e-4)
    assert found.divergence is not None
    assert found.divergence["new_token"] == 5
    assert found.divergence["top2_gap"] == pytest.approx(float(top[0] - top[1]), abs=1e-4)


def test_outputs_end_where_the_model_ends_them() -> None:
    ended = toy_model(vocab_size=2048)
    test = LosslessTest(ended, PROMPTS, 12, [ended.config.mask_token_id])
    (plain,), _ = test.decode(Variant("hf-generate", 1, 1), [0])
    ended.generation_config.eos_token_id = [plain[4]]
    test = LosslessTest(ended, PROMPTS, 12, [ended.config.mask_token_id])
    for strategy in ("hf-generate", "ar", "linear"):
        outputs, _ = test.decode(Variant(strategy, 4, 3), [0, 1, 2])
        assert outputs[0] == plain[: plain.index(plain[4]) + 1]


def test_only_float32_must_be_identical() -> None:
    different = Compared(3, 9, False, 8, 0.2, {"new_token": 4, "top2_gap": 0.1})
    runs = [
        Run(dtype, Variant(strategy, 4, 1), [different])
        for dtype in ("float32", "bfloat16")
        for strategy in ("hf-generate", "linear")
    ]
    (failure,) = wrong(runs, None)
    assert failure.startswith("linear-4 in float32, 1 at once: 1 of 1 outputs differ")
    assert len(wrong(runs, 0.1)) == 1
    assert "linear-4 in bfloat16" in wrong(runs, 0.09)[1]


@pytest.mark.usefixtures("_toy")
def test_the_command_passes_and_reports_every_variant() -> None:
    result = call("--dtypes", "float32,bfloat16", "--batch-size", "1,2")
    assert result.exit_code == 0, result.output
    record = json.loads(Path("lossless.json").read_text())
    assert len(record["runs"]) == 2 * 2 * 6
    assert record["failures"] == []
    assert all(run["identical"] == 2 for run in record["runs"] if run["dtype"] == "float32")
    plain = record["runs"][0]
    assert (plain["strategy"], plain["batch_size"], plain["decode_tpf"]) == ("hf-generate", 1, None)
    assert record["runs"][1]["decode_tpf"] == 1
    assert sorted(path.name for path in Path().iterdir()) == ["lossless.json", "prompts.jsonl"]


@pytest.mark.usefixtures("_toy")
def test_a_difference_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = LosslessTest.decode

    def differing(self: LosslessTest, variant: Variant, numbers: Any) -> Any:
        outputs, metrics = decode(self, variant, numbers)
        if variant.strategy == "linear":
            outputs[0] = [*outputs[0][:-1], (outputs[0][-1] + 1) % 2048]
        return outputs, metrics

    monkeypatch.setattr(LosslessTest, "decode", differing)
    result = call("--strategies", "ar,linear", "--batch-size", "2")
    assert result.exit_code == 1
    assert "linear-4 in float32, 2 at once: 1 of 2 outputs differ, first {'prompt': 0, 'new_token': 8" in result.output
    record = json.loads(Path("lossless.json").read_text())
    assert [run["identical"] for run in record["runs"]] == [2, 2, 2, 1]
    assert len(record["failures"]) == 1


@pytest.mark.usefixtures("_toy")
def test_counters_that_contradict_each_other_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recguide.metrics.DecodeMetrics.on_finish", lambda self, record: None)
    result = call("--strategies", "linear", "--batch-size", "1")
    assert result.exit_code == 1
    assert "counters contradict" in result.output


@pytest.mark.usefixtures("_toy")
def test_an_interrupted_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    decode, calls = LosslessTest.decode, []

    def interrupted(self: LosslessTest, variant: Variant, numbers: Any) -> Any:
        calls.append(variant.strategy)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return decode(self, variant, numbers)

    monkeypatch.setattr(lossless.LosslessTest, "decode", interrupted)
    arguments = ("--strategies", "ar,linear", "--batch-size", "1")
    result = call(*arguments)
    assert result.exit_code == 130
    assert "goes on from there" in result.output
    assert not Path("lossless.json").exists()
    assert call(*arguments, "--dtypes", "bfloat16").exit_code == 2
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    assert calls == ["hf-generate", "hf-generate", "ar", "ar", "ar", "linear", "linear"]
    runs = json.loads(Path("lossless.json").read_text())["runs"]
    assert [run["prompts"] for run in runs] == [2, 2, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--strategies", "hf-generate"], "--strategies must be of ar, linear"),
        (["--dtypes", "int8"], "--dtypes must be of float32"),
        (["--batch-size", "0"], "--batch-size must be at least 1"),
        (["--seed", "2"], "a file has its own"),
    ],
)
@pytest.mark.usefixtures("_toy")
def test_a_mistake_ends_with_its_reason(arguments: list[str], message: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert message in result.output.replace("\n", " ")
