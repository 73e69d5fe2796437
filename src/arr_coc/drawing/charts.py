"""Line charts as SVG text, drawn by matplotlib: sharp at any size, readable on a phone, in light and in dark.

Matplotlib comes with the extra `eval`; nothing that answers questions imports this module.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import matplotlib as mpl
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FormatStrFormatter, LogLocator, MaxNLocator, NullLocator

# Okabe and Ito's palette, which the colour-blind can tell apart; lines of one colour differ in dashes and markers.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#7f7f7f")
DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)))
MARKERS = ("o", "s", "^")
# In points, as the labels are: on a screen 360 pixels wide, they are about as large as they are here.
WIDTH, HEIGHT, TEXT, LABEL = 390, 300, 11, 10
LEFT, TOP, BOTTOM, GAP, KEY = 42, 10, 54, 13, 18
LONGEST = 20  # letters of a label
NEAR = 0.85  # of the axis: from there on, a line is joined with its name
LOGARITHMIC = 3  # the largest x over the smallest from which on the x axis is logarithmic
_INK = "#010203"  # stands for `ink` until the SVG is written
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # letters stay letters
    "svg.hashsalt": "arr-coc",  # the same chart has the same text
    "text.parse_math": False,  # a dollar in a name is a dollar
    "font.size": TEXT,
    "text.color": _INK,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
}

Points = Sequence[tuple[float, float]]


def line_chart(
    lines: Mapping[str, Points],
    x_label: str,
    y_label: str,
    strong: str | None = None,
    level: tuple[float, str] | None = None,
    ink: str = "currentColor",
    note: str = "",
) -> str:
    """Draw named lines, each with its name at its end; over a wide range of x the x axis is logarithmic.

    Args:
        lines (`Mapping[str, Sequence[tuple[float, float]]]`): points of each line by its name, joined in this order;
            x must be above 0. A line without points is left out, and the others look as they do beside it.
        x_label, y_label (`str`): labels of the axes, with units.
        strong (`str`, *optional*): name of the line to draw thicker.
        level (`tuple[float, str]`, *optional*): height and name of a horizontal line.
        ink (`str`, *optional*, defaults to `"currentColor"`): colour of axes and text.
        note (`str`, *optional*): a small line at the foot, such as where the numbers come from.

    Returns:
        `str`: the SVG; the same for the same arguments.

    Example:

    ```python
    >>> from arr_coc.drawing.charts import line_chart
    >>> line_chart({"a": [(1, 0.5), (10, 1.0)]}, "tokens", "accuracy").count("<title>a</title>")
    1

    ```
    """
    drawn = {name: list(points) for name, points in lines.items() if points}
    if not drawn:
        raise ValueError("`lines` has no points; a chart needs at least one point")
    ends = {name: max(points) for name, points in drawn.items()}
    if level is not None:
        ends[level[1]] = (max(x for x, _ in ends.values()), level[0])
    names = {name: name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…" for name in ends}
    height = max(HEIGHT, TOP + BOTTOM + GAP * len(ends))
    right = KEY + 18 + 0.62 * LABEL * max(map(len, names.values()))  # room for the names
    with style.context("default"), mpl.rc_context(_STYLE):
        figure = Figure(figsize=(WIDTH / 72, height / 72))
        axes = figure.add_axes((LEFT / WIDTH, BOTTOM / height, 1 - (LEFT + right) / WIDTH, 1 - (TOP + BOTTOM) / height))
        _set_axes(axes, list(drawn.values()), ends)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        if note:
            figure.text(4 / WIDTH, 4 / height, note, size=7.5, alpha=0.7)
        places = _spread(axes, {name: y for name, (_, y) in ends.items()}, height)
        looks = {name: _look(number, name == strong) for number, name in enumerate(lines)}
        for number, (name, end) in enumerate(ends.items()):
            look = looks.get(name, {"color": _INK, "linewidth": 1, "linestyle": (0, (1, 3))})
            if name in drawn:
                axes.plot(*zip(*drawn[name], strict=True), **look, gid=f"line {number}", clip_on=False)
            else:
                axes.axhline(end[1], **look, gid=f"line {number}")
            place, key = places[name] / height, (WIDTH - right + 14) / WIDTH
            if axes.transLimits.transform(axes.transScale.transform(end))[0] > NEAR:  # else it would cross other lines
                axes.annotate(
                    "", end, (key, place), textcoords="figure fraction",
                    arrowprops={"arrowstyle": "-", "color": look["color"], "alpha": 0.4, "shrinkA": 0, "shrinkB": 4},
                )  # fmt: skip
            xs = [key, key + KEY / 2 / WIDTH, key + KEY / WIDTH]
            figure.add_artist(Line2D(xs, [place] * 3, **look, markevery=[1]))
            weight = "bold" if name == strong else "normal"
            figure.text(xs[-1] + 4 / WIDTH, place, names[name], size=LABEL, va="center_baseline", weight=weight)
        written = io.StringIO()
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _tidy(written.getvalue(), list(ends), f"{y_label} over {x_label}").replace(_INK, ink)


def _look(number: int, strong: bool) -> dict[str, Any]:
    """Colour, dashes, marker and width of a line."""
    turn = number // len(COLOURS) % len(DASHES)
    look = {"color": COLOURS[number % len(COLOURS)], "linestyle": DASHES[turn], "marker": MARKERS[turn]}
    # the strong line lies below the others, so that its width hides none of them
    return look | {"linewidth": 3 if strong else 1.3, "markersize": 6.5 if strong else 4, "zorder": 3 if strong else 4}


def _set_axes(axes: Axes, lines: Sequence[Points], ends: Mapping[str, tuple[float, float]]) -> None:
    """Limits and ticks; y reaches from one round tenth to another."""
    xs = [x for points in lines for x, _ in points]
    ys = [y for points in (*lines, ends.values()) for _, y in points]
    if max(xs) > LOGARITHMIC * min(xs):
        axes.set_xscale("log")
        axes.set_xlim(min(xs) / 1.05, max(xs) * 1.05)
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if max(xs) > 8 * min(xs) else (1, 1.5, 2, 3, 5, 7)))
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        margin = 0.04 * (max(xs) - min(xs)) or 0.5 * max(xs)
        axes.set_xlim(min(xs) - margin, max(xs) + margin)
        axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FormatStrFormatter("%g"))
    high = math.ceil(10 * max(ys) - 1e-9) / 10
    axes.set_ylim(min(math.floor(10 * min(ys) + 1e-9) / 10, high - 0.1), high)
    axes.yaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10]))
    axes.grid(axis="y", color=_INK, alpha=0.15)
    axes.tick_params(axis="y", length=0)


def _spread(axes: Axes, wanted: Mapping[str, float], height: float) -> dict[str, float]:
    """Heights of the labels in points, as close to those of their lines as possible without overlapping."""
    low, high = axes.get_ylim()
    bottom, top = BOTTOM, height - TOP
    placed: dict[str, float] = {}
    last = top + GAP
    for name in sorted(wanted, key=lambda name: -wanted[name]):
        last = min(bottom + (top - bottom) * (wanted[name] - low) / (high - low), last - GAP)
        placed[name] = last
    last = bottom - 2 * GAP
    for name in sorted(placed, key=lambda name: placed[name]):  # labels below the bottom move up again
        last = max(placed[name], last + GAP)
        placed[name] = last
    return placed


def _tidy(svg: str, names: Sequence[str], label: str) -> str:
    """The SVG alone, as wide as there is room, with names to hover over and no ids that nothing refers to."""
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg [^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg [^>]*?) height="[^"]*"', rf'\1 role="img" aria-label="{escape(label)}"', svg, count=1)
    for number, name in enumerate(names):
        svg = svg.replace(f'<g id="line {number}">', f"<g><title>{escape(name)}</title>")
    used = set(re.findall(r"#(\w+)[\")]", svg))
    return re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in used else "", svg)
