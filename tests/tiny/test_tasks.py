"""The task generators: deterministic, disjoint splits, right answers, and scorers that reject wrong ones."""

import itertools
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from recguide.tiny.tasks import FAMILIES, SPLITS, Task, make_task, prose_passages, score, templates
from recguide.tiny.tasks.sandbox import runs

pytest.importorskip("reasoning_gym")

CASES = [(family, split) for family in FAMILIES for split in SPLITS]


def draw(family: str, split: str, count: int) -> list[Task]:
    return [make_task(family, split, index) for index in range(count)]


@pytest.mark.parametrize(("family", "split"), CASES)
def test_answers_score_and_fit(family: str, split: str) -> None:
    tasks = draw(family, split, 20 if family == "code" else 300)
    assert all(score(task, task.answer) for task in tasks)
    for task in draw(family, split, 500):
        assert task.family == family
        assert len(task.prompt) <= 480, task.prompt
        assert len(task.answer) <= 800, task.answer
        assert (task.prompt + task.answer).isascii()
        assert "{" not in task.prompt


@pytest.mark.parametrize("family", FAMILIES)
def test_wrong_outputs_fail(family: str) -> None:
    tasks = draw(family, "test", 12 if family == "code" else 150)
    for task, other in itertools.pairwise(tasks):
        for output in ("", other.answer, task.answer[: len(task.answer) // 3]):
            if family == "math" and output == other.answer and task.checks == other.checks:
                continue
            assert not score(task, output), (task, output)


@pytest.mark.parametrize(("family", "split"), CASES)
def test_deterministic(family: str, split: str) -> None:
    assert draw(family, split, 5) == draw(family, split, 5)


@pytest.mark.parametrize("family", FAMILIES)
def test_splits_are_disjoint(family: str) -> None:
    prompts = {split: {task.prompt for task in draw(family, split, 1000)} for split in SPLITS}
    for one, two in itertools.combinations(SPLITS, 2):
        assert not prompts[one] & prompts[two]
    names = {split: {template.name for template in templates(family, split)} for split in SPLITS}
    assert names["train"] == names["test"]
    assert not names["train"] & names["unseen"]


def test_code_traces_agree_with_the_code() -> None:
    """The independent references agree with the answers' code; run here, as these texts are our own."""
    for split in ("train", "unseen"):
        for task in draw("code", split, 1000):
            source = task.answer.split("```python\n")[1].split("```")[0]
            exec("\n".join([source, *task.checks]), {})
            name, shown = task.answer.rpartition("So `")[2].split("` returns ")
            call = task.checks[0].removeprefix("assert ").split(" == ")[1]
            assert name in source
            assert shown == f"{call}."


def test_arithmetic_is_right() -> None:
    for split in ("train", "unseen"):
        for task in draw("math", split, 1000):
            for line in task.answer.replace("$", "").split("\n"):
                for left, right in equations(line):
                    assert eval(left) == eval(right), line


def equations(line: str) -> Sequence[tuple[str, str]]:
    found = re.findall(r"((?:\d+ [-+*/] )+\d+)(?= = (\d+)\b(?! [-+*/]))", line)
    return [(left, right) for left, right in found]


@pytest.mark.parametrize(
    "source",
    [
        "while True: pass",
        "x = ' ' * 10**9",
        "raise SystemExit(0)",
        "print('x', file=open('f', 'w'), flush=True)",
        "1 +",
        "assert False",
        "import socket; socket.socket()",
        "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9')",
        "import os; os.system('true')",
        "import subprocess; subprocess.run(['true'])",
        "import os; os._exit(0) if os.fork() else None",
        "import ctypes",
    ],
)
def test_sandbox_rejects(source: str) -> None:
    assert not runs(source)


def test_sandbox_accepts() -> None:
    assert runs("assert sum([1, 2]) == 3\nprint('x' * 100)")
    assert runs("import os\nwith open(os.devnull, 'w') as file: print('x', file=file)")
    # More than an argument of a command may have.
    assert runs("x = 1\n" * 50_000)
    # Names of types are looked up in the program's module.
    assert runs(
        "import dataclasses\n@dataclasses.dataclass\nclass A:\n    x: 'list[int]' = None\nassert A.__module__ == __name__"
    )


def test_sandbox_is_the_same_every_time() -> None:
    odd = "assert hash('a') % 2"
    assert len({runs(odd) for _ in range(10)}) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import os; os.remove({file!r})",
        "import os; os.rename({file!r}, {file!r} + '.old')",
        "import os; os.truncate({file!r}, 0)",
        "import os; os.chmod({file!r}, 0)",
        "import os; os.close(os.open({file!r}, os.O_RDWR | os.O_TRUNC))",
        "open({file!r}, 'w').close()",
        "import pathlib; pathlib.Path({file!r}).unlink()",
        "import os, shutil; shutil.rmtree(os.path.dirname({file!r}))",
        "import os; os.mkdir({file!r} + '.d')",
        "import os; os.symlink({file!r}, 'x')",
        "import os; os.kill(os.getppid(), 0)",
        "import signal, os; os.killpg(0, signal.SIGCONT)",
        # What multiprocessing starts processes with.
        "import multiprocessing.util as u, os; u.spawnv_passfds(b'/bin/true', [b'true'], [])",
    ],
)
def test_sandbox_leaves_all_else_alone(source: str, tmp_path: Path) -> None:
    file = tmp_path / "own"
    file.write_text("kept")
    source = source.format(file=str(file))
    assert not runs(source)
    # Refused, not failed for another reason.
    body = "\n".join(f"    {line}" for line in source.splitlines())
    assert runs(
        f"try:\n{body}\nexcept PermissionError as error:\n    assert 'not allowed here' in str(error)\nelse:\n    1 / 0"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["own"]
    assert file.read_text() == "kept"


def test_sandbox_refuses_before_a_socket_is_made() -> None:
    """By itself, not for want of a network."""
    assert runs("import socket\ntry:\n    socket.socket()\nexcept PermissionError:\n    pass\nelse:\n    assert False")


def test_sandbox_has_a_folder_of_its_own_and_the_given_limits() -> None:
    assert runs("import os; assert os.listdir() == []")
    large = "x = bytearray(300 << 20)"
    assert not runs(large)
    assert runs(large, timeout=600, memory_mib=1024)
    busy = "import time\nwhile time.process_time() < 2.5: pass"
    assert not runs(busy, timeout=600)
    assert runs(busy, timeout=600, cpu_seconds=10)


def test_unknown_split() -> None:
    with pytest.raises(ValueError, match="no tasks"):
        make_task("math", "other", 0)


def test_prose() -> None:
    passages = list(itertools.islice(prose_passages(1), 300))
    assert all(300 <= len(p) <= 900 and p.isascii() for p in passages)
    assert passages == list(itertools.islice(prose_passages(1), 300))
    assert passages != list(itertools.islice(prose_passages(2), 300))
