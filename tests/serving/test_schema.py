"""What the OpenAPI description says, the server does: generated requests, right ones and wrong ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from recguide.engine import EngineConfig

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]


@pytest.fixture(scope="module")
def description(loaded: tuple[Any, Any], listening: Any) -> Iterator[Any]:
    # Pages for a few dozen tokens, so that no generated length takes long.
    with listening(loaded, engine=EngineConfig(max_requests=4, kv_bytes=3 * 2**19 + 2**18), max_waiting=0) as server:
        assert 16 < server.service.limits.context < 200
        yield schemathesis.openapi.from_url(server.url + "/openapi.json")


ROUTES = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{name}"),
    ("GET", "/recguide/speculation"),
    ("PUT", "/recguide/speculation"),
    ("GET", "/health"),
    ("GET", "/metrics"),
]


def test_all_routes_are_described(description: Any) -> None:
    described = {(found.method.upper(), found.path) for found in operations(description)}
    assert described == set(ROUTES)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_every_route_is_as_described(description: Any, method: str, path: str, mode: GenerationMode) -> None:
    operation = description[path][method]
    if mode is GenerationMode.NEGATIVE and not operation.body:
        pytest.skip("takes nothing that could be wrong")

    @settings(max_examples=15 if operation.body else 3, deadline=None, suppress_health_check=list(HealthCheck))
    @given(operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        if isinstance(case.body, dict) and mode is GenerationMode.POSITIVE:
            case.body["model"] = "recguide-tiny"
        case.call_and_validate(checks=CHECKS, timeout=60)

    check()


def operations(description: Any) -> list[Any]:
    return [found.ok() for found in description.get_all_operations()]
