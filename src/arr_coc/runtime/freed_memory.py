"""Memory that was freed, kept for what needs some next."""

from __future__ import annotations

import contextlib
import ctypes
import sys

# glibc's numbers of its settings, and their values in bytes.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
KEPT = 2**28
LARGEST = 2**25


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
