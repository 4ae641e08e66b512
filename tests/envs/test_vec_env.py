"""Playing an episode equals stepping it; the rest is Stable-Baselines3's VecEnv."""

from __future__ import annotations

import json
import time
import zlib

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

from rl4lms_like.data_pools.dummy import DummyPool
from rl4lms_like.data_pools.sampler import ShuffledSampler
from rl4lms_like.envs.env import TextGenEnv
from rl4lms_like.envs.stepping import make_vec_env, play_by_stepping
from rl4lms_like.envs.vec_env import TextVecEnv
from rl4lms_like.rewards import BatchedRewardFunction, RewardFunction
from rl4lms_like.rewards.sentiment import SentimentReward
from rl4lms_like.rewards.synthetic import RewardIncreasingNumbers
from rl4lms_like.system.errors import RewardError

N_ENVS = 3
EOS = 1
FIELDS = (
    "prompt_or_input_text",
    "context_text",
    "target_or_reference_texts",
    "meta_info",
    "action_history",
    "prompt_or_input_encoded_pt",
    "prompt_or_input_attention_mask_pt",
    "context_encoded_pt",
    "context_attention_mask_pt",
    "input_encoded_pt",
    "input_attention_mask_pt",
)


def fingerprint(*values) -> float:
    """A number in [0, 1000) that any change of the values changes."""
    return zlib.crc32(repr(values).encode()) % 100_000 / 100


def everything(observation) -> list:
    values = [getattr(observation, name) for name in FIELDS]
    return [value.tolist() if hasattr(value, "tolist") else value for value in values]


class ReadsEverything(RewardFunction):
    """Pays a fingerprint of all it is given, for every token."""

    def __call__(self, prev_observation, action, current_observation, done, meta_info=None):
        return fingerprint(everything(prev_observation), action, everything(current_observation), done, meta_info)


class ReadsEverythingAtTheEnd(ReadsEverything):
    """Pays the fingerprint for last tokens; does not promise so."""

    def __call__(self, prev_observation, action, current_observation, done, meta_info=None):
        return super().__call__(prev_observation, action, current_observation, done, meta_info) if done else 0.0


class PromisesTheEnd(ReadsEverythingAtTheEnd):
    terminal = True


class BatchedReadsEverything(BatchedRewardFunction):
    """Pays a fingerprint of each entry, for every token."""

    def __call__(self, prompt_texts, gen_texts, ref_texts, dones, meta_infos=None):
        entries = zip(prompt_texts, gen_texts, ref_texts, dones, meta_infos, strict=True)
        return [fingerprint(*entry) for entry in entries]


class BatchedPromisesTheEnd(BatchedReadsEverything):
    terminal = True

    def __call__(self, prompt_texts, gen_texts, ref_texts, dones, meta_infos=None):
        scores = super().__call__(prompt_texts, gen_texts, ref_texts, dones, meta_infos)
        return np.where(dones, scores, 0.0)


class Vandal(RewardFunction):
    """Tries to change the episode."""

    def __call__(self, prev_observation, action, current_observation, done, meta_info=None):
        current_observation.action_ids[:] = 0
        return 0.0


REWARDS = {
    reward.__name__: reward
    for reward in (
        ReadsEverything,
        ReadsEverythingAtTheEnd,
        PromisesTheEnd,
        BatchedReadsEverything,
        BatchedPromisesTheEnd,
        SentimentReward,
    )
} | {"RewardIncreasingNumbers": lambda: RewardIncreasingNumbers(min_tokens=4)}


@pytest.fixture(scope="module")
def make_env(tiny_tokenizer, samples):
    def make(reward=None, kind="text", n_envs=N_ENVS, **changes) -> VecEnv:
        arguments = {"max_episode_length": 6, "max_prompt_length": 8, "terminate_on_eos": True}
        given = {"tokenizer": tiny_tokenizer, "reward_function": reward or ReadsEverything(), "samples": samples}
        return make_vec_env(kind, n_envs, **(given | arguments | changes))

    return make


@pytest.mark.parametrize("context_start_token", [None, 0], ids=["causal", "seq2seq"])
@pytest.mark.parametrize("reward", REWARDS)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32 - 1))
def test_playing_equals_stepping(make_env, batch_of, random_responses, reward, context_start_token, seed):
    played, stepped = (make_env(REWARDS[reward](), context_start_token=context_start_token) for _ in range(2))
    for env in (played, stepped):
        env.seed(seed)
    for round in range(2):
        prompts = played.reset(), stepped.reset()
        assert all(np.array_equal(prompts[0][key], prompts[1][key]) for key in prompts[0])
        episodes = batch_of(random_responses(N_ENVS, seed + round, n_ids=300))
        rewards = played.play(episodes)
        assert rewards.dtype == np.float32 and rewards.shape == (episodes.n_tokens,)
        np.testing.assert_array_equal(rewards, play_by_stepping(stepped, episodes).total)
        stepped.load_state_dict(played.state_dict())  # stepping drew further prompts when episodes ended


def test_stepping_stable_baselines_own_vec_env_pays_the_same(make_env, batch_of, random_responses):
    own, theirs = make_env(), make_env(kind="dummy")
    assert type(theirs) is DummyVecEnv
    for seed in range(5):
        theirs.seed(seed)
        theirs.reset()
        own.set_options([{"sample": sample} for sample in theirs.get_attr("sample")])
        own.reset()
        episodes = batch_of(random_responses(N_ENVS, seed, n_ids=300))
        np.testing.assert_array_equal(own.play(episodes), play_by_stepping(theirs, episodes).total)


def test_done_holds_at_the_last_token_of_an_episode_cut_short(make_env, batch_of):
    env = make_env(PromisesTheEnd())
    env.reset()
    rewards = env.play(batch_of([[5, 6], [7, 8, 9], [EOS]]))  # the first two neither end nor reach the limit
    assert (rewards[[1, 4, 5]] > 0).all() and (rewards[[0, 2, 3]] == 0).all()


def test_stepping_refuses_episodes_that_its_environments_do_not_end(make_env, batch_of):
    for responses, data in (
        ([[5, 6], [EOS], [EOS]], "episode 0 .* 2 "),
        ([[EOS, 6], [EOS], [EOS]], "episode 0 "),
    ):
        env = make_env()
        env.reset()
        with pytest.raises(ValueError, match=data):
            play_by_stepping(env, batch_of(responses))


def test_a_terminal_reward_costs_one_call_and_one_decode_an_episode(make_env, batch_of, tiny_tokenizer, monkeypatch):
    decoded = []
    decode = type(tiny_tokenizer).decode

    def counting(self, ids, **kwargs):
        decoded.append(ids)
        return decode(self, ids, **kwargs)

    env = make_env(RewardIncreasingNumbers(min_tokens=4))
    env.reset()
    monkeypatch.setattr(type(tiny_tokenizer), "decode", counting)
    env.play(batch_of([[5] * 6, [6] * 4 + [EOS], [7] * 6]))
    assert len(decoded) == N_ENVS


def test_playing_wants_fresh_prompts_and_episodes_that_fit(make_env, batch_of):
    env = make_env()
    env.reset()
    with pytest.raises(ValueError, match=" 3 "):
        env.play(batch_of([[5]]))
    with pytest.raises(ValueError, match=r"1 to 6 .* 1 to 7"):
        env.play(batch_of([[5] * 7, [5], [5]]))
    env.play(batch_of([[5], [5], [5]]))
    with pytest.raises(ValueError):
        env.play(batch_of([[5], [5], [5]]))
    env.reset()
    env.step(np.array([5, 5, 5]))
    with pytest.raises(ValueError):
        env.play(batch_of([[5], [5], [5]]))


def test_samples_stay_readable_after_playing_and_change_with_the_next_reset(make_env, batch_of):
    env = make_env(n_envs=16)
    env.seed(0)
    env.reset()
    before = env.samples
    env.play(batch_of([[EOS]] * 16))
    assert env.samples == before
    env.reset()
    assert env.samples != before


def test_one_seed_one_sequence_of_prompts_whatever_the_number_of_envs(make_env):
    few, many = make_env(n_envs=2), make_env(n_envs=6)
    for env in (few, many):
        env.seed(5)
    drawn = [sample.id for _ in range(3) for sample in few.reset() and few.samples]
    many.reset()
    assert drawn == [sample.id for sample in many.samples]


def test_prompts_go_on_from_a_saved_state(make_env):
    env = make_env()
    env.seed(1)
    env.reset()
    state = json.loads(json.dumps(env.state_dict()))
    expected = [env.reset() and [sample.id for sample in env.samples] for _ in range(5)]
    other = make_env()
    other.load_state_dict(state)
    assert expected == [other.reset() and [sample.id for sample in other.samples] for _ in range(5)]


def test_steps_like_a_vec_env(make_env):
    env = make_env()
    assert env.env_is_wrapped(DummyVecEnv) == [False] * N_ENVS
    assert env.get_attr("max_episode_length") == [6] * N_ENVS
    env.set_attr("note", "x", indices=[1])
    assert env.get_attr("note", indices=[1]) == ["x"]
    assert len(env.env_method("sibling")) == N_ENVS
    env.reset()
    assert all("prompt_text" in info for info in env.reset_infos)
    before = env.samples
    observations, rewards, dones, infos = env.step(np.array([5, EOS, 5]))
    assert rewards.shape == (N_ENVS,) and dones.tolist() == [False, True, False]
    assert infos[1]["terminal_observation"]["context_attention_mask_pt"].sum() == 1
    assert not infos[1]["TimeLimit.truncated"]
    assert observations["context_attention_mask_pt"].sum(axis=1).tolist() == [1, 0, 1]  # the second starts anew
    assert [env.samples[0], env.samples[2]] == [before[0], before[2]]
    for _ in range(5):
        _, _, dones, infos = env.step(np.array([5, 5, 5]))
    assert dones.tolist() == [True, False, True]
    assert infos[0]["TimeLimit.truncated"] and infos[2]["TimeLimit.truncated"]
    env.close()


def test_prompts_are_encoded_once(make_env, tiny_tokenizer, samples, monkeypatch):
    env = make_env(n_envs=40)
    encoded = []
    encode = type(env.layout).encode

    def counting(self, prompt):
        encoded.append(prompt)
        return encode(self, prompt)

    monkeypatch.setattr(type(env.layout), "encode", counting)
    for _ in range(3):
        env.reset()
    assert len(encoded) == len(samples) and all(sample in encoded for sample in samples)


def test_a_reward_cannot_change_what_later_rewards_see(make_env, batch_of):
    env = make_env(Vandal())
    env.reset()
    with pytest.raises(RewardError, match="read-only"):
        env.play(batch_of([[5], [5], [5]]))


def test_playing_costs_little(tiny_tokenizer, batch_of):
    """The budget is 3 us a token; the test leaves room for a busy machine."""
    env = TextVecEnv(64, tiny_tokenizer, RewardIncreasingNumbers(20), DummyPool.prepare("train", "Count: 0"), 48, 16)
    generator = np.random.default_rng(0)
    episodes = batch_of(generator.integers(2, 300, (64, 48)).tolist())
    seconds = []
    for _ in range(5):
        env.reset()
        start = time.perf_counter()
        env.play(episodes)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) / episodes.n_tokens < 10e-6


def test_envs_share_what_they_can(make_env):
    env = make_env()
    first, second, _ = env.envs
    assert isinstance(first, TextGenEnv)
    assert first.sampler is second.sampler and first.layout is second.layout
    assert first.reward_function is second.reward_function


# --- prompts without a played episode --------------------------------------------------------------------------------


@pytest.fixture
def shuffled(make_env, samples):
    """An environment that draws each prompt once before it draws one again, and the order in which it does."""
    env = make_env(make_sampler=ShuffledSampler)
    env.seed(3)
    order = ShuffledSampler(samples, seed=3)
    return env, [order.samples[order.draw()].id for _ in range(40)]


def ids(env):
    return [sample.id for sample in env.samples]


def test_prompts_of_a_reset_without_a_played_episode_are_drawn_again(shuffled, batch_of):
    env, order = shuffled
    env.reset()
    env.reset()
    assert ids(env) == order[:3]
    env.play(batch_of([[2, EOS], [3, EOS], [4, EOS]]))
    env.reset()
    assert ids(env) == order[3:6]


def test_prompts_are_put_back_when_the_groups_become_larger(shuffled):
    env, order = shuffled
    env.reset()
    env.group_size = 3
    env.reset()
    assert ids(env) == [order[0]] * 3


def test_prompts_that_were_stepped_through_are_not_drawn_again(shuffled):
    env, order = shuffled
    env.reset()
    env.step(np.array([2, 2, 2]))
    env.reset()
    assert ids(env) == order[3:6]


def test_a_restored_position_is_not_changed_by_a_reset_before(shuffled, batch_of):
    env, order = shuffled
    env.reset()
    env.play(batch_of([[2, EOS], [3, EOS], [4, EOS]]))
    state = json.loads(json.dumps(env.state_dict()))
    env.reset()
    env.load_state_dict(state)
    env.reset()
    assert ids(env) == order[3:6]


def test_a_new_seed_starts_with_the_first_pass(shuffled):
    env, order = shuffled
    env.reset()
    env.seed(3)
    env.reset()
    assert ids(env) == order[:3]
