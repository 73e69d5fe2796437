"""Stage `proxy`: relevance from boxes or maps. No language model runs; the encoder's tokens come from disk."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from arr_coc.balancing import Judgement
from arr_coc.data.sources import GAZE, open_pictures, open_places, sizes_of
from arr_coc.evaluation.metrics import overlap
from arr_coc.inference.load import load_model, load_processor
from arr_coc.realizing import ARRCOCLayer
from arr_coc.training.config import TrainConfig
from arr_coc.training.feature_cache import (
    INDEX,
    Batch,
    Features,
    cache_directory,
    features_key,
    weights_key,
    write_features,
)
from arr_coc.training.losses import proxy_losses
from arr_coc.training.schedule import Schedule, Source
from arr_coc.training.stage import Stage, open_layer
from arr_coc.training.teacher import Teacher

Progress = Callable[[str, int], None]


class ProxyTask(nn.Module):
    """The layer with what only training needs.

    Args:
        layer (`ARRCOCLayer`): learns.
    """

    def __init__(self, layer: ARRCOCLayer) -> None:
        super().__init__()
        self.layer = layer
        self.sharpness = nn.Parameter(torch.tensor(2.5))  # logarithm of
        self.threshold = nn.Parameter(torch.tensor(0.4))

    def forward(self, batch: Batch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Losses of a batch, and measures of how well it looked."""
        judged = judge_batch(self.layer, batch)
        relevance = judged.balance.relevance.flatten(1)  # [B, N]
        losses = proxy_losses(self.sharpness.exp() * (relevance - self.threshold), batch.target)
        inside = batch.target > 0.5
        present = inside.any(dim=1)
        losses["explore"] = _explore(judged.balance.tensions[:, 1], present)
        with torch.no_grad():
            overlaps = overlap(relevance, inside)
            measures = {"overlap": overlaps.sum() / present.sum().clamp(min=1)}
        return losses, measures


def judge_batch(layer: ARRCOCLayer, batch: Batch) -> Judgement:
    """What a layer makes of features that were kept."""
    with torch.autocast(batch.tokens.device.type, enabled=False):  # in float32, as the layer will choose
        texture = layer.project_again(batch.texture, batch.tokens, batch.grid)
        return layer.judge(texture, batch.tokens, batch.words, batch.grid, batch.word_mask, batch.attended)


def _explore(tension: Tensor, present: Tensor) -> Tensor:
    """A question about a place need not explore; one about something that is not there has to."""
    wanted = (~present).float()
    return nn.functional.binary_cross_entropy(tension.clamp(1e-4, 1 - 1e-4), wanted)


def open_proxy_stage(config: TrainConfig, accelerator: Any, progress: Progress | None = None) -> Stage:
    """Encode the sources of stage `proxy`, and open what was encoded; arguments as of [`open_encoded_stage`]."""
    return open_encoded_stage(config, accelerator, progress, ProxyTask)


def open_encoded_stage(
    config: TrainConfig, accelerator: Any, progress: Progress | None, make_task: Callable[[ARRCOCLayer], nn.Module]
) -> Stage:
    """Encode the sources of a stage without answers, as far as they are not in the cache, and open what was encoded.

    Args:
        config (`TrainConfig`): of the run.
        accelerator (`accelerate.Accelerator`): on whose device, and over whose processes, it runs.
        progress (`Callable`, *optional*): told the name of a source and how many of its pictures were encoded.
        make_task (`Callable`): gives the module that is trained.

    Returns:
        [`~arr_coc.training.stage.Stage`]: the base itself is needed no longer.
    """
    model: Any = load_model(config.base, dtype=torch.float32).to(accelerator.device)
    layer = open_layer(model, config.start, config.introspect).to(accelerator.device)
    processor = load_processor(config.base)
    folder = Path(config.cache or cache_directory()) / "features"
    size = config.batch_size * accelerator.num_processes
    weights, sources, distill = weights_key(model), [], config.stage == "distill"
    asks = distill or layer.default_introspect != "off"
    teacher = Teacher(model, processor, distill, layer.default_introspect) if asks else None
    opened: dict[str, Features] = {}  # one that is named twice is read once
    for name in config.data:
        examples = (open_pictures if distill else open_places)(name, config.samples, config.seed)
        gaze = name.startswith(GAZE)
        if gaze and teacher is not None:
            raise ValueError(
                f"{name} shows pictures as mode saccade does, and where the model looks is only known of whole ones; "
                f"use {name.removeprefix(GAZE)}, or another stage without introspect"
            )
        marks = [mark for mark, given in ((GAZE, gaze), ("distill", distill)) if given]
        parts = (config.samples, config.seed, config.query_layers, *marks, sizes_of(name))
        key = features_key(weights, processor, layer, name.removeprefix(GAZE), *parts)
        with accelerator.main_process_first():
            if not (folder / key / INDEX).exists():
                write_features(
                    folder / key, model, processor, layer, examples, query_layers=config.query_layers, gaze=gaze,
                    progress=None if progress is None else partial(progress, name), teacher=teacher,
                )  # fmt: skip
        if key not in opened:
            opened[key] = Features(folder / key)
        sources.append(Source(opened[key], size, config.seed))
    schedule = Schedule(sources, [1.0] * len(sources), config.steps, config.seed)

    def batch_at(step: int) -> Batch:
        features, numbers = schedule.at(step)
        return features.batch(numbers[accelerator.process_index :: accelerator.num_processes], accelerator.device)

    return Stage(make_task(layer), layer, batch_at)
