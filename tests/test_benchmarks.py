import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(name="benchmark")
def load_benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    spec = importlib.util.spec_from_file_location("layer_benchmark", ROOT / "layer.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_layer_benchmark_runs_and_writes_its_rows(benchmark, monkeypatch, tmp_path, capsys):
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
