"""The tab Ask: an answer as it is written, what was looked at, and what all tokens would have said."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import gradio as gr
from transformers import TextIteratorStreamer

from arr_coc.demo.drawings import OPACITY, draw_read, draw_relevance, draw_shares
from arr_coc.demo.engine import MODES, Engine
from arr_coc.demo.snapshot import Look
from arr_coc.demo.texts import EMPTY, MODE_WORDS, say_answer, say_stats
from arr_coc.demo.widgets import (
    MODEL,
    QUICK,
    add_examples,
    budget_slider,
    picture_input,
    picture_output,
    read_share,
    say_mistakes,
    slider,
)


class Asked(NamedTuple):
    """What other tabs use of this one."""

    picture: Any
    question: Any
    mode: Any
    budget: Any
    look: Any


def stream_look(engine: Engine, picture: Any, question: str, mode: str, share: float | None) -> Iterator[str | Look]:
    """The answer as far as it is written, again and again; at last the whole look."""
    streamer = TextIteratorStreamer(engine.vlm.processor.tokenizer, skip_prompt=True, skip_special_tokens=True)
    found: list[Look | BaseException] = []

    def work() -> None:
        try:
            found.append(engine.ask(picture, question, mode, share, streamer=streamer))
        except BaseException as error:
            found.append(error)
            streamer.end()  # type: ignore[no-untyped-call]

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    text = ""
    for part in streamer:
        text += part
        yield text
    worker.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    yield found[0]


def build_ask(engine: Engine) -> Asked:
    """Lay the tab out and connect it."""
    look = gr.State(None)
    shelf = gr.Row()
    with gr.Row(equal_height=False):
        with gr.Column(scale=5, min_width=300):
            picture = picture_input()
            question = gr.Textbox(label="Question", placeholder="what does the red text say?", lines=1, max_lines=4)
            mode = gr.Radio(list(MODES), value="prune", label="Mode", info=MODE_WORDS)
            budget = budget_slider(25)
            beside = gr.Checkbox(value=True, label="Also ask with all tokens, to compare")
            ask = gr.Button("Ask", variant="primary")
            message = gr.HTML("", elem_id="message")
        with gr.Column(scale=7, min_width=300):
            stats = gr.HTML(EMPTY, label="Answer", elem_id="stats")
    with gr.Row(equal_height=False):
        heat = picture_output("Relevance: where it wants to look", elem_id="heat")
        read = picture_output("What was read; numbers say what mattered first", elem_id="read")
        shares = picture_output("Homunculus: area in proportion to tokens spent", elem_id="homunculus")
    opacity = slider("Opacity of the map of relevance, 0 to 1", 0, 1, OPACITY, 0.05)

    @say_mistakes(0, 6, emptied=1)
    def run(picture: Any, question: str, mode: str, budget: float, beside: bool, opacity: float) -> Iterator[Any]:
        same = [gr.skip()] * 4
        share = read_share(budget)
        shown = engine.check(picture, question, mode, share)
        yield "", say_answer(""), *same
        final: Look | None = None
        for step in stream_look(engine, shown, question, mode, share):
            if isinstance(step, str):
                yield "", say_answer(step), *same
            else:
                final = step
        if final is None:
            return
        said = say_stats(final, None)
        yield "", said, *same[1:], final
        yield "", said, draw_relevance(final, opacity), draw_read(final), draw_shares(final), gr.skip()
        if beside and mode != "full":
            yield "", say_stats(final, engine.ask(shown, question, "full", 1.0)), *same

    outputs = [message, stats, heat, read, shares, look]
    inputs = [picture, question, mode, budget, beside, opacity]
    shared: dict[str, Any] = {"fn": run, "inputs": inputs, "outputs": outputs, **MODEL}
    gr.on([ask.click, question.submit], **shared, api_name="ask")
    opacity.change(
        lambda look, opacity: gr.skip() if look is None else draw_relevance(look, opacity),
        [look, opacity], heat, api_visibility="private", **QUICK,
    )  # fmt: skip
    with shelf:
        add_examples([picture, question, mode, budget]).then(**shared, api_visibility="private")
    return Asked(picture, question, mode, budget, look)
