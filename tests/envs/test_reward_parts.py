"""What each part of a combined reward adds is told alike by playing, by workers and by stepping."""

from __future__ import annotations

import sys

import cloudpickle
import numpy as np
import pytest

from rl4lms_like.core.sample import Sample
from rl4lms_like.envs.env import TextGenEnv
from rl4lms_like.envs.stepping import make_vec_env, play_by_stepping
from rl4lms_like.envs.vec_env import TextVecEnv
from rl4lms_like.rewards.base import RewardFunction, RewardPart
from rl4lms_like.rewards.combine import CombinedReward
from rl4lms_like.rewards.lengths import LengthPenalty
from rl4lms_like.rewards.sentiment import SentimentReward

N_ENVS = 4


class EvenTokens(RewardFunction):
    """A tenth of a point for every token with an even id."""

    def __call__(self, prev_observation, action, current_observation, done, meta_info=None):
        return 0.1 * (action % 2 == 0)


@pytest.fixture(scope="module", autouse=True)
def rewards_of_this_file_travel_by_value():
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    yield
    cloudpickle.unregister_pickle_by_value(module)


def combined() -> CombinedReward:
    return CombinedReward(
        [
            RewardPart(EvenTokens(), 0.7, "even"),
            RewardPart(SentimentReward(), 1.3, "sentiment"),
            RewardPart(LengthPenalty(0, "tokens", 0.1, -10.0), 0.3, "length"),
        ]
    )


@pytest.fixture
def make(tiny_tokenizer, samples):
    made = []

    def build(kind, reward, workers=0):
        env = make_vec_env(
            kind,
            N_ENVS,
            **({"reward_workers": workers} if workers else {}),
            tokenizer=tiny_tokenizer,
            reward_function=reward,
            samples=samples[:1],
            max_episode_length=6,
            max_prompt_length=8,
            terminate_on_eos=True,
        )
        made.append(env)
        env.reset()
        return env

    yield build
    for env in made:
        env.close()


@pytest.mark.parametrize(("kind", "workers"), [("text", 2), ("dummy", 0), ("subproc", 0)])
def test_every_way_tells_the_same_parts(make, batch_of, random_responses, kind, workers):
    episodes = batch_of(random_responses(N_ENVS, 0, n_ids=300))
    played = make("text", combined())
    rewards, parts = played.play(episodes), played.reward_parts
    assert list(parts) == ["even", "sentiment", "length"]
    np.testing.assert_array_equal(rewards, sum(parts.values()).astype(np.float32))
    other = make(kind, combined(), workers)
    if isinstance(other, TextVecEnv):
        others, reported = other.play(episodes), other.reward_parts
    else:
        others, reported = play_by_stepping(other, episodes)
    np.testing.assert_array_equal(rewards, others)
    assert list(reported) == list(parts)
    for name, values in parts.items():
        np.testing.assert_array_equal(values, reported[name])


def test_a_reward_without_parts_tells_none(make, batch_of, random_responses, tiny_tokenizer):
    env = make("text", EvenTokens())
    env.play(batch_of(random_responses(N_ENVS, 0, n_ids=300)))
    assert env.reward_parts == {}
    single = TextGenEnv(tiny_tokenizer, EvenTokens(), [Sample("s", "x")], 6, 8)
    single.reset()
    assert "reward_parts" not in single.step(4)[4]


def test_a_step_tells_its_parts(tiny_tokenizer):
    env = TextGenEnv(tiny_tokenizer, combined(), [Sample("s", "x")], 6, 8)
    env.reset()
    _, reward, _, _, info = env.step(4)
    assert info["reward_parts"] == {"even": pytest.approx(0.07), "sentiment": 0.0, "length": 0.0}
    assert reward == sum(info["reward_parts"].values())
