"""Small models and drafters for tests: of this package, and of packages built on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from .adapter import ModelAdapter, Predictions
from .attention import resolve_backend
from .dense_kv import KVCache
from .hooks import Hook
from .models.draft_adapter import DraftAdapterConfig, add_draft_adapter, draft_adapter_of
from .models.nemotron_labs_diffusion import NemotronLabsDiffusionConfig, NemotronLabsDiffusionModel
from .segments import Plan, Segment
from .structs import ForwardRecord, RoundRecord

MASK = 5


def toy_config(vocab_size: int = 24, **changes: Any) -> NemotronLabsDiffusionConfig:
    """An NLD config of two small layers with YaRN, query scaling, GQA and a query width that is not the hidden size."""
    fields: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "mask_token_id": MASK,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    }
    return NemotronLabsDiffusionConfig(**(fields | changes))


def toy_model(seed: int = 0, vocab_size: int = 24, **changes: Any) -> NemotronLabsDiffusionModel:
    """
    A random NLD model with a draft adapter that matters, fp32, in eval mode, without end-of-sequence tokens.

    Its output varies with its input, and a small vocabulary makes some of its drafts right by chance.
    """
    generator = torch.Generator().manual_seed(seed)
    model = NemotronLabsDiffusionModel(toy_config(vocab_size, **changes))
    model.train(False)
    add_draft_adapter(model, DraftAdapterConfig(r=4, lora_alpha=16.0, target_modules=("o_proj",)))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    assert draft_adapter_of(model)
    return model


class ScriptedDrafts(ModelAdapter):
    """
    A model adapter whose drafts are dictated, while verification stays the model's own: any acceptance can be staged.

    Args:
        model ([`NemotronLabsDiffusionModel`]): the model.
        guess (callable): `position -> token`, the draft of each absolute position.
        margin (callable, *optional*): `position -> margin` of that guess; 1.0 by default.
        alternative (callable, *optional*): `position -> token`, the second candidate there.
    """

    def __init__(
        self,
        model: NemotronLabsDiffusionModel,
        guess: Callable[[int], int],
        margin: Callable[[int], float] = lambda position: 1.0,
        alternative: Callable[[int], int] | None = None,
    ) -> None:
        super().__init__(model, resolve_backend("torch_sdpa"))
        self._guess, self._margin, self._alternative = guess, margin, alternative

    def forward(
        self,
        rows: Sequence[Sequence[Segment]],
        kv: KVCache,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Plan, Predictions]:
        plan, predictions = super().forward(rows, kv, *args, **kwargs)
        for segments, spans in zip(rows, plan.outputs, strict=True):
            for segment, (start, end) in zip(segments, spans, strict=True):
                if segment.bidirectional:
                    first = segment.position + len(segment.tokens) - (end - start)
                    for i, position in zip(range(start, end), range(first, first + end - start), strict=True):
                        self._dictate(predictions, i, position)
        return plan, predictions

    def _dictate(self, predictions: Predictions, i: int, position: int) -> None:
        token, margin = self._guess(position), self._margin(position)
        second = (
            self._alternative(position) if self._alternative else next(t for t in predictions.best[i] if t != token)
        )
        others = [t for t in predictions.best[i] if t not in (token, second)]
        predictions.best[i][:] = [token, second, *others][: len(predictions.best[i])]
        predictions.probabilities[i] = ((1 + margin) / 2, (1 - margin) / 2)


@contextmanager
def priced_time(milliseconds: Callable[[int, int], float]) -> Iterator[None]:
    """
    Inside, every forward says that it took so long, whatever it took, so that rates are exact and what learns from times can be tested.

    Args:
        milliseconds (callable): `(requests, query_tokens) -> ms`.
    """
    forward = ModelAdapter.forward

    def priced(self: ModelAdapter, rows: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        plan, predictions = forward(self, rows, *args, **kwargs)
        seconds = milliseconds(sum(map(bool, rows)), plan.query_tokens) / 1000
        return plan, replace(predictions, seconds=seconds, elapsed=seconds)

    ModelAdapter.forward = priced  # type: ignore[method-assign]
    try:
        yield
    finally:
        ModelAdapter.forward = forward  # type: ignore[method-assign]


class PricedRates(Hook):
    """Tokens that rounds commit, and the milliseconds of their forwards as they say."""

    def __init__(self) -> None:
        self.tokens, self.ms = 0, 0.0

    def on_draft(self, record: ForwardRecord) -> None:
        self.ms += 1000 * record.elapsed

    def on_verify(self, record: ForwardRecord) -> None:
        self.ms += 1000 * record.elapsed

    def on_commit(self, record: RoundRecord) -> None:
        self.tokens += len(record.committed)
