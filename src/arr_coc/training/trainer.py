"""Training a selector: opening a stage, and the loop that all share: steps, log, checkpoints, resuming."""

from __future__ import annotations

import json
import math
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from arr_coc.config import ARRCOCConfig
from arr_coc.inference.load import load_config
from arr_coc.runtime.atomic_files import write_aside
from arr_coc.runtime.hub import CONFIG_NAME
from arr_coc.runtime.machine import environment
from arr_coc.training.answers import open_answers_stage
from arr_coc.training.checkpoints import list_checkpoints, read_checkpoint, write_checkpoint
from arr_coc.training.config import TrainConfig
from arr_coc.training.distill import open_distill_stage
from arr_coc.training.losses import total
from arr_coc.training.proxy import Progress, open_proxy_stage
from arr_coc.training.stage import Stage
from arr_coc.training.trials import open_trials_stage

Say = Callable[[int, dict[str, float]], None]


def train(config: TrainConfig, say: Say | None = None, progress: Progress | None = None) -> Path:
    """Train a selector for a frozen model; Ctrl-C saves a checkpoint first.

    Args:
        config (`TrainConfig`): all settings.
        say (`Callable`, *optional*): told the step and its losses and measures.
        progress (`Callable`, *optional*): told the name of a source and how many of its pictures were encoded.

    Returns:
        `Path`: the directory of the run, which opens as a selector.

    Example:

    ```python
    >>> from arr_coc.training.config import TrainConfig
    >>> from arr_coc.training.trainer import train
    >>> config = TrainConfig(["scenes", "pages"], "runs/one", steps=5000)
    >>> train(config)  # doctest: +SKIP
    PosixPath('runs/one')

    ```
    """
    check_run(config)
    accelerator = open_accelerator(config.device)
    if config.stage == "proxy":
        stage = open_proxy_stage(config, accelerator, progress)
    elif config.stage == "distill":
        stage = open_distill_stage(config, accelerator, progress)
    elif config.stage == "trials":
        stage = open_trials_stage(config, accelerator, progress)
    else:
        stage = open_answers_stage(config, accelerator)
    return run_steps(stage, config, accelerator, say)


def open_accelerator(device: str) -> Any:
    """Accelerate, on a device or over the processes that torchrun started."""
    try:
        from accelerate import (  # type: ignore[import-untyped]
            Accelerator,
            DistributedDataParallelKwargs,
            InitProcessGroupKwargs,
        )
    except ImportError:
        raise ValueError("training needs accelerate; install arr-coc[train]") from None
    # what only decides how many tokens are kept gets no gradient from a map
    unused = DistributedDataParallelKwargs(find_unused_parameters=True)
    patient = InitProcessGroupKwargs(timeout=timedelta(hours=12))  # one process encodes while the others wait
    return Accelerator(cpu=device == "cpu", kwargs_handlers=[unused, patient])


def check_run(config: TrainConfig) -> None:
    """Refuse to begin where a run was begun, and to go on with other settings than it was begun with."""
    out = Path(config.out)
    checkpoints = list_checkpoints(out)
    if not checkpoints:
        return
    if not config.resume:
        raise ValueError(f"{out} holds a run that was begun; go on with --resume, or give another --out")
    before = json.loads((out / "run.json").read_text(encoding="utf-8"))
    for name, value in config.record().items():
        if name not in ("save_every", "log_every") and before.get(name) != value:
            raise ValueError(f"{out} was begun with {name} {before.get(name)!r}, not {value!r}; go on with the same")
    begun = ARRCOCConfig.from_json((checkpoints[-1] / CONFIG_NAME).read_text(encoding="utf-8"))
    begun.check_edition(load_config(config.base), f"the run in {out}", "give another --out")


def run_steps(stage: Stage, config: TrainConfig, accelerator: Any, say: Say | None = None) -> Path:
    """The loop: take all steps of a stage, log, save checkpoints, and save the selector at the end.

    Args:
        stage (`Stage`): what learns, from what.
        config (`TrainConfig`): all settings.
        accelerator (`accelerate.Accelerator`): see [`open_accelerator`].
        say (`Callable`, *optional*): told the step and its losses and measures.

    Returns:
        `Path`: the directory of the run.
    """
    out, task, layer = Path(config.out), stage.task, stage.layer
    first = accelerator.is_main_process
    trained = [parameter for parameter in task.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=config.highest_rate, weight_decay=0.01)
    begun = list_checkpoints(out) if config.resume else []
    if first:
        out.mkdir(parents=True, exist_ok=True)
    step = read_checkpoint(begun[-1], task, optimizer) if begun else 0
    wrapped, optimizer = accelerator.prepare(task, optimizer)
    wrapped.train()
    if first:
        processes = {"processes": accelerator.num_processes}
        settings = {**config.record(), **processes, **environment()}
        write_aside(out / "run.json", json.dumps(settings, indent=1) + "\n")
        _cut_log(out / "log.jsonl", step)

    def save() -> None:
        if first:
            write_checkpoint(out, step, stage, getattr(optimizer, "optimizer", optimizer))

    last, asked = time.perf_counter(), 0
    with _Interrupts() as interrupts:
        while step < config.steps:
            if interrupts.came:  # between steps, so that what is saved is whole
                save()
                raise KeyboardInterrupt
            for group in optimizer.param_groups:
                group["lr"] = config.rate_at(step)
            losses, measures = wrapped(stage.batch_at(step))
            loss = total(losses)
            optimizer.zero_grad(set_to_none=True)
            norm = torch.zeros_like(loss)
            if loss.requires_grad:  # not so for the estimator `none`
                accelerator.backward(loss)
                norm = accelerator.clip_grad_norm_(trained, 1.0)
            if not math.isfinite(float(loss.detach() + norm)):
                raise ValueError(_not_finite(losses, step, out))
            asked += config.batch_size * accelerator.num_processes
            if (step + 1) % config.log_every == 0 or step + 1 == config.steps or step == 0:
                values = torch.stack([loss.detach(), norm, *losses.values(), *measures.values()]).tolist()
                facts = dict(zip(["loss", "norm", *losses, *measures], values, strict=True))
                now = time.perf_counter()
                facts["per_second"], last, asked = asked / (now - last), now, 0
                if first:
                    _log(out / "log.jsonl", step + 1, facts)
                    if say is not None:
                        say(step + 1, facts)
            optimizer.step()
            step += 1
            if step % config.save_every == 0 and step < config.steps:
                save()
    accelerator.wait_for_everyone()
    save()
    if first:
        layer.save_pretrained(out)
        stage.save(out, True)
    return out


class _Interrupts:
    """Ctrl-C, to be asked for between steps; a second one is not waited for."""

    def __init__(self) -> None:
        self.came = False
        self.before: Any = None

    def __enter__(self) -> _Interrupts:
        if threading.current_thread() is threading.main_thread():
            self.before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        if self.before is not None:
            signal.signal(signal.SIGINT, self.before)

    def _note(self, *_: object) -> None:
        if self.came:
            raise KeyboardInterrupt
        self.came = True


def _not_finite(losses: dict[str, Tensor], step: int, out: Path) -> str:
    """A loss that is no number ends the run before it reaches the weights; what was good is kept."""
    values = ", ".join(f"{name} {float(value.detach()):.3g}" for name, value in losses.items())
    kept = list_checkpoints(out)
    good = f"{kept[-1]} is the last good checkpoint" if kept else "there is no checkpoint yet"
    return f"step {step + 1} is not finite ({values}); {good}; try a lower --rate"


def _log(path: Path, step: int, facts: dict[str, float]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step, **{name: round(value, 6) for name, value in facts.items()}}) + "\n")


def _cut_log(path: Path, step: int) -> None:
    """Drop lines of steps that will be taken again."""
    if path.exists():
        lines = path.read_text(encoding="utf-8").splitlines()
        rows = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= step]
        write_aside(path, "".join(f"{line}\n" for line in rows))
