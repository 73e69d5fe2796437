"""Looking until the answer is sure, against fixed budgets: right answers, tokens, and what sureness is worth.

python recipes/selector/looks.py --out recipes/selector/results/looks.json

The embedded model, held-out (test) questions. Tokens are all visual tokens that the language model processed, in all
looks and while it was asked where to look, as a share of the picture's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import cycle
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, NamedTuple

import typer

from arr_coc import ARRCOCQwen, Gaze
from arr_coc.data.worlds import make_example, open_world, split_seed
from arr_coc.runtime.atomic_files import write_aside
from arr_coc.runtime.machine import find_revision

SHARES, BUDGETS = (1 / 16, 1 / 8, 1 / 4, 1 / 2), (448, 529, 1024)
AUTO, FULL = "auto", "full"
FIRST = 9 * 10**6  # of the seeds, which nothing else uses


class World(NamedTuple):
    """Pictures of a world at a side in pixels, and how many of them."""

    name: str
    side: int
    count: int

    @property
    def label(self) -> str:
        """In tables."""
        return f"{self.name}, {self.side}"


WORLDS = (
    World("scenes", 512, 150), World("camouflage", 512, 150), World("void", 512, 150), World("pages", 512, 150),
    World("needles", 1024, 50), World("needles", 2048, 50),
)  # fmt: skip


def list_ways(world: World) -> dict[str, dict[str, Any]]:
    """Arguments of `answer` by the name of a way to read."""
    if world.side > 1024:
        gaze = Gaze(gestalt=256)
        fixed = {f"saccade {budget}": {"mode": "saccade", "budget": budget, "gaze": gaze} for budget in BUDGETS}
        return {AUTO: {"mode": "auto"}, **fixed}
    ways: dict[str, dict[str, Any]] = {FULL: {"mode": "full"}}
    ways[AUTO] = {"mode": "auto"}
    for ending, introspect in (("", "off"), (" asked", "on")):
        ways |= {f"{share:g}{ending}": {"mode": "prune", "budget": share, "introspect": introspect} for share in SHARES}
    return ways


def ask(vlm: ARRCOCQwen, world: World) -> Iterable[dict[str, Any]]:
    """A row for each way of each question."""
    kinds = cycle(open_world(world.name).kinds)
    for number in range(world.count):
        example = make_example(world.name, split_seed("test", FIRST + number), next(kinds), (world.side, world.side))
        for way, options in list_ways(world).items():
            answer = vlm.answer(example.picture, example.question, max_new_tokens=24, **options)
            glanced = 0.0
            if "asked" in way:
                glanced = 1 / 16  # looks count it themselves
            yield {
                "way": way, "right": answer.text == example.answer,
                "share": answer.tokens.used / answer.tokens.full + glanced,
                "looks": [[look.sure, look.seen] for look in answer.looks],
            }  # fmt: skip


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Means, and for each answer that was looked for how sure it was, whether it was right, and in how many looks."""
    found: dict[str, Any] = {
        "right": round(fmean(row["right"] for row in rows), 4), "share": round(fmean(row["share"] for row in rows), 4),
    }  # fmt: skip
    if rows[0]["looks"]:
        found["answers"] = [[row["looks"][-1][0], int(row["right"]), len(row["looks"])] for row in rows]
    return found


def main(
    out: Annotated[Path | None, typer.Option(help="Where the JSON goes; worlds already there are not asked.")] = None,
    count: Annotated[int, typer.Option(help="Questions of each world. [default: as committed]")] = 0,
) -> None:
    vlm = ARRCOCQwen.from_pretrained()
    found = json.loads(out.read_text())["worlds"] if out is not None and out.exists() else {}
    for world in WORLDS:
        if world.label in found:
            continue
        rows: dict[str, list[dict[str, Any]]] = {}
        for row in ask(vlm, world._replace(count=count or world.count)):
            rows.setdefault(row["way"], []).append(row)
        found[world.label] = {way: summarise(part) for way, part in rows.items()}
        for way, row in found[world.label].items():
            print(f"{world.label:18} {way:16} right {row['right']:.3f} share {row['share']:.3f}", flush=True)
        if out is not None:
            content = {"revision": find_revision(), "worlds": found}
            write_aside(out, json.dumps(content) + "\n")


if __name__ == "__main__":
    typer.run(main)
