"""Reading a vision encoder's layers: the attention each cell receives and its keys, without a second pass.

Attention is recomputed from queries and keys, in chunks of rows, so the model may run with sdpa or flash attention,
which do not return it.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from arr_coc.config import EncoderLayer

# Most elements in one chunk of attention: 256 MB in float32.
MOST_ELEMENTS = 2**26


@dataclass(frozen=True, eq=False)
class LayerInput:
    """Queries and keys of one encoder layer for all pictures of a kind, in the order of the cells.

    Args:
        queries, keys (`Tensor` of shape `[heads, n, d]`): as the attention compares them.
        content (`Tensor` of shape `[n, F]`): keys before the rotary embedding.
        lengths (`tuple[int, ...]`): patches in each frame or window; attention stays inside it.
        scale (`float`): factor of the product of queries and keys.
        patches (`int`): adjacent patches in one cell.
        order (`Tensor`, *optional*): index of each cell in the layer, if it works in another order (windows).
    """

    queries: Tensor
    keys: Tensor
    content: Tensor
    lengths: tuple[int, ...]
    scale: float
    patches: int
    order: Tensor | None = None

    def by_cell(self, values: Tensor) -> Tensor:
        """Mean `[N, F]` of values `[n, F]` over the patches of each cell, in the order of the picture."""
        cells = values.view(-1, self.patches, values.shape[-1]).mean(dim=1)  # [N, F]
        return cells if self.order is None else cells[self.order]


def attention_received(queries: Tensor, keys: Tensor, lengths: Sequence[int], scale: float) -> Tensor:
    """Mean attention `[n]` that each patch receives from all patches of its frame or window, over all heads."""
    received = []
    parts = [torch.split(values, list(lengths), dim=1) for values in (queries, keys)]
    for q, k in zip(*parts, strict=True):
        heads, count, _ = k.shape
        rows = max(1, MOST_ELEMENTS // (heads * count))
        total = torch.zeros(count, device=k.device)
        for part in torch.split(q, rows, dim=1):
            weights = (part.float() @ k.float().mT * scale).softmax(dim=-1)  # [heads, rows, count]
            total += weights.sum(dim=(0, 1))
        received.append(total / (heads * count))
    return torch.cat(received)


def find_layer(layer: EncoderLayer, depth: int, attending: Sequence[int]) -> int:
    """The number of a layer; a float is a share of the depth and means the nearest layer in `attending`.

    `attending` lists the layers that attend to the whole picture.

    Example:

    ```python
    >>> from arr_coc.families.encoder_attention import find_layer
    >>> find_layer(-1, 32, range(32)), find_layer(0.5, 32, [7, 15, 23, 31])
    (31, 15)

    ```
    """
    if isinstance(layer, float):
        if not 0 <= layer <= 1:
            raise ValueError(f"an encoder layer as a share of the depth must be in [0, 1], got {layer}")
        return min(attending, key=lambda number: abs(number - layer * (depth - 1)))
    if not -depth <= layer < depth:
        raise ValueError(f"the encoder has {depth} layers, there is no layer {layer}; use {-depth}..{depth - 1}")
    return layer % depth


class EncoderReader:
    """Computes attention and keys of the recorded layers on demand, once for all pictures of a kind.

    Args:
        read (`Callable`): returns a recorded layer's [`LayerInput`], given its number.
        layers (`Sequence[EncoderLayer]`): the recorded layers.
        depth (`int`): number of layers in the encoder.
        attending (`Sequence[int]`, *optional*): layers that attend to the whole picture; all by default.
        recorded (`Mapping[int, Mapping]`, *optional*): the arguments of each recorded layer, which `read` reads.
    """

    def __init__(
        self,
        read: Callable[[int], LayerInput],
        layers: Sequence[EncoderLayer],
        depth: int,
        attending: Sequence[int] | None = None,
        recorded: Mapping[int, Mapping[str, Any]] | None = None,
    ) -> None:
        self.depth = depth
        self.attending = range(depth) if attending is None else attending
        self.layers = {self._find(layer) for layer in layers}
        self._read, self._recorded = read, recorded or {}
        # plain dictionaries: a cache on bound methods would be a reference cycle that keeps the encoder's tensors alive
        self._inputs: dict[int, LayerInput] = {}
        self._attention: dict[int, Tensor] = {}

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that it keeps."""
        known = [value for layer in self._inputs.values() for value in vars(layer).values()]
        values: list[Any] = [*known, *self._attention.values()]
        for arguments in self._recorded.values():
            for value in arguments.values():
                values += value if isinstance(value, tuple | list) else [value]
        return [value for value in values if isinstance(value, Tensor)]

    def renewed(self) -> EncoderReader:
        """One of the same layers that has computed nothing yet."""
        fresh = copy.copy(self)
        fresh._inputs, fresh._attention = {}, {}
        return fresh

    def attention(self, layer: EncoderLayer) -> Tensor:
        """Attention `[N]` that the cells of all pictures receive."""
        number = self._known(layer)
        if number not in self._attention:
            layer_input = self._layer(number)
            received = attention_received(layer_input.queries, layer_input.keys, layer_input.lengths, layer_input.scale)
            self._attention[number] = layer_input.by_cell(received[:, None])[:, 0]
        return self._attention[number]

    def keys(self, layer: EncoderLayer) -> Tensor:
        """Keys `[N, F]` of the cells of all pictures, before the rotary embedding."""
        layer_input = self._layer(self._known(layer))
        return layer_input.by_cell(layer_input.content)

    def _layer(self, number: int) -> LayerInput:
        if number not in self._inputs:
            self._inputs[number] = self._read(number)
        return self._inputs[number]

    def _find(self, layer: EncoderLayer) -> int:
        return find_layer(layer, self.depth, self.attending)

    def _known(self, layer: EncoderLayer) -> int:
        number = self._find(layer)
        if number not in self.layers:
            raise ValueError(f"layer {layer} of the encoder was not kept; name it in the selector's `encoder_layers`")
        return number


@contextmanager
def keep_inputs(modules: Sequence[nn.Module], layers: Sequence[int]) -> Iterator[dict[int, dict[str, Any]]]:
    """Record the arguments of the chosen layers' calls, by name, inside `with`."""
    kept: dict[int, dict[str, Any]] = {}
    handles, thread = [], threading.get_ident()
    for layer in {layer % len(modules) for layer in layers}:

        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], layer: int = layer) -> None:
            if threading.get_ident() == thread:  # another thread may be running the same encoder
                kept[layer] = kwargs | ({"hidden_states": args[0]} if args else {})

        handles.append(modules[layer].register_forward_pre_hook(keep, with_kwargs=True))
    try:
        yield kept
    finally:
        for handle in handles:
            handle.remove()
