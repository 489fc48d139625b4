from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from recguide.tiny.examples import EXAMPLES

Running = Any  # conftest's, which no test can import


def read(server: Running) -> dict[tuple[str, tuple[str, ...]], float]:
    """Samples by name and the values of their labels, the model's left out."""
    samples = {}
    for family in text_string_to_metric_families(httpx.get(server.url + "/metrics").text):
        for sample in family.samples:
            labels = tuple(value for name, value in sorted(sample.labels.items()) if name != "model_name")
            samples[sample.name, labels] = sample.value
    return samples


def test_metrics_add_up_to_the_answers(start: Callable[..., Running]) -> None:
    server = start()
    messages = [{"role": "user", "content": EXAMPLES["math"]}]
    answers = [
        server.post(
            "/v1/chat/completions",
            {"model": "recguide-tiny", "messages": messages, "max_tokens": 40, "temperature": 0, "recguide": own},
        ).json()
        for own in (
            {"strategy": "recguide"},
            {"strategy": "linear", "block_size": 8},
            {"strategy": "ar"},
            {"strategy": "auto"},
        )
    ]
    server.post("/v1/completions", {"model": "no", "prompt": ""})
    server.settle()
    seen = read(server)
    usage = [answer["usage"] for answer in answers]
    accepted = sum(one["completion_tokens_details"]["accepted_prediction_tokens"] for one in usage)
    rejected = sum(one["completion_tokens_details"]["rejected_prediction_tokens"] for one in usage)
    assert seen["vllm:prompt_tokens_total", ()] == sum(one["prompt_tokens"] for one in usage)
    assert seen["vllm:generation_tokens_total", ()] == sum(one["completion_tokens"] for one in usage)
    assert seen["vllm:spec_decode_num_accepted_tokens_total", ()] == accepted
    assert seen["vllm:spec_decode_num_draft_tokens_total", ()] == accepted + rejected
    positions = [
        value for (name, _), value in seen.items() if name == "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    ]
    assert sum(positions) == accepted
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_time_per_output_token"):
        assert seen[f"vllm:{name}_seconds_count", ()] == 4
    assert seen["vllm:time_to_first_token_seconds_sum", ()] < seen["vllm:e2e_request_latency_seconds_sum", ()]
    finished = sum(value for (name, _), value in seen.items() if name == "vllm:request_success_total")
    assert finished == 4
    rounds = sum(answer["recguide"]["rounds"] for answer in answers)
    assert sum(value for (name, _), value in seen.items() if name == "recguide_round_outcomes_total") == rounds
    assert sum(value for (name, _), value in seen.items() if name == "recguide_block_share") == pytest.approx(1)
    reused = sum(answer["recguide"]["reused"] for answer in answers)
    assert seen["recguide_reuse_share", ()] == pytest.approx(reused / rounds)
    assert seen["recguide_bucket_occupancy", ()] == 1
    assert seen["recguide_rho_tokens_per_ms", ("auto",)] > 0
    assert [seen["recguide_mode", (name,)] for name in ("ar", "auto")] == [0, 1]
    assert seen["vllm:num_requests_running", ()] == seen["vllm:num_requests_waiting", ()] == 0
    assert seen["vllm:kv_cache_usage_perc", ()] == 0
    assert seen["recguide_acceptance_collapsed", ()] == 0
    assert seen["recguide_http_requests_total", ("/v1/chat/completions", "200")] == 4
    assert seen["recguide_http_requests_total", ("/v1/completions", "404")] == 1


def test_spans_have_their_callers_and_no_prompt(start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from recguide.serving import server as module
    from recguide.serving.request_log import opentelemetry_span

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(module, "_tracer_span", lambda: opentelemetry_span(provider.get_tracer("test")))
    server = start(traces=True, log_prompts=True)
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    headers = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}
    body = {"model": "recguide-tiny", "prompt": "secret words", "max_tokens": 3, "temperature": 0}
    assert server.post("/v1/completions", body, headers=headers).status_code == 200
    server.settle()
    (span,) = exporter.get_finished_spans()
    assert span.name == "POST /v1/completions"
    assert f"{span.context.trace_id:032x}" == trace_id
    assert span.attributes is not None
    assert span.attributes["http.response.status_code"] == 200
    assert span.attributes["gen_ai.usage.output_tokens"] == 3
    assert span.attributes["recguide.strategy"] == "auto"
    assert "secret" not in str(dict(span.attributes))
