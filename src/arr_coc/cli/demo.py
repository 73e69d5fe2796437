"""`arr-coc demo`: serve the page in the browser."""

from __future__ import annotations

import errno
import gc
import socket
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from arr_coc.cli.errors import one_line_errors
from arr_coc.cli.options import Model, SelectorName

FIRST_PORT, LAST_PORT = 7860, 7959


def demo(
    model: Model = None,
    selector: SelectorName = None,
    share: Annotated[
        bool, typer.Option("--share", help="Also create a public address, through Gradio's servers.")
    ] = False,
    port: Annotated[int | None, typer.Option(help="Port to listen on. [default: the first free one from 7860]")] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on: 127.0.0.1 for this machine only, 0.0.0.0 for everybody.")
    ] = "127.0.0.1",
    device: Annotated[str | None, typer.Option(help="cpu or cuda. [default: cuda if there is one]")] = None,
    votes: Annotated[Path, typer.Option(help="File to which votes of the tab Compare are appended.")] = Path(
        "votes.jsonl"
    ),
) -> None:
    """Serve a page that shows where the model looks, and why. Ctrl-C ends it."""
    with one_line_errors():
        status = Console(stderr=True, highlight=False).status("opening the model and the page")
        status.start()

        def announce(address: str) -> None:
            status.stop()
            gc.enable()
            typer.echo(f"page      {address}")

        gc.disable()  # importing thousands of modules makes no garbage, and collecting would slow it down
        try:
            serve_page(model, selector, host, port, share, votes, device, announce)
        except KeyboardInterrupt:
            typer.echo("stopped", err=True)
        finally:
            status.stop()
            gc.enable()


def serve_page(
    model: str | None,
    selector: str | None,
    host: str,
    port: int | None,
    share: bool,
    votes: Path,
    device: str | None,
    announce: Callable[[str], None],
) -> None:
    """Open the model and serve the page until it is stopped; `announce` is called with its address."""
    if find_spec("gradio") is None:
        raise ValueError("the demo needs gradio; install it with pip install 'arr-coc[demo]'")
    if votes.is_dir() or not votes.parent.is_dir():
        raise ValueError(f"votes cannot be written to {votes}; give a file in a folder that exists")
    port = find_port(host, port)
    from arr_coc.demo.engine import Engine

    engine = Engine.open(model, selector, device=device, private=is_private(host, share))
    from arr_coc.demo.app import build, serve  # gradio takes seconds to import, so mistakes are reported before

    page = build(engine, votes)
    threading.Thread(target=engine.warm_up, daemon=True).start()
    address = serve(page, host=host, port=port, share=share)
    announce(page.share_url or address if share else address)
    page.block_thread()


def is_private(host: str, share: bool) -> bool:
    """Whether only this machine can reach the page."""
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
                    reason = (error.strerror or str(error)).lower()
                    option = "--port" if port is not None else "--host"
                    raise ValueError(f"cannot serve at {host}:{candidate}: {reason}; give another {option}") from None
    raise ValueError(f"ports {FIRST_PORT} to {LAST_PORT} are all in use; give a --port")
