"""Put a trained selector into the package, with its card.

python recipes/selector/ship.py runs/selector --figures recipes/selector/figures.json
"""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from arr_coc.balancing import SCORES, TENSIONS

TARGET = Path(__file__).parents[2] / "src" / "arr_coc" / "assets" / "selector"
MOST_BYTES = 2_000_000
FILES = ("config.json", "model.safetensors")
CARD = """---
license: apache-2.0
library_name: arr-coc
base_model: embedded
---
# The selector of the embedded model

{parameters:,} weights that decide which tokens of a picture the embedded model of arr-coc reads, given the question.
They learned from boxes (stage `proxy`), the model frozen, {minutes}:

```
{command}
```

Drawn scenes, camouflage, pages and needles, 12,000 photographs of COCO with class names, 19,178 referring expressions;
`gaze:` is what mode `saccade` sees of a picture. Everything below is of samples and photographs that neither model nor
selector saw. No real Qwen weights were used anywhere.

## What is answered

Exact answers, the mean of {n} scenes and {n} camouflage samples at 512 pixels and {n} pages at 768; all tokens:
{full:.3f}.

| tokens kept | {names} | share of `oracle` | share of all tokens |
|---|{rules}---|---|
{answers}

"oracle" is told where the answer lies, "untrained" is the layer before training, the others are blind to the question;
"downsample" reads a smaller picture of as many tokens.

## Where it looks

Overlap: intersection over union of the boxes' cells with as many of the most relevant ones.

| | this selector | untrained | random |
|---|---|---|---|
{overlap}

Camouflage: the asked gray text gets more than twice the tokens of the bright red box on {wins} of the samples at
{budgets} of the tokens. Referring expressions about photographs: a quarter of the tokens covers {covered:.3f} of what
is meant ({best} {blind:.3f}, the best rule that is blind to the question; {times:.2f} times that). The asked box is
more relevant than another annotated one in {pairs:.1%} of the pairs; {same:.1%} of the {same_count:,} pairs of one
category, {other:.1%} of the {other_count:,} others.

## What it discovered

Mean weights of the three scorers and the three tensions by kind of question:

| | {kinds_head} |
|---|{kinds_rules}
{kinds}

{verdict}

Of the information scorer's channels the heaviest are {channels}. Over the words of a question it mixes maximum, mean
and sum as {words}; all words together speak for or against colours and places; words found light up their row,
their column, and where rows and columns cross with {aligned};
relevance lights up the cells beside it with {beside}, above and below with {above}. Gains of the three weights by
strength: {gain}. Steepness and offset of `auto`, which boxes do not train: {auto}.
"""


def main(
    selector: Annotated[Path, typer.Argument(help="Directory of the run.")],
    figures: Annotated[Path, typer.Option(help="What recipes/selector/check.py wrote.")],
    verdict: Annotated[str, typer.Option(help="What the weights by kind say of the expected pattern.")] = "",
    minutes: Annotated[str, typer.Option(help="How long it took, on what.")] = "in minutes",
    first: Annotated[list[Path] | None, typer.Option(help="Directories of the runs it went on from, in order.")] = None,
) -> None:
    found = json.loads(figures.read_text())
    runs = [json.loads((one / "run.json").read_text()) for one in (*(first or ()), selector)]
    size = sum((selector / name).stat().st_size for name in FILES)
    if size > MOST_BYTES:
        raise typer.BadParameter(f"{size:,} bytes: too large to ship")
    aside = TARGET.with_name(".selector")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    for name in FILES:
        shutil.copy(selector / name, aside / name)
        (aside / name).chmod(0o644)
    (aside / "README.md").write_text(card(found, runs, verdict, size, minutes))
    shutil.rmtree(TARGET, ignore_errors=True)
    aside.rename(TARGET)
    print(f"{size:,} bytes in {TARGET}")


def card(found: dict[str, Any], runs: list[dict[str, Any]], verdict: str, size: int, minutes: str) -> str:
    """The model card, from what was measured and how it was made."""
    rows = {share: row for share, row in found["answers"].items() if share != "full"}
    rows = dict(sorted(rows.items(), key=lambda one: -float(one[0])))
    names = [name for name, value in next(iter(rows.values())).items() if isinstance(value, dict)]
    wins = found["camouflage"]
    expressed = found["expressions"]
    best = max((name for name in expressed["coverage"] if name != "selector"), key=expressed["coverage"].__getitem__)
    by = expressed["pairs by category"]
    made = found["discovered"]
    commands = [_command(run, place, len(runs)) for place, run in enumerate(runs)]
    return CARD.format(
        parameters=size // 4, minutes=minutes,
        command="\n".join(" \\\n    ".join(_lines(command)) for command in commands),
        n=found["samples"], full=found["answers"]["full"], names=" | ".join(names),
        rules="---|" * len(names),
        answers="\n".join(
            f"| {float(share):.1%} | " + " | ".join(f"{row[name]['all']:.3f}" for name in names)
            + f" | {row['share of oracle']:.3f} | {row['share of full']:.3f} |"
            for share, row in rows.items()
        ),
        overlap="\n".join(
            f"| {name} | " + " | ".join(f"{row[key]:.3f}" for key in ("selector", "untrained", "random")) + " |"
            for name, row in found["overlap"].items()
        ),
        wins=", ".join(f"{row['wins']:.1%}" for row in wins.values()),
        budgets=", ".join(f"{float(share):.1%}" for share in wins), covered=expressed["coverage"]["selector"],
        best=f"`{best}`", blind=expressed["coverage"][best], times=expressed["times the best blind rule"],
        pairs=expressed["pairs"], same=by["same category"][0], same_count=by["same category"][1],
        other=by["other category"][0], other_count=by["other category"][1],
        kinds_head=" | ".join((*SCORES, *TENSIONS)), kinds_rules="---|" * 6,
        kinds="\n".join(
            f"| {kind} | " + " | ".join(f"{value:.2f}" for value in row.values()) + " |"
            for kind, row in sorted(made["by kind"].items())
        ),
        verdict=verdict, channels=", ".join(f"{name} {share:.2f}" for name, share in made["channels"].items()),
        words=_listed(made["words"]), aligned=_listed(made["rows, columns, both"]),
        beside=made["sides, up and down"][0], above=made["sides, up and down"][1], gain=_listed(made["gain"]),
        auto=_listed(made["steepness, offset"]),
    )  # fmt: skip


def _command(run: dict[str, Any], place: int, count: int) -> list[str]:
    """The command of a run; one that goes on from another names it."""
    data = ["/".join(Path(name).parts[-2:]) if name.startswith("/") else name for name in run["data"]]
    command = ["arr-coc", "train", *[part for name in data for part in ("--data", name)]]
    command += ["--samples", str(run["samples"]), "--steps", str(run["steps"]), "--batch", str(run["batch_size"])]
    command += ["--rate", str(run["rate"]), "--seed", str(run["seed"])]
    if place:
        command += ["--start", f"runs/{place}"]
    return [*command, "--out", "runs/selector" if place == count - 1 else f"runs/{place + 1}"]


def _listed(values: list[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


def _lines(command: list[str]) -> list[str]:
    """Words of a command, a few to a line."""
    lines, line = [], ""
    for word in map(shlex.quote, command):
        if word.startswith("--") and len(line) > 70:
            lines.append(line)
            line = ""
        line = f"{line} {word}".strip()
    return [*lines, line]


if __name__ == "__main__":
    typer.run(main)
