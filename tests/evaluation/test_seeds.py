"""Several seeds in one row: the mean over them, how far they lie apart, and what they are called."""

import json
from dataclasses import replace

import pytest
import torch
from tiny_models import tiny_model
from typer.testing import CliRunner

from arr_coc.cli import app
from arr_coc.evaluation.contenders import find_ours, open_contenders
from arr_coc.evaluation.records import RECORDS, RUN, WORK, Record, Store
from arr_coc.evaluation.report.sections import make_sections
from arr_coc.evaluation.report.statistics import paired_differences
from arr_coc.evaluation.report.summary import summarise
from arr_coc.evaluation.seeds import read_seeds
from arr_coc.inference.load import load_model, load_selector

SEEDS = {"ours": ["runs/a", "runs/b"]}
SCORES = {"ours#1": [1, 1, 0, 1], "ours#2": [1, 0, 0, 0], "grid": [0, 1, 0, 0], "full": [1, 1, 1, 1]}
TIMES = dict.fromkeys(("encode_ms", "select_ms", "prefill_ms", "first_token_ms", "select_ms_iqr", "kv_bytes"), 1.0)
TIMES |= {"of_full": 0.5, "decode_ms": None, "peak_mb": None, "samples": 2}


def make_records(scores=SCORES, task="t"):
    return [
        Record(
            task, str(item), name, "full" if name == "full" else "0.25", 25 + (name == "ours#2"), 100,
            score=float(score), answer=name, coverage=0.5, seen=1.0,
        )
        for name, each in scores.items()
        for item, score in enumerate(each)
    ]  # fmt: skip


def make_summary(records=None, rows=("full", "ours", "grid"), seeds=SEEDS, times=(), work=()):
    return summarise(make_records() if records is None else records, times, rows, ["0.25"], work, seeds)


def row_of(summary, name):
    [row] = [row for row in summary["rows"] if row["selector"] == name]
    return row


def test_a_row_is_the_mean_of_its_seeds_with_the_lowest_and_the_highest():
    times = [{**TIMES, "selector": f"ours#{n}", "budget": "0.25", "select_ms": float(n)} for n in (1, 2)]
    times += [{**TIMES, "selector": name, "budget": "0.25"} for name in ("linear", "linear@wrong", "ours#1@wrong")]
    work = [
        {"selector": f"ours#{n}", "budget": "0.25", "samples": 1}
        | {f"{part}_gmacs": 1.0 * n for part in ("encoder", "language", "choosing")}
        for n in (1, 2)
    ]
    summary = make_summary(times=times, work=work)
    assert [row["selector"] for row in summary["rows"]] == ["full", "ours", "grid"]
    ours = row_of(summary, "ours")
    assert (ours["accuracy"], ours["spread"], ours["each_seed"]) == (0.5, [0.25, 0.75], [0.75, 0.25])
    assert (ours["tokens"], ours["times"]["select_ms"], ours["encoder_gmacs"]) == (25.5, 1.5, 1.5)
    assert ours["times"]["decode_ms"] is None
    assert summary["seeds"] == SEEDS
    assert summary["tasks"]["t"]["means"]["ours"]["0.25"]["spread"] == [0.25, 0.75]
    assert summary["failures"]["0.25"]["t"] == {"seen but misread": 4}  # of both seeds
    assert summary["select_percentile"] == {"0.25": 1.0}  # of one rival; seeds are none of their row
    assert not any("spread" in row_of(summary, name) for name in ("full", "grid"))
    sections = {section.title: section for section in make_sections(summary, ["0.25"])}
    for title, cell in (("At a glance", 1), ("Task t", 1)):
        [shown] = [row for row in sections[title].rows if row[0].strip("*") == "ours"]
        assert shown[cell].startswith("**0.500")
        assert shown[cell].endswith(" [0.250 to 0.750]")
        assert "several seeds" in sections[title].words
    assert "Against ours" in sections


def test_differences_are_paired_with_the_mean_of_each_question():
    summary = make_summary()
    mean = [1, 0.5, 0, 0.5]
    [expected] = paired_differences([SCORES["grid"]], [mean])
    assert row_of(summary, "grid")["minus_ours"] == [round(value, 4) for value in expected]
    [of_one] = paired_differences([SCORES["grid"]], [SCORES["ours#1"]])  # the control: one lucky seed
    assert row_of(summary, "grid")["minus_ours"] != [round(value, 4) for value in of_one]


def test_the_spread_is_that_of_means_over_tasks():
    """Seeds that are good at different tasks lie close together."""
    swapped = {**SCORES, "ours#1": SCORES["ours#2"], "ours#2": SCORES["ours#1"]}
    summary = make_summary(make_records() + make_records(swapped, "u"))
    assert row_of(summary, "ours")["spread"] == [0.5, 0.5]
    assert [facts["means"]["ours"]["0.25"]["spread"] for facts in summary["tasks"].values()] == [[0.25, 0.75]] * 2


def test_only_questions_that_all_seeds_were_asked_count():
    cut = [record for record in make_records() if record.key != ("t", "3", "ours#2", "0.25")]
    summary = make_summary(cut)
    assert summary["items"] == {"t": 3}
    assert row_of(summary, "ours")["each_seed"] == [0.6667, 0.3333]


def test_one_seed_alone_looks_as_it_would_without_a_name():
    alone = [record for record in make_records() if record.selector != "ours#2"]
    summary = make_summary(alone, seeds={"ours": ["runs/a"]})
    plain = [replace(record, selector=record.selector.replace("ours#1", "ours")) for record in alone]
    other = make_summary(plain, seeds=None)
    assert [{k: v for k, v in row.items() if k != "minus_ours"} for row in summary["rows"]] == other["rows"]
    assert "seeds" not in make_sections(summary, ["0.25"])[0].words
    assert "seeds" not in other


def test_the_row_that_a_report_is_about():
    assert find_ours(["full", "ours", "arr-coc"], ["ours"]) == "arr-coc"
    assert find_ours(["full", "ours", "arr-coc-untrained"], ["ours"]) == "ours"
    assert find_ours(["full", "ours@wrong", "arr-coc-untrained"], ["ours"]) == "arr-coc-untrained"
    assert find_ours(["full", "grid"]) == "arr-coc"


@pytest.mark.parametrize(
    ("names", "rows", "seeds"),
    [
        (["grid"], ["grid"], {}),
        (["o=a+b"], ["o"], {"o": ["a", "b"]}),
        (["o=x/a@home+x/b@saccade", "o@wrong"], ["o@saccade", "o@wrong"], {"o": ["x/a@home", "x/b"]}),
        (["all", "arr-coc=arr-coc+runs/b"], ["all", "arr-coc"], {"arr-coc": ["arr-coc", "runs/b"]}),
    ],
)
def test_how_seeds_are_named(names, rows, seeds):
    assert read_seeds(names) == (rows, seeds)


def test_a_directory_may_have_any_name(tmp_path):
    (tmp_path / "a=b+c").mkdir()
    assert read_seeds([str(tmp_path / "a=b+c")]) == ([str(tmp_path / "a=b+c")], {})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("ours=runs/a+", "seeds are given as ROW=A+B"),
        ("=runs/a+runs/b", "seeds are given as ROW=A+B"),
        ("my ours=runs/a", "seeds are given as ROW=A+B"),
        ("ours=runs/a+runs/a", "each seed of a row must be another selector, got 'ours=runs/a+runs/a'"),
        ("grid=runs/a+runs/b", "grid is a selector's name, got 'grid=runs/a+runs/b'; name the row otherwise"),
        ("ours=runs/a,ours=runs/b", "the row ours has other seeds already"),
        ("ours=arr-coc+nothing", "no selector is named 'nothing'"),
        ("ours=grid+random,ours@wrong", "grid does not read the question"),
        ("ours=grid+visionzip,ours@saccade", "visionzip has no saccade mode"),
    ],
)
def test_a_mistake_is_one_line(given, said, tmp_path):
    arguments = ["eval", "--tasks", "scenes", "--limit", "1", "--selectors", given, "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    [line] = [line for line in result.stderr.splitlines() if line.strip()]
    assert said in line


def test_seeds_may_be_added_but_not_replaced(tmp_path):
    Store(tmp_path, {}, {"seeds": {"ours": ["a", "b"]}})
    assert Store(tmp_path, {}, {"seeds": {"ours": ["a", "b", "c"], "other": ["d"]}}).about["seeds"] == {
        "ours": ["a", "b", "c"],
        "other": ["d"],
    }
    assert Store(tmp_path, {}, {"seeds": {"ours": ["a"]}}).about["seeds"]["ours"] == ["a", "b", "c"]
    assert Store(tmp_path, {}).about["seeds"]["ours"] == ["a", "b", "c"]
    with pytest.raises(ValueError, match=r"was started with ours=a\+b\+c, got ours=a\+x; add seeds at the end"):
        Store(tmp_path, {}, {"seeds": {"ours": ["a", "x"]}})


@pytest.fixture(scope="module", name="trained")
def save_two_selectors(tmp_path_factory):
    """The shipped selector, and one whose weights were shaken."""
    folder = tmp_path_factory.mktemp("runs")
    selector = load_selector("arr-coc", load_model("embedded", dtype=torch.float32))
    selector.save_pretrained(folder / "a")
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in selector.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    selector.save_pretrained(folder / "b")
    return folder


def test_every_form_of_a_row_opens_all_seeds(trained):
    model = load_model("embedded", dtype=torch.float32)
    rows, seeds = read_seeds([f"ours={trained / 'a'}+{trained / 'b'}", "ours@saccade", "ours@wrong"])
    opened = open_contenders(rows, model, seeds)[1:]
    names = [f"ours#{n}{form}" for form in ("", "@saccade", "@wrong") for n in (1, 2)]
    assert [one.name for one in opened] == names
    assert [one.row for one in opened] == [f"ours{form}" for form in ("", "@saccade", "@wrong") for _ in range(2)]
    assert [one.mode for one in opened] == ["prune"] * 2 + ["saccade"] * 2 + ["prune"] * 2
    assert [one.wrong for one in opened] == [False] * 4 + [True] * 2


@pytest.mark.slow
def test_two_seeds_are_evaluated_and_a_third_is_added(trained, tmp_path):
    out = tmp_path / "out"

    def run(places, *more):
        listed = "+".join(str(place) for place in places)
        selectors = ",".join([f"ours={listed}", "ours@wrong", "downsample", *more])
        arguments = ("--tasks", "scenes", "--limit", "3", "--size", "256", "--budgets", "0.25", "--no-times")
        result = CliRunner().invoke(app, ["eval", *arguments, "--selectors", selectors, "--out", str(out)])
        assert result.exit_code == 0, result.output
        return json.loads((out / "summary.json").read_text())

    summary = run([trained / "a", trained / "b"])
    records = [json.loads(line) for line in (out / RECORDS).read_text().splitlines()]
    each = {"ours#1", "ours#2", "ours#1@wrong", "ours#2@wrong"}
    assert {row["selector"] for row in records} == {"full", "downsample", *each}
    assert {row["selector"] for row in summary["rows"]} == {"full", "ours", "ours@wrong", "downsample"}
    assert summary["seeds"] == {"ours": ["a", "b"]}  # no folders of the machine
    for name in ("ours", "ours@wrong"):
        row = row_of(summary, name)
        plain, _, suffix = name.partition("@")
        accuracies = [
            sum(one["score"] for one in records if one["selector"] == f"{plain}#{n}{'@' * bool(suffix)}{suffix}") / 3
            for n in (1, 2)
        ]
        assert row["each_seed"] == [round(value, 4) for value in accuracies]
        assert row["accuracy"] == round(sum(accuracies) / 2, 4)
        assert row["encoder_gmacs"] > 0
    assert "minus_ours" in row_of(summary, "downsample")
    for file in ("report.html", "report.md", "summary.json"):
        assert str(trained) not in (out / file).read_text()
    assert "`ours` is the mean of 2 seeds, `a` and `b`." in (out / "report.md").read_text()
    assert json.loads((out / RUN).read_text())["seeds"] == {"ours": [str(trained / "a"), str(trained / "b")]}
    before, counted = (out / RECORDS).read_text(), (out / WORK).read_text()
    summary = run([trained / "a", trained / "b", "arr-coc"])
    assert (out / RECORDS).read_text().startswith(before)
    added = {json.loads(line)["selector"] for line in (out / RECORDS).read_text()[len(before) :].splitlines()}
    assert added == {"ours#3", "ours#3@wrong"}
    assert (out / WORK).read_text().startswith(counted)
    ours = row_of(summary, "ours")
    assert ours["each_seed"][2] == ours["each_seed"][0]  # the same weights under another name


def test_a_selector_inside_the_language_model_may_name_its_layer():
    model = tiny_model("qwen3_vl")
    by_name = {each.name: each.selector for each in open_contenders(["fastv", "fastv:1", "fastv:3@wrong"], model)}
    assert {name: by_name[name].layer for name in by_name if name != "full"} == {
        "fastv": 2,
        "fastv:1": 1,
        "fastv:3@wrong": 3,
    }
    for wrong in ("grid:2", "fastv:x"):
        with pytest.raises(ValueError, match=f"'{wrong}' names no layer"):
            open_contenders([wrong], model)
