"""The `recguide` command, also as `python -m recguide`."""

import os
import sys


def main() -> None:
    """Run the command line."""
    if sys.argv[1:2] == ["bench"] and "OMP_WAIT_POLICY" not in os.environ:
        # OpenMP reads it when torch is loaded, which the package's import has done: begin again. Spinning threads are slow
        # beside any other load.
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.execv(sys.executable, [sys.executable, "-m", "recguide", *sys.argv[1:]])
    from .cli.main import app

    app()


if __name__ == "__main__":
    main()
