"""Do a model's tokens know where things are? For photographs with boxes, by the cosine of tokens and words."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

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


@torch.no_grad()
def where_auc(model: Any, processor: Any, photos: list[Photo], least: int = 5) -> dict[str, float]:
    """By class, the mean area under the curve over its photographs; classes in fewer than `least` are left out."""
    family = open_family(model)
    table = model.get_input_embeddings().weight
    found: dict[str, list[float]] = defaultdict(list)
    for photo in photos:
        with Image.open(photo.path) as file:
            inputs = processor.image_processor(images=[file.convert("RGB")], return_tensors="pt").to(model.device)
        tokens = family.encode(inputs, "image").features.float()  # [N, D]
        _, rows, columns = family.grids(inputs, "image")[0]
        for name in {name for name, _ in photo.things}:
            boxes = [box for other, box in photo.things if other == name]
            inside = under_boxes(boxes, photo.size, (rows, columns))
            if inside.all():
                continue
            ids = processor.tokenizer.encode(name, add_special_tokens=False)
            word = table[torch.tensor(ids, device=table.device)].float().mean(dim=0)
            scores = F.cosine_similarity(tokens, word[None], dim=-1).cpu().numpy()
            found[name].append(area_under_curve(scores, inside))
    return {name: round(float(np.mean(values)), 4) for name, values in sorted(found.items()) if len(values) >= least}
