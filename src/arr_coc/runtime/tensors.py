"""Tensor helpers: a cache for constant tensors (grids, kernels), uploads, row normalisation, a model's device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import lru_cache, wraps
from typing import Any, ParamSpec

import torch
from torch import Tensor

P = ParamSpec("P")
_local = threading.local()


def constant(make: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Decorator that caches the tensors a function returns; never write to them.

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
    def cached(*args: Hashable) -> Tensor:
        # the state of the first caller must not last: an inference tensor could not be used outside inference mode,
        # and autocast would round products of matrices, which are made on the host
        with torch.inference_mode(False), torch.autocast("cpu", enabled=False):
            return make(*args)  # type: ignore[call-arg, arg-type]

    @wraps(make)
    def get(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        value = cached(*args, *kwargs.values())
        collected: list[Tensor] | None = getattr(_local, "collected", None)
        if collected is not None:
            collected.append(value)
        return value

    return get


@contextmanager
def collect_constants() -> Iterator[list[Tensor]]:
    """Collect the constants used inside, so that a CUDA graph, which holds bare addresses, can keep them alive."""
    _local.collected = []
    try:
        yield _local.collected
    finally:
        _local.collected = None


def upload(value: Tensor, device: torch.device) -> Tensor:
    """Copy a small tensor of the host to a device without waiting for what the device is doing."""
    return value.to(device, non_blocking=True)


def unit_rows(x: Tensor) -> Tensor:
    """Scale rows to length 1; zero rows stay zero. Safe in half precision, where a small epsilon or large norm is not.

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


def input_device(model: Any) -> torch.device:
    """Where a model of transformers takes its inputs, also if it is offloaded, so that its weights are on `meta`."""
    embeddings = model.get_input_embeddings()
    for weight in embeddings.parameters():
        if weight.device.type != "meta":
            found: torch.device = weight.device
            return found
    device = getattr(getattr(embeddings, "_hf_hook", None), "execution_device", None)  # accelerate's
    real = (weight.device for weight in model.parameters() if weight.device.type != "meta")
    return torch.device(device) if device is not None else next(real, torch.device("cpu"))
