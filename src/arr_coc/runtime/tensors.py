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
    >>> from arr_coc.runtime.tensors import constant
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


def unit_rows(x: Tensor) -> Tensor:
    """Rows of length 1; zero rows stay zero. Safe in half precision, where neither a small epsilon nor a large norm is.

    Example:

    ```python
    >>> import torch
    >>> from arr_coc.runtime.tensors import unit_rows
    >>> unit_rows(torch.tensor([[3.0, 4.0], [0.0, 0.0]])).tolist()
    [[0.6000000238418579, 0.800000011920929], [0.0, 0.0]]

    ```
    """
    length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    inverse = torch.where(length > 0, length, 1.0).reciprocal().clamp(max=6e4)
    return x * inverse.to(x.dtype)
