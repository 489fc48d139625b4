"""Run untrusted Python in a short-lived, resource-limited subprocess without network.

This contains accidents of a model (endless loops, huge lists, stray downloads, deleted files); it is no defence against an attacker.
"""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile

# A dedicated exit status, so that a program that exits early by itself does not count as passed.
_PASSED = 93

# The child limits itself: a `preexec_fn` in the parent would be unsafe where the caller has threads. Audit hooks cannot be taken
# away again, and hear of sockets, processes and changes of files before they are made. `fork_exec`, which tells none, is replaced.
_RUNNER = f"""
import os, signal, sys
cpu_seconds, memory_mib, seconds = map(int, sys.argv[1:])
del sys.argv[1:]
source = sys.stdin.buffer.read().decode()
def refuse_process(*arguments):
    raise PermissionError("new processes are not allowed here")
try:
    import _posixsubprocess, resource
except ImportError:
    pass
else:
    _posixsubprocess.fork_exec = refuse_process
    # Should the caller be gone by then.
    signal.alarm(seconds)
    for name, limit in (("CPU", cpu_seconds), ("AS", memory_mib << 20), ("FSIZE", 0), ("NPROC", 0)):
        kind = getattr(resource, "RLIMIT_" + name)
        _, most = resource.getrlimit(kind)
        limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
        try:
            resource.setrlimit(kind, (limit, limit))
        except ValueError:
            pass
REFUSED = (
    "socket.", "ctypes.", "subprocess.", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.system", "os.kill",
    "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown", "os.chflags",
    "os.utime", "os.setxattr", "os.removexattr",
)
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
NOWHERE = os.devnull
def refuse(event, arguments):
    if event.startswith(REFUSED) or event == "open" and arguments[2] & WRITES and arguments[0] != NOWHERE:
        raise PermissionError(f"{{event}} is not allowed here")
sys.addaudithook(refuse)
answer = sys.modules["answer"] = type(sys)("answer")
exec(compile(source, "<answer>", "exec"), vars(answer))
os._exit({_PASSED})
"""


def runs(source: str, timeout: float = 20.0, cpu_seconds: int = 2, memory_mib: int = 256) -> bool:
    """
    Whether `source` runs to its end without an exception, within the limits, in an empty temporary directory.

    It has the standard library, may read files and change none, and starts no process. Its hashes, and so the order of its sets, are the
    same in every run. macOS has no limit of memory, and Windows none but `timeout`.

    Args:
        source (`str`): a program.
        timeout (`float`): seconds of wall time; on a busy machine a good deal more than the processor's.
        cpu_seconds (`int`): of the processor.
        memory_mib (`int`): of address space, the interpreter's own included.
    """
    limits = (cpu_seconds, memory_mib, math.ceil(timeout) + 1)
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                # As isolated as -I makes it, and yet PYTHONHASHSEED is read.
                [sys.executable, "-P", "-s", "-S", "-B", "-c", _RUNNER, *map(str, limits)],
                input=source.encode(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env={"PYTHONHASHSEED": "0"},
                timeout=timeout,
                check=False,
            )
        except (subprocess.TimeoutExpired, UnicodeEncodeError):
            return False
    return done.returncode == _PASSED
