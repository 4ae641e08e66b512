"""`report.html`: report of a run in one file, made from the run folder.

    run folder ──read_run──► RunRecord ──► facts, headline, curves, samples ──report.html.j2──► report.html

The page needs neither network nor scripts, and supports dark mode and small screens. Values that the run did not log
are left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl4lms_like.core.disk import reason
from rl4lms_like.core.errors import RL4LMsLikeError
from rl4lms_like.tracking.alarms import findings
from rl4lms_like.tracking.charts import Series, format_number, line_chart
from rl4lms_like.tracking.credit import credit_of
from rl4lms_like.tracking.curves import CURVES, EVALUATIONS, LEARNING, PARTS, Curve, part_curves
from rl4lms_like.tracking.record import RunRecord, number, read_predictions, read_run
from rl4lms_like.tracking.run_folder import REPORT_FILE, write_whole
from rl4lms_like.tracking.sink import Epoch

N_SHOWN, N_FOLDED = 6, 18
LONG_TEXT = 420
N_TABLE_ROWS = 120
REFERENCE = re.compile(r"<START-\d+>(.*?)<END-\d+>", re.DOTALL)


@dataclass(frozen=True)
class Panel:
    """Chart with its caption."""

    title: str
    note: str
    last: str
    svg: str
    legend: tuple[str, ...] = ()


@dataclass(frozen=True)
class Change:
    """Score before and after training."""

    name: str
    before: str
    after: str
    change: str


@dataclass(frozen=True)
class Pair:
    """Responses to one prompt before and after training."""

    sample_id: str
    prompt: str
    texts: tuple[str, ...]
    references: tuple[str, ...]
    scores: tuple[Change, ...]


@dataclass(frozen=True)
class Samples:
    """Pairs of a split."""

    split: str
    epochs: tuple[Epoch, ...]
    total: int
    shown: Sequence[Pair]
    folded: Sequence[Pair]


def write_report(run_path: str | Path) -> Path:
    """Write `report.html` into a run folder, from the files in that folder.

    Args:
        run_path: the folder; the run may be unfinished, and all files except `config.json` may be missing.

    Returns:
        The report's path.

    Raises:
        RL4LMsLikeError: it is not a run folder, a file was not written by a tracker, or the report cannot be written.
    """
    from jinja2 import Environment, PackageLoader
    from markupsafe import Markup

    run = read_run(run_path)
    environment = Environment(
        loader=PackageLoader("rl4lms_like", "tracking"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["svg"] = Markup
    page = environment.get_template("report.html.j2").render(
        title=run.path.resolve().name,
        project=run.path.resolve().parent.name,
        status=_status(run),
        facts=_facts(run),
        tiles=_tiles(run),
        headline=[(split, list(scores), _changes(scores)) for split, scores in run.evaluations.items()],
        alarms=findings(run),
        groups=_groups(run),
        samples=[_samples(run, split) for split in run.predictions],
        credit=credit_of(run),
        table=_table(run),
        config=_as_yaml(run.config),
        long_text=LONG_TEXT,
    )
    path = run.path / REPORT_FILE
    try:
        write_whole(path, page)
    except OSError as error:
        raise RL4LMsLikeError(f"cannot write the report: {reason(error)}") from error
    return path


def _status(run: RunRecord) -> str:
    n_iters, n_done = run.setting("train_evaluation", "n_iters"), len(run.iterations)
    if not n_done:
        return "no iteration yet"
    last = int(run.iterations[-1]["iteration"])
    if isinstance(n_iters, int) and last < n_iters:
        return f"unfinished, {last} of {n_iters} iterations"
    return f"{last} {'iterations' if n_iters is not None else 'steps'}"


def _facts(run: RunRecord) -> list[tuple[str, str]]:
    last = run.iterations[-1] if run.iterations else {}
    seconds = (run.ended - run.began).total_seconds() if run.began and run.ended else None
    episodes = [value for _, value in run.curve("rollout_info/n_episodes") if value is not None]
    facts = {
        "Algorithm": run.setting("alg", "id"),
        "Policy": run.setting("alg", "policy", "id"),
        "Model": run.setting("alg", "policy", "args", "model_name") or run.setting("alg", "model_name"),
        "Reward": run.setting("reward_fn", "id"),
        "Data": run.setting("datapool", "id"),
        "Seed": run.setting("seed"),
        "Started": run.began.strftime("%d %B %Y, %H:%M").lstrip("0") if run.began else None,
        "Wall time": _duration(seconds) if seconds is not None else None,
        "Tokens": format_number(last["timesteps"]) if last.get("timesteps") else None,
        "Episodes": format_number(sum(episodes)) if episodes else None,
        "Alarms": (str(len(run.alarms)) if run.alarms else "none") if run.setting("doctor", "enabled") else None,
    }
    return [(name, str(value)) for name, value in facts.items() if value is not None]


def _tiles(run: RunRecord) -> list[tuple[str, str, str]]:
    """Return the main numbers as (name, value, value for comparison)."""
    tiles = []
    reward = _ends(run, "rollout_info/ep_rew")
    if reward:
        tiles.append(("reward per episode", format_number(reward[1]), f"{format_number(reward[0])} at first"))
    for name, key in (("loss per token", "supervised/loss"), ("loss on val", "supervised/val_loss")):
        loss = _ends(run, key)
        if loss:
            tiles.append((name, format_number(loss[1]), f"{format_number(loss[0])} at first"))
    kl = _ends(run, "rollout_info/kl_div_mean")
    if kl:
        target = number(run.setting("alg", "kl_div", "target_kl"))
        against = f"target {format_number(target)}" if target is not None else "no target"
        tiles.append(("KL per token", format_number(kl[1]), against))
    entropy = _ends(run, "rollout_info/entropy")
    if entropy:
        tiles.append(("entropy", format_number(entropy[1]), f"{format_number(entropy[0])} at first"))
    gaps = [value for _, value in run.curve("train/ratio_gap") if value is not None]
    if gaps:
        tiles.append(("largest ratio-one gap", format_number(max(gaps), 2), "0 is exact"))
    speeds = sorted(value for _, value in run.curve("time/tokens_per_s") if value is not None)
    if speeds:
        tiles.append(("tokens per second", format_number(speeds[len(speeds) // 2]), "median"))
    return tiles


def _ends(run: RunRecord, key: str) -> tuple[float, float] | None:
    values = [value for _, value in run.curve(key) if value is not None]
    return (values[0], values[-1]) if values else None


def _changes(scores: Mapping[Epoch, Mapping[str, Any]]) -> list[Change]:
    each = list(scores.values())
    first, last = each[0], each[-1]
    keys = dict.fromkeys([*first, *last])
    return [_change(key, first.get(key), last.get(key) if len(scores) > 1 else None) for key in keys]


def _change(name: str, before: Any, after: Any) -> Change:
    first, last = number(before), number(after)
    difference = last - first if first is not None and last is not None else None
    sign = "+" if difference is not None and difference > 0 else ""
    change = "" if difference is None else f"{sign}{format_number(difference)}"
    return Change(name, format_number(first), format_number(last), change)


def _groups(run: RunRecord) -> list[tuple[str, list[Panel]]]:
    """Return the charts by heading, without empty headings."""
    groups: dict[str, list[Panel]] = {LEARNING: [], PARTS: [], EVALUATIONS: _metric_panels(run)}
    for curve in [*CURVES, *part_curves(key for line in run.iterations for key in line)]:
        panel = _curve_panel(run, curve)
        if panel is not None:
            groups.setdefault(curve.group, []).append(panel)
    return [(heading, panels) for heading, panels in groups.items() if panels]


def _curve_panel(run: RunRecord, curve: Curve) -> Panel | None:
    series = []
    for label, keys in curve.lines.items():
        key = next((key for key in keys if any(key in line for line in run.iterations)), None)
        if key is not None:
            spread = dict(run.curve(f"{key}_std")) if curve.band else {}
            series.append(Series(label, [(x, y, spread.get(x)) for x, y in run.curve(key)]))
    target = number(run.setting(*curve.target)) if curve.target else None
    note = f"{curve.note}; dashed: the target, {format_number(target)}" if target is not None else curve.note
    return _panel(curve.title, note, series, log=curve.log, target=target, from_zero=curve.from_zero)


def _metric_panels(run: RunRecord) -> list[Panel]:
    keys = dict.fromkeys(key for epochs in run.evaluations.values() for scores in epochs.values() for key in scores)
    panels = []
    for key in keys:
        lines = {
            split: [(float(epoch), number(scores.get(key)), None) for epoch, scores in epochs.items()]
            for split, epochs in run.evaluations.items()
        }
        panel = _panel(key, "", [Series(split, points) for split, points in lines.items()], x_name="epoch")
        if panel is not None:
            panels.append(panel)
    return panels


def _panel(title: str, note: str, series: list[Series], **options: Any) -> Panel | None:
    series = [line for line in series if line.last is not None]
    if not series:
        return None
    svg = line_chart(series, title=title, **options)
    legend = tuple(line.label for line in series) if len(series) > 1 else ()
    return Panel(title, note, format_number(series[0].last), svg, legend)


def _samples(run: RunRecord, split: str) -> Samples:
    """Return pairs of the first and the last evaluation, evenly spaced over the split, not selected by score."""
    files = run.predictions[split]
    epochs = tuple(dict.fromkeys((next(iter(files)), next(reversed(files)))))
    sides = [{str(item.get("sample_id")): item for item in read_predictions(files[epoch])} for epoch in epochs]
    ids = [sample_id for sample_id in sides[0] if all(sample_id in side for side in sides)]
    n_pairs = min(len(ids), N_SHOWN + N_FOLDED)
    spaced = [ids[index * len(ids) // n_pairs] for index in range(n_pairs)]
    pairs = [_pair(sample_id, [side[sample_id] for side in sides]) for sample_id in spaced]
    stride = max(1, n_pairs // N_SHOWN)
    shown = pairs[::stride][:N_SHOWN]
    return Samples(split, epochs, len(ids), shown, [pair for pair in pairs if pair not in shown])


def _pair(sample_id: str, sides: Sequence[Mapping[str, Any]]) -> Pair:
    known = ("split_name", "sample_id", "prompt_text", "generated_text", "ref_text")
    first, last = sides[0], sides[-1]
    scored = [key for key, value in first.items() if key not in known and number(value) is not None]
    reference = str(first.get("ref_text") or "")
    references = [text.strip() for text in REFERENCE.findall(reference)] or ([reference] if reference else [])
    texts = tuple(str(side.get("generated_text", "")).strip() for side in sides)
    scores = tuple(_change(key, first[key], last.get(key)) for key in scored)
    return Pair(sample_id, str(first.get("prompt_text", "")).strip(), texts, tuple(references), scores)


def _table(run: RunRecord) -> tuple[list[str], list[list[str]]]:
    """Return all numbers of the iterations as a table; long runs are thinned evenly."""
    keys = list(dict.fromkeys(key for line in run.iterations for key in line))
    stride = -(-len(run.iterations) // N_TABLE_ROWS) or 1
    return keys, [[format_number(number(line.get(key)), 4) for key in keys] for line in run.iterations[::stride]]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    parts = [(hours, "h"), (minutes, "min"), (rest, "s")]
    return " ".join(f"{count} {unit}" for count, unit in parts if count) or "0 s"


def _as_yaml(config: Mapping[str, Any]) -> str:
    import yaml

    return yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True, width=100)
