"""Whether strategies write plain decoding's text, whatever their blocks, batches and dtype, and where they part if not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ..config import RecGuideConfig
from ..metrics import DecodeMetrics
from .benchmark import OURS, check_counters, difference, label_of, sizes_of

PLAIN = "hf-generate"
"""transformers' own greedy `generate`, each prompt alone: what every output is compared with. In batches it is a contender itself, since
in half precision a batch changes plain decoding's text too."""

_PAD = 0
"""Fills batches; nothing looks at it, so any token will do."""


@dataclass(frozen=True)
class Variant:
    """A strategy, its block size (`None` where it chooses), and how many prompts it decodes at once."""

    strategy: str
    block_size: int | None
    batch_size: int

    @property
    def label(self) -> str:
        return label_of(self.strategy, self.block_size)


REFERENCE = Variant(PLAIN, 1, 1)


def variants(strategies: Sequence[str], block_sizes: Sequence[int], batch_sizes: Sequence[int]) -> list[Variant]:
    """
    Plain decoding, then every strategy at every block size that it can have, by batch size.

    Plain decoding of single prompts, the reference, comes first whether 1 is among the batch sizes or not.

    Raises:
        ConfigError: no such block size.
    """
    for size in block_sizes:
        RecGuideConfig(block_size=size)
    names = (PLAIN, *strategies)
    found = [
        Variant(name, size, batch) for batch in batch_sizes for name in names for size in sizes_of(name, block_sizes)
    ]
    return list(dict.fromkeys((REFERENCE, *found)))


@dataclass(frozen=True)
class Compared:
    """
    One output beside plain decoding's.

    Args:
        prompt (`int`): its number.
        new_tokens (`int`): of the output.
        identical (`bool`): token for token.
        agreed (`int`): tokens that are the likeliest when the whole output is read in one plain forward (teacher forcing).
        largest_gap (`float`): by how many logits the likeliest token there leads the output's own, at the most.
        divergence (`dict`, *optional*): `new_token`, the number of the first different one, and `top2_gap`, by how many logits the
            likeliest token leads the second there.
    """

    prompt: int
    new_tokens: int
    identical: bool
    agreed: int
    largest_gap: float
    divergence: dict[str, float] | None = None


@dataclass
class Run:
    """A variant in one dtype, with what it has come to."""

    dtype: str
    variant: Variant
    outputs: list[Compared] = field(default_factory=list)
    committed: int = 0
    forwards: int = 0

    @property
    def must_equal(self) -> bool:
        """In float32 every output of a strategy is plain decoding's; what plain decoding makes of a batch is not ours to promise."""
        return self.dtype == "float32" and self.variant.strategy != PLAIN

    @property
    def divergences(self) -> list[dict[str, float]]:
        return [{"prompt": one.prompt} | one.divergence for one in self.outputs if one.divergence is not None]

    def report(self) -> dict[str, Any]:
        """This run's entry of the JSON file."""
        identical = sum(one.identical for one in self.outputs)
        tokens = sum(one.new_tokens for one in self.outputs)
        return {
            "dtype": self.dtype,
            **asdict(self.variant),
            "prompts": len(self.outputs),
            "new_tokens": tokens,
            "identical": identical,
            "identical_rate": identical / len(self.outputs),
            "agreement": sum(one.agreed for one in self.outputs) / tokens,
            "largest_gap": max(one.largest_gap for one in self.outputs),
            "decode_tpf": self.committed / self.forwards if self.forwards else None,
            "divergences": self.divergences,
        }


def wrong(runs: Sequence[Run], largest_gap: float | None) -> list[str]:
    """
    What is not as it must be, in words.

    Args:
        runs (`Sequence[Run]`): all of them.
        largest_gap (`float`, *optional*):
            Of the top two logits where an output in half precision first parts from plain decoding; a larger one is no rounding.
    """
    found = []
    for run in runs:
        name = f"{run.variant.label} in {run.dtype}, {run.variant.batch_size} at once"
        if run.must_equal and run.divergences:
            found.append(
                f"{name}: {len(run.divergences)} of {len(run.outputs)} outputs differ, first {run.divergences[0]}"
            )
        elif largest_gap is not None and run.variant.strategy != PLAIN:
            far = [one for one in run.divergences if one["top2_gap"] > largest_gap]
            if far:
                found.append(f"{name}: {len(far)} outputs part at more than {largest_gap} logits, first {far[0]}")
    return found


class LosslessTest:
    """
    Decodes prompts in all ways and compares.

    Args:
        model ([`~transformers.PreTrainedModel`]): attached, so that it knows the strategies.
        prompts (`Sequence[list[int]]`): token ids.
        max_new_tokens (`int`): of each output.
        excluded (`Sequence[int]`): tokens that strategies never predict, such as MASK; plain decoding is told to suppress them.
    """

    def __init__(self, model: Any, prompts: Sequence[list[int]], max_new_tokens: int, excluded: Sequence[int]) -> None:
        self._model, self._prompts, self._max_new_tokens = model, prompts, max_new_tokens
        self._excluded = list(excluded)
        ends = model.generation_config.eos_token_id
        self._ends = set() if ends is None else {ends} if isinstance(ends, int) else set(ends)

    def parts(self, variant: Variant) -> list[tuple[int, ...]]:
        """The numbers of the prompts that are decoded together."""
        count = len(self._prompts)
        return [
            tuple(range(first, min(first + variant.batch_size, count))) for first in range(0, count, variant.batch_size)
        ]

    def decode(self, variant: Variant, numbers: Sequence[int]) -> tuple[list[list[int]], DecodeMetrics]:
        """
        Each prompt's new tokens, up to its end, and what decoding them has cost.

        Raises:
            LosslessError: the counters contradict each other or the outputs.
        """
        metrics = DecodeMetrics()
        options: dict[str, Any] = {"suppress_tokens": self._excluded or None}
        if variant.strategy in OURS:
            config = (
                {} if variant.block_size is None or variant.strategy == "ar" else {"block_size": variant.block_size}
            )
            options = {"generation_strategy": variant.strategy, "recguide_config": config, "recguide_hooks": [metrics]}
        length = max(len(self._prompts[i]) for i in numbers)
        short = [length - len(self._prompts[i]) for i in numbers]
        ids = torch.tensor([[_PAD] * pads + self._prompts[i] for pads, i in zip(short, numbers, strict=True)])
        mask = torch.tensor([[0] * pads + [1] * (length - pads) for pads in short])
        output = self._model.generate(
            ids.to(self._model.device),
            attention_mask=mask.to(self._model.device),
            max_new_tokens=self._max_new_tokens,
            do_sample=False,
            pad_token_id=_PAD,
            **options,
        )
        outputs = [self._up_to_end(row) for row in output[:, length:].tolist()]
        if variant.strategy in OURS:
            check_counters(variant.label, metrics, sum(map(len, outputs)))
        return outputs, metrics

    def compare(self, number: int, output: list[int], reference: list[int]) -> Compared:
        """An output of a prompt beside plain decoding's."""
        agreed, gap = self._teacher_forced(self._prompts[number], output)
        if output == reference:
            return Compared(number, len(output), True, agreed, gap)
        ids = torch.tensor([self._prompts[number]], device=self._model.device)
        return Compared(number, len(output), False, agreed, gap, difference(self._model, ids, output, reference))

    def _up_to_end(self, tokens: list[int]) -> list[int]:
        end = next((i for i, token in enumerate(tokens, start=1) if token in self._ends), len(tokens))
        return tokens[:end]

    def _teacher_forced(self, prompt: list[int], output: list[int]) -> tuple[int, float]:
        ids = torch.tensor([[*prompt, *output]], device=self._model.device)
        with torch.no_grad():
            logits = self._model(input_ids=ids[:, :-1], use_cache=False, logits_to_keep=len(output)).logits[0].float()
        logits[:, self._excluded] = float("-inf")
        gaps = logits.amax(-1) - logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
        return int((gaps == 0).sum()), float(gaps.max())
