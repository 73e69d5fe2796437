"""Learning from answers: four estimators learn, the negative control does not; draws, labels, budgets, LoRA."""

import itertools
import json
import math
import os
import signal
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from toy_base import CHAT, toy_base, toy_batch
from typer.testing import CliRunner

from arr_coc import ARRCOCConfig, ARRCOCLayer, ARRCOCQwen, ChatTokens, load_processor
from arr_coc.cli import app
from arr_coc.config import EMBEDDED_SELECTOR as SELECTOR
from arr_coc.data.example import Example
from arr_coc.data.worlds import make_example
from arr_coc.inference.load import load_model
from arr_coc.training.answers import AnswersTask, answer_losses, make_batch
from arr_coc.training.config import TrainConfig
from arr_coc.training.estimators import ESTIMATORS, EstimatingSelector, gumbel_top_k, log_chance_of
from arr_coc.training.schedule import BudgetPlan
from arr_coc.training.trainer import train

pytestmark = pytest.mark.slow  # quick ones of each folder run in the fast suite

ONE = "0.0625"  # of sixteen tokens


def make_task(layer, base, estimator, chat=CHAT, budget=ONE, steps=1, **settings):
    config = TrainConfig(["scenes"], "runs", "answers", estimator=estimator, budget=budget, steps=steps, **settings)
    return AnswersTask(layer, base, chat, config)


@pytest.fixture(scope="module", name="toy")
def make_toy():
    return toy_base()


@pytest.fixture(scope="module", name="held")
def make_held():
    return toy_batch(128, 10**6)


def misled(toy):
    """A layer that looks at what stands out, and hardly at what is asked."""
    layer = ARRCOCLayer(ARRCOCConfig.for_model(toy))
    with torch.no_grad():
        layer.balancer.gain.zero_()
        layer.balancer.lean.zero_()
        layer.balancer.neutral[:3] = torch.tensor([1.0, 1.0, -3.0])
        layer.balancer.neutral[4] = -6.0
    return layer


def accuracy(toy, layer, batch, budget=ONE):
    """Of the layer as it is deployed."""
    with torch.no_grad():
        return make_task(layer, toy, "none", budget=budget)(batch)[1]["accuracy"].item()


def test_the_toy_is_right_if_and_only_if_it_reads_the_asked_thing(toy, held):
    assert accuracy(toy, ARRCOCLayer(ARRCOCConfig.for_model(toy)), held) > 0.95
    assert accuracy(toy, misled(toy), held) < 0.35
    assert accuracy(toy, misled(toy), held, "1.0") < 0.5  # all of it is too much


@pytest.mark.parametrize(
    "estimator",
    [pytest.param(name, marks=() if name == "gate" else pytest.mark.slow) for name in ESTIMATORS],
)
def test_four_estimators_learn_from_answers_and_none_does_not(estimator, toy, held):
    torch.manual_seed(0)
    layer, steps = misled(toy), 40
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    falling = "0.25>0.0625" if estimator in ("gate", "gumbel") else ONE
    task = make_task(layer, toy, estimator, budget=falling, steps=steps)
    optimizer = torch.optim.AdamW(task.parameters(), lr=0.02)
    first = accuracy(toy, layer, held)
    for step in range(steps):
        losses, _ = task(toy_batch(48, step)._replace(step=step, draw=7777 + step))
        loss = torch.stack(list(losses.values())).sum()
        assert loss.requires_grad == (estimator != "none")
        if loss.requires_grad:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    last = accuracy(toy, layer, held)
    if estimator == "none":
        assert last == first
        assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    else:
        assert last > first + 0.2


def test_indices_alone_carry_no_gradient_and_a_gate_changes_nothing_but_that(toy, held):
    """`topk(...).indices` and `gather` tell the scorer nothing; the gate's value is exactly 1."""
    layer = misled(toy)
    none = make_task(layer, toy, "none")(held)[0]["answer"]
    gate = make_task(layer, toy, "gate")(held)[0]["answer"]
    assert not none.requires_grad
    assert torch.equal(none, gate.detach())
    gate.backward()
    assert layer.participatory.agree.grad.abs().sum() > 0
    assert all(weight.grad is None for weight in toy.parameters())


def test_chances_of_all_draws_add_up_to_one_and_drawing_agrees_with_them():
    logits = torch.tensor([0.3, -1.0, 1.2, 0.0])
    chances = {
        order: log_chance_of(logits, torch.tensor(order)).exp().item() for order in itertools.permutations(range(4), 2)
    }
    assert sum(chances.values()) == pytest.approx(1.0, abs=1e-5)
    generator = torch.Generator().manual_seed(0)
    drawn = [tuple(gumbel_top_k(logits, 2, generator)[0].tolist()) for _ in range(4000)]
    for order, chance in chances.items():
        assert drawn.count(order) / 4000 == pytest.approx(chance, abs=4 * math.sqrt(chance / 4000))


@pytest.mark.parametrize("estimator", ["gumbel", "reinforce"])
def test_a_cold_draw_is_the_most_relevant_and_a_warm_one_is_not(estimator, toy, held):
    layer = ARRCOCLayer(ARRCOCConfig.for_model(toy))
    tokens = toy.model.get_image_features(held.inputs["pixel_values"][:64], None).pooler_output
    from arr_coc import VisualQuery

    query = VisualQuery(tokens, (1, 4, 4), tokens[3:4], picture=torch.rand(1, 3, 32, 32))
    relevance = layer.select([query], 4)[0].output.relevance.flatten()
    best = relevance.topk(4).indices.sort().values
    for temperature, same in ((1e-4, True), (100.0, False)):
        generator = torch.Generator().manual_seed(1)
        [chosen] = EstimatingSelector(layer, estimator, temperature, generator).select([query], 4)
        assert torch.equal(chosen.indices, best) == same
        assert chosen.gate is None if estimator == "reinforce" else (chosen.gate == 1).all()


def test_only_the_answer_and_its_end_are_learned():
    vlm = ARRCOCQwen.from_pretrained(selector="arr-coc-untrained")
    small, wide = (Image.new("RGB", size).copy for size in ((128, 128), (192, 128)))
    examples = [Example("what color is the star?", small, answers=("red", "crimson")),
                Example("what is in the picture?", wide, answers=("a red star, a blue ring",))]  # fmt: skip
    batch = make_batch(vlm.processor, examples, 0, 0, "cpu")
    for row, example in enumerate(examples):
        learned = batch.inputs["labels"][row]
        text = vlm.processor.tokenizer.decode(learned[learned != -100])
        assert text == f"{example.answer}<|im_end|>"


def test_the_loss_of_an_answer_is_its_own_and_right_means_all_of_it():
    labels = torch.tensor([[-100, 3, 4, -100], [-100, -100, 5, -100]])
    logits = torch.zeros(2, 4, 8)
    logits[0, 0, 3] = logits[0, 1, 4] = logits[1, 1, 5] = 20.0
    loss, right = answer_losses(logits, labels)
    assert loss.tolist() == pytest.approx([0, 0], abs=1e-4)
    assert right.tolist() == [1, 1]
    logits[0, 1, 4] = 0.0
    loss, right = answer_losses(logits, labels)
    assert loss[0].item() == pytest.approx(math.log(8) / 2, abs=1e-4)
    assert right.tolist() == [0, 1]


def test_budgets_fall_stay_or_are_drawn():
    falling = BudgetPlan.parse("1.0>0.25")
    assert [round(falling.at(step, 5), 3) for step in range(5)] == [1.0, 0.707, 0.5, 0.354, 0.25]
    assert BudgetPlan.parse("0.25").at(3, 9) == 0.25
    assert BudgetPlan.parse("auto").at(3, 9) == "auto"
    drawn = [BudgetPlan.parse("0.06-0.5").at(step, 100, seed=1) for step in range(100)]
    assert len(set(drawn)) == 100
    assert min(drawn) >= 0.06
    assert max(drawn) <= 0.5
    for wrong in ("0", "2.0", "a", "0.5>x", "0.1-0.2-0.3"):
        with pytest.raises(ValueError, match=r"`budget` must be as 0\.25"):
            BudgetPlan.parse(wrong)


@pytest.mark.slow
def test_thrift_makes_auto_ask_for_fewer_tokens(toy, held):
    layer = ARRCOCLayer(ARRCOCConfig.for_model(toy, min_tokens=2, max_tokens=12))
    with torch.no_grad():
        layer.allocator.offset.fill_(-0.1)  # asks for more than it needs
    task = make_task(layer, toy, "gate", budget="auto", steps=10, thrift=5.0)
    optimizer = torch.optim.AdamW(task.parameters(), lr=0.02)
    spent = []
    for _ in range(10):
        losses, measures = task(held)
        optimizer.zero_grad()
        losses["thrift"].backward()
        optimizer.step()
        spent.append(measures["tokens"].item())
    assert spent[-1] < spent[0]


def small(monkeypatch):
    monkeypatch.setattr("arr_coc.data.sources.world_size", lambda world, number: (128, 128))


def run(out, say=None, **settings):
    settings = {"steps": 4, "batch_size": 4, "save_every": 2, "log_every": 1, "samples": 20} | settings
    return train(TrainConfig(["scenes/color"], out, "answers", **settings), say)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["gate", "reinforce"])
def test_a_run_on_the_embedded_model_is_resumed_exactly(estimator, tmp_path, monkeypatch):
    small(monkeypatch)
    whole = run(tmp_path / "whole", estimator=estimator, budget="0.5-0.9")

    def stop(step, facts):
        if step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts", estimator=estimator, budget="0.5-0.9", say=stop)
    parts = run(tmp_path / "parts", estimator=estimator, budget="0.5-0.9", resume=True)
    one, other = (load_file(path / "model.safetensors") for path in (whole, parts))
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    untrained = ARRCOCLayer(ARRCOCLayer.from_pretrained(whole).config).state_dict()
    assert any((value != untrained[name]).any() for name, value in one.items())
    about = json.loads((parts / "run.json").read_text())
    assert (about["stage"], about["estimator"], about["budget"]) == ("answers", estimator, "0.5-0.9")


@pytest.mark.slow
def test_lora_learns_beside_the_selector_and_is_saved_as_an_adapter(tmp_path, monkeypatch):
    pytest.importorskip("peft")
    small(monkeypatch)
    out = run(tmp_path / "out", lora=2)
    assert json.loads((out / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == "embedded"
    checkpoint = out / "checkpoint-000002"
    assert (checkpoint / "adapter" / "adapter_config.json").is_file()  # it answers with its LoRA, too
    weights = load_file(out / "adapter" / "adapter_model.safetensors")
    assert any("lora_B" in name and value.abs().sum() > 0 for name, value in weights.items())
    plain = ARRCOCQwen.from_pretrained().model.state_dict().keys()
    for directory in (out, checkpoint):
        assert any("lora_B" in name for name in ARRCOCQwen.from_pretrained(directory).model.state_dict().keys() - plain)


@pytest.mark.slow
def test_last_layers_learn_and_the_base_is_saved_with_them(tmp_path, monkeypatch):
    small(monkeypatch)
    out = run(tmp_path / "out", last_layers=1)
    before, after = (ARRCOCQwen.from_pretrained(base).model.state_dict() for base in (None, out / "base"))
    changed = {name for name, value in after.items() if not torch.equal(value, before[name].to(value.dtype))}
    last = max(int(name.split("layers.")[1].split(".")[0]) for name in after if "language_model.layers" in name)
    assert changed
    assert all(f"language_model.layers.{last}." in name for name in changed)


def test_a_base_in_bfloat16_trains_a_selector_in_float32(tmp_path, monkeypatch):
    small(monkeypatch)
    weights = load_file(run(tmp_path / "out", dtype="bfloat16") / "model.safetensors")
    assert {value.dtype for value in weights.values() if value.is_floating_point()} == {torch.float32}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("--data", "scenes", "--estimator", "magic"),
            "`estimator` must be gate, gumbel, reinforce, soft or none, got 'magic'",
        ),
        (("--data", "scenes", "--budget", "lots"), "`budget` must be as 0.25"),
        (("--data", "scenes", "--reward", "money"), "`reward` must be likelihood or accuracy, got 'money'"),
        (("--data", "nowhere"), "'nowhere' is neither a world"),
        (("--data", "scenes", "--dtype", "half"), "`dtype` must be float32 or bfloat16, got 'half'"),
        (("--data", "scenes", "--last-layers", "99"), "`last_layers` must be at most 6 for this model, got 99"),
        (("--data", "scenes", "--last-layers", "1", "--lora", "2"), "choose one"),
        (("--data", "some.json"), "some.json is not named as VQAv2's questions"),
    ],
)
def test_a_mistake_is_one_line(arguments, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("some.json").write_text("{}")
    given = ["train", "--stage", "answers", *arguments, "--out", "out"]
    result = CliRunner(env={"COLUMNS": "1000"}).invoke(app, given)
    assert result.exit_code == 2
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(lines) == 1
    assert said in lines[0]


@pytest.mark.parametrize("estimator", ["gate", "gumbel", "none"])
def test_answers_teach_through_saccades_too(estimator):
    model, processor = load_model("embedded", dtype=torch.float32).requires_grad_(False), load_processor("embedded")
    examples = [make_example("scenes", 5), make_example("pages", 6)]
    layer = ARRCOCLayer(ARRCOCConfig.for_model(model))
    chat = ChatTokens.from_tokenizer(processor.tokenizer)
    task = make_task(layer, model, estimator, chat, budget="0.5", mode="saccade")
    losses, measures = task(make_batch(processor, examples, 0, 1, "cpu"))
    assert 0 < measures["tokens"] <= 0.5
    assert losses["answer"].requires_grad == (estimator != "none")
    if estimator != "none":
        losses["answer"].backward()
        assert layer.participatory.agree.grad.abs().sum() > 0


@pytest.mark.slow
def test_a_compressor_learns_alone_where_the_choice_does_not(tmp_path):
    settings = {"mode": "saccade", "compress": "conv", "estimator": "none", "samples": 4, "budget": "0.3"}
    done = train(
        TrainConfig(["scenes"], tmp_path / "run", "answers", start=SELECTOR, steps=2, batch_size=2, **settings)
    )
    before, after = ARRCOCLayer.from_pretrained(SELECTOR).state_dict(), ARRCOCLayer.from_pretrained(done).state_dict()
    moved = {name for name, value in after.items() if name not in before or not torch.equal(value, before[name])}
    assert moved
    assert all(name.startswith("compressor.") for name in moved)
    assert after["compressor.widen.0.weight"].abs().sum() > 0


def test_what_reads_all_tokens_cannot_be_taught_through_saccades():
    with pytest.raises(ValueError, match="saccade can be trained with gate, gumbel or none, got estimator 'soft'"):
        TrainConfig(["scenes"], "out", "answers", mode="saccade", estimator="soft")
