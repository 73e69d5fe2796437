"""The steps that turn a full prompt into a shorter one, the same for every mode.

`read` -> `encode` -> `choose` -> `encode_chosen` -> `build`. Only `choose` calls the selector. If it fails, the session
calls `keep_all` instead of the last two steps, or raises.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from arr_coc.config import Grid, cell_count
from arr_coc.families.family import Family, Inputs
from arr_coc.prompting.cache import Holding
from arr_coc.prompting.encodings import Encodings
from arr_coc.prompting.layout import Prompt
from arr_coc.prompting.prefix import Prefix
from arr_coc.prompting.question import Ints, embed_question, find_query
from arr_coc.prompting.settings import Settings
from arr_coc.selectors.output import ARRCOCOutput

Kept = Sequence[tuple[Grid, Ints]]


class KeptCells(Sequence[tuple[Grid, Ints]]):
    """For each picture its grid and the cells whose tokens stayed; they leave the device when somebody looks at them.

    Args:
        pictures (`Iterable[tuple[Grid, Tensor | ndarray]]`): the grid and the cells `[k]` of each picture.
    """

    def __init__(self, pictures: Iterable[tuple[Grid, Tensor | Ints]]) -> None:
        self._pictures = list(pictures)

    @classmethod
    def join(cls, parts: Iterable[Kept]) -> KeptCells:
        """The pictures of several prompts, where they are."""
        return cls(picture for part in parts for picture in (part._pictures if isinstance(part, KeptCells) else part))

    def __len__(self) -> int:
        return len(self._pictures)

    def __repr__(self) -> str:
        return repr(list(self))

    def __getitem__(self, place: Any) -> Any:
        self._pictures = [
            (grid, cells.cpu().numpy() if isinstance(cells, Tensor) else cells) for grid, cells in self._pictures
        ]
        return self._pictures[place]


class Shortened(NamedTuple):
    """A shorter prompt.

    Args:
        inputs (`dict`): ordinary arguments for `model(**inputs)` or `model.generate(**inputs)`.
        outputs (`list[ARRCOCOutput | None]`): the layer's output for each picture, images before clips; None from
            other selectors.
        kept (`Sequence[tuple[Grid, ndarray]]`): for each picture, its grid and the cells whose tokens stayed.
        full, used (`list[int]`): for each picture, its number of visual tokens in the full prompt, and in this one.
        holding (`Holding`, *optional*): what a cache that this prompt fills will hold; None if it is the full prompt.
        encoded (`list[int]`, *optional*): for each picture, the tokens that the encoder made of it, as if none had been
            known before; None if they are those of `full`.
        glanced (`list[int]`, *optional*): for each picture, the tokens that the language model read to choose these;
            None if it read none.
        glanced_layers (`int`, *optional*): in how many layers it read them; None for all.
        begun (`Prefix`, *optional*): what the language model has read of this prompt while it chose the rest of it.
    """

    inputs: dict[str, Any]
    outputs: list[ARRCOCOutput | None]
    kept: Kept
    full: list[int]
    used: list[int]
    holding: Holding | None = None
    encoded: list[int] | None = None
    glanced: list[int] | None = None
    glanced_layers: int | None = None
    begun: Prefix | None = None


class Shortening(ABC):
    """Shortens one prompt, step by step. Each way to shorten is a subclass.

    Args:
        family (`Family`): the opened model.
        inputs (`Mapping`): the processor's output, with pictures.
        settings (`Settings`): how the prompt is shortened.
    """

    # what happens if the selection fails, for the log
    fallback: str = "all visual tokens are kept"
    prompt: Prompt  # the full prompt, set by `read`
    reads_on: bool = False  # whether what is read to choose is kept for the answer

    def __init__(self, family: Family, inputs: Inputs, settings: Settings) -> None:
        self.family, self.inputs, self.settings = family, inputs, settings
        # a session has looked into a cache before
        self.shared = settings.encoded if isinstance(settings.encoded, Encodings) else None
        self.question: list[Tensor] = []  # token ids [Q] of each row's question
        self.asked_layers: list[int] = []  # whose attention was read, if the model was asked where it looks
        self.known = False  # whether an earlier call about the same question had asked it

    @abstractmethod
    def read(self) -> None:
        """Find pictures, question and positions, while the device is still idle."""

    @abstractmethod
    def encode(self) -> None:
        """Run the vision encoder."""

    @abstractmethod
    def choose(self) -> None:
        """Call the selector and check its selections."""

    def encode_chosen(self) -> None:  # noqa: B027  (most have encoded everything already)
        """Encode the chosen cells, if they are not encoded yet."""

    @abstractmethod
    def build(self) -> Shortened:
        """Lay out the shorter prompt."""

    def keep_all(self) -> Shortened:
        """The full prompt, unchanged."""
        kept: Kept = [(span.grid, np.arange(cell_count(span.grid))) for span in self.prompt.spans]
        counts = self.prompt.counts
        # the model encodes the pictures of this prompt, whatever was encoded before
        encoded = [count + made for count, made in zip(counts, self.count_encoded(), strict=True)]
        return Shortened(dict(self.inputs), [None] * len(kept), kept, counts, counts, encoded=encoded)

    def count_asked_layers(self) -> int | None:
        """In how many layers the model read what it was asked about; None if it was not asked."""
        return 1 + self.asked_layers[-1] if self.asked_layers and not self.known else None

    def _ask(self, ask: Callable[[], list[Tensor]], *details: Hashable) -> list[Tensor]:
        """Ask the model where it looks, unless it has said so for the same prompt and details in an earlier look."""
        if self.shared is None:
            return ask()
        found, asked = self.shared.attended(self._name_asking(self.asked_layers, details), ask)
        self.known = not asked
        return found

    def _name_asking(self, layers: Sequence[int], details: Sequence[Hashable]) -> Hashable:
        """What makes the model look elsewhere: the prompt, the layers that are read, and details."""
        ids = self.prompt.ids
        return ids.tobytes(), ids.shape, tuple(layers), tuple(details)

    def _has_asked(self, layers: Sequence[int], *details: Hashable) -> bool:
        """Whether an earlier look has asked the model the same, so that asking costs nothing."""
        if self.shared is None or not self.settings.further:
            return False
        return self.shared.knows_attended(self._name_asking(layers, details))

    def count_encoded(self) -> list[int]:
        """For each picture, the tokens that `encode` has made of it."""
        return [0] * len(self.prompt.counts)

    def _embed_question(self, inputs: Inputs, prompt: Prompt) -> list[Tensor]:
        """Find each row's question and return its embeddings `[Q, D]`."""
        self.question = find_query(
            self.family, prompt.ids, prompt.mask, prompt.labels, self.settings.query, self.settings.chat
        )
        return embed_question(self.family, self.question, inputs["input_ids"].device, self.settings.query_layers)
