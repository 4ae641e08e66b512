"""Each alarm of updates fires on a made case and is quiet just below its threshold."""

from __future__ import annotations

import pytest

from rl4lms_like.on_policy.doctor import alerts
from tests.on_policy.doctor.histories import context, history


def test_a_ratio_off_one_is_told_at_once_with_its_cause():
    found = alerts.ratio_gap(history(ratio_gap=[1e-6, 2e-3]), context())
    assert "0.002" in found.message and found.advice == "Likely cause: a cause"
    assert alerts.ratio_gap(history(ratio_gap=[2e-3, 1e-3]), context()) is None
    assert alerts.ratio_gap(history(ratio_gap=[9.0]), context(max_ratio_gap=None)) is None


def test_a_kl_above_a_multiple_of_its_target_is_told_after_some_patience():
    targeted = context(target_kl=0.1)
    found = alerts.kl_above_budget(history(kl=[0.1, 0.31, 0.4, 0.5]), targeted)
    assert "3 times the target of 0.1" in found.message and "0.31, 0.4, 0.5" in found.message
    assert "alg.kl_div.coeff" in found.advice and found.evidence["kl"] == [0.31, 0.4, 0.5]
    assert alerts.kl_above_budget(history(kl=[0.31, 0.4, 0.3, 0.4, 0.5]), targeted) is None
    assert alerts.kl_above_budget(history(kl=[0.1, 0.4, 0.5]), targeted) is None, "two iterations"


def test_a_target_per_sequence_is_held_against_whole_responses():
    horizon = context(target_kl=2.0, kl_per_sequence=True)
    assert "nats per response" in alerts.kl_above_budget(history(kl=[0.31] * 3, length=20.0), horizon).message
    assert alerts.kl_above_budget(history(kl=[0.31] * 3, length=19.0), horizon) is None


def test_without_a_target_the_limit_is_absolute():
    assert "doctor.max_kl, 2.5" in alerts.kl_above_budget(history(kl=[2.6] * 3), context()).message
    assert alerts.kl_above_budget(history(kl=[2.4] * 3), context()) is None
    assert alerts.kl_above_budget(history(kl=[4.1] * 3), context(limits={"max_kl": None})) is None
    assert alerts.kl_above_budget(history(kl=[None] * 3), context()) is None, "no reference"


def test_an_estimated_kl_below_zero_is_no_kl():
    assert "generation_kwargs" in alerts.kl_negative(history(kl=[-0.11, -0.2, -0.3]), context()).advice
    assert alerts.kl_negative(history(kl=[-0.09, -0.2, -0.3]), context()) is None
    masked = alerts.kl_negative(history(kl=[-0.11, -0.2, -0.3]), context(is_masked=True))
    assert masked.advice.startswith("The mask restricts sampling: raise alg.policy.args.top_mask")
    taken = context(estimates_kl=False)
    assert alerts.kl_negative(history(kl=[-0.11, -0.2, -0.3]), taken) is None, "the advice was followed"


@pytest.mark.parametrize(("first", "later", "limit"), [(2.0, 0.03, 0.04), (0.1, 0.009, 0.01)])
def test_entropy_is_held_against_its_start_and_an_absolute_limit(first, later, limit):
    found = alerts.entropy_collapse(history(entropy=[first, later, later, later]), context())
    assert found.evidence == {"entropy": [later] * 3, "limit": pytest.approx(limit), "first": first}
    assert alerts.entropy_collapse(history(entropy=[first] + [limit * 1.01] * 3), context()) is None
    assert alerts.entropy_collapse(history(entropy=[first, later, later, first]), context()) is None


def test_without_a_limit_no_entropy_is_too_small():
    off = context(limits={"min_entropy": None, "min_entropy_share": None})
    assert alerts.entropy_collapse(history(entropy=[2.0] + [-1e-8] * 3), off) is None  # 0, up to rounding


def test_who_is_certain_of_the_best_reward_with_another_text_for_each_prompt_is_done_not_ill():
    solved = {"entropy": [2.0, 0.01, 0.01, 0.01], "reward_spread": [0.5, 0.0, 0.0, 0.0], "best_reward": 1.0}
    solved["reward"] = [0.4, 1.0, 1.0, 1.0]
    assert alerts.entropy_collapse(history(**solved, duplicates=0.5), context()) is None
    assert alerts.entropy_collapse(history(**solved, duplicates=0.6), context()) is not None, "one text for most"
    assert alerts.entropy_collapse(history(**solved, duplicates=None), context()) is not None, "one prompt"
    solved["best_reward"] = 1.5
    assert alerts.entropy_collapse(history(**solved, duplicates=0.5), context()) is not None, "there was better"


def test_a_value_loss_explodes_where_it_exceeds_all_that_is_paid():
    long = [0.1] * 10 + [1.1, 1.2, 1.3]
    for explained in (-0.5, 0.1):  # of an exploded critic it is around 0: its returns have its values in them
        found = alerts.value_error(history(value_loss=long, explained_variance=explained), context())
        assert "10 times its median before, 0.1" in found.message
    paid = {"reward": [0.5] * 10 + [1.0] * 3, "reward_std": 0.2}
    assert alerts.value_error(history(value_loss=long, **paid), context()) is not None, "1.04 is paid at last"
    paid["reward"] = [0.5] * 10 + [1.2] * 3
    assert alerts.value_error(history(value_loss=long, **paid), context()) is None, "returns grew"
    assert alerts.value_error(history(value_loss=long, kl_reward=-1.2), context()) is None, "by the KL"
    assert alerts.value_error(history(value_loss=[0.1] * 10 + [0.9] * 3), context()) is None
    assert alerts.value_error(history(value_loss=[0.1] * 4 + [1.1] * 3), context()) is None, "too early"


def test_with_a_normed_reward_the_critic_errs_in_standard_deviations():
    exploded = history(value_loss=[0.1] * 10 + [6.0] * 3)  # 0.5 ± 0.2 is 2.5 ± 1 then
    assert alerts.value_error(exploded, context()) is not None
    assert alerts.value_error(exploded, context(norm_reward=True)) is None
    assert alerts.value_error(history(value_loss=[0.1] * 10 + [7.5] * 3), context(norm_reward=True)) is not None
    equal = history(value_loss=[0.1] * 10 + [6.0] * 3, reward_std=1e-9)  # which the collector does not divide by
    assert alerts.value_error(equal, context(norm_reward=True)) is not None


def test_an_iteration_without_a_value_loss_does_not_mix_before_and_after():
    holes = [0.1] * 2 + [None] * 7 + [0.1] + [2.0] * 3
    assert alerts.value_error(history(value_loss=holes), context()).evidence["before"] == 0.1


@pytest.mark.parametrize("signs", [{"n_episodes": 7.0}, {"reward_spread": 0.0}, {"reward_spread": [0.5, 0.0] * 5}])
def test_returns_without_variance_need_not_be_explained(signs):
    assert alerts.value_error(history(explained_variance=[-3.0] * 10, **signs), context()) is None


def test_an_explained_variance_that_stays_far_below_zero_is_told_unless_it_gets_better():
    staying = history(explained_variance=[-3.0] * 10)
    assert "below -1 for 10 iterations" in alerts.value_error(staying, context()).message
    better = history(explained_variance=[-8.0 + 0.5 * k for k in range(10)])
    assert alerts.value_error(better, context()) is None
    assert alerts.value_error(history(explained_variance=[-3.0] * 9 + [-0.9]), context()) is None


def test_a_critic_that_hardly_learns_is_not_to_learn_more_slowly():
    """Where the rate is small, the critic stays where its first weights are; a smaller rate would keep it there."""
    slow = history(
        explained_variance=[-1.5] * 10, value_loss=[0.17, 0.17, 0.14, 0.12, 0.12, 0.1, 0.09, 0.1, 0.11, 0.12]
    )
    assert "raise alg.args.critic_learning_rate" in alerts.value_error(slow, context()).advice
    own = context(critic_keys="alg.args.vf_coef")
    assert "raise alg.args.learning_rate" in alerts.value_error(slow, own).advice
    jumping = history(explained_variance=[-30.0] * 10, value_loss=[0.2, 21.0, 4.0, 1.0, 9.0, 0.3, 14.0, 0.5, 7.0, 2.0])
    assert "Lower alg.args.critic_learning_rate" in alerts.value_error(jumping, context()).advice


def test_small_updates_that_clip_most_tokens_need_a_wider_range():
    tiny = alerts.large_updates(history(clip_fraction=[0.9] * 3, approx_kl=[0.02, 0.004, 0.001]), context())
    assert "raise alg.args.clip_range" in tiny.advice and "Lower" not in tiny.advice
    large = alerts.large_updates(history(clip_fraction=[0.9] * 3, approx_kl=[0.1] * 3), context())
    assert large.advice.startswith("Lower alg.args.learning_rate")


def test_steps_that_were_left_out_are_counted():
    found = alerts.non_finite(history(skipped_steps=[0.0, 2.0, 5.0]), context())
    assert found.message.startswith("3 steps of this update were skipped, 5 in total")
    assert alerts.non_finite(history(skipped_steps=[0.0, 2.0, 2.0]), context()) is None
    assert alerts.non_finite(history(n=3), context()) is None
    assert alerts.non_finite(history(skipped_steps=[1.0]), context()) is not None, "in the first iteration"


def test_updates_that_go_far_are_told():
    assert "fraction of clipped tokens" in alerts.large_updates(history(clip_fraction=[0.6] * 3), context()).message
    assert alerts.large_updates(history(clip_fraction=[0.6, 0.5, 0.6]), context()) is None
    assert "KL of an update" in alerts.large_updates(history(approx_kl=[0.3] * 3), context()).message
    assert alerts.large_updates(history(approx_kl=[0.19] * 3), context()) is None


def test_updates_that_change_nothing_are_told():
    assert "the gradient has been 0" in alerts.no_learning(history(grad_norm=[0.0] * 3), context()).message
    assert alerts.no_learning(history(grad_norm=[0.0, 0.0, 1e-9]), context()) is None
    assert "cg_damping" in alerts.no_learning(history(step_taken=[0.0] * 3), context()).advice
    assert alerts.no_learning(history(step_taken=[0.0, 1.0, 0.0]), context()) is None
    left_out = history(step_taken=[0.0] * 3, skipped_steps=[1.0, 2.0, 3.0])
    assert alerts.no_learning(left_out, context()) is None, "no step was tried"
    assert alerts.no_learning(history(step_taken=[0.0] * 3, skipped_steps=[2.0] * 3), context()) is not None
    assert alerts.no_learning(history(grad_norm=[0.0] * 3), context(limits={"no_learning": False})) is None


def test_minibatches_of_few_episodes_are_reported_with_the_size_that_holds_enough():
    small = history(minibatch_episodes=[2.0, 1.5, 1.0], length=48.0, optimizer_steps=150.0)
    found = alerts.small_minibatches(small, context(rl4lms_steps=100))
    assert found.evidence == {"minibatch_episodes": [2.0, 1.5, 1.0], "limit": 4.0}
    assert "150 optimizer steps, in RL4LMs with the same values 100" in found.message
    assert "alg.args.batch_size" in found.advice and "192" in found.advice
    assert "env.n_envs" in alerts.small_minibatches(small, context(minibatch_key=None)).advice
    assert alerts.small_minibatches(history(minibatch_episodes=[2.0, 4.0, 1.0]), context()) is None
    assert alerts.small_minibatches(history(minibatch_episodes=[None] * 3), context()) is None, "not logged"
