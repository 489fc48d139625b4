"""What each process of the tests of tensor parallelism runs: `program.py RANK FOLDER PART`; what it has seen goes to a file."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

SIZE = 2
STRATEGIES = ("ar", "linear", "recguide", "quadratic", "auto")
PROMPTS = [[7, 9, 11, 13, 8], [40, 41, 42], [20, 21, 22, 23, 24, 25, 26, 27, 28], [33]]
KV_BYTES = 60 * 4 * 2 * 2 * 1 * 16 * 4
"""Of 60 pages of 4 tokens: K and V, two layers, one head of 16, fp32."""
CANCELLED = {"max_new_tokens": 100, "do_sample": True, "seed": 5}


def calls() -> dict[str, dict[str, Any]]:
    """Arguments of `generate`, by a name."""
    padded = torch.tensor([[0, 0, *PROMPTS[1]], PROMPTS[0]])
    kinds: dict[str, dict[str, Any]] = {
        "greedy": {"inputs": torch.tensor([PROMPTS[0]])},
        # Without a seed: each process draws another one.
        "sampled": {"inputs": torch.tensor([PROMPTS[2]]), "do_sample": True, "temperature": 1.5},
        "batch": {
            "inputs": padded,
            "attention_mask": padded.ne(0).long(),
            "do_sample": True,
            "seed": 3,
            "repetition_penalty": 1.2,
            "eos_token_id": [6, 7, 8, 9],
            "pad_token_id": 0,
        },
    }
    return {
        f"{kind} {strategy}": {"max_new_tokens": 30, "generation_strategy": strategy} | arguments
        for kind, arguments in kinds.items()
        for strategy in STRATEGIES
    }


def requests() -> list[dict[str, Any]]:
    """Options of an engine's requests, one for each of `PROMPTS` and strategy."""
    sampled = {"do_sample": True, "temperature": 1.2}
    return [
        {"max_new_tokens": 30 + i, "generation_strategy": strategy, "pad_token_id": 0}
        | ({"recguide_config": {"block_size": 4}} if strategy != "auto" else {})
        | ({**sampled, "seed": i} if i % 2 else {})
        | ({"repetition_penalty": 1.2} if i % 3 == 0 else {})
        for i, strategy in enumerate(STRATEGIES * len(PROMPTS))
    ]


def prompt_of(i: int) -> list[int]:
    return PROMPTS[i % len(PROMPTS)]


def milliseconds(rank: int) -> Callable[[int, int], float]:
    """A clock for each rank: to one a forward costs the same whatever it holds, to the other its tokens cost most."""
    return (lambda requests, tokens: 10.0) if rank == 0 else (lambda requests, tokens: 0.1 + 10.0 * tokens)


def rounds_of(records: Any) -> list[list[int]]:
    """What was decided for each round: the tokens verified, and those of its branches."""
    return [[record.block_size, *(branch.branch.block_size for branch in record.branches)] for record in records[0]]


def generates(model: Any, rank: int, seen: dict[str, Any]) -> None:
    import recguide
    from recguide.testing import priced_time

    seen["texts"] = {}
    for name, arguments in calls().items():
        torch.manual_seed(rank)
        seen["texts"][name] = model.generate(**arguments).tolist()
    clocked = calls()["greedy auto"] | {"max_new_tokens": 120, "return_dict_in_generate": True, "output_records": True}
    with priced_time(milliseconds(rank)):
        output = model.generate(**clocked)
    seen["clocked"] = output.sequences.tolist()
    seen["rounds"] = rounds_of(output.records) if output.records else None
    seen["statistics"] = output.statistics is not None

    first = model.generate(**calls()["greedy recguide"], return_dict_in_generate=True)
    longer = torch.cat((first.sequences, torch.tensor([[30, 31]])), dim=1)
    mask, cache = torch.ones_like(longer), first.cache
    heads = {layer.keys.shape[1] for layer in cache.layers}
    onwards = {"max_new_tokens": 20, "generation_strategy": "recguide", "cache": cache, "attention_mask": mask}
    seen["continued"] = model.generate(longer, **onwards).tolist()
    seen["heads in the cache"] = sorted(heads)

    class Fails(recguide.Hook):
        def on_verify(self, record: Any) -> None:
            raise ArithmeticError("a hook of rank 0's")

    try:
        model.generate(**calls()["greedy recguide"], recguide_hooks=[Fails()])
    except Exception as error:
        seen["failed call"] = f"{type(error).__name__}: {error}"
    seen["after it"] = model.generate(**calls()["greedy recguide"]).tolist()
    for name in ("compile", "cuda_graphs"):
        try:
            model.generate(**calls()["greedy ar"], recguide_config={name: True})
        except recguide.UnsupportedError as error:
            seen[name] = str(error)


def engine(model: Any, rank: int, seen: dict[str, Any]) -> None:
    import recguide
    import recguide.engine.core as core
    from recguide.ranks import Ranks

    cancelled_it = threading.Event()

    class Waits(recguide.Hook):
        """So that the first request has written some tokens and not all when it is cancelled."""

        def on_commit(self, record: Any) -> None:
            if record.request == 0 and record.index == 2:
                assert cancelled_it.wait(60)

    beats, beat = [], Ranks.beat
    Ranks.beat = lambda self: beats.append(beat(self))  # type: ignore[method-assign, func-returns-value]
    core.BEAT = 0.1  # type: ignore[misc]
    # Room for few of the requests, so that some are sent back.
    config = recguide.EngineConfig(page_size=4, kv_bytes=KV_BYTES, max_requests=6, prefix_sharing=True)
    with recguide.Engine(model, config, [Waits()]) as engine:
        seen["pages"] = engine._pool.num_pages
        if rank:
            try:
                engine.add_request(PROMPTS[0])
            except recguide.UnsupportedError as error:
                seen["add_request"] = str(error)
            engine.follow()
            return
        for name, call in (("follow", engine.follow), ("generate", lambda: model.generate(**calls()["greedy ar"]))):
            try:
                call()
            except recguide.UnsupportedError as error:
                seen[name] = str(error)
        time.sleep(0.5)
        seen["beats"] = len(beats)
        cancelled = engine.add_request(PROMPTS[0], generation_strategy="recguide", **CANCELLED)
        handles: dict[int, Any] = {}

        def submit(start: int) -> None:
            for i in range(start, len(requests()), 2):
                handles[i] = engine.add_request(prompt_of(i), **requests()[i])

        threads = [threading.Thread(target=submit, args=(start,)) for start in (0, 1)]
        for thread in threads:
            thread.start()
        next(iter(cancelled))
        cancelled.cancel()
        cancelled_it.set()
        for thread in threads:
            thread.join()
        seen["cancelled"] = cancelled.result(60).tokens, cancelled.result().reason
        results = [handles[i].result(60) for i in range(len(requests()))]
        seen["engine texts"] = [result.tokens for result in results]
        seen["preempted"] = sum(result.preempted for result in results)
        seen["heads in the pages"] = sorted({layer[0].shape[1] for layer in engine._pool._layers.values()})


def main() -> None:
    rank, folder, part = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(SIZE)}
    store, timeout = f"file://{folder}/{part}-store", timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=SIZE, timeout=timeout)

    import recguide
    from recguide.loading import load

    model, _ = load(str(folder / "model"), "float32", "cpu", tensor_parallel=True)
    seen: dict[str, Any] = {}
    if part == "together":
        generates(model, rank, seen)
        engine(model, rank, seen)
        seen["after the engine"] = model.generate(**calls()["greedy ar"]).tolist()
    # Each part ends with the death of a process: of rank 0 in the first, while the other waits for it; of rank 1 in the second.
    sizes = recguide.EngineConfig(page_size=8 if part == "apart" and rank else 16)
    engines = recguide.Engine(model, sizes)
    if rank:
        try:
            engines.follow()
        except recguide.RankError as error:
            seen["end"] = str(error)
    elif part == "apart":
        results = [engines.add_request(PROMPTS[0], max_new_tokens=8).result(60) for _ in range(2)]
        seen["end"] = [f"{type(result.error).__name__}: {result.error}" for result in results]
        engines.close()
    (folder / f"{part}-{rank}.json").write_text(json.dumps(seen))
    # As a process that is killed does: without a word to the other.
    os._exit(0)


if __name__ == "__main__":
    main()
