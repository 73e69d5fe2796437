"""How questions are put: the same question in several wordings, the plain one most often."""

from __future__ import annotations

import random

_WORDINGS: dict[str, tuple[str, ...]] = {
    "color": (
        "what color is the {shape}?",
        "which color is the {shape}?",
        "what color does the {shape} have?",
        "what is the color of the {shape}?",
    ),
    "count_shape": (
        "how many {shape}s are there?",
        "how many {shape}s are in the picture?",
        "how many {shape}s do you see?",
        "count the {shape}s.",
    ),
    "count_color": (
        "how many {color} things are there?",
        "how many {color} things are in the picture?",
        "how many {color} things do you see?",
        "count the {color} things.",
    ),
    "relation": (
        "what is {side} the {color} {shape}?",
        "which thing is {side} the {color} {shape}?",
        "what do you see {side} the {color} {shape}?",
    ),
    "read": (
        "what does the {color} text say?",
        "what is written in {color}?",
        "read the {color} text.",
        "what does the {color} word say?",
    ),
    "read_only": ("what does the text say?", "what is written here?", "read the text.", "what does it say?"),
    "unusual": ("what is unusual?", "which one is unusual?", "what does not belong here?", "which is the odd one out?"),
    "overview": ("what is in the picture?", "what do you see?", "what is there?", "describe the picture."),
}


def put(rng: random.Random, kind: str, **words: str) -> str:
    """A question of a kind, in one of its wordings; crosses are the plural of cross."""
    wordings = _WORDINGS[kind]
    chosen = wordings[0] if rng.random() < 0.5 else rng.choice(wordings)
    return chosen.format(**words).replace("crosss", "crosses")
