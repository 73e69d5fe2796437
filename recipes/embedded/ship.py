"""Put a trained model into the package, with its card.

python recipes/embedded/ship.py runs/embedded --figures recipes/embedded/figures.json
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Annotated

import typer

TARGET = Path(__file__).parents[2] / "src" / "arr_coc" / "assets" / "embedded"
MOST_BYTES, MOST_SHARD = 24_000_000, 12_000_000
NAMES = {
    "color": "what color is the {shape}?",
    "count_shape": "how many {shape}s are there?",
    "count_color": "how many {color} things are there?",
    "relation": "what is left of the {color} {shape}?",
    "read": "what does the {color} text say?",
    "unusual": "what is unusual?",
    "overview": "what is in the picture?",
    "camouflage": "gray text on gray, beside a red box",
    "void_count": "counts on noise, splatter, flat fields",
    "void_read": "text on noise, splatter, flat fields",
}
CARD = """---
license: apache-2.0
library_name: transformers
pipeline_tag: image-text-to-text
---
# The embedded model of arr-coc

A Qwen3-VL of {millions:.1f} million parameters, trained from scratch on drawn scenes
(`recipes/embedded` makes it again). It stands for a frozen vision-language model: it never saw a pruned prompt.

What it can answer: one question about one drawn picture of 128 to 512 pixels a side, at most about twice as long as
wide, in the grammar below: in small letters, American spelling, a few wordings of each. What it cannot: photographs,
pages, small print, lower-case text, several pictures or turns, anything else; it answers all the same, and the answer
means nothing. Larger pictures are made smaller, to as many pixels as 512x512 has.

Exact answers on {samples} held-out samples a kind, written in Pillow's own font:

| question | {columns} |
|---|{rules}|
{rows}

"arr-coc", "random" and "oracle" keep a quarter of the tokens: those that the untrained layer chooses, at random, and
those under what is asked; "downsample" reads a smaller picture of as many tokens. On {strangers} pictures that another
program drew with other fonts {share:.1%} of the answers are exact.
"""


def main(
    model: Annotated[Path, typer.Argument(help="Directory of the trained model.")],
    figures: Annotated[Path, typer.Option(help="What recipes/embedded/check.py wrote.")],
) -> None:
    found = json.loads(figures.read_text())
    strangers = json.loads((Path(__file__).parents[2] / "tests" / "strangers" / "answers.json").read_text())
    files = [path for path in sorted(model.iterdir()) if path.name != "curve.json"]
    sizes = [path.stat().st_size for path in files]
    if max(sizes) > MOST_SHARD or sum(sizes) > MOST_BYTES:
        raise typer.BadParameter(f"{sum(sizes):,} bytes, the largest file {max(sizes):,}: too large to ship")
    columns = list(dict.fromkeys(name for row in found["exact"].values() for name in row))
    rows = []
    for kind, text in NAMES.items():
        values = [found["exact"][kind].get(name) for name in columns]
        rows.append(f"| {text} | " + " | ".join("" if value is None else f"{value:.3f}" for value in values) + " |")
    parameters = sum(size for path, size in zip(files, sizes, strict=True) if path.suffix == ".safetensors") / 2
    card = CARD.format(
        millions=parameters / 1e6, samples=found["samples"], columns=" | ".join(columns), rules="---|" * len(columns),
        rows="\n".join(rows), strangers=len(strangers), share=found["strangers"],
    )  # fmt: skip
    aside = TARGET.with_name(".embedded")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    for path in files:
        shutil.copy(path, aside / path.name)
        (aside / path.name).chmod(0o644)
    (aside / "README.md").write_text(card.replace("---||", "---|"))
    shutil.rmtree(TARGET, ignore_errors=True)
    aside.rename(TARGET)
    print(f"{sum(sizes) / 1e6:.1f} MB in {TARGET}")


if __name__ == "__main__":
    typer.run(main)
