"""Metric from any Python function, sync or async, which is called like the function of a reward."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from rl4lms_like.core.generated import Generated
from rl4lms_like.metrics.base import GeneratedMetric, MetricResults
from rl4lms_like.scoring.python_function import FunctionName, FunctionScore, built_object
from rl4lms_like.scoring.score import mean


@dataclass(eq=False, repr=False)  # `kwargs` may contain secrets
class PythonMetric(FunctionScore, GeneratedMetric):
    """Mean of the values of a Python function, under `python/<its name>`; None of the function is not counted.

    With `responses` it gets all texts of a batch as lists, with `response` one text per call, and with `completions`
    the lists that TRL's trainers pass. `prompts`, `references` and `meta_infos` are passed by these names, all others
    are columns of the data.
    """

    def results_of(self, generated: Sequence[Generated]) -> MetricResults:
        """Return the values of the function and their mean."""
        values: Any = self.values(generated)
        if hasattr(values, "tolist"):  # an array or a tensor
            values = values.tolist()

        # Mappings and sets have a length, but no order of the responses.
        if isinstance(values, str | bytes | Mapping | Set) or not hasattr(values, "__len__"):
            raise ValueError(f"expected a list of {len(generated)} values, got {values!r:.60}")
        if len(values) != len(generated):
            raise ValueError(f"{len(values)} values for {len(generated)} texts")
        scores = [math.nan if value is None else float(value) for value in values]
        return {f"python/{self.label}": (scores, mean(scores))}


def built_metric(object: FunctionName) -> Any:
    """Return a metric that was built in Python.

    Args:
        object: the metric; in a file its name, which cannot be built again.
    """
    return built_object(object, "metrics")
