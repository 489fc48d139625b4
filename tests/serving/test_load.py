"""Many clients at once, clients that go away, and a server that is told to stop."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from recguide.engine import EngineConfig
from recguide.tiny.examples import EXAMPLES

Running = Any  # conftest's, which no test can import
CLIENT = Path(__file__).parents[2] / "eval" / "serving.py"


def clients(url: str, tmp_path: Path, *options: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Clients in another process: figures, and each request's outcome."""
    pytest.importorskip("reasoning_gym")
    out = tmp_path / "outcomes.json"
    command = [sys.executable, str(CLIENT), "load", url, "--outcomes", str(out), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=True)
    return json.loads(done.stdout), json.loads(out.read_text())


def chat(**changes: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": EXAMPLES["math"]}]
    return {"model": "recguide-tiny", "messages": messages, "max_tokens": 24, "temperature": 0} | changes


@pytest.mark.slow
def test_200_streams_at_once_are_all_served(start: Callable[..., Running], tmp_path: Path) -> None:
    server = start(engine=EngineConfig(max_requests=16), max_waiting=184)
    figures, outcomes = clients(server.url, tmp_path, "--requests", "200", "--concurrency", "200", "--max-tokens", "12")
    assert figures["statuses"] == {"200": 200}
    assert figures["completed"] == 200
    # 48 prompts go round: every answer to one is the same, however full the batch was.
    assert figures["different_texts"] == 0
    assert all(one["tokens"] <= 12 and one["text"] for one in outcomes)
    server.settle()


@pytest.mark.slow
def test_who_finds_the_queue_full_is_told_when_to_come_back(start: Callable[..., Running], tmp_path: Path) -> None:
    server = start(engine=EngineConfig(max_requests=2), max_waiting=2)
    figures, outcomes = clients(server.url, tmp_path, "--requests", "60", "--concurrency", "30", "--max-tokens", "8")
    assert set(figures["statuses"]) == {"200", "429"}
    assert figures["completed"] == figures["statuses"]["200"] >= 4
    refused = [one for one in outcomes if one["status"] == 429]
    assert all(one["retry_after"] >= 1 and "queue_full" in one["error"] for one in refused)
    server.settle()


@pytest.mark.slow
def test_clients_that_go_away_free_their_places(start: Callable[..., Running], tmp_path: Path) -> None:
    server = start(engine=EngineConfig(max_requests=8), max_waiting=100)
    figures, _ = clients(
        server.url, tmp_path, "--requests", "80", "--concurrency", "20", "--leaving", "0.5", "--max-tokens", "64"
    )
    assert set(figures["statuses"]) == {"200", "-1"}
    assert figures["statuses"]["-1"] > 20
    assert figures["completed"] == figures["statuses"]["200"]
    assert figures["different_texts"] == 0
    server.settle()
    assert 'path="/v1/chat/completions",status="499"' in httpx.get(server.url + "/metrics").text


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_frees_its_place_in_the_middle(start: Callable[..., Running], stream: bool) -> None:
    server = start(engine=EngineConfig(max_requests=1))
    body = chat(max_tokens=1500, ignore_eos=True, recguide={"strategy": "ar"}, stream=stream)
    with httpx.Client() as client:
        if stream:
            with client.stream("POST", server.url + "/v1/chat/completions", json=body, timeout=60) as answer:
                # To let go of the iterator would close the connection.
                lines = answer.iter_lines()
                first = next(lines)
                assert (answer.status_code, first[:6]) == (200, "data: ")
                assert server.service.under_way == 1
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post(server.url + "/v1/chat/completions", json=body, timeout=1.5)
    # Far sooner than the 1500 tokens would take.
    server.settle(5)
    assert server.post("/v1/chat/completions", chat(max_tokens=2)).status_code == 200


def test_a_request_that_takes_too_long_ends_with_504(start: Callable[..., Running]) -> None:
    server = start(request_seconds=0.5)
    endless = chat(max_tokens=1900, ignore_eos=True, recguide={"strategy": "ar"})
    answer = server.post("/v1/chat/completions", endless)
    assert (answer.status_code, answer.json()["error"]["type"]) == (504, "timeout_error")
    with httpx.stream(
        "POST", server.url + "/v1/chat/completions", json=endless | {"stream": True}, timeout=60
    ) as answer:
        events = [line for line in answer.iter_lines() if line]
    assert answer.status_code == 200
    assert json.loads(events[-1].removeprefix("data: "))["error"]["type"] == "timeout_error"
    server.settle(10)


def test_more_answers_than_there_is_room_for_are_refused_for_good(start: Callable[..., Running]) -> None:
    server = start(engine=EngineConfig(max_requests=2), max_waiting=1)
    answer = server.post("/v1/completions", {"model": "recguide-tiny", "prompt": "a", "n": 4, "max_tokens": 2})
    assert answer.status_code == 400
    assert "the server takes 3" in answer.json()["error"]["message"]


# --- a process of its own -------------------------------------------------------------------------------------------


@pytest.fixture
def process() -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """`recguide serve`, its address, and its log as it comes."""
    command = [sys.executable, "-m", "recguide", "serve", "--port", "0", "--threads", "1", "--drain-seconds", "60"]
    log: list[str] = []
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        for line in server.stderr:
            log.append(line)
            if found := re.search(r"(http://127\.0\.0\.1:\d+)/v1", line):
                break
        else:
            pytest.fail(f"The server ended with {server.wait()}: {log}")
        reader = threading.Thread(target=lambda: log.extend(server.stderr or ()), daemon=True)
        reader.start()
        try:
            yield server, found[1], log
        finally:
            if server.poll() is None:
                server.kill()
            reader.join(10)


@pytest.mark.slow
def test_sigterm_lets_requests_end_and_takes_no_more(process: tuple[subprocess.Popen[str], str, list[str]]) -> None:
    server, url, log = process
    texts: dict[int, str] = {}

    def ask(number: int) -> None:
        body = chat(max_tokens=150, ignore_eos=True, stream=number % 2 == 0)
        answer = httpx.post(url + "/v1/chat/completions", json=body, timeout=100)
        assert answer.status_code == 200, answer.text
        if number % 2:
            texts[number] = answer.json()["choices"][0]["message"]["content"]
        else:
            assert answer.text.endswith("data: [DONE]\n\n")
            events = [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n")[:-2]]
            texts[number] = "".join(event["choices"][0]["delta"].get("content", "") for event in events)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + 60
    while 'recguide_answers_under_way{model_name="recguide-tiny"} 12.0' not in httpx.get(url + "/metrics").text:
        assert time.monotonic() < until
        time.sleep(0.02)
    server.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    with pytest.raises(httpx.ConnectError):
        httpx.get(url + "/health")
    for thread in threads:
        thread.join(100)
    assert len(texts) == 12
    assert len(set(texts.values())) == 1
    assert server.wait(60) == 0
    assert any("Stopping" in line for line in log)


@pytest.mark.slow
def test_the_log_has_a_line_a_request_and_no_prompt(process: tuple[subprocess.Popen[str], str, list[str]]) -> None:
    server, url, log = process
    secret = "my-secret-word"
    body = chat(messages=[{"role": "user", "content": secret}], user="someone", max_tokens=5)
    given = httpx.post(url + "/v1/chat/completions", json=body, headers={"x-request-id": "mine-1"}, timeout=60)
    assert given.headers["x-request-id"] == "mine-1"
    odd = {"x-request-id": "no {id}" * 30}
    assert re.fullmatch("[0-9a-f]{32}", httpx.get(url + "/v1/models", headers=odd).headers["x-request-id"])
    httpx.post(url + "/v1/chat/completions", json=body | {secret: secret}, timeout=60)
    httpx.post(url + "/v1/chat/completions", json=body | {"tools": [secret]}, timeout=60)
    httpx.post(
        url + "/v1/chat/completions",
        content=b'{"prompt": "' + secret.encode(),
        headers={"content-type": "application/json"},
    )
    httpx.get(url + "/health")
    server.send_signal(signal.SIGTERM)
    assert server.wait(60) == 0
    time.sleep(0.2)
    lines = [json.loads(line) for line in log if line.startswith("{")]
    assert [(line["path"], line["status"]) for line in lines] == [
        ("/v1/chat/completions", 200),
        ("/v1/models", 200),
        ("/v1/chat/completions", 400),
        ("/v1/chat/completions", 400),
        ("/v1/chat/completions", 400),
    ]
    first = lines[0]
    assert (first["request_id"], first["user"], first["completion_tokens"]) == ("mine-1", "someone", 5)
    assert first["strategy"] == "auto"
    assert {"queue_s", "ttft_s", "e2e_s", "rounds", "forwards", "accepted", "drafted", "seconds"} <= first.keys()
    assert not any(secret in line for line in log if '"error": "extra_forbidden' not in line)


def test_prompts_are_logged_where_that_is_asked_for(
    start: Callable[..., Running], caplog: pytest.LogCaptureFixture
) -> None:
    server = start(log_prompts=True)
    with caplog.at_level("INFO", "recguide.requests"):
        server.post("/v1/completions", {"model": "recguide-tiny", "prompt": "def f(", "max_tokens": 1})
        server.settle()
    assert json.loads(caplog.messages[-1])["prompts"] == ["def f("]


def test_a_seeded_text_under_load_is_generates(start: Callable[..., Running]) -> None:
    server = start(engine=EngineConfig(max_requests=4))
    ids = server.tokenizer("def f(")["input_ids"]
    answers: dict[int, str] = {}

    def ask(number: int) -> None:
        body = {"model": "recguide-tiny", "prompt": ids, "max_tokens": 16, "temperature": 0.9, "seed": number % 3}
        answers[number] = server.post("/v1/completions", body).json()["choices"][0]["text"]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    for seed in range(3):
        prompt = torch.tensor([ids])
        wanted = server.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), generation_strategy="ar", do_sample=True,
            temperature=0.9, top_k=0, seed=seed, max_new_tokens=16,
        )  # fmt: skip
        text = server.tokenizer.decode(wanted[0, len(ids) :], skip_special_tokens=True)
        assert [answers[number] for number in (seed, seed + 3, seed + 6)] == [text] * 3
