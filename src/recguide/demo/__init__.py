"""The demo: answers coloured by how their tokens came, rounds with their branches, strategies side by side, load.

`recguide demo` starts it. What is shown is made by pure functions from round records (`timeline`, `drawing`, `answer`);
`desk` answers prompts with one engine a model; `app` is the page, the only file that knows Gradio.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import MissingDependencyError


def start(
    loaders: Mapping[str, Callable[[], tuple[Any, Any]]], host: str | None = None, port: int | None = None
) -> None:
    """
    Serve the demo until it is stopped.

    Args:
        loaders (`Mapping[str, Callable]`):
            The models that may be chosen, by name; each gives a model that understands strategies, and its tokenizer. The first
            one is loaded now, so that a wrong path is told before a page is shown.
        host (`str`, *optional*): address to listen on; by default `GRADIO_SERVER_NAME`, else this machine only.
        port (`int`, *optional*): by default the first free one from 7860.

    Raises:
        MissingDependencyError: Gradio is not installed.
    """
    try:
        import gradio  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError('The demo needs Gradio: pip install "recguide[demo]".') from error
    from .app import serve
    from .desk import Desk

    desk = Desk(loaders)
    desk.model(desk.names[0])
    try:
        serve(desk, host, port)
    finally:
        desk.close()
