"""A Python function as a reward: what it is called with, None, lists with weights, and every mistake."""

from __future__ import annotations

import functools
import re

import numpy as np
import pytest

from rl4lms_like.core.observation import Observation, TextLayout
from rl4lms_like.core.sample import Sample
from rl4lms_like.envs.env import REWARD_PARTS, TextGenEnv
from rl4lms_like.envs.vec_env import TextVecEnv
from rl4lms_like.rewards.base import RewardFunction, RewardPart
from rl4lms_like.rewards.call import score_episodes, score_episodes_in_parts
from rl4lms_like.rewards.python_function import PythonReward, reward_of
from rl4lms_like.system.errors import ConfigError, RewardError
from rl4lms_like.testing.checkers import check_reward_function
from tests.builders import episodes_of_lengths

SAMPLES = [
    Sample("s0", "Say a", ["a"], {"topic": "first", "answer": 1}),
    Sample("s1", "Say bc", ["bc"], {"topic": "second", "answer": 2}),
    Sample("s2", "Say def", ["x"], {"topic": "third"}),
]
TEXTS = ["a", "bc", "def"]
CHAT = Sample.of_messages("chat", [{"role": "user", "content": "Hello"}], meta_data={"answer": 3})


def episode(tokenizer, sample, text) -> Observation:
    ids = np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"])
    return Observation(sample, np.array([4]), ids, len(ids), TextLayout(tokenizer, 8, 8))


@pytest.fixture
def episodes(tiny_tokenizer):
    return [episode(tiny_tokenizer, sample, text) for sample, text in zip(SAMPLES, TEXTS, strict=True)]


def paid(reward, episodes) -> list[float]:
    ends = np.cumsum([episode.n_actions for episode in episodes]) - 1
    return score_episodes(reward, episodes)[ends].tolist()


def called_with(function, episodes):
    """The keyword arguments of each call of a function with the parameters of another one."""
    calls = []

    @functools.wraps(function)
    def record(**arguments):
        calls.append(arguments)
        function(**arguments)  # it must accept them
        return [0.0] * len(episodes) if "response" not in arguments else 0.0

    score_episodes(PythonReward(record), episodes)
    return calls


# --- forms ------------------------------------------------------------------------------------------------------------


def test_it_gets_the_lists_that_it_names(episodes):
    def named(responses, prompts): ...
    def everything(prompts, responses, references, meta_infos): ...
    def others(responses, **kwargs): ...

    prompts = ["Say a", "Say bc", "Say def"]
    assert called_with(named, episodes) == [{"responses": TEXTS, "prompts": prompts}]
    whole = {
        "prompts": prompts,
        "responses": TEXTS,
        "references": [["a"], ["bc"], ["x"]],
        "meta_infos": [sample.meta_data for sample in SAMPLES],
    }
    assert called_with(everything, episodes) == called_with(others, episodes) == [whole]


def test_it_gets_columns_of_the_data_by_their_names(episodes):
    def named(responses, topic, answer, unknown="default"): ...
    def one(response, topic, answer): ...

    assert called_with(named, episodes) == [
        {"responses": TEXTS, "topic": ["first", "second", "third"], "answer": [1, 2, None]}
    ]
    assert called_with(one, episodes) == [
        {"response": "a", "topic": "first", "answer": 1},
        {"response": "bc", "topic": "second", "answer": 2},
        {"response": "def", "topic": "third", "answer": None},
    ]


def test_a_parameter_response_means_one_call_per_text(episodes):
    def one(prompt, response, references, meta_info): ...

    assert [call["response"] for call in called_with(one, episodes)] == TEXTS
    assert called_with(one, episodes)[1] == {
        "prompt": "Say bc",
        "response": "bc",
        "references": ["bc"],
        "meta_info": {"topic": "second", "answer": 2},
    }


def test_completions_is_the_form_of_trl(episodes):
    def keywords(completions, topic, **kwargs): ...

    (call,) = called_with(keywords, episodes)
    assert call.pop("completion_ids") == [episode.action_ids.tolist() for episode in episodes]
    assert call == {
        "prompts": ["Say a", "Say bc", "Say def"],
        "completions": TEXTS,
        "topic": ["first", "second", "third"],
        "answer": [1, 2, None],
    }


def test_conversations_are_lists_of_messages_in_the_form_of_trl(tiny_tokenizer):
    def keywords(prompts, completions, **kwargs): ...
    def ours(prompts, responses): ...

    chat = [episode(tiny_tokenizer, CHAT, "Hi")]
    (call,) = called_with(keywords, chat)
    assert call["prompts"] == [[{"role": "user", "content": "Hello"}]]
    assert call["completions"] == [[{"role": "assistant", "content": "Hi"}]]
    assert call["answer"] == [3]
    assert called_with(ours, chat) == [{"prompts": ["Hello"], "responses": ["Hi"]}]


def test_rewards_of_trl_s_documentation_work_unchanged(episodes, tiny_tokenizer):
    def reward_len(completions, **kwargs):
        return [-abs(20 - len(completion)) for completion in completions]

    def reward_num_unique_chars(completion_ids, **kwargs):
        return [float(len(ids)) for ids in completion_ids]

    def format_reward_func(completions, **kwargs):
        pattern = r"^<think>.*?</think><answer>.*?</answer>$"
        contents = [completion[0]["content"] for completion in completions]
        return [1.0 if re.match(pattern, content) else 0.0 for content in contents]

    def answer_func(completions, answer, **kwargs):
        return [1.0 if content == str(gold) else 0.0 for content, gold in zip(completions, answer, strict=True)]

    assert paid(PythonReward(reward_len), episodes) == [-19, -18, -17]
    lengths = [episode.n_actions for episode in episodes]
    assert paid(PythonReward(reward_num_unique_chars), episodes) == lengths
    chat = [episode(tiny_tokenizer, CHAT, text) for text in ("<think>a</think><answer>b</answer>", "b")]
    assert paid(PythonReward(format_reward_func), chat) == [1, 0]
    assert paid(PythonReward(answer_func), [episode(tiny_tokenizer, SAMPLES[0], text) for text in "12"]) == [1, 0]


def test_objects_partial_functions_and_lambdas_are_functions(episodes):
    class Scaled:
        def __init__(self, scale):
            self.scale = scale

        def __call__(self, responses):
            return [self.scale * len(text) for text in responses]

    def scaled(responses, scale):
        return [scale * len(text) for text in responses]

    for function in (Scaled(2), functools.partial(scaled, scale=2), lambda responses: [2 * len(t) for t in responses]):
        assert paid(PythonReward(function), episodes) == [2, 4, 6]
        check_reward_function(function)
    assert paid(PythonReward(scaled, kwargs={"scale": 2}), episodes) == [2, 4, 6]


def test_async_functions_are_awaited(episodes):
    async def batch(responses):
        return [len(text) for text in responses]

    async def one(response):
        return len(response)

    assert paid(PythonReward(batch), episodes) == paid(PythonReward(one), episodes) == [1, 2, 3]


# --- environments -----------------------------------------------------------------------------------------------------


def lengths(responses):
    return [float(len(text)) for text in responses]


def half(response):
    return 0.5


def played(tokenizer, reward, **arguments):
    env = TextVecEnv(3, tokenizer, reward, SAMPLES, 6, 8, **arguments)
    try:
        env.seed(0)
        env.reset()
        return env.play(episodes_of_lengths([3, 1, 5], vocab_size=300)), env.reward_parts
    finally:
        env.close()


def test_an_environment_takes_functions_and_lists_of_them(tiny_tokenizer):
    alone, parts = played(tiny_tokenizer, lengths)
    assert alone[[2, 3, 8]].min() > 0 and not parts

    total, parts = played(tiny_tokenizer, [lengths, (half, 2.0), RewardPart(PythonReward(half), -1.0, "minus"), half])
    assert list(parts) == ["lengths", "half", "minus", "half_2"]
    np.testing.assert_allclose(total[[2, 3, 8]], alone[[2, 3, 8]] + 1.0)


def test_functions_are_scored_by_workers_too(tiny_tokenizer):
    def local(responses, topic):  # neither importable nor without columns
        return [len(text) + len(name) for text, name in zip(responses, topic, strict=True)]

    here, _ = played(tiny_tokenizer, [local, lengths])
    there, _ = played(tiny_tokenizer, [local, lengths], reward_workers=2)
    np.testing.assert_array_equal(here, there)


def test_a_function_that_cannot_be_sent_to_workers_is_an_error(tiny_tokenizer):
    import threading

    lock = threading.Lock()

    def locked(responses):
        with lock:
            return lengths(responses)

    with pytest.raises(RewardError, match="cannot be sent to reward workers"):
        played(tiny_tokenizer, locked, reward_workers=1)


def test_functions_of_tokens_keep_working(tiny_tokenizer):
    def tokens(previous, action, current, done, meta_info=None):
        return 1.0

    def by_other_names(a, b, c, d, e):
        return float(d)

    rewards, _ = played(tiny_tokenizer, tokens)
    assert rewards.tolist() == [1.0] * 9
    assert played(tiny_tokenizer, by_other_names)[0].sum() == 3
    assert played(tiny_tokenizer, [tokens, lengths])[1]["tokens"].sum() == 9

    env = TextGenEnv(tiny_tokenizer, tokens, SAMPLES, 6, 8)
    env.reset()
    assert env.step(5)[1] == 1.0


def test_an_episode_that_is_stepped_has_the_parts_of_a_list(tiny_tokenizer):
    env = TextGenEnv(tiny_tokenizer, [lengths, half], SAMPLES, 1, 8)
    env.reset()
    _, reward, _, _, info = env.step(5)
    assert info[REWARD_PARTS] == {"lengths": reward - 0.5, "half": 0.5}


# --- None -------------------------------------------------------------------------------------------------------------


def only_first(prompts, completions, **kwargs):
    return [1.0 if prompt.endswith(" a") else None for prompt in prompts]


def none(responses):
    return [None] * len(responses)


def test_none_of_one_of_several_rewards_leaves_it_out(episodes):
    rewards = score_episodes_in_parts(reward_of([lengths, (only_first, 2.0)]), episodes)
    ends = np.cumsum([item.n_actions for item in episodes]) - 1
    assert rewards.total[ends].tolist() == [3, 2, 3]
    np.testing.assert_array_equal(rewards.parts["only_first"][ends], [2, np.nan, np.nan])


class NoOpinion(RewardFunction):
    terminal = True

    def __call__(self, prev_observation, action, current_observation, done, meta_info=None):
        return None


def test_none_is_allowed_in_rewards_of_tokens_and_in_workers(episodes, tiny_tokenizer):
    rewards = score_episodes_in_parts(reward_of([lengths, NoOpinion()]), episodes)
    assert rewards.total.sum() == 6 and np.isnan(rewards.parts["NoOpinion"]).sum() == 3

    here, parts = played(tiny_tokenizer, [lengths, only_first])
    there, parts_there = played(tiny_tokenizer, [lengths, only_first], reward_workers=2)
    np.testing.assert_array_equal(here, there)
    np.testing.assert_array_equal(parts["only_first"], parts_there["only_first"])


def test_none_of_all_or_of_a_single_reward_is_an_error_that_names_the_sample(episodes):
    with pytest.raises(RewardError, match="all parts of CombinedReward returned None for sample 's1'"):
        score_episodes(reward_of([only_first, none]), episodes)
    with pytest.raises(RewardError, match=r"only_first' returned None for sample 's1'"):
        score_episodes(reward_of(only_first), episodes)
    with pytest.raises(RewardError, match=r"only_first' returned None for sample 's1'"):
        score_episodes(reward_of([only_first]), episodes)
    with pytest.raises(RewardError, match=r"NoOpinion returned None for token 1 of sample 's0'"):
        score_episodes(NoOpinion(), episodes)


def test_nan_is_no_none(episodes):
    def nan(responses):
        return [float("nan")] * len(responses)

    with pytest.raises(RewardError, match=r"part 'nan': .*returned nan for sample 's0'"):
        score_episodes(reward_of([lengths, nan]), episodes)


# --- mistakes ---------------------------------------------------------------------------------------------------------


def scores_nothing(texts): ...
def misspelled(responses, topik): ...
def only_by_position(responses, /): ...
def renamed(response, promt): ...


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (scores_nothing, r"scores_nothing has neither a parameter `responses`, `response` or `completions`"),
        (misspelled, r"misspelled' has the parameter 'topik', .*did you mean 'topic'\? columns: topic, answer"),
        ([lengths, misspelled], r"'topik'"),
        (renamed, r"'promt'.*did you mean 'prompt'"),
        (only_by_position, r"takes responses only by position"),
        (NoOpinion, r"expected a reward, got the class NoOpinion: write NoOpinion\(...\)"),
        ([], r"the list is empty|nothing to combine"),
        ([(lengths, "much")], r"expected pairs \(reward, weight\), got the weight 'much'"),
    ],
)
def test_a_mistake_is_reported_when_the_environment_is_built(tiny_tokenizer, reward, message):
    with pytest.raises(ConfigError, match=message):
        TextVecEnv(3, tiny_tokenizer, reward, SAMPLES, 6, 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"function": NoOpinion}, "expected a function or an object, got the class NoOpinion"),
        ({"function": 3}, "expected a function, or an import path"),
        ({"function": lengths, "kwargs": {"scal": 1}}, "has no parameter 'scal'; it has: responses"),
        ({"function": lengths, "kwargs": {"responses": []}}, "'responses' is passed"),
        ({"function": scores_nothing}, "has no parameter 'responses' or 'completions'.*it has: texts"),
    ],
)
def test_a_mistake_is_reported_when_the_reward_is_built(arguments, message):
    with pytest.raises(ValueError, match=message):
        PythonReward(**arguments)
