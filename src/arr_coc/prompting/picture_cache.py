"""A cache of encoded pictures for servers: pictures are recognised by their content, the least recently used go first.

[`Encodings`] belongs to the pictures of one prompt, and somebody must know that the next prompt has the same ones. Here
nobody needs to know: a prompt's pixels are looked up by their digest.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from arr_coc.families.family import Family, Inputs
from arr_coc.families.recordable import read_state
from arr_coc.prompting.encodings import Encodings
from arr_coc.runtime.digest import PictureDigest

logger = logging.getLogger(__name__)


class _Entry:
    """What was encoded of the pictures of one prompt. Who holds `lock` may use it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = weakref.ref(model)
        self.encodings = Encodings()
        self.lock = threading.RLock()
        self.users = 0
        self.nbytes = 0


class EncodingCache:
    """Remembers what was encoded of recent pictures, up to a number of bytes.

    Pass it as `encoded` to [`prepare`], [`attach`] or [`ARRCOCQwen.answer`], from any number of threads. A prompt whose
    pictures were seen lately runs no vision encoder. All pictures of a prompt, in their order, are one entry, so
    prepare prompts one by one and join them with [`collate_prepared`].

    What is kept belongs to the encoder's weights and active adapters: after another adapter was chosen, or weights were
    put in the place of others, pictures are encoded again. Weights whose values change where they are cannot be
    noticed, as by `load_state_dict`; call [`~EncodingCache.clear`] then. Encoders that learn are refused. Of an encoder
    that is in training mode, compiled, or has hooks, nothing is kept, and the log says so once.

    Args:
        limit_bytes (`int`, *optional*, defaults to 1 GiB): what the entries may take together after each call, where
            the model is. The least recently used are forgotten first.

    Attributes:
        hits, misses (`int`): prompts whose pictures were known, and were not.

    Example:

    ```python
    >>> from importlib.resources import files
    >>> from arr_coc import ARRCOCQwen, EncodingCache
    >>> vlm, cache = ARRCOCQwen.from_pretrained(), EncodingCache()
    >>> page = files("arr_coc") / "assets" / "examples" / "page.png"
    >>> for question in ("what is the total?", "which total is written here?"):
    ...     answer = vlm.answer(page, question, encoded=cache)
    >>> cache.hits, cache.misses, len(cache)
    (1, 1, 1)

    ```
    """

    # keys and values of a prompt belong to one conversation
    prefix: None = None

    def __init__(self, limit_bytes: int = 2**30) -> None:
        if isinstance(limit_bytes, bool) or not isinstance(limit_bytes, int) or limit_bytes < 1:
            raise ValueError(f"`limit_bytes` must be a whole number of at least 1, got {limit_bytes!r}")
        self.limit_bytes = limit_bytes
        self.hits = self.misses = 0
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()  # the most recently used last
        self._lock = threading.Lock()
        self._digest = PictureDigest()
        self._told = False  # that nothing is kept

    @property
    def nbytes(self) -> int:
        """Bytes that all entries take."""
        with self._lock:
            return sum(entry.nbytes for entry in self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def __bool__(self) -> bool:  # an empty cache is a cache
        return True

    def __reduce__(self) -> tuple[Any, ...]:
        return EncodingCache, (self.limit_bytes,)  # a copy begins empty

    def clear(self) -> None:
        """Forget everything; calls that are running keep what they use."""
        with self._lock:
            self._entries.clear()

    @contextmanager
    def open(
        self, family: Family, inputs: Inputs, images: Sequence[Image.Image | Tensor] | None = None
    ) -> Iterator[Encodings]:
        """What was encoded of the pictures of a prompt, for this thread alone until the end of `with`.

        Args:
            family (`Family`): the opened model.
            inputs (`Mapping`): the processor's output.
            images (`Sequence[PIL.Image.Image | Tensor]`, *optional*): the original pictures, if they are encoded
                instead of the processor's pixels.
        """
        _check_frozen(family)
        states = tuple(map(read_state, _encoder(family)))
        obstacle = next((state.obstacle for state in states if state.obstacle is not None), None)
        if obstacle is not None:
            self._keep_nothing(obstacle)
            yield Encodings()
            return
        key = states, self._key(family, inputs, images)
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or entry.model() is not family.target:
                entry = self._entries[key] = _Entry(family.target)
                self.misses += 1
            else:
                self.hits += 1
            self._entries.move_to_end(key)
            entry.users += 1
        try:
            with entry.lock:
                try:
                    yield entry.encodings
                except BaseException:
                    entry.encodings = Encodings()  # it may be incomplete
                    raise
                finally:
                    entry.nbytes = entry.encodings.nbytes
        finally:
            with self._lock:
                entry.users -= 1
                self._forget()

    def _keep_nothing(self, obstacle: str) -> None:
        """Count a call of which nothing can be kept, and say so once."""
        with self._lock:
            self.misses += 1
            told, self._told = self._told, True
        if not told:
            logger.warning("an `EncodingCache` keeps nothing of this encoder, as its results may vary: %s", obstacle)

    def _key(self, family: Family, inputs: Inputs, images: Sequence[Image.Image | Tensor] | None) -> Hashable:
        model: Any = family.target
        # tensors of inference mode cannot be used outside it
        setting = id(model), model.dtype, model.device, torch.is_inference_mode_enabled()
        if images is not None:
            return *setting, "original", *map(self._digest, images)
        pixels = [(kind, self._digest(inputs[family.pixel_names[kind]])) for kind in family.present(inputs)]
        grids = [inputs[name] for name in family.needs(inputs) if inputs.get(name) is not None]
        return *setting, *pixels, *(tuple(grid.flatten().tolist()) for grid in grids)

    def _forget(self) -> None:
        """Drop what is of no use, then the least recently used entries beyond the limit; never one that is in use."""
        idle = {key: entry for key, entry in self._entries.items() if not entry.users}
        for key, entry in idle.items():
            if not entry.nbytes or entry.model() is None:
                del self._entries[key]
        total = sum(entry.nbytes for entry in self._entries.values())
        for key, entry in idle.items():
            if total <= self.limit_bytes:
                break
            if self._entries.pop(key, None) is not None:
                total -= entry.nbytes


def _encoder(family: Family) -> list[nn.Module]:
    """The parts of a model that make features of pictures: all but the language model."""
    return [part for name, part in family.inner.named_children() if name != "language_model"]


def _check_frozen(family: Family) -> None:
    """Raise `ValueError` if the encoder of a model is learning: what it made before would be out of date."""
    if not family.target.training:
        return
    if any(weight.requires_grad for part in _encoder(family) for weight in part.parameters()):
        raise ValueError(
            "an `EncodingCache` cannot serve an encoder that learns; freeze the encoder, call model.eval(), or leave "
            "out `encoded`"
        )
