"""The tab Microscope: channels, scores, weights and tensions behind the last answer, and those of any one cell."""

from __future__ import annotations

from typing import Any

import gradio as gr

from arr_coc.demo.ask import AskTab
from arr_coc.demo.drawings import Cell, cell_at, draw_cell, enlarge
from arr_coc.demo.snapshot import Snapshot
from arr_coc.demo.texts import NOTHING_ASKED, write_cell, write_maps, write_weights, write_words
from arr_coc.demo.widgets import QUICK_EVENT, picture_output, read_whole


def show(snapshot: Snapshot | None, cell: Cell | None) -> tuple[Any, ...]:
    """All outputs of the tab, for one cell or for none."""
    if snapshot is None:
        return (None, NOTHING_ASKED, "", "", "", "", cell)
    if snapshot.maps is None:
        return (enlarge(snapshot), "", write_cell(snapshot, None), "", "", "", None)
    maps = snapshot.maps
    return (
        draw_cell(snapshot, cell),
        write_words(snapshot, cell),
        write_cell(snapshot, cell),
        write_weights(maps),
        write_maps({"relevance": maps.relevance, **maps.scores}, "large", cell),
        write_maps(maps.channels, "small", cell),
        cell,
    )


def build_microscope(ask_tab: AskTab) -> None:
    """Lay out the tab and connect its events."""
    cell = gr.State(None)
    gr.Markdown("What led to the last answer of the tab **Ask**. Click a cell to see its details.")
    with gr.Row(equal_height=False):
        with gr.Column(scale=6, min_width=300):
            picture = picture_output("Relevance; click a cell", None, elem_id="cells")
            with gr.Row():
                row = gr.Number(label="Row", value=1, precision=0, minimum=1, min_width=80)
                column = gr.Number(label="Column", value=1, precision=0, minimum=1, min_width=80)
                show_button = gr.Button("Show this cell", min_width=120)
        with gr.Column(scale=6, min_width=300):
            words = gr.HTML(NOTHING_ASKED, elem_id="words")
            details = gr.HTML("", elem_id="cell")
    weights = gr.HTML("", elem_id="weights")
    with gr.Accordion("Relevance and the three scores", open=True):
        scores = gr.HTML("", elem_id="scores")
    with gr.Accordion("All channels of the texture", open=True):
        channels = gr.HTML("", elem_id="channels")
    outputs = [picture, words, details, weights, scores, channels, cell]

    def click(snapshot: Snapshot | None, event: gr.SelectData) -> tuple[Any, ...]:
        if snapshot is None:
            return *show(None, None), 1, 1
        place = cell_at(snapshot, *event.index)
        return *show(snapshot, place), place[0] + 1, place[1] + 1

    def show_numbered(snapshot: Snapshot | None, row: float | None, column: float | None) -> tuple[Any, ...]:
        if snapshot is None:
            return show(snapshot, None)
        down, along = read_whole(row, 1, snapshot.grid[0]), read_whole(column, 1, snapshot.grid[1])
        return show(snapshot, None if down is None or along is None else (down - 1, along - 1))

    snapshot = ask_tab.snapshot
    picture.select(click, snapshot, [*outputs, row, column], api_visibility="private", **QUICK_EVENT)
    show_button.click(show_numbered, [snapshot, row, column], outputs, api_name="cell", **QUICK_EVENT)
    snapshot.change(lambda taken: show(taken, None), snapshot, outputs, api_visibility="private", **QUICK_EVENT)
