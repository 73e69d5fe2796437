import importlib.util
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from arr_coc.evaluation.shapes import SHAPES
from arr_coc.families import language_graph, language_passes, room
from arr_coc.families.encoder_graph import MOST_PATCHES

ROOT = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(name="load")
def make_loader(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))

    def load(name):
        spec = importlib.util.spec_from_file_location(f"{name}_benchmark", ROOT / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.mark.slow
def test_the_layer_benchmark_runs_and_writes_its_rows(load, monkeypatch, tmp_path, capsys):
    benchmark = load("layer")
    monkeypatch.setitem(benchmark.GRIDS, "cpu", [(2, 3), (4, 4)])
    monkeypatch.setitem(benchmark.VISION_2B, "depth", 1)
    monkeypatch.setitem(benchmark.VISION_2B, "deepstack_visual_indexes", [0])
    benchmark.main(device="cpu", out=tmp_path / "rows.json", repeats=1, encoder=True, graphs=True)
    assert "of the encoder" in capsys.readouterr().out
    written = json.loads((tmp_path / "rows.json").read_text())
    stages = {row["stage"] for row in written["rows"]}
    assert stages >= {"texture_core", "texture_full", "scoring", "balancing", "allocation", "layer", "encoder"}
    assert [path.name for path in tmp_path.iterdir()] == ["rows.json"]


def test_committed_results_meet_the_bars():
    rows = json.loads((ROOT / "results" / "layer-h200.json").read_text())["rows"]

    def one(stage, grid):
        return next(row for row in rows if (row["stage"], row["grid"], row["batch"]) == (stage, list(grid), 1))

    assert one("texture_core", (32, 32))["median_ms"] <= 5
    assert one("texture_full", (32, 32))["median_ms"] <= 15
    assert one("texture_full", (32, 32))["peak_mb"] < 160
    assert one("scoring_to_allocation", (32, 32))["median_ms"] <= 1
    assert one("layer", (64, 64))["share_of_encoder"] <= 0.10
    for stage in ("texture_core", "texture_full", "layer"):
        growth = one(stage, (94, 126))["median_ms"] / one(stage, (16, 16))["median_ms"]
        assert growth <= 94 * 126 / 256


@pytest.mark.slow
def test_the_attach_benchmark_runs_and_replaces_what_it_measured_before(load, tmp_path):
    out = tmp_path / "rows.json"
    for _ in range(2):
        load("attach").main(device="cpu", out=out, repeats=1, tiny=True, calls=0, model_name="Qwen3", tokens=48)
    written = json.loads(out.read_text())
    assert [row["kept"] for row in written["rows"]] == ["plain", "full"]
    assert written["attention"] == "sdpa"


@pytest.mark.slow
def test_the_benchmark_of_batches_runs_and_writes_its_rows(load, tmp_path):
    benchmark, out = load("batches"), tmp_path / "rows.json"
    benchmark.main(device="cpu", models="", repeats=1, tiny=True, out=out)
    rows = json.loads(out.read_text())["rows"]
    assert [(row["pictures"], row["from"]) for row in rows] == [(1, "device"), (1, "host"), (2, "device"), (2, "host")]
    assert {row["tokens_per_picture"] for row in rows} == {529}
    assert all(row["pictures_per_second"] > 0 for row in rows)


def test_attaching_costs_little_and_the_cache_falls_as_the_tokens():
    found = json.loads((ROOT / "results" / "attach-h200.json").read_text())
    assert set(found["memory_growth_bytes"].values()) == {0}
    rows = found["rows"]
    models = ["Qwen3-VL-2B", "Qwen3-VL-8B", "Qwen2.5-VL-7B", "Qwen3-VL-8B, layers compiled"]
    assert {row["model"] for row in rows} == set(models)
    for row in rows:
        plain = next(
            one for one in rows if (one["model"], one["tokens"], one["kept"]) == (row["model"], row["tokens"], "plain")
        )
        kept = row["kept"] if isinstance(row["kept"], int) else row["tokens"]
        words = 42  # around the picture
        assert row["cache_bytes"] * (row["tokens"] + words) == plain["cache_bytes"] * (kept + words)
        if row["kept"] == "full" and row["tokens"] >= 4096:
            assert row["first_token_ratio"] <= 1.03


def read_results(name):
    return json.loads((ROOT / "results" / f"{name}-h200.json").read_text())


def test_a_gaze_stops_growing_with_the_picture():
    rows = read_results("gaze")["rows"]
    by = {(row["model"], row["megapixels"], row["method"]): row for row in rows}
    for model in ("Qwen3-VL-2B", "Qwen3-VL-8B", "Qwen2.5-VL-7B"):
        assert {(model, size, "saccade") for size in (1, 4, 12, 50, 200)} <= set(by)
        small, large = (by[model, size, "saccade"] for size in (12, 200))
        assert small["stages_ms"]["tokens"] == large["stages_ms"]["tokens"] == 529
        assert small["texture"]["median_ms"] <= 5
        assert large["texture"]["median_ms"] <= 40
        assert large["first_token"]["median_ms"] <= 1.5 * small["first_token"]["median_ms"]
        assert small["times_downsample"] <= 1.25
        full = by[model, 12, "full"]["first_token"]["median_ms"]
        assert full >= (34 if model == "Qwen3-VL-8B" else 30) * small["first_token"]["median_ms"]
        # at 1 megapixel and up to 50, a smaller picture is faster, as the docs say
        assert all(by[model, size, "saccade"]["times_downsample"] > 1 for size in (1, 4, 12, 50))
    assert by["Qwen3-VL-8B", 12, "saccade"]["first_token"]["median_ms"] <= 40
    assert by["Qwen3-VL-2B", 12, "saccade"]["first_token"]["median_ms"] <= 25


def test_answers_and_further_turns_are_as_fast_as_the_docs_say():
    found = read_results("gaze")
    times = {(row["model"], row["method"], row["tokens"]): row["answer"]["median_ms"] for row in found["answers"]}
    for model, faster in (("Qwen3-VL-8B", 5), ("Qwen3-VL-2B", 4)):
        gaze = times[model, "saccade", 32]
        assert times[model, "full", 32] >= faster * gaze
        assert times[model, "saccade, no graphs", 32] >= 2.5 * gaze
        assert {(model, "saccade", length) for length in (1, 8, 32, 128, 512)} <= set(times)
    append = {row["model"]: row["graphs"]["median_ms"] for row in found["append"]}
    assert append["Qwen3-VL-8B"] <= 12


def test_batches_and_further_questions_are_as_fast_as_the_docs_say():
    rows = {row["pictures"]: row for row in read_results("batches")["rows"]}
    assert all(rows[count]["pictures_per_second"] >= 35 for count in (8, 32))
    found = read_results("questions")
    assert found["ten questions over one"]["saccade"] <= 7
    assert found["ten questions over one"]["prune"] <= 1.6
    assert found["attached over plain"] <= 1.02


def test_kernels_of_stages_are_those_of_the_gaze_and_none_beats_the_machine():
    rows = {row["stage"]: row for row in read_results("limits")["rows"] if row["model"] == "Qwen3-VL-8B"}
    assert all(row["least_ms"] <= row["kernels_ms"] <= row["median_ms"] for row in rows.values())
    whole = rows["the whole gaze"]
    parts = [row for name, row in rows.items() if name not in ("the whole gaze", "a decoded token")]
    for key in ("kernels_ms", "gflop", "least_ms"):
        assert sum(row[key] for row in parts) == pytest.approx(whole[key], rel=0.01)


def test_the_goals_that_are_missed_are_named(load):
    benchmark = load("speed")
    speed = benchmark.read_speed()
    missed = [goal.what for goal in benchmark.goals(speed) if not goal.met]
    process = "answer of a process of the embedded model on two CPU cores, over the time before"
    assert missed == ["100 tokens appended to 600, Qwen3-VL-2B", f"first {process}", f"later {process}"]
    page = (ROOT.parent / "docs" / "performance.md").read_text()
    assert page.count("| **no** |") == len(missed)
    speed.cpu["first"] = 0.7
    assert benchmark.goals_table(speed).count("| **no** |") == len(missed) - 1


def test_repeated_measurements_hold_the_reported_ones():
    repeats, questions = read_results("repeats"), read_results("questions")
    for row in read_results("gaze")["append"]:
        assert row["graphs"]["median_ms"] in [again["median_ms"] for again in repeats["append"][row["model"]]]
    ten = [{mode: row[mode] for mode in ("prune", "saccade")} for row in repeats["ten questions over one"]]
    assert questions["ten questions over one"] in ten
    assert questions["attached over plain"] in [row["ratio"] for row in repeats["attached over plain"]]


def test_pages_show_the_committed_times(load):
    benchmark, fill_page = load("speed"), load("marks").fill_page
    speed, slower = benchmark.read_speed(), benchmark.read_speed()
    for row in slower.rows.values():
        row["first_token"]["median_ms"] *= 2
    for row in slower.batches.values():
        row["pictures_per_second"] /= 2
        row["peak_mb"] *= 2
    for row in slower.limits.values():
        row["kernels_ms"] *= 2
    for row in (*slower.layer.values(), *(row["first_token"] for row in slower.attach.values())):
        row["median_ms"] *= 2
    slower.questions["ten questions over one"]["prune"] *= 2
    slower.questions["attached over plain"] *= 2
    for name, blocks in benchmark.PAGES.items():
        page = (ROOT.parent / name).read_text()
        assert fill_page(page, blocks, speed, "speed") == page, "run `python benchmarks/speed.py`"
        assert fill_page(page, blocks, slower, "speed") != page
    for name in ("limits", "left", "attached", "layer", "attach"):
        block = {name: benchmark.PAGES["docs/performance.md"][name]}
        page = (ROOT.parent / "docs" / "performance.md").read_text()
        assert fill_page(page, block, slower, "speed") != page
    assert benchmark.FIGURE.read_text() == benchmark.draw_answers(speed)
    with pytest.raises(ValueError, match="marks"):
        fill_page("", {"costs": benchmark.costs}, speed, "speed")


def test_the_docs_say_what_is_recorded_and_compute_a_room_as_the_code_does(monkeypatch):
    text = (ROOT.parent / "docs" / "performance.md").read_text()
    graphs = language_graph.LanguageGraphs(torch.nn.Module())
    rooms = ", ".join(map(str, room.ROOMS[:-1]))
    for said in (
        f"steps of {language_passes.STEP} tokens, up to {language_passes.MOST_FIRST}",
        f"room for {rooms} or {room.ROOMS[-1]}",
        f"{graphs.replay.limit} recordings, together",
        f"up to {MOST_PATCHES} patches",
    ):
        assert said in text
    assert list(language_passes.APPENDED) == [1, 32, *range(64, 513, 64)]
    assert "1, 32, or steps of 64 up to 512 tokens" in text
    assert (language_graph.PATIENCE, room.ROOM_SHARE, graphs.replay.limit_bytes) == (2, 1 / 16, 2**30)
    _, (_, _, layers, heads, kv_heads), _, _ = SHAPES["Qwen3-VL-8B"]
    config = SimpleNamespace(
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=128
    )
    monkeypatch.setattr(room, "Room", lambda shape, like: (shape, like.element_size()))
    monkeypatch.setattr(room, "_memory", lambda device: 2**40)
    like = torch.zeros(1, dtype=torch.bfloat16)
    # 529 tokens, 40 of text and the picture's two marks, in steps of 32, with room to go on
    length = -(-(529 + 40 + 2) // language_passes.STEP) * language_passes.STEP + language_passes.SPARE
    shape, size = graphs.rooms.find(config, 1, length, like)
    assert shape[4] == 768
    assert f"{math.prod(shape) * size:,} bytes" in text
    assert f"{math.prod(shape) * size / 2**20:.0f} MiB" in text


def test_the_2b_shape_fits_a_small_gpu_as_the_docs_say():
    found = json.loads((ROOT / "results" / "space-h200.json").read_text())
    assert found["weights_gb"] == round(2 * found["parameters"] / 1e9, 2)
    docs = (ROOT.parent / "docs" / "demo.md").read_text()
    for pixels in (1, 4, 12):
        rows = [row for row in found["rows"] if row["megapixels"] == pixels]
        assert all(row["fits"] and row["reserved_gb"] < found["limit_gb"] for row in rows)
        assert f"| {pixels} | " + " | ".join(f"{row['reserved_gb']:.1f}" for row in rows) + " |" in docs
