"""For users: checkers for their own components, and tiny models to try them on."""

from rl4lms_like.testing.checkers import check_data_pool, check_metric, check_reward_function

__all__ = ["check_data_pool", "check_metric", "check_reward_function"]
