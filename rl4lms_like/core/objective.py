"""Parts of a loss: terms per action, and the weights with which they are averaged.

    policy, kl              weighted: sum_t w_t x_t / n_actions     w = 1 is the mean over all actions
    value, entropy, nll     mean over all actions; `nll` contains weights of its own

The weights are computed once for a whole minibatch. The loss of a micro-batch is its fraction of the minibatch's
actions times the mean of its weighted terms, so the gradient does not depend on how a minibatch is split.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

LossAggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm"]


class Objective(NamedTuple):
    """Terms of an algorithm's loss on some whole episodes, one number per action, to be minimised.

    A loss of a whole response is repeated for each of its actions (`repeat_interleave(episodes.lengths)`), and averaged
    with `seq_mean_token_mean`.

    Args:
        policy: `[n_actions]`.
        log_ratio: `[n_actions]`, current log-prob minus log-prob in the rollout; detached.
        value: `[n_actions]`, the critic's error; None = there is no critic.
        entropy: `[n_actions]`, negative entropy; None = not computed.
        kl: `[n_actions]`, KL penalty to the reference, with its coefficient; None = it is part of the rewards or
            advantages, or there is none.
        nll: `[n_actions]`, weighted negative log-likelihood; None = not used.
        clipped: `[n_actions]`, 1 where the loss limits the ratio, else 0; None = determined from `log_ratio`.
    """

    policy: Tensor
    log_ratio: Tensor
    value: Tensor | None = None
    entropy: Tensor | None = None
    kl: Tensor | None = None
    nll: Tensor | None = None
    clipped: Tensor | None = None

    def detach(self) -> Objective:
        """Return the same terms, detached from the graph."""
        return self._replace(**{name: term.detach() for name, term in self._terms().items()})

    def empty(self) -> Objective:
        """Return the same terms for no actions."""
        # A pass that only keeps step with other processes: its terms must be there by name, but add no action.
        return self._replace(**{name: term[:0] for name, term in self._terms().items()})

    def _terms(self) -> dict[str, Tensor]:
        """Return the terms that are not None, by name."""
        return {name: term for name, term in self._asdict().items() if term is not None}

    @staticmethod
    def joined(objectives: Sequence[Objective]) -> Objective:
        """Concatenate the terms of several micro-batches."""
        # All micro-batches have the same terms.
        joined: dict[str, Tensor] = {}
        for name in objectives[0]._terms():
            joined[name] = torch.cat([getattr(objective, name) for objective in objectives])

        return objectives[0]._replace(**joined)


WEIGHTED = ("policy", "kl")
"""Terms averaged with weights; the others are means over all actions."""


def action_weights(
    lengths: Tensor, aggregation: LossAggregation, norm: float | None = None, kept: Tensor | None = None
) -> Tensor:
    """Compute the weights of the actions of a whole minibatch, relative to a mean over all actions.

        token_mean                 1
        seq_mean_token_mean        n_actions / (n_episodes length_i)     mean over episodes of the mean over actions
        seq_mean_token_sum_norm    n_actions / (n_episodes norm)         mean over episodes of the sum / constant
                                                                         (Dr. GRPO, arXiv 2503.20783)

    Actions that are not kept have weight 0 and do not count in these numbers; `norm` stays the same.

    Args:
        lengths: `[n_episodes]`, number of actions of each episode.
        aggregation: see above.
        norm: the constant of `seq_mean_token_sum_norm`, commonly the longest possible response.
        kept: `[n_actions]`, bool; default: all.

    Returns:
        `[n_actions]`, float32, episode after episode.

    Raises:
        ValueError: `seq_mean_token_sum_norm` without `norm`.

    Examples:
        >>> action_weights(torch.tensor([1, 3]), "seq_mean_token_mean").tolist()  # 4 / (2 * 1), then 4 / (2 * 3)
        [2.0, 0.6666666865348816, 0.6666666865348816, 0.6666666865348816]
    """
    n_actions = int(lengths.sum())

    # First the weights of the kept actions alone, as if there were no others: they are relative to a mean over n_kept
    # actions. But `weighted_mean` divides by all actions, so they are multiplied by n_actions / n_kept.
    if kept is not None:
        row = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
        counts = torch.zeros_like(lengths).index_add(0, row, kept.to(lengths))  # kept actions of each episode

        weights = torch.zeros(n_actions, dtype=torch.float32, device=lengths.device)
        if bool(kept.any()):
            weights[kept] = action_weights(counts[counts > 0], aggregation, norm) * (n_actions / int(counts.sum()))
        return weights

    if aggregation == "token_mean":
        return torch.ones(n_actions, device=lengths.device)

    # w_t = n_actions / (n_episodes d_i), so that 1/n_actions sum_t w_t x_t = 1/n_episodes sum_i 1/d_i sum_{t in i} x_t.
    if aggregation == "seq_mean_token_mean":
        divisors = lengths.clamp_min(1).float()  # avoids n / 0 for an episode without actions
    elif norm is None:
        raise ValueError("seq_mean_token_sum_norm requires `norm`, the constant to divide by")
    else:
        divisors = torch.full(lengths.shape, float(norm), device=lengths.device)
    return (n_actions / (len(lengths) * divisors)).repeat_interleave(lengths)


def weighted_mean(name: str, term: Tensor, weights: Tensor) -> Tensor:
    """Return the mean of a term over actions, weighted if the term is in `WEIGHTED`.

    This is the mean of weight times term, not a sum divided by a sum of weights, so that `token_mean` equals
    Stable-Baselines3's loss to the last bit. Even rounding errors matter: where the exact gradient is 0, AdamW would
    turn them into full steps.

    Examples:
        >>> term, weights = torch.tensor([1.0, 3.0]), torch.tensor([0.5, 1.5])
        >>> float(weighted_mean("policy", term, weights)), float(weighted_mean("value", term, weights))
        (2.5, 2.0)
    """
    if name in WEIGHTED:
        term = weights * term
    return term.mean()
