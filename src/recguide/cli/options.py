"""Options that several commands have, and how those with commas are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from ..config import ATTENTION_BACKENDS
from ..errors import ConfigError
from ..loading import TINY

ModelOption = Annotated[str, typer.Option("--model", help=f"{TINY} (embedded), a directory, or a hub name.")]
DtypeOption = Annotated[
    str, typer.Option(help="float32, bfloat16 or float16. Equality with plain decoding holds in float32.")
]
DeviceOption = Annotated[str, typer.Option(help="As in device_map: cpu, cuda, auto.")]
BackendOption = Annotated[
    str, typer.Option(help=f"{', '.join(ATTENTION_BACKENDS)}; auto goes by the device and says why in the log.")
]
CompileOption = Annotated[bool, typer.Option("--compile", help="Run the model's forward through torch.compile.")]
GraphsOption = Annotated[bool, typer.Option("--cuda-graphs", help="Replay forwards as CUDA graphs.")]
ThreadsOption = Annotated[int | None, typer.Option(min=1, help="torch threads; by default torch's own choice.")]


def names(text: str, known: Sequence[str], option: str) -> list[str]:
    """The known names of an option, in order, none twice."""
    found = list(dict.fromkeys(name.strip() for name in text.split(",")))
    if unknown := [name for name in found if name not in known]:
        raise ConfigError(f"{option} must be of {', '.join(known)}; got {', '.join(unknown)}.")
    return found


def whole_numbers(text: str, option: str) -> list[int]:
    """The positive whole numbers of an option, ascending, none twice."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{option} must be whole numbers with commas between; got {text!r}.") from error
    if min(numbers) < 1:
        raise ConfigError(f"{option} must be at least 1; got {text!r}.")
    return sorted(set(numbers))
