"""`arr-coc demo`: the page in the browser."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch

from arr_coc.demo.engine import Engine
from arr_coc.evaluation.run import check_device

FIRST_PORT, LAST_PORT = 7860, 7959
NEEDS = "the demo needs gradio; install it with pip install 'arr-coc[demo]'"


def demo(
    model: str | None,
    selector: str | None,
    host: str,
    port: int | None,
    share: bool,
    votes: Path,
    device: str | None,
    say: Callable[[str], None],
) -> None:
    """Open the model and serve the page until it is stopped."""
    if find_spec("gradio") is None:
        raise ValueError(NEEDS)
    if votes.is_dir() or not votes.parent.is_dir():
        raise ValueError(f"votes cannot be written to {votes}; give a file in a folder that exists")
    port = find_port(host, port)
    engine = open_engine(model, selector, device, private=is_private(host, share))
    from arr_coc.demo.app import build, serve  # gradio takes seconds: mistakes are said before

    page = build(engine, votes)
    threading.Thread(target=engine.warm_up, daemon=True).start()
    address = serve(page, host=host, port=port, share=share)
    say(page.share_url or address if share else address)
    page.block_thread()


def open_engine(model: str | None, selector: str | None, device: str | None, private: bool) -> Engine:
    """The engine, on a GPU where there is one; there models but the embedded one are opened in float16."""
    place = check_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    loading = {"dtype": torch.float16} if place.type == "cuda" and model is not None else {}
    engine = Engine.open(model, selector, private=private, **loading)
    engine.vlm.to(place)
    return engine


def is_private(host: str, share: bool) -> bool:
    """Whether only this machine reaches the page."""
    return not share and host in ("127.0.0.1", "localhost", "::1")


def find_port(host: str, port: int | None) -> int:
    """The port that was asked for, or the first free one."""
    if port is not None and not 1 <= port <= 65535:
        raise ValueError(f"`port` must be 1 to 65535, got {port}")
    for candidate in [port] if port is not None else range(FIRST_PORT, LAST_PORT + 1):
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, candidate))
                return candidate
            except OSError as error:
                if port is not None or error.errno not in (errno.EADDRINUSE, errno.EACCES):
                    why = error.strerror or str(error)
                    what = "--port" if port is not None else "--host"
                    raise ValueError(
                        f"cannot serve at {host}:{candidate}: {why.lower()}; give another {what}"
                    ) from None
    raise ValueError(f"ports {FIRST_PORT} to {LAST_PORT} are all in use; give a --port")
