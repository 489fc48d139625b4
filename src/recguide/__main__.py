"""`python -m recguide` is the `recguide` command."""

from .cli.main import app

app()
