"""Questions of reasoning-gym: each in one split only, answers stripped, the same in every process."""

from __future__ import annotations

import random

import pytest

from rl4lms_like.data_pools import DATA_POOLS
from rl4lms_like.system.errors import DataPoolError

pytest.importorskip("reasoning_gym", reason="needs the extra 'reasoning'")

SMALL = {"dataset": "chain_sum", "config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}


def pool(split="train", **args):
    return DATA_POOLS.get("reasoning_gym", {"split": split, **SMALL, **args}).samples


def questions(*splits, **args):
    return {sample.prompt_or_input_text for split in splits for sample in pool(split, **args)}


def test_a_question_is_in_one_split_whatever_the_seed_and_the_size():
    held_out = questions("val", "test", size=3000)
    assert len(held_out) > 20
    for seed in range(3):
        assert not held_out & questions("train", size=3000, seed=seed)
        assert not questions("val", size=500, seed=seed) & questions("test", size=3000)


def test_questions_are_distinct_and_all_of_a_small_data_set_are_found():
    prompts = [sample.prompt_or_input_text for split in ("train", "val", "test") for sample in pool(split, size=3000)]
    assert len(prompts) == len(set(prompts)) == 200


def test_ratios_divide_the_questions():
    n = {split: len(pool(split, size=3000, split_ratios=[0.5, 0.5, 0])) for split in ("train", "val")}
    assert sum(n.values()) == 200 and 70 < n["val"] < 130
    with pytest.raises(DataPoolError, match="no samples"):
        pool("test", split_ratios=[0.5, 0.5, 0])


def test_a_sample_has_the_stripped_answer_and_the_entry():
    sample = pool(prompt_prefix="Q: ", prompt_suffix="\nA:")[0]
    entry = sample.meta_data["entry"]
    assert sample.prompt_or_input_text == f"Q: {entry['question'].strip()}\nA:"
    assert sample.references == [entry["answer"].strip()]
    for sample in pool(dataset="rotate_matrix", config={"min_n": 2, "max_n": 2}, size=20):
        assert sample.references[0] == sample.references[0].strip()


@pytest.mark.parametrize("name", ["chain_sum", "list_functions", "letter_jumble"])
def test_a_seed_gives_the_same_questions_and_leaves_the_global_generator_alone(name):
    random.seed(7)
    state = random.getstate()
    first = pool(dataset=name, config=None, size=20)
    assert random.getstate() == state
    pool(size=5)  # another data set: nothing is kept
    random.seed(8)
    assert pool(dataset=name, config=None, size=20) == first
    assert pool(dataset=name, config=None, size=20, seed=1) != first


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"dataset": "chain_sums"}, "did you mean 'chain_sum'"),
        ({"config": {"min_terns": 2}}, "min_terns"),
        ({"config": {"min_terms": 5, "max_terms": 2}}, "max_terms"),
        ({"split_ratios": [1, 1, 1]}, "split_ratios"),
    ],
)
def test_what_the_package_does_not_have_is_named(args, message):
    with pytest.raises(DataPoolError, match=message):
        pool(**args)
    if "split_ratios" not in args:
        with pytest.raises(DataPoolError, match=message):
            DATA_POOLS.resolve("reasoning_gym").require("the run", **SMALL | args)
