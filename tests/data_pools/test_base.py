"""TextGenPool and Sample as users of RL4LMs know them."""

from __future__ import annotations

import random

import pytest

from rl4lms_like.core.sample import Sample
from rl4lms_like.data_pools import DATA_POOLS, DataPoolRegistry, TextGenPool
from rl4lms_like.data_pools.dummy import DummyPool
from rl4lms_like.data_pools.dummy import TestTextGenPool as RL4LMsName
from rl4lms_like.testing.checkers import check_data_pool


class Numbers(TextGenPool):
    """A user's pool, as RL4LMs' documentation writes them."""

    @classmethod
    def prepare(cls, split, n=10, **args):
        return cls([Sample(id=f"{split}_{i}", prompt_or_input_text=str(i), references=[]) for i in range(n)])


def test_a_pool_is_a_sequence_of_sample_and_weight():
    pool = Numbers.prepare("train", n=3)
    assert len(pool) == 3 and pool[1] == (Sample("train_1", "1", []), 1.0)
    assert [sample.id for sample, weight in pool] == ["train_0", "train_1", "train_2"]


def test_a_user_s_pool_passes_the_checker_and_is_prepared_by_the_registry():
    check_data_pool(Numbers, n=4)
    assert len(DataPoolRegistry.get(f"{__name__}:Numbers", {"split": "val", "n": 2})) == 2


def test_split_gives_consecutive_slices():
    first, second = Numbers.prepare("train", n=10).split([0.55, 0.3])
    assert isinstance(first, Numbers)
    assert [len(first), len(second)] == [5, 3]
    assert second[0][0].id == "train_5"
    for ratios in ([0.9, 0.2], [-0.1]):
        with pytest.raises(ValueError):
            first.split(ratios)


def test_sample_draws_one():
    pool = Numbers.prepare("train")
    assert pool.sample(random.Random(0)) == pool.sample(random.Random(0))
    assert {pool.sample(random.Random(seed)).id for seed in range(50)} > {"train_0", "train_9"}


def test_dummy_pool_is_one_prompt_many_times():
    pool = DATA_POOLS.get("dummy_pool", {"split": "val", "prompt": "Dummy", "n_samples": 5})
    assert pool.samples == [Sample(str(index), "Dummy", []) for index in range(5)]
    assert len(DummyPool.prepare("train", "x")) == 100 and RL4LMsName is DummyPool
    check_data_pool(DummyPool, prompt="x")
