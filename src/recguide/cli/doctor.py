"""What this installation can do, and why not where it cannot."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import torch

from ..attention import BACKENDS, resolve_backend
from ..errors import RecGuideError

PACKAGES = (
    "recguide",
    "torch",
    "transformers",
    "accelerate",
    "safetensors",
    "triton",
    "flashinfer-python",
    "reasoning-gym",
    "llguidance",
)


def diagnose() -> Iterator[tuple[str, str]]:
    """Pairs of a name and what was found."""
    yield "python", platform.python_version()
    for package in PACKAGES:
        try:
            yield package, version(package)
        except PackageNotFoundError:
            yield package, "not installed"
    yield "devices", ", ".join(_devices())
    yield "threads", f"{torch.get_num_threads()}, OMP_WAIT_POLICY={os.environ.get('OMP_WAIT_POLICY', 'not set')}"
    for name in BACKENDS:
        try:
            resolve_backend(name)
            yield f"backend {name}", "usable"
        except (RecGuideError, ImportError) as error:
            yield f"backend {name}", f"not usable: {error}"


def _devices() -> Iterator[str]:
    yield f"cpu ({torch.backends.cpu.get_cpu_capability()})"
    for index in range(torch.cuda.device_count()):
        yield f"cuda:{index} ({torch.cuda.get_device_name(index)})"
