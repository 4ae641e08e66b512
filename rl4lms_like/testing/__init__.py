"""Checkers for components that users write, and tiny models for tests."""

from rl4lms_like.testing.checkers import (
    check_algorithm,
    check_data_pool,
    check_metric,
    check_post_processor,
    check_reward_function,
)
from rl4lms_like.testing.environments import check_text_environment

__all__ = [
    "check_algorithm",
    "check_data_pool",
    "check_metric",
    "check_post_processor",
    "check_reward_function",
    "check_text_environment",
]
