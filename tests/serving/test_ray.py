"""Two engines behind Ray Serve on this machine: texts, metrics, errors, cancelled requests, and a replica that is killed under load."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from recguide.errors import ConfigError
from recguide.loading import TINY
from recguide.tiny.examples import EXAMPLES

# Read when Ray is imported, here and in its processes: nothing of ours is reported to anybody.
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
ray = pytest.importorskip("ray", reason='Ray is not installed: pip install "recguide[ray]"')
pytest.importorskip("ray.serve", reason='Ray Serve is not installed: pip install "recguide[ray]"')

from ray import serve  # noqa: E402

from recguide.serving.ray_app import ServeArgs, build  # noqa: E402

pytestmark = pytest.mark.slow

STREAMS = 20
PLACES = 16


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Two replicas, behind Serve on a free port of 127.0.0.1."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    ray.init(num_cpus=3, object_store_memory=150_000_000, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(build(ServeArgs(min_replicas=2, max_replicas=2, max_requests=PLACES, threads=1)))
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


def body(index: int, **changes: Any) -> dict[str, Any]:
    """Requests of many kinds: each other prompts and lengths, half of them sampled."""
    prompt = list(EXAMPLES.values())[index % len(EXAMPLES)]
    return {
        "model": TINY,
        "messages": [{"role": "user", "content": f"{prompt} ({index})"}],
        "max_tokens": 192 + 8 * (index % 5),
        "ignore_eos": True,
        "temperature": 0.8 * (index % 2),
        "seed": index,
    } | changes


def metrics(url: str, name: str) -> dict[str, float]:
    """A metric by replica; under "" what is of none."""
    found = {}
    for line in httpx.get(url + "/metrics", timeout=60).text.splitlines():
        if line.startswith(name + "{"):
            labels, value = line[len(name) + 1 :].split("} ")
            found[dict(part.split("=") for part in labels.split(",")).get("replica", '""').strip('"')] = float(value)
    return found


def settle(url: str, seconds: float = 120) -> None:
    """Wait until two replicas hold nothing."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        running, held = metrics(url, "vllm:num_requests_running"), metrics(url, "vllm:kv_cache_usage_perc")
        if len(running) == 2 and not any(running.values()) and not any(held.values()):
            return
        time.sleep(0.2)
    raise AssertionError(f"Still held after {seconds} s: {running}, {held}")


def replica_pids() -> list[int]:
    """Processes of our replicas: workers of the raylet that this process has started."""
    pids = []
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if b"ServeReplica:default:EngineReplica" in (process / "cmdline").read_bytes():
                raylet = _parent(int(process.name))
                if _parent(raylet) == os.getpid():
                    pids.append(int(process.name))
    return pids


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


async def stream(
    client: httpx.AsyncClient, asked: dict[str, Any], started: Callable[[], None]
) -> tuple[str, list[str], list[Any]]:
    """Text, finish reasons and errors of a streamed answer; it has exactly one `[DONE]`, or an error."""
    text, reasons, errors, done = "", [], [], 0
    async with client.stream("POST", "/v1/chat/completions", json=asked | {"stream": True}) as reply:
        assert reply.status_code == 200, await reply.aread()
        async for line in reply.aiter_lines():
            if line == "data: [DONE]":
                done += 1
            elif line:
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    errors.append(event["error"])
                    continue
                (choice,) = event["choices"]
                if choice["delta"].get("content"):
                    text += choice["delta"]["content"]
                    started()
                if choice["finish_reason"]:
                    reasons.append(choice["finish_reason"])
    assert done == (not errors)
    return text, reasons, errors


def test_the_text_is_that_of_one_engine(url: str, server: Any) -> None:
    for index in range(4):
        asked = body(index)
        mine, other = (
            httpx.post(place + "/v1/chat/completions", json=asked, timeout=120).json() for place in (url, server.url)
        )
        assert mine["choices"] == other["choices"]
        assert mine["usage"]["completion_tokens"] == other["usage"]["completion_tokens"] == asked["max_tokens"]
        assert mine["recguide"]["seed"] == other["recguide"]["seed"]


def test_log_probabilities_come_through(url: str) -> None:
    reply = httpx.post(url + "/v1/chat/completions", json=body(0, logprobs=True, top_logprobs=2), timeout=120).json()
    content = reply["choices"][0]["logprobs"]["content"]
    assert len(content) == body(0)["max_tokens"]
    assert all(len(entry["top_logprobs"]) == 2 and entry["logprob"] <= 0 for entry in content)


def test_a_mistake_that_a_replica_finds_comes_as_itself(url: str, server: Any) -> None:
    asked = {"model": TINY, "prompt": [10**6], "max_tokens": 4, "temperature": 0}
    mine, other = (httpx.post(place + "/v1/completions", json=asked, timeout=60) for place in (url, server.url))
    assert (mine.status_code, mine.json()) == (other.status_code, other.json())
    assert mine.status_code == 400
    assert "vocabulary" in mine.json()["error"]["message"]
    assert metrics(url, "recguide_lost_total") == {"": 0}


def test_a_client_that_goes_frees_its_place(url: str) -> None:
    settle(url)

    async def leave() -> None:
        async with (
            httpx.AsyncClient(base_url=url, timeout=120) as client,
            client.stream("POST", "/v1/chat/completions", json=body(0, max_tokens=1500, stream=True)) as reply,
        ):
            async for line in reply.aiter_lines():
                if '"content":"' in line and '"content":""' not in line:
                    return

    asyncio.run(leave())
    settle(url)
    assert metrics(url, "recguide_answers_under_way") == {"": 0}
    assert metrics(url, "recguide_lost_total") == {"": 0}


def test_killed_under_load_no_answer_is_lost_or_given_twice(url: str, server: Any) -> None:
    settle(url)
    expected = [
        server.post("/v1/chat/completions", body(i)).json()["choices"][0]["message"]["content"] for i in range(STREAMS)
    ]
    pids = replica_pids()
    assert len(pids) == 2
    on_it: dict[str, float] = {}

    async def run() -> list[tuple[str, list[str], list[Any]]]:
        begun: Counter[int] = Counter()
        async with httpx.AsyncClient(base_url=url, timeout=240, limits=httpx.Limits(max_connections=None)) as client:
            tasks = []
            for index in range(STREAMS):
                tasks.append(asyncio.create_task(stream(client, body(index), lambda i=index: begun.update([i]))))
            while len(begun) < 16:
                assert not any(task.done() for task in tasks), "an answer ended before sixteen were under way"
                await asyncio.sleep(0.01)
            while len(on_it) < 2:
                on_it.update(await asyncio.to_thread(metrics, url, "vllm:num_requests_running"))
            os.kill(pids[0], signal.SIGKILL)
            return await asyncio.gather(*tasks)

    answers = asyncio.run(run())
    assert [errors for _, _, errors in answers] == [[]] * STREAMS
    assert [reasons for _, reasons, _ in answers] == [["length"]] * STREAMS
    assert [text for text, _, _ in answers] == expected
    # Those on the other replica went on where they were.
    lost = metrics(url, "recguide_lost_total")[""]
    assert 0 < lost <= max(on_it.values())
    assert STREAMS - lost >= min(on_it.values()) > 0
    settle(url)
    assert pids[0] not in replica_pids()
    assert len(replica_pids()) == 2, "the killed replica was not replaced"


def test_arguments_are_checked() -> None:
    with pytest.raises(ConfigError, match="min_replicas"):
        build(ServeArgs(min_replicas=3, max_replicas=2))
    with pytest.raises(ConfigError, match="scheduler"):
        build(ServeArgs(scheduler="none"))
    with pytest.raises(ValueError, match="modle"):
        ServeArgs.model_validate({"modle": "x"})
