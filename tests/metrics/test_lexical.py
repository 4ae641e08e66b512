"""Metrics of overlap with references: keys, scores of texts, texts without references."""

from __future__ import annotations

import math

import pytest

from rl4lms_like.metrics import METRICS
from rl4lms_like.metrics.call import compute_metric
from rl4lms_like.testing.checkers import check_metric

pytestmark = pytest.mark.usefixtures("language_data")

OVERLAP = ["meteor", "rouge", "rouge_l_max", "bleu", "sacre_bleu", "ter", "chrf"]
TEXTS = ["The cat sat on the warm mat", "", "A dog ran far away home", "no reference for this"]
REFERENCES = [["The cat sat on the warm mat"], ["It rained"], ["nobody", "The dog ran far away home"], []]


def computed(id, args=None, texts=TEXTS, references=REFERENCES):
    return compute_metric(METRICS.get(id, args), [""] * len(texts), texts, references)


@pytest.mark.parametrize("id", [*OVERLAP, "diversity"])
def test_every_metric_passes_the_checker_and_reports_the_keys_of_its_row(id):
    check_metric(METRICS.get(id), keys=METRICS.entry(id).keys)


@pytest.mark.parametrize("id", OVERLAP)
def test_a_text_without_references_has_no_score_and_does_not_count(id):
    with_it, without = computed(id), computed(id, None, TEXTS[:3], REFERENCES[:3])
    for key, (scores, overall) in with_it.items():
        assert scores[:3] == without[key][0]
        assert math.isnan(scores[3])
        assert overall == without[key][1]


@pytest.mark.parametrize("id", OVERLAP)
def test_without_any_references_there_is_no_score(id):
    results = computed(id, None, TEXTS[:2], [[], []])
    assert tuple(results) == METRICS.entry(id).keys
    assert all(math.isnan(number) for scores, overall in results.values() for number in (*scores, overall))


def test_meteor_reports_each_text_and_the_mean():
    scores, overall = computed("meteor", None, TEXTS[:2], REFERENCES[:2])["lexical/meteor"]
    assert scores == [pytest.approx(0.9985, abs=1e-4), 0.0]
    assert overall == pytest.approx(sum(scores) / 2)


def test_rouge_reports_plain_means():
    """RL4LMs reported the middle of a thousand random resamples, which differs from call to call."""
    for scores, overall in computed("rouge", {"use_single_ref": False}, TEXTS[:3], REFERENCES[:3]).values():
        assert overall == pytest.approx(sum(scores) / 3)


@pytest.mark.parametrize("id", ["bleu", "sacre_bleu", "ter", "chrf"])
def test_samples_may_have_different_numbers_of_references(id):
    """RL4LMs' sacrebleu metrics raised here."""
    ((scores, overall),) = computed(id, None, TEXTS[:3], REFERENCES[:3]).values()
    assert len(scores) == 3
    assert math.isfinite(overall)


def test_a_corpus_score_is_not_the_mean_of_its_texts():
    scores, corpus = computed("bleu", None, TEXTS[:3], REFERENCES[:3])["lexical/bleu"]
    assert (scores[0], scores[1]) == (1.0, 0.0)
    assert 0 < corpus != pytest.approx(sum(scores) / 3)


def test_diversity_names_its_window():
    results = computed("diversity", {"window_size": 4})
    assert "diversity_metrics/msttr-4" in results
    assert "diversity_metrics/msttr-4_nopunct" in results
    assert all(scores is None for scores, _ in results.values())
