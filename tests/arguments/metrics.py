"""How each argument of the metrics is seen to act: by id, then by argument."""

from __future__ import annotations

from rl4lms_like.metrics.sentiment import SentimentMetric
from rl4lms_like.system.functions import NamedFunction
from tests.arguments import metrics_of_models, metrics_of_rules, rewards_of_rules
from tests.arguments.seen import Acts, Silent

ROWS: dict[str, dict[str, Acts | Silent]] = {
    **metrics_of_rules.ROWS,
    **metrics_of_models.ROWS,
    "python": rewards_of_rules.ROWS["python"],  # functions are called alike
    "object": {"object": Acts(NamedFunction(SentimentMetric()))},
}
