"""The tables and the figure of accuracy in the pages, from the committed results.

    python benchmarks/accuracy.py

Reads the files of `FILES`, writes `docs/images/bench.svg` and what stands between the marks in the pages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from statistics import fmean
from typing import Any

from marks import ROOT, fill_pages, make_table, paragraph, read_json

from arr_coc.drawing.origin import stamp_figure
from arr_coc.evaluation.contenders import FULL, OURS, split_name
from arr_coc.evaluation.report.sections import write_budget
from arr_coc.evaluation.report.summary import find_best, write_accuracy
from arr_coc.evaluation.report.write import draw_charts
from arr_coc.runtime.atomic_files import write_aside

FILES = {
    "selectors": "benchmarks/results/eval-h200/summary.json",
    "model": "recipes/embedded/editions/first.json",  # the shipped edition, as recipes/embedded/check.py measures it
    "selector": "recipes/selector/results/figures.json",
    "gaze": "recipes/selector/results/gaze.json",
    "estimators": "recipes/selector/results/estimators.json",
    "parts": "recipes/selector/results/ablation.json",
    "memory": "benchmarks/results/training-h200.json",
    "own": "benchmarks/results/eval-own-attention-cpu/summary.json",
    "looks": "recipes/selector/results/looks.json",
    "tensions": "recipes/selector/results/tensions.json",
    "open": "recipes/selector/results/open_questions.json",
}
RESULTS = ROOT / FILES["selectors"]
FIGURE = ROOT / "docs" / "images" / "bench.svg"
# The README's columns, and its rows: ours, these, and the best of the others. docs/accuracy.md has all.
SHORT, ALWAYS, OTHERS = ("0.5", "0.25", "0.06"), (FULL, "oracle", "downsample", "grid", "random"), 8
# Kinds of questions as a reader would ask them.
QUESTIONS = {
    "color": "what color is the star?",
    "count_shape": "how many stars are there?",
    "count_color": "how many red things are there?",
    "relation": "what is left of the red star?",
    "read": "what does the red text say?",
    "unusual": "what is unusual?",
    "overview": "what is in the picture?",
    "camouflage": "gray text on gray, beside a bright red box",
    "void_count": "counts on noise, splatter, flat fields",
    "void_read": "text on noise, splatter, flat fields",
    "page_value": "pages: what is the total?",
    "page_cell": "pages: what is the price of the bread?",
    "page_title": "pages: what is the title?",
    "page_footnote": "pages: what does the footnote say?",
    "needle": "large pictures: what does the sign next to the red star say?",
}

Found = Mapping[str, Any]


def read_found() -> dict[str, Any]:
    """The committed results."""
    return {name: read_json(path) for name, path in FILES.items()}


def select_rows(summary: Found) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """Budgets, and rows by selector and budget, the best selectors first."""
    by: dict[str, dict[str, Any]] = {}
    for row in summary["rows"]:
        by.setdefault(row["selector"], {})[row["budget"]] = row
    budgets = list(dict.fromkeys(row["budget"] for row in summary["rows"] if row["budget"] != FULL))
    names = sorted(by, key=lambda name: -sum(accuracy(by[name], budget) for budget in budgets))
    return budgets, {name: by[name] for name in names}


def accuracy(rows: Mapping[str, Any], budget: str) -> float:
    """Mean accuracy of a selector at a budget."""
    return rows.get(budget, rows.get(FULL, {})).get("accuracy", 0.0)


def compare(summary: Found, short: bool = False) -> str:
    """Selectors by mean accuracy; unless `short`, also how far they hold, and what choosing takes."""
    budgets, rows = select_rows(summary)
    if short:
        budgets = [budget for budget in budgets if budget in SHORT]
        others = [name for name in rows if name not in ALWAYS and not name.startswith(OURS)]
        rows = {name: row for name, row in rows.items() if name not in others[OTHERS:]}
    best = {budget: find_best({name: accuracy(row, budget) for name, row in rows.items()}) for budget in budgets}
    lines = []
    for name, row in rows.items():
        cells = [f"**{name}**" if name == OURS else name]
        for budget in budgets:
            value = write_accuracy(accuracy(row, budget))
            cells.append(f"**{value}**" if name in best[budget] else value)
        if not short:
            held, spent = summary["gives_in"].get(name), row.get("0.25", {}).get("times", {}).get("select_ms")
            cells.append("" if name == FULL else "-" if held is None else f"{100 * held:.0f} %")
            cells.append("" if spent is None or name == "fastv" else f"{spent:.1f}")
        lines.append(cells)
    head = ["selector", *(write_budget(budget) for budget in budgets)]
    return make_table([*head, *([] if short else ["95 % held to", "select, ms"])], lines)


def selectors(found: Found) -> str:
    """All selectors, with what choosing costs."""
    return compare(found["selectors"])


def selectors_in_short(found: Found) -> str:
    """The README's rows, and where ours is weakest."""
    return f"{compare(found['selectors'], short=True)}\n{weakest(found)}"


def percent(share: str) -> str:
    return f"{100 * float(share):g} %"


def kinds(found: Found) -> str:
    """The embedded model by kind of question, with all tokens and with a quarter of them."""
    model = found["model"]
    names = list(dict.fromkeys(key.split(", ")[1] for key in model["pruned"]))
    rows = []
    for kind, right in model["exact"].items():
        kept = (model["pruned"].get(f"{kind}, {name}, 0.25") for name in names)
        rows.append([QUESTIONS.get(kind, kind), f"{right:.3f}", *("" if x is None else f"{x:.3f}" for x in kept)])
    table = make_table(["question", "all tokens", *(f"a quarter, {name}" for name in names)], rows)
    given = model["given"]
    return (
        paragraph(
            f"Exact answers of the {given['model']} on {given['samples']} held-out pictures of each kind with all "
            f"tokens, and on {given['pruned']} of some kinds with a quarter of them; a blank was not measured."
        )
        + f"\n{table}"
    )


def weakest(found: Found) -> str:
    """The kind of question at which the trained selector loses most."""
    exact, pruned = found["model"]["exact"], found["model"]["pruned"]
    right = {kind: pruned[f"{kind}, {OURS}, 0.25"] for kind in exact if f"{kind}, {OURS}, 0.25" in pruned}
    kind = max(right, key=lambda kind: exact[kind] - right[kind])
    others = ", ".join(
        f"`{name}` {pruned[f'{kind}, {name}, 0.25']:.3f}"
        for name in ("arr-coc-untrained", "random", "oracle")
        if f"{kind}, {name}, 0.25" in pruned
    )
    return paragraph(
        f'Of {len(right)} kinds of questions, `{OURS}` is weakest at "{QUESTIONS.get(kind, kind)}": '
        f"{right[kind]:.3f} right with a quarter of the tokens ({others})."
    )


def photographs(found: Found) -> str:
    """What the embedded model knows of photographs and of strangers' pictures."""
    photos, others = found["model"]["photos"], found["model"]["others"]
    places = sorted(photos["where, by cosine"].items(), key=lambda row: row[1])
    mean = sum(value for _, value in places) / len(places)
    (worst, low), (best, high) = places[0], places[-1]
    return paragraph(
        f'On balanced yes/no questions ("is there a dog?") about 500 unseen photographs, {photos["presence"]:.3f} of '
        f"its answers are right; asked in POPE's wording, {photos['presence_pope']:.3f}. Its tokens also say where "
        f"things are: the area under the curve of the cosine between token and class name is {mean:.3f} on average "
        f"over {len(places)} classes, from {worst} ({low:.2f}) to {best} ({high:.2f}). On 70 pictures drawn by another "
        f"program with other fonts (`tests/strangers`) {100 * others['strangers']:.0f} % of the answers are right."
    )


def learned(found: Found) -> str:
    """The trained selector beside rules and the oracle."""
    answers = {share: row for share, row in found["selector"]["answers"].items() if isinstance(row, dict)}
    names = ["selector", "oracle", "arr-coc-untrained", "centre", "grid", "random", "downsample"]
    rows = [
        [percent(share), *(f"{row[name]['all']:.3f}" for name in names), f"{row['share of oracle']:.3f}"]
        for share, row in answers.items()
    ]
    table = make_table(["tokens kept", OURS, *names[1:], "share of the oracle's"], rows)
    return f"{table}\nAll tokens reach {found['selector']['answers']['full']:.3f}.\n"


def looking(found: Found) -> str:
    """Where the trained selector looks."""
    figures = found["selector"]
    wins = ", ".join(f"{100 * row['wins']:.0f} % at {percent(share)}" for share, row in figures["camouflage"].items())
    photos, said = figures["overlap"]["photos"], figures["expressions"]
    covered, kept, same = said["coverage"], said["kept coverage"], said["pairs by category"]["same category"][0]
    found_things = paragraph(
        "Asked for gray text on gray, it gives the text more than twice the tokens of the bright red box beside it in "
        f"{wins} of the tokens (share of the samples at a budget). On COCO photographs it finds a named class with an "
        f"overlap of {photos['selector']:.3f} (random {photos['random']:.3f}, `arr-coc-untrained` "
        f"{photos['arr-coc-untrained']:.3f})."
    )
    meant_things = paragraph(
        "On referring expressions, the quarter of the tokens with the highest relevance covers "
        f"{covered['selector']:.3f} of the meant object, {said['times the best blind rule']:.2f} times what `centre` "
        "covers, the best rule that ignores the question. The quarter that is really kept also explores, carries text "
        f"along and drops near-duplicates; it covers {kept['selector']:.3f} (`centre` {kept['centre']:.3f}). The "
        f"selector ranks the meant object above another one in the same photograph in {100 * said['pairs']:.1f} % of "
        f"the pairs ({100 * same:.1f} % where both have the same category): better than chance, but not good."
    )
    return f"{found_things}\n{meant_things}"


def grid_of(rows: Mapping[str, Mapping[str, Any]], first: str = "") -> str:
    """Rows by world: exact answers, and milliseconds where they were measured."""
    worlds = list(max(rows.values(), key=len))
    order = [world for world in ("needles 2048", "needles 1024", "scenes 1024", "pages 1024") if world in worlds]
    order += [world for world in worlds if world not in order]

    def write(cell: Mapping[str, float]) -> str:
        times = f", {cell['first_token_ms']:.0f} ms" if "first_token_ms" in cell else ""
        return f"{cell['right']:.2f}{times}"

    return make_table(
        [first, *order], [[name, *(write(cells[world]) for world in order)] for name, cells in rows.items()]
    )


def rivals(found: Found) -> str:
    """The same number of tokens, spent in different ways."""
    return grid_of(found["gaze"]["tables"]["rivals"])


def saccades(found: Found) -> str:
    """What more saccades add."""
    return grid_of(found["gaze"]["tables"]["saccades"], "saccades")


def gaze_parts(found: Found) -> str:
    """What each part of the gaze contributes."""
    return grid_of(found["gaze"]["tables"]["gaze"])


def compression(found: Found) -> str:
    """Relevance, compression, and both."""
    return grid_of(found["gaze"]["tables"]["coc"])


def signs(found: Found) -> str:
    """What each way of spending 529 tokens reads of a large picture."""
    right = {name: cells["needles 2048"]["right"] for name, cells in found["gaze"]["tables"]["rivals"].items()}
    return paragraph(
        f"Of small signs in pictures of 2048x2048 pixels the embedded model reads {right['all tokens']:.2f} with all "
        f"tokens, {right['prune']:.2f} pruned to 529, {right['downsample']:.2f} in a smaller picture and "
        f"{right['saccade']:.2f} with saccades ({found['gaze']['samples']} pictures)."
    )


def estimators(found: Found) -> str:
    """Loss, answers and memory of the estimators."""
    stages = found["estimators"]["stages"]
    peak = {(row["model"], row["estimator"]): row["peak_mb"] / 1e3 for row in found["memory"]["rows"]}
    rows = []
    for name in stages["answers"]:
        cells = [f"`{name}`"]
        for stage in ("answers", "hard"):
            row = stages[stage][name]
            cells.append(f"{row['first loss']:.2f} to {row['last loss']:.2f}")
            cells += [f"{row[f'scenes {x}']:.2f} / {row[f'camouflage {x}']:.2f}" for x in ("0.125", "0.06")]
        rows.append([*cells, *(f"{peak[f'Qwen3-VL-{size}', name]:.1f}" for size in ("2B", "4B"))])
    head = ["`answers`: loss", "at 12.5 %", "at 6 %", "`hard`: loss", "at 12.5 %", "at 6 %", "2B", "4B"]
    return make_table(["", *head], rows)


def parts(found: Found) -> str:
    """The layer with one part removed."""
    overlap = ["worlds", "pages", "expressions"]
    answered = [f"{world} answered" for world in ("scenes", "camouflage", "pages")]
    rows = [[name, *(f"{row[x]:.2f}" for x in overlap + answered)] for name, row in found["parts"]["rows"].items()]
    return make_table(["", "overlap: worlds", *overlap[1:], "answers: scenes", "camouflage", "pages"], rows)


def own_attention(found: Found) -> str:
    """The model's own attention beside other selectors, with what the language model spends."""
    budgets, rows = select_rows(found["own"])
    best = {
        budget: find_best({name: accuracy(by, budget) for name, by in rows.items() if split_name(name)[0] != OURS})
        for budget in budgets
    }
    lines = []
    for name, by in rows.items():
        cells = [f"`{name}`"]
        for budget in budgets:
            text = write_accuracy(accuracy(by, budget))
            cells.append(f"**{text}**" if name in best[budget] else text)
        costs = [by[FULL]] if FULL in by else [by[budget] for budget in budgets]
        cells.append(" / ".join(f"{row['processed']:.0f}" for row in costs))
        cells.append(" / ".join(f"{row['language_gmacs'] + row['choosing_gmacs']:.2f}" for row in costs))
        lines.append(cells)
    head = ["selector", *map(write_budget, budgets), "tokens processed", "GMAC of language model and choosing"]
    return make_table(head, lines)


# Worlds of the looks whose mean is taken, and the ways to read, as a reader would name them.
LOOKED = ("scenes, 512", "camouflage, 512", "void, 512", "pages, 512")
WAYS = {
    "full": "all tokens", "0.5": "1/2", "0.25": "1/4", "0.125": "1/8", "0.0625": "1/16", "auto": "`auto`",
    "0.5 asked": "1/2, asked", "0.25 asked": "1/4, asked", "0.125 asked": "1/8, asked",
    "0.0625 asked": "1/16, asked",
}  # fmt: skip


def looks_by_world(found: Found) -> str:
    """Right answers, and the share of tokens that was read, by world and way."""
    worlds, lines = found["looks"]["worlds"], []
    for way, name in WAYS.items():
        rows = [worlds[world][way] for world in LOOKED]
        mean = {key: fmean(row[key] for row in rows) for key in ("right", "share")}
        more = worlds["needles, 1024"].get(way)
        cells = [f"{row['right']:.2f} ({row['share']:.2f})" if row else "-" for row in (*rows, more)]
        lines.append([name, f"{mean['right']:.3f} ({mean['share']:.3f})", *cells])
    return make_table(["", "mean of 512 pixels", *LOOKED, "needles, 1024"], lines)


def looks_at_large(found: Found) -> str:
    """Needles of 2048 pixels."""
    rows = found["looks"]["worlds"]["needles, 2048"].items()
    lines = [[WAYS.get(way, f"`{way}`"), f"{row['right']:.2f}", f"{row['share']:.3f}"] for way, row in rows]
    return make_table(["", "right", "share of 4096 tokens"], lines)


def sureness(found: Found) -> str:
    """What sureness is worth, over all answers of mode auto."""
    ways = [row for by_way in found["looks"]["worlds"].values() for row in by_way.values()]
    answers = [each for row in ways for each in row.get("answers", ())]
    at_once = [right for _, right, looks in answers if looks == 1]
    lines, error = [], 0.0
    for low, high in pairwise((0.0, 0.5, 0.8, 0.9, 0.95, 0.99, 1.01)):
        group = [(sure, right) for sure, right, _ in answers if low <= sure < high]
        if group:
            sure, right = (fmean(part) for part in zip(*group, strict=True))
            error += len(group) / len(answers) * abs(sure - right)
            lines.append([f"{low:g} to {min(high, 1):g}", str(len(group)), f"{sure:.3f}", f"{right:.3f}"])
    said = paragraph(
        f"Of {len(answers)} answers {len(at_once) / len(answers):.0%} were sure at once; of these "
        f"{sum(at_once) / max(1, len(at_once)):.1%} were right. The expected calibration error is {error:.3f}."
    )
    return f"{make_table(['sureness of the last look', 'answers', 'mean sureness', 'right'], lines)}\n{said}"


# Kinds of questions in the table of tensions, as a reader would ask them.
ASKED = {
    "color": "what color is the star?", "read": "what does the red text say?", "unusual": "which one is unusual?",
    "relation": "what is left of the star?", "count_shape": "how many stars are there?",
    "count_color": "how many red things are there?", "overview": "what is in the picture?",
    "camouflage": "what does the gray text say? (camouflage)", "void_count": "how many blots? (void)",
    "void_read": "what does the text say? (void)", "page_title": "what is the title?",
    "page_value": "what is the total?", "page_cell": "what is the price of the fork?",
    "page_footnote": "what does the footnote say?",
}  # fmt: skip


def by_question(found: Found) -> str:
    """What the learned tension does to each kind of question."""
    runs = [run["kinds"] for run in found["tensions"]["runs"].values()]
    mean = {kind: {name: fmean(run[kind][name] for run in runs) for name in runs[0][kind]} for kind in runs[0]}
    lines = [
        [text, f"{row['detail']:.2f}", f"{row['explore']:.2f}", f"{row['variety']:.2f}", f"{100 * row['first']:.1f} %",
         f"{row['looks']:.2f}", f"{100 * row['share']:.1f} %", f"{row['right']:.2f}"]
        for kind, text in ASKED.items() if (row := mean.get(kind))
    ]  # fmt: skip
    lines.sort(key=lambda line: float(line[4].split()[0]))
    return make_table(["question", "detail", "explore", "variety", "first look", "looks", "all looks", "right"], lines)


def frozen(found: Found) -> str:
    """What it costs to freeze a tension, or the weights of the scores, at the mean."""
    runs = list(found["tensions"]["runs"].values())
    names = {"steered": "nothing", "detail": "`detail`", "explore": "`explore`", "variety": "`variety`",
             "weights": "the weights of the three scores"}  # fmt: skip
    lines = []
    for name, text in names.items():
        rows = [run["frozen"][name] for run in runs]
        right, share = ([row[key] for row in rows] for key in ("right", "share"))
        lines.append([text, f"{fmean(right):.3f}", " / ".join(f"{value:.3f}" for value in right),
                      f"{fmean(share):.3f}", " / ".join(f"{value:.3f}" for value in share)])  # fmt: skip
    said = paragraph(f"{runs[0]['questions']} test questions, {len(runs)} trainings with other seeds.")
    return f"{make_table(['frozen', 'right', 'of each seed', 'share of tokens', 'of each seed'], lines)}\n{said}"


def open_questions(found: Found) -> str:
    """How often the even grid is taken on noise and splattered paint."""
    asked, alone = (found["open"]["introspect"][key] for key in ("on", "off"))
    return paragraph(
        f"{asked['pictures']} pictures of noise and splattered paint (`void`, test seeds), each with "
        f"{len(asked['open'])} wordings of an open question: the even grid is kept {asked['grid']} of {asked['of']} "
        f"times, and {alone['grid']} times if the model is not asked. Where a text is asked for that stands on such a "
        f"ground, it is kept {asked['texts_grid']} and {alone['texts_grid']} of {asked['texts']} times."
    )


PAGES: dict[str, dict[str, Callable[[Found], str]]] = {
    "docs/looks.md": {
        "by question": by_question,
        "frozen": frozen,
        "sureness": sureness,
        "looks by world": looks_by_world,
        "looks at large": looks_at_large,
    },
    "docs/own-attention.md": {"open questions": open_questions, "own attention": own_attention},
    "docs/accuracy.md": {
        "selectors": selectors,
        "weakest": weakest,
        "kinds": kinds,
        "photographs": photographs,
        "learned": learned,
        "looking": looking,
    },
    "docs/gaze.md": {"rivals": rivals, "saccades": saccades, "parts": gaze_parts, "compression": compression},
    "docs/training.md": {"estimators": estimators, "parts": parts},
}


def main() -> None:
    """Write the figure and the tables."""
    found = read_found()
    [drawn, *_] = draw_charts(found["selectors"], ink="#666").values()
    write_aside(FIGURE, stamp_figure(drawn, found["selectors"]))
    fill_pages(PAGES, found, "accuracy")


if __name__ == "__main__":
    main()
