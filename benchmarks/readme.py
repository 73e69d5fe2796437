"""The README's table and figure of all selectors, from the committed results.

    python benchmarks/readme.py

Reads `benchmarks/results/eval-h200/summary.json`, writes `docs/images/bench.svg` and what stands between the marks in
the README.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from arr_coc.drawing.origin import stamp_figure
from arr_coc.evaluation.contenders import FULL, OURS
from arr_coc.evaluation.report import draw_charts
from arr_coc.evaluation.sections import write_budget
from arr_coc.evaluation.summary import find_best, write_accuracy
from arr_coc.runtime.atomic_files import write_aside

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "eval-h200" / "summary.json"
FIGURE = ROOT / "docs" / "images" / "bench.svg"
BEGIN, END = "<!-- bench: made by benchmarks/readme.py -->\n", "<!-- /bench -->\n"


def make_table(summary: dict[str, Any]) -> str:
    """Selectors by mean accuracy, with what choosing costs."""
    by: dict[str, dict[str, Any]] = {}
    for row in summary["rows"]:
        by.setdefault(row["selector"], {})[row["budget"]] = row
    budgets = list(dict.fromkeys(row["budget"] for row in summary["rows"] if row["budget"] != FULL))

    def accuracy(name: str, budget: str) -> float:
        return by[name].get(budget, by[name].get(FULL, {})).get("accuracy", 0.0)

    best = {budget: find_best({name: accuracy(name, budget) for name in by}) for budget in budgets}
    lines = [
        "| selector | " + " | ".join(write_budget(budget) for budget in budgets) + " | 95 % held to |",
        "|---" * (len(budgets) + 2) + "|",
    ]
    timed = any(row["times"] for row in summary["rows"])
    if timed:
        lines = [f"{lines[0]} select, ms |", f"{lines[1]}---|"]
    for name in sorted(by, key=lambda name: -sum(accuracy(name, budget) for budget in budgets)):
        cells = []
        for budget in budgets:
            value = write_accuracy(accuracy(name, budget))
            cells.append(f"**{value}**" if name in best[budget] else value)
        held = summary["gives_in"].get(name)
        held_to = "" if name == FULL else "-" if held is None else f"{100 * held:.0f} %"
        spent = by[name].get("0.25", {}).get("times", {}).get("select_ms")
        chosen = "" if spent is None or name == "fastv" else f"{spent:.1f}"
        shown = f"**{name}**" if name == OURS else name
        lines.append(f"| {' | '.join([shown, *cells, held_to, *([chosen] if timed else [])])} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the figure and the table."""
    summary = json.loads(RESULTS.read_text(encoding="utf-8"))
    [drawn, *_] = draw_charts(summary, ink="#666").values()
    write_aside(FIGURE, stamp_figure(drawn, summary))
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    write_aside(readme, f"{before}{BEGIN}{make_table(summary)}{END}{after}")


if __name__ == "__main__":
    main()
