"""What a long measurement has done so far, kept beside its result."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import typer

from ..calibration import Fingerprint
from ..errors import CalibrationError
from .mistakes import errors

WHAT, VERSION = "recguide unfinished", 1


class Unfinished:
    """
    The finished steps of a command, in a file of a header and one step a line; a context manager.

    SIGINT and SIGTERM end the command with exit code 130 and keep the file, as being killed does, and the same command goes on from it.
    When the block has come to its end, its result being written, the file is removed.

    Args:
        path (`Path`): read if it is there, made with the first step if not.
        fingerprint (`Fingerprint`): of the setup.
        arguments (`dict`): all else that the steps depend on, as JSON has it.

    Raises:
        CalibrationError: the file has steps of other arguments or another setup, or is no such file.
    """

    def __init__(self, path: Path, fingerprint: Fingerprint, arguments: dict[str, Any]) -> None:
        self.done: dict[str, Any] = {}
        """What each step has come to."""
        self._path = path
        self._of = {"fingerprint": asdict(fingerprint), "arguments": arguments}
        if path.is_file():
            self._read()

    def __enter__(self) -> Unfinished:
        self._before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGTERM, self._before)
        if isinstance(value, KeyboardInterrupt):
            kept = f"The finished steps are in {self._path}: the same command goes on from there."
            errors.print(f"Interrupted. {kept if self.done else 'No step was finished.'}", markup=False, soft_wrap=True)
            raise typer.Exit(130) from None
        if value is None:
            self._path.unlink(missing_ok=True)

    def add(self, step: str, result: Any) -> None:
        """Write down what a step has come to, as values that JSON knows."""
        lines: list[Any] = [] if self.done else [{"what": WHAT, "version": VERSION, **self._of}]
        lines.append([step, result])
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))
        self.done[step] = result

    def _read(self) -> None:
        text = self._path.read_bytes()
        lines = text.splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            # Cut off in writing.
            lines.pop()
        try:
            values = [json.loads(line) for line in lines]
            self.done = dict(values[1:])
            wrong = self._differing(values[0]) if self.done else ""
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            wrong = f"is not a file of finished steps ({error!r})"
        if wrong:
            raise CalibrationError(f"{self._path} {wrong}. Delete it to measure anew.")
        os.truncate(self._path, sum(map(len, lines)) if self.done else 0)

    def _differing(self, header: dict[str, Any]) -> str:
        """What is wrong with a header."""
        if (header["what"], header["version"]) != (WHAT, VERSION):
            return f"is {(header['what'], header['version'])}; expected {(WHAT, VERSION)}"
        differing = [
            f"{name} {header[part].get(name)!r}, here {value!r}"
            for part, values in self._of.items()
            for name, value in values.items()
            if header[part].get(name) != value
        ]
        return f"has the finished steps of another run ({'; '.join(differing)})" if differing else ""
