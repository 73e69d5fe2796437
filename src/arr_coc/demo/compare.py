"""The tab Compare: two selectors on one picture and question, and which of them people prefer."""

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
from arr_coc.demo.snapshot import Look
from arr_coc.demo.texts import say_stats
from arr_coc.demo.widgets import (
    MODEL,
    QUICK,
    add_examples,
    budget_slider,
    picture_input,
    picture_output,
    read_share,
    say_mistake,
    say_mistakes,
)

VOTES = {"A is better": "a", "B is better": "b", "Both are good": "both", "Neither": "neither"}
_lock = threading.Lock()


def add_vote(path: Path, model: str, looks: tuple[Look, Look], vote: str) -> dict[str, Any]:
    """Write a vote as one line of a file; the picture is named by its pixels as they were drawn."""
    one = looks[0]
    sides = [{"selector": one.selector, "answer": one.answer, "tokens": one.used, "full": one.full} for one in looks]
    row = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": model,
        "picture": hashlib.sha256(one.image.tobytes()).hexdigest(),
        "question": one.question,
        "budget": one.budget,
        "a": sides[0],
        "b": sides[1],
        "vote": vote,
    }
    with _lock, path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return row


def build_compare(engine: Engine, votes: Path) -> None:
    """Lay the tab out and connect it."""
    looks = gr.State(None)
    shelf = gr.Row()
    names = engine.selectors
    other = "visionzip" if "visionzip" in names else names[-1]
    hint = "A name, a directory or a Hub id" if engine.private else None
    with gr.Row(equal_height=False):
        with gr.Column(scale=4, min_width=300):
            picture = picture_input()
        with gr.Column(scale=6, min_width=300):
            question = gr.Textbox(label="Question", lines=1, max_lines=4)
            with gr.Row():
                choose: dict[str, Any] = {
                    "choices": names,
                    "allow_custom_value": engine.private,
                    "info": hint,
                    "min_width": 140,
                }
                first = gr.Dropdown(label="Selector A", value=names[0], elem_id="first", **choose)
                second = gr.Dropdown(label="Selector B", value=other, elem_id="second", **choose)
            budget = budget_slider(12)
            go = gr.Button("Compare", variant="primary")
            message = gr.HTML("", elem_id="compare-message")
    with gr.Row(equal_height=False):
        facts = [gr.HTML("", elem_id=f"facts-{side}", min_width=300) for side in "ab"]
    with gr.Row():
        buttons = {text: gr.Button(text, min_width=120, size="sm") for text in VOTES}
    said = gr.HTML(f'<p class="quiet">Votes are added to {escape(votes.name)}.</p>', elem_id="voted")
    with gr.Row(equal_height=False):
        reads = [picture_output(f"{side.upper()}: what was read", elem_id=f"read-{side}") for side in "ab"]
    with gr.Row(equal_height=False):
        heats = [picture_output(f"{side.upper()}: relevance, if it has any", elem_id=f"heat-{side}") for side in "ab"]

    @say_mistakes(0, 9)
    def run(picture: Any, question: str, first: str, second: str, budget: float) -> tuple[Any, ...]:
        share = read_share(budget)
        shown = engine.check(picture, question, "prune", share)
        found = tuple(engine.ask(shown, question, "prune", share, name) for name in (first, second))
        heats = [None if look.maps is None else draw_relevance(look) for look in found]
        return ("", *(say_stats(look, None) for look in found), *map(draw_read, found), *heats, found, "")

    def vote(looks: tuple[Look, Look] | None, name: str) -> tuple[str, None]:
        if looks is None:
            return '<p class="quiet">There is nothing to vote on; compare two selectors first.</p>', None
        try:
            add_vote(votes, engine.name, looks, VOTES[name])
        except OSError as error:
            return say_mistake(Mistake(f"the vote could not be saved: {error.strerror}")), None
        return f'<p class="quiet">Saved: {name.lower()}. Thank you.</p>', None  # one vote for each comparison

    inputs, outputs = [picture, question, first, second, budget], [message, *facts, *reads, *heats, looks, said]
    gr.on([go.click, question.submit], run, inputs, outputs, api_name="compare", **MODEL)
    for text, button in buttons.items():
        button.click(
            lambda looks, name=text: vote(looks, name), looks, [said, looks],
            api_visibility="private", **QUICK,
        )  # fmt: skip
    with shelf:
        add_examples([picture, question]).then(run, inputs, outputs, api_visibility="private", **MODEL)
