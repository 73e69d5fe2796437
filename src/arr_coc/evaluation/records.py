"""What was measured, line by line on disk, so that a run can be killed at any moment and go on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from arr_coc.runtime.atomic_files import write_aside

Key = tuple[str, str, str, str]
RUN, RECORDS, TIMES, MISSING = "run.json", "records.jsonl", "times.jsonl", "missing.jsonl"


@dataclass(frozen=True)
class Record:
    """One question, asked of one model through one selector at one budget.

    Args:
        task, item, selector, budget (`str`): what was asked, and how.
        tokens, full (`int`): visual tokens that were read, and that there were.
        answer (`str`, *optional*), score (`float`, *optional*): where something was to be answered.
        precision, coverage (`float`, *optional*): of the kept cells, where there are boxes.
        overlap, pointing (`float`, *optional*): of the relevance map, where there is one.
        misled (`str`, *optional*): which scorer led away from what was not looked at.
        grid (`list[int]`, *optional*), kept (`str`, *optional*): rows and columns, and the kept cells as bits in
            hexadecimal, of the first items of a task, for drawing.
    """

    task: str
    item: str
    selector: str
    budget: str
    tokens: int
    full: int
    answer: str | None = None
    score: float | None = None
    precision: float | None = None
    coverage: float | None = None
    overlap: float | None = None
    pointing: float | None = None
    misled: str | None = None
    grid: list[int] | None = None
    kept: str | None = None

    @property
    def key(self) -> Key:
        """What it is found by."""
        return self.task, self.item, self.selector, self.budget

    def to_line(self) -> str:
        """As a line of JSON, without what is not there."""
        return json.dumps({name: value for name, value in asdict(self).items() if value is not None})


class Store:
    """A directory of results.

    Args:
        directory (`Path`): made if it is not there.
        settings (`Mapping`): what results depend on; a directory that was begun with others is refused.
        about (`Mapping`, *optional*): what else is worth knowing, such as the machine.
    """

    def __init__(self, directory: Path, settings: Mapping[str, Any], about: Mapping[str, Any] | None = None) -> None:
        self.directory = directory
        path = directory / RUN
        if path.exists():
            before = json.loads(path.read_text(encoding="utf-8"))
            for name, value in settings.items():
                if before.get(name) != value:
                    raise ValueError(
                        f"{directory} was begun with {name} {before.get(name)!r}, not {value!r}; "
                        "go on with the same, or give another --out"
                    )
        directory.mkdir(parents=True, exist_ok=True)
        write_aside(path, json.dumps({**settings, **(about or {})}, indent=1) + "\n")
        known = {field.name for field in fields(Record)}
        self.records: dict[Key, Record] = {}
        for row in self._read(RECORDS):
            record = Record(**{name: value for name, value in row.items() if name in known})
            self.records[record.key] = record
        self.times: dict[tuple[str, str], dict[str, Any]] = {
            (row["selector"], row["budget"]): row for row in self._read(TIMES)
        }
        self.missing: dict[tuple[str, str], str] = {
            (row["task"], row["item"]): row["why"] for row in self._read(MISSING)
        }

    def add(self, records: Iterable[Record]) -> None:
        """Write the records of a batch that are not there yet."""
        new = [record for record in records if record.key not in self.records]
        self._append(RECORDS, [record.to_line() for record in new])
        self.records |= {record.key: record for record in new}

    def add_times(self, row: dict[str, Any]) -> None:
        """Write the times of one selector at one budget."""
        self._append(TIMES, [json.dumps(row)])
        self.times[row["selector"], row["budget"]] = row

    def add_missing(self, task: str, item: str, why: str) -> None:
        """Write down a picture that could not be read."""
        if (task, item) not in self.missing:
            self._append(MISSING, [json.dumps({"task": task, "item": item, "why": why})])
            self.missing[task, item] = why

    def _append(self, name: str, lines: list[str]) -> None:
        if lines:
            with (self.directory / name).open("a", encoding="utf-8") as file:
                file.write("".join(f"{line}\n" for line in lines))
                file.flush()
                os.fsync(file.fileno())

    def _read(self, name: str) -> list[dict[str, Any]]:
        """Whole lines; one that was torn when a run was killed is cut off."""
        path = self.directory / name
        if not path.exists():
            return []
        lines = path.read_bytes().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            write_aside(path, b"".join(lines[:-1]).decode())
            lines = lines[:-1]
        try:
            return [json.loads(line) for line in lines]
        except ValueError as error:
            raise ValueError(f"{path} is damaged ({error}); remove it, or give another --out") from None
