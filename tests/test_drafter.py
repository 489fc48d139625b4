"""Other families' ways of drafting are a small value; whatever it says, the output is plain decoding's."""

from typing import Any

import pytest

from recguide import RecGuideConfig, UnsupportedError
from recguide.adapter import Drafter, ModelAdapter
from recguide.attention import resolve_backend
from recguide.loop import generate, method_of
from recguide.rounds import Request
from recguide.testing import MASK, toy_model

MODEL = toy_model()
NOISE = Drafter(filler_token_id=7, excluded_token_ids=(MASK,), adapter_on_seed=False, shifted=True)


def decode(drafter: Drafter | None, **options: Any) -> list[int]:
    adapter = ModelAdapter(MODEL, resolve_backend(), drafter)
    method = method_of(RecGuideConfig(**options), frozenset(), adapter)
    request = Request(0, [1, 2, 3], 30, lambda tokens: None, method)
    generate([request], adapter)
    return request.tokens


@pytest.mark.parametrize(
    "options",
    [{"strategy": "linear"}, {"strategy": "recguide", "continuation": False, "delta": 0.9}, {"strategy": "ar"}],
)
@pytest.mark.parametrize("block_size", [2, 8])
def test_output_does_not_depend_on_the_drafter(options: dict[str, Any], block_size: int) -> None:
    assert decode(NOISE, block_size=block_size, **options) == decode(None, strategy="ar")


@pytest.mark.parametrize("strategy", ["recguide", "quadratic"])
def test_what_shifted_logits_cannot_do_is_refused_first(strategy: str) -> None:
    with pytest.raises(UnsupportedError, match="shifted"):
        decode(NOISE, strategy=strategy)


def test_the_adapter_flag_of_the_seed_and_the_outputs() -> None:
    adapter = ModelAdapter(MODEL, resolve_backend(), NOISE)
    segment = adapter.block([9, None, 4, None], 10)
    assert segment.tokens == [9, 7, 4, 7]
    assert segment.outputs == (0, 3)
    assert ModelAdapter(MODEL, resolve_backend()).block([9, None], 10).outputs == (1, None)
    assert ModelAdapter(MODEL, resolve_backend()).block([None, None], 10).outputs == (0, None)
