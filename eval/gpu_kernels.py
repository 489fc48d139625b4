"""The kernels by themselves on a device: against their references, and against the clock. Needs torch and Triton, nothing of recguide."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
from gpu_clock import Clock, Row
from roofline import NETWORKS, Network, attention_cost
from torch import Tensor
from torch.nn import functional as F

from recguide_kernels import reference
from recguide_kernels.kv_commit import commit_work, kv_commit
from recguide_kernels.logit_stats import NO_NOISE, logit_stats, noise_keys
from recguide_kernels.packed import PackedRound
from recguide_kernels.segment_attention import segment_attention
from recguide_kernels.work import DeviceWork, plan, tile_rows

CAUSAL, BOTH = False, True
Shape = tuple[int, bool, int]
"""Length of a segment, whether it is bidirectional, and how much of the verified one it sees besides."""
BLOCK = 16
FUSED: list[Shape] = [(BLOCK, CAUSAL, 0), (BLOCK, BOTH, 4), (BLOCK, BOTH, 8), (BLOCK, BOTH, BLOCK)]
"""A verified block with two corrections and a continuation: the shape that docs/kernels.md counts."""
ROUNDS: dict[str, list[Shape]] = {"fused": FUSED, "verify": FUSED[:1], "single": [(1, CAUSAL, 0)]}
PAGE = 16
SPLIT = 2048
"""That of recguide's backend `triton`."""
NLD_8B = NETWORKS[1]
TOY = Network("toy", 32, 48, 1, heads=2, kv_heads=1, head_dim=16, vocabulary=5000, rank=4)


def network(clock: Clock) -> Network:
    """The sizes that are measured."""
    return TOY if clock.dry_run else NLD_8B


@dataclass(frozen=True)
class Case:
    """The tensors of one attention, of `query [H, T, D]`, `keys`, `values [G, T, D]` and caches `[N, G, D]`."""

    query: Tensor
    keys: Tensor
    values: Tensor
    key_cache: Tensor
    value_cache: Tensor
    packed: PackedRound

    @property
    def scaling(self) -> float:
        return float(self.query.shape[-1] ** -0.5)

    @property
    def group(self) -> int:
        return self.query.shape[0] // self.keys.shape[0]

    @property
    def seen(self) -> int:
        """Pairs of query and packed token of which the first sees the second."""
        a0, a1, b0, b1 = self.packed.visible.unbind(1)
        return int((a1 - a0 + b1 - b0).sum())

    def rows(self) -> int:
        starts = self.packed.starts
        return tile_rows(max(b - a for a, b in pairwise(starts)), self.group, self.query.dtype)

    def work(self, split: int | None, rows: int | None = None) -> DeviceWork:
        height = self.rows() if rows is None else rows
        planned = plan(self.packed.starts, self.packed.prefix, self.group, height, split)
        return planned.to(self.query.device)

    def tensors(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        named = (self.query, self.keys, self.values, self.key_cache, self.value_cache)
        return [tensor if dtype is None else tensor.to(dtype) for tensor in named]

    def run(self, work: DeviceWork) -> Tensor:
        return segment_attention(*self.tensors(), self.packed, self.scaling, work)


def intervals(rows: Sequence[Sequence[Shape]]) -> tuple[list[int], list[tuple[int, int, int, int]]]:
    """`starts` and the rows of `visible` of requests with the given segments."""
    starts, visible = [0], []
    for shapes in rows:
        first = start = starts[-1]
        for length, both, seen in shapes:
            besides = (first, first + seen) if seen else (0, 0)
            visible += [(start, start + length if both else i + 1, *besides) for i in range(start, start + length)]
            start += length
        starts.append(start)
    return starts, visible


def make(
    requests: Sequence[tuple[int, Sequence[Shape]]],
    device: torch.device,
    *,
    heads: int | None = None,
    kv_heads: int = 2,
    size: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    page_size: int = PAGE,
    first_page: int = 0,
    seed: int = 0,
) -> Case:
    """
    Requests `(prefix, segments)` with pages in random order; all that is not a prefix is NaN in the caches.

    Args:
        heads (`int`, *optional*): query heads; four for each key/value head by default.
        first_page (`int`): pages before it take memory and are nobody's.
    """
    heads = 4 * kv_heads if heads is None else heads
    generator = torch.Generator(device).manual_seed(seed)
    starts, visible = intervals([shapes for _, shapes in requests])
    prefix = [cached for cached, _ in requests]
    needed = [-(-cached // page_size) for cached in prefix]
    pages = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(seed)) + first_page
    tables = torch.zeros(len(prefix), max(needed) + 1, dtype=torch.int32)
    filled = torch.zeros(sum(needed), page_size, dtype=torch.bool)
    for row, own in enumerate(pages.split(needed)):
        tables[row, : needed[row]] = own
        filled[own - first_page] = (torch.arange(needed[row] * page_size) < prefix[row]).view(-1, page_size)
    caches = []
    for _ in range(2):
        cache = torch.empty(((first_page + sum(needed)) * page_size + 1, kv_heads, size), dtype=dtype, device=device)
        own_part = cache[first_page * page_size :]
        own_part.normal_(generator=generator)
        own_part[:-1][~filled.flatten().to(device)] = float("nan")
        own_part[-1] = float("nan")
        caches.append(cache)
    tokens = starts[-1]
    query = torch.empty((heads, tokens, size), dtype=dtype, device=device).normal_(generator=generator)
    keys, values = torch.empty((2, kv_heads, tokens, size), dtype=dtype, device=device).normal_(generator=generator)
    packed = PackedRound(
        tuple(starts),
        tuple(prefix),
        torch.tensor(visible, device=device).view(-1, 4),
        tables.to(device),
        page_size,
    )
    return Case(query, keys, values, *caches, packed)


def gathered(case: Case, repeat: int = 1) -> tuple[Tensor, Tensor]:
    """Keys and values `[R, G * repeat, K, D]` of requests with equal prefixes: those of the pages, then the packed ones."""
    packed, tokens = case.packed, case.packed.starts[1]
    place = torch.arange(packed.prefix[0], device=case.query.device)
    slots = packed.tables[:, place // packed.page_size].long() * packed.page_size + place % packed.page_size
    found = []
    for cache, new in ((case.key_cache, case.keys), (case.value_cache, case.values)):
        own = new.unflatten(1, (-1, tokens)).transpose(0, 1)
        old = cache.index_select(0, slots.flatten()).unflatten(0, slots.shape).transpose(1, 2)
        found.append(torch.cat((old, own), dim=2).repeat_interleave(repeat, dim=1))
    return found[0], found[1]


def masks(case: Case) -> Tensor:
    """Of requests with equal shapes, additive `[R, 1, Q, K]`."""
    packed = case.packed
    seen = [reference.dense_mask(packed, request) for request in range(packed.requests)]
    mask = torch.stack(seen)[:, None]
    return mask.new_zeros(mask.shape, dtype=case.query.dtype).masked_fill_(~mask, float("-inf"))


def padded_query(case: Case) -> Tensor:
    """`[R, H, Q, D]` of requests with equal shapes."""
    return case.query.unflatten(1, (-1, case.packed.starts[1])).transpose(0, 1)


def torch_error(case: Case, expected: Tensor) -> float:
    """The largest error that torch's own attention makes in the case's dtype; `expected` is `[T, H, D]`."""
    packed, worst = case.packed, 0.0
    for request, prefix in enumerate(packed.prefix):
        own = slice(packed.starts[request], packed.starts[request + 1])
        place = torch.arange(prefix, device=case.query.device)
        pages = packed.tables[request, place // packed.page_size].long()
        slots = pages * packed.page_size + place % packed.page_size
        keys, values = (
            torch.cat((cache[slots].transpose(0, 1), new[:, own]), dim=1).repeat_interleave(case.group, dim=0)[None]
            for cache, new in ((case.key_cache, case.keys), (case.value_cache, case.values))
        )
        mask = reference.dense_mask(packed, request)
        out = F.scaled_dot_product_attention(case.query[None, :, own], keys, values, mask, scale=case.scaling)
        worst = max(worst, float((out[0].transpose(0, 1).double() - expected[own]).abs().max()))
    return worst


def attention_cases(clock: Clock) -> Iterator[tuple[str, Case, int | None]]:
    """Names, inputs, and the split; those most worth knowing first. A dry run has a few of each kind."""
    dry = clock.dry_run
    # The interpreter cuts bfloat16 off where devices round.
    half = torch.float16 if dry else torch.bfloat16
    kv_heads, long = (1, 70) if dry else (2, 4097)
    case = partial(make, device=clock.device, kv_heads=kv_heads)
    for dtype in (half, torch.float32) if dry else (half, torch.float32, torch.float16):
        for split in (64,) if dry else (SPLIT, None):
            yield f"{dtype}, prefix {long}, split {split}", case([(long, FUSED)], dtype=dtype), split
    several = [(33, [(1, CAUSAL, 0)]), (0, FUSED[:2]), (64, FUSED[:1]), (long, FUSED)]
    for dtype in (half,) if dry else (half, torch.float32):
        yield f"{dtype}, several requests", case(several[: 2 if dry else 4], dtype=dtype), 64
    for prefix in (0,) if dry else (0, 1, 63, 64, 65):
        yield f"prefix {prefix}", case([(prefix, FUSED[:2])], dtype=half), 64
    for shape in ("single",) if dry else ("verify", "single"):
        yield f"{shape} alone", case([(70, ROUNDS[shape])] * 2, dtype=half), 64
    short = [(20, FUSED[:2])]
    for size in (80,) if dry else (64, 80, 96, 256):
        yield f"head size {size}", case(short, size=size, dtype=half), 64
    for group in (3,) if dry else (1, 3, 5, 32):
        yield f"group {group}", case(short, heads=group * kv_heads, size=64, dtype=half), 64
    if not dry:
        yield "long bidirectional segments", case([(5, [(70, CAUSAL, 0), (130, BOTH, 20)])], dtype=half), 64


def attention_correct(clock: Clock) -> Iterator[Row]:
    for name, case, split in attention_cases(clock):
        out = case.run(case.work(split)).double()
        expected = reference.segment_attention(*case.tensors(torch.float64), case.packed, case.scaling)
        error = float((out - expected).abs().max())
        allowed = 1e-5 if case.query.dtype == torch.float32 else 2 * torch_error(case, expected)
        yield _verdict(f"segment_attention: {name}", error, allowed)


def equal_bits(clock: Clock) -> Iterator[Row]:
    """Requests alone, and in another order, give the bits that they give together."""
    shapes = [(40, FUSED), (0, FUSED[:1]), (600, FUSED[:2])]
    together = make(shapes[: 2 if clock.dry_run else 3], clock.device)
    packed = together.packed
    out = together.run(together.work(16, rows=64))
    differing = 0
    for order in ([1, 0], [1]) if clock.dry_run else ([2, 0, 1], [1], [0]):
        _, visible = intervals([shapes[request][1] for request in order])
        tokens, starts = [], [0]
        for request in order:
            tokens += range(packed.starts[request], packed.starts[request + 1])
            starts.append(len(tokens))
        moved = PackedRound(
            tuple(starts),
            tuple(packed.prefix[request] for request in order),
            torch.tensor(visible, device=clock.device),
            packed.tables[order],
            packed.page_size,
        )
        query, keys, values = (tensor[:, tokens] for tensor in (together.query, together.keys, together.values))
        case = replace(together, query=query, keys=keys, values=values, packed=moved)
        differing += int((case.run(case.work(16, rows=64)) != out[tokens]).sum())
    yield _verdict("segment_attention: bits that depend on neighbours or order", differing, 0)


def replayed_plan(clock: Clock) -> Iterator[Row]:
    """A captured launch follows the plan that is copied into its tensors."""
    device = clock.device
    first = make([(40, [(5, CAUSAL, 0)]), (0, [(5, BOTH, 0)])], device)
    second = make([(0, [(3, CAUSAL, 0), (4, BOTH, 2)]), (17, [(3, CAUSAL, 0)])], device, seed=1)
    longest = max(first.key_cache.shape[0], second.key_cache.shape[0])
    widest = max(first.packed.tables.shape[1], second.packed.tables.shape[1])
    inputs = [_wide(case, longest, widest) for case in (first, second)]
    plans = [plan(case.packed.starts, case.packed.prefix, case.group, 64, 20) for case in inputs]
    work = replace(plans[0].to(device, items=6, merges=4), partials=8)
    held = replace(
        inputs[0],
        packed=replace(
            inputs[0].packed, visible=inputs[0].packed.visible.clone(), tables=inputs[0].packed.tables.clone()
        ),
    )
    held = Case(*(tensor.clone() for tensor in held.tensors()), held.packed)
    results: list[Tensor] = []
    replay = clock.captured(lambda: results.append(held.run(work)))
    for case, planned in zip(inputs, plans, strict=True):
        fresh = planned.to(device, items=6, merges=4)
        pairs = list(zip(held.tensors(), case.tensors(), strict=True))
        pairs += [(held.packed.visible, case.packed.visible), (held.packed.tables, case.packed.tables)]
        for target, source in [*pairs, (work.items, fresh.items), (work.merges, fresh.merges)]:
            target.copy_(source)
        replay()
        expected = case.run(fresh)
        clock.wait()
        yield _verdict("segment_attention: a replayed plan", float((results[-1] - expected).abs().max()), 0.0)


def _wide(case: Case, slots: int, pages: int) -> Case:
    """With caches and tables of at least these sizes."""
    caches = [F.pad(cache, (0, 0, 0, 0, 0, slots - cache.shape[0])) for cache in (case.key_cache, case.value_cache)]
    tables = F.pad(case.packed.tables, (0, pages - case.packed.tables.shape[1]))
    return Case(case.query, case.keys, case.values, *caches, replace(case.packed, tables=tables))


def far_offsets(clock: Clock) -> Iterator[Row]:
    """Slots whose offsets, in numbers, are beyond 2^31."""
    first = 4 if clock.dry_run else 2**31 // (PAGE * 2 * 128) + 3
    near, far = (make([(70, FUSED[:2])], clock.device, first_page=page) for page in (0, first))
    differing = (far.run(far.work(64)) != near.run(near.work(64))).sum()
    yield _verdict("segment_attention: offsets beyond 32 bits", int(differing), 0)


def stats_correct(clock: Clock) -> Iterator[Row]:
    vocabulary = network(clock).vocabulary
    rows = 2 if clock.dry_run else 64
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        generator = torch.Generator(clock.device).manual_seed(3)
        logits = torch.empty((rows, vocabulary), dtype=dtype, device=clock.device).normal_(generator=generator)
        logits *= 4
        logits[:, 100] = float("nan")  # An excluded token's logit takes no part, whatever it is.
        expected = reference.logit_stats(logits.double(), [100])
        got = logit_stats(logits, [100])
        yield _verdict(f"logit_stats: ids, {dtype}", int((got.ids != expected.ids).sum()), 0)
        for name, limit in (("probabilities", 2e-5), ("margins", 2e-5), ("entropies", 1e-4)):
            error = float((getattr(got, name).double() - getattr(expected, name)).abs().max())
            yield _verdict(f"logit_stats: {name}, {dtype}", error, limit)


def noise_correct(clock: Clock) -> Iterator[Row]:
    """
    The noise of each row, against its definition worked out in float64 on the host: where logits are all 0 the scores are the noise,
    and their softmax tells how high the two highest are.
    """
    seeds, positions = [0, 2**64 - 1, 2**63, 12345], [0, 2**32 - 1, 2**31, 77]
    vocabulary = network(clock).vocabulary
    noise = torch.stack([philox_gumbel(seed, at, vocabulary) for seed, at in zip(seeds, positions, strict=True)])
    noise = torch.cat((noise, torch.zeros(1, vocabulary, dtype=torch.float64))).to(clock.device)
    logits = torch.zeros(5, vocabulary, device=clock.device)
    logits[4, 7] = 3.0
    got = logit_stats(logits, [100], noise_keys([*seeds, 7], [*positions, NO_NOISE], clock.device))
    expected = reference.logit_stats(logits.double(), [100], noise)
    yield _verdict("logit_stats: ids under noise", int((got.ids != expected.ids).sum()), 0)
    error = (got.probabilities.double() / expected.probabilities - 1).abs().max()
    yield _verdict("logit_stats: probabilities under noise, relative", float(error), 1e-4)


def philox_gumbel(seed: int, position: int, vocabulary: int) -> Tensor:
    """`float64[V]`: the noise of one row from Philox 4x32-10 (Salmon et al., 2011), as `recguide.sampling` defines it."""
    word = 0xFFFFFFFF
    counter = torch.arange((vocabulary + 3) // 4)
    c = [counter, torch.full_like(counter, position), torch.zeros_like(counter), torch.zeros_like(counter)]
    keys = [seed & word, seed >> 32]
    for _ in range(10):
        products = [c[0] * 0xD2511F53, c[2] * 0xCD9E8D57]
        high = [(product >> 32) & word for product in products]
        c = [high[1] ^ c[1] ^ keys[0], products[1] & word, high[0] ^ c[3] ^ keys[1], products[0] & word]
        keys = [(keys[0] + 0x9E3779B9) & word, (keys[1] + 0xBB67AE85) & word]
    # The variate is rounded to float32 before its logarithm is taken, in the definition too.
    uniform = ((torch.stack(c, dim=-1).flatten()[:vocabulary].float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    return -(-torch.log1p(-uniform.double())).log()


def commit_correct(clock: Clock) -> Iterator[Row]:
    case = make([(9, [(20, CAUSAL, 0)]), (16, [(17, CAUSAL, 0)]), (31, [(4, CAUSAL, 0)])], clock.device)
    tables = torch.randperm(3 * 8, generator=torch.Generator().manual_seed(1)).view(3, 8).to(torch.int32)
    packed, counts = replace(case.packed, tables=tables.to(clock.device)), [20, 0, 3]
    slots = 24 * PAGE
    caches = [torch.full((slots, *case.key_cache.shape[1:]), 7.0, dtype=torch.bfloat16, device=clock.device)] * 2
    got, expected = [cache.clone() for cache in caches], [cache.clone() for cache in caches]
    kv_commit(
        case.keys, case.values, got[0], got[1], packed, commit_work(packed, torch.tensor(counts, device=clock.device))
    )
    reference.kv_commit(case.keys, case.values, expected[0], expected[1], packed, counts)
    differing = sum(int((a != b).sum()) for a, b in zip(got, expected, strict=True))
    yield _verdict("kv_commit: numbers that differ", differing, 0)


def _verdict(name: str, error: float, allowed: float) -> Row:
    # NaN is not below anything, and JSON has none.
    return {
        "case": name,
        "error": str(error) if error != error else error,
        "allowed": allowed,
        "right": error <= allowed,
    }


def correctness(clock: Clock) -> Iterator[Row]:
    """All kernels against their references."""
    yield from stats_correct(clock)
    yield from noise_correct(clock)
    yield from commit_correct(clock)
    yield from attention_correct(clock)
    yield from equal_bits(clock)
    yield from replayed_plan(clock)
    yield from far_offsets(clock)


def machine(clock: Clock) -> Iterator[Row]:
    """What the device is, and the bandwidth that a copy reaches on it."""
    row: Row = {"torch": torch.__version__, "cuda": torch.version.cuda, "device": "cpu"}
    if not clock.dry_run:
        found = torch.cuda.get_device_properties(0)
        row |= {
            "device": found.name,
            "capability": f"{found.major}.{found.minor}",
            "multiprocessors": found.multi_processor_count,
            "memory_bytes": found.total_memory,
        }
    yield row
    numbers = 1 << (12 if clock.dry_run else 30)
    source = torch.empty(numbers, dtype=torch.bfloat16, device=clock.device).normal_()
    target = torch.empty_like(source)
    ms = clock.ms(lambda: target.copy_(source))
    yield {"copy_bytes": 2 * source.nbytes, "copy_ms": ms, "bytes_per_ms": 2 * source.nbytes / ms}


def attention(clock: Clock) -> Iterator[Row]:
    """Segment attention in its ways of splitting, against torch; the loads that bars are about come first."""
    net = network(clock)
    loads = ((1, (20,)),) if clock.dry_run else ((64, (8192, 4096, 2048)), (1, (8192, 2048)), (8, (8192, 2048)))
    for requests, contexts in loads:
        for context in contexts:
            for name in ("fused", "single") if clock.dry_run else ("fused", "verify", "single"):
                case = make(
                    [(context, ROUNDS[name])] * requests,
                    clock.device,
                    heads=net.heads,
                    kv_heads=net.kv_heads,
                    size=net.head_dim,
                )
                yield from attention_times(clock, net, case, {"round": name, "requests": requests, "context": context})


def attention_times(clock: Clock, net: Network, case: Case, setting: Row) -> Iterator[Row]:
    tokens, requests = case.packed.starts[1], case.packed.requests
    cost = attention_cost(net, requests, tokens, case.packed.prefix[0], case.seen // requests)
    setting = setting | {"bytes": cost.bytes, "operations": cost.operations}
    heights = [case.rows()] if tokens * case.group <= 128 else [case.rows(), 128]
    for rows in heights:
        for split in (SPLIT,) if clock.dry_run else (SPLIT, None, 256, 512, 1024):
            if split is None or split < case.packed.prefix[0] or split == SPLIT:
                work = case.work(split, rows)
                ms = clock.ms(lambda: case.run(work))  # noqa: B023 - it runs at once
                yield setting | {"way": "segment_attention", "split": split, "rows": rows, "ms": ms}
    if setting["round"] == "fused":
        apart = separate_rows(case)
        work_apart = apart.work(SPLIT)
        yield setting | {"way": "separate padded rows", "split": SPLIT, "ms": clock.ms(lambda: apart.run(work_apart))}
    query, mask = padded_query(case), masks(case)
    laid_out = gathered(case, case.group)

    def sdpa(keys: Tensor, values: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, keys, values, mask, scale=case.scaling)

    yield setting | {"way": "torch SDPA, keys and values laid out before", "ms": clock.ms(lambda: sdpa(*laid_out))}
    ms = clock.ms(lambda: sdpa(*gathered(case, case.group)))
    yield setting | {"way": "torch SDPA from pages", "ms": ms}


def separate_rows(case: Case) -> Case:
    """Fused rounds with a request for every segment, which runs the tokens that it supposes again; all as long as the longest."""
    packed = case.packed
    longest = max(length + seen for length, _, seen in FUSED)
    rows = packed.requests * len(FUSED)
    starts, visible = intervals([[(longest, BOTH, 0)]] * rows)
    tokens = torch.arange(starts[-1], device=case.query.device) % case.query.shape[1]
    apart = PackedRound(
        tuple(starts),
        tuple(prefix for prefix in packed.prefix for _ in FUSED),
        torch.tensor(visible, device=case.query.device),
        packed.tables.repeat_interleave(len(FUSED), dim=0),
        packed.page_size,
    )
    query, keys, values = (tensor[:, tokens] for tensor in (case.query, case.keys, case.values))
    return replace(case, query=query, keys=keys, values=values, packed=apart)


def torch_stats(logits: Tensor, excluded: int) -> tuple[Tensor, ...]:
    """The three passes that the kernel stands for, on the logits as they are: the likeliest two, the softmax, the entropy."""
    logits[:, excluded] = float("-inf")
    top = logits.topk(2, dim=-1)
    probabilities = logits.softmax(-1, dtype=torch.float32)
    found = probabilities.gather(1, top.indices)
    return top.indices, found, found[:, 0] - found[:, 1], torch.special.entr(probabilities).sum(-1)


def statistics_of_logits(clock: Clock) -> Iterator[Row]:
    """`logit_stats`, with noise and without, against three passes of torch."""
    vocabulary = network(clock).vocabulary
    for dtype in (torch.bfloat16, torch.float32):
        for rows in (2,) if clock.dry_run else (64, 16, 256, 1024):
            logits = torch.empty((rows, vocabulary), dtype=dtype, device=clock.device).normal_()
            keys = noise_keys(range(rows), range(rows), clock.device)
            setting: Row = {"rows": rows, "vocabulary": vocabulary, "dtype": str(dtype), "bytes": logits.nbytes}
            for way, run in (
                ("logit_stats", lambda: logit_stats(logits, [100])),  # noqa: B023 - run at once
                ("logit_stats with noise", lambda: logit_stats(logits, [100], keys)),  # noqa: B023
                ("three passes of torch", lambda: torch_stats(logits, 100)),  # noqa: B023
            ):
                yield setting | {"way": way, "ms": clock.ms(run)}
