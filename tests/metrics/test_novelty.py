"""Novelty against a file of training texts."""

from __future__ import annotations

import pytest

from rl4lms_like.metrics import METRICS
from rl4lms_like.metrics.call import compute_metric
from rl4lms_like.testing.checkers import check_metric


@pytest.fixture
def training_texts(tmp_path):
    path = tmp_path / "train.txt"
    path.write_text("the cat sat\non my way\n", encoding="utf-8")
    return str(path)


def test_it_passes_the_checker_and_reports_the_keys_of_its_row(training_texts):
    check_metric(METRICS.get("novelty", {"training_texts": training_texts}), keys=METRICS.entry("novelty").keys)


def test_shares_of_texts_and_of_all(training_texts):
    metric = METRICS.get("novelty", {"training_texts": training_texts, "max_n": 2})
    results = compute_metric(metric, ["", ""], ["the cat sat", "on my roof"], [[], []])
    assert results == {
        "diversity_metrics/novelty-1": ([0.0, pytest.approx(1 / 3)], pytest.approx(1 / 6)),
        "diversity_metrics/novelty-2": ([0.0, 0.5], 0.25),
        "diversity_metrics/novel_texts": ([0.0, 1.0], 0.5),
    }


def test_a_missing_file_is_said_when_the_metric_is_built(tmp_path):
    with pytest.raises(ValueError):
        METRICS.get("novelty", {"training_texts": str(tmp_path / "none.txt")})
