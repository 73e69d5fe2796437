"""Stage `distill`, and stage `proxy` of a selector that asks the model where it looks."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from arr_coc import ARRCOCLayer, ARRCOCQwen
from arr_coc.cli import app
from arr_coc.data.sources import open_pictures
from arr_coc.data.worlds import make_example, split_seed
from arr_coc.knowing import hear
from arr_coc.training.config import TrainConfig
from arr_coc.training.distill import DistillTask
from arr_coc.training.feature_cache import Features, write_features
from arr_coc.training.losses import distill_losses, total
from arr_coc.training.proxy import judge_batch
from arr_coc.training.teacher import Teacher
from arr_coc.training.trainer import train

EXAMPLES = 16


def small_pictures(name, count, seed=0, split="train"):
    for index in range(count):
        yield make_example(name, split_seed(split, seed + index), None, ((192, 192), (192, 128))[index % 2])


@pytest.fixture(autouse=True)
def use_small_sources(monkeypatch):
    for name in ("open_pictures", "open_places"):
        monkeypatch.setattr(f"arr_coc.training.proxy.{name}", small_pictures)


@pytest.fixture(scope="module", name="vlm")
def open_embedded():
    return ARRCOCQwen.from_pretrained(selector="arr-coc-untrained")


def eager_attention(vlm, example):
    """What the last token, and the mean of the words, pay the picture in eager attention over all tokens `[h, w]`."""
    from arr_coc.inference.messages import encode_text, make_inputs, make_messages

    model, processor = vlm.model, vlm.processor
    inputs = make_inputs(processor, [make_messages(example.picture, example.question)], "cpu", torch.float32)
    ids = inputs["input_ids"][0].tolist()
    words = encode_text(processor, example.question)
    [begin] = [place for place in range(len(ids)) if ids[place : place + len(words)] == words]
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            layers = model(**inputs, output_attentions=True).attentions
    finally:
        model.set_attn_implementation(before)
    paid = torch.stack(layers).mean(dim=(0, 2))[0]
    both = paid[-1] + paid[begin : begin + len(words)].mean(dim=0)
    rows, columns = (inputs["image_grid_thw"][0, 1:] // 2).tolist()
    return both[inputs["input_ids"][0] == model.config.image_token_id].view(rows, columns)


def test_the_teacher_says_what_eager_attention_says(vlm):
    example = make_example("scenes", split_seed("train", 3), None, (192, 160))
    [looked] = Teacher(vlm.model, vlm.processor, whole=True, pooled="off")(example.picture, [example.question])
    wanted = hear(eager_attention(vlm, example)[None, None])[0, 0]
    torch.testing.assert_close(looked.whole, wanted, atol=2e-4, rtol=1e-3)
    assert looked.pooled is None


def test_several_questions_about_one_picture_are_as_alone(vlm):
    example = make_example("scenes", split_seed("train", 3), None, (192, 160))
    questions = [example.question, "how many?", "what is the text at the left, and what color has it?"] * 4
    teacher = Teacher(vlm.model, vlm.processor, whole=True, pooled="on")
    together = teacher(example.picture, questions)
    assert len(together) == len(questions)
    for question, looked in list(zip(questions, together, strict=True))[-3:]:
        [alone] = teacher(example.picture, [question])
        torch.testing.assert_close(looked.whole, alone.whole, atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(looked.pooled, alone.pooled, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("introspect", ["off", "on", 2])
def test_what_was_seen_is_kept_with_what_was_asked(introspect, vlm, tmp_path):
    layer = ARRCOCLayer(replace(vlm.selector.config, introspect=introspect)).eval()
    examples = list(small_pictures("scenes", 4))
    teacher = Teacher(vlm.model, vlm.processor, True, layer.default_introspect)
    write_features(tmp_path, vlm.model, vlm.processor, layer, examples, teacher=teacher)
    features = Features(tmp_path)
    for number, example in enumerate(examples):
        batch = features.batch([number])
        [looked] = teacher(example.picture, [example.question])
        torch.testing.assert_close(batch.target[0], looked.whole.flatten(), atol=2e-3, rtol=0)
        assert (batch.attended is None) == (introspect == "off")
        if batch.attended is None:
            continue
        torch.testing.assert_close(batch.attended[0].sqrt(), looked.pooled.flatten(), atol=2e-3, rtol=0)
        answer = ARRCOCQwen(vlm.model, vlm.processor, layer).inspect(example.picture, example.question, mode="prune")
        relevance = judge_batch(layer, batch).balance.relevance
        torch.testing.assert_close(relevance, answer.output.relevance, atol=0.02, rtol=0)  # half precision, bytes


def test_the_loss_asks_for_the_order_and_the_map():
    target, sharpness = torch.rand(3, 20, generator=torch.Generator().manual_seed(0)), torch.tensor(8.0)
    far = target.roll(1, dims=1)
    losses = [float(total(distill_losses(map, target, sharpness))) for map in (target, (target + far) / 2, far)]
    assert losses == sorted(losses)
    halved, same = (distill_losses(map, target, sharpness)["map"] for map in (0.5 * target, target))
    assert halved > same == 0
    own = distill_losses(target.square().log() / 8, target, sharpness)["follow"]  # softmax of this is the share itself
    assert own.abs() < 1e-5
    nothing = distill_losses(torch.zeros(3, 20), torch.zeros(3, 20), sharpness)
    assert all(torch.isfinite(value) for value in nothing.values())


@pytest.mark.slow
def test_a_run_learns_where_the_model_looks(vlm, tmp_path):
    config = TrainConfig(
        ["scenes"], tmp_path / "run", stage="distill", steps=150, batch_size=8, samples=64, warm_up=10,
        cache=tmp_path / "cache",
    )  # fmt: skip
    place = train(config)
    layer = ARRCOCLayer.from_pretrained(place)
    assert layer.default_introspect == "off"
    held, untrained = tmp_path / "held", ARRCOCLayer(vlm.selector.config).eval()
    teacher = Teacher(vlm.model, vlm.processor, whole=True, pooled="off")
    write_features(
        held, vlm.model, vlm.processor, layer, small_pictures("scenes", 40, split="validation"), teacher=teacher
    )
    features, found = Features(held), {}
    for name, each in (("trained", layer), ("untrained", untrained)):
        with torch.no_grad():
            tasks = [DistillTask(each)(features.batch([number])) for number in range(len(features))]
        found[name] = sum(float(measures["agreement"]) for _, measures in tasks) / len(tasks)
    assert found["trained"] > found["untrained"] + 0.1
    assert json.loads((place / "run.json").read_text())["stage"] == "distill"


def test_boxes_teach_a_selector_that_asks_the_model(tmp_path):
    config = TrainConfig(
        ["scenes"], tmp_path / "run", steps=3, batch_size=4, samples=EXAMPLES, introspect="on", cache=tmp_path / "c"
    )
    layer = ARRCOCLayer.from_pretrained(train(config))
    assert layer.default_introspect == "on"
    new = ARRCOCLayer(layer.config)
    assert not torch.equal(layer.balancer.following, new.balancer.following)
    assert not torch.equal(layer.balancer.trust.weight, new.balancer.trust.weight)


def test_a_run_of_an_older_version_goes_on(tmp_path):
    from safetensors.torch import load_file, save_file

    settings = {"batch_size": 4, "samples": EXAMPLES, "cache": tmp_path / "cache", "save_every": 2}
    train(TrainConfig(["scenes"], tmp_path / "run", steps=4, **settings))
    [*_, last] = sorted((tmp_path / "run").glob("checkpoint-*"))
    (tmp_path / "run" / "config.json").unlink()
    for path in (tmp_path / "run" / "model.safetensors", last / "model.safetensors"):
        path.unlink(missing_ok=True)
    [state] = last.glob("*.safetensors")
    old = {name: value for name, value in load_file(state).items() if not name.endswith(ARRCOCLayer.added)}
    assert len(old) < len(load_file(state))
    save_file(old, state)
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    del facts["introspect"]
    (tmp_path / "run" / "run.json").write_text(json.dumps({**facts, "steps": 6}))
    place = train(TrainConfig(["scenes"], tmp_path / "run", steps=6, resume=True, **settings))
    assert torch.equal(ARRCOCLayer.from_pretrained(place).balancer.following, torch.tensor([0.0, 0.0, -3.0]))


def test_any_pictures_with_questions_will_do(tmp_path, monkeypatch):
    Image.new("RGB", (96, 64), "red").save(tmp_path / "a.png")
    rows = [{"image": "a.png", "question": "what is this?"}, {"image": "a.png", "question": "and that?", "x": 1}]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    examples = list(open_pictures(str(tmp_path / "asked.jsonl"), 1))
    assert [example.question for example in examples] == ["what is this?", "and that?"]
    assert {example.picture_id for example in examples} == {str(tmp_path / "a.png")}
    assert not any(example.boxes or example.answers for example in examples)
    monkeypatch.setattr("arr_coc.training.proxy.open_pictures", open_pictures)
    command = ["train", "--stage", "distill", "--data", str(tmp_path / "asked.jsonl"), "--steps", "2", "--batch", "2"]
    place = ["--out", str(tmp_path / "run"), "--cache", str(tmp_path / "cache"), "--introspect", "on"]
    result = CliRunner().invoke(app, [*command, *place])
    assert result.exit_code == 0, result.output
    assert ARRCOCLayer.from_pretrained(tmp_path / "run").default_introspect == "on"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--stage", "distill", "--data", "gaze:scenes"], "only known of whole ones; use scenes"),
        (["--data", "gaze:scenes", "--introspect", "on"], "only known of whole ones; use scenes"),
        (["--stage", "distill", "--data", "scenes", "--introspect", "maybe"], "'off' or a number of layers"),
        (["--stage", "distill", "--data", "nowhere"], "neither a world"),
    ],
)
def test_a_mistake_is_one_line(arguments, said, tmp_path, monkeypatch):
    monkeypatch.setattr("arr_coc.training.proxy.open_pictures", open_pictures)
    result = CliRunner().invoke(app, ["train", "--out", str(tmp_path / "run"), "--steps", "2", *arguments])
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_docs_name_the_stage():
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    assert "--stage distill" in page
