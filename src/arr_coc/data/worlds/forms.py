"""The world `forms`: scanned forms, delivery notes and till receipts, with questions about what is filled in."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
from PIL import Image, ImageDraw

from arr_coc.data.boxes import Box
from arr_coc.data.worlds.pages import ITEMS
from arr_coc.data.worlds.tools.drawing import COLOURS, SHAPES, Colour, draw_shape, jitter, jitter_named
from arr_coc.data.worlds.tools.fields import FORM_KEYS, KEYS
from arr_coc.data.worlds.tools.sheet import MOST_SKEW, Face, Sheet, choose_face, make_paper
from arr_coc.data.worlds.tools.wording import put
from arr_coc.data.worlds.world import Question, Scene, Size, Thing, World, register_world

_ALL = KEYS | FORM_KEYS
# None of these has a key's name in it.
_TITLES = (
    *("INVOICE", "RECEIPT", "DELIVERY NOTE", "ORDER FORM", "APPLICATION", "REGISTRATION", "CLAIM FORM", "STATEMENT"),
    *("PACKING LIST", "WORK ORDER", "RENTAL CONTRACT", "WAYBILL", "QUESTIONNAIRE", "CONSENT FORM", "Request Form"),
    *("Purchase Order", "Bill of Lading", "Sales Slip", "Service Report", "Insurance Form"),
)
_HEADINGS = (
    *("SECTION A", "SECTION B", "DETAILS", "CUSTOMER", "SHIPPING", "BILLING", "PAYMENT", "GENERAL", "GROUP ONE"),
    *("Personal", "For office use", "To be filled in", "Goods", "Contact", "Employment", "II. History", "1. Basics"),
)
_PROSE = (
    *("please", "return", "this", "form", "to", "our", "office", "within", "thirty", "days", "all", "goods", "remain"),
    *("property", "of", "until", "full", "thank", "you", "for", "shopping", "with", "us", "the", "undersigned"),
    *("agrees", "that", "above", "is", "true", "and", "complete", "no", "refund", "without", "receipt", "print"),
)
_BLANKS = ("remarks", "initials", "notes", "witness", "approved", "received")
_OPTIONS = (
    *("new", "used", "male", "female", "single", "other", "monthly", "weekly", "air", "sea", "rail", "urgent", "copy"),
)
_STAMPS = ("RECEIVED", "COPY", "APPROVED", "VOID", "FILED", "ENTERED")
_INKS: tuple[Colour, ...] = ((28, 48, 150), (20, 60, 120), (35, 35, 45), (60, 40, 130))


@register_world("forms")
class Forms(World):
    """Scanned forms and receipts."""

    kinds = ("form_value",)
    sides = (600, 1200)
    distracting = False  # until a form is read, any field may have the answer

    def draw(self, rng: random.Random, size: Size, kind: str, varied: bool = False) -> Scene:
        """Draw until something is filled in."""
        return draw_form(rng, size, varied)


def draw_form(rng: random.Random, size: Size, varied: bool = False, angle: float | None = None) -> Scene:
    """A form and a question about each of its fields.

    Args:
        rng (`random.Random`): makes all random choices.
        size (`tuple[int, int]`): width and height.
        varied (`bool`, *optional*, defaults to `False`): also use the extra fonts.
        angle (`float`, *optional*): degrees against the clock; by default at most `MOST_SKEW` to either side.

    Returns:
        [`Scene`]: boxes of questions are those of the key and of the value.

    Example:

    ```python
    >>> import random
    >>> from arr_coc.data.worlds.forms import draw_form
    >>> scene = draw_form(random.Random(1), (512, 640))
    >>> scene.picture.size, scene.questions[0].kind
    ((512, 640), 'form_value')

    ```
    """
    while True:
        form = _Form(rng, size, varied, angle)
        form.fill()
        if form.entries:
            return form.finish()


def choose_keys(rng: random.Random, most: int) -> list[str]:
    """Different keys, none of which is contained in another."""
    chosen: list[str] = []
    for key in rng.sample(list(_ALL), len(_ALL)):
        if len(chosen) == most:
            break
        if not any(key in other or other in key for other in chosen):
            chosen.append(key)
    return chosen


class _Form:
    """A form being set, from the top down."""

    def __init__(self, rng: random.Random, size: Size, varied: bool, angle: float | None) -> None:
        self.rng, self.size, self.varied = rng, size, varied
        skew = 0.0 if rng.random() < 0.15 else rng.uniform(-MOST_SKEW, MOST_SKEW)
        self.paper, ink = make_paper(rng)
        self.sheet = Sheet(rng, size, ink, skew if angle is None else angle)
        self.body = rng.randint(15, max(15, min(26, 12 + min(size) // 40)))
        self.face = choose_face(rng, self.body, varied)._replace(slanted=False)
        self.small = choose_face(rng, max(14, round(0.8 * self.body)), varied)._replace(pitch=0.0)
        self.filled, self.pen = self._choose_filling()
        self.case = rng.choice((str.title, str.title, str.capitalize, str.upper, str.upper, str.lower))
        self.entries: list[tuple[str, str, Box, Box]] = []
        self.most = rng.randint(8, 30)
        self.keys = deque(choose_keys(rng, self.most + 8))
        self.options = rng.sample(_OPTIONS, len(_OPTIONS))
        self._choose_room()

    def _choose_filling(self) -> tuple[Face, Colour | None]:
        """The face and ink of what is filled in: printed as the rest, typed, or by pen."""
        rng, kind = self.rng, self.rng.random()
        if kind < 0.4:
            return self.face, None
        size = min(26, self.body + rng.randint(0, 3))
        face = choose_face(rng, size, self.varied)
        if kind < 0.65:
            return face, None
        face = face._replace(pitch=0.0, bold=False, slanted=rng.random() < 0.7, shaky=True)
        return face, jitter(rng, rng.choice(_INKS), 12)

    def _choose_room(self) -> None:
        """What stays in the picture however the sheet is turned; a slip is narrower than the picture."""
        rng, (width, height) = self.rng, self.size
        sine = math.sin(math.radians(MOST_SKEW))
        lost_x, lost_y = height / 2 * sine + 2, width / 2 * sine + 2
        self.slip = rng.random() < 0.3
        widest = width - 2 * lost_x
        paper_width = min(widest, self.body * rng.uniform(17, 26)) if self.slip else widest
        left = lost_x + rng.uniform(0, 1) * (widest - paper_width)
        margin = rng.uniform(0.01, 0.06) * paper_width
        self.left, self.right = left + margin, left + paper_width - margin
        self.top, self.bottom = lost_y + rng.uniform(0, 0.04) * height, height - lost_y - rng.uniform(0, 0.04) * height
        self.edges: Box | None = None
        if self.slip and paper_width < widest - 8:
            self.edges = (left - 4, -height, left + paper_width + 4, 2 * height)
        elif rng.random() < 0.4:
            beside, above = rng.uniform(0, lost_x), rng.uniform(0, lost_y)
            self.edges = (beside, above, width - rng.uniform(0, lost_x), height - rng.uniform(0, lost_y))
        dark = rng.choice((rng.randint(5, 60), rng.randint(60, 160), rng.randint(190, 255)))
        self.bed = jitter(rng, (dark, dark, dark), 10)

    @property
    def room(self) -> float:
        return self.right - self.left

    def fill(self) -> None:
        """Head, fields in one or more sections, and what fits below them."""
        rng, roomy = self.rng, min(self.size) >= 420
        if rng.random() < (0.85 if roomy else 0.4):
            self.add_head()
        if self.slip and roomy and rng.random() < 0.6:
            self.add_items()
        while len(self.entries) < self.most and self.bottom - self.top > 3.2 * self.body:
            before = self.top
            if roomy and rng.random() < 0.35:
                self.add_heading()
            left = self.most - len(self.entries)
            count = left if rng.random() < 0.4 else rng.randint(min(3, left), left)
            layouts: tuple[Callable[[int], None], ...] = (self.add_lines, self.add_lines, self.add_columns)
            if not self.slip:
                layouts = (self.add_boxes, self.add_boxes, self.add_columns, self.add_lines)
            rng.choice(layouts)(count)
            self.top += rng.uniform(0.3, 1.0) * self.body
            if self.top < before + 2 * self.body:
                break
            if roomy and rng.random() < 0.25:
                rng.choice((self.add_prose, self.add_options))()
        if rng.random() < 0.5:
            self.add_options()
        self.add_end()

    def finish(self) -> Scene:
        """The scanned form, with a question about every field."""
        picture, things = self.sheet.finish(self.paper, self.edges, self.bed)
        turn = self.sheet.turn
        questions = tuple(
            Question("form_value", put(self.rng, "form_value", key=key), value, (turn(label), turn(filled)), clues=1)
            for key, value, label, filled in self.entries
        )
        return Scene(picture, questions, things)

    def choose(
        self, labels: Face, mark: str, room: float, begin: Callable[[float], float]
    ) -> tuple[str, str, str, float] | None:
        """The next key whose label and value fit: key, label, value, where the value begins; None if none fits."""
        for _ in range(min(4, len(self.keys))):
            key = self.keys.popleft()
            label = self.case(key) + mark
            label_width = labels.width(label)
            at = begin(label_width)
            for _ in range(4 if label_width <= room else 0):
                value = _ALL[key](self.rng)
                if at + self.filled.width(value) <= room:
                    return key, label, value, at
            self.keys.append(key)
        return None

    def enter(
        self, key: str, label: str, at: tuple[float, float], labels: Face, value: str, to: tuple[float, float]
    ) -> None:
        """Print a label at a place, and fill in its value at another; both are beginnings of baselines."""
        label_box = self.sheet.write(label, *at, labels, ("text", *key.split()))
        value_box = self.sheet.write(value, *to, self.filled, ("text",), self.pen)
        self.entries.append((key, value, label_box, value_box))

    def cells(self, count: int, columns: int, step: float) -> Iterator[tuple[int, float]]:
        """Column and baseline of each of some fields, row by row while there is room; the top moves below them."""
        top = self.top
        for place in range(count):
            row, column = divmod(place, columns)
            base = top + row * step + 1.1 * self.body
            if base + 0.4 * self.body > self.bottom:
                return
            self.top = top + (row + 1) * step
            yield column, base

    def add_columns(self, count: int) -> None:
        """Keys with their values behind them, or in line, in up to three columns."""
        rng, body = self.rng, self.body
        columns = rng.randint(1, max(1, min(3, int(self.room // (14 * body)))))
        width = (self.room - body * (columns - 1)) / columns
        step, mark = body * rng.uniform(1.45, 2.3), rng.choice((":", ":", "", "."))
        tab = rng.uniform(0.42, 0.55) * width if rng.random() < 0.5 else 0.0
        lined = rng.random() < 0.4
        for column, base in self.cells(count, columns, step):
            chosen = self.choose(self.face, mark, width, lambda label: max(label + 0.5 * body, tab))
            if chosen is None:
                continue
            key, label, value, at = chosen
            x = self.left + column * (width + body)
            self.enter(key, label, (x, base), self.face, value, (x + at, base))
            if lined:
                below = base + 0.32 * body
                self.sheet.rule(x + at - 3, below, x + width, below)

    def add_lines(self, count: int) -> None:
        """Keys at the left and values at the right edge, with leaders, rules or nothing between."""
        rng, body = self.rng, self.body
        columns = 2 if self.room > 28 * body and rng.random() < 0.5 else 1
        width = (self.room - 1.5 * body * (columns - 1)) / columns
        if columns == 1:
            width = min(width, body * rng.uniform(16, 40))
        step, mark = body * rng.uniform(1.35, 1.9), rng.choice((":", "", "", ""))
        leader, spread = rng.choice(("dots", "dots", "line", "none", "none")), rng.randint(4, 9)
        ruled = rng.random() < 0.4
        for column, base in self.cells(count, columns, step):
            chosen = self.choose(self.face, mark, width, lambda label: label + body)
            if chosen is None:
                continue
            key, label, value, _ = chosen
            x = self.left + column * (width + 1.5 * body)
            end = x + width - self.filled.width(value)
            self.enter(key, label, (x, base), self.face, value, (end, base))
            self.lead(x + self.face.width(label), end, base, leader, spread)
            if ruled and leader == "none":
                self.sheet.rule(x, base + 0.33 * body, x + width, base + 0.33 * body)

    def lead(self, begin: float, end: float, base: float, leader: str, spread: int) -> None:
        """What leads from a key to its value."""
        begin, end = begin + 0.4 * self.body, end - 0.4 * self.body
        if end > begin and leader == "dots":
            self.sheet.dots(begin, end, base, spread)
        elif end > begin and leader == "line":
            self.sheet.rule(begin, base, end, base)

    def add_boxes(self, count: int) -> None:
        """Rows of ruled boxes, with small labels above or left of what is filled in, now and then a comb."""
        rng, body, small = self.rng, self.body, self.small
        above = rng.random() < 0.6 or self.room < 13 * body
        pad, thick = rng.uniform(3, 6), rng.choice((1, 1, 2))
        height = (small.size * 1.15 + body * 1.45 if above else body * 1.7) + pad
        widest = max(1, min(4, int(self.room // ((8 if above else 13) * body))))
        gap = rng.choice((0.0, 0.0, rng.uniform(3, 8)))
        done = 0
        while done < count and self.top + height < self.bottom:
            columns = min(count - done, rng.randint(1, widest))
            parts = [rng.uniform(1, 1.8) for _ in range(columns)]
            x = self.left
            for part in parts:
                width = part / sum(parts) * self.room
                self.sheet.frame((x, self.top, x + width - gap, self.top + height), thick)
                done += 1
                self.fill_box(x + pad + 1, width - gap - 2 * pad - 2, height, above)
                x += width
            self.top += height + gap

    def fill_box(self, x: float, width: float, height: float, above: bool) -> None:
        """Put a field into a box; one that nothing fits into stays empty."""
        mark, behind = ("", 0.0) if above else (self.rng.choice((":", "")), 0.5 * self.body)
        chosen = self.choose(self.small, mark, width, lambda label: 0.0 if above else label + behind)
        low = self.top + height - 0.4 * self.body
        high = self.top + 1.1 * self.small.size if above else low
        if chosen is None:
            blank = self.case(self.rng.choice(_BLANKS))
            if self.small.width(blank) <= width:
                self.sheet.write(blank, x, high, self.small)
            return
        key, label, value, at = chosen
        pitch = self.filled.size * 1.05
        if above and " " not in value and pitch * len(value) < width and self.rng.random() < 0.2:
            plain, self.filled = self.filled, self.filled._replace(pitch=pitch)
            self.enter(key, label, (x, high), self.small, value, (x, low))
            self.filled = plain
            for place in range(self.rng.randint(len(value), int(width / pitch)) + 1):
                self.sheet.rule(x + place * pitch, low - 0.2 * pitch, x + place * pitch, low + 0.4 * self.body)
            return
        beside = self.rng.choice((0.0, 0.0, 0.3)) * (width - at - self.filled.width(value))
        self.enter(key, label, (x, high), self.small, value, (x + at + beside, low))

    def add_items(self) -> None:
        """Goods and their prices, which nobody asks for."""
        rng, body = self.rng, self.body
        step = body * rng.uniform(1.3, 1.6)
        items = [item for item in ITEMS if item not in _ALL]
        self.keys = deque(key for key in self.keys if key not in ("price", "cost"))
        for item in rng.sample(items, rng.randint(2, 7)):
            base, name, price = self.top + 1.1 * body, self.case(item), KEYS["price"](rng)
            end = self.right - self.face.width(price)
            if base + 6 * body > self.bottom or self.left + self.face.width(name) + body > end:
                continue
            self.sheet.write(name, self.left, base, self.face, ("text", item))
            self.sheet.write(price, end, base, self.face)
            self.top += step
        self.sheet.rule(self.left, self.top + 0.3 * body, self.right, self.top + 0.3 * body)
        self.top += 0.6 * body

    def add_head(self) -> None:
        """A title, with a logo or lines of prose."""
        rng = self.rng
        face = choose_face(rng, round(self.body * rng.uniform(1.2, 1.9)), self.varied)._replace(pitch=0.0)
        title, left = rng.choice(_TITLES), self.left
        if rng.random() < 0.4 and not self.slip:
            size = round(2.2 * face.size)
            self.add_logo(self.left, self.top, size)
            left += size + self.body
            if face.width(title) <= self.right - left:
                self.sheet.write(title, left, self.top + 1.4 * face.size, face, ("text", "title"))
            self.top += 1.1 * size
        elif face.width(title) <= self.room:
            x = left + rng.choice((0.0, 0.5)) * (self.room - face.width(title))
            self.sheet.write(title, x, self.top + face.size, face, ("text", "title"))
            self.top += 1.5 * face.size
        if rng.random() < 0.3:
            self.add_prose()
        if rng.random() < 0.3:
            self.sheet.rule(self.left, self.top, self.right, self.top + rng.choice((1, 2, 3)))
            self.top += 0.5 * self.body

    def add_logo(self, x: float, y: float, size: int) -> None:
        """A shape of some colour."""
        rng = self.rng
        shape, colour = rng.choice(SHAPES), rng.choice([name for name in COLOURS if name != "white"])
        image = Image.new("RGB", (size + 1, size + 1))
        draw_shape(ImageDraw.Draw(image), shape, size / 2, size / 2, size / 2 - 1, (255, 255, 255))
        box = (x, y, x + size, y + size)
        self.sheet.imprint(np.asarray(image.convert("L")), round(x), round(y))
        self.sheet.colour(box, jitter_named(rng, colour, self.paper))
        self.sheet.things.append(Thing(box, (shape, colour)))

    def add_heading(self) -> None:
        """The name of a section, underlined or on its own."""
        rng, body = self.rng, self.body
        heading, face = rng.choice(_HEADINGS), self.face._replace(bold=True)
        if self.bottom - self.top < 5 * body or face.width(heading) > self.room:
            return
        self.sheet.write(heading, self.left, self.top + 1.2 * body, face)
        self.top += 1.6 * body
        if rng.random() < 0.5:
            self.sheet.rule(self.left, self.top, self.right, self.top)
            self.top += 0.3 * body

    def add_prose(self) -> None:
        """One or two lines of small print."""
        for _ in range(self.rng.randint(1, 2)):
            words = self.rng.sample(_PROSE, self.rng.randint(4, 14))
            while words and self.small.width(" ".join(words)) > self.room:
                words.pop()
            if words and self.top + 4 * self.body < self.bottom:
                self.sheet.write(" ".join(words), self.left, self.top + self.small.size, self.small)
                self.top += 1.3 * self.small.size
        self.top += 0.3 * self.body

    def add_options(self) -> None:
        """Check boxes, some of them ticked."""
        rng, body, sheet = self.rng, self.body, self.sheet
        base, x = self.top + 1.2 * body, self.left
        if base + 0.4 * body > self.bottom:
            return
        side = round(0.8 * body)
        for _ in range(min(len(self.options), rng.randint(2, 4))):
            name = self.case(self.options.pop())
            if x + 1.4 * side + self.face.width(name) > self.right:
                break
            sheet.frame((x, base - side, x + side, base))
            if rng.random() < 0.4:
                image = Image.new("L", (side, side))
                tick = ImageDraw.Draw(image)
                tick.line([(3, 3), (side - 2, side - 2)], fill=255, width=2)
                tick.line([(3, side - 2), (side - 2, 3)], fill=255, width=2)
                sheet.imprint(np.asarray(image), round(x), round(base - side))
            sheet.write(name, x + 1.4 * side, base, self.face)
            x += 1.4 * side + self.face.width(name) + 1.2 * body
        self.top += 1.9 * body

    def add_end(self) -> None:
        """Below the fields, as there is room: a stamp, a signature, small print."""
        rng, body = self.rng, self.body
        left = self.bottom - self.top
        if left > 4.5 * body and rng.random() < 0.4:
            self.add_stamp(min(left, 9 * body))
        if left > 4.5 * body and rng.random() < 0.4:
            self.add_signature()
        if rng.random() < 0.4:
            self.add_prose()

    def add_stamp(self, room: float) -> None:
        """A word in a frame, put there aslant at the right."""
        rng = self.rng
        word, colour = rng.choice(_STAMPS), rng.choice(("red", "blue", "green", "purple", "black"))
        face = choose_face(rng, rng.randint(16, 24), self.varied)
        width, height = round(face.width(word)) + 16, round(1.8 * face.size)
        if width > 0.5 * self.room or height + 0.2 * width > room:
            return
        stamp = Sheet(rng, (width, height), self.sheet.ink, 0.0)
        stamp.frame((1, 1, width - 4, height - 4), 2)
        stamp.write(word, 8, 1.25 * face.size, face._replace(shaky=False))
        image = Image.fromarray(stamp.cover).rotate(rng.uniform(-12, 12), Image.Resampling.BILINEAR, expand=True)
        x, y = round(self.right - image.width), round(self.top)
        self.sheet.imprint(np.asarray(image), x, y)
        box = (x, y, x + image.width, y + image.height)
        self.sheet.colour(box, jitter_named(rng, colour, self.paper))
        self.sheet.things.append(Thing(box, ("text", colour)))

    def add_signature(self) -> None:
        """A scribble on a line at the left."""
        rng, body = self.rng, self.body
        width, height = round(min(0.45 * self.room, 10 * body)), round(2.4 * body)
        image = Image.new("L", (width, height))
        steps = rng.randint(14, 30)
        path = [
            (4 + (width - 8) * step / steps + rng.uniform(-0.5, 0.5) * body, height * (0.5 + 0.42 * rng.uniform(-1, 1)))
            for step in range(steps)
        ]
        ImageDraw.Draw(image).line(path, fill=255, width=rng.choice((1, 2)), joint="curve")
        y = round(self.top + 0.2 * body)
        self.sheet.imprint(np.asarray(image), round(self.left), y)
        self.sheet.colour((self.left, y, self.left + width, y + height), jitter(rng, rng.choice(_INKS), 12))
        self.sheet.rule(self.left, y + height, self.left + width, y + height)
        self.sheet.write(self.case("signature"), self.left, y + height + 1.1 * self.small.size, self.small)
        self.top = y + height + 1.6 * self.small.size
