"""The tables and the figure of speed in the pages, from the committed results.

    python benchmarks/speed.py

Reads the files of `FILES` in `benchmarks/results`, writes `docs/images/answers.svg` and what stands between the marks
in the pages.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from marks import ROOT, fill_pages, make_table, paragraph, read_json

from arr_coc.drawing.charts import COLOURS
from arr_coc.drawing.origin import name_origin, stamp_figure
from arr_coc.evaluation.shapes import QUESTION, SHAPES
from arr_coc.runtime.atomic_files import write_aside

FILES = {
    "gaze": "gaze-h200.json",
    "cpu": "ask-cpu.json",
    "limits": "limits-h200.json",
    "batches": "batches-h200.json",
    "questions": "questions-h200.json",
    "repeats": "repeats-h200.json",
    "layer": "layer-h200.json",
    "attach": "attach-h200.json",
}
# `make ask` shows the first.
CPU_ANSWERS = ("first", "later")
FIGURE = ROOT / "docs" / "images" / "answers.svg"
# Methods as the results call them, and as a reader would.
METHODS = {
    "full": "all tokens",
    "downsample": "a smaller picture",
    "saccade, no graphs": "a gaze, `graphs=False`",
    "saccade": "a gaze",
}
LARGE, SMALL = "Qwen3-VL-8B", "Qwen3-VL-2B"
INK = "#666"  # readable in light and dark


class Speed:
    """The results by shape, megapixels and method."""

    def __init__(
        self,
        gaze: Mapping[str, Any],
        cpu: Mapping[str, Any],
        limits: Mapping[str, Any],
        batches: Mapping[str, Any],
        questions: Mapping[str, Any],
        repeats: Mapping[str, Any],
        layer: Mapping[str, Any],
        attach: Mapping[str, Any],
    ) -> None:
        self.drawn = gaze  # what the figure shows
        self.rows = {(row["model"], row["megapixels"], row["method"]): row for row in gaze["rows"]}
        self.answers = {(row["model"], row["method"], row["tokens"]): row["answer"] for row in gaze["answers"]}
        self.append = {row["model"]: row for row in gaze["append"]}
        self.cpu = {when: cpu["times"][f"{when} answer"]["now over before"]["median of pairs"] for when in CPU_ANSWERS}
        self.limits = {row["stage"]: row for row in limits["rows"] if row["model"] == LARGE}
        self.batches = {row["pictures"]: row for row in batches["rows"] if row["model"] == LARGE}
        self.questions, self.repeats = questions, repeats
        self.layer = {(row["stage"], *row["grid"]): row for row in layer["rows"] if row["batch"] == 1}
        self.attach = {(row["model"], row["tokens"], row["kept"]): row for row in attach["rows"]}
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

    def over(self, model: str, method: str, other: str, size: int = 12) -> float:
        """How many times as long the first token takes in one way as in another."""
        time, base = (self.rows[model, size, name]["first_token"]["median_ms"] for name in (method, other))
        return time / base

    def gaze(self, model: str, size: int = 12) -> float:
        """Milliseconds of a gaze to the first token."""
        return self.rows[model, size, "saccade"]["first_token"]["median_ms"]

    def appended(self, model: str) -> float:
        """Milliseconds for 100 tokens added to a cache of 600."""
        return self.append[model]["graphs"]["median_ms"]


class Goal(NamedTuple):
    """What was aimed at, and what was measured."""

    what: str
    goal: float
    measured: float
    unit: str = ""
    least: bool = False  # the goal is the least, not the most

    @property
    def met(self) -> bool:
        return self.measured >= self.goal if self.least else self.measured <= self.goal


def read_speed() -> Speed:
    """The committed results."""
    return Speed(**{key: read_json(f"benchmarks/results/{name}") for key, name in FILES.items()})


def milliseconds(value: float | None) -> str:
    """Three digits are all that the spread allows."""
    return "-" if value is None else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def share(values: Sequence[float]) -> str:
    """The least and the most of ratios, as percents above one."""
    low, high = (f"{100 * (value - 1):.0f}" for value in (min(values), max(values)))
    return f"{low} to {high} %" if low != high else f"{low} %"


def first_tokens(speed: Speed) -> str:
    """Every shape and size, by method."""
    head = "shape, megapixels|full|prune to 529|downsample to 529|saccade|saccade, graphs=False"
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


def limits(speed: Speed) -> str:
    """Each stage of a gaze next to what the machine allows."""
    head = "stage|ms|kernels, ms|at least, ms|kernels|launches|GFLOP|MB"
    rows = []
    for name, row in speed.limits.items():
        times = [f"{row[key]:.1f}" for key in ("median_ms", "kernels_ms", "least_ms")]
        sizes = [f"{row[key]:,.0f}" for key in ("kernels", "launches", "gflop", "megabytes")]
        rows.append([name, *times, *sizes])
    return make_table(head.split("|"), rows)


def left(speed: Speed) -> str:
    """What a faster host and faster kernels could still save."""
    whole, first, token = (speed.limits[name] for name in ("the whole gaze", "first pass", "a decoded token"))
    alone = [row for row in speed.limits.values() if row not in (whole, token)]
    encoder = [speed.limits[name] for name in ("gestalt", "cells")]

    def total(rows: Sequence[Mapping[str, float]], key: str) -> str:
        return f"{sum(row[key] for row in rows):.1f}"

    return paragraph(
        f"Kernels take {whole['kernels_ms']:.1f} of the {whole['median_ms']:.1f} ms of the whole gaze; in "
        f"the other {whole['median_ms'] - whole['kernels_ms']:.1f} none runs, and the device waits. The stages one by "
        f"one take {total(alone, 'median_ms')} ms, because each of them waits for the device at its end. At its peak "
        f"the machine would need {whole['least_ms']:.1f} ms: most of what is left lies inside the kernels. Those of "
        f"the first pass take {first['kernels_ms']:.1f} ms where weights and arithmetic need at least "
        f"{first['least_ms']:.1f}; those of the encoder's two passes {total(encoder, 'kernels_ms')} where they need "
        f"{total(encoder, 'least_ms')}; those of a decoded token {token['kernels_ms']:.1f} where reading the weights "
        f"needs {token['least_ms']:.1f}. Choosing takes {speed.limits['choose']['kernels_ms']:.1f} ms in "
        f"{speed.limits['choose']['kernels']:.0f} kernels that compute next to nothing. Which kernels "
        "lose how much was not taken apart."
    )


def smaller(speed: Speed) -> str:
    """Where a smaller picture is the better choice."""
    ratio = {
        size: [speed.rows[model, size, "saccade"]["times_downsample"] for model in speed.models] for size in speed.sizes
    }
    against = [speed.over(model, "full", "saccade", 1) for model in speed.models]
    plain = [speed.over(model, "saccade, no graphs", "full", 1) for model in (LARGE, SMALL)]
    spread = [
        speed.rows[model, 1, method]["first_token"]["iqr_ms"]
        for model in speed.models
        for method in ("saccade", "full")
    ]
    answer = [speed.answer(model, "saccade", 32) / speed.answer(model, "downsample", 32) for model in (LARGE, SMALL)]
    largest = ", ".join(f"{model} {value:.2f}" for model, value in zip(speed.models, ratio[200], strict=True))
    items = [
        f"At 1 megapixel a gaze takes {min(ratio[1]):.1f} to {max(ratio[1]):.1f} times as long to the first token as a "
        f"smaller picture of as many tokens. All tokens take {share(against)} longer than a gaze, with interquartile "
        f"ranges of {min(spread):.0f} to {max(spread):.0f} ms; with `graphs=False` a gaze takes {share(plain)} longer "
        "than all tokens in Qwen3-VL. Take a smaller picture, or all tokens where detail matters.",
        f"From 4 to 50 megapixels a gaze takes {share(ratio[4] + ratio[12] + ratio[50])} longer to the first token "
        f"than a smaller picture. At 200 it is no slower ({largest} of its time): resizing so many pixels takes longer "
        "than measuring them.",
        f"To the end of an answer of 32 tokens a gaze takes {share(answer)} longer at 12 megapixels.",
    ]
    return "".join(textwrap.fill(item, 120, initial_indent="- ", subsequent_indent="  ") + "\n" for item in items)


def goals(speed: Speed) -> list[Goal]:
    """All of them, met or not."""
    seven = "Qwen2.5-VL-7B"
    found = [
        Goal(f"first token, {LARGE}, 12 megapixels", 40, speed.gaze(LARGE), " ms"),
        Goal(f"first token, {SMALL}, 12 megapixels", 25, speed.gaze(SMALL), " ms"),
    ]
    for model, least in ((LARGE, 34), (SMALL, 30), (seven, 30)):
        times = speed.over(model, "full", "saccade")
        found.append(Goal(f"first token of all tokens over a gaze, {model}, 12 megapixels", least, times, least=True))
    for model in speed.models:
        times = speed.rows[model, 12, "saccade"]["times_downsample"]
        found.append(Goal(f"first token of a gaze over a smaller picture, {model}, 12 megapixels", 1.25, times))
    for model in speed.models:
        times = speed.gaze(model, 200) / speed.gaze(model)
        found.append(Goal(f"first token at 200 megapixels over 12, {model}", 1.5, times))
    for model, least in ((LARGE, 5), (SMALL, 4)):
        gaze = speed.answer(model, "saccade", 32)
        for method, name, goal in (("full", "all tokens", least), ("saccade, no graphs", "`graphs=False`", 2.5)):
            times = speed.answer(model, method, 32) / gaze
            found.append(Goal(f"answer of 32 tokens, {name} over a gaze, {model}", goal, times, least=True))
    for model, most in ((LARGE, 12), (SMALL, 6)):
        found.append(Goal(f"100 tokens appended to 600, {model}", most, speed.appended(model), " ms"))
    for count in (8, 32):
        each = speed.batches[count]["pictures_per_second"]
        found.append(Goal(f"pictures a second, {LARGE}, batches of {count}", 35, each, least=True))
    ratios = speed.questions["ten questions over one"]
    for mode, most in (("saccade", 7), ("prune", 1.6)):
        found.append(Goal(f"ten questions over one, mode `{mode}`, {LARGE}", most, ratios[mode]))
    kept = speed.questions["attached over plain"]
    found.append(Goal(f"first token attached with all tokens kept over plain, {LARGE}", 1.02, kept))
    what = "answer of a process of the embedded model on two CPU cores, over the time before"
    return [*found, *(Goal(f"{when} {what}", 0.7, speed.cpu[when]) for when in CPU_ANSWERS)]


def goals_table(speed: Speed) -> str:
    """Goals with their figures; what falls short is bold."""
    rows = []
    for goal in goals(speed):
        bound = f"{'at least' if goal.least else 'at most'} {goal.goal:g}{goal.unit}"
        digits = 1 if goal.measured >= 10 else 3 if abs(goal.measured - goal.goal) < 0.03 * goal.goal else 2
        rows.append([goal.what, bound, f"{goal.measured:.{digits}f}{goal.unit}", "yes" if goal.met else "**no**"])
    return make_table(["", "goal", "measured", "met"], rows)


def margins(speed: Speed) -> str:
    """What repeated measurements say about goals that are missed or barely met."""
    rows = {row["run"]: row["median_ms"] for row in speed.repeats["append"][SMALL]}
    early = [time for run, time in rows.items() if not run.startswith(("fifth", "sixth"))]
    [fifth] = [time for run, time in rows.items() if run.startswith("fifth")]
    late = [time for run, time in rows.items() if run.startswith("sixth")]
    large, small = (speed.rows[model, 12, "saccade"]["first_token"]["iqr_ms"] for model in (LARGE, SMALL))
    unrested = speed.repeats["ten questions over one"][0]
    return paragraph(
        f"Appending with {SMALL} took {min(early):.2f} to {max(early):.2f} ms in {len(early)} runs before queries and "
        f"keys were turned in one go. Since then it took {fifth:.2f} ms on one host and {min(late):.2f} to "
        f"{max(late):.2f} on another, which missed the goal; since these runs each layer starts three kernels fewer, "
        f"which was not measured. Two goals are met by less than the spread, and another "
        f"run may miss them: the first token of {LARGE} (interquartile range {large:.1f} ms) and the ratio of {SMALL} "
        f"(gaze {small:.1f} ms). Ten questions were also measured without a rest before each call: "
        f"{unrested['saccade']:.1f} in mode `saccade`, which misses the goal, and {unrested['prune']:.2f} in mode "
        "`prune`."
    )


def attached(speed: Speed) -> str:
    """What an attachment adds that keeps everything."""
    rows = speed.repeats["attached over plain"]
    before = [f"{row['ratio']:.3f}" for row in rows if not row["lengths on the host"]]
    kept = speed.questions["attach, all kept"]["attached, all kept"]
    return paragraph(
        f"**With an attachment that keeps everything.** It adds less than the spread: "
        f"{speed.questions['attached over plain']:.3f} of the plain model's time to the first token ({LARGE}, 4096 "
        f"tokens, one run, interquartile range {kept['iqr_ms']:.1f} of {kept['median_ms']:.0f} ms). It was "
        f"{', '.join(before[:-1])} and {before[-1]} in {len(before)} runs before the lengths of pictures were given on "
        "the host: without them every layer of the encoder waits for the device, as it does in the plain model. The "
        "windows of Qwen2.5-VL still do."
    )


def questions(speed: Speed) -> str:
    """The sentence of the recipes."""
    ratios = speed.questions["ten questions over one"]
    return paragraph(
        f"On one NVIDIA H200, at the shape of {LARGE} with random weights and a picture of 12 megapixels, ten "
        f"questions take {ratios['prune']:.2f} times as long to their first tokens as one question in mode `prune`, "
        f"and {ratios['saccade']:.1f} times in mode `saccade`, where each needs its own pass "
        "(`benchmarks/questions.py`, `benchmarks/results/questions-h200.json`)."
    )


def statistics_mb(row: Mapping[str, float]) -> float:
    """By the table of memory: 1.5 bytes a pixel for each picture."""
    return 1.5 * row["megapixels"] * row["pictures"]


def cache_mb(row: Mapping[str, float]) -> float:
    """Keys and values in bf16 of the tokens that are read, the text and the picture's two marks."""
    _, (_, _, layers, _, heads), _, _ = SHAPES[LARGE]
    return 2 * layers * heads * 128 * 2 * (row["tokens_per_picture"] + QUESTION + 2) * row["pictures"] / 1e6


def batches(speed: Speed) -> str:
    """Pictures a second and memory by the size of a batch."""
    head = "pictures|ms|pictures a second|over batches of one|peak, MB|statistics, MB|keys and values, MB"
    rows = []
    for count, row in speed.batches.items():
        spread = f"{row['first_token']['median_ms']:.1f} ({row['first_token']['iqr_ms']:.1f})"
        rates = [f"{row['pictures_per_second']:.1f}", f"{row['over_batches_of_one']:.2f}"]
        rows.append(
            [str(count), spread, *rates, *(f"{x:,.0f}" for x in (row["peak_mb"], statistics_mb(row), cache_mb(row)))]
        )
    return make_table(head.split("|"), rows)


def batch_memory(speed: Speed) -> str:
    """What the figures say."""
    most, eight = max(speed.batches), 8
    row = speed.batches[most]
    each = (row["peak_mb"] - speed.batches[eight]["peak_mb"]) / (most - eight)
    gain = speed.batches[eight]["over_batches_of_one"]
    return paragraph(
        f"Batches of {eight} answer {gain:.2f} times as many pictures a second as batches of one; larger ones add "
        f"little, but {each:.0f} MB a picture. The table of memory bounds what the pictures take, not the whole: with "
        f"{most} of them the peak is {row['peak_mb'] / 1e3:.1f} GB, where statistics take "
        f"{statistics_mb(row) / 1e3:.1f} and keys and values {cache_mb(row) / 1e3:.1f}. The rest, among it strips of "
        "pixels and what the model computes over all rows at once, was not taken apart."
    )


def layer_costs(speed: Speed) -> str:
    """Stages of the layer beside one pass of the encoder."""
    rows = []
    for grid in dict.fromkeys(key[1:] for key in speed.layer):
        times = [
            speed.layer[stage, *grid]["median_ms"]
            for stage in ("texture_full", "scoring_to_allocation", "layer", "encoder")
        ]
        tokens, sides = grid[0] * grid[1], f"{32 * grid[1]}x{32 * grid[0]}"
        cells = [
            f"{value:.2f}" if value < 0.995 else f"{value:.1f}" if value < 10 else f"{value:.0f}" for value in times
        ]
        rows.append([f"{sides} ({tokens})", *cells, f"{100 * times[2] / times[3]:.1f} %"])
    head = "picture (tokens)|texture, 40 channels|scoring to allocation|whole layer|encoder|share"
    memory = f"Beyond its inputs, the layer takes {speed.layer['layer', 32, 32]['peak_mb']:.0f} MB at 1024x1024.\n"
    return f"{make_table(head.split('|'), rows)}\n{memory}"


def attach_costs(speed: Speed) -> str:
    """Time to the first token with tokens dropped after the encoder, over the plain model's."""
    rows = []
    for model, tokens in dict.fromkeys(key[:2] for key in speed.attach if key[0] in SHAPES):
        plain, full, few = (speed.attach[model, tokens, kept] for kept in ("plain", "full", 400))
        cells = []
        for kept in ("full", 1024, 400, 64):
            row = speed.attach.get((model, tokens, kept))
            cells.append(
                "-" if row is None else f"{row['first_token']['median_ms']:.0f} ({row['first_token_ratio']:.2f})"
            )
        prefill = " / ".join(f"{row['prefill']['median_ms']:.0f}" for row in (full, few))
        cache = " / ".join(f"{row['cache_bytes'] / 1e6:.0f}" for row in (full, few))
        rows.append([f"{model}, {tokens}", f"{plain['first_token']['median_ms']:.0f}", *cells, prefill, cache])
    head = "shape, tokens|plain|keep all|keep 1024|keep 400|keep 64|prefill: all / 400|cache: all / 400, MB"
    most = {
        compiled: max(
            row["first_token_ratio"]
            for (model, tokens, kept), row in speed.attach.items()
            if kept == "full" and tokens >= 4096 and ("compiled" in model) == compiled
        )
        for compiled in (False, True)
    }
    said = paragraph(
        f"Keeping all tokens costs at most {100 * (most[False] - 1):.1f} % over the plain model from 4096 tokens on "
        f"({100 * (most[True] - 1):.1f} % with compiled layers)."
    )
    return f"{make_table(head.split('|'), rows)}\n{said}"


def costs(speed: Speed) -> str:
    """The table of the README: what is read, by the size of the picture."""
    sizes = (1, 12, 200)
    rows = []
    for method, name in (
        ("full", "all tokens"),
        ("prune", "`prune` to 529"),
        ("downsample", "smaller picture, 529"),
        ("saccade", "`saccade`, 529"),
    ):
        whole = speed.answers.get((LARGE, method, 32), {}).get("median_ms")
        rows.append([name, *(milliseconds(speed.first(LARGE, size, method)) for size in sizes), milliseconds(whole)])
    return make_table(["", *(f"{size} MP" for size in sizes), "12 MP, 32 tokens"], rows)


PAGES: dict[str, dict[str, Callable[[Speed], str]]] = {
    "docs/gaze.md": {"first tokens": first_tokens},
    "docs/performance.md": {
        "stages": stages,
        "sizes": sizes,
        "answers": answers,
        "lengths": lengths,
        "appended": appended,
        "limits": limits,
        "left": left,
        "attached": attached,
        "smaller": smaller,
        "goals": goals_table,
        "margins": margins,
        "layer": layer_costs,
        "attach": attach_costs,
    },
    "docs/batches.md": {"batches": batches, "batch memory": batch_memory},
    "docs/recipes.md": {"questions": questions},
}


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
                f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{name.replace("`", "")}</text>',
                f'<rect x="{left}" {shape} width="{middle:.1f}"/>',
                f'<rect x="{left + middle:.1f}" {shape} fill-opacity="0.4" width="{end - middle:.1f}"/>',
                f'<text x="{left + end + 6:.1f}" y="{y + 14}">{milliseconds(whole)}</text>',
            ]
            y += step
        y += top
    label = "milliseconds to an answer of 32 tokens; darker: to the first token"
    parts.append(f'<text x="{left}" y="{y - 18}">{label}</text>')
    origin = name_origin(speed.drawn["machine"])
    parts.append(f'<text x="12" y="{y - 3}" font-size="9" fill-opacity="0.7">{origin}</text>')
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 {y}" role="img" aria-label="{label}" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="{INK}">'
    )
    return stamp_figure("\n".join([opening, *parts, "</svg>"]), speed.drawn)


def main() -> None:
    """Write the figure and the tables."""
    speed = read_speed()
    write_aside(FIGURE, draw_answers(speed))
    fill_pages(PAGES, speed, "speed")


if __name__ == "__main__":
    main()
