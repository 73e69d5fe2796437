"""How long each stage of an answer takes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Times stages by name; waits for the device at both ends, so it is used where a person asked for times.

    Args:
        device (`torch.device`): what to wait for.
        on (`bool`, *optional*, defaults to `True`): if not, nothing is timed and nothing waits.
    """

    def __init__(self, device: torch.device, on: bool = True) -> None:
        self.on = on
        self.cuda = device.type == "cuda"
        self.milliseconds: dict[str, float] = {}

    def now(self) -> float:
        """Milliseconds, when all work so far is done."""
        if self.cuda:
            torch.cuda.synchronize()
        return 1e3 * time.perf_counter()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time spent inside `with` to a stage."""
        if not self.on:
            yield
            return
        begin = self.now()
        try:
            yield
        finally:
            self.milliseconds[name] = self.milliseconds.get(name, 0.0) + self.now() - begin


OFF = Stopwatch(torch.device("cpu"), on=False)
