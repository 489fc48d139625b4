"""Options: their defaults, what is refused, and in which of several places they are looked for."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from recguide import ConfigError, RecGuideConfig, RecGuideError
from recguide.config import ATTENTION_BACKENDS, BLOCK_SIZES, STRATEGIES
from recguide.hf_strategy import resolve_config


def test_defaults() -> None:
    config = RecGuideConfig()
    assert dataclasses.asdict(config) == {
        "strategy": "recguide",
        "block_size": 16,
        "delta": 0.5,
        "max_corrections": 2,
        "continuation": True,
        "reuse": True,
        "exclude_eos_replacement": True,
        "draft_threshold": 0.0,
        "policy": "fixed",
        "tables": None,
        "attention_backend": "auto",
        "compile": False,
        "cuda_graphs": False,
    }


def test_how_forwards_are_run_may_be_chosen_under_auto_too() -> None:
    config = RecGuideConfig(strategy="auto", attention_backend="torch_sdpa")
    assert config.changed == {"attention_backend": "torch_sdpa"}
    assert RecGuideConfig().changed == {}


def test_a_config_is_frozen_and_compares_by_value() -> None:
    assert RecGuideConfig(delta=0.25) == RecGuideConfig.from_options({"delta": 0.25})
    with pytest.raises(dataclasses.FrozenInstanceError):
        RecGuideConfig().delta = 0.1  # type: ignore[misc]


@pytest.mark.parametrize(
    "options",
    [
        *({"block_size": size} for size in BLOCK_SIZES),
        *({"strategy": strategy} for strategy in STRATEGIES),
        {"delta": 0},
        {"delta": 1.0},
        {"max_corrections": 0},
        {"strategy": "linear", "draft_threshold": 1},
        {"continuation": False, "reuse": False, "exclude_eos_replacement": False},
    ],
    ids=str,
)
def test_values_that_are_allowed(options: dict[str, Any]) -> None:
    config = RecGuideConfig.from_options(options)
    assert {name: getattr(config, name) for name in options} == options


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"strategy": "medusa"}, ["medusa", *STRATEGIES]),
        ({"attention_backend": "flash"}, ["attention_backend", "'flash'", *ATTENTION_BACKENDS]),
        ({"compile": "max-autotune"}, ["compile", "True, False", "'max-autotune'"]),
        ({"cuda_graphs": 1}, ["cuda_graphs", "True, False", "got 1"]),
        ({"block_size": 0}, ["block_size", "got 0", *map(str, BLOCK_SIZES)]),
        ({"block_size": 12}, ["block_size", "got 12", "8, 16"]),
        ({"block_size": 4096}, ["block_size", "4096"]),
        ({"block_size": 16.0}, ["block_size", "16.0"]),
        ({"block_size": True}, ["block_size", "True"]),
        ({"block_size": "16"}, ["block_size", "'16'"]),
        ({"block_size": None}, ["block_size", "None"]),
        ({"delta": -0.1}, ["delta", "-0.1", "from 0 to 1"]),
        ({"delta": 1.01}, ["delta", "1.01", "from 0 to 1"]),
        ({"delta": float("nan")}, ["delta", "nan"]),
        ({"delta": True}, ["delta", "True"]),
        ({"delta": "0.5"}, ["delta", "'0.5'"]),
        ({"max_corrections": 3}, ["max_corrections", "got 3", "0, 1, 2"]),
        ({"max_corrections": -1}, ["max_corrections", "-1"]),
        ({"continuation": 1}, ["continuation", "got 1", "True, False"]),
        ({"reuse": None}, ["reuse", "None"]),
        ({"exclude_eos_replacement": "yes"}, ["exclude_eos_replacement", "'yes'"]),
        ({"strategy": "linear", "draft_threshold": 1.5}, ["draft_threshold", "1.5"]),
        ({"draft_threshold": 0.5}, ["draft_threshold=0.5", "linear", "recguide"]),
        ({"block_siez": 16}, ["block_siez", "block_size", "delta"]),
        ({"b": 1, "a": 2}, ["a, b", "max_corrections"]),
    ],
    ids=str,
)
def test_values_that_are_refused(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        RecGuideConfig.from_options(options)
    assert [word for word in words if word not in str(error.value)] == []
    assert isinstance(error.value, ValueError)
    assert isinstance(error.value, RecGuideError)


def test_resolve_from_nothing_a_dict_or_a_config() -> None:
    assert resolve_config("linear", None) == RecGuideConfig("linear")
    assert resolve_config("linear", {"block_size": 8}) == RecGuideConfig("linear", 8)
    assert resolve_config("linear", {"block_size": 8, "strategy": "linear"}) == RecGuideConfig("linear", 8)
    assert resolve_config("quadratic", RecGuideConfig("quadratic", 4)) == RecGuideConfig("quadratic", 4)


def test_resolving_leaves_the_users_dict_alone() -> None:
    options = {"block_size": 8}
    resolve_config("linear", options)
    assert options == {"block_size": 8}


def test_an_unknown_strategy_is_named_with_the_choices() -> None:
    with pytest.raises(ConfigError) as error:
        resolve_config("linaer", {})
    assert all(word in str(error.value) for word in ("'linaer'", *STRATEGIES))


@pytest.mark.parametrize("strategy", [["linear"], {"name": "linear"}, 3, ""])
def test_a_strategy_that_is_no_name(strategy: Any) -> None:
    with pytest.raises(ConfigError, match="Unknown generation_strategy"):
        resolve_config(strategy, None)


def test_two_strategies_that_disagree() -> None:
    with pytest.raises(ConfigError) as error:
        resolve_config("linear", {"strategy": "recguide"})
    assert "'linear'" in str(error.value)
    assert "'recguide'" in str(error.value)


@pytest.mark.parametrize("options", ["block_size=8", 8])
def test_options_that_are_no_dict(options: Any) -> None:
    with pytest.raises(ConfigError, match="recguide_config"):
        resolve_config("linear", options)
