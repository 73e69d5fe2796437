"""`arr-coc compare`: how two selectors look at one picture, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from arr_coc.balancing import SCORES, TENSIONS
from arr_coc.commands.look import check_files, rounded
from arr_coc.config import EMBEDDED, Budget
from arr_coc.models.answering import ARRCOCQwen
from arr_coc.models.loading import find_base, load_selector, quiet_loading
from arr_coc.models.messages import make_messages
from arr_coc.pictures import open_picture
from arr_coc.selecting import list_selectors
from arr_coc.sheet import draw_comparison, save_image


def compare(
    selectors: tuple[str, str], path: Path, question: str, model: str | None, budget: Budget, out: Path | None
) -> dict[str, Any]:
    """Ask one question through two selectors and draw where each of them looked."""
    check_files(path, out, "--out")
    for name in selectors:
        if name in ("oracle", "downsample", "half-and-half"):
            raise ValueError(f"{name} chooses no tokens of its own by the question; compare others")
    picture = open_picture(path).image
    make_messages(picture, question)  # refuses an empty one before anything is opened
    quiet_loading()
    base = model if model is not None else next(iter(_bases(selectors)))
    vlm = ARRCOCQwen.from_pretrained(base, selectors[0])
    looks, facts = [], []
    for name in selectors:
        vlm = ARRCOCQwen(vlm.model, vlm.processor, load_selector(name, vlm.model))
        answer = vlm.answer(picture, question, budget=budget)
        (_, rows, columns), cells = answer.kept[0]
        kept = np.zeros(rows * columns, dtype=bool)
        kept[cells] = True
        short = Path(name).name
        looks.append((short, answer.output, kept.reshape(rows, columns), answer.text))
        output = answer.output
        facts.append(
            {
                "selector": name,
                "answer": answer.text,
                "tokens": {"full": answer.tokens.full, "used": answer.tokens.used},
                "strategy": answer.strategy,
                "weights": output and dict(zip(SCORES, rounded(output.weights[0].tolist()), strict=True)),
                "tensions": output and dict(zip(TENSIONS, rounded(output.tensions[0].tolist()), strict=True)),
            }
        )
    if out is not None:
        save_image(draw_comparison(picture, question.strip(), looks), out)
    both = looks[0][2] & looks[1][2]
    return {"question": question, "budget": budget, "selectors": facts, "kept_by_both": int(both.sum())}


def _bases(selectors: tuple[str, str]) -> set[str]:
    """The one base that the selectors were made for."""
    found = {str(find_base(None, name)[0]) for name in selectors if name not in list_selectors()} or {EMBEDDED}
    if len(found) > 1:
        raise ValueError(
            f"the selectors were made for different models, {' and '.join(sorted(found))}; name one with --model"
        )
    return found
