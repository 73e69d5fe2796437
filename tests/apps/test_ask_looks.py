"""`arr-coc ask --mode auto` and `--compress`, and the same in evaluations."""

import json
from importlib.resources import files

import numpy as np
import pytest
from simple_selector import ByScore
from tiny_directory import photo, write_checkpoint
from tiny_models import tiny_model
from typer.testing import CliRunner

from arr_coc import ARRCOCQwen, Looks
from arr_coc.cli import app
from arr_coc.data.worlds import draw_scene, split_seed
from arr_coc.evaluation.contenders import open_contenders, split_name
from arr_coc.inference.answer import Answer, TokenCount

EXAMPLES = files("arr_coc") / "assets" / "examples"
PAGE, TOTAL = str(EXAMPLES / "page.png"), "what is the total?"
NEEDLE, SIGN = str(EXAMPLES / "needle.png"), "what does the sign next to the black ring say?"


def invoke(*arguments):
    return CliRunner(env={"COLUMNS": "1000"}).invoke(app, list(map(str, arguments)))


@pytest.mark.slow
@pytest.mark.parametrize(("path", "question", "text"), [(PAGE, TOTAL, "$20.10"), (NEEDLE, SIGN, "FTXDQB")])
def test_the_embedded_model_is_sure_of_the_examples(path, question, text):
    facts = json.loads(invoke("ask", path, question, "--json").stdout)
    assert facts["answer"] == text
    assert facts["mode"] == "prune"
    [look] = facts["looks"]
    assert look["sure"] >= 0.99
    full = facts["tokens"]["full"]
    assert look["seen"] < full / 4
    assert look["tokens"] - look["seen"] == pytest.approx(full / 16, abs=4)  # to ask where to look
    assert look["tokens"] == facts["tokens"]["used"]
    assert facts["reason"].startswith(
        f"{look['sure']:.2f} sure after one look ({look['tokens']} tokens), sure enough; "
    )


@pytest.mark.slow
def test_who_is_harder_to_convince_looks_again():
    facts = json.loads(invoke("ask", PAGE, TOTAL, "--mode", "auto", "--sure", "1", "--json").stdout)
    assert facts["answer"] == "$20.10"
    full = facts["tokens"]["full"]
    first, last = facts["looks"]
    assert first["seen"] < full / 4 < round(full / 2) == last["seen"] == last["tokens"]  # what it looks at is known
    assert facts["tokens"]["used"] == first["tokens"] + last["tokens"]
    assert (first["then"], last["then"]) == ("again", "last")
    assert "sure after 2 looks (" in facts["reason"]


@pytest.mark.slow
def test_a_compressed_gestalt_is_within_reach(tmp_path):
    plain, pooled = (
        json.loads(invoke("ask", NEEDLE, SIGN, "--mode", "saccade", *compress, "--json").stdout)
        for compress in ((), ("--compress", "pool"))
    )
    assert pooled["tokens"] == plain["tokens"]
    assert pooled["timings_ms"]["encode"] > plain["timings_ms"]["encode"]  # of a larger gestalt
    sheet = tmp_path / "sheet.png"
    looked = invoke("look", NEEDLE, SIGN, "--mode", "saccade", "--compress", "merge", "--out", sheet)
    assert looked.exit_code == 0
    assert sheet.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ask", PAGE, TOTAL, "--budget", "0.2", "--sure", "0.9"], "--sure belongs to mode auto, got mode prune"),
        (["ask", PAGE, TOTAL, "--mode", "auto", "--sure", "2"], "`sure` must be in (0, 1], got 2.0"),
        (
            ["ask", PAGE, TOTAL, "--budget", "0.2", "--compress", "pool"],
            "--compress belongs to mode saccade, got mode prune",
        ),
        (["look", PAGE, TOTAL, "--compress", "pool"], "--compress belongs to mode saccade, got mode prune"),
        (["ask", PAGE, TOTAL, "--mode", "saccade", "--compress", "zip"], "one of pool, merge, conv or None, got 'zip'"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(arguments, message):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.slow
def test_a_file_of_questions_remembers_how_sure_it_had_to_be(tmp_path, monkeypatch):
    checkpoint = tmp_path / "model"
    checkpoint.mkdir()
    write_checkpoint(checkpoint)
    photo(96, 64).save(tmp_path / "a.png")
    (tmp_path / "questions.jsonl").write_text('{"image": "a.png", "question": "what is it?"}\n')
    asked = []

    def answer_many(self, questions, **options):
        asked.append(options)
        return iter([Answer("no", (), (), TokenCount(4, 4), "all", "", {}) for _ in questions])

    monkeypatch.setattr(ARRCOCQwen, "answer_many", answer_many)
    out = tmp_path / "answers.jsonl"
    batch = ["ask", "--batch", tmp_path / "questions.jsonl", "--model", checkpoint, "--out", out, "--mode", "auto"]
    assert invoke(*batch, "--sure", "0.9").exit_code == 0
    assert asked[0]["looks"] == Looks(sure=0.9)
    again = invoke(*batch, "--sure", "0.8")
    assert again.exit_code == 2
    assert "was started with sure 0.9, got 0.8" in again.stderr
    assert invoke(*batch, "--sure", "0.9").exit_code == 0
    assert len(asked) == 1


def test_contenders_may_compress_the_gestalt():
    assert split_name("arr-coc@pool@wrong") == ("arr-coc", "@pool@wrong")
    model = tiny_model("qwen3_vl")
    names = ["arr-coc-untrained@pool", "grid@merge", "grid@saccade@pool", "grid"]
    by_name = {each.name: each for each in open_contenders(names, model)}
    for name, compress in zip(names, ("pool", "merge", "pool", None), strict=True):
        gaze = by_name[name].gaze
        assert (gaze and gaze.compress) == compress
        assert by_name[name].mode == ("prune" if compress is None else "saccade")
    with pytest.raises(ValueError, match="grid has learned no compression, got 'grid@conv'; use grid@pool"):
        open_contenders(["grid@conv"], model)
    with pytest.raises(ValueError, match="compressed in one way"):
        open_contenders(["grid@pool@merge"], model)
    with pytest.raises(ValueError, match="visionzip has no saccade mode"):
        open_contenders(["visionzip@pool"], model)


def test_an_unknown_mode_names_all(tmp_path):
    write_checkpoint(tmp_path)
    vlm = ARRCOCQwen.from_pretrained(tmp_path, ByScore())
    with pytest.raises(ValueError, match="`mode` must be one of auto, full, prune, weight, saccade, got 'best'"):
        vlm.answer(photo(96, 64), "what?", mode="best")


def spread(look):
    """Root of the mean squared distance of a look's cells from their middle, as a share of the picture's diagonal."""
    [((_, rows, columns), cells)] = look.kept
    places = np.stack(np.divmod(np.asarray(cells), columns), axis=1)  # [K, 2]
    return np.sqrt(places.var(axis=0).sum()) / np.hypot(rows, columns)


@pytest.mark.slow
def test_questions_differ_in_number_spread_and_rounds():
    vlm, seen, wide, rounds = ARRCOCQwen.from_pretrained(), {}, {}, {}
    for number in (1, 3, 7, 13, 16, 20):  # held-out scenes with several shapes of one kind, and a text
        scene = draw_scene("scenes", split_seed("test", 9_800_000 + number), "count_shape", (512, 512))
        shape = next(each.words[0] for each in scene.things if len(each.words) == 2 and "text" not in each.words)
        color = next(each.words[1] for each in scene.things if each.words[0] == "text")
        for name, question in (
            ("unusual", "which one is unusual?"),
            ("count", f"how many {shape}{'es' if shape == 'cross' else 's'} are there?"),
            ("read", f"what does the {color} text say?"),
        ):
            looks = vlm.answer(scene.picture, question).looks
            seen.setdefault(name, []).append(looks[0].seen)
            wide.setdefault(name, []).append(spread(looks[0]))
            rounds.setdefault(name, []).append(len(looks))
    number, width, looks = ({name: np.mean(values[name]) for name in seen} for values in (seen, wide, rounds))
    assert number["unusual"] < number["read"] < number["count"]
    assert width["read"] < min(width["count"], width["unusual"])
    assert looks["read"] == 1 < looks["count"]
    # control: what was learned makes the difference
    vlm.selector.steering.correction[-1].weight.data.zero_()
    vlm.selector.steering.correction[-1].bias.data.zero_()
    for question in ("which one is unusual?", "how many rings are there?"):
        assert vlm.answer(scene.picture, question).looks[0].seen == 32


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("grid@auto@saccade", "names two modes; use grid@auto or grid@saccade"),
        ("fastv@auto", "fastv picks no tokens of a picture, so it takes one look, got 'fastv@auto'; use fastv"),
    ],
)
def test_contenders_that_cannot_look_again_are_refused(name, message):
    with pytest.raises(ValueError, match=message):
        open_contenders([name], tiny_model("qwen3_vl"))
