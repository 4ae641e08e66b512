"""Prompts are drawn in proportion to their priorities, by a generator that is seeded, saved and restored."""

from __future__ import annotations

import json
import time
from collections import Counter

import pytest

from rl4lms_like.core.errors import DataPoolError
from rl4lms_like.core.sample import Sample
from rl4lms_like.data_pools.dummy import DummyPool
from rl4lms_like.data_pools.sampler import PrioritySampler

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
