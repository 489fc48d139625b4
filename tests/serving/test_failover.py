"""An answer that is begun again elsewhere: no token is given twice or lost, and another text is an error."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest

from recguide.errors import InputError
from recguide.hf_outputs import TokenLogprobs
from recguide.serving.failover import TRIES, AnswerLost, Failover, Lost
from recguide.serving.observer import Figures
from recguide.serving.tokens import End, Round, TokenRequest

REQUEST = TokenRequest([1], {})
END = End("length", Figures(queue=1.0, ttft=2.0, e2e=5.0, rounds=3))


class Scripted:
    """A source whose tries go as they are given: rounds, an end, or an error to raise."""

    def __init__(self, *tries: list[list[int] | Round | End | Exception]) -> None:
        self._tries = iter(tries)
        self.asked = self.left = 0

    async def decode(self, request: TokenRequest) -> AsyncGenerator[Round | End]:
        assert request is REQUEST
        self.asked += 1
        try:
            for item in next(self._tries):
                if isinstance(item, Exception):
                    raise item
                yield Round(item) if isinstance(item, list) else item
        finally:
            self.left += 1


def answer(source: Scripted) -> tuple[list[Round], End | Exception]:
    """The rounds that come, and what they end with."""
    rounds: list[Round] = []

    async def read() -> End | Exception:
        try:
            async for item in Failover(source).decode(REQUEST):
                if isinstance(item, End):
                    return item
                rounds.append(item)
        except Exception as error:
            return error
        raise AssertionError("the answer has no end")

    end = asyncio.run(read())
    assert source.left == source.asked, "a try was left open"
    return rounds, end


def tokens(rounds: list[Round]) -> list[int]:
    return [token for item in rounds for token in item.tokens]


def test_without_a_loss_everything_is_as_it_comes() -> None:
    rounds, end = answer(Scripted([[1, 2], [3], END]))
    assert rounds == [Round([1, 2]), Round([3])]
    assert end == END


@pytest.mark.parametrize("lost_after", range(7))
@pytest.mark.parametrize("again", [[[1, 2, 3, 4, 5, 6]], [[1], [2, 3], [4, 5], [6]], [[1, 2, 3, 4, 5], [6]]])
def test_lost_anywhere_and_cut_otherwise_no_token_is_lost_or_given_twice(
    lost_after: int, again: list[list[int]]
) -> None:
    before = [[token] for token in range(1, lost_after + 1)]
    source = Scripted([*before, Lost("gone")], [*again, END])
    rounds, end = answer(source)
    assert tokens(rounds) == [1, 2, 3, 4, 5, 6]
    assert isinstance(end, End)
    assert all(item.tokens for item in rounds)
    assert source.asked == 2


def test_log_probabilities_go_with_their_tokens() -> None:
    known = [TokenLogprobs(-float(token)) for token in range(1, 5)]
    source = Scripted(
        [Round([1, 2], known[:2]), Lost("gone")], [Round([1, 2, 3], known[:3]), Round([4], known[3:]), END]
    )
    rounds, _ = answer(source)
    assert [pair for item in rounds for pair in zip(item.tokens, item.logprobs, strict=True)] == [
        (token, TokenLogprobs(-float(token))) for token in range(1, 5)
    ]


def test_times_are_of_all_tries_and_costs_of_the_last() -> None:
    _, end = answer(Scripted([[1], Lost("gone")], [[1, 2], END]))
    assert isinstance(end, End)
    assert end.figures.e2e > END.figures.e2e
    # The first token came in the first try, long before the second one's 2 s.
    assert end.figures.queue <= end.figures.ttft < 1.0
    assert end.figures.rounds == 3
    assert math.isfinite(end.figures.ttft)


@pytest.mark.parametrize(
    "again",
    [[[1, 9, 3], END], [[9], END], [[1, 2], [9], END], [[1], END], [END]],
    ids=["within a round", "at once", "after a round", "ends before", "ends at once"],
)
def test_another_text_is_an_error_and_not_a_mixture(again: list[list[int] | End]) -> None:
    source = Scripted([[1, 2, 3], Lost("gone")], again)
    rounds, end = answer(source)
    assert tokens(rounds) == [1, 2, 3]
    assert isinstance(end, AnswerLost)
    assert "otherwise" in str(end)
    assert source.asked == 2


def test_an_answer_that_is_lost_again_and_again_ends() -> None:
    source = Scripted(*[[[1], Lost("gone")]] * (TRIES + 1))
    rounds, end = answer(source)
    assert tokens(rounds) == [1]
    assert isinstance(end, AnswerLost)
    assert source.asked == TRIES


@pytest.mark.parametrize("error", [InputError("too long"), RuntimeError("a fault")])
def test_what_is_no_loss_is_not_asked_again(error: Exception) -> None:
    source = Scripted([[1], error], [[1, 2], END])
    _, end = answer(source)
    assert end is error
    assert source.asked == 1


def test_leaving_leaves_the_source() -> None:
    source = Scripted([[1], [2], END])

    async def leave() -> None:
        rounds = Failover(source).decode(REQUEST)
        await anext(rounds)
        await rounds.aclose()

    asyncio.run(leave())
    assert source.left == 1


def test_losses_are_counted() -> None:
    failover = Failover(Scripted([[1], Lost("gone")], [[1], Lost("gone")], [[1], replace(END, reason="eos")]))

    async def read() -> list[Round | End]:
        return [item async for item in failover.decode(REQUEST)]

    assert len(asyncio.run(read())) == 2
    assert failover.lost == 2
