"""What to prefer. `REWARDS` has every reward by id; the config's `reward_fn.id` names one."""

from rl4lms_like.core.registry import Entry, Registry
from rl4lms_like.rewards.base import BatchedRewardFunction, RewardFunction

REWARDS = Registry(
    "reward",
    group="rl4lms_like.rewards",
    table={
        "increasing_numbers": Entry(
            "rl4lms_like.rewards.synthetic:RewardIncreasingNumbers", "how much of the response is numbers that grow"
        ),
        "sentences_with_dates": Entry(
            "rl4lms_like.rewards.synthetic:RewardSentencesWithDates", "1 if the response has a date like 2022-10-04"
        ),
        "sentiment": Entry(
            "rl4lms_like.rewards.sentiment:SentimentReward", "how positive the text is by the VADER lexicon, -1 to 1"
        ),
    },
)
RewardFunctionRegistry = REWARDS
"""RL4LMs' name."""

__all__ = ["REWARDS", "BatchedRewardFunction", "RewardFunction", "RewardFunctionRegistry"]
