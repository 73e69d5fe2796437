"""Commands keep the memory that tensors free, so that the system need not hand it out again."""

import platform
import subprocess
import sys

import pytest

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


def count_new_pages(what: str) -> int:
    found = subprocess.run([sys.executable, "-c", PROGRAM, what], capture_output=True, text=True, check=True)
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
