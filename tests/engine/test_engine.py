"""The engine: every request's text is what it is alone, whatever its neighbours, the scheduler, and the room there is."""

from __future__ import annotations

import asyncio
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LogitsProcessor

import recguide
from recguide import (
    ConfigError,
    Engine,
    EngineConfig,
    ForwardRecord,
    Hook,
    InputError,
    NemotronLabsDiffusionModel,
    UnsupportedError,
)
from recguide.config import BLOCK_SIZES
from recguide.engine.scheduler import SCHEDULERS, Bucketed
from recguide.metrics import DecodeMetrics
from recguide.policy import AIMD
from recguide.testing import toy_model

PAGE_BYTES = 2 * 2 * 2 * 16 * 4 * 4
"""Of a page of 4 tokens of the toy model: K and V, two layers, two heads of 16, fp32."""
STRATEGIES = ("ar", "linear", "recguide", "quadratic")


@lru_cache
def model() -> NemotronLabsDiffusionModel:
    return toy_model(vocab_size=64)


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 40, (count,), generator=generator).tolist()
    return [torch.randint(6, 64, (length,), generator=generator).tolist() for length in lengths]


def options_of(i: int) -> dict[str, Any]:
    """Requests of every kind: greedy and sampled, with and without processors that look at the prefix, of all strategies."""
    options: dict[str, Any] = {
        "generation_strategy": STRATEGIES[i % 4],
        "recguide_config": {"block_size": (4, 8)[i // 2 % 2]},
        "max_new_tokens": 5 + 4 * (i % 4),
    }
    if i % 2:
        options |= {"do_sample": True, "seed": i, "temperature": 0.9}
    if i % 3 == 0:
        options |= {"repetition_penalty": 1.2}
    if i % 5 == 0:
        options |= {"eos_token_id": list(range(6, 16)), "pad_token_id": 0}
    return options


@lru_cache
def alone(i: int) -> list[int]:
    prompt = prompts(COUNT)[i]
    output = model().generate(torch.tensor([prompt]), **(options_of(i) | {"generation_strategy": "ar"}))
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


COUNT = 12


def small(**changes: Any) -> EngineConfig:
    fields: dict[str, Any] = {"page_size": 4, "kv_bytes": 400 * PAGE_BYTES, "max_requests": 6, "prefill_chunk": 16}
    return EngineConfig(**(fields | changes))


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("pages", [38, 400])
@pytest.mark.parametrize("prefix_sharing", [False, True])
def test_every_text_is_what_it_is_alone(scheduler: str, pages: int, prefix_sharing: bool) -> None:
    """With room for all, and with so little that requests are sent back and computed again."""
    metrics = DecodeMetrics()
    config = small(scheduler=scheduler, kv_bytes=pages * PAGE_BYTES, prefix_sharing=prefix_sharing)
    with Engine(model(), config, [metrics]) as engine:
        handles = [engine.add_request(prompt, **options_of(i)) for i, prompt in enumerate(prompts(COUNT))]
        results = [handle.result(120) for handle in handles]
        engine._pool.check_integrity([])
    assert [result.tokens for result in results] == [alone(i) for i in range(COUNT)]
    assert {result.reason for result in results} == {"length", "eos"}
    assert bool(sum(result.preempted for result in results)) == (pages == 38)
    assert metrics.requests == COUNT
    assert metrics.new_tokens == sum(len(result.tokens) for result in results)


def test_tokens_stream_by_round_and_join_to_the_result() -> None:
    prompt = prompts(COUNT)[3]
    with Engine(model(), small()) as engine:
        handle = engine.add_request(prompt, **options_of(3))
        pieces = list(handle)
        assert list(handle) == []
        assert [token for piece in pieces for token in piece] == handle.result().tokens == alone(3)

        async def read(i: int) -> list[int]:
            return [token async for piece in engine.add_request(prompts(COUNT)[i], **options_of(i)) for token in piece]

        async def all_of_them() -> list[list[int]]:
            return list(await asyncio.gather(*map(read, range(COUNT))))

        assert asyncio.run(all_of_them()) == [alone(i) for i in range(COUNT)]


def test_a_model_whose_layers_are_offloaded(tmp_path: Path) -> None:
    """By accelerate's `device_map`: embeddings here, the layers on disk until they are called."""
    model().save_pretrained(tmp_path / "model")
    places = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=places | {"model.layers": "disk"}, offload_folder=tmp_path / "offload"
    )
    with Engine(loaded, small()) as engine:
        handles = [engine.add_request(prompt, **options_of(i)) for i, prompt in enumerate(prompts(COUNT)[:4])]
        assert [handle.result(120).tokens for handle in handles] == [alone(i) for i in range(4)]


def test_submission_from_many_threads() -> None:
    results: dict[int, list[int]] = {}
    with Engine(model(), small()) as engine:

        def submit(i: int) -> None:
            results[i] = engine.add_request(prompts(COUNT)[i], **options_of(i)).result(120).tokens

        threads = [threading.Thread(target=submit, args=(i,)) for i in range(COUNT)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == {i: alone(i) for i in range(COUNT)}


def test_generate_batch_and_as_completed() -> None:
    with Engine(model(), small()) as engine:
        options = options_of(3) | {"do_sample": False}
        options.pop("seed")
        results = engine.generate_batch(prompts(4), **options)
        for prompt, result in zip(prompts(4), results, strict=True):
            expected = model().generate(torch.tensor([prompt]), **(options | {"generation_strategy": "ar"}))
            assert result.tokens == expected[0, len(prompt) :].tolist()
        handles = [engine.add_request(prompts(1)[0], max_new_tokens=n) for n in (60, 2, 20)]
        assert [r.request_id for r in engine.as_completed(handles)] == [handles[i].request_id for i in (1, 2, 0)]


@pytest.mark.parametrize("drain", [True, False])
def test_closing(drain: bool) -> None:
    engine = Engine(model(), small(max_requests=2))
    handles = [engine.add_request(prompt, max_new_tokens=40) for prompt in prompts(5)]
    engine.close(drain=drain)
    reasons = [handle.result(1).reason for handle in handles]
    assert set(reasons) <= ({"length"} if drain else {"cancelled", "length"})
    engine._pool.check_integrity([])
    assert engine._pool.free_pages == engine._pool.num_pages
    with pytest.raises(UnsupportedError, match="closed"):
        engine.add_request([7], max_new_tokens=1)


class CancelAt(Hook):
    """Cancels a request when a certain kind of event has come for the n-th time."""

    def __init__(self, event: str, count: int) -> None:
        self.event, self.left = event, count
        self.target: Any = None

    def _count(self, event: str) -> None:
        if event == self.event and self.target is not None:
            self.left -= 1
            if self.left == 0:
                self.target.cancel()

    def on_prefill(self, record: Any) -> None:
        self._count("prefill")

    def on_draft(self, record: Any) -> None:
        self._count("draft")

    def on_verify(self, record: Any) -> None:
        self._count("verify")

    def on_commit(self, record: Any) -> None:
        self._count("commit")


@pytest.mark.parametrize("event", ["prefill", "draft", "verify", "commit"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_cancel_in_any_phase_frees_all_and_harms_nobody(event: str, count: int) -> None:
    canceller = CancelAt(event, count)
    with Engine(model(), small(prefill_chunk=8), [canceller]) as engine:
        for _ in range(17):
            canceller.left = count
            victim = engine.add_request(prompts(COUNT)[2], max_new_tokens=300)
            canceller.target = victim
            others = [engine.add_request(prompts(COUNT)[i], **options_of(i)) for i in (3, 5)]
            assert victim.result(60).reason == "cancelled"
            assert [other.result(60).tokens for other in others] == [alone(3), alone(5)]
            victim.cancel()
        engine._pool.check_integrity([])
        assert engine._pool.free_pages == engine._pool.num_pages
        assert not engine._jobs


def test_a_queued_request_can_be_cancelled() -> None:
    with Engine(model(), small(max_requests=1)) as engine:
        first = engine.add_request(prompts(1)[0], max_new_tokens=100)
        second = engine.add_request(prompts(1)[0], max_new_tokens=100)
        second.cancel()
        assert second.result(60).reason == "cancelled"
        assert second.result().tokens == []
        assert first.result(60).reason == "length"


class Fails(LogitsProcessor):  # type: ignore[misc]
    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.left -= 1
        if self.left <= 0:
            raise RuntimeError("a user's mistake")
        return scores


def test_one_bad_request_harms_no_other() -> None:
    def bad_stop(input_ids: Tensor, scores: Any) -> bool:
        raise RuntimeError("another mistake")

    with Engine(model(), small()) as engine:
        good = [engine.add_request(prompts(COUNT)[i], **options_of(i)) for i in (3, 5)]
        bad = [
            engine.add_request(prompts(1)[0], max_new_tokens=20, logits_processor=[Fails(4)]),
            engine.add_request(prompts(1)[0], max_new_tokens=20, stopping_criteria=[bad_stop]),
        ]
        for handle, words in zip(bad, ("a user's mistake", "another mistake"), strict=True):
            result = handle.result(60)
            assert result.reason == "error"
            assert str(result.error) == words
            with pytest.raises(RuntimeError, match=words):
                list(handle)
        assert [handle.result(60).tokens for handle in good] == [alone(3), alone(5)]


def test_a_broken_hook_ends_requests_and_not_the_engine() -> None:
    class Broken(Hook):
        armed = True

        def on_commit(self, record: Any) -> None:
            if self.armed:
                self.armed = False
                raise RuntimeError("a broken hook")

    with Engine(model(), small(), [Broken()]) as engine:
        assert str(engine.add_request(prompts(1)[0], max_new_tokens=20).result(60).error) == "a broken hook"
        assert engine.add_request(prompts(COUNT)[3], **options_of(3)).result(60).tokens == alone(3)
        engine._pool.check_integrity([])


class FailsToFinish(Hook):
    def on_finish(self, record: Any) -> None:
        raise RuntimeError("never ends well")


def test_a_hook_that_fails_at_each_end_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with Engine(model(), small(max_requests=1), [FailsToFinish()]) as engine:
        handles = [engine.add_request(prompts(COUNT)[3], **options_of(3)) for _ in range(3)]
        handles[1].cancel()
        reasons = [handle.result(60).reason for handle in handles]
    assert reasons[0] == reasons[2] == "length"
    assert "never ends well" in caplog.text


class Alternating(LogitsProcessor):  # type: ignore[misc]
    """Lets even and odd tokens come in turn, by a count that it keeps; raises at call number `fails_at`."""

    def __init__(self, fails_at: int = 0) -> None:
        self.calls = 0
        self.fails_at = fails_at

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.fails_at:
            raise RuntimeError("at this call")
        scores = scores.clone()
        scores[:, self.calls % 2 :: 2] = float("-inf")
        return scores


def test_a_processor_with_a_state_is_each_requests_own() -> None:
    expected = [
        model().generate(
            torch.tensor([p]), max_new_tokens=9, logits_processor=[Alternating()], generation_strategy="ar"
        )
        for p in prompts(4)
    ]
    with Engine(model(), small()) as engine:
        results = engine.generate_batch(prompts(4), max_new_tokens=9, logits_processor=[Alternating()])
    for prompt, result, output in zip(prompts(4), results, expected, strict=True):
        assert result.tokens == output[0, len(prompt) :].tolist()


def test_what_a_failing_processor_did_not_approve_is_not_given_out() -> None:
    prompt = prompts(1)[0]
    arguments: dict[str, Any] = {"max_new_tokens": 9, "generation_strategy": "linear"}
    whole = model().generate(torch.tensor([prompt]), logits_processor=[Alternating()], **arguments)
    with Engine(model(), small()) as engine:
        handle = engine.add_request(prompt, logits_processor=[Alternating(fails_at=5)], **arguments)
        result = handle.result(60)
    assert result.reason == "error"
    assert result.tokens == whole[0, len(prompt) : len(prompt) + 4].tolist()


def test_pad_tokens_of_a_prompt_are_tokens() -> None:
    prompt = [0, 0, 7, 0, 9]
    ids = torch.tensor([prompt])
    expected = model().generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, generation_strategy="ar", pad_token_id=0
    )
    with Engine(model(), small()) as engine:
        assert (
            engine.add_request(prompt, max_new_tokens=8, pad_token_id=0).result(60).tokens == expected[0, 5:].tolist()
        )


def test_a_strategy_that_is_the_models_default_stays() -> None:
    class Blocks(Hook):
        sizes: set[int] = set()

        def on_commit(self, record: Any) -> None:
            self.sizes.add(record.block_size)

    own = toy_model(vocab_size=64)
    recguide.attach(own, "ar")
    with Engine(own, small(), [Blocks()]) as engine:
        engine.add_request([7, 8], max_new_tokens=6).result(60)
    assert Blocks.sizes == {1}


@pytest.mark.parametrize("strategy", ["ar", "recguide"])
def test_logprobs_come_with_their_tokens_and_are_those_of_generate(strategy: str) -> None:
    own = model()
    options: dict[str, Any] = {
        "max_new_tokens": 20, "do_sample": True, "seed": 4, "output_logprobs": True, "top_logprobs": 2
    }  # fmt: skip
    call = own.generate(torch.tensor([[7, 8, 9]]), generation_strategy="ar", return_dict_in_generate=True, **options)
    values, ids = (part[0].tolist() for part in call.top_logprobs)
    with Engine(own, small()) as engine:
        handle = engine.add_request([7, 8, 9], generation_strategy=strategy, **(options | {"seed": call.seeds[0]}))
        assert handle.logprobs is not None
        given = 0
        for tokens in handle:
            given += len(tokens)
            assert len(handle.logprobs) >= given
        result = handle.result()
        alone = engine.add_request([7, 8, 9], max_new_tokens=3)
        assert alone.result(60).logprobs is None
        assert alone.logprobs is None
    assert result.tokens == call.sequences[0, 3:].tolist()
    assert result.logprobs is not None
    assert [one.logprob for one in result.logprobs] == pytest.approx(call.logprobs[0].tolist(), abs=1e-4)
    assert [[token for token, _ in one.top] for one in result.logprobs] == ids
    assert [[value for _, value in one.top] for one in result.logprobs] == [
        pytest.approx(row, abs=1e-4) for row in values
    ]


def test_status_tells_who_runs_and_who_waits() -> None:
    go_on, running = threading.Event(), threading.Event()

    class Halt(Hook):
        def on_prefill(self, record: ForwardRecord) -> None:
            running.set()
            go_on.wait(60)

    with Engine(model(), small(max_requests=1), [Halt()]) as engine:
        before = engine.status()
        handles = [engine.add_request([7, 8, 9], max_new_tokens=4) for _ in range(3)]
        assert running.wait(60)
        busy = engine.status()
        go_on.set()
        for handle in handles:
            handle.result(60)
    assert (before.running, before.waiting, before.free_pages) == (0, 0, before.pages)
    assert (busy.running, busy.waiting) == (1, 2)
    assert busy.free_pages < busy.pages


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"prompt_ids": []}, InputError, "empty"),
        ({"prompt_ids": [7, 64]}, InputError, "Token 64 is not of the model's vocabulary"),
        ({"prompt_ids": torch.tensor([[7, 8]])}, InputError, "flat sequence"),
        ({"prompt_ids": "hello"}, InputError, "flat sequence"),
        ({"output_logits": True}, UnsupportedError, "output_logits"),
        ({"sequence_bias": [[[64], 1.0]]}, InputError, "SequenceBiasLogitsProcessor"),
        ({"top_logprobs": 2}, ConfigError, "goes with output_logprobs=True"),
        ({"top_logprobs": 129, "output_logprobs": True}, ConfigError, "from 0 to 128; got 129"),
        ({"cache": object()}, UnsupportedError, "cache"),
        ({"prompt_ids": [7] * 600}, InputError, "600 tokens; the model's context is 512"),
        ({"max_new_tokens": 20000}, InputError, "KV pages"),
        ({"num_beams": 2}, UnsupportedError, "num_beams"),
        ({"streamer": object()}, UnsupportedError, "streamer"),
        ({"generation_strategy": "fast"}, ConfigError, "fast"),
        ({"do_sample": True, "num_return_sequences": 2}, UnsupportedError, "one sequence"),
    ],
)
def test_bad_requests_are_refused_in_the_callers_thread(
    arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    with Engine(model(), small()) as engine, pytest.raises(error, match=words):
        engine.add_request(**({"prompt_ids": [7, 8], "max_new_tokens": 3} | arguments))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"scheduler": "fifo"}, "packed"),
        ({"max_requests": 0}, "max_requests"),
        ({"page_size": 2.5}, "page_size"),
        ({"prefix_sharing": "no"}, "prefix_sharing"),
        ({"scheduler": "bucketed", "max_wait": 2}, "max_wait"),
    ],
)
def test_bad_configs(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineConfig(**fields)


def test_an_engine_checks_what_it_is_made_of() -> None:
    with pytest.raises(ConfigError, match="EngineConfig"):
        Engine(model(), {"max_requests": 2})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"recguide\.Hook"):
        Engine(model(), hooks=[print])  # type: ignore[list-item]


def test_a_result_that_is_late() -> None:
    with Engine(model(), small()) as engine:
        handle = engine.add_request(prompts(1)[0], max_new_tokens=400)
        with pytest.raises(TimeoutError, match="has not ended"):
            handle.result(0.0)
        handle.cancel()


def test_a_thousand_requests_over_few_slots() -> None:
    """Joins, cancels and ends in any order; all that were not cancelled are what they are alone, and nothing is left behind."""
    some = prompts(10, seed=5)
    expected = [
        model().generate(torch.tensor([prompt]), max_new_tokens=7, generation_strategy="ar")[0, len(prompt) :].tolist()
        for prompt in some
    ]
    with Engine(model(), small(max_requests=64, scheduler="bucketed", prefill_chunk=512)) as engine:
        handles = []
        for i in range(1000):
            options = {"generation_strategy": STRATEGIES[i % 3], "max_new_tokens": 1 + i % 7}
            handles.append(engine.add_request(some[i % 10], **options))
            if i % 7 == 0:
                handles[i // 2].cancel()
        results = [handle.result(300) for handle in handles]
        engine._pool.check_integrity([])
        assert engine._pool.free_pages == engine._pool.num_pages
        assert not engine._jobs
        assert engine._runner.idle
    for i, result in enumerate(results):
        assert result.reason in ("length", "cancelled")
        assert result.tokens == expected[i % 10][: len(result.tokens)]
        assert result.reason == "cancelled" or len(result.tokens) == 1 + i % 7


class Waits(Hook):
    """The most verifications of others that a request saw pass between two of its own."""

    def __init__(self) -> None:
        self.verifications = 0
        self.last: dict[int, int] = {}
        self.longest: dict[int, int] = {}

    def on_verify(self, record: Any) -> None:
        self.verifications += 1
        for request in record.requests:
            waited = self.verifications - self.last.get(request, self.verifications - 1) - 1
            self.longest[request] = max(self.longest.get(request, 0), waited)
            self.last[request] = self.verifications


def test_one_whose_block_nobody_shares_waits_a_bounded_number_of_rounds() -> None:
    waits = Waits()
    config = small(max_requests=32, scheduler="bucketed", prefill_chunk=4096, kv_bytes=2000 * PAGE_BYTES)
    with Engine(model(), config, [waits]) as engine:
        arguments: dict[str, Any] = {"generation_strategy": "linear", "max_new_tokens": 30}
        for _ in range(31):
            engine.add_request([7, 8, 9], recguide_config={"block_size": 4}, **arguments)
        loner = engine.add_request([7, 8, 9], recguide_config={"block_size": 8}, **arguments)
        assert loner.result(60).reason == "length"
    assert 0 < waits.longest[loner.request_id] <= max(waits.longest.values())
    assert max(waits.longest.values()) <= Bucketed(config.max_wait, len(BLOCK_SIZES)).longest_wait


def test_every_policy_forgets_every_request() -> None:
    """Whether it ends, is cancelled, or fails: nothing of it is left anywhere."""
    aimd = AIMD()
    with Engine(model(), small()) as engine:
        options: dict[str, Any] = {"generation_strategy": "linear", "recguide_config": {"policy": aimd}}
        handles = [engine.add_request(prompts(COUNT)[i], max_new_tokens=30, **options) for i in range(6)]
        handles.append(engine.add_request(prompts(1)[0], max_new_tokens=20, logits_processor=[Fails(4)], **options))
        handles[1].cancel()
        assert {handle.result(60).reason for handle in handles} == {"length", "cancelled", "error"}
    assert not aimd._sizes
