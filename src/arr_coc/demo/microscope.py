"""The tab Microscope: channels, scores, weights and tensions of the last answer, and of any cell of it."""

from __future__ import annotations

from typing import Any

import gradio as gr

from arr_coc.demo.ask import Asked
from arr_coc.demo.drawings import cell_at, draw_cell, enlarge
from arr_coc.demo.snapshot import Look
from arr_coc.demo.texts import EMPTY, say_cell, say_maps, say_weights, say_words
from arr_coc.demo.widgets import QUICK, picture_output, read_whole

Cell = tuple[int, int]


def show(look: Look | None, cell: Cell | None) -> tuple[Any, ...]:
    """Everything of the tab, for a cell or for none."""
    if look is None:
        return (None, EMPTY, "", "", "", "", cell)
    if look.maps is None:
        return (enlarge(look), "", say_cell(look, None), "", "", "", None)
    maps = look.maps
    return (
        draw_cell(look, cell),
        say_words(look, cell),
        say_cell(look, cell),
        say_weights(maps),
        say_maps({"relevance": maps.relevance, **maps.scores}, "large", cell),
        say_maps(maps.channels, "small", cell),
        cell,
    )


def build_microscope(asked: Asked) -> None:
    """Lay the tab out and connect it."""
    cell = gr.State(None)
    gr.Markdown("What led to the last answer of the tab **Ask**. Click a cell to see what is known of it.")
    with gr.Row(equal_height=False):
        with gr.Column(scale=6, min_width=300):
            picture = picture_output("Relevance; click a cell", None, elem_id="cells")
            with gr.Row():
                row = gr.Number(label="Row", value=1, precision=0, minimum=1, min_width=80)
                column = gr.Number(label="Column", value=1, precision=0, minimum=1, min_width=80)
                go = gr.Button("Show this cell", min_width=120)
        with gr.Column(scale=6, min_width=300):
            words = gr.HTML(EMPTY, elem_id="words")
            facts = gr.HTML("", elem_id="cell")
    weights = gr.HTML("", elem_id="weights")
    with gr.Accordion("Relevance and the three scores", open=True):
        scores = gr.HTML("", elem_id="scores")
    with gr.Accordion("All channels of the texture", open=True):
        channels = gr.HTML("", elem_id="channels")
    outputs = [picture, words, facts, weights, scores, channels, cell]

    def click(look: Look | None, event: gr.SelectData) -> tuple[Any, ...]:
        if look is None:
            return *show(None, None), 1, 1
        place = cell_at(look, *event.index)
        return *show(look, place), place[0] + 1, place[1] + 1

    def name(look: Look | None, row: float | None, column: float | None) -> tuple[Any, ...]:
        if look is None:
            return show(look, None)
        down, along = read_whole(row, 1, look.grid[0]), read_whole(column, 1, look.grid[1])
        return show(look, None if down is None or along is None else (down - 1, along - 1))

    picture.select(click, asked.look, [*outputs, row, column], api_visibility="private", **QUICK)
    go.click(name, [asked.look, row, column], outputs, api_name="cell", **QUICK)
    asked.look.change(lambda look: show(look, None), asked.look, outputs, api_visibility="private", **QUICK)
