"""The embedded model: its format, and that no strategy changes a token of what it writes."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import recguide
from recguide import RecGuideConfig
from recguide.adapter import ModelAdapter
from recguide.attention import resolve_backend
from recguide.loop import read_tables
from recguide.metrics import DecodeMetrics
from recguide.models.draft_adapter import draft_adapter_of
from recguide.tiny.tasks import FAMILIES, make_task
from recguide.tiny.train import Recipe

WEIGHTS = Path(recguide.tiny_path())


@cache
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(WEIGHTS, dtype=torch.float32).eval()


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(WEIGHTS)


def encode(prompts: list[str]) -> Any:
    texts = [
        tokenizer().apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
        )
        for prompt in prompts
    ]
    return tokenizer()(texts, return_tensors="pt", padding=True)


@cache
def prompts() -> list[str]:
    return [make_task(FAMILIES[i % 3], "test", 1000 + i).prompt for i in range(200)]


def test_format_and_size() -> None:
    assert type(model()).__name__ == "NemotronLabsDiffusionModel"
    assert AutoModelForCausalLM.from_pretrained(WEIGHTS).dtype == torch.bfloat16
    assert sum(path.stat().st_size for path in WEIGHTS.rglob("*.safetensors")) <= 10_000_000
    assert 4e6 <= sum(p.numel() for p in model().parameters()) <= 5e6
    assert len(draft_adapter_of(model())) == model().config.num_hidden_layers
    assert {path.suffix for path in WEIGHTS.rglob("*") if path.is_file()} <= {
        ".json",
        ".safetensors",
        ".jinja",
        ".md",
        ".png",
    }


def test_tokenizer() -> None:
    text = "Maya has 1204 apples; 17 + 25 = 42.\n```python\ndef f(x):\n    return x\n```"
    ids = tokenizer()(text)["input_ids"]
    assert tokenizer().decode(ids) == text
    assert all(sum(c.isdigit() for c in tokenizer().decode([i])) <= 1 for i in range(len(tokenizer())))
    chat = tokenizer().apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer().mask_token_id == model().config.mask_token_id


BATCH, NEW_TOKENS = 40, 24


@cache
def plain_output(start: int) -> torch.Tensor:
    output: torch.Tensor = model().generate(
        **encode(prompts()[start : start + BATCH]), max_new_tokens=NEW_TOKENS, do_sample=False
    )
    return output


@pytest.mark.parametrize(
    ("strategy", "options", "count"),
    [
        ("ar", {}, 200),
        ("linear", {"block_size": 16}, 200),
        ("recguide", {"block_size": 16}, 200),
        ("linear", {"block_size": 8, "draft_threshold": 0.9}, 40),
        ("quadratic", {"block_size": 8}, 40),
        ("recguide", {"block_size": 32, "delta": 0.9}, 40),
    ],
)
def test_many_prompts_equal_plain_generate(strategy: str, options: dict[str, Any], count: int) -> None:
    for start in range(0, count, BATCH):
        output = model().generate(
            **encode(prompts()[start : start + BATCH]),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            generation_strategy=strategy,
            recguide_config=options,
        )
        assert output.equal(plain_output(start))


@pytest.mark.parametrize("setting", [{"temperature": 1.0, "top_k": 0}, {"temperature": 0.7, "top_p": 0.9, "top_k": 20}])
def test_many_prompts_sampled_equal_plain_sampling(setting: dict[str, Any]) -> None:
    for start in range(0, 200, 2 * BATCH):
        texts = [
            model().generate(
                **encode(prompts()[start : start + BATCH]),
                max_new_tokens=NEW_TOKENS,
                do_sample=True,
                seed=[start + row for row in range(BATCH)],
                generation_strategy=strategy,
                **setting,
            )
            for strategy in ("ar", "recguide")
        ]
        assert texts[0].equal(texts[1])


def figures(strategy: str, block_size: int = 16, prompt_count: int = 6, max_new_tokens: int = 96) -> DecodeMetrics:
    metrics = DecodeMetrics()
    for prompt in prompts()[:prompt_count]:
        model().generate(
            **encode([prompt]),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            generation_strategy=strategy,
            recguide_config={"block_size": block_size},
            recguide_hooks=[metrics],
        )
    metrics.check()
    return metrics


def test_branches_save_forwards_and_stay_small() -> None:
    linear, recguide_16 = figures("linear"), figures("recguide")
    assert recguide_16.decode_tpf > 1.1 * linear.decode_tpf
    assert recguide_16.query_tokens_per_forward["fused"] <= 64
    assert recguide_16.mean_committed == pytest.approx(linear.mean_committed, rel=0.25)


def test_the_draft_adapter_matters() -> None:
    """Without it drafts are worse: an adapter lost on the way would show here."""
    with_adapter = figures("linear", prompt_count=12, max_new_tokens=160).mean_committed
    scales = {delta: delta.scale for delta in draft_adapter_of(model()).values()}
    try:
        for delta in scales:
            delta.scale = 0.0
        without = figures("linear", prompt_count=12, max_new_tokens=160).mean_committed
    finally:
        for delta, scale in scales.items():
            delta.scale = scale
    assert without < with_adapter


def test_the_recipe_is_in_the_card() -> None:
    card = (WEIGHTS / "README.md").read_text()
    assert f'"seed": {Recipe().seed}' in card
    assert all(f'"steps": {phase.steps}' in card for phase in Recipe().phases)
    assert (WEIGHTS / "loss.png").is_file()
    assert (WEIGHTS / "acceptance.png").is_file()


def test_the_tables_of_policies_are_of_these_weights() -> None:
    """Read by fingerprint: weights that change need tables measured anew."""
    progress, costs = read_tables(
        ModelAdapter(model(), resolve_backend()), RecGuideConfig(policy="verification_guided")
    )
    assert progress is not None
    assert costs is not None
    assert {"all", "8 full", "16 partial"} <= set(progress.strata)
    assert {1, 8, 16, 32} <= set(costs.block_sizes)
    assert {1, 2, 4, 8, 16, 32} <= set(costs.loads)
