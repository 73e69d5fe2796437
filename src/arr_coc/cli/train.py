"""`arr-coc train`: train a selector for a frozen model, with a progress bar."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from arr_coc.cli.errors import one_line_errors
from arr_coc.cli.options import Device, Model, parse_introspect

if TYPE_CHECKING:
    from arr_coc.training.config import TrainConfig


def train(
    data: Annotated[
        list[str],
        typer.Option(
            help="What to learn from; may be given several times. A world or one kind of its questions (scenes, "
            "scenes/read). For proxy also a folder in COCO format, or JSON lines of referring expressions (image, "
            "expression, box) or of gaze (image, question, map); for distill any with image and question. For answers "
            "and hard also crowded, or a file of VQAv2 questions."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Directory of the run.")],
    stage: Annotated[
        str,
        typer.Option(
            help="proxy (from boxes and maps), distill (from where the model looks while it reads all tokens), answers "
            "(from what the model answers), hard (hard examples twice), or trials (how many tokens a question needs)."
        ),
    ] = "proxy",
    base: Model = None,
    start: Annotated[
        Path | None, typer.Option(help="Directory or name of the selector to start from. [default: arr-coc-untrained]")
    ] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 1000,
    batch: Annotated[int, typer.Option(help="Questions per step and process.")] = 32,
    rate: Annotated[
        float | None, typer.Option(help="Peak learning rate. [default: 1e-3 for answers and hard, else 3e-3]")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Sets the order, and the first example of each world.")] = 0,
    samples: Annotated[int, typer.Option(min=1, help="Examples per world.")] = 2000,
    estimator: Annotated[str, typer.Option(help="answers, hard: gate, gumbel, reinforce, soft or none.")] = "gate",
    budget: Annotated[
        str,
        typer.Option(help="answers, hard: fixed (0.25), falling (1.0>0.25), random per step (0.06-0.5), or auto."),
    ] = "0.25",
    reward: Annotated[str, typer.Option(help="reinforce: likelihood or accuracy.")] = "likelihood",
    thrift: Annotated[
        float,
        typer.Option(
            min=0,
            help="trials: what all tokens of a picture cost, where a right answer is worth 1; with budget auto: cost "
            "of the kept tokens in the loss.",
        ),
    ] = 0.0,
    lora: Annotated[int, typer.Option(min=0, help="answers, hard: rank of LoRA on the model; 0 keeps it frozen.")] = 0,
    last_layers: Annotated[
        int, typer.Option(min=0, help="answers, hard: number of last layers of the model that are trained too.")
    ] = 0,
    query_layers: Annotated[
        int, typer.Option(min=0, help="Layers of the model that read the question before the selector does.")
    ] = 0,
    introspect: Annotated[
        str | None,
        typer.Option(
            help="Whether the selector asks the model where it looks: on, off, auto, or a number of layers. "
            "[default: as in --start]"
        ),
    ] = None,
    mode: Annotated[str, typer.Option(help="answers, hard: prune or saccade.")] = "prune",
    compress: Annotated[
        str | None, typer.Option(help="saccade: compress the gestalt by pool, merge or conv; conv is trained.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="answers, hard: data type of the model, float32 or bfloat16.")] = "float32",
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 200,
    cache: Annotated[
        Path | None,
        typer.Option(
            help="proxy, distill, trials: directory of what is kept between runs. [default: ~/.cache/arr-coc]"
        ),
    ] = None,
    device: Device = "cpu",
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the last checkpoint in --out.")] = False,
) -> None:
    """Train a selector for a frozen model. Ctrl-C saves a checkpoint; --resume continues from it."""
    with one_line_errors():
        from arr_coc.config import EMBEDDED
        from arr_coc.runtime.atomic_files import check_folder
        from arr_coc.training.config import TrainConfig

        check_folder(out)
        config = TrainConfig(
            data=data, out=out, stage=stage, base=base or EMBEDDED, start=start, steps=steps, batch_size=batch,
            rate=rate, seed=seed, samples=samples, estimator=estimator, budget=budget, reward=reward, thrift=thrift,
            lora=lora, last_layers=last_layers, query_layers=query_layers, mode=mode, compress=compress, dtype=dtype,
            introspect=parse_introspect(introspect),
            save_every=save_every, cache=cache, device=device, resume=resume,
        )  # fmt: skip
        try:
            run_training(config)
        except KeyboardInterrupt:
            typer.echo(f"stopped; the same command with --resume continues from {out}", err=True)
            raise typer.Exit(130) from None
    if os.environ.get("RANK", "0") == "0":  # only one of several processes prints
        typer.echo(f"selector  {out}")


def run_training(config: TrainConfig) -> Path:
    """Train a selector and show the progress; returns the directory of the run."""
    from arr_coc.inference.load import quiet_loading
    from arr_coc.training.trainer import train

    quiet_loading()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[facts]}"),
    )
    with Progress(*columns, console=Console(stderr=True, highlight=False)) as bar:
        training: list[TaskID] = []
        reading: dict[str, TaskID] = {}

        def progress(name: str, done: int) -> None:
            if name not in reading:
                reading[name] = bar.add_task(f"reading {name}", total=None, facts="")
            bar.update(reading[name], completed=done)

        def say(step: int, facts: dict[str, float]) -> None:
            for task in reading.values():
                bar.update(task, visible=False)
            if not training:
                training.append(bar.add_task("training", total=config.steps, facts=""))
            measure = {"proxy": "overlap", "distill": "agreement"}.get(config.stage, "accuracy")
            shown = f"loss {facts['loss']:.3f}  {measure} {facts[measure]:.2f}  {facts['per_second']:.0f} questions/s"
            bar.update(training[0], completed=step, facts=shown)

        return train(config, say=say, progress=progress)
