"""Qwen3.5: the encoder of Qwen3-VL without DeepStack, a language model that mixes linear and full attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from arr_coc.families.family import register_family
from arr_coc.families.qwen2_vl import Qwen2VL
from arr_coc.families.qwen3_vl import Qwen3VL


@register_family("qwen3_5")
class Qwen35(Qwen3VL):
    """Qwen3.5. In its linear layers a dropped token is not masked but never read."""

    def wrap(self, features: list[Tensor], deepstack: list[list[Tensor]]) -> Any:
        """Features of each picture, as before DeepStack."""
        return Qwen2VL.wrap(self, features, deepstack)
