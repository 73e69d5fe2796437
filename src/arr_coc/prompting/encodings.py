"""One picture, many questions: what the vision encoder made of the pictures of a prompt, kept for the next question.

In mode `prune` a picture is encoded once. In mode `saccade` its gestalt is encoded once and each of its cells at most
once. Every question still chooses its own tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from arr_coc.config import EncoderLayer, Grid, cell_count
from arr_coc.families.family import Encoded, Family, Inputs
from arr_coc.gaze.gestalt import encode_gestalts
from arr_coc.gaze.plan import GazePlan
from arr_coc.gaze.source import PictureSource
from arr_coc.pixels.mipmaps import Mipmaps
from arr_coc.prompting.prefix import Prefix
from arr_coc.runtime.digest import PictureDigest

# On CUDA, cells of a further question are encoded in numbers that are multiples of this.
STEP = 64
_DIGEST = PictureDigest()


class _Gestalts(NamedTuple):
    """The gestalts of all pictures under one plan each, and the measurements they were made from."""

    mipmaps: list[Mipmaps | None]
    encoded: Encoded


class _Cells:
    """The cells of one picture that were encoded at full resolution: `rows` maps a cell to its row, or to -1."""

    def __init__(self, count: int, device: torch.device) -> None:
        with torch.inference_mode(False):  # inference tensors could not be written to outside inference mode
            self.rows = torch.full((count,), -1, device=device)
        self.levels: list[Tensor] = []  # features, then DeepStack's levels, each [m, D]

    def missing(self, cells: Tensor) -> Tensor:
        """The cells among these that were not encoded yet."""
        return cells[self.rows[cells] < 0]

    def add(self, cells: Tensor, levels: Sequence[Tensor]) -> None:
        """Keep the encoded levels `[m, D]` of cells `[m]`."""
        known = len(self.levels[0]) if self.levels else 0
        self.rows[cells] = torch.arange(known, known + len(cells), device=cells.device)
        self.levels = [torch.cat(pair) for pair in zip(self.levels, levels, strict=True)] if known else list(levels)


class Encodings:
    """What was encoded of the pictures of a prompt. Pass it with further questions about the same pictures.

    It belongs to the pictures of one prompt, in their order. [`~arr_coc.encode`] makes one; each question that it is
    passed with adds what it had to encode. What it keeps carries no gradients.

    Attributes:
        calls (`int`): how often the encoder ran.
        pixels (`dict[str, Tensor]`): the processor's pixels, if they are shared too.
        prefix (`Prefix`, *optional*): keys and values of the last prompt, if they are shared too.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.pixels: dict[str, Tensor] = {}
        self.prefix: Prefix | None = None
        self._grids: list[tuple[str, Grid]] | None = None
        self._full: dict[str, tuple[set[EncoderLayer], Encoded]] = {}
        self._pictures: dict[str, list[Tensor] | None] = {}
        self._gestalts: dict[Hashable, _Gestalts] = {}
        self._cells: dict[int, _Cells] = {}
        self._attended: tuple[Hashable, list[Tensor]] = (None, [])
        self._source: tuple[object, ...] | None = None  # the model, and digests of the pictures, once they are known

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_source": None}  # a copy may belong to a copy of the model

    def remember_source(self, family: Family, inputs: Inputs) -> None:
        """Remember the model and the pictures that this is about, so that others are refused."""
        self._source = _describe_source(family, inputs)

    def check_source(self, family: Family, inputs: Inputs) -> None:
        """Raise `ValueError` if this is known to be about another model or other pictures."""
        if self._source is not None and self._source != _describe_source(family, inputs):
            raise ValueError("`encoded` holds other pictures, or those of another model; encode these pictures first")

    def check(self, pictures: Sequence[tuple[str, Grid]]) -> None:
        """Raise `ValueError` if these are not pictures of the kinds and grids that were encoded."""
        grids = list(pictures)
        if self._grids is None:
            self._grids = grids
        elif self._grids != grids:
            raise ValueError(
                f"`encoded` holds pictures of grids {[grid for _, grid in self._grids]}, this prompt has "
                f"{[grid for _, grid in grids]}; encode these pictures first"
            )

    @torch.no_grad()
    def full(self, family: Family, inputs: Inputs, kind: str, layers: Sequence[EncoderLayer] = ()) -> Encoded:
        """All pictures of a kind encoded whole, with the named encoder layers recorded."""
        known = self._full.get(kind)
        if known is None or not set(layers) <= known[0]:
            recorded = set(layers) | (known[0] if known else set())
            self.calls += 1
            self._full[kind] = (recorded, family.encode(inputs, kind, tuple(recorded)))
        return self._full[kind][1]

    def pictures(self, family: Family, inputs: Inputs, kind: str) -> list[Tensor] | None:
        """The pictures of a kind as the model reads them."""
        if kind not in self._pictures:
            self._pictures[kind] = family.pictures(inputs, kind)
        return self._pictures[kind]

    @torch.no_grad()
    def gestalts(
        self,
        family: Family,
        sources: Sequence[PictureSource],
        plans: Sequence[GazePlan],
        mipmaps: list[Mipmaps | None],
        replay: bool,
    ) -> Encoded:
        """The gestalts of all pictures, from a CUDA graph if `replay` allows it."""
        key = tuple(plan.overview for plan in plans)
        if key not in self._gestalts:
            self.calls += 1
            self._gestalts[key] = _Gestalts(mipmaps, encode_gestalts(family, sources, plans, mipmaps, replay))
        return self._gestalts[key].encoded

    def mipmaps(self, plans: Sequence[GazePlan]) -> list[Mipmaps | None] | None:
        """What was measured of the pictures under these plans; None if nothing was yet."""
        known = self._gestalts.get(tuple(plan.overview for plan in plans))
        return None if known is None else known.mipmaps

    @torch.no_grad()
    def cells(
        self,
        family: Family,
        sources: Sequence[PictureSource],
        cells: Sequence[Tensor],
        fixed_count: bool,
        replay: bool,
    ) -> Encoded | None:
        """Chosen cells of each picture at full resolution; only those that are new are encoded.

        Args:
            family (`Family`): the opened model.
            sources (`Sequence[PictureSource]`): the pictures.
            cells (`Sequence[Tensor]`): the chosen cells `[k]` of each.
            fixed_count (`bool`): whether the next prompt will have as many.
            replay (`bool`): whether a CUDA graph may encode them.
        """
        if not any(len(chosen) for chosen in cells):
            return None
        stores = []
        for place, source in enumerate(sources):
            if place not in self._cells:
                self._cells[place] = _Cells(cell_count(source.grid), source.device)
            stores.append(self._cells[place])
        new = [store.missing(chosen) if len(chosen) else chosen for store, chosen in zip(stores, cells, strict=True)]
        further = any(store.levels for store in stores)
        if further and replay and stores[0].rows.is_cuda:
            new = [_fill_up(store, chosen) for store, chosen in zip(stores, new, strict=True)]
        encoded = encode_cells(family, sources, new, replay and (fixed_count or further))
        if encoded is not None:
            self.calls += 1
            counts = [len(chosen) for chosen in new]
            parts = zip(*(torch.split(level, counts) for level in (encoded.features, *encoded.deepstack)), strict=True)
            for store, chosen, levels in zip(stores, new, parts, strict=True):
                if len(chosen):
                    store.add(chosen, levels)
        rows = [
            [level[store.rows[chosen]] for level in store.levels]
            for store, chosen in zip(stores, cells, strict=True)
            if len(chosen)
        ]
        features, *deepstack = (torch.cat(level) for level in zip(*rows, strict=True))
        return Encoded(features, tuple(deepstack))

    def knows_attended(self, key: Hashable) -> bool:
        """Whether the model was asked where it looks; `key` as in [`~Encodings.attended`]."""
        return self._attended[0] == key

    def attended(self, key: Hashable, ask: Callable[[], list[Tensor]]) -> tuple[list[Tensor], bool]:
        """Where the model looks at each picture, and whether it was asked just now; kept for the last question.

        Args:
            key (`Hashable`): the prompt and the layers that are read.
            ask (`Callable`): asks the model.
        """
        asks = self._attended[0] != key
        if asks:
            self._attended = key, ask()
        return self._attended[1], asks

    @property
    def nbytes(self) -> int:
        """Bytes that features, pictures, keys and values take."""
        encoded = [known for _, known in self._full.values()] + [known.encoded for known in self._gestalts.values()]
        tensors = [level for known in encoded for level in (known.features, *known.deepstack)]
        tensors += [level for store in self._cells.values() for level in store.levels]
        tensors += [picture for pictures in self._pictures.values() for picture in pictures or ()]
        measured = [mipmaps for known in self._gestalts.values() for mipmaps in known.mipmaps if mipmaps is not None]
        tensors += [tensor for mipmaps in measured for tensor in mipmaps.tensors if tensor is not None]
        tensors += [*self.pixels.values(), *self._attended[1]]
        tensors += [store.rows for store in self._cells.values()]
        tensors += [tensor for known in encoded if known.reader is not None for tensor in known.reader.tensors]
        # views keep all of the memory that they show a part of
        storages = {storage.data_ptr(): storage.nbytes() for storage in map(Tensor.untyped_storage, tensors)}
        return sum(storages.values()) + (0 if self.prefix is None else self.prefix.nbytes)


def _describe_source(family: Family, inputs: Inputs) -> tuple[object, ...]:
    pixels = [(kind, _DIGEST(inputs[family.pixel_names[kind]])) for kind in family.present(inputs)]
    return id(family.target), *pixels


def _fill_up(store: _Cells, cells: Tensor) -> Tensor:
    """New cells and others that are not encoded yet, up to a whole step: graphs are recorded for few sizes."""
    spare = -len(cells) % STEP
    if not spare or not len(cells):
        return cells
    free = store.rows < 0
    free[cells] = False
    return torch.cat([cells, free.nonzero()[:spare, 0]])


def encode_cells(
    family: Family, sources: Sequence[PictureSource], cells: Sequence[Tensor], replay: bool
) -> Encoded | None:
    """Encode the chosen cells of all pictures in one call of the encoder."""
    chosen = [(source, indices) for source, indices in zip(sources, cells, strict=True) if len(indices)]
    if not chosen:
        return None
    patches = torch.cat([source.patches(indices).to(family.target.dtype) for source, indices in chosen])
    grids = [source.grid for source, _ in chosen]
    return family.encode_cells(patches, [indices for _, indices in chosen], grids, replay=replay)
