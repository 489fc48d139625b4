"""Attention backends, by name. A backend's own imports happen only when it is asked for."""

from __future__ import annotations

from collections.abc import Callable

from ..errors import ConfigError
from .base import AttentionBackend, PlannedAttention, installed


def _torch_sdpa() -> AttentionBackend:
    from .torch_sdpa import TorchSDPA

    return TorchSDPA()


BACKENDS: dict[str, Callable[[], AttentionBackend]] = {"torch_sdpa": _torch_sdpa}


def resolve_backend(name: str = "torch_sdpa") -> AttentionBackend:
    """The backend called `name`; an unknown one raises [`ConfigError`] with the list."""
    if name not in BACKENDS:
        raise ConfigError(f"Unknown attention backend {name!r}. Known: {', '.join(BACKENDS)}.")
    return BACKENDS[name]()


__all__ = ["BACKENDS", "AttentionBackend", "PlannedAttention", "installed", "resolve_backend"]
