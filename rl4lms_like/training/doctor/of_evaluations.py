"""Alert on evaluations: the training reward rises while a held-out metric gets worse.

best evaluation of a metric ── … ── the last two: significantly worse, and the training reward significantly higher
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rl4lms_like.training.doctor.findings import Case, Finding
from rl4lms_like.training.doctor.history import N_MARKS, History, Mark

DIRECTIONS = {
    "answers/": "max",
    "consistency/": "max",
    "fluency_metrics/": "min",
    "intent/": "max",
    "lexical/": "max",
    "lexical/ter": "min",
    "semantic/": "max",
    "synthetic/": "max",
    "table_to_text/": "max",
}
"""Prefix of a metric's key -> whether larger or smaller is better; the longest match counts.

Lengths and diversity have no better direction."""

CLEARLY = 3.0
"""Standard errors by which two means must differ."""


def direction_of(key: str) -> str | None:
    """Return `max`, `min`, or None if a metric has no better direction."""
    fitting = [start for start in DIRECTIONS if key == start or (start.endswith("/") and key.startswith(start))]
    fitting += [start for start in DIRECTIONS if not start.endswith("/") and key.startswith(f"{start}/")]
    return DIRECTIONS[max(fitting, key=len)] if fitting else None


def standard_error(values: Iterable[Any]) -> float:
    """Return the standard error of the mean of a metric's scores of single texts; 0 for fewer than two scores."""
    numbers = [float(value) for value in values if isinstance(value, (int, float)) and math.isfinite(value)]
    if len(numbers) < 2:
        return 0.0
    mean = math.fsum(numbers) / len(numbers)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in numbers) / (len(numbers) - 1) / len(numbers))


def reward_hacking(history: History, case: Case) -> Finding | None:
    """Detect that the training reward rises while a metric on `val` other than the reward falls from its best.

    The reward then no longer measures the intended quality (Goodhart's law; Gao et al., arXiv 2210.10760; Skalse et
    al., arXiv 2209.13085). In each of the last two evaluations, the metric must be worse by `max_held_out_fall` and by
    three standard errors, and the reward must be higher by three standard errors.
    """
    limit = case.limits.max_held_out_fall
    for key, mode in case.modes.items() if limit is not None else ():
        trail = history.held_out.get(key)
        if trail is None or len(trail.last) < N_MARKS or trail.best in trail.last:
            continue
        best = _with_reward(trail.best, history.first)
        assert limit is not None
        if all(_has_fallen(mark, best, mode, limit) and _is_better_paid(mark, best) for mark in trail.last):
            return _finding(key, best, trail.last[-1])
    return None


def _with_reward(mark: Mark, first: Mapping[str, float | None]) -> Mark:
    """Complete an evaluation before training with the reward of the first rollout, which is of the same policy."""
    if mark.reward is not None:
        return mark
    n, std = first.get("n_episodes") or 1.0, first.get("reward_std") or 0.0
    return Mark(mark.epoch, mark.score, mark.error, first.get("reward"), std / math.sqrt(n))


def _has_fallen(mark: Mark, best: Mark, mode: str, limit: float) -> bool:
    fall = best.score - mark.score if mode == "max" else mark.score - best.score
    return fall > max(limit * abs(best.score), CLEARLY * math.hypot(mark.error, best.error))


def _is_better_paid(mark: Mark, best: Mark) -> bool:
    if mark.reward is None or best.reward is None:
        return False
    return mark.reward - best.reward > CLEARLY * math.hypot(mark.reward_error, best.reward_error)


def _finding(key: str, best: Mark, last: Mark) -> Finding:
    assert best.reward is not None and last.reward is not None
    return Finding(
        f"the reward rose from {best.reward:.3g} to {last.reward:.3g}, and {key} on val went from {best.score:.3g} "
        f"(epoch {best.epoch}) to {last.score:.3g} (epoch {last.epoch})",
        f"Read texts of both epochs (in report.html); raise alg.kl_div.coeff, stop earlier, or make {key} part of the "
        f"reward (reward_fn: combine). If the fall is acceptable, list the metrics that matter in doctor.held_out",
        {
            "reward": [best.reward, last.reward],
            "score": [best.score, last.score],
            "epoch": [float(best.epoch), float(last.epoch)],
        },
        key,
    )


def mark_of(
    epoch: int, key: str, score: float, predictions: Sequence[Mapping[str, Any]], recent: Sequence[Mapping[str, Any]]
) -> Mark:
    """Combine a metric's score at an evaluation with the reward of the preceding iterations.

    Args:
        epoch: number of iterations before the evaluation.
        key: key of the metric.
        score: score on the split.
        predictions: texts with the scores of single texts.
        recent: diagnostics of the iterations since the previous evaluation that are in the history.
    """
    error = standard_error(prediction.get(key) for prediction in predictions)
    rewards = [signs["reward"] for signs in recent if signs.get("reward") is not None]
    if not rewards:
        return Mark(epoch, score, error, None, 0.0)
    spread = math.fsum((signs.get("reward_std") or 0.0) ** 2 / (signs.get("n_episodes") or 1.0) for signs in recent)
    return Mark(epoch, score, error, math.fsum(rewards) / len(rewards), math.sqrt(spread) / len(rewards))
