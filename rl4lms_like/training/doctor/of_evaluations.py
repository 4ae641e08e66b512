"""The alarm of evaluations: the reward rises while what it stands for falls.

best evaluation of a metric ── … ── the last two: clearly worse, and the training reward clearly higher
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
"""Beginning of a metric's key -> which way is better; the longest that fits counts. Lengths and diversity have none."""

CLEARLY = 3.0
"""Standard errors by which two means must differ."""


def direction_of(key: str) -> str | None:
    """`max`, `min`, or None where a metric has no better and worse."""
    fitting = [start for start in DIRECTIONS if key == start or (start.endswith("/") and key.startswith(start))]
    fitting += [start for start in DIRECTIONS if not start.endswith("/") and key.startswith(f"{start}/")]
    return DIRECTIONS[max(fitting, key=len)] if fitting else None


def standard_error(values: Iterable[Any]) -> float:
    """Of the mean of a metric's scores of single texts; 0 where it has fewer than two."""
    numbers = [float(value) for value in values if isinstance(value, (int, float)) and math.isfinite(value)]
    if len(numbers) < 2:
        return 0.0
    mean = math.fsum(numbers) / len(numbers)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in numbers) / (len(numbers) - 1) / len(numbers))


def reward_hacking(history: History, case: Case) -> Finding | None:
    """The training reward rises, and a metric on `val` that is not the reward falls from its best.

    What is optimised has then come apart from what it was meant to measure (Goodhart's law; Gao et al., arXiv
    2210.10760; Skalse et al., arXiv 2209.13085). Both must be clear: in the last two evaluations the metric is worse by
    `max_held_out_fall` and by three standard errors, the reward higher by three.
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
    """A mark made before training has the first rollout's reward, which is of the same policy."""
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
        f"Read texts of both epochs (report.html has them); raise alg.kl_div.coeff, stop earlier, or make {key} a part "
        f"of the reward (reward_fn: combine). If it is no loss: doctor.held_out names the metrics that count",
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
    """A metric at an evaluation, with the reward of the iterations before it.

    Args:
        epoch: iterations before it.
        key: the metric's.
        score: on the split.
        predictions: with the scores of single texts.
        recent: signs of the iterations since the evaluation before, as far as they are remembered.
    """
    error = standard_error(prediction.get(key) for prediction in predictions)
    rewards = [signs["reward"] for signs in recent if signs.get("reward") is not None]
    if not rewards:
        return Mark(epoch, score, error, None, 0.0)
    spread = math.fsum((signs.get("reward_std") or 0.0) ** 2 / (signs.get("n_episodes") or 1.0) for signs in recent)
    return Mark(epoch, score, error, math.fsum(rewards) / len(rewards), math.sqrt(spread) / len(rewards))
