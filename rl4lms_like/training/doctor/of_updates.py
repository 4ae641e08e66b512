"""Alerts on updates: ratio, KL, entropy, critic, step size, values that are not finite."""

from __future__ import annotations

import math
from statistics import median

from rl4lms_like.rollouts.collector import EQUAL
from rl4lms_like.training.doctor.findings import Case, Finding, all_above, all_below, listed
from rl4lms_like.training.doctor.history import History
from rl4lms_like.training.doctor.of_rollouts import is_solved
from rl4lms_like.training.doctor.signs import FEWEST_EPISODES, Signs

MANY_ALIKE = 0.5
"""Fraction of the most frequent response above which responses are assumed to ignore their prompts."""

CRITIC_ADVICE = (
    "Lower {}, use alg.policy.args.value_head_init: zero, or scale the reward (alg.kl_div.norm_reward: true)"
)

SLOW_CRITIC_ADVICE = (
    "Its loss hardly changes: raise {}, use alg.policy.args.value_head_init: zero, or scale the reward "
    "(alg.kl_div.norm_reward: true)"
)

STANDS_STILL = 3.0
"""Ratio of largest to smallest value loss below which the critic is too slow. Too large steps vary the loss more."""

SMALL_KL = 0.005
"""Small KL of an update, nats per token. At 0.01 and above, half of the tokens leave a clip range of 0.2."""

STOP_EARLY = ", or stop large updates early: alg.args.target_kl (0.02)"

GETS_BETTER = 0.25
"""Relative decrease of 1 - explained variance within a window from which the critic is considered to be learning."""


def ratio_gap(history: History, case: Case) -> Finding | None:
    """Detect that the first ratio of an update is not 1.

    Rollout and update then compute different log-probs for the same tokens, so that every gradient is off-policy.
    Huang et al., "The 37 implementation details of PPO" (2022), use this number for debugging.
    """
    gaps = history.last("ratio_gap", 1)
    if case.max_ratio_gap is None or not all_above(gaps, case.max_ratio_gap):
        return None
    return Finding(
        f"the first minibatch's ratio differs from 1 by {gaps[0]:.2g}, more than rounding ({case.max_ratio_gap:g}): "
        f"the update starts from other log-probs than the rollout's",
        f"Likely cause: {case.ratio_cause}",
        {"ratio_gap": gaps[0], "allowed": case.max_ratio_gap},
    )


def kl_above_budget(history: History, case: Case) -> Finding | None:
    """Detect that the KL to the reference stays far above its target, or above an absolute limit if there is no target.

    The reward then comes from text that is unlikely under the reference. With growing distance, the true reward falls
    while the learned one rises (Gao et al., arXiv 2210.10760).
    """
    limits = case.limits
    kls, unit = history.last("kl", limits.patience), "nats per token"
    if case.target_kl is None:
        if limits.max_kl is None or not all_above(kls, limits.max_kl):
            return None
        budget, said = limits.max_kl, f"doctor.max_kl, {limits.max_kl:g}"
    else:
        if limits.kl_times_target is None:
            return None
        if case.kl_per_sequence:
            lengths = history.last("length", limits.patience)
            kls = [kl * length for kl, length in zip(kls, lengths, strict=False)]
            unit = "nats per response"
        budget = limits.kl_times_target * case.target_kl
        said = f"{limits.kl_times_target:g} times the target of {case.target_kl:g}"
    if not all_above(kls, budget):
        return None
    return Finding(
        f"the KL to the reference has been above {said} {unit} for {len(kls)} iterations: {listed(kls)}",
        f"Raise alg.kl_div.coeff (or gain, of an adaptive controller), or lower {case.step_keys}",
        {"kl": kls, "budget": budget},
    )


def kl_negative(history: History, case: Case) -> Finding | None:
    """Detect that the estimated KL is negative, although a KL divergence cannot be.

    The expectation of log p - log p_ref under the policy's own samples is at least 0. If it is negative for several
    iterations, generation arguments change the sampling distribution. The penalty then rewards drift from the
    reference, unless its estimator is never negative.
    """
    limit = case.limits.max_negative_kl
    kls = history.last("kl", case.limits.patience)
    if limit is None or not case.estimates_kl or not all_below(kls, -limit):
        return None
    mask = (
        "The mask restricts sampling: raise alg.policy.args.top_mask, or update the mask model more often "
        "(alg.policy.args.target_update_iterations). "
    )
    return Finding(
        f"the estimated KL to the reference has been below -{limit:g} nats per token for {len(kls)} iterations: "
        f"{listed(kls)}",
        f"{mask if case.is_masked else ''}Sample from the policy itself: top_k: 0, top_p: 1, temperature: 1 and no "
        "min_length in alg.policy.args.generation_kwargs; or use alg.kl_div.estimator: k3, which is never negative",
        {"kl": kls, "limit": -limit},
    )


def entropy_collapse(history: History, case: Case) -> Finding | None:
    """Detect that the entropy is near 0, or a small fraction of its initial value.

    The policy no longer explores, and the texts for all prompts become alike. Mnih et al. (arXiv 1602.01783) add the
    entropy bonus against it. A deterministic policy that gets the best reward, with different texts for different
    prompts, has solved its task and gives no alert.
    """
    limits, start = case.limits, history.first.get("entropy")
    values = history.last("entropy", limits.patience)
    bounds = [] if limits.min_entropy is None else [limits.min_entropy]
    if limits.min_entropy_share is not None and start is not None:
        bounds.append(limits.min_entropy_share * start)
    if start is None or not bounds or not all_below(values, max(bounds)):
        return None
    alike = history.last("duplicates", limits.patience)
    if alike and max(alike) <= MANY_ALIKE and is_solved(history, case):
        return None
    return Finding(
        f"the entropy has been below {max(bounds):.3g} nats per token for {len(values)} iterations: {listed(values)}; "
        f"in the first iteration it was {start:.3g}",
        f"Raise alg.kl_div.coeff or alg.args.ent_coef (for example from 0 to 0.01), or lower {case.step_keys}",
        {"entropy": values, "limit": max(bounds), "first": start},
    )


def value_error(history: History, case: Case) -> Finding | None:
    """Detect a critic worse than a constant: its loss explodes, or its explained variance stays far below 0.

    Advantages then contain the critic's error in addition to noise. A loss that grows with the rewards is no alert: it
    must exceed the mean square of the rewards, which is the loss of a critic that always predicts 0. The explained
    variance is ignored if rewards are equal or episodes are few, because there is no variance to explain.
    """
    return _exploded(history, case) or _unexplained(history, case)


def _exploded(history: History, case: Case) -> Finding | None:
    limits = case.limits
    losses = history.last("value_loss", limits.patience)
    known = history.known("value_loss", limits.patience + limits.window)
    paid = [_mean_square(signs, case) for signs in history.recent[-limits.patience :]]
    before = known[: len(known) - limits.patience]
    if limits.max_value_loss_growth is None or not losses or not before:
        return None
    usual = median(before)
    if not all_above(losses, limits.max_value_loss_growth * usual):
        return None
    if any(mean_square is None or loss <= mean_square for loss, mean_square in zip(losses, paid, strict=True)):
        return None
    return Finding(
        f"the value loss has been above {limits.max_value_loss_growth:g} times its median before, {usual:.3g}, for "
        f"{len(losses)} iterations: {listed(losses)}; a critic that always predicts 0 would be better",
        CRITIC_ADVICE.format(case.critic_keys),
        {"value_loss": losses, "before": usual, "explained_variance": history.last("explained_variance", len(losses))},
    )


def _mean_square(signs: Signs, case: Case) -> float | None:
    """Return the mean square of episode rewards including the KL penalty, in the critic's unit; None if unknown."""
    reward, spread = signs.get("reward"), signs.get("reward_std")
    if reward is None or spread is None:
        return None
    kl = [signs.get(name) or 0.0 for name in ("kl_reward", "kl_reward_std")]
    unit = spread if case.norm_reward and spread > EQUAL * abs(reward) else 1.0
    return math.fsum(part**2 for part in (reward / unit, spread / unit, *kl))


def _unexplained(history: History, case: Case) -> Finding | None:
    limits = case.limits
    long = history.last("explained_variance", limits.window)
    if limits.min_explained_variance is None or not all_below(long, limits.min_explained_variance):
        return None
    if 1 - long[-1] < (1 - GETS_BETTER) * (1 - long[0]):
        return None
    if not all_above(history.last("reward_spread", limits.window), limits.min_reward_spread or 0.0):
        return None
    if any(n < FEWEST_EPISODES for n in history.last("n_episodes", limits.window)):
        return None
    losses = history.last("value_loss", limits.window)
    rate = f"alg.args.{'critic_learning_rate' if 'critic_learning_rate' in case.critic_keys else 'learning_rate'}"
    stands_still = bool(losses) and max(losses) <= STANDS_STILL * min(losses)
    return Finding(
        f"the explained variance of the returns has been below {limits.min_explained_variance:g} for {len(long)} "
        f"iterations, now {long[-1]:.3g}: a constant would fit better than the critic",
        SLOW_CRITIC_ADVICE.format(rate) if stands_still else CRITIC_ADVICE.format(case.critic_keys),
        {"explained_variance": long, "limit": limits.min_explained_variance},
    )


def non_finite(history: History, case: Case) -> Finding | None:
    """Detect steps skipped because their loss or gradient was NaN or infinite (`alg.args.non_finite: skip`).

    A single skipped step is an unusual minibatch. With many skipped steps the run learns little.
    """
    now, before = history.last("skipped_steps", 1), history.last("skipped_steps", 2)
    new = now[0] - (before[0] if before else 0.0) if now else 0.0
    if new <= 0:
        return None
    return Finding(
        f"{new:g} steps of this update were skipped, {now[0]:g} in total: their loss or gradient was not finite",
        "Lower alg.args.learning_rate or max_grad_norm, and check whether rewards are unusually large",
        {"skipped_steps": now[0], "new": new},
    )


def large_updates(history: History, case: Case) -> Finding | None:
    """Detect updates that move far from the policy that generated the rollout.

    Tokens outside the clip range have no gradient, and the variance of the ratios grows, so later epochs learn little.
    """
    limits = case.limits
    clipped = history.last("clip_fraction", limits.patience)
    kls = history.last("approx_kl", limits.patience)
    too_many = limits.max_clip_fraction is not None and all_above(clipped, limits.max_clip_fraction)
    if not too_many and (limits.max_approx_kl is None or not all_above(kls, limits.max_approx_kl)):
        return None
    values = clipped if too_many else kls
    what = "fraction of clipped tokens" if too_many else "KL of an update to the rollout's policy"
    limit = limits.max_clip_fraction if too_many else limits.max_approx_kl
    if too_many and all_below(kls[-1:], SMALL_KL):
        advice = f"The updates are small, their KL is {listed(kls[-1:])}: raise alg.args.clip_range (0.2)"
    else:
        advice = f"Lower {case.step_keys}{STOP_EARLY if 'n_epochs' in case.step_keys else ''}"
    return Finding(
        f"the {what} has been above {limit:g} for {len(values)} iterations: {listed(values)}",
        advice,
        {"clip_fraction" if too_many else "approx_kl": values, "limit": float(limit or 0.0)},
    )


def small_minibatches(history: History, case: Case) -> Finding | None:
    """Detect minibatches with few episodes.

    All tokens of an episode share its reward, so the gradient of a minibatch is a mean over its episodes. With few
    episodes it is mostly noise, and each optimizer step follows this noise.
    """
    least, sizes = case.limits.min_minibatch_episodes, history.last("minibatch_episodes", case.limits.patience)
    lengths = history.last("length", case.limits.patience)
    if least is None or not all_below(sizes, least) or not lengths:
        return None
    wanted, n_steps = math.ceil(least * max(lengths)), history.last("optimizer_steps", 1)
    steps = f"; an update has {n_steps[0]:g} optimizer steps" if n_steps else ""
    steps += f", in RL4LMs with the same values {case.rl4lms_steps}" if steps and case.rl4lms_steps is not None else ""
    return Finding(
        f"minibatches had {sizes[-1]:.3g} episodes on average for {len(sizes)} iterations, fewer than {least}{steps}",
        f"Raise alg.args.batch_size (counted in tokens) to {wanted} or more"
        if case.has_batch_size
        else "Raise env.n_envs or alg.args.n_steps",
        {"minibatch_episodes": sizes, "limit": float(least)},
    )


def no_learning(history: History, case: Case) -> Finding | None:
    """Detect updates without effect: the gradient is 0, or TRPO's line search accepts no step."""
    patience = case.limits.patience
    norms, steps = history.last("grad_norm", patience), history.last("step_taken", patience)
    still = bool(norms) and not any(norms)
    left_out = history.last("skipped_steps", patience)  # these are reported by `non_finite`
    refused = bool(steps) and not any(steps) and len(set(left_out)) < 2
    if not case.limits.no_learning or not (still or refused):
        return None
    found = "the gradient has been 0" if still else "no step of the line search was accepted"
    advice = (
        "Check whether rewards differ between episodes, and whether alg.args.vf_coef or a schedule removes the gradient"
        if still
        else "Raise alg.args.cg_damping, or lower alg.args.target_kl"
    )
    return Finding(f"{found} for {patience} iterations: the policy does not change", advice, {"iterations": patience})
