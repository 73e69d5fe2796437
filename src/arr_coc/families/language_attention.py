"""What chosen tokens of a prompt pay to all others, in the layers of the language model.

The attention is computed again from queries and keys, of the chosen tokens only, while the model runs as it is. So it
works beside every attention implementation, and no layer keeps a square of all tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from arr_coc.families.family import Family


class Asking(NamedTuple):
    """Whose attention is read: groups of tokens, each read as a mean.

    Args:
        columns (`Tensor` of shape `[B, R]`): columns of the tokens in the prompt.
        shares (`Tensor` of shape `[B, G, R]`): how much each of them counts in each group.

    Example:

    ```python
    >>> import torch
    >>> from arr_coc.families.language_attention import Asking
    >>> groups = torch.tensor([[[False, False, True], [True, True, False]]])  # the last token, and two words
    >>> Asking.of(groups).shares
    tensor([[[0.0000, 0.0000, 1.0000],
             [0.5000, 0.5000, 0.0000]]])

    ```
    """

    columns: Tensor
    shares: Tensor

    @classmethod
    def of(cls, groups: Tensor) -> Asking:
        """Groups as masks `[B, G, L]` over the columns of the prompt, on the host."""
        asked = groups.any(dim=1)  # [B, L]
        # the columns that are asked come first, in their order; rows with fewer of them repeat others, which count 0
        columns = (~asked).long().argsort(dim=1, stable=True)[:, : max(1, int(asked.sum(dim=1).max()))]  # [B, R]
        taken = groups.gather(2, columns[:, None].expand(-1, groups.shape[1], -1)).float()  # [B, G, R]
        return cls(columns, taken / taken.sum(dim=-1, keepdim=True).clamp(min=1))

    @classmethod
    def alone(cls, columns: Tensor) -> Asking:
        """One token of each row, at columns `[B]`."""
        return cls(columns[:, None], torch.ones(len(columns), 1, 1, device=columns.device))


def attending_layers(family: Family) -> list[tuple[int, nn.Module]]:
    """The layers of the language model in which a token can attend to all before it, with their numbers.

    Raise `ValueError` if some layers attend to near tokens only: there a token says nothing about most of a picture.
    """
    language: Any = family.inner.language_model
    kinds = getattr(language.config, "layer_types", None) or ["full_attention"] * len(language.layers)
    other = set(kinds) - {"full_attention", "linear_attention"}
    if other:
        raise ValueError(
            f"{family.config.model_type} has layers of {', '.join(sorted(other))}, whose attention says nothing about "
            "most of a picture; use a selector that reads no attention"
        )
    return [(number, layer) for number, layer in enumerate(language.layers) if kinds[number] == "full_attention"]


class FinerCells(NamedTuple):
    """Cells whose tokens a prompt holds only pooled; attention is read on the cells themselves.

    In a layer, a cell's state is taken to be that of the pooled token that holds it, plus what set the cell apart from
    it when both entered the language model: every layer adds to the states it is given, so the difference is still
    there. Only keys are made of these states, nothing else is computed for them.

    Args:
        rows (`Tensor` of shape `[S]`), parents (`Tensor` of shape `[S]`): for each cell, its row of the batch and the
            column of its pooled token.
        apart (`tuple[Tensor, ...]`): how tokens and pooled tokens differ `[S, D]`: at the input, then at each DeepStack
            level.
        positions (`tuple[Tensor, ...]`): cosines and sines `[1, S, d]` of the cells' places.
        places (`Tensor` of shape `[B, M]`): for each row the numbers of its cells; any where `valid` is False.
        valid (`Tensor` of shape `[B, M]`): False where a row has fewer cells than others.
        pooled (`Tensor` of shape `[B, L]`): True at pooled tokens, for which the cells stand.
    """

    rows: Tensor
    parents: Tensor
    apart: tuple[Tensor, ...]
    positions: tuple[Tensor, ...]
    places: Tensor
    valid: Tensor
    pooled: Tensor

    def states(self, hidden: Tensor, layer: int) -> Tensor:
        """Approximate states `[1, S, D]` of the cells, of the states `[B, L, D]` that enter a layer."""
        states = hidden[self.rows, self.parents]
        # the first layers add the DeepStack levels one by one
        for apart in self.apart[: layer + 1]:
            states = states + apart
        return states[None]


def paid_attention(
    module: Any,
    hidden: Tensor,
    positions: tuple[Tensor, ...],
    asking: Asking,
    mask: Tensor,
    finer: FinerCells | None = None,
    finer_states: Tensor | None = None,
) -> Tensor:
    """Attention `[B, heads, G, L]` that groups of tokens pay to all tokens in a layer, or `[B, heads, G, M]` to cells.

    Args:
        module (`nn.Module`): attention module of a decoder layer.
        hidden (`Tensor` of shape `[B, L, D]`): its input.
        positions (`tuple[Tensor, ...]`): cosines and sines `[B, L, d]` of the tokens' positions.
        asking (`Asking`): the groups.
        mask (`Tensor` of shape `[B, L]`): False where padded.
        finer (`FinerCells`, *optional*), finer_states (`Tensor` of shape `[1, S, D]`, *optional*): cells to read in
            place of pooled tokens, and the module's input for them.
    """
    columns, batch = asking.columns, len(hidden)
    cosine, sine = (value.expand(batch, -1, -1) for value in positions)
    rows = torch.arange(batch, device=hidden.device)[:, None]
    queries = _turn(_project(module, "q", hidden[rows, columns]), cosine[rows, columns], sine[rows, columns])
    keys = _turn(_project(module, "k", hidden), cosine, sine)  # [B, heads of keys, L, d]
    visible = torch.arange(hidden.shape[1], device=hidden.device) <= columns[:, :, None]  # [B, R, L]
    visible = visible & mask[:, None]
    if finer is not None and finer_states is not None:
        cells = _turn(_project(module, "k", finer_states), *finer.positions)[0]  # [heads of keys, S, d]
        keys = torch.cat([keys, cells[:, finer.places].transpose(0, 1)], dim=2)  # [B, heads of keys, L + M, d]
        # a cell is seen by what comes after its pooled token
        after = finer.parents[finer.places][:, None] <= columns[:, :, None]  # [B, R, M]
        shown = finer.valid[:, None] & after
        visible = torch.cat([visible & ~finer.pooled[:, None], shown], dim=2)  # [B, R, L + M]
    # [B, heads, R, d] -> [B, heads of keys, group, R, d]
    by_key = queries.float().view(batch, keys.shape[1], -1, *queries.shape[2:])
    with torch.autocast(hidden.device.type, enabled=False):
        weights = by_key @ keys.float().mT[:, :, None] * module.scaling  # [B, heads of keys, group, R, L]
        # a row that sees nothing is padding, and counts 0
        weights = weights.masked_fill(~visible[:, None, None], torch.finfo(weights.dtype).min).softmax(dim=-1)
        if finer is not None:
            weights = weights[..., hidden.shape[1] :]
        paid: Tensor = asking.shares[:, None] @ weights.flatten(1, 2)  # [B, 1, G, R] @ [B, heads, R, L]
    return paid


def _project(module: Any, name: str, hidden: Tensor) -> Tensor:
    """Queries or keys `[B, heads, n, d]` before the rotary embedding, normalised if the model does so."""
    states: Tensor = getattr(module, f"{name}_proj")(hidden)
    heads = states.shape[-1] // module.head_dim
    if name == "q":
        heads = module.config.num_attention_heads
    # Qwen3.5 has a gate behind the query of each head
    states = states.view(*states.shape[:-1], heads, -1)[..., : module.head_dim]  # [B, n, heads * d] -> [B, n, heads, d]
    norm = getattr(module, f"{name}_norm", None)
    by_head: Tensor = (states if norm is None else norm(states)).transpose(1, 2)
    return by_head


def _turn(states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Apply the rotary embedding `[B, n, e]` to the first `e` numbers of each head of states `[B, heads, n, d]`."""
    width = cosine.shape[-1]
    first, second = states[..., : width // 2], states[..., width // 2 : width]
    crossed = torch.cat([-second, first], dim=-1)
    turned = states[..., :width] * cosine[:, None] + crossed * sine[:, None]
    return torch.cat([turned, states[..., width:]], dim=-1)


@contextmanager
def reading_attention(
    layers: Sequence[tuple[int, nn.Module]], asking: Asking, mask: Tensor, finer: FinerCells | None = None
) -> Iterator[list[Tensor]]:
    """Inside, each pass of the model in this thread adds what the groups pay in each layer.

    To all tokens `[B, heads, G, L]`, or to cells `[B, heads, G, M]`.

    Args:
        layers (`Sequence[tuple[int, nn.Module]]`): some of [`attending_layers`].
        asking (`Asking`): the groups.
        mask (`Tensor` of shape `[B, L]`): False where the prompt is padded.
        finer (`FinerCells`, *optional*): cells to read in place of pooled tokens.
    """
    paid: list[Tensor] = []
    thread = get_ident()

    @torch.no_grad()
    def read(number: int, layer: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if get_ident() != thread:  # which runs the same model
            return
        hidden: Tensor = args[0] if args else kwargs["hidden_states"]
        given = layer.input_layernorm(hidden)
        # layers may be on several devices, and their inputs may still be on that of the layer before
        values = (hidden, asking, mask, finer, kwargs["position_embeddings"])
        hidden, asked, seen, cells, positions = (_move(value, given.device) for value in values)
        states = None if cells is None else layer.input_layernorm(cells.states(hidden, number))
        paid.append(paid_attention(layer.self_attn, given, positions, asked, seen, cells, states))

    handles = [layer.register_forward_pre_hook(partial(read, number), with_kwargs=True) for number, layer in layers]
    try:
        yield paid
    finally:
        for handle in handles:
            handle.remove()


def _move(value: Any, device: torch.device) -> Any:
    """Tensors, and tuples of them, on a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if value is None:
        return None
    moved = [_move(each, device) for each in value]
    return type(value)(*moved) if hasattr(value, "_fields") else tuple(moved)
