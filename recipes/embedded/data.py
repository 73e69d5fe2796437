"""Batches for training: scenes of one size, several questions each, and the words under every token."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from courses import COURSES, Kind, Part, augment, is_photos, mosaic
from PIL import Image
from placing import CELL
from torch import Tensor

from arr_coc.data.boxes import Box
from arr_coc.data.coco import class_frequencies, photo_examples, presence_examples
from arr_coc.data.example import Example
from arr_coc.data.photo_questions import Photo, photo_scene
from arr_coc.data.worlds import Scene, draw_scene, split_seed
from arr_coc.data.worlds.clips import draw_clip
from arr_coc.data.worlds.pages import COLUMNS, ITEMS
from arr_coc.data.worlds.tools.drawing import CHARACTERS, COLOURS, SHAPES
from arr_coc.data.worlds.tools.fields import FORM_KEYS, KEYS
from arr_coc.data.worlds.world import Clip, Question, Thing

# What lies under a token, said with words of the vocabulary.
LABELS = (*KEYS, *ITEMS, *COLUMNS, *" ".join(FORM_KEYS).split())
DRAWN = (*COLOURS, *SHAPES, "text", *CHARACTERS, "title", "footnote", "sign", *LABELS)
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


def with_relations(photos: list[Photo]) -> list[Photo]:
    """Photographs in which something is left of something else, or right, above or below."""
    blank, rng = Image.new("RGB", (1, 1)), random.Random(0)
    asked = (photo_scene(photo, rng, picture=blank, wording="all").questions for photo in photos)
    return [
        photo
        for photo, questions in zip(photos, asked, strict=True)
        if any(question.kind == "photo_relation" for question in questions)
    ]


def resized(scene: Scene, size: tuple[int, int]) -> Scene:
    """The same scene in another size."""
    across, down = size[0] / scene.picture.width, size[1] / scene.picture.height
    things = tuple(
        Thing((box[0] * across, box[1] * down, box[2] * across, box[3] * down), words)
        for box, words in ((thing.box, thing.words) for thing in scene.things)
    )
    picture = scene.picture if scene.picture.size == size else scene.picture.resize(size, Image.Resampling.BICUBIC)
    return Scene(picture, scene.questions, things)


def named_boxes(things: tuple[Thing, ...]) -> tuple[list[Box], list[int]]:
    """Boxes of things, once for each of their words in `SEEN`, and the places of those words."""
    pairs = [(thing.box, PLACES[word]) for thing in things for word in thing.words if word in PLACES]
    return [box for box, _ in pairs], [place for _, place in pairs]


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
        self.related = {split: with_relations(found) for split, found in self.photos.items()}
        self.course = [part for part in COURSES[course] if self.photos or not is_photos(part)]
        marker = tokenizer.convert_tokens_to_ids
        self.encode = lru_cache(2**16)(lambda text: tokenizer.encode(text, add_special_tokens=False))
        self.begin = [marker("<|im_start|>"), *self.encode("user\n")]
        self.before, self.after = marker("<|vision_start|>"), marker("<|vision_end|>")
        self.end = marker("<|im_end|>")
        self.between = [self.end, *self.encode("\n"), marker("<|im_start|>"), *self.encode("assistant\n")]
        self.image, self.video = marker("<|image_pad|>"), marker("<|video_pad|>")

    def __call__(self, split: str, first: int, rng: random.Random, done: float = 1.0) -> dict[str, Any]:
        """A batch of scenes of one size, from consecutive seeds, as training has come (0 to 1)."""
        part = rng.choices(self.course, [part.share for part in self.course])[0]
        grid, frames = part.grid(rng, done), part.frames(rng)
        scenes, kinds = [], []
        for place in range(self.count(grid, frames)):
            kind = rng.choices(list(part.kinds), list(part.kinds.values()))[0]
            scenes.append(self.draw(split, first + place, kind, grid, frames, rng, varied=True))
            kinds.append(kind[1])
        return self.put_together(scenes, kinds, grid, rng, QUESTIONS)

    def count(self, grid: tuple[int, int], frames: int) -> int:
        """How many pictures or clips make a batch."""
        return min(512, max(8, self.tokens // (grid[0] * grid[1] * ((frames + 1) // 2))))

    def held(self, split: str, first: int, kind: Kind, part: Part, rng: random.Random) -> dict[str, Any]:
        """A batch of one kind, one question each, to measure on."""
        grid, frames = part.grid(rng, 0.45), part.frames(rng)  # as large as needles of 1024 pixels
        if kind[0] == "photos":
            grid = (6, 6)
            examples = self.photo_examples(self.photos[split], kind[1], first)[:512]
            scenes = [Scene(one.picture, (Question(kind[1], one.question, one.answer),)) for one in examples]
        else:
            numbers = range(first, first + self.count(grid, frames))
            scenes = [self.draw(split, number, kind, grid, frames, rng, varied=False) for number in numbers]
        return self.put_together(scenes, [kind[1]] * len(scenes), grid, rng, 1) | {"kind": kind[1]}

    @staticmethod
    def photo_examples(photos: list[Photo], kind: str, seed: int) -> list[Example]:
        """Questions of a kind about photographs as they are."""
        if kind.startswith("presence"):
            return presence_examples(photos, seed, "pope" if kind == "presence_pope" else "own")
        return photo_examples(photos, kind, seed)

    def draw(
        self, split: str, index: int, kind: Kind, grid: tuple[int, int], frames: int, rng: random.Random, varied: bool
    ) -> Scene:
        """A scene of about a size; half of them will be resized to it, as a processor would."""
        if kind[0] == "photos":
            names = self.names[split]
            absent = tuple(dict.fromkeys(rng.choices(list(names), list(names.values()), k=4)))
            four = grid[0] > 6 and rng.random() < 0.6
            photos = self.related[split] if kind[1] == "photo_relation" else self.photos[split]
            part, picture = mosaic(photos, rng) if four else augment(rng.choice(photos), rng)
            scene = photo_scene(part, rng, absent, picture, wording="all")
            return resized(scene, (grid[1] * CELL, grid[0] * CELL))
        off = (rng.randint(-15, 15), rng.randint(-15, 15)) if rng.random() < 0.5 else (0, 0)
        size = (max(128, grid[1] * CELL + off[0]), max(128, grid[0] * CELL + off[1]))
        seed = split_seed(split, index)  # type: ignore[arg-type]
        if kind[0] == "clips":
            return draw_clip(seed, kind[1], size, frames, varied)
        return draw_scene(kind[0], seed, kind[1], size, varied)

    def put_together(
        self, scenes: list[Scene], kinds: list[str], grid: tuple[int, int], rng: random.Random, most: int
    ) -> dict[str, Any]:
        """Tensors of scenes: pictures of nearly one size, words in boxes, questions of the kind first."""
        films = [scene.frames if isinstance(scene, Clip) else (scene.picture,) for scene in scenes]
        sizes = np.array([film[0].size for film in films])  # [B, 2]
        width, height = sizes.max(axis=0)
        pictures = np.zeros((len(scenes), len(films[0]), height, width, 3), dtype=np.uint8)
        groups = (len(films[0]) + 1) // 2
        boxes: list[Box] = []
        words: list[int] = []
        owners: list[int] = []
        lines = []
        for row, (scene, film, kind) in enumerate(zip(scenes, films, kinds, strict=True)):
            for number, frame in enumerate(film):
                pictures[row, number, : frame.height, : frame.width] = np.asarray(frame)
                things = scene.frame_things[number] if isinstance(scene, Clip) else scene.things
                found, named = named_boxes(things)
                boxes, words = boxes + found, words + named
                owners += [row * groups + number // 2] * len(found)
            wanted = [question for question in scene.questions if question.kind == kind]
            others = [question for question in scene.questions if question.kind != kind]
            rng.shuffle(wanted)
            rng.shuffle(others)
            asked = wanted[:1] if most == 1 else (wanted[: most - 3] + others + wanted[most - 3 :])[:most]
            lines.append([self._turn(question.text, question.answer) for question in asked])
        clip = len(films[0]) > 1
        opening, positions = self.opening(grid, groups, scenes[0].fps if isinstance(scenes[0], Clip) else 0.0)
        return {
            "pictures": torch.from_numpy(pictures),
            "sizes": torch.from_numpy(sizes).float(),
            "boxes": torch.tensor(boxes, dtype=torch.float32).view(-1, 4),
            "word": torch.tensor(words, dtype=torch.int64),
            "owner": torch.tensor(owners, dtype=torch.int64),
            "images": len(scenes) * groups,
            "groups": groups,
            "kinds": kinds,
            "grid": grid,
            "opening": opening,
            "positions": positions,
            "visual": (opening == (self.video if clip else self.image)).nonzero()[:, 0],
            **self._collate(lines),
        }

    def opening(self, grid: tuple[int, int], groups: int, fps: float) -> tuple[Tensor, Tensor]:
        """Ids `[L0]` of all before the question, and their positions `[3, L0]`; with the times of a clip's frames."""
        height, width = grid
        row = np.arange(height).repeat(width)
        column = np.tile(np.arange(width), height)
        ids, places, at = [*self.begin], [np.tile(np.arange(len(self.begin)), (3, 1))], len(self.begin)
        for group in range(groups):
            time = f"<{(4 * group + 1) / 2 / fps:.1f} seconds>" if fps else ""
            before = [*self.encode(time), self.before]
            seen = [self.video if fps else self.image] * (height * width)
            places.append(np.tile(np.arange(len(before)), (3, 1)) + at)
            at += len(before)
            places.append(np.stack([np.zeros_like(row), row, column]) + at)
            at += max(height, width)
            places.append(np.full((3, 1), at))
            at += 1
            ids += [*before, *seen, self.after]
        return torch.tensor(ids), torch.from_numpy(np.concatenate(places, axis=1))

    def _turn(self, question: str, answer: str) -> tuple[list[int], int]:
        """Ids from the question to the end of the answer, and where the answer begins."""
        asked = [*self.encode(question), *self.between]
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
