from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from recguide import ConfigError, Engine, EngineConfig
from recguide.serving.server import local_engine
from recguide.serving.tokens import End, Round, TokenRequest


def request(**options: Any) -> TokenRequest:
    return TokenRequest([7, 8, 9], {"max_new_tokens": 12, "do_sample": False} | options)


def test_rounds_then_the_end(loaded: tuple[Any, Any]) -> None:
    local = local_engine(*loaded, EngineConfig())

    async def work() -> list[Round | End]:
        return [item async for item in local.decode(request(generation_strategy="linear"))]

    with Engine(loaded[0]) as other, local.engine:
        *rounds, end = asyncio.run(work())
        wanted = other.add_request([7, 8, 9], max_new_tokens=12, generation_strategy="ar").result(60)
    assert isinstance(end, End)
    assert [token for one in rounds if isinstance(one, Round) for token in one.tokens] == wanted.tokens
    assert end.figures.rounds == len(rounds) - 1
    assert not local.observer._under_way


def test_a_refused_request_leaves_nothing(loaded: tuple[Any, Any]) -> None:
    local = local_engine(*loaded, EngineConfig())

    async def work() -> None:
        async for _ in local.decode(request(top_logprobs=1)):
            pass

    with local.engine, pytest.raises(ConfigError, match="top_logprobs"):
        asyncio.run(work())
    assert not local.observer._under_way


def test_who_goes_while_a_request_is_submitted_leaves_nothing(
    loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    local = local_engine(*loaded, EngineConfig())
    began, go_on, submitted, submit = threading.Event(), threading.Event(), threading.Event(), local._submit

    def slowly(wanted: TokenRequest, at: float) -> Any:
        began.set()
        go_on.wait(60)
        found = submit(wanted, at)
        submitted.set()
        return found

    monkeypatch.setattr(local, "_submit", slowly)

    async def work() -> None:
        async def read() -> None:
            async for _ in local.decode(request(max_new_tokens=2000, eos_token_id=None, generation_strategy="ar")):
                pass

        task = asyncio.create_task(read())
        await asyncio.to_thread(began.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()
        for _ in range(1000):
            if submitted.is_set() and not local.observer._under_way:
                break
            await asyncio.sleep(0.01)

    with local.engine:
        asyncio.run(work())
        status = local.engine.status()
    assert (status.running, status.waiting, status.free_pages) == (0, 0, status.pages)
    assert not local.observer._under_way
