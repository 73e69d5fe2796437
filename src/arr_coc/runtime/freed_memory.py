"""Memory that was freed, kept for what needs some next."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator
from threading import Thread

# glibc's numbers of its settings, and their values in bytes.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
KEPT = 2**28
LARGEST = 2**25
# What an answer of the embedded model needs at most.
FRESH = 24 * 2**20


def keep_freed_memory() -> None:
    """Let this process keep up to 256 MB of freed memory, from blocks of up to 32 MB.

    Linux's C library gives the memory of larger tensors back to the system and takes it again for the next ones, page
    by page, all through an answer. That costs the embedded model a tenth of its time. It is a setting of the whole
    process, so only commands change it. Elsewhere nothing happens.
    """
    if not sys.platform.startswith("linux"):
        return
    with contextlib.suppress(OSError, AttributeError):  # another C library has no such setting
        change = ctypes.CDLL(None).mallopt
        change(_MMAP_THRESHOLD, LARGEST)
        change(_TRIM_THRESHOLD, KEPT)


@contextlib.contextmanager
def take_memory_meanwhile() -> Iterator[None]:
    """Take 24 MB from the system on another thread while the body runs, and free them at its end.

    The system hands memory out page by page, which is most of what a first answer takes longer than later ones. Loading
    uses one core. Without [`keep_freed_memory`] the freed memory goes back to the system.
    """
    if not sys.platform.startswith("linux"):
        yield
        return
    library = ctypes.CDLL(None)
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    block = library.malloc(FRESH)  # here: what another thread frees, this one does not get
    if not block:
        yield
        return
    thread = Thread(target=ctypes.memset, args=(block, 0, FRESH), daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        library.free(block)
