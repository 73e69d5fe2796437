"""Worlds: drawn pictures with questions, their answers, and boxes around what the answers depend on."""

from arr_coc.data.worlds import (  # noqa: F401  (they register themselves)
    camouflage,
    crowds,
    ends,
    forms,
    lines,
    needles,
    pages,
    scenes,
    void,
)
from arr_coc.data.worlds.clips import draw_clip
from arr_coc.data.worlds.world import Clip, Scene, draw_scene, list_worlds, make_example, open_world, split_seed

__all__ = ["Clip", "Scene", "draw_clip", "draw_scene", "list_worlds", "make_example", "open_world", "split_seed"]
