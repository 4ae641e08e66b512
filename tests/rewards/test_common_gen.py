"""The penalty as a reward: every entry has its own value, whichever of RL4LMs' two names it goes by (D-18)."""

from __future__ import annotations

import pytest

from rl4lms_like.core.sample import Sample
from rl4lms_like.rewards import REWARDS
from rl4lms_like.system.errors import ComponentError
from rl4lms_like.testing.checkers import check_reward_function

PROMPT = "generate a sentence with: dog run field."
SAMPLES = (Sample("a", PROMPT, ["A dog runs."]), Sample("b", "use these", ["A cat."], {"concepts": ["cat", "sit"]}))
IDS = ("common_gen_repeat_penalty", "common_gen_repeat_penalty_batched")


@pytest.mark.parametrize("id", IDS)
def test_it_is_a_reward_like_any_other(id):
    check_reward_function(REWARDS.get(id), SAMPLES, (" dog run field", " a dog.", " a cat sit", "<eos>"))


@pytest.mark.parametrize("id", IDS)
def test_unfinished_entries_get_zero_and_shift_nothing(id):
    """RL4LMs' batched form returned values for finished entries only: 2 values for these 4 transitions."""
    texts = ["dog run field", "dog run field", "a dog", "dog run field"]
    rewards = REWARDS.get(id)([PROMPT] * 4, texts, [[]] * 4, [False, True, True, True])
    assert rewards == [0, -1, 0, -1]


@pytest.mark.parametrize("id", IDS)
def test_a_prompt_without_concepts_names_the_way_out(id):
    with pytest.raises((ComponentError, ValueError), match="`prefix`"):
        REWARDS.get(id)(["On 1998-03-12"], ["a dog"], [[]], [True])
    with pytest.raises(ValueError):
        REWARDS.get(id, {"prefix": ""})
