"""What every command does with a user's mistake."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

from ..errors import LosslessError, RecGuideError

errors = Console(stderr=True)


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
