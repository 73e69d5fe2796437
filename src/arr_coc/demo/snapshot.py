"""What one visitor saw: an answer, and everything on the way to it, off the device and small enough to draw."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from arr_coc.balancing import SCORES, TENSIONS
from arr_coc.inference.answer import Answer
from arr_coc.selectors.output import ARRCOCOutput, spread_windows

Floats = NDArray[np.float32]
DRAWN = 1024  # pixels along a picture that is kept


@dataclass(frozen=True, eq=False)
class Look:
    """One answer, and what was seen on the way to it; belongs to one visitor.

    Args:
        image (`PIL.Image.Image`): the picture, small enough to draw; as far as its cells reach, which in mode
            `saccade` may be beyond its edges.
        question, mode, selector (`str`): as asked.
        answer, strategy, reason (`str`): as given.
        budget (`float`): share of the tokens that was asked for.
        used, full (`int`): visual tokens.
        milliseconds (`dict[str, float]`): by stage.
        grid (`tuple[int, int]`): rows and columns of cells.
        tokens (`ndarray` of shape `[h, w]`): spent on each cell.
        cells (`ndarray` of shape `[k]`): read at full resolution, most relevant first.
        blur (`float`): pixels of `image` a side under one pixel of the gestalt; 1 without one.
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
    budget: float
    used: int
    full: int
    milliseconds: dict[str, float]
    grid: tuple[int, int]
    tokens: Floats
    cells: NDArray[np.int64]
    blur: float = 1.0
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


def make_look(
    image: Image.Image,
    question: str,
    mode: str,
    selector: str,
    budget: float,
    answer: Answer,
    cell: int,
    words: tuple[str, ...],
    channels: Mapping[str, int],
    notes: tuple[str, ...] = (),
) -> Look:
    """Everything of an answer about one picture that is drawn; `cell` is the side of a token in pixels."""
    (_, rows, columns), cells = answer.kept[0]
    spent = np.zeros(rows * columns, dtype=np.float32)
    spent[cells] = 1.0
    share = min(1.0, DRAWN / max(image.size))
    size = (max(1, round(image.width * share)), max(1, round(image.height * share)))
    small = image.resize(size, Image.Resampling.LANCZOS, reducing_gap=2.0) if share < 1 else image
    blur = 1.0
    if mode == "saccade":  # its cells are cut from the picture as it is, which is continued where the last ones reach
        small = continue_edges(small, (round(columns * cell * share), round(rows * cell * share)))
        if len(cells) < rows * columns:
            gestalt = max(1, answer.tokens.used - len(cells))
            spent += gestalt / (rows * columns)
            blur = max(1.0, share * (rows * columns / gestalt) ** 0.5)
    maps = None if answer.output is None else read_maps(answer.output, words, channels, (rows, columns))
    if maps is not None:
        cells = cells[(-maps.relevance[cells // columns, cells % columns]).argsort(kind="stable")]
    return Look(
        image=small,
        question=question,
        mode=mode,
        selector=selector,
        answer=answer.text,
        strategy=answer.strategy,
        reason=answer.reason,
        budget=budget,
        used=answer.tokens.used,
        full=answer.tokens.full,
        milliseconds=answer.timings_ms,
        grid=(rows, columns),
        tokens=spent.reshape(rows, columns),
        cells=cells,
        blur=blur,
        maps=maps,
        notes=notes,
    )


def continue_edges(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """A picture continued with its last pixels to a larger size."""
    pixels = np.asarray(image)
    more = (max(0, size[1] - image.height), max(0, size[0] - image.width))
    return Image.fromarray(np.pad(pixels, ((0, more[0]), (0, more[1]), (0, 0)), mode="edge")) if any(more) else image


def read_maps(output: ARRCOCOutput, words: tuple[str, ...], channels: Mapping[str, int], grid: tuple[int, int]) -> Maps:
    """What a layer saw, as arrays on the grid of cells; windows, whose last may reach beyond it, are cut up."""

    def array(values: torch.Tensor) -> Floats:
        return spread_windows(values, grid).detach().float().cpu().numpy()

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
