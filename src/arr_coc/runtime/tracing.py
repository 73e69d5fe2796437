"""What `torch.compile` does not trace: our own code around a compiled model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def untraced(function: Function) -> Function:
    """Decorator: `torch.compile` leaves this function and all that it calls as they are."""
    return cast("Function", torch.compiler.disable(function))  # type: ignore[no-untyped-call]


def untraced_itself(function: Function) -> Function:
    """Decorator: `torch.compile` leaves this function as it is, but compiles what it calls, such as the model."""
    return cast("Function", torch.compiler.disable(function, recursive=False))  # type: ignore[no-untyped-call]
