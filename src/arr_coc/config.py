"""Settings of the relevance layer in one frozen, validated dataclass, and the checks of budgets and grids.

Letters in shape comments throughout the package:

| letter  | meaning                                                        |
|---------|----------------------------------------------------------------|
| `B`     | batch (pictures or clips)                                      |
| `C`     | texture channels: 13 (`core`) or 40 (`full`)                   |
| `H W`   | pixels                                                         |
| `t h w` | frames and the token grid (after the encoder's 2x2 merge)      |
| `N`     | tokens or cells, `t * h * w`                                   |
| `D`     | width of the language model                                    |
| `Q`     | words (tokens) of the query                                    |
| `K`     | kept tokens                                                    |
| `R`     | rank of the layer's learned maps from `D`                      |
"""

from __future__ import annotations

import dataclasses
import json
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, SupportsIndex, get_args

from arr_coc._version import __version__

ChannelSet = Literal["core", "full"]
# Whether the model is asked where it looks before anything is chosen: always, where few tokens stay, never; or always,
# but only through so many of its layers.
Introspect = Literal["auto", "on", "off"] | int
Budget = int | float | Literal["auto"]
# A budget of a whole prompt: `{"total": 512}` is shared among its pictures before a selector sees it.
PromptBudget = Budget | Mapping[str, int]
Grid = tuple[int, int, int]
# A part of a picture in cells: top, left, height, width.
CellBox = tuple[int, int, int, int]
# A layer of the vision encoder: its number (negative from the end), or a float for a fraction of the depth.
EncoderLayer = int | float
# The model and the selector that come with the package: the model's name, and both folders.
EMBEDDED = "embedded"
EMBEDDED_MODEL = str(Path(__file__).parent / "assets" / "embedded")
EMBEDDED_SELECTOR = str(Path(__file__).parent / "assets" / "selector")
# In the config of the embedded model: the number of its edition. A selector fits one edition.
EDITION_NAME = "arr_coc_edition"
# The layer as a selector: the one that was trained for the model at hand, and the layer before training, for any model.
TRAINED = "arr-coc"
UNTRAINED = "arr-coc-untrained"

CHANNEL_SETS: tuple[str, ...] = get_args(ChannelSet)


def check_budget(budget: object) -> Budget:
    """Return the budget of one picture if it is valid, and raise otherwise.

    Args:
        budget (`int`, `float` or `"auto"`):
            An int is a number of tokens per picture, a float in (0, 1] a ratio; `"auto"` lets relevance decide.

    Example:

    ```python
    >>> from arr_coc.config import check_budget
    >>> check_budget(0.25)
    0.25

    ```
    """
    if isinstance(budget, str):
        if budget != "auto":
            raise ValueError(f"`budget` must be an int, a float in (0, 1] or 'auto', got {budget!r}")
        return "auto"
    if isinstance(budget, Mapping):
        raise TypeError(
            f"`budget` must be that of one picture here, got {budget!r}; give a total to `prepare`, `attach` or "
            "`answer`"
        )
    if isinstance(budget, bool) or not isinstance(budget, Real):
        raise TypeError(f"`budget` must be an int, a float in (0, 1] or 'auto', got {type(budget).__name__}")
    if isinstance(budget, Integral):
        if budget < 1:
            raise ValueError(f"`budget` must be at least 1 token, got {budget}; use 'auto' to let relevance decide")
        return int(budget)
    ratio = float(budget)
    if not 0.0 < ratio <= 1.0:
        raise ValueError(f"`budget` must be in (0, 1] as a ratio, got {ratio}; use an int for a number of tokens")
    return ratio


def check_prompt_budget(budget: object) -> PromptBudget:
    """Return the budget of a prompt if it is valid, and raise otherwise.

    Args:
        budget (`int`, `float`, `"auto"` or `dict`):
            `{"total": 512}` is a number of tokens for all pictures of a prompt together; the others are for each
            picture, as in [`check_budget`].

    Example:

    ```python
    >>> from arr_coc.config import check_prompt_budget
    >>> check_prompt_budget({"total": 512})
    {'total': 512}

    ```
    """
    if not isinstance(budget, Mapping):
        return check_budget(budget)
    if set(budget) != {"total"}:
        raise ValueError(f"`budget` as a dict must have the one key 'total', as {{'total': 512}}, got {dict(budget)!r}")
    total = budget["total"]
    if isinstance(total, bool) or not isinstance(total, Integral):
        raise TypeError(f"the total of `budget` must be a whole number of tokens, got {total!r}")
    if total < 1:
        raise ValueError(f"the total of `budget` must be at least 1 token, got {total}")
    return {"total": int(total)}


def check_introspect(introspect: object) -> Introspect:
    """Return the setting if it is valid, and raise otherwise.

    Args:
        introspect (`"auto"`, `"on"`, `"off"` or `int`): a number is how many layers of the language model are read.

    Example:

    ```python
    >>> from arr_coc.config import check_introspect
    >>> check_introspect("auto"), check_introspect(12)
    ('auto', 12)

    ```
    """
    if isinstance(introspect, str) and introspect in ("auto", "on", "off"):
        return introspect  # type: ignore[return-value]
    if isinstance(introspect, bool) or not isinstance(introspect, Integral):
        raise ValueError(f"`introspect` must be 'auto', 'on', 'off' or a number of layers, got {introspect!r}")
    if introspect < 1:
        raise ValueError(f"`introspect` must read at least 1 layer, got {introspect}; use 'off' to read none")
    return int(introspect)


@dataclass(frozen=True, kw_only=True)
class ARRCOCConfig:
    """Configuration of an [`ARRCOCLayer`].

    Args:
        hidden_size (`int`):
            Width `D` of the language model.
        channels (`str`, *optional*, defaults to `"full"`):
            Texture channels, `"core"` (13) or `"full"` (40).
        rank (`int`, *optional*):
            Rank `R` of the learned maps from `D`. By default it is chosen so that the layer has 50 to 300 thousand
            parameters at widths from 256 to 8192.
        budget (`int`, `float` or `"auto"`, *optional*, defaults to 0.25):
            Budget when a call gives none. See [`~arr_coc.attending.resolve_budget`].
        min_tokens (`int`, *optional*, defaults to 64):
            Fewest tokens that `"auto"` keeps of a picture, or of a clip for each of its frames.
        max_tokens (`int`, *optional*, defaults to 400):
            Most tokens that `"auto"` keeps of a picture, or of a clip for each of its frames.
        gestalt_tokens (`int`, *optional*, defaults to 256):
            Tokens of the low-resolution overview; the `detail_lost` channels are measured at its scale.
        cell_pixels (`int`, *optional*, defaults to 32):
            Pixels a side of one token: 32 for Qwen3-VL, 28 for Qwen2-VL and Qwen2.5-VL.
        max_image_pixels (`int`, *optional*, defaults to 256,000,000):
            Larger pictures are refused.
        text_detector (`str`, *optional*):
            Name of the detector that fills the `text` channel; `None` is the built-in stroke density. Set by the layer.
        base_model_name_or_path (`str`, *optional*):
            The vision-language model this layer was made for.
        base_model_edition (`int`, *optional*):
            Of the embedded model, the edition this layer was made for; without one, the first. None for other models.
        compressor_levels (`int`, *optional*, defaults to 0):
            Encoder levels (its output, then DeepStack's) that the learned compressor handles; 0 for no compressor. See
            [`~arr_coc.gaze.compression.ConvCompressor`].
        introspect (`"auto"`, `"on"`, `"off"` or `int`, *optional*, defaults to `"off"`):
            Whether the model itself is asked where it looks, when a call does not say. See [`~arr_coc.prepare`].
        seed (`int`, *optional*, defaults to 0):
            Seed of the fixed orthogonal projections and of the convolutions behind zero-initialised corrections.
        arr_coc_version (`str`, *optional*):
            Version of the package that wrote the configuration.

    Example:

    ```python
    >>> from arr_coc import ARRCOCConfig
    >>> config = ARRCOCConfig(hidden_size=2048)
    >>> ARRCOCConfig.from_json(config.to_json()) == config
    True

    ```
    """

    hidden_size: int
    channels: ChannelSet = "full"
    rank: int | None = None
    budget: Budget = 0.25
    min_tokens: int = 64
    max_tokens: int = 400
    gestalt_tokens: int = 256
    cell_pixels: int = 32
    max_image_pixels: int = 256_000_000
    text_detector: str | None = None
    base_model_name_or_path: str | None = None
    base_model_edition: int | None = None
    compressor_levels: int = 0
    introspect: Introspect = "off"
    seed: int = 0
    arr_coc_version: str = __version__

    def __post_init__(self) -> None:
        # huggingface_hub's `strict` skips its checks on frozen dataclasses, so they are written out here.
        if self.rank is None and isinstance(self.hidden_size, int) and self.hidden_size > 0:
            object.__setattr__(self, "rank", min(64, max(8, 50_000 // self.hidden_size)))
        if self.base_model_edition is None and self.base_model_name_or_path == EMBEDDED:
            object.__setattr__(self, "base_model_edition", 1)
        counts = (
            *(() if self.base_model_edition is None else ("base_model_edition",)),
            "hidden_size",
            "rank",
            "min_tokens",
            "max_tokens",
            "gestalt_tokens",
            "cell_pixels",
            "max_image_pixels",
        )
        for name in (*counts, "compressor_levels", "seed"):
            value, least = getattr(self, name), 1 if name in counts else 0
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"`{name}` must be an int, got {type(value).__name__}")
            if value < least:
                raise ValueError(f"`{name}` must be at least {least}, got {value}")
        for name in ("text_detector", "base_model_name_or_path"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise TypeError(f"`{name}` must be a string or None, got {type(value).__name__}")
        if not isinstance(self.arr_coc_version, str):
            raise TypeError(f"`arr_coc_version` must be a string, got {type(self.arr_coc_version).__name__}")
        if self.channels not in CHANNEL_SETS:
            raise ValueError(f"`channels` must be one of {', '.join(CHANNEL_SETS)}, got {self.channels!r}")
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"`min_tokens` must not exceed `max_tokens`, got {self.min_tokens} > {self.max_tokens}; "
                "raise `max_tokens` or lower `min_tokens`"
            )
        check_budget(self.budget)
        check_introspect(self.introspect)

    @classmethod
    def for_model(cls, model: Any, **changes: Any) -> ARRCOCConfig:
        """Configuration for a vision-language model of transformers.

        Args:
            model (`PreTrainedModel`): supplies the width, the cell size and the name.
            changes: fields to set or override.
        """
        config, vision = model.config, model.config.vision_config
        name = getattr(config, "name_or_path", "")
        fields = {
            "hidden_size": config.get_text_config().hidden_size,
            "cell_pixels": vision.patch_size * getattr(vision, "spatial_merge_size", 1),
            "base_model_name_or_path": EMBEDDED if name == EMBEDDED_MODEL else name or None,
            "base_model_edition": getattr(config, EDITION_NAME, None),
        }
        return cls(**{**fields, **changes})

    def for_base(self, other: ARRCOCConfig) -> ARRCOCConfig:
        """This configuration with the base model of another, by name and edition."""
        return dataclasses.replace(
            self, base_model_name_or_path=other.base_model_name_or_path, base_model_edition=other.base_model_edition
        )

    def check_edition(
        self, config: Any, name: str = "the selector", fix: str = "train it again with `arr-coc train`"
    ) -> None:
        """Raise `ValueError` if this was made for another edition of the embedded model.

        Args:
            config (`PreTrainedConfig`): of the model; other models have no edition, and are not refused.
            name (`str`, *optional*): what the error calls this.
            fix (`str`, *optional*): what the error says to do.
        """
        mine, given = self.base_model_edition, getattr(config, EDITION_NAME, None)
        if mine is None or given is None or mine == given:
            return
        older = "" if self.arr_coc_version == __version__ else f", or install arr-coc=={self.arr_coc_version}"
        raise ValueError(
            f"{name} was trained for edition {mine} of the embedded model, this is edition {given}; {fix}{older}"
        )

    @property
    def low_rank(self) -> int:
        """`rank`, which is never `None` after construction."""
        return self.rank or 0

    def to_json(self) -> str:
        """The configuration as JSON text."""
        return json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ARRCOCConfig:
        """Build a configuration from a dictionary; unknown keys raise an error."""
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            written_by = values.get("arr_coc_version", "an unknown version")
            raise ValueError(
                f"unknown configuration keys {', '.join(unknown)}: written by arr-coc {written_by}, "
                f"this is {__version__}; install that version or remove the keys"
            )
        if "hidden_size" not in values:
            raise ValueError("the configuration has no `hidden_size`; is this an arr-coc selector's config.json?")
        return cls(**values)

    @classmethod
    def from_json(cls, text: str) -> ARRCOCConfig:
        """Parse the output of [`~ARRCOCConfig.to_json`]."""
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"the configuration is not valid JSON: {error}") from None
        if not isinstance(values, dict):
            raise ValueError(f"the configuration must be a JSON object, got {type(values).__name__}")
        return cls.from_dict(values)


def check_grid(grid: Sequence[SupportsIndex], name: str = "grid") -> Grid:
    """Return `grid` as `(t, h, w)` of plain ints; a pair means one frame.

    Example:

    ```python
    >>> from arr_coc.config import check_grid
    >>> check_grid((24, 32))
    (1, 24, 32)

    ```
    """
    try:
        sizes = [operator.index(side) for side in grid if not isinstance(side, bool)]
    except TypeError:
        sizes = []
    if len(sizes) == 2:
        sizes = [1, *sizes]
    if len(sizes) != 3 or min(sizes) < 1:
        raise ValueError(f"`{name}` must be (h, w) or (t, h, w) in whole numbers of at least 1, got {grid!r}")
    return sizes[0], sizes[1], sizes[2]


def cell_count(grid: Grid) -> int:
    """Number of cells `N = t * h * w` of a grid."""
    return math.prod(grid)
