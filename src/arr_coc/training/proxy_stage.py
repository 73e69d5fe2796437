"""`arr-coc train --stage proxy`: open the base, write its features once, train a layer on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from arr_coc.data.sources import GAZE, open_places, sizes_of
from arr_coc.inference.load import load_model, load_processor
from arr_coc.training.feature_cache import (
    INDEX,
    Batch,
    Features,
    cache_directory,
    features_key,
    weights_key,
    write_features,
)
from arr_coc.training.proxy import ProxyTask
from arr_coc.training.schedule import Schedule, Source
from arr_coc.training.trainer import LoopConfig, Say, check_run, open_accelerator, open_layer, train


def train_proxy(
    data: Sequence[str],
    out: str | Path,
    base: str = "embedded",
    config: LoopConfig | None = None,
    *,
    start: str | Path | None = None,
    samples: int = 2000,
    cache: str | Path | None = None,
    query_layers: int = 0,
    device: str = "cpu",
    resume: bool = False,
    say: Say | None = None,
    progress: Callable[[str, int], None] | None = None,
) -> Path:
    """Train a selector to find what boxes or maps mark, for a frozen model.

    Args:
        data (`Sequence[str]`): sources, each with an equal share of the steps; see
            [`~arr_coc.data.sources.open_places`].
        out (`str` or `Path`): directory of the run.
        base (`str`, *optional*, defaults to `"embedded"`): directory or Hub id of the model.
        config (`LoopConfig`, *optional*): see there.
        start (`str` or `Path`, *optional*): a selector to go on from; by default an untrained layer.
        samples (`int`, *optional*, defaults to 2000): samples of each world.
        cache (`str` or `Path`, *optional*): where features are kept; see [`cache_directory`].
        query_layers (`int`, *optional*, defaults to 0): as in [`~arr_coc.prepare`].
        device (`str`, *optional*, defaults to `"cpu"`): `"cpu"` or `"cuda"`.
        resume (`bool`, *optional*, defaults to `False`): go on from the last checkpoint of `out`.
        say, progress (`Callable`, *optional*): told of steps, and of pictures that were encoded.
    """
    config = config or LoopConfig()
    if not data:
        raise ValueError("`data` is empty; name at least one source")
    about = {
        "stage": "proxy", "data": list(data), "base": base, "start": None if start is None else str(start),
        "samples": samples, "query_layers": query_layers,
    }  # fmt: skip
    check_run(Path(out), config, about, resume)
    accelerator = open_accelerator(device)
    model: Any = load_model(base, dtype=torch.float32).to(accelerator.device)
    layer = open_layer(model, start).to(accelerator.device)
    processor = load_processor(base)
    folder = Path(cache or cache_directory()) / "features"
    size = config.batch_size * accelerator.num_processes
    weights, sources = weights_key(model), []
    opened: dict[str, Features] = {}  # one that is named twice is read once
    for name in data:
        shown = open_places(name, samples, config.seed)
        gaze = name.startswith(GAZE)
        parts = (samples, config.seed, query_layers, *([GAZE] if gaze else []), sizes_of(name))
        key = features_key(weights, processor, layer, name.removeprefix(GAZE), *parts)
        with accelerator.main_process_first():
            if not (folder / key / INDEX).exists():
                write_features(
                    folder / key, model, processor, layer, shown, query_layers=query_layers, gaze=gaze,
                    progress=None if progress is None else lambda done, name=name: progress(name, done),  # type: ignore[misc]
                )  # fmt: skip
        if key not in opened:
            opened[key] = Features(folder / key)
        sources.append(Source(opened[key], size, config.seed))
    del model
    schedule = Schedule(sources, [1.0] * len(sources), config.steps, config.seed)

    def batch_at(step: int) -> Batch:
        features, numbers = schedule.at(step)
        return features.batch(numbers[accelerator.process_index :: accelerator.num_processes], accelerator.device)

    task = ProxyTask(layer)
    return train(
        out, task, layer, batch_at, config, accelerator=accelerator, resume=resume, about=about, say=say
    )  # fmt: skip
