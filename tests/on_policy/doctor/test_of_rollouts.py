"""Each alarm of rollouts fires on a made case and is quiet just below its threshold."""

from __future__ import annotations

import pytest

from rl4lms_like.on_policy.doctor import alerts
from tests.on_policy.doctor.histories import context, history


def test_rewards_that_do_not_differ_are_told():
    found = alerts.reward_constant(history(reward_spread=[0.0] * 3, reward=0.5), context())
    assert "the same reward for 3 iterations: 0.5, 0.5, 0.5" in found.message
    assert alerts.reward_constant(history(reward_spread=[0.0, 0.0, 2e-5]), context()) is None
    assert alerts.reward_constant(history(reward_spread=[None] * 3), context()) is None, "one episode a rollout"
    assert alerts.reward_constant(history(reward_spread=[0.0] * 3), context(limits={"min_reward_spread": 0.0}))


def test_groups_with_equal_rewards_are_told():
    equal = {"groups_differing": [0.05] * 3, "groups_kept": 1.0}
    assert "below 0.1 for 3 iterations" in alerts.equal_groups(history(**equal), context()).message
    assert alerts.equal_groups(history(**equal | {"groups_differing": [0.05, 0.05, 0.1]}), context()) is None
    solved = {"reward_spread": [0.5, 0.0, 0.0, 0.0], "reward": [0.4, 1.0, 1.0, 1.0], "best_reward": 1.0}
    solved |= {"groups_differing": [0.5, 0.0, 0.0, 0.0], "groups_kept": 1.0}
    assert alerts.equal_groups(history(**solved), context()) is None
    replaced = equal | {"groups_kept": 0.05}
    assert alerts.equal_groups(history(**replaced), context()) is None
    assert alerts.few_kept_groups(history(**replaced), context()) is not None


def test_few_episodes_have_equal_rewards_by_chance():
    lucky = {"reward_spread": [0.0] * 10, "reward": [1.0, 0.0] * 5}
    assert alerts.reward_constant(history(**lucky, n_episodes=7.0), context()) is None
    assert alerts.reward_constant(history(**lucky, n_episodes=8.0), context()) is not None
    same = {"reward": 0.5, "n_episodes": 2.0}
    assert alerts.reward_constant(history(reward_spread=[0.0] * 9, **same), context()) is None
    assert alerts.reward_constant(history(reward_spread=[0.0] * 10, **same), context()) is not None


def test_a_policy_that_rose_to_the_best_reward_is_done_not_ill():
    spreads = {"reward_spread": [0.5, 0.0, 0.0, 0.0]}
    solved = history(**spreads, reward=[0.4, 1.0, 1.0, 1.0], best_reward=1.0)
    assert alerts.reward_constant(solved, context()) is None
    stuck = history(**spreads, reward=[0.4, 0.7, 0.7, 0.7], best_reward=[1.0, 0.7, 0.7, 0.7])
    assert alerts.reward_constant(stuck, context()) is not None
    flat = history(reward_spread=[0.0] * 3, reward=0.5, best_reward=0.5)
    assert alerts.reward_constant(flat, context()) is not None, "it was never another"


def test_responses_that_no_longer_end_are_reported_where_they_did():
    stopped_ending = history(truncated=[0.5, 1.0, 1.0, 1.0])
    found = alerts.all_truncated(stopped_ending, context())
    assert "100% of the responses reached the length limit" in found.message and "max_new_tokens" in found.advice
    assert alerts.all_truncated(history(truncated=[0.5, 1.0, 0.98, 1.0]), context()) is None
    assert alerts.all_truncated(stopped_ending, context(can_end=False)) is None


def test_continuations_of_a_fixed_length_are_no_alert():
    assert alerts.all_truncated(history(truncated=[1.0] * 5), context()) is None


def test_responses_that_say_nothing_are_told():
    assert "ended with their first token" in alerts.all_empty(history(empty=[0.9] * 3), context()).message
    assert alerts.all_empty(history(empty=[0.9, 0.89, 0.9]), context()) is None
    assert alerts.all_empty(history(empty=[0.9] * 3), context(has_dialogues=True)) is None


def test_a_limit_of_zero_tells_any_share_but_none():
    none = context(limits={"max_empty_share": 0.0, "max_truncated_share": 0.0})
    assert alerts.all_empty(history(empty=[0.0] * 3), none) is None
    assert alerts.all_empty(history(empty=[0.01] * 3), none) is not None
    assert alerts.all_truncated(history(truncated=[0.0] * 3), none) is None
    assert alerts.all_truncated(history(truncated=[0.01] * 3), none) is None, "it was so at first"


@pytest.mark.parametrize("sign", ["duplicates", "near_duplicates"])
def test_equal_responses_are_told_where_they_have_become_more(sign):
    found = alerts.duplicates(history(**{sign: [0.0, 0.51, 0.6, 0.6]}), context())
    assert found.evidence == {sign: [0.51, 0.6, 0.6], "first": 0.0}
    assert alerts.duplicates(history(**{sign: [0.0, 0.5, 0.6, 0.6]}), context()) is None
    assert alerts.duplicates(history(**{sign: [0.4, 0.6, 0.6, 0.6]}), context()) is None, "few answers by nature"
    off = {"max_duplicate_share": None, "max_near_duplicate_share": None}
    assert alerts.duplicates(history(**{sign: [0.0, 0.9, 0.9, 0.9]}), context(limits=off)) is None


def test_a_reward_that_is_ordered_by_length_is_told_either_way():
    assert (
        "longer responses get higher rewards"
        in alerts.reward_follows_length(history(length_correlation=[0.95] * 10), context()).message
    )
    worse = alerts.reward_follows_length(history(length_correlation=[-0.95] * 10), context())
    assert "lower" in worse.message and "length_penalty" not in worse.advice, "it would pay even less for length"
    assert alerts.reward_follows_length(history(length_correlation=[0.89] * 10), context()) is None
    assert alerts.reward_follows_length(history(length_correlation=[0.95] * 9), context()) is None
    rare = [None] * 6 + [0.95] * 4
    assert alerts.reward_follows_length(history(length_correlation=rare), context()) is None, "length hardly varies"


def test_equal_answers_of_an_environment_are_told():
    found = alerts.equal_answers(history(equal_answers=[1.0] * 3), context())
    assert "100% of the answers of the environment were the same text for 3 iterations" in found.message
    assert alerts.equal_answers(history(equal_answers=[1.0, 1.0, 0.99]), context()) is None
    assert alerts.equal_answers(history(equal_answers=[1.0, None, 1.0]), context()) is None, "few answers"
    assert alerts.equal_answers(history(reward=[0.5] * 3), context()) is None, "no dialogues"
    assert alerts.equal_answers(history(equal_answers=[1.0] * 3), context(has_one_answer=True)) is None


def test_failed_calls_are_told_if_they_are_most():
    found = alerts.failed_calls(history(calls=[2.0, 4.0, 1.0], failed_calls=[1.5, 3.0, 0.75]), context())
    assert found.evidence == {"failed_calls": [0.75] * 3, "limit": 0.5}
    assert alerts.failed_calls(history(calls=[2.0] * 3, failed_calls=[1.5, 1.0, 1.5]), context()) is None
    assert alerts.failed_calls(history(calls=[0.0] * 3, failed_calls=0.0), context()) is None, "no calls"
    assert alerts.failed_calls(history(reward=[0.5] * 3), context()) is None, "no tools"


def test_a_tool_that_is_never_called_is_told():
    rare = {"calls/search": [0.0] * 10, "calls/add": [0.0] * 9 + [0.01]}
    found = alerts.unused_tool(history(**rare), context())
    assert found.message == "no episode of the last 10 iterations called the tool 'search'"
    assert alerts.unused_tool(history(**{"calls/search": [0.0] * 9}), context()) is None
    assert alerts.unused_tool(history(**{"calls/search": [0.01] + [0.0] * 9}), context()) is None
    assert alerts.unused_tool(history(reward=[0.5] * 10), context()) is None, "no tools"


def test_dialogues_that_never_end_are_told_from_the_first_iteration_on():
    never = history(truncated=[1.0] * 3)
    found = alerts.all_truncated(never, context(has_dialogues=True, can_end=False))
    assert "the environment ended none of them" in found.message and "max_turns" in found.advice
    assert alerts.all_truncated(never, context()) is None
    assert alerts.all_truncated(history(truncated=[1.0, 0.98, 1.0]), context(has_dialogues=True)) is None
