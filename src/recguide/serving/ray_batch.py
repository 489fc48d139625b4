"""Answers to a file of requests by many engines, by Ray Data (extra: ray); resumable."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import ray
import ray.data

from ..errors import ConfigError, InputError
from .batch import Answerer, read_done, read_requests
from .settings import Settings

MOST_TASKS = 10_000
"""Of Ray's. One a line up to there, so that a line's answer is written when it has come; above, several lines share one."""


@dataclass
class BatchReport:
    """
    What a run has done.

    Args:
        lines (`int`): of the input.
        before (`int`): that the output had already.
        answered, refused (`int`): written now, with an answer and with an error.
    """

    lines: int = 0
    before: int = 0
    answered: int = 0
    refused: int = 0


def run(source: Path, target: Path, settings: Settings, replicas: int) -> Iterator[BatchReport]:
    """
    Answer the lines of a file that the output does not have yet. Each answer is written when it has come, in no certain order.

    Args:
        source, target (`Path`): JSONL, see [`BatchLine`]; what `target` has is kept.
        settings (`Settings`): of each engine.
        replicas (`int`): engines, each in a process of its own.

    Returns:
        `Iterator[BatchReport]`: the state before the first answer and after each; whoever stops iterating stops the run.

    Raises:
        InputError: a file is not what it should be.
        ConfigError: an option's value is not allowed, or the machine is too small for so many engines.
    """
    settings.server_config()
    requests, done = read_requests(source), read_done(target)
    if strangers := done - requests.keys():
        raise InputError(
            f"{target} has answers to requests that {source} does not have, such as {min(strangers)!r}. Give another output."
        )
    report = BatchReport(len(requests), len(done))
    yield report
    lines = [text for name, text in requests.items() if name not in done]
    if not lines:
        return
    with _started(settings, replicas), target.open("a", encoding="utf-8") as output:
        for line in _answers(lines, settings, replicas):
            output.write(line + "\n")
            output.flush()
            if json.loads(line)["response"]["status_code"] == 200:
                report.answered += 1
            else:
                report.refused += 1
            yield report


def _answers(lines: list[str], settings: Settings, replicas: int) -> Iterator[str]:
    ray.data.DataContext.get_current().enable_progress_bars = False
    data = ray.data.from_items(
        [{"line": line} for line in lines], override_num_blocks=min(len(lines), MOST_TASKS)
    ).map_batches(
        Answerer,
        fn_constructor_args=(settings,),
        batch_size=None,
        # An engine is kept full: it has more lines than places.
        compute=ray.data.ActorPoolStrategy(
            size=replicas,
            max_tasks_in_flight_per_actor=2 * settings.max_requests,
            max_concurrent_calls_per_actor=settings.max_requests,
        ),
        **settings.actor_options(),
    )
    for batch in data.iter_batches(batch_size=None, prefetch_batches=0):
        yield from map(str, batch["line"])


@contextlib.contextmanager
def _started(settings: Settings, replicas: int) -> Iterator[None]:
    """Ray: the one that is there, or one on this machine for as long as it is needed."""
    if ray.is_initialized():
        yield
        return
    ray.init(include_dashboard=False, log_to_driver=False)
    try:
        for name, needed in zip(("CPU", "GPU"), settings.actor_options().values(), strict=True):
            if (there := ray.cluster_resources().get(name, 0)) < needed * replicas:
                raise ConfigError(
                    f"{replicas} engines need {needed * replicas:g} {name}s, and Ray has {there:g}. Ask for fewer."
                )
        yield
    finally:
        ray.shutdown()
