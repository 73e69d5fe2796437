"""Measure the embedded model on samples it never saw: every kind with all tokens and a quarter of them.

python recipes/embedded/check.py --n 500 --out recipes/embedded/figures.json
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from courses import COURSES
from looking import where_auc
from PIL import Image

from arr_coc import load_processor
from arr_coc.config import EMBEDDED
from arr_coc.data.coco import presence_examples, read_photos
from arr_coc.data.example import Example
from arr_coc.data.worlds import make_example, split_seed
from arr_coc.evaluation.answers import answer_examples, exact_match
from arr_coc.inference.load import load_model, load_selector

# Least share of exact answers with all tokens.
BARS = {
    **dict.fromkeys(("color", "count_shape", "count_color"), 0.97),
    **dict.fromkeys(("relation", "unusual", "overview"), 0.93),
    "read": 0.95,
    "camouflage": 0.90,
    "void_count": 0.95,
    "void_read": 0.95,
    "needle": 0.85,
}
PAGES, STRANGERS, LARGE, PRESENCE, WHERE = 0.90, 0.85, 0.75, 0.70, 0.70  # pages: the mean of their kinds
QUARTER = 0.25


def ask_strangers(model: Any, processor: Any) -> float:
    """Share of exact answers on pictures that another program drew."""
    folder = Path(__file__).parents[2] / "tests" / "strangers"
    samples = []
    for row in json.loads((folder / "answers.json").read_text()):
        with Image.open(folder / row["file"]) as image:
            picture = image.convert("RGB")
        samples.append(Example(row["question"], picture.copy, row["file"], (row["answer"],), kind=row["kind"]))
    return round(exact_match(samples, answer_examples(model, processor, samples)), 4)


def ask_photos(model: Any, processor: Any, folder: Path) -> dict[str, Any]:
    """Share of exact answers to balanced questions about what is there, and how well tokens know where."""
    photos = read_photos(folder)
    samples = presence_examples(photos, 0)
    where = where_auc(model, processor, photos)
    return {
        "presence": round(exact_match(samples, answer_examples(model, processor, samples)), 4),
        "questions": len(samples),
        "photos": len(photos),
        "where": round(sum(where.values()) / len(where), 4),
        "where_by_class": where,
    }


def main(
    model: Annotated[Path | None, typer.Option(help="Directory of a model. [default: the embedded one]")] = None,
    n: Annotated[int, typer.Option(help="Samples of a kind.")] = 500,
    out: Annotated[Path | None, typer.Option(help="Where the JSON goes.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cuda" if torch.cuda.is_available() else "cpu",
    kinds: Annotated[str, typer.Option(help="Only these kinds, with commas.")] = "",
    course: Annotated[str, typer.Option(help="What it learned: scenes or wide.")] = "wide",
    photos: Annotated[Path | None, typer.Option(help="Folder of photographs in COCO format, to ask about too.")] = None,
    large: Annotated[int, typer.Option(help="Needles of 2048 pixels to ask for; better on a GPU.")] = 0,
) -> None:
    directory = EMBEDDED if model is None else str(model)
    processor = load_processor(directory)
    opened = load_model(directory, dtype=torch.float32).to(device)
    known = [kind for part in COURSES[course] for kind in part.kinds if kind[0] != "photos"]
    found: dict[str, dict[str, float]] = {}
    failed = False
    for world, kind in known:
        if kinds and kind not in kinds.split(","):
            continue
        begin = time.time()
        size, count = ((1024, 1024), max(1, n // 5)) if world == "needles" else (None, n)
        samples = [make_example(world, split_seed("test", index), kind, size) for index in range(count)]
        row = {"full": exact_match(samples, answer_examples(opened, processor, samples))}
        for name in ("arr-coc", *(("random", "oracle", "downsample") if kind in ("read", "color", "needle") else ())):
            answers = answer_examples(opened, processor, samples, load_selector(name, opened), QUARTER)
            row[f"{name} {QUARTER}"] = exact_match(samples, answers)
        found[kind] = {name: round(value, 4) for name, value in row.items()}
        failed |= row["full"] < BARS.get(kind, 0.0)
        print(kind, found[kind], f"bar {BARS.get(kind)}", f"{time.time() - begin:.0f} s", flush=True)
    pages = [row["full"] for kind, row in found.items() if kind.startswith("page_")]
    if pages:
        print("pages", sum(pages) / len(pages), f"bar {PAGES}", flush=True)
        failed |= sum(pages) / len(pages) < PAGES
    strangers = ask_strangers(opened, processor)
    print("strangers", strangers, f"bar {STRANGERS}", flush=True)
    failed |= strangers < STRANGERS
    content: dict[str, Any] = {"samples": n, "exact": found, "strangers": strangers}
    if "read" in found:
        failed |= found["read"]["random 0.25"] >= 0.3 or found["read"]["oracle 0.25"] <= 0.9
    if large:
        processor.image_processor.size = {"shortest_edge": 128**2, "longest_edge": 2048**2}
        samples = [make_example("needles", split_seed("test", index), None, (2048, 2048)) for index in range(large)]
        score = exact_match(samples, answer_examples(opened, processor, samples, batch_size=4))
        content["needles_2048"] = {"samples": large, "full": round(score, 4)}
        print("needles of 2048 pixels", content["needles_2048"], f"bar {LARGE}", flush=True)
        failed |= score < LARGE
    if photos is not None:
        content["photos"] = ask_photos(opened, processor, photos)
        print("photos", content["photos"], f"bars {PRESENCE}, {WHERE}", flush=True)
        failed |= content["photos"]["presence"] < PRESENCE or content["photos"]["where"] < WHERE
    if out is not None:
        out.write_text(json.dumps(content, indent=1) + "\n")
    raise typer.Exit(int(failed))


if __name__ == "__main__":
    typer.run(main)
