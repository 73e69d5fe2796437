"""Qwen3.5: Qwen3-VL's encoder without DeepStack, and a language model with linear and full attention layers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from arr_coc.families.family import register_family
from arr_coc.families.qwen2_vl import Qwen2VL
from arr_coc.families.qwen3_vl import Qwen3VL


@register_family("qwen3_5", "qwen3_5_moe")
class Qwen35(Qwen3VL):
    """Qwen3.5 and its mixture-of-experts variant.

    Dropped tokens are not in the prompt at all, so its linear layers never read them.
    """

    graphs_language = False

    def wrap(self, features: list[Tensor], deepstack: list[list[Tensor]]) -> Any:
        """Features of each picture; this family has no DeepStack."""
        return Qwen2VL.wrap(self, features, deepstack)
