"""Measure accuracy: every question of a task with every selector at every budget, in batches that are encoded once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, zip_longest
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from arr_coc.config import Grid, cell_count
from arr_coc.data.boxes import cells_inside
from arr_coc.data.example import Example, MissingPicture
from arr_coc.evaluation.answers import LONGEST_ANSWER, Shown, decode, show_example, tell_boxes
from arr_coc.evaluation.contenders import Contender, read_budget
from arr_coc.evaluation.metrics import LOOKED, answer_coverage, coverage, find_misleading, overlap, pointing, precision
from arr_coc.evaluation.records import Record, Store
from arr_coc.evaluation.scoring import METRICS
from arr_coc.evaluation.tasks import Task
from arr_coc.evaluation.wrong_question import other_question, record_choices
from arr_coc.families.family import Encoded, Family, Inputs, open_family
from arr_coc.inference.load import load_model, load_processor
from arr_coc.inference.messages import check_messages, make_inputs, make_messages
from arr_coc.inference.run import Run
from arr_coc.inference.session import Session
from arr_coc.prompting.question import ChatTokens, Ints
from arr_coc.prompting.settings import Settings
from arr_coc.runtime.machine import check_device
from arr_coc.selectors.contract import Selector
from arr_coc.selectors.output import ARRCOCOutput

Progress = Callable[[int], None]
# The first items of a task have their kept cells stored, so that a report can draw them.
DRAWN = 40


@dataclass(frozen=True, eq=False)
class Opened:
    """A model with its processor and generation settings.

    Args:
        model (`PreTrainedModel`), processor (`ProcessorMixin`): of a supported family.
        instruction (`str`, *optional*): appended to every question, such as how long an answer should be.
        max_new_tokens (`int`, *optional*, defaults to 32): the longest answer.
    """

    model: Any
    processor: Any
    instruction: str = ""
    max_new_tokens: int = LONGEST_ANSWER

    @cached_property
    def chat(self) -> ChatTokens:
        """Chat markers of the model's prompts."""
        return ChatTokens() if self.processor is None else ChatTokens.from_tokenizer(self.processor.tokenizer)

    def session(self, family: Family, contender: Contender, budget: str, selector: Selector | None = None) -> Session:
        """A session with a contender at a budget; a selection that fails ends the run, since it must not be scored.

        Another selector may take the place of the contender's own.
        """
        settings = Settings(
            mode=contender.mode, budget=read_budget(budget), chat=self.chat, on_error="raise",
            introspect=contender.introspect, gaze=contender.gaze,
        )  # fmt: skip
        return Session(family, selector or contender.selector, settings)

    def ask(self, questions: Sequence[str], pictures: Sequence[Any]) -> dict[str, Any]:
        """Model inputs for a batch of questions, each about a picture or a clip, on the model's device."""
        conversations = [
            make_messages(picture, f"{question} {self.instruction}".strip())
            for picture, question in zip(pictures, questions, strict=True)
        ]
        for messages in conversations:
            check_messages(messages, self.processor)
        return make_inputs(self.processor, conversations, self.model.device, self.model.dtype)


class Sample(NamedTuple):
    """A question about one picture or clip, opened, with the model's inputs."""

    item: Example
    shown: Shown
    inputs: dict[str, Any]


def take_samples(opened: Opened, tasks: Sequence[Task], count: int) -> list[Sample]:
    """Up to `count` questions, taken from all tasks in turn; those whose pictures cannot be read are passed over."""
    numbered = zip_longest(*([(task, number) for number in range(len(task))] for task in tasks))
    samples: list[Sample] = []
    for task, number in (pair for pair in chain.from_iterable(numbered) if pair is not None):
        if len(samples) == count:
            break
        item = task[number]
        try:
            shown = show_example(item)
        except MissingPicture:
            continue
        samples.append(Sample(item, shown, opened.ask([item.question], [shown])))
    return samples


def open_model(name: str, device: str, dtype: str, size: int) -> Opened:
    """Open a model by directory, Hub id or `"embedded"`; pictures of up to `size` pixels a side keep their size."""
    target = check_device(device)
    processor = load_processor(name)
    limits = processor.image_processor.size
    limits["longest_edge"] = max(limits["longest_edge"], size**2)
    return Opened(load_model(name, dtype=getattr(torch, dtype)).to(target).eval(), processor)


@contextmanager
def share_encodings(family: Family, contenders: Sequence[Contender]) -> Iterator[None]:
    """Inside `with`, a family encodes the same pixels once, with the encoder layers that any contender needs."""
    layers = sorted({layer for contender in contenders for layer in getattr(contender.selector, "encoder_layers", ())})
    encoded: dict[tuple[int, str], tuple[Tensor, Encoded]] = {}

    def encode(inputs: Inputs, kind: str, wanted: Sequence[int] = ()) -> Encoded:
        pixels = inputs[family.pixel_names[kind]]
        key = (pixels.data_ptr(), kind)
        if key not in encoded or encoded[key][0] is not pixels:
            encoded[key] = (pixels, type(family).encode(family, inputs, kind, layers))
        return encoded[key][1]

    family.__dict__["encode"] = encode
    try:
        yield
    finally:
        del family.__dict__["encode"]


@torch.no_grad()
def run_contender(
    opened: Opened,
    family: Family,
    inputs: dict[str, Any],
    contender: Contender,
    budget: str,
    answer: bool,
    asked: dict[str, Any] | None = None,
) -> Run:
    """Run a contender at a budget on a batch, one picture or clip per row; generate answers, or only select.

    If `asked` is given, the same batch with other questions, the contender chooses by these.
    """
    selector = contender.selector
    if asked is not None:
        recording, repeat = record_choices(selector)
        chosen = opened.session(family, contender, budget, recording).inspect(asked)
        if not answer:
            return chosen
        selector = repeat()
    session = opened.session(family, contender, budget, selector)
    if not answer:
        return session.inspect(inputs)
    return session.generate({**inputs, "max_new_tokens": opened.max_new_tokens, "do_sample": False})


def measure_looking(item: Example, kept: tuple[Grid, Ints] | None, output: ARRCOCOutput | None) -> dict[str, Any]:
    """Measure kept cells and relevance against an item's boxes; if the answer was not seen, name what misled.

    The boxes of a clip hold in all its frames.
    """
    measures: dict[str, Any] = {}
    if not item.boxes:
        return measures
    if kept is not None:
        (frames, rows, columns), cells = kept
        inside = cells_inside(item.boxes, rows, columns).expand(frames, -1, -1).flatten()
        mask = torch.zeros(frames * rows * columns, dtype=torch.bool)
        mask[torch.as_tensor(cells)] = True
        measures |= {
            "precision": float(precision(mask, inside)),
            "coverage": float(coverage(mask, inside)),
            "seen": answer_coverage(mask.view(frames, rows, columns), item),  # [N] -> [t, h, w]
        }
    if output is not None:
        relevance = output.relevance[0].float().cpu()  # [t, h, w]
        inside = cells_inside(item.boxes, *relevance.shape[1:]).expand_as(relevance).flatten()
        flat = relevance.flatten()
        measures |= {"overlap": float(overlap(flat, inside)), "pointing": float(pointing(flat, inside))}
        if measures.get("seen", 1.0) < LOOKED:
            scores = {name: score[0].float().cpu().flatten() for name, score in output.scores.items()}
            weights = dict(zip(scores, output.weights[0].tolist(), strict=True))
            own = cells_inside(item.answer_boxes, *relevance.shape[1:]).expand_as(relevance).flatten()
            measures["misled"] = find_misleading(flat, scores, weights, own)
    return {name: value if isinstance(value, str) else round(value, 4) for name, value in measures.items()}


def run_task(
    opened: Opened,
    task: Task,
    contenders: Sequence[Contender],
    budgets: Sequence[str],
    store: Store,
    batch_size: int,
    progress: Progress,
) -> None:
    """Add the records of a task that a store lacks; `progress` gets the number of records done."""
    family = open_family(opened.model)
    calls = [(contender, budget) for contender in contenders for budget in contender.budgets(budgets)]
    for first in range(0, len(task), batch_size):
        numbers = range(first, min(first + batch_size, len(task)))
        batch = [item for number in numbers if (task.name, (item := task[number]).id) not in store.missing]
        # batches are asked whole, so that a resumed run gives the same answers as an uninterrupted one
        todo = [
            (contender, budget)
            for contender, budget in calls
            if any((task.name, item.id, contender.name, budget) not in store.records for item in batch)
        ]
        progress(len(batch) * (len(calls) - len(todo)))
        if not todo:
            continue
        items, pictures = [], []
        for item in batch:
            try:
                pictures.append(show_example(item))
                items.append(item)
            except MissingPicture as error:
                store.add_missing(task.name, item.id, str(error))
                progress(len(todo))
        if not items:
            continue
        inputs = opened.ask([item.question for item in items], pictures)
        wrong: dict[str, Any] | None = None
        if any(contender.wrong for contender, _ in todo):
            questions = {task[number].id: other_question(task, number) for number in numbers}
            pixels = {name: inputs[name] for name in family.pixel_names.values() if name in inputs}  # encoded once
            wrong = opened.ask([questions[item.id] for item in items], pictures) | pixels
        with share_encodings(family, contenders):
            for contender, budget in todo:
                tell_boxes(contender.selector, items, pictures)
                asked = wrong if contender.wrong else None
                run = run_contender(opened, family, inputs, contender, budget, task.metric is not None, asked)
                answers = None if run.generated is None else decode(opened.processor, run.generated)
                drawn = [first + number < DRAWN for number in range(len(items))]
                layers = len(family.inner.language_model.layers)
                store.add(_records(task, items, contender, budget, run, layers, answers, drawn))
                progress(len(items))


def _records(
    task: Task,
    items: Sequence[Example],
    contender: Contender,
    budget: str,
    run: Run,
    layers: int,
    answers: Sequence[str] | None,
    drawn: Sequence[bool],
) -> Iterator[Record]:
    for row, (item, own) in enumerate(zip(items, run.split(len(items)), strict=True)):
        facts: dict[str, Any] = {"encoded": own.encoded, "processed": round(fmean(own.processed(layers)), 2)}
        if answers is not None and task.metric is not None:
            answer = answers[row]
            facts |= {"answer": answer, "score": round(METRICS[task.metric](answer, item.answers), 4)}
        kept = own.kept[0] if contender.selector.keeps_cells else None
        if kept is not None:
            facts["sharp"] = len(kept[1])
        facts |= measure_looking(item, kept, own.outputs[0])
        if drawn[row] and kept is not None:
            grid = kept[0] if kept[0][0] > 1 else kept[0][1:]
            facts |= {"grid": list(grid), "kept": _bits(*kept)}
        yield Record(task.name, item.id, contender.name, budget, own.used, own.full, **facts)


def _bits(grid: Grid, cells: Ints) -> str:
    mask = np.zeros(cell_count(grid), dtype=bool)
    mask[np.asarray(cells)] = True
    return np.packbits(mask).tobytes().hex()


def read_bits(text: str, grid: Sequence[int]) -> np.ndarray:
    """The kept cells `[rows, columns]` of a record, or `[frames, rows, columns]`."""
    mask = np.unpackbits(np.frombuffer(bytes.fromhex(text), dtype=np.uint8))[: math.prod(grid)]
    return mask.astype(bool).reshape(grid)
