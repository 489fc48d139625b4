"""Answers that outlive whoever writes them: another begins again, and what was given is not given twice."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import AsyncGenerator
from dataclasses import replace

from .observer import Figures
from .tokens import End, Round, TokenRequest, TokenSource

logger = logging.getLogger(__name__)

TRIES = 3
"""Of one request. One that brings down whoever decodes it must not go through all of them."""


class Lost(Exception):
    """Whoever decoded a request is gone."""


class AnswerLost(Exception):
    """An answer cannot be completed: it was lost too often, or it came out otherwise when it was written again."""


class Failover:
    """
    Asks for a request again where it was lost, and goes on behind the tokens that were given.

    Decoding depends on the request alone, so the tokens up to there are the same ones. That is checked: where they are others, as may be in
    half precision, the answer ends with an error and not as a mixture of two.

    Args:
        source (`TokenSource`): raises [`Lost`] where a request is lost; asked again, it asks another.
    """

    def __init__(self, source: TokenSource) -> None:
        self.lost = 0
        """How often an answer was lost."""
        self._source = source

    async def decode(self, request: TokenRequest) -> AsyncGenerator[Round | End]:
        """
        As of [`TokenSource`]. Of an answer that was begun again, the times are those of all tries and the costs those of the last.

        Raises:
            AnswerLost: the answer cannot be completed.
        """
        given: list[int] = []
        began, first = time.perf_counter(), math.inf
        for attempt in range(1, TRIES + 1):
            before = time.perf_counter() - began
            again = _Again(given)
            try:
                async with contextlib.aclosing(self._source.decode(request)) as rounds:
                    async for item in rounds:
                        if isinstance(item, End):
                            again.check_end()
                            if attempt > 1:
                                item = replace(item, figures=_of_all_tries(item.figures, before, first))
                            yield item
                            return
                        if (new := again.behind(item)).tokens:
                            first = min(first, time.perf_counter() - began)
                            given += new.tokens
                            yield new
            except Lost as error:
                self.lost += 1
                logger.warning("Lost after %d tokens, try %d of %d: %s", len(given), attempt, TRIES, error)
        raise AnswerLost(f"The answer was lost {TRIES} times, each time with whoever wrote it.")


class _Again:
    """An answer that is written again, up to where it was given already."""

    def __init__(self, given: list[int]) -> None:
        self._expected = list(given)

    def behind(self, item: Round) -> Round:
        """What of a round is new."""
        known = min(len(self._expected), len(item.tokens))
        if item.tokens[:known] != self._expected[:known]:
            raise _otherwise()
        del self._expected[:known]
        return Round(item.tokens[known:], None if item.logprobs is None else item.logprobs[known:])

    def check_end(self) -> None:
        """The answer must not end before that."""
        if self._expected:
            raise _otherwise()


def _otherwise() -> AnswerLost:
    return AnswerLost(
        "The answer was lost with whoever wrote it, and came out otherwise when it was written again; in float32 it would be the same."
    )


def _of_all_tries(figures: Figures, before: float, first: float) -> Figures:
    """The last try's figures, from the first submission on; `before` and `first` are the seconds to its start and to the first token."""
    return replace(
        figures,
        queue=min(figures.queue + before, first),
        ttft=min(figures.ttft + before, first),
        e2e=figures.e2e + before,
    )
