"""Checks of an algorithm's gradients on a tabular policy, for `check_algorithm`; explained in docs/exact_gradients.md.

objective      E[gradient] is that of the expected reward minus the KL penalty, up to a positive factor
invariance     micro-batches, padding and generation batches do not change the gradient
like=PPO       the gradients of single batches equal those of another algorithm
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from torch import Tensor

from rl4lms_like.core.episodes import EpisodeBatch
from rl4lms_like.system.schema import signature_of
from rl4lms_like.testing.tabular import Enumeration, Gradients, Response, responses_of
from rl4lms_like.testing.tabular_policy import LENGTH

TOLERANCE = 1e-5
"""Largest accepted difference of two gradients, relative to their size; algorithms may round to float32."""

UNBIASED: Mapping[str, Any] = {
    "gamma": 1.0,
    "gae_lambda": 1.0,
    "value_gae_lambda": None,
    "gae_length_alpha": None,
    "normalize_advantage": False,
    "ent_coef": 0.0,
    "nll_coef": 0.0,
    "nll_threshold": 1.0,
    "micro_batch_size": None,
    "scale": "none",
    "dynamic_sampling": None,
    "overlong_buffer": None,
    "importance_correction": "none",
    "correction_range": None,
    "first_token_temperature": None,
}
"""Arguments with which the first step follows the gradient of the objective, used if the algorithm has them."""

GROUPS: Mapping[str, Any] = {"prompts": (0, 0), "group_size": 2}
"""Arguments of the enumeration for algorithms that compare several responses to a prompt."""

OTHERWISE = "If the algorithm optimizes something else on purpose, pass exact=False"

CAUSES = {
    "reward": "log-probs, advantages or rewards of a neighboring token; advantages that are normalized, clipped or "
    f"discounted by a constant in the code; a wrong sign; no step of `policy.optimizer`. {OTHERWISE}",
    "KL penalty": "the estimate k1 as a term of the loss, where its expected gradient is 0; a penalty that is counted "
    "twice; log-probs of a reference other than the policy's; with masks, log-probs over the allowed tokens",
    "observed tokens": "tokens of the environment count as actions; use `observations.action_mask` and "
    "`observations.lengths`, not `response_mask` and `response_lengths`",
    "critic": "targets computed with the lambda of the advantages, or from normalized advantages",
    "micro_batch_size": "the mean of the means of micro-batches; statistics (of advantages, of kept actions) computed "
    "in each micro-batch instead of the whole minibatch",
    "generation batches": "ids of groups that are equal in several generation batches; statistics of all batches that "
    f"cannot be switched off. {OTHERWISE}",
    "padding": "padded positions count in a sum, a mean or a standard deviation",
    "like": "tokens that are left out, but count in the mean; another epsilon in the standard deviation, or a division "
    "by n instead of n - 1; statistics over padded or observed tokens; other targets of the critic",
}
"""Likely causes of each difference."""


def check_objective(algorithm: type[OnPolicyAlgorithm], args: Mapping[str, Any]) -> None:
    """Check expected gradients, and that neither micro-batches nor padding nor generation batches change a gradient.

    Args:
        algorithm: class of the algorithm.
        args: its arguments.

    Raises:
        AssertionError: a gradient is wrong.
    """
    argument_names = _argument_names(algorithm) | args.keys()
    unbiased = dict(args)
    unbiased |= {name: value for name, value in UNBIASED.items() if name in argument_names}
    arguments_class: Any = _arguments_class(algorithm)

    # Groups of two: responses of two actions are enough, and their pairs are few (9 x 9). The mean of a group contains
    # the response itself, which scales the gradient of its reward by (G - 1) / G, but not that of a KL penalty.
    groups = _groups(algorithm, args)
    if groups:
        unbiased |= {"length": 2, **groups}
        if "baseline" in argument_names:
            unbiased["baseline"] = "leave_one_out"

    # E[gradient of the loss] = -c x gradient of the objective (c > 0), which autograd computes from all responses.
    cases: list[tuple[str, dict[str, Any]]] = [
        ("reward", {}),
        ("KL penalty", {"kl_coeff": 0.25}),
        ("observed tokens", {"observed": True, "length": LENGTH}),
    ]
    if getattr(arguments_class, "kl_in_loss", False):
        in_loss = {"placement": "loss", "estimator": arguments_class.kl_estimator}
        cases.append(("KL penalty", {"kl_coeff": 0.25, **in_loss}))
    for case, options in cases:
        run = Enumeration(algorithm, reward, **{**unbiased, **options})
        (exact,) = torch.autograd.grad(-run.objective(), run.policy.logits)
        _require(algorithm, case, gap(run.expected()["logits"], exact), f"expected gradient of the {_OBJECTIVES[case]}")

    # A rollout of two generation batches has twice the episodes, and the mean of their gradients.
    run = Enumeration(algorithm, reward, **unbiased)
    for first, second in itertools.pairwise(_some(run)):
        both = run.gradients(first, second)
        first_alone = run.gradients(first)
        second_alone = run.gradients(second)
        mean = {name: (first_alone[name] + second_alone[name]) / 2 for name in both}
        _require(algorithm, "generation batches", _difference(both, mean), "mean gradient of two generation batches")

    if getattr(arguments_class, "needs_critic", True):
        _check_critic(algorithm, unbiased, argument_names)
    _check_invariance(algorithm, args, argument_names)


def check_like(algorithm: type[OnPolicyAlgorithm], like: type[OnPolicyAlgorithm], args: Mapping[str, Any]) -> None:
    """Check that two algorithms have the same gradients with ratios of 1 and others, and with observed tokens.

    Args:
        algorithm: class of the algorithm.
        like: class of the other one.
        args: arguments of both; the other one gets those that it has.

    Raises:
        AssertionError: the gradients of a batch differ.
    """
    args_of_like = {name: value for name, value in args.items() if name in _argument_names(like)}

    # At a distance of 0 the ratios are 1, so that nothing is clipped; at 0.5 they differ from 1.
    for distance, observed in ((0.0, False), (0.5, False), (0.0, True)):
        options: dict[str, Any] = {"prompts": (0, 0), "ends": True, "distance": distance, "observed": observed}
        run = Enumeration(algorithm, reward, **{**options, **args, **_groups(algorithm, args)})
        run_of_like = Enumeration(like, reward, **{**options, **args_of_like, **_groups(like, args_of_like)})

        ratios = "other ratios than 1" if distance else "ratios of 1"
        tokens = " and observed tokens" if observed else ""
        for episodes in _some(run):
            difference = _difference(run.gradients(episodes), run_of_like.gradients(episodes))
            _require(algorithm, "like", difference, f"gradient of {like.__name__} with {ratios}{tokens}")


_OBJECTIVES = {
    "reward": "expected reward",
    "KL penalty": "expected reward minus the KL penalty",
    "observed tokens": "expected reward, in episodes with observed tokens",
}


def reward(prompt: int, response: Response) -> float:
    """Return a reward that is different for most responses, a multiple of 1/8."""
    return (sum((position + 1) * token for position, token in enumerate(response)) + prompt) / 8


def gap(gradient: Tensor, exact: Tensor) -> float:
    """Return the distance of a gradient to the nearest positive multiple of the exact one, relative to its own norm.

    This is the sine of the angle between them, 1 from 90 degrees on, and 1 for a gradient of 0.

    Examples:
        >>> gap(torch.tensor([2.0, 0.0]), torch.tensor([1.0, 0.0])), gap(torch.zeros(2), torch.tensor([1.0, 0.0]))
        (0.0, 1.0)
    """
    if not bool(gradient.any()):
        return 1.0
    # Projection onto the exact gradient; not onto its opposite, which would be a wrong sign.
    factor = ((gradient * exact).sum() / exact.square().sum()).clamp_min(0.0)
    return float((gradient - factor * exact).norm() / gradient.norm())


def _groups(algorithm: Any, args: Mapping[str, Any]) -> dict[str, Any]:
    """Return `GROUPS` for algorithms with more than one response to a prompt."""
    values = {argument.name: argument.default for argument in signature_of(_arguments_class(algorithm)).arguments}
    values |= args
    return dict(GROUPS) if values.get("group_size", 1) > 1 else {}


def _arguments_class(algorithm: Any) -> Any:
    """Return the class of the algorithm's arguments; for those of Stable-Baselines3, the algorithm itself."""
    return getattr(algorithm, "arguments_class", algorithm)


def _argument_names(algorithm: Any) -> set[str]:
    return {argument.name for argument in signature_of(_arguments_class(algorithm)).arguments}


def _check_critic(algorithm: type[OnPolicyAlgorithm], unbiased: Mapping[str, Any], argument_names: set[str]) -> None:
    """Check that the critic learns the expected return, if the algorithm's step changes the critic."""
    # With another lambda for the advantages, an algorithm that confuses the two does not learn the return.
    if {"gae_lambda", "value_gae_lambda"} <= argument_names:
        unbiased = {**unbiased, "gae_lambda": 0.5, "value_gae_lambda": 1.0}
    run = Enumeration(algorithm, reward, **unbiased)
    gradient = run.expected()["values"]

    # E[(V(s) - R)^2]: with lambda 1, the target of each token is the reward of the whole response (gamma is 1).
    squared_error = torch.zeros((), dtype=torch.float64)
    for episodes, probability in run.batches():
        returns = torch.tensor([reward(0, response) for response in responses_of(episodes)], dtype=torch.float64)
        errors = run.policy.predict_values(episodes) - returns.repeat_interleave(episodes.lengths)  # [n_tokens]
        squared_error = squared_error + probability * errors.square().mean()
    (exact,) = torch.autograd.grad(squared_error, run.policy.values)

    # An algorithm may train its critic in another step than this one.
    if bool(gradient.any()):
        _require(algorithm, "critic", gap(gradient, exact), "expected gradient of the critic's squared error")


def _check_invariance(algorithm: type[OnPolicyAlgorithm], args: Mapping[str, Any], argument_names: set[str]) -> None:
    """Check on batches of different lengths that micro-batches and padding do not change the gradient."""
    args = {**args, **_groups(algorithm, args)}
    options: dict[str, Any] = {"prompts": (0, 0), "ends": True, "distance": 0.5}
    run = Enumeration(algorithm, reward, **{**options, **args})
    for episodes in _some(run):
        padded = run.gradients(_padded(episodes))
        _require(algorithm, "padding", _difference(run.gradients(episodes), padded), "gradient without padded columns")

    # One token is less than any episode, so each episode is a micro-batch of its own.
    if "micro_batch_size" not in argument_names:
        return
    run_of_whole = Enumeration(algorithm, reward, **{**options, **args, "micro_batch_size": None})
    run_of_each = Enumeration(algorithm, reward, **{**options, **args, "micro_batch_size": 1})
    for episodes in _some(run):
        difference = _difference(run_of_each.gradients(episodes), run_of_whole.gradients(episodes))
        _require(algorithm, "micro_batch_size", difference, "gradient of the whole minibatch")


def _some(run: Enumeration) -> Iterator[EpisodeBatch]:
    """Yield every 17th batch of episodes, so that all first tokens and lengths occur."""
    return (episodes for episodes, _ in itertools.islice(run.batches(), 5, None, 17))


def _padded(episodes: EpisodeBatch) -> EpisodeBatch:
    """Return the same episodes with one more column, and other ids in padded positions."""
    # 2 is a token like any other, so that a sum over padded positions is not by chance one of zeros.
    wide = episodes.widened(episodes.prompt_ids.shape[1], episodes.response_ids.shape[1] + 1)
    return replace(wide, response_ids=wide.response_ids.masked_fill(~wide.response_mask, 2))


def _difference(gradients: Gradients, expected: Gradients) -> float:
    """Return the largest difference of two gradients, relative to the largest number in them."""
    size = max(float(gradient.abs().max()) for gradient in (*gradients.values(), *expected.values()))
    largest = max(float((gradients[name] - expected[name]).abs().max()) for name in expected)
    return largest / size if size else 0.0


def _require(algorithm: type[OnPolicyAlgorithm], case: str, difference: float, expected: str) -> None:
    """Raise an error if a difference exceeds the tolerance; NaN does."""
    assert difference <= TOLERANCE, (
        f"{algorithm.__name__} on a tabular policy ({case}): its gradient differs from the {expected} by "
        f"{difference:.2g}, relative to its size. Likely causes: {CAUSES[case]}"
    )
