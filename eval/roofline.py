"""What a fused round must read and compute, and the least time that takes: the tables of docs/kernels.md.

    python eval/roofline.py

Counted are the weights, read once a forward; the K/V of the prefixes, read once, and of the packed tokens, written; the logits, written
and read once by what makes statistics of them. Activations are not: what a layer hands to the next can stay in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

BYTES = 2
"""Of a number in bfloat16."""


@dataclass(frozen=True)
class Network:
    """Sizes of a decoder: pre-norm, grouped heads, a gated feed-forward, an untied head; `rank` is the draft adapter's on `o_proj`."""

    name: str
    hidden: int
    feed_forward: int
    layers: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    vocabulary: int = 131_072
    rank: int = 128

    @property
    def layer_weights(self) -> int:
        """Numbers in the matrices of all layers, the draft adapter's included."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        adapter = self.rank * (self.hidden + self.heads * self.head_dim)
        return self.layers * (attention + 3 * self.hidden * self.feed_forward + adapter)

    @property
    def head_weights(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def kv_bytes(self) -> int:
        """Of one token's keys and values in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * BYTES


@dataclass(frozen=True)
class Chip:
    """A vendor's figures: memory bandwidth in bytes a second, dense bfloat16 operations a second."""

    name: str
    bandwidth: float
    operations: float


NETWORKS = (Network("NLD-3B", 3072, 9216, 26), Network("NLD-8B", 4096, 14336, 34), Network("NLD-14B", 5120, 16384, 40))
H200 = Chip("H200", 4.8e12, 989.5e12)
B200 = Chip("B200", 8.0e12, 2.25e15)
CHIPS = (H200, B200)


@dataclass(frozen=True)
class Cost:
    """Bytes moved and operations done."""

    bytes: int
    operations: int

    def ms(self, chip: Chip) -> float:
        """The floor: the longer of moving the bytes and doing the operations, each at the vendor's rate."""
        return 1000 * max(self.bytes / chip.bandwidth, self.operations / chip.operations)

    def compute_bound(self, chip: Chip) -> bool:
        return self.operations / chip.operations > self.bytes / chip.bandwidth


def attention_cost(network: Network, requests: int, tokens: int, context: int, seen: int) -> Cost:
    """
    Of the attention of one layer, the projections left out.

    Args:
        network (`Network`): its heads.
        requests (`int`): C.
        tokens (`int`): query tokens of a request.
        context (`int`): cached tokens of a request, which every query token sees and which are read once.
        seen (`int`): pairs of query and packed token of a request of which the first sees the second.
    """
    kv = 2 * (context + tokens) * network.kv_heads
    rows = (kv + 2 * tokens * network.heads) * network.head_dim
    return Cost(requests * rows * BYTES, requests * 4 * network.heads * network.head_dim * (tokens * context + seen))


def forward_cost(network: Network, requests: int, tokens: int, context: int, seen: int) -> Cost:
    """Of one packed forward with the draft adapter and the logits of all its tokens; arguments as in [`attention_cost`]."""
    packed = requests * tokens
    weights = network.layer_weights + network.head_weights
    logits = 2 * packed * network.vocabulary * BYTES
    kv = (requests * context + packed) * network.kv_bytes
    attention = attention_cost(network, requests, tokens, context, seen).operations
    return Cost(weights * BYTES + logits + kv, 2 * weights * packed + network.layers * attention)


def causal_pairs(tokens: int) -> int:
    """`seen` of one causal segment."""
    return tokens * (tokens + 1) // 2


def fused_pairs(block: int, depths: tuple[int, ...]) -> int:
    """`seen` of a verified block with a branch at each of the depths: a branch sees itself and what it takes as given."""
    return causal_pairs(block) + sum(block * (block + depth) for depth in depths)


def fused_round(network: Network, requests: int, context: int, block: int = 16) -> Cost:
    """One forward: the block is verified beside two corrections and a continuation, each as long as the block."""
    depths = (block // 4, block // 2, block)
    return forward_cost(network, requests, 4 * block, context, fused_pairs(block, depths))


def two_forward_round(network: Network, requests: int, context: int, block: int = 16) -> tuple[Cost, Cost]:
    """A draft forward, bidirectional, and a verification, causal."""
    draft = forward_cost(network, requests, block, context, block * block)
    return draft, forward_cost(network, requests, block, context, causal_pairs(block))


def turning_point(network: Network, chip: Chip, context: int, tokens: int | None = None) -> int:
    """
    The fewest query tokens of a forward that the arithmetic takes longer than the memory.

    Args:
        network (`Network`), chip (`Chip`): what runs where.
        context (`int`): cached tokens of each request.
        tokens (`int`, *optional*): query tokens of a request, of which there are as many as it takes; `None`: one request has them all.

    Returns:
        `int`: in all requests together; 0 where no number is enough, because the prefixes take longer to read than to work on.
    """

    def bound(count: int) -> bool:
        own = count if tokens is None else tokens
        requests = 1 if tokens is None else count
        return forward_cost(network, requests, own, context, causal_pairs(own)).compute_bound(chip)

    most = 1 << 20
    if not bound(most):
        return 0
    low, high = 0, most  # Not bound at low, bound at high.
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if bound(middle) else (middle, high)
    return high if tokens is None else high * tokens


def round_lines() -> Iterator[str]:
    """The table of rounds."""
    yield "| model | C | context | fused: GB | TFLOP | H200, ms | B200, ms | draft + verify: GB | TFLOP | H200, ms | B200, ms |"
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    for network in NETWORKS:
        for requests in (1, 8, 64):
            for context in (1024, 8192):
                cells = [network.name, str(requests), str(context)]
                for forwards in (
                    (fused_round(network, requests, context),),
                    two_forward_round(network, requests, context),
                ):
                    cells.append(f"{sum(cost.bytes for cost in forwards) / 1e9:.1f}")
                    cells.append(f"{sum(cost.operations for cost in forwards) / 1e12:.2f}")
                    cells += [_floor(forwards, chip) for chip in CHIPS]
                yield f"| {' | '.join(cells)} |"


def _floor(forwards: tuple[Cost, ...], chip: Chip) -> str:
    """Milliseconds; marked where all of the forwards are compute bound."""
    ms = sum(cost.ms(chip) for cost in forwards)
    return f"{ms:.2f}{' *' if all(cost.compute_bound(chip) for cost in forwards) else ''}"


def turning_lines() -> Iterator[str]:
    """The table of turning points."""
    yield "| model | context | one request: H200 | B200 | requests of 16 tokens: H200 | B200 |"
    yield "|---|---|---|---|---|---|"
    for network in NETWORKS:
        for context in (0, 1024, 8192):
            points = [turning_point(network, chip, context, tokens) for tokens in (None, 16) for chip in CHIPS]
            yield f"| {network.name} | {context} | {' | '.join(str(n) if n else 'never' for n in points)} |"


def weight_lines() -> Iterator[str]:
    """The table of weights."""
    yield "| model | weights read, GB | K/V of a token, KB |"
    yield "|---|---|---|"
    for network in NETWORKS:
        weights = (network.layer_weights + network.head_weights) * BYTES
        yield f"| {network.name} | {weights / 1e9:.2f} | {network.kv_bytes / 1e3:.1f} |"


def partial_bytes(network: Network, tokens: int, context: int, split: int, rows: int = 64) -> int:
    """
    Written and read again by one layer's attention of one request: what the ranges of a split prefix leave to be merged.

    Args:
        network (`Network`): its heads.
        tokens, context (`int`): query and cached tokens.
        split (`int`): cached tokens of a range.
        rows (`int`, defaults to 64): height of a tile, in query tokens times the query heads of a key/value head.
    """
    group = network.heads // network.kv_heads
    ranges, tiles = -(-context // split), -(-tokens // (rows // group))
    return 0 if ranges == 1 else 2 * ranges * tiles * network.kv_heads * rows * (network.head_dim + 1) * 4


def partial_lines() -> Iterator[str]:
    """The table of what splitting costs."""
    network, context = NETWORKS[1], 8192
    yield "| split | 1 query token, MB | 16, MB | 64, MB | share of the bandwidth left at most: 1 | 16 | 64 |"
    yield "|---|---|---|---|---|---|---|"
    for split in (256, 512, 1024, 2048, 4096, context):
        sizes, shares = [], []
        for tokens, rows in ((1, 16), (16, 64), (64, 64)):
            own = attention_cost(network, 1, tokens, context, 0).bytes
            partial = partial_bytes(network, tokens, context, split, rows)
            sizes.append(f"{partial / 1e6:.1f}")
            shares.append(f"{own / (own + partial):.2f}")
        yield f"| {split if split < context else 'none'} | {' | '.join(sizes + shares)} |"


if __name__ == "__main__":
    for lines in (weight_lines(), round_lines(), turning_lines(), partial_lines()):
        print(*lines, "", sep="\n")
