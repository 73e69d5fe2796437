"""Opening a base model: only whole safetensors checkpoints, and what is wrong with others in one line."""

import json
import os
import pickle
import shutil

import pytest
import torch
from jinja2.sandbox import ImmutableSandboxedEnvironment
from safetensors.torch import load_file, save_file
from tiny_directory import photo, write_checkpoint
from tiny_models import FAMILIES, RELATIVES, tiny_model
from transformers import AutoModelForImageTextToText

from arr_coc import ARRCOCQwen
from arr_coc.config import EMBEDDED_MODEL
from arr_coc.families.faster.leaner_layers import PatchProjection
from arr_coc.inference.load import load_adapter, load_model, load_processor
from arr_coc.inference.messages import make_inputs, make_messages

pytestmark = pytest.mark.slow

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture(scope="module", params=[*FAMILIES, *RELATIVES], name="saved")
def save_model(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    tiny_model(request.param).save_pretrained(directory)
    return directory


@pytest.fixture(name="copied")
def copy_model(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "copied")


@pytest.fixture(scope="module", name="whole")
def save_whole(tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole")
    write_checkpoint(directory)
    return directory


@pytest.fixture(name="broken")
def copy_whole(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "broken")


def edit_weights(directory, change):
    weights = load_file(directory / WEIGHTS)
    change(weights)
    save_file(weights, directory / WEIGHTS, metadata={"format": "pt"})


def edit_config(directory, **values):
    path = directory / "config.json"
    content = json.loads(path.read_text())
    for name, value in values.items():
        (content if name in content else content["text_config"])[name] = value
    path.write_text(json.dumps(content))


def refusal(directory, **options):
    with pytest.raises(ValueError, match="cannot be opened as a model: ") as caught:
        load_model(directory, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value).partition("cannot be opened as a model: ")[2]


def test_a_whole_checkpoint_opens_as_it_was_saved(saved):
    expected, opened = tiny_model(saved.name[:-1]).state_dict(), load_model(saved).state_dict()
    assert expected.keys() == opened.keys()
    assert all(torch.equal(value, opened[name]) for name, value in expected.items())


def test_a_missing_weight_is_named(copied):
    name = next(name for name in sorted(load_file(copied / WEIGHTS)) if "layers.1." in name and "norm" in name)
    edit_weights(copied, lambda weights: weights.pop(name))
    says = refusal(copied)
    assert says.startswith("its weights do not fit its config.json; missing: ")
    assert name.rpartition("layers.")[2] in says


def test_layers_that_are_not_there_are_named(copied):
    edit_config(copied, num_hidden_layers=64)
    refusal(copied)  # some have a type for each layer in their config, too
    content = json.loads((copied / "config.json").read_text())
    content["text_config"].pop("layer_types", None)
    (copied / "config.json").write_text(json.dumps(content))
    says = refusal(copied)
    assert "missing: " in says
    assert " more" in says
    assert "layers.10." in says


def test_an_unexpected_weight_is_named(copied):
    edit_weights(copied, lambda weights: weights.update({"model.language_model.extra.weight": torch.ones(2)}))
    assert "unexpected: model.language_model.extra.weight" in refusal(copied)


def test_a_weight_of_another_shape_is_named(copied):
    name = next(name for name in sorted(load_file(copied / WEIGHTS)) if "layers.1." in name and "norm" in name)
    edit_weights(copied, lambda weights: weights.update({name: torch.ones(7)}))
    assert "of another shape: " in refusal(copied)
    assert "of another shape: " in refusal(copied, ignore_mismatched_sizes=True)


def test_fewer_layers_than_weights_are_refused(broken):
    edit_config(broken, num_hidden_layers=1)
    says = refusal(broken)
    assert "unexpected: model.language_model.layers.1." in says
    assert says.endswith("and 19 more")
    with pytest.raises(ValueError, match="do not fit its config"):
        ARRCOCQwen.from_pretrained(broken)


def test_buffers_of_old_checkpoints_are_passed_over(broken):
    name = "model.language_model.rotary_emb.inv_freq"
    edit_weights(broken, lambda weights: weights.update({name: torch.ones(8)}))
    load_model(broken)


@pytest.mark.parametrize("tied", [True, False])
def test_only_a_tied_head_may_be_absent(broken, tied):
    edit_config(broken, tie_word_embeddings=tied)
    edit_weights(broken, lambda weights: weights.pop("lm_head.weight"))
    if tied:
        model = load_model(broken)
        assert model.lm_head.weight is model.get_input_embeddings().weight
    else:
        assert refusal(broken) == "its weights do not fit its config.json; missing: lm_head.weight"


class Trap:
    """Unpickled, it says so."""

    def __reduce__(self):
        return pytest.fail, ("was unpickled",)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00001.bin"])
def test_pickled_weights_are_refused_unopened(broken, name):
    (broken / WEIGHTS).unlink()
    (broken / name).write_bytes(pickle.dumps(Trap()))
    index = {"metadata": {}, "weight_map": {"lm_head.weight": name}}
    (broken / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    says = refusal(broken)
    assert says == f"it has no {WEIGHTS} or {INDEX}; {name} is pickled, which is not read: save it again as safetensors"
    with pytest.raises(ValueError, match="only safetensors are read"):
        load_model(broken, use_safetensors=False)
    with pytest.raises(ValueError, match="only safetensors are read"):
        load_model(broken, gguf_file=name)
    (broken / name).unlink()
    assert refusal(broken) == f"it has no {WEIGHTS} or {INDEX}"


def test_pickled_weights_beside_safetensors_are_not_read(broken):
    (broken / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    load_model(broken)


@pytest.mark.parametrize("name", ["adapter_model.bin", "../whole/model.safetensors", "/tmp/model.safetensors"])
def test_a_config_names_no_other_file(broken, name):
    (broken / "adapter_model.bin").write_bytes(pickle.dumps(Trap()))
    content = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**content, "transformers_weights": name}))
    assert refusal(broken) == f"its config names {name}, which is no safetensors file in its folder"


def shard(directory, name):
    """Make it a checkpoint of one shard of this name."""
    names = dict.fromkeys(load_file(directory / WEIGHTS), name)
    (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": names}))


@pytest.mark.parametrize(
    "name",
    [
        *("{outside}", "../outside.safetensors", "a/../../outside.safetensors", "..\\x.safetensors"),
        *("C:\\x.safetensors", "part.bin", "", None, 3),
    ],
)
def test_an_index_that_names_another_file_is_refused_unopened(broken, name):
    outside = broken.parent / "outside.safetensors"
    name = str(outside) if name == "{outside}" else name
    shard(broken, name)
    shutil.move(broken / WEIGHTS, outside)
    (broken / "part.bin").write_bytes(pickle.dumps(Trap()))
    assert refusal(broken) == f"{INDEX} names {name}, which is no safetensors file in its folder"


def test_an_index_of_its_own_files_opens(broken):
    shard(broken, "part.safetensors")
    shutil.move(broken / WEIGHTS, broken / "part.safetensors")
    load_model(broken)
    (broken / "part.safetensors").unlink()
    assert refusal(broken) == f"{INDEX} names part.safetensors, which is missing"
    os.mkfifo(broken / "part.safetensors")
    assert refusal(broken) == f"{INDEX} names part.safetensors, which is missing"
    for content in ("", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": {}}}'):
        (broken / INDEX).write_text(content)
        assert refusal(broken) == f"{INDEX} is not an index of weights"


def test_an_adapter_is_not_a_model(broken):
    (broken / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "/tmp", "peft_type": "LORA"}))
    assert refusal(broken) == "it is a LoRA adapter; merge it into its base and save that"


def test_a_pickled_adapter_is_refused_unopened(tmp_path):
    pytest.importorskip("peft")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter" / "adapter_model.bin").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(ValueError, match=r"has no adapter_model\.safetensors; save it again"):
        load_adapter(tiny_model("qwen3_vl"), tmp_path)


def test_from_the_hub_only_safetensors_are_asked_for(whole, monkeypatch):
    import transformers

    asked = {}

    def from_pretrained(place, **options):
        asked.update(options)
        report = dict.fromkeys(("missing_keys", "unexpected_keys", "mismatched_keys"), ())
        return torch.nn.Linear(1, 1), report

    config = transformers.AutoConfig.from_pretrained(whole)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda *_, **__: config)
    monkeypatch.setattr(transformers.AutoModelForImageTextToText, "from_pretrained", from_pretrained)
    monkeypatch.setattr("arr_coc.inference.load.find_file", lambda *_: (_ for _ in ()).throw(FileNotFoundError()))
    load_model("somebody/model")
    assert asked["use_safetensors"] is True
    index = whole.parent / "hub-index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../a.safetensors"}}))

    def find_index(place, name, hub):
        if name == INDEX:
            return index
        raise FileNotFoundError(name)

    monkeypatch.setattr("arr_coc.inference.load.find_file", find_index)
    assert refusal("somebody/model") == f"{INDEX} names ../a.safetensors, which is no safetensors file in its folder"


def test_the_embedded_model_opens_and_answers_as_saved(whole):
    assert load_model("embedded").config.name_or_path == EMBEDDED_MODEL
    assert ARRCOCQwen.from_pretrained(whole, "grid").answer(photo(64, 64), "what?", max_new_tokens=1).tokens.full == 64


def test_the_modules_of_other_models_are_their_own(saved):
    plain = AutoModelForImageTextToText.from_pretrained(saved)
    assert [type(module) for module in load_model(saved).modules()] == [type(module) for module in plain.modules()]


def test_the_embedded_model_projects_patches_as_the_convolution_would():
    first_layer = load_model("embedded", dtype=torch.float32).model.visual.patch_embed.proj
    assert isinstance(first_layer, PatchProjection)
    patches = torch.randn(5, *first_layer.weight.shape[1:], generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(first_layer(patches), torch.nn.Conv3d.forward(first_layer, patches))
    changed = patches.clone()
    changed[0, -1, -1, -1, -1] += 1  # the control: the last pixel counts, too
    assert not torch.allclose(first_layer(changed)[0], first_layer(patches)[0])
    assert list(first_layer.state_dict()) == ["weight", "bias"]


def test_the_chat_template_is_compiled_when_a_processor_is_opened(whole, tmp_path, monkeypatch):
    compiled, compile_text = [], ImmutableSandboxedEnvironment.from_string

    def count(self, source, *args, **kwargs):
        compiled.append(source)
        return compile_text(self, source, *args, **kwargs)

    monkeypatch.setattr(ImmutableSandboxedEnvironment, "from_string", count)
    directory = shutil.copytree(whole, tmp_path / "copied")
    template = directory / "chat_template.jinja"
    template.write_text("{# known to no other test #}" + template.read_text())
    processor = load_processor(directory)
    assert len(compiled) == 1
    make_inputs(processor, [make_messages(photo(64, 64), "what color is it?")], "cpu")
    assert len(compiled) == 1


@pytest.mark.parametrize("content", [None, "{{ raise_exception('no short chats') }}"])
def test_a_processor_opens_whatever_its_chat_template_says(whole, tmp_path, content):
    directory = shutil.copytree(whole, tmp_path / "copied")
    template = directory / "chat_template.jinja"
    template.unlink() if content is None else template.write_text(content)
    assert load_processor(directory).chat_template == content
