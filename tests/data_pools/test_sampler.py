"""Prompts are drawn in proportion to their priorities, by a generator that is seeded, saved and restored."""

from __future__ import annotations

import json
import time
from collections import Counter

import numpy as np
import pytest

from rl4lms_like.core.sample import Sample
from rl4lms_like.data_pools.dummy import DummyPool
from rl4lms_like.data_pools.sampler import DifficultySampler, PrioritySampler, ShuffledSampler
from rl4lms_like.system.errors import DataPoolError

SAMPLES = [Sample(str(index), f"prompt {index}") for index in range(4)]
WEIGHTS = [1.0, 0.0, 3.0, 0.5]


def drawn(sampler, n=50):
    return [sampler.draw() for _ in range(n)]


@pytest.mark.parametrize("scale", [0.0, 0.5, 1.0, 2.0])
def test_frequencies_follow_the_scaled_weights(scale):
    sampler = PrioritySampler(zip(SAMPLES, WEIGHTS, strict=True), scale, seed=0)
    n_draws = 20_000
    counts = Counter(drawn(sampler, n_draws))
    total = sum(weight**scale for weight in WEIGHTS)
    for index, weight in enumerate(WEIGHTS):
        expected = weight**scale / total
        assert counts[index] / n_draws == pytest.approx(expected, abs=4 * (expected * (1 - expected) / n_draws) ** 0.5)


def test_plain_samples_weigh_one():
    plain = PrioritySampler(SAMPLES, 1.0, seed=3)
    assert drawn(plain) == drawn(PrioritySampler([(sample, 1.0) for sample in SAMPLES], 1.0, seed=3))
    assert plain.sample(2)[0] in SAMPLES


def test_a_pool_can_be_drawn_from():
    assert len(PrioritySampler(DummyPool.prepare("train", "x", 7))) == 7


def test_seeds_decide():
    sampler = PrioritySampler(SAMPLES, seed=1)
    first = drawn(sampler)
    assert first != drawn(sampler)
    sampler.seed(1)
    assert first == drawn(sampler)
    assert first != drawn(PrioritySampler(SAMPLES, seed=2))


def test_goes_on_from_a_saved_state():
    sampler = PrioritySampler(SAMPLES, seed=1)
    drawn(sampler)
    state = json.loads(json.dumps(sampler.state_dict()))
    other = PrioritySampler(SAMPLES)
    other.load_state_dict(state)
    assert drawn(sampler) == drawn(other)


def test_a_state_of_another_pool_is_refused():
    with pytest.raises(DataPoolError):
        PrioritySampler(SAMPLES[:3]).load_state_dict(PrioritySampler(SAMPLES).state_dict())


@pytest.mark.parametrize(
    ("weights", "sample"),
    [
        ([], None),
        ([1.0, -1.0], "sample 1 .*-1.0"),
        ([float("nan")], "sample 0 .*nan"),
        ([0.0, 0.0], None),
    ],
)
def test_weights_that_make_no_sense_are_refused(weights, sample):
    with pytest.raises(DataPoolError, match=sample):
        PrioritySampler(list(zip(SAMPLES, weights, strict=False)), 1.0)


def test_a_draw_from_many_is_cheap():
    sampler = PrioritySampler([(SAMPLES[0], 1.0)] * 300_000, 1.0, seed=0)
    start = time.perf_counter()
    drawn(sampler, 1000)
    assert time.perf_counter() - start < 0.5  # RL4LMs took 0.28 s for one


def asked(sampler, right, n_rollouts=40, n_episodes=32):
    """The last rollout's prompts and what the sampler logs, where `right(sample)` decides on the reward."""
    for _ in range(n_rollouts):
        samples = sampler.sample(n_episodes)
        logged = sampler.update([sample.id for sample in samples], [float(right(sample)) for sample in samples])
    return samples, logged


HALF_IMPOSSIBLE = [Sample(str(index), "hard" if index % 2 else "can be done") for index in range(40)]


def test_impossible_prompts_are_drawn_less_often_but_not_lost():
    coin = np.random.default_rng(0)
    sampler = DifficultySampler(HALF_IMPOSSIBLE, seed=0)
    _, logged = asked(sampler, lambda sample: sample.prompt_or_input_text != "hard" and coin.random() < 0.5)
    assert 0.45 <= logged["too_hard"] <= 0.7 and logged["useful"] >= 0.3
    counts = Counter(sampler.samples[index].prompt_or_input_text for index in drawn(sampler, 4000))
    assert 0.03 < counts["hard"] / 4000 < 0.2  # with weights 0.1 and 1 for two halves: 0.09
    assert {HALF_IMPOSSIBLE[index].id for index in drawn(sampler, 20_000)} == {one.id for one in HALF_IMPOSSIBLE}


def test_prompts_that_become_easy_are_drawn_less_often_and_come_back():
    sampler = DifficultySampler(HALF_IMPOSSIBLE, seed=0)
    _, logged = asked(sampler, lambda sample: True)
    assert logged["too_easy"] == 1 and logged["success_rate"] > 0.9
    _, logged = asked(sampler, lambda sample: sample.prompt_or_input_text != "hard", n_rollouts=80)
    assert logged["too_hard"] == 0.5


def test_the_success_rate_is_a_moving_average():
    sampler = DifficultySampler(SAMPLES, momentum=0.5, success_from=2.0)
    assert sampler.update(["0", "0"], [2.0, 1.9])["success_rate"] == 0.375  # 0.5, 0.75, 0.375
    assert sampler.update(["1"], [2.0])["success_rate"] == (0.375 + 0.75) / 2


def test_a_difficulty_sampler_resumes_exactly():
    right = {"0", "2"}.__contains__
    sampler, other = DifficultySampler(SAMPLES, seed=1), DifficultySampler(SAMPLES)
    asked(sampler, lambda sample: right(sample.id))
    other.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    assert asked(sampler, lambda sample: right(sample.id)) == asked(other, lambda sample: right(sample.id))
    assert sampler.state_dict() == other.state_dict()


def test_limits_that_exclude_each_other_are_refused():
    with pytest.raises(ValueError, match="hard_below"):
        DifficultySampler(SAMPLES, hard_below=0.6, easy_above=0.4)


def test_every_sample_is_drawn_once_before_one_is_drawn_again():
    sampler = ShuffledSampler(SAMPLES, seed=0)
    passes = [drawn(sampler, 4) for _ in range(30)]
    assert all(sorted(order) == [0, 1, 2, 3] for order in passes)
    assert len(set(map(tuple, passes))) > 10, "each pass has its own order"


def test_the_order_of_passes_is_that_of_the_seed():
    assert drawn(ShuffledSampler(SAMPLES, seed=1)) == drawn(ShuffledSampler(SAMPLES, seed=1))
    assert drawn(ShuffledSampler(SAMPLES, seed=1)) != drawn(ShuffledSampler(SAMPLES, seed=2))
    assert drawn(ShuffledSampler(SAMPLES)) != drawn(ShuffledSampler(SAMPLES)), "seeds from the operating system"
    sampler = ShuffledSampler(SAMPLES, seed=1)
    first = drawn(sampler)
    sampler.seed(1)
    assert drawn(sampler) == first


@pytest.mark.parametrize("n_before", [0, 3, 4, 9])
def test_passes_go_on_from_a_saved_state(n_before):
    sampler = ShuffledSampler(SAMPLES, seed=1)
    drawn(sampler, n_before)
    state = json.loads(json.dumps(sampler.state_dict()))
    other = ShuffledSampler(SAMPLES)
    drawn(other, 2)
    other.load_state_dict(state)
    assert drawn(sampler) == drawn(other)


@pytest.mark.parametrize("n", [1, 3, 6])
def test_draws_that_are_put_back_are_drawn_again(n):
    sampler = ShuffledSampler(SAMPLES, seed=1)
    drawn(sampler, 2)
    before = drawn(sampler, n)
    sampler.put_back(n)
    assert drawn(sampler, n) == before


def test_passes_over_the_data_are_logged():
    sampler = ShuffledSampler(SAMPLES, seed=1)
    sampler.sample(6)
    assert sampler.update(["0"] * 6, [0.0] * 6) == {"n_passes": 1.5}


def test_with_replacement_nothing_is_put_back():
    sampler, other = PrioritySampler(SAMPLES, seed=1), PrioritySampler(SAMPLES, seed=1)
    drawn(sampler, 5)
    drawn(other, 5)
    sampler.put_back(5)
    assert drawn(sampler) == drawn(other)
