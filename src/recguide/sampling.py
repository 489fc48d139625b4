"""Exact sampling by shared noise: tokens from logits, so that the text depends on the prompt and the seed alone.

The token at position n is the argmax of the processed scores plus Gumbel noise, which draws it with the softmax
probabilities of those scores (the Gumbel-max trick). The noise is a function of (seed, n) and nothing else. A draft gets
the same noise, so it guesses what plain sampling would draw, and verification stays a comparison of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)

Words = tuple[Tensor, Tensor, Tensor, Tensor]
Processor = Callable[[Tensor, Tensor], Tensor]
"""`(ids [N, S], scores [N, V]) -> scores [N, V]`, as transformers' logits processors."""


@dataclass(frozen=True)
class Sampling:
    """
    How a request's logits become the scores of which the highest wins.

    Args:
        seed (`int`, *optional*): of its noise, 64 bits; `None` is greedy.
        processors (`tuple` of logits processors): those that do not look at the prefix, so that drafts can have them too.
        by_position (`bool`): its tokens are chosen one by one on their true prefixes, by rules that need the noise itself.
    """

    seed: int | None = None
    processors: tuple[Processor, ...] = ()
    by_position: bool = False


@dataclass(frozen=True)
class Predicted:
    """The output rows `[start, end)` of one request: its rules, and the absolute position that each row predicts."""

    sampling: Sampling
    start: int
    positions: list[int]

    @property
    def end(self) -> int:
        return self.start + len(self.positions)


def processed_scores(logits: Tensor, predicted: Sequence[Predicted], excluded: Sequence[int] = ()) -> Tensor:
    """
    What the rows' processors make of their logits.

    Args:
        logits (`float32[N, V]`): left as they are.
        predicted (`Sequence[Predicted]`): the rows that have rules; the others keep their logits.
        excluded (`Sequence[int]`): tokens that the processors must not count on, such as MASK.

    Returns:
        `float32[N, V]`; `logits` itself where no row has a processor.
    """
    if not any(rows.sampling.processors for rows in predicted):
        return logits
    scores = logits.clone()
    for rows in predicted:
        of_request = scores[rows.start : rows.end]
        for token in excluded:
            of_request[:, token] = float("-inf")
        no_prefix = torch.empty((len(rows.positions), 0), dtype=torch.long, device=logits.device)
        for processor in rows.sampling.processors:
            of_request = processor(no_prefix, of_request)
        scores[rows.start : rows.end] = of_request
    return scores


def row_noise(logits: Tensor, predicted: Sequence[Predicted]) -> Tensor | None:
    """The noise of all rows, `float32[N, V]` as the logits, zero for greedy ones; None if all are. Lives for one round."""
    noisy = [(rows, rows.sampling.seed) for rows in predicted if rows.sampling.seed is not None]
    if not noisy:
        return None
    seeds = [seed for rows, seed in noisy for _ in rows.positions]
    positions = [position for rows, _ in noisy for position in rows.positions]
    drawn = gumbel_noise(seeds, positions, logits.shape[1], logits.device)
    if len(seeds) == logits.shape[0]:
        return drawn
    index = [i for rows, _ in noisy for i in range(rows.start, rows.end)]
    return torch.zeros_like(logits).index_copy_(0, torch.tensor(index, device=logits.device), drawn)


def gumbel_noise(seeds: Sequence[int], positions: Sequence[int], vocab_size: int, device: torch.device) -> Tensor:
    """
    Standard Gumbel noise of each (seed, position) over the vocabulary.

    Token v has word v mod 4 of Philox's block with counter (v // 4, position, 0, 0) and the seed as key. The word x is a
    uniform variate `(x + 1/2) / 2^32`, the noise `-log(-log1p(-uniform))`: the tail that can win keeps its full resolution.

    Args:
        seeds, positions (`Sequence[int]`): N each; 64-bit seeds, positions below 2^32.
        vocab_size (`int`): V.

    Returns:
        `float32[N, V]`, finite.
    """
    key = torch.tensor([(seed & _WORD, (seed >> 32) & _WORD) for seed in seeds], device=device)[:, :, None]
    row = torch.tensor(positions, device=device)[:, None]
    column = torch.arange((vocab_size + 3) // 4, device=device)[None]
    zero = torch.zeros_like(row)
    words = philox4x32((column, row, zero, zero), (key[:, 0], key[:, 1]))
    uniform = (torch.stack(words, dim=-1).flatten(1)[:, :vocab_size].float() + 0.5).mul_(2.0**-32)
    # Largest float below 1: the word 2^32 - 1 must not become an infinite exponential.
    return uniform.clamp_(max=1 - 2.0**-24).neg_().log1p_().neg_().log_().neg_()


def philox4x32(counter: Words, key: tuple[Tensor, Tensor], rounds: int = 10) -> Words:
    """
    The Philox 4x32 counter-based generator (Salmon et al., 2011, Parallel Random Numbers: As Easy as 1, 2, 3).

    Args:
        counter, key (`int64` tensors that broadcast): four and two words of 32 bits.
        rounds (`int`, defaults to 10).

    Returns:
        Four `int64` tensors of words from 0 to 2^32 - 1.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        # The products take 64 bits; where they wrap into the sign, the mask brings their upper word back.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = ((product1 >> 32) & _WORD) ^ c1 ^ k0, ((product0 >> 32) & _WORD) ^ c3 ^ k1
        c1, c3 = product1 & _WORD, product0 & _WORD
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def row_seed(seed: int, row: int) -> int:
    """The 64-bit seed of a batch's row: the given seed for the first, words of its own Philox stream for the others."""
    if row == 0:
        return seed
    counter = [torch.tensor(word) for word in (row, 0, 0, 1)]
    key = (torch.tensor(seed & _WORD), torch.tensor((seed >> 32) & _WORD))
    low, high, _, _ = philox4x32((counter[0], counter[1], counter[2], counter[3]), key)
    return int(low) | int(high) << 32
