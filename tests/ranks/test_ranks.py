"""A model that is split over two processes writes what it writes in one, whatever differs between them."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import recguide
from recguide import ConfigError, NemotronLabsDiffusionModel, UnsupportedError
from recguide.loading import load
from recguide.models.draft_adapter import DraftAdapterConfig, add_draft_adapter
from recguide.ranks import FIRST, LENGTH, Ranks, Word
from recguide.testing import priced_time, toy_config

PROGRAM = Path(__file__).with_name("program.py")
_spec = importlib.util.spec_from_file_location("ranks_program", PROGRAM)
assert _spec is not None
assert _spec.loader is not None
program = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(program)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model() -> NemotronLabsDiffusionModel:
    """With draft adapters on layers that are split by their inputs and by their outputs."""
    generator = torch.Generator().manual_seed(1)
    made = NemotronLabsDiffusionModel(toy_config(vocab_size=64, num_attention_heads=4, num_key_value_heads=2)).eval()
    add_draft_adapter(made, DraftAdapterConfig(r=4, lora_alpha=8.0, target_modules=("o_proj", "q_proj", "up_proj")))
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return made


def run(model: NemotronLabsDiffusionModel, folder: Path, part: str) -> list[dict[str, Any]]:
    """What the two processes have seen, which load the model from `folder`."""
    model.save_pretrained(folder / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(recguide.tiny_path(), name), folder / "model")
    source = Path(recguide.__file__).parents[1]
    kernels = source.parent / "kernels"
    paths = os.pathsep.join(map(str, (source, kernels, *filter(None, [os.environ.get("PYTHONPATH")]))))
    environment = os.environ | {"PYTHONPATH": paths, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    commands = [[sys.executable, str(PROGRAM), str(rank), str(folder), part] for rank in range(program.SIZE)]
    processes = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command in commands
    ]
    try:
        said = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n\n".join(said)
    return [json.loads((folder / f"{part}-{rank}.json").read_text()) for rank in range(program.SIZE)]


@pytest.fixture(scope="module")
def together(model: NemotronLabsDiffusionModel, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(model, tmp_path_factory.mktemp("ranks"), "together")


def test_generate_is_what_it_is_in_one_process(
    model: NemotronLabsDiffusionModel, together: list[dict[str, Any]]
) -> None:
    """Every strategy, greedy and sampled; where no seed is given, rank 0's is drawn."""
    for name, arguments in program.calls().items():
        torch.manual_seed(0)
        expected = model.generate(**arguments).tolist()
        assert [seen["texts"][name] for seen in together] == [expected, expected], name


def test_clocks_that_differ_do_not_divide_the_ranks(
    model: NemotronLabsDiffusionModel, together: list[dict[str, Any]]
) -> None:
    """By its own clock each rank would run other rounds; all run those of rank 0's."""
    arguments = program.calls()["greedy auto"] | {"max_new_tokens": 120}
    alone = []
    for rank in range(program.SIZE):
        recguide.policy.SHELF._idle.pop(model, None)
        with priced_time(program.milliseconds(rank)):
            alone.append(model.generate(**arguments, return_dict_in_generate=True, output_records=True))
    rounds = [program.rounds_of(output.records) for output in alone]
    assert rounds[0] != rounds[1]
    expected = alone[0].sequences.tolist()
    assert [seen["clocked"] for seen in together] == [expected, expected]
    assert together[0]["rounds"] is not None
    assert [seen["statistics"] for seen in together] == [True, False]


def test_going_on_from_a_cache(model: NemotronLabsDiffusionModel, together: list[dict[str, Any]]) -> None:
    first = model.generate(**program.calls()["greedy recguide"])
    longer = torch.cat((first, torch.tensor([[30, 31]])), dim=1)
    expected = model.generate(longer, max_new_tokens=20, generation_strategy="ar").tolist()
    assert [seen["continued"] for seen in together] == [expected, expected]
    assert [seen["heads in the cache"] for seen in together] == [[1], [1]]


def test_a_call_that_fails_on_rank_0_fails_on_all_and_the_next_one_works(
    model: NemotronLabsDiffusionModel, together: list[dict[str, Any]]
) -> None:
    assert together[0]["failed call"] == "ArithmeticError: a hook of rank 0's"
    assert together[1]["failed call"].startswith("RankError: ")
    assert "ArithmeticError: a hook of rank 0's" in together[1]["failed call"]
    expected = model.generate(**program.calls()["greedy recguide"]).tolist()
    assert [seen["after it"] for seen in together] == [expected, expected]


def test_what_was_never_tried_is_refused(together: list[dict[str, Any]]) -> None:
    for seen in together:
        assert "split over ranks" in seen["cuda_graphs"] or "CUDA device" in seen["cuda_graphs"]
        assert "split over ranks" in seen["compile"] or "compiler" in seen["compile"]


def test_an_engine_on_rank_0_writes_what_requests_write_alone(
    model: NemotronLabsDiffusionModel, together: list[dict[str, Any]]
) -> None:
    """Requests of all strategies from two threads, with so few pages that some are sent back, beside one that is cancelled."""
    first = together[0]
    for i, (options, text) in enumerate(zip(program.requests(), first["engine texts"], strict=True)):
        prompt = program.prompt_of(i)
        expected = model.generate(torch.tensor([prompt]), **(options | {"generation_strategy": "ar"}))
        assert text == expected[0, len(prompt) :].tolist(), options
    assert first["preempted"] > 0
    tokens, reason = first["cancelled"]
    whole = model.generate(torch.tensor([program.PROMPTS[0]]), generation_strategy="ar", **program.CANCELLED)
    assert reason == "cancelled"
    assert 0 < len(tokens) < program.CANCELLED["max_new_tokens"]
    assert tokens == whole[0, len(program.PROMPTS[0]) :][: len(tokens)].tolist()
    expected = model.generate(**program.calls()["greedy ar"]).tolist()
    assert [seen["after the engine"] for seen in together] == [expected, expected]


def test_each_rank_keeps_its_own_heads_and_the_budget_counts_these(together: list[dict[str, Any]]) -> None:
    assert together[0]["heads in the pages"] == [1]
    # Of 60 pages, less the slot that padded reads go to.
    assert [seen["pages"] for seen in together] == [59, 59]


def test_only_rank_0_takes_requests_and_one_thing_is_done_at_a_time(together: list[dict[str, Any]]) -> None:
    assert "rank 0" in together[1]["add_request"]
    assert "nothing to follow" in together[0]["follow"]
    assert "another call or engine" in together[0]["generate"]


@pytest.mark.parametrize("size", [12, FIRST - LENGTH - 1, FIRST - LENGTH, FIRST - LENGTH + 1, 3 * FIRST])
def test_words_of_every_length_arrive(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of so many bytes, what surrounds the text included."""
    sent: list[torch.Tensor] = []
    first, second = object.__new__(Ranks), object.__new__(Ranks)
    monkeypatch.setattr(first, "_broadcast", sent.append)
    monkeypatch.setattr(second, "_broadcast", lambda tensor: tensor.copy_(sent.pop(0)))
    text = "x" * (size - len('["end",""]'))
    first._say(Word.END, text)
    assert len(sent) == 1 + (size > FIRST - LENGTH)
    assert second._hear() == (Word.END, text)
    assert not sent


@pytest.mark.parametrize(
    ("processes", "ranks", "message"),
    [(4, 2, "split over 2 of 4 processes"), (3, 3, "2 key/value heads cannot be split evenly over 3")],
)
def test_splits_that_cannot_be(
    processes: int, ranks: int, message: str, model: NemotronLabsDiffusionModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: processes)
    monkeypatch.setattr(model, "_tp_size", ranks)
    with pytest.raises(UnsupportedError, match=message):
        model.generate(torch.tensor([[7]]), generation_strategy="ar", max_new_tokens=1)


def test_a_model_in_one_process_has_no_ranks_and_cannot_be_split(model: NemotronLabsDiffusionModel) -> None:
    with recguide.Engine(model) as engine:
        assert engine.leads
        with pytest.raises(UnsupportedError, match="nothing to follow"):
            engine.follow()
    with pytest.raises(ConfigError, match="torchrun"):
        load("recguide-tiny", "float32", "cpu", tensor_parallel=True)


def test_an_idle_engine_lets_the_others_know(together: list[dict[str, Any]]) -> None:
    assert together[0]["beats"] >= 2


def test_rank_0_dies(together: list[dict[str, Any]]) -> None:
    assert "start them again" in together[1]["end"]


def test_engines_that_differ_and_a_rank_that_dies(model: NemotronLabsDiffusionModel, tmp_path: Path) -> None:
    """The other rank finds that it follows another engine, and ends; rank 0's requests end with an error and do not hang."""
    first, second = run(model, tmp_path, "apart")
    assert "All ranks must do the same" in second["end"]
    assert all(end.startswith("RankError: ") and "start them again" in end for end in first["end"])
