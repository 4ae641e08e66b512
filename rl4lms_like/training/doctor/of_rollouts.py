"""Alerts on rollouts: constant rewards; truncated, empty or duplicate responses; rewards that follow length."""

from __future__ import annotations

from statistics import fmean

from rl4lms_like.training.doctor.findings import Case, Finding, all_above, all_below, listed
from rl4lms_like.training.doctor.history import History
from rl4lms_like.training.doctor.signs import FEWEST_EPISODES

MUST_GROW = 0.25
"""Increase of the duplicate fraction since the first iteration needed for an alert. Less is attributed to the task."""


def reward_constant(history: History, case: Case) -> Finding | None:
    """Detect that all episodes of a rollout get the same reward.

    Equal rewards give no learning signal apart from the KL penalty. There is no alert if the policy has improved to the
    best reward seen so far. Small rollouts may have equal rewards by chance, so they must have them for a whole window.
    """
    limit, patience = case.limits.min_reward_spread, case.limits.patience
    few = any(n < FEWEST_EPISODES for n in history.last("n_episodes", patience))
    n_looked_at = max(case.limits.window, patience) if few else patience
    spreads, rewards = history.last("reward_spread", n_looked_at), history.last("reward", n_looked_at)
    if limit is None or not (all_below(spreads, limit) or (bool(spreads) and not any(spreads))):
        return None
    if few and rewards and max(rewards) - min(rewards) > limit * max(map(abs, rewards)):
        return None
    if is_solved(history, case):
        return None
    return Finding(
        f"all episodes of a rollout got the same reward for {len(spreads)} iterations: {listed(rewards)}",
        "Check the reward of the example, and whether the args of reward_fn fit the task (a length, a label, "
        "references); sample with more variety (do_sample: true, temperature) or use more episodes (env.n_envs)",
        {"reward": rewards, "spread": spreads},
    )


def is_solved(history: History, case: Case) -> bool:
    """Return True if all episodes get the best reward seen so far, and the first rollout's reward was lower."""
    limit, patience = case.limits.min_reward_spread or 0.0, case.limits.patience
    spreads, rewards = history.last("reward_spread", patience), history.last("reward", patience)
    start, best = history.first.get("reward"), history.best_reward
    if start is None or best is None or not rewards or not spreads:
        return False
    return max(spreads) <= limit and start < min(rewards) and best - min(rewards) <= limit * abs(best)


def all_truncated(history: History, case: Case) -> Finding | None:
    """Detect that responses reach the length limit instead of ending, unless they did so in the first iteration.

    The reward then judges incomplete texts, and the policy does not learn to stop. If all responses were truncated in
    the first iteration, the task is assumed to ask for continuations of a fixed length.
    """
    limit, start = case.limits.max_truncated_share, history.first.get("truncated")
    shares = history.last("truncated", case.limits.patience)
    if limit is None or not case.can_end or not shares or min(shares) < limit or not all(shares):
        return None
    if start is None or start >= limit:
        return None
    return Finding(
        f"{fmean(shares):.0%} of the responses reached the length limit for {len(shares)} iterations",
        "Raise max_new_tokens in alg.policy.args.generation_kwargs and env.args.max_episode_length, or start from a "
        "model that generates the end token. If truncation is intended, set env.args.terminate_on_eos: false",
        {"truncated_share": shares, "length": history.last("length", len(shares))},
    )


def all_empty(history: History, case: Case) -> Finding | None:
    """Detect responses that end with their first token.

    This happens when the reward penalizes text, or when the prompt template leaves nothing to generate.
    """
    limit = case.limits.max_empty_share
    shares = history.last("empty", case.limits.patience)
    if limit is None or not shares or min(shares) < limit or not all(shares):
        return None
    return Finding(
        f"{fmean(shares):.0%} of the responses ended with their first token for {len(shares)} iterations",
        "Check the reward of empty responses; set min_length in alg.policy.args.generation_kwargs, or raise "
        "alg.kl_div.coeff",
        {"empty_share": shares},
    )


def duplicates(history: History, case: Case) -> Finding | None:
    """Detect many equal responses, or near duplicates of different prompts, that were not there in the first iteration.

    A common form of collapse is one text with a high reward for every prompt. Tasks with few possible answers have
    equal responses from the start, so only growth is reported. Equal responses to a single prompt are the sign of a
    deterministic policy, which `entropy_collapse` covers.
    """
    limits = case.limits
    kinds = {
        "duplicates": (limits.max_duplicate_share, "are identical"),
        "near_duplicates": (limits.max_near_duplicate_share, "have a near duplicate of another prompt"),
    }
    for name, (limit, what) in kinds.items():
        shares, start = history.last(name, limits.patience), history.first.get(name)
        if limit is None or start is None or not all_above(shares, max(limit, start + MUST_GROW)):
            continue
        return Finding(
            f"{fmean(shares):.0%} of the responses {what} for {len(shares)} iterations; in the first iteration it was "
            f"{start:.0%}",
            f"Raise alg.kl_div.coeff or alg.args.ent_coef, lower {case.step_keys}, and check why the repeated text "
            f"gets its reward",
            {name: shares, "first": start},
        )
    return None


def reward_follows_length(history: History, case: Case) -> Finding | None:
    """Detect that rewards correlate with length within rollouts (Spearman's rank correlation, mean over a window).

    If longer responses get higher rewards, the policy mainly learns length (Singhal et al., arXiv 2310.03716).
    """
    limits = case.limits
    rhos, lengths = history.known("length_correlation", limits.window), history.last("length", 1)
    if limits.max_length_correlation is None or 2 * len(rhos) < limits.window or not rhos:
        return None
    rho = fmean(rhos)
    if abs(rho) <= limits.max_length_correlation:
        return None
    return Finding(
        f"longer responses get {'higher' if rho > 0 else 'lower'} rewards: rank correlation {rho:.2f}, mean over "
        f"{len(rhos)} of the last {limits.window} iterations; mean response length {listed(lengths)} tokens",
        "If length is not the objective, "
        + (
            "divide the reward by it, or add reward_fn.args.shaping_fn: {id: length_penalty, args: {max_length: ...}}"
            if rho > 0
            else "check which part of the reward decreases with each token (a penalty, a mean over tokens)"
        ),
        {"correlation": rho, "rollouts": float(len(rhos))},
    )
