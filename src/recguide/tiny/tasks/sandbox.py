"""Run untrusted Python in a short-lived, resource-limited subprocess without network.

This contains accidents of a model (endless loops, huge lists, stray downloads); it is no defence against an attacker.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile

# A dedicated exit status, so that a program that exits early by itself does not count as passed.
_PASSED = 93

# The child limits itself: a `preexec_fn` in the parent would be unsafe where the caller has threads. Audit hooks cannot be taken
# away again, and hear of sockets and of new processes before they are made.
_RUNNER = f"""
import os, sys
try:
    import resource
    for name, limit in (("CPU", int(sys.argv[2])), ("AS", int(sys.argv[3]) << 20), ("FSIZE", 0), ("NPROC", 0)):
        resource.setrlimit(getattr(resource, "RLIMIT_" + name), (limit, limit))
except (ImportError, ValueError, OSError):
    pass
def refuse(event, arguments):
    if event.startswith(("socket.", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.system", "subprocess.", "ctypes.")):
        raise PermissionError(f"{{event}} is not allowed here")
sys.addaudithook(refuse)
exec(compile(sys.argv[1], "<answer>", "exec"), {{"__name__": "answer"}})
os._exit({_PASSED})
"""


def runs(source: str, timeout: float = 20.0, cpu_seconds: int = 2, memory_mib: int = 256) -> bool:
    """
    Whether `source` runs to its end without an exception, within the limits, in an empty temporary directory.

    Args:
        source (`str`): a program.
        timeout (`float`): seconds of wall time; on a busy machine a good deal more than the processor's.
        cpu_seconds (`int`): of the processor.
        memory_mib (`int`): of address space, the interpreter's own included.
    """
    if "\0" in source:
        return False
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-S", "-c", _RUNNER, source, str(cpu_seconds), str(memory_mib)],
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
