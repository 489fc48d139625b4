"""Where prompts are answered: each session its own, cancelling frees the place, and only the given models can be had."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from recguide import ConfigError, EngineConfig, InputError, RecGuideConfig
from recguide.demo import load, race
from recguide.demo.desk import Desk, Model, Running
from recguide.loading import TINY
from recguide.loading import load as load_model
from recguide.structs import RoundRecord

PROMPT = "Write a letter from Zoe to Mila."


@pytest.fixture(scope="module")
def desk() -> Iterator[Desk]:
    desk = Desk({TINY: partial(load_model, TINY, "float32", "cpu")}, EngineConfig(max_requests=2))
    yield desk
    desk.close()


@pytest.fixture(scope="module")
def model(desk: Desk) -> Model:
    return desk.model(TINY)


class Gate:
    """Lets a model's forwards through one by one."""

    def __init__(self, model: Any) -> None:
        self.open, self.passed = threading.Semaphore(0), threading.Semaphore(0)
        self._handle = model.register_forward_pre_hook(self._wait)

    def _wait(self, *_: Any) -> None:
        self.passed.release()
        self.open.acquire(timeout=60)

    def remove(self) -> None:
        self._handle.remove()
        for _ in range(1000):
            self.open.release()


def answer(desk: Desk, model: Model, strategy: str, **options: Any) -> Running:
    running = model.ask(PROMPT, RecGuideConfig(strategy=strategy), 40, **options)
    with desk.serving("one", model, running):
        assert [event for _, event, _ in running][-1] == "finish"
    return running


@pytest.mark.parametrize("strategy", ["linear", "quadratic", "recguide", "auto"])
def test_answers_are_those_of_plain_decoding(desk: Desk, model: Model, strategy: str) -> None:
    plain, running = answer(desk, model, "ar"), answer(desk, model, strategy)
    assert running.result().tokens == plain.result().tokens
    rounds = [record for _, record in running.records if isinstance(record, RoundRecord)]
    assert [rounds[0].seed, *(token for one in rounds for token in one.committed)] == running.result().tokens
    assert "".join(model.pieces(running.result().tokens)) == model.tokenizer.decode(
        running.result().tokens, skip_special_tokens=True
    )
    assert not running.was_shared
    assert running.seconds > 0


def test_cancelling_ends_the_sessions_request_and_frees_its_place(desk: Desk, model: Model) -> None:
    gate = Gate(model.model)
    try:
        running = model.ask(PROMPT, RecGuideConfig(strategy="ar"), 200)
        with desk.serving("one", model, running):
            gate.passed.acquire(timeout=60)
            assert desk.under_way == 1
            assert desk.cancel("another") == 0, "sessions cannot end each other's"
            assert desk.cancel("one") == 1
            gate.remove()
            for _ in running:
                pass
        assert running.result().reason == "cancelled"
        assert desk.under_way == 0
        assert model.engine._runner.idle
        assert model.engine._pool.free_pages == model.engine._pool.num_pages
    finally:
        gate.remove()
    assert answer(desk, model, "recguide").result().reason in ("length", "eos")


def test_leaving_ends_the_request(desk: Desk, model: Model) -> None:
    gate = Gate(model.model)
    running = model.ask(PROMPT, RecGuideConfig(strategy="ar"), 200)
    with pytest.raises(KeyError), desk.serving("one", model, running):  # noqa: PT012 - the error is ours
        gate.passed.acquire(timeout=60)
        # From now on nothing waits; the request is cancelled on the way out, or has long to go.
        gate.remove()
        raise KeyError
    assert running.result().reason == "cancelled"
    assert desk.under_way == 0


def test_two_sessions_are_answered_together_and_each_as_alone(desk: Desk, model: Model) -> None:
    alone = answer(desk, model, "recguide").result().tokens
    first = model.ask(PROMPT, RecGuideConfig(strategy="recguide"), 40)
    second = model.ask(PROMPT, RecGuideConfig(strategy="linear"), 40)
    with desk.serving("one", model, first), desk.serving("two", model, second):
        for _ in first:
            pass
        for _ in second:
            pass
    assert first.result().tokens == second.result().tokens == alone
    assert second.was_shared


def test_only_the_given_models(desk: Desk) -> None:
    for name in ("/etc", "../x", "gpt2"):
        with pytest.raises(InputError, match="Unknown model"):
            desk.model(name)


def test_a_model_is_loaded_from_safetensors_only_and_runs_no_code(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "auto_map": {"AutoModelForCausalLM": "evil.Model"}}')
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Model: ...\n")
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises((OSError, ValueError)):
        Desk({"evil": partial(load_model, str(tmp_path), "float32", "cpu")}).model("evil")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("prompt", "message"),
    [("", "empty"), (" \n", "empty"), ("word " * 3000, "context is 2048"), ("x" * 50_000, "50000 characters")],
)
def test_prompts_that_cannot_be_answered(model: Model, prompt: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        model.ask(prompt, RecGuideConfig(), 16)


def test_the_race_puts_all_on_one_clock(desk: Desk, model: Model) -> None:
    entrants = []
    for strategy in ("ar", "recguide"):
        entrant = race.Entrant(strategy)
        running = answer(desk, model, strategy)
        entrant.follow(model, running)
        entrant.tokens = running.result().tokens
        entrants.append(entrant)
    seen = race.view(entrants, True)
    assert [lane["label"] for lane in seen["lanes"]] == ["AR", "RecGuide"]
    for lane in seen["lanes"]:
        assert lane["commits"] == sorted(lane["commits"])
        assert lane["commits"][-1][1] == seen["total"] == len(entrants[0].tokens or ()) - 1
    assert entrants[0].counts.forwards == seen["total"]
    assert race.verdict(entrants)[1] == "know"
    entrants[1].tokens = [1]
    assert race.verdict(entrants) == (
        "RecGuide wrote another text than AR. In float32 that is a fault; in half precision near-ties may part.",
        "error",
    )


def test_users_in_a_closed_loop(model: Model) -> None:
    looks = list(
        load.LoadRun(model.model, model.tokenizer, "linear-8", "bucketed", users=2, requests=4, max_new_tokens=24)
    )
    last = looks[-1]
    assert last.figures is not None
    assert last.figures["contender"] == "linear-8 bucketed"
    assert last.figures["concurrency"] == 2
    assert last.figures["tokens_per_s"] > 0
    assert 1 <= last.occupancy <= 2
    assert sum(last.block_share.values()) == pytest.approx(1)
    assert last.tokens == 4 * 23


def test_a_load_can_be_stopped(model: Model) -> None:
    run = load.LoadRun(model.model, model.tokenizer, "ar", "packed", users=2, requests=100)
    run.stopped.set()
    assert [look.figures for look in run] == []


def test_loads() -> None:
    assert load.loads_up_to(1) == [1]
    assert load.loads_up_to(6) == [1, 2, 4, 6]
    assert load.loads_up_to(32) == [1, 2, 4, 8, 16, 32]
    with pytest.raises(InputError, match="Between 1 and 32"):
        load.loads_up_to(33)


@pytest.mark.parametrize("name", load.CONTENDERS)
def test_contenders_are_allowed_configurations(name: str) -> None:
    try:
        RecGuideConfig(**load.CONTENDERS[name])
    except ConfigError as error:
        pytest.fail(str(error))


def test_the_simulator_gives_runs_as_they_are_done() -> None:
    runs = load.simulated("nld-8b", ["concurrency_table"], "packed", (2, 4), requests=12)
    assert next(runs)["concurrency"] == 2
    assert next(runs)["tokens_per_s"] > 0
