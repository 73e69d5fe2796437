"""Measure an embedded model on samples it never saw; what is already in the JSON is not measured again.

python recipes/embedded/check.py --photos photos --out recipes/embedded/figures.json
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from courses import COURSES
from looking import probe_auc, where_auc
from PIL import Image

from arr_coc import load_processor
from arr_coc.config import EMBEDDED, TRAINED, UNTRAINED
from arr_coc.data.coco import photo_examples, presence_examples, read_photos
from arr_coc.data.example import Example
from arr_coc.data.worlds import make_example, split_seed
from arr_coc.evaluation.answers import answer_examples, exact_match
from arr_coc.inference.load import load_model, load_selector
from arr_coc.runtime.atomic_files import write_aside

# Kinds of questions that the first edition of the model learned, too.
FIRST = (
    *("color", "count_shape", "count_color", "relation", "read", "unusual", "overview", "camouflage"),
    *("void_count", "void_read", "page_value", "page_cell", "page_title", "page_footnote", "needle"),
)
# Least share of exact answers with all tokens: the mean of some kinds.
BARS = {
    "clips": (("clip_direction", "clip_appears", "clip_first", "clip_blink", "clip_pan", "clip_cut"), 0.90),
    "forms": (("form_value",), 0.85),
    "two ends": (("two_ends",), 0.90),
    "long lines": (("long_line",), 0.90),
}
PRESENCE, WORDINGS, STRANGERS = 0.83, 0.03, 69  # right answers, their loss in POPE's wording, pictures of 70
CHOSEN = ("color", "count_shape", "relation", "read", "camouflage", "page_value", "two_ends", "form_value", "needle")
SELECTORS = (UNTRAINED, TRAINED, "random", "oracle")
BUDGETS = (0.25, 0.125, 0.06)
LEARNED = 2000  # photographs that a linear probe is fitted on


class Check:
    """A model, the selector that was trained for it if there is one, and what was found out about it so far."""

    def __init__(
        self, directory: str, device: str, out: Path | None, given: dict[str, Any], trained: str | None = None
    ) -> None:
        self.processor = load_processor(directory)
        self.model = load_model(directory, dtype=torch.float32).to(device)
        self.out, self.trained = out, TRAINED if trained is None and directory == EMBEDDED else trained
        self.selectors = [name for name in SELECTORS if name != TRAINED or self.trained is not None]
        self.found: dict[str, Any] = {"given": given, "exact": {}, "others": {}}
        if out is not None and out.exists():
            self.found |= read_figures(out)
        if self.found["given"] != given:
            raise typer.BadParameter(f"{out} has figures of {self.found['given']}, not of {given}; give another --out")

    def share(self, samples: list[Example], selector: str | None = None, budget: float | None = None) -> float:
        """Share of exact answers."""
        named = self.trained if selector == TRAINED else selector
        chosen = None if named is None else load_selector(named, self.model)
        answers = answer_examples(self.model, self.processor, samples, chosen, budget)
        return round(exact_match(samples, answers), 4)

    def ask(self, world: str, kind: str, count: int, selector: str | None = None, budget: float | None = None) -> float:
        """Share of exact answers to test samples of a kind."""
        return self.share(draw(world, kind, count), selector, budget)

    def measure(self, part: str, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """A figure of a part, `function(*arguments)` if it is not known; written at once."""
        known = self.found.setdefault(part, {})
        if name not in known:
            begin = time.time()
            known[name] = function(*arguments)
            print(f"{part}: {name}: {known[name]} ({time.time() - begin:.0f} s)", flush=True)
            if self.out is not None:
                write_aside(self.out, json.dumps(self.found, indent=1) + "\n")
        return known[name]


def read_figures(file: Path) -> dict[str, Any]:
    """What was measured; files without `arr-coc-untrained` call it `arr-coc`, and the trained one `embedded`."""
    found: dict[str, Any] = json.loads(file.read_text())
    pruned = found.get("pruned", {})
    if pruned and not any(f", {UNTRAINED}, " in name for name in pruned):
        today = {TRAINED: UNTRAINED, EMBEDDED: TRAINED}
        rows = ((*name.split(", "), share) for name, share in pruned.items())
        found["pruned"] = {f"{kind}, {today.get(who, who)}, {budget}": share for kind, who, budget, share in rows}
    return found


def draw(world: str, kind: str, count: int) -> list[Example]:
    """Test samples of a kind, of the world's own sizes; needles of 1024 pixels, upright forms."""
    return [make_example(world, split_seed("test", index), kind, size_of(world, index)) for index in range(count)]


def size_of(world: str, index: int) -> tuple[int, int] | None:
    """Width and height of a sample; None where its seed decides."""
    if world == "needles":
        return 1024, 1024
    if world == "forms":
        rng = random.Random(f"form {index}")
        height = rng.randint(600, 1200)
        return round(height * rng.uniform(0.62, 0.85)), height
    return None


def strangers() -> list[Example]:
    """Pictures that another program drew."""
    folder, samples = Path(__file__).parents[2] / "tests" / "strangers", []
    for row in json.loads((folder / "answers.json").read_text()):
        with Image.open(folder / row["file"]) as image:
            picture = image.convert("RGB")
        samples.append(Example(row["question"], picture.copy, row["file"], (row["answer"],), kind=row["kind"]))
    return samples


def check_photos(check: Check, folder: Path) -> None:
    """Yes and no in our own wordings and in POPE's, other questions, and whether tokens know where things are."""
    photos, others = read_photos(folder / "validation"), read_photos(folder / "train")[:LEARNED]
    for name, wording in (("presence", "own"), ("presence_pope", "pope")):
        check.measure("photos", name, check.share, presence_examples(photos, 0, wording))
    for kind in ("photo_count", "photo_side", "photo_relation"):
        check.measure("photos", kind, check.share, photo_examples(photos, kind, 0))
    check.measure("photos", "where, by cosine", where_auc, check.model, check.processor, photos)
    check.measure("photos", "where, by a linear probe", probe_auc, check.model, check.processor, photos, others)


def check_needles(check: Check, count: int) -> None:
    """Needles in pictures of 2048 pixels."""
    check.processor.image_processor.size = {"shortest_edge": 128**2, "longest_edge": 2048**2}
    samples = [make_example("needles", split_seed("test", index), None, (2048, 2048)) for index in range(count)]
    check.measure("others", f"needles of 2048 pixels, {count}", check.share, samples)


def failures(found: dict[str, Any], first: dict[str, Any] | None) -> list[str]:
    """What falls short, in words; `first` are the figures of the first edition."""
    exact, photos = found["exact"], found.get("photos", {})
    short = []
    for name, (kinds, bar) in BARS.items():
        known = [exact[kind] for kind in kinds if kind in exact]
        if known and sum(known) / len(known) < bar:
            short.append(f"{name}: {sum(known) / len(known):.4f}, not {bar}")
    if first is not None:
        kinds = [kind for kind in FIRST if kind in exact and kind in first["exact"]]
        losses = {kind: first["exact"][kind] - exact[kind] for kind in kinds}
        if losses and sum(losses.values()) / len(losses) > 0.01:
            short.append(f"the first edition's kinds are {sum(losses.values()) / len(losses):.4f} worse in the mean")
        short += [
            f"{kind} is {loss:.3f} worse than the first edition's" for kind, loss in losses.items() if loss > 0.03
        ]
    if "presence" in photos:
        if photos["presence"] < PRESENCE:
            short.append(f"presence: {photos['presence']}, not {PRESENCE}")
        if photos["presence_pope"] < photos["presence"] - WORDINGS:
            short.append(f"POPE's wording: {photos['presence_pope']} against {photos['presence']} in our own")
    if round(70 * found["others"].get("strangers", 1.0)) < STRANGERS:
        short.append(f"strangers: {found['others']['strangers']}")
    return short


def main(
    model: Annotated[Path | None, typer.Option(help="Directory of a model. [default: the embedded one]")] = None,
    selector: Annotated[
        Path | None, typer.Option(help="Selector trained for the model. [default: the embedded model's own, else none]")
    ] = None,
    n: Annotated[int, typer.Option(help="Samples of a kind.")] = 500,
    pruned: Annotated[int, typer.Option(help="Samples of a kind for each selector and budget.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Where the JSON goes, and what is already known.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cuda" if torch.cuda.is_available() else "cpu",
    kinds: Annotated[str, typer.Option(help="Only these kinds, with commas.")] = "",
    photos: Annotated[Path | None, typer.Option(help="Folder with train and validation, each in COCO format.")] = None,
    large: Annotated[int, typer.Option(help="Needles of 2048 pixels to ask for; better on a GPU.")] = 0,
    first: Annotated[Path | None, typer.Option(help="Figures of the first edition, to compare with.")] = None,
) -> None:
    trained = None if selector is None else str(selector)
    known = {kind: world for part in COURSES["all"] for world, kind in part.kinds if world != "photos"}
    wanted = kinds.split(",") if kinds else list(known)
    if unknown := sorted(set(wanted) - set(known)):
        raise typer.BadParameter(f"no kind is named {', '.join(unknown)}; there are {', '.join(known)}")
    given = {"model": EMBEDDED if model is None else model.name, "samples": n, "pruned": pruned}
    given |= {} if trained is None else {"selector": trained}
    check = Check(str(model or EMBEDDED), device, out, given, trained)
    for kind, world in known.items():
        if kind not in wanted:
            continue
        check.measure("exact", kind, check.ask, world, kind, n)
        if pruned and kind in CHOSEN:
            for name, budget in product(check.selectors, BUDGETS):
                row = f"{kind}, {name}, {budget:g}"
                check.measure("pruned", row, check.ask, world, kind, pruned, name, budget)
    check.measure("others", "strangers", check.share, strangers())
    if photos is not None:
        check_photos(check, photos)
    if large:
        check_needles(check, large)
    short = failures(check.found, None if first is None else read_figures(first))
    print("\n".join(short) or "everything holds")
    raise typer.Exit(int(bool(short)))


if __name__ == "__main__":
    typer.run(main)
