"""The model for lmms-eval, with a stand-in for lmms-eval; the real one runs in tests/lmms."""

import importlib
import sys
import tomllib
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from importlib.resources import files
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from PIL import Image

from arr_coc.evaluation.lmms import cut_at, find_device, generation_options

PICTURES = files("arr_coc") / "assets" / "examples"


class Base:
    """What lmms-eval's base class gives."""

    def __init__(self):
        self._rank, self._world_size, self.task_dict = 0, 1, {}

    @property
    def rank(self):
        return self._rank


@dataclass
class Manifest:
    model_id: str
    simple_class_path: str


@pytest.fixture
def lmms(monkeypatch):
    """The module as lmms-eval imports it."""
    parts = {"lmms_eval.api.model": {"lmms": Base}, "lmms_eval.models.registry_v2": {"ModelManifest": Manifest}}
    for name, content in {"lmms_eval": {}, "lmms_eval.api": {}, "lmms_eval.models": {}, **parts}.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delitem(sys.modules, "arr_coc.evaluation.lmms")
    return importlib.import_module("arr_coc.evaluation.lmms")


def request_of(text, pictures_of, number=0, **generation):
    return SimpleNamespace(args=(text, generation, pictures_of, number, "task", "test"))


def ask_recorded(lmms, monkeypatch, request, said="a. b", **arguments):
    """The text that comes back, and what `answer` was asked."""
    asked = []

    def answer(messages, **options):
        asked.append((messages, options))
        return SimpleNamespace(text=said, tokens=SimpleNamespace(full=8, used=2))

    monkeypatch.setattr(lmms.ARRCOCQwen, "from_pretrained", lambda *_, **__: SimpleNamespace(answer=answer))
    model = lmms.ARRCOCModel(**arguments)
    model.task_dict = {"task": {"test": [None]}}
    [text] = model.generate_until([request])
    [(messages, options)] = asked
    return text, messages, options


def test_the_entry_point_gives_a_class_that_lmms_eval_takes(lmms):
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    [(name, value)] = project["entry-points"]["lmms_eval.models"].items()
    manifest = EntryPoint(name, value, "lmms_eval.models").load()()
    assert manifest.model_id == name == "arr_coc"
    module, _, found = manifest.simple_class_path.rpartition(".")
    model_class = getattr(importlib.import_module(module), found)
    assert issubclass(model_class, Base)
    assert model_class.is_simple


def test_it_answers_from_the_budget_it_was_given(lmms, capsys):
    model = lmms.ARRCOCModel(budget=0.25, device="cpu", batch_size="1")
    docs = [PICTURES / "camouflage.png", PICTURES / "splatter.png"]
    model.task_dict = {"task": {"test": docs}}
    requests = [
        request_of("what does the gray text say?", lambda doc: [Image.open(doc)], until=["\n\n"], temperature=0),
        request_of("what does the blue text say?", lambda doc: [str(doc)], 1, until=["S"]),
    ]
    assert model.generate_until(requests) == ["LSNHZ", "CBN"]
    assert "70 of 280 visual tokens" in " ".join(capsys.readouterr().err.split())
    assert (model.device, model.batch_size, model.rank) == (torch.device("cpu"), 1, 0)


@pytest.mark.parametrize("pictures", [["a.png", "b.png"], [], None])
def test_several_pictures_come_before_the_text_and_none_is_a_question_in_words(lmms, monkeypatch, pictures):
    request = request_of("<image> <image>\nwhich is red?", lambda _: pictures, max_new_tokens=5)
    _, [message], _ = ask_recorded(lmms, monkeypatch, request)
    shown = [{"type": "image", "image": name} for name in pictures or ()]
    assert message == {"role": "user", "content": [*shown, {"type": "text", "text": "which is red?"}]}


def test_the_task_decides_about_generation_and_the_model_about_tokens(lmms, monkeypatch):
    asked = request_of("what?", lambda _: ["a.png"], until=["."])
    text, _, options = ask_recorded(lmms, monkeypatch, asked, mode="saccade", budget="auto", max_new_tokens=7)
    assert text == "a"
    assert options == {"budget": "auto", "mode": "saccade", "max_new_tokens": 7, "do_sample": False}
    asked = request_of("what?", lambda _: ["a.png"], max_new_tokens=3)
    assert ask_recorded(lmms, monkeypatch, asked, max_new_tokens=7)[2]["max_new_tokens"] == 3


def test_what_is_opened_is_what_was_named_and_a_selection_that_fails_ends_the_run(lmms, monkeypatch):
    opened = []
    monkeypatch.setattr(lmms.ARRCOCQwen, "from_pretrained", lambda *parts, **options: opened.append((parts, options)))
    lmms.ARRCOCModel(selector="some/selector", device="cpu")
    lmms.ARRCOCModel("some/model", dtype="bfloat16", device="cpu")
    options = {"device_map": "cpu", "on_error": "raise"}
    assert opened == [
        ((None, "some/selector"), {"dtype": "auto", **options}),
        (("some/model", None), {"dtype": "bfloat16", **options}),
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"budgets": 3}, "arr_coc has no argument budgets; it has pretrained, selector, budget, mode"),
        ({"budget": 1.5}, r"`budget` must be in \(0, 1\] as a ratio, got 1.5"),
        ({"budget": "some"}, "`budget` must be an int, a float in .* or 'auto', got 'some'"),
        ({"mode": "glance"}, "`mode` must be one of auto, full, prune, weight, saccade, got 'glance'"),
        ({"selector": "oracle"}, "oracle must be told where to look"),
        ({"selector": "nothing"}, "no selector is named 'nothing'"),
        ({"pretrained": "nothing"}, "there is no directory 'nothing', and a Hub id has a slash"),
        ({"batch_size": "8"}, "`batch_size` must be 1, got 8"),
        ({"batch_size": "auto"}, "`batch_size` must be 1, got auto"),
        ({"max_new_tokens": 0}, "`max_new_tokens` must be a whole number of at least 1, got 0"),
        ({"max_new_tokens": 1.5}, "`max_new_tokens` must be a whole number of at least 1, got 1.5"),
        ({"dtype": "float7"}, "`dtype` must be 'auto' or one of torch's, such as 'bfloat16', got 'float7'"),
        ({"device": "toaster"}, "`device` must be one of torch's, such as cpu, cuda or cuda:0, got 'toaster'"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(lmms, arguments, said):
    with pytest.raises(ValueError, match=said) as error:
        lmms.ARRCOCModel(**{"device": "cpu", **arguments})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("method", ["loglikelihood", "generate_until_multi_round"])
def test_what_it_does_not_do_is_said(lmms, method):
    with pytest.raises(NotImplementedError, match="choose tasks whose output_type is generate_until"):
        getattr(lmms.ARRCOCModel, method)(None, [])


def test_each_process_gets_a_gpu_of_its_own_unless_one_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert [str(find_device(name)) for name in (None, "cuda", "cuda:1", "cpu")] == ["cuda:3", "cuda:3", "cuda:1", "cpu"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert str(find_device(None)) == "cpu"
    with pytest.raises(ValueError, match="`device` is cuda:1, but torch finds no GPU; use cpu"):
        find_device("cuda:1")


@pytest.mark.parametrize(
    ("generation", "options"),
    [
        ({}, {"do_sample": False}),
        ({"temperature": 0.0, "top_p": 1.0, "image_aspect_ratio": "pad"}, {"do_sample": False}),
        ({"temperature": 0.7, "top_p": None}, {"do_sample": True, "temperature": 0.7}),
        ({"temperature": 0.7, "do_sample": False, "num_beams": 2}, {"do_sample": False, "num_beams": 2}),
    ],
)
def test_generation_is_greedy_unless_a_temperature_is_named(generation, options):
    assert generation_options(generation) == options


@pytest.mark.parametrize(
    ("until", "left"),
    [(None, "one\n\ntwo, three."), ("\n\n", "one\n\ntwo, three."), (",", "one\n\ntwo"), (["", ".", "tw"], "one\n\n")],
)
def test_a_text_ends_before_the_first_end_but_keeps_its_paragraphs(until, left):
    assert cut_at("one\n\ntwo, three.", until) == left
