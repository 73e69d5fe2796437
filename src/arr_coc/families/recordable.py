"""Whether what a module made before, or a recording of it, can stand in for it: its results must depend on its inputs
and weights alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from torch import nn

# Hooks of this module collect outputs for who asks for them, and change nothing. They stay for good once that was done.
_LISTENERS = "transformers.utils.output_capturing"


class State(NamedTuple):
    """What a recording of a module depends on besides its inputs.

    Args:
        obstacle (`str`, *optional*): why it cannot be recorded.
        weights (`tuple[int, ...]`): addresses of its weights, which a recording reads by address.
        adapters (`tuple`): which adapters of PEFT are active, and how strongly.
    """

    obstacle: str | None
    weights: tuple[int, ...] = ()
    adapters: tuple[Any, ...] = ()


_known: ContextVar[dict[int, State] | None] = ContextVar("arr_coc_states", default=None)


@contextmanager
def unchanged_modules() -> Iterator[None]:
    """Inside, modules do not change, so that looking through each of them once is enough."""
    token = _known.set({} if _known.get() is None else _known.get())
    try:
        yield
    finally:
        _known.reset(token)


def read_state(root: nn.Module) -> State:
    """What the results of a module depend on besides its inputs, or why that cannot be known.

    Example:

    ```python
    >>> from torch import nn
    >>> from arr_coc.families.recordable import read_state
    >>> module = nn.Linear(2, 2).eval()
    >>> before = read_state(module)
    >>> module.weight = nn.Parameter(module.weight.detach().clone())
    >>> before == read_state(module), read_state(module.train()).obstacle
    (False, 'it is in training mode')

    ```
    """
    known = _known.get()
    if known is None:
        return _look_through(root)
    if id(root) not in known:
        known[id(root)] = _look_through(root)
    return known[id(root)]


def _look_through(root: nn.Module) -> State:
    # part of every call, before anything is launched: not by `modules()`, which takes milliseconds for a large model
    tensors: list[Any] = []
    adapters: list[Any] = []
    waiting: list[Any] = [root]
    for module in waiting:  # which grows
        if module is None:
            continue
        own = module.__dict__
        if (
            own["_forward_hooks"]
            or own["_forward_pre_hooks"]
            or own.get("training")
            or "_hf_hook" in own
            or "_compiled_call_impl" in own
            or "forward" in own
        ):
            obstacle = _find_obstacle(own)
            if obstacle is not None:
                return State(obstacle)
        if own["_parameters"]:
            tensors += own["_parameters"].values()
        if own["_buffers"]:
            tensors += own["_buffers"].values()
        if "merged_adapters" in own or "_active_adapter" in own:  # a layer of PEFT, or a whole one that it saves
            active = module.active_adapters, module.disable_adapters, module.merged_adapters
            adapters.append((*map(str, active), tuple(own.get("scaling", {}).items())))
        if own["_modules"]:
            waiting += own["_modules"].values()
    addresses = tuple([value.data_ptr() for value in tensors if value is not None])
    if 0 in addresses and any(value.numel() and not value.data_ptr() for value in tensors if value is not None):
        return State("it has weights without an address of their own, such as quantized ones")
    return State(None, addresses, tuple(adapters))


def _find_obstacle(own: dict[str, Any]) -> str | None:
    if own.get("_compiled_call_impl") is not None or "_orig_mod" in own["_modules"]:
        return "it is compiled"
    if own.get("training"):
        return "it is in training mode"
    hooks = (*own["_forward_hooks"].values(), *own["_forward_pre_hooks"].values())
    if any(getattr(hook, "__module__", None) != _LISTENERS for hook in hooks):
        return "it has hooks"
    if own.get("_hf_hook") is not None:
        return "it has hooks of accelerate"
    if "forward" in own:
        return "another tool has replaced `forward`"
    return None
