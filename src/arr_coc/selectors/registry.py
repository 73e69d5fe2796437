"""The registry of selectors, by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from arr_coc.config import TRAINED, UNTRAINED
from arr_coc.runtime.hub import PretrainedModule
from arr_coc.selectors.contract import Selector

SelectorT = TypeVar("SelectorT", bound=type[Selector])
_REGISTRY: dict[str, type[Selector]] = {}


class UnknownSelectorError(ValueError):
    """A name that no selector is registered under."""


def register_selector(name: str) -> Callable[[SelectorT], SelectorT]:
    """Class decorator that registers a selector under a unique name.

    Example:

    ```python
    >>> from arr_coc import TokenSelector, register_selector
    >>> @register_selector("grid")
    ... class Mine(TokenSelector):
    ...     def select(self, queries, budget=None):
    ...         return []
    Traceback (most recent call last):
        ...
    ValueError: a selector named 'grid' is already registered (GridSelector); choose another name

    ```
    """

    def register(cls: SelectorT) -> SelectorT:
        if name == TRAINED:
            raise ValueError(f"{name!r} is the selector that was trained for a model; choose another name")
        if name in _REGISTRY:
            raise ValueError(
                f"a selector named {name!r} is already registered ({_REGISTRY[name].__name__}); choose another name"
            )
        _REGISTRY[name] = cls
        return cls

    return register


def create_selector(name: str, **kwargs: Any) -> Any:
    """Make a registered selector; `arr-coc-untrained` needs a `config`.

    `arr-coc` is the selector that was trained for a model, and is opened with it: see [`ARRCOCQwen.from_pretrained`].

    Example:

    ```python
    >>> import torch
    >>> from arr_coc import VisualQuery, create_selector
    >>> query = VisualQuery(tokens=torch.randn(16, 8), grid=(1, 4, 4), words=torch.randn(2, 8))
    >>> [selection] = create_selector("grid").select([query], budget=4)
    >>> selection.indices.tolist()
    [0, 2, 8, 10]

    ```
    """
    if name == TRAINED:
        raise UnknownSelectorError(
            f"{TRAINED!r} was trained for a model and comes with it; use ARRCOCQwen.from_pretrained().selector, "
            f"or {UNTRAINED!r}"
        )
    cls = find_class(name)
    try:
        inspect.signature(cls).bind(**kwargs)
    except TypeError as error:
        raise TypeError(f"selector {name!r} takes {inspect.signature(cls)}: {error}") from None
    return cls(**kwargs)


def find_class(name: str) -> type[Selector]:
    """The class that is registered under a name."""
    if name not in _REGISTRY:
        raise UnknownSelectorError(f"no selector is named {name!r}; there are {', '.join(list_selectors())}")
    return _REGISTRY[name]


def list_selectors() -> list[str]:
    """Names of all selectors that fit any model, which are those that [`create_selector`] makes.

    `arr-coc`, the selector that was trained for a model, comes with its model and is not among them.

    Example:

    ```python
    >>> from arr_coc import list_selectors
    >>> {"arr-coc-untrained", "centre", "grid", "random"} <= set(list_selectors())
    True

    ```
    """
    return sorted(_REGISTRY)


def selector_name(selector: Selector) -> str:
    """The registered name of a selector, or the name of its class if it has none; `arr-coc` if it was trained."""
    if isinstance(selector, PretrainedModule) and selector.trained:
        return TRAINED
    names = [name for name, cls in _REGISTRY.items() if type(selector) is cls]
    return names[0] if names else type(selector).__name__
