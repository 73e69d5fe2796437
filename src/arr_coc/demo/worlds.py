"""The tab Worlds: held-out drawn examples with their true answers, and a search for failures."""

from __future__ import annotations

import random
from collections.abc import Iterator
from html import escape
from typing import Any

import gradio as gr
import torch

from arr_coc.data.boxes import cells_inside
from arr_coc.data.example import Example
from arr_coc.data.worlds import list_worlds, make_example, split_seed
from arr_coc.demo.ask import AskTab
from arr_coc.demo.drawings import draw_boxes, draw_read, enlarge
from arr_coc.demo.engine import Engine, Mistake
from arr_coc.demo.snapshot import Snapshot
from arr_coc.demo.widgets import (
    MODEL_EVENT,
    QUICK_EVENT,
    budget_slider,
    picture_output,
    read_share,
    read_whole,
    report_mistakes,
)
from arr_coc.evaluation.metrics import LOOKED, answer_coverage, find_misleading
from arr_coc.evaluation.scoring import exact

LONGEST_SEARCH = 24  # examples; other visitors wait meanwhile
LAST_NUMBER = 10**7


def draw_example(world: str, number: int) -> Example:
    """A held-out example by its number."""
    return make_example(world, split_seed("test", number), None, (512, 512))


def judge(example: Example, snapshot: Snapshot) -> str:
    """Whether the answer is right, and if not, why, as HTML."""
    right = exact(snapshot.answer, [example.answer]) == 1
    verdict = f'<p class="verdict"><b>{escape(snapshot.answer) or "(no answer)"}</b>: {"right" if right else "wrong"}; '
    verdict += f"the truth is <b>{escape(example.answer)}</b> ({snapshot.used} of {snapshot.full} tokens)</p>"
    if right or not example.boxes:
        return verdict
    covered = answer_coverage(torch.from_numpy(snapshot.tokens >= 1), example)
    if covered >= LOOKED:
        return verdict + f'<p class="reason">Seen but misread: {covered:.0%} of the answer\'s own box was read.</p>'
    misled = _write_misleading(snapshot, cells_inside(example.answer_boxes, *snapshot.grid))
    return verdict + f'<p class="reason">Not seen: only {covered:.0%} of the answer\'s own box was read{misled}.</p>'


def _write_misleading(snapshot: Snapshot, inside: torch.Tensor) -> str:
    """Which score led away from the true cells `[h, w]`, for selectors that have scores."""
    maps = snapshot.maps
    if maps is None:
        return ""
    scores = {name: torch.from_numpy(score).flatten() for name, score in maps.scores.items()}
    name = find_misleading(torch.from_numpy(maps.relevance).flatten(), scores, maps.weights, inside.flatten())
    return f"; the score that misled it most is {name}"


def build_worlds(engine: Engine, ask_tab: AskTab, tabs: Any) -> None:
    """Lay out the tab and connect its events."""
    gr.Markdown("Drawn pictures with known answers that nothing was trained on. Orange boxes: what must be looked at.")
    with gr.Row(equal_height=False):
        with gr.Column(scale=4, min_width=300):
            world = gr.Dropdown(list_worlds(), value="scenes", label="World", elem_id="world")
            number = gr.Number(label="Number of the example", value=0, precision=0, minimum=0, maximum=LAST_NUMBER)
            budget = budget_slider(6)
            with gr.Row():
                draw = gr.Button("Draw a random one", min_width=140)
                show = gr.Button("Show this number", min_width=140)
            search = gr.Button("Find a failure", variant="primary")
            take = gr.Button("Take it to Ask")
            status = gr.HTML("", elem_id="told")
        with gr.Column(scale=8, min_width=300):
            question = gr.HTML("", elem_id="asked")
            verdict = gr.HTML("", elem_id="verdict")
            with gr.Row():
                truth = picture_output("What must be looked at", elem_id="truth")
                read = picture_output("What was read", elem_id="world-read")
    outputs = [number, question, verdict, truth, read, status]

    def ask(world: str, number: int, budget: float) -> tuple[Example, Snapshot]:
        example = draw_example(world, number)
        return example, engine.ask(example.picture, example.question, "prune", read_share(budget))

    def fill(number: int, example: Example, snapshot: Snapshot, status: str) -> tuple[Any, ...]:
        text = f'<div class="answer">{escape(example.question)}</div>'
        drawings = draw_boxes(enlarge(snapshot), tuple(example.boxes)), draw_read(snapshot)
        return number, text, judge(example, snapshot), *drawings, _quiet(status)

    @report_mistakes(5, 6)
    def show_number(world: str, number: float | None, budget: float) -> tuple[Any, ...]:
        whole = read_whole(number, 0, LAST_NUMBER)
        if whole is None:
            raise Mistake("the number of the example is empty; give one, or draw a random one")
        return fill(whole, *ask(world, whole, budget), f"Held-out example {whole} of {world}.")

    @report_mistakes(5, 6)
    def find_failure(world: str, budget: float) -> Iterator[tuple[Any, ...]]:
        first = random.randrange(LAST_NUMBER - LONGEST_SEARCH)
        unchanged = [gr.skip()] * 5
        for count in range(LONGEST_SEARCH):
            example, snapshot = ask(world, first + count, budget)
            if exact(snapshot.answer, [example.answer]) < 1:
                status = f"Example {count + 1} of the search failed; all {count} before it were right."
                yield fill(first + count, example, snapshot, status)
                return
            yield *unchanged, _quiet(f"Searching: {count + 1} of {LONGEST_SEARCH}, all right so far.")
        yield *unchanged, _quiet(f"All {LONGEST_SEARCH} were right; search again, or use a smaller budget.")

    def take_to_ask(world: str, number: float | None, budget: float) -> tuple[Any, ...]:
        example = draw_example(world, read_whole(number, 0, LAST_NUMBER) or 0)
        return gr.update(value=example.picture), example.question, "prune", budget, gr.update(selected="ask")

    numbered = [world, number, budget]
    show.click(show_number, numbered, outputs, api_name="world", **MODEL_EVENT)
    draw.click(lambda: random.randrange(LAST_NUMBER), None, number, api_visibility="private", **QUICK_EVENT).then(
        show_number, numbered, outputs, api_visibility="private", **MODEL_EVENT
    )
    search.click(find_failure, [world, budget], outputs, api_name="fail", **MODEL_EVENT)
    targets = [ask_tab.picture, ask_tab.question, ask_tab.mode, ask_tab.budget, tabs]
    take.click(take_to_ask, numbered, targets, api_visibility="private", **QUICK_EVENT)


def _quiet(text: str) -> str:
    return f'<p class="quiet">{text}</p>'
