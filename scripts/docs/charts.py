"""Charts as SVG files without scripts: curves and bars.

Colours follow the colour scheme of the reader, and the background is the chart's own, so that it is legible wherever it
is shown. Title and description, with the numbers, are for screen readers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from statistics import fmean, stdev

from rl4lms_like.tracking.charts import nice_ticks

WIDTH = 400  # pixels: two pictures fit side by side into the column of a page, and one onto a phone
TOP = 54  # below the title and the line under it

LIGHT = {"paper": "#ffffff", "ink": "#1f2328", "faint": "#59636e", "grid": "#d1d9e0"}
LIGHT |= {"line-1": "#0969da", "line-2": "#bc4c00", "line-3": "#1a7f37", "line-4": "#8250df", "line-5": "#bf3989"}
DARK = {"paper": "#1c2128", "ink": "#e6edf3", "faint": "#a3adb8", "grid": "#3d444d"}
DARK |= {"line-1": "#6cb6ff", "line-2": "#f69d50", "line-3": "#6bc46d", "line-4": "#d2a8ff", "line-5": "#f778ba"}
"""Name -> colour, in both schemes."""


def style() -> str:
    """Return the style sheet of a picture."""
    rules = [
        ".paper{fill:var(--paper)}",
        "text{fill:var(--ink);font:12px system-ui,-apple-system,'Segoe UI',Roboto,Helvetica,Arial,sans-serif}",
        ".title{font-size:14px;font-weight:600}",
        ".faint{fill:var(--faint)}",
        ".grid{stroke:var(--grid)}",
        ".reference{stroke:var(--faint);stroke-dasharray:4 3}",
        "polyline{fill:none;stroke-width:2;stroke-linejoin:round}",
        ".band{opacity:.18}",
    ]
    for number in range(1, 6):
        color = f"var(--line-{number})"
        rules.append(f".line-{number} polyline{{stroke:{color}}}")
        rules.append(f".line-{number} .fill{{fill:{color}}}")
    return (
        f":root{{{_variables(LIGHT)}}}@media(prefers-color-scheme:dark){{:root{{{_variables(DARK)}}}}}{''.join(rules)}"
    )


def _variables(colors: Mapping[str, str]) -> str:
    return ";".join(f"--{name}:{color}" for name, color in colors.items())


def _document(title: str, subtitle: str, description: str, height: int, elements: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        f'role="img" aria-labelledby="title description">'
    )
    lines = [
        head,
        f'<title id="title">{escape(title)}</title>',
        f'<desc id="description">{escape(description)}</desc>',
        f"<style>{style()}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{height}" rx="6"/>',
        _text(14, 23, title, "title"),
        _text(14, 41, subtitle, "faint"),
        *elements,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


# --- learning curves -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    """Line of a picture: mean over seeds, with one standard deviation around it unless that is left out."""

    label: str
    x: Sequence[float]
    mean: Sequence[float]
    std: Sequence[float] | None = None

    @classmethod
    def of_seeds(cls, label: str, seeds: Sequence[Sequence[float]], x_per_iteration: float) -> Curve:
        """Average the values `seeds[seed][iteration]` of each iteration."""
        by_iteration = list(zip(*seeds, strict=True))
        x = [x_per_iteration * (iteration + 1) for iteration in range(len(by_iteration))]
        return cls(label, x, [fmean(values) for values in by_iteration], [stdev(values) for values in by_iteration])


@dataclass(frozen=True)
class Point:
    """Single point of a picture of curves."""

    label: str
    x: float
    y: float


def curves_picture(
    title: str,
    subtitle: str,
    x_name: str,
    curves: Sequence[Curve],
    y_range: tuple[float, float],
    points: Sequence[Point] = (),
) -> str:
    """Return a picture of learning curves, with their labels at the right, and of single points."""
    low, high = y_range
    x_max = max(*(max(curve.x) for curve in curves), *(point.x for point in points), 0.0)
    longest = max(len(one.label) for one in (*curves, *points))
    height, left, right, bottom = 250, 42, max(72, 14 + 8 * longest), 40

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            left + x / x_max * (WIDTH - left - right),
            height - bottom - (min(max(y, low), high) - low) / (high - low) * (height - bottom - TOP),
        )

    def line_of(xs: Sequence[float], ys: Sequence[float]) -> list[str]:
        return ["{:.1f},{:.1f}".format(*place(x, y)) for x, y in zip(xs, ys, strict=True)]

    elements = []
    for tick in nice_ticks(low, high):
        _, y = place(0, tick)
        elements.append(f'<line class="grid" x1="{left}" x2="{WIDTH - right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        elements.append(_text(left - 8, y + 4, f"{tick:.1f}", "faint", "end"))
    digits = 0 if x_max >= 4 else 1 if x_max >= 0.4 else 2
    for tick in nice_ticks(0, x_max, count=4):
        elements.append(_text(place(tick, low)[0], height - bottom + 17, f"{tick:,.{digits}f}", "faint", "middle"))
    elements.append(_text(place(x_max / 2, low)[0], height - 7, x_name, "faint", "middle"))

    for number, curve in enumerate(curves, start=1):
        line = f'<polyline points="{" ".join(line_of(curve.x, curve.mean))}"/>'
        if curve.std is not None:
            upper = line_of(curve.x, [mean + std for mean, std in zip(curve.mean, curve.std, strict=True)])
            lower = line_of(curve.x, [mean - std for mean, std in zip(curve.mean, curve.std, strict=True)])
            line = f'<polygon class="band fill" points="{" ".join(upper + lower[::-1])}"/>{line}'
        elements.append(f'<g class="line-{number}">{line}</g>')
    for point in points:
        x, y = place(point.x, point.y)
        elements.append(f'<circle fill="var(--ink)" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>')

    # A line's label is at the right edge, at the height of the line's end. A point's label is to the right of the
    # point, or to the left if it would meet those of lines. Labels that are close together are moved down.
    ends = [(curve.mean[-1], x_max, curve.label, f"line-{i}") for i, curve in enumerate(curves, start=1)]
    beside = [(point.y, point.x, point.label, "point") for point in points]
    for labels in (ends, beside):
        y_before = 0.0
        for value, x_value, label, kind in sorted(labels, key=lambda one: -one[0]):
            x, y = place(x_value, value)
            y_before = max(y, y_before + 15)
            is_left = kind == "point" and x_value > 0.8 * x_max
            x, anchor = (x - 8, "end") if is_left else (x + 6, "start")
            elements.append(f'<g class="{kind}">{_text(x, y_before + 4, label, "fill", anchor)}</g>')

    summary = []
    for curve in curves:
        first, last = (round(value, 2) + 0.0 for value in (curve.mean[0], curve.mean[-1]))  # -0.0 + 0.0 is 0.0
        summary.append(f"{curve.label} from {first:.2f} to {last:.2f}")
    summary += [f"{point.label} {point.y:.2f}" for point in points]
    description = f"{subtitle}. Along {x_name}: {'; '.join(summary)}."
    return _document(title, subtitle, description, height, elements)


# --- bars ------------------------------------------------------------------------------------------------------------


def bars_picture(title: str, subtitle: str, bars: Sequence[tuple[str, float]]) -> str:
    """Return a picture of horizontal bars with their values, and a dashed line at 1."""
    left, right, row = 160, 52, 26
    height = TOP + row * len(bars) + 14
    x_max = max(1.0, *(value for _, value in bars))

    def place(value: float) -> float:
        return left + value / x_max * (WIDTH - left - right)

    elements = [f'<line class="reference" x1="{place(1):.1f}" x2="{place(1):.1f}" y1="{TOP}" y2="{height - 10}"/>']
    for number, (label, value) in enumerate(bars):
        y = TOP + row * number
        elements.append(_text(left - 8, y + 17, label, anchor="end"))
        box = f'x="{left}" y="{y + 4}" width="{place(value) - left:.1f}" height="{row - 8}" rx="2"'
        elements.append(f'<g class="line-1"><rect class="fill" {box}/></g>')
        elements.append(_text(WIDTH - 14, y + 17, f"{value:.2f}", anchor="end"))

    description = f"{subtitle}. {'; '.join(f'{label}: {value:.2f}' for label, value in bars)}."
    return _document(title, subtitle, description, height, elements)
