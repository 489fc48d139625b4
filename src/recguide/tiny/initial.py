"""Initial weights of `recguide-tiny`: small noise, a head that starts as the embeddings, and heads wired to copy.

A network this small spends millions of tokens before it finds out how to continue a text that it has seen before. The
circuit is known (Olsson et al., 2022, In-context Learning and Induction Heads): heads of one layer note the previous
token, heads of the next look for the place whose previous token is the present one, and repeat what stands there. Here
both are written down at the start; training then moves every weight as it likes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

EMBEDDING_STD = 1 / 16
_SHARED = 0.5
_PREVIOUS_PAIRS = slice(0, 6)
"""Rotary pairs that turn fast enough to tell one position from the next."""
_MATCH_PAIRS = slice(8, None)
"""Rotary pairs that hardly turn over a few hundred positions, so that a match counts the same at any distance."""


@torch.no_grad()
def initialize(model: Any) -> None:
    """
    Set embeddings, head and the attention of the first two layers of `model`, a `NemotronLabsDiffusionModel`, in place.

    All embeddings get a direction in common, from which the first layer makes queries and keys that depend on position
    alone. The head stays a parameter of its own.
    """
    network, head = model.model, model.lm_head
    config = network.config
    width, size, groups = config.hidden_size, config.head_dim, config.num_key_value_heads
    shared = nn.functional.normalize(torch.randn(width), dim=0)
    embeddings = network.embed_tokens.weight
    embeddings.normal_(0, EMBEDDING_STD)
    embeddings += torch.outer(_SHARED - embeddings @ shared, shared)
    head.weight.copy_(embeddings)
    angles = network.rotary_emb.inv_freq
    first, second = (network.layers[i].self_attn for i in (0, 1))

    token, note, repeat = (_orthonormal(groups * size, width) for _ in range(3))
    half = size // 2
    for group in range(groups // 2):
        key, query = torch.zeros(2, half), torch.zeros(2, half)
        key[0, _PREVIOUS_PAIRS] = 2.0
        query[0, _PREVIOUS_PAIRS] = angles[_PREVIOUS_PAIRS].cos()
        query[1, _PREVIOUS_PAIRS] = -angles[_PREVIOUS_PAIRS].sin()
        rows = slice(group * size, (group + 1) * size)
        _wire(first, group, query.flatten()[:, None] * shared, key.flatten()[:, None] * shared, token[rows], note[rows])
    matching = torch.zeros(2, half, dtype=torch.bool)
    matching[:, _MATCH_PAIRS] = True
    matched = matching.flatten().nonzero()[:, 0]
    for group in range(groups):
        part = slice(group * len(matched), (group + 1) * len(matched))
        key, query = torch.zeros(size, width), torch.zeros(size, width)
        key[matched], query[matched] = 2.5 * note[part], 2.5 * token[part]
        rows = slice(group * size, (group + 1) * size)
        _wire(second, group, query, key, repeat[rows], repeat[rows])


def _orthonormal(rows: int, columns: int) -> Tensor:
    basis: Tensor = torch.linalg.qr(torch.randn(columns, columns))[0]
    return basis[:rows]


def _wire(attention: Any, group: int, query: Tensor, key: Tensor, read: Tensor, write: Tensor) -> None:
    """Give key/value head `group` and its query heads `[head_dim, width]` weights; they read by `read` and write by `write`."""
    size = len(query)
    rows = slice(group * size, (group + 1) * size)
    attention.k_proj.weight[rows] = key
    attention.v_proj.weight[rows] = read
    shares = attention.num_key_value_groups
    for head in range(group * shares, (group + 1) * shares):
        rows = slice(head * size, (head + 1) * size)
        attention.q_proj.weight[rows] = query
        attention.o_proj.weight[:, rows] = 2 * EMBEDDING_STD / shares * write.T
