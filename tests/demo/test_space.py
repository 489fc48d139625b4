"""The Space's files agree with the package."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SPACE = ROOT / "demo"


def test_the_front_matter_names_what_is_there() -> None:
    matter = dict(re.findall(r"^(\w+): (.+)$", (SPACE / "README.md").read_text().split("---")[1], flags=re.MULTILINE))
    assert matter["sdk"] == "gradio"
    assert f"gradio=={matter['sdk_version']}" in (ROOT / "constraints.txt").read_text().split()
    assert (SPACE / matter["app_file"]).is_file()
    assert matter["license"] == "apache-2.0"
    assert len(matter["short_description"]) <= 60


def test_it_needs_the_package_with_its_extra_and_nothing_else() -> None:
    assert (SPACE / "requirements.txt").read_text().split() == ["recguide[demo]"]


def test_it_uses_public_names_only() -> None:
    for path in (SPACE / "app.py", *(ROOT / "src/recguide/demo").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.startswith("_")], path
            # Of other objects; a class may have its own.
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                assert isinstance(node.value, ast.Name), (path, node.attr)
                assert node.value.id == "self", (path, node.attr)
