"""The kernels in Triton's interpreter, on the CPU: each file of `interpreted/` in a process where TRITON_INTERPRET is set."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = sorted(path.name for path in (HERE / "interpreted").glob("test_*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_kernels_interpreted(name: str) -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "interpreted" / name)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d+ passed", done.stdout), done.stdout


def test_every_kernel_is_interpreted() -> None:
    assert FILES == [
        "test_backend.py",
        "test_graphs.py",
        "test_kv_commit.py",
        "test_logit_stats.py",
        "test_segment_attention.py",
    ]
