"""Learning what a question needs by trials: only the steering learns, it tells questions apart, and a price counts."""

import json
import random

import pytest
import torch
from toy_base import CHAT, SHAPES, SIDE, toy_base, toy_batch
from typer.testing import CliRunner

from arr_coc import ARRCOCConfig, ARRCOCLayer
from arr_coc.cli import app
from arr_coc.config import EMBEDDED_SELECTOR as SELECTOR
from arr_coc.families.family import open_family
from arr_coc.gaze.loop import LEEWAY
from arr_coc.inference.session import Session
from arr_coc.prompting.settings import Settings
from arr_coc.training import trials
from arr_coc.training.config import TrainConfig
from arr_coc.training.trials import Trials, TrialsTask, try_questions

TOTAL = SIDE**2
SETTINGS = Settings(chat=CHAT, on_error="raise")
PRICE = 0.2


@pytest.fixture(scope="module", name="toy")
def make_toy():
    return toy_base()


@pytest.fixture(autouse=True)
def larger_first_look(monkeypatch):
    monkeypatch.setattr(trials, "FIRST_SHARE", 0.25)  # of sixteen tokens: 1 to 16


def make_layer(toy):
    return ARRCOCLayer(ARRCOCConfig.for_model(toy)).eval()


def collect(layer, toy, count=12):
    parts = [try_questions(layer, toy, toy_batch(32, seed)._replace(draw=seed), SETTINGS) for seed in range(count)]
    return Trials(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def learn(toy, price=PRICE, steps=300, table=None):
    torch.manual_seed(0)
    layer = make_layer(toy).requires_grad_(False)
    table = table or collect(layer, toy)
    task, rng = TrialsTask(layer, price), random.Random(0)
    optimizer = torch.optim.AdamW([each for each in task.parameters() if each.requires_grad], lr=0.005)
    for _ in range(steps):
        losses, _ = task(table.rows([rng.randrange(len(table.facts)) for _ in range(128)], "cpu"))
        optimizer.zero_grad()
        sum(losses.values()).backward()
        optimizer.step()
    return layer


def count_read(toy, layer, batch, leeway=LEEWAY):
    """Tokens that the layer keeps of each picture where it may choose how many."""
    settings = Settings(chat=CHAT, on_error="raise", budget=0.25, leeway=leeway)
    with torch.no_grad():
        return torch.tensor(Session(open_family(toy), layer, settings).prepare(batch.inputs).used_counts)


def is_even(inputs):
    """Whether the shape that is asked for has an even number."""
    ids = inputs["input_ids"]
    return ids[ids >= SHAPES].view(len(ids), -1)[:, -1] % 2 == 0


def answers_by_question(few):
    """A model that is right about some questions with few tokens, and about the others with many."""

    def read(base, inputs):
        count = torch.tensor([len(part) for part in inputs["mm_encoder_outputs"]["image"].pooler_output])
        right = torch.where(few(inputs), count <= 2, count >= 8).float()
        return 10 * (1 - right), right

    return read


def test_an_untaught_layer_keeps_what_the_budget_says(toy):
    layer, batch = make_layer(toy), toy_batch(8, 1)
    assert count_read(toy, layer, batch).tolist() == count_read(toy, layer, batch, 1.0).tolist() == [TOTAL // 4] * 8


def test_trials_are_what_happened(toy):
    layer, batch = make_layer(toy), toy_batch(6, 3)
    table = try_questions(layer, toy, batch, SETTINGS)
    assert table.moves.shape == (6, trials.COUNT, 3)
    detail = torch.sigmoid(table.moves[..., 0])
    expected = (TOTAL * 0.25 * LEEWAY ** (2 * detail - 1)).round().clamp(1, TOTAL) / TOTAL
    assert torch.equal(table.share, expected)
    assert ((table.chance >= 0) & (table.chance <= 1)).all()
    assert table.usual[:, 0].tolist() == pytest.approx([0.5] * 6, abs=1e-5)
    again = try_questions(layer, toy, batch, SETTINGS)
    assert all(torch.equal(one, other) for one, other in zip(table, again, strict=True))
    other = try_questions(layer, toy, batch._replace(draw=99), SETTINGS)
    assert not torch.equal(table.moves, other.moves)


@pytest.mark.slow
def test_it_learns_which_questions_need_few_tokens(toy, monkeypatch):
    monkeypatch.setattr(trials, "read_answers", answers_by_question(is_even))
    held = toy_batch(64, 10**6)
    read, few = count_read(toy, learn(toy), held).float(), is_even(held.inputs)
    assert read[few].mean() < 3
    assert read[~few].mean() > 7
    # control: if questions do not tell which, they cannot be told apart
    torch.manual_seed(1)
    guess = answers_by_question(lambda inputs: torch.rand(len(inputs["input_ids"])) < 0.5)
    monkeypatch.setattr(trials, "read_answers", guess)
    blind = count_read(toy, learn(toy), held).float()
    assert (blind[few].mean() - blind[~few].mean()).abs() < 2


@pytest.mark.slow
def test_tokens_have_a_price(toy, monkeypatch):
    monkeypatch.setattr(trials, "read_answers", lambda base, inputs: (torch.zeros(32), torch.ones(32)))
    held, table = toy_batch(16, 10**6), collect(make_layer(toy), toy, 2)
    cheap, dear = (count_read(toy, learn(toy, price, table=table), held).float().mean() for price in (1e-9, 1.0))
    assert dear < 2 < cheap


@pytest.mark.slow
def test_reading_less_is_learned_from_answers_where_more_misleads(toy):
    assert count_read(toy, learn(toy, price=1e-6), toy_batch(64, 10**6)).float().mean() < TOTAL / 8


@pytest.mark.slow
def test_only_the_steering_learns_and_budgets_of_a_call_stay(toy):
    layer, held = learn(toy, steps=5), toy_batch(8, 10**6)
    fresh = make_layer(toy)
    before = fresh.state_dict()
    changed = {name.split(".")[0] for name, value in layer.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"steering"}
    with torch.no_grad():
        first, second = (
            Session(open_family(toy), each, Settings(chat=CHAT, on_error="raise", budget=5)).prepare(held.inputs)
            for each in (layer, fresh)
        )
    assert [cells.tolist() for _, cells in first.kept] == [cells.tolist() for _, cells in second.kept]


@pytest.mark.slow
def test_the_command_tries_once_and_continues(tmp_path, monkeypatch):
    monkeypatch.setenv("ARR_COC_CACHE", str(tmp_path / "cache"))
    tried = []
    attempt = trials.try_questions
    monkeypatch.setattr(trials, "try_questions", lambda *given, **named: tried.append(1) or attempt(*given, **named))
    command = [
        *("train", "--stage", "trials", "--data", "scenes/color", "--samples", "3", "--start", SELECTOR),
        *("--batch", "2", "--thrift", "0.5", "--out"),
    ]
    first = CliRunner().invoke(app, [*command, str(tmp_path / "one"), "--steps", "4", "--save-every", "2"])
    assert first.exit_code == 0, first.output
    assert len(tried) == 1
    record = json.loads((tmp_path / "one" / "run.json").read_text())
    assert (record["stage"], record["thrift"]) == ("trials", 0.5)
    again = CliRunner().invoke(app, [*command, str(tmp_path / "two"), "--steps", "4"])
    assert again.exit_code == 0
    assert len(tried) == 1
    one, two = (ARRCOCLayer.from_pretrained(tmp_path / name).state_dict() for name in ("one", "two"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert one["steering.correction.3.weight"].any()


def test_a_price_is_needed():
    with pytest.raises(ValueError, match="so they need a price; give a `thrift`"):
        TrainConfig(["scenes"], "runs", "trials")
    result = CliRunner().invoke(app, ["train", "--stage", "trials", "--data", "scenes", "--out", "nowhere"])
    assert result.exit_code == 2
    assert "give a `thrift`" in result.stderr
