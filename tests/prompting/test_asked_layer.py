"""The layer with the model's own attention as a further voice: `introspect`."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from drawing import noise, splatter
from tiny_models import CLIP, MIXED, QWEN, SMALL, TWO_IMAGES, inputs_for, tiny_model
from typer.testing import CliRunner

from arr_coc import ARRCOCConfig, ARRCOCLayer, ARRCOCQwen, Gaze, attach, create_selector, prepare
from arr_coc.cli import app
from arr_coc.data.worlds import make_example, split_seed
from arr_coc.evaluation.contenders import open_contenders, split_name
from arr_coc.families.family import open_family
from arr_coc.inference.session import Session
from arr_coc.knowing import focus_of, hear
from arr_coc.prompting.encodings import Encodings
from arr_coc.prompting.first_look.introspection import introspect
from arr_coc.prompting.prefix import Prefix
from arr_coc.prompting.prune import Pruning
from arr_coc.prompting.settings import Settings

LARGE = [("text", 3), ("image", (1, 32, 24)), ("text", 5)]  # 192 tokens
HUGE = [("text", 4), ("image", (1, 64, 48)), ("text", 6)]  # 768 tokens: its gestalt has fewer


def structured(family, *prompts):
    """Inputs whose pictures are half noise and half plain: with noise alone an even grid is kept."""
    data = inputs_for(family, *prompts)
    data["pixel_values"][: len(data["pixel_values"]) // 2] = 0.3
    return data


def make_layer(model, **changes):
    return ARRCOCLayer(ARRCOCConfig.for_model(model, **changes)).eval()


def run(model, data, budget=20, **settings):
    layer = settings.pop("layer", None) or make_layer(model)
    session = Session(open_family(model), layer, Settings(budget=budget, on_error="raise", **settings))
    with torch.no_grad():
        return session.prepare(data)


def attended(model, data, layers=None):
    steps = Pruning(open_family(model), data, Settings(on_error="raise"), create_selector("own-attention"))
    steps.read()
    steps.encode()
    found = introspect(steps.family, data, steps.prompt, steps.positions, steps.encoded, layers=layers)
    return [paid.view(1, *span.grid) for paid, span in zip(found, steps.prompt.spans, strict=True)]


@pytest.mark.parametrize("family", QWEN)
def test_the_layer_hears_what_the_model_pays(family):
    model, data = tiny_model(family), structured(family, LARGE)
    plain, asked = run(model, data), run(model, data, introspect="on")
    [paid] = attended(model, data)
    assert plain.outputs[0].voice is None
    torch.testing.assert_close(asked.outputs[0].voice, hear(paid))
    assert plain.glanced_counts == [0]
    assert asked.glanced_counts == [12]  # a sixteenth of the tokens, on a grid of 4 x 3
    assert "the model itself looks" in asked.outputs[0].reason[0]
    assert "the model itself looks" not in plain.outputs[0].reason[0]
    assert asked.kept[0][1].tolist() != plain.kept[0][1].tolist()
    assert run(model, data, introspect="off").kept[0][1].tolist() == plain.kept[0][1].tolist()


@pytest.mark.parametrize("prompts", [(TWO_IMAGES,), (LARGE, SMALL), (CLIP,), (MIXED,)])
def test_several_pictures_rows_and_clips_hear_their_own(prompts):
    model, data = tiny_model("qwen3_vl"), inputs_for("qwen3_vl", *prompts)
    found = run(model, data, budget=2, introspect="on").outputs
    for output, paid in zip(found, attended(model, data), strict=True):
        torch.testing.assert_close(output.voice, hear(paid))


def test_automatic_introspection_asks_where_few_cells_stay():
    model, data = tiny_model("qwen3_vl"), structured("qwen3_vl", LARGE)  # 192 tokens
    for budget, asks in ((0.25, False), (33, False), (31, True), ({"total": 31}, True), (0.1, True), (None, False)):
        found = run(model, data, budget=budget, introspect="auto")
        assert (found.outputs[0].voice is not None) == asks, budget
        same = run(model, data, budget=budget, introspect="on" if asks else "off")
        assert found.kept[0][1].tolist() == same.kept[0][1].tolist()
    saccade = {"mode": "saccade", "gaze": Gaze(overlap="keep"), "introspect": "auto"}
    data = inputs_for("qwen3_vl", HUGE)
    for budget, asks in ((400, False), (260, False), (200, True), (120, True)):  # 140 and 104 of 768 cells sharp
        assert (run(model, data, budget=budget, **saccade).outputs[0].voice is not None) == asks
    data = structured("qwen3_vl", LARGE)
    for most, asks in ((400, False), (16, True)):
        layer = make_layer(model, min_tokens=4, max_tokens=most)
        found = run(model, data, budget="auto", layer=layer, introspect="auto")
        assert (found.outputs[0].voice is not None) == asks


@pytest.mark.parametrize("family", QWEN)
def test_in_saccades_the_gestalt_says_where(family):
    model, data = tiny_model(family), structured(family, HUGE)
    gaze = {"mode": "saccade", "budget": 300, "gaze": Gaze(overlap="keep")}
    plain, asked = run(model, data, **gaze), run(model, data, introspect="on", **gaze)
    [output] = asked.outputs
    assert output.voice.shape == output.relevance.shape
    assert output.voice.max() == 1
    assert output.voice.min() == 0
    assert asked.glanced_counts[0] > 0
    assert asked.used_counts == plain.used_counts
    assert asked.kept[0][1].tolist() != plain.kept[0][1].tolist()


@pytest.fixture(name="lengths")
def count_lengths(monkeypatch):
    """The number of tokens of each pass of a language model; a hook would be an obstacle to reading on."""
    lengths: list[int] = []

    def count(model):
        language = type(model.model.language_model)
        forward = language.forward

        def counting(self, *args, **kwargs):
            lengths.append(kwargs["inputs_embeds"].shape[1])
            return forward(self, *args, **kwargs)

        monkeypatch.setattr(language, "forward", counting)
        return lengths

    return count


def ask(model, selector, data, overlap="keep", **changes):
    settings = {"mode": "saccade", "budget": 300, "gaze": Gaze(overlap=overlap), "introspect": "on", **changes}
    session = Session(open_family(model), selector, Settings(on_error="raise", **settings))
    return session.generate({**data, "max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False})


@pytest.mark.parametrize("family", QWEN)
@pytest.mark.parametrize("name", ["arr-coc-untrained", "own-attention"])
@torch.no_grad()
def test_the_gestalt_is_not_read_twice(family, name, lengths, monkeypatch):
    model, data = tiny_model(family), structured(family, HUGE)
    selector = make_layer(model) if name == "arr-coc-untrained" else create_selector(name)
    passes = lengths(model)
    once = ask(model, selector, data)
    whole = once.inputs["input_ids"].shape[1]
    text = len(data["input_ids"][0]) - 768  # all but the picture
    gestalt, second = passes[0] - text, passes[1]
    passes.clear()
    monkeypatch.setattr("arr_coc.prompting.saccade.open_cache", lambda family: None)
    twice = ask(model, selector, data)
    assert passes[:2] == [gestalt + text, whole]
    assert second == whole - gestalt - 5  # without what comes before the question: four words and a marker
    assert (once.glanced_counts, twice.glanced_counts) == ([0], [gestalt])
    assert torch.equal(once.generated, twice.generated)
    assert once.kept[0][1].tolist() == twice.kept[0][1].tolist()


@torch.no_grad()
def test_a_conversation_begins_with_what_was_read_to_choose(lengths):
    model, data = tiny_model("qwen3_vl"), structured("qwen3_vl", HUGE)
    selector, passes = make_layer(model), lengths(model)
    encoded = Encodings()
    encoded.prefix = Prefix()
    first = ask(model, selector, data, encoded=encoded)
    alone = list(passes[:2])
    assert first.glanced_counts == [0]
    assert torch.equal(first.generated, ask(model, selector, data).generated)
    passes.clear()
    again = ask(model, selector, data, encoded=encoded)
    assert passes[0] == alone[1]  # the same question: what the model said is remembered
    assert again.glanced_counts == [0]
    assert torch.equal(first.generated, again.generated)
    passes.clear()
    other = {**data, "input_ids": data["input_ids"].clone()}
    other["input_ids"][0, -2] += 1
    another = ask(model, selector, other, encoded=encoded)
    assert passes[0] == alone[0]  # asked again, beside what the conversation holds
    assert passes[1] == alone[1]
    assert another.glanced_counts[0] > 0
    assert torch.equal(another.generated, ask(model, selector, other).generated)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"overlap": "drop"}, "saccades take the place of some of the gestalt"),
        ({"gaze": Gaze(compress="merge")}, "the question decides what is merged"),
        ({"introspect": 1}, "later layers have read nothing"),
    ],
)
@torch.no_grad()
def test_it_is_read_again_where_it_may_have_changed(changes, why, lengths):
    model, data = tiny_model("qwen3_vl"), structured("qwen3_vl", HUGE)
    passes = lengths(model)
    run = ask(model, make_layer(model), data, **changes)
    assert run.inputs["input_ids"].shape[1] in passes[:2], why
    assert run.glanced_counts[0] > 0


def test_only_so_many_layers_are_read():
    model, data = tiny_model("qwen3_vl"), structured("qwen3_vl", LARGE)
    for depth, layers in ((1, [0]), (2, [0, 1]), (99, None)):
        [output] = run(model, data, introspect=depth).outputs
        torch.testing.assert_close(output.voice, hear(attended(model, data, layers)[0]))
    ran: list[int] = []
    handles = [
        layer.register_forward_hook(lambda *_, number=number: ran.append(number))
        for number, layer in enumerate(model.model.language_model.layers)
    ]
    gaze = {"mode": "saccade", "budget": 300, "gaze": Gaze(overlap="keep")}
    run(model, inputs_for("qwen3_vl", HUGE), introspect=1, **gaze)
    run(model, data, introspect=2)
    for handle in handles:
        handle.remove()
    assert ran == [0, 0, 1]
    found = run(model, data, introspect=1)
    assert found.processed(3) == [32, 20, 20]
    assert found.split(1)[0].processed(3) == [32, 20, 20]
    assert run(model, data, introspect="on").processed(3) == [32, 32, 32]


def test_the_layer_says_itself_unless_the_call_does():
    model, data = tiny_model("qwen3_vl"), structured("qwen3_vl", LARGE)
    layer = make_layer(model, introspect="on")
    assert run(model, data, layer=layer).outputs[0].voice is not None
    assert run(model, data, layer=layer, introspect="off").outputs[0].voice is None
    voice = prepare(model, data, layer, budget=20).outputs[0].voice
    with torch.no_grad(), attach(model, make_layer(model), budget=20, introspect="on", on_error="raise") as attached:
        model(**data)
    assert torch.equal(attached.output[0].voice, voice)


@torch.no_grad()
def test_saved_layers_keep_their_choice_and_older_ones_start_as_new(tmp_path):
    model, data = tiny_model("qwen3_vl"), structured("qwen3_vl", LARGE)
    layer = make_layer(model, introspect=2)
    layer.balancer.following.add_(0.5)
    layer.save_pretrained(tmp_path)
    again = ARRCOCLayer.from_pretrained(tmp_path)
    assert again.default_introspect == 2
    assert torch.equal(again.balancer.following, layer.balancer.following)
    assert run(model, data, layer=again).kept[0][1].tolist() == run(model, data, layer=layer).kept[0][1].tolist()

    from safetensors.torch import load_file, save_file

    state = load_file(tmp_path / "model.safetensors")
    old = {name: value for name, value in state.items() if name not in ARRCOCLayer.added}
    assert len(old) == len(state) - 8
    save_file(old, tmp_path / "model.safetensors")
    opened = ARRCOCLayer.from_pretrained(tmp_path)
    assert torch.equal(opened.balancer.following, make_layer(model).balancer.following)
    assert not opened.balancer.trust.weight.any()
    assert not opened.steering.correction[-1].weight.any()


def test_answers_teach_how_far_to_follow():
    model, data = tiny_model("qwen3_vl"), structured("qwen3_vl", LARGE)
    layer = make_layer(model).train()
    session = Session(open_family(model), layer, Settings(budget=20, on_error="raise", introspect="on"))
    logits = session.forward(data).result.logits
    logits.square().mean().backward()
    assert layer.balancer.following.grad.abs().min() > 0 or layer.balancer.following.grad[:2].abs().min() > 0
    assert layer.balancer.trust.weight.grad.abs().sum() > 0


def test_what_cannot_be_is_said_in_one_line():
    model, data = tiny_model("qwen2_vl"), inputs_for("qwen2_vl", LARGE)
    layer = make_layer(model)
    for wrong, said in ((0, "at least 1 layer"), ("yes", "'on', 'off' or a number"), (True, "a number of layers")):
        with pytest.raises(ValueError, match=said):
            prepare(model, data, layer, introspect=wrong)
        with pytest.raises(ValueError, match=said):
            ARRCOCConfig(hidden_size=8, introspect=wrong)
    for name in ("grid", "crop", "downsample", "pixelprune"):
        with pytest.raises(ValueError, match=f"'{name}' does not ask the model where it looks; drop introspect='on'"):
            prepare(model, data, create_selector(name), introspect="on")
        prepare(model, data, create_selector(name), introspect="auto")
    with attach(model, create_selector("fastv"), introspect=3), pytest.raises(ValueError, match="drop introspect=3"):
        model(**data)
    with pytest.raises(ValueError, match="'own-attention' only asks the model"):
        prepare(model, data, create_selector("own-attention"), introspect="off")
    for harmless in ("auto", "off"):
        prepare(model, data, create_selector("grid"), introspect=harmless)
    weighed = {"mode": "weight", "budget": 20}
    with pytest.raises(ValueError, match="mode 'weight' reads all tokens, so the model is not asked"):
        prepare(model, data, layer, introspect="on", **weighed)
    for harmless in ("auto", "off", None):
        assert prepare(model, data, make_layer(model, introspect="on"), introspect=harmless, **weighed).outputs
    words = {"query": [torch.tensor([20, 21])], "budget": 10}
    with pytest.raises(ValueError, match="the prompt's own question; drop `query`; or use introspect='off'"):
        prepare(model, data, layer, introspect="on", **words)
    assert prepare(model, data, layer, introspect="auto", **words).outputs[0].voice is None
    near = replace_layers(model, ["sliding_attention", "full_attention", "full_attention"])
    with pytest.raises(ValueError, match="layers of sliding_attention"):
        prepare(near, data, layer, introspect="on", budget=10)
    assert prepare(near, data, layer, introspect="auto", budget=10).outputs[0].voice is None
    mixed = replace_layers(model, ["linear_attention", "full_attention", "full_attention"])
    with pytest.raises(ValueError, match="must read as far as layer 2, the first that sees a whole picture, got 1"):
        prepare(mixed, data, layer, introspect=1, budget=10)


def replace_layers(model, kinds):
    model.config.text_config.layer_types = kinds
    return model


def test_the_layer_refuses_attention_of_another_shape():
    layer = ARRCOCLayer(ARRCOCConfig(hidden_size=8))
    tokens, words = torch.randn(2, 12, 8), torch.randn(2, 3, 8)
    with pytest.raises(ValueError, match=r"`attended` must have shape \[2, 12\], got \(2, 3, 4\)"):
        layer(tokens, words, grid=(3, 4), attended=torch.rand(2, 3, 4))
    with pytest.raises(ValueError, match=r"NaN|finite"):
        layer(tokens, words, grid=(3, 4), attended=torch.full((2, 12), torch.nan))


OPEN = (
    "what is this?", "what do you see?", "what is unusual?", "describe the picture", "what is shown here?",
    "tell me about this image", "is there anything interesting?", "what does this picture show?",
)  # fmt: skip


@pytest.mark.slow
@torch.no_grad()
def test_on_noise_the_model_looks_nowhere_and_on_a_picture_somewhere():
    vlm = ARRCOCQwen.from_pretrained(budget=9, introspect="on")
    pictures = [each for seed in (0, 1) for each in (noise(seed, 384, 384), splatter(seed, 384))]
    for question in OPEN:
        for picture in pictures:
            found = vlm.inspect(picture[0].mul(255).byte().permute(1, 2, 0).numpy(), question)
            assert found.strategy == "grid"
            assert "nor does the model itself look at one" in found.reason
    for seed in range(4):
        scene = make_example("scenes", split_seed("test", seed), None, (384, 384))
        asked = make_example("void", split_seed("test", seed), "void_read", (384, 384))
        assert vlm.inspect(scene.picture, scene.question).strategy == "relevance"
        assert vlm.inspect(scene.picture, OPEN[0]).strategy == "relevance"
        assert vlm.inspect(asked.picture, asked.question).strategy == "relevance"


@torch.no_grad()
def test_queries_with_and_without_attention_go_through_the_layer_apart():
    from arr_coc import VisualQuery

    generator = torch.Generator().manual_seed(0)
    layer = ARRCOCLayer(ARRCOCConfig(hidden_size=8)).eval()
    bare = [
        VisualQuery(torch.randn(12, 8, generator=generator), (1, 3, 4), torch.randn(3, 8, generator=generator))
        for _ in range(3)
    ]
    queries = [bare[0], replace(bare[1], attended=torch.rand(12, generator=generator)), bare[2]]
    together = layer.select(queries, 4)
    for query, selection in zip(queries, together, strict=True):
        [alone] = layer.select([query], 4)
        assert torch.equal(alone.indices, selection.indices)
        assert (selection.output.voice is None) == (query.attended is None)


def test_even_attention_points_nowhere_on_any_grid():
    for cells in (1, 2, 4, 5, 23, 24, 144, 1024):
        assert focus_of(torch.ones(1, cells)).abs() < 1e-6
        assert cells < 4 or focus_of(torch.eye(cells)[:1]) > 1


def test_any_whole_number_is_a_number_of_layers():
    assert ARRCOCConfig(hidden_size=8, introspect=np.int64(3)).introspect == 3
    with pytest.raises(ValueError, match="'auto', 'on', 'off' or a number of layers"):
        ARRCOCConfig(hidden_size=8, introspect=torch.tensor([1, 2]))


@torch.no_grad()
def test_what_was_read_to_choose_is_kept_no_longer_than_it_serves():
    model, data = tiny_model("qwen3_vl"), structured("qwen3_vl", HUGE)
    layer, gaze = make_layer(model), {"mode": "saccade", "budget": 300, "gaze": Gaze(overlap="keep")}
    assert run(model, data, layer=layer, introspect="on", **gaze).begun is None
    assert ask(model, layer, data).begun is None
    session = Session(open_family(model), layer, Settings(on_error="raise", introspect="on", **gaze))
    kept = session.prepare(data, reads_on=True)
    assert kept.begun.nbytes > 0


@torch.no_grad()
def test_a_selector_is_compared_with_and_without():
    assert split_name("arr-coc@saccade@asked") == ("arr-coc", "@saccade@asked")
    assert split_name("arr-coc@asked@saccade@wrong") == ("arr-coc", "@asked@saccade@wrong")
    model = tiny_model("qwen3_vl")
    by_name = {each.name: each for each in open_contenders(["arr-coc-untrained@asked", "arr-coc-untrained"], model)}
    assert by_name["arr-coc-untrained@asked"].introspect == "on"
    assert by_name["arr-coc-untrained"].introspect is None
    with pytest.raises(ValueError, match="grid does not ask the model, or always does"):
        open_contenders(["grid@asked"], model)


@pytest.mark.slow
@torch.no_grad()
def test_the_embedded_model_is_asked_by_every_entry():
    from importlib.resources import files

    picture, question = str(files("arr_coc") / "assets" / "examples" / "shapes.png"), "what does the purple text say?"
    vlm = ARRCOCQwen.from_pretrained(budget=8)
    plain = vlm.answer(picture, question)
    asked = vlm.answer(picture, question, introspect="on")
    assert asked.text == plain.text == "WZZTC"
    assert plain.output.voice is None
    assert asked.output.voice.max() == 1
    looked = vlm.inspect(picture, question, introspect="on")
    assert torch.equal(looked.output.voice, asked.output.voice)
    for wrong in (0, False, ""):
        with pytest.raises(ValueError, match="`introspect` must"):
            vlm.answer(picture, question, introspect=wrong)
    [many] = vlm.answer_many([(picture, question)], introspect="on")
    assert many.kept[0][1].tolist() == asked.kept[0][1].tolist()
    always = ARRCOCQwen(vlm.model, vlm.processor, vlm.selector, budget=8, introspect="auto")
    assert always.answer(picture, question).kept[0][1].tolist() == asked.kept[0][1].tolist()
    everything = ARRCOCQwen(vlm.model, vlm.processor, vlm.selector, introspect="on").answer(
        picture, question, mode="full"
    )
    assert everything.text == "WZZTC"
    assert everything.tokens.used == everything.tokens.full
    result = CliRunner().invoke(app, ["ask", picture, question, "--budget", "8", "--introspect", "6"])
    assert "WZZTC" in result.output
    assert "by where the model itself looks" in " ".join(result.output.split())
    result = CliRunner().invoke(app, ["look", picture, question, "--json", "--introspect", "sometimes"])
    assert result.exit_code == 2
    assert "must be 'auto', 'on', 'off' or a number of layers, got 'sometimes'" in " ".join(result.output.split())
