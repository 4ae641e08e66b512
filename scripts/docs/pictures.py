"""Draw the pictures of the documentation from the results of the benchmarks.

    python -m scripts.docs.pictures                    # writes docs/pictures/*.svg

A picture is an SVG file without scripts. Its colours follow the colour scheme of the reader, and its background is its
own, so that it is legible wherever it is shown. Title and description, with the numbers, are for screen readers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import fmean, stdev

from rl4lms_like.tracking.charts import nice_ticks

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PICTURES = ROOT / "docs" / "pictures"

WIDTH = 400  # pixels: two pictures fit side by side into the column of a page, and one onto a phone
TOP = 54  # below the title and the line under it

LIGHT = {"paper": "#ffffff", "ink": "#1f2328", "faint": "#59636e", "grid": "#d1d9e0"}
LIGHT |= {"line-1": "#0969da", "line-2": "#bc4c00", "line-3": "#1a7f37", "line-4": "#8250df"}
DARK = {"paper": "#1c2128", "ink": "#e6edf3", "faint": "#a3adb8", "grid": "#3d444d"}
DARK |= {"line-1": "#6cb6ff", "line-2": "#f69d50", "line-3": "#6bc46d", "line-4": "#d2a8ff"}
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
    for number in range(1, 5):
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
    """Line of a picture: mean over seeds, with one standard deviation around it."""

    label: str
    x: Sequence[float]
    mean: Sequence[float]
    std: Sequence[float]

    @classmethod
    def of_seeds(cls, label: str, seeds: Sequence[Sequence[float]], x_per_iteration: float) -> Curve:
        """Average the values `seeds[seed][iteration]` of each iteration."""
        by_iteration = list(zip(*seeds, strict=True))
        x = [x_per_iteration * (iteration + 1) for iteration in range(len(by_iteration))]
        return cls(label, x, [fmean(values) for values in by_iteration], [stdev(values) for values in by_iteration])


def curves_picture(
    title: str, subtitle: str, x_name: str, curves: Sequence[Curve], y_range: tuple[float, float]
) -> str:
    """Return a picture of learning curves, each with its label at its end."""
    height, left, right, bottom = 250, 42, 72, 40
    low, high = y_range
    x_max = max(curve.x[-1] for curve in curves)

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            left + x / x_max * (WIDTH - left - right),
            height - bottom - (min(max(y, low), high) - low) / (high - low) * (height - bottom - TOP),
        )

    def points(xs: Sequence[float], ys: Sequence[float]) -> list[str]:
        return ["{:.1f},{:.1f}".format(*place(x, y)) for x, y in zip(xs, ys, strict=True)]

    elements = []
    for tick in nice_ticks(low, high):
        _, y = place(0, tick)
        elements.append(f'<line class="grid" x1="{left}" x2="{WIDTH - right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        elements.append(_text(left - 8, y + 4, f"{tick:.1f}", "faint", "end"))
    for tick in nice_ticks(0, x_max, count=4):
        elements.append(_text(place(tick, low)[0], height - bottom + 17, f"{tick:,.0f}", "faint", "middle"))
    elements.append(_text(place(x_max / 2, low)[0], height - 7, x_name, "faint", "middle"))

    for number, curve in enumerate(curves, start=1):
        upper = points(curve.x, [mean + std for mean, std in zip(curve.mean, curve.std, strict=True)])
        lower = points(curve.x, [mean - std for mean, std in zip(curve.mean, curve.std, strict=True)])
        band = f'<polygon class="band fill" points="{" ".join(upper + lower[::-1])}"/>'
        line = f'<polyline points="{" ".join(points(curve.x, curve.mean))}"/>'
        elements.append(f'<g class="line-{number}">{band}{line}</g>')

    # Labels at the ends of the lines, moved apart where the lines end close together.
    y_before = 0.0
    for number, curve in sorted(enumerate(curves, start=1), key=lambda one: -one[1].mean[-1]):
        x, y = place(curve.x[-1], curve.mean[-1])
        y_before = max(y, y_before + 15)
        elements.append(f'<g class="line-{number}">{_text(x + 6, y_before + 4, curve.label, "fill")}</g>')

    summary = [f"{curve.label} from {curve.mean[0]:.2f} to {curve.mean[-1]:.2f}" for curve in curves]
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


# --- the pictures ----------------------------------------------------------------------------------------------------


def _results(name: str) -> dict:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def verifiable_answers() -> str:
    """Learning curves on sums whose results are checked."""
    results = _results("learning_curves.json")
    curves = [
        Curve.of_seeds(label, seeds, results["responses_per_iteration"]) for label, seeds in results["rewards"].items()
    ]
    n_seeds = len(next(iter(results["rewards"].values())))
    subtitle = f"fraction of right results, mean ± std of {n_seeds} seeds"
    return curves_picture("A tiny GPT-2 learns to add", subtitle, "responses", curves, (0.2, 1.0))


def three_rewards() -> str:
    """Learning curves of PPO with rewards of three kinds."""
    runs = _results("critic_techniques.json")["runs"]
    labels = {"numbers": "numbers", "sentiment": "sentiment", "reasoning": "spelling"}
    curves = []
    for task, label in labels.items():
        seeds = [run["reward"] for run in runs[task]["today"].values()]
        curves.append(Curve.of_seeds(label, seeds, 100 / len(seeds[0])))
    return curves_picture("PPO on three tasks", "reward, mean ± std of ten seeds", "% of the run", curves, (0.0, 1.0))


def _ratios_to_trl(of_iteration: str, of_step: str) -> list[tuple[str, float]]:
    """Return this library's cost divided by TRL's, of GRPO by the length of prompt and response, of DPO and KTO."""
    shapes = _results("grpo_iteration.json")["shapes"]
    ratios = []
    for shape, label in (("i", "GRPO, 5 + 20 tokens"), ("ii", "GRPO, 64 + 48"), ("ii-long", "GRPO, 256 + 48")):
        ours, trl = (shapes[shape]["summary"][system][of_iteration] for system in ("ours_grpo", "trl_grpo"))
        ratios.append((label, ours["median"] / trl["median"] if isinstance(ours, dict) else ours / trl))

    steps = _results("preference_speed.json")
    for objective in ("dpo", "kto"):
        for size, label in ((778, "778"), (50257, "50k")):
            ratio = steps[f"{objective}, vocabulary {size}"]["ratio"][of_step]
            ratios.append((f"{objective.upper()}, vocabulary {label}", ratio))
    return ratios


def cpu_time() -> str:
    """CPU time of an iteration of GRPO, and of a step of DPO and KTO."""
    subtitle = "of an iteration or step; TRL = 1, less is better"
    return bars_picture("CPU time next to TRL 1.16", subtitle, _ratios_to_trl("cpu_s", "cpu_ms"))


def memory() -> str:
    """Peak memory of the same processes."""
    subtitle = "of the process; TRL = 1, less is better"
    return bars_picture("Peak memory next to TRL 1.16", subtitle, _ratios_to_trl("peak_mb", "peak_mb"))


def ppo_speed() -> str:
    """Time of an iteration of PPO, here and in TRL, next to a loop that does the necessary work only."""
    shapes = _results("ppo_iteration.json")["shapes"]
    bars = []
    for shape, result in shapes.items():
        for system, label in (("ours", "this library"), ("trl_ppo", "TRL 1.12")):
            bars.append((f"{shape}, {label}", result["summary"][system]["times_bare"]["median"]))
    return bars_picture("Time of a PPO iteration", "bare loop = 1, less is better", bars)


def _critic_free(family: str) -> str:
    summary = _results("critic_free/results.json")["summary"]
    bars = []
    for label, scores in summary.items():
        if label.endswith(family):
            bars.append((label.removesuffix(f" {family}"), scores["test:synthetic/increasing_numbers_in_text"]["mean"]))
    return bars_picture(f"Increasing numbers, tiny {family}", "reward after training; best: 1, before: 0.33", bars)


def critic_free_gpt2() -> str:
    """Reward of a tiny GPT-2 after training with each critic-free algorithm."""
    return _critic_free("GPT-2")


def critic_free_t5() -> str:
    """Reward of a tiny T5 after training with each critic-free algorithm."""
    return _critic_free("T5")


PICTURES_OF: dict[str, Callable[[], str]] = {
    "verifiable_answers.svg": verifiable_answers,
    "three_rewards.svg": three_rewards,
    "cpu_time.svg": cpu_time,
    "memory.svg": memory,
    "ppo_speed.svg": ppo_speed,
    "critic_free_gpt2.svg": critic_free_gpt2,
    "critic_free_t5.svg": critic_free_t5,
}


def drawn() -> Iterator[tuple[Path, str]]:
    """Yield file and content of each picture."""
    for name, draw in PICTURES_OF.items():
        yield PICTURES / name, draw()


if __name__ == "__main__":
    PICTURES.mkdir(exist_ok=True)
    for file, content in drawn():
        file.write_text(content, encoding="utf-8")
        print(file.relative_to(ROOT))
