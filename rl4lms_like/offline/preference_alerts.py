"""Alerts for problems of a preference run: pure functions of its history, and the table of those that are checked.

    training logs, evaluations on `val` ─ History ─ alert ─> Alert, or None if there is no problem

Each alert is reported once, as a warning and as a line of alarms.jsonl, which report.html shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rl4lms_like.algorithms.preference_arguments import LENGTH_CORRELATION, REFERENCE_POINT
from rl4lms_like.training.alert import Alert

LOG_PROB_FACTOR = 1.5
"""Growth of the negative log-prob of better responses that is reported."""
PERPLEXITY_FACTOR = 1.5
EARLY = 0.25  # fraction of the run
N_AT_ZERO = 5  # training logs with z0 = 0
MAX_CORRELATION = 0.8
MAX_IMBALANCE = 2.0
"""Ratio of the weighted numbers of good and bad responses; the paper of KTO recommends at most 4/3."""
N_KEPT = 8
PERPLEXITY = "fluency_metrics/reference_perplexity"

Numbers = Mapping[str, Any]


@dataclass
class History:
    """Numbers of a run by step: the first and the latest ones."""

    n_steps: int = 0  # optimizer steps of the whole run
    balance: float | None = None  # weighted number of good responses for each weighted bad one; None for pairs
    train: list[dict[str, Any]] = field(default_factory=list)  # lines of the training log, with their `step`
    val: list[dict[str, Any]] = field(default_factory=list)  # evaluations on `val`, with their `step`
    reported: list[str] = field(default_factory=list)  # names of the alerts that were reported

    def add(self, split: str, step: int, numbers: Numbers) -> dict[str, Alert]:
        """Add numbers of `train` or `val`, and return the alerts that are new."""
        line: dict[str, Any] = {"step": step}
        for key, value in numbers.items():
            if isinstance(value, int | float) and math.isfinite(value):
                line[key] = value

        # The first line is kept, since alerts compare with the start of the run; of the others, the latest.
        lines = self.train if split == "train" else self.val
        lines.append(line)
        if len(lines) > N_KEPT:
            del lines[1]

        new_alerts: dict[str, Alert] = {}
        for name, check in ALERTS.items():
            alert = None if name in self.reported else check(self)
            if alert is not None:
                new_alerts[name] = alert
        self.reported += new_alerts
        return new_alerts

    def state_dict(self) -> dict[str, Any]:
        """Return the history as JSON."""
        return asdict(self)

    def last(self, key: str, lines: Sequence[Numbers], n: int) -> list[float]:
        """Return the values of a key in the last `n` lines after the first one; none if there are fewer."""
        values = [line[key] for line in lines[1:] if key in line]
        return values[-n:] if len(values) >= n else []


def chosen_log_prob_falls(history: History) -> Alert | None:
    """Detect that the better responses become much less likely on `val`."""
    key = "logps/chosen"
    values = history.last(key, history.val, 2)
    first = history.val[0].get(key) if history.val else None
    # Log-probs are negative: a value below 1.5 times the first one is further from 0. Two evaluations in a row.
    if not values or first is None or max(values) >= LOG_PROB_FACTOR * first:
        return None

    return Alert(
        f"the log-prob of the better responses fell from {first:.4g} to {values[-1]:.4g} nats on val",
        "set alg.args.sft_weight (dpo), raise alg.args.beta, or lower alg.training_args.learning_rate",
        {key: [first, *values]},
    )


def margin_grows_while_perplexity_rises(history: History) -> Alert | None:
    """Detect that more pairs are ranked correctly, while generated texts get worse."""
    # Objectives without a reference have no rewards; they compare mean log-probs.
    before = history.val[0] if history.val else {}
    key = "rewards/margins" if "rewards/margins" in before else "mean_logps/margins"
    margins = history.last(key, history.val, 2)
    perplexities = history.last(PERPLEXITY, history.val, 2)  # only with the metric `reference_perplexity`
    if not margins or not perplexities or PERPLEXITY not in before:
        return None
    if min(margins) <= before[key] or min(perplexities) <= PERPLEXITY_FACTOR * before[PERPLEXITY]:
        return None

    return Alert(
        f"the margin grew from {before[key]:.4g} to {margins[-1]:.4g}, and the perplexity of generated texts from "
        f"{before[PERPLEXITY]:.4g} to {perplexities[-1]:.4g}",
        "lower alg.training_args.learning_rate or the number of epochs, or raise alg.args.beta",
        {"margins": margins, "perplexities": perplexities},
    )


def accuracy_is_one_early(history: History) -> Alert | None:
    """Detect that all pairs of `val` are ranked correctly in the first part of the run."""
    # The first line is of the untrained model.
    for line in history.val[1:]:
        accuracy = line.get("rewards/accuracies", line.get("mean_logps/accuracies", 0.0))
        if accuracy >= 1 and line["step"] <= EARLY * history.n_steps:
            return Alert(
                f"all pairs of val are ranked correctly after {line['step']} of {history.n_steps} steps",
                "the pairs are easy: look for a difference in length or form, and lower the learning rate",
                {"step": line["step"], "accuracy": accuracy},
            )
    return None


def z0_stays_at_zero(history: History) -> Alert | None:
    """Detect that the reference point of KTO has no effect."""
    # z0 = max(0, estimate of the KL): at 0, the estimates of all steps since the log before were negative or 0.
    values = history.last(REFERENCE_POINT, history.train, N_AT_ZERO)
    if not values or max(values) > 0:
        return None
    return Alert(
        f"z0, the estimate of the KL to the reference, was 0 in the last {len(values)} logs",
        "responses to other prompts are less likely than at first: use larger batches, or lower the learning rate",
        {REFERENCE_POINT: values},
    )


def labels_are_unbalanced(history: History) -> Alert | None:
    """Detect that one class has much more weight than the other."""
    balance = history.balance
    if balance is None or 1 / MAX_IMBALANCE <= balance <= MAX_IMBALANCE:
        return None
    return Alert(
        f"good responses have {balance:.3g} times the weight of bad ones",
        "set alg.args.desirable_weight and undesirable_weight so that both weigh the same",
        {"balance": balance},
    )


def reward_follows_length(history: History) -> Alert | None:
    """Detect that a reward model measures length."""
    values = history.last(LENGTH_CORRELATION, history.val, 1)
    if not values or abs(values[-1]) <= MAX_CORRELATION:
        return None
    return Alert(
        f"the reward of a text of val is correlated with its number of tokens: r = {values[-1]:.2f}",
        "add pairs in which the shorter response is the better one",
        {LENGTH_CORRELATION: values},
    )


ALERTS: dict[str, Callable[[History], Alert | None]] = {
    check.__name__: check
    for check in (
        chosen_log_prob_falls,
        margin_grows_while_perplexity_rises,
        accuracy_is_one_early,
        z0_stays_at_zero,
        labels_are_unbalanced,
        reward_follows_length,
    )
}
"""Alerts by name."""
