"""The golden record: what the package answered, kept and reported before a change, compared with what it does now.

    python tests/golden/record.py            # make the record again and compare; exit code 1 where it differs
    python tests/golden/record.py --write    # make it the new record; the commit says why

Answers, kept cells, ids and tables must be the same; relevance maps and logits may differ by 1e-5, losses, and logits
of recurrent layers, by 1e-3. It uses the public API and the command line, so that files may move underneath.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import numpy as np
import tiny_models
import torch
from typer.testing import CliRunner

from arr_coc import (
    ARRCOCConfig,
    ARRCOCLayer,
    ARRCOCQwen,
    ChatTokens,
    attach,
    create_selector,
    list_selectors,
    prepare,
)
from arr_coc.cli import app
from arr_coc.data.worlds import draw_clip, list_worlds, make_example, split_seed
from arr_coc.inference.load import load_selector

RECORD = Path(__file__).with_name("record.json")
TOLERANCE = 1e-5
# Adam turns the rounding of a tiny gradient into a whole step, so that losses after some steps agree less.
TRAINING_TOLERANCE = 1e-3
# Recurrent layers carry the rounding of a product, which differs from processor to processor, through all tokens: on
# one of Intel logits are up to 1.1e-4 off those of one of AMD. Ids and kept cells of these models must be the same.
RECURRENT, RECURRENT_TOLERANCE = re.compile(r"/tiny/qwen3_5\w* .*/logits/\d+"), 1e-3
EXAMPLES = {
    "shapes.png": "what does the purple text say?",
    "needle.png": "what does the sign next to the black ring say?",
    "camouflage.png": "what does the gray text say?",
    "splatter.png": "what does the blue text say?",
    "page.png": "what is the total?",
    "cat.jpg": "is there a cat?",
    "coffee.jpg": "is there a cup?",
    "../astronaut.jpg": "is there a person?",
}
# They say themselves what they keep; the oracle must be told where to look.
UNTOLD = [name for name in list_selectors() if name != "oracle"]
CHAT = ChatTokens(tiny_models.CHAT_START, tiny_models.CHAT_END, (tiny_models.USER,), tiny_models.NEWLINE)


def pack(kept: Any) -> list[list[Any]]:
    """Grids and kept cells; cells as bits in hexadecimal."""
    found = []
    for grid, cells in kept:
        mask = np.zeros(grid[0] * grid[1] * grid[2], dtype=bool)
        mask[np.asarray(cells)] = True
        found.append([list(grid), len(cells), np.packbits(mask).tobytes().hex()])
    return found


def floats(values: torch.Tensor) -> list[float]:
    return [round(value, 7) for value in values.detach().float().flatten().tolist()]


def embedded() -> dict[str, Any]:
    """Every mode on the pictures of the package and of the worlds, every selector on some of them."""
    torch.manual_seed(0)
    vlm, found = ARRCOCQwen.from_pretrained(), {}
    folder = files("arr_coc") / "assets" / "examples"
    asked: dict[str, tuple[Any, str]] = {Path(name).name: (folder / name, text) for name, text in EXAMPLES.items()}
    for world in list_worlds():
        sample = make_example(world, split_seed("test", 3), None, (256, 256))
        asked[world] = (sample.picture, sample.question)
    clip = draw_clip(split_seed("test", 3), "clip_cut", (128, 128), 6)
    asked["clips"] = ({"type": "video", "video": list(clip.frames)}, clip.questions[0].text)
    calls = [("prune", 0.25), ("prune", "auto"), ("weight", None), ("full", None), ("saccade", 48), ("saccade", 0.3)]
    fewer = {"needle.png": calls[:1] + calls[4:], "clips": calls[:4]}
    for name, (picture, question) in asked.items():
        for mode, budget in fewer.get(name, calls):
            answer = vlm.answer(picture, question, mode=mode, budget=budget, max_new_tokens=12)
            facts = {
                "answer": answer.text, "tokens": [answer.tokens.full, answer.tokens.used], "kept": pack(answer.kept),
                "strategy": answer.strategy, "reason": answer.reason,
            }  # fmt: skip
            if answer.output is not None and (mode, budget) in (("prune", 0.25), ("saccade", 48)):
                facts["relevance"] = floats(answer.output.relevance)[::3]
                facts["weights"] = floats(answer.output.weights)
                facts["tensions"] = floats(answer.output.tensions)
            found[f"{name} {mode} {budget}"] = facts
    for selector in UNTOLD:
        made = load_selector(selector, vlm.model)
        other = ARRCOCQwen(vlm.model, vlm.processor, made)
        for name in ("shapes.png", "camouflage"):
            answer = other.answer(*asked[name], budget=0.2, max_new_tokens=12)
            found[f"{name} by {selector}"] = {
                "answer": answer.text, "tokens": [answer.tokens.full, answer.tokens.used], "kept": pack(answer.kept),
                "strategy": answer.strategy, "reason": answer.reason,
            }  # fmt: skip
    return found


def tiny() -> dict[str, Any]:
    """Every family with every selector, and our layer in every mode; several pictures, rows, clips."""
    found: dict[str, Any] = {}
    for family in [*tiny_models.FAMILIES, *tiny_models.RELATIVES]:
        model = tiny_models.tiny_model(family)
        torch.manual_seed(0)
        prompts = {
            "rows": (tiny_models.IMAGE_PROMPT, tiny_models.SMALL, tiny_models.TEXT),
            "two": (tiny_models.TWO_IMAGES,),
        }
        if family in tiny_models.QWEN:
            prompts |= {"clip": (tiny_models.CLIP,), "mixed": (tiny_models.MIXED,)}
        layer = ARRCOCLayer(ARRCOCConfig.for_model(model)).eval()
        for name in UNTOLD:
            selector = layer if name == "arr-coc-untrained" else create_selector(name)
            for prompt, specs in prompts.items():
                inputs = tiny_models.inputs_for(family, *specs, seed=5)
                found[f"{family} {name} {prompt}"] = attempt(model, selector, inputs, budget=0.4)
        for mode in ("weight", "saccade"):
            for prompt in ("rows", "two"):
                inputs = tiny_models.inputs_for(family, *prompts[prompt], seed=5)
                found[f"{family} {mode} {prompt}"] = attempt(model, layer, inputs, mode=mode, budget=0.6)
        inputs = tiny_models.inputs_for(family, *prompts["rows"], seed=5)
        made = prepare(model, inputs, layer, budget=3, chat=CHAT)
        found[f"{family} prepare"] = {
            name: made[name].tolist() for name in ("input_ids", "attention_mask", "position_ids") if name in made
        }
    return found


def attempt(model: Any, selector: Any, inputs: Any, **options: Any) -> dict[str, Any]:
    """Generated ids and kept cells, or why there are none."""
    try:
        with torch.no_grad(), attach(model, selector, chat=CHAT, on_error="raise", **options) as run:
            logits = model(**inputs, logits_to_keep=1).logits[:, -1]
            out = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    except ValueError as error:
        return {"refused": str(error)}
    maps = [floats(output.relevance) for output in run.output if output is not None]
    return {
        "ids": out[:, inputs["input_ids"].shape[1] :].tolist(), "kept": pack(run.kept), "relevance": maps,
        "logits": floats(logits[:, 20:24]),
    }  # fmt: skip


def command(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    if result.exit_code:
        raise RuntimeError(f"arr-coc {' '.join(arguments)}: {result.output}")
    return result.stdout


def training(folder: Path) -> dict[str, Any]:
    """A few steps of every stage: losses, and how well it looked or answered."""
    found = {}
    small = ("--steps", "4", "--batch", "4", "--samples", "12", "--cache", str(folder / "cache"))
    runs = {
        "proxy": ("--stage", "proxy", "--data", "scenes", "--data", "gaze:pages"),
        "gate": ("--stage", "answers", "--data", "scenes", "--data", "void"),
        "gumbel": ("--stage", "hard", "--data", "camouflage", "--estimator", "gumbel", "--budget", "0.1-0.5"),
        "soft": ("--stage", "answers", "--data", "scenes", "--estimator", "soft"),
        "reinforce": ("--stage", "answers", "--data", "scenes", "--estimator", "reinforce"),
        "saccade": ("--stage", "answers", "--data", "scenes", "--mode", "saccade", "--budget", "0.5"),
    }
    for name, arguments in runs.items():
        out = folder / name
        command("train", *arguments, *(small if name == "proxy" else small[:6]), "--out", str(out))
        rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
        found[name] = [{key: value for key, value in row.items() if key not in ("per_second", "norm")} for row in rows]
    return found


def evaluation(folder: Path) -> dict[str, Any]:
    """Every selector on two worlds at two budgets: records, and the tables of the report."""
    out = folder / "eval"
    command(
        "eval", "--tasks", "scenes", "--tasks", "needles", "--selectors", "all", "--budgets", "0.25,16", "--limit", "3",
        "--size", "256", "--batch", "3", "--no-times", "--out", str(out),
    )  # fmt: skip
    records = [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]
    report = (out / "report.md").read_text().splitlines()
    tables = [line for line in report if line.startswith("|")]
    return {"records": {" ".join(map(str, list(row.values())[:4])): list(row.values())[4:] for row in records},
            "tables": tables}  # fmt: skip


def commands() -> dict[str, Any]:
    """What the commands print."""
    picture = str(files("arr_coc") / "assets" / "examples" / "shapes.png")
    question = EXAMPLES["shapes.png"]
    asked = json.loads(command("ask", picture, question, "--budget", "0.25", "--json"))
    del asked["timings_ms"]
    looked_for = json.loads(command("ask", picture, question, "--json"))
    for name in ("timings_ms", "looks"):
        del looked_for[name]  # sureness is a product of probabilities, which differs from processor to processor
    looked = json.loads(command("look", picture, question, "--json"))
    del looked["image"]
    compared = json.loads(command("compare", "arr-coc-untrained", "visionzip", picture, question, "--json"))
    return {"ask": asked, "ask auto": looked_for, "look": looked, "compare": compared}


PARTS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "embedded": lambda folder: embedded(),
    "tiny": lambda folder: tiny(),
    "training": training,
    "evaluation": evaluation,
    "commands": lambda folder: commands(),
}


def make(part: str) -> dict[str, Any]:
    """A part of the record."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        return PARTS[part](Path(place))


def tolerance(where: str) -> float:
    """How much a number at a place of the record may differ, as a share of it, or if it is below 1, at all."""
    if where.startswith("/training/"):
        return TRAINING_TOLERANCE
    return RECURRENT_TOLERANCE if RECURRENT.fullmatch(where) else TOLERANCE


def differences(before: Any, now: Any, where: str = "") -> list[str]:
    """Where two records differ, in words."""
    if isinstance(before, dict) and isinstance(now, dict):
        found = [f"{where}/{name}: {'is gone' if name in before else 'is new'}" for name in before.keys() ^ now.keys()]
        for name in before.keys() & now.keys():
            found += differences(before[name], now[name], f"{where}/{name}")
        return sorted(found)
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        return [one for place, pair in enumerate(zip(before, now, strict=True))
                for one in differences(*pair, f"{where}/{place}")]  # fmt: skip
    numbers = isinstance(before, float) and isinstance(now, int | float)
    same = abs(before - now) <= tolerance(where) * max(1.0, abs(before)) if numbers else before == now
    return [] if same else [f"{where}: {str(before)[:80]} became {str(now)[:80]}"]


def main() -> int:
    """Compare, or write."""
    now = {part: make(part) for part in PARTS}
    if "--write" in sys.argv:
        RECORD.write_text(json.dumps(now, separators=(",", ":"), sort_keys=True) + "\n", encoding="utf-8")
        print(f"{RECORD.name}: {RECORD.stat().st_size:,} bytes")
        return 0
    found = differences(json.loads(RECORD.read_text(encoding="utf-8")), json.loads(json.dumps(now)))
    print("\n".join(found) or "the record holds")
    print(f"{len(found)} differences")
    return int(bool(found))


if __name__ == "__main__":
    raise SystemExit(main())
