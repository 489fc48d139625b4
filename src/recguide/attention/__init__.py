"""Attention backends, by name. A backend's own imports happen only when it is asked for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch

from ..config import ATTENTION_BACKENDS
from ..errors import ConfigError, RecGuideError, UnsupportedError
from ..kernel_support import flashinfer_problem, triton_problem
from .base import CURRENT, AttentionBackend, PlannedAttention, installed, running

logger = logging.getLogger(__name__)
CPU = torch.device("cpu")
_HALF = (torch.float16, torch.bfloat16)


def _torch_sdpa() -> AttentionBackend:
    from .torch_sdpa import TorchSDPA

    return TorchSDPA()


def _triton() -> AttentionBackend:
    from .triton import TritonAttention

    return TritonAttention()


def _flashinfer() -> AttentionBackend:
    from .flashinfer import FlashInferAttention

    return FlashInferAttention()


BACKENDS: dict[str, Callable[[], AttentionBackend]] = {
    "torch_sdpa": _torch_sdpa,
    "triton": _triton,
    "flashinfer": _flashinfer,
}


@dataclass(frozen=True)
class Work:
    """What a backend is to run: the model's `device` and, where they are known, its `dtype` and the sizes of its heads."""

    device: torch.device = CPU
    dtype: torch.dtype | None = None
    head_dims: frozenset[int] = frozenset()


@dataclass(frozen=True)
class BackendChoice:
    """The backend that is taken, and why."""

    name: str
    reason: str


def backend_problem(name: str, work: Work) -> RecGuideError | None:
    """What keeps the backend called `name` from doing `work`, and what to do about it; `None` if nothing does."""
    if name == "triton":
        problem = triton_problem(work.device)
        types: tuple[torch.dtype, ...] = (torch.float32, *_HALF)
        strange = [size for size in work.head_dims if size % 8 or not 8 <= size <= 256]
        sizes = "a multiple of 8 up to 256"
    elif name == "flashinfer":
        problem, types = flashinfer_problem(work.device), _HALF
        strange, sizes = [size for size in work.head_dims if size not in (64, 128, 256)], "64, 128 or 256"
    else:
        return None
    if problem is not None:
        return problem
    if work.dtype not in (None, *types):
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in types)
        return UnsupportedError(
            f"it computes in {names}, and the model in {str(work.dtype).removeprefix('torch.')}: use torch_sdpa"
        )
    if len(work.head_dims) > 1:
        found = " and ".join(map(str, sorted(work.head_dims)))
        return UnsupportedError(
            f"keys and values must have heads of one size, and the model's have {found}: use torch_sdpa"
        )
    if strange:
        return UnsupportedError(f"its head size must be {sizes}, and the model's is {min(strange)}: use torch_sdpa")
    return None


def choose_backend(work: Work) -> BackendChoice:
    """What `"auto"` stands for: `triton` on a CUDA device that it can use, else `torch_sdpa`, which runs everywhere."""
    if work.device.type != "cuda":
        return BackendChoice("torch_sdpa", f"it is the one for {work.device.type}")
    if problem := backend_problem("triton", work):
        return BackendChoice("torch_sdpa", f"triton cannot be used: {problem}")
    return BackendChoice("triton", "it reads pages in place on a CUDA device")


@lru_cache
def _tell(device: str, choice: BackendChoice) -> None:
    """To the log, once. Whoever has a CUDA device expects its kernels to run."""
    lacking = device == "cuda" and choice.name == "torch_sdpa"
    logger.log(logging.WARNING if lacking else logging.INFO, "Attention backend %s: %s.", choice.name, choice.reason)


def resolve_backend(name: str = "auto", work: Work | None = None) -> AttentionBackend:
    """
    The backend called `name`, for `work` (by default, on the CPU). What `"auto"` has become goes to the log.

    Raises:
        ConfigError: no backend is called so.
        UnsupportedError, MissingDependencyError: it cannot do this work here; the message says why and what to do.
    """
    work = Work() if work is None else work
    if name not in ATTENTION_BACKENDS:
        raise ConfigError(f"Unknown attention backend {name!r}. Known: {', '.join(ATTENTION_BACKENDS)}.")
    if name == "auto":
        choice = choose_backend(work)
        _tell(work.device.type, choice)
        name = choice.name
    elif problem := backend_problem(name, work):
        raise type(problem)(f"The attention backend {name!r} cannot be used: {problem}.")
    return BACKENDS[name]()


__all__ = [
    "BACKENDS",
    "CURRENT",
    "AttentionBackend",
    "BackendChoice",
    "PlannedAttention",
    "Work",
    "backend_problem",
    "choose_backend",
    "installed",
    "resolve_backend",
    "running",
]
