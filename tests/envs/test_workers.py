"""Rewards in other processes are the rewards of this one, and their failures come back with a name."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import cloudpickle
import numpy as np
import pytest

from rl4lms_like.core.errors import RewardError
from rl4lms_like.envs.vec_env import TextVecEnv
from rl4lms_like.rewards import BatchedRewardFunction, RewardFunction
from rl4lms_like.rewards.sentiment import SentimentReward

N_ENVS = 5


class WhereItRuns(RewardFunction):
    """Pays the process id, so that a test sees where it ran, and knows the text."""

    def __call__(self, prev_observation, action, current_observation, done, meta_info=None):
        return len(current_observation.context_text) + (os.getpid() % 1000) / 1000


class LengthOfText(RewardFunction):
    """Pays for every token."""

    def __call__(self, prev_observation, action, current_observation, done, meta_info=None):
        return len(current_observation.context_text) - 0.5 * len(prev_observation.context_text) + 100 * done


class Fails(RewardFunction):
    def __call__(self, prev_observation, action, current_observation, done, meta_info=None):
        raise KeyError("topic")


class Dies(BatchedRewardFunction):
    def __call__(self, prompt_texts, gen_texts, ref_texts, dones, meta_infos=None):
        os._exit(3)


class HoldsALock(LengthOfText):
    def __init__(self):
        self.lock = threading.Lock()


@pytest.fixture(scope="module", autouse=True)
def rewards_of_this_file_travel_by_value():
    """Worker processes cannot import a test file by its name."""
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    yield
    cloudpickle.unregister_pickle_by_value(module)


@pytest.fixture
def make_env(tiny_tokenizer, samples):
    made = []

    def make(reward, reward_workers):
        env = TextVecEnv(N_ENVS, tiny_tokenizer, reward, samples, 6, 8, reward_workers=reward_workers)
        env.seed(0)
        made.append(env)
        return env

    yield make
    for env in made:
        env.close()


@pytest.mark.parametrize("reward", [LengthOfText, SentimentReward])
def test_workers_score_as_this_process_does(make_env, batch_of, random_responses, reward):
    here, there = make_env(reward(), 0), make_env(reward(), 2)
    for round in range(3):
        episodes = batch_of(random_responses(N_ENVS, round, n_ids=300))
        here.reset(), there.reset()
        np.testing.assert_array_equal(here.play(episodes), there.play(episodes))


def test_workers_are_other_processes_and_end_with_the_environment(make_env, batch_of):
    env = make_env(WhereItRuns(), 1)
    env.reset()
    rewards = env.play(batch_of([[40]] * N_ENVS))
    assert not np.isclose(rewards % 1, (os.getpid() % 1000) / 1000, atol=1e-4).any()
    processes = list(env._workers._pool._processes.values())
    env.close()
    assert processes and not any(process.is_alive() for process in processes)


def test_a_failure_in_a_worker_names_reward_sample_and_cause(make_env, batch_of):
    env = make_env(Fails(), 1)
    env.reset()
    with pytest.raises(RewardError, match=r"Fails failed on token 1 of sample 'sample_\d'.*KeyError: 'topic'"):
        env.play(batch_of([[40]] * N_ENVS))


def test_a_worker_that_dies_is_reported(make_env, batch_of):
    env = make_env(Dies(), 1)
    env.reset()
    with pytest.raises(RewardError, match="a worker process of Dies ended while it scored 5 episodes"):
        env.play(batch_of([[40]] * N_ENVS))


def test_a_reward_that_cannot_travel_is_refused_at_once(make_env):
    with pytest.raises(RewardError, match="HoldsALock cannot be sent to reward workers"):
        make_env(HoldsALock(), 1)
    make_env(HoldsALock(), 0)


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="looks processes up in /proc")
def test_workers_end_when_their_run_is_killed():
    code = (
        "import os, signal\n"
        "from concurrent.futures import ProcessPoolExecutor\n"
        "import multiprocessing\n"
        "from rl4lms_like.envs.workers import _receive\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context('forkserver')\n"
        "    pool = ProcessPoolExecutor(1, mp_context=context, initializer=_receive, initargs=(b'', {}))\n"
        "    print(pool.submit(os.getpid).result(), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    worker = int(killed.stdout)
    for _ in range(200):
        if not os.path.exists(f"/proc/{worker}"):
            return
        time.sleep(0.05)
    pytest.fail(f"the worker {worker} is still there")
