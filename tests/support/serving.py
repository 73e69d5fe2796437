"""The page of `arr-coc demo`, started as a user starts it."""

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import arr_coc


@contextmanager
def serve(folder, *arguments, **variables):
    """The address of a page that runs inside `with`, and the seconds until it was there."""
    port = free_port()
    command = [sys.executable, "-m", "arr_coc", "demo", "--port", str(port), *arguments]
    own = {**os.environ, "PYTHONPATH": str(Path(arr_coc.__file__).parents[1]), **variables}
    begin = time.perf_counter()
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env=own)
    address = f"http://127.0.0.1:{port}/"
    try:
        while fetch(address) != 200:
            if process.poll() is not None or time.perf_counter() - begin > 120:
                raise RuntimeError((folder / "log").read_text())
            time.sleep(0.05)
        yield address, time.perf_counter() - begin
    finally:
        process.terminate()
        process.wait(30)


def free_port():
    """A port that no other test takes at the same time."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def fetch(address):
    """The status of an answer; None if there is none."""
    try:
        with urllib.request.urlopen(address, timeout=10) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except OSError:
        return None
