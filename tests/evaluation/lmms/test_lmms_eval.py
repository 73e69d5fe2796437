"""lmms-eval, run as people run it, gives the answers and the score that our own evaluation gives."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from arr_coc import ARRCOCQwen
from arr_coc.data.worlds import make_example
from arr_coc.evaluation.answers import answer_examples, exact_match

pytestmark = [
    pytest.mark.lmms,
    pytest.mark.skipif(find_spec("lmms_eval") is None, reason="needs lmms-eval: make test-lmms"),
]
KINDS = [("scenes", "read"), ("scenes", "count_color"), ("pages", "page_cell")]
SAMPLES = [make_example(world, seed, kind) for world, kind in KINDS for seed in range(5)]


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """A folder with the task, its pictures and its questions."""
    folder = tmp_path_factory.mktemp("task")
    rows = []
    for number, sample in enumerate(SAMPLES):
        sample.picture.save(folder / f"{number}.png")
        rows.append({"picture": str(folder / f"{number}.png"), "question": sample.question, "answer": sample.answer})
    (folder / "worlds.json").write_text("\n".join(map(json.dumps, rows)))
    (folder / "worlds.yaml").write_text(Path(__file__).with_name("worlds.yaml").read_text())
    return folder


def run_lmms_eval(task, out, arguments):
    """The command of docs/lmms.md in a process of its own."""
    command = [sys.executable, "-m", "lmms_eval", "--model", "arr_coc", "--model_args", arguments, "--device", "cpu"]
    command += ["--tasks", "worlds", "--include_path", str(task), "--output_path", str(out), "--log_samples"]
    alone = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(task / "hub"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=task, env={**os.environ, **alone}, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize(
    ("arguments", "selector", "own"),
    [
        ("pretrained=embedded,selector=arr-coc,budget=0.25", "arr-coc", {"budget": 0.25}),
        ("selector=grid,budget=48", "grid", {"budget": 48}),
        ("mode=saccade,budget=64", "arr-coc", {"budget": 64, "mode": "saccade"}),
    ],
)
def test_it_scores_what_our_own_evaluation_scores(task, tmp_path, arguments, selector, own):
    done = run_lmms_eval(task, tmp_path, arguments)
    results, logged = (list(tmp_path.rglob(name)) for name in ("*results.json", "*samples_worlds.jsonl"))
    assert len(results) == len(logged) == 1, done.stdout[-2000:] + done.stderr[-2000:]
    score = json.loads(results[0].read_text())["results"]["worlds"]["exact_match,none"]
    rows = sorted(map(json.loads, logged[0].read_text().splitlines()), key=lambda row: row["doc_id"])

    vlm = ARRCOCQwen.from_pretrained("embedded", selector)
    answers = answer_examples(vlm.model, vlm.processor, SAMPLES, vlm.selector, **own)
    assert [row["filtered_resps"] for row in rows] == answers
    assert score == pytest.approx(exact_match(SAMPLES, answers))
    # the worse two make mistakes, and not only mistakes: a score of theirs is not equal by accident
    assert (0 < score < 1) == (own["budget"] != 0.25)


def test_wrong_arguments_are_refused_in_one_line(task, tmp_path):
    done = run_lmms_eval(task, tmp_path, "budget=2.5")  # lmms-eval says it and ends well all the same
    assert "Error during evaluation: `budget` must be in (0, 1] as a ratio, got 2.5; use an int for" in done.stdout
    assert not list(tmp_path.rglob("*results.json"))
