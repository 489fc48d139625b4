"""Models by name or path, for every command."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from .. import attach, tiny_path
from ..errors import ConfigError, InputError, LosslessError, RecGuideError

TINY = "recguide-tiny"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
errors = Console(stderr=True)


def load(name: str, dtype: str, device: str, trust_remote_code: bool = False) -> tuple[Any, Any]:
    """
    A model that understands `generation_strategy`, and its tokenizer.

    Args:
        name (`str`): `recguide-tiny` for the embedded model, else a directory or hub name.
        dtype (`str`): `float32`, `bfloat16` or `float16`.
        device (`str`): as in `device_map`: `cpu`, `cuda`, `auto`, …
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
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=DTYPES[dtype], device_map=device, use_safetensors=True, **options
    )
    tokenizer = AutoTokenizer.from_pretrained(path, **options)
    return attach(model).eval(), tokenizer


def chat_ids(tokenizer: Any, prompt: str) -> torch.Tensor:
    """`int64[1, T]`: the prompt as a chat message where the tokenizer has a chat template, else as it is."""
    if tokenizer.chat_template is None:
        plain: torch.Tensor = tokenizer(prompt, return_tensors="pt")["input_ids"]
        return plain
    messages = [{"role": "user", "content": prompt}]
    encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
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


@contextmanager
def readable_errors() -> Iterator[None]:
    """
    A user's mistake ends the command with its message and exit code 2, not with a traceback; an output that is not plain decoding's, with
    exit code 1.
    """
    try:
        yield
    except LosslessError as error:
        errors.print(f"Not lossless: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error
    except (RecGuideError, OSError) as error:
        errors.print(f"Error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from error
