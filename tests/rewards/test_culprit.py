"""The one text that a batched reward cannot score is found, if it is one text."""

from __future__ import annotations

import time

import pytest

from rl4lms_like.core.errors import RewardError
from rl4lms_like.core.observation import Observation, TextLayout
from rl4lms_like.core.sample import Sample
from rl4lms_like.rewards import BatchedRewardFunction
from rl4lms_like.rewards.call import score_episodes


class FailsOn(BatchedRewardFunction):
    """Fails where `fails` says so of a text and its batch; remembers the number of its calls."""

    terminal = True

    def __init__(self, fails, seconds=0.0):
        self.fails, self.seconds, self.n_calls, self.remembered = fails, seconds, 0, 0

    def __call__(self, prompt_texts, gen_texts, ref_texts, dones, meta_infos=None):
        self.n_calls += 1
        self.remembered += 1
        time.sleep(self.seconds)
        for text in prompt_texts:
            if self.fails(text, prompt_texts):
                raise KeyError("topic")
        return [0.0] * len(prompt_texts)

    def state_dict(self):
        return {"n": self.remembered}

    def load_state_dict(self, state):
        self.remembered = state["n"]


@pytest.fixture
def episodes(tiny_tokenizer):
    layout = TextLayout(tiny_tokenizer, 8, 4)
    samples = [Sample(f"s{index}", prompt, []) for index, prompt in enumerate(["one", "two", "three", "four"])]
    ids = layout.encode_all([sample.prompt_or_input_text for sample in samples])
    return [
        Observation(sample, prompt, ids[0][:2], len(ids[0][:2]), layout)
        for sample, prompt in zip(samples, ids, strict=True)
    ]


def failure(reward, episodes):
    with pytest.raises(RewardError) as error:
        score_episodes(reward, episodes)
    return str(error.value)


def test_the_text_that_fails_alone_too_is_named(episodes):
    reward = FailsOn(lambda text, batch: text == "three")
    said = failure(reward, episodes)
    assert said.startswith("FailsOn failed on a batch of 4, which starts with sample 's0' (prompt 'one'): KeyError")
    assert said.endswith(". It fails on entry 2 alone too: sample 's2' (prompt 'three')")
    assert reward.remembered == 1, "what a reward remembers is what it had after the call that failed"


@pytest.mark.parametrize(
    "fails",
    [lambda text, batch: True, lambda text, batch: len(batch) > 1],
    ids=["every text", "the batch"],
)
def test_no_text_is_blamed_for_what_is_not_its_own(fails, episodes):
    assert failure(FailsOn(fails), episodes).endswith("KeyError: 'topic'")


def test_it_costs_no_more_than_the_call_that_failed_or_a_second(episodes):
    reward = FailsOn(lambda text, batch: True, seconds=0.4)
    failure(reward, episodes)
    assert reward.n_calls <= 1 + 3
