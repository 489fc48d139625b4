"""The likeliest tokens of each row, the probabilities of two, and the entropy, on the host in one transfer.

In plain torch, or by the kernel where it can run. Both take the highest of the same float32 scores, the lowest token among equals, so
without noise they give the same tokens to the bit. With noise the kernel adds its own, which may differ from torch's in the last bit:
a request is decided by one of the two from its first token to its last, whatever its strategy. Probabilities and entropies may be rounded
otherwise; they only steer drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .kernel_support import interpreting, triton_problem
from .sampling import Predicted, processed_scores, row_noise

_NEVER = -1e30
"""A logit of no probability that can still be multiplied by it."""


@dataclass(frozen=True)
class Ranked:
    """
    What is known of N rows.

    Args:
        best (`list[list[int]]`): of each row the tokens of the highest scores, in order.
        probabilities (`list[tuple[float, float]]`): of the first two, by the softmax of the scores; none unless two are wanted.
        entropies (`list[float]`): of the softmax of the logits as they are, in nats; none unless wanted.
        noise (`torch.Tensor`, *optional*): `float32[N, V]`, for rules that choose tokens by position.
    """

    best: list[list[int]]
    probabilities: list[tuple[float, float]]
    entropies: list[float]
    noise: Tensor | None


def rank(logits: Tensor, predicted: Sequence[Predicted], best: int, entropies: bool, excluded: Sequence[int]) -> Ranked:
    """
    Rank the tokens of each row by its scores: its logits, or what its rules and its noise make of them.

    Args:
        logits (`float32[N, V]`): as before after it.
        predicted (`Sequence[Predicted]`): the rows that have rules.
        best (`int`): how many tokens are wanted; 1 leaves the probabilities out.
        entropies (`bool`): whether those are wanted.
        excluded (`Sequence[int]`): tokens that take no part in anything.
    """
    scores = processed_scores(logits, predicted, excluded)
    device, left = logits.device, logits.shape[1] - len(set(excluded))
    # On a CPU the question alone, whether Triton is installed, would take as long as the answer.
    if (device.type != "cpu" or interpreting()) and triton_problem(device) is None and left >= max(best, 2):
        return _by_kernel(logits, scores, predicted, best, entropies, excluded)
    return _by_torch(logits, scores, predicted, best, entropies, excluded)


def _by_kernel(
    logits: Tensor,
    scores: Tensor,
    predicted: Sequence[Predicted],
    best: int,
    entropies: bool,
    excluded: Sequence[int],
) -> Ranked:
    from recguide_kernels.logit_stats import NO_NOISE, logit_stats, noise_keys

    seeds, positions = [0] * logits.shape[0], [NO_NOISE] * logits.shape[0]
    for rows in predicted:
        if rows.sampling.seed is not None:
            seeds[rows.start : rows.end] = [rows.sampling.seed] * len(rows.positions)
            positions[rows.start : rows.end] = rows.positions
    keys = noise_keys(seeds, positions, logits.device) if any(p != NO_NOISE for p in positions) else None
    # Triton launches on the current device.
    with torch.cuda.device_of(logits):
        top = logit_stats(scores, excluded, keys, max(best, 2))
        own = top if scores is logits or not entropies else logit_stats(logits, excluded)
    # One table for one transfer; a token id is exact in float64.
    columns = [top.ids[:, :best].double(), top.probabilities.double(), own.entropies[:, None].double()]
    lines = torch.cat(columns, dim=1).tolist()
    return Ranked(
        [[int(token) for token in line[:best]] for line in lines],
        [(line[best], line[best + 1]) for line in lines] if best > 1 else [],
        [line[-1] for line in lines] if entropies else [],
        row_noise(logits, [rows for rows in predicted if rows.sampling.by_position]),
    )


def _by_torch(
    logits: Tensor,
    scores: Tensor,
    predicted: Sequence[Predicted],
    best: int,
    entropies: bool,
    excluded: Sequence[int],
) -> Ranked:
    noise = row_noise(logits, predicted)
    if noise is not None:
        scores = scores + noise
    held = [logits[:, token].clone() for token in excluded]
    for token in excluded:
        logits[:, token] = scores[:, token] = _NEVER
    # Among equal scores argmax takes the first, as plain generate does; topk takes any.
    first = scores.argmax(-1, keepdim=True)
    # One table for one transfer; a token id is exact in float32.
    columns = [first.float()]
    if best > 1 or entropies:
        own = logits.softmax(-1)
        shared = own if scores is logits else scores.softmax(-1)
    if best > 1:
        ids = scores.topk(best, dim=-1).indices
        columns += [ids.float(), shared.gather(1, ids[:, :2])]
    if entropies:
        # The entropy is log Z - E[logit], and log Z = logit - log p at any token; the likeliest has no p of 0.
        likeliest = first if scores is logits else logits.argmax(-1, keepdim=True)
        log_z = logits.gather(1, likeliest) - own.gather(1, likeliest).log()
        columns.append(log_z - torch.linalg.vecdot(own, logits)[:, None])
    lines = torch.cat(columns, dim=1).tolist()
    for token, logit in zip(excluded, held, strict=True):
        # Whoever chooses tokens by other rules gets the model's own logits.
        logits[:, token] = logit
    return Ranked(
        [[int(line[0])] if best == 1 else _ranked(line, best) for line in lines],
        [(line[best + 1], line[best + 2]) for line in lines] if best > 1 else [],
        [line[-1] for line in lines] if entropies else [],
        noise,
    )


def _ranked(line: list[float], best: int) -> list[int]:
    """The first of equals, and the others of the top."""
    if line[1] == line[0]:
        return [int(token) for token in line[1 : best + 1]]
    return [int(line[0]), *[int(token) for token in line[1 : best + 1] if token != line[0]][: best - 1]]
