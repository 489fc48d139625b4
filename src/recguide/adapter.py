"""What the loop needs from a model: packed forwards, and how the family drafts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.distributed.utils import is_dtensor

from .attention import AttentionBackend, Work, installed, resolve_backend
from .calibration import Fingerprint
from .config import ForwardConfig
from .dense_kv import KVCache
from .errors import CheckpointError, UnsupportedError
from .forwards import Forwards, forwards_of
from .paged_kv import head_dims
from .ranking import rank
from .ranks import Extents, Ranks
from .sampling import Predicted, Sampling
from .segments import Plan, Segment, pack


@dataclass(frozen=True)
class Drafter:
    """
    How a model family drafts with its own backbone.

    Args:
        filler_token_id (`int`): stands in the undrafted places of a block (MASK; another family may use noise).
        excluded_token_ids (`tuple[int]`): never predicted, neither drafted nor verified.
        adapter_on_seed (`bool`): the draft adapter is on for the block's first token too.
        shifted (`bool`): the logits at i predict the token at i + 1 (as in causal mode), not the one at i.
    """

    filler_token_id: int
    excluded_token_ids: tuple[int, ...] = ()
    adapter_on_seed: bool = True
    shifted: bool = False


def _nld(model: PreTrainedModel) -> Drafter:
    mask = model.config.mask_token_id
    if not 0 <= mask < model.config.vocab_size:
        raise CheckpointError(
            f"mask_token_id={mask} is not a token of the vocabulary (0 … {model.config.vocab_size - 1}); "
            "drafting needs it. The released NLD configs say 100: set config.mask_token_id."
        )
    return Drafter(filler_token_id=mask, excluded_token_ids=(mask,))


FAMILIES: dict[str, Callable[[PreTrainedModel], Drafter]] = {"nemotron_labs_diffusion": _nld}
"""Drafters by `config.model_type`."""


@dataclass(frozen=True)
class Predictions:
    """
    A forward's results on the host, one entry an output row.

    `best[i]` are the tokens of the highest scores in order, `probabilities[i]` the top two's, `entropies[i]` that of the model's
    own logits in nats, the last two only where they were asked for; excluded tokens take no part in any. Scores are the logits, or what
    the request's [`Sampling`] makes of them.
    `logits` stay on the device: `float32[N, V]`, as the model gave them; so does the `noise`, `float32[N, V]`, of the sampled requests
    whose tokens are chosen by position.
    """

    best: list[list[int]]
    probabilities: list[tuple[float, float]]
    entropies: list[float]
    logits: Tensor
    noise: Tensor | None
    seconds: float
    elapsed: float


class ModelAdapter:
    """
    A model, its drafter and an attention backend as one thing that runs packed forwards.

    Args:
        model ([`~transformers.PreTrainedModel`]): a decoder whose attention goes through transformers' attention interface.
        backend (`AttentionBackend`): computes the segments.
        drafter (`Drafter`, *optional*): how it drafts; by default the family's. A family that cannot draft decodes with
            blocks of 1.
        forwards (`Forwards`, *optional*): how they are run; by default as they are, with the backend.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        backend: AttentionBackend,
        drafter: Drafter | None = None,
        forwards: Forwards | None = None,
    ) -> None:
        self.model = model
        self.backend = backend
        self.forwards = Forwards(model, backend) if forwards is None else forwards
        self.ranks = Ranks.of(model)
        """Those that the model is split over; `None` where it is whole."""
        config = model.config.get_text_config()
        self._drafter, self._refusal = drafter, None
        if drafter is None and config.model_type in FAMILIES:
            try:
                self._drafter = FAMILIES[config.model_type](model)
            except CheckpointError as error:
                # Plain decoding needs no drafter, so only whoever asks for it hears of this.
                self._refusal = error
        self._excluded = list(self._drafter.excluded_token_ids) if self._drafter else []

    @classmethod
    def of(cls, model: PreTrainedModel, options: ForwardConfig | None = None) -> ModelAdapter:
        """
        The adapter of a model whose forwards are run as `options` say.

        Raises:
            UnsupportedError, MissingDependencyError: the attention backend cannot be used with this model on its device.
        """
        options = ForwardConfig() if options is None else options
        device = device_of(model)
        work = Work(device, model.dtype, head_dims(model.config))
        backend = resolve_backend(options.attention_backend, work)
        adapter = cls(model, backend, forwards=forwards_of(model, backend, options, device))
        if adapter.ranks is not None and (options.compile or options.cuda_graphs):
            raise UnsupportedError(
                "compile and cuda_graphs cannot be honoured for a model that is split over ranks: whether these compile and capture in "
                "step was never tried. Leave them out."
            )
        return adapter

    @property
    def excluded_token_ids(self) -> list[int]:
        """Tokens that are never predicted, such as MASK."""
        return self._excluded

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """What tables measured with this model, its dtype, device, backend and way of running it carry."""
        ignored = ("transformers_version", "_name_or_path", "dtype", "architectures")
        config = {k: v for k, v in self.model.config.to_dict().items() if k not in ignored}
        digest = sha256(json.dumps(config, sort_keys=True, default=str).encode())
        weights = sorted(self.model.state_dict().items())
        for name, weight in weights:
            digest.update(f"{name}{tuple(weight.shape)}".encode())
            # Of a weight that is split over ranks each has other values, and they must come to the same fingerprint.
            if weight.device.type != "meta" and not is_dtensor(weight):
                # bf16 weights widened to float32 are the same model, so values are compared and not bytes.
                digest.update(weight.flatten()[:16].float().cpu().numpy().astype(np.float32).tobytes())
        return Fingerprint(
            model=digest.hexdigest()[:16],
            dtype=str(self.model.dtype).removeprefix("torch."),
            device=torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type,
            backend=self.forwards.name + (f"+tp{self.ranks.size}" if self.ranks is not None else ""),
            adapter=any("draft_adapter" in name for name, _ in weights),
        )

    @property
    def device(self) -> torch.device:
        return device_of(self.model)

    @property
    def drafter(self) -> Drafter:
        """The drafter; raises [`UnsupportedError`] for a model that has none, [`CheckpointError`] for one that lacks a part."""
        if self._refusal is not None:
            raise self._refusal
        if self._drafter is None:
            raise UnsupportedError(
                f"{type(self.model).__name__} (model_type={self.model.config.model_type!r}) has no drafter: it can only decode with "
                f"strategy='ar'. Families that draft: {', '.join(FAMILIES)}."
            )
        return self._drafter

    def causal(self, tokens: list[int], position: int, outputs: tuple[int, int | None] = (0, None)) -> Segment:
        """A segment of committed or drafted tokens, as in plain decoding."""
        return Segment(tokens, position, outputs=outputs)

    def block(self, tokens: Sequence[int | None], position: int, hypothesis: int = 0) -> Segment:
        """
        A segment that drafts a block.

        Args:
            tokens (`Sequence[int | None]`): the block's tokens that are known; `None` where one is to be drafted.
            position (`int`): absolute position of the block's first token.
            hypothesis (`int`): tokens of the verified segment that it supposes committed.

        Returns:
            `Segment`: its outputs are the block's second to last tokens, and the first one too where that is `None`.
        """
        drafter = self.drafter
        known_first = tokens[0] is not None
        assert known_first or not drafter.shifted, "shifted logits cannot predict a block's first token"
        filled = [drafter.filler_token_id if token is None else token for token in tokens]
        outputs = (0, len(tokens) - 1) if drafter.shifted else (1 if known_first else 0, None)
        adapter_from = 0 if drafter.adapter_on_seed or not known_first else 1
        return Segment(
            filled, position, bidirectional=True, adapter_from=adapter_from, hypothesis=hypothesis, outputs=outputs
        )

    def forward(
        self,
        rows: Sequence[Sequence[Segment]],
        kv: KVCache,
        best: int = 1,
        samplings: Sequence[Sampling | None] = (),
        entropies: bool = False,
    ) -> tuple[Plan, Predictions]:
        """
        One packed forward.

        Args:
            rows (sequence of sequences of `Segment`): the segments of every batch row of `kv`, the verified one first.
            kv (`KVCache`): read, and written behind each row's prefix; commit afterwards.
            best (`int`): how many of the likeliest tokens are wanted a row; 1 leaves the probabilities out.
            samplings (`Sequence[Sampling | None]`): each batch row's; none at all if empty.
            entropies (`bool`): whether those are wanted.

        Returns:
            `(Plan, Predictions)`: one device-to-host transfer in all.
        """
        begun = time.perf_counter()
        with nullcontext() if self.ranks is None else self.ranks.forward(rows, kv):
            plan, logits, seconds = self._run(rows, kv)
        predicted = [
            Predicted(sampling, plan.outputs[row][0][0], self._predicted_positions(rows[row]))
            for row, sampling in enumerate(samplings)
            if sampling is not None and rows[row]
        ]
        ranked = rank(logits, predicted, best, entropies, self._excluded)
        elapsed = time.perf_counter() - begun
        return plan, Predictions(
            ranked.best, ranked.probabilities, ranked.entropies, logits, ranked.noise, seconds=seconds, elapsed=elapsed
        )

    def follow(self, work: list[Any], kv_at: Callable[[Extents], KVCache]) -> Any:
        """
        Run the forwards of what rank 0 leads, until it ends: what the other ranks of a split model do.

        Args:
            work (`list`): what rank 0 must be about; see [`Ranks.leading`].
            kv_at (callable): the cache of a forward, by the [`KVCache.extents`] of rank 0's.

        Returns:
            The result that rank 0 gives.
        """
        assert self.ranks is not None, "there is nobody to follow"

        def forward(rows: list[list[Segment]], extents: Extents) -> None:
            self._run(rows, kv_at(extents))

        with installed(self.model):
            return self.ranks.follow(work, forward)

    def _run(self, rows: Sequence[Sequence[Segment]], kv: KVCache) -> tuple[Plan, Tensor, float]:
        """A forward's plan, its logits `float32[N, V]`, and the seconds that the model took."""
        plan = pack(rows, kv.lengths, self.device)
        run = self.forwards.prepare(plan, kv)
        start = time.perf_counter()
        logits = run()
        seconds = time.perf_counter() - start
        return plan, logits.float(), seconds

    def _predicted_positions(self, segments: Sequence[Segment]) -> list[int]:
        """The absolute positions that the output rows of a request's segments are about."""
        return [
            segment.position + i + (not segment.bidirectional or self.drafter.shifted)
            for segment in segments
            for i in range(*slice(*segment.outputs).indices(len(segment.tokens)))
        ]


def device_of(model: PreTrainedModel) -> torch.device:
    """Where a model takes its tokens."""
    embeddings = model.get_input_embeddings()
    # An offloaded module's weight is on no device until its hook brings it to the one it runs on.
    device = getattr(getattr(embeddings, "_hf_hook", None), "execution_device", None)
    return torch.device(device) if device is not None else embeddings.weight.device  # type: ignore[return-value]
