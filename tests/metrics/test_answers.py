"""Answers as metrics: 1 or 0 for each text, the share of right ones, pass@k and maj@k over the samples of a prompt."""

from __future__ import annotations

import math

import pytest

from rl4lms_like.metrics import METRICS
from rl4lms_like.metrics.answers import PassAtK
from rl4lms_like.metrics.call import compute_metric
from rl4lms_like.rewards import REWARDS
from rl4lms_like.system.errors import MetricError
from rl4lms_like.testing.checkers import check_metric


def computed(id, args, texts, references, prompts=None):
    return compute_metric(METRICS.get(id, args), prompts or ["Q"] * len(texts), texts, references)


@pytest.mark.parametrize(
    ("id", "args"),
    [
        ("exact_match", {}),
        ("math_equal", {}),
        ("regex", {"pattern": "a"}),
        ("pass_at_k", {"k": [1]}),
        ("maj_at_k", {"k": [1]}),
    ],
)
def test_they_pass_the_checker(id, args):
    metric = METRICS.get(id, args)
    check_metric(metric)


def test_the_share_of_right_answers_among_those_that_can_be_told():
    texts, references = ["42", "It is 42.", "", "42"], [["42"], ["42"], ["42"], []]
    scores, overall = computed("exact_match", {}, texts, references)["answers/exact_match"]
    assert scores[:3] == [1.0, 0.0, 0.0] and math.isnan(scores[3]) and overall == pytest.approx(1 / 3)
    scores, overall = computed("math_equal", {}, texts, references)["answers/math_equal"]
    assert scores[:3] == [1.0, 1.0, 0.0] and math.isnan(scores[3]) and overall == pytest.approx(2 / 3)
    assert computed("regex", {"pattern": "4"}, texts, references)["answers/regex"] == ([1.0, 1.0, 0.0, 1.0], 0.75)
    assert math.isnan(computed("exact_match", {}, ["42"], [[]])["answers/exact_match"][1])


@pytest.mark.parametrize("id", ["exact_match", "math_equal", "regex"])
def test_reward_and_metric_of_one_id_agree(id):
    args = {"pattern": "2"} if id == "regex" else {}
    texts, references = ["42", "It is 42.", "41", ""], [["42"]] * 4
    scores, _ = computed(id, args, texts, references)[f"answers/{id}"]
    assert scores == list(REWARDS.get(id, args)(["Q"] * 4, texts, references, [True] * 4))


def test_pass_at_k_groups_the_samples_of_a_prompt():
    prompts, texts = ["a", "b", "a", "b", "a", "b"], ["1", "2", "0", "2", "0", "2"]
    results = computed("pass_at_k", {"k": [1, 2]}, texts, [["1"], ["2"]] * 3, prompts)
    assert results["answers/pass@1"] == (pytest.approx([1 / 3, 1] * 3), pytest.approx(2 / 3))
    assert results["answers/pass@2"] == (pytest.approx([2 / 3, 1] * 3), pytest.approx(5 / 6))


def test_pass_at_k_asks_any_batched_reward_what_is_right():
    texts = ["It is 42.", "41.9 or so", "forty-two", "42"]
    metric = PassAtK([1], REWARDS.get("math_equal", {}))
    assert compute_metric(metric, ["Q"] * 4, texts, [["42"]] * 4)["answers/pass@1"][1] == 0.5
    near = PassAtK([1], REWARDS.get("math_equal", {"rel_tol": 0.1, "reward": 0.4}), correct_from=0.3)
    assert compute_metric(near, ["Q"] * 4, texts, [["42"]] * 4)["answers/pass@1"][1] == 0.75


def test_a_judge_that_cannot_tell_is_an_error_and_not_a_wrong_answer():
    def unsure(prompts, responses, references, dones, metas):
        return [1.0, math.nan]

    with pytest.raises(MetricError, match="text 1, 'b'"):
        compute_metric(PassAtK([1], unsure), ["Q"] * 2, ["a", "b"], [["a"]] * 2)
    with pytest.raises(ValueError):
        PassAtK([])


def test_too_few_samples_are_said_clearly():
    with pytest.raises(MetricError, match=r"pass@3 .* 3 .*1 of 2 .*'b'"):
        computed("pass_at_k", {"k": [1, 3]}, ["1"] * 4, [["1"]] * 4, ["a", "a", "a", "b"])


def test_maj_at_k_is_the_vote_of_each_k_samples_for_equal_numbers():
    scorer = REWARDS.get("math_equal", {})
    texts = ["1/2", "3", "0.5", "3", "3", "\\frac{1}{2}"]
    results = computed("maj_at_k", {"k": [1, 3, 4], "scorer": scorer}, texts, [["0.50"]] * 6)
    assert results["answers/maj@1"] == ([0.5] * 6, 0.5)
    assert results["answers/maj@3"][1] == 0.5  # of two votes
    assert results["answers/maj@4"][1] == 1.0  # two to two, and the right answer was first; two samples do not vote
    assert computed("maj_at_k", {"k": [4], "scorer": scorer}, texts[1:], [["0.50"]] * 5)["answers/maj@4"][1] == 0.0


def test_samples_without_an_answer_do_not_vote():
    scorer = REWARDS.get("exact_match", {"extract": r"is (\w+)", "ignore_case": True})
    texts = ["no idea", "none", "it is Paris"]
    assert computed("maj_at_k", {"k": [3], "scorer": scorer}, texts, [["paris"]] * 3)["answers/maj@3"][1] == 1.0
    assert computed("maj_at_k", {"k": [2], "scorer": scorer}, texts, [["paris"]] * 3)["answers/maj@2"][1] == 0.0


def test_votes_need_a_scorer_that_extracts_answers():
    with pytest.raises(ValueError, match="exact_match or math_equal"):
        METRICS.get("maj_at_k", {"scorer": REWARDS.get("regex", {"pattern": "4"})})


def test_prompts_without_references_are_left_out():
    results = computed("pass_at_k", {}, ["1", "1"], [["1"], []], ["a", "b"])
    assert results["answers/pass@1"][0][0] == 1.0 and results["answers/pass@1"][1] == 1.0
    assert math.isnan(results["answers/pass@1"][0][1])
