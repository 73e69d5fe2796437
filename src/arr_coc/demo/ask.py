"""The tab Ask: the answer as it is written, what was read for it, and the answer from all tokens beside it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, NamedTuple, get_args

import gradio as gr
from transformers import TextIteratorStreamer

from arr_coc.demo.arr_and_coc import ask_ways, write_ways
from arr_coc.demo.drawings import OPACITY, draw_read, draw_relevance, draw_tokens_as_area
from arr_coc.demo.engine import MODES, Engine, Share
from arr_coc.demo.looks import write_looks
from arr_coc.demo.snapshot import Snapshot
from arr_coc.demo.texts import COMPRESS_HELP, MODE_HELP, NOTHING_ASKED, write_answer, write_costs
from arr_coc.demo.widgets import (
    MODEL_EVENT,
    QUICK_EVENT,
    add_examples,
    budget_slider,
    picture_input,
    picture_output,
    read_budget,
    read_share,
    report_mistakes,
    slider,
)
from arr_coc.gaze.compression import Compress
from arr_coc.gaze.plan import Gaze

NOT_COMPRESSED = "no"


# ARR, COC and both are compared at one budget: this one where the system decides.
WAYS_SHARE = 0.25


class AskTab(NamedTuple):
    """Components of this tab that other tabs use."""

    picture: Any
    question: Any
    mode: Any
    budget: Any
    snapshot: Any


def stream_answer(
    engine: Engine, picture: Any, question: str, mode: str, share: Share | None, gaze: Gaze | None = None
) -> Iterator[str | Snapshot]:
    """Yield the answer so far each time it grows, and at the end its snapshot."""
    streamer = TextIteratorStreamer(engine.vlm.processor.tokenizer, skip_prompt=True, skip_special_tokens=True)
    results: list[Snapshot | BaseException] = []

    def work() -> None:
        try:
            results.append(engine.ask(picture, question, mode, share, streamer=streamer, gaze=gaze))
        except BaseException as error:
            results.append(error)
            streamer.end()  # type: ignore[no-untyped-call]

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    text = ""
    for part in streamer:
        text += part
        yield text
    worker.join()
    if isinstance(results[0], BaseException):
        raise results[0]
    yield results[0]


def read_gaze(compress: str) -> Gaze | None:
    """The gaze of what was chosen to compress the small picture by; None if it is not."""
    return None if compress == NOT_COMPRESSED else Gaze(compress=compress)  # type: ignore[arg-type]  # checks it


def build_ask(engine: Engine) -> AskTab:
    """Lay out the tab and connect its events."""
    snapshot = gr.State(None)
    shelf = gr.Row()
    with gr.Row(equal_height=False):
        with gr.Column(scale=5, min_width=300):
            picture = picture_input()
            question = gr.Textbox(label="Question", placeholder="what does the red text say?", lines=1, max_lines=4)
            mode = gr.Radio(list(MODES), value="auto", label="Mode", info=MODE_HELP)
            ways = [NOT_COMPRESSED, *get_args(Compress)]
            compress = gr.Radio(ways, value=NOT_COMPRESSED, label="Compress the small picture", info=COMPRESS_HELP)
            budget = budget_slider(0, automatic=True)
            compared = gr.Checkbox(value=True, label="Also ask with all tokens, to compare")
            ask = gr.Button("Ask", variant="primary")
            compare = gr.Button("Compare ARR, COC and both")
            message = gr.HTML("", elem_id="message")
        with gr.Column(scale=7, min_width=300):
            stats = gr.HTML(NOTHING_ASKED, label="Answer", elem_id="stats")
            looks = gr.HTML("", elem_id="looks")
    compared_ways = gr.HTML("", elem_id="ways", padding=False)
    with gr.Row(equal_height=False):
        heat = picture_output("Relevance: where it wants to look", elem_id="heat")
        read = picture_output("What was read; numbers show what mattered first", elem_id="read")
        homunculus = picture_output("Homunculus: area in proportion to the tokens spent", elem_id="homunculus")
    opacity = slider("Opacity of the relevance map, 0 to 1", 0, 1, OPACITY, 0.05)

    @report_mistakes(0, 8, cleared=1)
    def run(
        picture: Any, question: str, mode: str, budget: float, compared: bool, opacity: float, compress: str
    ) -> Iterator[Any]:
        unchanged = [gr.skip()] * 6
        share, gaze = read_budget(budget), read_gaze(compress)
        opened = engine.check(picture, question, mode, share, gaze)
        yield "", write_answer(""), *unchanged[:4], "", ""
        final: Snapshot | None = None
        for step in stream_answer(engine, opened, question, mode, share, gaze):
            if isinstance(step, str):
                yield "", write_answer(step), *unchanged
            else:
                final = step
        if final is None:
            return
        costs = write_costs(final, None)
        yield "", costs, *unchanged[:3], final, *unchanged[:2]
        drawings = draw_relevance(final, opacity), draw_read(final), draw_tokens_as_area(final)
        yield "", costs, *drawings, gr.skip(), write_looks(final), gr.skip()
        if compared and mode != "full":
            yield "", write_costs(final, engine.ask(opened, question, "full", 1.0)), *unchanged

    @report_mistakes(0, 2, cleared=1)
    def run_ways(picture: Any, question: str, budget: float, compress: str) -> Iterator[Any]:
        share, gaze = WAYS_SHARE if budget == 0 else read_share(budget), read_gaze(compress)
        opened = engine.check(picture, question, "saccade", share)
        asked = []
        for pair in ask_ways(engine, opened, question, share or 0.0, (gaze and gaze.compress) or "pool"):
            asked.append(pair)
            yield "", write_ways(asked)

    outputs = [message, stats, heat, read, homunculus, snapshot, looks, compared_ways]
    inputs = [picture, question, mode, budget, compared, opacity, compress]
    event: dict[str, Any] = {"fn": run, "inputs": inputs, "outputs": outputs, **MODEL_EVENT}
    gr.on([ask.click, question.submit], **event, api_name="ask")
    compare.click(
        run_ways, [picture, question, budget, compress], [message, compared_ways], api_name="arr-and-coc", **MODEL_EVENT
    )
    opacity.change(
        lambda taken, opacity: gr.skip() if taken is None else draw_relevance(taken, opacity),
        [snapshot, opacity], heat, api_visibility="private", **QUICK_EVENT,
    )  # fmt: skip
    with shelf:
        add_examples([picture, question, mode, budget]).then(**event, api_visibility="private")
    return AskTab(picture, question, mode, budget, snapshot)
