"""The strict score is 1 for the right answer alone; the other is that of the package, of a stripped answer."""

from __future__ import annotations

import pytest

from rl4lms_like.data_pools import DATA_POOLS
from rl4lms_like.metrics import METRICS
from rl4lms_like.rewards import REWARDS


def scores(responses, references, metas=None, **args):
    rewards = REWARDS.get("reasoning_gym", args)
    n = len(responses)
    paid = rewards(["?"] * n, responses, references, [True] * n, metas)
    found, overall = METRICS.get("reasoning_gym", args).compute(["?"] * n, responses, references, metas)[
        "answers/reasoning_gym"
    ]
    assert found == paid and overall == pytest.approx(sum(paid) / n)
    return paid


def test_strict_accepts_only_the_answer():
    responses = ["8", " 8\n", "a  b", "18", "8 or 9", "8.0", "", "the the the", " "]
    references = [["8"], ["8"], ["a b"], *[["8"]] * 6]
    assert scores(responses, references) == [1, 1, 1, 0, 0, 0, 0, 0, 0]


def test_an_empty_text_is_wrong_whatever_the_answer():
    assert scores(["", " \n"], [[""], [" "]]) == [0, 0]


def test_the_answer_can_be_extracted():
    responses = ["The answer is 8. The end", "8", "answer is 9."]
    assert scores(responses, [["8"]] * 3, extract=r"answer is (\d+)") == [1, 0, 0]


def test_the_package_scores_stripped_answers_and_pays_for_nonsense():
    pytest.importorskip("reasoning_gym", reason="needs the extra 'reasoning'")
    sample = DATA_POOLS.get("reasoning_gym", {"split": "train", "dataset": "gcd"}).samples[0]
    (right,) = sample.references
    responses = [f" {right}\n", f"{right} or what", "", "the the the"]
    graded = scores(responses, [[right]] * 4, [sample.meta_data] * 4, strict=False)
    assert graded[0] == 1 and 0 < graded[1] < 1 and graded[2:] == [0, 0]
    halting = {"split": "train", "dataset": "game_of_life_halting", "size": 20}
    samples = DATA_POOLS.get("reasoning_gym", halting).samples
    nonsense, references = ["the the the the"] * len(samples), [sample.references for sample in samples]
    metas = [sample.meta_data for sample in samples]
    assert max(scores(nonsense, references, metas, strict=False)) == 1
    assert scores(nonsense, references, metas) == [0] * len(samples)


def test_the_scorer_has_the_config_of_the_data_set():
    pytest.importorskip("reasoning_gym", reason="needs the extra 'reasoning'")
    with pytest.raises(ValueError, match="pool 'reasoning_gym'"):
        scores(["8"], [["8"]], [{"topic": "sums"}], strict=False)
