"""Some rows of a batch: those whose answers are not sure yet are read on, the others are not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from arr_coc.families.family import Family, Inputs, split_pictures
from arr_coc.inference.run import Run

# What a caller passes for all rows of a batch, and perhaps tells rows apart by their places.
_OF_ALL_ROWS = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "streamer")


def can_take_rows(arguments: Inputs) -> bool:
    """Whether a call of `generate` can be made for some rows of its batch alone."""
    return len(arguments["input_ids"]) > 1 and not any(arguments.get(name) for name in _OF_ALL_ROWS)


def take_rows(family: Family, arguments: Inputs, run: Run, rows: Sequence[int]) -> dict[str, Any]:
    """Arguments of `generate` for some rows of a batch; the run's shorter prompt is cut to them too.

    Args:
        family (`Family`): the opened model.
        arguments (`Mapping`): of `generate`, for all rows.
        run (`Run`): has the shorter prompt of all rows.
        rows (`Sequence[int]`): ascending.
    """
    if run.holding is None or run.prompt is None or len(rows) == len(arguments["input_ids"]):
        return dict(arguments)
    held, spans = run.holding, run.prompt.spans
    chosen = torch.tensor(rows, device=held.mask.device)
    run.rows, run.holding = list(rows), held.take_rows(chosen)
    features = {}
    for kind, output in run.inputs["mm_encoder_outputs"].items():
        own = [span.row for span in spans if span.kind == kind]
        pictures = [part for row, part in zip(own, split_pictures(output), strict=True) if row in rows]
        if pictures:
            features[kind] = family.join(pictures)
    run.inputs = {
        **run.inputs,
        "input_ids": run.holding.short_ids,
        "attention_mask": run.holding.mask,
        **family.place(run.holding.mask, run.holding.positions, run.holding.next_position),
        "mm_encoder_outputs": features,
    }
    ids: Tensor = arguments["input_ids"]
    cut = {"input_ids": ids[chosen.to(ids.device)]}
    if arguments.get("attention_mask") is not None:
        cut["attention_mask"] = arguments["attention_mask"][chosen.to(ids.device)]
    return {**arguments, **cut}
