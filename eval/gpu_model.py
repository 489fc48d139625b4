"""A model of the 8B release's shape with random weights, on a device: forwards, rounds, and decoding with recorded acceptance."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from gpu_clock import Clock, Row
from gpu_kernels import BLOCK, PAGE, network
from roofline import Network, fused_round, two_forward_round
from transformers import AutoModelForCausalLM, AutoTokenizer

from recguide import NemotronLabsDiffusionConfig, NemotronLabsDiffusionModel, RecGuideConfig, RoundRecord, tiny_path
from recguide.adapter import ModelAdapter, Predictions
from recguide.attention import installed
from recguide.config import ForwardConfig
from recguide.dense_kv import KVCache
from recguide.hooks import Hook
from recguide.loop import method_of
from recguide.models.draft_adapter import DraftAdapterConfig, add_draft_adapter
from recguide.paged_kv import PagedBatch, PagePool
from recguide.rounds import Method, Request, plan_blocks, prefill, run_round
from recguide.segments import Plan, Segment, pack
from recguide.structs import Guess
from recguide.tiny.examples import EXAMPLES
from recguide.trace import TraceWriter, read_trace

MASK = 100
DEPTHS = (4, 8)
"""Of the two corrections; the continuation comes after the whole block."""
SHORT, LONG = 1024, 8192
HISTORY = 640
"""Tokens cached in the forwards of many requests: the published B200 sweep has 330 to 945 in the mean."""


def random_model(net: Network, device: torch.device) -> NemotronLabsDiffusionModel:
    """bfloat16, with a draft adapter that is not zero."""
    config = NemotronLabsDiffusionConfig(
        vocab_size=net.vocabulary,
        hidden_size=net.hidden,
        intermediate_size=net.feed_forward,
        num_hidden_layers=net.layers,
        num_attention_heads=net.heads,
        num_key_value_heads=net.kv_heads,
        head_dim=net.head_dim,
        mask_token_id=MASK,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = NemotronLabsDiffusionModel._from_config(config, dtype=torch.bfloat16)
        deltas = add_draft_adapter(model, DraftAdapterConfig(net.rank, 4.0 * net.rank, ("o_proj",)))
    with torch.no_grad():
        for delta in deltas.values():
            delta.lora_B.weight.normal_(std=0.02)
    model.requires_grad_(False)
    return model.eval()  # type: ignore[no-any-return]


class Stage:
    """
    A model with pages for its requests, whose prefixes hold random keys and values.

    Args:
        net (`Network`): the model's sizes.
        tokens (`int`): that the pages hold.
    """

    def __init__(self, net: Network, clock: Clock, tokens: int) -> None:
        self.net, self.clock = net, clock
        self.model = random_model(net, clock.device)
        self.pool = PagePool(-(-tokens // PAGE), PAGE)
        table = self.pool.new_table([])
        assert table.reserve(1)
        plan = pack([[Segment([0], 0)]], [0], clock.device)
        empty = torch.empty((net.kv_heads, 0, net.head_dim), dtype=torch.bfloat16, device=clock.device)
        for layer in range(net.layers):
            pages = PagedBatch(self.pool, [table]).pages(layer, empty, empty, plan)
            for memory in (pages.keys, pages.values):
                memory.normal_()
        table.release()

    def adapter(
        self, kind: type[ModelAdapter] = ModelAdapter, cuda_graphs: bool = False, backend: str = "triton"
    ) -> Any:
        return kind.of(self.model, ForwardConfig(attention_backend=backend, cuda_graphs=cuda_graphs))

    @contextmanager
    def batch(
        self, requests: int, context: int, segments: Sequence[Segment]
    ) -> Iterator[tuple[list[list[Segment]], PagedBatch]]:
        """Inside: the segments of so many requests with a prefix of `context` tokens each, and their cache."""
        tables = [self.pool.new_table([]) for _ in range(requests)]
        for table in tables:
            assert table.reserve(context)
            table.commit(context)
            assert table.reserve(sum(len(segment.tokens) for segment in segments))
        yield [list(segments)] * requests, PagedBatch(self.pool, tables)
        for table in tables:
            table.release()

    def forward_ms(self, adapter: ModelAdapter, requests: int, context: int, segments: Sequence[Segment]) -> float:
        """Milliseconds of the device for the model's forward, the logits of the segments' outputs included."""
        with self.batch(requests, context, segments) as (rows, kv):
            plan = pack(rows, kv.lengths, self.clock.device)
            return self.clock.ms(adapter.forwards.prepare(plan, kv))

    def round_ms(self, adapter: ModelAdapter, context: int, segments: Sequence[Segment]) -> float:
        """Milliseconds of the host from the segments of one request to its predictions."""
        with self.batch(1, context, segments) as (rows, kv):
            return self.clock.wall_ms(lambda: adapter.forward(rows, kv, 2, entropies=True))


def tokens(count: int) -> list[int]:
    """Any will do for the time that they take."""
    return [1000 + i for i in range(count)]


def segments(adapter: ModelAdapter, context: int, block: int = BLOCK) -> dict[str, list[Segment]]:
    """The forwards of a round behind `context` cached tokens."""
    verify = adapter.causal(tokens(block), context)
    branches = [
        adapter.block([1000, *[None] * (block - 1)], context + depth, depth) for depth in DEPTHS if depth < block
    ]
    continuation = adapter.block([None] * block, context + block, block)
    return {
        "fused": [verify, *branches, continuation],
        "verify": [verify],
        "draft": [adapter.block([1000, *[None] * (block - 1)], context)],
    }


def model(clock: Clock) -> Iterator[Row]:
    """Forwards and rounds of one request, then forwards of many."""
    counts = (2,) if clock.dry_run else (1, 8, 32, 128, 2, 4, 16, 64)
    sizes, history = ((8,), 20) if clock.dry_run else ((16, 8, 32), HISTORY)
    contexts = (20,) if clock.dry_run else (SHORT, LONG)
    room = max(counts) * (history + 4 * max(sizes) + PAGE)
    stage = Stage(network(clock), clock, max(room, max(contexts) + 512 + PAGE))
    with installed(stage.model):
        yield from forwards(stage, contexts)
        yield from rounds(stage, contexts)
        yield from loads(stage, counts, sizes, history)


def forwards(stage: Stage, contexts: Sequence[int]) -> Iterator[Row]:
    """Device time of one request's forwards: the parts of a round, then by query tokens and context."""
    adapter = stage.adapter()
    for context in contexts:
        fused, (draft, verify) = (cost(stage.net, 1, context) for cost in (fused_round, two_forward_round))
        bytes_of = {"fused": fused.bytes, "draft": draft.bytes, "verify": verify.bytes}
        for name, of_round in segments(adapter, context).items():
            ms = stage.forward_ms(adapter, 1, context, of_round)
            count = sum(len(segment.tokens) for segment in of_round)
            yield {"forward": name, "context": context, "tokens": count, "bytes": bytes_of[name], "ms": ms}
    for count in (1,) if stage.clock.dry_run else (1, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512):
        for context in contexts:
            ms = stage.forward_ms(adapter, 1, context, [adapter.causal(tokens(count), context)])
            yield {"forward": "causal", "context": context, "tokens": count, "ms": ms}


def rounds(stage: Stage, contexts: Sequence[int]) -> Iterator[Row]:
    """One request's round on the host's clock, plan and statistics included: fused, or drafted and verified; graphs on and off."""
    for graphs in (False,) if stage.clock.dry_run else (True, False):
        adapter = stage.adapter(cuda_graphs=graphs)
        for context in contexts:
            row: Row = {"cuda_graphs": graphs, "context": context}
            for name, of_round in segments(adapter, context).items():
                row[name] = stage.round_ms(adapter, context, of_round)
            yield row


def loads(stage: Stage, counts: Sequence[int], sizes: Sequence[int], history: int) -> Iterator[Row]:
    """T_C(B): device time of the draft and the verification of C requests with blocks of B; of fused forwards while they are small."""
    adapter = stage.adapter()
    for size in sizes:
        for requests in counts:
            row: Row = {"requests": requests, "block_size": size, "history": history}
            for name, of_round in segments(adapter, history, size).items():
                if name != "fused" or requests * size <= 512:
                    row[name] = stage.forward_ms(adapter, requests, history, of_round)
            yield row


# --- decoding with recorded acceptance --------------------------------------------------------------------------------


class Replay(ModelAdapter):
    """
    Runs every forward, and puts a recorded request's predictions in place of what it predicts: rounds go as they went.

    `rounds` are the recorded ones of the request that comes next.
    """

    rounds: Sequence[RoundRecord] = ()
    _round: int | None = None

    def forward(
        self, rows: Sequence[Sequence[Segment]], kv: KVCache, *args: Any, **kwargs: Any
    ) -> tuple[Plan, Predictions]:
        plan, predictions = super().forward(rows, kv, *args, **kwargs)
        spans = plan.outputs[0]
        if self._round is None:
            self._dictate(predictions, spans[0][0], self.rounds[0].seed)
            self._round = 0
            return plan, predictions
        record = self.rounds[self._round]
        if rows[0][0].bidirectional:
            for row, guess in zip(range(*spans[0]), record.draft.guesses, strict=True):
                self._dictate_guess(predictions, row, guess)
            return plan, predictions
        for row, token in zip(range(*spans[0]), record.committed, strict=False):
            self._dictate(predictions, row, token)
        for (start, end), branch in zip(spans[1:], record.branches, strict=True):
            if branch.branch.replacement is None:
                self._dictate(predictions, start, branch.first)
                start += 1
            for row, guess in zip(range(start, end), branch.draft.guesses, strict=True):
                self._dictate_guess(predictions, row, guess)
        self._round = self._round + 1 if self._round + 1 < len(self.rounds) else None
        return plan, predictions

    def _dictate_guess(self, predictions: Predictions, row: int, guess: Guess) -> None:
        predictions.best[row][:] = [guess.token, *guess.alternatives]
        predictions.probabilities[row] = guess.probability, guess.second_probability

    def _dictate(self, predictions: Predictions, row: int, token: int) -> None:
        others = [other for other in predictions.best[row] if other != token]
        predictions.best[row][:] = [token, *others][: len(predictions.best[row])]


class Observed(Hook):
    """Rounds and forwards, as they are told."""

    def __init__(self) -> None:
        self.rounds: list[RoundRecord] = []
        self.forwards: Counter[str] = Counter()

    def on_draft(self, record: Any) -> None:
        self.forwards[record.kind] += 1

    def on_verify(self, record: Any) -> None:
        self.forwards[record.kind] += 1

    def on_commit(self, record: RoundRecord) -> None:
        self.rounds.append(record)


def decode(
    adapter: ModelAdapter,
    pool: PagePool,
    prompt: Sequence[int],
    new_tokens: int,
    method: Method,
    eos: frozenset[int],
    hook: Hook,
) -> float:
    """Seconds of a request's rounds, its prompt's forward left out."""
    request = Request(
        id=0,
        tokens=list(prompt),
        max_new_tokens=new_tokens,
        stop=lambda written: "eos" if written[-1] in eos else None,
        method=method,
    )
    table = pool.new_table(request.tokens)
    assert table.reserve(len(prompt) + method.most_tokens)
    kv = PagedBatch(pool, [table])
    prefill([request], adapter, kv, hook)
    start = time.perf_counter()
    while request.finished is None:
        assert table.reserve(method.most_tokens)
        plan_blocks([request], 1)
        run_round([request], adapter, kv, hook)
    seconds = time.perf_counter() - start
    table.release()
    return seconds


Recorded = list[tuple[list[int], list[RoundRecord]]]
"""Prompts with their rounds."""


class Embedded:
    """The embedded model on the CPU, whose rounds are recorded."""

    def __init__(self) -> None:
        model = AutoModelForCausalLM.from_pretrained(tiny_path(), dtype=torch.float32, use_safetensors=True).eval()
        self.adapter = ModelAdapter.of(model, ForwardConfig(attention_backend="torch_sdpa"))
        eos = model.generation_config.eos_token_id or model.config.eos_token_id
        self.eos = frozenset([eos] if isinstance(eos, int) else eos)
        tokenizer = AutoTokenizer.from_pretrained(tiny_path())
        chats = ([{"role": "user", "content": text}] for text in EXAMPLES.values())
        self.prompts: list[list[int]] = [
            tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
            for chat in chats
        ]

    def record(self, config: RecGuideConfig, new_tokens: int, folder: Path) -> Recorded:
        """Decode the example prompts, by way of traces on disk."""
        method, found = method_of(config, self.eos, self.adapter), []
        with installed(self.adapter.model):
            for number, prompt in enumerate(self.prompts):
                trace = folder / f"{config.strategy}-{number}.jsonl"
                with TraceWriter(trace) as writer:
                    decode(self.adapter, PagePool(64, PAGE), prompt, new_tokens, method, self.eos, writer)
                found.append((prompt, [event for _, event in read_trace(trace) if isinstance(event, RoundRecord)]))
        return found


def end_to_end(clock: Clock) -> Iterator[Row]:
    """Tokens a second of one request, with the embedded model's acceptance: every forward is run, what it predicts is replaced."""
    new_tokens, context = (24, 120) if clock.dry_run else (96, SHORT)
    net, embedded = network(clock), Embedded()
    configs = [RecGuideConfig(strategy=strategy, block_size=BLOCK) for strategy in ("recguide", "linear", "ar")]
    with tempfile.TemporaryDirectory() as folder:
        recorded = [embedded.record(config, new_tokens, Path(folder)) for config in configs]
    stage = Stage(net, clock, context + new_tokens + 2 * 4 * BLOCK + PAGE)
    with installed(stage.model):
        for graphs in (False,) if clock.dry_run else (True, False):
            # A dry run has the interpreter at work elsewhere.
            adapter = stage.adapter(Replay, graphs, "torch_sdpa" if clock.dry_run else "triton")
            for config, requests in zip(configs, recorded, strict=True):
                method = method_of(config, embedded.eos, adapter)
                # In the first pass kernels are compiled and graphs captured.
                for _ in range(2):
                    seconds, observed = replayed(
                        adapter, stage.pool, requests, context, new_tokens, method, embedded.eos
                    )
                committed = sum(len(record.committed) for record in observed.rounds)
                yield {
                    "strategy": config.strategy,
                    "cuda_graphs": graphs,
                    "context": context,
                    "tokens": committed,
                    "rounds": len(observed.rounds),
                    "forwards": dict(observed.forwards),
                    "tokens_per_round": committed / len(observed.rounds),
                    "tokens_per_second": committed / seconds,
                    "ms_per_forward": 1000 * seconds / observed.forwards.total(),
                }


def replayed(
    adapter: Replay,
    pool: PagePool,
    requests: Recorded,
    context: int,
    new_tokens: int,
    method: Method,
    eos: frozenset[int],
) -> tuple[float, Observed]:
    """Seconds of the rounds of recorded requests behind prompts of `context` tokens, and what happened."""
    seconds, observed = 0.0, Observed()
    for prompt, recorded in requests:
        longer = [*tokens(max(context - len(prompt), 0)), *prompt][-context:]
        before = len(observed.rounds)
        adapter.rounds = recorded
        seconds += decode(adapter, pool, longer, new_tokens, method, eos, observed)
        for got, was in zip(observed.rounds[before:], recorded, strict=True):
            same = (got.committed, got.outcome, got.hit, got.draft) == (was.committed, was.outcome, was.hit, was.draft)
            assert same, f"round {was.index} went {got.outcome}, and was recorded as {was.outcome}"
    return seconds, observed
