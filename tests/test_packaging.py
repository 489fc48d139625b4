"""The wheel: both packages and the embedded model are in it, and nothing else; its metadata says what it needs."""

import shutil
import subprocess
import sys
from collections.abc import Iterable
from email.message import Message
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("src", "kernels", "tests", "pyproject.toml", "LICENSE", "README.md", ".gitignore")
PACKAGES = {"recguide", "recguide_kernels"}
# What may lie in a working tree and must not be shipped; the build below gets one of each.
LITTER = ("__pycache__/module.cpython-311.pyc", ".mypy_cache/cache.json", ".ruff_cache/cache", ".pytest_cache/cache")
MEBIBYTE = 2**20


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the working tree with litter in it, without network or isolation."""
    copy = tmp_path_factory.mktemp("copy")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns(".*_cache"))
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, copy / name)
    for name in LITTER:
        (copy / "src/recguide" / name).parent.mkdir(exist_ok=True)
        (copy / "src/recguide" / name).touch()
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(out)]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def names(wheel: Path) -> list[str]:
    with ZipFile(wheel) as archive:
        return archive.namelist()


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def litter(names: Iterable[str]) -> list[str]:
    """The names that have no place in a wheel."""
    parts = {name: Path(name).parts for name in names}
    return [
        name
        for name, folders in parts.items()
        if name.endswith(".pyc")
        or "tests" in folders
        or any(f.endswith("cache") or f == "__pycache__" for f in folders)
    ]


def test_holds_both_packages_and_nothing_else(names: list[str]) -> None:
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == PACKAGES
    assert {f"{package}/__init__.py" for package in PACKAGES} <= set(names)


def test_holds_every_source(names: list[str]) -> None:
    sources = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src/recguide").rglob("*.py")}
    assert sources <= set(names)


def test_holds_the_embedded_model(names: list[str]) -> None:
    weights = {name for name in names if name.startswith("recguide/tiny/weights/")}
    assert "recguide/tiny/weights/model.safetensors" in weights
    assert "recguide/tiny/weights/config.json" in weights
    lying = {f"recguide/tiny/weights/{path.name}" for path in (ROOT / "src/recguide/tiny/weights").glob("*.*")}
    assert lying <= weights


def test_holds_no_litter(names: list[str]) -> None:
    assert litter(names) == []


def test_litter_is_recognised() -> None:
    bad = ["recguide/__pycache__/a.pyc", "recguide/.mypy_cache/a.json", "tests/test_a.py", "recguide/tests/a.py"]
    assert litter([*bad, "recguide/__init__.py", "recguide/testing.py", "recguide/tiny/cache.py"]) == bad


def test_is_small(wheel: Path) -> None:
    assert wheel.stat().st_size < 12 * MEBIBYTE


def test_says_what_it_needs(metadata: Message) -> None:
    needs = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    always = {need.name: need.specifier for need in needs if need.marker is None}
    assert always["torch"] == SpecifierSet(">=2.9")
    assert always["transformers"] == SpecifierSet(">=5.24,<6")
    assert not {"matplotlib", "reasoning-gym", "pytest"} & set(always)
    assert set(metadata.get_all("Provides-Extra", [])) >= {"train", "dev"}


def test_says_its_licence(metadata: Message, names: list[str]) -> None:
    assert metadata["License-Expression"] == "Apache-2.0"
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_installs_the_command(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/entry_points.txt"))
        assert "recguide = recguide.__main__:main" in archive.read(name).decode().splitlines()
