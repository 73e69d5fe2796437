"""Modes `prune` and `weight`: tokens are dropped, or scaled by relevance.

The whole picture is encoded once before, unless the selector picks cells by their pixels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from arr_coc.attending import resolve_budget
from arr_coc.config import Budget, cell_count
from arr_coc.families.family import Encoded, Family, Inputs
from arr_coc.prompting.first_look.introspection import (
    choose_introspection,
    introspect,
    is_tight,
    layers_to_read,
    pooled_grid,
)
from arr_coc.prompting.layout import build, check_selections, encode_full, read_prompt
from arr_coc.prompting.question import Ints
from arr_coc.prompting.settings import Settings
from arr_coc.prompting.sharing import select_shared, share_budget
from arr_coc.prompting.shortening import Shortened, Shortening
from arr_coc.selectors.contract import LayerReader, PixelQuery, PixelSelector, Selection, TokenSelector, VisualQuery
from arr_coc.selectors.registry import selector_name


class Pruning(Shortening):
    """Encodes everything and keeps the tokens that a selector picks, each at its true position.

    Args:
        family, inputs, settings: as in [`Shortening`].
        selector (`TokenSelector`): picks the tokens.
    """

    def __init__(self, family: Family, inputs: Inputs, settings: Settings, selector: TokenSelector) -> None:
        super().__init__(family, inputs, settings)
        self.selector = selector
        self.budgets: list[Budget | None] = []  # of each picture
        self.encoded: dict[str, Encoded] = {}
        self.selections: list[Selection] = []
        self.chosen: list[Ints] = []
        self.attended: list[Tensor] = []  # of each picture, if the model was asked
        self.introspect = choose_introspection(family, settings, selector)

    def read(self) -> None:
        """Find pictures, question and positions."""
        self.prompt = read_prompt(self.family, self.inputs)
        self._share_budget()
        self._read_text()

    def _share_budget(self) -> None:
        # mode `weight` keeps all tokens and only scales them
        budget = 1.0 if self.settings.mode == "weight" else self.settings.budget
        spans = self.prompt.spans
        counts = [len(span.columns) for span in spans]
        self.budgets = share_budget(budget, [span.row for span in spans], counts)
        if self.settings.share < 1:
            usual, share = self.selector.default_budget, self.settings.share
            whole = [resolve_budget(usual if given is None else given, count)
                     for given, count in zip(self.budgets, counts, strict=True)]  # fmt: skip
            self.budgets = [
                given if most is None else max(1, round(share * most))
                for given, most in zip(self.budgets, whole, strict=True)
            ]

    def _read_text(self) -> None:
        self.words = self._embed_question(self.inputs, self.prompt)
        self.positions = self.family.positions(self.prompt.inputs)

    def encode(self) -> None:
        """Encode all pictures, and record the encoder layers that the selector reads."""
        for kind in self.family.present(self.inputs):
            if self.shared is None:
                self.encoded[kind] = self.family.encode(self.inputs, kind, self.selector.encoder_layers)
            else:
                self.shared.check([(span.kind, span.grid) for span in self.prompt.spans])
                self.encoded[kind] = self.shared.full(self.family, self.inputs, kind, self.selector.encoder_layers)

    def count_encoded(self) -> list[int]:
        """All of them."""
        return self.prompt.counts

    def choose(self) -> None:
        """Ask the selector for one selection per picture; before it the model itself, if the selector wants that."""
        if self._asks_the_model():
            self.asked_layers = layers_to_read(self.family, self.introspect)
            self.attended = self._ask(self._introspect)
        queries = self._queries()
        self.selector.check(queries)
        self.selections = self._select(queries)
        self.chosen = check_selections(self.prompt.spans, self.selections)

    def _introspect(self) -> list[Tensor]:
        return introspect(
            self.family, self.inputs, self.prompt, self.positions, self.encoded, self.settings.chat, self.asked_layers
        )

    def _asks_the_model(self) -> bool:
        """Whether the model is asked where it looks: if it is wanted, and some tokens have to go."""
        if self.introspect == "off":
            return False
        if self._has_asked(layers_to_read(self.family, self.introspect)):
            return True
        counts = self.prompt.counts
        usual = self.selector.default_budget
        kept = [
            resolve_budget(usual if budget is None else budget, count)
            for budget, count in zip(self.budgets, counts, strict=True)
        ]
        if self.introspect == "auto":
            return is_tight(self.selector, kept, [span.grid for span in self.prompt.spans])
        return any(few is None or few < count for few, count in zip(kept, counts, strict=True))

    def _select(self, queries: Sequence[VisualQuery]) -> list[Selection]:
        return select_shared(self.selector.select, queries, self.budgets)

    def _queries(self) -> list[VisualQuery]:
        """One query per picture, in the order of the spans."""
        pictures: list[Tensor | None] = []
        for kind in self.encoded:
            count = sum(span.kind == kind for span in self.prompt.spans)
            pixels = None
            if self.selector.needs_picture and self.shared is None:
                pixels = self.family.pictures(self.inputs, kind)
            elif self.selector.needs_picture and self.shared is not None:
                pixels = self.shared.pictures(self.family, self.inputs, kind)
            pictures += [None] * count if pixels is None else pixels
        queries = []
        attended: Sequence[Tensor | None] = self.attended or [None] * len(pictures)
        for span, picture, paid in zip(self.prompt.spans, pictures, attended, strict=True):
            encoded = self.encoded[span.kind]
            rows = slice(span.offset, span.offset + len(span.columns))
            features = encoded.features[rows].detach()
            queries.append(
                VisualQuery(
                    features,
                    span.grid,
                    self.words[span.row].to(features),
                    picture=picture,
                    attention_reader=None if encoded.reader is None else _read_rows(encoded.reader.attention, rows),
                    key_reader=None if encoded.reader is None else _read_rows(encoded.reader.keys, rows),
                    deepstack=tuple(level[rows].detach() for level in encoded.deepstack),
                    attended=paid,
                    details=self.settings.details,
                    leeway=self.settings.leeway,
                )
            )
        return queries

    def build(self) -> Shortened:
        """Build the prompt from the columns that stay, with their positions and features."""
        inputs, holding = build(
            self.family, self.inputs, self.prompt, self.positions, self.encoded, self.selections, self.chosen,
            self.settings.mode,
        )  # fmt: skip
        outputs = [selection.output for selection in self.selections]
        kept = [(span.grid, cells) for span, cells in zip(self.prompt.spans, self.chosen, strict=True)]
        counts = self.prompt.counts
        return Shortened(
            inputs,
            outputs,
            kept,
            counts,
            list(map(len, self.chosen)),
            holding,
            glanced=self._count_glanced(),
            glanced_layers=self.count_asked_layers(),
        )

    def keep_all(self) -> Shortened:
        """The full prompt, unchanged; what the model read to choose counts too."""
        return super().keep_all()._replace(glanced=self._count_glanced(), glanced_layers=self.count_asked_layers())

    def _count_glanced(self) -> list[int] | None:
        if not self.attended or self.known:
            return None
        return [cell_count(pooled_grid(span.grid)) for span in self.prompt.spans]


class PruningPixels(Shortening):
    """Encodes only the cells that a selector picks by their pixels, each at its true place.

    Args:
        family, inputs, settings: as in [`Shortening`].
        selector (`PixelSelector`): picks the cells.
    """

    def __init__(self, family: Family, inputs: Inputs, settings: Settings, selector: PixelSelector) -> None:
        super().__init__(family, inputs, settings)
        self.selector = selector
        family.cut()  # raises if this family has no cells
        if family.present(inputs) != ["image"]:
            raise ValueError(f"{selector_name(selector)!r} takes still pictures only; for clips use another selector")

    def read(self) -> None:
        """Find pictures, question and positions."""
        self.prompt = read_prompt(self.family, self.inputs)
        self._embed_question(self.inputs, self.prompt)
        self.positions = self.family.positions(self.prompt.inputs)

    def encode(self) -> None:
        """Nothing to encode yet."""

    def choose(self) -> None:
        """Ask the selector for the cells of each picture."""
        pictures = self.family.pictures(self.inputs, "image") or []
        spans = self.prompt.spans
        budgets = share_budget(
            self.settings.budget, [span.row for span in spans], [len(span.columns) for span in spans]
        )
        queries = [PixelQuery(picture, span.grid) for picture, span in zip(pictures, spans, strict=True)]
        self.selections = select_shared(self.selector.select, queries, budgets)
        self.chosen = check_selections(spans, self.selections)

    def encode_chosen(self) -> None:
        """Encode the chosen cells of all pictures in one call."""
        rows: Tensor = self.inputs[self.family.pixel_names["image"]]
        by_cell = rows.view(sum(self.prompt.counts), -1, rows.shape[1])  # [patches, F] -> [N, m * m, F]
        cells = [selection.indices for selection in self.selections]
        places = torch.cat([span.offset + own for span, own in zip(self.prompt.spans, cells, strict=True)])
        patches = by_cell[places].flatten(0, 1)  # [k, m * m, F] -> [k * m * m, F]
        self.encoded = self.family.encode_cells(patches, cells, [span.grid for span in self.prompt.spans])

    def build(self) -> Shortened:
        """Build the prompt from the encoded cells."""
        counts = list(map(len, self.chosen))
        levels = [torch.split(level, counts) for level in (self.encoded.features, *self.encoded.deepstack)]
        selections = [
            Selection(selection.indices, features, tuple(deepstack))
            for selection, features, *deepstack in zip(self.selections, *levels, strict=True)
        ]
        inputs, holding = build(
            self.family, self.inputs, self.prompt, self.positions, {"image": self.encoded}, selections, self.chosen,
            self.settings.mode,
        )  # fmt: skip
        kept = [(span.grid, cells) for span, cells in zip(self.prompt.spans, self.chosen, strict=True)]
        return Shortened(inputs, [None] * len(kept), kept, self.prompt.counts, counts, holding, counts)


class KeepingAll(Shortening):
    """Encodes everything and leaves the prompt as it is, for selectors inside the language model."""

    def read(self) -> None:
        """Find the pictures."""
        self.prompt = read_prompt(self.family, self.inputs)

    def encode(self) -> None:
        """Encode all pictures."""
        self.encoded = encode_full(self.family, self.inputs, self.prompt, self.shared)

    def choose(self) -> None:
        """Nothing to choose yet: the first layers of the language model read everything."""

    def build(self) -> Shortened:
        """The same prompt, with features in place of pixels."""
        return self.keep_all()._replace(inputs=self.encoded)


def _read_rows(read: LayerReader, rows: slice) -> LayerReader:
    """Limit a reader to the cells of one picture."""
    return lambda layer: read(layer)[rows]
