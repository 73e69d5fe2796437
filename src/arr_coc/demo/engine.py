"""What the page asks: one model for everybody, one question at a time, and everything seen on the way."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import nn

from arr_coc.balancing import SCORES, TENSIONS
from arr_coc.batching import group_queries
from arr_coc.config import EMBEDDED, EMBEDDED_MODEL, Budget
from arr_coc.layer import ARRCOCLayer
from arr_coc.models.answering import Answer, ARRCOCQwen
from arr_coc.models.loading import find_base, load_selector, quiet_loading
from arr_coc.outputs import ARRCOCOutput
from arr_coc.pictures import open_picture
from arr_coc.selecting import Selection, Selector, TokenSelector, VisualQuery, list_selectors
from arr_coc.texture import CHANNELS

Floats = NDArray[np.float32]
MODES = ("prune", "saccade", "weight", "full")
# Characters of a question, pixels along a picture as it is drawn, answers at most this long, selectors kept open.
LONGEST_QUESTION, DRAWN, LONGEST_ANSWER, OPEN = 2000, 1024, 64, 6
# They are told where to look, or choose no tokens of their own by the question.
UNASKED = ("oracle", "downsample", "half-and-half")


class Mistake(ValueError):
    """Something a visitor can mend; its text is shown as it is."""


@dataclass(frozen=True, eq=False)
class Look:
    """One answer, and what was seen on the way to it; belongs to one visitor.

    Args:
        image (`PIL.Image.Image`): the picture, small enough to draw.
        question, mode, selector (`str`): as asked.
        answer, strategy, reason (`str`): as given.
        used, full (`int`): visual tokens.
        milliseconds (`dict[str, float]`): by stage.
        grid (`tuple[int, int]`): rows and columns of cells.
        tokens (`ndarray` of shape `[h, w]`): spent on each cell.
        cells (`ndarray` of shape `[k]`): read at full resolution, most relevant first.
        coarse (`int`): cells a side under one token of the gestalt; 0 without one.
        cell (`float`): pixels a side of a cell in the picture as it was given.
        maps (`Maps`, *optional*): what the layer saw, if a layer chose.
        notes (`tuple[str, ...]`): what was done to the picture.
    """

    image: Image.Image
    question: str
    mode: str
    selector: str
    answer: str
    strategy: str
    reason: str
    used: int
    full: int
    milliseconds: dict[str, float]
    grid: tuple[int, int]
    tokens: Floats
    cells: NDArray[np.int64]
    coarse: int = 0
    cell: float = 32.0
    maps: Maps | None = None
    notes: tuple[str, ...] = ()

    @property
    def first_token(self) -> float:
        """Milliseconds to the first token."""
        return sum(value for name, value in self.milliseconds.items() if name != "decode")


@dataclass(frozen=True, eq=False)
class Maps:
    """What a layer saw of one picture: relevance, scores and channels `[h, w]`, pull of words `[Q, h, w]`."""

    relevance: Floats
    scores: dict[str, Floats]
    channels: dict[str, Floats]
    pull: Floats
    words: tuple[str, ...]
    weights: dict[str, float]
    tensions: dict[str, float]


class Watched(nn.Module, TokenSelector):
    """A layer that keeps what it saw in its outputs."""

    def __init__(self, layer: ARRCOCLayer) -> None:
        super().__init__()
        self.layer = layer

    def check(self, queries: Sequence[VisualQuery]) -> None:
        """As the layer does."""
        self.layer.check(queries)

    def select(self, queries: Sequence[VisualQuery], budget: Budget | None = None) -> list[Selection]:
        """As the layer does, with details."""
        found: dict[int, Selection] = {}
        for places, inputs in group_queries(queries):
            output = self.layer(**inputs, budget=budget, details=True)
            for row, place in enumerate(places):
                one = output.picture(row)
                found[place] = Selection(indices=one.indices[0], output=one)
        return [found[place] for place in range(len(queries))]


@dataclass(eq=False)
class Engine:
    """Opens a model once and answers whoever asks, one at a time.

    Args:
        vlm (`ARRCOCQwen`): model, processor and selector.
        name (`str`): of the model, for people.
        selector (`str`): of the selector that is used unless another is named.
        private (`bool`, *optional*, defaults to `True`): whether selectors may be opened from directories and the Hub
            by whoever asks; on a page that strangers see only registered ones are.
    """

    vlm: ARRCOCQwen
    name: str
    selector: str
    private: bool = True
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _opened: OrderedDict[str, Selector] = field(default_factory=OrderedDict)

    @classmethod
    def open(
        cls, model: str | None = None, selector: str | None = None, *, private: bool = True, **loading: Any
    ) -> Engine:
        """Open a model by its directory or Hub id (the embedded one by default) with its selector."""
        quiet_loading()
        base, found = find_base(model, selector)
        embedded = str(base) in (EMBEDDED, EMBEDDED_MODEL)
        chosen = str(found or (EMBEDDED if embedded else "arr-coc"))
        if chosen in UNASKED:
            raise ValueError(f"{chosen} chooses no tokens by the question; use another selector")
        vlm = ARRCOCQwen.from_pretrained(base, chosen, on_error="raise", **loading)
        return cls(vlm, EMBEDDED if embedded else str(base), chosen, private)

    @property
    def selectors(self) -> list[str]:
        """Names that can be chosen; the one of the page first."""
        known = [name for name in list_selectors() if name not in (*UNASKED, "full")]
        own = [EMBEDDED] if self.name == EMBEDDED else []
        return list(dict.fromkeys([self.selector, *own, *known]))

    def ask(
        self,
        picture: str | Path | Image.Image | None,
        question: str,
        mode: str = "prune",
        share: float = 0.25,
        selector: str | None = None,
        streamer: Any = None,
    ) -> Look:
        """Answer, and keep what was seen; whatever a visitor can cause is a [`Mistake`]."""
        try:
            shown, notes = self.check(picture, question, mode, share)
            with self._lock:
                chosen = self._find(selector or self.selector)
                watched = Watched(chosen) if isinstance(chosen, ARRCOCLayer) else chosen
                vlm = ARRCOCQwen(self.vlm.model, self.vlm.processor, watched, on_error="raise")
                options: dict[str, Any] = {"mode": mode, "budget": share, "max_new_tokens": LONGEST_ANSWER}
                answer = vlm.answer(shown, question, streamer=streamer, **options)
            names = self._words(question), self.channels(chosen)
            return make_look(shown, question, mode, selector or self.selector, answer, *names, notes)
        except Mistake:
            raise
        except (ValueError, TypeError, OSError) as error:
            raise Mistake(" ".join(str(error).split())) from None
        except (MemoryError, torch.OutOfMemoryError):
            raise Mistake("there is not enough memory for this picture in this mode; use a smaller one") from None
        finally:
            if streamer is not None:
                streamer.end()

    def check(
        self, picture: str | Path | Image.Image | None, question: str, mode: str, share: float
    ) -> tuple[Image.Image, tuple[str, ...]]:
        """Refuse what cannot be asked, in words; the opened picture and what was done to it."""
        if picture is None:
            raise Mistake("there is no picture; upload one, paste one, or click an example")
        if not question or not question.strip():
            raise Mistake("the question is empty; ask something about the picture")
        if len(question) > LONGEST_QUESTION:
            raise Mistake(f"the question has {len(question):,} characters; ask in at most {LONGEST_QUESTION:,}")
        if mode not in MODES:
            raise Mistake(f"there is no mode {mode!r}; there are {', '.join(MODES)}")
        if not 0 < share <= 1:
            raise Mistake(f"a budget of {share:.0%} leaves nothing to read; move it to 1 % or more, at most 100 %")
        if isinstance(picture, Image.Image):
            return picture, ()
        try:
            opened = open_picture(picture)
        except (ValueError, OSError) as error:  # not where it lies on the server
            raise Mistake(str(error).replace(str(picture), f"the file {Path(picture).name}")) from None
        return opened.image, tuple(f"the picture {note}" for note in opened.notes)

    def _find(self, name: str) -> Selector:
        """A selector by its name, opened once."""
        name = name.strip()
        if name == self.selector:
            return self.vlm.selector
        if name in UNASKED:
            raise Mistake(f"{name} chooses no tokens by the question; choose another selector")
        if not self.private and name not in self.selectors:
            raise Mistake(f"no selector is named {name!r} here; there are {', '.join(self.selectors)}")
        if name not in self._opened:
            self._opened[name] = load_selector(name, self.vlm.model)
            while len(self._opened) > OPEN:
                self._opened.popitem(last=False)
        self._opened.move_to_end(name)
        return self._opened[name]

    def _words(self, question: str) -> tuple[str, ...]:
        ids = self.vlm.processor.tokenizer(question, add_special_tokens=False)["input_ids"]
        return tuple(self.vlm.processor.tokenizer.decode([token]).strip() for token in ids)

    @staticmethod
    def channels(selector: Selector) -> Mapping[str, int]:
        """Names and places of the channels that a layer reads; none of other selectors."""
        return CHANNELS[selector.config.channels] if isinstance(selector, ARRCOCLayer) else {}

    def warm_up(self) -> None:
        """Ask once in every mode, so that no visitor waits for what the first call takes longer."""
        for mode in MODES:
            self.ask(Image.new("RGB", (160, 160), "white"), "what is in the picture?", mode, 0.5)


def make_look(
    image: Image.Image,
    question: str,
    mode: str,
    selector: str,
    answer: Answer,
    words: tuple[str, ...],
    channels: Mapping[str, int],
    notes: tuple[str, ...] = (),
) -> Look:
    """Everything of an answer about one picture that is drawn, off the device."""
    (_, rows, columns), cells = answer.kept[0]
    output = answer.output
    sharp = np.zeros(rows * columns, dtype=np.float32)
    sharp[cells] = 1.0
    coarse = 0
    if mode == "saccade" and len(cells) < rows * columns:
        gestalt = max(1, answer.tokens.used - len(cells))
        coarse = max(1, round((rows * columns / gestalt) ** 0.5))
        sharp += gestalt / (rows * columns)
    maps = None if output is None else read_maps(output, words, channels, (rows, columns))
    if maps is not None:
        cells = cells[(-maps.relevance[cells // columns, cells % columns]).argsort(kind="stable")]
    share = min(1.0, DRAWN / max(image.size))
    size = (max(1, round(image.width * share)), max(1, round(image.height * share)))
    return Look(
        image=image.resize(size, Image.Resampling.LANCZOS, reducing_gap=2.0) if share < 1 else image,
        question=question,
        mode=mode,
        selector=selector,
        answer=answer.text,
        strategy=answer.strategy,
        reason=answer.reason,
        used=answer.tokens.used,
        full=answer.tokens.full,
        milliseconds=answer.timings_ms,
        grid=(rows, columns),
        tokens=sharp.reshape(rows, columns),
        cells=cells,
        coarse=coarse,
        cell=image.width / columns,
        maps=maps,
        notes=notes,
    )


def read_maps(output: ARRCOCOutput, words: tuple[str, ...], channels: Mapping[str, int], grid: tuple[int, int]) -> Maps:
    """What a layer saw, as arrays on the grid of cells; windows, whose last may reach beyond it, are cut up."""
    seen = output.relevance.shape[-2:]
    side = max(-(-grid[0] // seen[0]), -(-grid[1] // seen[1]))

    def array(values: torch.Tensor) -> Floats:
        cells = values.repeat_interleave(side, dim=-2).repeat_interleave(side, dim=-1)[..., : grid[0], : grid[1]]
        return cells.detach().float().cpu().numpy()

    texture = None if output.texture is None else array(output.texture[0, 0])
    pull = array(output.word_pull[0, :, 0]) if output.word_pull is not None else np.zeros((0, *grid), np.float32)
    return Maps(
        relevance=array(output.relevance[0, 0]),
        scores={name: array(score[0, 0]) for name, score in output.scores.items()},
        channels={} if texture is None else {name: texture[place] for name, place in channels.items()},
        pull=pull,
        words=words if len(words) == len(pull) else tuple(f"word {number + 1}" for number in range(len(pull))),
        weights=dict(zip(SCORES, output.weights[0].tolist(), strict=True)),
        tensions=dict(zip(TENSIONS, output.tensions[0].tolist(), strict=True)),
    )
