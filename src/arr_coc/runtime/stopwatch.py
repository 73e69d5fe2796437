"""Time the stages of an answer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Times stages by name. It waits for the device at both ends of a stage, so use it only where times are wanted.

    Args:
        device (`torch.device`): the device to wait for.
        on (`bool`, *optional*, defaults to `True`): if False, nothing is timed and nothing waits.
    """

    def __init__(self, device: torch.device, on: bool = True) -> None:
        self.on = on
        self.cuda = device.type == "cuda"
        self.milliseconds: dict[str, float] = {}

    def now(self) -> float:
        """The time in milliseconds, after all queued work has finished."""
        if self.cuda:
            torch.cuda.synchronize()
        return 1e3 * time.perf_counter()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time spent inside `with` to a stage."""
        if not self.on:
            yield
            return
        start = self.now()
        try:
            yield
        finally:
            self.milliseconds[name] = self.milliseconds.get(name, 0.0) + self.now() - start


OFF = Stopwatch(torch.device("cpu"), on=False)
