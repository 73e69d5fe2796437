"""Draw the strangers: pictures by another program, with other fonts, in the grammar of the worlds. Needs matplotlib.

    python recipes/embedded/strangers.py

The pictures and `answers.json` are kept in the repository; this says how they came about.
"""

import json
import random
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Circle, PathPatch, RegularPolygon, Wedge
from matplotlib.path import Path as Curve

HERE = Path(__file__).parents[2] / "tests" / "strangers"
# names of CSS colours: other values than those of the worlds
COLOURS = {
    "red": "crimson", "green": "forestgreen", "blue": "royalblue", "yellow": "gold", "purple": "darkviolet",
    "orange": "darkorange", "cyan": "darkturquoise", "pink": "hotpink", "gray": "gray", "black": "black",
}  # fmt: skip
SHAPES = ("circle", "square", "triangle", "star", "cross", "ring", "diamond")
# without those that fonts draw alike
READABLE = "ABCDEFGHJKLMNPQRSTUVWXYZ23456789"
FONTS = ("STIXGeneral", "cmss10", "cmr10", "cmtt10")
GROUNDS = ("white", "ivory", "lavender", "honeydew")


def patch(shape, x, y, r, colour):
    if shape == "circle":
        return Circle((x, y), r, color=colour)
    if shape == "ring":
        return Wedge((x, y), r, 0, 360, width=0.3 * r, color=colour)
    if shape == "square":
        return RegularPolygon((x, y), 4, radius=r * 2**0.5, orientation=0.7853981634, color=colour)
    if shape == "diamond":
        return RegularPolygon((x, y), 4, radius=r, color=colour)
    if shape == "triangle":
        return RegularPolygon((x, y), 3, radius=1.15 * r, color=colour)
    if shape == "star":
        return PathPatch(Curve.unit_regular_star(5, 0.42).transformed(_affine(x, y, r)), color=colour, lw=0)
    a = 0.36
    corners = [
        (-a, -1),
        (a, -1),
        (a, -a),
        (1, -a),
        (1, a),
        (a, a),
        (a, 1),
        (-a, 1),
        (-a, a),
        (-1, a),
        (-1, -a),
        (-a, -a),
    ]
    return PathPatch(Curve([(x + r * u, y + r * v) for u, v in [*corners, corners[0]]]), color=colour, lw=0)


def _affine(x, y, r):
    return mpl.transforms.Affine2D().scale(r).translate(x, y)


class Page:
    """A figure of so many pixels, with its origin at the top left."""

    def __init__(self, rng, size):
        self.rng, self.size, self.taken = rng, size, []
        self.figure = plt.figure(figsize=(size[0] / 100, size[1] / 100), dpi=100, facecolor=rng.choice(GROUNDS))
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set_xlim(0, size[0])
        self.axes.set_ylim(0, size[1])
        self.axes.axis("off")

    def room(self, w, h):
        for _ in range(300):
            x, y = self.rng.uniform(4, self.size[0] - w - 4), self.rng.uniform(4, self.size[1] - h - 4)
            if all(x + w + 6 < a or c + 6 < x or y + h + 6 < b or d + 6 < y for a, b, c, d in self.taken):
                self.taken.append((x, y, x + w, y + h))
                return x, y
        raise RuntimeError("no room")

    def shape(self, shape, colour, r):
        x, y = self.room(2 * r, 2 * r)
        self.axes.add_patch(patch(shape, x + r, y + r, r, COLOURS[colour]))
        return x + r, self.size[1] - y - r

    def text(self, text, colour):
        points = self.rng.uniform(19, 26)
        w, h = len(text) * points * 1.05, points * 1.4
        x, y = self.room(w, h)
        self.axes.text(x, y + 0.3 * h, text, fontsize=points, color=COLOURS[colour], family=self.rng.choice(FONTS))

    def save(self, name):
        self.figure.savefig(HERE / name, facecolor=self.figure.get_facecolor())
        plt.close(self.figure)


def draw(kind, number):
    """One picture, its question and its answer."""
    rng = random.Random(f"stranger {kind} {number}")
    page = Page(rng, (rng.randrange(240, 461), rng.randrange(240, 461)))
    shapes, colours = rng.sample(SHAPES, 5), rng.sample(sorted(COLOURS), 5)
    radius = lambda: rng.uniform(14, 34)  # noqa: E731
    if kind == "color":
        for shape, colour in zip(shapes[:3], colours, strict=False):
            page.shape(shape, colour, radius())
        question, answer = f"what color is the {shapes[0]}?", colours[0]
    elif kind == "count_shape":
        count = rng.randrange(0, 5)
        for _ in range(count):
            page.shape(shapes[0], rng.choice(colours), radius())
        for shape in rng.choices(shapes[1:], k=2):
            page.shape(shape, rng.choice(colours), radius())
        plural = shapes[0] + ("es" if shapes[0] == "cross" else "s")
        question, answer = f"how many {plural} are there?", str(count)
    elif kind == "count_color":
        count = rng.randrange(0, 5)
        for _ in range(count):
            page.shape(rng.choice(shapes), colours[0], radius())
        for colour in rng.choices(colours[1:], k=2):
            page.shape(rng.choice(shapes), colour, radius())
        question, answer = f"how many {colours[0]} things are there?", str(count)
    elif kind == "relation":
        places = [page.shape(shapes[place], colours[place], 22) for place in range(2)]
        dx, dy = places[1][0] - places[0][0], places[1][1] - places[0][1]
        if max(abs(dx), abs(dy)) < 60:
            return None
        side = ("right of" if dx > 0 else "left of") if abs(dx) > abs(dy) else ("below" if dy > 0 else "above")
        question, answer = f"what is {side} the {colours[0]} {shapes[0]}?", f"{colours[1]} {shapes[1]}"
    elif kind == "read":
        words = ["".join(rng.choice(READABLE) for _ in range(rng.randrange(2, 6))) for _ in "ab"]
        for word, colour in zip(words, colours, strict=False):
            page.text(word, colour)
        page.shape(shapes[0], colours[2], radius())
        question, answer = f"what does the {colours[0]} text say?", words[0]
    elif kind == "unusual":
        page.shape(shapes[1], colours[1], radius())
        for _ in range(rng.randrange(3, 6)):
            page.shape(shapes[0], colours[0], radius())
        question, answer = "what is unusual?", f"{colours[1]} {shapes[1]}"
    else:
        sizes = (52, 32, 19)[: rng.randrange(2, 4)]
        for shape, r in zip(shapes, sizes, strict=False):
            page.shape(shape, rng.choice(colours), r)
        question, answer = "what is in the picture?", ", ".join(shapes[: len(sizes)])
    name = f"{kind}/{number}.png"
    (HERE / kind).mkdir(exist_ok=True)
    page.save(name)
    return {"file": name, "kind": kind, "question": question, "answer": answer}


def main():
    rows = []
    for kind in ("color", "count_shape", "count_color", "relation", "read", "unusual", "overview"):
        number = made = 0
        while made < 10:
            try:
                row = draw(kind, number)
            except RuntimeError:
                row = None
            plt.close("all")
            number += 1
            if row is not None:
                rows.append(row)
                made += 1
    (HERE / "answers.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
