"""A PEFT LoRA that is switched per token: on where a token is drafted, off where it is verified or prefilled.

One packed forward holds tokens of both kinds, so the switch cannot be a mode of the model. Each adapted linear layer
gets its low-rank delta from a forward hook, multiplied by the flags that [`adapter_rows`] sets for the call.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ..errors import CheckpointError

SUBMODULE = "draft_adapter"
_rows: ContextVar[Tensor | None] = ContextVar("recguide_adapter_rows", default=None)


@contextmanager
def adapter_rows(rows: Tensor | None) -> Iterator[None]:
    """
    Turn the draft adapter on for some tokens of the forwards inside the `with` block.

    Args:
        rows (`torch.Tensor`, *optional*): `bool[T]` or `bool[B, T]`, True where the token is drafted. `None`: off for all.
    """
    token = _rows.set(rows)
    try:
        yield
    finally:
        _rows.reset(token)


class _Traced:
    """The flags of a forward that is being compiled: torch's compiler follows attributes, and not context variables."""

    on = False
    rows: Tensor | None = None


_traced = _Traced()


@contextmanager
def traced_adapter_rows(rows: Tensor | None) -> Iterator[None]:
    """[`adapter_rows`] inside of a function that is compiled as a whole."""
    _traced.on, _traced.rows = True, rows
    try:
        yield
    finally:
        _traced.on, _traced.rows = False, None


class LoraDelta(nn.Module):
    """The low-rank term `scale * B(A(x))` of one linear layer. `x` is `[..., in]`, the result `[..., out]`."""

    def __init__(self, in_features: int, out_features: int, rank: int, scale: float) -> None:
        super().__init__()
        self.lora_A = nn.Linear(in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, out_features, bias=False)
        self.scale = scale
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.lora_B(self.lora_A(x)) * self.scale  # type: ignore[no-any-return]


def _add_delta(linear: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
    # Whoever compiles the model alone has the compiler stop here, and go on with the flags of the call.
    rows = _traced.rows if torch.compiler.is_compiling() and _traced.on else _rows.get()
    if rows is None:
        return None
    return output + linear.get_submodule(SUBMODULE)(args[0]) * rows.unsqueeze(-1).to(output)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class DraftAdapterConfig:
    """What `adapter_config.json` says: `r` the rank, `lora_alpha / r` the scale, `target_modules` the layer names."""

    r: int
    lora_alpha: float
    target_modules: tuple[str, ...]

    @classmethod
    def read(cls, directory: Path) -> DraftAdapterConfig:
        path = directory / "adapter_config.json"
        if not path.is_file():
            raise CheckpointError(
                f"The draft adapter {directory} has no adapter_config.json; expected a PEFT LoRA directory."
            )
        raw: dict[str, Any] = json.loads(path.read_text())
        for key, plain in (("use_dora", False), ("use_rslora", False), ("bias", "none"), ("modules_to_save", None)):
            if raw.get(key) not in (plain, None):
                raise CheckpointError(
                    f"{path}: {key}={raw[key]!r} is not supported; expected a plain LoRA ({key}={plain!r})."
                )
        targets = raw["target_modules"]
        return cls(
            r=raw["r"],
            lora_alpha=raw["lora_alpha"],
            target_modules=(targets,) if isinstance(targets, str) else tuple(targets),
        )


def add_draft_adapter(model: nn.Module, config: DraftAdapterConfig) -> dict[str, LoraDelta]:
    """Give every linear layer of `model` named in `config.target_modules` a delta (zero at first); returns them by layer path."""
    deltas = {}
    for path, module in model.named_modules():
        if path.rpartition(".")[2] in config.target_modules and isinstance(module, nn.Linear):
            delta = LoraDelta(module.in_features, module.out_features, config.r, config.lora_alpha / config.r)
            hook = getattr(module, "_hf_hook", None)
            device = getattr(hook, "execution_device", None)
            # A quantized layer's weight is no floating-point tensor; its delta is kept in torch's default type.
            dtype = module.weight.dtype if module.weight.is_floating_point() else torch.get_default_dtype()
            delta.to(device=module.weight.device if device is None else device, dtype=dtype)
            if not hasattr(module, SUBMODULE):
                module.register_forward_hook(_add_delta)
            module.add_module(SUBMODULE, delta)
            deltas[path] = delta
    if not deltas:
        raise CheckpointError(
            f"No linear layer of the model is named {' or '.join(config.target_modules)}; the draft adapter fits another model."
        )
    return deltas


def draft_adapter_of(model: nn.Module) -> dict[str, LoraDelta]:
    """The deltas that `model` carries, by the path of their linear layer; empty without a draft adapter."""
    suffix = f".{SUBMODULE}"
    return {
        path.removesuffix(suffix): m
        for path, m in model.named_modules()
        if path.endswith(suffix) and isinstance(m, LoraDelta)
    }


def load_draft_adapter(model: nn.Module, directory: str | Path, renames: dict[str, str]) -> None:
    """
    Load a PEFT LoRA directory as the model's draft adapter.

    Args:
        model (`nn.Module`): the backbone that is to draft.
        directory (`str` or `Path`): holds `adapter_config.json` and `adapter_model.safetensors`.
        renames (`dict[str, str]`): prefixes of released layer paths and what they are called in `model`.

    Raises:
        CheckpointError: a key is missing, left over, or of another shape; the message names the keys.
    """
    directory = Path(directory)
    config = DraftAdapterConfig.read(directory)
    weights = directory / "adapter_model.safetensors"
    if not weights.is_file():
        raise CheckpointError(
            f"The draft adapter {directory} has no adapter_model.safetensors (only safetensors files are read)."
        )
    found: dict[str, Tensor] = {}
    with safe_open(weights, framework="pt") as file:
        for key in file.keys():  # noqa: SIM118 - a safetensors file, not a dict
            path = key.removeprefix("base_model.model.")
            for released, ours in renames.items():
                if path.startswith(released):
                    path = ours + path.removeprefix(released)
            found[path] = file.get_tensor(key)

    deltas = add_draft_adapter(model, config)
    expected = {
        f"{path}.{name}.weight": getattr(delta, name).weight
        for path, delta in deltas.items()
        for name in ("lora_A", "lora_B")
    }
    problems = [f"missing {key}" for key in expected.keys() - found.keys()] + [
        f"unexpected {key}" for key in found.keys() - expected.keys()
    ]
    problems += [
        f"{key} has shape {tuple(found[key].shape)}, expected {tuple(expected[key].shape)}"
        for key in expected.keys() & found.keys()
        if found[key].shape != expected[key].shape
    ]
    if problems:
        raise CheckpointError(
            f"The draft adapter {directory} does not fit the model: " + "; ".join(sorted(problems)) + "."
        )
    with torch.no_grad():
        for key, parameter in expected.items():
            parameter.copy_(found[key])
    _split_like_layers(model, deltas)


def _split_like_layers(model: Any, deltas: dict[str, LoraDelta]) -> None:
    """Where a layer is split over ranks, the part of its delta that touches what is split is too, by transformers' own styles."""
    from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    for path, delta in deltas.items():
        mesh = getattr(model.get_submodule(path).weight, "device_mesh", None)
        if mesh is None:
            continue
        style = model.tp_plan.get(replace_layer_number_by_wildcard(path))
        # A layer of another style has all of its input and gives all of its output, and so does the delta.
        part = {"rowwise": "lora_A", "colwise": "lora_B"}.get(style)
        if part is not None:
            apply_tensor_parallelism(delta, mesh, {f"{part}.weight": style, part: style})


def save_draft_adapter(model: nn.Module, directory: str | Path, renames: dict[str, str]) -> None:
    """Write the model's draft adapter as a PEFT LoRA directory, under the released layer names (inverse of loading)."""
    deltas = draft_adapter_of(model)
    if any(hasattr(parameter, "device_mesh") for delta in deltas.values() for parameter in delta.parameters()):
        raise CheckpointError("The draft adapter is split over ranks: load the model in one process to save it.")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    state = {}
    for path, delta in deltas.items():
        released = path
        for theirs, ours in renames.items():
            if path.startswith(ours):
                released = theirs + path.removeprefix(ours)
                break
        for name in ("lora_A", "lora_B"):
            state[f"base_model.model.{released}.{name}.weight"] = getattr(delta, name).weight.detach().contiguous()
    first = next(iter(deltas.values()))
    rank = first.lora_A.out_features
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": first.scale * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({path.rpartition(".")[2] for path in deltas}),
    }
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(state, directory / "adapter_model.safetensors", metadata={"format": "pt"})
