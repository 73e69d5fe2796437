"""Several wordings of each kind of question; the first is used most often."""

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
    "page_value": (
        "what is the {key}?",
        "which {key} is written here?",
        "read the {key}.",
        "what does it say for {key}?",
    ),
    "page_cell": ("what is the {key} of the {item}?", "which {key} has the {item}?", "read the {key} of the {item}."),
    "page_title": ("what is the title?", "which title is written here?", "read the title.", "what does the title say?"),
    "page_footnote": ("what does the footnote say?", "what is the footnote?", "read the footnote."),
    "needle": (
        "what does the sign next to the {color} {shape} say?",
        "what is written next to the {color} {shape}?",
        "read the sign next to the {color} {shape}.",
    ),
    "presence": ("is there {name}?", "is there {name} in the picture?", "do you see {name}?", "can you see {name}?"),
    "photo_count": ("how many {name} are there?", "how many {name} are in the picture?", "how many {name} do you see?"),
    "photo_side": ("what {group} is on the {side}?", "which {group} is on the {side}?"),
    "unusual": ("what is unusual?", "which one is unusual?", "what does not belong here?", "which is the odd one out?"),
    "overview": ("what is in the picture?", "what do you see?", "what is there?", "describe the picture."),
    "presence_asked": (
        "is there {name} in the picture?",
        "is there any {single} in the photo?",
        "are there any {many} in this image?",
        "does the image contain {name}?",
        "does this picture show {name}?",
        "can you see {name} here?",
        "is {name} visible?",
        "is there {name}?",
    ),
    "presence_of_many": (
        "are there any {many} in this image?",
        "are there {many} in the picture?",
        "does the image contain {many}?",
        "can you see {many} here?",
        "are {many} visible?",
    ),
    "photo_number": (
        "how many {name} are there?",
        "how many {name} are in the image?",
        "how many {name} are in the picture?",
        "what is the number of {name} in the picture?",
        "how many {name} can you see?",
    ),
    "photo_relation": (
        "what is {side} the {name}?",
        "which thing is {side} the {name}?",
        "what do you see {side} the {name}?",
    ),
    "clip_direction": (
        "which way does the {shape} move?",
        "in which direction does the {shape} move?",
        "which way does the {shape} go?",
        "where does the {shape} move?",
    ),
    "clip_mover": ("which thing moves {way}?", "what moves {way}?", "which thing goes {way}?"),
    "clip_still": ("which thing does not move?", "what does not move?", "which thing stays in its place?"),
    "clip_appears": (
        "what does the sign say that appears?",
        "read the sign that appears.",
        "which text appears?",
        "what does the new sign say?",
    ),
    "clip_disappears": (
        "what does the sign say that disappears?",
        "read the sign that disappears.",
        "which text disappears?",
        "what did the sign say that is gone?",
    ),
    "clip_stays": (
        "what does the sign say that is always there?",
        "read the sign that is always there.",
        "which text is always there?",
    ),
    "clip_first": ("which thing came first?", "what came first?", "which thing appears first?", "what appears first?"),
    "clip_last": ("which thing came last?", "what came last?", "which thing appears last?", "what appears last?"),
    "clip_second": ("which thing came second?", "what came second?", "which thing appears second?"),
    "clip_next": (
        "what came right after the {color} {shape}?",
        "which thing came right after the {color} {shape}?",
        "what appears right after the {color} {shape}?",
    ),
    "clip_blink": (
        "how many times did the {shape} blink?",
        "how often did the {shape} blink?",
        "how many times does the {shape} blink?",
        "how often does the {shape} blink?",
    ),
    "clip_scenes": (
        "how many scenes are there?",
        "how many scenes does the clip have?",
        "how many scenes do you see?",
        "count the scenes.",
    ),
    "clip_before": (
        "what color was the {shape} before the cut?",
        "which color did the {shape} have before the cut?",
        "before the cut, what color was the {shape}?",
    ),
    "clip_after": (
        "what color was the {shape} after the cut?",
        "which color did the {shape} have after the cut?",
        "after the cut, what color was the {shape}?",
    ),
    "clip_scene": (
        "what color was the {shape} in the {place} scene?",
        "which color did the {shape} have in the {place} scene?",
        "in the {place} scene, what color was the {shape}?",
    ),
    "two_signs": (
        "do the {first} and the {second} sign say the same?",
        "do the signs at the {first} and at the {second} say the same?",
        "does the sign at the {first} say the same as the sign at the {second}?",
        "is the same written at the {first} and at the {second}?",
    ),
    "two_shapes": (
        "are the shapes at the {first} and at the {second} alike in shape and color?",
        "is the shape at the {first} the same as at the {second}, in shape and color?",
        "do the {first} and the {second} shape have the same shape and color?",
        "are the {first} and the {second} shape alike in shape and color?",
    ),
    "long_line": (
        "what does the long line say?",
        "read the long line.",
        "what is written in the long line?",
        "what does the longest line say?",
    ),
    "any_shape": (
        "is there any {name}?",
        "do you see any {name}?",
        "is there any {name} in the picture?",
        "can you see any {name}?",
    ),
    "any_color": (
        "is there any {color} thing?",
        "do you see any {color} thing?",
        "is there any {color} thing in the picture?",
        "can you see any {color} thing?",
    ),
    "form_value": (
        "what is the {key}?",
        "which {key} is written here?",
        "read the {key}.",
        "what does the form say for {key}?",
    ),
}


def put(rng: random.Random, kind: str, **words: str) -> str:
    """Word a question of a kind; the plural of cross is crosses."""
    wordings = _WORDINGS[kind]
    chosen = wordings[0] if rng.random() < 0.5 else rng.choice(wordings)
    return chosen.format(**words).replace("crosss", "crosses")
