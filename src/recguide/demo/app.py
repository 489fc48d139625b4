"""The page as a whole. This file and the tabs are the only ones that know Gradio."""

from __future__ import annotations

import os

# Gradio asks for neither leave nor network once this says no; read when it is imported and again when it starts.
os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"

import gradio as gr

from .desk import Desk
from .recordings import LARGEST
from .tabs.branches import branches_tab
from .tabs.calibration import calibration_tab
from .tabs.compare import compare_tab
from .tabs.generate import generate_tab
from .tabs.parts import USERS, WAITING, static, stopper
from .tabs.under_load import load_tab


def build(desk: Desk) -> gr.Blocks:
    """The page for a desk's models."""
    page: gr.Blocks
    with gr.Blocks(title="recguide", analytics_enabled=False, delete_cache=(3600, 3600)) as page:
        with gr.Row(elem_classes="rg-top"):
            gr.HTML(
                '<div class="rg-title"><h1>recguide</h1><p>One language model drafts and checks its own text: several tokens a '
                "forward, not a letter changed.</p></div>",
                padding=False,
            )
            model = gr.Dropdown(
                desk.names,
                value=desk.names[0],
                label="Model",
                scale=0,
                min_width=220,
                interactive=True,
                elem_id="model",
            )
            theme = gr.Button("◐ Light / dark", scale=0, min_width=120, size="sm", elem_id="theme")
        theme.click(None, js="() => { document.body.classList.toggle('dark'); }")
        shown = gr.State(None)
        with gr.Tabs() as tabs:
            with gr.Tab("1 Generate", id="generate"):
                see = generate_tab(desk, model, shown)
            with gr.Tab("2 Branches", id="branches"):
                branches_tab(desk, shown)
            with gr.Tab("3 Compare", id="compare"):
                compare_tab(desk, model)
            with gr.Tab("4 Load", id="load"):
                end_load = load_tab(desk, model)
            with gr.Tab("5 Calibration", id="calibration"):
                calibration_tab(desk, model)
        see.click(lambda: gr.Tabs(selected="branches"), None, tabs, api_visibility="private", show_progress="hidden")
        # Whoever leaves gives the place back.
        page.unload(stopper(desk))
        page.unload(end_load)
    page.queue(max_size=WAITING, default_concurrency_limit=USERS)
    return page


def serve(desk: Desk, host: str | None = None, port: int | None = None, block: bool = True) -> tuple[gr.Blocks, str]:
    """
    Start the page.

    Args:
        desk (`Desk`): its models.
        host (`str`, *optional*): address to listen on; by default `GRADIO_SERVER_NAME`, else this machine only.
        port (`int`, *optional*): by default the first free one from 7860.
        block (`bool`, defaults to `True`): return only when it is stopped.

    Returns:
        `tuple[gradio.Blocks, str]`: the page, and its address.
    """
    page = build(desk)
    _, address, _ = page.launch(
        server_name=host,
        server_port=port,
        prevent_thread_lock=True,
        share=False,
        ssr_mode=False,
        pwa=False,
        mcp_server=False,
        quiet=True,
        footer_links=[],
        max_file_size=LARGEST,
        theme=_theme(),
        head=f"<style>{static('style.css')}</style>",
    )
    if block:
        print(f"recguide's demo is at {address} (Ctrl+C ends it).", flush=True)
        page.block_thread()
    return page, address


def _theme() -> gr.themes.Base:
    # Fonts of the reader's machine: nothing is fetched.
    sans = [gr.themes.Font(name) for name in ("system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif")]
    mono = [gr.themes.Font(name) for name in ("ui-monospace", "Menlo", "Consolas", "monospace")]
    return gr.themes.Base(primary_hue="blue", neutral_hue="slate", font=sans, font_mono=mono, radius_size="md")
