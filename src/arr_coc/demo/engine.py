"""What the page asks: one model for everybody, one question at a time, and everything seen on the way."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import nn

from arr_coc.commands.compare import UNASKED
from arr_coc.config import EMBEDDED, Budget
from arr_coc.demo.snapshot import Look, make_look
from arr_coc.families.family import open_family
from arr_coc.inference.answer import ARRCOCQwen
from arr_coc.inference.load import find_names, load_selector, quiet_loading
from arr_coc.pixels.files import open_picture
from arr_coc.realizing import ARRCOCLayer
from arr_coc.selectors.contract import Selection, Selector, TokenSelector, VisualQuery
from arr_coc.selectors.grouping import group_queries
from arr_coc.selectors.registry import list_selectors
from arr_coc.texture import CHANNELS

logger = logging.getLogger(__name__)

MODES = ("prune", "saccade", "weight", "full")
# Characters of a question, tokens of an answer, selectors that are kept open.
LONGEST_QUESTION, LONGEST_ANSWER, OPEN = 2000, 64, 6
# Visual tokens that one question may have where the picture is looked at in its own resolution: others wait.
MOST_TOKENS = {"cpu": 2048, "cuda": 16384}


class Mistake(ValueError):
    """Something a visitor can mend; its text is shown as it is."""


class Shown(NamedTuple):
    """An opened picture, and what was done to open it."""

    image: Image.Image
    notes: tuple[str, ...] = ()


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
    _opening: threading.Lock = field(default_factory=threading.Lock)
    _opened: OrderedDict[str, Selector] = field(default_factory=OrderedDict)

    @classmethod
    def open(
        cls, model: str | None = None, selector: str | None = None, *, private: bool = True, **loading: Any
    ) -> Engine:
        """Open a model by its directory or Hub id (the embedded one by default) with its selector."""
        quiet_loading()
        name, chosen = find_names(model, selector)
        if chosen in UNASKED:
            raise ValueError(f"{chosen} chooses no tokens by the question; use another selector")
        vlm = ARRCOCQwen.from_pretrained(name, chosen, on_error="raise", **loading)
        if not private:  # strangers need not know where things lie
            name, chosen = (Path(one).name if Path(one).is_dir() else one for one in (name, chosen))
        return cls(vlm, name, chosen, private)

    @property
    def selectors(self) -> list[str]:
        """Names that can be chosen; the one of the page first."""
        known = [name for name in list_selectors() if name not in (*UNASKED, "full")]
        own = [EMBEDDED] if self.name == EMBEDDED else []
        return list(dict.fromkeys([self.selector, *own, *known]))

    def ask(
        self,
        picture: str | Path | Image.Image | Shown | None,
        question: str,
        mode: str = "prune",
        share: float | None = 0.25,
        selector: str | None = None,
        streamer: Any = None,
    ) -> Look:
        """Answer, and keep what was seen; whatever a visitor can cause is a [`Mistake`]."""
        try:
            shown = self.check(picture, question, mode, share)
            with self._opening:  # the Hub may take its time, for which others need not wait
                chosen = self._find(selector or self.selector)
            with self._lock:
                watched = Watched(chosen) if isinstance(chosen, ARRCOCLayer) else chosen
                vlm = ARRCOCQwen(self.vlm.model, self.vlm.processor, watched, on_error="raise")
                options: dict[str, Any] = {"mode": mode, "budget": share, "max_new_tokens": LONGEST_ANSWER}
                answer = vlm.answer(shown.image, question, streamer=streamer, **options)
            asked = question, mode, selector or self.selector, float(share or 0)
            names = self._words(question), self.channels(chosen)
            return make_look(shown.image, *asked, answer, self.cell, *names, shown.notes)
        except Mistake:
            raise
        except (MemoryError, torch.OutOfMemoryError):
            raise Mistake("there is not enough memory for this picture in this mode; use a smaller one") from None
        except (ValueError, TypeError, OSError) as error:
            raise Mistake(" ".join(str(error).split()) or type(error).__name__) from None
        except Exception as error:  # the page stays up, and whoever runs it can read why
            logger.exception("a question failed")
            raise Mistake(f"this failed here ({type(error).__name__}); try another picture or mode") from None
        finally:
            if streamer is not None:
                streamer.end()

    def check(
        self, picture: str | Path | Image.Image | Shown | None, question: str, mode: str, share: float | None
    ) -> Shown:
        """Refuse what cannot be asked, in words; the opened picture."""
        if picture is None:
            raise Mistake("there is no picture; upload one, paste one, or click an example")
        if not question or not question.strip():
            raise Mistake("the question is empty; ask something about the picture")
        if len(question) > LONGEST_QUESTION:
            raise Mistake(f"the question has {len(question):,} characters; ask in at most {LONGEST_QUESTION:,}")
        if not question.isprintable() and question.encode(errors="ignore").decode() != question:
            raise Mistake("the question has characters that are no text; write it again")
        if mode not in MODES:
            raise Mistake(f"there is no mode {mode!r}; there are {', '.join(MODES)}")
        if share is None or not math.isfinite(share):
            raise Mistake("the budget is empty; give 1 to 100 %")
        if not 0 < share <= 1:
            raise Mistake(f"a budget of {share:.0%} leaves nothing to read; move it to 1 % or more, at most 100 %")
        shown = picture if isinstance(picture, Shown) else _open(picture)
        if mode == "saccade":
            self._check_size(shown.image, share)
        return shown

    def _check_size(self, image: Image.Image, share: float) -> None:
        """Refuse a gaze that others would wait for too long."""
        total = -(-image.width // self.cell) * -(-image.height // self.cell)
        most = MOST_TOKENS[self.vlm.device.type]
        if share * total > most:
            wanted = f"{share:.0%} of this picture are {share * total:,.0f} tokens, and {most:,} is the most here"
            raise Mistake(f"{wanted}; use a budget of at most {max(1, math.floor(100 * most / total))} %")

    @property
    def cell(self) -> int:
        """Pixels a side of one token."""
        cut = open_family(self.vlm.model).cut()
        return int(cut["patch_size"] * cut["merge_size"])

    def _find(self, name: str) -> Selector:
        """A selector by its name, opened once."""
        name = str(name).strip()
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
            with contextlib.suppress(Mistake):  # not every selector knows every mode
                self.ask(Image.new("RGB", (160, 160), "white"), "what is in the picture?", mode, 0.5)


def _open(picture: str | Path | Image.Image) -> Shown:
    if isinstance(picture, Image.Image):
        return Shown(picture)
    try:
        opened = open_picture(picture)
    except (ValueError, OSError) as error:  # not where it lies on the server
        raise Mistake(str(error).replace(str(picture), f"the file {Path(picture).name}")) from None
    return Shown(opened.image, tuple(f"the picture {note}" for note in opened.notes))
