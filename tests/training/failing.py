"""Rewards that fail, for runs that must say so."""

from rl4lms_like.rewards.base import BatchedRewardFunction, RewardFunction


class Late(RewardFunction):
    """Works for some episodes, then does what it was told."""

    terminal = True

    def __init__(self, after: int, what: str) -> None:
        self.left = after
        self.what = what

    def __call__(self, prev_observation, action, current_observation, done, meta_info=None):
        self.left -= 1
        if self.left >= 0:
            return 0.5
        if self.what == "raise":
            raise KeyError("the_missing_key")
        return float("nan") if self.what == "nan" else "text"


class TooFew(BatchedRewardFunction):
    """Forgets one value."""

    terminal = True

    def __call__(self, prompt_texts, gen_texts, ref_texts, dones, meta_infos=None):
        return [0.0] * (len(gen_texts) - 1)
