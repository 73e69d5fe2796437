"""Checkpoints that can be trusted: written aside and renamed, in safetensors, never pickled.

A checkpoint is a directory `checkpoint-000300` with the selector itself (and its `adapter`, with LoRA), the optimizer's
state and what only training needs. Random numbers are drawn from the seed and the step, so that there is no other state
to keep.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from arr_coc.realizing import ARRCOCLayer
from arr_coc.training.stage import Stage

STATE_NAME = "training.safetensors"
STEP_NAME = "training.json"


def write_checkpoint(out: Path, step: int, stage: Stage, optimizer: torch.optim.Optimizer, keep: int = 2) -> Path:
    """Write the state after a step; older checkpoints but the last ones are removed once it is complete.

    Args:
        out (`Path`): directory of the run.
        step (`int`): how many steps were taken.
        stage (`Stage`): all that is trained, and the layer that is kept after training.
        optimizer (`torch.optim.Optimizer`): of the task's parameters.
        keep (`int`, *optional*, defaults to 2): how many checkpoints stay.
    """
    path = out / f"checkpoint-{step:06}"
    aside = out / f".checkpoint-{os.getpid()}"
    try:
        shutil.rmtree(aside, ignore_errors=True)
        stage.layer.save_pretrained(aside)
        stage.save(aside, False)
        save_file(_state(stage.task, optimizer), aside / STATE_NAME)
        (aside / STEP_NAME).write_text(json.dumps({"step": step}) + "\n", encoding="utf-8")
        if path.exists():
            shutil.rmtree(path)
        aside.rename(path)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    for old in list_checkpoints(out)[:-keep]:
        shutil.rmtree(old)
    return path


def list_checkpoints(out: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(path for path in out.glob("checkpoint-*") if (path / STEP_NAME).is_file())


def read_checkpoint(path: Path, task: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Restore task and optimizer exactly; returns how many steps were taken."""
    saved = load_file(path / STATE_NAME)
    found = {name[5:]: value for name, value in saved.items() if name.startswith("task.")}
    # what an older version of the layer had not starts as in a new one
    added = {name: value for name, value in task.state_dict().items() if name.endswith(ARRCOCLayer.added)}
    task.load_state_dict({**added, **found})
    names = _names(task, optimizer)
    state: dict[int, dict[str, Any]] = {}
    for name, value in saved.items():
        if name.startswith("optimizer."):
            _, field, parameter = name.split(".", 2)
            state.setdefault(names.index(parameter), {})[field] = value
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    return int(json.loads((path / STEP_NAME).read_text(encoding="utf-8"))["step"])


def _state(task: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    state = {f"task.{name}": value for name, value in task.state_dict().items()}
    names = _names(task, optimizer)
    for place, fields in optimizer.state_dict()["state"].items():
        for field, value in fields.items():
            state[f"optimizer.{field}.{names[place]}"] = torch.as_tensor(value)
    return {name: value.detach().cpu().clone().contiguous() for name, value in state.items()}


def _names(task: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Names of the parameters in the optimizer's order."""
    known = {id(parameter): name for name, parameter in task.named_parameters()}
    return [known[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
