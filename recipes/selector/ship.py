"""Put a trained selector into the package, with its card.

python recipes/selector/ship.py runs/selector --figures recipes/selector/results/figures.json
"""

from __future__ import annotations

import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from arr_coc.balancing import SCORES, TENSIONS
from arr_coc.config import EDITION_NAME, EMBEDDED, EMBEDDED_MODEL, TRAINED, UNTRAINED, ARRCOCConfig

TARGET = Path(__file__).parents[2] / "src" / "arr_coc" / "assets" / "selector"
MOST_BYTES = 2_000_000
FILES = ("config.json", "model.safetensors")
CARD = """---
license: apache-2.0
library_name: arr-coc
base_model: embedded
---
# The selector of the embedded model

{parameters:,} weights that decide, given a question, which tokens of a picture the embedded model of arr-coc reads.
They were trained on boxes (stage `proxy`) with the model frozen, {minutes}:

```
{command}
```

The data are drawn scenes, camouflage, pages and needles, 12,000 COCO photographs with class names, and 19,178 referring
expressions; `gaze:` shows a picture as mode `saccade` sees it. Everything below was measured on samples and photographs
that neither model nor selector was trained on. No real Qwen weights were used anywhere.

## Answers

Exact answers, averaged over {n} scenes and {n} camouflage samples at 512 pixels and {n} pages at 768; all tokens reach
{full:.3f}.

| tokens kept | {names} | share of `oracle` | share of all tokens |
|---|{rules}---|---|
{answers}

"oracle" is told where the answer is, "arr-coc-untrained" is the layer before training, the others ignore the question;
"downsample" reads a smaller picture with the same number of tokens.

## Where it looks

Overlap: intersection over union of the boxes' cells and the same number of most relevant cells.

| | this selector | arr-coc-untrained | random |
|---|---|---|---|
{overlap}

Camouflage: the gray text that is asked for gets more than twice the tokens of the bright red box in {wins} of the
samples at {budgets} of the tokens.

Referring expressions about photographs: the quarter of the tokens with the highest relevance covers {covered:.3f} of
the meant object ({best} {blind:.3f}, the best rule that ignores the question; {times:.2f} times that). The quarter
that is really kept, which also explores, carries text along and drops near-duplicates, covers {kept:.3f} ({kept_best}
{kept_blind:.3f}), measured with

```
arr-coc eval --tasks refexp:val.jsonl.gz --selectors arr-coc,centre,grid,random --budgets 0.25 --limit 100000 \\
    --no-times --out DIR
```

The meant box is more relevant than another annotated one in {pairs:.1%} of the pairs: {same:.1%} of the {same_count:,}
pairs of one category, {other:.1%} of the {other_count:,} others.

## What it discovered

Mean weights of the three scorers and mean tensions by kind of question:

| | {kinds_head} |
|---|{kinds_rules}
{kinds}

{verdict}

The information scorer's heaviest channels are {channels}. The participatory scorer mixes maximum, mean and sum over
the words of a question as {words}. All words together speak for or against colours and places. Words that were found
raise their row, their column, and the crossings of rows and columns by {aligned}. Relevance raises the cells left and
right of it by {beside}, above and below by {above}. Gains of the three weights by strength: {gain}. Steepness and
offset of `auto`, which boxes do not train: {auto}.
"""


def main(
    selector: Annotated[Path, typer.Argument(help="Directory of the run.")],
    figures: Annotated[Path, typer.Option(help="What recipes/selector/check.py wrote.")],
    verdict: Annotated[str, typer.Option(help="What the weights by kind say of the expected pattern.")] = "",
    minutes: Annotated[str, typer.Option(help="How long it took, on what.")] = "in minutes",
    first: Annotated[list[Path] | None, typer.Option(help="Directories of the runs it went on from, in order.")] = None,
) -> None:
    found = json.loads(figures.read_text().replace('"untrained"', f'"{UNTRAINED}"'))  # its older name
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
    (aside / "config.json").write_text(name_base(ARRCOCConfig.from_json((selector / "config.json").read_text())))
    (aside / "README.md").write_text(card(found, runs, verdict, size, minutes))
    shutil.rmtree(TARGET, ignore_errors=True)
    aside.rename(TARGET)
    print(f"{size:,} bytes in {TARGET}")


def name_base(config: ARRCOCConfig) -> str:
    """The config of a selector that was trained for a directory of the embedded model, or for that itself."""
    edition = json.loads((Path(EMBEDDED_MODEL) / "config.json").read_text())[EDITION_NAME]
    if config.base_model_edition not in (None, edition):
        raise typer.BadParameter(f"trained for edition {config.base_model_edition}; the package has edition {edition}")
    return replace(config, base_model_name_or_path=EMBEDDED, base_model_edition=edition).to_json()


def card(found: dict[str, Any], runs: list[dict[str, Any]], verdict: str, size: int, minutes: str) -> str:
    """The model card, from what was measured and how it was made."""
    rows = {share: row for share, row in found["answers"].items() if share != "full"}
    rows = dict(sorted(rows.items(), key=lambda one: -float(one[0])))
    names = [name for name, value in next(iter(rows.values())).items() if isinstance(value, dict)]
    wins = found["camouflage"]
    expressed = found["expressions"]
    kept = expressed["kept coverage"]
    best, kept_best = (_best_blind(coverage) for coverage in (expressed["coverage"], kept))
    by = expressed["pairs by category"]
    made = found["discovered"]
    commands = [_command(run, place, len(runs)) for place, run in enumerate(runs)]
    return CARD.format(
        parameters=size // 4, minutes=minutes,
        command="\n".join(" \\\n    ".join(_lines(command)) for command in commands),
        n=found["samples"], full=found["answers"]["full"],
        names=" | ".join(TRAINED if name == "selector" else name for name in names), rules="---|" * len(names),
        answers="\n".join(
            f"| {float(share):.1%} | " + " | ".join(f"{row[name]['all']:.3f}" for name in names)
            + f" | {row['share of oracle']:.3f} | {row['share of full']:.3f} |"
            for share, row in rows.items()
        ),
        overlap="\n".join(
            f"| {name} | " + " | ".join(f"{row[key]:.3f}" for key in ("selector", UNTRAINED, "random")) + " |"
            for name, row in found["overlap"].items()
        ),
        wins=", ".join(f"{row['wins']:.1%}" for row in wins.values()),
        budgets=", ".join(f"{float(share):.1%}" for share in wins), covered=expressed["coverage"]["selector"],
        best=f"`{best}`", blind=expressed["coverage"][best], times=expressed["times the best blind rule"],
        kept=kept["selector"], kept_best=f"`{kept_best}`", kept_blind=kept[kept_best],
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


def _best_blind(coverage: dict[str, float]) -> str:
    """The rule that covers most without knowing the question."""
    return max((name for name in coverage if name not in ("selector", UNTRAINED)), key=coverage.__getitem__)


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
