"""The contract of attention backends, and their way into a Hugging Face model without touching its code.

A backend plans once a forward and runs once a layer. The plan reaches the layers as a keyword argument of the model's
forward. While a backend is installed, a forward without a plan runs the model's own attention, so other threads
that use the model as usual are not disturbed.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

from ..dense_kv import KVCache
from ..errors import UnsupportedError
from ..segments import Plan

PREFIX = "recguide:"
HARMLESS = {"dropout", "position_ids", "is_causal", "use_cache", "cache", "output_attentions", "output_hidden_states"}
"""What layers pass to their attention and segments may leave aside: inference has no dropout, and the plan has the rest."""
CURRENT = "current"
"""As the plan of a compiled forward: the one that runs now. The forward is the same program then whatever is planned."""
_current: ContextVar[PlannedAttention] = ContextVar("recguide_planned_attention")
_lock = threading.Lock()
_users: dict[int, int] = {}


class PlannedAttention(Protocol):
    """One forward's attention over segments, planned."""

    layers_run: int
    """How many layers have asked so far."""

    def run(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """
        Attend in one layer, after storing its keys and values.

        Args:
            layer (`int`): layer index.
            query (`torch.Tensor`): `[H, T, D]`, rotated.
            keys, values (`torch.Tensor`): `[G, T, D]`, not repeated for GQA.
            scaling (`float`): factor of the scores.

        Returns:
            `torch.Tensor`: `[T, H, D]`.
        """


class AttentionBackend(Protocol):
    """Computes segments with two visible intervals over a cached prefix."""

    name: str

    def plan(self, plan: Plan, kv: KVCache, dtype: torch.dtype) -> PlannedAttention:
        """Prepare a forward in `dtype`: masks, work items, indices; everything that does not depend on the layer."""


class StaticAttention(PlannedAttention, Protocol):
    """A planned forward whose tensors keep their addresses, so that it can be captured and run again with another plan."""

    def load(self, padded: Plan, plan: Plan, kv: KVCache) -> None:
        """Take over another forward of the same bounds."""


@runtime_checkable
class StaticBackend(AttentionBackend, Protocol):
    """A backend whose forwards can be captured."""

    def bounds(self, plan: Plan, page_size: int, group: int, dtype: torch.dtype) -> Hashable:
        """
        What is fixed when a forward is captured, besides its own shapes.

        Args:
            plan (`Plan`): with its padding; only its counts are looked at.
            page_size (`int`): of the cache.
            group (`int`): query heads of a key/value head.
            dtype (`torch.dtype`): of the model.
        """

    def static(self, padded: Plan, plan: Plan, kv: KVCache, dtype: torch.dtype, bounds: Any) -> StaticAttention:
        """Prepare a forward to be captured: `padded` is `plan` with tokens and rows behind it that are nobody's."""


@contextmanager
def running(attention: PlannedAttention) -> Iterator[None]:
    """Inside, layers that are called with [`CURRENT`] attend as `attention` has planned."""
    token = _current.set(attention)
    try:
        yield
    finally:
        _current.reset(token)


@torch.library.custom_op("recguide::run_current", mutates_args=())
def _run_current(query: Tensor, keys: Tensor, values: Tensor, layer: int, scaling: float) -> Tensor:
    """[`PlannedAttention.run`] as one operation, into which no compiler looks."""
    return _current.get().run(layer, query, keys, values, scaling).contiguous()


@_run_current.register_fake
def _(query: Tensor, keys: Tensor, values: Tensor, layer: int, scaling: float) -> Tensor:
    return query.new_empty((query.shape[1], query.shape[0], query.shape[2]))


def _attend(own: Callable[..., Any] | None) -> Callable[..., Any]:
    """The function that a layer calls: the planned attention if the forward carries one, else the model's own."""

    def attend(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        recguide_attention: PlannedAttention | str | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if recguide_attention is None:
            assert own is not None
            return own(module, query, key, value, attention_mask, scaling=scaling, **kwargs)  # type: ignore[no-any-return]
        if strange := [name for name in kwargs.keys() - HARMLESS if kwargs[name] is not None]:
            names = ", ".join(sorted(strange))
            raise UnsupportedError(f"{type(module).__name__} attends with {names}, which segments do not know.")
        factor = query.shape[-1] ** -0.5 if scaling is None else scaling
        if isinstance(recguide_attention, str):
            return _run_current(query[0], key[0], value[0], module.layer_idx, factor)[None], None
        return recguide_attention.run(module.layer_idx, query[0], key[0], value[0], factor)[None], None

    return attend


@contextmanager
def installed(model: PreTrainedModel) -> Iterator[None]:
    """
    While inside, forwards of `model` that carry `recguide_attention=` use it; the model's setting is put back at the end.

    May be entered by several threads for the same model.
    """
    config = model.config.get_text_config()
    with _lock:
        if not _users.get(id(config)):
            own = config._attn_implementation
            _register(own, model)
            config._attn_implementation = PREFIX + own
        _users[id(config)] = _users.get(id(config), 0) + 1
    try:
        yield
    finally:
        with _lock:
            _users[id(config)] -= 1
            if not _users[id(config)]:
                del _users[id(config)]
                config._attn_implementation = config._attn_implementation.removeprefix(PREFIX)


def _register(own: str, model: PreTrainedModel) -> None:
    if own == "eager":
        # Eager attention is a function beside the model's classes, not an entry of the table.
        modules = (sys.modules[cls.__module__] for cls in type(model).__mro__)
        function = next((m.eager_attention_forward for m in modules if hasattr(m, "eager_attention_forward")), None)
    else:
        function = AttentionInterface._global_mapping[own]
    AttentionInterface.register(PREFIX + own, _attend(function))
    AttentionMaskInterface.register(PREFIX + own, ALL_MASK_ATTENTION_FUNCTIONS[own])
