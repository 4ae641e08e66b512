"""For users: checkers for their own components, and tiny models to try them on."""

from rl4lms_like.testing.checkers import (
    check_algorithm,
    check_data_pool,
    check_metric,
    check_post_processor,
    check_reward_function,
)

__all__ = ["check_algorithm", "check_data_pool", "check_metric", "check_post_processor", "check_reward_function"]
