"""The tab Worlds: samples that no one trained on, with what is true of them; and where it fails."""

from __future__ import annotations

import random
from collections.abc import Iterator
from html import escape
from typing import Any

import gradio as gr
import torch

from arr_coc.data.worlds import Sample, list_worlds, make_sample, split_seed
from arr_coc.demo.ask import Asked
from arr_coc.demo.drawings import draw_boxes, draw_read, enlarge
from arr_coc.demo.engine import Engine, Mistake
from arr_coc.demo.snapshot import Look
from arr_coc.demo.widgets import MODEL, QUICK, budget_slider, picture_output, read_share, read_whole, say_mistakes
from arr_coc.evaluation.metrics import LOOKED, cells_inside, coverage, find_misleading
from arr_coc.evaluation.scoring import exact

SEARCHED = 24  # samples until a search gives up: others wait
_LAST = 10**7


def draw_sample(world: str, number: int) -> Sample:
    """A held-out sample by its number."""
    return make_sample(world, split_seed("test", number), None, (512, 512))


def judge(sample: Sample, look: Look) -> str:
    """What is true, what was answered, and if that is wrong, why."""
    right = exact(look.answer, [sample.answer]) == 1
    said = f'<p class="verdict"><b>{escape(look.answer) or "(no answer)"}</b>: {"right" if right else "wrong"}; '
    said += f"the truth is <b>{escape(sample.answer)}</b> ({look.used} of {look.full} tokens)</p>"
    if right or not sample.boxes:
        return said
    inside = cells_inside(sample.boxes, *look.grid)
    seen = float(coverage(torch.from_numpy(look.tokens >= 1).flatten(), inside.flatten()))
    if seen >= LOOKED:
        return said + f'<p class="reason">Seen but misread: {seen:.0%} of what had to be looked at was read.</p>'
    return said + f'<p class="reason">Not looked at: only {seen:.0%} of it was read{_misled(look, inside)}.</p>'


def _misled(look: Look, inside: torch.Tensor) -> str:
    """The score that led elsewhere, if a layer chose."""
    if look.maps is None:
        return ""
    relevance, *scores = (torch.from_numpy(one).flatten() for one in (look.maps.relevance, *look.maps.scores.values()))
    named = dict(zip(look.maps.scores, scores, strict=True))
    name = find_misleading(relevance, named, look.maps.weights, inside.flatten())
    return f"; the score that misled it most is {name}"


def build_worlds(engine: Engine, asked: Asked, tabs: Any) -> None:
    """Lay the tab out and connect it."""
    gr.Markdown("Drawn pictures with known answers, from seeds that nothing was trained on; orange: what must be seen.")
    with gr.Row(equal_height=False):
        with gr.Column(scale=4, min_width=300):
            world = gr.Dropdown(list_worlds(), value="scenes", label="World", elem_id="world")
            number = gr.Number(label="Sample number", value=0, precision=0, minimum=0, maximum=_LAST)
            budget = budget_slider(6)
            with gr.Row():
                draw = gr.Button("Draw a random one", min_width=140)
                again = gr.Button("Show this number", min_width=140)
            fail = gr.Button("Find a failure", variant="primary")
            take = gr.Button("Take it to Ask")
            told = gr.HTML("", elem_id="told")
        with gr.Column(scale=8, min_width=300):
            question = gr.HTML("", elem_id="asked")
            verdict = gr.HTML("", elem_id="verdict")
            with gr.Row():
                truth = picture_output("What must be looked at", elem_id="truth")
                read = picture_output("What was read", elem_id="world-read")
    outputs = [number, question, verdict, truth, read, told]

    def look_at(world: str, number: int, budget: float) -> tuple[Sample, Look]:
        sample = draw_sample(world, number)
        return sample, engine.ask(sample.picture, sample.question, "prune", read_share(budget))

    def shown(number: int, sample: Sample, look: Look, told: str) -> tuple[Any, ...]:
        text = f'<div class="answer">{escape(sample.question)}</div>'
        drawn = draw_boxes(enlarge(look), tuple(sample.boxes)), draw_read(look)
        return number, text, judge(sample, look), *drawn, f'<p class="quiet">{told}</p>'

    @say_mistakes(5, 6)
    def one(world: str, number: float | None, budget: float) -> tuple[Any, ...]:
        place = read_whole(number, 0, _LAST)
        if place is None:
            raise Mistake("the number of the sample is empty; give one, or draw a random one")
        return shown(place, *look_at(world, place, budget), f"Held-out sample {place} of {world}.")

    @say_mistakes(5, 6)
    def search(world: str, budget: float) -> Iterator[tuple[Any, ...]]:
        first = random.randrange(_LAST - SEARCHED)
        for count in range(SEARCHED):
            sample, look = look_at(world, first + count, budget)
            if exact(look.answer, [sample.answer]) < 1:
                told = f"Sample {count + 1} of the search failed; all {count} before it were right."
                yield shown(first + count, sample, look, told)
                return
            yield *[gr.skip()] * 5, f'<p class="quiet">Searching: {count + 1} of {SEARCHED}, all right so far.</p>'
        yield *[gr.skip()] * 5, f'<p class="quiet">All {SEARCHED} were right; search on, or use a smaller budget.</p>'

    def to_ask(world: str, number: float | None, budget: float) -> tuple[Any, ...]:
        sample = draw_sample(world, read_whole(number, 0, _LAST) or 0)
        return gr.update(value=sample.picture), sample.question, "prune", budget, gr.update(selected="ask")

    again.click(one, [world, number, budget], outputs, api_name="world", **MODEL)
    draw.click(lambda: random.randrange(_LAST), None, number, api_visibility="private", **QUICK).then(
        one, [world, number, budget], outputs, api_visibility="private", **MODEL
    )
    fail.click(search, [world, budget], outputs, api_name="fail", **MODEL)
    targets = [asked.picture, asked.question, asked.mode, asked.budget, tabs]
    take.click(to_ask, [world, number, budget], targets, api_visibility="private", **QUICK)
