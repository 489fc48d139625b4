"""What the OpenAPI description says, the server does: generated requests, right ones and wrong ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
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
    with listening(loaded, engine=EngineConfig(max_requests=4, kv_bytes=3 * 2**19 + 2**18)) as server:
        assert 16 < server.service.limits.context < 200
        yield schemathesis.openapi.from_url(server.url + "/openapi.json")


schema = schemathesis.pytest.from_fixture("description")


@pytest.mark.slow
@schema.parametrize()
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_every_route_is_as_described(case: Any) -> None:
    if isinstance(case.body, dict) and case.meta.generation.mode is GenerationMode.POSITIVE:
        case.body["model"] = "recguide-tiny"
    case.call_and_validate(checks=CHECKS, timeout=60)
