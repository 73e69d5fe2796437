import dataclasses
import json

import pytest

from arr_coc import ARRCOCConfig, ARRCOCLayer, __version__
from arr_coc.config import check_budget, check_grid, check_prompt_budget


def test_round_trips_through_json_and_records_version_and_base():
    config = ARRCOCConfig(hidden_size=96, budget="auto", base_model_name_or_path="Qwen/Qwen3-VL-2B-Instruct", seed=7)
    assert ARRCOCConfig.from_json(config.to_json()) == config
    written = json.loads(config.to_json())
    assert written["arr_coc_version"] == __version__
    assert written["base_model_name_or_path"] == "Qwen/Qwen3-VL-2B-Instruct"
    assert written["rank"] == config.rank


def test_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ARRCOCConfig(hidden_size=64).budget = 3


@pytest.mark.parametrize(
    ("values", "error", "says"),
    [
        ({"hidden_size": 0}, ValueError, "`hidden_size` must be at least 1, got 0"),
        ({"hidden_size": 2.0}, TypeError, "`hidden_size` must be an int, got float"),
        ({"hidden_size": True}, TypeError, "`hidden_size` must be an int, got bool"),
        ({"channels": "all"}, ValueError, "one of core, full, got 'all'"),
        ({"rank": -1}, ValueError, "`rank` must be at least 1"),
        ({"budget": 0}, ValueError, "at least 1 token, got 0"),
        ({"budget": -4}, ValueError, "at least 1 token, got -4"),
        ({"budget": 2.0}, ValueError, "use an int for a number of tokens"),
        ({"budget": float("nan")}, ValueError, r"in \(0, 1\] as a ratio, got nan"),
        ({"budget": "most"}, ValueError, "or 'auto', got 'most'"),
        ({"budget": None}, TypeError, "got NoneType"),
        ({"budget": {"total": 512}}, TypeError, "that of one picture here, got {'total': 512}; give a total to"),
        ({"min_tokens": 500}, ValueError, "500 > 400; raise `max_tokens`"),
        ({"base_model_name_or_path": 3}, TypeError, "must be a string or None, got int"),
        ({"base_model_edition": "2"}, TypeError, "`base_model_edition` must be an int, got str"),
        ({"base_model_edition": 0}, ValueError, "`base_model_edition` must be at least 1, got 0"),
        ({"seed": -1}, ValueError, "`seed` must be at least 0"),
    ],
)
def test_what_is_wrong_is_refused_with_the_fix(values, error, says):
    with pytest.raises(error, match=says):
        ARRCOCConfig(**{"hidden_size": 64, **values})


def test_unknown_keys_name_the_version_that_wrote_them():
    text = json.dumps({"hidden_size": 8, "colour": 1, "arr_coc_version": "9.9"})
    with pytest.raises(ValueError, match=r"unknown configuration keys colour: written by arr-coc 9\.9"):
        ARRCOCConfig.from_json(text)


@pytest.mark.parametrize("text", ["{", "[1]", "{}"])
def test_what_is_no_configuration_is_refused(text):
    with pytest.raises(ValueError, match="configuration"):
        ARRCOCConfig.from_json(text)


def test_the_budget_of_a_prompt_may_be_a_total():
    for budget in (3, 0.5, "auto", {"total": 512}):
        assert check_prompt_budget(budget) == budget


@pytest.mark.parametrize(
    ("budget", "error", "says"),
    [
        ({}, ValueError, "must have the one key 'total', as {'total': 512}, got {}"),
        ({"sum": 4}, ValueError, "got {'sum': 4}"),
        ({"total": 4, "each": 2}, ValueError, "the one key 'total'"),
        ({"total": 0}, ValueError, "at least 1 token, got 0"),
        ({"total": 0.5}, TypeError, "must be a whole number of tokens, got 0.5"),
        ({"total": True}, TypeError, "must be a whole number of tokens, got True"),
        ({"total": "auto"}, TypeError, "got 'auto'"),
        ([512], TypeError, "or 'auto', got list"),
        (0, ValueError, "at least 1 token, got 0"),
    ],
)
def test_a_wrong_total_is_refused_in_one_line(budget, error, says):
    with pytest.raises(error, match=says) as caught:
        check_prompt_budget(budget)
    assert "\n" not in str(caught.value)


def test_budget_keeps_its_kind():
    assert isinstance(check_budget(1), int)
    assert isinstance(check_budget(1.0), float)
    with pytest.raises(TypeError):
        check_budget(True)


@pytest.mark.parametrize("grid", [(0, 3), (3,), (1, 2, 3, 4), (2.0, 3), (True, 2)])
def test_bad_grids_are_refused(grid):
    with pytest.raises(ValueError, match="`grid` must be"):
        check_grid(grid)


@pytest.mark.parametrize("channels", ["core", "full"])
@pytest.mark.parametrize("width", [256, 896, 1536, 2048, 2560, 3584, 4096, 5120, 8192])
def test_layer_has_50_to_300_thousand_parameters_at_any_width(width, channels):
    assert 50_000 <= ARRCOCLayer(ARRCOCConfig(hidden_size=width, channels=channels)).num_parameters() <= 300_000
