"""`bert_score` and `bleurt`: pure, picklable, the same as the metric of that id."""

from __future__ import annotations

import math

import pytest

from rl4lms_like.metrics import METRICS
from rl4lms_like.rewards import REWARDS
from rl4lms_like.testing.checkers import check_metric, check_reward_function
from tests.local_models import LOCAL_MODELS


@pytest.fixture(scope="module")
def args(tmp_path_factory):
    encoder, regressor = tmp_path_factory.mktemp("encoder"), tmp_path_factory.mktemp("regressor")
    LOCAL_MODELS["encoder"](encoder)
    LOCAL_MODELS["regressor"](regressor)
    scored = {"model_type": str(encoder), "num_layers": 2}
    return {
        ("reward", "bert_score"): scored,
        ("metric", "bert_score"): {"language": "en", **scored},
        ("reward", "bleurt"): {"checkpoint": str(regressor)},
        ("metric", "bleurt"): {"config_name": str(regressor)},
    }


@pytest.mark.parametrize("id", ["bert_score", "bleurt"])
def test_they_pass_the_checkers(id, args):
    check_reward_function(REWARDS.get(id, args["reward", id]))
    check_metric(METRICS.get(id, args["metric", id]), keys=METRICS.entry(id).keys)


@pytest.mark.parametrize("id", ["bert_score", "bleurt"])
def test_samples_without_references(id, args):
    reward, metric = REWARDS.get(id, args["reward", id]), METRICS.get(id, args["metric", id])
    prompts, texts, references = ["p", "q", "r"], ["good", "", "a joy"], [["the film"], [], ["a joy", "sad"]]
    (_, (scores, overall)) = metric.compute(prompts, texts, references).popitem()
    assert math.isnan(scores[1]) and overall == pytest.approx((scores[0] + scores[2]) / 2)
    rewards = reward(prompts[::2], texts[::2], references[::2], [True, True])
    assert rewards == pytest.approx(scores[::2], abs=1e-5)
    with pytest.raises(ValueError, match="prompt 'q'"):
        reward(prompts, texts, references, [True] * 3)
    assert reward(prompts, texts, references, [True, False, True]) == pytest.approx([rewards[0], 0, rewards[1]])


def test_the_reward_takes_its_checkpoint(args):
    """D-35: RL4LMs always used bleurt-base-128."""
    reward = REWARDS.get("bleurt", {"checkpoint": "bleurt-tiny-128"})
    assert reward.classifier.model_name == "Elron/bleurt-tiny-128"
    assert REWARDS.get("bleurt").classifier.model_name == "Elron/bleurt-base-128"
