"""Results on disk, one JSON line per question, so that a killed run can resume."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from arr_coc.config import EMBEDDED, EMBEDDED_MODEL, TRAINED, UNTRAINED
from arr_coc.evaluation.contenders import rename, split_name
from arr_coc.evaluation.seeds import join_seeds
from arr_coc.runtime.atomic_files import append_lines, recover_rows, write_aside

Key = tuple[str, str, str, str]
RUN, RECORDS, TIMES, WORK, MISSING = "run.json", "records.jsonl", "times.jsonl", "work.jsonl", "missing.jsonl"


@dataclass(frozen=True)
class Record:
    """One question, asked with one selector at one budget.

    Args:
        task, item, selector, budget (`str`): the question's task and id, the selector's name, and the budget.
        tokens, full (`int`): visual tokens read, and visual tokens of the whole picture or clip.
        sharp (`int`, *optional*): cells read at full resolution; in mode `"saccade"` the tokens of the gestalt are read
            besides them. None for selectors that keep no cells.
        encoded (`int`, *optional*): visual tokens that the encoder made, whether they were read or not.
        processed (`float`, *optional*): visual tokens that the language model processed, to choose and to answer, mean
            over its layers. None for both in results of an earlier version.
        answer (`str`, *optional*), score (`float`, *optional*): None for tasks without answers.
        precision, coverage (`float`, *optional*): of the kept cells; None without boxes.
        overlap, pointing (`float`, *optional*): of the relevance map; None without a map or boxes.
        seen (`float`, *optional*): share of the answer's own box that was kept, see
            [`~arr_coc.evaluation.metrics.answer_coverage`]; None without boxes.
        misled (`str`, *optional*): if the answer was not seen, the scorer that most preferred other cells.
        grid (`list[int]`, *optional*), kept (`str`, *optional*): rows and columns, of a clip also the number of frames
            before them, and the kept cells as bits in hexadecimal; only for the first items of a task, which a report
            may draw.
    """

    task: str
    item: str
    selector: str
    budget: str
    tokens: int
    full: int
    sharp: int | None = None
    encoded: int | None = None
    processed: float | None = None
    answer: str | None = None
    score: float | None = None
    precision: float | None = None
    coverage: float | None = None
    overlap: float | None = None
    pointing: float | None = None
    seen: float | None = None
    misled: str | None = None
    grid: list[int] | None = None
    kept: str | None = None

    @property
    def key(self) -> Key:
        """Task, item, selector and budget, which identify a record."""
        return self.task, self.item, self.selector, self.budget

    def to_line(self) -> str:
        """One line of JSON, without the fields that are None."""
        return json.dumps({name: value for name, value in asdict(self).items() if value is not None})


def check_started(path: Path, started: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Raise `ValueError` if results in a file or folder were made with other settings than a run that continues it."""
    for name, value in settings.items():
        if started.get(name) != value:
            raise ValueError(
                f"{path} was started with {name} {started.get(name)!r}, got {value!r}; "
                "use the same value, or give another --out"
            )


def _join_revisions(*revisions: str | None) -> str | None:
    """The commits that a run was begun and continued with, each once."""
    each = [name for revision in revisions if revision for name in revision.split(", ")]
    return ", ".join(dict.fromkeys(each)) or None


def name_today(selector: str, model: str) -> str:
    """The name of a selector in results of a model, which may be older: `arr-coc` was also the untrained layer.

    Example:

    ```python
    >>> from arr_coc.evaluation.records import name_today
    >>> name_today("untrained", "embedded"), name_today("arr-coc", "embedded"), name_today("arr-coc", "a/model")
    ('arr-coc-untrained', 'arr-coc', 'arr-coc-untrained')

    ```
    """
    embedded = model in (EMBEDDED, EMBEDDED_MODEL)
    plain, suffix = split_name(selector)
    if not embedded and plain == TRAINED:
        return UNTRAINED + suffix
    return rename(selector, embedded)


class Store:
    """A directory of results.

    Args:
        directory (`Path`): created if missing.
        settings (`Mapping`): settings that change the results; a directory that was started with others is
            refused.
        about (`Mapping`, *optional*): further facts to store, such as the machine; a run that is continued with another
            `revision` has both, and with further `seeds` of a row has all.

    Attributes:
        about (`dict`): settings and facts, as stored.
    """

    def __init__(self, directory: Path, settings: Mapping[str, Any], about: Mapping[str, Any] | None = None) -> None:
        self.directory = directory
        path = directory / RUN
        self.about: dict[str, Any] = {**settings, **(about or {})}
        if path.exists():
            saved = json.loads(path.read_text(encoding="utf-8"))
            check_started(directory, saved, settings)
            self.about["revision"] = _join_revisions(saved.get("revision"), self.about.get("revision"))
            if seeds := join_seeds(directory, saved.get("seeds", {}), self.about.get("seeds", {})):
                self.about["seeds"] = seeds
        directory.mkdir(parents=True, exist_ok=True)
        write_aside(path, json.dumps(self.about, indent=1) + "\n")
        known = {field.name for field in fields(Record)}
        self.records: dict[Key, Record] = {}
        model = str(settings.get("model", EMBEDDED))
        for row in self._recover(RECORDS, model):
            record = Record(**{name: value for name, value in row.items() if name in known})
            self.records[record.key] = record
        self.times, self.work = (
            {(row["selector"], row["budget"]): row for row in self._recover(name, model)} for name in (TIMES, WORK)
        )
        self.missing: dict[tuple[str, str], str] = {
            (row["task"], row["item"]): row["why"] for row in self._recover(MISSING)
        }

    def _recover(self, name: str, model: str | None = None) -> list[dict[str, Any]]:
        """The rows of a file; those of selectors, told by the name of the model, with the names of today."""
        rows = recover_rows(self.directory / name, "remove it, or give another --out")
        return rows if model is None else [{**row, "selector": name_today(row["selector"], model)} for row in rows]

    def add(self, records: Iterable[Record]) -> None:
        """Append the records that the store does not have yet."""
        new = [record for record in records if record.key not in self.records]
        append_lines(self.directory / RECORDS, [record.to_line() for record in new])
        self.records |= {record.key: record for record in new}

    def add_times(self, row: dict[str, Any]) -> None:
        """Append the times of one selector at one budget."""
        append_lines(self.directory / TIMES, [json.dumps(row)])
        self.times[row["selector"], row["budget"]] = row

    def add_work(self, row: dict[str, Any]) -> None:
        """Append the multiply-adds of one selector at one budget."""
        append_lines(self.directory / WORK, [json.dumps(row)])
        self.work[row["selector"], row["budget"]] = row

    def add_missing(self, task: str, item: str, why: str) -> None:
        """Append a picture that could not be read."""
        if (task, item) not in self.missing:
            append_lines(self.directory / MISSING, [json.dumps({"task": task, "item": item, "why": why})])
            self.missing[task, item] = why
