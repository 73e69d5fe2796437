"""Settings of a run: refused in one line where they are wrong, and recorded so that a run can go on."""

import json

import pytest

from arr_coc import ARRCOCConfig
from arr_coc.training.config import STAGES, TrainConfig
from arr_coc.training.trainer import check_run

# What `run.json` of a run of each stage says of its settings; `introspect` is new, and None is what older runs had.
LOOP = {"steps", "batch_size", "rate", "warm_up", "seed", "save_every", "log_every"}
PROXY = LOOP | {"stage", "data", "base", "start", "samples", "query_layers", "introspect"}
ANSWERS = PROXY | {
    "estimator", "budget", "reward", "thrift", "lora", "last_layers", "dtype", "mode", "compress",
}  # fmt: skip


def test_the_rate_is_the_stages_unless_it_is_given():
    rates = {stage: TrainConfig(["scenes"], "out", stage, thrift=0.1).highest_rate for stage in STAGES}
    assert rates == {"proxy": 3e-3, "distill": 3e-3, "answers": 1e-3, "hard": 1e-3, "trials": 3e-3}
    assert TrainConfig(["scenes"], "out", rate=0.5).highest_rate == 0.5


@pytest.mark.parametrize(
    ("stage", "keys"), [("proxy", PROXY), ("distill", PROXY), ("answers", ANSWERS), ("hard", ANSWERS)]
)
def test_a_run_records_its_settings_under_the_names_of_older_runs(stage, keys, tmp_path):
    record = TrainConfig(("scenes",), tmp_path, stage, start=tmp_path).record()
    assert record.keys() == keys
    assert json.loads(json.dumps(record)) == record  # so that what was read back can be compared
    assert record["rate"] is not None


def test_a_run_goes_on_with_the_same_settings_only(tmp_path):
    config = TrainConfig(["scenes"], tmp_path, steps=8, resume=True)
    (tmp_path / "run.json").write_text(json.dumps(config.record() | {"torch": "another"}))
    (tmp_path / "checkpoint-000004").mkdir()
    (tmp_path / "checkpoint-000004" / "training.json").write_text('{"step": 4}')
    (tmp_path / "checkpoint-000004" / "config.json").write_text(ARRCOCConfig(hidden_size=8).to_json())
    check_run(config)
    check_run(TrainConfig(["scenes"], tmp_path, steps=8, resume=True, save_every=1, log_every=1))
    with pytest.raises(ValueError, match="was begun with seed 0, not 1; go on with the same"):
        check_run(TrainConfig(["scenes"], tmp_path, steps=8, resume=True, seed=1))
    with pytest.raises(ValueError, match="holds a run that was begun"):
        check_run(TrainConfig(["scenes"], tmp_path, steps=8))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"data": []}, "`data` is empty"),
        ({"stage": "seven"}, "`stage` must be proxy, distill, answers, hard or trials, got 'seven'"),
        ({"estimator": "magic"}, "`estimator` must be gate, gumbel, reinforce, soft or none, got 'magic'"),
        ({"reward": "money"}, "`reward` must be likelihood or accuracy, got 'money'"),
        ({"mode": "weight"}, "`mode` must be prune or saccade, got 'weight'"),
        ({"dtype": "half"}, "`dtype` must be float32 or bfloat16, got 'half'"),
        ({"device": "banana"}, "`device` must be cpu or cuda, got 'banana'"),
        ({"budget": "lots"}, r"`budget` must be as 0\.25"),
        ({"steps": 0}, "`steps` must be at least 1, got 0"),
        ({"log_every": 0}, "`log_every` must be at least 1, got 0"),
        ({"thrift": -1.0}, r"`thrift` must be at least 0, got -1\.0"),
        ({"rate": 3.0}, r"`rate` must lie between 0 and 1, got 3\.0"),
        ({"lora": 2, "last_layers": 1}, "choose one"),
        ({"compress": "conv"}, "`compress` belongs to mode saccade, got mode prune"),
        ({"compress": "zip", "mode": "saccade"}, "`compress` must be one of"),
        ({"mode": "saccade", "estimator": "reinforce"}, "saccade can be trained with gate, gumbel or none"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(settings, said):
    with pytest.raises(ValueError, match=said) as error:
        TrainConfig(**{"data": ["scenes"], "out": "out"} | settings)
    assert "\n" not in str(error.value)


def test_one_source_is_a_list_too():
    with pytest.raises(TypeError, match="must be a list of sources, got the text 'scenes'"):
        TrainConfig("scenes", "out")
