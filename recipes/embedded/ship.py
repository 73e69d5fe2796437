"""Put a trained model into the package, with its card.

python recipes/embedded/ship.py runs/7 --figures figures.json --first recipes/embedded/editions/first.json
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from check import BUDGETS, CHOSEN, LEARNED, SELECTORS, read_figures

from arr_coc.config import EDITION_NAME

TARGET = Path(__file__).parents[2] / "src" / "arr_coc" / "assets" / "embedded"
EDITION = 2  # of the model that is shipped; selectors record which one they were trained for
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
    "two_ends": "is the sign at the left the same as at the right?",
    "long_line": "what does the long line say?",
    "any": "is there any {color} {shape}?",
    "form_value": "forms: what is the {key}?",
    "clip_direction": "clips: which way does the {shape} move?",
    "clip_appears": "clips: what does the sign say that appears?",
    "clip_first": "clips: which thing came first?",
    "clip_blink": "clips: how many times did the {shape} blink?",
    "clip_pan": "clips that pan over a page: what is the {key}?",
    "clip_cut": "clips: what color was the {shape} before the cut?",
}
PHOTOS = {
    "presence": "is there a dog?",
    "presence_pope": "Is there a dog in the image? (as POPE words it)",
    "photo_count": "how many dogs are there? (up to four)",
    "photo_side": "what animal is on the left?",
    "photo_relation": "what is left of the dog?",
}
CARD = """---
license: apache-2.0
library_name: transformers
pipeline_tag: image-text-to-text
---
# The embedded model of arr-coc, second edition

A Qwen3-VL of {millions:.1f} million parameters, trained from scratch on drawn scenes, pages, forms, clips, large
pictures with small signs, and photographs of COCO (`recipes/embedded` makes it again). It stands for a frozen
vision-language model: it never saw a pruned prompt.

What supervised it: answers, and which words lie under each visual token, by a linear head that was thrown away. No loss
ties a visual token to the embedding of a word, and none did in a real Qwen. (The first edition's did: its tokens were
pulled towards the embeddings of the words under them, so that the cosine of a token and a word found things.) Its data
are drawn worlds, and photographs and boxes of COCO (photographs under the terms COCO publishes, boxes CC BY 4.0).

What it can answer: one question about one picture of 128 to 1024 pixels a side, at most about twice as long as wide, or
about a clip of 4 to 16 frames of 128 to 256 pixels, in the grammar below, in a few wordings of each, American spelling.
What it cannot: several pictures or turns, anything else; it answers all the same, and the answer means nothing. Larger
pictures are made smaller, to as many pixels as 1024x1024 has.

Exact answers with all tokens on {samples} held-out samples a kind, written in Pillow's own font, beside those of the
first edition on the same samples:

| question | this edition | the first |
|---|---|---|
{rows}

On {strangers} pictures that another program drew with other fonts {share:.1%} of the answers are exact (the first
edition: {first_share:.1%}).

## Where tokens know

Photographs it never saw ({photos} of COCO's), in mean over classes; 0.5 is chance:

| area under the curve | this edition | the first |
|---|---|---|
| cosine of token and class name | {cosine:.3f} | {first_cosine:.3f} |
| a linear probe on the tokens, fitted on {learned:,} other photographs | {probe:.3f} | {first_probe:.3f} |

## With fewer tokens

Exact answers in mean over {chosen}, {pruned} samples each:

{pruned_rows}

"oracle" is told where the answer is; "arr-coc-untrained" is the layer before training, "arr-coc" the selector that was
trained for the edition.
"""


def mean(values: Iterable[float]) -> float:
    """The mean of some figures."""
    found = list(values)
    return sum(found) / len(found)


def mean_known(figures: dict[str, float], names: list[str]) -> float | None:
    """The mean of some figures, if all of them were measured."""
    return mean(figures[name] for name in names) if all(name in figures for name in names) else None


def value(number: float | None) -> str:
    """A figure, or nothing."""
    return "" if number is None else f"{number:.3f}"


def describe(found: dict[str, Any], first: dict[str, Any], millions: float) -> str:
    """The card, from the figures of both editions."""
    rows = [
        f"| {text} | {value(found[part][kind])} | {value(first[part].get(kind))} |"
        for part, names in (("exact", NAMES), ("photos", PHOTOS))
        for kind, text in names.items()
    ]
    strangers = json.loads((Path(__file__).parents[2] / "tests" / "strangers" / "answers.json").read_text())
    places = [("where, by cosine", "cosine"), ("where, by a linear probe", "probe")]
    where = {
        f"{edition}{short}": mean(figures["photos"][name].values())
        for edition, figures in (("", found), ("first_", first))
        for name, short in places
    }
    return CARD.format(
        millions=millions, samples=found["given"]["samples"], rows="\n".join(rows),
        strangers=len(strangers), learned=LEARNED, photos=500,
        share=found["others"]["strangers"], first_share=first["others"]["strangers"], chosen=", ".join(known(first)),
        pruned=found["given"]["pruned"], pruned_rows=prune_rows(found, first), **where,
    )  # fmt: skip


def known(first: dict[str, Any]) -> list[str]:
    """The chosen kinds that both editions were measured on."""
    return [kind for kind in CHOSEN if any(name.startswith(f"{kind},") for name in first["pruned"])]


def prune_rows(found: dict[str, Any], first: dict[str, Any]) -> str:
    """A table of selectors and shares of the tokens, for both editions."""
    lines = [
        "| tokens kept | " + " | ".join(f"{budget:.1%}" for budget in BUDGETS for _ in range(2)) + " |",
        "|---|" + "---|" * (2 * len(BUDGETS)),
        "| edition | " + " | ".join(["this | the first"] * len(BUDGETS)) + " |",
    ]
    for selector in SELECTORS:
        shares = [
            mean_known(figures["pruned"], [f"{kind}, {selector}, {budget:g}" for kind in known(first)])
            for budget in BUDGETS
            for figures in (found, first)
        ]
        lines.append(f"| {selector} | " + " | ".join(map(value, shares)) + " |")
    return "\n".join(lines)


def number_edition(file: Path, edition: int) -> None:
    """Write the number of the edition into the config of a model, its keys sorted as transformers has them."""
    config = json.loads(file.read_text()) | {EDITION_NAME: edition}
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def main(
    model: Annotated[Path, typer.Argument(help="Directory of the trained model.")],
    figures: Annotated[Path, typer.Option(help="What recipes/embedded/check.py wrote.")],
    first: Annotated[Path, typer.Option(help="The same of the first edition.")],
) -> None:
    files = [path for path in sorted(model.iterdir()) if path.name not in ("curve.json", "head.safetensors")]
    sizes = [path.stat().st_size for path in files]
    if max(sizes) > MOST_SHARD or sum(sizes) > MOST_BYTES:
        raise typer.BadParameter(f"{sum(sizes):,} bytes, the largest file {max(sizes):,}: too large to ship")
    parameters = sum(size for path, size in zip(files, sizes, strict=True) if path.suffix == ".safetensors") / 2
    card = describe(read_figures(figures), read_figures(first), parameters / 1e6)
    aside = TARGET.with_name(".embedded")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    for path in files:
        shutil.copy(path, aside / path.name)
        (aside / path.name).chmod(0o644)
    number_edition(aside / "config.json", EDITION)
    (aside / "README.md").write_text(card)
    shutil.rmtree(TARGET, ignore_errors=True)
    aside.rename(TARGET)
    print(f"{sum(sizes) / 1e6:.1f} MB in {TARGET}")


if __name__ == "__main__":
    typer.run(main)
