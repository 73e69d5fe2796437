"""`arr-coc compare`: how two selectors look at one picture, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from arr_coc.commands.ask import kept_cells
from arr_coc.commands.look import check_files, explain
from arr_coc.config import EMBEDDED, Budget
from arr_coc.drawing.sheet import draw_comparison, save_image
from arr_coc.inference.answer import ARRCOCQwen
from arr_coc.inference.load import find_base, load_selector, quiet_loading
from arr_coc.inference.messages import make_messages
from arr_coc.pixels.files import open_picture
from arr_coc.selectors.registry import list_selectors

# They are told where to look, or choose no tokens of their own by the question.
UNASKED = ("oracle", "downsample", "half-and-half")


def compare(
    selectors: tuple[str, str], path: Path, question: str, model: str | None, budget: Budget, out: Path | None
) -> dict[str, Any]:
    """Ask one question through two selectors and draw where each of them looked."""
    check_files(path, out, "--out")
    for name in selectors:
        if name in UNASKED:
            raise ValueError(f"{name} chooses no tokens of its own by the question; compare others")
    picture = open_picture(path).image
    make_messages(picture, question)  # refuses an empty one before anything is opened
    quiet_loading()
    vlm = ARRCOCQwen.from_pretrained(model or _find_base(selectors), selectors[0])
    other = ARRCOCQwen(vlm.model, vlm.processor, load_selector(selectors[1], vlm.model))
    looks, facts = [], []
    for name, asked in zip(selectors, (vlm, other), strict=True):
        answer = asked.answer(picture, question, budget=budget)
        looks.append((Path(name).name, answer.output, kept_cells(answer), answer.text))
        facts.append(
            {
                "selector": name,
                "answer": answer.text,
                "tokens": {"full": answer.tokens.full, "used": answer.tokens.used},
                "strategy": answer.strategy,
                **explain(answer.output),
            }
        )
    if out is not None:
        save_image(draw_comparison(picture, question.strip(), looks), out)
    both = looks[0][2] & looks[1][2]
    return {"question": question, "budget": budget, "selectors": facts, "kept_by_both": int(both.sum())}


def _find_base(selectors: tuple[str, str]) -> str:
    """The one model that the selectors were made for; those that fit any are asked on the embedded one."""
    found = {str(find_base(None, name)[0]) for name in selectors if name not in list_selectors()}
    if len(found) > 1:
        both = " and ".join(sorted(found))
        raise ValueError(f"the selectors were made for different models, {both}; name one with --model")
    return found.pop() if found else EMBEDDED
