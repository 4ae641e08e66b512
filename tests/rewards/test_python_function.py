"""Any function of the working folder as a reward: batched or not, async or not, in time, and named when it fails."""

from __future__ import annotations

import asyncio
import multiprocessing
import pickle
import sys
import time

import numpy as np
import pytest

from rl4lms_like.core.observation import Observation, TextLayout
from rl4lms_like.core.sample import Sample
from rl4lms_like.envs.vec_env import TextVecEnv
from rl4lms_like.rewards.base import RewardPart
from rl4lms_like.rewards.call import score_episodes
from rl4lms_like.rewards.combine import CombinedReward
from rl4lms_like.rewards.python_function import PythonReward
from rl4lms_like.scoring.score import Texts
from rl4lms_like.system.errors import RewardError
from rl4lms_like.testing.checkers import check_reward_function
from tests.builders import episodes_of_lengths

MODULE = """
import asyncio
import time

RUNNING, MOST = 0, 0


def lengths(prompts, responses, references, meta_infos, scale=1.0):
    return [scale * len(text) for text in responses]


def length(prompt, response, references, meta_info, scale=1.0):
    return scale * len(response)


async def lengths_later(prompts, responses, references, meta_infos):
    await asyncio.sleep(0.001)
    return [len(text) for text in responses]


async def length_later(prompt, response, references, meta_info):
    global RUNNING, MOST
    RUNNING += 1
    MOST = max(MOST, RUNNING)
    await asyncio.sleep(0.01)
    RUNNING -= 1
    return len(response)


def fails(prompt, response, references, meta_info):
    return {}[response]


async def fails_later(prompt, response, references, meta_info):
    await asyncio.sleep(0.001 * len(response))
    return {}[response]


async def never(prompt, response, references, meta_info):
    await asyncio.sleep(60)


async def never_batched(prompts, responses, references, meta_infos):
    await asyncio.sleep(60)


def slow(prompts, responses, references, meta_infos):
    time.sleep(60)


def too_few(prompts, responses, references, meta_infos):
    return [1.0]


def nothing(prompt, response, references, meta_info):
    return None


async def times_out_itself(prompt, response, references, meta_info):
    raise asyncio.TimeoutError("the judge is away")


def by_text(prompts, responses, references, meta_infos):
    return {place: 1.0 for place in range(len(responses))}


def as_set(prompts, responses, references, meta_infos):
    return {3.0, 1.0, 2.0}


def as_number(prompts, responses, references, meta_infos):
    return 1.0


class Judge:
    def __call__(self, prompts, responses, references, meta_infos):
        return [0.5] * len(responses)


judge = Judge()
number = 3
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "my_functions.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("RL4LMS_LIKE_CODE", str(tmp_path))
    yield "my_functions"
    sys.modules.pop("my_functions", None)


@pytest.fixture
def episodes(tiny_tokenizer):
    layout = TextLayout(tiny_tokenizer, 8, 8)
    rows = [np.asarray(tiny_tokenizer(text, add_special_tokens=False)["input_ids"]) for text in ("a", "bc", "def")]
    return [Observation(Sample(f"s{i}", "Say"), np.array([4]), row, len(row), layout) for i, row in enumerate(rows)]


def paid(reward, episodes) -> list[float]:
    ends = np.cumsum([episode.n_actions for episode in episodes]) - 1
    return score_episodes(reward, episodes)[ends].tolist()


KINDS = [("lengths", True), ("length", False), ("lengths_later", True), ("length_later", False)]


@pytest.mark.parametrize(("name", "batched"), KINDS)
def test_all_kinds_of_functions_pay_what_they_return(mine, episodes, name, batched):
    reward = PythonReward(f"{mine}:{name}", batched)
    assert paid(reward, episodes) == [1, 2, 3]
    assert paid(PythonReward(f"{mine}:{name}", batched, timeout_s=5.0), episodes) == [1, 2, 3]
    check_reward_function(reward)


def test_it_gets_further_arguments_by_name(mine, episodes):
    assert paid(PythonReward(f"{mine}:lengths", kwargs={"scale": 0.5}), episodes) == [0.5, 1, 1.5]
    assert paid(PythonReward(f"{mine}:length", False, kwargs={"scale": 2}), episodes) == [2, 4, 6]
    assert paid(PythonReward(f"{mine}:judge"), episodes) == [0.5] * 3


def test_async_calls_wait_together_up_to_the_limit(mine, tiny_tokenizer):
    reward = PythonReward(f"{mine}:length_later", batched=False, max_concurrency=4)
    texts = Texts(["p"] * 12, ["x" * i for i in range(12)], [[]] * 12, [None] * 12)
    assert reward.scores(texts) == list(range(12))
    assert sys.modules[mine].MOST == 4


def test_it_can_be_called_where_a_loop_runs_already(mine, episodes):
    reward = PythonReward(f"{mine}:length_later", batched=False)

    async def notebook():
        return paid(reward, episodes)

    assert asyncio.run(notebook()) == [1, 2, 3]


@pytest.mark.parametrize(("name", "batched"), [("never", False), ("never_batched", True), ("slow", True)])
def test_what_takes_too_long_is_given_up(mine, episodes, name, batched):
    start = time.monotonic()
    with pytest.raises(RewardError, match=rf"'my_functions:{name}' .*0.05 s"):
        score_episodes(PythonReward(f"{mine}:{name}", batched, timeout_s=0.05), episodes)
    assert time.monotonic() - start < 30


@pytest.mark.parametrize("name", ["fails", "fails_later"])
def test_a_failure_names_function_text_and_cause(mine, episodes, name):
    with pytest.raises(RewardError, match=rf"'my_functions:{name}' .*text 0, 'a': KeyError: 'a'"):
        score_episodes(PythonReward(f"{mine}:{name}", batched=False), episodes)


@pytest.mark.parametrize("name", ["by_text", "as_set", "as_number"])
def test_what_has_no_order_or_is_no_list_is_refused(mine, episodes, name):
    with pytest.raises(RewardError, match=rf"my_functions:{name}' .* 3 "):
        score_episodes(PythonReward(f"{mine}:{name}"), episodes)


def test_what_it_returns_is_checked(mine, episodes):
    with pytest.raises(RewardError, match=r"my_functions:too_few' .*1 .* 3,"):
        score_episodes(PythonReward(f"{mine}:too_few"), episodes)
    with pytest.raises(RewardError, match=r"my_functions:nothing' .*None .*'s0'"):
        score_episodes(PythonReward(f"{mine}:nothing", batched=False), episodes)


@pytest.mark.parametrize(
    ("path", "data"),
    [
        ("my_functions", "'my_functions'$"),
        ("my_functions:lenghts", "'my_functions:lenghts': AttributeError"),
        ("no_such_module:f", "'no_such_module:f': ModuleNotFoundError"),
        ("my_functions:Judge", "'my_functions:Judge' has no parameter 'responses'"),
        ("my_functions:number", "'my_functions:number' .*3"),
    ],
)
def test_what_is_no_function_is_refused_when_the_reward_is_built(mine, path, data):
    with pytest.raises(ValueError, match=data):
        PythonReward(path)


def test_the_form_is_that_of_the_parameters_unless_it_is_given(mine, episodes):
    assert paid(PythonReward(f"{mine}:length"), episodes) == [1, 2, 3]
    with pytest.raises(ValueError, match="'my_functions:length' has no parameter 'responses'"):
        PythonReward(f"{mine}:length", batched=True)
    with pytest.raises(ValueError, match="'my_functions:lengths' has no parameter 'response'"):
        PythonReward(f"{mine}:lengths", batched=False)


def test_arguments_that_the_function_does_not_take_are_told_when_it_is_built(mine):
    with pytest.raises(ValueError, match=r"'scal'"):
        PythonReward(f"{mine}:lengths", kwargs={"scal": 2})


@pytest.mark.parametrize("timeout_s", [None, 5.0])
def test_a_time_out_of_the_functions_own_is_its_failure(mine, episodes, timeout_s):
    with pytest.raises(RewardError, match=r"text 0, 'a': TimeoutError: the judge is away"):
        score_episodes(PythonReward(f"{mine}:times_out_itself", batched=False, timeout_s=timeout_s), episodes)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_process_that_was_forked_waits_for_itself(mine, episodes):
    reward = PythonReward(f"{mine}:length_later", batched=False)
    assert paid(reward, episodes) == [1, 2, 3]
    if "fork" not in multiprocessing.get_all_start_methods():
        pytest.skip("no fork here")
    process = multiprocessing.get_context("fork").Process(target=paid, args=(reward, episodes))
    process.start()
    process.join(20)
    ended = process.exitcode
    process.kill()
    assert ended == 0 and paid(reward, episodes) == [1, 2, 3]


def test_it_travels_after_use(mine, episodes):
    reward = PythonReward(f"{mine}:length_later", batched=False)
    assert paid(reward, episodes) == paid(pickle.loads(pickle.dumps(reward)), episodes) == [1, 2, 3]


def test_async_functions_work_in_reward_workers(mine, tiny_tokenizer):
    reward = CombinedReward(
        [
            RewardPart(PythonReward(f"{mine}:length_later", batched=False), 0.5, "later"),
            RewardPart(PythonReward(f"{mine}:lengths"), 1.0, "now"),
        ]
    )
    samples = [Sample(str(i), f"prompt {i}") for i in range(4)]
    batch = episodes_of_lengths([3, 1, 5, 2], vocab_size=300)
    paid_by = []
    for workers in (0, 2):
        env = TextVecEnv(4, tiny_tokenizer, reward, samples, 6, 8, reward_workers=workers)
        try:
            env.seed(0)
            env.reset()
            paid_by.append((env.play(batch), env.reward_parts))
        finally:
            env.close()
    np.testing.assert_array_equal(paid_by[0][0], paid_by[1][0])
    assert list(paid_by[1][1]) == ["later", "now"] and paid_by[1][0].any()
    for name in ("later", "now"):
        np.testing.assert_array_equal(paid_by[0][1][name], paid_by[1][1][name])
