"""Parts of pages that are made from committed results: they stand between two marks, and are never written by hand.

<!-- NAME: made by benchmarks/FILE.py -->
...
<!-- /NAME -->
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from arr_coc.runtime.atomic_files import write_aside

ROOT = Path(__file__).parent.parent
Results = TypeVar("Results")


def read_json(path: str) -> Any:
    """Results by their path from the root of the repository."""
    return json.loads((ROOT / path).read_text(encoding="utf-8"))


def make_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" if line[0] != "---" else f"|{'|'.join(line)}|\n" for line in lines)


def paragraph(text: str) -> str:
    """Text in lines as long as the pages'."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False) + "\n"


def fill_page(text: str, blocks: Mapping[str, Callable[[Results], str]], results: Results, maker: str) -> str:
    """A page with what stands between its marks made anew."""
    for name, make in blocks.items():
        begin, end = f"<!-- {name}: made by benchmarks/{maker}.py -->\n", f"<!-- /{name} -->\n"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise ValueError(f"the marks {begin.strip()} and {end.strip()} must both be in the page")
        text = f"{before}{begin}{make(results)}{end}{after}"
    return text


def fill_pages(pages: Mapping[str, Mapping[str, Callable[[Results], str]]], results: Results, maker: str) -> None:
    """Write all pages of a maker."""
    for name, blocks in pages.items():
        page = ROOT / name
        write_aside(page, fill_page(page.read_text(encoding="utf-8"), blocks, results, maker))
