"""Prometheus metrics: vLLM's names where they mean the same, `recguide_` for what only this engine has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..config import STRATEGIES
from .observer import Figures
from .service import Service
from .tokens import LocalEngine

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_SECONDS_A_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)


class ServerMetrics:
    """
    Counts requests, and shows how the engine is doing when it is asked.

    Args:
        service (`Service`): that answers.
        engines (`Collector`): of the engines that decode for it.
    """

    def __init__(self, service: Service, engines: Collector) -> None:
        self._registry = CollectorRegistry()

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, ("model_name",), registry=self._registry).labels(service.name)

        def histogram(name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(name, text, ("model_name",), registry=self._registry, buckets=buckets).labels(service.name)

        self._queue = histogram("vllm:request_queue_time_seconds", "From submission to the first forward.")
        self._ttft = histogram("vllm:time_to_first_token_seconds", "From submission to the first token.")
        self._e2e = histogram("vllm:e2e_request_latency_seconds", "From submission to the last token.")
        self._tpot = histogram(
            "vllm:request_time_per_output_token_seconds", "Between an answer's tokens, in its mean.", _SECONDS_A_TOKEN
        )
        self._prompt = counter("vllm:prompt_tokens", "Prompt tokens of requests that were taken on.")
        self._generated = counter("vllm:generation_tokens", "Tokens written.")
        self._preempted = counter("vllm:num_preemptions", "Times an answer lost its KV pages to others.")
        self._success = Counter(
            "vllm:request_success",
            "Answers that came to their end.",
            ("model_name", "finished_reason"),
            registry=self._registry,
        )
        self._http = Counter(
            "recguide_http_requests", "HTTP requests by path and status; 499: the client had gone.", ("path", "status"),
            registry=self._registry,
        )  # fmt: skip
        self._name = service.name
        self._registry.register(_ServiceMetrics(service))
        self._registry.register(engines)

    def http(self, path: str, status: int) -> None:
        """An HTTP request has ended."""
        self._http.labels(path, str(status)).inc()

    def prompts(self, tokens: int) -> None:
        """A request with prompts of so many tokens is being answered."""
        self._prompt.inc(tokens)

    def tokens(self, count: int) -> None:
        """So many tokens were written."""
        self._generated.inc(count)

    def answered(self, reason: str, figures: Figures, tokens: int) -> None:
        """An answer has come to its end."""
        self._success.labels(self._name, reason).inc()
        self._preempted.inc(figures.preempted)
        self._queue.observe(figures.queue)
        self._ttft.observe(figures.ttft)
        self._e2e.observe(figures.e2e)
        if tokens > 1:
            self._tpot.observe((figures.e2e - figures.ttft) / (tokens - 1))

    async def text(self) -> bytes:
        """All of them, in Prometheus' text format."""
        return generate_latest(self._registry)


class ReadWhenAsked(Collector):
    """Metrics that are read when somebody asks for them."""

    def describe(self) -> Iterable[Metric]:
        # Without it the registry would collect once to learn the names.
        return []


class _ServiceMetrics(ReadWhenAsked):
    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        under_way = GaugeMetricFamily(
            "recguide_answers_under_way", "Answers taken on, running or waiting.", labels=("model_name",)
        )
        under_way.add_metric((self._service.name,), self._service.under_way)
        yield under_way
        mode = GaugeMetricFamily(
            "recguide_mode", "1 for the strategy of requests that name none.", labels=("strategy",)
        )
        for strategy in STRATEGIES:
            mode.add_metric((strategy,), float(strategy == self._service.speculation.strategy))
        yield mode


class EngineMetrics(ReadWhenAsked):
    """
    How an engine is doing.

    Args:
        name (`str`): the model's, as requests call it.
        local (`LocalEngine`): the engine.
    """

    def __init__(self, name: str, local: LocalEngine) -> None:
        self._name, self._local = name, local

    def collect(self) -> Iterator[Metric]:
        yield from self._of_engine()
        yield from self._of_drafts()

    def _of_engine(self) -> Iterator[Metric]:
        status = self._local.engine.status()
        yield self._gauge("vllm:num_requests_running", "Answers that hold a place in the engine.", status.running)
        yield self._gauge("vllm:num_requests_waiting", "Answers that wait for one.", status.waiting)
        used = 1 - status.free_pages / status.pages
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of the KV pages that are held; 1 is all.", used)
        rho = GaugeMetricFamily(
            "recguide_rho_tokens_per_ms",
            "Committed tokens that a millisecond is worth to a policy.",
            labels=("policy",),
        )
        for policy, price in status.prices.items():
            rho.add_metric((policy,), price)
        yield rho

    def _of_drafts(self) -> Iterator[Metric]:
        seen, recent = self._local.observer.counts(), self._local.observer.recent()
        yield self._counter("vllm:spec_decode_num_drafts", "Rounds that verified a draft.", seen.drafts)
        yield self._counter(
            "vllm:spec_decode_num_draft_tokens", "Drafted tokens that were verified.", seen.draft_tokens
        )
        yield self._counter(
            "vllm:spec_decode_num_accepted_tokens",
            "Drafted tokens that the verifier agreed with.",
            seen.accepted_tokens,
        )
        yield self._counters(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Likewise, by place in the draft.",
            "position",
            seen.accepted_by_position,
        )
        yield self._counters("recguide_forwards", "Forwards, by kind.", "kind", seen.forwards)
        yield self._counters("recguide_query_tokens", "Query tokens of forwards, by kind.", "kind", seen.query_tokens)
        yield self._counters(
            "recguide_round_outcomes", "Rounds by their end: what became of branches.", "outcome", seen.outcomes
        )
        share = GaugeMetricFamily(
            "recguide_block_share", "Share of the last rounds, by block size.", labels=("block_size",)
        )
        for size, value in recent.block_share.items():
            share.add_metric((str(size),), value)
        yield share
        yield self._gauge(
            "recguide_reuse_share", "Share of the last rounds whose draft came from a branch.", recent.reuse_share
        )
        yield self._gauge(
            "recguide_bucket_occupancy", "Requests in a verifying forward, in the mean of the last.", recent.occupancy
        )
        if recent.first_accepted is not None:
            yield self._gauge(
                "recguide_first_draft_acceptance",
                "Share of first drafted tokens that were accepted.",
                recent.first_accepted,
            )
        yield self._gauge(
            "recguide_acceptance_collapsed",
            "1 while drafts are hardly ever right: is the adapter another model's? Texts are right all the same, and slow.",
            float(recent.has_collapsed),
        )

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=("model_name",))
        family.add_metric((self._name,), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=("model_name",))
        family.add_metric((self._name,), value)
        return family

    def _counters(self, name: str, text: str, label: str, values: dict[Any, int]) -> Metric:
        family = CounterMetricFamily(name, text, labels=("model_name", label))
        for key, value in sorted(values.items()):
            family.add_metric((self._name, str(key)), value)
        return family
