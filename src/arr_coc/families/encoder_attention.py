"""What the layers of a vision encoder saw: attention received and keys, from the one pass that encodes the picture.

Attention is computed again from queries and keys, in chunks of rows, so that the model may run with sdpa or flash
attention, which never give it out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from arr_coc.config import EncoderLayer

# Elements of one chunk of attention: 256 MB in float32.
MOST_ELEMENTS = 2**26


@dataclass(frozen=True, eq=False)
class LayerInput:
    """Queries and keys of one encoder layer for all pictures of a kind, in the order of the cells.

    Args:
        queries, keys (`Tensor` of shape `[heads, n, d]`): as the attention compares them.
        content (`Tensor` of shape `[n, F]`): keys before they were turned by their positions.
        lengths (`tuple[int, ...]`): what attends to itself alone: frames, or windows.
        scale (`float`): of the product of queries and keys.
        patches (`int`): patches of one cell, next to each other.
        order (`Tensor`, *optional*): where each cell stands, if the layer works in another order (windows).
    """

    queries: Tensor
    keys: Tensor
    content: Tensor
    lengths: tuple[int, ...]
    scale: float
    patches: int
    order: Tensor | None = None

    def by_cell(self, values: Tensor) -> Tensor:
        """Mean `[N, F]` over the patches of each cell, of values `[n, F]`, in the order of the picture."""
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
    """The layer of an encoder that is meant: a number, or the nearest of those `attending` to the whole picture.

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
        return min(attending, key=lambda own: abs(own - layer * (depth - 1)))
    if not -depth <= layer < depth:
        raise ValueError(f"the encoder has {depth} layers, there is no layer {layer}")
    return layer % depth


class EncoderReader:
    """Reads attention and keys of the layers that were kept, when asked, once for all pictures of a kind.

    Args:
        read (`Callable`): what a layer saw.
        layers (`Sequence[EncoderLayer]`): those that were kept.
        depth (`int`): layers of the encoder.
        attending (`Sequence[int]`, *optional*): layers that attend to the whole picture; all by default.
    """

    def __init__(
        self,
        read: Callable[[int], LayerInput],
        layers: Sequence[EncoderLayer],
        depth: int,
        attending: Sequence[int] | None = None,
    ) -> None:
        self.depth = depth
        self.attending = range(depth) if attending is None else attending
        self.layers = {self._find(layer) for layer in layers}
        self._read = read
        # plain dictionaries: a cache of bound methods would be a cycle that keeps the encoder's tensors
        self._inputs: dict[int, LayerInput] = {}
        self._attention: dict[int, Tensor] = {}

    def attention(self, layer: EncoderLayer) -> Tensor:
        """Attention `[N]` that the cells of all pictures receive."""
        number = self._known(layer)
        if number not in self._attention:
            found = self._layer(number)
            received = attention_received(found.queries, found.keys, found.lengths, found.scale)
            self._attention[number] = found.by_cell(received[:, None])[:, 0]
        return self._attention[number]

    def keys(self, layer: EncoderLayer) -> Tensor:
        """Keys `[N, F]` of the cells of all pictures, before their positions turned them."""
        found = self._layer(self._known(layer))
        return found.by_cell(found.content)

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
    """Remember by name what the chosen layers are called with, inside `with`."""
    kept: dict[int, dict[str, Any]] = {}
    handles, own = [], threading.get_ident()
    for layer in {layer % len(modules) for layer in layers}:

        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], layer: int = layer) -> None:
            if threading.get_ident() == own:  # another thread may run the same encoder meanwhile
                kept[layer] = kwargs | ({"hidden_states": args[0]} if args else {})

        handles.append(modules[layer].register_forward_pre_hook(keep, with_kwargs=True))
    try:
        yield kept
    finally:
        for handle in handles:
            handle.remove()
