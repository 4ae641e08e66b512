"""Numbers from raw timings, and tables for people.

Medians over iterations. Ratios to the bare loop are medians of ratios within one round, so that a machine that drifts
over minutes drifts out of them; the ratio of CPU times ignores what other processes took away. Systems that do not fit
into memory together are measured in groups, each with a bare loop of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from rich.table import Table

from benchmarks.workload import Shape

YARDSTICK = "bare"
BEFORE = {"ours": "before", "ours_grpo": "before_grpo"}
"""System -> the same one in an older checkout."""


def describe(shape: Shape) -> str:
    """The shape in words."""
    return (
        f"prompt {shape.prompt_len} + {shape.response_len} tokens, {shape.episodes} episodes, {shape.n_epochs} epochs, "
        f"minibatches of {shape.minibatch} episodes, {shape.family} {shape.n_layer} x {shape.n_embd}, "
        f"vocabulary {shape.vocab_size}"
    )


def progress_line(name: str, round_: int, iteration: Mapping[str, Any]) -> str:
    """One iteration as one line."""
    label = f"round {round_}" if round_ else "warm-up"
    return (
        f"  {label:8} {name:10} {iteration['wall_s']:8.2f} s  (CPU {iteration['cpu_s']:.2f} s, "
        f"others {iteration['others_cores']:.2f} cores, peak {iteration['peak_mb']:.0f} MiB)"
    )


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": median(values), "min": min(values), "max": max(values)}


def summary(shape: Shape, systems: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Medians and spreads of each system.

    Args:
        shape: of the work.
        systems: as `ppo_iteration.measure` returns them.

    Returns:
        By system: `wall_s`, `rollout_s`, `update_s`, `cpu_s`, `others_cores`, if the bare loop ran `times_bare` and
        `cpu_times_bare`, and if an older checkout ran `cpu_times_before`, each with median, min and max;
        `tokens_per_s`, `peak_mb`, `loaded_mb`.
    """
    rows: dict[str, dict[str, Any]] = {}
    for name, system in systems.items():
        iterations = system["iterations"]
        keys = ("wall_s", "rollout_s", "update_s", "cpu_s", "others_cores")
        row: dict[str, Any] = {key: _spread([iteration[key] for iteration in iterations]) for key in keys}
        row["tokens_per_s"] = shape.response_tokens / row["wall_s"]["median"]
        row["peak_mb"] = iterations[-1]["peak_mb"]
        row["loaded_mb"] = system["after_load_mb"]
        if YARDSTICK in systems:
            pairs = list(zip(iterations, systems[YARDSTICK]["iterations"], strict=True))
            row["times_bare"] = _spread([mine["wall_s"] / bare["wall_s"] for mine, bare in pairs])
            row["cpu_times_bare"] = _spread([mine["cpu_s"] / bare["cpu_s"] for mine, bare in pairs])
        if BEFORE.get(name) in systems:
            pairs = list(zip(iterations, systems[BEFORE[name]]["iterations"], strict=True))
            row["cpu_times_before"] = _spread([mine["cpu_s"] / before["cpu_s"] for mine, before in pairs])
        rows[name] = row
    return rows


def merged(summaries: Sequence[Mapping[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """The rows of several groups; a system that is in more than one keeps its first row."""
    rows: dict[str, dict[str, Any]] = {}
    for summary_of_group in summaries:
        for name, row in summary_of_group.items():
            rows.setdefault(name, row)
    return rows


def _cell(spread: Mapping[str, float] | None) -> str:
    if spread is None:
        return "-"
    return f"{spread['median']:.2f} [dim]({spread['min']:.2f}-{spread['max']:.2f})[/dim]"


def comparison(shape: Shape, rows: Mapping[str, Mapping[str, Any]]) -> Table:
    """The side-by-side table of one shape."""
    table = Table(title=f"shape {shape.name}: {describe(shape)}; medians (and ranges)")
    table.add_column("system", no_wrap=True)
    for heading in (
        "iteration s",
        "rollout s",
        "update s",
        "tokens/s",
        "x bare",
        "CPU x bare",
        "CPU x before",
        "peak MiB",
        "others",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, row in rows.items():
        table.add_row(
            name,
            _cell(row["wall_s"]),
            *(f"{row[key]['median']:.2f}" for key in ("rollout_s", "update_s")),
            f"{row['tokens_per_s']:.0f}",
            _cell(row.get("times_bare")),
            f"{row['cpu_times_bare']['median']:.2f}" if "cpu_times_bare" in row else "-",
            f"{row['cpu_times_before']['median']:.3f}" if "cpu_times_before" in row else "-",
            f"{row['peak_mb']:.0f} [dim](loaded {row['loaded_mb']:.0f})[/dim]",
            f"{row['others_cores']['median']:.2f}",
        )
    table.caption = "others: cores that other processes kept busy meanwhile"
    return table


def scaling(axis: str, shapes: Sequence[Shape], results: Sequence[Mapping[str, Any]]) -> Table:
    """Time per response token over a range of one quantity."""
    table = Table(title=f"cost over an 8x range of {axis}: milliseconds per response token, median (of CPU time)")
    table.add_column(axis)
    for name in results[0]["summary"]:
        table.add_column(name, justify="right")
        table.add_column("x first", justify="right")
    for shape, result in zip(shapes, results, strict=True):
        cells = [shape.name]
        for name, row in result["summary"].items():
            cost = row["cpu_s"]["median"] / shape.response_tokens
            first = results[0]["summary"][name]["cpu_s"]["median"] / shapes[0].response_tokens
            cells += [f"{1000 * cost:.3f}", f"{cost / first:.2f}"]
        table.add_row(*cells)
    return table


def profile(shape: Shape, system: Mapping[str, Any]) -> list[Table]:
    """CPU seconds of each part of our iteration (medians), and torch's dearest operators in the warm-up iteration."""
    iterations = system["iterations"]
    total = median(iteration["cpu_s"] for iteration in iterations)
    parts = Table(title=f"shape {shape.name}: where our iteration's {total:.2f} CPU s go")
    for heading in ("part", "s", "share"):
        parts.add_column(heading, justify="left" if heading == "part" else "right")
    seconds = {
        part: median(iteration["parts"][part] for iteration in iterations) for part in sorted(iterations[0]["parts"])
    }
    seconds["everything else"] = total - sum(seconds.values())
    for part, value in seconds.items():
        parts.add_row(part, f"{value:.3f}", f"{value / total:.1%}")
    operators = Table(title="torch's operators in the warm-up iteration, by their own time")
    for heading in ("operator", "s", "share", "calls"):
        operators.add_column(heading, justify="left" if heading == "operator" else "right")
    warm_up = system["warm_up"][0]
    for row in warm_up["operators"]:
        fraction = row["self_s"] / warm_up["operators_s"]
        operators.add_row(row["operator"], f"{row['self_s']:.3f}", f"{fraction:.1%}", str(row["calls"]))
    return [parts, operators]
