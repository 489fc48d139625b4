"""
What `torch.compile` buys on this machine: tokens a second of strategies with it and without, and where a forward's time goes.

All ways decode the same prompts in turn, in one process, so that a noisy moment hits them alike, and what is measured is the process's
time on the processor, which other processes do not take part in: run it with one thread. Outputs are compared.

    OMP_NUM_THREADS=1 taskset -c 1 python eval/compiled.py --json compile.json
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from recguide.adapter import ModelAdapter
from recguide.attention import installed
from recguide.cli.benchmark import environment
from recguide.config import ForwardConfig
from recguide.dense_kv import DenseKV
from recguide.loading import TINY, chat_ids, load
from recguide.segments import Plan, Segment, pack
from recguide.tiny.tasks import FAMILIES, make_task

STRATEGIES = ("ar", "linear", "recguide")
WAYS: dict[str, dict[str, Any]] = {"as it is": {}, "compiled": {"compile": True}}


def decode(model: Any, ids: torch.Tensor, strategy: str, options: dict[str, Any], new_tokens: int) -> list[int]:
    """The new tokens."""
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        generation_strategy=strategy,
        recguide_config=options,
    )
    tokens: list[int] = output[0, ids.shape[1] :].tolist()
    return tokens


def speeds(model: Any, prompts: Sequence[torch.Tensor], repeats: int, new_tokens: int) -> dict[str, Any]:
    """Tokens a second of each strategy in each way, the median of the repeats; and whether all wrote the same."""
    pairs = [(strategy, way) for strategy in STRATEGIES for way in WAYS]
    seconds: dict[tuple[str, str], list[float]] = {pair: [] for pair in pairs}
    texts: dict[tuple[str, str], list[list[int]]] = {}
    for strategy, way in pairs:  # Compiles what is to be compiled, and fills the caches.
        texts[strategy, way] = [decode(model, ids, strategy, WAYS[way], new_tokens) for ids in prompts]
    for repeat in range(repeats):
        turn = repeat % len(pairs)
        for strategy, way in pairs[turn:] + pairs[:turn]:
            start = time.process_time()
            for ids in prompts:
                decode(model, ids, strategy, WAYS[way], new_tokens)
            seconds[strategy, way].append(time.process_time() - start)
    tokens = sum(map(len, texts[pairs[0]]))
    table = {
        strategy: {way: tokens / statistics.median(seconds[strategy, way]) for way in WAYS} for strategy in STRATEGIES
    }
    for strategy in STRATEGIES:
        ratios = [a / b for a, b in zip(*(seconds[strategy, way] for way in WAYS), strict=True)]
        table[strategy] |= {"ratio": statistics.median(ratios), "ratio_low": min(ratios), "ratio_high": max(ratios)}
    return {"tokens": tokens, "tokens_per_s": table, "equal": all(text == texts[pairs[0]] for text in texts.values())}


def forwards(model: Any, counts: Sequence[int], context: int, repeats: int) -> list[dict[str, float]]:
    """Milliseconds of one forward behind a prefix, planned and run, and of its matrix products alone."""
    adapters = {way: ModelAdapter.of(model, ForwardConfig(**options)) for way, options in WAYS.items()}
    kv = DenseKV(1, capacity=context + max(counts))
    # The adapter's products are left out: it is off in verification.
    linears = [m for name, m in model.named_modules() if isinstance(m, nn.Linear) and "draft_adapter" not in name]
    lines = []
    with installed(model), torch.no_grad():
        adapters["as it is"].forward([[Segment([7] * context, 0)]], kv)
        kv.commit(0, context)
        for count in counts:
            segment = Segment([7] * count, context)
            plan = pack([[segment]], kv.lengths, adapters["as it is"].device)
            work = {way: partial(_forward, adapter, plan, kv) for way, adapter in adapters.items()}
            work["products"] = partial(_products, linears, count)
            times: dict[str, list[float]] = {name: [] for name in work}
            for call in work.values():
                call()
            for _ in range(repeats):
                for name, call in work.items():
                    start = time.process_time()
                    call()
                    times[name].append(1000 * (time.process_time() - start))
            lines.append({"query_tokens": count} | {name: statistics.median(values) for name, values in times.items()})
    return lines


def _forward(adapter: ModelAdapter, plan: Plan, kv: DenseKV) -> torch.Tensor:
    return adapter.forwards.prepare(plan, kv)()


def _products(linears: Sequence[nn.Linear], count: int) -> None:
    for linear in linears:
        nn.functional.linear(torch.ones(count, linear.in_features), linear.weight)


def main(
    model: Annotated[str, typer.Option()] = TINY,
    prompts: Annotated[int, typer.Option(min=1, help="Of each suite.")] = 1,
    repeats: Annotated[int, typer.Option(min=1)] = 9,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 96,
    context: Annotated[int, typer.Option(min=1, help="Cached tokens behind which single forwards are timed.")] = 192,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Decode with and without `torch.compile`, in turn."""
    loaded, tokenizer = load(model, "float32", "cpu")
    ids = [chat_ids(tokenizer, make_task(name, "test", i).prompt) for name in FAMILIES for i in range(prompts)]
    record = {
        "environment": environment(model, loaded) | {"max_new_tokens": max_new_tokens, "repeats": repeats},
        "decoding": speeds(loaded, ids, repeats, max_new_tokens),
        "forwards_ms": forwards(loaded, (1, 16, 64), context, 3 * repeats),
    }
    text = json.dumps(record, indent=2) + "\n"
    if json_file:
        json_file.write_text(text)
    print(text)


if __name__ == "__main__":
    typer.run(main)
