"""The supported families of vision-language models: how each encodes pictures, numbers positions and takes features."""

from arr_coc.families import llava, qwen2_5_vl, qwen2_vl, qwen3_5, qwen3_vl  # noqa: F401  (they register themselves)
from arr_coc.families.family import Family, list_families, open_family, register_family

__all__ = ["Family", "list_families", "open_family", "register_family"]
