"""What a metric returns is names with scores of the right shape, or an error that names the metric."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rl4lms_like.metrics import BaseMetric
from rl4lms_like.metrics.call import compute_metric
from rl4lms_like.system.errors import MetricError


class Reports(BaseMetric):
    def __init__(self, results):
        self.results = results

    def compute(self, prompt_texts, generated_texts, reference_texts, meta_infos=None, model=None, split_name=None):
        if isinstance(self.results, Exception):
            raise self.results
        return self.results


def computed(results):
    return compute_metric(Reports(results), ["p"] * 2, ["a", "b"], [[], []], split_name="val")


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_scores_become_plain_floats(kind):
    results = computed({"family/name": (kind([1, 2]), np.float32(1.5)), "family/other": (None, torch.tensor(2))})
    assert results == {"family/name": ([1.0, 2.0], 1.5), "family/other": (None, 2.0)}
    assert all(type(score) is float for score in [*results["family/name"][0], results["family/other"][1]])


def test_a_metric_may_have_nothing_to_say():
    assert computed({}) == {}


def test_nan_means_not_defined():
    assert np.isnan(computed({"f/n": (None, float("nan"))})["f/n"][1])


@pytest.mark.parametrize(
    ("results", "data"),
    [
        (None, "Reports .*NoneType"),
        ([("f/n", 1.0)], "Reports .*list"),
        ({"f/n": 1.0}, "'f/n': .* 1.0$"),
        ({"f/n": ([1.0], 1.0)}, "'f/n': 1 .* 2 "),
        ({"f/n": ([1.0, "n/a"], 1.0)}, "'f/n': .*'n/a'"),
        ({"f/n": (None, None)}, "'f/n': .*None"),
        ({"f/n": (3.0, 1.0)}, "'f/n': .* 3.0$"),
        (ValueError("no"), "Reports .*'val' .*2 .*: ValueError: no"),
    ],
)
def test_anything_else_is_refused_by_name(results, data):
    with pytest.raises(MetricError, match=data):
        computed(results)


def test_a_split_without_texts_is_refused():
    with pytest.raises(MetricError, match=r"Reports: .*'test'"):
        compute_metric(Reports({}), [], [], [], split_name="test")
