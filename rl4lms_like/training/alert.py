"""An alert: a problem of a run, with its numbers and advice, and how it is reported."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rl4lms_like.tracking.base import IN_SHORT, Tracker
from rl4lms_like.tracking.run_folder import ALARMS_FILE

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Alert:
    """A problem that was detected: one sentence, what to change and in which direction, the numbers."""

    message: str
    advice: str
    evidence: dict[str, Any]
    metric: str = ""  # key of the metric concerned, if any


def report_alert(tracker: Tracker, at: str, number: int, name: str, alert: Alert, examples: Sequence[Any] = ()) -> None:
    """Log an alert at "iteration" or "step" `number`, and write it to the file of alerts."""
    logger.warning("%s %d, %s: %s. %s", at, number, name, alert.message, alert.advice, extra=IN_SHORT)
    line = {"alarm": name, "iteration": number, "said": alert.message, "advice": alert.advice}
    tracker.log_line(ALARMS_FILE, {**line, "evidence": alert.evidence, "examples": examples})
