"""One picture, many questions: encoded once, chosen anew, and the same as asking each question by itself."""

from importlib.resources import files

import pytest
import torch
from simple_selector import GREEDY, ByScore
from tiny_models import FAMILIES, QWEN, TWO_IMAGES, inputs_for, tiny_model

from arr_coc import ARRCOCConfig, ARRCOCLayer, ARRCOCQwen, attach, create_selector, encode, prepare
from arr_coc.families import open_family
from arr_coc.families.qwen2_vl import Qwen2VL
from arr_coc.prompting.encodings import Encodings

EXAMPLES = files("arr_coc") / "assets" / "examples"
PAGE = ["what is the total?", "what is the title?", "which total is written here?"]


@pytest.fixture(scope="module", name="vlm")
def open_embedded():
    return ARRCOCQwen.from_pretrained()


@pytest.fixture(name="encoded_cells")
def count_cells(monkeypatch):
    """How many cells each call of the encoder got in mode saccade."""
    plain, counts = Qwen2VL.encode_cells, []

    def counted(self, patches, cells, grids, replay=False):
        counts.append(sum(map(len, cells)))
        return plain(self, patches, cells, grids, replay)

    monkeypatch.setattr(Qwen2VL, "encode_cells", counted)
    return counts


def questions(family, spec):
    """Two prompts about the same pictures that ask different things."""
    data = inputs_for(family, spec)
    other = {**data, "input_ids": data["input_ids"].clone()}
    other["input_ids"][:, -4:] = other["input_ids"][:, -4:].flip(1) + 1
    return data, other


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "name", ["arr-coc", *(pytest.param(name, marks=pytest.mark.slow) for name in ("visionzip", "grid", "fastv"))]
)
@torch.no_grad()
def test_shared_encodings_change_nothing(family, name, monkeypatch):
    model = tiny_model(family)
    layer = ARRCOCLayer(ARRCOCConfig.for_model(model)).eval()
    selector = layer if name == "arr-coc" else create_selector(name)
    seen = encode(model, inputs_for(family, TWO_IMAGES), selector)
    plain, ran = type(open_family(model)).run_encoder, []
    for data in questions(family, TWO_IMAGES):
        outs = []
        for encoded in (None, seen):
            monkeypatch.setattr(
                type(open_family(model)), "run_encoder", lambda *args, known=encoded: ran.append(known) or plain(*args)
            )
            with attach(model, selector, budget=5, on_error="raise", encoded=encoded) as run:
                outs.append((model.generate(**data, **GREEDY), [cells.tolist() for _, cells in run.kept]))
        assert torch.equal(outs[0][0], outs[1][0])
        assert outs[0][1] == outs[1][1]
    assert seen.calls == 1
    assert ran
    assert not any(known is seen for known in ran)  # nothing was encoded again
    assert seen.nbytes > 0


@pytest.mark.parametrize("family", QWEN)
@torch.no_grad()
def test_in_saccades_the_gestalt_is_encoded_once_and_no_cell_twice(family, encoded_cells):
    model = tiny_model(family)
    layer = ARRCOCLayer(ARRCOCConfig.for_model(model)).eval()
    spec = [("text", 4), ("image", (1, 32, 32)), ("text", 6)]
    seen, kept = Encodings(), set()
    for data in questions(family, spec):
        with attach(model, layer, mode="saccade", budget=100, on_error="raise", encoded=seen) as run:
            model(**data)
        kept |= set(run.kept[0][1].tolist())
    with attach(model, layer, mode="saccade", budget=100, on_error="raise", encoded=seen) as run:
        again = model(**data).logits
        assert torch.equal(again, model(**data).logits)
    gestalt, *saccades = encoded_cells
    assert gestalt <= 100
    assert sum(saccades) == len(kept)
    assert len(saccades) <= 2


@torch.no_grad()
def test_pictures_of_other_sizes_are_refused():
    model = tiny_model("qwen3_vl")
    seen = encode(model, inputs_for("qwen3_vl", TWO_IMAGES))
    with pytest.raises(ValueError, match=r"`encoded` holds pictures of grids .*; encode these pictures first"):
        prepare(model, inputs_for("qwen3_vl", [("image", (1, 4, 4)), ("text", 3)]), ByScore(), encoded=seen)


@pytest.mark.slow
def test_a_conversation_encodes_once_and_answers_as_single_questions_do(vlm):
    page = vlm.look(EXAMPLES / "page.png", remember=False)
    for question in PAGE:
        alone = vlm.answer(EXAMPLES / "page.png", question, max_new_tokens=12)
        together = page.ask(question, max_new_tokens=12)
        assert together.text == alone.text
        assert together.kept[0][1].tolist() == alone.kept[0][1].tolist()
    assert page.encoder_calls == 1


@pytest.mark.slow
def test_turns_stay_in_the_prompt(vlm):
    page = vlm.look(EXAMPLES / "page.png")
    first = page.ask(PAGE[0], max_new_tokens=12)
    page.ask(PAGE[1], max_new_tokens=12)
    assert [turn["role"] for turn in page.turns] == ["user", "assistant"] * 2
    assert page.turns[1]["content"][0]["text"] == first.text
    assert page.encoder_calls == 1
    assert len([part for turn in page.turns for part in turn["content"] if part["type"] == "image"]) == 1


@pytest.mark.slow
def test_a_conversation_in_saccades(vlm, encoded_cells):
    needle = vlm.look(EXAMPLES / "needle.png", remember=False)
    question = "what does the sign next to the black ring say?"
    first = needle.ask(question, mode="saccade", max_new_tokens=12)
    assert first.text == "FTXDQB"
    calls = needle.encoder_calls
    assert calls == 2  # gestalt, and saccades
    again = needle.ask(question, mode="saccade", max_new_tokens=12)
    assert again.text == first.text
    assert needle.encoder_calls == calls  # every cell is known
    needle.ask("what does the sign next to the red star say?", mode="saccade", max_new_tokens=12)
    assert needle.encoder_calls == calls + 1
    assert encoded_cells[0] <= 256
