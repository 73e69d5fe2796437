"""The world `camouflage`: gray text on gray ground, and a bright red box that is never asked about."""

from __future__ import annotations

import random

from arr_coc.data.worlds.tools.drawing import COLOURS, Canvas, jitter, make_ground, random_text
from arr_coc.data.worlds.tools.wording import put
from arr_coc.data.worlds.world import Question, Scene, Size, Thing, World, register_world


@register_world("camouflage")
class Camouflage(World):
    """Barely visible text to read, and a conspicuous box to ignore."""

    kinds = ("camouflage",)

    def draw(self, rng: random.Random, size: Size, kind: str, varied: bool = False) -> Scene:
        """Draw one gray text and one red box."""
        while True:
            shade = rng.randint(90, 165)
            canvas = Canvas(rng, size, *make_ground(rng, size, (shade, shade, shade)), varied)
            difference = rng.randint(24, 55) * rng.choice((-1, 1))
            ink = (shade + difference,) * 3
            text = random_text(rng, 6 if min(size) > 180 else 4)
            box = canvas.add_text(text, "gray", ink, rng.randint(22, 24 + min(size) // 14))
            width, height = (min(size) * rng.uniform(0.1, 0.25) for _ in range(2))
            corner = canvas.place(width, height)
            if box is None or corner is None:
                continue
            x, y = (value * canvas.scale for value in corner)
            corners = [x, y, x + width * canvas.scale, y + height * canvas.scale]
            canvas.pen.rectangle(corners, fill=jitter(rng, COLOURS["red"]))
            canvas.things.append(Thing(canvas.taken[-1], ("red",)))
            question = put(rng, "read", color="gray") if rng.random() < 0.8 else put(rng, "read_only")
            questions = (Question("camouflage", question, text, (box,)),)
            return Scene(canvas.finish(), questions, tuple(canvas.things))
