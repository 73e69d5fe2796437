"""The tab Compare: two selectors on the same picture and question, and votes on which is better."""

from __future__ import annotations

import hashlib
import json
import threading
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr

from arr_coc.demo.drawings import draw_read, draw_relevance
from arr_coc.demo.engine import Engine, Mistake
from arr_coc.demo.snapshot import Snapshot
from arr_coc.demo.texts import write_costs
from arr_coc.demo.widgets import (
    MODEL_EVENT,
    QUICK_EVENT,
    add_examples,
    budget_slider,
    picture_input,
    picture_output,
    read_share,
    report_mistakes,
    write_mistake,
)

VOTES = {"A is better": "a", "B is better": "b", "Both are good": "both", "Neither": "neither"}
_lock = threading.Lock()


def add_vote(path: Path, model: str, snapshots: tuple[Snapshot, Snapshot], vote: str) -> dict[str, Any]:
    """Append a vote to a file of JSON lines; the picture is identified by a hash of its pixels as drawn."""
    first = snapshots[0]
    sides = [
        {"selector": side.selector, "answer": side.answer, "tokens": side.used, "full": side.full} for side in snapshots
    ]
    row = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": model,
        "picture": hashlib.sha256(first.image.tobytes()).hexdigest(),
        "question": first.question,
        "budget": first.budget,
        "a": sides[0],
        "b": sides[1],
        "vote": vote,
    }
    with _lock, path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return row


def build_compare(engine: Engine, votes: Path) -> None:
    """Lay out the tab and connect its events."""
    snapshots = gr.State(None)
    shelf = gr.Row()
    names = engine.selectors
    other = "visionzip" if "visionzip" in names else names[-1]
    hint = "Name, directory or Hub id" if engine.private else None
    with gr.Row(equal_height=False):
        with gr.Column(scale=4, min_width=300):
            picture = picture_input()
        with gr.Column(scale=6, min_width=300):
            question = gr.Textbox(label="Question", lines=1, max_lines=4)
            with gr.Row():
                options: dict[str, Any] = {
                    "choices": names,
                    "allow_custom_value": engine.private,
                    "info": hint,
                    "min_width": 140,
                }
                first = gr.Dropdown(label="Selector A", value=names[0], elem_id="first", **options)
                second = gr.Dropdown(label="Selector B", value=other, elem_id="second", **options)
            budget = budget_slider(12)
            compare = gr.Button("Compare", variant="primary")
            message = gr.HTML("", elem_id="compare-message")
    with gr.Row(equal_height=False):
        costs = [gr.HTML("", elem_id=f"facts-{side}", min_width=300) for side in "ab"]
    with gr.Row():
        buttons = {text: gr.Button(text, min_width=120, size="sm") for text in VOTES}
    voted = gr.HTML(f'<p class="quiet">Votes are appended to {escape(votes.name)}.</p>', elem_id="voted")
    with gr.Row(equal_height=False):
        reads = [picture_output(f"{side.upper()}: what was read", elem_id=f"read-{side}") for side in "ab"]
    with gr.Row(equal_height=False):
        heats = [picture_output(f"{side.upper()}: relevance, if it has any", elem_id=f"heat-{side}") for side in "ab"]

    @report_mistakes(0, 9)
    def run(picture: Any, question: str, first: str, second: str, budget: float) -> tuple[Any, ...]:
        share = read_share(budget)
        opened = engine.check(picture, question, "prune", share)
        taken = tuple(engine.ask(opened, question, "prune", share, name) for name in (first, second))
        heats = [None if snapshot.maps is None else draw_relevance(snapshot) for snapshot in taken]
        return ("", *(write_costs(snapshot, None) for snapshot in taken), *map(draw_read, taken), *heats, taken, "")

    def vote(snapshots: tuple[Snapshot, Snapshot] | None, name: str) -> tuple[str, None]:
        if snapshots is None:
            return '<p class="quiet">There is nothing to vote on; compare two selectors first.</p>', None
        try:
            add_vote(votes, engine.name, snapshots, VOTES[name])
        except OSError as error:
            return write_mistake(Mistake(f"the vote could not be saved: {error.strerror}")), None
        return f'<p class="quiet">Saved: {name.lower()}. Thank you.</p>', None  # one vote per comparison

    inputs, outputs = [picture, question, first, second, budget], [message, *costs, *reads, *heats, snapshots, voted]
    gr.on([compare.click, question.submit], run, inputs, outputs, api_name="compare", **MODEL_EVENT)
    for text, button in buttons.items():
        button.click(
            lambda snapshots, name=text: vote(snapshots, name), snapshots, [voted, snapshots],
            api_visibility="private", **QUICK_EVENT,
        )  # fmt: skip
    with shelf:
        add_examples([picture, question]).then(run, inputs, outputs, api_visibility="private", **MODEL_EVENT)
