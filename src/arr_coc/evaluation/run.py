"""Accuracy: every item of every task through every selector at every budget, in batches, each encoded once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from arr_coc.config import Grid
from arr_coc.data.boxes import cells_inside
from arr_coc.data.example import Example, MissingPicture
from arr_coc.evaluation.answers import decode, tell_boxes
from arr_coc.evaluation.contenders import Contender, read_budget
from arr_coc.evaluation.metrics import LOOKED, coverage, find_misleading, overlap, pointing, precision
from arr_coc.evaluation.records import Record, Store
from arr_coc.evaluation.scoring import METRICS
from arr_coc.evaluation.tasks import Task
from arr_coc.families.family import Encoded, Family, Inputs, open_family
from arr_coc.inference.load import load_model, load_processor
from arr_coc.inference.messages import make_inputs, make_messages
from arr_coc.inference.session import Run, Session
from arr_coc.prompting.question import ChatTokens, Ints
from arr_coc.prompting.settings import Settings
from arr_coc.runtime.machine import check_device
from arr_coc.selectors.output import ARRCOCOutput

Progress = Callable[[int], None]
# Items of a task whose kept cells are written down, for drawing.
DRAWN = 40


@dataclass(frozen=True, eq=False)
class Opened:
    """A model with what it takes to ask it.

    Args:
        model (`PreTrainedModel`), processor (`ProcessorMixin`): of a supported family.
        instruction (`str`, *optional*): said after every question, such as how long an answer should be.
        max_new_tokens (`int`, *optional*, defaults to 16): how long it may be.
    """

    model: Any
    processor: Any
    instruction: str = ""
    max_new_tokens: int = 16

    @cached_property
    def chat(self) -> ChatTokens:
        """Markers of its prompts."""
        return ChatTokens() if self.processor is None else ChatTokens.from_tokenizer(self.processor.tokenizer)

    def session(self, family: Family, contender: Contender, budget: str) -> Session:
        """A contender at a budget. A failure ends the run: a score must be of tokens that were chosen."""
        settings = Settings(mode=contender.mode, budget=read_budget(budget), chat=self.chat, on_error="raise")
        return Session(family, contender.selector, settings)

    def ask(self, questions: Sequence[str], pictures: Sequence[Any]) -> dict[str, Any]:
        """Inputs of a batch of questions, on the model's device."""
        conversations = [
            make_messages(picture, f"{question} {self.instruction}".strip())
            for picture, question in zip(pictures, questions, strict=True)
        ]
        return make_inputs(self.processor, conversations, self.model.device, self.model.dtype)


def open_model(name: str, device: str, dtype: str, size: int) -> Opened:
    """A model by its directory, its Hub id or `"embedded"`; pictures of `size` pixels a side are not made smaller."""
    place = check_device(device)
    processor = load_processor(name)
    limits = processor.image_processor.size
    limits["longest_edge"] = max(limits["longest_edge"], size**2)
    return Opened(load_model(name, dtype=getattr(torch, dtype)).to(place).eval(), processor)


@contextmanager
def share_encodings(family: Family, contenders: Sequence[Contender]) -> Iterator[None]:
    """Inside `with`, a family encodes the same pixels once, and keeps the layers that any contender reads."""
    layers = sorted({layer for one in contenders for layer in getattr(one.selector, "encoder_layers", ())})
    found: dict[tuple[int, str], tuple[Tensor, Encoded]] = {}

    def encode(inputs: Inputs, kind: str, wanted: Sequence[int] = ()) -> Encoded:
        pixels = inputs[family.pixel_names[kind]]
        key = (pixels.data_ptr(), kind)
        if key not in found or found[key][0] is not pixels:
            found[key] = (pixels, type(family).encode(family, inputs, kind, layers))
        return found[key][1]

    family.__dict__["encode"] = encode
    try:
        yield
    finally:
        del family.__dict__["encode"]


@torch.no_grad()
def run_contender(
    opened: Opened, family: Family, inputs: dict[str, Any], contender: Contender, budget: str, answer: bool
) -> Run:
    """One selector at one budget on one batch of inputs, a picture in each row; with answers, or only what it reads."""
    session = opened.session(family, contender, budget)
    if not answer:
        return session.look(inputs)
    return session.generate({**inputs, "max_new_tokens": opened.max_new_tokens, "do_sample": False})


def count_read(family: Family, run: Run) -> list[int]:
    """Visual tokens that each row of a batch read, a picture in each row."""
    if run.inside_layer is not None:
        return [len(cells) for _, cells in run.kept]
    counts: list[int] = (run.inputs["input_ids"] == family.token_id("image")).sum(dim=1).tolist()
    return counts


def measure_looking(item: Example, kept: tuple[Grid, Ints] | None, output: ARRCOCOutput | None) -> dict[str, Any]:
    """How well something looked, where boxes say what had to be looked at, and if it did not, what misled it."""
    found: dict[str, Any] = {}
    if not item.boxes:
        return found
    if kept is not None:
        (_, rows, columns), cells = kept
        inside = cells_inside(item.boxes, rows, columns).flatten()
        mask = torch.zeros(rows * columns, dtype=torch.bool)
        mask[torch.as_tensor(cells)] = True
        found |= {"precision": float(precision(mask, inside)), "coverage": float(coverage(mask, inside))}
    if output is not None:
        relevance = output.relevance[0, -1].float().cpu()
        inside = cells_inside(item.boxes, *relevance.shape).flatten()
        flat = relevance.flatten()
        found |= {"overlap": float(overlap(flat, inside)), "pointing": float(pointing(flat, inside))}
        if found.get("coverage", 1.0) < LOOKED:
            scores = {name: score[0, -1].float().cpu().flatten() for name, score in output.scores.items()}
            weights = dict(zip(scores, output.weights[0].tolist(), strict=True))
            found["misled"] = find_misleading(flat, scores, weights, inside)
    return {name: value if isinstance(value, str) else round(value, 4) for name, value in found.items()}


def run_task(
    opened: Opened,
    task: Task,
    contenders: Sequence[Contender],
    budgets: Sequence[str],
    store: Store,
    batch_size: int,
    progress: Progress,
) -> None:
    """Fill a store with the records of a task that are not there yet; `progress` is told how many were made."""
    family = open_family(opened.model)
    calls = [(one, budget) for one in contenders for budget in one.budgets(budgets)]
    for first in range(0, len(task), batch_size):
        batch = [task[number] for number in range(first, min(first + batch_size, len(task)))]
        batch = [item for item in batch if (task.name, item.id) not in store.missing]
        # a batch is asked as a whole, so that a run that was interrupted answers as one that was not
        todo = [
            (one, budget)
            for one, budget in calls
            if any((task.name, item.id, one.name, budget) not in store.records for item in batch)
        ]
        progress(len(batch) * (len(calls) - len(todo)))
        if not todo:
            continue
        items, pictures = [], []
        for item in batch:
            try:
                pictures.append(item.picture)
                items.append(item)
            except MissingPicture as error:
                store.add_missing(task.name, item.id, str(error))
                progress(len(todo))
        if not items:
            continue
        inputs = opened.ask([item.question for item in items], pictures)
        full = [grid[0] * grid[1] * grid[2] for grid in family.grids(inputs, "image")]
        with share_encodings(family, contenders):
            for one, budget in todo:
                tell_boxes(one.selector, items)
                run = run_contender(opened, family, inputs, one, budget, task.metric is not None)
                answers = None if run.generated is None else decode(opened.processor, run.generated)
                drawn = [first + number < DRAWN for number in range(len(items))]
                read = count_read(family, run)
                store.add(_records(task, items, one, budget, run, answers, read, full, drawn))
                progress(len(items))


def _records(
    task: Task,
    items: Sequence[Example],
    contender: Contender,
    budget: str,
    run: Run,
    answers: Sequence[str] | None,
    read: Sequence[int],
    full: Sequence[int],
    drawn: Sequence[bool],
) -> Iterator[Record]:
    for row, item in enumerate(items):
        facts: dict[str, Any] = {}
        if answers is not None and task.metric is not None:
            answer = answers[row]
            facts |= {"answer": answer, "score": round(METRICS[task.metric](answer, item.answers), 4)}
        kept = run.kept[row] if contender.selector.keeps_cells else None
        facts |= measure_looking(item, kept, run.outputs[row])
        if drawn[row] and kept is not None:
            facts |= {"grid": list(kept[0][1:]), "kept": _bits(*kept)}
        yield Record(task.name, item.id, contender.name, budget, read[row], full[row], **facts)


def _bits(grid: Grid, cells: Ints) -> str:
    mask = np.zeros(grid[1] * grid[2], dtype=bool)
    mask[np.asarray(cells)] = True
    return np.packbits(mask).tobytes().hex()


def read_bits(text: str, grid: Sequence[int]) -> np.ndarray:
    """The kept cells `[rows, columns]` of a record."""
    mask = np.unpackbits(np.frombuffer(bytes.fromhex(text), dtype=np.uint8))[: grid[0] * grid[1]]
    return mask.astype(bool).reshape(grid[0], grid[1])
