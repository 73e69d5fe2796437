"""A snapshot: one visitor's answer and everything the page draws of it, off the device and small."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from arr_coc.drawing.labels import label_channels, label_tensions, label_weights
from arr_coc.drawing.overlay import continue_edges, count_seen, find_scale
from arr_coc.gaze.compression import Compress
from arr_coc.gaze.loop import Look
from arr_coc.inference.answer import Answer
from arr_coc.pixels.files import Picture
from arr_coc.selectors.output import ARRCOCOutput, spread_windows

Floats = NDArray[np.float32]
LONGEST_SIDE = 1024  # pixels of a picture that is kept for drawing


@dataclass(frozen=True, eq=False)
class Maps:
    """What a relevance layer saw of one picture, as arrays on the grid of cells.

    Args:
        relevance (`ndarray` of shape `[h, w]`): in [0, 1].
        scores, channels (`dict[str, ndarray]`): maps `[h, w]` by name.
        pull (`ndarray` of shape `[Q, h, w]`): how strongly each word of the question pulls at each cell.
        words (`tuple[str, ...]`): the question's words, as the model reads them.
        weights, tensions (`dict[str, float]`): by name.
    """

    relevance: Floats
    scores: dict[str, Floats]
    channels: dict[str, Floats]
    pull: Floats
    words: tuple[str, ...]
    weights: dict[str, float]
    tensions: dict[str, float]


@dataclass(frozen=True, eq=False)
class Snapshot:
    """One visitor's answer and all that is drawn of it.

    Args:
        image (`PIL.Image.Image`): the picture, made small enough to draw. In mode `"saccade"` it is continued at its
            edges as far as its cells reach.
        question, mode, selector (`str`): as asked.
        answer, strategy, reason (`str`): as answered.
        budget (`float`): share of the tokens that was asked for.
        used, full (`int`): visual tokens that were read, in all looks together, and of the whole picture.
        milliseconds (`dict[str, float]`): time by stage.
        grid (`tuple[int, int]`): rows and columns of cells.
        tokens (`ndarray` of shape `[h, w]`): tokens spent on each cell, in the last look.
        cells (`ndarray` of shape `[k]`): flat indices of the cells read at full resolution, most relevant first.
        blur (`float`): side of a pixel of the gestalt, in pixels of `image`; 1 without a gestalt.
        maps (`Maps`, *optional*): what the layer saw; None for selectors without relevance.
        notes (`tuple[str, ...]`): how the picture was converted, and what had no effect.
        looks (`tuple[Look, ...]`): the looks at the picture, in order, if there could be more than one.
        compress (`str`, *optional*): how the gestalt was compressed; None if it was not.
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
    looks: tuple[Look, ...] = ()
    compress: Compress | None = None

    @property
    def first_token(self) -> float:
        """Milliseconds to the first token."""
        return sum(value for name, value in self.milliseconds.items() if name != "decode")


def take_snapshot(
    picture: Picture,
    question: str,
    selector: str,
    budget: float,
    answer: Answer,
    cell: int,
    compress: Compress | None = None,
) -> Snapshot:
    """Take what is drawn from an answer about one picture; `cell` is the side of a token in pixels."""
    (_, rows, columns), cells = answer.kept[0]
    spent = np.zeros(rows * columns, dtype=np.float32)
    spent[cells] = 1.0
    image, blur = picture.image, 1.0
    scale = min(1.0, LONGEST_SIDE / max(image.size))
    if scale < 1:
        size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
        image = image.resize(size, Image.Resampling.LANCZOS, reducing_gap=2.0)
    if answer.mode == "saccade":  # cells are cut from the picture as it is, and the last ones may reach beyond it
        image = continue_edges(image, (round(columns * cell * scale), round(rows * cell * scale)))
        if len(cells) < rows * columns:
            spent += max(1, count_seen(answer) - len(cells)) / (rows * columns)
            blur = max(1.0, scale * find_scale(answer))
    maps = None if answer.output is None else read_maps(answer.output, answer.words, (rows, columns))
    if maps is not None:
        cells = cells[(-maps.relevance[cells // columns, cells % columns]).argsort(kind="stable")]
    return Snapshot(
        image=image,
        question=question,
        mode=answer.mode,
        selector=selector,
        answer=answer.text,
        strategy=answer.strategy,
        reason=answer.reason,
        budget=budget,
        used=answer.tokens.used,
        full=answer.tokens.full,
        milliseconds=answer.timings_ms,
        grid=(rows, columns),
        tokens=spent.reshape(rows, columns),  # [N] -> [h, w]
        cells=cells,
        blur=blur,
        maps=maps,
        notes=tuple(f"the picture {note}" for note in picture.notes),
        looks=answer.looks,
        compress=compress,
    )


def read_maps(output: ARRCOCOutput, words: tuple[str, ...], grid: tuple[int, int]) -> Maps:
    """What a layer saw, as arrays on the grid of cells; maps of windows are spread over the cells under them."""

    def to_array(values: torch.Tensor) -> Floats:
        return spread_windows(values, grid).detach().float().cpu().numpy()

    if output.texture is None or output.word_pull is None:
        raise ValueError("the page shows every channel and word; ask with `details=True`")
    return Maps(
        relevance=to_array(output.relevance[0, 0]),
        scores={name: to_array(score[0, 0]) for name, score in output.scores.items()},
        channels={name: to_array(channel) for name, channel in label_channels(output.texture[0, 0]).items()},
        pull=to_array(output.word_pull[0, :, 0]),
        words=words,
        weights=label_weights(output),
        tensions=label_tensions(output),
    )
