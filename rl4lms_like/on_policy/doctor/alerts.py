"""Alerts of the run doctor: pure functions of the history, and the table of those that are checked.

    (History, Context) ─ alert ─> Alert, or None if there is no problem

Unless stated otherwise, a condition must hold for `patience` iterations, and a threshold of None switches it off.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median

from rl4lms_like.config.run_config import DoctorConfig
from rl4lms_like.on_policy.doctor.diagnostics import (
    CALLS,
    FAILED_CALLS,
    FEWEST_EPISODES,
    N_MARKS,
    OF_TOOL,
    Diagnostics,
    HeldOutScore,
    History,
)
from rl4lms_like.rollouts.rollout import EQUAL
from rl4lms_like.training.alert import Alert

MANY_ALIKE = 0.5  # fraction of the most frequent response above which responses are assumed to ignore their prompts
MUST_GROW = 0.25  # increase of the duplicate fraction since the first iteration; less is attributed to the task
PLATEAU_RATIO = 3.0  # largest to smallest value loss of a critic that is too slow; too large steps vary the loss more
GETS_BETTER = 0.25  # relative decrease of 1 - explained variance within a window of a critic that is learning
SMALL_KL = 0.005  # of an update, nats per token; from 0.01, half of the tokens leave a clip range of 0.2
CLEARLY = 3.0  # standard errors by which two means must differ
SCALE = "use alg.policy.args.value_head_init: zero, or scale the reward (alg.kl_div.norm_reward: true)"


@dataclass(frozen=True)
class Context:
    """Properties of a run that its alerts need."""

    limits: DoctorConfig
    max_ratio_gap: float | None = 1e-3  # accepted distance of an update's first ratio from 1; None: no alert
    ratio_cause: str = ""  # likely cause of a larger distance, in words
    target_kl: float | None = None  # of the KL controller
    kl_per_sequence: bool = False  # the target is per response instead of per token
    estimates_kl: bool = True  # the KL penalty uses the estimator that can be negative (`estimator: k1`)
    has_teacher: bool = False  # the KL is that to a teacher, which falls during training
    is_masked: bool = False  # a mask restricts the sampled tokens (NLPO)
    norm_reward: bool = False  # the critic is trained on rewards divided by their standard deviation
    minibatch_key: str | None = "batch_size"  # the argument that sets the size of minibatches, if they have one
    rollout_key: str = "n_steps"  # the argument that sets the size of rollouts
    rl4lms_steps: int | None = None  # optimizer steps per iteration of RL4LMs with the same values
    can_end: bool = True  # responses can end before the length limit
    has_dialogues: bool = False  # an environment answers, and ends the episodes
    has_one_answer: bool = False  # the environment has only one answer, such as "Try again" (`reasoning_gym`)
    step_keys: str = "alg.args.learning_rate or n_epochs"  # config keys that reduce the size of updates
    critic_keys: str = "alg.args.critic_learning_rate or vf_coef"  # config keys that reduce the critic's updates
    modes: Mapping[str, str] = field(default_factory=dict)  # held-out metric -> `max` or `min`


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.3g}" for value in values)


def _lasting(values: Sequence[float]) -> str:
    return f"for {len(values)} iterations: {_listed(values)}"


# In all three: without values, which were not logged or are of too few iterations, no condition holds.
def _all_above(values: Sequence[float], limit: float | None) -> bool:
    """Return True if there are a limit and values, and all of them are above the limit."""
    return limit is not None and bool(values) and min(values) > limit


def _all_below(values: Sequence[float], limit: float | None) -> bool:
    return limit is not None and bool(values) and max(values) < limit


def _all_reach(values: Sequence[float], limit: float | None) -> bool:
    """Return True if all values are at least the limit and none is 0."""
    return limit is not None and bool(values) and min(values) >= limit and all(values)


# --- updates ---------------------------------------------------------------------------------------------------------


def ratio_gap(history: History, context: Context) -> Alert | None:
    """Detect that the first ratio of an update is not 1.

    Rollout and update then compute different log-probs for the same tokens, so that every gradient is off-policy.
    Huang et al., "The 37 implementation details of PPO" (2022), use this number for debugging.
    """
    # One iteration is enough: before the first step the weights are those of the rollout, so only rounding may differ.
    gaps = history.last("ratio_gap", 1)
    allowed = context.max_ratio_gap
    if not _all_above(gaps, allowed):
        return None

    return Alert(
        f"an update's first ratio is off by {gaps[0]:.2g} (limit {allowed:g})",  # short: the console shows the cause
        f"Likely cause: {context.ratio_cause}",
        {"ratio_gap": gaps[0], "allowed": allowed},
    )


def non_finite(history: History, context: Context) -> Alert | None:
    """Detect steps skipped because their loss or gradient was NaN or infinite (`alg.args.non_finite: skip`)."""
    total = history.last("skipped_steps", 1)
    if not total:
        return None

    # The counter is of the whole run, so the steps of this update are its increase since the iteration before.
    n_new = total[0]
    last_two = history.last("skipped_steps", 2)
    if last_two:
        n_new -= last_two[0]
    if n_new <= 0:
        return None

    return Alert(
        f"{n_new:g} steps of this update were skipped, {total[0]:g} in total: their loss or gradient was not finite",
        "Lower alg.args.learning_rate or max_grad_norm, and check whether rewards are unusually large",
        {"skipped_steps": total[0], "new": n_new},
    )


def kl_above_budget(history: History, context: Context) -> Alert | None:
    """Detect that the KL to the reference stays far above its target, or above an absolute limit if there is no target.

    The reward then comes from text that is unlikely under the reference. With growing distance, the true reward falls
    while the learned one rises (Gao et al., arXiv 2210.10760).
    """
    # The KL to a teacher is what distillation minimises: it is large at the start.
    if context.has_teacher:
        return None
    limits = context.limits
    kls = history.last("kl", limits.patience)

    # A multiple of the controller's target, if it has one. The KL is logged in nats per token; the target of a horizon
    # controller is in nats per response, for which the KL is multiplied by the mean length.
    factor = limits.kl_times_target
    target = context.target_kl
    budget = limits.max_kl
    unit = "nats per token"
    if target is not None:
        budget = None if factor is None else factor * target
        if context.kl_per_sequence:
            lengths = history.last("length", limits.patience)
            kls = [kl * length for kl, length in zip(kls, lengths, strict=False)]
            unit = "nats per response"
    if not _all_above(kls, budget):
        return None

    bound = f"doctor.max_kl, {budget:g}"
    if target is not None:
        bound = f"{factor:g} times the target of {target:g}"
    return Alert(
        f"the KL to the reference has been above {bound} {unit} {_lasting(kls)}",
        f"Raise alg.kl_div.coeff (or gain, of an adaptive controller), or lower {context.step_keys}",
        {"kl": kls, "budget": budget},
    )


def kl_negative(history: History, context: Context) -> Alert | None:
    """Detect that the estimated KL is negative, although a KL divergence cannot be.

    The expectation of log p - log p_ref under the policy's own samples is at least 0. If it is negative for several
    iterations, generation arguments change the sampling distribution. The penalty then rewards drift from the
    reference, unless its estimator is never negative.
    """
    limit = context.limits.max_negative_kl
    kls = history.last("kl", context.limits.patience)
    if limit is None or not context.estimates_kl or not _all_below(kls, -limit):
        return None

    # Filters such as top_k, and masks, sample from another distribution q than the policy's p. The mean of
    # log p - log p_ref under q may have any sign.
    advice = (
        "Sample from the policy itself: top_k: 0, top_p: 1, temperature: 1 and no min_length in "
        "alg.policy.args.generation_kwargs; or use alg.kl_div.estimator: k3, which is never negative"
    )
    if context.is_masked:
        advice = (
            "The mask restricts sampling: raise alg.policy.args.top_mask, or update the mask model more often "
            f"(alg.policy.args.target_update_iterations). {advice}"
        )

    message = f"the estimated KL to the reference has been below -{limit:g} nats per token {_lasting(kls)}"
    return Alert(message, advice, {"kl": kls, "limit": -limit})


def entropy_collapse(history: History, context: Context) -> Alert | None:
    """Detect that the entropy is near 0, or a small fraction of its initial value.

    The policy no longer explores, and the texts for all prompts become alike. Mnih et al. (arXiv 1602.01783) add the
    entropy bonus against it. A deterministic policy that gets the best reward, with different texts for different
    prompts, has solved its task and gives no alert.
    """
    limits = context.limits
    values = history.last("entropy", limits.patience)  # nats per token
    start = history.first.get("entropy")

    # The larger of the two bounds: if the entropy is small from the start, a fraction of it says little.
    bounds = []
    if limits.min_entropy is not None:
        bounds.append(limits.min_entropy)
    if limits.min_entropy_share is not None and start is not None:
        bounds.append(limits.min_entropy_share * start)
    limit = max(bounds, default=None)
    if not _all_below(values, limit):
        return None

    # Without duplicates (a pool with one prompt) it is unknown whether the texts differ: this is an alert.
    alike = history.last("duplicates", limits.patience)
    if alike and max(alike) <= MANY_ALIKE and _is_solved(history, context):
        return None

    return Alert(
        f"the entropy has been below {limit:.3g} nats per token {_lasting(values)}; at first it was {start:.3g}",
        f"Raise alg.kl_div.coeff or alg.args.ent_coef (for example from 0 to 0.01), or lower {context.step_keys}",
        {"entropy": values, "limit": limit, "first": start},
    )


def value_error(history: History, context: Context) -> Alert | None:
    """Detect a critic worse than a constant: its loss explodes, or its explained variance stays far below 0.

    Advantages then contain the critic's error in addition to noise. A loss that grows with the rewards is no alert: it
    must exceed the mean square of the rewards, which is the loss of a critic that always predicts 0. The explained
    variance is ignored if rewards are equal or episodes are few, because there is no variance to explain.
    """
    return _exploded(history, context) or _unexplained(history, context)


def _exploded(history: History, context: Context) -> Alert | None:
    patience = context.limits.patience
    growth = context.limits.max_value_loss_growth
    losses = history.last("value_loss", patience)

    # Relative to the median of the iterations before: the unit of the loss is that of the squared rewards.
    before = history.known("value_loss", patience + context.limits.window)[:-patience]
    if growth is None or not before:
        return None
    usual = median(before)
    if not _all_above(losses, growth * usual):
        return None

    # The returns may have grown instead. A critic that predicts 0 has the loss E[R²]; above this, its values are wrong.
    for loss, diagnostics in zip(losses, history.recent[-patience:], strict=True):
        square = _mean_square(diagnostics, context)
        if square is None or loss <= square:
            return None

    return Alert(
        f"the value loss has been above {growth:g} times its median before, {usual:.3g}, {_lasting(losses)}; "
        f"a critic that always predicts 0 would be better",
        f"Lower {context.critic_keys}, {SCALE}",
        {"value_loss": losses, "before": usual, "explained_variance": history.last("explained_variance", patience)},
    )


def _mean_square(diagnostics: Diagnostics, context: Context) -> float | None:
    """Return the mean square of episode rewards including the KL penalty, in the critic's unit; None if unknown."""
    reward = diagnostics.get("reward")
    deviation = diagnostics.get("reward_std")
    if reward is None or deviation is None:
        return None

    # `norm_reward` divides the task's rewards by their standard deviation, unless that is a rounding error. The KL
    # penalty is not divided.
    unit = 1.0
    if context.norm_reward and deviation > EQUAL * abs(reward):
        unit = deviation
    kl_mean = diagnostics.get("kl_reward") or 0.0
    kl_deviation = diagnostics.get("kl_reward_std") or 0.0

    # E[x²] = mean² + variance, of the task's reward and of the penalty. Their product is left out.
    roots = (reward / unit, deviation / unit, kl_mean, kl_deviation)
    return math.fsum(root**2 for root in roots)


def _unexplained(history: History, context: Context) -> Alert | None:
    limit = context.limits.min_explained_variance
    window = context.limits.window
    explained = history.last("explained_variance", window)
    losses = history.last("value_loss", window)

    # Explained variance is 1 - Var[R - V] / Var[R]: with nearly equal returns the denominator is 0, and with few
    # episodes the fraction is large by chance.
    has_variance = _all_above(history.last("reward_spread", window), context.limits.min_reward_spread or 0.0)
    if not has_variance or any(n < FEWEST_EPISODES for n in history.last("n_episodes", window)):
        return None

    # A critic that starts far off and gets better needs time, not other settings.
    if not _all_below(explained, limit) or 1 - explained[-1] < (1 - GETS_BETTER) * (1 - explained[0]):
        return None

    # Opposite causes have opposite advice: too large steps make the loss jump, too small ones leave it where it was.
    advice = f"Lower {context.critic_keys}, {SCALE}"
    if losses and max(losses) <= PLATEAU_RATIO * min(losses):
        rate = "critic_learning_rate" if "critic_learning_rate" in context.critic_keys else "learning_rate"
        advice = f"Its loss hardly changes: raise alg.args.{rate}, {SCALE}"
    return Alert(
        f"the critic fits worse than a constant: explained variance below {limit:g} {_lasting(explained)}",
        advice,
        {"explained_variance": explained, "limit": limit},
    )


def large_updates(history: History, context: Context) -> Alert | None:
    """Detect updates that move far from the policy that generated the rollout.

    Tokens outside the clip range have no gradient, and the variance of the ratios grows, so later epochs learn little.
    """
    # Both are means over the update. An algorithm may log only one of them: TRPO clips nothing.
    for name, title, limit in (
        ("clip_fraction", "fraction of clipped tokens", context.limits.max_clip_fraction),
        ("approx_kl", "KL of an update to the rollout's policy", context.limits.max_approx_kl),
    ):
        values = history.last(name, context.limits.patience)
        if not _all_above(values, limit):
            continue

        # Many clipped tokens with a small KL are not large updates: the clip range is narrow for this policy.
        advice = f"Lower {context.step_keys}"
        kl = history.last("approx_kl", 1)
        if name == "clip_fraction" and _all_below(kl, SMALL_KL):
            advice = f"The updates are small, their KL is {_listed(kl)}: raise alg.args.clip_range (0.2)"
        elif "n_epochs" in context.step_keys:
            advice += ", or stop large updates early: alg.args.target_kl (0.02)"
        return Alert(f"the {title} has been above {limit:g} {_lasting(values)}", advice, {name: values, "limit": limit})
    return None


def no_learning(history: History, context: Context) -> Alert | None:
    """Detect updates without effect: the gradient is 0, or TRPO's line search accepts no step."""
    if not context.limits.no_learning:
        return None
    patience = context.limits.patience
    norms = history.last("grad_norm", patience)
    steps = history.last("step_taken", patience)

    # A line search that was skipped has not been tried: if the counter of skipped steps rises, `non_finite` reports it.
    skipped = history.last("skipped_steps", patience)
    if norms and not any(norms):
        problem = "the gradient has been 0"
        advice = (
            "Check whether rewards differ between episodes, and whether alg.args.vf_coef or a schedule removes the "
            "gradient"
        )
    elif steps and not any(steps) and len(set(skipped)) < 2:
        problem = "no step of the line search was accepted"
        advice = "Raise alg.args.cg_damping, or lower alg.args.target_kl"
    else:
        return None

    message = f"{problem} for {patience} iterations: the policy does not change"
    return Alert(message, advice, {"iterations": patience})


def small_minibatches(history: History, context: Context) -> Alert | None:
    """Detect minibatches with few episodes.

    All tokens of an episode share its reward, so the gradient of a minibatch is a mean over its episodes. With few
    episodes it is mostly noise, and each optimizer step follows this noise.
    """
    least = context.limits.min_minibatch_episodes
    sizes = history.last("minibatch_episodes", context.limits.patience)  # mean over an update
    lengths = history.last("length", context.limits.patience)
    if least is None or not _all_below(sizes, least) or not lengths:
        return None

    # RL4LMs' minibatches are tokens of many episodes, ours are whole episodes. A `batch_size` in tokens that is common
    # there may be one episode here.
    message = f"minibatches had {sizes[-1]:.3g} episodes on average for {len(sizes)} iterations, fewer than {least}"
    n_steps = history.last("optimizer_steps", 1)
    if n_steps:
        message += f"; an update has {n_steps[0]:g} optimizer steps"
        if context.rl4lms_steps is not None:
            message += f", in RL4LMs with the same values {context.rl4lms_steps}"

    advice = f"Raise env.n_envs or alg.args.{context.rollout_key}"
    if context.minibatch_key == "minibatch_episodes":
        advice = f"Raise alg.args.minibatch_episodes to {least} or more"
    elif context.minibatch_key is not None:
        advice = f"Raise alg.args.batch_size (counted in tokens) to {math.ceil(least * max(lengths))} or more"
    return Alert(message, advice, {"minibatch_episodes": sizes, "limit": float(least)})


# --- rollouts --------------------------------------------------------------------------------------------------------


def reward_constant(history: History, context: Context) -> Alert | None:
    """Detect that all episodes of a rollout get the same reward.

    Equal rewards give no learning signal apart from the KL penalty. There is no alert if the policy has improved to the
    best reward seen so far. Small rollouts may have equal rewards by chance, so they must have them for a whole window.
    """
    limit = context.limits.min_reward_spread
    patience = context.limits.patience
    is_small = any(n < FEWEST_EPISODES for n in history.last("n_episodes", patience))
    n = max(context.limits.window, patience) if is_small else patience
    spreads = history.last("reward_spread", n)
    rewards = history.last("reward", n)

    # A spread is relative to the largest reward; a limit of 0 still means equal rewards.
    if limit is None or not spreads or (any(spreads) and not _all_below(spreads, limit)):
        return None

    # Equal within each small rollout, but not in all: this is how a binary reward looks by chance (0 0 0 0, 1 1 1 1).
    is_by_chance = is_small and rewards and max(rewards) - min(rewards) > limit * max(map(abs, rewards))
    if is_by_chance or _is_solved(history, context):
        return None

    return Alert(
        f"all episodes of a rollout got the same reward for {len(spreads)} iterations: {_listed(rewards)}",
        "Check the reward of the example and the args of reward_fn; set do_sample: true, or raise env.n_envs",
        {"reward": rewards, "spread": spreads},
    )


def equal_groups(history: History, context: Context) -> Alert | None:
    """Detect that the responses to most prompts get equal rewards, so that these groups have advantages of 0.

    With dynamic sampling such groups are replaced; see `few_kept_groups`.
    """
    # All groups are kept only without dynamic sampling, or if it had none to replace.
    limit = context.limits.min_differing_groups
    shares = history.last("groups_differing", context.limits.patience)
    kept_shares = history.last("groups_kept", context.limits.patience)
    if not _all_below(shares, limit) or min(kept_shares, default=0.0) < 1 or _is_solved(history, context):
        return None

    return Alert(
        f"the fraction of groups whose rewards differ has been below {limit:g} {_lasting(shares)}",
        "Raise alg.args.group_size or the temperature, use prompts that are neither too easy nor too hard or a reward "
        "with more values, or set alg.args.dynamic_sampling",
        {"groups_differing": shares, "limit": limit},
    )


def few_kept_groups(history: History, context: Context) -> Alert | None:
    """Detect that dynamic sampling discards almost all generated groups.

    Nearly all of the time is then spent on generating texts that the update does not use.
    """
    limit = context.limits.min_kept_groups
    shares = history.last("groups_kept", context.limits.patience)
    if not _all_below(shares, limit):
        return None

    return Alert(
        f"the fraction of generated groups that are kept has been below {limit:g} {_lasting(shares)}",
        "The prompts are too easy or too hard for the policy: use others, or lower alg.args.dynamic_sampling",
        {"groups_kept": shares, "limit": limit},
    )


def _is_solved(history: History, context: Context) -> bool:
    """Return True if all episodes get the best reward seen so far, and the first rollout's reward was lower."""
    limit = context.limits.min_reward_spread or 0.0
    spreads = history.last("reward_spread", context.limits.patience)
    rewards = history.last("reward", context.limits.patience)
    start = history.first.get("reward")
    best = history.best_reward
    if start is None or best is None or not rewards or not spreads:
        return False

    # A reward that is constant from the start has no lower first value: it is not solved, it is broken.
    has_risen = start < min(rewards)
    return max(spreads) <= limit and has_risen and best - min(rewards) <= limit * abs(best)


def all_truncated(history: History, context: Context) -> Alert | None:
    """Detect that responses reach the length limit instead of ending, unless they did so in the first iteration.

    The reward then judges incomplete texts, and the policy does not learn to stop. If all responses were truncated in
    the first iteration, the task is assumed to ask for continuations of a fixed length; not with dialogues.
    """
    limit = context.limits.max_truncated_share
    start = history.first.get("truncated")
    shares = history.last("truncated", context.limits.patience)
    if limit is None or start is None or not _all_reach(shares, limit):
        return None

    # An environment ends its episodes itself: that none ends is no task of a fixed length.
    if context.has_dialogues:
        return Alert(
            f"{fmean(shares):.0%} of the episodes were truncated for {len(shares)} iterations: the environment ended "
            f"none of them",
            "Raise env.dialogue.max_turns, max_turn_length or env.args.max_episode_length, which rl4lms-like check "
            "compares; if the environment never returns terminated, set doctor.max_truncated_share: null",
            {"truncated_share": shares, "length": history.last("length", len(shares))},
        )
    if start >= limit or not context.can_end:
        return None

    return Alert(
        f"{fmean(shares):.0%} of the responses reached the length limit for {len(shares)} iterations",
        "Raise max_new_tokens in alg.policy.args.generation_kwargs and env.args.max_episode_length, or start from a "
        "model that generates the end token. If truncation is intended, set env.args.terminate_on_eos: false",
        {"truncated_share": shares, "length": history.last("length", len(shares))},
    )


def equal_answers(history: History, context: Context) -> Alert | None:
    """Detect that an environment answers every turn with the same text.

    The policy then learns nothing from answers: a server may be down, or every turn may be of a form that the
    environment does not understand.
    """
    shares = history.last("equal_answers", context.limits.patience)
    if context.has_one_answer or not _all_reach(shares, context.limits.max_equal_answer_share):
        return None

    return Alert(
        f"{fmean(shares):.0%} of the answers of the environment were the same text for {len(shares)} iterations",
        "Read the example; check whether the environment understands the turns (rl4lms-like play shows episodes of a "
        "model). If it always gives the same answer, set doctor.max_equal_answer_share: null",
        {"equal_answers": shares},
    )


def failed_calls(history: History, context: Context) -> Alert | None:
    """Detect that most of the calls of tools fail: wrong names, wrong arguments, or errors of the tools."""
    limit = context.limits.max_failed_calls
    patience = context.limits.patience
    calls = history.last(CALLS, patience)
    failed = history.last(FAILED_CALLS, patience)

    # Both are means over the same episodes, so their quotient is the fraction of the calls.
    if not calls or not failed or not all(calls):
        return None
    shares = [n_failed / n for n_failed, n in zip(failed, calls, strict=True)]
    if not _all_above(shares, limit):
        return None

    return Alert(
        f"{fmean(shares):.0%} of the calls of tools failed for {len(shares)} iterations",
        "Read the answers to failed calls (train_evaluation.save_rollouts, rl4lms-like play): the prompt may lack an "
        "example of a call, or max_turn_length may cut calls",
        {"failed_calls": shares, "limit": limit},
    )


def unused_tool(history: History, context: Context) -> Alert | None:
    """Detect that a tool is never called, so that the policy cannot learn to use it."""
    window = context.limits.window
    if not context.limits.unused_tools or not history.recent:
        return None
    unused = []
    for name in sorted(history.recent[-1]):
        calls = history.last(name, window) if name.startswith(OF_TOOL) else []
        if calls and not any(calls):
            unused.append(name.removeprefix(OF_TOOL))
    if not unused:
        return None

    named = ", ".join(map(repr, unused))
    return Alert(
        f"no episode of the last {window} iterations called the tool{'s' * (len(unused) > 1)} {named}",
        "Begin with a model that calls it (a supervised run on examples), name it in the prompt, or remove it; if it "
        "is not needed in each task, set doctor.unused_tools: false",
        {"iterations": float(window), "tools": float(len(unused))},
    )


def all_empty(history: History, context: Context) -> Alert | None:
    """Detect responses that end with their first token.

    This happens when the reward penalizes text, or when the prompt template leaves nothing to generate. In a dialogue,
    one token may be the right turn, after which the environment ends the episode.
    """
    shares = history.last("empty", context.limits.patience)
    if context.has_dialogues or not _all_reach(shares, context.limits.max_empty_share):
        return None

    return Alert(
        f"{fmean(shares):.0%} of the responses ended with their first token for {len(shares)} iterations",
        "Check the reward of empty responses; set min_length in the generation_kwargs, or raise alg.kl_div.coeff",
        {"empty_share": shares},
    )


def duplicates(history: History, context: Context) -> Alert | None:
    """Detect many equal responses, or near duplicates of different prompts, that were not there in the first iteration.

    A common form of collapse is one text with a high reward for every prompt. Tasks with few possible answers have
    equal responses from the start, so only growth is reported. Equal responses to a single prompt are the sign of a
    deterministic policy, which `entropy_collapse` covers.
    """
    # Equal responses first: they are near duplicates, too, and the plainer message is enough.
    limits = context.limits
    for name, limit, title in (
        ("duplicates", limits.max_duplicate_share, "are identical"),
        ("near_duplicates", limits.max_near_duplicate_share, "have a near duplicate of another prompt"),
    ):
        shares = history.last(name, limits.patience)
        start = history.first.get(name)
        if limit is None or start is None or not _all_above(shares, max(limit, start + MUST_GROW)):
            continue

        return Alert(
            f"{fmean(shares):.0%} of the responses {title} for {len(shares)} iterations; at first it was {start:.0%}",
            f"Raise alg.kl_div.coeff or alg.args.ent_coef, lower {context.step_keys}, and check the text's reward",
            {name: shares, "first": start},
        )
    return None


def reward_follows_length(history: History, context: Context) -> Alert | None:
    """Detect that rewards correlate with length within rollouts (Spearman's rank correlation, mean over a window).

    If longer responses get higher rewards, the policy mainly learns length (Singhal et al., arXiv 2310.03716).
    """
    limit = context.limits.max_length_correlation
    window = context.limits.window

    # A rollout with equal lengths or equal rewards has no correlation; half of a window must have one.
    rhos = history.known("length_correlation", window)
    if limit is None or not rhos or 2 * len(rhos) < window:
        return None
    rho = fmean(rhos)
    if abs(rho) <= limit:
        return None

    # The two signs have different causes. A reward that falls with length makes responses short, and at last empty.
    level = "lower"
    advice = "check which part of the reward decreases with each token (a penalty, a mean over tokens)"
    if rho > 0:
        level = "higher"
        advice = (
            "divide the reward by it, or add reward_fn.args.shaping_fn: {id: length_penalty, args: {max_length: ...}}"
        )
    lengths = history.last("length", 1)
    return Alert(
        f"longer responses get {level} rewards: rank correlation {rho:.2f}, mean over {len(rhos)} of the last {window} "
        f"iterations; mean response length {_listed(lengths)} tokens",
        f"If length is not the objective, {advice}",
        {"correlation": rho, "rollouts": float(len(rhos))},
    )


# --- evaluations -----------------------------------------------------------------------------------------------------


def reward_hacking(history: History, context: Context) -> Alert | None:
    """Detect that the training reward rises while a metric on `val` other than the reward falls from its best.

    The reward then no longer measures the intended quality (Goodhart's law; Gao et al., arXiv 2210.10760; Skalse et
    al., arXiv 2209.13085). In each of the last two evaluations, the metric must be worse by `max_held_out_fall` and by
    three standard errors, and the reward must be higher by three standard errors.
    """
    limit = context.limits.max_held_out_fall
    if limit is None:
        return None

    for key, mode in context.modes.items():
        # If the best evaluation is one of the last two, the metric still rises, or has fallen only once.
        evaluations = history.held_out.get(key)
        if evaluations is None or len(evaluations.last) < N_MARKS or evaluations.best in evaluations.last:
            continue
        best = _with_reward(evaluations.best, history.first)
        last = evaluations.last[-1]
        if not all(_is_hacked(score, best, mode, limit) for score in evaluations.last):
            continue

        return Alert(
            f"the reward rose from {best.reward:.3g} to {last.reward:.3g}, and {key} on val went from "
            f"{best.score:.3g} (epoch {best.epoch}) to {last.score:.3g} (epoch {last.epoch})",
            f"Read texts of both epochs (in report.html); raise alg.kl_div.coeff, stop earlier, or make {key} part of "
            f"the reward (reward_fn: combine); or list the metrics that matter in doctor.held_out",
            {
                "reward": [best.reward, last.reward],
                "score": [best.score, last.score],
                "epoch": [float(best.epoch), float(last.epoch)],
            },
            key,
        )
    return None


def _is_hacked(now: HeldOutScore, best: HeldOutScore, mode: str, limit: float) -> bool:
    """Return True if the score is clearly worse than the best one, by more than `limit`, and the reward is higher."""
    if now.reward is None or best.reward is None:
        return False

    # The best of many evaluations is partly luck: a difference must exceed three standard errors of the difference,
    # √(error² + error²).
    fall = best.score - now.score if mode == "max" else now.score - best.score
    has_fallen = fall > max(limit * abs(best.score), CLEARLY * math.hypot(now.error, best.error))
    return has_fallen and now.reward - best.reward > CLEARLY * math.hypot(now.reward_error, best.reward_error)


def _with_reward(score: HeldOutScore, first: Diagnostics) -> HeldOutScore:
    """Complete an evaluation before training with the reward of the first rollout, which is of the same policy."""
    if score.reward is not None:
        return score
    n = first.get("n_episodes") or 1.0
    deviation = first.get("reward_std") or 0.0
    return replace(score, reward=first.get("reward"), reward_error=deviation / math.sqrt(n))


LARGER_IS_BETTER = ("answers", "consistency", "intent", "lexical", "semantic", "synthetic", "table_to_text")
SMALLER_IS_BETTER = ("fluency_metrics", "lexical/ter")
"""First parts of the keys of metrics. Lengths and diversity have no better direction."""


def direction_of(key: str) -> str | None:
    """Return `max`, `min`, or None if a metric has no better direction."""
    for mode, starts in (("min", SMALLER_IS_BETTER), ("max", LARGER_IS_BETTER)):
        if f"{key}/".startswith(tuple(f"{start}/" for start in starts)):
            return mode
    return None


_CHECKED = (
    *(ratio_gap, non_finite, kl_above_budget, kl_negative, entropy_collapse, value_error, large_updates, no_learning),
    *(small_minibatches, reward_constant, equal_groups, few_kept_groups, all_truncated, all_empty, duplicates),
    *(reward_follows_length, equal_answers, failed_calls, unused_tool),
)
ALERTS: dict[str, Callable[[History, Context], Alert | None]] = {alert.__name__: alert for alert in _CHECKED}
"""Alerts that are checked after each iteration, in this order; `reward_hacking` is checked after each evaluation."""
