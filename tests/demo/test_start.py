"""How the demo is started, by the command and without its extra."""

import os
import subprocess
import sys
import urllib.request

import pytest
from typer.testing import CliRunner

from recguide import MissingDependencyError
from recguide.cli.main import app
from recguide.demo import start


def test_without_gradio_the_install_line_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gradio", None)
    with pytest.raises(MissingDependencyError, match=r"recguide\[demo\]"):
        start({})
    result = CliRunner().invoke(app, ["demo"], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "recguide[demo]" in result.output


@pytest.mark.slow
def test_the_command_serves_the_page_on_this_machine_only() -> None:
    pytest.importorskip("gradio", reason="the demo needs gradio")
    command = [sys.executable, "-m", "recguide", "demo", "--threads", "1"]
    # Whatever the surroundings say, nothing is listened to from outside unless it was asked for.
    surroundings = os.environ | {"GRADIO_SERVER_NAME": "0.0.0.0", "GRADIO_SHARE": "True"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=surroundings) as running:
        try:
            assert running.stdout is not None
            line = running.stdout.readline()
            address = line.split(" is at ")[1].split()[0]
            assert address.startswith("http://127.0.0.1:")
            with urllib.request.urlopen(address, timeout=120) as page:
                assert b"recguide" in page.read()
        finally:
            running.terminate()
