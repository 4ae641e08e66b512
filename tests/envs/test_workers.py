"""Rewards in other processes are the rewards of this one, and their failures come back with a name."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import forkserver
from types import SimpleNamespace

import cloudpickle
import numpy as np
import pytest

from rl4lms_like.envs.vec_env import TextVecEnv
from rl4lms_like.envs.workers import _end_of
from rl4lms_like.rewards import BatchedRewardFunction, RewardFunction
from rl4lms_like.rewards.sentiment import SentimentReward
from rl4lms_like.system.errors import RewardError

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


class Sick(RewardFunction):
    """Ends its process, or never comes back, on one sample: always, or as long as a file is there, which it removes."""

    terminal = True

    def __init__(self, how, sample, once=None, log=None):
        self.how, self.sample, self.once, self.log = how, sample, once, log

    def __call__(self, prev_observation, action, current_observation, done, meta_info=None):
        if self.log is not None:
            with self.log.open("a") as stream:
                stream.write(f"{current_observation.sample.id} {os.getpid()}\n")
        if current_observation.sample.id == self.sample and (self.once is None or self.once.exists()):
            if self.once is not None:
                self.once.unlink()
            if self.how == "hang":
                time.sleep(600)
            os.kill(os.getpid(), signal.SIGKILL) if self.how == "kill" else os._exit(3)
        return len(current_observation.context_text)


class ReadsItsProcess(RewardFunction):
    def __call__(self, prev_observation, action, current_observation, done, meta_info=None):
        of_a_terminal = [getattr(signal, name, None) for name in ("SIGINT", "SIGTTIN", "SIGTTOU")]
        are_ignored = all(signal.getsignal(each) is signal.SIG_IGN for each in of_a_terminal if each)
        return float(os.environ["RL4LMS_LIKE_OF_A_TEST"]) if are_ignored else -1.0


class GivesUpInSilence(RewardFunction):
    """Takes its own timeout for an answer."""

    terminal = True

    def __call__(self, prev_observation, action, current_observation, done, meta_info=None):
        try:
            time.sleep(600)
        except BaseException:
            return 0.0


class RunsAProgram(BatchedRewardFunction):
    """Waits for a program that never ends, as generated code does; writes down its process."""

    def __init__(self, file):
        self.file = file

    def __call__(self, prompt_texts, gen_texts, ref_texts, dones, meta_infos=None):
        program = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with self.file.open("a") as stream:
            stream.write(f"{program.pid}\n")
        program.wait()


class SlowToStart(Sick):
    def __init__(self):
        super().__init__("", None)

    def __setstate__(self, state):
        time.sleep(3.5)
        self.__dict__ = state


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

    def make(reward, reward_workers, **options):
        env = TextVecEnv(N_ENVS, tiny_tokenizer, reward, samples, 6, 8, reward_workers=reward_workers, **options)
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
    processes = list(env.scorer._workers._pool._processes.values())
    env.close()
    assert processes and not any(process.is_alive() for process in processes)


def test_a_worker_has_the_environment_of_now_and_no_terminal_stops_it(make_env, batch_of, monkeypatch):
    """The server that forks it began with an earlier environment; a terminal's Ctrl-C goes to all processes.

    Where a process that is not in the foreground writes (`stty tostop`) or reads, a terminal stops it: for ever.
    """
    if "forkserver" in multiprocessing.get_all_start_methods():
        forkserver.ensure_running()
    monkeypatch.setenv("RL4LMS_LIKE_OF_A_TEST", "7")
    env = make_env(ReadsItsProcess(), 1)
    env.reset()
    assert set(env.play(batch_of([[40]] * N_ENVS))) == {7.0}


def test_a_failure_in_a_worker_names_reward_sample_and_cause(make_env, batch_of):
    env = make_env(Fails(), 1)
    env.reset()
    with pytest.raises(RewardError, match=r"Fails .* 1 .*'sample_\d'.*KeyError: 'topic'"):
        env.play(batch_of([[40]] * N_ENVS))


def test_a_worker_that_dies_twice_is_reported_with_its_samples(make_env, batch_of, caplog):
    env = make_env(Dies(), 1)
    env.reset()
    with pytest.raises(RewardError, match=r"Dies .* 3, .*sample_\d.* 2 ") as error:
        env.play(batch_of([[40]] * N_ENVS))
    assert "5 of 5 episodes are scored again" in caplog.text
    assert [text["sample_id"] for text in error.value.texts] == [sample.id for sample in env.samples]


@pytest.fixture
def play_all(batch_of, random_responses):
    """The rewards of one batch, in which every sample stands once."""

    def play(env):
        env.reset()
        for each, sample in zip(env.envs, env.envs[0].sampler.samples, strict=True):
            each.reset(options={"sample": sample})
        return env.play(batch_of(random_responses(N_ENVS, 0, n_ids=300)))

    return play


@pytest.fixture
def expected(make_env, play_all):
    """What a reward in good health pays for that batch."""
    return play_all(make_env(Sick("", None), 0))


@pytest.mark.parametrize(
    ("how", "message", "n_workers"), [("exit", "status 3", 1), ("kill", "killed from outside", 1), ("hang", "2 s", 2)]
)
def test_a_worker_that_fails_once_is_started_again_and_no_reward_is_lost(
    make_env, play_all, expected, tmp_path, caplog, how, message, n_workers
):
    (once := tmp_path / "once").touch()
    log = tmp_path / "log"
    env = make_env(Sick(how, "sample_2", once, log), n_workers, reward_timeout=2 if how == "hang" else None)
    np.testing.assert_array_equal(play_all(env), expected)
    assert not once.exists() and env.reward_restarts == 1
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "the reward Sick" in warning and message in warning and "'sample_2' (prompt 'The film')" in warning
    if n_workers == 1:  # what had its rewards is not scored again
        calls = [line.split() for line in log.read_text().splitlines()]
        assert [sample for sample, _ in calls] == [f"sample_{index}" for index in (0, 1, 2, 2, 3, 4)]
        assert len({process for _, process in calls}) == 2


def test_the_second_failure_ends_it_and_names_the_sample(make_env, play_all):
    env = make_env(Sick("hang", "sample_3"), 2, reward_timeout=2)
    data = r"Sick .* 2 s .*'sample_3' \([^,]*\)$"
    start = time.monotonic()
    with pytest.raises(RewardError, match=data) as error:
        play_all(env)
    assert time.monotonic() - start < 60
    assert [text["sample_id"] for text in error.value.texts] == [f"sample_{index}" for index in range(N_ENVS)]
    assert env.scorer._workers._pool is None  # no process goes on hanging


def is_running(process):
    try:
        with open(f"/proc/{process}/stat") as stream:
            return stream.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="looks processes up in /proc")
def test_what_a_worker_has_started_ends_with_it(make_env, play_all, tmp_path):
    env = make_env(RunsAProgram(tmp_path / "started"), 1, reward_timeout=1)
    with pytest.raises(RewardError):
        play_all(env)
    started = (tmp_path / "started").read_text().split()
    for _ in range(200):
        if not any(map(is_running, started)):
            break
        time.sleep(0.05)
    assert len(started) == 2 and not any(map(is_running, started))


@pytest.mark.skipif(not hasattr(signal, "SIGRTMIN"), reason="needs signals of the real time")
def test_a_signal_without_a_name_is_named_by_its_number():
    number = int(signal.SIGRTMIN) + 3
    assert _end_of([SimpleNamespace(exitcode=-number)]) == f"ended by the signal {number}"
    assert _end_of([SimpleNamespace(exitcode=-signal.SIGSEGV)]) == "ended by the signal SIGSEGV"


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs SIGALRM")
def test_without_workers_nothing_is_paid_to_a_reward_that_keeps_its_timeout_to_itself(make_env, play_all):
    env = make_env(GivesUpInSilence(), 0, reward_timeout=0.1)
    with pytest.raises(RewardError, match=r"GivesUpInSilence .* 5: .*0\.1 s") as error:
        play_all(env)
    assert len(error.value.texts) == N_ENVS


def test_the_time_that_workers_need_to_start_does_not_count(make_env, play_all, expected):
    """Importing what a reward is made of takes seconds."""
    env = make_env(SlowToStart(), 1, reward_timeout=2)
    np.testing.assert_array_equal(play_all(env), expected)
    assert env.reward_restarts == 0


def test_an_interrupt_ends_a_reward_that_hangs(make_env, play_all):
    env = make_env(Sick("hang", "sample_1"), 1)
    threading.Timer(1.5, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT]).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        play_all(env)
    env.close()
    assert time.monotonic() - start < 60


@pytest.mark.parametrize("error", [OSError("AF_UNIX path too long"), EOFError("unexpected EOF")])
def test_processes_that_cannot_be_started_are_named_with_the_key(error, make_env, batch_of, monkeypatch):
    def submit(*_):
        raise error

    def shutdown(*_, **__):
        raise RuntimeError("cannot join thread before it is started")

    env = make_env(WhereItRuns(), 2)
    env.reset()
    with monkeypatch.context() as patch:
        patch.setattr(ProcessPoolExecutor, "submit", submit)
        patch.setattr(ProcessPoolExecutor, "shutdown", shutdown)
        with pytest.raises(RewardError, match=f"2 .*env.reward_workers .*: {type(error).__name__}: {error}"):
            env.play(batch_of([[40]] * N_ENVS))
    env.close()


def test_a_reward_that_cannot_travel_is_refused_at_once(make_env):
    with pytest.raises(RewardError, match="HoldsALock"):
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
        "    pool = ProcessPoolExecutor(1, mp_context=context, initializer=_receive, initargs=(b'', {}, None))\n"
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
