"""The whole page: its four tabs, and how it is served."""

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

LARGEST_UPLOAD = "64mb"
LONGEST_QUEUE = 16  # visitors beyond that are told to come back
KEEP_UPLOADS = 3600  # seconds


def build(engine: Engine, votes: Path) -> Any:
    """Build the page for a model.

    Uploads and drawings are kept in a folder of their own, which is removed when the program ends.

    Args:
        engine (`Engine`): answers the questions.
        votes (`Path`): file to which votes of the tab Compare are appended.
    """
    _use_own_folder()
    about = f"Model **{engine.name}**, selector **{engine.selector}**."
    with gr.Blocks(title="arr-coc", analytics_enabled=False, delete_cache=(KEEP_UPLOADS, KEEP_UPLOADS)) as page:
        gr.Markdown(f"# arr-coc: look where the question points\n{about}")
        with gr.Tabs() as tabs:
            with gr.Tab("Ask", id="ask"):
                ask_tab = build_ask(engine)
            with gr.Tab("Microscope", id="microscope"):
                build_microscope(ask_tab)
            with gr.Tab("Compare", id="compare"):
                build_compare(engine, votes)
            with gr.Tab("Worlds", id="worlds"):
                build_worlds(engine, ask_tab, tabs)
    return page.queue(max_size=LONGEST_QUEUE, default_concurrency_limit=1)


def _use_own_folder() -> None:
    """Keep files in a folder that is removed when the program ends, also if it is terminated."""
    os.environ.pop("GRADIO_ALLOWED_PATHS", None)
    if "GRADIO_TEMP_DIR" in os.environ:
        return
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    os.environ["GRADIO_TEMP_DIR"] = tempfile.mkdtemp(prefix="arr-coc-demo-")
    atexit.register(shutil.rmtree, os.environ["GRADIO_TEMP_DIR"], ignore_errors=True)


def serve(page: Any, *, host: str = "127.0.0.1", port: int | None = None, share: bool = False) -> str:
    """Serve the page in the background and return its address."""
    _, address, _ = page.launch(
        server_name=host, server_port=port, share=share, prevent_thread_lock=True, quiet=True, show_error=False,
        max_file_size=LARGEST_UPLOAD, allowed_paths=[], footer_links=["gradio", "settings"], ssr_mode=False,
        theme=make_theme(), css=STYLE,
    )  # fmt: skip
    return str(address)
