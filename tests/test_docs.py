"""Every Python example of the documentation runs."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").glob("*.md"))]


def examples(page: str) -> list[str]:
    return re.findall(
        r"^```python\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )


@pytest.mark.parametrize("page", PAGES)
def test_examples_run(page: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The examples of a page are one session, top to bottom."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for number, code in enumerate(examples(page), start=1):
        exec(compile(code, f"{page}, example {number}", "exec"), names)


def test_there_are_examples() -> None:
    assert len(examples("README.md")) >= 2


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md", "src/recguide/tiny/weights/README.md"])
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        if "://" not in target:
            assert ((ROOT / page).parent / target).exists(), target


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 150
