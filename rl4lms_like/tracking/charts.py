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

# Size of a chart and the margins around its plot, in pixels.
WIDTH = 340
HEIGHT = 170
LEFT = 44
RIGHT = 12
TOP = 10
BOTTOM = 24

MAX_POINTS = 300
"""Number of points from which on a series is drawn as its trend: about one for each pixel."""

MAX_DOTS = 16
LOG_ZERO = 1e-15
"""Values up to this are drawn on the lower border of a logarithmic axis, as 0 is."""

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
            value = math.log10(max(value, low))
            low = math.log10(low)
            high = math.log10(high)
        fraction = min(max((value - low) / (high - low), 0.0), 1.0)
        return HEIGHT - BOTTOM - fraction * (HEIGHT - TOP - BOTTOM)

    def point(self, x: float, y: float) -> str:
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
    # A long series is drawn twice: all peaks, faint, and their trend. The axes must hold the peaks.
    is_long = any(len(line.points) > MAX_POINTS for line in series)
    raw = series
    if is_long:
        raw = [Series(line.label, thinned(line.points)) for line in series]
        series = [Series(line.label, trend(line.points)) for line in series]
    frame = _frame(raw, log=log, target=target, from_zero=from_zero)

    # In SVG, what comes later is drawn on top: the hover columns last.
    elements = [_grid(frame), _axis(frame, x_name)]
    if target is not None:
        elements.append(_rule("target", frame.y(target)))
    for number, line in enumerate(series, start=1):
        noise = f'<g class="raw">{_line(raw[number - 1], frame)}</g>' if is_long else ""
        elements.append(f'<g class="line-{number}">{_band(line, frame)}{noise}{_line(line, frame)}</g>')
    elements.append(_hover(series, frame, x_name))

    summary = "; ".join(_summary(line) for line in series)
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(f"{title}. {summary}")}">'
        f"{''.join(elements)}</svg>"
    )


def thinned(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """Return about `limit` points with all peaks: the lowest and the highest of each segment."""
    x = itemgetter(0)
    y = itemgetter(1)
    peaks: list[Point] = []
    for segment in _segments(points, limit // 2):
        extremes = {min(segment, key=y), max(segment, key=y)}  # a set: in a flat segment both are one point
        peaks += sorted(extremes, key=x)
    return peaks


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
    with_value = [point for point in points if point[1] is not None]
    length = math.ceil(len(with_value) / n) or 1
    for start in range(0, len(with_value), length):
        yield with_value[start : start + length]


def nice_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Return about `count` round numbers within `[low, high]`, spaced by 1, 2 or 5 times a power of ten."""
    if high <= low:
        return [low]

    # The round step whose ratio to the exact one is nearest to 1.
    exact_step = (high - low) / count
    power = 10.0 ** math.floor(math.log10(exact_step))
    step = power * min((1, 2, 5, 10), key=lambda factor: abs(math.log(factor * power / exact_step)))

    # With a tolerance: 0.3 / 0.1 is 2.9999999999999996, whose floor is 2. Multiples, not sums: errors would add up.
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def format_number(value: float | None, digits: int = 3) -> str:
    """Format a number: `0.0123`, `12,300`, `1.5M`, `3.1e-6`, `−0.2`; an en dash for None."""
    if value is None or not math.isfinite(value):
        return "–"

    # The borders are those of rounding to three digits: 999.5 would be 1e+03, and 999,500 is 1M.
    size = abs(value)
    if 999_500 <= size < 9.995e8:
        text = f"{value / 1e6:,.{digits}g}M"
    elif 999.5 <= size < 999_500:
        text = f"{value:,.0f}"
    elif value == 0 or 1e-4 <= size < 999.5:
        text = f"{value:.{digits}g}"
    else:
        text = f"{value:.{digits - 1}g}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")

    # U+2212, as wide as a plus sign.
    return text.replace("-", "−", 1) if value < 0 else text


def duration(seconds: float) -> str:
    """Format seconds as `0:42`, `12:05` or `3:07:12`."""
    whole_minutes, remaining_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(whole_minutes, 60)
    return f"{hours}:{minutes:02d}:{remaining_seconds:02d}" if hours else f"{minutes}:{remaining_seconds:02d}"


def _frame(series: Sequence[Series], *, log: bool, target: float | None, from_zero: bool) -> Frame:
    """Return the ranges that hold all values with their bands, and the target."""
    xs: list[float] = []
    ys: list[float] = []
    for line in series:
        for x, y, std in line.points:
            if y is not None:
                xs.append(x)
                ys += (y - (std or 0.0), y + (std or 0.0))
    if not xs:
        raise ValueError("nothing to draw: no series has a value")
    if target is not None:
        ys.append(target)

    x_range = (min(xs), max(xs))
    y_range = _logarithmic_range(ys) if log else _linear_range(ys, from_zero=from_zero)
    return Frame(x_range, y_range, log=log)


def _logarithmic_range(ys: Sequence[float]) -> tuple[float, float]:
    """Return the whole powers of ten around the positive values."""
    positive = [y for y in ys if y > LOG_ZERO] or [1e-9]
    low = 10 ** math.floor(math.log10(min(positive)))
    high = 10 ** math.ceil(math.log10(max(positive)))
    return (low, high if high > low else low * 10)


def _linear_range(ys: Sequence[float], *, from_zero: bool) -> tuple[float, float]:
    """Return the limits of the values with a margin of 5 %."""
    low = min(ys)
    high = max(ys)
    if from_zero:
        low = min(low, 0.0)
        high = max(high, 0.0)

    # A constant is drawn in the middle. Its differences are rounding errors, which the axis must not magnify.
    size = max(abs(low), abs(high))
    is_flat = high - low <= 1e-9 * size + 1e-200
    if not is_flat:
        margin = 0.05 * (high - low)
    elif size > 1e-200:
        margin = 0.5 * size
    else:
        margin = 1.0

    # A chart that includes zero rests on it, or hangs from it if all values are negative: no margin on that side.
    bottom = low if from_zero and low == 0 else low - margin
    top = high if from_zero and high == 0 > low else high + margin
    return bottom, top


def _grid(frame: Frame) -> str:
    """Return the horizontal lines with their labels: about four, on a logarithmic axis at powers of ten."""
    ticks: list[tuple[float, str]] = []
    if frame.log:
        low, high = (round(math.log10(edge)) for edge in frame.y_range)
        for power in range(low, high + 1, max(1, math.ceil((high - low) / 4))):
            ticks.append((10.0**power, f'10<tspan class="power" dy="-4">{power}</tspan>'))
    else:
        values = nice_ticks(*frame.y_range)
        for value, label in zip(values, _tick_labels(values), strict=True):
            ticks.append((value, escape(label)))

    elements = []
    for value, label in ticks:
        y = frame.y(value)
        elements.append(_rule("grid", y))
        # A third of the letters' height lower, so that their middle is on the line.
        elements.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{label}</text>')
    return "".join(elements)


def _tick_labels(values: Sequence[float]) -> list[str]:
    """Return the labels of an axis, with the same number of decimals."""
    # The space left of the axis is for about seven characters: large numbers are shortened.
    largest = max(map(abs, values), default=0.0)
    if largest >= 1e6:
        return [format_number(value) for value in values]
    if largest >= 10_000:
        labels = []
        for value in values:
            labels.append(f"{format_number(value / 1000)}k" if value else "0")
        return labels

    step = 1.0
    if len(values) > 1:
        step = values[1] - values[0]
    elif values:
        step = abs(values[0])
    if step and step < 1e-4:
        return [format_number(value, 2) for value in values]

    # As many decimals as the step has. Without the rounding of zeros a tick of -1e-17 would be "−0.0".
    decimals = max(0, -math.floor(math.log10(step) + 1e-9)) if step else 0
    labels = []
    for value in values:
        tick = value if abs(value) > step * 1e-6 else 0
        labels.append(f"{tick:,.{decimals}f}".replace("-", "−"))
    return labels


def _axis(frame: Frame, x_name: str) -> str:
    """Return the x axis; ticks are whole numbers, as iterations are, unless the range is short, as that of epochs."""
    low, high = frame.x_range
    ticks = [tick for tick in nice_ticks(low, high, count=5) if tick == round(tick) or high - low < 4]

    elements = [_rule("axis", HEIGHT - BOTTOM)]
    for tick in ticks:
        position = f'x="{frame.x(tick):.1f}" y="{HEIGHT - 8}" text-anchor="middle"'
        elements.append(f'<text class="tick" {position}>{format_number(tick)}</text>')
    elements.append(f'<text class="tick name" x="0" y="{HEIGHT - 8}">{escape(x_name)}</text>')
    return "".join(elements)


def _band(line: Series, frame: Frame) -> str:
    """Return the area within one standard deviation: its upper edge from left to right, its lower edge back."""
    with_std = [(x, y, std) for x, y, std in line.points if y is not None and std is not None]
    if len(with_std) < 2:
        return ""
    upper = [frame.point(x, y + std) for x, y, std in with_std]
    lower = [frame.point(x, y - std) for x, y, std in reversed(with_std)]
    return f'<polygon class="band" points="{" ".join(upper + lower)}"/>'


def _line(line: Series, frame: Frame) -> str:
    """Return a line, interrupted where values are missing, and its dots."""
    elements = []
    for has_value, run in groupby(line.points, key=lambda point: point[1] is not None):
        points = [frame.point(x, y) for x, y, _ in run if y is not None]
        if has_value and len(points) > 1:
            elements.append(f'<polyline class="line" points="{" ".join(points)}"/>')

    # A dot on every point of a short line: a single value between gaps has no line. A long one has a dot at its end.
    dots = [(x, y) for x, y, _ in line.points if y is not None]
    if len(dots) > MAX_DOTS:
        dots = dots[-1:]
    for x, y in dots:
        elements.append(f'<circle class="dot" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="2.2"/>')
    return "".join(elements)


def _hover(series: Sequence[Series], frame: Frame, x_name: str) -> str:
    """Return one invisible column per x, which shows its points and a tooltip on hover."""
    columns: dict[float, list[tuple[int, Series, float, float | None]]] = {}
    for number, line in enumerate(series, start=1):
        for x, y, std in line.points:
            if y is not None:
                columns.setdefault(x, []).append((number, line, y, std))

    # Columns meet halfway between their values, so that there is no gap without a tooltip.
    xs = sorted(columns)
    borders = [LEFT, *(frame.x((left + right) / 2) for left, right in pairwise(xs)), WIDTH - RIGHT]

    elements = []
    for x, (left, right) in zip(xs, pairwise(borders), strict=True):
        tooltip = [f"{x_name} {format_number(x)}"]
        dots = ""
        for number, line, y, std in columns[x]:
            std_text = "" if std is None else f" ± {format_number(std)}"
            tooltip.append(f"{line.label}: {format_number(y, 4)}{std_text}")
            dots += f'<circle class="mark line-{number}" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="3.2"/>'
        area = f'x="{left:.1f}" width="{right - left:.1f}" y="{TOP}" height="{HEIGHT - TOP - BOTTOM}"'
        title = f"<title>{escape(chr(10).join(tooltip))}</title>"
        elements.append(f'<g class="hover">{title}<rect {area}/>{dots}</g>')
    return "".join(elements)


def _summary(line: Series) -> str:
    """Return what a screen reader reads of a line."""
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
    omit_zeros: bool = False  # not drawn if all values are 0


LEARNING = "Learning curves"
PARTS = "Reward components"
EVALUATIONS = "Evaluations"
UPDATE = "Policy updates"
COST = "Throughput and time"
CALLBACKS = "Numbers of callbacks"

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
    Curve(LEARNING, "KL coefficient", "weight of the KL penalty",
          {"coefficient": ("rollout_info/kl_coeff",)}, from_zero=True),
    Curve(LEARNING, "Entropy", "nats per token; falls as the policy becomes more deterministic",
          {"entropy": ("rollout_info/entropy",)}),
    Curve(LEARNING, "KL penalty", "contribution to an episode's reward", {"penalty": ("rollout_info/ep_kl_rew",)},
          omit_zeros=True),  # 0 with the penalty in the loss or in the advantage
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
    Curve(UPDATE, "KL loss", "penalty in the loss, coefficient included", {"loss": ("ppo/kl_loss",)}),
    Curve(UPDATE, "Loss on texts", "of alg.ptx, nats per token, without its coefficient", {"loss": ("ppo/ptx_loss",)}),
    Curve(UPDATE, "Balancing loss", "of the experts, without its coefficient",
          {"loss": ("ppo/balancing_loss", "supervised/balancing_loss", "preference/balancing_loss")}),
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

PART = "rollout_info/reward/"
"""Prefix of the keys of a combined reward's parts."""
OF_CALLBACK = "callback/"
"""Prefix of the keys of the numbers that users' callbacks return."""


def callback_curves(keys: Iterable[str]) -> list[Curve]:
    """Return a chart for each number of users' callbacks among the logged keys, in their order."""
    curves = []
    for key in dict.fromkeys(keys):
        if key.startswith(OF_CALLBACK):
            curves.append(Curve(CALLBACKS, key.removeprefix(OF_CALLBACK), "", {"number": (key,)}))
    return curves


def part_curves(keys: Iterable[str]) -> list[Curve]:
    """Return a chart for each part of a combined reward among the logged keys, in their order."""
    part_keys = [key for key in dict.fromkeys(keys) if key.startswith(PART)]
    note = "contribution to an episode's reward; band: ± one std"
    curves = []
    for key in part_keys:
        # `<part>_std` is the band of `<part>`; but a part may itself have a name that ends so.
        is_std = key.endswith("_std") and key.removesuffix("_std") in part_keys
        if not is_std:
            curves.append(Curve(PARTS, key.removeprefix(PART), note, {"reward": (key,)}, band=True))
    return curves
