"""One picture, many questions: encoded once, chosen anew, and the same as asking each question by itself."""

import copy
from importlib.resources import files

import pytest
import torch
from simple_selector import GREEDY, ByScore
from tiny_models import FAMILIES, IMAGE, IMAGE_PROMPT, QWEN, TWO_IMAGES, inputs_for, tiny_model

from arr_coc import (
    ARRCOCConfig,
    ARRCOCLayer,
    ARRCOCQwen,
    Gaze,
    Selection,
    TokenSelector,
    attach,
    create_selector,
    encode,
    prepare,
)
from arr_coc.families import open_family
from arr_coc.families.qwen2_vl import Qwen2VL
from arr_coc.inference.messages import make_inputs, make_messages
from arr_coc.prompting import prefix as prefix_module
from arr_coc.prompting.encodings import Encodings
from arr_coc.prompting.prefix import Prefix

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
    "name",
    ["arr-coc-untrained", *(pytest.param(name, marks=pytest.mark.slow) for name in ("visionzip", "grid", "fastv"))],
)
@torch.no_grad()
def test_shared_encodings_change_nothing(family, name, monkeypatch):
    model = tiny_model(family)
    layer = ARRCOCLayer(ARRCOCConfig.for_model(model)).eval()
    selector = layer if name == "arr-coc-untrained" else create_selector(name)
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


def test_questions_in_inference_mode_and_outside_take_turns(encoded_cells):
    model = tiny_model("qwen3_vl")
    layer = ARRCOCLayer(ARRCOCConfig.for_model(model)).eval()
    data = inputs_for("qwen3_vl", [("text", 4), ("image", (1, 32, 32)), ("text", 6)])
    settings = {"mode": "saccade", "gaze": Gaze(gestalt=30), "on_error": "raise"}
    found = []
    for modes in ((torch.no_grad, torch.no_grad), (torch.inference_mode, torch.no_grad)):
        seen, logits = Encodings(), []
        for mode, budget in zip(modes, (100, 140), strict=True):
            before = len(encoded_cells)
            with mode(), attach(model, layer, budget=budget, encoded=seen, **settings):
                logits.append(model(**data).logits)
            assert len(encoded_cells) > before  # the second question has new cells, too
        found.append(logits)
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@torch.no_grad()
def test_pictures_of_other_sizes_are_refused():
    model = tiny_model("qwen3_vl")
    seen = encode(model, inputs_for("qwen3_vl", TWO_IMAGES))
    with pytest.raises(ValueError, match=r"`encoded` holds other pictures, .*; encode these pictures first"):
        prepare(model, inputs_for("qwen3_vl", [("image", (1, 4, 4)), ("text", 3)]), ByScore(), encoded=seen)
    with pytest.raises(ValueError, match=r"`encoded` holds pictures of grids .*; encode these pictures first"):
        prepare(model, inputs_for("qwen3_vl", IMAGE_PROMPT), ByScore(), encoded=copy.deepcopy(seen))


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_other_pictures_and_models_are_refused(family):
    model = tiny_model(family)
    data, other = inputs_for(family, TWO_IMAGES), inputs_for(family, TWO_IMAGES, seed=3)
    seen = encode(model, data)
    same = {name: value.clone() for name, value in data.items()}  # as the processor makes them again
    short = prepare(model, same, ByScore(), budget=3, on_error="raise", encoded=seen)
    assert (short.tokens.used, seen.calls) == (6, 1)
    for wrong, opened_by in (({**data, "pixel_values": other["pixel_values"]}, model), (data, tiny_model(family))):
        with pytest.raises(ValueError, match="`encoded` holds other pictures, or those of another model; encode thes"):
            prepare(opened_by, wrong, ByScore(), budget=3, encoded=seen)
    twin = copy.deepcopy(seen)
    assert prepare(model, data, ByScore(), budget=3, encoded=twin).tokens.used == 6


def test_a_question_about_another_picture_leaves_what_was_encoded_as_it_was(vlm):
    question, options = "what color is the star?", {"max_new_tokens": 4}
    messages = make_messages(EXAMPLES / "shapes.png", question)
    seen = encode(vlm.model, make_inputs(vlm.processor, [messages], "cpu"))
    with pytest.raises(ValueError, match="`encoded` holds other pictures, or those of another model"):
        vlm.answer(EXAMPLES / "splatter.png", question, encoded=seen, **options)
    for _ in range(2):
        answer = vlm.answer(EXAMPLES / "shapes.png", question, encoded=seen, **options)
        assert answer.text == vlm.answer(EXAMPLES / "shapes.png", question, **options).text
    assert seen.calls == 1


@pytest.mark.slow
def test_a_conversation_encodes_once_and_answers_as_single_questions_do(vlm):
    page = vlm.look(EXAMPLES / "page.png", remember=False)
    for question in PAGE:
        alone = vlm.answer(EXAMPLES / "page.png", question, max_new_tokens=12)
        together = page.ask(question, max_new_tokens=12)
        assert together.text == alone.text
        assert together.kept[0][1].tolist() == alone.kept[0][1].tolist()
    assert page.encoder_calls == 1


def test_what_is_no_question_is_refused(vlm):
    page = vlm.look(EXAMPLES / "page.png")
    with pytest.raises(ValueError, match="the question is empty; ask something about the picture"):
        page.ask(" ")
    with pytest.raises(TypeError, match="the question must be a string, got int"):
        page.ask(3)
    assert (page.turns, page.encoder_calls) == ([], 0)


@pytest.mark.slow
def test_ten_questions_about_one_picture_encode_it_once(vlm, encoded_cells):
    shapes = ["ring", "star", "bar", "circle", "square", "triangle", "cross", "heart", "arrow", "moon"]
    asked = [f"what does the sign next to the {color} {shape} say?" for color, shape in zip(
        ["black", "red", "blue", "green", "yellow"] * 2, shapes, strict=True)]  # fmt: skip
    whole = vlm.look(EXAMPLES / "page.png", remember=False)
    for question in asked:
        whole.ask(question, max_new_tokens=2)
    assert whole.encoder_calls == 1
    encoded_cells.clear()
    needle, kept = vlm.look(EXAMPLES / "needle.png", remember=False), []
    for question in asked:
        kept.append(set(needle.ask(question, mode="saccade", max_new_tokens=2).kept[0][1].tolist()))
    gestalt, *saccades = encoded_cells  # tokens of each call of the encoder
    assert gestalt <= 256
    assert len(saccades) <= 10
    assert sum(saccades) == len(set.union(*kept))  # no cell twice
    assert sum(map(len, kept)) > 1.5 * sum(saccades)  # which the questions have in common


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


LARGE = [("text", 20), ("image", (1, 32, 32)), ("text", 6)]
WAYS = {
    "prune": ([("text", 5), *TWO_IMAGES], None, {"budget": 5}),
    "full": (TWO_IMAGES, "full", {}),
    "gestalt stays": (LARGE, None, {"mode": "saccade", "budget": 100, "gaze": Gaze(overlap="keep")}),
    "gestalt makes room": (LARGE, None, {"mode": "saccade", "budget": 100, "gaze": Gaze(overlap="drop")}),
}


@pytest.fixture(name="read_columns")
def count_columns(monkeypatch):
    """Lists the number of columns of each pass of a language model from now on; with hooks, nothing is reused."""

    def count(model):
        columns, cls = [], type(model.model.language_model)
        plain = cls.forward

        def counted(self, *args, **kwargs):
            columns.append(kwargs["inputs_embeds"].shape[1])
            return plain(self, *args, **kwargs)

        monkeypatch.setattr(cls, "forward", counted)
        return columns

    return count


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_what_prompts_have_in_common_is_read_once(family, way, read_columns):
    spec, name, settings = WAYS[way]
    if family == "llava" and "mode" in settings:
        pytest.skip("LLaVA 1.5 encodes whole pictures only")
    model = tiny_model(family)
    selector = create_selector(name) if name else ARRCOCLayer(ARRCOCConfig.for_model(model)).eval()
    plain, seen, prompts = Encodings(), Encodings(), questions(family, spec)
    seen.prefix = Prefix()
    columns, lengths = read_columns(model), []
    for data in (*prompts, prompts[0]):
        outs = []
        for encoded in (plain, seen):
            with attach(model, selector, on_error="raise", encoded=encoded, **settings):
                outs.append(model.generate(**data, **GREEDY))
            lengths.append(columns[0])
            columns.clear()
        assert torch.equal(*outs)
    whole, read = lengths[::2], lengths[1::2]
    assert read[0] == whole[0]
    before = prompts[0]["input_ids"][0].tolist().index(IMAGE)
    # the text before the picture at least; the gestalt too if it stays; all but the question if all tokens stay
    common = {"full": prompts[0]["input_ids"].shape[1] - 4, "gestalt stays": before + 20}.get(way, before)
    assert all(0 < now <= all_of_it - common for all_of_it, now in zip(whole[1:], read[1:], strict=True))
    assert seen.prefix.tokens_read == sum(read)
    assert seen.nbytes > seen.prefix.nbytes > 0


@torch.no_grad()
def test_a_gestalt_that_stays_is_found_without_looking_at_values(monkeypatch, read_columns):
    model, seen = tiny_model("qwen3_vl"), Encodings()
    layer, seen.prefix = ARRCOCLayer(ARRCOCConfig.for_model(model)).eval(), Prefix()
    settings = {**WAYS["gestalt stays"][2], "on_error": "raise"}
    monkeypatch.setattr(prefix_module, "_count_common", None)  # which would wait for the device
    columns, prompts = read_columns(model), list(questions("qwen3_vl", LARGE))
    prompts.append({**prompts[0], "input_ids": prompts[0]["input_ids"].clone()})
    prompts[-1]["input_ids"][0, 0] += 1  # the control: another text before the picture, so that nothing is reused
    with attach(model, layer, encoded=seen, **settings):
        for data in prompts:
            model.generate(**data, **GREEDY)
    first, second, third = (count for count in columns if count > 1)
    assert first == third > 100
    assert second < first - 20


@torch.no_grad()
def test_only_what_is_the_same_is_reused(monkeypatch, read_columns):
    """Another picture of the same size has the same ids and positions; its features tell it apart."""
    model, prefix = tiny_model("qwen3_vl"), Prefix()
    columns = read_columns(model)
    pictures = [inputs_for("qwen3_vl", IMAGE_PROMPT, seed=seed) for seed in (0, 0, 1)]
    pictures[2]["input_ids"] = pictures[0]["input_ids"]

    def ask(data, prefix):
        seen = Encodings()
        seen.prefix = prefix
        with attach(model, create_selector("full"), on_error="raise", encoded=seen):
            return model.generate(**data, **GREEDY)

    expected = [ask(data, None) for data in pictures]
    columns.clear()
    for data, wanted in zip(pictures, expected, strict=True):
        assert torch.equal(ask(data, prefix), wanted)
    whole, picture = data["input_ids"].shape[1], data["input_ids"][0].tolist().index(IMAGE)
    assert [count for count in columns if count > 1] == [whole, whole - picture]  # the second read its last token only
    monkeypatch.setattr(prefix_module, "_count_common", lambda *_: whole - 2)
    assert not torch.equal(ask(pictures[0], prefix), expected[0])  # the control: keys and values of the other picture


@pytest.mark.parametrize(
    "options",
    [{"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}, {"return_dict_in_generate": True},
     {"use_cache": False}, {"prompt_lookup_num_tokens": 2}, {"cache_implementation": "static"}],
)  # fmt: skip
@torch.no_grad()
def test_other_ways_to_decode_read_the_whole_prompt(options):
    model, seen = tiny_model("qwen2_5_vl"), Encodings()
    seen.prefix = Prefix()
    data, other = questions("qwen2_5_vl", IMAGE_PROMPT)
    given = {**GREEDY, **options}
    with attach(model, ByScore(), budget=3):
        torch.manual_seed(0)
        expected = model.generate(**other, **given)
    with attach(model, ByScore(), budget=3, encoded=seen) as run:
        model.generate(**data, **GREEDY)
        read = seen.prefix.tokens_read
        torch.manual_seed(0)
        found = model.generate(**other, **given)
        assert torch.equal(*(getattr(out, "sequences", out) for out in (found, expected)))
        assert seen.prefix.tokens_read == 2 * read
        model.generate(**other, **GREEDY)  # goes on from the first again
    assert 2 * read < seen.prefix.tokens_read < 3 * read
    assert run.kept


@torch.no_grad()
def test_batches_and_linear_attention_read_the_whole_prompt():
    for family, specs in (("qwen2_vl", (IMAGE_PROMPT, IMAGE_PROMPT)), ("qwen3_5", (IMAGE_PROMPT,))):
        model, seen = tiny_model(family), Encodings()
        seen.prefix = Prefix()
        data = inputs_for(family, *specs)
        with attach(model, ByScore(), budget=3):
            expected = model.generate(**data, **GREEDY)
        with attach(model, ByScore(), budget=3, encoded=seen):
            assert torch.equal(model.generate(**data, **GREEDY), expected)
            read = seen.prefix.tokens_read
            assert torch.equal(model.generate(**data, **GREEDY), expected)
        assert seen.prefix.tokens_read == 2 * read


@pytest.mark.parametrize("way", ["full", "gestalt stays"])
@torch.no_grad()
def test_another_adapter_reads_the_whole_prompt(way):
    peft = pytest.importorskip("peft", reason="comes with the dev extra")
    spec, name, settings = WAYS[way]
    model, seen = tiny_model("qwen3_vl"), Encodings()
    selector, seen.prefix = create_selector(name or "grid"), Prefix()
    config = peft.LoraConfig(r=4, target_modules=r".*language_model.*v_proj", init_lora_weights=False, lora_alpha=64)
    model = peft.get_peft_model(model, config, "one")
    model.add_adapter("two", config)
    model.eval()
    data, answers, read = inputs_for("qwen3_vl", spec), [], []
    for adapter in ("one", "two", "two"):
        model.set_adapter(adapter)
        with attach(model, selector, on_error="raise", **settings):
            expected = model.generate(**data, **GREEDY)
        with attach(model, selector, on_error="raise", encoded=seen, **settings):
            answers.append(model.generate(**data, **GREEDY))
        assert torch.equal(answers[-1], expected)
        read.append(seen.prefix.tokens_read - sum(read))
    assert read[0] == read[1] > 1.5 * read[2]
    assert not torch.equal(answers[0], answers[1])  # the control: adapters matter


@torch.no_grad()
def test_with_hooks_or_exchanged_weights_the_whole_prompt_is_read():
    model, seen = tiny_model("qwen3_vl"), Encodings()
    seen.prefix = Prefix()
    data, read = inputs_for("qwen3_vl", IMAGE_PROMPT), []
    projection = model.model.language_model.layers[0].self_attn.v_proj

    def ask():
        with attach(model, create_selector("full"), on_error="raise", encoded=seen):
            model.generate(**data, **GREEDY)
        read.append(seen.prefix.tokens_read - sum(read))

    ask()
    ask()
    model(**data, output_hidden_states=True)  # leaves hooks of transformers behind, which only listen
    ask()
    ask()
    projection.weight = torch.nn.Parameter(-projection.weight)
    ask()
    ask()
    projection.register_forward_hook(lambda module, args, output: -output)
    ask()
    ask()
    whole = read[0]
    assert read == [whole, 1, 1, 1, whole, 1, whole, whole]


class Cells(TokenSelector):
    """Keeps 20 cells in a row."""

    def __init__(self, first):
        self.first = first

    def select(self, queries, budget=None):
        return [Selection(indices=torch.arange(self.first, self.first + 20)) for _ in queries]


@torch.no_grad()
def test_a_small_share_is_read_again():
    for before, reused in ((3, 0), (30, 31)):  # words; with the marker of the picture
        model, seen = tiny_model("qwen2_vl"), Encodings()
        seen.prefix = Prefix()
        data = inputs_for("qwen2_vl", [("text", before), ("image", (1, 16, 16)), ("text", 20)])
        for first in (0, 20):
            with attach(model, Cells(first), encoded=seen):
                model.generate(**data, **GREEDY)
        assert seen.prefix.tokens_read == 2 * (before + 2 + 20 + 20) - reused


@torch.no_grad()
def test_after_a_call_that_failed_the_whole_prompt_is_read():
    model, seen = tiny_model("qwen2_vl"), Encodings()
    seen.prefix = Prefix()
    data, _ = questions("qwen2_vl", IMAGE_PROMPT)

    def fail(ids, scores):
        raise RuntimeError("no")

    with attach(model, ByScore(), budget=3, encoded=seen):
        expected = model.generate(**data, **GREEDY)
        read = seen.prefix.tokens_read
        with pytest.raises(RuntimeError, match="no"):
            model.generate(**data, **GREEDY, logits_processor=[fail])
        assert seen.prefix.tokens_read == read + 1
        assert torch.equal(model.generate(**data, **GREEDY), expected)
    assert seen.prefix.tokens_read == 2 * read + 1


@pytest.mark.slow
def test_a_conversation_reads_what_its_prompts_have_in_common_once(vlm):
    signs = [f"what does the sign next to the {thing} say?" for thing in ("black ring", "red star")]
    for picture, asked, remember, options in (
        ("needle.png", signs, False, {"mode": "saccade", "gaze": Gaze(overlap="keep")}),
        ("page.png", PAGE, True, {"mode": "full"}),
    ):
        together, read = vlm.look(EXAMPLES / picture, remember=remember), []
        for question in asked:
            alone = vlm.look(EXAMPLES / picture)  # the control: nothing to reuse
            alone.turns = list(together.turns) if remember else []
            answers = [talk.ask(question, max_new_tokens=12, **options).text for talk in (together, alone)]
            assert answers[0] == answers[1]
            read.append(alone.tokens_read)
        # gestalt or picture: most of the prompt
        assert read[0] < together.tokens_read < read[0] + 0.7 * sum(read[1:])
