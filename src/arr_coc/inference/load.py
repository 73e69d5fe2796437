"""Loading models, processors (with or without torchvision) and selectors from a directory or the Hub."""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import os
from functools import cache
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from huggingface_hub.utils.logging import set_verbosity as set_hub_verbosity
from jinja2 import TemplateError
from safetensors import SafetensorError
from torch import nn
from transformers.utils.import_utils import is_torchvision_available
from transformers.video_processing_utils import VideoProcessorMixin

from arr_coc.config import EMBEDDED, EMBEDDED_MODEL, EMBEDDED_SELECTOR, TRAINED, UNTRAINED, ARRCOCConfig
from arr_coc.families.family import family_class
from arr_coc.families.faster.cpu_layers import use_cpu_layers
from arr_coc.families.faster.leaner_layers import PatchProjection
from arr_coc.inference.processors.clips import Qwen2VLClips, Qwen3VLClips
from arr_coc.inference.processors.pictures import Qwen2VLImageProcessorPil
from arr_coc.realizing import ARRCOCLayer
from arr_coc.runtime.hub import CONFIG_NAME, UnreachableError, find_file
from arr_coc.runtime.tensors import input_device
from arr_coc.selectors.contract import Selector
from arr_coc.selectors.registry import UnknownSelectorError, create_selector, list_selectors

logger = logging.getLogger(__name__)

# What the embedded model was trained on.
SCOPE = (
    "the embedded model knows drawn scenes, pages and signs, and a little about photographs, 128 to 1024 pixels a "
    "side: colors, counts, sides and sizes of shapes, capitals and digits to read, what is odd, values and titles of "
    "forms, and whether there is a dog, asked in small letters about one picture; to anything else its answer is a "
    "guess"
)
# The folder of the LoRA adapter that was trained with a selector, beside that selector.
ADAPTER = "adapter"
_HUB = ("revision", "cache_dir", "local_files_only", "token")
# Settings that a clip's pictures share with still ones.
_OF_PICTURES = ("patch_size", "merge_size", "temporal_patch_size", "image_mean", "image_std", "size")
# What transformers raises for configs and weights that make no sense.
_UNREADABLE = (
    *(OSError, ValueError, RuntimeError, TypeError, LookupError, AttributeError),
    *(SafetensorError, StrictDataclassError),
)
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# Old checkpoints hold these buffers, which models now compute from their config.
_COMPUTED = (".inv_freq", ".position_ids")


def quiet_loading() -> None:
    """Switch off progress bars and warnings of transformers and the Hub, for the command line."""
    logs: Any = transformers.utils.logging
    logs.disable_progress_bar()
    logs.set_verbosity_error()
    set_hub_verbosity(logging.ERROR)


def load_processor(directory_or_id: str | Path, **hub: Any) -> Any:
    """Load a model's processor. Without torchvision it takes clips as lists of pictures, not as files.

    Args:
        directory_or_id (`str` or `Path`): a directory, a Hub id such as `Qwen/Qwen3-VL-2B-Instruct`, or `"embedded"`.
        hub: `revision`, `cache_dir`, `local_files_only`, `token`, as in transformers.

    Example:

    ```python
    >>> from arr_coc import load_processor
    >>> processor = load_processor("embedded")
    >>> processor.tokenizer.tokenize("what does the red text say?")[-2:]
    ['▁say', '?']

    ```
    """
    processor = _open_processor(directory_or_id, hub)
    with contextlib.suppress(ValueError, TemplateError):  # there is no template, or it refuses so short a chat
        # compiled and remembered by transformers, so that the first question need not wait for it
        processor.apply_chat_template([{"role": "user", "content": "."}], tokenize=False)
    return processor


def _open_processor(directory_or_id: str | Path, hub: dict[str, Any]) -> Any:
    cls = getattr(transformers, family_class(load_config(directory_or_id, **hub).model_type).processor_class)
    # not `AutoProcessor`, which silently returns a bare tokenizer if it does not know the class
    if "video_processor" not in inspect.signature(cls.__init__).parameters:
        return _load(cls, directory_or_id, hub)
    if is_torchvision_available():
        with contextlib.suppress(ValueError):  # it was saved without its video processor
            return _load(cls, directory_or_id, hub)
    return _load(without_torchvision(cls), directory_or_id, hub)


def without_torchvision(cls: type[Any]) -> type[Any]:
    """A Qwen-VL processor class whose video processor needs no torchvision, and takes clips as pictures.

    Args:
        cls (`type`): `Qwen2VLProcessor`, `Qwen2_5_VLProcessor` or `Qwen3VLProcessor`. If an object is made without a
            `video_processor`, it reads the pictures of a clip with the settings of its `image_processor`.
    """
    clips = Qwen3VLClips if issubclass(cls, transformers.Qwen3VLProcessor) else Qwen2VLClips

    def init(
        self: Any,
        image_processor: Any = None,
        tokenizer: Any = None,
        video_processor: Any = None,
        chat_template: Any = None,
    ) -> None:
        if video_processor is None:
            video_processor = clips(**{name: getattr(image_processor, name) for name in _OF_PICTURES})
        cls.__init__(self, image_processor, tokenizer, video_processor, chat_template=chat_template)

    def from_pretrained(made: Any, /, place: Any, **hub: Any) -> Any:
        settings, _ = made.get_processor_dict(place, **hub)
        parts = [
            auto.from_pretrained(place, **hub) for auto in (transformers.AutoImageProcessor, transformers.AutoTokenizer)
        ]
        if type(parts[0]) is transformers.Qwen2VLImageProcessorPil:
            parts[0].__class__ = Qwen2VLImageProcessorPil  # the same settings and results
        try:
            parts.append(clips.from_pretrained(place, **hub))
        except OSError:  # it was saved without a video processor
            parts.append(None)
        return made.from_args_and_dict(parts, settings)

    def check(self: Any, name: str, part: Any) -> Any:  # transformers' own needs torchvision to know a video processor
        if name == "video_processor" and isinstance(part, VideoProcessorMixin):
            return VideoProcessorMixin
        return cls.check_argument_for_proper_class(self, name, part)

    def reduce(self: Any) -> tuple[Any, ...]:  # pickle would look for the class by its name
        return _make_without_torchvision, (cls,), self.__dict__

    methods = {
        "__init__": init,
        "__reduce__": reduce,
        "from_pretrained": classmethod(from_pretrained),
        "check_argument_for_proper_class": check,
    }
    return type(cls.__name__, (cls,), methods)


def _make_without_torchvision(cls: type[Any]) -> Any:
    made: Any = without_torchvision(cls)
    return made.__new__(made)


def load_model(directory_or_id: str | Path, **kwargs: Any) -> nn.Module:
    """Load a supported model from safetensors. Keywords are transformers'.

    Others are refused before their weights are read, and so are pickled weights. Weights that are missing, unexpected
    or of another shape are refused by their names.
    """
    dtype = kwargs.get("dtype")
    if isinstance(dtype, str) and dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ValueError(f"`dtype` must be 'auto' or one of torch's, such as 'bfloat16', got {dtype!r}")
    if kwargs.get("use_safetensors") is False or kwargs.get("gguf_file") is not None:
        raise ValueError("only safetensors are read; leave out `use_safetensors=False` and `gguf_file`")
    hub = {name: kwargs[name] for name in _HUB if name in kwargs}
    config = load_config(directory_or_id, **hub)
    family_class(config.model_type)
    _check_weights(directory_or_id, getattr(config, "transformers_weights", None), kwargs.get("variant"), hub)
    # mismatched sizes are not ignored: with this they are listed like the rest
    listed = {"use_safetensors": True, "output_loading_info": True, "ignore_mismatched_sizes": True}
    model, report = _load(transformers.AutoModelForImageTextToText, directory_or_id, {**kwargs, **listed})
    _check_report(directory_or_id, report)
    if _is_embedded(directory_or_id):  # nobody else's model is changed
        model.model.visual.patch_embed.proj.__class__ = PatchProjection  # the same weights under the same names
        use_cpu_layers(model)
    opened: nn.Module = model.eval()
    return opened


def _check_weights(
    directory_or_id: str | Path, named: str | None = None, variant: str | None = None, hub: dict[str, Any] | None = None
) -> None:
    """Raise `ValueError` unless a model's weights are safetensors in its own folder. No weights are opened.

    Args:
        directory_or_id (`str` or `Path`): as in [`load_processor`].
        named (`str`, *optional*): the file that the config names.
        variant (`str`, *optional*): as in transformers.
        hub: as in [`load_processor`].
    """
    place = EMBEDDED_MODEL if str(directory_or_id) == EMBEDDED else str(directory_or_id)
    local, hub = os.path.isdir(place), hub or {}
    ending = f".{variant}" if variant else ""
    names = [named] if named else [f"model{ending}.safetensors", f"model.safetensors.index{ending}.json"]
    if not all(_is_inside(name, (".safetensors", ".json")) for name in names):
        raise _refused(directory_or_id, f"its config names {named}, which is no safetensors file in its folder")
    if _find(place, "adapter_config.json", hub) is not None:
        raise _refused(directory_or_id, "it is a LoRA adapter; merge it into its base and save that")
    if local and not any(os.path.isfile(os.path.join(place, name)) for name in names):
        pickled = sorted(path.name for path in Path(place).iterdir() if path.suffix in _PICKLED)
        hint = f"; {pickled[0]} is pickled, which is not read: save it again as safetensors" if pickled else ""
        raise _refused(directory_or_id, f"it has no {' or '.join(names)}{hint}")
    index = _find(place, names[-1], hub) if names[-1].endswith(".json") else None
    if index is None:
        return  # all in one file
    try:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        raise _refused(directory_or_id, f"{names[-1]} is not an index of weights") from None
    for shard in sorted(shards, key=str):
        if not _is_inside(shard, (".safetensors",)):
            raise _refused(directory_or_id, f"{names[-1]} names {shard}, which is no safetensors file in its folder")
        if local and not os.path.isfile(os.path.join(place, shard)):
            raise _refused(directory_or_id, f"{names[-1]} names {shard}, which is missing")


def _find(place: str, name: str, hub: dict[str, Any]) -> Path | None:
    try:
        return find_file(place, name, hub)
    except OSError:
        return None


def _is_inside(name: Any, endings: tuple[str, ...]) -> bool:
    """Whether this is the name of a file inside a folder, with one of these endings."""
    if not isinstance(name, str) or not name.endswith(endings):
        return False
    return not any(
        path.is_absolute() or path.drive or ".." in path.parts for path in (PurePosixPath(name), PureWindowsPath(name))
    )


def _check_report(directory_or_id: str | Path, report: dict[str, Any]) -> None:
    """Raise `ValueError` for weights that transformers did not find, did not use, or that have another shape."""
    wrong = {
        "missing": report["missing_keys"],
        "unexpected": [name for name in report["unexpected_keys"] if not name.endswith(_COMPUTED)],
        "of another shape": [name for name, *_ in report["mismatched_keys"]],
    }
    parts = []
    for kind, names in wrong.items():
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            parts.append(f"{kind}: {', '.join(sorted(names)[:3])}{more}")
    if parts:
        raise _refused(directory_or_id, f"its weights do not fit its config.json; {'; '.join(parts)}")


def _refused(directory_or_id: str | Path, reason: str) -> ValueError:
    return ValueError(f"{directory_or_id} cannot be opened as a model: {reason}")


def load_config(directory_or_id: str | Path, **hub: Any) -> Any:
    """The config of a model, without its weights."""
    name = str(directory_or_id)
    if name == EMBEDDED:
        return _load(transformers.AutoConfig, name, hub)
    if os.path.isfile(name):
        raise _refused(name, "it is a file; give the directory of the model")
    if _is_bare_name(name):
        raise ValueError(f"there is no directory {name!r}, and a Hub id has a slash, as in Qwen/Qwen3-VL-2B-Instruct")
    if os.path.isdir(name) and not os.path.isfile(os.path.join(name, "config.json")):
        raise _refused(name, "it has no config.json")
    return _load(transformers.AutoConfig, directory_or_id, hub)


def _load(cls: Any, directory_or_id: str | Path, kwargs: dict[str, Any]) -> Any:
    place = EMBEDDED_MODEL if str(directory_or_id) == EMBEDDED else str(directory_or_id)
    try:
        return cls.from_pretrained(place, **kwargs)
    except _UNREADABLE as error:
        reason = " ".join(str(error).split()).split(". ")[0]
        raise ValueError(f"{directory_or_id} cannot be opened as {_noun(cls)}: {reason}") from None


def _noun(cls: Any) -> str:
    return "a model" if cls.__name__.startswith("Auto") else f"a {cls.__name__}"


def recorded_base(directory_or_id: str | Path, **hub: Any) -> str | None:
    """The base model named in a selector's config; empty if it names none, None if this is not a selector."""
    config = _read_config(directory_or_id, hub)
    return None if config is None else str(config.get("base_model_name_or_path") or "")


def _read_config(directory_or_id: str | Path, hub: dict[str, Any]) -> dict[str, Any] | None:
    """What a selector's config says; None if this is not a selector."""
    if _is_bare_name(directory_or_id):
        return None  # no need to ask the Hub
    try:
        values = json.loads(find_file(directory_or_id, CONFIG_NAME, hub).read_text(encoding="utf-8"))
    except UnreachableError:
        raise ValueError(
            f"{directory_or_id} is not a directory, and the Hub cannot be reached; check the path or the connection"
        ) from None
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) and "arr_coc_version" in values else None


def tuned_base(place: str | Path) -> str | None:
    """The directory of the base model saved beside a selector, if its last layers were trained too."""
    directory = Path(place) / "base"
    return str(directory) if (directory / "config.json").is_file() else None


def has_adapter(selector: str | Path | Selector | None, **hub: Any) -> bool:
    """Whether a selector was trained with LoRA on its base model; the adapter is then saved beside it."""
    if not isinstance(selector, str | Path) or str(selector) in (*selector_names(), EMBEDDED):
        return False
    try:
        find_file(selector, f"{ADAPTER}/adapter_config.json", hub)
    except OSError:
        return False
    return True


def load_adapter(model: nn.Module, selector: str | Path, **hub: Any) -> nn.Module:
    """The base model with the LoRA adapter that was trained with a selector, frozen."""
    if (config := _read_config(selector, hub)) is not None:
        ARRCOCConfig.from_dict(config).check_edition(model.config, f"the selector {selector}")
    try:
        from peft import PeftModel
    except ImportError:
        raise ValueError(f"{selector} was trained with LoRA, which needs peft; install arr-coc[train]") from None
    try:
        find_file(selector, f"{ADAPTER}/adapter_model.safetensors", hub)
    except OSError:
        raise ValueError(f"the LoRA adapter of {selector} has no adapter_model.safetensors; save it again") from None
    source = {"model_id": str(selector), "subfolder": ADAPTER, **hub}
    if Path(selector).is_dir():
        source = {"model_id": str(Path(selector) / ADAPTER)}
    try:
        tuned: Any = PeftModel.from_pretrained(model, **source)
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        reason = " ".join(str(error).split()).split(". ")[0]
        raise ValueError(f"the LoRA adapter of {selector} does not fit this base: {reason}") from None
    frozen: nn.Module = tuned.requires_grad_(False).eval()
    return frozen


def find_base(
    base: str | Path | None, selector: str | Path | Selector | None, **hub: Any
) -> tuple[str | Path, str | Path | Selector | None]:
    """The base model and the selector to load, if either was left out."""
    if base is not None:
        if isinstance(selector, str | Path) and str(selector) == TRAINED and not _is_embedded(base):
            raise _not_trained(base)  # before its weights are read
        if selector is not None or recorded_base(base, **hub) is None:
            return base, selector
        selector = base
    if selector is None or isinstance(selector, Selector) or str(selector) in (*selector_names(), EMBEDDED):
        return EMBEDDED, selector
    if not isinstance(selector, str | Path):
        raise TypeError(f"`selector` must be a name, a directory, a Hub id or a selector, got {selector!r}")
    _check_place(selector)
    recorded = tuned_base(selector) or recorded_base(selector, **hub)
    if recorded is None:
        raise ValueError(
            f"{selector} is not a selector: it has no {CONFIG_NAME} of one; give what was saved or trained"
        )
    if not recorded:
        raise ValueError(f"{selector} does not name its base model; name it too, as `base` or with --model")
    return recorded, selector


def find_names(base: str | Path | None, selector: str | Path | None) -> tuple[str, str]:
    """Names of the base model and the selector to load, if either was left out."""
    model, chosen = find_base(base, selector)
    if not _is_embedded(model):
        return str(model), str(chosen or UNTRAINED)
    return EMBEDDED, current_name(str(chosen or TRAINED))


def selector_names(embedded: bool = True) -> list[str]:
    """Names of selectors for the embedded model, or for one that no selector was trained for."""
    return [TRAINED, *list_selectors()] if embedded else list_selectors()


def current_name(selector: str) -> str:
    """The name of a selector for the embedded model, whose trained one may also be called `"embedded"`.

    Example:

    ```python
    >>> from arr_coc.inference.load import current_name
    >>> current_name("embedded"), current_name("grid")
    ('arr-coc', 'grid')

    ```
    """
    return TRAINED if selector == EMBEDDED else selector


def is_embedded(model: nn.Module) -> bool:
    """Whether this is the model that comes with the package."""
    return getattr(model.config, "name_or_path", None) == EMBEDDED_MODEL


def find_trained(model: nn.Module) -> str:
    """The directory of the selector that was trained for a model; `ValueError` if there is none."""
    if not is_embedded(model):
        raise _not_trained(getattr(model.config, "name_or_path", None) or "this model")
    return EMBEDDED_SELECTOR


def _not_trained(base: str | Path) -> ValueError:
    return ValueError(
        f"no selector was trained for {base}; use {UNTRAINED}, or give the directory or Hub id of a trained one"
    )


def _is_embedded(base: str | Path) -> bool:
    return str(base) in (EMBEDDED, EMBEDDED_MODEL)


def _is_bare_name(place: str | Path) -> bool:
    """Whether this is neither a directory nor a Hub id, which has a slash."""
    return "/" not in str(place) and not os.path.isdir(place)


def _check_place(selector: str | Path) -> None:
    """Raise `ValueError` unless this is the name of a selector, a directory, or has the form of a Hub id."""
    if _is_bare_name(selector) and str(selector) != EMBEDDED:
        names = ", ".join(selector_names())
        raise UnknownSelectorError(f"no selector is named {str(selector)!r}; use {names}, a directory or a Hub id")


def load_selector(selector: str | Path | Selector | None, model: nn.Module, **hub: Any) -> Selector:
    """Load a selector for a model, on the model's device.

    Args:
        selector (`str`, `Path` or selector, *optional*): a registered name, a directory, a Hub id, or a selector
            object; `"arr-coc"` is the one that was trained for the model, which the embedded model has,
            `"arr-coc-untrained"` the layer before training. The default is `"arr-coc"` for the embedded model and
            `"arr-coc-untrained"` for others.
        model (`nn.Module`): the model whose tokens it will choose.
        hub: as in [`load_processor`].
    """
    loaded: Any
    if selector is None and is_embedded(model):
        selector = TRAINED
    if selector is None:
        _warn_untrained()
        selector = UNTRAINED
    if isinstance(selector, Selector):
        loaded = selector
    elif not isinstance(selector, str | Path):
        raise TypeError(f"`selector` must be a name, a directory, a Hub id or a selector, got {selector!r}")
    elif str(selector) == TRAINED:
        loaded = ARRCOCLayer.from_pretrained(find_trained(model))
    elif str(selector) == UNTRAINED:
        loaded = ARRCOCLayer(ARRCOCConfig.for_model(model)).eval()
    elif str(selector) in list_selectors():
        loaded = create_selector(str(selector))
    else:
        _check_place(selector)
        if not hasattr(model, "peft_config") and has_adapter(selector, **hub):
            raise ValueError(
                f"{selector} was trained with LoRA on its base, which this model lacks; load both with "
                "ARRCOCQwen.from_pretrained or `arr-coc ask --selector`"
            )
        place = EMBEDDED_SELECTOR if str(selector) == EMBEDDED else selector
        loaded = ARRCOCLayer.from_pretrained(place, **hub)
    check_editions(loaded, model, "the selector" if isinstance(selector, Selector) else f"the selector {selector}")
    for part in (loaded, getattr(loaded, "beside", None)):
        if isinstance(part, ARRCOCLayer):
            width, wanted = part.config.hidden_size, ARRCOCConfig.for_model(model).hidden_size
            if width != wanted:
                raise ValueError(f"the selector was made for models of width {width}, this one has {wanted}")
        if isinstance(part, nn.Module):
            part.to(input_device(model))
    result: Selector = loaded
    return result


def check_editions(selector: Selector, model: Any, name: str = "the selector") -> None:
    """Raise `ValueError` if a selector was trained for another edition of the embedded model than this one."""
    for part in (selector, getattr(selector, "beside", None)):
        if isinstance(part, ARRCOCLayer):
            part.config.check_edition(model.config, name)


@cache
def _warn_untrained() -> None:
    logger.warning("no selector was given: using the untrained layer, which is a training-free selector")
