"""Every key of the `doctor` block acts: an alarm that is told by default is not told with another value, or is off."""

from __future__ import annotations

import pytest

from rl4lms_like.catalogue import table_rows
from rl4lms_like.config.load import parse_config
from rl4lms_like.config.run_config import DoctorConfig, HeldOutConfig
from rl4lms_like.on_policy.doctor import alerts
from tests.config_errors import raises_at
from tests.on_policy.doctor.histories import context, history
from tests.on_policy.doctor.test_of_evaluations import KEY, followed

EXPLODED = {"value_loss": [0.1] * 10 + [2.0] * 3, "explained_variance": -0.5}
ROWS = [
    ("patience", 4, alerts.all_empty, {"empty": [1.0] * 3}),
    ("window", 11, alerts.reward_follows_length, {"length_correlation": [0.95] * 10}),
    ("kl_times_target", 6.0, alerts.kl_above_budget, {"kl": [0.5] * 3}),
    ("max_kl", 6.0, alerts.kl_above_budget, {"kl": [5.0] * 3}),
    ("max_negative_kl", 0.3, alerts.kl_negative, {"kl": [-0.2] * 3}),
    ("min_entropy", 0.001, alerts.entropy_collapse, {"entropy": [0.008] * 3}),
    ("min_entropy_share", 0.01, alerts.entropy_collapse, {"entropy": [2.0, 0.03, 0.03, 0.03]}),
    ("min_reward_spread", 1e-9, alerts.reward_constant, {"reward_spread": [1e-7] * 3}),
    ("min_differing_groups", 0.01, alerts.equal_groups, {"groups_differing": [0.05] * 3, "groups_kept": 1.0}),
    ("min_kept_groups", 0.01, alerts.few_kept_groups, {"groups_kept": [0.05] * 3}),
    ("max_value_loss_growth", 30.0, alerts.value_error, EXPLODED),
    ("min_explained_variance", -5.0, alerts.value_error, {"explained_variance": [-3.0] * 10}),
    ("max_truncated_share", 1.0, alerts.all_truncated, {"truncated": [0.1, 0.995, 0.995, 0.995]}),
    ("max_equal_answer_share", None, alerts.equal_answers, {"equal_answers": [1.0] * 3}),
    ("max_failed_calls", 0.8, alerts.failed_calls, {"calls": [2.0] * 3, "failed_calls": 1.5}),
    ("unused_tools", False, alerts.unused_tool, {"calls/search": [0.0] * 10}),
    ("max_empty_share", 0.99, alerts.all_empty, {"empty": [0.95] * 3}),
    ("max_duplicate_share", 0.8, alerts.duplicates, {"duplicates": [0.0, 0.7, 0.7, 0.7]}),
    ("max_near_duplicate_share", 0.8, alerts.duplicates, {"near_duplicates": [0.0, 0.7, 0.7, 0.7]}),
    ("max_length_correlation", 0.99, alerts.reward_follows_length, {"length_correlation": [0.95] * 10}),
    ("max_clip_fraction", 0.8, alerts.large_updates, {"clip_fraction": [0.6] * 3}),
    ("max_approx_kl", 0.5, alerts.large_updates, {"approx_kl": [0.3] * 3}),
    ("min_minibatch_episodes", 2, alerts.small_minibatches, {"minibatch_episodes": [2.5] * 3}),
    ("no_learning", False, alerts.no_learning, {"grad_norm": [0.0] * 3}),
]
ELSEWHERE = {"enabled", "max_ratio_gap", "held_out", "max_held_out_fall"}


@pytest.mark.parametrize(("key", "other", "alarm", "signs"), ROWS, ids=[row[0] for row in ROWS])
def test_another_value_silences_the_alarm_and_null_switches_it_off(key, other, alarm, signs):
    target = {"target_kl": 0.1} if key == "kl_times_target" else {}
    assert alarm(history(**signs), context(**target)) is not None
    assert alarm(history(**signs), context(limits={key: other}, **target)) is None
    if "None" in str(DoctorConfig.__dataclass_fields__[key].type):
        assert alarm(history(**signs), context(limits={key: None}, **target)) is None


def test_every_key_has_a_row():
    assert {row[0] for row in ROWS} | ELSEWHERE == set(DoctorConfig.__dataclass_fields__)


def test_a_smaller_fall_can_be_told():
    fallen = followed([0.4, 0.35, 0.33], [None, 0.5, 0.7])
    assert alerts.reward_hacking(fallen, context(modes={KEY: "max"})) is None
    assert alerts.reward_hacking(fallen, context(modes={KEY: "max"}, limits={"max_held_out_fall": 0.1}))


def test_the_block_is_checked_like_all_others(tiny_config):
    tiny_config["doctor"] = {"max_kll": 3, "patience": 0, "held_out": [{"metric": "length/words", "mode": "up"}]}
    with raises_at("doctor.max_kll", "doctor.patience", "doctor.held_out.0.mode", mentions="'max_kl'"):
        parse_config(tiny_config)


@pytest.mark.parametrize("block", [DoctorConfig, HeldOutConfig])
def test_the_page_of_the_doctor_has_every_key_with_its_default(block, repository):
    page = (repository / "docs" / "doctor.md").read_text()
    assert [row for row in table_rows(block) if row not in page] == []
