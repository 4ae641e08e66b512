"""Questions with several tries."""

from __future__ import annotations

import pytest

from rl4lms_like import DATA_POOLS, ENVIRONMENTS
from rl4lms_like.core.sample import Sample
from rl4lms_like.envs.adapters.retries import Retries

SAMPLE = Sample("0", "Spell sun backward.", ["nus"])


def test_an_episode():
    env = ENVIRONMENTS.get("reasoning_gym", {"tries": 3})
    assert env.reset(options={"sample": SAMPLE}) == ("Spell sun backward.", {})
    again = "That is wrong. Try again.\n"
    metrics = {"correct": 0.0, "tries": 1.0}
    assert env.step("sun") == (again, -0.1, False, False, {"metrics": metrics})
    assert env.step("")[:2] == (again, -0.1)
    assert env.step(" nus\n") == ("", 1.0, True, False, {"metrics": {"correct": 1.0, "tries": 3.0}})
    env.reset(options={"sample": SAMPLE})
    assert env.step("nus")[1:3] == (1.0, True)


def test_the_last_try_ends_the_episode():
    env = Retries(tries=2)
    env.reset(options={"sample": SAMPLE})
    env.step("sun")
    assert env.step("sun") == ("", 0.0, True, False, {"metrics": {"correct": 0.0, "tries": 2.0}})


def test_the_answer_is_found_in_the_turn():
    env = Retries(extract=r"<answer>(.*?)</answer>")
    env.reset(options={"sample": SAMPLE})
    assert env.step("nus")[1] == -0.1
    assert env.step("I think <answer>nus</answer>.")[1] == 1.0


@pytest.mark.parametrize("options", [None, {"sample": Sample("0", "Why?")}])
def test_a_question_without_an_answer_is_an_error(options):
    with pytest.raises(ValueError, match="with a reference"):
        Retries().reset(options=options)


def test_the_scorers_of_the_package():
    pytest.importorskip("reasoning_gym")
    pool = DATA_POOLS.get("reasoning_gym", {"split": "train", "dataset": "chain_sum", "size": 50})
    sample = next(iter(pool))[0]
    env = Retries(strict=False)
    env.reset(options={"sample": sample})
    assert env.step(sample.references[0])[1:3] == (1.0, True)
