"""Describe the machine of a run: device, versions, revision of the source."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path
from typing import Any

import torch
import transformers

from arr_coc._version import __version__


def check_device(device: str) -> torch.device:
    """Turn `"cpu"` or `"cuda"` into a `torch.device`.

    Args:
        device (`str`): `"cpu"` or `"cuda"`; `"cuda"` raises if there is no CUDA device.

    Returns:
        `torch.device`: the device.

    Example:

    ```python
    >>> from arr_coc.runtime.machine import check_device
    >>> check_device("cpu")
    device(type='cpu')

    ```
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f"`device` must be cpu or cuda, got {device!r}; CUDA_VISIBLE_DEVICES chooses among several")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("there is no CUDA device; use cpu")
    return torch.device(device)


def describe_machine(model: Any) -> dict[str, Any]:
    """Facts that measured times depend on: processor, threads, dtype, attention and versions."""
    device = model.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "machine": name,
        "threads": torch.get_num_threads(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "attention": str(model.config._attn_implementation),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "arr_coc": __version__,
    }


def environment() -> dict[str, Any]:
    """Versions and source revision, to record with a training run."""
    return {
        "arr_coc": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "revision": find_revision(),
    }


def find_revision(folder: Path = Path(__file__).parent) -> str | None:
    """The git revision of the package's source, with `+changes` if it has others than committed; None without one."""

    def ask(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = ask("status", "--porcelain", "--untracked-files=no", "--", "..")
        return ask("rev-parse", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None
