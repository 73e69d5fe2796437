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
    "page_value": "pages: what is the {key}?",
    "page_cell": "pages: what is the {column} of the {item}?",
    "page_title": "pages: what is the title?",
    "page_footnote": "pages: what does the footnote say?",
    "needle": "1024 pixels: what does the sign next to the {color} {shape} say?",
}
CARD = """---
license: apache-2.0
library_name: transformers
pipeline_tag: image-text-to-text
---
# The embedded model of arr-coc

A Qwen3-VL of {millions:.1f} million parameters, trained from scratch on drawn scenes, pages, large pictures with small
signs, and photographs of COCO (`recipes/embedded` makes it again). It stands for a frozen vision-language model: it
never saw a pruned prompt.

What supervised it: answers, and which words lie under each visual token, by a linear head that was thrown away. No loss
ties a visual token to the embedding of a word, and none did in a real Qwen. Its data are drawn worlds, and photographs
and boxes of COCO (photographs under the terms COCO publishes, boxes CC BY 4.0).

What it can answer: one question about one picture of 128 to 1024 pixels a side, at most about twice as long as wide, in
the grammar below: in small letters, American spelling, a few wordings of each. What it cannot: lower-case text, several
pictures or turns, anything else; it answers all the same, and the answer means nothing. Larger pictures are made
smaller, to as many pixels as 1024x1024 has.

Exact answers on {samples} held-out samples a kind ({needles} of needles), written in Pillow's own font:

| question | {columns} |
|---|{rules}|
{rows}

"arr-coc", "random" and "oracle" keep a quarter of the tokens: those that the untrained layer chooses, at random, and
those under what is asked; "downsample" reads a smaller picture of as many tokens. On {strangers} pictures that another
program drew with other fonts {share:.1%} of the answers are exact. Signs in pictures of 2048 pixels, read whole:
{large:.3f} of {large_count}.

Photographs, {questions:,} questions such as "is there a dog?" about {photos} of COCO that it never saw,
balanced between yes and no for each class: {presence:.3f} are right. It is a guess with a tendency, not a
detector. Tokens under a thing are nearer to its name than the others (cosine; 0.5 is chance): area under the curve
{where:.3f} in the mean of {classes} classes, from {worst} {least:.2f} to {best} {most:.2f}.

{by_class}
"""


def main(
    model: Annotated[Path, typer.Argument(help="Directory of the trained model.")],
    figures: Annotated[Path, typer.Option(help="What recipes/embedded/check.py wrote.")],
) -> None:
    found = json.loads(figures.read_text())
    strangers = json.loads((Path(__file__).parents[2] / "tests" / "strangers" / "answers.json").read_text())
    files = [path for path in sorted(model.iterdir()) if path.name not in ("curve.json", "head.safetensors")]
    sizes = [path.stat().st_size for path in files]
    if max(sizes) > MOST_SHARD or sum(sizes) > MOST_BYTES:
        raise typer.BadParameter(f"{sum(sizes):,} bytes, the largest file {max(sizes):,}: too large to ship")
    columns = list(dict.fromkeys(name for row in found["exact"].values() for name in row))
    rows = []
    for kind, text in NAMES.items():
        values = [found["exact"][kind].get(name) for name in columns]
        rows.append(f"| {text} | " + " | ".join("" if value is None else f"{value:.3f}" for value in values) + " |")
    parameters = sum(size for path, size in zip(files, sizes, strict=True) if path.suffix == ".safetensors") / 2
    seen, large = found["photos"], found["needles_2048"]
    classes = sorted(seen["where_by_class"].items(), key=lambda one: -one[1])
    card = CARD.format(
        millions=parameters / 1e6, samples=found["samples"], needles=found["samples"] // 5,
        columns=" | ".join(columns), rules="---|" * len(columns), rows="\n".join(rows), strangers=len(strangers),
        share=found["strangers"], large=large["full"], large_count=large["samples"], questions=seen["questions"],
        photos=seen["photos"], presence=seen["presence"], where=seen["where"], classes=len(classes),
        best=classes[0][0], most=classes[0][1], worst=classes[-1][0], least=classes[-1][1],
        by_class=", ".join(f"{name} {value:.2f}" for name, value in classes),
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
