"""Batches for training: scenes of one size, several questions each, and the words under every token."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from courses import COURSES, Kind, Part, augment, mosaic
from PIL import Image
from torch import Tensor

from arr_coc.data.coco import Photo, class_frequencies, photo_scene, presence_examples
from arr_coc.data.worlds import Scene, draw_scene, split_seed
from arr_coc.data.worlds.drawing import CHARACTERS, COLOURS, SHAPES
from arr_coc.data.worlds.pages import COLUMNS, ITEMS, KEYS
from arr_coc.data.worlds.world import Question

CELL = 32
# What lies under a token, said with words of the vocabulary.
DRAWN = (*COLOURS, *SHAPES, "text", *CHARACTERS, "title", "footnote", "sign", *dict.fromkeys((*KEYS, *ITEMS, *COLUMNS)))
# COCO's classes, in its order.
CLASSES = (
    *("person", "bicycle", "car", "motorcycle", "airplane", "bus", "train", "truck", "boat", "traffic light"),
    *("fire hydrant", "stop sign", "parking meter", "bench", "bird", "cat", "dog", "horse", "sheep", "cow", "elephant"),
    *("bear", "zebra", "giraffe", "backpack", "umbrella", "handbag", "tie", "suitcase", "frisbee", "skis", "snowboard"),
    *("sports ball", "kite", "baseball bat", "baseball glove", "skateboard", "surfboard", "tennis racket", "bottle"),
    *("wine glass", "cup", "fork", "knife", "spoon", "bowl", "banana", "apple", "sandwich", "orange", "broccoli"),
    *("carrot", "hot dog", "pizza", "donut", "cake", "chair", "couch", "potted plant", "bed", "dining table", "toilet"),
    *("tv", "laptop", "mouse", "remote", "keyboard", "cell phone", "microwave", "oven", "toaster", "sink"),
    *("refrigerator", "book", "clock", "vase", "scissors", "teddy bear", "hair drier", "toothbrush"),
)
SEEN = tuple(dict.fromkeys((*DRAWN, *CLASSES)))
PLACES = {word: place for place, word in enumerate(SEEN)}
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
            if word in PLACES:
                found[:, :, PLACES[word]] |= under
    return found.reshape(rows * columns, -1)


class Batcher:
    """Makes batches of ids in which each question sees the picture and itself, but no other question.

    Args:
        tokenizer (`PreTrainedTokenizerFast`): of the model.
        tokens (`int`): visual tokens of a batch.
        course (`str`, *optional*, defaults to `"scenes"`): what is drawn, see `courses.py`.
        photos (`dict[str, list[Photo]]`, *optional*): photographs by split.
    """

    def __init__(
        self, tokenizer: Any, tokens: int, course: str = "scenes", photos: dict[str, list[Photo]] | None = None
    ) -> None:
        self.tokens = tokens
        self.photos = photos or {}
        self.names = {split: class_frequencies(found) for split, found in self.photos.items()}
        self.course = [part for part in COURSES[course] if self.photos or ("photos", "presence") not in part.kinds]
        marker = tokenizer.convert_tokens_to_ids
        encode = lambda text: tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
        self.before = [marker("<|im_start|>"), *encode("user\n"), marker("<|vision_start|>")]
        self.after = marker("<|vision_end|>")
        self.end = marker("<|im_end|>")
        self.between = [self.end, *encode("\n"), marker("<|im_start|>"), *encode("assistant\n")]
        self.image = marker("<|image_pad|>")
        self.encode = encode

    def __call__(self, split: str, first: int, rng: random.Random, done: float = 1.0) -> dict[str, Any]:
        """A batch of scenes of one size, from consecutive seeds, as training has come (0 to 1)."""
        part = rng.choices(self.course, [part.share for part in self.course])[0]
        grid = part.grid(rng, done)
        scenes, kinds = [], []
        for place in range(min(512, max(8, self.tokens // (grid[0] * grid[1])))):
            kind = rng.choices(list(part.kinds), list(part.kinds.values()))[0]
            scenes.append(self.draw(split, first + place, kind, grid, rng, varied=True))
            kinds.append(kind[1])
        return self.put_together(scenes, kinds, grid, rng, QUESTIONS)

    def held(self, split: str, first: int, kind: Kind, part: Part, rng: random.Random) -> dict[str, Any]:
        """A batch of one kind, one question each, to measure on."""
        grid = part.grid(rng, 0.45)  # as large as needles of 1024 pixels
        count = min(512, max(8, self.tokens // (grid[0] * grid[1])))
        if kind[0] == "photos":
            grid = (6, 6)
            scenes = [
                Scene(one.picture, (Question(one.kind, one.question, one.answer),))
                for one in presence_examples(self.photos[split], first)[:512]
            ]
        else:
            scenes = [self.draw(split, first + place, kind, grid, rng, varied=False) for place in range(count)]
        return self.put_together(scenes, [kind[1]] * len(scenes), grid, rng, 1) | {"kind": kind[1]}

    def draw(
        self, split: str, index: int, kind: Kind, grid: tuple[int, int], rng: random.Random, varied: bool
    ) -> Scene:
        """A scene of about a size; half of them are resized to it, as a processor would."""
        if kind[0] == "photos":
            names = self.names[split]
            absent = tuple(dict.fromkeys(rng.choices(list(names), list(names.values()), k=4)))
            four = grid[0] > 6 and rng.random() < 0.6
            photos = self.photos[split]
            part, picture = mosaic(photos, rng) if four else augment(rng.choice(photos), rng)
            return photo_scene(part, rng, absent, picture)
        off = (rng.randint(-15, 15), rng.randint(-15, 15)) if rng.random() < 0.5 else (0, 0)
        size = (max(128, grid[1] * CELL + off[0]), max(128, grid[0] * CELL + off[1]))
        return draw_scene(kind[0], split_seed(split, index), kind[1], size, varied)  # type: ignore[arg-type]

    def put_together(
        self, scenes: list[Scene], kinds: list[str], grid: tuple[int, int], rng: random.Random, most: int
    ) -> dict[str, Any]:
        """Tensors of scenes: pictures, words under the tokens, questions of the kind first."""
        rows, columns = grid
        size = (columns * CELL, rows * CELL)
        pictures = np.empty((len(scenes), size[1], size[0], 3), dtype=np.uint8)
        seen = np.zeros((len(scenes), rows * columns, len(SEEN)), dtype=np.uint8)
        lines = []
        for place, (scene, kind) in enumerate(zip(scenes, kinds, strict=True)):
            exact = scene.picture.size == size
            picture = scene.picture if exact else scene.picture.resize(size, Image.Resampling.BICUBIC)
            pictures[place] = np.asarray(picture)
            seen[place] = seen_words(scene, rows, columns)
            wanted = [question for question in scene.questions if question.kind == kind]
            others = [question for question in scene.questions if question.kind != kind]
            rng.shuffle(wanted)
            rng.shuffle(others)
            asked = wanted[:1] if most == 1 else (wanted[: most - 3] + others + wanted[most - 3 :])[:most]
            lines.append([self._turn(question.text, question.answer) for question in asked])
        return {
            "pictures": torch.from_numpy(pictures),
            "seen": torch.from_numpy(seen),
            "kinds": kinds,
            "grid": grid,
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


class Held(torch.utils.data.Dataset[dict[str, Any]]):
    """Batches of one kind each, of a split that is never trained on."""

    def __init__(self, batcher: Batcher, split: str, batches: int) -> None:
        self.batcher, self.split = batcher, split
        kinds = [(kind, part) for part in batcher.course for kind in part.kinds]
        self.parts = [(number, kind, part, go) for number, (kind, part) in enumerate(kinds) for go in range(batches)]

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, place: int) -> dict[str, Any]:
        torch.set_num_threads(1)
        number, kind, part, go = self.parts[place]
        rng = random.Random(f"{self.split} {number} {go}")
        return self.batcher.held(self.split, 10**6 * number + 1000 * go, kind, part, rng)


class Stream(torch.utils.data.IterableDataset[dict[str, Any]]):
    """Endless batches; each worker has seeds of its own, and a course goes on with the time that is given."""

    def __init__(self, batcher: Batcher, first: int, seconds: float) -> None:
        self.batcher, self.first, self.seconds = batcher, first, seconds

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = torch.utils.data.get_worker_info()
        number = 0 if worker is None else worker.id
        torch.set_num_threads(1)
        at = self.first + number * 10**9
        rng = random.Random(f"stream {at}")
        begin = time.time()
        while True:
            batch = self.batcher("train", at, rng, min(1.0, (time.time() - begin) / self.seconds))
            at += len(batch["kinds"])
            yield batch
