"""Learning where to look from boxes: a whole small run, interrupted, resumed, in two processes, on bad data."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from typer.testing import CliRunner

from arr_coc import ARRCOCConfig, ARRCOCLayer, ARRCOCQwen
from arr_coc.cli import app
from arr_coc.data import sources
from arr_coc.data.example import Example, open_file
from arr_coc.data.gaze_maps import read_gaze_maps
from arr_coc.data.worlds import make_example, split_seed
from arr_coc.evaluation.answers import answer_examples
from arr_coc.evaluation.metrics import overlap
from arr_coc.training import checkpoints
from arr_coc.training.config import TrainConfig
from arr_coc.training.feature_cache import Batch, Features, features_key, make_target, weights_key, write_features
from arr_coc.training.losses import proxy_losses, total
from arr_coc.training.proxy import ProxyTask, judge_batch
from arr_coc.training.schedule import Schedule, Source
from arr_coc.training.trainer import train

DATA = ("scenes/color", "scenes/read")
SAMPLES = 24


def small_source(name, count, seed=0, split="train"):
    """Samples as the package would open them, but small."""
    world, _, kind = name.partition("/")
    for index in range(count):
        size = ((192, 192), (192, 128))[index % 2]
        example = make_example(world, split_seed(split, seed + index), kind or None, size)
        yield replace(example, distractors=())


@pytest.fixture(scope="module", name="cache")
def make_cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def use_small_sources(monkeypatch):
    monkeypatch.setattr("arr_coc.training.proxy.open_places", small_source)


@pytest.fixture(scope="module", name="vlm")
def open_embedded():
    return ARRCOCQwen.from_pretrained(selector="arr-coc-untrained")


def run(out, cache, steps=12, say=None, **settings):
    settings = {"batch_size": 8, "save_every": 4, "log_every": 2, "warm_up": 5} | settings
    return train(TrainConfig(DATA, out, steps=steps, samples=SAMPLES, cache=cache, **settings), say)


def read_log(directory):
    return [json.loads(line) for line in (Path(directory) / "log.jsonl").read_text().splitlines()]


def weights(directory):
    return load_file(Path(directory) / "model.safetensors")


def same(one, other):
    return all(torch.equal(value, other[name]) for name, value in one.items())


class Stop:
    """Presses Ctrl-C at a step."""

    def __init__(self, step):
        self.step = step

    def __call__(self, step, facts):
        if step == self.step:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.slow
def test_an_interrupted_run_goes_on_exactly(cache, tmp_path):
    whole = run(tmp_path / "whole", cache, 60, save_every=20)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts", cache, 60, save_every=20, say=Stop(30))
    assert not (tmp_path / "parts" / "model.safetensors").exists()
    assert checkpoints.list_checkpoints(tmp_path / "parts")[-1].name == "checkpoint-000030"
    parts = run(tmp_path / "parts", cache, 60, save_every=20, resume=True)
    assert same(weights(whole), weights(parts))
    assert [row["step"] for row in read_log(parts)] == [1, *range(2, 61, 2)]
    about = json.loads((parts / "run.json").read_text())
    assert {"seed", "steps", "data", "base", "revision", "torch", "arr_coc"} <= about.keys()


@pytest.mark.slow
def test_three_hundred_steps_learn(cache, tmp_path, vlm):
    whole = run(tmp_path / "whole", cache, 300, save_every=100)
    rows = read_log(whole)
    assert [row["step"] for row in rows] == [1, *range(2, 301, 2)]
    assert rows[-1]["loss"] < 0.5 * rows[0]["loss"]

    # on samples it did not learn from it looks better than before, and can be opened like any selector
    folder = tmp_path / "held"
    write_features(folder, vlm.model, vlm.processor, vlm.selector, small_source("scenes/read", 40, split="validation"))
    held = Features(folder)
    learned = ARRCOCLayer.from_pretrained(whole)
    assert learned.config.base_model_name_or_path == "embedded"
    found = {name: measure(layer, held) for name, layer in (("before", vlm.selector), ("after", learned))}
    assert found["after"] > 1.2 * found["before"]


def measure(layer, features):
    source = Source(features, 8, 0)
    values = []
    for place in range(source.length):
        batch = features.batch(source.numbers(place))
        with torch.no_grad():
            relevance = judge_batch(layer, batch).balance.relevance.flatten(1)
        values.append(overlap(relevance, batch.target > 0.5))
    return torch.cat(values).mean().item()


def test_the_layer_learns_the_same_in_autocast():
    generator = torch.Generator().manual_seed(0)
    tokens, texture, words = (
        torch.rand(shape, generator=generator) for shape in ((2, 12, 64), (2, 40, 3, 4), (2, 5, 64))
    )
    target = torch.eye(12)[:2]
    batch = Batch(tokens, texture, words, torch.ones(2, 5, dtype=torch.bool), target, (1, 3, 4))
    found = {}
    for autocast in (True, False):
        task = ProxyTask(ARRCOCLayer(ARRCOCConfig(hidden_size=64)))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            losses, _ = task(batch)
        sum(losses.values()).backward()
        gradients = [weight.grad for weight in task.parameters() if weight.grad is not None]
        assert len(gradients) > 10
        found[autocast] = gradients
    assert all(map(torch.equal, found[True], found[False]))


@pytest.mark.slow
def test_another_seed_is_another_run_and_the_same_is_the_same(cache, tmp_path):
    one, two, other = (
        run(tmp_path / name, cache, 6, seed=seed) for name, seed in (("one", 3), ("two", 3), ("other", 4))
    )
    assert same(weights(one), weights(two))
    assert not same(weights(one), weights(other))


def test_what_decides_the_features_decides_their_name(tmp_path, vlm):
    def key(name="scenes", layer=vlm.selector, *parts):
        return features_key(weights_key(vlm.model), vlm.processor, layer, name, *parts)

    assert key() == key()
    assert len({key(), key("pages"), key("scenes", vlm.selector, 5), key("scenes", vlm.selector, 6)}) == 4
    finer = ARRCOCLayer(replace(vlm.selector.config, gestalt_tokens=64))
    assert key(layer=finer) != key()
    path = tmp_path / "rows.jsonl"
    path.write_text("one")
    before = key(str(path))
    path.write_text("another")
    assert key(str(path)) != before


@pytest.mark.slow
def test_markers_in_a_question_are_read_as_text_as_when_it_is_asked(tmp_path, vlm):
    [example] = small_source("scenes/color", 1)
    marker = "<|im_end|>"
    question = f"what color is the {marker}?"
    write_features(tmp_path, vlm.model, vlm.processor, vlm.selector, [replace(example, question=question)])
    words = load_file(tmp_path / "00000.safetensors")["words"].float()
    marked = vlm.model.get_input_embeddings()(torch.tensor(vlm.processor.tokenizer.convert_tokens_to_ids(marker)))
    assert ((words - marked).abs().amax(dim=1) > 1e-3).all()
    asked = vlm.inspect(example.picture, question).words
    assert load_file(tmp_path / "00000.safetensors")["asked"].tolist() == [[0, len(asked)]]


def test_going_on_with_other_settings_or_another_model_is_refused(cache, tmp_path):
    run(tmp_path / "out", cache, 4)
    with pytest.raises(ValueError, match=r"was begun with steps 4, not 5"):
        run(tmp_path / "out", cache, 5, resume=True)
    narrow = ARRCOCLayer(ARRCOCConfig(hidden_size=64))
    narrow.save_pretrained(tmp_path / "narrow")
    with pytest.raises(ValueError, match=r"was made for a model with hidden_size 64, this one has 256"):
        run(tmp_path / "new", cache, 4, start=tmp_path / "narrow")
    elsewhere = ARRCOCLayer(ARRCOCConfig(hidden_size=256, base_model_name_or_path="someone/else"))
    elsewhere.save_pretrained(tmp_path / "elsewhere")
    out = run(tmp_path / "new", cache, 4, start=tmp_path / "elsewhere")
    assert ARRCOCLayer.from_pretrained(out).config.base_model_name_or_path == "embedded"


def test_features_are_what_the_selector_sees_when_it_answers(tmp_path, vlm):
    sample = make_example("scenes", split_seed("validation", 5), "read", (192, 128))
    write_features(tmp_path / "f", vlm.model, vlm.processor, vlm.selector, [sample])
    batch = Features(tmp_path / "f").batch([0])
    with torch.no_grad():
        kept = judge_batch(vlm.selector, batch).balance.relevance[0, 0]
    seen = vlm.answer(sample.picture, sample.question, budget=0.25).output.relevance[0, 0]
    assert torch.allclose(kept, seen, atol=5e-3)
    assert not torch.allclose(kept, kept.mean().expand_as(kept), atol=5e-3)
    assert batch.target.sum() > 0


def test_features_that_are_there_are_not_computed_again(tmp_path, vlm):
    opened = []

    def example(name, number):
        picture = Image.new("RGB", (128, 128))
        boxes = ((0, 0, 1, 1),)
        return Example("red", lambda: opened.append(name) or picture, f"{name}#{number}", boxes=boxes, picture_id=name)

    for _ in range(2):
        examples = [example(name, number) for name in "abc" for number in range(2)]
        write_features(tmp_path / "f", vlm.model, vlm.processor, vlm.selector, examples)
    assert opened == ["a", "b", "c"]  # one picture is encoded once for all that is asked about it
    assert [place.id for place in Features(tmp_path / "f").places] == ["a#0", "a#1", "b#0", "b#1", "c#0", "c#1"]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2])
def test_two_processes_give_the_weights_of_one_with_the_doubled_batch(processes, cache, tmp_path):
    whole = run(tmp_path / "one", cache, 6, batch_size=8)
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import test_training as here
from arr_coc.training import proxy
proxy.open_places = here.small_source
here.run({str(tmp_path / "two")!r}, {str(cache)!r}, 6, batch_size=4)
"""
    script = tmp_path / "script.py"
    script.write_text(code)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    done = subprocess.run(
        [*command, str(script)], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=300
    )
    assert done.returncode == 0, done.stderr[:8000]
    found, wanted = weights(tmp_path / "two"), weights(whole)
    untrained = ARRCOCLayer(ARRCOCLayer.from_pretrained(whole).config).state_dict()
    for name, value in wanted.items():
        moved = (value - untrained[name]).abs().max()
        assert (found[name] - value).abs().max() <= 0.02 * moved + 1e-6, name
    assert any((value != untrained[name]).any() for name, value in wanted.items())


@pytest.mark.slow
def test_a_loss_that_is_no_number_ends_the_run_and_leaves_the_last_good_checkpoint(cache, tmp_path, monkeypatch):
    import arr_coc.training.proxy as proxy

    losses, calls = proxy.proxy_losses, []

    def break_later(logits, target):
        calls.append(1)
        found = losses(logits, target)
        return found | {"bce": found["bce"] * (float("nan") if len(calls) > 6 else 1.0)}

    monkeypatch.setattr(proxy, "proxy_losses", break_later)
    with pytest.raises(ValueError, match=r"step 7 is not finite \(.*bce nan.*checkpoint-000004 is the last good"):
        run(tmp_path / "out", cache)
    kept = checkpoints.list_checkpoints(tmp_path / "out")
    assert [path.name for path in kept] == ["checkpoint-000004"]
    assert all(value.isfinite().all() for value in weights(kept[0]).values())


@pytest.mark.slow
def test_a_full_disk_leaves_the_previous_checkpoint(cache, tmp_path, monkeypatch):
    save, calls = checkpoints.save_file, []

    def fill(content, path):
        calls.append(1)
        save(content, path)
        if len(calls) == 2:
            Path(path).write_bytes(b"half")
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "save_file", fill)
    with pytest.raises(OSError, match="No space left"):
        run(tmp_path / "out", cache)
    assert [path.name for path in (tmp_path / "out").glob("*checkpoint*")] == ["checkpoint-000004"]
    monkeypatch.setattr(checkpoints, "save_file", save)
    assert same(weights(run(tmp_path / "out", cache, resume=True)), weights(run(tmp_path / "again", cache)))


@pytest.mark.slow
def test_a_run_is_not_overwritten_by_accident(cache, tmp_path):
    run(tmp_path / "out", cache, 4)
    with pytest.raises(ValueError, match="holds a run that was begun"):
        run(tmp_path / "out", cache, 4)


def test_batches_are_full_of_one_grid_and_every_question_is_seen(cache, tmp_path, vlm):
    write_features(tmp_path / "f", vlm.model, vlm.processor, vlm.selector, small_source("scenes/color", 21))
    features = Features(tmp_path / "f")
    source = Source(features, 4, 0)
    assert source.length == 11 // 4 + 10 // 4
    seen = set()
    for place in range(5 * source.length):
        numbers = source.numbers(place)
        assert len(numbers) == 4
        assert len({features.grids[number] for number in numbers}) == 1
        seen |= set(numbers)
    assert seen == set(range(21))
    assert len(Source(features, 64, 0).numbers(0)) == 64  # more than there are: some come twice
    schedule = Schedule([source, source], [1, 0], 5, 0)
    assert [schedule.at(step)[1] for step in range(5)] == [source.numbers(step) for step in range(5)]


@pytest.mark.parametrize(("missing", "refused"), [(1, False), (3, True)])
def test_missing_pictures_are_named_and_too_many_refused(missing, refused, tmp_path, vlm, caplog):
    def example(number):
        path = tmp_path / f"{number}.png"
        if number >= missing:
            Image.new("RGB", (128, 128)).save(path)
        return Example("red", partial(open_file, path), str(number), boxes=((0, 0, 1, 1),), picture_id=str(path))

    examples = [example(number) for number in range(20)]
    if refused:
        with pytest.raises(ValueError, match=r"3 of 20 pictures cannot be read, the first is .*0\.png"):
            write_features(tmp_path / "f", vlm.model, vlm.processor, vlm.selector, examples)
        with pytest.raises(ValueError, match="not complete"):
            Features(tmp_path / "f")
    else:
        write_features(tmp_path / "f", vlm.model, vlm.processor, vlm.selector, examples)
        assert "1 of 20 pictures cannot be read" in caplog.text
        assert len(Features(tmp_path / "f")) == 19


def test_gaze_is_a_map_and_not_a_box(tmp_path, vlm):
    Image.new("RGB", (128, 128)).save(tmp_path / "a.png")
    gaze = Image.new("L", (64, 64))
    gaze.paste(200, (0, 0, 32, 32))
    gaze.save(tmp_path / "map.png")
    (tmp_path / "g.jsonl").write_text(json.dumps({"image": "a.png", "question": "what is it?", "map": "map.png"}))
    write_features(tmp_path / "f", vlm.model, vlm.processor, vlm.selector, read_gaze_maps(tmp_path / "g.jsonl"))
    target = Features(tmp_path / "f").batch([0]).target.view(4, 4)
    assert target[:2, :2].min() == 1
    assert target[2:].max() == 0


def test_a_trained_selector_answers(cache, tmp_path, vlm):
    out = run(tmp_path / "out", cache, 4)
    trained = ARRCOCQwen.from_pretrained(out)
    sample = make_example("scenes", split_seed("validation", 9), "color", (192, 192))
    [answer] = answer_examples(trained.model, trained.processor, [sample], trained.selector, 0.5)
    assert answer


def command(*arguments):
    return CliRunner(env={"COLUMNS": "1000"}).invoke(app, ["train", *map(str, arguments)])


def test_the_command_trains_stops_and_goes_on(cache, tmp_path, monkeypatch):
    settings = ("--data", "scenes/color", "--out", tmp_path / "out", "--steps", 8, "--batch", 4, "--samples", SAMPLES)
    settings += ("--cache", cache, "--save-every", 100)
    rate_at = TrainConfig.rate_at

    def interrupt(config, step):
        if step == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return rate_at(config, step)

    monkeypatch.setattr(TrainConfig, "rate_at", interrupt)
    stopped = command(*settings)
    assert stopped.exit_code == 130
    assert "--resume continues" in stopped.stderr
    assert [path.name for path in checkpoints.list_checkpoints(tmp_path / "out")] == ["checkpoint-000006"]
    monkeypatch.setattr(TrainConfig, "rate_at", rate_at)
    done = command(*settings, "--resume")
    assert done.exit_code == 0, done.stderr
    assert done.stdout == f"selector  {tmp_path / 'out'}\n"
    assert ARRCOCLayer.from_pretrained(tmp_path / "out").config.hidden_size == 256


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--data", "nowhere"), "'nowhere' is neither a world (camouflage, crowds, ends, forms, lines, needles, "),
        (("--data", "scenes/title"), "scenes asks no 'title'"),
        (("--data", "empty"), "empty has 0 files named instances"),
        (("--data", "odd.jsonl"), "odd.jsonl has lines of a; needed are image, expression, box"),
        (("--data", "broken.jsonl"), "broken.jsonl is not JSON lines"),
        (("--data", "late.jsonl"), "late.jsonl, line 2 has no 'box'"),
        (("--data", "pixels.jsonl"), "pixels.jsonl, line 1: a box is four shares of the picture's sides"),
        (("--data", "bare"), "no picture of bare has a box"),
        (("--data", "scenes", "--device", "banana"), "`device` must be cpu or cuda, got 'banana'"),
        (("--data", "scenes", "--steps", "0"), "`steps` must be at least 1, got 0"),
        (("--data", "scenes", "--rate", "3"), "`rate` must lie between 0 and 1, got 3.0"),
        (
            ("--data", "scenes", "--stage", "seven"),
            "stage` must be proxy, distill, answers, hard or trials, got 'seven'",
        ),
        (("--data", "scenes", "--base", "nowhere"), "there is no directory 'nowhere'"),
        (("--data", "scenes", "--start", "nowhere/at/all"), "nowhere/at/all"),
    ],
)
def test_a_mistake_is_one_line(arguments, said, tmp_path, monkeypatch):
    monkeypatch.setattr("arr_coc.training.proxy.open_places", sources.open_places)
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("bare").mkdir()
    Path("bare/instances.json").write_text(json.dumps({"images": [], "annotations": [], "categories": []}))
    Path("pixels.jsonl").write_text(json.dumps({"image": "a.png", "expression": "dog", "box": [0, 0, 32, 32]}))
    Path("odd.jsonl").write_text('{"a": 1}\n')
    Path("broken.jsonl").write_text("not json\n")
    line = {"image": "a.png", "expression": "dog", "box": [0, 0, 1, 1]}
    Path("late.jsonl").write_text(json.dumps(line) + "\n" + json.dumps({"image": "a.png", "expression": "cat"}) + "\n")
    result = command(*arguments, "--out", "out", "--cache", "cache")
    assert result.exit_code == 2
    lines = [one for one in result.stderr.splitlines() if one.strip()]
    assert len(lines) == 1
    assert said in lines[0]


def asked(boxes, **others):
    return Example("dog", Image.new("RGB", (64, 64)).copy, boxes=boxes, **others)


def test_the_target_orders_boxes_surroundings_nothing_and_other_things():
    near, far = (0.0, 0.0, 0.25, 0.25), (0.75, 0.75, 1.0, 1.0)
    target = make_target(asked((near,), distractors=(near, far)), (1, 8, 8))
    assert (target[:2, :2] == 1).all()
    levels = [target[0, 0], target[2, 2], target[4, 4], target[7, 7]]
    assert levels == sorted(levels, reverse=True)
    assert len(set(map(float, levels))) == 4
    assert (target > 0.5).sum() == 4
    both = make_target(asked((near,), lookalikes=(near, far)), (1, 8, 8))
    assert (both[:2, :2] == 1).all()
    assert target[7, 7] < both[7, 7] < both[5, 5]  # less than nothing in particular, more than what distracts
    assert make_target(asked((), distractors=(near, far)), (1, 8, 8)).sum() == 0  # not there: nothing matters


def test_losses_ask_for_the_order_and_the_place():
    apart = {"distractors": ((0.75, 0.75, 1, 1),), "lookalikes": ((0.75, 0, 1, 0.25),)}
    target = make_target(asked(((0, 0, 0.5, 0.5),), **apart), (1, 8, 8)).view(1, -1)
    good = 20 * (target - 0.5)
    bad = {
        "flat": torch.zeros_like(good), "elsewhere": good.flip(1), "other things": torch.where(target == 0, 3, good),
        "what is alike": torch.where((target > 0.05) & (target < 0.15), 12, good),
        "nothing beside": torch.where((target > 0.4) & (target < 0.5), -8, good),
    }  # fmt: skip
    best = total(proxy_losses(good, target))
    for name, logits in bad.items():
        assert total(proxy_losses(logits, target)) > best, name
    absent = torch.zeros_like(target)
    assert total(proxy_losses(good - 20, absent)) < total(proxy_losses(good, absent))
