"""What this installation can do, and why not where it cannot."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import torch

from ..attention import BACKENDS, Work, backend_problem, choose_backend

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
    for device in [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]:
        for name in BACKENDS:
            problem = backend_problem(name, Work(device))
            yield f"backend {name}, {device}", "usable" if problem is None else f"not usable: {problem}"
        choice = choose_backend(Work(device))
        yield f"backend auto, {device}", f"{choice.name}: {choice.reason}"


def _devices() -> Iterator[str]:
    yield f"cpu ({torch.backends.cpu.get_cpu_capability()})"
    for index in range(torch.cuda.device_count()):
        yield f"cuda:{index} ({torch.cuda.get_device_name(index)})"
