"""Many engines behind one address, by Ray Serve (extra: ray).

    serve run recguide.serving.ray_app:build model=recguide-tiny min_replicas=2 max_replicas=2

`EngineReplica` decodes, as many of them as the load asks for; `Front` takes the HTTP requests, turns texts into tokens and back, and asks
the replicas. A replica that dies loses no answer: see `failover`.
"""

# Annotations are types here and not texts: Ray Serve goes by that of `build`.

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Annotated, Any

from fastapi import FastAPI
from prometheus_client.core import CounterMetricFamily, Metric
from pydantic import Field
from ray import serve
from ray.exceptions import NodeDiedError, ObjectLostError, RayActorError, WorkerCrashedError
from ray.serve.exceptions import DeploymentUnavailableError, ReplicaUnavailableError

from ..engine import Engine
from ..errors import ConfigError, RecGuideError
from .failover import Failover, Lost
from .metrics import EngineMetrics, ReadWhenAsked, ServerMetrics
from .observer import EngineObserver
from .server import application, context_of, sampling_of
from .service import FINISH_REASONS, Limits, Service
from .settings import Settings
from .tokens import End, LocalEngine, Round, TokenRequest

MOST_FAULTS = 3
"""Requests in a row that an engine may fail by a fault of its own; then its replica is replaced."""
MOST_ONGOING = 100_000
"""Of Ray Serve's own limit for a replica; the one that holds is of the front's queue, which answers 429."""
METRICS_SECONDS = 10.0
"""That replicas have to tell their metrics; Prometheus waits no longer for a scrape."""
GRACE_SECONDS = 1.0
"""Until a request counts as cancelled by its replica."""
GONE = (NodeDiedError, ObjectLostError, RayActorError, ReplicaUnavailableError, WorkerCrashedError)


class ServeArgs(Settings):
    """
    Arguments of the application: those of any server, and how many replicas there are.

    The API key is taken from `RECGUIDE_API_KEY` where the application is built, so that it stands in no command line.

    Args:
        min_replicas, max_replicas (`int`): engines; their number follows the load.
        target_ongoing_requests (`float`, *optional*):
            Answers under way for each engine that their number aims at; by default three quarters of `max_requests`.
    """

    min_replicas: Annotated[int, Field(ge=0)] = 1
    max_replicas: Annotated[int, Field(ge=1)] = 1
    target_ongoing_requests: Annotated[float, Field(gt=0)] | None = None


# --- engines --------------------------------------------------------------------------------------------------------


class EngineReplica:
    """
    One engine in a process of its own.

    Args:
        args (`ServeArgs`): model and engine.
    """

    def __init__(self, args: ServeArgs) -> None:
        _log_to_stderr()
        config = args.server_config()
        model, tokenizer = args.load()
        observer = EngineObserver()
        self._engine = Engine(model, config.engine, [observer])
        self._local = LocalEngine(self._engine, observer, tokenizer)
        self._metrics = EngineMetrics(config.name, self._local)
        self._about = {
            "tokenizer": tokenizer,
            "context": context_of(model, self._engine),
            "sampling": sampling_of(model),
        }
        self._faults = 0

    async def decode(self, request: TokenRequest) -> AsyncGenerator[Round | End | RecGuideError]:
        """As of [`TokenSource`]. An error of the user's is an item, since Ray would log what is raised, and with it what the user sent."""
        try:
            async with contextlib.aclosing(self._local.decode(request)) as rounds:
                async for item in rounds:
                    yield item
            self._faults = 0
        except RecGuideError as error:
            yield error
        except Exception:
            self._faults += 1
            raise

    async def about(self) -> dict[str, Any]:
        """What the front needs of the model: its tokenizer, context and sampling."""
        return self._about

    async def metrics(self) -> tuple[str, list[Metric]]:
        """The replica's name, and the engine's metrics."""
        return serve.get_replica_context().replica_id.unique_id, list(self._metrics.collect())

    def check_health(self) -> None:
        """Ray Serve replaces a replica for which this raises."""
        if self._faults >= MOST_FAULTS:
            raise RuntimeError(f"The engine failed {self._faults} requests in a row by a fault of its own.")

    def __del__(self) -> None:
        # Ray Serve has waited for the requests under way. Where loading failed there is no engine.
        if (engine := getattr(self, "_engine", None)) is not None:
            engine.close()


class Replicas:
    """
    A [`TokenSource`] that asks replicas through Ray Serve, which chooses one for each request.

    Args:
        handle (`DeploymentHandle`): of the replicas.
    """

    def __init__(self, handle: Any) -> None:
        self._handle = handle.options(stream=True)

    async def decode(self, request: TokenRequest) -> AsyncGenerator[Round | End]:
        """
        As of [`TokenSource`].

        Raises:
            Lost: the replica is gone, or has given the request up.
        """
        answer = self._handle.decode.remote(request)
        try:
            async for item in answer:
                if isinstance(item, RecGuideError):
                    raise item
                if isinstance(item, End) and item.reason not in FINISH_REASONS:
                    raise Lost(f"The replica has ended the request: {item.reason}.")
                yield item
        except GONE as error:
            raise Lost(str(error)) from error
        except asyncio.CancelledError as error:
            # It looks the same where this request is cancelled, where Ray Serve cancels what a client that has gone asked for (ahead of
            # telling us), and where a replica gives a request up. In the first two, this task ends here.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            await asyncio.sleep(GRACE_SECONDS)
            raise Lost("The replica has cancelled the request.") from error
        finally:
            answer.cancel()


# --- the front ------------------------------------------------------------------------------------------------------


class ReplicaMetrics(ReadWhenAsked):
    """
    Metrics of all replicas, each with the label `replica`.

    Args:
        name (`str`): the model's, as requests call it.
        source (`Failover`): knows how often answers were lost.
    """

    def __init__(self, name: str, source: Failover) -> None:
        self._name, self._source = name, source
        self.families: Mapping[str, list[Metric]] = {}
        """By replica, as they were read last."""

    def collect(self) -> Iterator[Metric]:
        lost = CounterMetricFamily(
            "recguide_lost",
            "Times an answer was lost with its replica, and begun again by another.",
            labels=("model_name",),
        )
        lost.add_metric((self._name,), self._source.lost)
        yield lost
        together: dict[str, Metric] = {}
        for replica, families in self.families.items():
            for family in families:
                whole = together.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                whole.samples += [s._replace(labels=s.labels | {"replica": replica}) for s in family.samples]
        yield from together.values()


class FrontMetrics(ServerMetrics):
    """
    Metrics of the front, and of its replicas as they answer.

    Args:
        service (`Service`): that answers.
        source (`Failover`): decodes for it.
        handle (`DeploymentHandle`): of the replicas.
    """

    def __init__(self, service: Service, source: Failover, handle: Any) -> None:
        self._handle, self._replicas = handle, ReplicaMetrics(service.name, source)
        super().__init__(service, self._replicas)

    async def text(self) -> bytes:
        """All of them, in Prometheus' text format. Those of the replicas are left out where one does not answer in time."""
        try:
            answers = await self._handle.broadcast("metrics").results_async(
                timeout_s=METRICS_SECONDS, return_exceptions=True
            )
        except (DeploymentUnavailableError, TimeoutError):
            answers = []
        self._replicas.families = dict(answer for answer in answers if not isinstance(answer, BaseException))
        return await super().text()


class Front:
    """
    HTTP, texts and the queue.

    Args:
        args (`ServeArgs`): of the application.
        api_key (`str`, *optional*): that requests must have.
        handle (`DeploymentHandle`): of the replicas.
    """

    def __init__(self, args: ServeArgs, api_key: str | None, handle: Any) -> None:
        _log_to_stderr()
        self._args, self._config, self._handle = args, args.server_config(api_key), handle

    async def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Ray Serve when the front starts."""
        config = self._config
        about = await self._handle.about.remote()
        limits = Limits(
            self._args.max_requests * self._args.max_replicas,
            config.max_waiting,
            config.request_seconds,
            about["context"],
        )
        source = Failover(Replicas(self._handle))
        service = Service(config.name, about["tokenizer"], source, limits, about["sampling"], config.speculation)
        service.config_of(None)
        return application(service, FrontMetrics(service, source, self._handle), config)


def _log_to_stderr() -> None:
    """One line of JSON a request, as `recguide serve` has it; Ray keeps a process's standard error."""
    logging.basicConfig(stream=sys.stderr, format="%(message)s")
    logging.getLogger("recguide").setLevel(logging.INFO)


# --- the application ------------------------------------------------------------------------------------------------


def build(args: ServeArgs) -> serve.Application:
    """
    The application, for `serve run`, a Serve configuration file, or `serve.run`.

    Args:
        args (`ServeArgs`): models, sizes, replicas.
    """
    if args.min_replicas > args.max_replicas:
        raise ConfigError(
            f"min_replicas={args.min_replicas} is above max_replicas={args.max_replicas}. Raise the latter."
        )
    api_key = os.environ.get("RECGUIDE_API_KEY")
    config = args.server_config(api_key)
    target = args.target_ongoing_requests or max(1.0, 0.75 * args.max_requests)
    engines = serve.deployment(
        EngineReplica,
        autoscaling_config={
            "min_replicas": args.min_replicas,
            "max_replicas": args.max_replicas,
            "target_ongoing_requests": target,
        },
        # Never reached: an engine's own queue fills a free place at the next step, and a full replica would not tell its metrics.
        max_ongoing_requests=MOST_ONGOING,
        graceful_shutdown_timeout_s=config.drain_seconds,
        ray_actor_options=args.actor_options(),
    ).bind(args)
    # One, since its queue and its speculation are those of the whole application.
    front = serve.deployment(
        serve.ingress()(Front),
        num_replicas=1,
        max_ongoing_requests=MOST_ONGOING,
        graceful_shutdown_timeout_s=config.drain_seconds,
        ray_actor_options={"num_cpus": 0},
    )
    return front.bind(args, api_key, engines)
