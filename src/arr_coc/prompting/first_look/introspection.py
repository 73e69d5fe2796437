"""Introspection: where the model itself looks while it reads a prompt with few tokens for each picture.

In mode `prune` these are a sixteenth of the visual tokens, each the mean of those around it. Meanwhile the
attention of the prompt's last token and of the question's words is read, not on the pooled tokens but on all cells, see
[`FinerCells`]: the model says where to look, and the cells' own tokens say exactly where.

In mode `saccade` they are the gestalt. No other cells are encoded yet, so what is paid to its tokens is interpolated.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from arr_coc.config import ARRCOCConfig, Grid, Introspect, cell_count
from arr_coc.families.family import Encoded, Family, Inputs
from arr_coc.families.language_attention import Asking, FinerCells, attending_layers, reading_attention
from arr_coc.gaze.gestalt import Gestalt
from arr_coc.gaze.plan import GazePlan
from arr_coc.prompting.cache import Holding, calling
from arr_coc.prompting.layout import Gazed, Prompt, build, choose_columns
from arr_coc.prompting.question import Bools, ChatTokens, Ints, find_chat, find_question
from arr_coc.prompting.settings import Settings
from arr_coc.runtime.tensors import upload
from arr_coc.selectors.contract import Selection, TokenSelector
from arr_coc.selectors.registry import selector_name
from arr_coc.selectors.smaller_picture import nearest_cells, shrink_grid

# Visual tokens that a pooled picture has: a share of all, but some.
SHARE, FEWEST, MOST = 1 / 16, 16, 256
# With `introspect="auto"` the model is asked if less than this share of a picture's cells is read at full resolution:
# with a quarter of them, other selectors lose hardly anything.
TIGHT = 1 / 6
# Words of a question whose attention is read; of longer ones the last. Each of them looks at all cells in all heads.
MOST_WORDS = 256
# the arguments of a pass that only reads
READ = ("input_ids", "attention_mask", "position_ids", "mm_encoder_outputs")


def pooled_grid(grid: Grid) -> Grid:
    """The grid at which a picture or clip is read to see where the model looks.

    Example:

    ```python
    >>> from arr_coc.prompting.first_look.introspection import pooled_grid
    >>> pooled_grid((1, 24, 32)), pooled_grid((1, 94, 126)), pooled_grid((1, 3, 3))
    ((1, 6, 8), (1, 14, 18), (1, 3, 3))

    ```
    """
    fewest = FEWEST * grid[0]
    return shrink_grid(grid, max(fewest, min(round(SHARE * cell_count(grid)), MOST * grid[0])))


def choose_introspection(family: Family, settings: Settings, selector: TokenSelector) -> Introspect:
    """Whether a selector asks the model where it looks, and through how many layers.

    Raise `ValueError` if it must and cannot: with this selector, for this model, or for these settings. `"auto"`
    becomes `"off"` then.
    """
    wanted = settings.introspect or ("on" if selector.introspects else selector.default_introspect) or "off"
    if selector.introspects and wanted == "off":
        raise ValueError(f"{selector_name(selector)!r} only asks the model where it looks; drop introspect='off'")
    if not selector.introspects and selector.default_introspect is None:
        if wanted in ("auto", "off"):
            return "off"
        raise ValueError(cannot_introspect(selector_name(selector), wanted))
    if selector.introspects:
        check_introspection(family, settings)
        return "on" if wanted == "auto" else wanted
    if settings.mode == "weight" and wanted != "off":
        if settings.introspect in (None, "auto"):
            return "off"
        raise ValueError("mode 'weight' reads all tokens, so the model is not asked; use 'prune', or introspect='off'")
    try:
        if wanted != "off":
            check_introspection(family, settings, wanted)
    except ValueError as error:
        if wanted == "auto":
            return "off"
        raise ValueError(f"{error}; or use introspect='off'") from None
    return wanted


def cannot_introspect(name: str, introspect: object) -> str:
    """What an error says of a selector that asks the model nothing."""
    return f"{name!r} does not ask the model where it looks; drop introspect={introspect!r}, or use arr-coc"


def check_introspection(family: Family, settings: Settings, introspect: Introspect = "on") -> None:
    """Raise `ValueError` if a model's own attention cannot be read, or not for these settings."""
    layers = attending_layers(family)
    if settings.query is not None:
        raise ValueError("a selector that introspects asks the model the prompt's own question; drop `query`")
    if not layers_to_read(family, introspect):
        raise ValueError(
            f"`introspect` must read as far as layer {layers[0][0] + 1}, the first that sees a whole picture, got "
            f"{introspect}"
        )


def is_tight(selector: TokenSelector, kept: Sequence[int | None], grids: Sequence[Grid]) -> bool:
    """Whether some picture keeps so few of its cells that it pays to ask the model; None is an automatic number."""
    most = getattr(getattr(selector, "config", None), "max_tokens", ARRCOCConfig.max_tokens)  # of a frame
    return any(
        (most * grid[0] if few is None else few) < TIGHT * cell_count(grid)
        for few, grid in zip(kept, grids, strict=True)
    )


def layers_to_read(family: Family, introspect: Introspect) -> list[int]:
    """Numbers of the layers whose attention is read: of all, or of the first so many."""
    numbers = [number for number, _ in attending_layers(family)]
    return [number for number in numbers if number < introspect] if isinstance(introspect, int) else numbers


@dataclass(frozen=True)
class _Pooled:
    """One picture or clip, pooled.

    Args:
        small (`tuple[int, int, int]`): the grid of the pooled tokens.
        levels (`tuple[Tensor, ...]`): pooled tokens, and DeepStack levels, `[n, D]` each.
        cells (`ndarray` of shape `[n]`): the cells of the full grid whose places they take.
        parents (`Tensor` of shape `[N]`): for each cell, its pooled token.
        apart (`tuple[Tensor, ...]`): how the cells' tokens, and levels, differ from it, `[N, D]` each.
    """

    small: Grid
    levels: tuple[Tensor, ...]
    cells: Ints
    parents: Tensor
    apart: tuple[Tensor, ...]


def _pool(levels: Sequence[Tensor], grid: Grid, small: Grid) -> _Pooled:
    frames, rows, columns = grid
    pooled = []
    for level in levels:
        by_frame = level.view(frames, rows, columns, -1).permute(0, 3, 1, 2)  # [N, D] -> [t, D, h, w]
        means = F.adaptive_avg_pool2d(by_frame, (small[1], small[2]))
        pooled.append(means.permute(0, 2, 3, 1).flatten(0, 2))  # [t, D, h', w'] -> [n, D]
    row = ((torch.arange(rows) + 0.5) * small[1] / rows).long()
    column = ((torch.arange(columns) + 0.5) * small[2] / columns).long()
    frame = torch.arange(frames)[:, None, None] * small[1] * small[2]
    parents = (frame + row[:, None] * small[2] + column).flatten()
    on_device = upload(parents, levels[0].device)
    apart = tuple(level - means[on_device] for level, means in zip(levels, pooled, strict=True))
    return _Pooled(small, tuple(pooled), nearest_cells(small, grid).numpy(), parents, apart)


@torch.no_grad()
def introspect(
    family: Family,
    inputs: Inputs,
    prompt: Prompt,
    positions: Tensor,
    encoded: dict[str, Encoded],
    chat: ChatTokens | None = None,
    layers: Sequence[int] | None = None,
    small: Callable[[Grid], Grid] = pooled_grid,
) -> list[Tensor]:
    """Attention `[N]` that the model pays the cells of each picture: mean over layers and heads.

    That of the prompt's last token, plus the mean of the question's words.

    Args:
        family (`Family`): the opened model.
        inputs (`Mapping`): the inputs of the call.
        prompt (`Prompt`), positions (`Tensor` of shape `[P, B, L]`): the full prompt and its positions.
        encoded (`dict`): for each kind, what was encoded.
        chat (`ChatTokens`, *optional*): the chat markers; by default those of the model.
        layers (`Sequence[int]`, *optional*): numbers of the layers to read; by default all. Later ones are not run.
        small (`Callable`, *optional*): gives the grid at which a picture is read; by default a sixteenth of its tokens.
    """
    pictures = []
    for span in prompt.spans:
        full, rows = encoded[span.kind], slice(span.offset, span.offset + len(span.columns))
        levels = [level[rows].detach() for level in (full.features, *full.deepstack)]
        pictures.append(_pool(levels, span.grid, small(span.grid)))
    chosen = [picture.cells for picture in pictures]
    selections = [
        Selection(torch.from_numpy(picture.cells), picture.levels[0], picture.levels[1:]) for picture in pictures
    ]
    arguments, _ = build(family, inputs, prompt, positions, encoded, selections, chosen, "prune")
    short = {name: arguments[name] for name in READ if name in arguments}
    source, valid = (part.numpy() for part in choose_columns(prompt, chosen, torch.device("cpu")))
    finer = _find_cells(family, prompt, positions, source, valid, pictures, short["input_ids"].device)
    attention = _read(family, short, _find_asking(family, prompt, source, valid, chat), valid, finer, layers)  # [B, M]
    found, begins = [], [0] * len(prompt.ids)
    for span in prompt.spans:
        begin, count = begins[span.row], len(span.columns)
        found.append(attention[span.row, begin : begin + count])
        begins[span.row] += count
    return found


@torch.no_grad()
def introspect_gestalts(
    family: Family,
    inputs: Inputs,
    prompt: Prompt,
    positions: Tensor,
    encoded: Encoded,
    gestalts: Sequence[Gestalt],
    plans: Sequence[GazePlan],
    grids: Sequence[Grid],
    chat: ChatTokens | None = None,
    layers: Sequence[int] | None = None,
    cache: Any = None,
) -> tuple[list[Tensor], Holding]:
    """Attention `[windows]` that the model pays the windows of each picture while it reads the gestalts alone.

    Args:
        family (`Family`): the opened model.
        inputs (`Mapping`): the inputs of the call.
        prompt (`Prompt`), positions (`Tensor` of shape `[P, B, L]`): with a place for each token of the gaze.
        encoded (`Encoded`): the gestalts, as encoded.
        gestalts, plans, grids: of each picture, what the language model reads, the plan, and the full grid.
        chat, layers (*optional*): as in [`introspect`].
        cache (`Cache`, *optional*): an empty one, to which the keys and values of what is read are added.

    Returns:
        The attention for each picture, and the prompt that was read.
    """
    chosen = [np.arange(len(gestalt.places)) for gestalt in gestalts]
    selections = [
        Selection(torch.arange(len(gestalt.places)), gestalt.levels[0], gestalt.levels[1:]) for gestalt in gestalts
    ]
    gazes = [Gazed(gestalt.places, grid, len(gestalt.places)) for gestalt, grid in zip(gestalts, grids, strict=True)]
    arguments, holding = build(
        family, inputs, prompt, positions, {"image": encoded}, selections, chosen, "saccade", gazes
    )
    short = {name: arguments[name] for name in READ if name in arguments}
    source, valid = (part.numpy() for part in choose_columns(prompt, chosen, torch.device("cpu")))
    groups = _find_asking(family, prompt, source, valid, chat)
    attention = _read(family, short, groups, valid, numbers=layers, cache=cache)  # [B, L']
    found = []
    for span, gestalt, plan, grid in zip(prompt.spans, gestalts, plans, grids, strict=True):
        begin = int((valid[span.row] & (source[span.row] == span.columns[0])).argmax())
        paid = attention[span.row, begin : begin + len(gestalt.places)]
        _, rows, columns = plan.gestalt
        row, column = gestalt.places // grid[2] // plan.scale, gestalt.places % grid[2] // plan.scale
        # tokens may be merged, so that some cells of the gestalt have none
        by_cell = paid.new_zeros(rows * columns).index_add(0, row * columns + column, paid)
        fine = F.interpolate(by_cell.view(1, 1, rows, columns), plan.windows[1:], mode="bilinear")
        found.append(fine.flatten())  # [1, 1, wh, ww] -> [windows]
    return found, holding


def find_words(family: Family, prompt: Prompt, chat: ChatTokens | None) -> Bools:
    """Where the question's words are in a prompt, a mask `[B, L]`."""
    visual = np.isin(prompt.ids, [family.token_id(kind) for kind in family.kinds])
    chat = chat or find_chat(family)
    return find_question(prompt.ids, prompt.mask, visual, family.special_ids(), chat, prompt.labels)


def _find_asking(family: Family, prompt: Prompt, source: Ints, valid: Bools, chat: ChatTokens | None) -> Bools:
    """Masks `[B, 2, L']` of the last token before an answer, and of the question's words, in the shorter prompt."""
    words = find_words(family, prompt, chat)  # [B, L]
    read = prompt.mask.copy()
    if prompt.labels is not None:
        learned = prompt.mask & (prompt.labels != -100)
        columns = np.arange(read.shape[1])
        # the question of the last answer ends before its labels; a prompt of labels alone has no other end
        before = read & ~learned & (columns < np.where(learned, columns, -1).max(axis=1, keepdims=True))
        read = np.where(before.any(axis=1, keepdims=True), before, read)
    last = np.zeros_like(read)
    last[np.arange(len(read)), read.shape[1] - 1 - read[:, ::-1].argmax(axis=1)] = True
    words &= words[:, ::-1].cumsum(axis=1)[:, ::-1] <= MOST_WORDS
    pictured = np.isin(np.arange(len(read)), [span.row for span in prompt.spans])[:, None]
    last, words = last & pictured, words & pictured  # a row without pictures pays them nothing
    return np.stack([np.take_along_axis(group, source, axis=1) & valid for group in (last, words)], axis=1)


def _find_cells(
    family: Family,
    prompt: Prompt,
    positions: Tensor,
    source: Ints,
    valid: Bools,
    pictures: Sequence[_Pooled],
    device: torch.device,
) -> FinerCells:
    """All cells of all pictures, with the columns of their pooled tokens in the shorter prompt."""
    batch, length = source.shape
    by_row: list[list[Ints]] = [[] for _ in range(batch)]
    rows, parents, placed, pooled, offset = [], [], [], np.zeros((batch, length), dtype=bool), 0
    for span, picture in zip(prompt.spans, pictures, strict=True):
        count = len(span.columns)
        where = np.full(prompt.ids.shape[1], -1)
        where[source[span.row][valid[span.row]]] = valid[span.row].nonzero()[0]
        columns = where[span.columns[picture.cells]]  # of the pooled tokens
        pooled[span.row, columns] = True
        parents.append(columns[picture.parents.numpy()])
        rows.append(np.full(count, span.row))
        placed.append(positions[:, span.row, torch.from_numpy(span.columns)])  # [P, N]
        by_row[span.row].append(np.arange(offset, offset + count))
        offset += count
    numbers = [np.concatenate(own) if own else np.zeros(0, dtype=np.int64) for own in by_row]
    most = max(map(len, numbers))
    shown = np.arange(most) < np.array(list(map(len, numbers)))[:, None]
    places = np.stack([np.pad(own, (0, most - len(own))) for own in numbers])
    host = torch.from_numpy(np.stack([np.concatenate(rows), np.concatenate(parents)]))
    row_of, parent_of = upload(host, device)
    apart = tuple(torch.cat(level) for level in zip(*(picture.apart for picture in pictures), strict=True))
    at = upload(torch.cat(placed, dim=1)[:, None], device)  # [P, 1, S]
    turned = family.inner.language_model.rotary_emb(apart[0][None], at if len(at) > 1 else at[0])
    return FinerCells(
        row_of, parent_of, apart, turned, upload(torch.from_numpy(places), device),
        upload(torch.from_numpy(shown), device), upload(torch.from_numpy(pooled), device),
    )  # fmt: skip


def _read(
    family: Family,
    arguments: dict[str, Any],
    groups: Bools,
    valid: Bools,
    finer: FinerCells | None = None,
    numbers: Sequence[int] | None = None,
    cache: Any = None,
) -> Tensor:
    """Attention `[B, L']` to the tokens of a prompt, or to finer cells `[B, M]`: mean over layers and heads.

    That of two groups of tokens, masks `[B, 2, L']`, one plus the other.
    """
    layers, device = attending_layers(family), arguments["input_ids"].device
    chosen = [layer for layer in layers if numbers is None or layer[0] in numbers]
    if not chosen:
        known = ", ".join(str(number) for number, _ in layers)
        raise ValueError(f"`layers` must name some of {known}, got {numbers!r}")
    asking = Asking(*(upload(part, device) for part in Asking.of(torch.from_numpy(groups))))
    mask = upload(torch.from_numpy(valid), device)
    with calling(family.target), reading_attention(chosen, asking, mask, finer) as paid:
        run_layers(family, arguments, 1 + chosen[-1][0], cache)
    return torch.stack([layer.to(device).mean(dim=1) for layer in paid]).mean(dim=0).sum(dim=1)


def run_layers(family: Family, arguments: dict[str, Any], depth: int, cache: Any = None) -> None:
    """Run the model without its head, through so many layers of the language model; with a cache through all."""
    inner: Any = family.inner
    language = inner.language_model
    if depth == len(language.layers) or cache is not None:
        inner(**arguments, use_cache=cache is not None, past_key_values=cache)
        return
    # shallow copies share every weight and leave the model untouched
    short = copy.copy(language)
    short._modules = {**language._modules, "layers": language.layers[:depth], "norm": nn.Identity()}
    whole = copy.copy(inner)
    whole._modules = {**inner._modules, "language_model": short}
    type(inner).forward(whole, **arguments, use_cache=False)
