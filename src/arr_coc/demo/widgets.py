"""What all tabs share: theme, style sheet, inputs and outputs, examples, and how mistakes are shown."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.utils import get_upload_folder

from arr_coc.demo.engine import Mistake, Share

EXAMPLES = [
    ("scene", "shapes.png", "what does the purple text say?", "prune", 25),
    ("page", "page.png", "what is the title?", "prune", 12),
    ("needle", "needle.png", "what does the sign next to the black ring say?", "saccade", 25),
    ("camouflage", "camouflage.png", "what does the gray text say?", "prune", 12),
    ("void", "splatter.png", "what does the blue text say?", "prune", 25),
    ("photo: cat", "cat.jpg", "is there a cat?", "prune", 12),
    ("photo: coffee", "coffee.jpg", "is there a cup?", "saccade", 50),
]
# Events that ask the model are queued one after the other; those that only draw run at once.
MODEL_EVENT: dict[str, Any] = {"concurrency_id": "model", "concurrency_limit": 1, "scroll_to_output": False}
QUICK_EVENT: dict[str, Any] = {"queue": False, "show_progress": "hidden"}
STYLE = """
.gradio-container { max-width: min(1180px, 100vw) !important; min-width: 0 !important; margin: 0 auto !important; }
.answer { font-size: 1.5rem; font-weight: 650; line-height: 1.3; overflow-wrap: anywhere; min-height: 1.3em; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(190px, 1fr)); gap: 12px; }
.card { border: 1px solid var(--border-color-primary); border-radius: 8px; padding: 10px 14px; }
.card h4 { margin: 0 0 4px; font-size: .8rem; font-weight: 500; color: var(--body-text-color-subdued); }
.fact { font-variant-numeric: tabular-nums; margin: 2px 0; }
.difference { margin: 10px 0 2px; font-weight: 550; }
.reason { margin: 8px 0 0; } .quiet, .bars caption, .bars small { color: var(--body-text-color-subdued); }
.caption { font-size: .85rem; margin: 0; color: var(--body-text-color-subdued); }
.quiet { font-size: .9rem; margin: 4px 0; }
.bars { width: 100%; border-collapse: collapse; margin: 10px 0 0; }
.bars caption { text-align: left; font-size: .8rem; padding-bottom: 2px; }
.bars, .bars tr, .bars tbody { border: 0 !important; }
.bars td { padding: 2px 8px 2px 0 !important; border: 0 !important; font-variant-numeric: tabular-nums; }
.bars td:nth-child(1) { white-space: nowrap; width: 1%; } .bars td:nth-child(3) { text-align: right; width: 1%;
  white-space: nowrap; padding-right: 0 !important; }
.bars small { display: block; line-height: 1.1; }
.bar { height: 9px; border-radius: 5px; background: var(--border-color-primary); min-width: 40px; }
.bar i { display: block; height: 100%; border-radius: 5px; background: #3b7ea1; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(260px, 1fr)); gap: 0 28px; }
.maps { display: grid; gap: 10px; grid-template-columns: repeat(auto-fill, minmax(104px, 1fr)); }
.maps.large { grid-template-columns: repeat(auto-fill, minmax(200px, 1fr)); }
.maps figure { margin: 0; } .maps img { width: 100%; image-rendering: pixelated; border-radius: 4px; display: block; }
.maps figcaption { font-size: .75rem; overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
.tiles { display: grid; gap: 14px; grid-template-columns: repeat(auto-fill, minmax(min(100%, 240px), 1fr)); }
.tiles.three { grid-template-columns: repeat(auto-fill, minmax(min(100%, 300px), 1fr)); }
.tiles figure { margin: 0; min-width: 0; } .tiles .wide { grid-column: 1 / -1; }
.tiles img { display: block; max-width: 100%; max-height: 340px; border-radius: 4px; margin: 4px 0; }
.tiles .wide img { max-height: 500px; }
.tiles figcaption { font-size: .85rem; font-variant-numeric: tabular-nums; max-width: 420px; }
.tiles figcaption .bar { margin: 3px 0; } .tiles small { display: block; color: var(--body-text-color-subdued); }
.words { display: flex; flex-wrap: wrap; gap: 6px; }
.word { display: inline-flex; flex-direction: column; align-items: center; padding: 2px 7px; border-radius: 6px;
  background: color-mix(in srgb, #3b7ea1 var(--pull), transparent); border: 1px solid var(--border-color-primary); }
.word i { font-style: normal; } .word small { font-size: .7rem; font-variant-numeric: tabular-nums; }
.captioned { gap: 4px !important; } .captioned .html-container { padding: 0 !important; }
.mistake { border-left: 4px solid #e66101; padding: 8px 12px; font-weight: 550; overflow-wrap: anywhere;
  background: color-mix(in srgb, #e66101 12%, transparent); border-radius: 4px; }
.verdict { font-size: 1.05rem; margin: 6px 0; } .verdict b { overflow-wrap: anywhere; }
:focus-visible { outline: 3px solid #e66101 !important; outline-offset: 2px; }
"""


def make_theme() -> Any:
    """A calm theme in the fonts of the visitor's own system, so that nothing is fetched from elsewhere."""
    sans = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif"]
    mono = ["ui-monospace", "SFMono-Regular", "Menlo", "monospace"]
    return gr.themes.Default(primary_hue="sky", neutral_hue="slate", font=sans, font_mono=mono)


def picture_input(label: str = "Picture") -> Any:
    """An input for a picture that gives the path of its file; the engine opens it and reports what is wrong with it."""
    picture = gr.Image(label=label, type="filepath", sources=["upload", "clipboard"], height=320)
    # replaced on the object: for a subclass gradio would write a stub file beside this one
    picture.preprocess = _uploaded_file  # type: ignore[method-assign]
    return picture


def _uploaded_file(payload: Any) -> str | None:
    """The path of an uploaded file; a request may name any path, but only the upload folder is read."""
    if payload is None or not payload.path:
        return None
    path = Path(payload.path).resolve()
    if not path.is_relative_to(Path(get_upload_folder()).resolve()):
        raise gr.Error("Only uploaded pictures are read.", print_exception=False)
    return str(path)


def slider(label: str, least: float, most: float, value: float, step: float) -> Any:
    """A slider that gives None when its number field is empty."""
    widget = gr.Slider(least, most, value=value, step=step, label=label)
    widget.preprocess = lambda payload: payload  # type: ignore[method-assign]
    return widget


def budget_slider(value: int, automatic: bool = False) -> Any:
    """A slider for the budget in percent; 0 may mean that the system decides."""
    return slider("Budget, % of the tokens" + (" (0: automatic)" if automatic else ""), 0, 100, value, 1)


def read_share(percent: Any) -> float | None:
    """A percentage as a share; None if it is not a number."""
    return percent / 100 if isinstance(percent, int | float) and math.isfinite(percent) else None


def read_budget(percent: Any) -> Share | None:
    """A percentage as a share, 0 as `"auto"`; None if it is not a number."""
    share = read_share(percent)
    return "auto" if share == 0 else share


def read_whole(value: Any, least: int, most: int) -> int | None:
    """A whole number, limited to a range; None if it is not a number."""
    return min(max(int(value), least), most) if isinstance(value, int | float) and math.isfinite(value) else None


def picture_output(label: str, height: int | None = 400, **options: Any) -> Any:
    """A drawing with its caption above it, so that the caption covers nothing."""
    with gr.Column(min_width=240, elem_classes="captioned"):
        gr.HTML(f'<p class="caption">{label}</p>', padding=False)
        return gr.Image(
            label=label, show_label=False, interactive=False, type="pil", format="png", buttons=["fullscreen"],
            height=height, **options,
        )  # fmt: skip


def example_path(name: str) -> str:
    """Path of an example picture."""
    return str(Path(str(files("arr_coc") / "assets" / "examples" / name)))


def add_examples(inputs: list[Any]) -> Any:
    """A row of examples that fill the inputs (picture, question, mode, budget, or the first of them).

    Returns:
        The event after an example was filled in.
    """
    rows = [[example_path(name), question, mode, budget][: len(inputs)] for _, name, question, mode, budget in EXAMPLES]
    labels = [label for label, *_ in EXAMPLES]
    row = gr.Examples(rows, inputs, example_labels=labels, label="Examples: click one", examples_per_page=len(rows))
    return row.load_input_event


def report_mistakes(place: int, count: int, cleared: int | None = None) -> Callable[[Callable[..., Any]], Any]:
    """Show a [`Mistake`] of a handler at one of its `count` outputs; another may be cleared, the rest stay."""

    def decorate(handler: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(handler)
        def call(*args: Any) -> Any:
            try:
                result = handler(*args)
                if isinstance(result, Iterator):
                    yield from result
                else:
                    yield result
            except Mistake as mistake:
                outputs: list[Any] = [gr.skip()] * count
                if cleared is not None:
                    outputs[cleared] = ""
                outputs[place] = write_mistake(mistake)
                yield tuple(outputs)

        return call

    return decorate


def write_mistake(mistake: Mistake) -> str:
    """What is wrong, as HTML."""
    text = str(mistake) or "this cannot be done"
    if text.split()[0].islower() and "/" not in text.split()[0]:  # a word, not the name of something
        text = text[:1].upper() + text[1:]
    return f'<div class="mistake" role="alert">{escape(text)}.</div>'
