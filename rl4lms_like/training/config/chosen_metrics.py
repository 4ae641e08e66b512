"""Metrics that a config selects by key, such as the metric of the best model. Imports no torch.

    train_evaluation.keep_best: {metric: lexical/meteor, mode: max}      the model of the best evaluation
    alg.training_args.metric_for_best_model: eval_lexical/meteor         the same, in supervised runs
    doctor.held_out: [{metric: lexical/meteor, mode: max}]               must not fall while the reward rises

Each must be a key that `train_evaluation.metrics` reports. A misspelt key is reported before anything is loaded, unless
a metric is not in the table of the library.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rl4lms_like.core.errors import Mistake
from rl4lms_like.core.schema import at
from rl4lms_like.metrics import METRICS
from rl4lms_like.metrics.named import named_key

PLACE, HELD_OUT = "train_evaluation.keep_best", "doctor.held_out"
SUPERVISED = "alg.training_args.metric_for_best_model"
"""Config path of the metric in supervised runs: `loss` or a key of the metrics, with an optional prefix `eval_`."""


@dataclass(frozen=True, kw_only=True)
class KeepBestConfig:
    """The `train_evaluation.keep_best` block: keeps the model of the best evaluation on `val` in `best/`.

    Args:
        metric: a key of the metrics on `val`, `lexical/meteor`.
        mode: `max` if larger is better, `min` if smaller is better.
    """

    metric: str
    mode: Literal["max", "min"]


def chosen_metric_mistakes(blocks: Mapping[str, Any]) -> list[Mistake]:
    """Return a mistake for each selected key that no metric of the config reports, if all reported keys are known."""
    known = _reported(at(blocks, "train_evaluation.metrics"))
    if known is None:
        return []
    held_out = at(blocks, HELD_OUT)
    chosen = {f"{PLACE}.metric": at(blocks, f"{PLACE}.metric")}
    for index, each in enumerate(held_out if isinstance(held_out, list) else []):
        chosen[f"{HELD_OUT}.{index}.metric"] = each.get("metric") if isinstance(each, Mapping) else None
    mistakes = [
        unknown_metric(path, wanted, known)
        for path, wanted in chosen.items()
        if isinstance(wanted, str) and not _is_among(wanted, known)
    ]
    best = at(blocks, SUPERVISED)
    if isinstance(best, str) and not _is_among(best.removeprefix("eval_"), ["loss", *known]):
        mistakes.append(unknown_metric(SUPERVISED, best, ["loss", *known]))
    return mistakes


def unknown_metric(path: str, wanted: str, known: Iterable[str]) -> Mistake:
    """Return the mistake for a key at a config path that no metric reports, with the closest known key."""
    keys = list(known)
    near = difflib.get_close_matches(wanted, keys, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {_listed(keys)}"
    return Mistake(path, f"no metric reports {wanted!r}; {hint}")


def _reported(metrics: Any) -> list[str] | None:
    """Return the keys of the config's metrics; None with a user's metric, whose keys are unknown before evaluation."""
    keys: list[str] = []
    for metric in metrics if isinstance(metrics, list) else []:
        id = metric.get("id") if isinstance(metric, Mapping) else None
        own = METRICS.entry(id).keys if isinstance(id, str) and id in METRICS else ()
        if not own:
            return None
        keys += [named_key(key, metric["name"]) if metric.get("name") else key for key in own]
    return keys


def _listed(keys: Sequence[str]) -> str:
    return ", ".join(keys) if keys else "none, because train_evaluation.metrics is empty"


def _is_among(wanted: str, keys: Iterable[str]) -> bool:
    """Return whether a key is among the keys of the table, where `{n}` is a part that depends on arguments."""
    return any(re.fullmatch(re.sub(r"\\\{\w+\\\}", ".+", re.escape(key)), wanted) for key in keys)
