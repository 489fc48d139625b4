"""Models and their tokenizers by name or path: safetensors only."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.distributed import DistributedConfig
from transformers.utils import logging as transformers_logging

from . import attach, tiny_path
from .errors import ConfigError, InputError

TINY = "recguide-tiny"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load(
    name: str, dtype: str, device: str, trust_remote_code: bool = False, tensor_parallel: bool = False
) -> tuple[Any, Any]:
    """
    A model that understands `generation_strategy`, and its tokenizer.

    Args:
        name (`str`): `recguide-tiny` for the embedded model, else a directory or hub name.
        dtype (`str`): `float32`, `bfloat16` or `float16`.
        device (`str`): as in `device_map`: `cpu`, `cuda`, `auto`, …
        trust_remote_code (`bool`, defaults to `False`): let the checkpoint's own code run.
        tensor_parallel (`bool`, defaults to `False`):
            Split each layer over the processes that `torchrun` has started, all of which load it, each on its own accelerator.

    Raises:
        ConfigError: an unknown dtype; with tensor parallelism, one process alone, or another device than its accelerator.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype must be one of {', '.join(DTYPES)}; got {dtype!r}.")
    path = tiny_path() if name == TINY else name
    if name == TINY and not Path(path, "config.json").is_file():
        raise ConfigError(f"This installation has no embedded model (expected it in {path}). Reinstall recguide.")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    placed = {"distributed_config": _split(device)} if tensor_parallel else {"device_map": device}
    model = AutoModelForCausalLM.from_pretrained(path, dtype=DTYPES[dtype], use_safetensors=True, **placed, **options)
    tokenizer = AutoTokenizer.from_pretrained(path, **options)
    return attach(model).eval(), tokenizer


def _split(device: str) -> DistributedConfig:
    split = DistributedConfig(tp_plan="auto")
    if split.tp_size == 1:
        raise ConfigError("Tensor parallelism needs several processes: start them with torchrun --nproc-per-node=….")
    accelerator = torch.accelerator.current_accelerator()
    own = "cpu" if accelerator is None else accelerator.type
    if device not in ("auto", own):
        raise ConfigError(
            f"With tensor parallelism --device must be auto or {own}, where each process is; got {device!r}."
        )
    return split


def chat_ids(tokenizer: Any, prompt: str) -> torch.Tensor:
    """`int64[1, T]`: the prompt as a chat message where the tokenizer has a chat template, else as it is."""
    if tokenizer.chat_template is None:
        plain: torch.Tensor = tokenizer(prompt, return_tensors="pt")["input_ids"]
        return plain
    return conversation_ids(tokenizer, [{"role": "user", "content": prompt}])


def conversation_ids(tokenizer: Any, messages: list[dict[str, str]], **template_options: Any) -> torch.Tensor:
    """`int64[1, T]`: messages by the tokenizer's chat template, up to where the answer begins."""
    encoded = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True, **template_options
    )
    ids: torch.Tensor = encoded["input_ids"]
    return ids


def read_prompts(file: Path) -> list[str]:
    """The prompts of a JSONL file with a "prompt" a line; raises [`InputError`] for another file, and where there are none."""
    texts = []
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        try:
            text = json.loads(line)["prompt"]
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f'{file}, line {number}: expected a JSON object with a "prompt" ({error!r}).') from error
        if not isinstance(text, str) or not text:
            raise InputError(f"{file}, line {number}: the prompt must be a text that is not empty; got {text!r}.")
        texts.append(text)
    if not texts:
        raise InputError(f"{file} has no prompts.")
    return texts
