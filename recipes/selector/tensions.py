"""What each tension does to each kind of question in mode `auto`, and what it costs to freeze it at its mean.

python recipes/selector/tensions.py runs/trials --out recipes/selector/results/tensions.json

The embedded model, held-out (test) questions at 512 pixels. `runs` are of stage `trials`, with all three tensions.
A frozen tension is the same for all questions: `detail` the one that reads as many tokens in first
looks as before, the others their mean. `weights` freezes those of the three scores. Tokens are all visual tokens that
the language model processed, as a share of the picture's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from arr_coc import ARRCOCLayer, ARRCOCQwen, realizing
from arr_coc.balancing import TENSIONS, steer
from arr_coc.data.worlds import make_example, open_world, split_seed
from arr_coc.gaze.loop import LEEWAY
from arr_coc.runtime.atomic_files import write_aside
from arr_coc.runtime.machine import find_revision

WORLDS = ("scenes", "camouflage", "void", "pages")
FIRST = 95 * 10**5  # of the seeds, which nothing else uses
STEERED, WEIGHTS = "steered", "weights"
Row = dict[str, Any]


@contextmanager
def steering(change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Inside `with`, the tensions of first looks are changed after they were steered."""
    realizing.steer = lambda tensions, moved: change(steer(tensions, moved))
    try:
        yield
    finally:
        realizing.steer = steer


def ask(vlm: ARRCOCQwen, count: int) -> Iterator[Row]:
    """Answer `count` questions of each kind in mode auto."""
    for world in WORLDS:
        for kind in open_world(world).kinds:
            for number in range(count):
                example = make_example(world, split_seed("test", FIRST + number), kind, (512, 512))
                answer = vlm.answer(example.picture, example.question, mode="auto", max_new_tokens=24)
                yield {
                    "world": world, "kind": kind, "right": answer.text == example.answer,
                    "share": answer.tokens.used / answer.tokens.full, "looks": len(answer.looks),
                    "first": answer.looks[0].seen / answer.tokens.full, "weights": answer.output.weights[0].tolist(),
                }  # fmt: skip


def average(rows: list[Row], name: str) -> float:
    """The mean over worlds of their kinds' mean."""
    by_world = [[row[name] for row in rows if row["world"] == world] for world in WORLDS]
    return round(fmean(fmean(values) for values in by_world), 4)


def freeze(tensions: Tensor, place: int, value: float) -> Tensor:
    """Tensions `[B, 3]` of which one is the same for all questions."""
    frozen = tensions.clone()
    frozen[:, place] = value
    return frozen


def measure(vlm: ARRCOCQwen, count: int) -> dict[str, Any]:
    """All figures of one selector."""
    layer, seen = vlm.selector, list[Tensor]()

    def note(tensions: Tensor) -> Tensor:
        seen.append(tensions.detach())
        return tensions

    with steering(note):
        rows = list(ask(vlm, count))
    tensions = torch.cat(seen)  # [n, 3]: one row for each question, since only first looks are steered
    found = {STEERED: {name: average(rows, name) for name in ("right", "share")}}
    print(STEERED, found[STEERED], flush=True)
    by_kind = {}
    for kind in dict.fromkeys(row["kind"] for row in rows):
        places = [place for place, row in enumerate(rows) if row["kind"] == kind]
        means = {name: fmean(rows[place][name] for place in places) for name in ("right", "first", "share", "looks")}
        means |= dict(zip(TENSIONS, tensions[places].mean(dim=0).tolist(), strict=True))
        by_kind[kind] = {name: round(value, 4) for name, value in means.items()}
    mean_first = float((LEEWAY ** (2 * tensions[:, 0] - 1)).mean())
    detail = (math.log(mean_first, LEEWAY) + 1) / 2
    values = [detail, *tensions.mean(dim=0)[1:].tolist()]
    for place, name in enumerate(TENSIONS):
        with steering(partial(freeze, place=place, value=values[place])):
            frozen = list(ask(vlm, count))
        found[name] = {part: average(frozen, part) for part in ("right", "share")}
        print(name, found[name], flush=True)
    mean_weights = torch.tensor([row["weights"] for row in rows]).mean(dim=0).clamp(1e-3, 1 - 1e-3)
    balancer = layer.balancer
    kept = {name: value.clone() for name, value in balancer.state_dict().items()}
    with torch.no_grad():
        balancer.gain.zero_()
        balancer.correction[-1].weight[:3] = 0
        balancer.neutral[:3] = torch.logit(mean_weights)
    frozen = list(ask(vlm, count))
    balancer.load_state_dict(kept)
    found[WEIGHTS] = {part: average(frozen, part) for part in ("right", "share")}
    print(WEIGHTS, found[WEIGHTS], flush=True)
    return {"questions": len(rows), "frozen": found, "kinds": by_kind}


def main(
    runs: Annotated[list[Path], typer.Argument(help="Directories of runs of stage `trials`.")],
    out: Annotated[Path | None, typer.Option(help="Where the JSON goes; runs already there are not measured.")] = None,
    count: Annotated[int, typer.Option(help="Questions of each kind.")] = 25,
) -> None:
    found = json.loads(out.read_text())["runs"] if out is not None and out.exists() else {}
    vlm = ARRCOCQwen.from_pretrained()
    for run in runs:
        if run.name in found:
            continue
        steering = ARRCOCLayer.from_pretrained(run).steering
        vlm.selector.steering.load_state_dict(steering.state_dict())
        seed = json.loads((run / "run.json").read_text())["seed"]
        found[run.name] = {"seed": seed, **measure(vlm, count)}
        if out is not None:
            write_aside(out, json.dumps({"revision": find_revision(), "runs": found}) + "\n")


if __name__ == "__main__":
    typer.run(main)
