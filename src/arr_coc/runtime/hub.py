"""Save, load and push a selector like an adapter: a small config and safetensors, without the base model.

`huggingface_hub`'s mixin falls back to pickled weights and ignores unknown configuration keys. This one does neither,
and writes every file atomically.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from arr_coc._version import __version__
from arr_coc.config import ARRCOCConfig
from arr_coc.runtime.atomic_files import set_aside

WEIGHTS_NAME = "model.safetensors"
CONFIG_NAME = "config.json"


class UnreachableError(FileNotFoundError):
    """The name is no directory, not in the cache, and the Hub cannot be reached."""


class PretrainedModule(nn.Module):
    """A module with a config that can be saved, loaded and pushed to the Hub."""

    config: ARRCOCConfig
    trained: bool = False  # whether its weights were loaded
    added: tuple[str, ...] = ()  # names of weights that older versions of the class had not

    def num_parameters(self) -> int:
        """Number of parameters."""
        return sum(parameter.numel() for parameter in self.parameters())

    def save_pretrained(self, directory: str | Path) -> None:
        """Write `config.json` and `model.safetensors` into a directory, which is created if missing."""
        directory = Path(directory)
        if directory.is_file():
            raise ValueError(f"{directory} is a file; give a directory to save into")
        directory.mkdir(parents=True, exist_ok=True)
        state = {name: value.detach().cpu().contiguous() for name, value in self.state_dict().items()}
        config = dataclasses.replace(self.config, arr_coc_version=__version__)
        # the config is renamed last: a directory with a config is complete
        with set_aside(directory / CONFIG_NAME) as new_config, set_aside(directory / WEIGHTS_NAME) as new_weights:
            save_file(state, new_weights, metadata={"format": "pt"})
            new_config.write_text(config.to_json(), encoding="utf-8")

    @classmethod
    def from_pretrained(
        cls,
        directory_or_id: str | Path,
        *,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        token: str | bool | None = None,
        device: str = "cpu",
        **kwargs: Any,
    ) -> Self:
        """Load a saved module from a directory or the Hub, in evaluation mode.

        Args:
            directory_or_id (`str` or `Path`): a directory, or a Hub id such as `user/name`.
            revision, cache_dir, local_files_only, token: as in `huggingface_hub.hf_hub_download`.
            device (`str`, *optional*, defaults to `"cpu"`): where the weights go.
            kwargs: further arguments of the class.
        """
        hub = {"revision": revision, "cache_dir": cache_dir, "local_files_only": local_files_only, "token": token}
        config_path = find_file(directory_or_id, CONFIG_NAME, hub)
        weights_path = find_file(directory_or_id, WEIGHTS_NAME, hub)
        module = cls(ARRCOCConfig.from_json(config_path.read_text(encoding="utf-8")), **kwargs)
        try:
            state = load_file(weights_path, device=device)
        except SafetensorError as error:
            raise ValueError(f"{weights_path} is not a readable safetensors file: {error}") from None
        expected = module.state_dict()
        # what an older version did not save starts as in a new module
        state = {**{name: expected[name].to(device) for name in cls.added if name in expected}, **state}
        wrong = sorted(
            (expected.keys() ^ state.keys())
            | {name for name in expected.keys() & state.keys() if expected[name].shape != state[name].shape}
        )
        if wrong:
            raise ValueError(
                f"{weights_path} does not fit its {CONFIG_NAME}: see {', '.join(wrong[:4])}; save it again"
            )
        module.load_state_dict(state)
        module.trained = True
        return module.to(device).eval()

    def push_to_hub(self, repo_id: str, *, private: bool | None = None, token: str | bool | None = None) -> str:
        """Upload config and weights; returns the URL of the commit."""
        api = HfApi(token=token)
        api.create_repo(repo_id, private=private, exist_ok=True)
        with TemporaryDirectory() as directory:
            self.save_pretrained(directory)
            commit = api.upload_folder(
                repo_id=repo_id, folder_path=directory, commit_message=f"Upload {type(self).__name__} with arr-coc"
            )
        return str(commit.commit_url)


def find_file(directory_or_id: str | Path, name: str, hub: dict[str, Any]) -> Path:
    """Path of a selector's file, in a directory or downloaded from the Hub."""
    if Path(directory_or_id).is_dir():
        path = Path(directory_or_id, name)
        if path.is_file():
            return path
        raise FileNotFoundError(_missing(directory_or_id, name))
    try:
        return Path(hf_hub_download(repo_id=str(directory_or_id), filename=name, **hub))
    except (LocalEntryNotFoundError, HFValidationError, RepositoryNotFoundError) as error:
        kind = UnreachableError if isinstance(error, LocalEntryNotFoundError) else FileNotFoundError
        raise kind(
            f"{directory_or_id} is neither a directory nor a selector that can be reached on the Hub "
            f"({type(error).__name__})"
        ) from None
    except EntryNotFoundError:
        raise FileNotFoundError(_missing(directory_or_id, name)) from None


def _missing(where: str | Path, name: str) -> str:
    return (
        f"{where} has no {name}; a selector is a {CONFIG_NAME} and a {WEIGHTS_NAME} "
        "(pickled weights are refused: save them again with `save_pretrained`)"
    )
