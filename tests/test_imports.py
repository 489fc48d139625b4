"""`import recguide` stays light: it loads no optional package that torch and transformers do not load themselves."""

import subprocess
import sys
from pathlib import Path

FORBIDDEN = frozenset({"triton", "flashinfer", "gradio", "lm_eval", "ray", "matplotlib", "reasoning_gym"})
# A CUDA build of torch may load triton by itself, which is not recguide's doing.
BASELINE = "import torch, transformers, transformers.generation, transformers.modeling_utils"


def forbidden_modules(statements: str, *folders: Path) -> frozenset[str]:
    """The forbidden packages that a fresh interpreter has loaded after `statements`; `folders` go first on its path."""
    code = (
        f"import sys\nsys.path[:0] = {[str(folder) for folder in folders]!r}\n{statements}\nprint(*sorted(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return FORBIDDEN & frozenset(done.stdout.split())


def test_import_loads_no_optional_package() -> None:
    assert forbidden_modules("import recguide") <= forbidden_modules(BASELINE)


def test_the_kernels_references_need_no_triton() -> None:
    light = "import recguide_kernels.packed, recguide_kernels.reference, recguide_kernels.work"
    assert forbidden_modules(light) <= forbidden_modules("import torch")


def test_the_checker_finds_each_forbidden_package(tmp_path: Path) -> None:
    for name in FORBIDDEN:
        (tmp_path / f"{name}.py").touch()
    light = tmp_path / "light.py"
    light.write_text("".join(f"import {name}\n" for name in sorted(FORBIDDEN)))
    assert forbidden_modules("import light", tmp_path) == FORBIDDEN
    light.write_text("def later():\n    import matplotlib\n")
    assert forbidden_modules("import light", tmp_path) == frozenset()
