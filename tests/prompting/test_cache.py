"""Caches across turns: the reference is one pass over the whole conversation with the same tokens dropped."""

import copy
import itertools
import pickle

import pytest
import torch
from simple_selector import GREEDY, ByScore
from tiny_models import (
    CHAT_END,
    CLIP,
    FAMILIES,
    FIRST_WORD,
    HIDDEN,
    IMAGE,
    IMAGE_PROMPT,
    QWEN,
    SMALL,
    TWO_IMAGES,
    inputs_for,
    tiny_model,
)
from transformers import DynamicCache, StaticCache

from arr_coc import ARRCOCConfig, ARRCOCLayer, attach, create_selector
from arr_coc.families import open_family
from arr_coc.families.family import Encoded, read_levels
from arr_coc.inference.session import Session
from arr_coc.prompting.cache import (
    Holding,
    Role,
    append,
    calling,
    drop,
    holding_of,
    mark_cache,
    piece_of,
    text_piece,
    visual_piece,
)
from arr_coc.prompting.settings import Settings

TURN = torch.arange(FIRST_WORD, FIRST_WORD + 7)[None]


@pytest.fixture(scope="module", params=FAMILIES, name="opened")
def open_model(request):
    return request.param, tiny_model(request.param)


def conversation(data, answer):
    """The ids of a further turn, as a processor gives them: everything so far, then the new question."""
    ids = torch.cat([data["input_ids"], answer, TURN], dim=1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def reference(model, data, selector, answer, **settings):
    """Logits after the conversation in one pass without a cache, with the tokens of the first turn dropped."""
    from arr_coc import prepare

    prepared = prepare(model, data, selector, **settings)
    text = torch.cat([answer, TURN], dim=1)
    length = prepared["input_ids"].shape[1]
    mask = torch.cat([prepared["attention_mask"], torch.ones_like(text)], dim=1)
    positions = prepared["position_ids"]
    full = (
        model.model.get_rope_index(**{**data, "mm_token_type_ids": data["mm_token_type_ids"]})[0]
        if "mm_token_type_ids" in data
        else None
    )
    first = data["input_ids"].shape[1] if full is None else int(full.max()) + 1
    after = first + torch.arange(text.shape[1])
    if positions.ndim == 2:
        positions = torch.cat([positions, after[None]], dim=1)
    else:
        count = length + torch.arange(text.shape[1])
        rows = torch.stack([count, after, after, after])[:, None]
        positions = torch.cat([positions, rows], dim=2)
    arguments = {**prepared, "input_ids": torch.cat([prepared["input_ids"], text], dim=1)}
    arguments |= {"attention_mask": mask, "position_ids": positions}
    return model(**arguments, use_cache=False).logits[:, -1]


@pytest.mark.parametrize("how", ["own", "copied", "returned", "with pictures again"])
@pytest.mark.parametrize("spec", [IMAGE_PROMPT, TWO_IMAGES])
@torch.no_grad()
def test_a_further_turn_goes_on_from_the_cache_at_its_true_positions(opened, spec, how):
    family, model = opened
    data = inputs_for(family, spec)
    short = {}
    hook = lambda module, args, kwargs: short.update(length=kwargs["inputs_embeds"].shape[1])  # noqa: E731
    with attach(model, ByScore(), budget=3, on_error="raise"):
        cache = DynamicCache()
        if how == "returned":
            result = model.generate(**data, **GREEDY, return_dict_in_generate=True)
            cache, out = result.past_key_values, result.sequences
        else:
            out = model.generate(**data, **GREEDY, past_key_values=cache)
        if how == "copied":
            cache = copy.deepcopy(cache)
        answer = out[:, data["input_ids"].shape[1] :]
        turn = conversation(data, answer)
        if how == "with pictures again":
            turn = {**data, **turn}
            turn.pop("mm_token_type_ids", None)
        handle = model.model.language_model.register_forward_pre_hook(hook, with_kwargs=True)
        try:
            result = model.generate(
                **turn, past_key_values=cache, max_new_tokens=1, do_sample=False, return_dict_in_generate=True,
                output_logits=True,
            )  # fmt: skip
        finally:
            handle.remove()
    assert short["length"] <= TURN.shape[1] + 1  # only what is new is read
    assert torch.equal(result.sequences[:, : turn["input_ids"].shape[1]], turn["input_ids"])
    expected = reference(model, data, ByScore(), answer, budget=3)
    torch.testing.assert_close(result.logits[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", QWEN)
@torch.no_grad()
def test_saccades_clips_and_further_turns_go_on_too(family):
    model = tiny_model(family)
    layer = ARRCOCLayer(ARRCOCConfig.for_model(model)).eval()
    large = [("text", 4), ("image", (1, 16, 16)), ("text", 6)]
    for spec, selector, settings in (
        (large, layer, {"mode": "saccade", "budget": 30}),
        (CLIP, ByScore(), {"budget": 5}),
    ):
        data = inputs_for(family, spec)
        outs = []
        for cached in (True, False):
            with attach(model, selector, on_error="raise", **settings):
                cache = DynamicCache() if cached else None
                out = model.generate(**data, **GREEDY, past_key_values=cache)
                answer = out[:, data["input_ids"].shape[1] :]
                turn = conversation(data, answer)
                if cached:
                    second = model.generate(**turn, **GREEDY, past_key_values=cache)
                    third = torch.cat([second, TURN], dim=1)
                    outs.append(model.generate(input_ids=third, **GREEDY, past_key_values=cache))
        expected = reference(model, data, selector, answer, **settings)
        second = second[:, turn["input_ids"].shape[1]]
        allowed = expected.clone()
        allowed[:, GREEDY.get("suppress_tokens", [])] = -torch.inf
        assert torch.equal(allowed.argmax(dim=-1), second)
        assert torch.equal(outs[0][:, : third.shape[1]], third)


@torch.no_grad()
def test_decoding_by_hand_goes_on_whatever_came_between(opened):
    family, model = opened
    data = inputs_for(family, IMAGE_PROMPT)
    other = inputs_for(family, TWO_IMAGES, seed=9)
    logits = []
    for disturbed in (False, True):
        with attach(model, ByScore(), budget=3, on_error="raise"):
            first = model(**data, use_cache=True)
            if disturbed:
                model(**other)
            token = first.logits[:, -1:].argmax(dim=-1)
            second = model(input_ids=token, past_key_values=first.past_key_values)
            third = model(input_ids=token, past_key_values=second.past_key_values)
            logits.append(torch.stack([second.logits, third.logits]))
    assert torch.equal(*logits)


@torch.no_grad()
def test_a_cache_of_a_shortened_prompt_is_refused_elsewhere(opened):
    family, model = opened
    data = inputs_for(family, IMAGE_PROMPT)
    with attach(model, ByScore(), budget=3):
        result = model.generate(**data, **GREEDY, return_dict_in_generate=True)
    cache, turn = result.past_key_values, conversation(data, result.sequences[:, data["input_ids"].shape[1] :])
    for used in (cache, copy.deepcopy(cache)):
        with pytest.raises(ValueError, match="holds a shortened prompt, which the plain model would misread"):
            model.generate(**turn, **GREEDY, past_key_values=used)
        with pytest.raises(ValueError, match="holds a shortened prompt, which the plain model would misread"):
            model(input_ids=TURN, past_key_values=used)
    with attach(model, ByScore(), budget=3):  # another attachment knows what it holds
        model.generate(**turn, **GREEDY, past_key_values=copy.deepcopy(cache))
        for wrong, message in (
            ({**turn, "input_ids": turn["input_ids"].flip(1)}, "do not go on from the prompt that this cache holds"),
            ({"input_ids": torch.cat([turn["input_ids"], torch.tensor([[IMAGE, CHAT_END]])], dim=1)},
             "a further picture cannot join"),
        ):  # fmt: skip
            with pytest.raises(ValueError, match=message):
                model.generate(**wrong, **GREEDY, past_key_values=copy.deepcopy(cache))


@torch.no_grad()
def test_what_a_further_turn_hides_is_not_read(opened):
    family, model = opened
    data = inputs_for(family, IMAGE_PROMPT)
    hidden = torch.zeros(1, 3, dtype=torch.long)  # as after a row that ended before the others of its batch
    with attach(model, ByScore(), budget=3, on_error="raise"):
        cache = DynamicCache()
        out = model.generate(**data, **GREEDY, past_key_values=cache)
        turn = conversation(data, out[:, data["input_ids"].shape[1] :])
        first = out.shape[1]
        ids = torch.cat([out, hidden, TURN], dim=1)
        mask = torch.ones_like(ids)
        mask[:, first : first + 3] = 0
        last = out[:, -1:]  # of which nothing is in the cache yet
        new = torch.cat([last, hidden, TURN], dim=1)
        by_hand = model(input_ids=torch.cat([last, TURN], dim=1), past_key_values=copy.deepcopy(cache)).logits
        # a mask counts the columns of the conversation, or those in the cache
        for columns in (mask, mask[:, -cache.get_seq_length() - new.shape[1] :]):
            masked = model(input_ids=new, attention_mask=columns, past_key_values=copy.deepcopy(cache)).logits
            torch.testing.assert_close(masked[:, 4:], by_hand[:, 1:], rtol=1e-4, atol=1e-4)
        padded = model.generate(input_ids=ids, attention_mask=mask, **GREEDY, past_key_values=copy.deepcopy(cache))
        expected = model.generate(**turn, **GREEDY, past_key_values=cache)
    assert torch.equal(padded[:, ids.shape[1] :], expected[:, turn["input_ids"].shape[1] :])


def in_turn(ids):
    """Arguments that a further turn cannot have, with what is said of them."""
    return {
        "position_ids": (torch.zeros(3, *ids.shape, dtype=torch.long), "`position_ids` are computed here"),
        "attention_mask": (torch.ones(1, 1, 8, 8), "`attention_mask` must have shape .* as the whole conversation, go"),
        "mm_encoder_outputs": ({"image": None}, "a further picture cannot join the cache of a shortened prompt"),
        "cache_position": (torch.arange(ids.shape[1]), "`cache_position` counts columns of the full prompt"),
    }


@pytest.mark.parametrize("name", in_turn(TURN))
@torch.no_grad()
def test_arguments_that_a_further_turn_cannot_honour_are_refused(opened, name):
    family, model = opened
    data = inputs_for(family, IMAGE_PROMPT)
    with attach(model, ByScore(), budget=3, on_error="raise"):
        cache = DynamicCache()
        out = model.generate(**data, **GREEDY, past_key_values=cache)
        turn = conversation(data, out[:, data["input_ids"].shape[1] :])
        for call, arguments in ((model.generate, turn), (model, {"input_ids": TURN})):
            value, message = in_turn(arguments["input_ids"])[name]
            with pytest.raises(ValueError, match=message):
                call(**{**arguments, name: value}, past_key_values=cache)
        with pytest.raises(ValueError, match="guidance_scale reads a second prompt"):
            model.generate(**turn, guidance_scale=1.5, past_key_values=cache)
        model.generate(**turn, **GREEDY, past_key_values=cache)


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
@torch.no_grad()
def test_a_cache_that_was_reset_holds_nothing(opened, kind):
    family, model = opened
    data = inputs_for(family, IMAGE_PROMPT)
    cache = DynamicCache()
    if kind is StaticCache:
        cache = StaticCache(config=model.config.get_text_config(), max_cache_len=128)
    with attach(model, ByScore(), budget=3, on_error="raise"):
        out = model.generate(**data, **GREEDY, past_key_values=cache)
        turn = {**data, **conversation(data, out[:, data["input_ids"].shape[1] :])}
        turn.pop("mm_token_type_ids", None)
        cache.reset()
        assert type(cache) is kind
        if cache.get_seq_length():
            pytest.skip("this version of transformers keeps a DynamicCache as long as it was, with zeros")
        again = model.generate(**turn, **GREEDY, past_key_values=cache)
        assert torch.equal(again, model.generate(**turn, **GREEDY))
        assert holding_of(cache) is not None
    cache.reset()
    plain = model.generate(**data, **GREEDY, past_key_values=cache)
    assert torch.equal(plain, model.generate(**data, **GREEDY))


@torch.no_grad()
def test_a_pickled_cache_knows_what_it_holds(opened):
    family, model = opened
    data = inputs_for(family, IMAGE_PROMPT)
    with attach(model, ByScore(), budget=3, on_error="raise"):
        cache = DynamicCache()
        out = model.generate(**data, **GREEDY, past_key_values=cache)
        turn = conversation(data, out[:, data["input_ids"].shape[1] :])
        twin = pickle.loads(pickle.dumps(cache))
        expected = model.generate(**turn, **GREEDY, past_key_values=cache)
        assert torch.equal(model.generate(**turn, **GREEDY, past_key_values=twin), expected)
    with pytest.raises(ValueError, match="holds a shortened prompt, which the plain model would misread"):
        model.generate(**turn, **GREEDY, past_key_values=pickle.loads(pickle.dumps(twin)))


@torch.no_grad()
def test_keeping_everything_leaves_an_ordinary_cache(opened):
    family, model = opened
    data = inputs_for(family, IMAGE_PROMPT)
    plain = model.generate(**data, **GREEDY, return_dict_in_generate=True)
    turn = conversation(data, plain.sequences[:, data["input_ids"].shape[1] :])
    expected = model.generate(**turn, **GREEDY, past_key_values=plain.past_key_values)
    settings = [(create_selector("full"), {})]
    if family != "llava":
        settings.append((create_selector("grid"), {"budget": 1.0}))
    for selector, options in settings:
        with attach(model, selector, **options):
            result = model.generate(**data, **GREEDY, return_dict_in_generate=True)
            out = model.generate(**turn, **GREEDY, past_key_values=copy.deepcopy(result.past_key_values))
        assert torch.equal(out, expected)
        model.generate(**turn, **GREEDY, past_key_values=result.past_key_values)  # an ordinary cache


class Failing(ByScore):
    def select(self, queries, budget=None):
        raise RuntimeError("no idea")


@pytest.mark.parametrize("kept", ["budget", "weight", "failure"])
@torch.no_grad()
def test_a_further_turn_after_everything_was_kept_may_bring_its_pictures_again(opened, kept):
    family, model = opened
    data = inputs_for(family, TWO_IMAGES)
    layer = ARRCOCLayer(ARRCOCConfig.for_model(model)).eval()
    selector, options = {
        "budget": (ByScore(), {"budget": 400}), "weight": (layer, {"mode": "weight"}), "failure": (Failing(), {}),
    }[kept]  # fmt: skip
    with attach(model, selector, **options):
        cache = DynamicCache()
        out = model.generate(**data, **GREEDY, past_key_values=cache)
        turn = conversation(data, out[:, data["input_ids"].shape[1] :])
        expected = model.generate(**turn, **GREEDY, past_key_values=copy.deepcopy(cache))
        again = {**data, **turn}
        if "mm_token_type_ids" in data:
            types = data["mm_token_type_ids"]
            text = types.new_zeros(1, turn["input_ids"].shape[1] - types.shape[1])
            again["mm_token_type_ids"] = torch.cat([types, text], dim=1)
        assert torch.equal(model.generate(**again, **GREEDY, past_key_values=copy.deepcopy(cache)), expected)
        third = inputs_for(family, [("text", 1), ("image", (1, 8, 12)), ("text", 1)])
        ids = torch.cat([turn["input_ids"], third["input_ids"]], dim=1)
        more = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": third["pixel_values"]}
        with pytest.raises(ValueError, match=r"which a shortened prompt cannot follow|a further picture cannot join"):
            model.generate(**more, **GREEDY, past_key_values=cache)


@pytest.mark.parametrize("mode", ["prune", "weight"])
@torch.no_grad()
def test_other_prompts_may_come_between_the_turns_of_one_that_kept_everything(opened, mode):
    family, model = opened
    data, other = inputs_for(family, TWO_IMAGES), inputs_for(family, SMALL, seed=9)
    layer = ARRCOCLayer(ARRCOCConfig.for_model(model)).eval()
    with attach(model, layer, mode=mode, budget=400, on_error="raise"):
        cache = DynamicCache()
        out = model.generate(**data, **GREEDY, past_key_values=cache)
        turn = conversation(data, out[:, data["input_ids"].shape[1] :])
        step = {"input_ids": torch.cat([out[:, -1:], TURN], dim=1)}
        expected = model.generate(**turn, **GREEDY, past_key_values=copy.deepcopy(cache))
        by_hand = model(**step, past_key_values=copy.deepcopy(cache)).logits
        model.generate(**other, **GREEDY)  # the model's own count of positions is now that of this one
        assert torch.equal(model.generate(**turn, **GREEDY, past_key_values=copy.deepcopy(cache)), expected)
        assert torch.equal(model(**step, past_key_values=copy.deepcopy(cache)).logits, by_hand)
    cache.crop(2 - cache.get_seq_length())  # an ordinary cache may be cropped anywhere
    assert type(cache) is DynamicCache
    assert cache.get_seq_length() == 2


@torch.no_grad()
def test_crops_count_the_full_prompt(opened):
    family, model = opened
    data = inputs_for(family, IMAGE_PROMPT)
    with attach(model, ByScore(), budget=3):
        cache = DynamicCache()
        model.generate(**data, **GREEDY, past_key_values=cache)
        length = data["input_ids"].shape[1]
        decoded = cache.get_seq_length() - len([*data["input_ids"][0]]) + (data["input_ids"] == IMAGE).sum() - 3
        with pytest.raises(ValueError, match="cannot be cropped into its shortened prompt"):
            cache.crop(-int(decoded) - 1)
        cache.crop(-int(decoded))
        out = model.generate(**data, **GREEDY)
        answer = out[:, length:]
        turn = conversation(data, answer)
        again = model.generate(**turn, **GREEDY, past_key_values=cache)
        fresh = DynamicCache()
        model.generate(**data, **GREEDY, past_key_values=fresh)
        assert torch.equal(again, model.generate(**turn, **GREEDY, past_key_values=fresh))


def levels_of(family):
    """How many DeepStack levels a family has."""
    return 2 if family.config.model_type.startswith("qwen3_vl") else 0


class Transcript:
    """All that one row of a cache ever read, and when which of it was hidden. The reference reads it in one pass."""

    def __init__(self, family, row, holding, output):
        self.family, self.next = family, int(holding.next_position[row])
        valid = holding.mask[row].bool()
        self.ids, self.positions = holding.short_ids[row][valid], holding.positions[:, row][:, valid]
        visual = holding.short_ids == family.token_id("image")
        counts = visual.sum(dim=1).tolist()
        self.levels = [torch.split(level, counts)[row] for level in read_levels(output)]
        self.alive, self.hidden = list(range(len(self.ids))), []

    def add(self, ids, positions=None, levels=None):
        if positions is None:
            positions = (self.next + torch.arange(len(ids))).expand(len(self.positions), -1)
        if levels is None:
            self.next = int(positions.max()) + 1
        else:
            self.levels = [torch.cat(pair) for pair in zip(self.levels, levels, strict=True)]
        self.alive += range(len(self.ids), len(self.ids) + len(ids))
        self.ids, self.positions = torch.cat([self.ids, ids]), torch.cat([self.positions, positions], dim=1)

    def drop(self, keep):
        """Hide tokens of those that are alive, from everything that is read later."""
        gone = [column for column, stays in zip(self.alive, keep, strict=True) if not stays]
        self.alive = [column for column in self.alive if column not in gone]
        self.hidden.append((len(self.ids), gone))

    def logits(self, model, hide=True, true_positions=True):
        count = len(self.ids)
        mask = torch.ones(count, count).tril().bool()
        for time, gone in self.hidden if hide else ():
            mask[time:, gone] = False
        positions, ones = self.positions, torch.ones(1, count, dtype=torch.long)
        if not true_positions:
            positions = torch.arange(count).expand_as(positions)
        features = self.family.wrap([self.levels[0]], [[level] for level in self.levels[1:]])
        return model(
            input_ids=self.ids[None],
            attention_mask=torch.zeros(1, 1, count, count).masked_fill(~mask, torch.finfo(torch.float).min),
            mm_encoder_outputs={"image": features},
            use_cache=False,
            **self.family.place(ones, positions[:, None], torch.tensor([self.next])),
        ).logits[0, -1]

    def decode(self, model, count):
        tokens = []
        for _ in range(count):
            logits = self.logits(model)
            logits[GREEDY["suppress_tokens"]] = -torch.inf
            tokens.append(logits.argmax())
            self.add(tokens[-1][None])
        return torch.stack(tokens)


class Reading:
    """A cache and the transcript of each of its rows, which go through the same changes."""

    def __init__(self, name, *specs):
        self.model, self.chance = tiny_model(name), torch.Generator().manual_seed(3)
        self.family = open_family(self.model)
        session = Session(self.family, ByScore(), Settings(budget=3, on_error="raise"))
        run = session.prepare(inputs_for(name, *specs))
        with calling(self.model):
            self.cache = self.model(**run.inputs, use_cache=True).past_key_values
        mark_cache(self.cache, run.holding)
        output = run.inputs["mm_encoder_outputs"]["image"]
        self.rows = [Transcript(self.family, row, run.holding, output) for row in range(len(specs))]

    def look_and_ask(self, counts, question, start=None, decode=False):
        """Add this many cells to each row, then the question; returns arguments and what the cache then holds."""
        depth, positions, encoded = len(self.rows[0].positions), [], []
        for count, row in zip(counts, self.rows, strict=True):
            positions.append(torch.randint(2, 9, (depth, count), generator=self.chance))
            levels = [torch.randn(count, HIDDEN, generator=self.chance) for _ in range(1 + levels_of(self.family))]
            encoded.append(Encoded(levels[0], tuple(levels[1:])))
            row.add(torch.full((count,), IMAGE), positions[-1], levels)
        cells = [torch.arange(count) for count in counts]
        places = None
        if start is not None:
            places = (torch.tensor(start)[:, None] + torch.arange(question.shape[1])).expand(depth, -1, -1)
        for number, row in enumerate(self.rows):
            row.add(question[number], None if places is None else places[:, number])
        pieces = visual_piece(self.family, encoded, positions, cells), text_piece(question, positions=places)
        return append(self.family, self.cache, *pieces, decode=decode)

    def read(self, *args, **kwargs):
        arguments, holding = self.look_and_ask(*args, **kwargs)
        with calling(self.model):
            logits = self.model(**arguments).logits[:, -1]
        mark_cache(self.cache, holding)
        return logits

    def drop(self, keep):
        valid = holding_of(self.cache).mask.bool()
        for row, (stays, real) in zip(self.rows, zip(keep, valid, strict=True), strict=True):
            row.drop(stays[real])
        drop(self.family, self.cache, keep)

    def check(self, logits):
        for row, found in zip(self.rows, logits, strict=True):
            torch.testing.assert_close(found, row.logits(self.model), rtol=1e-4, atol=1e-4)
            for control in ({"hide": False}, {"true_positions": False}):
                if row.hidden or "hide" not in control:
                    assert not torch.allclose(found, row.logits(self.model, **control), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", [*FAMILIES, "qwen3_vl_moe"])
@pytest.mark.parametrize("counts", [[3], [2, 4], [3, 0]])
@torch.no_grad()
def test_looking_again_and_again_equals_one_pass_with_a_mask(name, counts):
    """Cells and question are added, covered tokens and the question dropped, then more is added: a loop of looks."""
    reading = Reading(name, *[IMAGE_PROMPT, SMALL][: len(counts)])
    question = torch.arange(FIRST_WORD, FIRST_WORD + 4).expand(len(counts), -1)
    start = holding_of(reading.cache).next_position.tolist()
    reading.check(reading.read(counts, question))
    for again in range(2):
        holding = holding_of(reading.cache)
        keep = torch.ones_like(holding.mask, dtype=torch.bool)
        keep[:, -4:] = False  # the question
        for row, roles in enumerate(holding.roles):
            cells = (roles == Role.CELL).nonzero()[:, 0]
            keep[row, cells[: 1 + row - again]] = False  # rows drop different numbers
        length = holding.length
        reading.drop(keep)
        held = holding_of(reading.cache)
        assert held.length == reading.cache.get_seq_length() == reading.cache.get_seq_length(2) < length
        assert torch.equal(held.next_position, holding.next_position)
        reading.check(reading.read(counts[::-1], question + again + 1, start))
    arguments, holding = reading.look_and_ask(counts, question, decode=True)
    with calling(reading.model):
        out = reading.model.generate(**arguments, **GREEDY)
    assert torch.equal(out[:, holding.length :], torch.stack([row.decode(reading.model, 6) for row in reading.rows]))


def test_what_keeps_different_numbers_of_tokens_is_not_said_to_be_unpadded():
    ids, ones = torch.arange(8).view(2, 4), torch.ones(2, 4, dtype=torch.long)
    whole = Holding(ids, ids, ones, ids[None], torch.full((2,), 8), ones * Role.TEXT, -ones, padded=False)
    valid = torch.tensor([[False, True], [True, True]])
    taken = whole.take(torch.tensor([[0, 1], [2, 3]]), valid, pad_id=9)
    assert taken.short_ids.tolist() == [[9, 1], [6, 7]]
    assert taken.padded


@torch.no_grad()
def test_crops_copies_and_refusals_after_more_was_added(opened):
    name, _ = opened
    reading = Reading(name, IMAGE_PROMPT)
    family, cache = reading.family, reading.cache
    question = TURN[:, :3]
    arguments, holding = reading.look_and_ask([2], question, decode=True)
    with calling(reading.model):
        first = reading.model.generate(**arguments, **GREEDY)
    keep = torch.ones(1, holding.length - 5, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"10 generated tokens .* remove them with `cache.crop\(-10\)`"):
        drop(family, cache, keep)  # 2 cells, 3 words and 5 tokens; nobody said what they are
    mark_cache(cache, holding)
    with pytest.raises(ValueError, match="has 5 generated tokens"):
        append(family, cache, text_piece(question))
    cache.crop(-5)
    copied = copy.deepcopy(cache)
    keep = torch.ones(1, holding.length, dtype=torch.bool)
    for wrong, message in ((keep[:, 1:], "`keep` must have the shape"), (~keep, "leaves no token in row 0")):
        with pytest.raises(ValueError, match=message):
            drop(family, cache, wrong)
    keep[:, -5:] = False
    drop(family, cache, keep)
    assert holding_of(copied).length == copied.get_seq_length() == holding.length  # a copy is its own
    assert holding_of(cache).length == holding.length - 5
    levels = [level[-2:] for level in reading.rows[0].levels]
    cells = visual_piece(
        family, [Encoded(levels[0], tuple(levels[1:]))], [reading.rows[0].positions[:, -5:-3]], [torch.arange(2)]
    )
    # what was dropped last can be added again as it was
    places = reading.rows[0].positions[:, None, -3:]
    arguments, _ = append(family, cache, cells, text_piece(question, positions=places), decode=True)
    with calling(reading.model):
        assert torch.equal(reading.model.generate(**arguments, **GREEDY), first)
    for used in (cache, copied, copy.deepcopy(cache)):
        with pytest.raises(ValueError, match="holds a shortened prompt, which the plain model would misread"):
            reading.model(input_ids=TURN, past_key_values=used)
    with pytest.raises(ValueError, match="does not say what it holds"):
        append(family, DynamicCache(), text_piece(question))


@torch.no_grad()
def test_questions_of_different_lengths_are_padded(opened):
    name, _ = opened
    reading = Reading(name, IMAGE_PROMPT, SMALL)
    questions, mask = TURN[:, :4].expand(2, -1), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    for row, question, real in zip(reading.rows, questions, mask, strict=True):
        row.add(question[real.bool()])
    arguments, holding = append(reading.family, reading.cache, text_piece(questions, mask))
    with calling(reading.model):
        reading.check(reading.model(**arguments).logits[:, -1])
    assert holding.next_position.tolist() == [row.next for row in reading.rows]


@pytest.mark.parametrize("specs", [[TWO_IMAGES], [IMAGE_PROMPT, SMALL]])
@torch.no_grad()
def test_a_prompt_can_be_read_piece_by_piece(opened, specs):
    name, model = opened
    run = Session(open_family(model), ByScore(), Settings(budget=3, on_error="raise")).prepare(inputs_for(name, *specs))
    family, length = open_family(model), run.holding.length
    expected = model.generate(**run.inputs, **GREEDY)
    for ends in ([5], [length - 2], [4, 6, length - 1]):
        cache = DynamicCache()
        mark_cache(cache, run.holding.nothing())
        for start, stop in itertools.pairwise([0, *ends]):
            arguments, holding = append(family, cache, piece_of(family, run.inputs, run.holding, start, stop))
            with calling(model):
                model(**arguments)
            mark_cache(cache, holding)
        before = holding.next_position
        arguments, holding = append(family, cache, piece_of(family, run.inputs, run.holding, stop), decode=True)
        with calling(model):
            assert torch.equal(model.generate(**arguments, **GREEDY), expected)
        assert torch.equal(holding.next_position, run.holding.next_position)
        if stop == length - 2:  # text goes on where it does in the whole prompt
            assert torch.equal(before, run.holding.next_position - 2)


@torch.no_grad()
def test_rows_of_a_batch_can_leave_it():
    reading = Reading("qwen3_vl", IMAGE_PROMPT, SMALL)
    question = torch.arange(FIRST_WORD, FIRST_WORD + 4).expand(2, -1)
    reading.read([2, 3], question)
    reading.cache.batch_select_indices(torch.tensor([1]))
    reading.rows = reading.rows[1:]
    reading.check(reading.read([1], question[:1]))


@torch.no_grad()
def test_linear_attention_is_added_to_but_nothing_is_dropped_from_it():
    reading = Reading("qwen3_5", IMAGE_PROMPT)
    holding = holding_of(reading.cache)
    with pytest.raises(ValueError, match=r"tokens cannot be dropped from a cache of .*LinearAttentionLayer"):
        drop(reading.family, reading.cache, torch.ones_like(holding.mask))
    question = TURN[:, :3]
    logits = reading.read([2], question)
    row = reading.rows[0]
    features = reading.family.wrap([row.levels[0]], [])
    ones = torch.ones(1, len(row.ids), dtype=torch.long)
    expected = reading.model(
        input_ids=row.ids[None], attention_mask=ones, mm_encoder_outputs={"image": features}, use_cache=False,
        **reading.family.place(ones, row.positions[:, None], torch.tensor([row.next])),
    ).logits[:, -1]  # fmt: skip
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="rows of different lengths cannot be added"):
        append(reading.family, reading.cache, text_piece(question, mask=torch.tensor([[0, 1, 1]])))


@torch.no_grad()
def test_a_cache_knows_what_its_tokens_are():
    name = "qwen3_vl"
    model = tiny_model(name)
    layer = ARRCOCLayer(ARRCOCConfig.for_model(model)).eval()
    large = [("text", 4), ("image", (1, 16, 16)), ("text", 6)]
    for selector, settings in ((ByScore(), Settings(budget=3)), (layer, Settings("saccade", 30))):
        run = Session(open_family(model), selector, settings).prepare(inputs_for(name, large, SMALL))
        holding = run.holding
        visual = holding.short_ids == IMAGE
        assert torch.equal(holding.roles == Role.PADDING, holding.mask == 0)
        assert torch.equal((holding.roles == Role.GESTALT) | (holding.roles == Role.CELL), visual)
        assert torch.equal(holding.cells >= 0, visual)
        saccades = [holding.cells[row][holding.roles[row] == Role.CELL].tolist() for row in (0, 1)]
        assert saccades == [cells.tolist() for _, cells in run.kept]
        # rows and columns of the picture's positions are those of its cells
        cells, places = holding.cells[0][visual[0]], holding.positions[1:, 0, visual[0]]
        assert torch.equal(places - places.new_tensor([[5], [5]]), torch.stack([cells // 8, cells % 8]))
    assert (holding.roles[0] == Role.GESTALT).sum() == run.used - sum(map(len, saccades))
