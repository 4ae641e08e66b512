"""`report.html`: report of a run in one file, made from the run folder.

    run folder ──read_run──► RunRecord ──► facts, headline, curves, samples ──report.html.j2──► report.html

The page needs neither network nor scripts, and supports dark mode and small screens. Values that the run did not log
are left out.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median_high
from typing import TYPE_CHECKING, Any

from rl4lms_like.core.disk import reason
from rl4lms_like.core.errors import RL4LMsLikeError
from rl4lms_like.tracking import charts
from rl4lms_like.tracking.charts import Curve, Series, format_number
from rl4lms_like.tracking.credit import credit_of, signed
from rl4lms_like.tracking.record import RunRecord, number, read_predictions, read_run, spaced, written_by_a_run
from rl4lms_like.tracking.rollouts import rollouts_of
from rl4lms_like.tracking.run_folder import ALARMS_FILE, REPORT_FILE, write_whole
from rl4lms_like.tracking.sink import Epoch

if TYPE_CHECKING:
    from jinja2 import Template

N_SHOWN, N_FOLDED = 6, 18
LONG_TEXT = 420
N_TABLE_ROWS = 120
REFERENCE = re.compile(r"<START-\d+>(.*?)<END-\d+>", re.DOTALL)


def write_report(run_path: str | Path) -> Path:
    """Write `report.html` into a run folder, from the files in that folder, and return its path.

    The run may be unfinished, and all files except `config.json` may be missing.

    Raises:
        RL4LMsLikeError: it is not a run folder, a file was not written by a tracker, or the report cannot be written.
    """
    import yaml

    run = read_run(run_path)
    credit = credit_of(run)
    page = template_of("tracking").render(
        title=run.path.resolve().name,
        project=run.path.resolve().parent.name,
        status=_status(run),
        facts=_facts(run),
        tiles=_tiles(run),
        headline=[(split, list(scores), _changes(scores)) for split, scores in run.evaluations.items()],
        alarms=alarms_of(run),
        groups=_groups(run),
        samples=[_samples(run, split) for split in run.predictions],
        rollouts=rollouts_of(run, credit),
        credit=credit,
        table=_table(run),
        config=yaml.safe_dump(dict(run.config), sort_keys=False, allow_unicode=True, width=100),
        long_text=LONG_TEXT,
    )
    path = run.path / REPORT_FILE
    try:
        write_whole(path, page)
    except OSError as error:
        raise RL4LMsLikeError(f"cannot write the report: {reason(error)}") from error
    return path


@functools.cache
def template_of(package: str) -> Template:
    """Return the template `report.html.j2` in a subpackage of this library."""
    from jinja2 import Environment, PackageLoader
    from markupsafe import Markup

    loader = PackageLoader("rl4lms_like", package)
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["svg"] = Markup
    return environment.get_template("report.html.j2")


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
    episodes = run.values("rollout_info/n_episodes")
    facts = {
        "Algorithm": run.setting("alg", "id"),
        "Policy": run.setting("alg", "policy", "id"),
        "Model": run.setting("alg", "policy", "args", "model_name") or run.setting("alg", "model_name"),
        "Reward": run.setting("reward_fn", "id"),
        "Data": run.setting("datapool", "id"),
        "Seed": run.setting("seed"),
        "Started": run.began.strftime("%d %B %Y, %H:%M").lstrip("0") if run.began else None,
        "Wall time": charts.duration(seconds) if seconds is not None else None,
        "Tokens": format_number(last["timesteps"]) if last.get("timesteps") else None,
        "Episodes": format_number(sum(episodes)) if episodes else None,
        "Alerts": (str(len(run.alarms)) if run.alarms else "none") if run.setting("doctor", "enabled") else None,
    }
    return [(name, str(value)) for name, value in facts.items() if value is not None]


def _tiles(run: RunRecord) -> list[tuple[str, str, str]]:
    """Return the main numbers as (name, value, value for comparison)."""
    target = number(run.setting("alg", "kl_div", "target_kl"))
    against = f"target {format_number(target)}" if target is not None else "no target"
    tiles = []
    for name, key, note in (
        ("reward per episode", "rollout_info/ep_rew", ""),
        ("loss per token", "supervised/loss", ""),
        ("loss on val", "supervised/val_loss", ""),
        ("loss per pair", "preference/loss", ""),
        ("loss on val", "preference/val_loss", ""),
        ("accuracy", "rewards/accuracies", ""),
        ("KL per token", "rollout_info/kl_div_mean", against),
        ("entropy", "rollout_info/entropy", ""),
    ):
        if values := run.values(key):
            tiles.append((name, format_number(values[-1]), note or f"{format_number(values[0])} at first"))
    if gaps := run.values("train/ratio_gap"):
        tiles.append(("largest ratio-one gap", format_number(max(gaps), 2), "0 is exact"))
    if speeds := run.values("time/tokens_per_s"):
        tiles.append(("tokens per second", format_number(median_high(speeds)), "median"))
    return tiles


def alarms_of(run: RunRecord) -> list[dict[str, Any]]:
    """Return the alerts of the run doctor in the order in which they were raised, with title, time and examples.

    alarms.jsonl          {"alarm": "entropy_collapse", "iteration": 12, "said": ..., "advice": ..., "examples": [...]}
    training_info.jsonl   doctor/entropy_collapse: 1 or 0 in each iteration from the 12th on

    Raises:
        RL4LMsLikeError: the file was not written by a run.
    """
    with written_by_a_run(run.path / ALARMS_FILE):
        return [_alarm(run, line) for line in run.alarms]


def _alarm(run: RunRecord, line: Mapping[str, Any]) -> dict[str, Any]:
    held = run.values(f"doctor/{line['alarm']}")
    since = f"; active in {sum(held):g} of the {len(held)} iterations since" if len(held) > 1 else ""
    examples = []
    for example in line.get("examples", ()):
        numbers = [f"{name} {value:.4g}" for name, value in example.items() if isinstance(value, int | float)]
        examples.append((str(example.get("prompt", "")), str(example.get("response", "")), ", ".join(numbers)))
    return {
        "title": str(line["alarm"]).replace("_", " "),
        "when": f"iteration {line.get('iteration')}{since}",
        "said": _sentence(str(line.get("said", ""))),
        "advice": _sentence(str(line.get("advice", ""))),
        "examples": examples,
    }


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith('.') else '.'}" if text else ""


def _changes(scores: Mapping[Epoch, Mapping[str, Any]]) -> list[dict[str, str]]:
    each = list(scores.values())
    first, last = each[0], each[-1]
    keys = dict.fromkeys([*first, *last])
    return [_change(key, first.get(key), last.get(key) if len(scores) > 1 else None) for key in keys]


def _change(name: str, before: Any, after: Any) -> dict[str, str]:
    """Return a score before and after training."""
    first, last = number(before), number(after)
    change = "" if first is None or last is None else signed(last - first)
    return {"name": name, "before": format_number(first), "after": format_number(last), "change": change}


def _groups(run: RunRecord) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return the charts by heading, without empty headings."""
    groups: dict[str, list[dict[str, Any]]] = {charts.LEARNING: [], charts.PARTS: [], charts.EVALUATIONS: []}
    keys = dict.fromkeys(key for epochs in run.evaluations.values() for scores in epochs.values() for key in scores)
    for key in keys:
        series = [
            Series(split, [(float(epoch), number(scores.get(key)), None) for epoch, scores in epochs.items()])
            for split, epochs in run.evaluations.items()
        ]
        groups[charts.EVALUATIONS] += _panels(key, "", series, x_name="epoch")
    for curve in [*charts.CURVES, *charts.part_curves(key for line in run.iterations for key in line)]:
        groups.setdefault(curve.group, []).extend(_curve_panels(run, curve))
    return [(heading, panels) for heading, panels in groups.items() if panels]


def _curve_panels(run: RunRecord, curve: Curve) -> list[dict[str, Any]]:
    series = []
    for label, keys in curve.lines.items():
        key = next((key for key in keys if any(key in line for line in run.iterations)), None)
        if key is not None:
            std = dict(run.curve(f"{key}_std")) if curve.band else {}
            series.append(Series(label, [(x, y, std.get(x)) for x, y in run.curve(key)]))
    target = number(run.setting(*curve.target)) if curve.target else None
    note = f"{curve.note}; dashed: the target, {format_number(target)}" if target is not None else curve.note
    return _panels(curve.title, note, series, log=curve.log, target=target, from_zero=curve.from_zero)


def _panels(title: str, note: str, series: list[Series], **options: Any) -> list[dict[str, Any]]:
    """Return a chart with its caption, or none if no series has a value."""
    series = [line for line in series if line.last is not None]
    if not series:
        return []
    svg = charts.line_chart(series, title=title, **options)
    legend = [line.label for line in series] if len(series) > 1 else []
    return [{"title": title, "note": note, "last": format_number(series[0].last), "svg": svg, "legend": legend}]


def _samples(run: RunRecord, split: str) -> dict[str, Any]:
    """Return pairs of the first and the last evaluation, evenly spaced over the split, not selected by score."""
    files = run.predictions[split]
    epochs = tuple(dict.fromkeys((next(iter(files)), next(reversed(files)))))
    sides = [{str(item.get("sample_id")): item for item in read_predictions(files[epoch])} for epoch in epochs]
    ids = [sample_id for sample_id in sides[0] if all(sample_id in side for side in sides)]
    chosen = spaced(ids, N_SHOWN + N_FOLDED)
    pairs = [_pair(sample_id, [side[sample_id] for side in sides]) for sample_id in chosen]
    shown = spaced(pairs, N_SHOWN)
    folded = [pair for pair in pairs if pair not in shown]
    return {"split": split, "epochs": epochs, "total": len(ids), "shown": shown, "folded": folded}


def _pair(sample_id: str, sides: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the responses to one prompt before and after training."""
    known = ("split_name", "sample_id", "prompt_text", "generated_text", "ref_text")
    first, last = sides[0], sides[-1]
    scored = [key for key, value in first.items() if key not in known and number(value) is not None]
    reference = str(first.get("ref_text") or "")
    return {
        "sample_id": sample_id,
        "prompt": str(first.get("prompt_text", "")).strip(),
        "texts": [str(side.get("generated_text", "")).strip() for side in sides],
        "references": [text.strip() for text in REFERENCE.findall(reference)] or ([reference] if reference else []),
        "scores": [_change(key, first[key], last.get(key)) for key in scored],
    }


def _table(run: RunRecord) -> tuple[list[str], list[list[str]]]:
    """Return all numbers of the iterations as a table; long runs are thinned evenly."""
    keys = list(dict.fromkeys(key for line in run.iterations for key in line))
    lines = spaced(run.iterations, N_TABLE_ROWS)
    return keys, [[format_number(number(line.get(key)), 4) for key in keys] for line in lines]
