"""`report.html`: report of a run in one file, made from the run folder.

    run folder ──read_run──► RunRecord ──► facts, headline, curves, samples ──report.html.j2──► report.html

The page needs neither network nor scripts, and supports dark mode and small screens. Values that the run did not log
are left out.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Container, Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import median_high
from typing import TYPE_CHECKING, Any

from rl4lms_like.system.disk import reason
from rl4lms_like.system.errors import RL4LMsLikeError
from rl4lms_like.tracking import charts
from rl4lms_like.tracking.charts import Curve, Series, format_number
from rl4lms_like.tracking.credit import credit_of, signed
from rl4lms_like.tracking.record import (
    RunRecord,
    dialogue_parts,
    number,
    read_predictions,
    read_run,
    spaced,
    written_by_a_run,
)
from rl4lms_like.tracking.rollouts import rollouts_of
from rl4lms_like.tracking.run_folder import ALARMS_FILE, REPORT_FILE, write_whole
from rl4lms_like.tracking.sink import Epoch
from rl4lms_like.tracking.thumbnails import N_EMBEDDED, embedded

if TYPE_CHECKING:
    from jinja2 import Template

N_SHOWN = 6
"""Number of samples of a split that are shown at once."""

N_FOLDED = 18
"""Number of further samples that can be unfolded."""

LONG_TEXT = 420
"""Number of characters from which on a text is folded."""

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

    # Before and after of each split's scores: (split, its epochs, rows of the table).
    headline = []
    for split, scores in run.evaluations.items():
        headline.append((split, list(scores), _changes(scores)))

    page = template_of("tracking").render(
        title=run.path.resolve().name,
        project=run.path.resolve().parent.name,
        status=_status(run),
        facts=_facts(run),
        tiles=_tiles(run),
        headline=headline,
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

    # Texts of models are escaped, so that they cannot be markup. The charts are markup of this library.
    loader = PackageLoader("rl4lms_like", package)
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["svg"] = Markup
    return environment.get_template("report.html.j2")


def _status(run: RunRecord) -> str:
    if not run.iterations:
        return "no iteration yet"

    # A supervised run has no `n_iters`: its lines are of optimizer steps.
    n_iters = run.setting("train_evaluation", "n_iters")
    last = int(run.iterations[-1]["iteration"])
    if isinstance(n_iters, int) and last < n_iters:
        return f"unfinished, {last} of {n_iters} iterations"
    return f"{last} {'iterations' if n_iters is not None else 'steps'}"


def _facts(run: RunRecord) -> list[tuple[str, str]]:
    """Return the settings and totals at the top of the page as (name, value), without those that are not known."""
    facts: dict[str, Any] = {
        "Algorithm": run.setting("alg", "id"),
        "Policy": run.setting("alg", "policy", "id"),
        "Model": run.setting("alg", "policy", "args", "model_name") or run.setting("alg", "model_name"),
        "Reward": run.setting("reward_fn", "id"),
        "Data": run.setting("datapool", "id"),
        "Seed": run.setting("seed"),
    }

    # The times are those of the log: of a resumed run they include the interruption.
    if run.began:
        facts["Started"] = run.began.strftime("%d %B %Y, %H:%M").lstrip("0")
    if run.began and run.ended:
        facts["Wall time"] = charts.duration((run.ended - run.began).total_seconds())

    if run.iterations and run.iterations[-1].get("timesteps"):
        facts["Tokens"] = format_number(run.iterations[-1]["timesteps"])
    if episodes := run.values("rollout_info/n_episodes"):
        facts["Episodes"] = format_number(sum(episodes))
    if run.setting("doctor", "enabled"):
        facts["Alerts"] = str(len(run.alarms)) if run.alarms else "none"
    return [(name, str(value)) for name, value in facts.items() if value is not None]


def _tiles(run: RunRecord) -> list[tuple[str, str, str]]:
    """Return the main numbers as (name, value, value for comparison)."""
    names = {
        "rollout_info/ep_rew": "reward per episode",
        "supervised/loss": "loss per token",
        "supervised/val_loss": "loss on val",
        "preference/loss": "loss per pair",
        "preference/val_loss": "loss on val",
        "rewards/accuracies": "accuracy",
        "rollout_info/kl_div_mean": "KL per token",
        "rollout_info/entropy": "entropy",
    }
    target = number(run.setting("alg", "kl_div", "target_kl"))
    target_note = f"target {format_number(target)}" if target is not None else "no target"

    # The last value, next to the first one. The KL begins at 0: its comparison is the target.
    tiles = []
    for key, name in names.items():
        if values := run.values(key):
            is_kl = key == "rollout_info/kl_div_mean"
            note = target_note if is_kl else f"{format_number(values[0])} at first"
            tiles.append((name, format_number(values[-1]), note))

    # A single large gap matters, hence the maximum; one slow iteration does not, hence the median.
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
    # 1 or 0 for each iteration since the alert.
    is_active = run.values(f"doctor/{line['alarm']}")
    since = ""
    if len(is_active) > 1:
        since = f"; active in {sum(is_active):g} of the {len(is_active)} iterations since"

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
    """Return the first and the last evaluation's scores of a split, a row for each key."""
    by_epoch = list(scores.values())
    first = by_epoch[0]
    last = by_epoch[-1] if len(by_epoch) > 1 else {}  # one evaluation is that before training
    keys = dict.fromkeys([*first, *last])
    return [_change(key, first.get(key), last.get(key)) for key in keys]


def _change(name: str, before: Any, after: Any) -> dict[str, str]:
    """Return a score before and after training."""
    first = number(before)
    last = number(after)
    change = "" if first is None or last is None else signed(last - first)
    return {"name": name, "before": format_number(first), "after": format_number(last), "change": change}


def _groups(run: RunRecord) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return the charts by heading, without empty headings."""
    # The order of the headings; those of the curves follow.
    groups: dict[str, list[dict[str, Any]]] = {charts.LEARNING: [], charts.PARTS: [], charts.EVALUATIONS: []}

    # A chart for each metric, with a line for each split over the epochs.
    metric_keys: dict[str, None] = {}
    for scores_by_epoch in run.evaluations.values():
        for scores in scores_by_epoch.values():
            metric_keys |= dict.fromkeys(scores)
    for key in metric_keys:
        series = []
        for split, scores_by_epoch in run.evaluations.items():
            points = [(float(epoch), number(scores.get(key)), None) for epoch, scores in scores_by_epoch.items()]
            series.append(Series(split, points))
        groups[charts.EVALUATIONS] += _panels(key, "", series, x_name="epoch")

    # Curves that the run has not logged are left out, such as PPO's of a supervised run.
    logged_keys = dict.fromkeys(chain.from_iterable(run.iterations))
    for curve in (*charts.CURVES, *charts.part_curves(logged_keys), *charts.callback_curves(logged_keys)):
        groups.setdefault(curve.group, []).extend(_curve_panels(run, curve, logged_keys))
    return [(heading, panels) for heading, panels in groups.items() if panels]


def _curve_panels(run: RunRecord, curve: Curve, logged_keys: Container[str]) -> list[dict[str, Any]]:
    # A line's keys are those of different algorithms, such as `ppo/value_loss` and SB3's `train/value_loss`.
    series = []
    for label, keys in curve.lines.items():
        key = next((key for key in keys if key in logged_keys), None)
        if key is not None:
            std = dict(run.curve(f"{key}_std")) if curve.band else {}
            series.append(Series(label, [(x, y, std.get(x)) for x, y in run.curve(key)]))

    if curve.omit_zeros and not any(y for line in series for _, y, _ in line.points):
        return []
    target = number(run.setting(*curve.target)) if curve.target else None
    note = f"{curve.note}; dashed: the target, {format_number(target)}" if target is not None else curve.note
    return _panels(curve.title, note, series, log=curve.log, target=target, from_zero=curve.from_zero)


def _panels(title: str, note: str, series: list[Series], **options: Any) -> list[dict[str, Any]]:
    """Return a chart with its caption, or none if no series has a value."""
    series = [line for line in series if line.last is not None]
    if not series:
        return []

    # A legend only if there is something to tell apart: the caption names a single line.
    svg = charts.line_chart(series, title=title, **options)
    legend = [line.label for line in series] if len(series) > 1 else []
    return [{"title": title, "note": note, "last": format_number(series[0].last), "svg": svg, "legend": legend}]


def _samples(run: RunRecord, split: str) -> dict[str, Any]:
    """Return pairs of the first and the last evaluation, evenly spaced over the split, not selected by score."""
    files = run.predictions[split]
    epochs = tuple(dict.fromkeys((next(iter(files)), next(reversed(files)))))  # one epoch if there is one evaluation

    # Predictions by sample, for each of the epochs; only samples of both can be compared.
    predictions: list[dict[str, dict[str, Any]]] = []
    for epoch in epochs:
        predictions.append({str(item.get("sample_id")): item for item in read_predictions(files[epoch])})
    ids = [sample_id for sample_id in predictions[0] if sample_id in predictions[-1]]

    pairs = []
    for sample_id in spaced(ids, N_SHOWN + N_FOLDED):
        pairs.append(_pair(sample_id, [by_id[sample_id] for by_id in predictions]))
    shown = spaced(pairs, N_SHOWN)
    for pair in shown[:N_EMBEDDED]:
        pair["images"] = embedded(run.path, predictions[0][pair["sample_id"]])
    folded = [pair for pair in pairs if pair not in shown]
    return {"split": split, "epochs": epochs, "total": len(ids), "shown": shown, "folded": folded}


def _pair(sample_id: str, predictions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the responses to one prompt before and after training; one of them if there is one evaluation."""
    first = predictions[0]
    last = predictions[-1]

    # All other numbers of a prediction are scores of metrics.
    known = ("split_name", "sample_id", "prompt_text", "generated_text", "ref_text", "images")
    score_keys = [key for key, value in first.items() if key not in known and number(value) is not None]

    # Several references are in one text, each between <START-1> and <END-1>, as in RL4LMs' files.
    reference_text = str(first.get("ref_text") or "")
    references = [reference.strip() for reference in REFERENCE.findall(reference_text)]
    if not references and reference_text:
        references = [reference_text]

    return {
        "sample_id": sample_id,
        "images": [],
        "prompt": str(first.get("prompt_text", "")).strip(),
        "texts": [str(prediction.get("generated_text", "")).strip() for prediction in predictions],
        "dialogues": [dialogue_parts(prediction.get("turns")) for prediction in predictions],
        "references": references,
        "scores": [_change(key, first[key], last.get(key)) for key in score_keys],
    }


def _table(run: RunRecord) -> tuple[list[str], list[list[str]]]:
    """Return all numbers of the iterations as a table; long runs are thinned evenly."""
    # Not every iteration has every key: an algorithm may log some of them rarely.
    keys = list(dict.fromkeys(chain.from_iterable(run.iterations)))
    rows = []
    for line in spaced(run.iterations, N_TABLE_ROWS):
        rows.append([format_number(number(line.get(key)), 4) for key in keys])
    return keys, rows
