"""The formulas give the values of the papers' formulas, worked out elsewhere, with gradients."""

import json

import pytest
import torch

from rl4lms_like.core import losses, preference_losses
from rl4lms_like.core.advantages import (
    generalized_advantages,
    group_advantages,
    normalized,
    overlong_penalty,
    returns_to_go,
    rewards_differ,
    whitened,
)
from rl4lms_like.core.objective import action_weights, weighted_mean
from rl4lms_like.core.token_masks import pack, top_k_mask, top_p_mask, with_tokens
from rl4lms_like.core.token_scores import (
    Head,
    masked_scores_of_logits,
    masked_token_scores,
    scores_of_logits,
    token_scores,
)
from rl4lms_like.core.trust_region import conjugate_gradient, largest_step
from rl4lms_like.rollouts.buffer import EpisodeBuffer
from rl4lms_like.rollouts.kl import AdaptiveKLController, HorizonKLController
from tests.builders import episodes_of_lengths


@pytest.fixture(scope="module")
def golden(shared_dir):
    cases = json.loads((shared_dir / "spec" / "golden_vectors.json").read_text())["cases"]
    return {case["id"]: case for case in cases}


def tensors(case, *names):
    return [torch.tensor(case["inputs"][name], dtype=torch.float64) for name in names]


def close(got, expected, mask=None):
    expected = torch.as_tensor(expected, dtype=torch.float64)
    got = torch.as_tensor(got, dtype=torch.float64)
    if mask is not None:
        got, expected = got[mask], expected[mask]
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimators(golden, estimator):
    case = golden["kl_estimators"]
    log_prob, reference, mask = tensors(case, "log_probs", "ref_log_probs", "mask")
    mask = mask.bool()
    log_prob.requires_grad_()
    kl = losses.kl_estimate(log_prob, reference, estimator)
    close(kl.detach(), case["expected"][estimator], mask)
    close(kl[mask].mean().detach(), case["expected"][f"{estimator}_masked_mean"])
    (gradient,) = torch.autograd.grad(kl[mask].mean(), log_prob)
    expected = torch.tensor(case["expected"][f"grad_{estimator}_wrt_logp"], dtype=torch.float64)
    scale = 1.0 if torch.allclose(gradient[mask], expected[mask], atol=1e-6) else float(mask.sum())
    close(gradient * scale, expected, mask)


def test_kl_estimators_over_all_outcomes(golden):
    case = golden["kl_exact_enumeration"]
    logits, reference = tensors(case, "logits", "ref_logits")
    log_prob, ref_log_prob = logits.log_softmax(0), reference.log_softmax(0)
    for name in ("k1", "k2", "k3"):
        expectation = (log_prob.exp() * losses.kl_estimate(log_prob, ref_log_prob, name)).sum()
        close(expectation, case["expected"][f"E_{name}"])


def test_adaptive_kl_controller(golden):
    case = golden["adaptive_kl_kbeta"]
    controller = AdaptiveKLController(0.001, 0.2, gain=0.1)
    seen = []
    for kl in case["inputs"]["observed_kl"]:
        controller.move(kl)
        seen.append(controller.coeff)
    close(seen, case["expected"]["kl_coef_after_each_update"])


def test_horizon_kl_controller(golden):
    case = golden["adaptive_kl_horizon"]
    controller = HorizonKLController(0.2, 6.0, horizon=10_000)
    seen = []
    for kl in case["inputs"]["observed_kl"]:
        controller.move(kl, 256)
        seen.append(controller.coeff)
    close(seen, case["expected"]["kl_coef_after_each_update"])


def test_kl_in_the_reward(golden):
    case = golden["kl_in_reward"]
    log_prob, reference, mask = tensors(case, "log_probs", "ref_log_probs", "mask")
    scores = torch.tensor(case["inputs"]["scores"], dtype=torch.float64)
    rewards = torch.zeros_like(log_prob)
    last = mask.sum(1).long() - 1
    rewards[torch.arange(len(last)), last] = scores
    rewards -= case["params"]["kl_coef"] * losses.kl_estimate(log_prob, reference)
    close(rewards, case["expected"]["token_rewards"], mask.bool())


def test_gae_of_padded_episodes(golden):
    case = golden["gae_right_padded"]
    rewards, values, mask = tensors(case, "rewards", "values", "mask")
    advantages, returns = generalized_advantages(rewards, values, mask, gamma=1.0, gae_lambda=0.95)
    close(advantages, case["expected"]["advantages"], mask.bool())
    close(returns, case["expected"]["returns"], mask.bool())
    close(whitened(advantages, mask), case["expected"]["advantages_whitened_unbiased"], mask.bool())
    close(whitened(advantages, mask, unbiased=False), case["expected"]["advantages_whitened_biased"], mask.bool())
    advantages, _ = generalized_advantages(rewards, values, mask, gamma=0.97, gae_lambda=0.9)
    close(advantages, case["expected"]["advantages_gamma097_lam09"], mask.bool())


def test_gae_skips_tokens_that_are_not_the_policys(golden):
    case = golden["gae_tool_hole"]
    rewards, values, mask = tensors(case, "rewards", "values", "mask")
    advantages, returns = generalized_advantages(rewards, values, mask, gamma=0.9, gae_lambda=0.8)
    close(advantages, case["expected"]["advantages_skip"], mask.bool())
    close(returns, case["expected"]["returns_skip"], mask.bool())


def test_gae_of_a_flat_rollout_with_a_value_after_its_end(golden):
    case = golden["gae_flat_episode_starts"]
    rewards, values = tensors(case, "rewards", "values")
    for last_values, key in (([0.0, 0.7], "advantages"), ([0.0, 0.0], "advantages_done")):
        buffer = EpisodeBuffer(gamma=0.99, gae_lambda=0.95)
        buffer.add(episodes_of_lengths([2, 3]), rewards, values, torch.zeros(5), torch.tensor(last_values))
        buffer.compute_returns_and_advantage()
        torch.testing.assert_close(buffer.advantages, torch.tensor(case["expected"][key]), atol=2e-5, rtol=2e-5)


def test_normalised_advantages_are_stable_baselines3s(golden):
    case = golden["masked_whiten"]
    values, mask = tensors(case, "values", "mask")
    close(whitened(values, mask), case["expected"]["unbiased"], mask.bool())
    expected = torch.tensor(case["expected"]["sb3_style"], dtype=torch.float64)
    close(normalized(values[mask.bool()]), expected[mask.bool()] if expected.ndim == 2 else expected)


def test_ppo_clip(golden):
    for name, high, value, gradient in (
        ("ppo_clip", 0.2, "token-mean", "grad_token-mean"),
        ("ppo_clip_higher_token_mean", 0.28, "loss", "grad"),
    ):
        case = golden[name]
        log_prob, old, advantages, mask = tensors(case, "log_probs", "old_log_probs", "advantages", "mask")
        mask = mask.bool()
        log_prob.requires_grad_()
        loss = losses.clipped_surrogate((log_prob - old)[mask], advantages[mask], 0.2, high).mean()
        close(loss.detach(), case["expected"][value])
        close(torch.autograd.grad(loss, log_prob)[0], case["expected"][gradient], mask)
    case = golden["ppo_clip"]
    log_prob, old, advantages, mask = tensors(case, "log_probs", "old_log_probs", "advantages", "mask")
    for aggregation in ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm"):
        chosen, key = mask.bool(), aggregation.replace("_", "-")
        weights = action_weights(chosen.sum(dim=1), aggregation, norm=chosen.shape[1])
        log_prob.requires_grad_()
        term = losses.clipped_surrogate((log_prob - old)[chosen], advantages[chosen], 0.2)
        loss = weighted_mean("policy", term, weights)
        close(loss.detach(), case["expected"][key])
        close(torch.autograd.grad(loss, log_prob)[0], case["expected"][f"grad_{key}"], chosen)
    log_prob = log_prob.detach()
    close(losses.approximate_kl((log_prob - old)[mask.bool()]), case["expected"]["approx_kl_k3"])


def test_dual_clip(golden):
    case = golden["ppo_dual_clip"]
    old, advantages, mask = tensors(case, "old_log_probs", "advantages", "mask")
    check_loss(
        case,
        lambda log_prob: losses.clipped_surrogate(
            (log_prob - old)[mask.bool()], advantages[mask.bool()], 0.2, dual_clip=3.0
        ),
        loss="token_mean",
    )


# --- critic-free algorithms -------------------------------------------------------------------------------------------


def check_loss(case, term, aggregation="token_mean", norm=None, loss="loss", gradient="grad"):
    """Compare a loss, whose terms per action are `term(log_prob)`, and its gradient."""
    log_prob, mask = tensors(case, "log_probs", "mask")
    mask = mask.bool()
    log_prob.requires_grad_()
    total = weighted_mean("policy", term(log_prob), action_weights(mask.sum(dim=1), aggregation, norm))
    close(total.detach(), case["expected"][loss])
    if gradient is not None:
        close(torch.autograd.grad(total, log_prob)[0], case["expected"][gradient], mask)


def flat(case):
    """Return old log-probs, advantages and mask, and the lengths of the episodes."""
    old, advantages, mask = tensors(case, "old_log_probs", "advantages", "mask")
    return old, advantages[mask.bool()], mask.bool(), mask.sum(dim=1).long()


@pytest.mark.parametrize(
    ("name", "key", "options"),
    [
        ("grpo_advantage", "unbiased_eps0.0001", {"scale": "group", "eps": 1e-4}),
        ("grpo_advantage", "unbiased_eps1e-06", {"scale": "group", "eps": 1e-6}),
        ("grpo_advantage", "unbiased_eps1e-09", {"scale": "group", "eps": 1e-9}),
        ("drgrpo_advantage", "advantages", {}),
        ("grpo_batch_std_advantage", "advantages", {"scale": "batch", "eps": 1e-4}),
        ("rloo_advantage", "advantages", {"baseline": "leave_one_out"}),
        ("opo_advantage", "advantages", {"baseline": "length_weighted"}),
    ],
)
def test_advantages_within_groups(golden, name, key, options):
    case = golden[name]
    (rewards,) = tensors(case, "rewards")
    lengths = torch.tensor(case["inputs"].get("lengths", [1.0] * len(rewards)))
    groups = torch.tensor(case["inputs"]["group"])
    close(group_advantages(rewards, groups, lengths=lengths, **options), case["expected"][key])


def test_maximum_likelihood_advantages():
    """MaxRL, arXiv 2602.02710: (r - mean) / mean; 0 where no response of the group succeeds."""
    rewards, groups = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0]), [7, 7, 7, 7, 2, 2, 2, 2, 5, 5]
    expected = [3.0, -1.0, -1.0, -1.0, 1 / 3, 1 / 3, -1.0, 1 / 3, 0.0, 0.0]
    close(group_advantages(rewards.double(), torch.tensor(groups), scale="mean"), expected)


def test_the_length_weighted_baseline():
    """OPO, arXiv 2505.23585, eq. 9: sum of l r / sum of l."""
    rewards, lengths = torch.tensor([1.0, 0.0, 0.5]).double(), torch.tensor([2, 6, 4])
    baseline = (2 * 1.0 + 6 * 0.0 + 4 * 0.5) / 12
    groups = torch.zeros(3).long()
    found = group_advantages(rewards, groups, baseline="length_weighted", lengths=lengths)
    close(found, [1.0 - baseline, -baseline, 0.5 - baseline])


def test_reinforce_pp_advantages(golden):
    case = golden["reinforce_pp_advantage"]
    rewards, mask = tensors(case, "token_rewards", "mask")
    returns = returns_to_go(rewards, mask, gamma=0.9)
    close(returns, case["expected"]["returns"], mask.bool())
    close(whitened(returns, mask), case["expected"]["unbiased"], mask.bool())
    close(whitened(returns, mask, unbiased=False), case["expected"]["biased"], mask.bool())
    case = golden["reinforce_pp_baseline_advantage"]
    rewards, mask = tensors(case, "rewards", "mask")
    advantages = group_advantages(rewards, torch.tensor(case["inputs"]["group"]))[:, None] * mask
    close(whitened(advantages, mask), case["expected"]["unbiased"], mask.bool())


def test_groups_that_are_kept(golden):
    case = golden["dapo_dynamic_sampling"]
    (rewards,) = tensors(case, "rewards")
    kept = rewards_differ(rewards, torch.tensor(case["inputs"]["group"]))
    assert kept[:: case["params"]["G"]].tolist() == case["expected"]["keep_group"]


def test_penalty_of_long_responses(golden):
    case = golden["dapo_overlong"]
    close(overlong_penalty(torch.tensor(case["inputs"]["lengths"]), 20, 5), case["expected"]["penalty"])


def test_grpo_loss(golden):
    case = golden["grpo_loss_k3"]
    old, advantages, mask, _ = flat(case)
    (reference,) = tensors(case, "ref_log_probs")
    check_loss(
        case,
        lambda log_prob: (
            losses.clipped_surrogate((log_prob - old)[mask], advantages, 0.2)
            + 0.04 * losses.kl_estimate(log_prob[mask], reference[mask], "k3")
        ),
        "seq_mean_token_mean",
    )
    case = golden["drgrpo_loss"]
    check_loss(
        case,
        lambda log_prob: losses.clipped_surrogate((log_prob - old)[mask], advantages, 0.2),
        "seq_mean_token_sum_norm",
        case["params"]["L"],
    )


def test_gspo_loss(golden):
    case = golden["gspo_loss"]
    old, advantages, mask, lengths = flat(case)
    (log_prob,) = tensors(case, "log_probs")
    ratio = losses.sequence_log_ratio((log_prob - old)[mask], lengths).exp()
    close(ratio[lengths.cumsum(0) - 1], case["expected"]["seq_ratio"])
    for low, high, suffix in ((3e-4, 4e-4, ""), (0.2, 0.2, "_clip02")):

        def term(log_prob, low=low, high=high):
            ratio = losses.sequence_log_ratio((log_prob - old)[mask], lengths)
            return losses.clipped_surrogate(ratio, advantages, low, high)

        check_loss(case, term, "seq_mean_token_mean", loss=f"loss{suffix}", gradient=f"grad{suffix}")


def test_gmpo_loss(golden):
    case = golden["gmpo_loss"]
    old, advantages, mask, lengths = flat(case)
    for clip, suffix in ((0.2, ""), (0.39, "_04")):

        def term(log_prob, clip=clip):
            return losses.geometric_mean_surrogate((log_prob - old)[mask], advantages, lengths, clip, clip)

        check_loss(case, term, "seq_mean_token_mean", loss=f"loss{suffix}", gradient=f"grad{suffix}")


def test_cpgd_and_cispo_losses(golden):
    case = golden["cpgd_loss"]
    old, advantages, mask, _ = flat(case)
    check_loss(
        case,
        lambda log_prob: losses.cpgd((log_prob - old)[mask], advantages, 0.2, 0.2),
        "seq_mean_token_mean",
        loss="loss_log_ratio_form",
    )
    case = golden["cispo_loss"]
    check_loss(case, lambda log_prob: losses.cispo(log_prob[mask], (log_prob - old)[mask], advantages, 1.2))


def test_importance_corrections(golden):
    case = golden["rollout_correction"]
    old, advantages, mask, lengths = flat(case)
    (behavior,) = tensors(case, "rollout_log_probs")
    limits = case["params"]
    for kind, key, place in (
        ("tis", "tis", "tis"),
        ("icepop", "icepop", "icepop"),
        ("sequence_mask", "seq_mask_tis", "seq_mask"),
    ):
        low, high = limits[f"{place}_low"], limits[f"{place}_high"]
        weights = losses.correction_weights((old - behavior)[mask], lengths, kind, low, high)
        expected = torch.tensor(case["expected"][f"{key}_weight"], dtype=torch.float64)[mask]
        close(weights, expected)

        def term(log_prob, weights=weights):
            return weights * losses.clipped_surrogate((log_prob - old)[mask], advantages, 0.2)

        check_loss(case, term, loss=f"loss_{key}", gradient=None)


def test_value_losses(golden):
    case = golden["value_loss_clipped"]
    values, old, returns, mask = tensors(case, "values", "old_values", "returns", "mask")
    mask = mask.bool()
    loss = losses.value_error(values[mask], returns[mask], old[mask], 0.2).mean()
    close(loss, case["expected"]["sb3_mse_of_clipped"])


def test_a2c_loss(golden):
    case = golden["a2c_loss"]
    log_prob, advantages, returns, values, entropy = tensors(
        case, "log_probs", "advantages", "returns", "values", "entropy"
    )
    loss = (
        losses.policy_gradient(log_prob, advantages).mean()
        + case["params"]["vf_coef"] * losses.value_error(values, returns).mean()
        - case["params"]["ent_coef"] * entropy.mean()
    )
    close(loss, case["expected"]["loss"])


def test_trust_region_step(golden):
    case = golden["trpo_step"]
    hessian, gradient = tensors(case, "hessian", "gradient")
    target_kl, damping = case["params"]["target_kl"], case["params"]["cg_damping"]
    solution = conjugate_gradient(lambda v: hessian @ v + damping * v, gradient, max_steps=10)
    close(solution.x, case["expected"]["search_direction"])
    close(largest_step(solution, gradient, target_kl), case["expected"]["max_step"])


def test_log_probs_and_entropy_of_extreme_logits(golden):
    case = golden["logprob_entropy"]
    (logits,) = tensors(case, "logits")
    labels = torch.tensor(case["inputs"]["labels"])
    identity = Head(torch.eye(logits.shape[1]))
    for log_prob, entropy in (
        scores_of_logits(logits, labels),
        token_scores(logits.float(), identity, labels, logits_budget=100),
    ):
        torch.testing.assert_close(log_prob, torch.tensor(case["expected"]["log_probs"]), atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(entropy, torch.tensor(case["expected"]["entropy"]), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("expected", "least"), [("mask_top_p_keep1", 1), ("mask_top_p_keep4", 4)])
def test_the_tokens_that_top_p_allows(golden, expected, least):
    """One meaning for both families: `min_tokens_to_keep` tokens, the special ones beside them."""
    case = golden["nlpo_masking"]
    (logits,) = tensors(case, "mask_model_logits")
    mask = with_tokens(top_p_mask(logits, case["params"]["top_p"], least), case["inputs"]["special_ids"])
    assert mask.tolist() == case["expected"][expected]


def test_the_tokens_that_top_k_allows(golden):
    case = golden["nlpo_masking"]
    (logits,) = tensors(case, "mask_model_logits")
    mask = with_tokens(top_k_mask(logits, case["params"]["top_k"]), case["inputs"]["special_ids"])
    assert mask.tolist() == case["expected"]["mask_top_k"]


def test_masked_and_raw_log_probs(golden):
    case = golden["nlpo_masking"]
    (logits,) = tensors(case, "policy_logits")
    actions = torch.tensor(case["inputs"]["actions"])
    allowed = pack(torch.tensor(case["expected"]["mask_top_p_keep1"]))
    identity = Head(torch.eye(logits.shape[1]))
    for scores in (
        masked_scores_of_logits(logits, actions, allowed),
        masked_token_scores(logits.float(), identity, actions, allowed, logits_budget=6),
    ):
        close(scores.log_prob, case["expected"]["masked_log_prob"])
        close(scores.raw_log_prob, case["expected"]["raw_log_prob"])


def pairs_of(case):
    chosen, rejected, ref_chosen, ref_rejected = tensors(
        case, "policy_chosen", "policy_rejected", "ref_chosen", "ref_rejected"
    )
    chosen.requires_grad_()
    return chosen, chosen - ref_chosen, rejected - ref_rejected


def test_dpo_and_its_variants(golden):
    case = golden["dpo_loss"]
    beta, smoothing = case["params"]["beta"], case["params"]["label_smoothing"]
    policy, chosen, rejected = pairs_of(case)
    loss = preference_losses.dpo_loss(chosen, rejected, beta)
    close(loss.detach(), case["expected"]["per_sample"])
    (gradient,) = torch.autograd.grad(loss.mean(), policy, retain_graph=True)
    close(gradient, case["expected"]["grad_policy_chosen"])
    close(preference_losses.dpo_loss(chosen, rejected, beta, smoothing).mean(), case["expected"]["cdpo_loss"])
    close(preference_losses.robust_dpo_loss(chosen, rejected, beta, smoothing).mean(), case["expected"]["robust_loss"])
    close(preference_losses.hinge_loss(chosen, rejected, beta).mean(), case["expected"]["hinge_loss"])


def test_ipo_with_sums_and_means(golden):
    case = golden["ipo_loss"]
    _, chosen, rejected = pairs_of(case)
    beta, (n_chosen, n_rejected) = case["params"]["beta"], tensors(case, "len_chosen", "len_rejected")
    close(preference_losses.ipo_loss(chosen, rejected, beta).mean(), case["expected"]["loss_sum"])
    means = chosen / n_chosen, rejected / n_rejected
    close(preference_losses.ipo_loss(*means, beta).mean(), case["expected"]["loss_length_avg"])


def test_kto(golden):
    case = golden["kto_loss"]
    chosen, rejected, policy, reference = tensors(case, "chosen_logratios", "rejected_logratios", "kl_policy", "kl_ref")
    z0 = preference_losses.kto_reference_point(policy - reference)
    close(z0, case["expected"]["z0"])
    is_desirable = torch.arange(len(chosen) + len(rejected)) < len(chosen)
    loss = preference_losses.kto_loss(torch.cat([chosen, rejected]), is_desirable, z0, case["params"]["beta"])
    close(loss[is_desirable], case["expected"]["chosen_losses"])
    close(loss[~is_desirable], case["expected"]["rejected_losses"])
    weights = torch.where(is_desirable, case["params"]["desirable_weight"], case["params"]["undesirable_weight"])
    close((weights * loss).mean(), case["expected"]["loss"])


def test_orpo(golden):
    case = golden["orpo_loss"]
    chosen, rejected = tensors(case, "chosen_avg_logp", "rejected_avg_logp")
    close(preference_losses.log_odds_ratio(chosen, rejected), case["expected"]["log_odds"])
    nll = torch.tensor(case["inputs"]["chosen_nll"], dtype=torch.float64)
    loss = preference_losses.orpo_loss(chosen, rejected, nll, case["params"]["beta"])
    close(loss.mean(), case["expected"]["loss"])


def test_simpo(golden):
    case = golden["simpo_loss"]
    beta = case["params"]["beta"]
    gamma = beta * case["params"]["gamma_beta_ratio"]
    scores = tensors(case, "chosen_avg_logp", "rejected_avg_logp")
    close(preference_losses.simpo_loss(*scores, beta, gamma).mean(), case["expected"]["loss"])


def test_reward_model(golden):
    case = golden["reward_model_loss"]
    chosen, rejected, margin = tensors(case, "chosen", "rejected", "margin")
    expected = case["expected"]
    close(preference_losses.bradley_terry_loss(chosen, rejected).mean(), expected["loss"])
    close(preference_losses.bradley_terry_loss(chosen, rejected, margin).mean(), expected["loss_margin"])
    close(preference_losses.bradley_terry_loss(chosen, rejected, 0.0, 0.01).mean(), expected["loss_center_0p01"])
