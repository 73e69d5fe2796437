"""Tokens and words that share a space, made from the picture itself, for tests that need no model.

Colours, text, detail, brightness, places and oddness have an axis each, and so have the words that name them; any other
word points in a direction of its own where no cell lies.
"""

from __future__ import annotations

import re
import zlib

import torch
from torch import Tensor

from arr_coc.pixels.mipmaps import pool_to
from arr_coc.texture import CHANNELS

WIDTH = 64

_COLOURS = {
    "red": (0.80, 0.12, 0.12),
    "green": (0.15, 0.60, 0.20),
    "blue": (0.12, 0.25, 0.75),
    "yellow": (0.95, 0.85, 0.15),
    "purple": (0.50, 0.15, 0.60),
    "orange": (0.92, 0.47, 0.12),
    "cyan": (0.10, 0.80, 0.85),
    "pink": (0.95, 0.55, 0.70),
    "brown": (0.45, 0.28, 0.13),
    "gray": (0.50, 0.50, 0.50),
    "white": (0.95, 0.95, 0.95),
    "black": (0.05, 0.05, 0.05),
}
_SYNONYMS = {
    "text": "text word words say says write written writing read reads letter letters sign label number name title",
    "detail": "detail details small tiny fine texture",
    "smooth": "smooth empty blank plain background flat",
    "bright": "bright light lit shiny",
    "dark": "dark shadow dim",
    "unusual": "unusual odd different strange striking",
    "left": "left",
    "right": "right",
    "top": "top upper above sky",
    "bottom": "bottom lower below ground floor",
    "middle": "middle centre center",
    "gray": "grey",
}
_AXES = {name: axis for axis, name in enumerate([*_COLOURS, *(name for name in _SYNONYMS if name not in _COLOURS)])}
_KNOWN = _AXES | {word: _AXES[name] for name, words in _SYNONYMS.items() for word in words.split()}
_SAMPLES = 8  # colour samples a side of each cell: a thin red line counts as red, not as its mean


def split_words(question: str) -> list[str]:
    """The words of a question, lower-case."""
    return re.findall(r"\w+", question.lower())


def embed_words(words: list[str]) -> Tensor:
    """Embeddings `[Q, 64]`: one axis for a known word, a direction of its own for any other."""
    vectors = torch.zeros(len(words), WIDTH)
    for row, word in enumerate(words):
        if word in _KNOWN:
            vectors[row, _KNOWN[word]] = 1.0
        else:
            generator = torch.Generator().manual_seed(zlib.crc32(word.encode()))
            free = torch.randn(WIDTH - len(_AXES), generator=generator)
            vectors[row, len(_AXES) :] = free / free.norm()
    return vectors


def embed_cells(picture: Tensor, texture: Tensor) -> Tensor:
    """Embeddings `[B, N, 64]` of cells from the picture `[B, 3, H, W]` and its full texture `[B, 40, h, w]`."""
    batch, _, rows, columns = texture.shape
    table = CHANNELS["full"]
    samples = pool_to(picture, (rows * _SAMPLES, columns * _SAMPLES)).flatten(2).mT  # [B, S, 3]
    distance = torch.cdist(samples, torch.tensor(list(_COLOURS.values())).expand(batch, -1, -1))  # [B, S, 12]
    member = torch.softmax(-60 * distance.square(), dim=-1).mT.reshape(batch, -1, rows * _SAMPLES, columns * _SAMPLES)
    colour = pool_to(member, (rows, columns)).sqrt()  # [B, 12, h, w]
    grey = texture[:, table["red"] : table["blue"] + 1].mean(dim=1)
    y, x = texture[:, table["y"]], texture[:, table["x"]]
    detail = texture[:, table["high_pass"]]
    maps = {
        "text": texture[:, table["text"]].sqrt(),
        "detail": detail.sqrt(),
        "smooth": (1 - 4 * detail).clamp(min=0),
        "bright": (grey - 0.6).clamp(min=0) * 2.5,
        "dark": (0.4 - grey).clamp(min=0) * 2.5,
        "unusual": texture[:, table["saliency"]] * 2,
        "left": (1 - 2 * x).clamp(min=0),
        "right": (2 * x - 1).clamp(min=0),
        "top": (1 - 2 * y).clamp(min=0),
        "bottom": (2 * y - 1).clamp(min=0),
        "middle": (1 - 1.5 * texture[:, table["eccentricity"]]).clamp(min=0),
    }
    cells = texture.new_zeros(batch, WIDTH, rows, columns)
    cells[:, : len(_COLOURS)] = colour
    for name, value in maps.items():
        cells[:, _AXES[name]] = value
    return cells.flatten(2).mT
