"""The loop that every stage shares: steps, log, checkpoints, resuming."""

from __future__ import annotations

import json
import math
import platform
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from arr_coc._version import __version__
from arr_coc.config import ARRCOCConfig
from arr_coc.realizing import ARRCOCLayer
from arr_coc.runtime.atomic_files import write_aside
from arr_coc.training.checkpoints import list_checkpoints, read_checkpoint, write_checkpoint
from arr_coc.training.losses import total

Say = Callable[[int, dict[str, float]], None]


@dataclass(frozen=True)
class LoopConfig:
    """How long, how fast, how often.

    Args:
        steps (`int`, *optional*, defaults to 1000): of the optimizer.
        batch_size (`int`, *optional*, defaults to 32): questions of a step in one process.
        rate (`float`, *optional*, defaults to 3e-3): highest learning rate; it falls with a cosine.
        warm_up (`int`, *optional*, defaults to 50): steps until it is reached.
        seed (`int`, *optional*, defaults to 0): of the order, and of everything drawn at random.
        save_every (`int`, *optional*, defaults to 200): steps between checkpoints.
        log_every (`int`, *optional*, defaults to 10): steps between lines of the log.
    """

    steps: int = 1000
    batch_size: int = 32
    rate: float = 3e-3
    warm_up: int = 50
    seed: int = 0
    save_every: int = 200
    log_every: int = 10

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "save_every", "log_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}")
        if not 0 < self.rate < 1:
            raise ValueError(f"`rate` must lie between 0 and 1, got {self.rate}")

    def rate_at(self, step: int) -> float:
        """The learning rate of a step."""
        cosine = 0.5 * (1 + math.cos(math.pi * step / self.steps))
        return self.rate * min(1.0, (step + 1) / max(1, self.warm_up)) * (0.02 + 0.98 * cosine)


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
    if device not in ("cpu", "cuda"):
        raise ValueError(f"`device` must be cpu or cuda, got {device!r}; CUDA_VISIBLE_DEVICES chooses among several")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("there is no CUDA device; use cpu")
    # what only decides how many tokens are kept gets no gradient from a map
    unused = DistributedDataParallelKwargs(find_unused_parameters=True)
    patient = InitProcessGroupKwargs(timeout=timedelta(hours=12))  # one process encodes while the others wait
    return Accelerator(cpu=device == "cpu", kwargs_handlers=[unused, patient])


def open_layer(model: Any, start: str | Path | None) -> ARRCOCLayer:
    """The layer that learns: untrained, or one to go on from, which must fit the model."""
    config = ARRCOCConfig.for_model(model)
    if start is None:
        return ARRCOCLayer(config)
    layer = ARRCOCLayer.from_pretrained(start)
    for name in ("hidden_size", "cell_pixels"):
        if getattr(layer.config, name) != getattr(config, name):
            given, wanted = getattr(layer.config, name), getattr(config, name)
            raise ValueError(f"{start} was made for a model with {name} {given}, this one has {wanted}")
    layer.config = replace(layer.config, base_model_name_or_path=config.base_model_name_or_path)
    return layer.train()


def check_run(out: Path, config: LoopConfig, about: dict[str, Any], resume: bool) -> None:
    """Refuse to begin where a run was begun, and to go on with other settings than it was begun with."""
    if not list_checkpoints(out):
        return
    if not resume:
        raise ValueError(f"{out} holds a run that was begun; go on with --resume, or give another --out")
    before = json.loads((out / "run.json").read_text(encoding="utf-8"))
    for name, value in {**asdict(config), **about}.items():
        if name not in ("save_every", "log_every") and before.get(name) != value:
            raise ValueError(f"{out} was begun with {name} {before.get(name)!r}, not {value!r}; go on with the same")


def train(
    out: str | Path,
    task: nn.Module,
    layer: ARRCOCLayer,
    batch_at: Callable[[int], Any],
    config: LoopConfig,
    *,
    accelerator: Any,
    resume: bool = False,
    about: dict[str, Any] | None = None,
    say: Say | None = None,
) -> Path:
    """Train a task and save its layer; Ctrl-C saves a checkpoint first.

    Args:
        out (`str` or `Path`): directory of the run: the selector, `run.json`, `log.jsonl`, checkpoints.
        task (`nn.Module`): from a batch to its losses and measures.
        layer (`ARRCOCLayer`): the part of it that is kept.
        batch_at (`Callable`): the batch of a step, for this process.
        config (`LoopConfig`): see there.
        accelerator (`accelerate.Accelerator`): see [`open_accelerator`].
        resume (`bool`, *optional*, defaults to `False`): go on from the last checkpoint.
        about (`dict`, *optional*): recorded in `run.json`.
        say (`Callable`, *optional*): told the step and its losses and measures.
    """
    out = Path(out)
    first = accelerator.is_main_process
    trained = [parameter for parameter in task.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=config.rate, weight_decay=0.01)
    begun = list_checkpoints(out) if resume else []
    if first:
        out.mkdir(parents=True, exist_ok=True)
    step = read_checkpoint(begun[-1], task, optimizer) if begun else 0
    wrapped, optimizer = accelerator.prepare(task, optimizer)
    wrapped.train()
    if first:
        processes = {"processes": accelerator.num_processes}
        settings = {**asdict(config), **(about or {}), **processes, **environment()}
        write_aside(out / "run.json", json.dumps(settings, indent=1) + "\n")
        _cut_log(out / "log.jsonl", step)

    def save() -> None:
        if first:
            write_checkpoint(out, step, task, layer, getattr(optimizer, "optimizer", optimizer))

    last, asked = time.perf_counter(), 0
    with _Interrupts() as interrupts:
        while step < config.steps:
            if interrupts.came:  # between steps, so that what is saved is whole
                save()
                raise KeyboardInterrupt
            for group in optimizer.param_groups:
                group["lr"] = config.rate_at(step)
            losses, measures = wrapped(batch_at(step))
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


def environment() -> dict[str, Any]:
    """What a run depends on beside its settings."""
    return {
        "arr_coc": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "revision": find_revision(),
    }


def find_revision() -> str | None:
    """The git revision of the package's source, where it lies in a repository."""
    try:
        found = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


def _log(path: Path, step: int, facts: dict[str, float]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step, **{name: round(value, 6) for name, value in facts.items()}}) + "\n")


def _cut_log(path: Path, step: int) -> None:
    """Drop lines of steps that will be taken again."""
    if path.exists():
        lines = path.read_text(encoding="utf-8").splitlines()
        rows = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= step]
        write_aside(path, "".join(f"{line}\n" for line in rows))
