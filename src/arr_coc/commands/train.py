"""`arr-coc train`: learn where to look, with a bar that shows how it goes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from arr_coc.config import EMBEDDED
from arr_coc.inference.load import quiet_loading
from arr_coc.training.answers_stage import train_answers
from arr_coc.training.proxy_stage import train_proxy
from arr_coc.training.trainer import LoopConfig


def train(stage: str, data: Sequence[str], out: Path, base: str | None, config: LoopConfig, **options: Any) -> Path:
    """Train a selector in stage `proxy`, `answers` or `hard`; options are those of the stage."""
    quiet_loading()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[facts]}"),
    )
    with Progress(*columns, console=Console(stderr=True, highlight=False)) as bar:
        steps: list[TaskID] = []
        encoding: dict[str, TaskID] = {}

        def progress(name: str, done: int) -> None:
            if name not in encoding:
                encoding[name] = bar.add_task(f"reading {name}", total=None, facts="")
            bar.update(encoding[name], completed=done)

        def say(step: int, facts: dict[str, float]) -> None:
            for task in encoding.values():
                bar.update(task, visible=False)
            if not steps:
                steps.append(bar.add_task("training", total=config.steps, facts=""))
            measured = "overlap" if stage == "proxy" else "accuracy"
            shown = f"loss {facts['loss']:.3f}  {measured} {facts[measured]:.2f}  {facts['per_second']:.0f} questions/s"
            bar.update(steps[0], completed=step, facts=shown)

        if stage == "proxy":
            return train_proxy(data, out, base or EMBEDDED, config, say=say, progress=progress, **options)
        return train_answers(data, out, base or EMBEDDED, config, hard=stage == "hard", say=say, **options)
