"""Small tensors that depend on sizes and a device alone, made once and kept: grids, kernels, orders."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import lru_cache, wraps
from typing import ParamSpec

import torch
from torch import Tensor

P = ParamSpec("P")
_local = threading.local()


def constant(make: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Decorator that keeps the tensors a function made last; they are never to be written to.

    Example:

    ```python
    >>> import torch
    >>> from arr_coc.constants import constant
    >>> @constant
    ... def ramp(side: int, device: torch.device) -> torch.Tensor:
    ...     return torch.linspace(0, 1, side, device=device)
    >>> ramp(3, torch.device("cpu")) is ramp(3, torch.device("cpu"))
    True

    ```
    """

    @lru_cache(maxsize=128)
    def kept(*args: Hashable) -> Tensor:
        # an inference tensor could not serve calls outside inference mode
        with torch.inference_mode(False):
            return make(*args)  # type: ignore[call-arg, arg-type]

    @wraps(make)
    def get(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        value = kept(*args, *kwargs.values())
        collected: list[Tensor] | None = getattr(_local, "collected", None)
        if collected is not None:
            collected.append(value)
        return value

    return get


@contextmanager
def collect_constants() -> Iterator[list[Tensor]]:
    """Collect the constants used inside, for those who must keep them alive: a CUDA graph holds bare addresses."""
    _local.collected = []
    try:
        yield _local.collected
    finally:
        _local.collected = None
