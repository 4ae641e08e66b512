"""The checkers say what is wrong with components, and nothing about good ones."""

from __future__ import annotations

import itertools
import threading

import pytest

from rl4lms_like.core.sample import Sample
from rl4lms_like.data_pools import TextGenPool
from rl4lms_like.metrics import BaseMetric
from rl4lms_like.rewards import BatchedRewardFunction, RewardFunction
from rl4lms_like.testing.checkers import check_data_pool, check_metric, check_post_processor, check_reward_function


class Good(RewardFunction):
    def __call__(self, prev_observation, action, current_observation, done, meta_info=None):
        return float(len(current_observation.context_text))


class SaysTerminal(Good):
    terminal = True


class Counts(Good):
    def __init__(self):
        self.count = itertools.count()

    def __call__(self, *_):
        return next(self.count)


class Nan(Good):
    def __call__(self, *_):
        return float("nan")


class Changes(Good):
    def __call__(self, prev_observation, action, current_observation, done, meta_info=None):
        current_observation.target_or_reference_texts.append("more")
        return 0.0


class Locked(Good):
    def __init__(self):
        self.lock = threading.Lock()


class Relative(BatchedRewardFunction):
    def __call__(self, prompt_texts, gen_texts, ref_texts, dones, meta_infos=None):
        longest = max(map(len, gen_texts))
        return [len(text) / (longest + 1) for text in gen_texts]


class Mean(BaseMetric):
    key = "family/name"

    def compute(self, prompt_texts, generated_texts, reference_texts, meta_infos=None, model=None, split_name=None):
        scores = [float(len(text)) for text in generated_texts]
        return {self.key: (scores, sum(scores) / len(scores))}


class OneWordKey(Mean):
    key = "name"


class Sorts(Mean):
    def compute(self, prompt_texts, generated_texts, *rest):
        generated_texts.sort()
        return super().compute(prompt_texts, generated_texts, *rest)


class Divides(Mean):
    def compute(self, prompt_texts, generated_texts, *rest):
        return {self.key: ([1 / len(text) for text in generated_texts], 1.0)}


class Forgets(Mean):
    calls = 0

    def compute(self, *texts):
        self.calls += 1
        return {"family/name": (None, self.calls)}


class ShyOfNothing(Mean):
    def compute(self, prompt_texts, generated_texts, *rest):
        if "" in [text.strip() for text in generated_texts] and len(generated_texts) > 3:
            raise ValueError("an empty text")
        return super().compute(prompt_texts, generated_texts, *rest)


class ManyKeys(Mean):
    """Reports a key for each n it was given."""

    def compute(self, *texts):
        return {"family/1_grams": (None, 0.0), "family/2_grams": (None, 0.0), "family/mean": (None, 0.0)}


class Pool(TextGenPool):
    made = itertools.count()

    @classmethod
    def prepare(cls, split, fault=""):
        id = {"ids": "x", "number": 3}.get(fault)
        text = f"{next(cls.made)}" if fault == "random" else "prompt"
        references = "text" if fault == "references" else []
        samples = [Sample(id or str(index), text, references) for index in range(0 if fault == "empty" else 3)]
        return samples if fault == "list" else cls(samples)


def test_good_components_pass():
    check_reward_function(Good())
    check_reward_function(Relative(), batch_independent=False)
    check_metric(Mean())
    check_data_pool(Pool)
    check_post_processor(shortened, limit=3)


def test_a_metric_is_checked_on_any_number_of_samples_of_ones_own():
    """The default texts are as many as the samples."""
    samples = [Sample(str(index), "a prompt", ["a reference"]) for index in range(5)]
    check_metric(Mean(), samples[:1])
    check_metric(Mean(), samples)
    with pytest.raises(AssertionError, match=r"2 .* 1 "):
        check_metric(Mean(), samples[:1], ["one", "two"])


def shortened(text: str, limit: int) -> str:
    return text[:limit]


def test_a_metric_reports_what_it_declares():
    check_metric(Mean(), keys=("family/name",))
    check_metric(ManyKeys(), keys=("family/{n}_grams", "family/mean"))
    with pytest.raises(AssertionError, match=r"ManyKeys .*'family/mean'"):
        check_metric(ManyKeys(), keys=("family/{n}_grams",))
    with pytest.raises(AssertionError, match=r"Mean .*'family/other'"):
        check_metric(Mean(), keys=("family/name", "family/other"))


@pytest.mark.parametrize(
    ("function", "data"),
    [
        (lambda text: None, "None"),
        (lambda text: text.splitlines()[0], "'': IndexError"),
        (lambda text: f"{text}{next(Pool.made)}", "second call"),
    ],
)
def test_bad_post_processors_are_told_why(function, data):
    with pytest.raises(AssertionError, match=data):
        check_post_processor(function)


@pytest.mark.parametrize(
    ("reward", "data"),
    [
        (SaysTerminal, "SaysTerminal .*done"),
        (Counts, "Counts .*same episodes"),
        (Nan, "Nan .*nan .* 1 .*'check_0'"),
        (Changes, "Changes .*samples"),
        (Locked, "Locked .*pickle"),
        (Relative, "Relative .*alone"),
    ],
)
def test_bad_rewards_are_told_why(reward, data):
    with pytest.raises(AssertionError, match=data):
        check_reward_function(reward())


@pytest.mark.parametrize(
    ("metric", "data"),
    [
        (OneWordKey, "'name'"),
        (Sorts, "Sorts .*lists"),
        (Divides, "Divides .*'val' .*ZeroDivisionError"),
        (ShyOfNothing, "ShyOfNothing .*'val' .*an empty text"),
        (Forgets, "'family/name'"),
    ],
)
def test_bad_metrics_are_told_why(metric, data):
    with pytest.raises(AssertionError, match=data):
        check_metric(metric())


@pytest.mark.parametrize(
    ("fault", "data"),
    [
        ("ids", "ids"),
        ("number", "sample 0: .*3"),
        ("random", "second call"),
        ("references", "references .*'text'"),
        ("list", "list, .*TextGenPool"),
        ("empty", "Pool, .*'train'"),
    ],
)
def test_bad_pools_are_told_why(fault, data):
    with pytest.raises(AssertionError, match=data):
        check_data_pool(Pool, fault=fault)
