"""Alarms of the rollout: rewards that do not differ, responses that do not end, end at once or are all alike."""

from __future__ import annotations

from statistics import fmean

from rl4lms_like.training.doctor.findings import Case, Finding, all_above, all_below, listed
from rl4lms_like.training.doctor.history import History
from rl4lms_like.training.doctor.signs import FEWEST_EPISODES

MUST_GROW = 0.25
"""Shares of equal responses that grew by less since the first iteration are the task's, not the policy's."""


def reward_constant(history: History, case: Case) -> Finding | None:
    """All episodes of a rollout get the same reward.

    Without a difference between them nothing says what to write more often; what is left to learn is the KL penalty. A
    policy that rose to the best reward there was has nothing left to learn, and no alarm. Few episodes get the same
    by chance: of them, all of a window must.
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
        "See what reward_fn pays for the example, and whether its args fit the task (a length, a label, references); "
        "sample more widely (do_sample: true, temperature) or take more episodes (env.n_envs)",
        {"reward": rewards, "spread": spreads},
    )


def is_solved(history: History, case: Case) -> bool:
    """Whether all episodes get the best reward there was, and it was less at first."""
    limit, patience = case.limits.min_reward_spread or 0.0, case.limits.patience
    spreads, rewards = history.last("reward_spread", patience), history.last("reward", patience)
    start, best = history.first.get("reward"), history.best_reward
    if start is None or best is None or not rewards or not spreads:
        return False
    return max(spreads) <= limit and start < min(rewards) and best - min(rewards) <= limit * abs(best)


def all_truncated(history: History, case: Case) -> Finding | None:
    """Responses hit the length limit instead of ending, and they did not at first.

    The reward then judges halves of texts, and the policy never learns to stop. Where all responses were cut in the
    first iteration already, the task is one of continuations of a fixed length.
    """
    limit, start = case.limits.max_truncated_share, history.first.get("truncated")
    shares = history.last("truncated", case.limits.patience)
    if limit is None or not case.can_end or not shares or min(shares) < limit or not all(shares):
        return None
    if start is None or start >= limit:
        return None
    return Finding(
        f"{fmean(shares):.0%} of the responses hit the length limit for {len(shares)} iterations",
        "Raise max_new_tokens in alg.policy.args.generation_kwargs and env.args.max_episode_length, or start from a "
        "model that has learned to end. If it is meant: env.args.terminate_on_eos: false",
        {"truncated_share": shares, "length": history.last("length", len(shares))},
    )


def all_empty(history: History, case: Case) -> Finding | None:
    """Responses end with their first token.

    It is the cheapest way out of a reward that punishes text, or what a template leaves to say.
    """
    limit = case.limits.max_empty_share
    shares = history.last("empty", case.limits.patience)
    if limit is None or not shares or min(shares) < limit or not all(shares):
        return None
    return Finding(
        f"{fmean(shares):.0%} of the responses ended with their first token for {len(shares)} iterations",
        "See whether reward_fn pays for saying nothing; give min_length in alg.policy.args.generation_kwargs, or raise "
        "alg.kl_div.coeff",
        {"empty_share": shares},
    )


def duplicates(history: History, case: Case) -> Finding | None:
    """Many responses are one and the same, or nearly the same under different prompts, and they were not at first.

    One stock text that pays well under any prompt is the common form of collapse. Tasks with few possible answers have
    equal responses from the beginning: only their growth is told. Under one prompt alone, equal responses are what a
    certain policy writes; of that the entropy tells.
    """
    limits = case.limits
    kinds = {
        "duplicates": (limits.max_duplicate_share, "are one and the same"),
        "near_duplicates": (limits.max_near_duplicate_share, "have a near twin under another prompt"),
    }
    for name, (limit, what) in kinds.items():
        shares, start = history.last(name, limits.patience), history.first.get(name)
        if limit is None or start is None or not all_above(shares, max(limit, start + MUST_GROW)):
            continue
        return Finding(
            f"{fmean(shares):.0%} of the responses {what} for {len(shares)} iterations; in the first one it was "
            f"{start:.0%}",
            f"Raise alg.kl_div.coeff or alg.args.ent_coef, lower {case.step_keys}, and see what the repeated text is "
            f"paid for",
            {name: shares, "first": start},
        )
    return None


def reward_follows_length(history: History, case: Case) -> Finding | None:
    """Within rollouts, the reward is ordered by length (Spearman's rank correlation, mean over a window).

    A reward that pays for length is learned as length (Singhal et al., arXiv 2310.03716).
    """
    limits = case.limits
    rhos, lengths = history.known("length_correlation", limits.window), history.last("length", 1)
    if limits.max_length_correlation is None or 2 * len(rhos) < limits.window or not rhos:
        return None
    rho = fmean(rhos)
    if abs(rho) <= limits.max_length_correlation:
        return None
    return Finding(
        f"longer responses are {'better' if rho > 0 else 'worse'} paid: rank correlation {rho:.2f}, mean over "
        f"{len(rhos)} of the last {limits.window} iterations; a response has {listed(lengths)} tokens",
        "If length is not the aim, "
        + (
            "divide the reward by it, or add reward_fn.args.shaping_fn: {id: length_penalty, args: {max_length: ...}}"
            if rho > 0
            else "see what of the reward falls with each token (a penalty, a mean over tokens)"
        ),
        {"correlation": rho, "rollouts": float(len(rhos))},
    )
