"""The `train_evaluation.keep_best` block: by which score a model is the best so far. Loads no torch.

    keep_best: {metric: lexical/meteor, mode: max}

The metric is one that `train_evaluation.metrics` reports; a misspelt one is told before anything is loaded, where all
keys are known from the table.
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

PLACE = "train_evaluation.keep_best"
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


def keep_best_mistakes(blocks: Mapping[str, Any]) -> list[Mistake]:
    """A metric to choose by that no metric of the config reports, as far as the table tells."""
    chosen, best = at(blocks, f"{PLACE}.metric"), at(blocks, SUPERVISED)
    wanted, metrics = best if chosen is None else chosen, at(blocks, "train_evaluation.metrics")
    if not isinstance(wanted, str):
        return []
    keys: list[str] = ["loss"] if chosen is None else []
    for metric in metrics if isinstance(metrics, list) else []:
        id = metric.get("id") if isinstance(metric, Mapping) else None
        own = METRICS.entry(id).keys if isinstance(id, str) and id in METRICS else ()
        if not own:
            return []  # what one of the user's own reports is seen at the first evaluation
        keys += [named_key(key, metric["name"]) if metric.get("name") else key for key in own]
    name = wanted.removeprefix("eval_") if chosen is None else wanted
    if any(_fits(name, key) for key in keys):
        return []
    mistake = unknown_metric(wanted, keys)
    return [mistake if chosen is not None else Mistake(SUPERVISED, mistake.message)]


def unknown_metric(wanted: str, known: Iterable[str]) -> Mistake:
    """Says that nothing reports the metric, and what is near."""
    keys = list(known)
    near = difflib.get_close_matches(wanted, keys, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {_listed(keys)}"
    return Mistake(f"{PLACE}.metric", f"no metric gives {wanted!r}; {hint}")


def _listed(keys: Sequence[str]) -> str:
    return ", ".join(keys) if keys else "none, for train_evaluation.metrics is empty"


def _fits(wanted: str, key: str) -> bool:
    """Whether a key of the table, in which `{n}` stands for what depends on arguments, is the one that is wanted."""
    return re.fullmatch(re.sub(r"\\\{\w+\\\}", ".+", re.escape(key)), wanted) is not None
