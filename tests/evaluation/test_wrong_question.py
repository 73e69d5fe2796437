"""The control `wrong`: a selector is asked another picture's question, and the model still its own."""

import json

import pytest
import torch
from typer.testing import CliRunner

from arr_coc import create_selector, list_selectors
from arr_coc.cli import app
from arr_coc.evaluation.contenders import Contender, open_contenders
from arr_coc.evaluation.records import RECORDS
from arr_coc.evaluation.run import Opened, run_contender
from arr_coc.evaluation.tasks import open_task
from arr_coc.evaluation.wrong_question import other_question
from arr_coc.families.family import open_family
from arr_coc.inference.load import load_model, load_processor
from arr_coc.selectors.registry import find_class

pytestmark = pytest.mark.slow  # the embedded model is asked
QUESTIONS = ["what color is the star?", "what does the red text say?"]
BUDGET = "12"


@pytest.fixture(scope="module", name="opened")
def open_embedded():
    return Opened(load_model("embedded", dtype=torch.float32), load_processor("embedded"))


def ask_both(opened, questions=QUESTIONS):
    """Model inputs for the same pictures with their own questions, and with each other's."""
    pictures = [item.open() for item in open_task("scenes/read", 2, 256)]
    own, wrong = opened.ask(questions, pictures), opened.ask(questions[::-1], pictures)
    return own, wrong


def run(opened, name, inputs, asked=None, answer=True, selector=None):
    contender = Contender(name, selector) if selector else open_contenders([name], opened.model)[-1]
    return run_contender(opened, open_family(opened.model), inputs, contender, BUDGET, answer, asked)


def cells(run):
    return [kept[1].tolist() for kept in run.kept]


def test_the_other_question_is_the_next_that_asks_something_else():
    task = open_task("scenes/color", 12, 256)
    for number, item in enumerate(task):
        other = other_question(task, number)
        assert other != item.question
        assert other in {each.question for each in task}
    single = open_task("scenes/color", 1, 256)
    assert other_question(single, 0) == single[0].question  # there is no other


@pytest.mark.parametrize("name", ["arr-coc", "arr-coc@saccade", "mmtok", "fastv"])
@torch.no_grad()
def test_the_choice_is_that_of_the_wrong_question_and_the_prompt_that_of_the_own(opened, name):
    own, wrong = ask_both(opened)
    plain, other = run(opened, name, own), run(opened, name, wrong)
    control = run(opened, name, own, wrong)
    assert cells(control) == cells(other) != cells(plain)
    words = own["input_ids"].shape[1]
    assert torch.equal(control.result[:, :words], own["input_ids"])
    assert run(opened, name, own, wrong, answer=False).used == control.used
    # asked its own question as the wrong one, nothing changes
    again = run(opened, name, own, own)
    assert cells(again) == cells(plain)
    assert torch.equal(again.generated, plain.generated)


@torch.no_grad()
def test_a_glance_at_the_wrong_question_decides_what_is_read_with_the_own(opened):
    own, wrong = ask_both(opened)
    plain, control = run(opened, "crop", own), run(opened, "crop", own, wrong)
    assert cells(control) == cells(run(opened, "crop", wrong)) != cells(plain)
    again = run(opened, "crop", own, own)
    assert torch.equal(again.generated, plain.generated)


@pytest.mark.parametrize("name", sorted({*list_selectors()} - {"oracle"}))
@torch.no_grad()
def test_a_selector_reads_the_question_if_it_says_so(opened, name):
    """`wrong` is offered for those whose choice another question can change, and for no other."""
    settings = {"downsample-auto": {"sure": 0.999}}
    selector = None if name == "arr-coc-untrained" else create_selector(name, **settings.get(name, {}))
    own, wrong = ask_both(opened, ["how many red squares are there?", "is there text?"])
    first = run(opened, name, own, answer=False, selector=selector)
    second = run(opened, name, wrong, answer=False, selector=selector)
    if not find_class(name).reads_question:
        assert cells(first) == cells(second)
    elif name != "downsample-auto":  # both of its choices may be the same size
        assert cells(first) != cells(second)


def test_blind_rules_have_no_such_control(opened):
    for name in ("grid@wrong", "downsample@wrong", "visionzip@wrong"):
        with pytest.raises(ValueError, match=r"does not read the question, got '\w+@wrong'; use \w+"):
            open_contenders([name], opened.model)
    names = {each.name for each in open_contenders(["wrong"], opened.model)}
    assert {"full", "arr-coc@wrong", "arr-coc-untrained@wrong", "fastv@wrong", "crop@wrong", "linear@wrong"} <= names
    assert not {"grid@wrong", "oracle@wrong", "arr-coc@saccade@wrong"} & names
    assert all(each.wrong for each in open_contenders(["wrong"], opened.model) if each.name != "full")


def test_the_report_has_a_row_that_falls_where_the_question_is_needed(tmp_path):
    arguments = ["--tasks", "scenes/read", "--selectors", "arr-coc,arr-coc@wrong,grid", "--budgets", "0.12"]
    out = tmp_path / "out"
    result = CliRunner().invoke(
        app, ["eval", *arguments, "--limit", "12", "--size", "256", "--no-times", "--out", str(out)]
    )
    assert result.exit_code == 0, result.output
    scores: dict[str, list[float]] = {}
    for row in map(json.loads, (out / RECORDS).read_text().splitlines()):
        scores.setdefault(row["selector"], []).append(row["score"])
    mean = {name: sum(values) / len(values) for name, values in scores.items()}
    assert mean["arr-coc"] >= mean["arr-coc@wrong"] + 0.3
    assert "arr-coc@wrong" in (out / "report.md").read_text()
