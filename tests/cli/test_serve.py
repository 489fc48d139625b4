from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from recguide.cli.main import app
from recguide.serving import server

RUN = CliRunner()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[server.ServerConfig]:
    """Configurations that would have been served."""
    found: list[server.ServerConfig] = []
    monkeypatch.setattr(server, "serve", lambda model, tokenizer, config: found.append(config))
    return found


def test_options_reach_the_server(served: list[server.ServerConfig], tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("a-key-that-nobody-guesses\nand more\n")
    line = (
        f"serve --served-model-name mine --strategy linear --block-size 8 --max-requests 3 --max-waiting 0 --kv-mib 7 "
        f"--prefix-sharing --scheduler bucketed --request-seconds 9 --drain-seconds 4 --api-key-file {key} --log-prompts"
    )
    result = RUN.invoke(app, line.split())
    assert result.exit_code == 0, result.output
    (config,) = served
    assert (config.name, config.host, config.port) == ("mine", "127.0.0.1", 8000)
    assert (config.speculation.strategy, config.speculation.block_size) == ("linear", 8)
    assert (config.engine.max_requests, config.engine.kv_bytes, config.engine.prefix_sharing) == (3, 7 * 2**20, True)
    assert (config.max_waiting, config.request_seconds, config.drain_seconds) == (0, 9.0, 4.0)
    assert (config.engine.scheduler, config.api_key, config.log_prompts) == (
        "bucketed",
        "a-key-that-nobody-guesses",
        True,
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("serve no/such/model", "no/such/model"),
        ("serve --strategy fast", "Unknown generation_strategy 'fast'"),
        ("serve --block-size 8", "decides by itself; it takes no block_size"),
        ("serve --strategy linear --block-size 7", "block_size must be one of"),
        ("serve --scheduler none", "Unknown scheduler 'none'"),
        ("serve --request-seconds 0", "request_seconds must be above 0"),
        ("serve --api-key-file no-such-file", "no-such-file"),
        ("serve --kv-mib 1", "KV pages hold no request"),
        ("serve --tensor-parallel", "torchrun"),
        ("serve --max-waiting=-1", "max-waiting"),
        ("serve --port 70000", "port"),
        ("serve --host 0.0.0.0", "requests must have a key"),
        ("serve --policy verification_guided --strategy linear --tables no-such-directory", "calibrate"),
        ("serve --dtype int8", "--dtype must be one of"),
    ],
)
def test_mistakes_are_told(line: str, words: str) -> None:
    result = RUN.invoke(app, line.split())
    assert result.exit_code == 2, result.output
    assert words in re.sub(r"[\s│]+", " ", result.output), result.output
    assert "Traceback" not in result.output


def test_keys(served: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = tmp_path / "empty"
    empty.write_text("")
    assert "is empty" in RUN.invoke(app, ["serve", "--api-key-file", str(empty)]).output
    monkeypatch.setenv("RECGUIDE_API_KEY", "short")
    assert "16 characters" in RUN.invoke(app, ["serve"]).output
    monkeypatch.setenv("RECGUIDE_API_KEY", "a-key-that-nobody-guesses")
    assert RUN.invoke(app, ["serve"]).exit_code == 0
    assert served[-1].api_key == "a-key-that-nobody-guesses"
    both = RUN.invoke(app, ["serve", "--api-key-file", str(empty)]).output
    assert "both given" in re.sub(r"\s+", " ", both)
