"""Do a model's tokens know where things are? For photographs with boxes, by two rules that choose tokens for a name.

The cosine of tokens and words needs no training, and finds what the model was taught to put side by side. A linear
probe, fitted on other photographs, finds whatever the tokens know.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from arr_coc.data.boxes import Box
from arr_coc.data.coco import Photo
from arr_coc.families.family import open_family


def area_under_curve(scores: np.ndarray, inside: np.ndarray) -> float:
    """Chance that a score from inside is above one from outside; ties count half."""
    order = np.argsort(scores, kind="stable")
    ranks = np.empty(len(scores))
    ranks[order] = np.arange(1, len(scores) + 1)
    for value in np.unique(scores[np.diff(np.sort(scores), prepend=np.nan) == 0]):
        ranks[scores == value] = ranks[scores == value].mean()
    wins = ranks[inside].sum() - inside.sum() * (inside.sum() + 1) / 2
    return float(wins / (inside.sum() * (~inside).sum()))


def under_boxes(boxes: list[Box], size: tuple[int, int], grid: tuple[int, int]) -> np.ndarray:
    """Which tokens `[h * w]` have their middle in a box, or hold the middle of one."""
    rows, columns = grid
    y, x = (np.arange(rows) + 0.5) / rows * size[1], (np.arange(columns) + 0.5) / columns * size[0]
    found = np.zeros((rows, columns), dtype=bool)
    for left, top, right, bottom in boxes:
        found |= ((y >= top) & (y <= bottom))[:, None] & ((x >= left) & (x <= right))[None]
        row = min(rows - 1, int((top + bottom) / 2 / size[1] * rows))
        found[row, min(columns - 1, int((left + right) / 2 / size[0] * columns))] = True
    return found.reshape(-1)


class Seen(NamedTuple):
    """A photograph's tokens `[N, D]`, and for the name of each thing which of them lie under it `[N]`."""

    tokens: Tensor
    under: dict[str, np.ndarray]


@torch.no_grad()
def see_photos(model: Any, processor: Any, photos: list[Photo]) -> list[Seen]:
    """Encode photographs as they are."""
    family, found = open_family(model), []
    for photo in photos:
        with Image.open(photo.path) as file:
            inputs = processor.image_processor(images=[file.convert("RGB")], return_tensors="pt").to(model.device)
        tokens = family.encode(inputs, "image").features.float()
        _, rows, columns = family.grids(inputs, "image")[0]
        boxes: dict[str, list[Box]] = defaultdict(list)
        for name, box in photo.things:
            boxes[name].append(box)
        found.append(
            Seen(tokens, {name: under_boxes(kept, photo.size, (rows, columns)) for name, kept in boxes.items()})
        )
    return found


@torch.no_grad()
def where_auc(model: Any, processor: Any, photos: list[Photo], least: int = 5) -> dict[str, float]:
    """By class, the mean area under the curve of the cosine; classes in fewer than `least` photographs are left out."""
    table = model.get_input_embeddings().weight

    def near(seen: Seen, name: str) -> Tensor:
        ids = processor.tokenizer.encode(name, add_special_tokens=False)
        word = table[torch.tensor(ids, device=table.device)].float().mean(dim=0)
        return F.cosine_similarity(seen.tokens, word[None], dim=-1)

    return _mean_by_class(see_photos(model, processor, photos), near, least)


@torch.no_grad()
def probe_auc(model: Any, processor: Any, photos: list[Photo], others: list[Photo], least: int = 5) -> dict[str, float]:
    """The same of a linear probe: ridge regression on other photographs."""
    learned, held = (see_photos(model, processor, shown) for shown in (others, photos))
    names = sorted({name for one in learned for name in one.under})
    features = torch.cat([one.tokens for one in learned]).double()  # [n, D]
    wanted = torch.zeros(len(features), len(names), dtype=torch.float64, device=features.device)
    begin = 0
    for one in learned:
        for name, under in one.under.items():
            wanted[begin : begin + len(under), names.index(name)] = torch.from_numpy(under).to(wanted)
        begin += len(one.tokens)
    middle, spread = features.mean(dim=0), features.std(dim=0).clamp(min=1e-6)
    features = (features - middle) / spread
    gram = features.T @ features + 0.01 * len(features) * torch.eye(features.shape[1]).to(features)
    weights = torch.linalg.solve(gram, features.T @ (wanted - wanted.mean(dim=0)))  # [D, classes]

    def score(one: Seen, name: str) -> Tensor:
        return ((one.tokens.double() - middle) / spread) @ weights[:, names.index(name)]

    known = [Seen(one.tokens, {name: under for name, under in one.under.items() if name in names}) for one in held]
    return _mean_by_class(known, score, least)


def _mean_by_class(seen: list[Seen], score: Callable[[Seen, str], Tensor], least: int) -> dict[str, float]:
    found: dict[str, list[float]] = defaultdict(list)
    for one in seen:
        for name, under in one.under.items():
            if not under.all():
                found[name].append(area_under_curve(score(one, name).cpu().numpy(), under))
    return {name: round(float(np.mean(values)), 4) for name, values in sorted(found.items()) if len(values) >= least}
