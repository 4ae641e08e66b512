"""What a reward returns is one finite number for each request, or an error that names the culprit."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from rl4lms_like.core.observation import Observation, TextLayout
from rl4lms_like.core.sample import Sample
from rl4lms_like.rewards import BatchedRewardFunction, RewardFunction
from rl4lms_like.rewards.call import score_episodes, score_transition
from rl4lms_like.system.errors import RewardError
from rl4lms_like.system.wording import excerpt


class Pays(RewardFunction):
    def __init__(self, value):
        self.value = value

    def __call__(self, prev_observation, action, current_observation, done, meta_info=None):
        return self.value


class PaysBatch(BatchedRewardFunction):
    terminal = True

    def __init__(self, value):
        self.value = value

    def __call__(self, prompt_texts, gen_texts, ref_texts, dones, meta_infos=None):
        return self.value


class Raises(BatchedRewardFunction):
    def __call__(self, prompt_texts, gen_texts, ref_texts, dones, meta_infos=None):
        return [len(infos["missing"]) for infos in meta_infos]


class Panic(BaseException):
    """As PyO3's, which a panic in Rust raises: no `Exception`."""


class UnspeakableError(Exception):
    def __str__(self):
        raise ValueError


class RaisesIt(RewardFunction):
    def __init__(self, error):
        self.error = error

    def __call__(self, prev_observation, action, current_observation, done, meta_info=None):
        raise self.error


class RaisesItOfABatch(BatchedRewardFunction):
    """On the text of one prompt."""

    def __init__(self, error):
        self.error = error

    def __call__(self, prompt_texts, gen_texts, ref_texts, dones, meta_infos=None):
        if "Count with me" in prompt_texts:
            raise self.error
        return [0.0] * len(prompt_texts)


class Ordinals(BatchedRewardFunction):
    """Pays 1, 2, 3 ... in the order of its entries."""

    def __call__(self, prompt_texts, gen_texts, ref_texts, dones, meta_infos=None):
        return range(1, len(dones) + 1)


@pytest.fixture
def episodes(tiny_tokenizer):
    layout = TextLayout(tiny_tokenizer, 8, 4)
    prompts = ["The film", "Count with me", "Nobody knew " * 20]
    return [
        Observation(Sample(f"s{index}", prompt), np.array([40]), np.array([50, 51, 52]), index + 1, layout)
        for index, prompt in enumerate(prompts)
    ]


NOT_A_NUMBER = [
    None,
    float("nan"),
    float("inf"),
    -float("inf"),
    1e300,
    10**400,
    "0.5",
    "n/a",
    [0.5, 0.5],
    1j,
    {},
    torch.tensor([1.0, 2.0]),
]


@pytest.mark.parametrize("value", NOT_A_NUMBER, ids=repr)
def test_anything_but_one_finite_number_is_refused(episodes, value):
    with pytest.raises(RewardError) as caught:
        score_episodes(Pays(value), episodes[:1])
    assert f"Pays returned {excerpt(value)} for token 1 of sample 's0'" in str(caught.value)
    assert "token 1 of sample 's0' (prompt 'The film'); expected one finite number" in str(caught.value)
    with pytest.raises(RewardError):
        score_transition(Pays(value), episodes[0].after(0), 50, episodes[0], True)


FAILURES = [Panic("index 3"), asyncio.CancelledError(), SystemExit(0), GeneratorExit(), UnspeakableError()]


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
def test_whatever_a_reward_raises_is_its_failure(episodes, error):
    with pytest.raises(RewardError, match=rf"RaisesIt .* 1 .*'s0' .*: {type(error).__name__}: "):
        score_episodes(RaisesIt(error), episodes[:1])
    with pytest.raises(RewardError, match=rf"OfABatch .* 6.*: {type(error).__name__}: ") as caught:
        score_episodes(RaisesItOfABatch(error), episodes)
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("reward", [RaisesIt, RaisesItOfABatch])
def test_an_interrupt_is_no_failure_of_the_reward(episodes, reward):
    with pytest.raises(KeyboardInterrupt):
        score_episodes(reward(KeyboardInterrupt()), episodes[1:2])


def test_a_message_stays_readable_whatever_was_returned(episodes):
    for value in ({index: "x" * 100 for index in range(1000)}, np.zeros((3, 50_000))):
        with pytest.raises(RewardError) as caught:
            score_episodes(PaysBatch(value), episodes)
        assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    "value", [1, 0.5, True, np.float64(0.5), np.float32(2), torch.tensor(0.25), torch.tensor([3.0])]
)
def test_every_kind_of_number_is_taken(episodes, value):
    assert score_episodes(Pays(value), episodes[:1]).tolist() == [float(value)]


@pytest.mark.parametrize("value", NOT_A_NUMBER, ids=repr)
def test_one_bad_entry_of_a_batch_is_named(episodes, value):
    with pytest.raises(RewardError) as caught:
        score_episodes(PaysBatch([0.5, value, 0.5]), episodes)
    assert f"PaysBatch returned {excerpt(value)} for sample 's1'" in str(caught.value)
    assert "entry 1 of a batch of 3" in str(caught.value)


@pytest.mark.parametrize("values", [[0.5, 0.5], [0.5] * 4, []])
def test_the_wrong_number_of_values_is_refused(episodes, values):
    with pytest.raises(RewardError, match=f"PaysBatch .*{len(values)} .* 3"):
        score_episodes(PaysBatch(values), episodes)


@pytest.mark.parametrize("values", [None, 0.5, "abc", {0: 1, 1: 1, 2: 1}, np.float64(1)], ids=repr)
def test_something_that_is_no_list_is_refused(episodes, values):
    with pytest.raises(RewardError, match=r"PaysBatch .* 3"):
        score_episodes(PaysBatch(values), episodes)


@pytest.mark.parametrize("values", [torch.ones(3, device="meta"), torch.ones(3).to_sparse()], ids=["meta", "sparse"])
def test_a_tensor_without_data_is_refused_with_the_name_of_the_reward(episodes, values):
    with pytest.raises(RewardError, match="PaysBatch returned"):
        score_episodes(PaysBatch(values), episodes)


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_every_kind_of_list_is_taken(episodes, kind):
    rewards = score_episodes(PaysBatch(kind([1.0, 2.0, 3.0])), episodes)
    assert rewards.tolist() == [1, 0, 2, 0, 0, 3]


def test_a_batch_has_the_tokens_of_one_episode_after_the_other(episodes):
    assert score_episodes(Ordinals(), episodes).tolist() == [1, 2, 3, 4, 5, 6]


def test_an_exception_is_attributed_and_chained(episodes):
    with pytest.raises(RewardError, match=r"Raises .* 6,.*'s0'") as caught:
        score_episodes(Raises(), episodes)
    assert isinstance(caught.value.__cause__, TypeError)


def test_a_long_prompt_is_shortened_in_the_message(episodes):
    with pytest.raises(RewardError) as caught:
        score_episodes(Pays(None), episodes[2:])
    assert "..." in str(caught.value) and len(str(caught.value)) < 200


def test_an_interrupt_is_not_a_failure_of_the_reward(episodes):
    def interrupted(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score_episodes(interrupted, episodes)


def test_the_sample_that_a_batched_reward_worked_on_is_named_without_another_call(episodes):
    calls = []

    class FailsOnOne(BatchedRewardFunction):
        def __call__(self, prompt_texts, gen_texts, ref_texts, dones, meta_infos=None):
            calls.append(len(gen_texts))
            return [self.score(prompt) for prompt in prompt_texts]

        def score(self, prompt):
            return 1.0 / (prompt != "Count with me")

    with pytest.raises(RewardError) as caught:
        score_episodes(FailsOnOne(), episodes)
    assert len(calls) == 1
    assert "probably at sample 's1'" in str(caught.value)


def test_no_sample_is_named_for_a_failure_after_the_loop_over_the_samples(episodes):
    class FailsAtItsEnd(BatchedRewardFunction):
        def __call__(self, prompt_texts, gen_texts, ref_texts, dones, meta_infos=None):
            for prompt, text, info in zip(prompt_texts, gen_texts, meta_infos, strict=True):  # noqa: B007
                length = len(text)
            return self.normalised(length, 0)

        def normalised(self, length, largest):
            return length / largest

    with pytest.raises(RewardError) as caught:
        score_episodes(FailsAtItsEnd(), episodes)
    assert "probably at" not in str(caught.value)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_failure_next_to_arrays_is_still_an_error_of_the_reward(episodes):
    """The truth value of an array is an error; the search for the sample must not run into it."""

    class WithArrays(BatchedRewardFunction):
        def __call__(self, prompt_texts, gen_texts, ref_texts, dones, meta_infos=None):
            features, lengths = np.ones((3, 2)), torch.ones(4)
            raise KeyError(f"{features.shape} {lengths.shape}")

    with pytest.raises(RewardError) as caught:
        score_episodes(WithArrays(), episodes)
    assert isinstance(caught.value.__cause__, KeyError)


def test_no_episodes_have_no_scores():
    class Terminal(RewardFunction):
        terminal = True

        def __call__(self, prev_observation, action, current_observation, done, meta_info=None):
            return 1.0

    assert len(score_episodes(Terminal(), [])) == 0
