"""The embedded model's card: its recipe in words, its curves as pictures, its figures from a benchmark file."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..pictures import check_installed, panel_grid
from .batches import PROSE_SHARE
from .tasks import templates
from .train import Recipe

CARD = """---
library_name: transformers
license: apache-2.0
tags: [recguide, diffusion, speculative-decoding, nemotron_labs_diffusion]
---

# recguide-tiny

{parameters:.1f} M parameters in the format of the Nemotron-Labs-Diffusion releases: one network that decodes causally and
drafts blocks with bidirectional attention. It ships inside the `recguide` package, so that the strategies can be tried,
tested and measured anywhere in seconds. It answers tasks of its three families and nothing else; it is no assistant.

```python
import recguide
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(recguide.tiny_path())
tokenizer = AutoTokenizer.from_pretrained(recguide.tiny_path())
```

## Network

{layers} layers, hidden size {hidden}, {heads} query and {kv} key/value heads of {head_dim}, FFN {ffn}, vocabulary {vocab} (byte-level BPE,
digits one by one, ChatML), YaRN, query scaling, untied head, draft adapter on `o_proj` (rank {rank}, scale {scale:g}), bf16.

## Data

Made by `recguide.tiny.tasks`, without end, from seeds:

* **math**: {gsm} templates of reasoning-gym's `gsm_symbolic` with worked solutions, and {stories} composed stories in which each step
  uses the result of the step before, with numbers up to 24; scored by the final number
* **code**: {code} kinds of small Python functions, scored by running assertions
* **text**: {text} kinds of instructions, scored by rules
* {prose:.0%} prose and code of Python's standard library

A first stretch of the training draws from a wider mixture (split `wide`): numbers up to 60, {wide_gsm} templates of `gsm_symbolic`, names
that say nothing of who bears them. What is trained on last, tested and benchmarked is narrower: in texts every animal has a name
of its own, and in stories only the hero has one.

Which of train and test an instance belongs to is a property of its prompt; the split `unseen` holds templates that training
never saw.

## Training

`recguide train-tiny` runs the recipe; these weights are its result (on two CPU cores, fp32). Each row holds packed documents
under a causal mask and draft blocks of 8, 16 or 32 that see their document up to their start, and themselves both ways. Loss: AR
cross-entropy of the answers, plus the draft cross-entropy of the masked places. Muon (fp32) for matrices, AdamW for the rest. The head
starts as the embeddings, and the first two layers start with heads that copy (`recguide.tiny.initial`).

**Deviation from the published objective:** most blocks carry exactly what a drafter meets, a clean seed and MASK elsewhere (65 %),
or MASK throughout (20 %, the continuation branch); the random masking of the objective makes up the rest. A network this small
meets the pattern of inference too rarely otherwise. The block grid is not aligned: a block starts anywhere in an answer.

```json
{recipe}
```

![losses](loss.png)
![acceptance](acceptance.png)

## Figures

{figures}
"""


def write_card(history: Path, bench: Path | None, directory: Path) -> None:
    """
    Write `README.md`, `loss.png` and `acceptance.png` into a model directory.

    Args:
        history (`Path`): `history.jsonl` of the training run.
        bench (`Path`, *optional*): JSON file of `recguide bench` on these weights.
        directory (`Path`): the model's directory, with its `config.json`.
    """
    lines = [json.loads(line) for line in history.read_text().splitlines()]
    _pictures(lines, directory)
    config = json.loads((directory / "config.json").read_text())
    adapter = json.loads((directory / "linear_spec_lora" / "adapter_config.json").read_text())
    weights = (directory / "model.safetensors").stat().st_size + (
        directory / "linear_spec_lora" / "adapter_model.safetensors"
    ).stat().st_size
    card = CARD.format(
        parameters=weights / 2e6,
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        kv=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        ffn=config["intermediate_size"],
        vocab=config["vocab_size"],
        rank=adapter["r"],
        scale=adapter["lora_alpha"] / adapter["r"],
        prose=PROSE_SHARE,
        gsm=sum(t.name.startswith("gsm") for t in templates("math", "train")),
        wide_gsm=sum(t.name.startswith("gsm") for t in templates("math", "wide")),
        stories=sum(not t.name.startswith("gsm") for t in templates("math", "train")),
        code=len(templates("code", "train")),
        text=len(templates("text", "train")),
        recipe=json.dumps(asdict(Recipe()), indent=1),
        figures=_figures(json.loads(bench.read_text())) if bench else "Not measured yet.",
    )
    (directory / "README.md").write_text(card)


def _figures(record: dict[str, Any]) -> str:
    environment = record["environment"]
    rows = [
        "| suite | strategy | B | accuracy | committed a round | full rounds | below 8 | tokens per forward | tau | reused |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for run in record["runs"]:
        if run["strategy"] not in ("ar", "linear", "recguide"):
            continue
        histogram = {int(n): count for n, count in run["acceptance_histogram"].items()}
        rounds = sum(histogram.values())
        below = sum(count for n, count in histogram.items() if n < 8) / max(1, rounds)
        rows.append(
            f"| {run['suite']} | {run['strategy']} | {run['block_size']} | {run['accuracy']:.0%} | {run['mean_committed']:.2f} "
            f"| {run['full_round_rate']:.0%} | {below:.0%} | {run['decode_tpf']:.2f} | {run['tau']:.2f} | {run['reuse_rate']:.0%} |"
        )
    prompts = record["runs"][0]["prompts"]
    return "\n".join(rows) + (
        f"\n\n`recguide bench`, {prompts} prompts a suite, split `{environment['split']}`, {environment['dtype']}, "
        f"torch {environment['torch']}, transformers {environment['transformers']}, {environment['processor']}."
    )


def _pictures(lines: list[dict[str, float]], directory: Path) -> None:
    check_installed("train")
    evaluated = [line for line in lines if "ar_loss" in line]
    steps = [line["step"] for line in evaluated]
    figure, ((axes,),) = panel_grid(1, 1, 7, 3.6)
    axes.plot(
        [line["step"] for line in lines], [line["train_ar_loss"] for line in lines], color="#b0c4de", linewidth=0.6
    )
    axes.plot(steps, [line["ar_loss"] for line in evaluated], color="#1f5fa8", label="autoregressive, held out")
    axes.plot(
        steps, [line["draft_loss"] for line in evaluated], color="#c05000", linestyle="--", label="draft, held out"
    )
    axes.set(xlabel="step", ylabel="cross-entropy (nats)", ylim=(0, 5))
    axes.legend(frameon=False)
    figure.savefig(directory / "loss.png", dpi=110)
    figure, ((axes,),) = panel_grid(1, 1, 7, 3.6)
    axes.plot(steps, [line["accepted_run"] for line in evaluated], color="#1f5fa8")
    axes.set(xlabel="step", ylabel="right guesses in a row (of 15)", ylim=(0, 15))
    figure.savefig(directory / "acceptance.png", dpi=110)
