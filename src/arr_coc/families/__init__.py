"""How one family of vision-language models encodes, counts positions and takes features: one small file each."""

from arr_coc.families import llava, qwen2_5_vl, qwen2_vl, qwen3_5, qwen3_vl  # noqa: F401  (they register themselves)
from arr_coc.families.family import Family, list_families, open_family, register_family

__all__ = ["Family", "list_families", "open_family", "register_family"]
