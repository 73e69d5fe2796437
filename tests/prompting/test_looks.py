"""Look, read, and look again: how much is read, when it stops, and that the last look is an ordinary one."""

import math
from dataclasses import replace

import pytest
import torch
from simple_selector import GREEDY, ByScore
from tiny_directory import photo, write_checkpoint
from tiny_models import CLIP, FAMILIES, IMAGE_PROMPT, QWEN, SMALL, TEXT, TWO_IMAGES, inputs_for, tiny_model

from arr_coc import ARRCOCConfig, ARRCOCLayer, ARRCOCQwen, Look, Looks, attach, create_selector, prepare
from arr_coc.families.family import open_family
from arr_coc.gaze.loop import LARGE, WHOLE, choose_mode, list_shares
from arr_coc.gaze.plan import Gaze, plan_gaze
from arr_coc.inference.session import Session
from arr_coc.prompting.encodings import Encodings
from arr_coc.prompting.settings import Settings

LARGE_PICTURE = [("text", 4), ("image", (1, 24, 40)), ("text", 6)]  # 12 x 20 cells
NEVER, AT_ONCE = Looks(rounds=3, sure=1.0), Looks(rounds=3, sure=1e-30)
ALL = {"looks": NEVER, "budget": 1.0}  # the last look reads everything
SHORT = {**GREEDY, "max_new_tokens": 4, "min_new_tokens": 4}


@pytest.fixture(scope="module", params=FAMILIES, name="opened")
def open_any(request):
    return request.param, tiny_model(request.param)


@pytest.fixture(scope="module", name="model")
def open_one():
    return tiny_model("qwen3_vl")


def run(model, data, selector=None, options=SHORT, **settings):
    session = Session(open_family(model), selector or ByScore(), Settings(on_error="raise", **settings))
    with torch.no_grad():
        return session.generate({**data, **options})


def count_passes(model, monkeypatch):
    """The number of tokens of each pass of the language model."""
    language, counts = open_family(model).inner.language_model, []
    forward = type(language).forward

    def count(self, *args, **kwargs):
        embeds = kwargs["inputs_embeds"] if kwargs.get("inputs_embeds") is not None else kwargs["input_ids"]
        counts.append(embeds.shape[1])
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(language), "forward", count)
    return counts


# how much, and when it stops


def test_each_look_reads_four_times_as_much():
    assert list_shares(1) == [1.0]
    assert list_shares(4) == [1 / 64, 1 / 16, 1 / 4, 1.0]


def test_an_answer_that_is_sure_is_read_in_one_look(opened):
    family, model = opened
    data = inputs_for(family, *[IMAGE_PROMPT], seed=3)
    looked = run(model, data, looks=AT_ONCE, budget=1.0)
    few = round(looked.full / 16)
    assert [len(looks) for looks in looked.looks] == [1]
    assert looked.looks[0][0].tokens == looked.used == max(1, few)
    alone = run(model, data, budget=max(1, few))
    assert torch.equal(looked.result, alone.result)
    assert looked.kept[0][1].tolist() == alone.kept[0][1].tolist()


def test_an_answer_that_is_never_sure_ends_in_the_plain_model(opened):
    family, model = opened
    data = inputs_for(family, *[IMAGE_PROMPT], seed=3)
    looked = run(model, data, **ALL)
    with torch.no_grad():
        plain = model.generate(**data, **SHORT)
    assert torch.equal(looked.result, plain)
    tokens = [look.tokens for look in looked.looks[0]]
    assert tokens == [max(1, round(share * looked.full)) for share in list_shares(3)]
    assert looked.used == looked.full


@pytest.mark.parametrize("budget", [6, 0.5, {"total": 6}])
def test_the_last_look_reads_the_budget(model, budget):
    data = inputs_for("qwen3_vl", IMAGE_PROMPT, seed=3)
    looked, alone = run(model, data, looks=NEVER, budget=budget), run(model, data, budget=budget)
    assert torch.equal(looked.result, alone.result)
    assert [look.seen for look in looked.looks[0]][-1] == alone.used


def test_sureness_is_the_probability_of_the_answer(model):
    data = inputs_for("qwen3_vl", IMAGE_PROMPT, seed=3)
    looked = run(model, data, looks=Looks(rounds=1), budget=1.0)
    options = {**SHORT, "return_dict_in_generate": True, "output_scores": True}
    with torch.no_grad():
        scores = model.generate(**data, **options).scores
    expected = math.exp(sum(float(step.float().log_softmax(-1).amax()) for step in scores))
    assert looked.looks[0][0].sure == pytest.approx(expected, abs=1e-4)


def test_what_comes_after_the_end_does_not_count(model):
    data = inputs_for("qwen3_vl", IMAGE_PROMPT, SMALL, seed=3)
    with torch.no_grad():
        first = model.generate(**data, **SHORT)[:, data["input_ids"].shape[1]]
    # the first row ends at once, the other goes on
    options = {**GREEDY, "min_new_tokens": 0, "eos_token_id": int(first[0]), "pad_token_id": 0}
    together = run(model, data, looks=Looks(rounds=1), budget=1.0, options=options)
    alone = run(model, inputs_for("qwen3_vl", IMAGE_PROMPT, seed=3), looks=Looks(rounds=1), budget=1.0, options=options)
    if int(first[0]) != int(first[1]):
        assert together.generated.shape[1] > 1
    assert together.looks[0][0].sure == pytest.approx(alone.looks[0][0].sure, abs=2e-4)


def test_an_unsure_answer_is_broken_off(model, monkeypatch):
    data = inputs_for("qwen3_vl", IMAGE_PROMPT, seed=3)
    counts = count_passes(model, monkeypatch)
    looked = run(model, data, **ALL)
    looks = looked.looks[0]
    # one pass over the prompt for each look; only the last answers in four tokens
    assert len(counts) == len(looks) + 3
    assert counts[:3] == [look.tokens + len(data["input_ids"][0]) - looked.full for look in looks]


def test_a_look_that_saw_everything_is_not_broken_off(model, monkeypatch):
    data = inputs_for("qwen3_vl", IMAGE_PROMPT, seed=3)
    counts = count_passes(model, monkeypatch)
    looked = run(model, data, selector=create_selector("full"), **ALL)
    assert [look.then for look in looked.looks[0]] == ["whole"]
    assert len(counts) == 4  # one prompt, four tokens
    with torch.no_grad():
        assert torch.equal(looked.result, model.generate(**data, **SHORT))


# what looks share


@pytest.mark.parametrize("family", QWEN)
def test_the_picture_is_encoded_once(family):
    model = tiny_model(family)
    calls = []
    model.model.visual.register_forward_hook(lambda *args: calls.append(1))
    looked = run(model, inputs_for(family, IMAGE_PROMPT, seed=3), **ALL)
    assert len(looked.looks[0]) == 3
    assert len(calls) == 1


@pytest.mark.parametrize("family", QWEN)
def test_saccades_go_on_from_the_gestalt(family, monkeypatch):
    model = tiny_model(family)
    layer = ARRCOCLayer(ARRCOCConfig.for_model(model)).eval()
    data = inputs_for(family, LARGE_PICTURE, seed=3)
    settings = {"mode": "saccade", "budget": 80, "gaze": Gaze(gestalt=15)}
    plan = plan_gaze((1, 12, 20), 80, Gaze(gestalt=15))
    assert not plan.drop
    counts = count_passes(model, monkeypatch)
    looked = run(model, data, layer, looks=NEVER, **settings)
    first, second, last = looked.looks[0]
    gestalt = plan.gestalt[1] * plan.gestalt[2]
    assert first.tokens == first.seen == gestalt + round(plan.saccades / 16)
    assert (second.tokens, second.seen) == (round(plan.saccades / 4), gestalt + round(plan.saccades / 4))
    assert (last.tokens, last.seen) == (plan.saccades, 80)
    after = len(data["input_ids"][0]) - 240 - 5  # text behind the picture
    assert counts[1:3] == [second.tokens + after, last.tokens + after]
    alone = run(model, data, layer, **settings)  # all cells of the last look see each other
    assert torch.equal(looked.result, alone.result)
    assert looked.kept[0][1].tolist() == alone.kept[0][1].tolist()


def test_a_plan_of_a_part_has_the_same_gestalt():
    plan = plan_gaze((1, 64, 64), 1024, Gaze())
    part = plan.part(0.25)
    assert part.overview == plan.overview
    assert (part.saccades, part.tokens) == (192, 448)
    assert plan.part(1.0) is plan
    assert plan.overview != plan_gaze((1, 64, 64), 64, Gaze()).overview


@pytest.mark.parametrize("mode", ["prune", "saccade"])
def test_the_model_is_asked_once_where_it_looks(model, mode):
    layer = ARRCOCLayer(ARRCOCConfig.for_model(model)).eval()
    data = inputs_for("qwen3_vl", LARGE_PICTURE, seed=3)
    options = {"mode": mode, "introspect": "on", "budget": 80}
    if mode == "saccade":
        options["gaze"] = Gaze(gestalt=15)
    looked = run(model, data, layer, looks=NEVER, **options)
    shared = Encodings()
    alone = [
        run(model, data, layer, encoded=shared, share=share, further=share > 1 / 16, **options)
        for share in list_shares(3)
    ][-1]
    glanced = 15 if mode == "prune" else 0  # a gestalt that was read to choose is not read again
    first, second, _ = looked.looks[0]
    assert first.tokens == first.seen + glanced
    assert second.tokens == second.seen - (15 if mode == "saccade" else 0)
    assert torch.equal(looked.result, alone.result)


def test_another_question_is_asked_anew(model):
    layer = ARRCOCLayer(ARRCOCConfig.for_model(model)).eval()
    data = inputs_for("qwen3_vl", LARGE_PICTURE, seed=3)
    other = {**data, "input_ids": data["input_ids"].clone()}
    other["input_ids"][0, -3] += 1
    shared = Encodings()
    settings = {"introspect": "on", "budget": 10}
    first, second, again = (run(model, each, layer, encoded=shared, **settings) for each in (data, other, other))
    assert sum(first.glanced_counts) == sum(second.glanced_counts) == 15
    assert sum(again.glanced_counts) == 0
    assert torch.equal(second.result, again.result)
    assert torch.equal(second.result, run(model, other, layer, **settings).result)


# batches, streams, options


def look_twice(model, options, *prompts):
    """Two rows of which one is sure after the first of three looks, and which one."""
    data = inputs_for("qwen3_vl", *prompts, seed=3)
    # not known of answers that were broken off: each share by itself
    sure = [looks[0].sure for looks in run(model, data, looks=Looks(rounds=1), budget=1 / 16).looks]
    between = math.sqrt(sure[0] * sure[1])
    early = max(range(2), key=sure.__getitem__)
    return data, run(model, data, looks=Looks(rounds=3, sure=between), budget=1.0, options=options), early


@pytest.mark.parametrize("prompts", [(IMAGE_PROMPT, SMALL), (SMALL, IMAGE_PROMPT), (TWO_IMAGES, IMAGE_PROMPT)])
def test_rows_keep_the_answer_they_were_sure_of(model, prompts):
    data, looked, early = look_twice(model, SHORT, *prompts)
    small = run(model, data, budget=1 / 16)
    assert torch.equal(looked.generated[early], small.generated[early])
    alone, first, later = small.split(2)[early], looked.split(2)[early], looked.split(2)[1 - early]
    assert [cells.tolist() for _, cells in first.kept] == [cells.tolist() for _, cells in alone.kept]
    assert first.used == alone.used < first.full
    assert later.used > small.split(2)[1 - early].used
    assert first.looks == [looked.looks[early]]


def test_rows_stop_at_different_times(model, monkeypatch):
    rows = []
    forward = type(open_family(model).inner.language_model).forward

    def count(self, *args, **kwargs):
        rows.append(len(kwargs["inputs_embeds"]))
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(open_family(model).inner.language_model), "forward", count)
    _, looked, early = look_twice(model, SHORT, IMAGE_PROMPT, SMALL)
    # the row that is sure takes part in the first look alone, the other in all
    assert [len(looks) for looks in looked.looks][early] == 1 < len(looked.looks[1 - early])
    assert [look.then for look in looked.looks[early]] == ["sure"]
    assert looked.looks[1 - early][0].then == "again"
    assert rows[-1] == 1  # control: both rows are read at first
    assert 2 in rows


class StopsRow:
    """Ends the first row of a batch after so many new tokens."""

    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **options):
        ended = torch.zeros(len(input_ids), dtype=torch.bool)
        ended[0] = input_ids.shape[1] >= self.length
        return ended


@pytest.mark.parametrize("stopped", [False, True])
def test_rows_of_a_batch_are_as_sure_as_alone(model, stopped):
    data = inputs_for("qwen3_vl", IMAGE_PROMPT, IMAGE_PROMPT, seed=3)
    assert data["attention_mask"].all()  # so that both are read as alone
    options = {**SHORT, "eos_token_id": 127, "pad_token_id": 0}
    if stopped:  # by a criterion of the caller, after which the row is filled with padding
        options = {**options, "stopping_criteria": [StopsRow(data["input_ids"].shape[1] + 2)]}
    together = run(model, data, options=options, looks=Looks(rounds=2, sure=0.9), budget=0.5)
    row = {name: value[:1] for name, value in data.items()}
    row["pixel_values"] = data["pixel_values"][: len(data["pixel_values"]) // 2]
    alone = run(model, row, options=options, looks=Looks(rounds=2, sure=0.9), budget=0.5)
    assert len(together.looks[0]) == len(alone.looks[0])
    for one, other in zip(together.looks[0], alone.looks[0], strict=True):
        assert one.sure == pytest.approx(other.sure, rel=2e-2, abs=1e-4)
        assert (one.tokens, one.then) == (other.tokens, other.then)


def test_rows_whose_functions_may_tell_them_apart_are_read_together(model):
    seen = []

    def watch(input_ids, scores):
        seen.append(len(input_ids))
        return scores

    _, looked, early = look_twice(model, {**SHORT, "logits_processor": [watch]}, IMAGE_PROMPT, SMALL)
    assert set(seen) == {2}
    assert len(looked.looks[early]) == 1 < len(looked.looks[1 - early])


def test_a_look_says_what_it_saw_and_what_followed(model):
    data = inputs_for("qwen3_vl", IMAGE_PROMPT, seed=3)
    looked = run(model, data, **ALL)
    looks = looked.looks[0]
    assert [look.then for look in looks] == ["again", "again", "whole"]
    assert [len(look.kept[0][1]) for look in looks] == [look.seen for look in looks]
    assert set(looks[0].kept[0][1]) < set(looks[1].kept[0][1]) < set(looks[2].kept[0][1])
    assert run(model, data, looks=NEVER, budget=0.5).looks[0][-1].then == "last"
    assert run(model, data, looks=AT_ONCE, budget=0.5).looks[0][-1].then == "sure"


def test_several_pictures_and_rows_without_one(model):
    data = inputs_for("qwen3_vl", TWO_IMAGES, TEXT, seed=3)
    looked = run(model, data, **ALL)
    with torch.no_grad():
        assert torch.equal(looked.result, model.generate(**data, **SHORT))
    assert looked.looks[0]
    assert looked.looks[1] == []


@pytest.mark.parametrize("options", [{"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}])
def test_where_sureness_is_not_known_there_is_one_look(model, options):
    data = inputs_for("qwen3_vl", IMAGE_PROMPT, seed=3)
    given = {**SHORT, **options}
    torch.manual_seed(0)
    looked = run(model, data, options=given, **ALL)
    torch.manual_seed(0)
    alone = run(model, data, budget=1.0, options=given)
    assert torch.equal(looked.result, alone.result)
    assert looked.looks == []


class Streamer:
    def __init__(self):
        self.tokens, self.ended = [], 0

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended += 1


@pytest.mark.parametrize("looks", [AT_ONCE, NEVER])
def test_a_streamer_sees_the_answer_that_stays(model, looks):
    data = inputs_for("qwen3_vl", IMAGE_PROMPT, seed=3)
    streamer = Streamer()
    looked = run(model, data, looks=looks, budget=1.0, options={**SHORT, "streamer": streamer})
    assert streamer.tokens == looked.result.flatten().tolist()
    assert streamer.ended == 1


def test_functions_of_the_caller_are_called_in_every_look(model):
    data, seen = inputs_for("qwen3_vl", IMAGE_PROMPT, seed=3), []

    def watch(input_ids, scores):
        seen.append(input_ids.shape[1])
        return scores

    run(model, data, options={**SHORT, "logits_processor": [watch]}, **ALL)
    length = data["input_ids"].shape[1]
    assert seen == [length, length, length, length + 1, length + 2, length + 3]


@pytest.mark.parametrize("mode", ["prune", "saccade"])
def test_what_another_question_asked_does_not_change_an_answer(model, mode):
    layer = ARRCOCLayer(ARRCOCConfig.for_model(model)).eval()
    data = inputs_for("qwen3_vl", LARGE_PICTURE, seed=3)
    shared, options = Encodings(), {"mode": mode, "introspect": "auto"}
    if mode == "saccade":
        options["gaze"] = Gaze(gestalt=15)
    few, many = 20, 150  # the model is asked for few tokens only
    first = run(model, data, layer, encoded=shared, budget=few, **options)
    assert first.outputs[0].voice is not None
    later = run(model, data, layer, encoded=shared, budget=many, **options)
    fresh = run(model, data, layer, budget=many, **options)
    assert later.outputs[0].voice is None
    assert later.kept[0][1].tolist() == fresh.kept[0][1].tolist()


def test_layers_that_are_not_asked_process_fewer_tokens(model):
    layer = ARRCOCLayer(ARRCOCConfig.for_model(model)).eval()
    data = inputs_for("qwen3_vl", LARGE_PICTURE, seed=3)
    looked = run(model, data, layer, looks=NEVER, introspect=1, budget=80).split(1)[0]
    total = sum(look.tokens for look in looked.looks[0])
    assert looked.processed(3) == [total, total - 15, total - 15]


@pytest.mark.parametrize("name", ["looks", "gaze"])
def test_settings_of_the_wrong_type_are_refused(model, name):
    with pytest.raises(TypeError, match=f"`{name}` must be a .*, got 3; use "):
        attach(model, create_selector("grid"), **{name: 3})


# mode auto


@pytest.mark.parametrize(
    ("cells", "still", "can_gaze", "mode"),
    [
        (WHOLE, True, True, "full"),
        (WHOLE + 1, True, True, "prune"),
        (LARGE, True, True, "prune"),
        (LARGE + 1, True, True, "saccade"),
        (LARGE + 1, False, True, "prune"),
        (LARGE + 1, True, False, "prune"),
    ],
)
def test_the_mode_fits_the_picture(cells, still, can_gaze, mode):
    assert choose_mode(cells, still, can_gaze)[0] == mode


@pytest.mark.parametrize(("prompt", "mode"), [(IMAGE_PROMPT, "prune"), (LARGE_PICTURE, "saccade"), (CLIP, "prune")])
def test_an_attached_model_chooses_by_the_grid(model, monkeypatch, prompt, mode):
    monkeypatch.setattr("arr_coc.gaze.loop.LARGE", 100)
    monkeypatch.setattr("arr_coc.gaze.loop.WHOLE", 4)
    monkeypatch.setattr("arr_coc.inference.looking.LAST_OF_LARGE", 80)
    layer = ARRCOCLayer(ARRCOCConfig.for_model(model)).eval()
    data = inputs_for("qwen3_vl", prompt, seed=3)
    looked = run(model, data, layer, mode="auto")
    assert looked.mode == mode
    assert looked.looks[0]
    with torch.no_grad():
        with attach(model, layer, mode="auto", on_error="raise"):
            found = model.generate(**data, **SHORT)
            model(**data)
        assert torch.equal(found, looked.result)
        assert prepare(model, data, layer, mode="auto").kept


def test_a_small_picture_is_read_whole(model):
    data = inputs_for("qwen3_vl", IMAGE_PROMPT, seed=3)
    looked = run(model, data, mode="auto")
    assert looked.used == looked.full <= WHOLE
    assert looked.looks == []


@pytest.fixture(scope="module", name="vlm")
def open_vlm(tmp_path_factory):
    directory = tmp_path_factory.mktemp("base")
    write_checkpoint(directory)
    return ARRCOCQwen.from_pretrained(directory, "grid")


def test_an_answer_says_how_it_came_about(vlm):
    answer = vlm.answer(photo(160, 120), "what is it?", mode="auto", looks=NEVER, **SHORT)
    assert [look.seen for look in answer.looks] == sorted(look.seen for look in answer.looks)
    assert answer.tokens.used == sum(look.tokens for look in answer.looks)
    assert answer.reason.startswith(f"{answer.sure:.2f} sure after 3 looks (")
    assert isinstance(answer.looks[0], Look)
    assert vlm.answer(photo(160, 120), "what is it?", mode="prune", **SHORT).looks == ()


def test_a_call_that_names_neither_mode_nor_budget_is_auto(vlm):
    picture, question = photo(480, 360), "what is it?"
    plain = vlm.answer(picture, question, **SHORT)
    assert plain.looks
    assert plain.text == vlm.answer(picture, question, mode="auto", **SHORT).text
    for options in ({"budget": 0.25}, {"budget": "auto"}, {"mode": "prune"}):  # as ever
        assert vlm.answer(picture, question, **options, **SHORT).looks == ()
    named = ARRCOCQwen(vlm.model, vlm.processor, vlm.selector, mode="saccade")
    assert named.answer(picture, question, **SHORT).mode == "saccade"
    inspected = vlm.inspect(picture, question)
    assert inspected.tokens.used == plain.looks[0].seen
    own = ARRCOCLayer(ARRCOCConfig.for_model(vlm.model, budget=16)).eval()
    sparing = ARRCOCQwen(vlm.model, vlm.processor, own)
    assert sparing.answer(picture, question, **SHORT).tokens.used == 16
    assert sparing.answer(photo(160, 120), question, mode="auto", looks=NEVER, **SHORT).looks[-1].seen == 16
    sparing.selector = vlm.selector
    assert sparing.answer(picture, question, **SHORT).looks
    smaller = ARRCOCQwen(vlm.model, vlm.processor, create_selector("downsample"))
    with pytest.raises(ValueError, match="`looks` need a selector that picks tokens of a picture, got 'downsample'"):
        smaller.answer(picture, question, looks=Looks(), **SHORT)
    few = ARRCOCQwen(vlm.model, vlm.processor, vlm.selector, budget=7).answer(picture, question, **SHORT)
    assert (few.tokens.used, few.looks) == (7, ())


def test_an_answer_is_finished_if_the_selection_fails(vlm, caplog):
    class Failing(ByScore):
        def select(self, queries, budget=None):
            raise RuntimeError("no idea")

    picture, question = photo(480, 360), "what is it?"
    answer = ARRCOCQwen(vlm.model, vlm.processor, Failing()).answer(picture, question, looks=NEVER, **SHORT)
    assert answer.text == vlm.answer(picture, question, mode="full", **SHORT).text
    assert [look.then for look in answer.looks] == ["whole"]
    assert len(caplog.records) == 1


def test_answers_of_a_batch_are_those_of_one_by_one(vlm):
    asked = [(photo(160, 120), "what is it?"), (photo(120, 160), "which colour?"), (None, "and now?")]
    options = {"mode": "auto", "looks": NEVER, **SHORT}
    together = [answer.text for answer in vlm.answer_many(asked, batch_size=3, **options)]
    alone = [vlm.answer(*each, **options).text for each in asked[:2]]
    assert together[:2] == alone


def test_a_conversation_looks_again(vlm):
    conversation = vlm.look(photo(160, 120), remember=False)
    found = conversation.ask("what is it?", mode="auto", looks=NEVER, budget=1.0, **SHORT)
    assert found.text == vlm.answer(photo(160, 120), "what is it?", mode="full", **SHORT).text
    assert len(found.looks) == 3
    assert conversation.encoder_calls == 1


def test_an_object_looks_again_if_it_was_made_so(vlm):
    again = ARRCOCQwen(vlm.model, vlm.processor, vlm.selector, looks=NEVER)
    assert len(again.answer(photo(160, 120), "what is it?", **SHORT).looks) == 3


# errors


@pytest.mark.parametrize("wrong", [{"rounds": 0}, {"rounds": 2.0}, {"rounds": True}, {"sure": 0}, {"sure": 1.5}])
def test_looks_are_checked(wrong):
    with pytest.raises(ValueError, match=f"`{next(iter(wrong))}` must be .*, got"):
        Looks(**wrong)


def test_a_mode_that_reads_everything_takes_no_looks():
    with pytest.raises(ValueError, match="mode 'weight' reads all tokens in one look"):
        Settings(mode="weight", looks=Looks())


@pytest.mark.parametrize("name", ["downsample", "fastv", "pixelprune", "crop"])
def test_selectors_of_other_kinds_take_one_look(model, name):
    data, selector = inputs_for("qwen3_vl", IMAGE_PROMPT, seed=3), create_selector(name)
    with pytest.raises(ValueError, match=f"`looks` need a selector that picks tokens of a picture, got '{name}'"):
        run(model, data, selector, looks=Looks())
    looked = run(model, inputs_for("qwen3_vl", LARGE_PICTURE, seed=3), selector, mode="auto", budget=0.5)
    assert looked.looks == []
    assert looked.mode == "prune"


def test_a_selection_that_fails_is_read_whole_and_finished(model):
    class Failing(ByScore):
        def select(self, queries, budget=None):
            raise RuntimeError("no")

    data = inputs_for("qwen3_vl", IMAGE_PROMPT, seed=3)
    session = Session(open_family(model), Failing(), Settings(**ALL))
    with torch.no_grad():
        looked = session.generate({**data, **SHORT})
        assert torch.equal(looked.result, model.generate(**data, **SHORT))
    assert looked.failure == "no"


def test_settings_of_a_session_stay_as_they_are(model):
    session = Session(open_family(model), ByScore(), Settings(mode="auto", looks=NEVER, on_error="raise"))
    before = replace(session.settings)
    with torch.no_grad():
        session.generate({**inputs_for("qwen3_vl", IMAGE_PROMPT, seed=3), **SHORT})
    assert session.settings == before
