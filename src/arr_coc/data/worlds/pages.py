"""The world `pages`: forms, receipts and tables with titles and footnotes, with questions about what they say."""

from __future__ import annotations

import random

from arr_coc.data.boxes import Box
from arr_coc.data.worlds.tools.drawing import Canvas, Colour, Font, choose_font, jitter, make_ground
from arr_coc.data.worlds.tools.fields import KEYS, Maker, amount, code, number, word
from arr_coc.data.worlds.tools.wording import put
from arr_coc.data.worlds.world import Question, Scene, Size, World, register_world

# Items of receipts and tables, one per line.
ITEMS = (
    *("apple", "banana", "bread", "cake", "carrot", "cup", "donut", "fork", "knife", "orange", "pizza", "sandwich"),
    *("spoon", "umbrella", "vase", "bottle", "book", "chair", "clock", "toaster"),
)
COLUMNS = ("price", "count", "weight", "code", "size", "row")
_PROSE = (
    *("the", "and", "with", "from", "this", "that", "for", "are", "you", "your", "our", "all", "not", "over", "under"),
    *("please", "when", "then", "more", "will"),
)
_TITLES = (
    *("INVOICE", "RECEIPT", "MENU", "REPORT", "ORDER", "TICKET", "BILL", "LIST", "FORM", "LETTER", "NOTICE", "PLAN"),
)


@register_world("pages")
class Pages(World):
    """Printed pages."""

    kinds = ("page_value", "page_cell", "page_title", "page_footnote")
    sides = (256, 768)
    least = 96
    distracting = False  # until a page is read, any line may have the answer

    def draw(self, rng: random.Random, size: Size, kind: str, varied: bool = False) -> Scene:
        """Draw until the page has a question of the kind."""
        while True:
            page = _Page(rng, size, varied)
            page.add_footnote(certain=kind == "page_footnote")
            page.add_title(certain=kind == "page_title")
            if rng.random() < 0.3:
                page.add_prose()
            form = rng.random() < 0.5 if kind in ("page_title", "page_footnote") else kind == "page_value"
            if rng.random() < 0.3:
                page.add_receipt()
            elif form:
                page.add_form(rng.choice((1, 1, 2)))
            else:
                page.add_table()
            if any(question.kind == kind for question in page.questions):
                return Scene(page.canvas.finish(), tuple(page.questions), tuple(page.canvas.things))


class _Page:
    """A page being written, from the top down and from the bottom up."""

    def __init__(self, rng: random.Random, size: Size, varied: bool) -> None:
        self.rng = rng
        dark = rng.random() < 0.12
        paper = jitter(rng, (30, 32, 36) if dark else (246, 244, 240), rng.choice((4, 9)))
        self.ink: Colour = jitter(rng, (225, 225, 225), 20) if dark else jitter(rng, (35, 35, 40), 30)
        ground = make_ground(rng, size, paper)
        self.canvas = Canvas(rng, size, *ground, varied, scale=2 if min(size) <= 512 and rng.random() < 0.5 else 1)
        self.body = rng.randint(16, 17 + min(size) // 36)
        self.font = self.new_font(self.body)
        self.margin = rng.uniform(0.03, 0.09) * size[0]
        self.top, self.bottom = rng.uniform(0.02, 0.07) * size[1], size[1] * rng.uniform(0.93, 0.98)
        self.questions: list[Question] = []

    def new_font(self, height: int) -> Font:
        return choose_font(self.rng, height * self.canvas.scale, self.canvas.varied)

    @property
    def room(self) -> float:
        return self.canvas.size[0] - 2 * self.margin

    def fit(self, make: Maker, font: Font, room: float) -> str | None:
        """Make a text that fits the room; None if several tries fail."""
        for _ in range(6):
            text = make(self.rng)
            if self.canvas.measure(text, font)[0] <= room:
                return text
        return None

    def write(self, text: str, x: float, y: float, words: tuple[str, ...] = ("text",)) -> Box:
        """Write in the body font, with y at the top of the line."""
        return self.canvas.write(text, x, y, self.ink, self.font, words, line=True)

    def add_prose(self) -> None:
        """Add a few lines of filler words."""
        font = self.new_font(max(14, round(0.85 * self.body)))
        for _ in range(self.rng.randint(1, 3)):
            text = ""
            while self.canvas.measure(longer := f"{text} {self.rng.choice(_PROSE)}".strip(), font)[0] < self.room:
                text = longer
            if text and self.top + 4 * self.body < self.bottom:
                self.canvas.write(text, self.margin, self.top, self.ink, font, line=True)
                self.top += 1.3 * self.body
        self.top += 0.5 * self.body

    def add_title(self, certain: bool) -> None:
        """Add a large title at the top: a usual word, random letters, or both."""
        if not certain and self.rng.random() < 0.3:
            return
        font = self.new_font(round(self.body * self.rng.uniform(1.25, 1.9)))

        def make(rng: random.Random) -> str:
            known, other = rng.choice(_TITLES), rng.choice((word, code))(rng)
            return rng.choice((known, other, f"{known} {other}"))

        title = self.fit(make, font, self.room)
        if title is None:
            return
        width, height = self.canvas.measure(title, font)
        x = self.margin + self.rng.choice((0.0, 0.5)) * (self.room - width)
        box = self.canvas.write(title, x, self.top, self.ink, font, ("text", "title"))
        self.top += height * self.rng.uniform(1.4, 2.1)
        if self.rng.random() < 0.3:
            self.rule(self.top)
            self.top += 0.4 * self.body
        self.questions.append(Question("page_title", put(self.rng, "page_title"), title, (box,)))

    def add_footnote(self, certain: bool) -> None:
        """Add a small footnote at the bottom, after an asterisk."""
        if not certain and self.rng.random() < 0.4:
            return
        font = self.new_font(max(15, round(self.body * self.rng.uniform(0.75, 0.95))))
        note = self.fit(
            lambda rng: " ".join(rng.choice((word, code, number))(rng) for _ in range(rng.randint(1, 2))),
            font, self.room - self.body,
        )  # fmt: skip
        if note is None:
            return
        _, height = self.canvas.measure(note, font)
        star, _ = self.canvas.measure("*", font)
        y = self.bottom - height
        self.canvas.write("*", self.margin, y, self.ink, font, ("footnote",))
        box = self.canvas.write(note, self.margin + star + 3, y, self.ink, font, ("text", "footnote"))
        self.bottom = y - self.body * self.rng.uniform(0.5, 1.5)
        self.questions.append(Question("page_footnote", put(self.rng, "page_footnote"), note, (box,)))

    def add_form(self, columns: int) -> None:
        """Add keys and values in one or two columns; values follow their keys, or are aligned."""
        rng = self.rng
        columns = columns if self.canvas.size[0] >= 420 else 1
        step = self.body * rng.uniform(1.35, 2.2)
        keys = rng.sample(list(KEYS), len(KEYS))
        mark, style = (
            rng.choice((":", ":", "", " ")),
            rng.choice((str.capitalize, str.capitalize, str.lower, str.upper)),
        )
        apart = rng.random() < 0.5
        width = self.room / columns - (8 if columns > 1 else 0)
        entries: list[tuple[str, Box, str, Box]] = []
        most = rng.randint(2, 16)
        for place in range(int((self.bottom - self.top) / step) * columns):
            if len(entries) == most or not keys:
                break
            key = keys.pop()
            x = self.margin + place % columns * (width + 16)
            y = self.top + place // columns * step
            label = style(key) + mark
            label_width, _ = self.canvas.measure(label, self.font)
            begin = max(label_width + 0.6 * self.body, 0.5 * width if apart else 0)
            value = self.fit(KEYS[key], self.font, width - begin)
            if value is None:
                continue
            key_box = self.write(label, x, y, ("text", key))
            entries.append((key, key_box, value, self.write(value, x + begin, y)))
        for key, key_box, value, box in entries:
            self.questions.append(
                Question("page_value", put(rng, "page_value", key=key), value, (key_box, box), clues=1)
            )

    def add_table(self) -> None:
        """Add a table with items down and columns across, with or without lines."""
        rng = self.rng
        step = self.body * rng.uniform(1.4, 2.2)
        rows = min(rng.randint(2, 9), int((self.bottom - self.top) / step) - 1)
        names = rng.sample(COLUMNS, rng.randint(1, 3))
        items = rng.sample(ITEMS, max(0, rows))
        first = max((self.canvas.measure(item, self.font)[0] for item in items), default=0) + self.body
        width = (self.room - first) / len(names)
        if rows < 2 or any(self.canvas.measure(name, self.font)[0] > width - 6 for name in names):
            return
        style, ruled = rng.choice((str.capitalize, str.lower)), rng.random() < 0.5
        heads = {
            name: self.write(style(name), self.margin + first + place * width, self.top, ("text", name))
            for place, name in enumerate(names)
        }
        for row, item in enumerate(items, 1):
            y = self.top + row * step
            if ruled:
                self.rule(y - 0.08 * step)
            label = self.write(style(item), self.margin, y, ("text", item))
            for place, name in enumerate(names):
                maker = {"price": amount, "code": code}.get(name, number)
                value = self.fit(maker, self.font, width - 6)
                if value is not None:
                    x = self.margin + first + place * width
                    box = self.write(value, x, y)
                    text = put(rng, "page_cell", key=name, item=item)
                    self.questions.append(Question("page_cell", text, value, (heads[name], label, box), clues=2))

    def add_receipt(self) -> None:
        """Add items with their prices at the right edge, and the total below a line."""
        rng = self.rng
        step = self.body * rng.uniform(1.3, 1.8)
        rows = min(rng.randint(1, 9), int((self.bottom - self.top) / step) - 2)
        style = rng.choice((str.capitalize, str.lower, str.upper))
        lines = [("price", item) for item in rng.sample(ITEMS, max(0, rows))] + [("total", "total")]
        right = self.margin + min(self.room, self.body * rng.uniform(9, 20))
        for place, (key, item) in enumerate(lines):
            y = self.top + place * step + (0.6 * step if key == "total" else 0)
            name_width, height = self.canvas.measure(style(item), self.font)
            price = self.fit(amount, self.font, right - self.margin - name_width - self.body)
            if price is None or y + height > self.bottom:
                continue
            if key == "total":
                self.rule(y - 0.2 * step)
            label = self.write(style(item), self.margin, y, ("text", item))
            box = self.write(price, right - self.canvas.measure(price, self.font)[0], y)
            kind = "page_value" if key == "total" else "page_cell"
            text = put(rng, kind, key=key, item=item)
            self.questions.append(Question(kind, text, price, (label, box), clues=1))

    def rule(self, y: float) -> None:
        """Draw a line across the page."""
        scale = self.canvas.scale
        ends = [self.margin * scale, y * scale, (self.margin + self.room) * scale, y * scale]
        self.canvas.pen.line(ends, fill=self.ink, width=scale)
