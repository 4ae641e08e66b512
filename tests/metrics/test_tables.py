"""ToTTo's metrics and reward: defined for empty texts and empty subsets, an error for tables that are not there."""

from __future__ import annotations

import math

import pytest

from rl4lms_like.core.sample import Sample
from rl4lms_like.metrics.lexical import BLEUToTTo, ParentToTTo
from rl4lms_like.rewards.lexical import PARENTRewardFunction
from rl4lms_like.scoring.score import Texts
from rl4lms_like.system.errors import MissingExtraError, RewardError
from rl4lms_like.testing.checkers import check_metric, check_reward_function
from tests.scoring.test_totto import raw_table

TABLES = (
    raw_table("In 2015 Colin Hanlon played.", "Hanlon played in 2015."),
    raw_table("In 2015 Colin Hanlon was in a play.", overlap_subset=False),
    raw_table("Colin Hanlon has a role.", overlap_subset=False),
)
SAMPLES = tuple(Sample(f"s{i}", "<table>", [], {"raw_table": table}) for i, table in enumerate(TABLES))
INFOS = [sample.meta_data for sample in SAMPLES]
TEXTS = ["In 2015 Colin Hanlon played.", "", "Colin Hanlon was."]


def test_reward_and_metrics_pass_their_checkers():
    check_reward_function(PARENTRewardFunction(), SAMPLES)
    check_metric(ParentToTTo(), SAMPLES)
    check_metric(BLEUToTTo(), SAMPLES)


def test_an_empty_text_is_scored_and_the_others_are_not_shifted():
    rewards = PARENTRewardFunction().scores(Texts([""] * 3, TEXTS, [[]] * 3, INFOS))
    assert rewards[0] > 0.9
    assert rewards[1] == pytest.approx(0, abs=1e-3)
    assert rewards[1] < rewards[2] < rewards[0]
    scores, mean = ParentToTTo().compute([""] * 3, TEXTS, [[]] * 3, INFOS)["table_to_text/parent_overall_f_score"]
    assert scores == rewards
    assert mean == pytest.approx(sum(rewards) / 3)
    assert BLEUToTTo().compute([""] * 3, [""] * 3, [[]] * 3, INFOS)["table_to_text/bleu_overall"][1] < 0.01


@pytest.mark.parametrize("metric", [ParentToTTo, BLEUToTTo])
def test_an_empty_subset_is_nan(metric):
    results = metric().compute([""], TEXTS[:1], [[]], INFOS[:1])
    for key, (_, overall) in results.items():
        assert math.isnan(overall) == ("non_overlap" in key)


def test_a_table_without_sentences_is_nan_in_the_metric_and_an_error_in_the_reward():
    infos = [*INFOS[:1], {"raw_table": raw_table("")}]
    results = ParentToTTo().compute(["", ""], TEXTS[:2], [[], []], infos)
    scores, mean = results["table_to_text/parent_overall_f_score"]
    assert math.isnan(scores[1])
    assert mean == scores[0]
    with pytest.raises(ValueError, match="text 1 "):
        PARENTRewardFunction().scores(Texts(["", ""], TEXTS[:2], [[], []], infos))


def test_a_sample_of_another_pool_is_an_error_that_names_totto():
    with pytest.raises(AssertionError, match="'totto'") as caught:
        check_reward_function(PARENTRewardFunction())
    assert isinstance(caught.value.__cause__, RewardError)


@pytest.mark.parametrize("component", [PARENTRewardFunction, ParentToTTo, BLEUToTTo])
def test_without_the_extra_it_is_not_even_built(component, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sacrebleu", None)
    with pytest.raises(MissingExtraError) as caught:
        component()
    assert caught.value.extra == "lexical"
