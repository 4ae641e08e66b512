"""Small line charts as inline SVG, without scripts; colours from the page's style sheet, a tooltip on every point.

    data -> Frame (ranges, ticks, linear or logarithmic) -> band, gridlines, line, target, hover columns

A value of None is a gap in the line. Axes end at the limits of the data; ticks are 1, 2 or 5 times a power of ten. A
long series is drawn as its trend (running medians) over a faint line with all peaks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby, pairwise
from operator import itemgetter
from statistics import median
from typing import TypeAlias

WIDTH, HEIGHT = 340, 170
LEFT, RIGHT, TOP, BOTTOM = 44, 12, 10, 24
MAX_POINTS = 300
MAX_DOTS = 16
LOG_ZERO = 1e-15

Point: TypeAlias = "tuple[float, float | None, float | None]"
"""x, y, and the standard deviation drawn around y; None if there is none."""


@dataclass(frozen=True)
class Series:
    """Line of a chart."""

    label: str
    points: Sequence[Point]

    @property
    def last(self) -> float | None:
        """Last value that is not None."""
        return next((y for _, y, _ in reversed(self.points) if y is not None), None)


@dataclass(frozen=True)
class Frame:
    """Mapping from values to canvas positions."""

    x_range: tuple[float, float]
    y_range: tuple[float, float]
    log: bool

    def x(self, value: float) -> float:
        """Return the canvas position of an x."""
        low, high = self.x_range
        fraction = (value - low) / (high - low) if high > low else 0.5
        return LEFT + fraction * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        """Return the canvas position of a y; values outside the range are clipped."""
        low, high = self.y_range
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(max(value, low))
        fraction = min(max((value - low) / (high - low), 0.0), 1.0)
        return HEIGHT - BOTTOM - fraction * (HEIGHT - TOP - BOTTOM)

    def place(self, x: float, y: float) -> str:
        """Return both canvas positions, for `points` of SVG."""
        return f"{self.x(x):.1f},{self.y(y):.1f}"


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    x_name: str = "iteration",
    log: bool = False,
    target: float | None = None,
    from_zero: bool = False,
) -> str:
    """Return a chart of one or two lines as an `<svg>` element; the first line has the accent colour.

    The title and a summary of the lines are for screen readers. On a logarithmic y axis, values of zero and below are
    drawn on the lower border. `target` is the y of a dashed horizontal line.

    Raises:
        ValueError: if there is no value to draw.
    """
    is_long = any(len(line.points) > MAX_POINTS for line in series)
    raw = [Series(line.label, thinned(line.points)) for line in series] if is_long else series
    series = [Series(line.label, trend(line.points)) for line in series] if is_long else series
    frame = _frame(raw, log=log, target=target, from_zero=from_zero)
    parts = [_grid(frame), _axis(frame, x_name)]
    if target is not None:
        parts.append(_rule("target", frame.y(target)))
    for number, line in enumerate(series, start=1):
        noise = f'<g class="raw">{_line(raw[number - 1], frame)}</g>' if is_long else ""
        parts.append(f'<g class="line-{number}">{_band(line, frame)}{noise}{_line(line, frame)}</g>')
    parts.append(_hover(series, frame, x_name))
    summary = "; ".join(_summary(line) for line in series)
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(f"{title}. {summary}")}">'
        f"{''.join(parts)}</svg>"
    )


def thinned(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """Return about `limit` points with all peaks: the lowest and the highest of each segment."""
    y = itemgetter(1)
    pairs = ({min(segment, key=y), max(segment, key=y)} for segment in _segments(points, limit // 2))
    return [point for pair in pairs for point in sorted(pair, key=itemgetter(0))]


def trend(points: Sequence[Point], limit: int = MAX_POINTS // 3) -> list[Point]:
    """Return about `limit` points: the middle of each segment with the segment's median y."""
    middles: list[Point] = []
    for segment in _segments(points, limit):
        stds = [std for _, _, std in segment if std is not None]
        x = segment[len(segment) // 2][0]
        middles.append((x, median(y for _, y, _ in segment if y is not None), median(stds) if stds else None))
    return middles


def _segments(points: Sequence[Point], n: int) -> Iterator[list[Point]]:
    """Yield up to `n` runs of consecutive points, without those that have no value."""
    there = [point for point in points if point[1] is not None]
    length = math.ceil(len(there) / n) or 1
    return (there[start : start + length] for start in range(0, len(there), length))


def nice_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Return about `count` round numbers within `[low, high]`, spaced by 1, 2 or 5 times a power of ten."""
    if high <= low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * min((1, 2, 5, 10), key=lambda factor: abs(math.log(factor * power / rough)))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def format_number(value: float | None, digits: int = 3) -> str:
    """Format a number: `0.0123`, `12,300`, `1.5M`, `3.1e-6`, `−0.2`; an en dash for None."""
    if value is None or not math.isfinite(value):
        return "–"
    size = abs(value)
    if 999_500 <= size < 9.995e8:
        text = f"{value / 1e6:,.{digits}g}M"
    elif 999.5 <= size < 999_500:
        text = f"{value:,.0f}"
    elif value == 0 or 1e-4 <= size < 999.5:
        text = f"{value:.{digits}g}"
    else:
        text = f"{value:.{digits - 1}g}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")
    return text.replace("-", "−", 1) if value < 0 else text


def duration(seconds: float) -> str:
    """Format seconds as `0:42`, `12:05` or `3:07:12`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _frame(series: Sequence[Series], *, log: bool, target: float | None, from_zero: bool) -> Frame:
    points = [(x, y, std or 0.0) for line in series for x, y, std in line.points if y is not None]
    if not points:
        raise ValueError("nothing to draw: no series has a value")
    xs = [x for x, _, _ in points]
    ys = [edge for _, y, std in points for edge in (y - std, y + std)] + ([] if target is None else [target])
    if log:
        positive = [y for y in ys if y > LOG_ZERO] or [1e-9]
        low, high = 10 ** math.floor(math.log10(min(positive))), 10 ** math.ceil(math.log10(max(positive)))
        return Frame((min(xs), max(xs)), (low, high if high > low else low * 10), log=True)
    low, high = min(ys), max(ys)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    size = max(abs(low), abs(high))
    is_flat = high - low <= 1e-9 * size + 1e-200
    pad = 0.05 * (high - low) if not is_flat else 0.5 * size if size > 1e-200 else 1.0
    bottom = low if from_zero and low == 0 else low - pad  # rests on zero
    top = high if from_zero and high == 0 > low else high + pad  # hangs from zero
    return Frame((min(xs), max(xs)), (bottom, top), log=False)


def _grid(frame: Frame) -> str:
    if frame.log:
        low, high = (round(math.log10(edge)) for edge in frame.y_range)
        powers = range(low, high + 1, max(1, math.ceil((high - low) / 4)))
        ticks = [(10.0**power, f'10<tspan class="power" dy="-4">{power}</tspan>') for power in powers]
    else:
        values = nice_ticks(*frame.y_range)
        ticks = [(value, escape(label)) for value, label in zip(values, _tick_labels(values), strict=True)]
    parts = []
    for value, label in ticks:
        y = frame.y(value)
        parts.append(_rule("grid", y))
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{label}</text>')
    return "".join(parts)


def _tick_labels(values: Sequence[float]) -> list[str]:
    """Return the labels of an axis, with the same number of decimals."""
    step = values[1] - values[0] if len(values) > 1 else abs(values[0]) if values else 1.0
    largest = max(map(abs, values), default=0.0)
    if largest >= 1e6:
        return [format_number(value) for value in values]
    if largest >= 10_000:
        return [f"{format_number(value / 1000)}k" if value else "0" for value in values]
    if step and step < 1e-4:
        return [format_number(value, 2) for value in values]
    decimals = max(0, -math.floor(math.log10(step) + 1e-9)) if step else 0
    near = (value if abs(value) > step * 1e-6 else 0 for value in values)
    return [f"{value:,.{decimals}f}".replace("-", "−") for value in near]


def _axis(frame: Frame, x_name: str) -> str:
    low, high = frame.x_range
    ticks = [tick for tick in nice_ticks(low, high, count=5) if tick == round(tick) or high - low < 4]
    parts = [_rule("axis", HEIGHT - BOTTOM)]
    for tick in ticks:
        place = f'x="{frame.x(tick):.1f}" y="{HEIGHT - 8}" text-anchor="middle"'
        parts.append(f'<text class="tick" {place}>{format_number(tick)}</text>')
    parts.append(f'<text class="tick name" x="0" y="{HEIGHT - 8}">{escape(x_name)}</text>')
    return "".join(parts)


def _band(line: Series, frame: Frame) -> str:
    inside = [(x, y, std) for x, y, std in line.points if y is not None and std is not None]
    if len(inside) < 2:
        return ""
    upper = [frame.place(x, y + std) for x, y, std in inside]
    lower = [frame.place(x, y - std) for x, y, std in reversed(inside)]
    return f'<polygon class="band" points="{" ".join(upper + lower)}"/>'


def _line(line: Series, frame: Frame) -> str:
    parts = []
    for is_there, run in groupby(line.points, key=lambda point: point[1] is not None):
        places = [frame.place(x, y) for x, y, _ in run if y is not None]
        if is_there and len(places) > 1:
            parts.append(f'<polyline class="line" points="{" ".join(places)}"/>')
    dots = [(x, y) for x, y, _ in line.points if y is not None]
    for x, y in dots if len(dots) <= MAX_DOTS else dots[-1:]:
        parts.append(f'<circle class="dot" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="2.2"/>')
    return "".join(parts)


def _hover(series: Sequence[Series], frame: Frame, x_name: str) -> str:
    """Return one invisible column per x, which shows its points and a tooltip on hover."""
    columns: dict[float, list[tuple[int, Series, float, float | None]]] = {}
    for number, line in enumerate(series, start=1):
        for x, y, std in line.points:
            if y is not None:
                columns.setdefault(x, []).append((number, line, y, std))
    places = sorted(columns)
    borders = [LEFT, *(frame.x((left + right) / 2) for left, right in pairwise(places)), WIDTH - RIGHT]
    parts = []
    for x, (left, right) in zip(places, pairwise(borders), strict=True):
        lines, dots = [f"{x_name} {format_number(x)}"], ""
        for number, line, y, std in columns[x]:
            spread = "" if std is None else f" ± {format_number(std)}"
            lines.append(f"{line.label}: {format_number(y, 4)}{spread}")
            dots += f'<circle class="mark line-{number}" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="3.2"/>'
        area = f'x="{left:.1f}" width="{right - left:.1f}" y="{TOP}" height="{HEIGHT - TOP - BOTTOM}"'
        title = f"<title>{escape(chr(10).join(lines))}</title>"
        parts.append(f'<g class="hover">{title}<rect {area}/>{dots}</g>')
    return "".join(parts)


def _summary(line: Series) -> str:
    values = [y for _, y, _ in line.points if y is not None]
    if not values:
        return f"{line.label}: no values"
    ends = f"from {format_number(values[0])} to {format_number(values[-1])}"
    return f"{line.label}: {ends}, lowest {format_number(min(values))}, highest {format_number(max(values))}"


def _rule(kind: str, y: float) -> str:
    return f'<line class="{kind}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'


# --- charts of the report --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    """Chart over iterations; drawn if the run logged any of its keys."""

    group: str  # heading of its section
    title: str  # caption
    note: str  # one-line description with the unit
    lines: Mapping[str, tuple[str, ...]]  # label -> keys; the first key that was logged is used
    band: bool = False  # shade one standard deviation around the line (`<key>_std`)
    target: tuple[str, ...] = ()  # path in the config of the target value
    log: bool = False  # logarithmic axis
    from_zero: bool = False  # the axis includes zero


LEARNING = "Learning curves"
PARTS = "Reward components"
EVALUATIONS = "Evaluations"
UPDATE = "Policy updates"
COST = "Throughput and time"

CURVES = (
    Curve(LEARNING, "Loss", "of the references, nats per token",
          {"train": ("supervised/loss",), "val": ("supervised/val_loss",)}, from_zero=True),
    Curve(LEARNING, "Loss", "of the preferences",
          {"train": ("preference/loss",), "val": ("preference/val_loss",)}),
    Curve(LEARNING, "Accuracy", "fraction of pairs with a larger reward of the better response",
          {"train": ("rewards/accuracies", "mean_logps/accuracies")}, from_zero=True),
    Curve(LEARNING, "Rewards", "of better and worse responses; implied by log-ratios, or of the reward model",
          {"chosen": ("rewards/chosen",), "rejected": ("rewards/rejected",)}),
    Curve(LEARNING, "Log-probs", "of better and worse responses, in nats",
          {"chosen": ("logps/chosen",), "rejected": ("logps/rejected",)}),
    Curve(LEARNING, "Reward", "task reward of an episode; band: ± one std",
          {"reward": ("rollout_info/ep_rew", "rollout/ep_rew_mean")}, band=True),
    Curve(LEARNING, "KL to the reference", "nats per token",
          {"KL": ("rollout_info/kl_div_mean",)}, target=("alg", "kl_div", "target_kl"), from_zero=True),
    Curve(LEARNING, "KL coefficient", "weight of the KL penalty in the reward",
          {"coefficient": ("rollout_info/kl_coeff",)}, from_zero=True),
    Curve(LEARNING, "Entropy", "nats per token; falls as the policy becomes more deterministic",
          {"entropy": ("rollout_info/entropy",)}),
    Curve(LEARNING, "KL penalty", "contribution to an episode's reward", {"penalty": ("rollout_info/ep_kl_rew",)}),
    Curve(LEARNING, "Response length", "tokens; band: ± one std",
          {"tokens": ("rollout_info/ep_lens", "rollout/ep_len_mean")}, band=True),
    Curve(LEARNING, "Truncated responses", "fraction that reached the length limit without an end token",
          {"fraction": ("rollout_info/truncated_share",)}, from_zero=True),
    Curve(LEARNING, "Groups", "fraction of groups whose rewards differ, and of groups that are kept",
          {"differing": ("rollout_info/groups_differing_share",), "kept": ("rollout_info/groups_kept_share",)},
          from_zero=True),
    Curve(UPDATE, "Value loss", "mean squared error of the critic",
          {"loss": ("ppo/value_loss", "train/value_loss")}, from_zero=True),
    Curve(UPDATE, "Explained variance", "of the returns; 1 is perfect, 0 is a constant prediction",
          {"explained variance": ("ppo/explained_variance", "train/explained_variance")}),
    Curve(UPDATE, "Ratio-one gap", "largest |ratio − 1| in the first minibatch; 0 is exact",
          {"gap": ("train/ratio_gap",)}, log=True),
    Curve(UPDATE, "Policy loss", "the surrogate that is minimised",
          {"loss": ("ppo/policy_gradient_loss", "train/policy_gradient_loss", "train/policy_loss")}),
    Curve(UPDATE, "Approximate KL", "from the rollout's policy; nats per token",
          {"KL": ("ppo/approx_kl", "train/approx_kl")}, from_zero=True),
    Curve(UPDATE, "Clip fraction", "fraction of tokens with a ratio outside the clip range",
          {"fraction": ("ppo/clip_fraction", "train/clip_fraction")}, from_zero=True),
    Curve(UPDATE, "Gradient norm", "before clipping, actor and critic together",
          {"norm": ("train/grad_norm",)}, from_zero=True),
    Curve(UPDATE, "Learning rate", "of the policy", {"learning rate": ("train/learning_rate",)}, from_zero=True),
    Curve(COST, "Throughput", "tokens per second, rollout and update together",
          {"tokens/s": ("time/tokens_per_s", "time/fps")}, from_zero=True),
    Curve(COST, "Optimizer steps", "per second, without evaluations",
          {"steps/s": ("time/steps_per_s",)}, from_zero=True),
    Curve(COST, "Time", "seconds per iteration",
          {"update": ("time/update_s",), "rollout": ("time/rollout_s",)}, from_zero=True),
)  # fmt: skip
PART = "rollout_info/reward/"  # prefix of the keys of a combined reward's parts


def part_curves(keys: Iterable[str]) -> list[Curve]:
    """Return a chart for each part of a combined reward among the logged keys, in their order."""
    parts = [key for key in dict.fromkeys(keys) if key.startswith(PART)]
    means = [key for key in parts if not (key.endswith("_std") and key.removesuffix("_std") in parts)]
    note = "contribution to an episode's reward; band: ± one std"
    return [Curve(PARTS, key.removeprefix(PART), note, {"reward": (key,)}, band=True) for key in means]
