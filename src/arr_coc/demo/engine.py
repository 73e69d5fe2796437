"""The engine behind the page: one model for all visitors, one question at a time."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image

from arr_coc.config import EMBEDDED, Grid, cell_count
from arr_coc.demo.snapshot import Snapshot, take_snapshot
from arr_coc.drawing.overlay import check_drawable, is_drawable
from arr_coc.families.family import open_family
from arr_coc.gaze.loop import LAST_OF_LARGE
from arr_coc.gaze.plan import Gaze, plan_gaze
from arr_coc.inference.load import current_name, find_names, load_selector, quiet_loading, selector_names
from arr_coc.inference.vlm import ARRCOCQwen
from arr_coc.pixels.files import Picture, open_picture
from arr_coc.runtime.machine import check_device
from arr_coc.selectors.contract import Selector

logger = logging.getLogger(__name__)

MODES = ("auto", "prune", "saccade", "weight", "full")
# Of the tokens, or what the system decides.
Share = float | Literal["auto"]
GAZING = ("saccade", "auto")  # modes in which a picture may be read small
LONGEST_QUESTION = 2000  # characters
LONGEST_ANSWER = 64  # tokens
MOST_OPEN = 6  # selectors that stay open
# Most visual tokens of one question in mode saccade, which reads the picture at its own resolution: others wait.
MOST_TOKENS = {"cpu": 2048, "cuda": 16384}


class Mistake(ValueError):
    """Something that the visitor can correct; the text is shown on the page."""


@dataclass(eq=False)
class Engine:
    """Opens a model once and answers the visitors' questions, one at a time.

    Args:
        vlm (`ARRCOCQwen`): model, processor and selector.
        name (`str`): name of the model, as the page shows it.
        selector (`str`): name of the default selector.
        private (`bool`, *optional*, defaults to `True`): whether visitors may open selectors from directories and the
            Hub. On a public page only registered selectors can be named.
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
        cls,
        model: str | None = None,
        selector: str | None = None,
        *,
        device: str | None = None,
        private: bool = True,
    ) -> Engine:
        """Open a model and its selector.

        Args:
            model, selector (`str`, *optional*): as in [`ARRCOCQwen.from_pretrained`].
            device (`str`, *optional*): cpu or cuda; by default cuda if there is one. There, models other than the
                embedded one are opened in float16.
            private (`bool`, *optional*, defaults to `True`): see the class.
        """
        place = check_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        quiet_loading()
        name, chosen = find_names(model, selector)
        check_drawable(chosen)
        dtype = torch.float16 if place.type == "cuda" and model is not None else "auto"
        vlm = ARRCOCQwen.from_pretrained(name, chosen, on_error="raise", dtype=dtype).to(place)
        if not private:  # strangers need not know where files are
            name, chosen = (Path(part).name if Path(part).is_dir() else part for part in (name, chosen))
        return cls(vlm, name, chosen, private)

    @property
    def selectors(self) -> list[str]:
        """Names that can be chosen, the default first."""
        names = [name for name in selector_names(self.name == EMBEDDED) if is_drawable(name) and name != "full"]
        return list(dict.fromkeys([self.selector, *names]))

    def ask(
        self,
        picture: str | Path | Image.Image | Picture | None,
        question: str,
        mode: str = "prune",
        share: Share | None = 0.25,
        selector: str | None = None,
        streamer: Any = None,
        gaze: Gaze | None = None,
        tokens: int | None = None,
    ) -> Snapshot:
        """Answer a question and keep what is drawn of it.

        Args:
            picture (a path or a picture): what is asked about.
            question, mode (`str`): as in [`ARRCOCQwen.answer`].
            share (`float` or `"auto"`): the budget, as a share of all tokens.
            selector (`str`, *optional*): name, directory or Hub id; by default the engine's.
            streamer (`BaseStreamer`, *optional*): gets the answer as it is written.
            gaze (`Gaze`, *optional*): of modes `"saccade"` and `"auto"`; the others pass it over.
            tokens (`int`, *optional*): the budget as a number, in place of `share`.

        Raises:
            [`Mistake`]: for everything that a visitor can cause.
        """
        try:
            opened = self.check(picture, question, mode, share, gaze)
            name = str(selector or self.selector).strip()
            name = current_name(name) if self.name == EMBEDDED else name
            with self._opening:  # a download may take long, and other visitors need not wait for it
                chosen = self._find_selector(name)
            compress = None if gaze is None else gaze.compress
            if compress == "conv" and mode in GAZING and getattr(chosen, "compressor", None) is None:
                raise Mistake(f"the selector {name} has learned no compression by conv; use pool or merge")
            with self._lock:
                vlm = ARRCOCQwen(self.vlm.model, self.vlm.processor, chosen, on_error="raise")
                options: dict[str, Any] = {"mode": mode, "budget": tokens or share, "max_new_tokens": LONGEST_ANSWER}
                if mode in GAZING:
                    options["gaze"] = gaze
                answer = vlm.answer(opened.image, question, streamer=streamer, details=True, **options)
            whole = answer.mode != "saccade" or len(answer.kept[0][1]) == answer.tokens.full
            used = None if whole else compress
            spent = answer.tokens.used / answer.tokens.full if isinstance(share, str) else share or 0.0
            taken = take_snapshot(opened, question, name, float(spent), answer, self.cell, used)
            if used == compress:
                return taken
            return replace(taken, notes=(*taken.notes, f"nothing was compressed: {answer.mode} read no small picture"))
        except Mistake:
            raise
        except (MemoryError, torch.OutOfMemoryError):
            raise Mistake("there is not enough memory for this picture in this mode; use a smaller picture") from None
        except (ValueError, TypeError, OSError) as error:
            raise Mistake(" ".join(str(error).split()) or type(error).__name__) from None
        except Exception as error:  # the page stays up, and the log says why
            logger.exception("a question failed")
            raise Mistake(f"this failed ({type(error).__name__}); try another picture or mode") from None
        finally:
            if streamer is not None:
                streamer.end()

    def check(
        self,
        picture: str | Path | Image.Image | Picture | None,
        question: str,
        mode: str,
        share: Share | None,
        gaze: Gaze | None = None,
    ) -> Picture:
        """Open the picture; whatever cannot be asked is a [`Mistake`]."""
        if picture is None:
            raise Mistake("there is no picture; upload one, paste one, or click an example")
        if not question or not question.strip():
            raise Mistake("the question is empty; ask something about the picture")
        if len(question) > LONGEST_QUESTION:
            raise Mistake(f"the question has {len(question):,} characters; at most {LONGEST_QUESTION:,} are allowed")
        if not question.isprintable() and question.encode(errors="ignore").decode() != question:
            raise Mistake("the question has characters that are not text; write it again")
        if mode not in MODES:
            raise Mistake(f"there is no mode {mode!r}; there are {', '.join(MODES)}")
        if share is None or (not isinstance(share, str) and not math.isfinite(share)):
            raise Mistake("the budget is empty; give 1 to 100 %")
        if not isinstance(share, str) and not 0 < share <= 1:
            raise Mistake(f"a budget of {share:.0%} leaves nothing to read; give 1 to 100 %")
        opened = picture if isinstance(picture, Picture) else _open(picture)
        if mode in GAZING:
            self._check_size(opened.image, share, gaze)
        return opened

    def find_grid(self, image: Image.Image) -> Grid:
        """The cells of a picture at its own resolution."""
        return 1, -(-image.height // self.cell), -(-image.width // self.cell)

    def _check_size(self, image: Image.Image, asked: Share, gaze: Gaze | None) -> None:
        """Refuse a gaze that would keep other visitors waiting too long."""
        grid, most = self.find_grid(image), MOST_TOKENS[self.vlm.device.type]
        total = cell_count(grid)
        # what the system decides is no more than that
        share = min(1.0, LAST_OF_LARGE / total) if isinstance(asked, str) else asked
        if share * total > most:
            wanted = f"{share:.0%} of this picture is {share * total:,.0f} tokens, and {most:,} is the limit here"
            raise Mistake(f"{wanted}; use a budget of at most {max(1, math.floor(100 * most / total))} %")
        if gaze is not None and gaze.compress is not None:
            encoded = cell_count(plan_gaze(grid, share, gaze).encoded)
            if encoded > most:
                wanted = (
                    f"to compress it, {encoded:,} tokens of this picture are encoded, and {most:,} is the limit here"
                )
                raise Mistake(f"{wanted}; use a smaller picture or budget, or no compression")

    @property
    def cell(self) -> int:
        """Side of a token in pixels."""
        cut = open_family(self.vlm.model).cut()
        return int(cut["patch_size"] * cut["merge_size"])

    def _find_selector(self, name: str) -> Selector:
        """A selector by its name; the last few stay open."""
        if name == self.selector:
            return self.vlm.selector
        check_drawable(name)
        if not self.private and name not in self.selectors:
            raise Mistake(f"no selector is named {name!r} here; there are {', '.join(self.selectors)}")
        if name not in self._opened:
            self._opened[name] = load_selector(name, self.vlm.model)
            while len(self._opened) > MOST_OPEN:
                self._opened.popitem(last=False)
        self._opened.move_to_end(name)
        return self._opened[name]

    def warm_up(self) -> None:
        """Ask once in every mode, so that no visitor waits for the slower first call."""
        for mode in MODES:
            with contextlib.suppress(Mistake):  # not every selector supports every mode
                self.ask(Image.new("RGB", (160, 160), "white"), "what is in the picture?", mode, 0.5)


def _open(picture: str | Path | Image.Image) -> Picture:
    if isinstance(picture, Image.Image):
        return Picture(picture)
    try:
        return open_picture(picture)
    except (ValueError, OSError) as error:  # visitors are not told where it lies on the server
        raise Mistake(str(error).replace(str(picture), f"the file {Path(picture).name}")) from None
