"""A file of requests: every line is answered once, as the server answers it, also by a run that was stopped."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from recguide.errors import InputError
from recguide.loading import TINY
from recguide.serving.batch import Answerer, read_done, read_requests
from recguide.serving.settings import Settings

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PLAIN = {"model": TINY, "max_tokens": 24, "ignore_eos": True, "temperature": 0}


def chat(text: str, **changes: Any) -> dict[str, Any]:
    return PLAIN | {"messages": [{"role": "user", "content": text}]} | changes


def completion(prompt: Any, **changes: Any) -> dict[str, Any]:
    return PLAIN | {"prompt": prompt} | changes


GOOD = {
    "greedy": (CHAT, chat("What is 3+4?")),
    "sampled": (CHAT, chat("What is 3+4?", temperature=0.9, seed=5)),
    "several": (COMPLETIONS, completion(["Liam brings", "The rabbit"], n=2, temperature=0.7, seed=1)),
    "logprobs": (COMPLETIONS, completion("Liam brings", logprobs=2, recguide={"strategy": "ar"})),
    "stopped": (CHAT, chat("Write about é and 水", stop=["e"])),
}
BAD = {
    "other model": (COMPLETIONS, completion("x", model="other"), 404),
    "not honoured": (COMPLETIONS, completion("x", best_of=3), 400),
    "unknown": (CHAT, chat("x", nonsense=1), 400),
    "no such token": (COMPLETIONS, completion([10**6]), 400),
    "too long": (COMPLETIONS, completion("x", max_tokens=10**6), 400),
    "streamed": (CHAT, chat("x", stream=True), 400),
}


def line(name: str, url: str | None, body: Any) -> str:
    return json.dumps({"custom_id": name, "body": body} | ({"url": url, "method": "POST"} if url else {}))


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(text + "\n" for text in lines), encoding="utf-8")
    return path


def check_same(body: dict[str, Any], expected: dict[str, Any]) -> None:
    """Two answers say the same; names, times and how a text was drafted aside."""
    for mine, other in zip(body["choices"], expected["choices"], strict=True):
        logprobs, others = mine.pop("logprobs"), other.pop("logprobs")
        assert mine == other
        assert (logprobs is None) == (others is None)
        if logprobs is not None:
            assert logprobs["tokens"] == others["tokens"]
            assert logprobs["token_logprobs"] == pytest.approx(others["token_logprobs"], abs=1e-3)
    for count in ("prompt_tokens", "completion_tokens"):
        assert body["usage"][count] == expected["usage"][count]


@pytest.fixture(scope="module")
def answerer() -> Answerer:
    return Answerer(Settings(max_requests=8, strategy="recguide"))


def test_a_line_gets_what_the_server_answers(answerer: Answerer, server: Any) -> None:
    async def answer_all() -> list[str]:
        lines = [line(name, url, body) for name, (url, body) in GOOD.items()]
        return (await answerer({"line": lines}))["line"]

    for text, (name, (url, body)) in zip(asyncio.run(answer_all()), GOOD.items(), strict=True):
        answered = json.loads(text)
        assert "\n" not in text
        assert answered["custom_id"] == name
        assert answered["error"] is None
        assert answered["response"]["status_code"] == 200
        check_same(answered["response"]["body"], server.post(url, body).json())


def test_a_mistake_is_the_line_s_answer(answerer: Answerer, server: Any) -> None:
    for name, (url, body, status) in BAD.items():
        answered = json.loads(asyncio.run(answerer.answer(line(name, url, body))))
        assert answered["custom_id"] == name
        assert answered["response"]["status_code"] == status, answered
        if name != "streamed":
            expected = server.post(url, body)
            assert expected.status_code == status
            assert answered["response"]["body"] == expected.json()
    assert (
        json.loads(asyncio.run(answerer.answer(line("streamed", *BAD["streamed"][:2]))))["response"]["body"]["error"][
            "param"
        ]
        == "stream"
    )


def test_a_fault_of_ours_is_the_line_s_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    answerer = Answerer(Settings())
    monkeypatch.setattr(answerer._app.state.service, "exchange", lambda body: 1 / 0)
    answered = json.loads(asyncio.run(answerer.answer(line("a", CHAT, chat("x")))))
    assert answered["response"]["status_code"] == 500


def test_without_a_url_the_body_says_what_it_is(answerer: Answerer) -> None:
    async def kinds() -> list[str]:
        lines = [line("a", None, chat("x", max_tokens=1)), line("b", None, completion("x", max_tokens=1))]
        return [json.loads(text)["response"]["body"]["object"] for text in (await answerer({"line": lines}))["line"]]

    assert asyncio.run(kinds()) == ["chat.completion", "text_completion"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 2"),
        ("[]", "line 2"),
        ('{"custom_id": "b"}', "body"),
        ('{"body": {}}', "custom_id"),
        ('{"custom_id": "", "body": {}}', "custom_id"),
        ('{"custom_id": 3, "body": {}}', "custom_id"),
        ('{"custom_id": "b", "body": {}, "extra": 1}', "extra"),
        ('{"custom_id": "b", "body": {}, "url": "/v1/embeddings"}', "url"),
        ('{"custom_id": "a", "body": {}}', "'a' stands in a line before"),
    ],
)
def test_an_input_that_is_none_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    source = write(tmp_path / "in.jsonl", [line("a", CHAT, chat("x")), text])
    with pytest.raises(InputError, match="line 2") as caught:
        read_requests(source)
    assert message in str(caught.value)


def test_an_empty_input_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no requests"):
        read_requests(write(tmp_path / "in.jsonl", [""]))


def test_a_half_written_line_is_cut_off_and_done_again(tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    assert read_done(target) == set()
    whole = '{"id": "batch_req_0", "custom_id": "a", "response": {"status_code": 200, "body": "é水\u2028"}}\n'
    for cut in range(len(whole.encode())):
        target.write_bytes(whole.encode() + whole.replace('"a"', '"b"').encode()[:cut])
        assert read_done(target) == {"a"}
        assert target.read_bytes() == whole.encode()
    target.write_bytes(whole.encode() + whole.replace('"a"', '"b"').encode())
    assert read_done(target) == {"a", "b"}


def test_an_output_that_is_none_is_refused_and_left_alone(tmp_path: Path) -> None:
    for stranger in ("my diary", '{"custom_id": "b", "body": {}}'):
        target = write(tmp_path / "out.jsonl", ['{"custom_id": "a", "response": null}', stranger])
        with pytest.raises(InputError, match="line 2"):
            read_done(target)
    target.write_text("my diary, without an end of its line")
    with pytest.raises(InputError):
        read_done(target)
    assert target.read_text() == "my diary, without an end of its line"


@pytest.mark.slow
def test_two_engines_answer_each_line_once_though_the_run_is_stopped(
    tmp_path: Path, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    ray = pytest.importorskip("ray", reason='Ray is not installed: pip install "recguide[ray]"')
    pytest.importorskip("ray.data", reason='Ray Data is not installed: pip install "recguide[ray]"')
    from recguide.serving.ray_batch import run

    bodies = {f"{name} {index}": (url, body) for index in range(4) for name, (url, body) in GOOD.items()}
    bodies |= {name: (url, body) for name, (url, body, _) in BAD.items()}
    source = write(tmp_path / "in.jsonl", [line(name, *request) for name, request in bodies.items()])
    target = tmp_path / "out.jsonl"
    settings = Settings(max_requests=4, threads=1)
    ray.init(num_cpus=2, object_store_memory=150_000_000, include_dashboard=False, log_to_driver=False)
    try:
        reports = run(source, target, settings, replicas=2)
        for report in reports:
            if report.answered >= 4:
                break
        reports.close()
        before = target.read_text(encoding="utf-8")
        assert 4 <= before.count("\n") < len(bodies)
        with target.open("a") as opened:
            opened.write('{"id": "batch_req_1", "custom_id": "greedy 0", "resp')
        *_, last = run(source, target, settings, replicas=2)
        assert (last.lines, last.before) == (len(bodies), before.count("\n"))
        *_, nothing = run(source, target, settings, replicas=2)
        assert (nothing.before, nothing.answered, nothing.refused) == (len(bodies), 0, 0)
    finally:
        ray.shutdown()
    assert target.read_text(encoding="utf-8").startswith(before)
    answered = [json.loads(text) for text in target.read_text(encoding="utf-8").split("\n")[:-1]]
    assert sorted(item["custom_id"] for item in answered) == sorted(bodies)
    for item in answered:
        url, body = bodies[item["custom_id"]]
        if item["custom_id"] == "streamed":
            continue
        expected = server.post(url, body)
        assert item["response"]["status_code"] == expected.status_code
        if expected.status_code == 200:
            check_same(item["response"]["body"], expected.json())
        else:
            assert item["response"]["body"] == expected.json()


@pytest.mark.slow
def test_an_output_of_another_input_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("ray.data", reason='Ray Data is not installed: pip install "recguide[ray]"')
    from recguide.serving.ray_batch import run

    source = write(tmp_path / "in.jsonl", [line("a", CHAT, chat("x"))])
    target = write(tmp_path / "out.jsonl", ['{"custom_id": "z", "response": null}'])
    with pytest.raises(InputError, match="'z'"):
        next(run(source, target, Settings(), 1))
