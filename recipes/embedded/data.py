"""Batches for training: scenes of one size, several questions each, and the words under every token."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from arr_coc.worlds import draw_scene, split_seed
from arr_coc.worlds.drawing import CHARACTERS, COLOURS, SHAPES
from arr_coc.worlds.sampling import Scene

CELL = 32
# What lies under a token, said with words of the vocabulary.
SEEN = (*COLOURS, *SHAPES, "text", *CHARACTERS)
# How often each kind of scene is drawn.
MIX = {
    ("scenes", "color"): 7,
    ("scenes", "count_shape"): 11,
    ("scenes", "count_color"): 9,
    ("scenes", "relation"): 12,
    ("scenes", "read"): 18,
    ("scenes", "unusual"): 10,
    ("scenes", "overview"): 12,
    ("camouflage", "camouflage"): 12,
    ("void", "void_count"): 4,
    ("void", "void_read"): 8,
}
QUESTIONS = 5


def seen_words(scene: Scene, rows: int, columns: int) -> np.ndarray:
    """Which of `SEEN` lie under each token, `[N, W]`: half of the word's box, or a quarter of the token."""
    found = np.zeros((rows, columns, len(SEEN)), dtype=np.uint8)
    y, x = np.arange(rows) * CELL, np.arange(columns) * CELL
    width, height = scene.picture.size
    across_scale, down_scale = columns * CELL / width, rows * CELL / height
    for thing in scene.things:
        left, right = (side * across_scale for side in thing.box[::2])
        top, bottom = (side * down_scale for side in thing.box[1::2])
        across = np.clip(np.minimum(x + CELL, right) - np.maximum(x, left), 0, None)
        down = np.clip(np.minimum(y + CELL, bottom) - np.maximum(y, top), 0, None)
        area = down[:, None] * across[None]  # [h, w]
        size = max(1.0, (right - left) * (bottom - top))
        under = (area >= 0.5 * size) | (area >= 0.25 * CELL * CELL)
        if not under.any():  # on the border of tokens
            row, column = int((top + bottom) / 2 // CELL), int((left + right) / 2 // CELL)
            under[min(rows - 1, max(0, row)), min(columns - 1, max(0, column))] = True
        for word in thing.words:
            found[:, :, SEEN.index(word)] |= under
    return found.reshape(rows * columns, -1)


class Batcher:
    """Makes batches of ids in which each question sees the picture and itself, but no other question.

    Args:
        tokenizer (`PreTrainedTokenizerFast`): of the model.
        tokens (`int`): visual tokens of a batch.
    """

    def __init__(self, tokenizer: Any, tokens: int) -> None:
        self.tokens = tokens
        marker = tokenizer.convert_tokens_to_ids
        encode = lambda text: tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
        self.before = [marker("<|im_start|>"), *encode("user\n"), marker("<|vision_start|>")]
        self.after = marker("<|vision_end|>")
        self.end = marker("<|im_end|>")
        self.between = [self.end, *encode("\n"), marker("<|im_start|>"), *encode("assistant\n")]
        self.image = marker("<|image_pad|>")
        self.encode = encode

    def __call__(
        self, split: str, first: int, rng: random.Random, only: tuple[str, str] | None = None, varied: bool = True
    ) -> dict[str, Any]:
        """A batch of scenes of one size, from consecutive seeds; half of them resized, as a processor would."""
        rows, columns = draw_grid(rng)
        count = min(512, max(32, self.tokens // (rows * columns)))
        total, size = rows * columns, (columns * CELL, rows * CELL)
        pictures = np.empty((count, size[1], size[0], 3), dtype=np.uint8)
        seen = np.zeros((count, total, len(SEEN)), dtype=np.uint8)
        lines, kinds = [], []
        for place in range(count):
            world, kind = only or rng.choices(list(MIX), list(MIX.values()))[0]
            off = (rng.randint(-15, 15), rng.randint(-15, 15)) if rng.random() < 0.5 else (0, 0)
            drawn = (max(128, size[0] + off[0]), max(128, size[1] + off[1]))
            scene = draw_scene(world, split_seed(split, first + place), kind, drawn, varied)
            exact = scene.picture.size == size
            picture = scene.picture if exact else scene.picture.resize(size, Image.Resampling.BICUBIC)
            pictures[place] = np.asarray(picture)
            seen[place] = seen_words(scene, rows, columns)
            wanted = [question for question in scene.questions if question.kind == kind]
            others = [question for question in scene.questions if question.kind != kind]
            rng.shuffle(wanted)
            rng.shuffle(others)
            asked = wanted[:1] if only else (wanted[:2] + others)[:QUESTIONS]
            kinds.append(kind)
            lines.append([self._turn(question.text, question.answer) for question in asked])
        return {
            "pictures": torch.from_numpy(pictures),
            "seen": torch.from_numpy(seen),
            "kinds": kinds,
            "grid": (rows, columns),
            **self._collate(lines),
        }

    def _turn(self, question: str, answer: str) -> tuple[list[int], int]:
        """Ids from the end of the picture to the end of the answer, and where the answer begins."""
        asked = [self.after, *self.encode(question), *self.between]
        return [*asked, *self.encode(answer), self.end], len(asked)

    def _collate(self, lines: list[list[tuple[list[int], int]]]) -> dict[str, Tensor]:
        """Text of all questions in a row: ids, labels, which question (0 is padding), and place within it."""
        longest = max(sum(len(ids) for ids, _ in line) for line in lines)
        longest = (longest + 15) // 16 * 16
        ids = np.zeros((len(lines), longest), dtype=np.int64)
        labels = np.full((len(lines), longest), -100, dtype=np.int64)
        turn = np.zeros((len(lines), longest), dtype=np.int64)
        within = np.zeros((len(lines), longest), dtype=np.int64)
        for row, line in enumerate(lines):
            at = 0
            for number, (turn_ids, begin) in enumerate(line, 1):
                end = at + len(turn_ids)
                ids[row, at:end] = turn_ids
                labels[row, at + begin - 1 : end - 1] = turn_ids[begin:]  # what comes next
                turn[row, at:end] = number
                within[row, at:end] = np.arange(len(turn_ids))
                at = end
        where = (labels.ravel() != -100).nonzero()[0]
        found = {"ids": ids, "labels": labels, "turn": turn, "within": within}
        found |= {"where": where, "targets": labels.ravel()[where]}
        return {name: torch.from_numpy(value) for name, value in found.items()}


def draw_grid(rng: random.Random) -> tuple[int, int]:
    """Rows and columns of tokens: 4 to 16, at most about twice as long as wide.

    Half of the time small ones: their texts and shapes are as large as in large pictures, and they cost less.
    """
    power = 2.2 if rng.random() < 0.5 else 0.8
    while True:
        rows, columns = (min(16, 4 + int(13 * rng.random() ** power)) for _ in range(2))
        if max(rows, columns) <= 2.25 * min(rows, columns):
            return rows, columns


class Held(torch.utils.data.Dataset[dict[str, Any]]):
    """Batches of one kind each, of a split that is never trained on."""

    def __init__(self, batcher: Batcher, split: str, batches: int) -> None:
        self.batcher, self.split = batcher, split
        self.parts = [(number, only, part) for number, only in enumerate(MIX) for part in range(batches)]

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, place: int) -> dict[str, Any]:
        torch.set_num_threads(1)
        number, only, part = self.parts[place]
        rng = random.Random(f"{self.split} {number} {part}")
        batch = self.batcher(self.split, 10**6 * number + 1000 * part, rng, only, varied=False)
        return {**batch, "kind": only[1]}


class Stream(torch.utils.data.IterableDataset[dict[str, Any]]):
    """Endless batches; each worker has seeds of its own."""

    def __init__(self, batcher: Batcher, first: int) -> None:
        self.batcher, self.first = batcher, first

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = torch.utils.data.get_worker_info()
        number = 0 if worker is None else worker.id
        torch.set_num_threads(1)
        at = self.first + number * 10**9
        rng = random.Random(f"stream {at}")
        while True:
            batch = self.batcher("train", at, rng)
            at += len(batch["kinds"])
            yield batch
