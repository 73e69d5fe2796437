import json
import pickle

import pytest
import torch
from drawing import random_tokens
from huggingface_hub.errors import EntryNotFoundError
from safetensors.torch import load_file, save_file

from arr_coc import ARRCOCConfig, ARRCOCLayer, __version__
from arr_coc.runtime import hub as saving


def trained_layer():
    layer = ARRCOCLayer(ARRCOCConfig(hidden_size=32, base_model_name_or_path="someone/base"))
    with torch.no_grad():
        for index, parameter in enumerate(layer.parameters()):
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)))
    return layer.eval()


def look(layer):
    with torch.no_grad():
        return layer(random_tokens(20, 32), random_tokens(3, 32, 1), grid=(4, 5), budget=6)


def test_round_trip_gives_the_same_weights_config_and_choice(tmp_path):
    layer = trained_layer()
    layer.save_pretrained(tmp_path / "selector")
    assert sorted(path.name for path in (tmp_path / "selector").iterdir()) == ["config.json", "model.safetensors"]
    other = ARRCOCLayer.from_pretrained(tmp_path / "selector")
    assert other.config == layer.config
    assert not other.training
    for name, value in layer.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name
    assert torch.equal(look(layer).relevance, look(other).relevance)
    untrained = ARRCOCLayer(layer.config)
    assert not torch.equal(look(layer).relevance, look(untrained).relevance)


def test_the_version_is_that_of_the_package_that_saved(tmp_path):
    old = ARRCOCLayer(ARRCOCConfig(hidden_size=8, arr_coc_version="0.0.1"))
    old.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["arr_coc_version"] == __version__


def test_pickled_weights_are_refused_even_under_the_right_name(tmp_path):
    layer = trained_layer()
    layer.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(layer.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match="pickled weights are refused"):
        ARRCOCLayer.from_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        ARRCOCLayer.from_pretrained(tmp_path)


def test_weights_that_do_not_fit_the_config_are_refused(tmp_path):
    trained_layer().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "rank": 4}))
    with pytest.raises(ValueError, match=r"does not fit its config\.json: see balancer"):
        ARRCOCLayer.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    state = load_file(tmp_path / "model.safetensors")
    del state["allocator.offset"]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"allocator\.offset"):
        ARRCOCLayer.from_pretrained(tmp_path)


def test_what_is_no_selector_is_said_plainly(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        ARRCOCLayer.from_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match="neither a directory nor a selector"):
        ARRCOCLayer.from_pretrained("no such/name!", local_files_only=True)
    with pytest.raises(FileNotFoundError, match="neither a directory nor a selector"):
        ARRCOCLayer.from_pretrained("someone/nothing", local_files_only=True, cache_dir=tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        trained_layer().save_pretrained(tmp_path / "file")


def test_a_failed_save_leaves_what_was_there(tmp_path, monkeypatch):
    layer = trained_layer()
    layer.save_pretrained(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def fail(state, path, metadata):
        path.write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(saving, "save_file", fail)
    with pytest.raises(OSError, match="no space"):
        ARRCOCLayer(ARRCOCConfig(hidden_size=8)).save_pretrained(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_loads_from_the_hub_by_id_and_pushes_the_two_files(tmp_path, monkeypatch):
    layer = trained_layer()
    layer.save_pretrained(tmp_path)
    asked, pushed = [], {}

    def download(repo_id, filename, revision, **kwargs):
        asked.append((repo_id, filename, revision))
        if filename not in ("config.json", "model.safetensors"):
            raise EntryNotFoundError(filename)
        return str(tmp_path / filename)

    class Api:
        def __init__(self, token=None):
            pushed["token"] = token

        def create_repo(self, repo_id, private, exist_ok):
            pushed["repo"] = (repo_id, private, exist_ok)

        def upload_folder(self, repo_id, folder_path, commit_message):
            pushed["files"] = sorted(path.name for path in saving.Path(folder_path).iterdir())
            return type("Commit", (), {"commit_url": "hub://commit"})

    monkeypatch.setattr(saving, "hf_hub_download", download)
    monkeypatch.setattr(saving, "HfApi", Api)
    loaded = ARRCOCLayer.from_pretrained("someone/selector", revision="v1")
    assert asked == [("someone/selector", name, "v1") for name in ("config.json", "model.safetensors")]
    assert loaded.config.base_model_name_or_path == "someone/base"
    assert loaded.push_to_hub("someone/selector", private=True, token="secret") == "hub://commit"
    assert pushed == {
        "token": "secret",
        "repo": ("someone/selector", True, True),
        "files": ["config.json", "model.safetensors"],
    }
