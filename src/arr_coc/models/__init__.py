"""How a vision-language model is opened: one small file per family, one shared builder of the shorter prompt."""

from arr_coc.models import llava, qwen2_5_vl, qwen2_vl, qwen3_5, qwen3_vl  # noqa: F401  (they register themselves)
from arr_coc.models.answering import Answer, ARRCOCQwen
from arr_coc.models.asking import ChatTokens
from arr_coc.models.attaching import Attachment, attach
from arr_coc.models.family import Family, list_families, register_family
from arr_coc.models.loading import load_processor
from arr_coc.models.preparing import prepare

__all__ = [
    "ARRCOCQwen",
    "Answer",
    "Attachment",
    "ChatTokens",
    "Family",
    "attach",
    "list_families",
    "load_processor",
    "prepare",
    "register_family",
]
