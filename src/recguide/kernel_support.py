"""Whether the optional kernels can run on a device, and if not, why. Nothing optional is imported here."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch

from .errors import MissingDependencyError, RecGuideError, UnsupportedError

LOWEST_CAPABILITY = (8, 0)
"""Of CUDA devices: the kernels are compiled for these and later ones in the tests."""


def interpreting() -> bool:
    """Whether Triton runs its kernels in its interpreter, in this process, for tests on a CPU. Triton reads this when it is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def triton_problem(device: torch.device) -> RecGuideError | None:
    """What keeps the Triton kernels from running on `device`, and what to do about it; `None` if nothing does."""
    if find_spec("triton") is None:
        return MissingDependencyError('triton is not installed: pip install "recguide[kernels]"')
    if device.type == "cpu" and interpreting():
        return None
    return _cuda_problem(device)


def flashinfer_problem(device: torch.device) -> RecGuideError | None:
    """Likewise for FlashInfer."""
    if find_spec("flashinfer") is None:
        return MissingDependencyError('flashinfer is not installed: pip install "recguide[flashinfer]"')
    return _cuda_problem(device)


def _cuda_problem(device: torch.device) -> RecGuideError | None:
    if device.type != "cuda":
        return UnsupportedError(
            f"it needs a CUDA device, and this one is {device.type}: move the model to one, or use torch_sdpa"
        )
    if not torch.cuda.is_available():
        return UnsupportedError("torch finds no CUDA device: use torch_sdpa")
    found = torch.cuda.get_device_capability(device)
    if found < LOWEST_CAPABILITY:
        return UnsupportedError(
            f"it needs a CUDA device of capability {_version(LOWEST_CAPABILITY)} or later, and "
            f"{torch.cuda.get_device_name(device)} has {_version(found)}: use torch_sdpa"
        )
    return None


def _version(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
