"""The time of `make ask` on a CPU after loading, against that of another version of the source.

python benchmarks/ask.py --against COMMIT_OR_PATH --out benchmarks/results/ask-cpu.json

Each round opens the embedded model in two new processes, one per version, which then answer in turn: a slow spell of
the machine falls on both. `first` is the first answer of a process, as in `make ask`; `later` are those after it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from importlib import import_module
from importlib.resources import files
from io import BytesIO
from pathlib import Path
from typing import Annotated

import torch
import typer
from timing import machine, summary, write_json

from arr_coc import ARRCOCQwen
from arr_coc.drawing.overlay import draw_overlay
from arr_coc.drawing.png_file import save_image
from arr_coc.inference.load import find_names, quiet_loading
from arr_coc.pixels.files import open_picture

ROOT = Path(__file__).parent.parent
QUESTION = "what does the purple text say?"
CELL = 32


def serve(mode: str | None) -> None:
    """Open the model, then answer for each line on standard input and print the milliseconds of answer and overlay."""
    meanwhile = contextlib.nullcontext
    with contextlib.suppress(ImportError, AttributeError):  # as the command does; earlier versions do not
        memory = import_module("arr_coc.runtime.freed_memory")
        memory.keep_freed_memory()
        meanwhile = memory.take_memory_meanwhile
    quiet_loading()
    image = open_picture(Path(str(files("arr_coc") / "assets" / "examples" / "shapes.png"))).image
    with meanwhile():
        vlm = ARRCOCQwen.from_pretrained(*find_names(None, None))
    print("ready", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        for _ in sys.stdin:
            start = time.perf_counter()
            answer = vlm.answer(image, QUESTION, mode=mode)
            answered = time.perf_counter()
            save_image(draw_overlay(image, answer, CELL), Path(directory) / "seen.png")
            done = time.perf_counter()
            print(1e3 * (answered - start), 1e3 * (done - answered), answer.text, flush=True)


class Server:
    """A new process that has opened the model from the source in a folder."""

    def __init__(self, source: Path, mode: str | None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", *(["--mode", mode] if mode else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(source)},
        )
        self._read()

    def ask(self) -> tuple[float, float, str]:
        """Milliseconds of answer and overlay, and the answer."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        answer, overlay, text = self._read().split(maxsplit=2)
        return float(answer), float(overlay), text

    def _read(self) -> str:
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("the process that answers has ended; its error is above")
        return line.strip()

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def copy_source(version: str, target: Path) -> Path:
    """The folder `src` of a commit or a checkout, copied so that nobody edits it meanwhile."""
    if (Path(version) / "src").is_dir():
        shutil.copytree(Path(version) / "src", target / "src", ignore=shutil.ignore_patterns("__pycache__"))
    else:
        packed = subprocess.run(["git", "archive", version, "src"], cwd=ROOT, check=True, capture_output=True).stdout
        with tarfile.open(fileobj=BytesIO(packed)) as archive:
            archive.extractall(target, filter="data")
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(target)], check=True)
    return target / "src"


def main(
    against: Annotated[str, typer.Option(help="Commit or checkout to compare with.")] = "HEAD",
    rounds: Annotated[int, typer.Option(help="New processes of each version.")] = 12,
    later: Annotated[int, typer.Option(help="Answers of each process after its first.")] = 15,
    out: Annotated[Path | None, typer.Option(help="Where the JSON goes.")] = None,
    mode: Annotated[str | None, typer.Option(help="Of both versions. [default: each version's own]")] = None,
    serving: Annotated[bool, typer.Option("--serve", hidden=True)] = False,
) -> None:
    if serving:
        serve(mode)
        return
    times: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as directory:
        names = {"before": against, "now": str(ROOT)}
        sources = {name: copy_source(version, Path(directory) / name) for name, version in names.items()}
        for turn in range(rounds):
            servers = {name: Server(source, mode) for name, source in sources.items()}
            order = list(servers) if turn % 2 else list(servers)[::-1]
            texts = set()
            for count in range(1 + later):
                when = "later" if count else "first"
                for name in order:
                    answer, overlay, text = servers[name].ask()
                    texts.add(text)
                    for what, value in (("answer", answer), ("answer and overlay", answer + overlay)):
                        times.setdefault(f"{when} {what}", {}).setdefault(name, []).append(value)
            for server in servers.values():
                server.close()
            if len(texts) != 1:
                raise ValueError(f"the versions answer differently: {sorted(texts)}")
            print(f"round {turn + 1}: " + ", ".join(f"{n} {times['first answer'][n][-1]:.0f} ms" for n in names))
    rows = {}
    for what, by_version in times.items():
        found = {name: summary(values) for name, values in by_version.items()}
        pairs = zip(by_version["now"], by_version["before"], strict=True)  # neighbours in time
        ratios = {kind: round(found["now"][kind] / found["before"][kind], 3) for kind in ("median_ms", "min_ms")}
        ratios["median of pairs"] = round(statistics.median(now / before for now, before in pairs), 3)
        rows[what] = {**found, "now over before": ratios}
        print(f"{what:26s}", *(f"{name} {row['median_ms']:7.1f} (IQR {row['iqr_ms']:.1f}, least {row['min_ms']:.1f})"
              for name, row in found.items()), ratios)  # fmt: skip
    if out is not None:
        place = torch.device("cpu")
        write_json(
            out, {**machine(place, torch.float32), "before": against, "question": QUESTION, "mode": mode, "times": rows}
        )


if __name__ == "__main__":
    typer.run(main)
