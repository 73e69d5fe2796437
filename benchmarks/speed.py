"""The tables and the figure of speed in README and docs, from the committed results.

    python benchmarks/speed.py

Reads `benchmarks/results/gaze-h200.json` and `ask-cpu.json`, writes `docs/images/answers.svg` and what stands between
the marks in the pages.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from arr_coc.drawing.charts import COLOURS
from arr_coc.runtime.atomic_files import write_aside

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
FIGURE = ROOT / "docs" / "images" / "answers.svg"
# Methods as the results call them, and as a reader would.
METHODS = {
    "full": "all tokens",
    "downsample": "a smaller picture",
    "saccade, no graphs": "a gaze, language not recorded",
    "saccade": "a gaze",
}
LARGE, SMALL = "Qwen3-VL-8B", "Qwen3-VL-2B"
INK = "#666"  # readable in light and dark


class Speed:
    """The results by shape, megapixels and method."""

    def __init__(self, gaze: Mapping[str, Any], cpu: Mapping[str, Any]) -> None:
        self.rows = {(row["model"], row["megapixels"], row["method"]): row for row in gaze["rows"]}
        self.answers = {(row["model"], row["method"], row["tokens"]): row["answer"] for row in gaze["answers"]}
        self.append = {row["model"]: row for row in gaze["append"]}
        self.cpu = cpu["times"]["later answer"]["now over before"]["median of pairs"]
        self.models = list(dict.fromkeys(row["model"] for row in gaze["rows"]))
        self.sizes = sorted({row["megapixels"] for row in gaze["rows"]})
        self.lengths = sorted({row["tokens"] for row in gaze["answers"]})

    def first(self, model: str, size: int, method: str) -> float | None:
        """Milliseconds to the first token; None if that was not measured."""
        row = self.rows.get((model, size, method))
        return None if row is None else row["first_token"]["median_ms"]

    def answer(self, model: str, method: str, tokens: int) -> float:
        """Milliseconds of a whole answer."""
        return self.answers[model, method, tokens]["median_ms"]


def read_speed() -> Speed:
    """The committed results."""
    return Speed(*(json.loads((RESULTS / name).read_text()) for name in ("gaze-h200.json", "ask-cpu.json")))


def make_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" if line[0] != "---" else f"|{'|'.join(line)}|\n" for line in lines)


def milliseconds(value: float | None) -> str:
    """Three digits are all that the spread allows."""
    return "-" if value is None else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def first_tokens(speed: Speed) -> str:
    """Every shape and size, by method."""
    head = "shape, megapixels|full|prune to 529|downsample to 529|saccade|saccade, language not recorded"
    head += "|full / saccade|saccade / downsample|memory, MB"
    rows = []
    for model in speed.models:
        for size in speed.sizes:
            times = [
                speed.first(model, size, method)
                for method in ("full", "prune", "downsample", "saccade", "saccade, no graphs")
            ]
            saccade, full = speed.rows[model, size, "saccade"], speed.rows.get((model, size, "full"))
            faster = "-" if full is None else f"{times[0] / times[3]:.1f}"
            memory = f"{saccade['peak_mb']:.0f}" + ("" if full is None else f" (full {full['peak_mb']:.0f})")
            ratio = f"{saccade['times_downsample']:.3f}"
            rows.append([f"{model}, {size}", *map(milliseconds, times), faster, ratio, memory])
    return make_table(head.split("|"), rows)


def stages(speed: Speed) -> str:
    """One gaze by stage at the smallest, the usual and the largest size."""
    rows = []
    for model in speed.models:
        for size in (speed.sizes[0], 12, speed.sizes[-1]):
            row = speed.rows[model, size, "saccade"]
            parts = [row["texture"]["median_ms"], *(row["stages_ms"][name] for name in ("select", "encode", "prefill"))]
            rows.append([f"{model}, {size}", *(f"{value:.1f}" for value in parts)])
    return make_table(["shape, megapixels", "texture alone", "select", "encode", "prefill"], rows)


def sizes(speed: Speed) -> str:
    """How the time to the first token grows with the picture; in brackets the spread."""
    rows = []
    for model in speed.models:
        for method in ("saccade", "downsample", "full"):
            cells = []
            for size in speed.sizes:
                row = speed.rows.get((model, size, method))
                spread = "" if row is None else f" ({row['first_token']['iqr_ms']:.1f})"
                cells.append(milliseconds(speed.first(model, size, method)) + spread)
            rows.append([f"{model}, {METHODS[method]}", *cells])
    return make_table(["", *(f"{size} MP" for size in speed.sizes)], rows)


def answers(speed: Speed) -> str:
    """Answers of 32 tokens by method."""
    rows = []
    for method, name in METHODS.items():
        cells = []
        for model in (LARGE, SMALL):
            time = speed.answer(model, method, 32)
            cells += [milliseconds(time), f"{speed.answer(model, 'full', 32) / time:.1f}"]
        rows.append([name, *cells])
    return make_table(["", LARGE, "times faster", SMALL, "times faster"], rows)


def lengths(speed: Speed) -> str:
    """Answers of a gaze by length, and what a token after the first one takes."""
    rows = []
    for model in (LARGE, SMALL):
        times = [speed.answer(model, "saccade", count) for count in speed.lengths]
        each = (times[-1] - times[0]) / (speed.lengths[-1] - speed.lengths[0])
        rows.append([model, *map(milliseconds, times), f"{each:.2f}"])
    counts = [f"{count} token{'s' * (count > 1)}" for count in speed.lengths]
    return make_table(["", *counts, "each further token"], rows)


def appended(speed: Speed) -> str:
    """100 tokens added to a cache of 600."""
    rows = [
        [model, *(milliseconds(row[kind]["median_ms"]) for kind in ("graphs", "no graphs"))]
        for model, row in speed.append.items()
    ]
    return make_table(["", "recorded", "not recorded"], rows)


def missed(speed: Speed) -> str:
    """The goals that are not reached."""
    goals = [
        (f"first token, {LARGE}, 12 megapixels", "40 ms", milliseconds(speed.first(LARGE, 12, "saccade")) + " ms"),
        (
            f"first token, {SMALL}, 12 megapixels, over that of a smaller picture",
            "1.25",
            f"{speed.rows[SMALL, 12, 'saccade']['times_downsample']:.3f}",
        ),
        (
            f"100 tokens appended to 600, {SMALL}",
            "6 ms",
            milliseconds(speed.append[SMALL]["graphs"]["median_ms"]) + " ms",
        ),
        ("an answer of the embedded model on two CPU cores, over the time before", "0.7", f"{speed.cpu:.2f}"),
    ]
    return make_table(["", "goal", "measured"], goals)


def summary(speed: Speed) -> str:
    """The sentences of the README."""
    full, prune, small, saccade = (
        milliseconds(speed.first(LARGE, 12, method)) for method in ("full", "prune", "downsample", "saccade")
    )
    whole, gaze = (milliseconds(speed.answer(LARGE, method, 32)) for method in ("full", "saccade"))
    text = (
        f"On one NVIDIA H200 at the shape of {LARGE} (random weights, bf16), a 12-megapixel photograph takes {full} ms "
        f"to the first token with all tokens, {prune} pruned to 529, {small} as a smaller picture and {saccade} with "
        f"saccades; one of 200 megapixels takes {milliseconds(speed.first(LARGE, 200, 'saccade'))}. "
        f"An answer of 32 tokens takes {whole} ms with all tokens and {gaze} with saccades."
    )
    return textwrap.fill(text, 120) + "\n"


PAGES: dict[str, dict[str, Callable[[Speed], str]]] = {
    "README.md": {"speed": summary},
    "docs/gaze.md": {"first tokens": first_tokens},
    "docs/performance.md": {
        "stages": stages,
        "sizes": sizes,
        "answers": answers,
        "lengths": lengths,
        "appended": appended,
        "missed": missed,
    },
}


def fill_page(text: str, blocks: Mapping[str, Callable[[Speed], str]], speed: Speed) -> str:
    """A page with what stands between its marks made anew."""
    for name, make in blocks.items():
        begin, end = f"<!-- {name}: made by benchmarks/speed.py -->\n", f"<!-- /{name} -->\n"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise ValueError(f"the marks {begin.strip()} and {end.strip()} must both be in the page")
        text = f"{before}{begin}{make(speed)}{end}{after}"
    return text


def draw_answers(speed: Speed) -> str:
    """Bars of the time to an answer of 32 tokens, in the darker part to its first token."""
    left, width, bar, step, top = 210, 370, 20, 30, 34
    longest = max(speed.answer(model, "full", 32) for model in (LARGE, SMALL))
    parts, y = [], top
    for model, colour in ((LARGE, COLOURS[0]), (SMALL, COLOURS[1])):
        parts.append(f'<text x="12" y="{y - 10}" font-weight="bold">{model}</text>')
        for method, name in METHODS.items():
            whole, first = speed.answer(model, method, 32), speed.first(model, 12, method) or 0.0
            end, middle = (width * value / longest for value in (whole, first))
            shape = f'y="{y}" height="{bar}" fill="{colour}"'
            parts += [
                f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{name}</text>',
                f'<rect x="{left}" {shape} width="{middle:.1f}"/>',
                f'<rect x="{left + middle:.1f}" {shape} fill-opacity="0.4" width="{end - middle:.1f}"/>',
                f'<text x="{left + end + 6:.1f}" y="{y + 14}">{milliseconds(whole)}</text>',
            ]
            y += step
        y += top
    label = "milliseconds to an answer of 32 tokens; darker: to the first token"
    parts.append(f'<text x="{left}" y="{y - 18}">{label}</text>')
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 {y}" role="img" aria-label="{label}" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="{INK}">'
    )
    return "\n".join([opening, *parts, "</svg>\n"])


def main() -> None:
    """Write the figure and the tables."""
    speed = read_speed()
    write_aside(FIGURE, draw_answers(speed))
    for name, blocks in PAGES.items():
        page = ROOT / name
        write_aside(page, fill_page(page.read_text(encoding="utf-8"), blocks, speed))


if __name__ == "__main__":
    main()
