"""The recipe of `recguide-tiny`: tokenizer, network, objective, schedule, checkpoints. `recguide train-tiny` runs it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoTokenizer, GenerationConfig

from ..errors import CheckpointError
from ..models.draft_adapter import DraftAdapterConfig, adapter_rows, add_draft_adapter
from ..models.nemotron_labs_diffusion import NemotronLabsDiffusionConfig, NemotronLabsDiffusionModel
from ..progress import counted
from .batches import IGNORE, Batch, Shape, batches, documents
from .initial import initialize
from .muon import Muon
from .tokenizer import END, MASK, PAD, corpus, train_tokenizer


@dataclass(frozen=True)
class Phase:
    """
    A stretch of the run.

    Args:
        steps (`int`): optimizer steps.
        matrix_lr, other_lr (`float`): Muon's and AdamW's rates at its start; both go linearly to `end` times that.
        end (`float`): 1.0 is a plateau.
        blocks (`int`): draft tokens a row; 0 trains the autoregressive side alone, at half the cost.
        draft_weight (`float`): weight of the draft loss; the AR loss has 1.
        warmup (`int`): steps of linear warm-up.
        split (`str`): the tasks that it trains on, `"wide"` or `"train"`.
    """

    steps: int
    matrix_lr: float
    other_lr: float
    end: float = 1.0
    blocks: int = 192
    draft_weight: float = 1.0
    warmup: int = 0
    split: str = "train"

    def rates(self, done: int) -> tuple[float, float]:
        """Rates after `done` steps of the phase."""
        factor = 1 + (self.end - 1) * done / self.steps
        if done < self.warmup:
            factor *= (done + 1) / self.warmup
        return self.matrix_lr * factor, self.other_lr * factor


PHASES = (
    Phase(steps=1520, matrix_lr=4e-3, other_lr=3e-3, blocks=0, warmup=40, split="wide"),
    Phase(steps=2100, matrix_lr=4e-3, other_lr=3e-3, end=0.03, blocks=288, split="wide"),
    Phase(steps=800, matrix_lr=3e-3, other_lr=2.2e-3, blocks=0, warmup=40),
    Phase(steps=2200, matrix_lr=3e-3, other_lr=2.2e-3, end=0.03, blocks=288),
)


@dataclass(frozen=True)
class Recipe:
    """Every number of the training run: the autoregressive loss alone, at half the cost, then both losses to the end."""

    phases: tuple[Phase, ...] = PHASES
    seed: int = 0
    tokenizer_tasks: int = 4000
    """Tasks of each family that the tokenizer is trained on."""
    rows: int = 4
    clean: int = 384
    family_weights: dict[str, float] = field(default_factory=lambda: {"math": 0.38, "code": 0.30, "text": 0.32})
    weight_decay: float = 0.05
    adapter_rank: int = 16
    adapter_alpha: float = 64.0
    checkpoint_minutes: float = 4.0
    evaluate_every: int = 100

    @property
    def steps(self) -> int:
        return sum(phase.steps for phase in self.phases)

    def phase_at(self, step: int) -> tuple[Phase, int]:
        """The phase that step number `step` (from 0) belongs to, and the steps done of it."""
        for phase in self.phases:
            if step < phase.steps:
                return phase, step
            step -= phase.steps
        raise ValueError("the run has fewer steps")

    def shape(self, blocks: int) -> Shape:
        return Shape(rows=self.rows, clean=self.clean, blocks=blocks)


def network_config(tokenizer: Any) -> NemotronLabsDiffusionConfig:
    """4.5 M parameters in the release's shape: YaRN, query scaling, GQA, an untied head."""
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in (("pad", PAD), ("end", END), ("mask", MASK))}
    return NemotronLabsDiffusionConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=2048,
        pad_token_id=ids["pad"],
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=ids["end"],
        mask_token_id=ids["mask"],
        block_size=32,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 512,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    )


def losses(model: nn.Module, batch: Batch, clean: int) -> tuple[Tensor, Tensor, Tensor]:
    """Mean AR loss of the answers' tokens, mean draft loss of the masked block tokens, and the draft's right guesses (bool)."""
    with adapter_rows(batch.adapter if batch.adapter.any() else None):
        hidden = model.model(  # type: ignore[operator]
            input_ids=batch.input_ids, attention_mask=batch.visible, position_ids=batch.position_ids, use_cache=False
        ).last_hidden_state
    used = batch.labels != IGNORE
    logits = model.lm_head(hidden[used]).float()  # type: ignore[operator]
    labels = batch.labels[used]
    in_blocks = (torch.arange(batch.labels.shape[1], device=used.device) >= clean).expand(batch.labels.shape)[used]
    ce = F.cross_entropy(logits, labels, reduction="none")
    right = torch.zeros_like(used)
    right[used] = logits.argmax(-1) == labels
    draft = ce[in_blocks].mean() if in_blocks.any() else ce.new_zeros(())
    return ce[~in_blocks].mean(), draft, right


def optimizers(model: nn.Module, weight_decay: float) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for embeddings, head, norms and adapter."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim == 2 and ".layers." in name and "draft_adapter" not in name
        (matrices if is_matrix else others).append(parameter)
    return [
        Muon(matrices, lr=0.0, weight_decay=weight_decay),
        torch.optim.AdamW(others, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0),
    ]


@torch.no_grad()
def evaluate(model: nn.Module, held_out: list[Batch], clean: int) -> dict[str, float]:
    """Teacher-forced figures on the test split: losses, AR accuracy of answer tokens, mean leading run of right draft guesses."""
    model.eval()
    ar: list[float] = []
    draft: list[float] = []
    ar_right: list[float] = []
    runs: list[float] = []
    for batch in held_out:
        ar_loss, draft_loss, right = losses(model, batch, clean)
        ar.append(float(ar_loss))
        draft.append(float(draft_loss))
        labelled = batch.labels != IGNORE
        ar_right.append(right[:, :clean][labelled[:, :clean]].float().mean().item())
        runs.extend(_leading_runs(batch, right, clean))
    model.train()
    mean = sum(runs) / max(1, len(runs))
    return {
        "ar_loss": sum(ar) / len(ar),
        "draft_loss": sum(draft) / len(draft),
        "ar_accuracy": sum(ar_right) / len(ar_right),
        "accepted_run": mean,
    }


def _leading_runs(batch: Batch, right: Tensor, clean: int) -> Iterator[float]:
    """Right guesses before the first wrong one, for each whole block of 16 with a clean seed that lies inside its document."""
    for row in range(batch.labels.shape[0]):
        for start in range(clean, batch.labels.shape[1], 16):
            labels = batch.labels[row, start : start + 16]
            if bool((labels[1:] != IGNORE).all()) and labels[0] == IGNORE:
                yield float(right[row, start + 1 : start + 16].long().cumprod(0).sum())


def held_out_batches(tokenizer: Any, recipe: Recipe, count: int = 4) -> list[Batch]:
    stream = documents(tokenizer, recipe.family_weights, "test", seed=1)
    source = batches(
        stream, recipe.shape(192), tokenizer.mask_token_id, tokenizer.pad_token_id, seed=1, block_sizes=(16,)
    )
    return [next(source) for _ in range(count)]


def train(recipe: Recipe, output: Path, stop_after: int | None = None, threads: int | None = None) -> bool:
    """
    Train, or go on from the last checkpoint in `output`; writes `output/model` (bf16, released layout) at the end.

    Args:
        recipe (`Recipe`): the numbers; saved beside the checkpoint, and a resumed run must use the same.
        output (`Path`): directory for `tokenizer/`, `checkpoint.pt`, `history.jsonl` and `model/`.
        stop_after (`int`, *optional*): end early, at this step of the recipe, with a checkpoint and no model.
        threads (`int`, *optional*): torch threads.

    Returns:
        `bool`: whether the recipe has been run to its end. A resumed run draws its data anew from the step it goes on from, so
        it differs from one that was never stopped, but not from one that was stopped at the same steps.
    """
    if threads:
        torch.set_num_threads(threads)
    output.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(recipe.seed)
    if not (output / "tokenizer").exists():
        train_tokenizer(corpus(recipe.tokenizer_tasks)).save_pretrained(output / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(output / "tokenizer")

    model = NemotronLabsDiffusionModel(network_config(tokenizer))
    initialize(model)
    add_draft_adapter(model, DraftAdapterConfig(recipe.adapter_rank, recipe.adapter_alpha, ("o_proj",)))
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    optims = optimizers(model, recipe.weight_decay)
    model, *optims = accelerator.prepare(model, *optims)

    step = started = _resume(output, recipe, accelerator.unwrap_model(model), optims)
    source: Iterator[Batch] = iter(())
    held_out = [batch.to(accelerator.device) for batch in held_out_batches(tokenizer, recipe)]
    saved_at = time.monotonic()
    last = min(recipe.steps, stop_after or recipe.steps)
    model.train()
    with counted() as progress:
        bar = progress.add_task("train-tiny", total=last, completed=step)
        while step < last:
            phase, done = recipe.phase_at(step)
            if done == 0 or step == started:
                stream = documents(tokenizer, recipe.family_weights, phase.split, seed=recipe.seed + 1000 * step)
                source = batches(
                    stream,
                    recipe.shape(phase.blocks),
                    tokenizer.mask_token_id,
                    tokenizer.pad_token_id,
                    recipe.seed + 1000 * step,
                )
            for optim, rate in zip(optims, phase.rates(done), strict=True):
                optim.param_groups[0]["lr"] = rate
            ar_loss, draft_loss, _ = losses(model, next(source).to(accelerator.device), recipe.clean)
            accelerator.backward(ar_loss + phase.draft_weight * draft_loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            for optim in optims:
                optim.step()
                optim.zero_grad()
            step += 1
            record = {
                "step": step,
                "train_ar_loss": ar_loss.item(),
                "train_draft_loss": draft_loss.item(),
                "matrix_lr": phase.rates(done)[0],
            }
            if not math.isfinite(record["train_ar_loss"]):
                raise RuntimeError(
                    f"The loss is not finite at step {step}; lower matrix_lr and resume from the last checkpoint."
                )
            if step % recipe.evaluate_every == 0 or step == last:
                record |= evaluate(model, held_out, recipe.clean)
            with (output / "history.jsonl").open("a") as file:
                file.write(json.dumps(record) + "\n")
            progress.update(
                bar,
                completed=step,
                description=f"AR {record['train_ar_loss']:.3f} draft {record['train_draft_loss']:.3f}",
            )
            if time.monotonic() - saved_at > 60 * recipe.checkpoint_minutes or step == last:
                _save(output, recipe, step, accelerator.unwrap_model(model), optims)
                saved_at = time.monotonic()
    if step < recipe.steps:
        return False
    export(accelerator.unwrap_model(model), tokenizer, output / "model")
    return True


def export(model: Any, tokenizer: Any, directory: Path) -> None:
    """Write the package's model directory: bf16 safetensors under the released key names, adapter, tokenizer."""
    model = model.to(torch.bfloat16).eval()
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _save(output: Path, recipe: Recipe, step: int, model: nn.Module, optims: list[torch.optim.Optimizer]) -> None:
    state = {
        "step": step,
        "recipe": json.dumps(asdict(recipe)),
        "model": model.state_dict(),
        "optims": [o.state_dict() for o in optims],
    }
    partial = output / "checkpoint.partial"
    torch.save(state, partial)
    partial.replace(output / "checkpoint.pt")


def _resume(output: Path, recipe: Recipe, model: nn.Module, optims: list[torch.optim.Optimizer]) -> int:
    path = output / "checkpoint.pt"
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True, map_location="cpu")
    if state["recipe"] != json.dumps(asdict(recipe)):
        raise CheckpointError(
            f"{path} was made by another recipe: {state['recipe']}; expected {json.dumps(asdict(recipe))}. Use another --output."
        )
    model.load_state_dict(state["model"])
    for optim, saved in zip(optims, state["optims"], strict=True):
        optim.load_state_dict(saved)
    step = int(state["step"])
    history = output / "history.jsonl"
    kept = [line for line in history.read_text().splitlines(keepends=True) if json.loads(line)["step"] <= step]
    history.write_text("".join(kept))
    return step
