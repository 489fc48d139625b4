"""Run untrusted Python in a short-lived, resource-limited subprocess.

This contains accidents of a small model (endless loops, huge lists); it is no defence against an attacker.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile

# A dedicated exit status, so that a program that exits early by itself does not count as passed.
_PASSED = 93

# The child limits itself: a `preexec_fn` in the parent would be unsafe where the caller has threads.
_RUNNER = f"""
import os, sys
try:
    import resource
    for name, limit in (("CPU", 2), ("AS", 256 << 20), ("FSIZE", 0), ("NPROC", 0)):
        resource.setrlimit(getattr(resource, "RLIMIT_" + name), (limit, limit))
except (ImportError, ValueError, OSError):
    pass
exec(compile(sys.argv[1], "<answer>", "exec"), {{"__name__": "answer"}})
os._exit({_PASSED})
"""


def runs(source: str, timeout: float = 5.0) -> bool:
    """Whether ``source`` runs to its end without an exception, within the limits."""
    if "\0" in source:
        return False
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-S", "-c", _RUNNER, source],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env={},
                timeout=timeout,
                check=False,
            )
        except (subprocess.TimeoutExpired, UnicodeEncodeError):
            return False
    return done.returncode == _PASSED
