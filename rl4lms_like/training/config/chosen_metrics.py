"""Metrics that a config chooses by, named by the keys that they report. Loads no torch.

    train_evaluation.keep_best: {metric: lexical/meteor, mode: max}      the model of the best evaluation
    alg.training_args.metric_for_best_model: eval_lexical/meteor         the same, of supervised runs
    doctor.held_out: [{metric: lexical/meteor, mode: max}]               must not fall while the reward rises

Each is one that `train_evaluation.metrics` reports; a misspelt one is told before anything is loaded, where the table
tells all keys.
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
"""Where a supervised run names the metric; `loss` is its own, and `eval_` may stand before any."""


@dataclass(frozen=True, kw_only=True)
class KeepBestConfig:
    """The `train_evaluation.keep_best` block: keeps the model of the best evaluation on `val` in `best/`.

    Args:
        metric: a key of the metrics on `val`, `lexical/meteor`.
        mode: whether it is to be large (`max`) or small (`min`).
    """

    metric: str
    mode: Literal["max", "min"]


def chosen_metric_mistakes(blocks: Mapping[str, Any]) -> list[Mistake]:
    """Metrics to choose by that no metric of the config reports, as far as the table tells."""
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
    """Says that nothing reports the metric which stands at a path of the config, and what is near."""
    keys = list(known)
    near = difflib.get_close_matches(wanted, keys, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {_listed(keys)}"
    return Mistake(path, f"no metric gives {wanted!r}; {hint}")


def _reported(metrics: Any) -> list[str] | None:
    """The keys of the config's metrics; None where one is the user's own, which tells them at the first evaluation."""
    keys: list[str] = []
    for metric in metrics if isinstance(metrics, list) else []:
        id = metric.get("id") if isinstance(metric, Mapping) else None
        own = METRICS.entry(id).keys if isinstance(id, str) and id in METRICS else ()
        if not own:
            return None
        keys += [named_key(key, metric["name"]) if metric.get("name") else key for key in own]
    return keys


def _listed(keys: Sequence[str]) -> str:
    return ", ".join(keys) if keys else "none, for train_evaluation.metrics is empty"


def _is_among(wanted: str, keys: Iterable[str]) -> bool:
    """Whether it is one of the table's keys, in which `{n}` stands for what depends on arguments."""
    return any(re.fullmatch(re.sub(r"\\\{\w+\\\}", ".+", re.escape(key)), wanted) for key in keys)
