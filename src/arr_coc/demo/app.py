"""The page as a whole: four tabs, and how it is served."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # nothing is reported to anyone

import gradio as gr

from arr_coc.demo.ask import build_ask
from arr_coc.demo.compare import build_compare
from arr_coc.demo.engine import Engine
from arr_coc.demo.microscope import build_microscope
from arr_coc.demo.widgets import STYLE, make_theme
from arr_coc.demo.worlds import build_worlds

UPLOAD = "64mb"
QUEUE = 16  # who comes when so many wait is told so
KEPT = 3600  # seconds that uploads stay


def build(engine: Engine, votes: Path) -> Any:
    """The page for a model; uploads and drawings lie in a folder of its own, which goes with the program."""
    _use_own_folder()
    about = f"Model **{engine.name}**, selector **{engine.selector}**."
    with gr.Blocks(title="arr-coc", analytics_enabled=False, delete_cache=(KEPT, KEPT)) as page:
        gr.Markdown(f"# arr-coc: look where the question points\n{about}")
        with gr.Tabs() as tabs:
            with gr.Tab("Ask", id="ask"):
                asked = build_ask(engine)
            with gr.Tab("Microscope", id="microscope"):
                build_microscope(asked)
            with gr.Tab("Compare", id="compare"):
                build_compare(engine, votes)
            with gr.Tab("Worlds", id="worlds"):
                build_worlds(engine, asked, tabs)
    return page.queue(max_size=QUEUE, default_concurrency_limit=1)


def _use_own_folder() -> None:
    """Keep files in a folder that goes when the program ends, also if it is terminated."""
    os.environ.pop("GRADIO_ALLOWED_PATHS", None)
    if "GRADIO_TEMP_DIR" in os.environ:
        return
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    os.environ["GRADIO_TEMP_DIR"] = tempfile.mkdtemp(prefix="arr-coc-demo-")
    atexit.register(shutil.rmtree, os.environ["GRADIO_TEMP_DIR"], ignore_errors=True)


def serve(page: Any, *, host: str = "127.0.0.1", port: int | None = None, share: bool = False) -> str:
    """Serve the page in the background, and give its address."""
    _, address, _ = page.launch(
        server_name=host, server_port=port, share=share, prevent_thread_lock=True, quiet=True, show_error=False,
        max_file_size=UPLOAD, allowed_paths=[], footer_links=["gradio", "settings"], ssr_mode=False,
        theme=make_theme(), css=STYLE,
    )  # fmt: skip
    return str(address)
