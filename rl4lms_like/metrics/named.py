"""Several instances of one metric in a run, distinguished by a name.

{id: learned_reward, args: ..., name: toxicity}   reports `semantic/learned_automodel_metric/toxicity`
"""

from __future__ import annotations

from typing import Any

from rl4lms_like.metrics.base import BaseMetric, MetricResults


def named_key(key: str, name: str) -> str:
    """Return the key followed by the name, such as `semantic/learned_automodel_metric/toxicity`."""
    return f"{key}/{name}"


class NamedMetric(BaseMetric):
    """Metric whose keys end in a name.

    Args:
        metric: the metric that computes the results.
        name: name that is appended to each of its keys, after a slash.
    """

    def __init__(self, metric: BaseMetric, name: str) -> None:
        self.metric = metric
        self.name = name
        self.needs_references = metric.needs_references

    def compute(
        self,
        prompt_texts: list[str],
        generated_texts: list[str],
        reference_texts: list[list[str]],
        meta_infos: list[dict[str, Any] | None] | None = None,
        model: Any = None,
        split_name: str | None = None,
    ) -> MetricResults:
        """Compute the metric's results under the longer keys."""
        results = self.metric.compute(prompt_texts, generated_texts, reference_texts, meta_infos, model, split_name)
        return {named_key(key, self.name): value for key, value in results.items()}
