"""`arr-coc ask --batch`: a file of questions, answered into a file that a stopped run continues."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from arr_coc.config import Budget, Introspect
    from arr_coc.gaze.loop import Looks
    from arr_coc.gaze.plan import Gaze

BATCH_SIZE = 8


@dataclass(frozen=True)
class Question:
    """A line of the file of questions.

    Args:
        id (`str`): unique in the file; without one, `line 3`.
        image (`str`, `list[str]`, *optional*): as it stands there.
        text (`str`): the question.
        pictures (`tuple[Path, ...]`): the files of the pictures.
    """

    id: str
    image: str | list[str] | None
    text: str
    pictures: tuple[Path, ...]


def read_questions(file: Path) -> list[Question]:
    """Rows of `question[, image][, id]`; `image` is a path or a list of them, relative to the file."""
    from arr_coc.data.json_lines import read_rows, text_of

    questions: dict[str, Question] = {}
    for number, row in read_rows(file, ("question",)):
        where = f"{file}, line {number}"
        image = row.get("image")
        names = [] if image is None else image if isinstance(image, list) else [image]
        if not all(isinstance(name, str) and name.strip() for name in names):
            raise ValueError(f"{where}: 'image' must be a path or a list of paths, got {image!r}")
        name = str(row.get("id", f"line {number}"))
        if name in questions:
            raise ValueError(f"{where}: the id {name!r} was there before; each question needs its own")
        pictures = tuple(file.parent / one for one in names)
        questions[name] = Question(name, image, text_of(row, "question", where), pictures)
    if not questions:
        raise ValueError(f"{file} has no question; give one a line, such as " + '{"image": "a.jpg", "question": "..."}')
    return list(questions.values())


def answer_file(
    file: Path,
    out: Path | None,
    batch_size: int,
    model: str | None,
    selector: str | None,
    mode: str | None,
    budget: Budget | None,
    introspect: Introspect | None,
    gaze: Gaze | None,
    looks: Looks | None,
    device: str,
) -> tuple[int, int]:
    """Answer what is not answered yet; returns the numbers of all questions and of those that could not be asked."""
    from arr_coc.inference.load import find_names, quiet_loading
    from arr_coc.inference.vlm import ARRCOCQwen
    from arr_coc.runtime.machine import check_device

    place = check_device(device)
    questions = read_questions(file)
    base, chosen = find_names(model, selector)
    settings = {
        "model": base, "selector": None if mode == "full" else chosen,
        "mode": mode or ("auto" if budget is None else "prune"), "budget": budget,
        "introspect": introspect, "compress": None if gaze is None else gaze.compress,
        "sure": None if looks is None else looks.sure,
    }  # fmt: skip
    known = {} if out is None else read_answers(out, file, questions, settings)
    failed = sum("error" in row for row in known.values())
    # batches are asked whole, so that a continued run gives the same answers as one that was never stopped
    batches = [questions[first : first + batch_size] for first in range(0, len(questions), batch_size)]
    todo = [question for batch in batches if any(q.id not in known for q in batch) for question in batch]
    if not todo:
        return len(questions), failed
    quiet_loading()
    vlm = ARRCOCQwen.from_pretrained(base, chosen).to(place)
    answers = vlm.answer_many(
        ((question.pictures or None, question.text) for question in todo),
        batch_size=batch_size, mode=mode, budget=budget, introspect=introspect, gaze=gaze, looks=looks,
        return_exceptions=True,
    )  # fmt: skip
    write = _open_output(out)
    shown = out is not None or not sys.stdout.isatty()
    with _show_progress(len(questions), len(known), shown) as advance:
        for question, answer in zip(todo, answers, strict=True):
            if question.id in known:
                continue
            write(json.dumps({**_describe(question, answer), **settings}))
            failed += isinstance(answer, Exception)
            advance()
    return len(questions), failed


def read_answers(
    out: Path, file: Path, questions: Sequence[Question], settings: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Rows by id that an earlier run has written; those of other questions or settings are refused."""
    from arr_coc.evaluation.records import check_started, name_today
    from arr_coc.runtime.atomic_files import check_folder, recover_rows

    if out.is_dir() or not out.absolute().parent.is_dir():
        raise ValueError(f"{out} cannot be written: " + ("it is a folder" if out.is_dir() else "its folder is missing"))
    check_folder(out.parent)
    if out.exists() and out.samefile(file):
        raise ValueError(f"{out} is the file of questions itself; give another --out")
    asked = {question.id: question for question in questions}
    known: dict[str, dict[str, Any]] = {}
    for row in recover_rows(out, "remove it, or give another --out"):
        name = str(row.get("id"))
        if name not in asked or row.get("question") != asked[name].text or row.get("image") != asked[name].image:
            raise ValueError(f"{out} answers other questions than {file} (id {name!r}); give another --out")
        named = row.get("selector")
        today = None if named is None else name_today(str(named), str(row.get("model")))
        check_started(out, {**row, "selector": today}, settings)
        known[name] = row
    return known


def _describe(question: Question, answer: Any) -> dict[str, Any]:
    asked = {"id": question.id, "image": question.image, "question": question.text}
    if isinstance(answer, Exception):
        return {**asked, "error": " ".join(str(answer).split()) or type(answer).__name__}
    tokens = {"full": answer.tokens.full, "used": answer.tokens.used}
    facts = {"answer": answer.text, "tokens": tokens, "strategy": answer.strategy, "reason": answer.reason}
    if answer.looks:
        from arr_coc.cli.facts import describe_looks

        facts["looks"] = describe_looks(answer.looks)
    return {**asked, **facts}


def _open_output(out: Path | None) -> Callable[[str], None]:
    from arr_coc.runtime.atomic_files import append_lines

    return typer.echo if out is None else lambda line: append_lines(out, [line])


@contextmanager
def _show_progress(total: int, done: int, on: bool) -> Iterator[Callable[[], None]]:
    """Inside `with`, a bar on the error stream; yields what moves it by one question."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # answers may go to the output, which a bar would take over
    console = Console(stderr=True, highlight=False)
    with Progress(*columns, console=console, redirect_stdout=False, disable=not on) as bar:
        row = bar.add_task("questions", total=total, completed=done)
        yield lambda: bar.advance(row)
