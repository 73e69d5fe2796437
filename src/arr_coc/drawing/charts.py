"""Line charts as SVG text: sharp at any size, readable in light and dark, without a plotting library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

# Okabe and Ito's palette, which the colour-blind can tell apart; lines that share a colour differ in their dashes.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#7f7f7f")
DASHES = ("", "6 3", "2 3")
WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, TOP, BOTTOM = 56, 150, 16, 48

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
    """Draw named lines over a logarithmic x axis.

    Args:
        lines (`Mapping[str, Sequence[tuple[float, float]]]`): points of each line by its name; x must be above 0.
        x_label, y_label (`str`): labels of the axes, with units.
        strong (`str`, *optional*): name of the line to draw thicker.
        level (`tuple[float, str]`, *optional*): height and name of a horizontal line.
        ink (`str`, *optional*, defaults to `"currentColor"`): colour of axes and text.
        note (`str`, *optional*): a small line at the foot, such as where the numbers come from.

    Returns:
        `str`: the SVG.

    Example:

    ```python
    >>> from arr_coc.drawing.charts import line_chart
    >>> line_chart({"a": [(1, 0.5), (10, 1.0)]}, "tokens", "accuracy").count("<polyline")
    1

    ```
    """
    points = [point for line in lines.values() for point in line]
    if not points:
        raise ValueError("`lines` has no points; a chart needs at least one point")
    xs, ys = [math.log(x) for x, _ in points], [y for _, y in points]
    if level is not None:
        ys.append(level[0])
    low_x, high_x = min(xs), max(max(xs), min(xs) + 1e-6)
    high_y = math.ceil(10 * max(ys) + 1e-9) / 10
    low_y = min(math.floor(10 * min(ys)) / 10, high_y - 0.1)
    inner_width, inner_height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def across(x: float) -> float:
        return LEFT + inner_width * (math.log(x) - low_x) / (high_x - low_x)

    def down(y: float) -> float:
        return TOP + inner_height * (high_y - y) / (high_y - low_y)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(y_label)} over {escape(x_label)}" font-family="system-ui, sans-serif" font-size="12" '
        f'fill="{ink}">'
    ]
    step = 0.1 if high_y - low_y <= 0.8 else 0.2
    for number in range(round((high_y - low_y) / step) + 1):
        y = high_y - number * step
        parts.append(f'<path d="M{LEFT} {down(y):.1f}H{WIDTH - RIGHT}" stroke="{ink}" stroke-opacity="0.15"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{down(y) + 4:.1f}" text-anchor="end">{y:.1f}</text>')
    for x in _ticks(math.exp(low_x), math.exp(high_x)):
        parts.append(f'<path d="M{across(x):.1f} {HEIGHT - BOTTOM}v5" stroke="{ink}"/>')
        parts.append(f'<text x="{across(x):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{x:g}</text>')
    parts.append(f'<path d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}" stroke="{ink}" fill="none"/>')
    parts.append(f'<text x="{LEFT + inner_width / 2}" y="{HEIGHT - 14}" text-anchor="middle">{escape(x_label)}</text>')
    if note:
        parts.append(f'<text x="4" y="{HEIGHT - 3}" font-size="9" fill-opacity="0.7">{escape(note)}</text>')
    middle = TOP + inner_height / 2
    parts.append(f'<text transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>')
    if level is not None:
        y = down(level[0])
        parts.append(
            f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="{ink}" stroke-dasharray="1 4"/>'
            f'<text x="{LEFT + 6}" y="{y - 5:.1f}" font-style="italic">{escape(level[1])}</text>'
        )
    names = sorted(lines, key=lambda name: name == strong)  # the strong line is drawn last, over the others
    places = _spread({name: down(max(lines[name])[1]) for name in names if lines[name]})
    for name in names:
        if not lines[name]:
            continue
        number = list(lines).index(name)
        colour, dash = COLOURS[number % len(COLOURS)], DASHES[number // len(COLOURS) % len(DASHES)]
        width = 3.5 if name == strong else 1.6
        line = sorted(lines[name])
        path = " ".join(f"{across(x):.1f},{down(y):.1f}" for x, y in line)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"'
            + (f' stroke-dasharray="{dash}"' if dash else "")
            + f"><title>{escape(name)}</title></polyline>"
        )
        parts += [f'<circle cx="{across(x):.1f}" cy="{down(y):.1f}" r="{width}" fill="{colour}"/>' for x, y in line]
        weight = ' font-weight="bold"' if name == strong else ""
        end = across(line[-1][0])
        parts.append(
            f'<path d="M{end + 4:.1f} {down(line[-1][1]):.1f}L{WIDTH - RIGHT + 10} {places[name]:.1f}" '
            f'stroke="{colour}" stroke-opacity="0.4"/>'
            f'<text x="{WIDTH - RIGHT + 14}" y="{places[name] + 4:.1f}" fill="{colour}"{weight}>{escape(name)}</text>'
        )
    return "".join([*parts, "</svg>"])


def _spread(wanted: Mapping[str, float], gap: float = 14.0) -> dict[str, float]:
    """Heights of the labels, as close to the wanted ones as possible without overlapping."""
    placed: dict[str, float] = {}
    last = TOP - gap
    for name in sorted(wanted, key=lambda name: wanted[name]):
        last = max(wanted[name], last + gap)
        placed[name] = last
    last = HEIGHT - 4 + gap
    for name in sorted(placed, key=lambda name: -placed[name]):  # labels below the bottom move up again
        last = min(placed[name], last - gap)
        placed[name] = last
    return placed


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers from `low` to `high` for the ticks of a logarithmic axis."""
    candidates = [base * 10.0**power for power in range(-3, 7) for base in (1, 2, 5)]
    return [tick for tick in candidates if low * 0.999 <= tick <= high * 1.001] or [round(low, 2)]
