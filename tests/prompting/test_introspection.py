"""Introspection: what the model itself pays the cells of a picture that it reads pooled."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from simple_selector import GREEDY, TOLERANCE, state_of
from tiny_models import (
    CLIP,
    FAMILIES,
    IMAGE,
    IMAGE_PROMPT,
    MIXED,
    QWEN,
    RELATIVES,
    SMALL,
    TEXT,
    TWO_IMAGES,
    inputs_for,
    tiny_model,
)

from arr_coc import ARRCOCQwen, Gaze, VisualQuery, attach, create_selector, prepare
from arr_coc.data.worlds import make_example, split_seed
from arr_coc.families.family import open_family
from arr_coc.families.language_attention import Asking, FinerCells, attending_layers, reading_attention
from arr_coc.prompting.first_look import introspection
from arr_coc.prompting.first_look.introspection import introspect, pooled_grid
from arr_coc.prompting.layout import encode_full, read_prompt
from arr_coc.prompting.prune import Pruning
from arr_coc.prompting.settings import Settings
from arr_coc.selectors.contract import InvalidSelectorError

LARGE = [("text", 3), ("image", (1, 32, 24)), ("text", 5)]  # 192 tokens


def steps_of(family, data, model=None):
    """The steps of mode `prune` up to the choice."""
    steps = Pruning(
        open_family(model or tiny_model(family)), data, Settings(on_error="raise"), create_selector("own-attention")
    )
    steps.read()
    steps.encode()
    return steps


def attended(family, *specs, model=None):
    steps = steps_of(family, inputs_for(family, *specs), model)
    found = introspect(steps.family, steps.inputs, steps.prompt, steps.positions, steps.encoded)
    return found, steps.prompt.spans


def eager(family, data):
    """What the last token, and the mean of the words, pay all tokens in the model's own eager attention `[B, L]`."""
    model = tiny_model(family, "eager")
    steps = steps_of(family, data)
    with torch.no_grad():
        inputs = encode_full(open_family(model), data, steps.prompt)
        layers = [layer for layer in model(**inputs, output_attentions=True).attentions if layer is not None]
    paid = torch.stack(layers).mean(dim=(0, 2))  # [layers, B, heads, L, L] -> [B, L, L]
    asked = [np.isin(steps.prompt.ids[row], ids.cpu().numpy()).nonzero()[0] for row, ids in enumerate(steps.question)]
    visual = [span.columns[-1] for span in steps.prompt.spans]
    return torch.stack(
        [
            own[-1] + own[[column for column in columns if column > max(visual, default=0)]].mean(dim=0)
            for own, columns in zip(paid, asked, strict=True)
        ]
    )


@pytest.fixture
def nothing_pooled(monkeypatch):
    monkeypatch.setattr(introspection, "SHARE", 1.0)
    monkeypatch.setattr(introspection, "MOST", 4096)


@pytest.mark.parametrize("family", [*FAMILIES, *RELATIVES])
@pytest.mark.usefixtures("nothing_pooled")
def test_without_pooling_it_is_the_attention_of_the_whole_prompt(family):
    data = inputs_for(family, IMAGE_PROMPT)
    [found], [span] = attended(family, IMAGE_PROMPT)
    torch.testing.assert_close(found, eager(family, data)[0, torch.from_numpy(span.columns)], atol=2e-5, rtol=1e-3)


@pytest.mark.parametrize("family", QWEN)
def test_pooled_it_is_near_that_and_far_from_another_prompt(family):
    [found], [span] = attended(family, LARGE)
    assert 12 <= np.prod(pooled_grid(span.grid)) <= 16
    assert len(found) == 192
    assert bool((found > 0).all())
    assert float(found.sum()) < 2  # two groups, and text takes its share
    whole = eager(family, inputs_for(family, LARGE))[0, torch.from_numpy(span.columns)]

    def alike(other):
        return float(torch.corrcoef(torch.stack([found, other]))[0, 1])

    assert alike(whole) > 0.5 > abs(alike(whole.flip(0)))


@pytest.mark.parametrize("family", [*FAMILIES, *RELATIVES])
def test_rows_of_a_batch_and_several_pictures_are_as_alone(family):
    specs = [TWO_IMAGES, SMALL, TEXT]
    together, spans = attended(family, *specs)
    assert [span.row for span in spans] == [0, 0, 1]
    data = [inputs_for(family, spec, seed=row) for row, spec in enumerate(specs)]
    alone = []
    for inputs in data[:2]:
        steps = steps_of(family, inputs)
        alone += introspect(steps.family, steps.inputs, steps.prompt, steps.positions, steps.encoded)
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one, other, **TOLERANCE)


@pytest.mark.parametrize("family", QWEN)
@torch.no_grad()
def test_clips_and_mixed_prompts(family):
    model = tiny_model(family)
    for spec in (CLIP, MIXED):
        found, spans = attended(family, spec, model=model)
        assert [len(each) for each in found] == [len(span.columns) for span in spans]
        short = prepare(model, inputs_for(family, spec), create_selector("own-attention"), budget=6, on_error="raise")
        assert model(**short).logits.isfinite().all()


@torch.no_grad()
def test_a_cell_is_known_by_what_sets_it_apart():
    """States of cells are those of their pooled token plus the difference, in the first layer exactly."""
    steps = steps_of("qwen3_vl", inputs_for("qwen3_vl", LARGE))
    family = steps.family
    seen: dict[str, FinerCells] = {}
    plain = introspection._find_cells

    def remember(*arguments):
        seen["cells"] = plain(*arguments)
        return seen["cells"]

    introspection._find_cells = remember
    inputs: dict[str, torch.Tensor] = {}
    handle = family.inner.language_model.layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: inputs.update(hidden=args[0] if args else kwargs["hidden_states"]),
        with_kwargs=True,
    )
    try:
        introspect(family, steps.inputs, steps.prompt, steps.positions, steps.encoded)
    finally:
        introspection._find_cells = plain
        handle.remove()
    features = steps.encoded["image"].features
    torch.testing.assert_close(seen["cells"].states(inputs["hidden"], 0)[0], features, atol=1e-5, rtol=1e-5)
    level = steps.encoded["image"].deepstack[0]
    pooled = level - seen["cells"].apart[1]  # what the first DeepStack level adds to each pooled token
    after = inputs["hidden"].clone()
    after[0, seen["cells"].parents] += pooled
    torch.testing.assert_close(seen["cells"].states(after, 1)[0], features + level, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", QWEN)
@torch.no_grad()
def test_the_selector_keeps_the_cells_with_most_attention(family):
    model, data = tiny_model(family), inputs_for(family, LARGE)
    before = state_of(model)
    with attach(model, create_selector("own-attention"), budget=20, on_error="raise") as run:
        model.generate(**data, **GREEDY)
    [(_, cells)] = run.kept
    [found], _ = attended(family, LARGE)
    assert cells.tolist() == found.topk(20).indices.sort().values.tolist()
    assert state_of(model) == before
    another = {**data, "input_ids": data["input_ids"].clone()}
    another["input_ids"][0, -5:-1] = torch.tensor([20, 30, 40, 50])
    with attach(model, create_selector("own-attention"), budget=20, on_error="raise") as run:
        model.generate(**another, **GREEDY)
    assert run.kept[0][1].tolist() != cells.tolist()


HUGE = [("text", 4), ("image", (1, 64, 48)), ("text", 6)]  # 768 tokens: its gestalt has fewer


@pytest.mark.parametrize("family", QWEN)
@torch.no_grad()
def test_saccades_go_where_the_gestalt_is_attended(family):
    model, data = tiny_model(family), inputs_for(family, HUGE)
    queries: list[VisualQuery] = []

    class Watching(type(create_selector("own-attention"))):
        def select(self, asked, budget=None):
            queries.extend(asked)
            return super().select(asked, budget)

    selector, seen = Watching(), []
    gaze = {"mode": "saccade", "budget": 300, "on_error": "raise", "gaze": Gaze(overlap="keep")}
    language = model.model.language_model
    handle = language.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["inputs_embeds"].shape[1]), with_kwargs=True
    )
    with attach(model, selector, **gaze) as run:
        model(**data)
    handle.remove()
    [query], [(grid, cells)] = queries, run.kept
    assert query.attended.shape == (np.prod(query.cells),)
    assert len(seen) == 2
    assert seen[1] - seen[0] == len(cells)  # first the gestalt alone, then what was looked at, too
    # what is looked at first is what the gestalt was attended at
    side = max(1, round(grid[1] / query.cells[1]))
    best = int(query.attended.argmax())
    top, left = best // query.cells[2] * side, best % query.cells[2] * side
    assert top * grid[2] + left in cells.tolist()
    # the same by eager attention
    eager_model = tiny_model(family, "eager")
    arguments: list[dict] = []
    handle = eager_model.model.register_forward_pre_hook(
        lambda module, args, kwargs: arguments.append(dict(kwargs)), with_kwargs=True
    )
    prepare(eager_model, data, selector, **gaze)
    handle.remove()
    alone = {**arguments[0], "use_cache": False, "past_key_values": None}
    layers = eager_model(**alone, output_attentions=True).attentions
    paid = torch.stack(layers).mean(dim=(0, 2))[0]  # [L', L']
    visual = (arguments[0]["input_ids"][0] == IMAGE).nonzero()[:, 0]
    assert len(visual) == len(query.tokens)
    both = (paid[-1] + paid[int(visual[-1]) + 2 :].mean(dim=0))[visual]  # the marker after a picture is no word
    fine = torch.nn.functional.interpolate(both.view(1, 1, *query.grid[1:]), query.cells[1:], mode="bilinear")
    torch.testing.assert_close(query.attended, fine.flatten(), atol=2e-5, rtol=1e-3)


@torch.no_grad()
def test_a_gestalt_that_is_compressed_is_attended_too():
    model, data = tiny_model("qwen3_vl"), inputs_for("qwen3_vl", HUGE)
    queries: list[VisualQuery] = []

    class Watching(type(create_selector("own-attention"))):
        def select(self, asked, budget=None):
            queries.extend(asked)
            return super().select(asked, budget)

    for compress in ("pool", "merge"):
        gaze = Gaze(gestalt=48, compress=compress)
        short = prepare(model, data, Watching(), mode="saccade", budget=100, gaze=gaze, on_error="raise")
        assert model(**short).logits.isfinite().all()
        paid = queries[-1].attended
        assert paid.shape == (np.prod(queries[-1].cells),)
        assert float(paid.sum()) > 0
        assert len(paid.unique()) > 20


@torch.no_grad()
def test_an_answer_that_is_learned_is_not_read():
    model, data = tiny_model("qwen3_vl"), inputs_for("qwen3_vl", LARGE)
    labels = torch.full_like(data["input_ids"], -100)
    labels[0, -2:] = data["input_ids"][0, -2:]
    found = []
    for last in ([20, 21], [90, 91]):
        ids = data["input_ids"].clone()
        ids[0, -2:] = torch.tensor(last)
        own = labels.clone()
        own[0, -2:] = torch.tensor(last)
        steps = steps_of("qwen3_vl", {**data, "input_ids": ids, "labels": own}, model)
        found += introspect(steps.family, steps.inputs, steps.prompt, steps.positions, steps.encoded)
    torch.testing.assert_close(*found, **TOLERANCE)
    steps = steps_of("qwen3_vl", {**data, "input_ids": ids}, model)  # without labels these are words
    [read] = introspect(steps.family, steps.inputs, steps.prompt, steps.positions, steps.encoded)
    assert not torch.allclose(read, found[1], atol=1e-4)


@torch.no_grad()
def test_of_several_answers_the_last_one_is_learned():
    """The question that counts ends before the last labels; the first ones are of an earlier turn."""
    data = inputs_for("qwen3_vl", LARGE)
    labels = torch.full_like(data["input_ids"], -100)
    labels[0, -2:] = data["input_ids"][0, -2:]
    alone = steps_of("qwen3_vl", {**data, "labels": labels.clone()})
    labels[0, :2] = data["input_ids"][0, :2]
    both = steps_of("qwen3_vl", {**data, "labels": labels})
    (first,), (second,) = (
        introspect(steps.family, steps.inputs, steps.prompt, steps.positions, steps.encoded) for steps in (alone, both)
    )
    torch.testing.assert_close(first, second, **TOLERANCE)


@pytest.mark.parametrize("family", QWEN)
@pytest.mark.usefixtures("nothing_pooled")
def test_words_before_a_picture_pay_it_nothing(family):
    [found], [span] = attended(family, [("text", 6), ("image", (1, 8, 8)), ("text", 1)])
    data = inputs_for(family, [("text", 6), ("image", (1, 8, 8)), ("text", 1)])
    with torch.no_grad():
        inputs = encode_full(open_family(tiny_model(family)), data, steps_of(family, data).prompt)
        layers = tiny_model(family, "eager")(**inputs, output_attentions=True).attentions
    paid = torch.stack(layers).mean(dim=(0, 2))[0]  # [L, L]
    last_and_word = 2 * paid[-1, torch.from_numpy(span.columns)]  # the only word behind it is the last token
    torch.testing.assert_close(found, last_and_word, atol=2e-5, rtol=1e-3)
    # asked before the picture, only the last token, a marker, sees it
    [early], [span] = attended(family, [("text", 6), ("image", (1, 8, 8))])
    assert float(early.sum()) < 1


@pytest.mark.parametrize("family", QWEN)
def test_clips_are_pooled_within_their_frames(family):
    spec = [("text", 3), ("video", (2, 16, 24)), ("text", 5)]
    steps = steps_of(family, inputs_for(family, spec))
    arguments = (steps.family, steps.inputs, steps.prompt, steps.positions, steps.encoded)
    pooled, grid = introspect(*arguments), steps.prompt.spans[0].grid
    assert grid == (2, 8, 12)
    assert np.prod(pooled_grid(grid)) < 96 * 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(introspection, "SHARE", 1.0)
        whole = introspect(*arguments)
    alike = torch.corrcoef(torch.stack([pooled[0], whole[0]]))[0, 1]
    turned = torch.corrcoef(torch.stack([pooled[0].view(2, -1).flip(0).flatten(), whole[0]]))[0, 1]
    assert alike > 0.4
    assert alike > turned + 0.1  # the other frame is no substitute


@torch.no_grad()
def test_autocast_does_not_make_cells_equal():
    steps = steps_of("qwen3_vl", inputs_for("qwen3_vl", LARGE))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        [found] = introspect(steps.family, steps.inputs, steps.prompt, steps.positions, steps.encoded)
    assert found.dtype == torch.float32
    assert len(found.unique()) > 180


@torch.no_grad()
def test_a_model_without_a_head_is_read_too_while_attached():
    model, data = tiny_model("qwen3_vl"), inputs_for("qwen3_vl", LARGE)
    with attach(model, create_selector("own-attention"), budget=20, on_error="raise") as run:
        model(**data)
    kept = run.kept[0][1].tolist()
    with attach(model.model, create_selector("own-attention"), budget=20, on_error="raise") as run:
        model.model(**data)
    assert run.kept[0][1].tolist() == kept


@torch.no_grad()
def test_the_model_is_not_asked_where_there_is_nothing_to_choose():
    model, data = tiny_model("qwen3_vl"), inputs_for("qwen3_vl", LARGE)
    passes: list[int] = []
    handle = model.model.language_model.register_forward_hook(lambda *_: passes.append(1))
    for budget, expected in ((20, 2), (1.0, 1), (192, 1), (5000, 1)):
        passes.clear()
        with attach(model, create_selector("own-attention"), budget=budget, on_error="raise") as run:
            model(**data)
        assert len(passes) == expected, budget
        assert len(run.kept[0][1]) == min(192, 192 if budget == 1.0 else budget)
    handle.remove()


def test_text_of_rows_without_pictures_is_not_read():
    data = inputs_for("qwen3_vl", LARGE, [("text", 150)])
    steps, asked = steps_of("qwen3_vl", data), []
    plain = introspection.Asking.of

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(introspection.Asking, "of", lambda groups: asked.append(groups) or plain(groups))
        introspect(steps.family, steps.inputs, steps.prompt, steps.positions, steps.encoded)
    [groups] = asked
    assert groups[0].any()
    assert not groups[1].any()
    steps = steps_of("qwen3_vl", inputs_for("qwen3_vl", [*LARGE, ("text", 300)]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(introspection.Asking, "of", lambda groups: asked.append(groups) or plain(groups))
        introspect(steps.family, steps.inputs, steps.prompt, steps.positions, steps.encoded)
    assert asked[-1].sum(dim=-1).tolist() == [[1, 256]]  # the last words of a long question
    assert bool(asked[-1][0, 1, -256:].all())


def test_where_it_cannot_be_is_said_in_one_line():
    model, data = tiny_model("qwen2_vl"), inputs_for("qwen2_vl", LARGE)
    words = [torch.tensor([20, 21])]
    with pytest.raises(ValueError, match="asks the model the prompt's own question; drop `query`"):
        prepare(model, data, create_selector("own-attention"), query=words)
    query = VisualQuery(torch.zeros(4, 8), (1, 2, 2), torch.zeros(1, 8))
    with pytest.raises(InvalidSelectorError, match=r"'own-attention' needs `VisualQuery.attended`"):
        create_selector("own-attention").select([query], 2)
    with pytest.raises(ValueError, match=r"`attended` must have shape \[4\], got \(3,\)"):
        replace(query, attended=torch.zeros(3))
    model.config.text_config.layer_types = ["full_attention", "sliding_attention", "full_attention"]
    with pytest.raises(ValueError, match="layers of sliding_attention"):
        prepare(model, data, create_selector("own-attention"))  # also if failures keep all tokens
    with pytest.raises(ValueError, match="layers of sliding_attention"):
        prepare(model, data, create_selector("own-attention"), mode="saccade", budget=100)


@torch.no_grad()
def test_layers_can_be_read_without_those_behind_them():
    model = tiny_model("qwen3_vl")
    steps = steps_of("qwen3_vl", inputs_for("qwen3_vl", SMALL), model)
    inputs = encode_full(steps.family, steps.inputs, read_prompt(steps.family, steps.inputs))
    asking = Asking.alone(torch.tensor([inputs["input_ids"].shape[1] - 1]))
    mask = inputs["attention_mask"].bool()
    paid = []
    for depth in (1, 3):
        with reading_attention(attending_layers(steps.family)[:1], asking, mask) as read:
            introspection.run_layers(steps.family, inputs, depth)
        paid += read
    assert len(paid) == 2
    assert torch.equal(*paid)
    assert len(model.model.language_model.layers) == 3


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "qwen3_5"])
def test_chosen_layers_are_read_and_later_ones_not_run(family):
    steps = steps_of(family, inputs_for(family, LARGE))
    arguments = (steps.family, steps.inputs, steps.prompt, steps.positions, steps.encoded)
    numbers = [number for number, _ in attending_layers(steps.family)]
    alone = [introspect(*arguments, layers=[number])[0] for number in numbers]
    torch.testing.assert_close(torch.stack(alone).mean(dim=0), introspect(*arguments)[0], **TOLERANCE)
    ran: list[int] = []
    handles = [
        layer.register_forward_hook(lambda *_, number=number: ran.append(number))
        for number, layer in enumerate(steps.family.inner.language_model.layers)
    ]
    introspect(*arguments, layers=numbers[:1])
    for handle in handles:
        handle.remove()
    assert ran == list(range(numbers[0] + 1))
    with pytest.raises(ValueError, match=r"`layers` must name some of .*\d, got \[99\]"):
        introspect(*arguments, layers=[99])


@pytest.mark.slow
def test_without_training_the_embedded_model_answers_from_few_tokens():
    """Test seeds; with an eighth of the tokens it is far above a blind rule, and as good as with all of them."""
    vlm = ARRCOCQwen.from_pretrained()
    items = [make_example("scenes", split_seed("test", seed), None, (384, 384)) for seed in range(24)]
    right = {}
    for name in ("own-attention", "grid", "full"):
        seen = ARRCOCQwen(vlm.model, vlm.processor, create_selector(name))
        answers = [seen.answer(item.open(), item.question, budget=0.125).text for item in items]
        right[name] = sum(answer in item.answers for answer, item in zip(answers, items, strict=True))
    assert right["own-attention"] >= right["full"] - 2
    assert right["own-attention"] >= right["grid"] + 8
