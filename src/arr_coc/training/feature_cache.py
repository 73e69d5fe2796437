"""What a frozen model sees, computed once and kept on disk, so that an epoch costs seconds.

A directory of shards, each a safetensors file that is written aside and renamed: work that was interrupted goes on
where it stopped. A picture's tokens and texture are kept once, however many questions are asked about it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from arr_coc.config import Grid, cell_count
from arr_coc.data.boxes import Box, cells_inside
from arr_coc.data.example import Example, MissingPicture, group_by_picture
from arr_coc.data.gaze_maps import read_map
from arr_coc.families.family import open_family
from arr_coc.inference.messages import encode_text
from arr_coc.realizing import ARRCOCLayer
from arr_coc.runtime.atomic_files import set_aside, write_aside
from arr_coc.training.encoding import PictureEncoder
from arr_coc.training.teacher import Looked, Teacher

FORMAT = 5  # to be raised when the same source gives other features or targets
SHARD = 64  # pictures
INDEX = "index.json"
MOST_SKIPPED = 0.1  # of the pictures
# One cell beside the boxes, two cells, the background, lookalikes; distractors are worth nothing.
BESIDE, NEAR, BACKGROUND, LOOKALIKE = 0.45, 0.35, 0.2, 0.1

logger = logging.getLogger(__name__)


class Batch(NamedTuple):
    """Questions about pictures of one size, as the layer takes them; with gaze, cells may be finer than tokens."""

    tokens: Tensor  # [B, N, D]
    texture: Tensor  # [B, C, h, w]
    words: Tensor  # [B, Q, D]
    word_mask: Tensor  # [B, Q]
    target: Tensor  # [B, h * w]
    grid: Grid  # of the tokens
    attended: Tensor | None = None  # [B, h * w], if the model was asked


def cache_directory() -> Path:
    """Where features are kept between runs: `ARR_COC_CACHE`, or below the user's cache directory."""
    given = os.environ.get("ARR_COC_CACHE")
    return Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "arr-coc"


@torch.no_grad()
def write_features(
    directory: str | Path,
    model: Any,
    processor: Any,
    layer: ARRCOCLayer,
    examples: Iterable[Example],
    *,
    query_layers: int = 0,
    gaze: bool = False,
    progress: Callable[[int], None] | None = None,
    teacher: Teacher | None = None,
) -> None:
    """Encode pictures and questions into a directory; shards that are there are taken as they are.

    Args:
        directory (`str` or `Path`): made if need be.
        model (`PreTrainedModel`), processor (`ProcessorMixin`): the frozen base.
        layer (`ARRCOCLayer`): makes the texture; its weights do not matter.
        examples (`Iterable[Example]`): always the same in the same order; a picture is encoded once for all that follow
            each other. What cannot be read is named, and refused when it is more than one picture in ten.
        query_layers (`int`, *optional*, defaults to 0): as in [`~arr_coc.prepare`].
        gaze (`bool`, *optional*, defaults to `False`): as mode `"saccade"` sees them: tokens of the gestalt, texture
            and targets of the windows.
        progress (`Callable`, *optional*): told how many pictures were done.
        teacher (`Teacher`, *optional*): says where the model looks. What it says of pooled pictures is kept too; what
            it says of whole ones takes the place of the examples' boxes and maps.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    encode = PictureEncoder(open_family(model), processor, layer, gaze)
    stream, number, done = group_by_picture(examples), 0, 0
    skipped: list[str] = []
    while groups := list(islice(stream, SHARD)):
        path = directory / f"{number:05}.safetensors"
        if not path.exists():
            _write_shard(path, encode, groups, query_layers, teacher)
        with safe_open(path, "pt") as file:
            skipped += json.loads(file.metadata()["skipped"])
        number, done = number + 1, done + len(groups)
        if progress is not None:
            progress(done)
    if skipped:
        message = f"{len(skipped)} of {done} pictures cannot be read, the first is {skipped[0]}"
        if len(skipped) > MOST_SKIPPED * done:
            raise ValueError(message)
        logger.warning(message)
    write_aside(directory / INDEX, json.dumps({"shards": number, "pictures": done}) + "\n")


def _write_shard(
    path: Path,
    encode: PictureEncoder,
    groups: list[list[Example]],
    query_layers: int,
    teacher: Teacher | None,
) -> None:
    family, processor = encode.family, encode.processor
    tokens, textures, targets, index, asked, kinds, ids = [], [], [], [], [], [], []
    grids: list[Grid] = []
    cells: list[Grid] = []
    rows: list[Tensor] = []
    heard: list[Tensor] = []  # where the model looks at pooled pictures
    places: dict[int, int] = {}  # of words that are the same everywhere
    skipped: list[str] = []
    for group in groups:
        try:
            picture = group[0].picture
            encoded, looked = encode(picture), list[Looked]()
            group = [example for example in group if encode_text(processor, example.question)]
            if teacher is not None:
                looked = teacher(picture, [example.question for example in group])
            wanted = [place.whole for place in looked if place.whole is not None]
            if not wanted:
                wanted = [make_target(example, encoded.cells, encoded.reach) for example in group]
        except MissingPicture as error:
            skipped.append(str(error))
            continue
        tokens.append(encoded.tokens.half())
        textures.append(encoded.texture.half())
        for example, target in zip(group, wanted, strict=True):
            words = torch.tensor(encode_text(processor, example.question), dtype=torch.long)
            embedded = family.embed_words(words.to(family.target.device), query_layers).half().cpu()
            for word, row in zip(words.tolist(), embedded, strict=True):
                known = places.get(word) if query_layers == 0 else None
                if known is None:
                    known = places[word] = len(rows)
                    rows.append(row)
                index.append(known)
            targets.append(_as_bytes(target))
            asked.append((len(grids), len(words)))
            kinds.append(example.kind)
            ids.append(example.id)
        heard += [_as_bytes(place.pooled) for place in looked if place.pooled is not None]
        grids.append(encoded.grid)
        cells.append(encoded.cells)
    names = sorted(set(kinds))
    content = {
        "tokens": torch.cat(tokens) if tokens else torch.zeros(0, 1),
        "texture": torch.cat(textures) if textures else torch.zeros(0, 1),
        "grids": torch.tensor(grids).view(-1, 3),
        "cells": torch.tensor(cells).view(-1, 3),
        "words": torch.stack(rows) if rows else torch.zeros(0, 1),
        "word_index": torch.tensor(index, dtype=torch.long),
        "targets": torch.cat(targets) if targets else torch.zeros(0, dtype=torch.uint8),
        "asked": torch.tensor(asked, dtype=torch.long).view(-1, 2),  # picture, number of words
        "kinds": torch.tensor([names.index(kind) for kind in kinds], dtype=torch.long),
    }
    if heard:
        content["heard"] = torch.cat(heard)
    about = {"kinds": json.dumps(names), "skipped": json.dumps(skipped), "ids": json.dumps(ids)}
    with set_aside(path) as aside:
        save_file({name: value.contiguous() for name, value in content.items()}, aside, about)


def _as_bytes(values: Tensor) -> Tensor:
    """A map in [0, 1] as bytes `[N]`."""
    return (values * 255).round().to(torch.uint8).flatten()


def make_target(example: Example, grid: Grid, reach: tuple[float, float] = (1.0, 1.0)) -> Tensor:
    """How relevant each cell should be, `[h, w]` in [0, 1]: boxes, around them, background, lookalikes, distractors.

    A budget is larger than most boxes. What fills it first is what lies around them: without the cell to its left a
    model does not see where a word begins. Last comes what was not asked for.

    Args:
        example (`Example`): with boxes, or with a mask, which is the target itself; with neither, what is asked for is
            not there, and nothing is relevant.
        grid (`Grid`): of the cells.
        reach (`tuple[float, float]`, *optional*): shares of the grid's width and height that the picture fills.
    """
    if example.mask is not None:
        return torch.from_numpy(read_map(example.mask, grid[1], grid[2]))
    boxes, distractors, lookalikes = (
        _within(part, reach) for part in (example.boxes, example.distractors, example.lookalikes)
    )
    inside = cells_inside(boxes, grid[1], grid[2]).float()
    if not boxes:
        return inside
    beside = _grown(inside)
    apart = cells_inside([box for box in distractors if not _meets(box, boxes)], grid[1], grid[2])
    around = torch.where(beside > 0, BESIDE, torch.where(_grown(beside) > 0, NEAR, BACKGROUND))
    around = around.masked_fill(cells_inside(lookalikes, grid[1], grid[2]), LOOKALIKE)
    return torch.where(inside > 0, 1.0, around.masked_fill(apart, 0.0))


def _within(boxes: Sequence[Box], reach: tuple[float, float]) -> tuple[Box, ...]:
    """Boxes as shares of a grid that the picture does not fill."""
    across, down = reach
    return tuple((left * across, top * down, right * across, bottom * down) for left, top, right, bottom in boxes)


def _grown(cells: Tensor) -> Tensor:
    """Cells `[h, w]` and all around them."""
    return F.max_pool2d(cells[None], 3, stride=1, padding=1)[0]


def _meets(box: Box, boxes: Sequence[Box]) -> bool:
    """Whether a box is a part of others, or has a part of them: the letters of an asked text are no other things."""
    for left, top, right, bottom in boxes:
        across = min(box[2], right) - max(box[0], left)
        down = min(box[3], bottom) - max(box[1], top)
        smaller = min((box[2] - box[0]) * (box[3] - box[1]), (right - left) * (bottom - top))
        if across > 0 and down > 0 and across * down > 0.3 * smaller:
            return True
    return False


@dataclass(frozen=True)
class _Place:
    """Where a question lies in its shard."""

    shard: int
    picture: int
    first_token: int
    first_cell: int
    first_word: int
    words: int
    first_target: int
    kind: str
    id: str


class Features:
    """Questions and pictures that [`write_features`] wrote, by number.

    Args:
        directories (`str` or `Path`): one or several; all must be complete.
    """

    def __init__(self, *directories: str | Path) -> None:
        self.shards: list[dict[str, Tensor]] = []
        self.places: list[_Place] = []
        self.grids: list[Grid] = []  # of the tokens
        self.cells: list[Grid] = []  # of texture and targets
        for directory in map(Path, directories):
            if not (directory / INDEX).is_file():
                raise ValueError(f"{directory} has no features, or they are not complete; write them first")
            for number in range(json.loads((directory / INDEX).read_text())["shards"]):
                self._add(directory / f"{number:05}.safetensors")
        if not self.places:
            raise ValueError(f"there is no question in {', '.join(map(str, directories))}")

    def _add(self, path: Path) -> None:
        with safe_open(path, "pt") as file:
            names, ids = (json.loads(file.metadata()[name]) for name in ("kinds", "ids"))
        shard = load_file(path)
        shard.setdefault("cells", shard["grids"])
        firsts, first_cells = (
            (counts.cumsum(0) - counts).tolist() for counts in (shard[name].prod(dim=1) for name in ("grids", "cells"))
        )
        word, target = 0, 0
        asked = zip(shard["asked"].tolist(), shard["kinds"].tolist(), ids, strict=True)
        for (picture, words), kind, name in asked:
            first = (firsts[picture], first_cells[picture])
            place = _Place(len(self.shards), picture, *first, word, words, target, names[kind], name)
            self.places.append(place)
            t, h, w = shard["cells"][picture].tolist()
            frames, rows, columns = shard["grids"][picture].tolist()
            self.grids.append((frames, rows, columns))
            self.cells.append((t, h, w))
            word, target = word + words, target + t * h * w
        self.shards.append(shard)

    def __len__(self) -> int:
        return len(self.places)

    def batch(self, numbers: list[int], device: torch.device | str = "cpu") -> Batch:
        """Questions of one grid, put together."""
        [(grid, cells)] = {(self.grids[number], self.cells[number]) for number in numbers}
        count, amount = cell_count(grid), cell_count(cells)
        tokens, texture, words, target, heard = [], [], [], [], []
        for number in numbers:
            place = self.places[number]
            shard = self.shards[place.shard]
            tokens.append(shard["tokens"][place.first_token : place.first_token + count])
            rows = shard["texture"][place.first_cell : place.first_cell + amount]  # [h * w, C]
            texture.append(rows.mT.reshape(-1, cells[1], cells[2]))  # [C, h, w]
            words.append(shard["words"][shard["word_index"][place.first_word : place.first_word + place.words]])
            target.append(shard["targets"][place.first_target : place.first_target + amount])
            if "heard" in shard:
                heard.append(shard["heard"][place.first_target : place.first_target + amount])
        mask = pad_sequence([torch.ones(len(row), dtype=torch.bool) for row in words], batch_first=True)
        return Batch(
            torch.stack(tokens).to(device).float(),
            torch.stack(texture).to(device).float(),
            pad_sequence(words, batch_first=True).to(device).float(),
            mask.to(device),
            torch.stack(target).to(device).float() / 255,
            grid,
            # of which the layer takes the root
            (torch.stack(heard).to(device).float() / 255).square() if heard else None,
        )


def weights_key(model: Any) -> str:
    """A short name for the weights of a model; every byte of them is read, so ask once."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


def features_key(weights: str, processor: Any, layer: ARRCOCLayer, source: str, *parts: object) -> str:
    """A short name for all that decides the features of a source: another one means they are made again.

    Args:
        weights (`str`): of the model, from [`weights_key`].
        processor (`ProcessorMixin`), layer (`ARRCOCLayer`): as in [`write_features`].
        source (`str`): of a file or folder, size and time of what describes it count too.
        parts: whatever else decides, such as the number of samples.
    """
    path = Path(source)
    files = sorted(path.glob("instances*")) if path.is_dir() else [path] if path.is_file() else []
    place = str(path.resolve()) if files else source
    states = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    config = replace(layer.config, base_model_name_or_path=None, base_model_edition=None)
    return _digest((FORMAT, weights, processor.image_processor.to_json_string(), config, place, states, parts))


def _digest(content: object) -> str:
    return hashlib.sha256(repr(content).encode()).hexdigest()[:16]
