"""Commands keep the memory that tensors free, so that the system need not hand it out again."""

import contextlib
import platform
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

from arr_coc.runtime.freed_memory import take_memory_meanwhile

PROGRAM = """
import ctypes, resource, sys
from arr_coc.runtime.freed_memory import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for megabytes in range(4, 30, 2):  # the C library takes a block larger than any before from the system
    block = ctypes.c_void_p(library.malloc(ctypes.c_size_t(megabytes * 2**20)))
    ctypes.memset(block, 1, megabytes * 2**20)
    library.free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def count_new_pages(what: str, program: str = PROGRAM) -> int:
    found = subprocess.run([sys.executable, "-c", program, what], capture_output=True, text=True, check=True)
    return int(found.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of the GNU C library")
def test_memory_is_not_taken_from_the_system_again():
    usual, kept = count_new_pages("leave"), count_new_pages("keep")
    assert kept < usual / 3


def test_commands_use_it(monkeypatch):
    from arr_coc import cli

    calls = []
    monkeypatch.setattr(cli, "keep_freed_memory", lambda: calls.append("kept"))
    monkeypatch.setattr(cli, "app", lambda: calls.append("ran"))
    cli.main()
    assert calls == ["kept", "ran"]


FIRST_USE = """
import contextlib, ctypes, resource, sys
from arr_coc.runtime.freed_memory import FRESH, keep_freed_memory, take_memory_meanwhile
keep_freed_memory()
with take_memory_meanwhile() if sys.argv[1] == "meanwhile" else contextlib.nullcontext():
    pass
library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
ctypes.memset(ctypes.c_void_p(library.malloc(ctypes.c_size_t(FRESH - 2**20))), 1, FRESH - 2**20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of the GNU C library")
def test_memory_is_taken_while_something_else_runs():
    usual, meanwhile = count_new_pages("usual", FIRST_USE), count_new_pages("meanwhile", FIRST_USE)
    assert usual > 1000
    assert meanwhile < usual / 10


def test_an_error_meanwhile_is_raised():
    with pytest.raises(ValueError, match="while loading"), take_memory_meanwhile():
        raise ValueError("while loading")


def test_ask_opens_the_model_meanwhile(monkeypatch):
    from arr_coc.cli.ask import answer_question
    from arr_coc.inference.vlm import ARRCOCQwen
    from arr_coc.runtime import freed_memory

    calls = []

    @contextlib.contextmanager
    def record():
        calls.append("begin")
        yield
        calls.append("end")

    opened = ARRCOCQwen.from_pretrained
    monkeypatch.setattr(freed_memory, "take_memory_meanwhile", record)
    monkeypatch.setattr(ARRCOCQwen, "from_pretrained", lambda *names: (calls.append("open"), opened(*names))[1])
    picture = Path(str(files("arr_coc") / "assets" / "examples" / "shapes.png"))
    question, mode = "what does the purple text say?", "prune"
    facts = answer_question(picture, question, None, None, mode, None, None, None, None, None, "cpu")
    assert facts["answer"] == "WZZTC"
    assert calls == ["begin", "open", "end"]
