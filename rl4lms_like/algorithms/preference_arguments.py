"""Arguments of the objectives of preference training (`alg.args`). This module does not import torch.

A formula is written for one pair (for `kto`: for one response); the loss of a step is the mean over its pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Lt

from rl4lms_like.system.errors import ConfigIssue
from rl4lms_like.system.numbers import AboveZero, Count, NonNegative, Positive
from rl4lms_like.system.schema import Block

LOSS = "preference/loss"
REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")
LOG_PROBS = ("logps/chosen", "logps/rejected")
MEANS = ("mean_logps/chosen", "mean_logps/rejected", "mean_logps/margins", "mean_logps/accuracies")
"""Keys of logged numbers. Rewards are outputs of a reward model, or implied by log-ratios; mean log-probs are not
rewards, because they have no reference."""
LENGTH_CORRELATION = "rewards/length_correlation"
REFERENCE_POINT = "kto/z0"
LOG_ODDS_RATIO = "orpo/log_odds_ratio"

Swapped = Annotated[float, Ge(0), Lt(0.5)]


@dataclass(frozen=True, kw_only=True)
class PreferenceArguments(Block):
    """Arguments of all objectives.

    Args:
        dropout: train with the dropout rates of the model's config and of `peft`, or with `adapters` only with that of
            `peft`. The reference has none.
    """

    needs_reference: ClassVar[bool] = False
    """True if responses are scored by their log-ratio to a reference model."""
    has_language_model: ClassVar[bool] = True
    """False if the trained model writes no text."""
    reads_labels: ClassVar[bool] = False
    """True if single responses with labels can be learned, and pairs are two of them."""

    keys: ClassVar[tuple[str, ...]] = (LOSS, *REWARDS, *LOG_PROBS)
    """Keys of what is measured on the preferences of `val` and `test`."""

    dropout: bool | Literal["adapters"] = False

    def formula(self) -> list[str]:
        """Return the loss with the values of these arguments, line by line."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class RewardModelArguments(PreferenceArguments):
    """Arguments of `reward_model`.

    Args:
        center_coef: weight of a term that keeps rewards centred at 0 (arXiv 2312.09244 uses 0.01).
        append_eos: end each text with the end-of-text token. It is recorded in the model's config.json, where the
            reward and the metric `reward_model` find it.
    """

    has_language_model: ClassVar[bool] = False
    keys: ClassVar[tuple[str, ...]] = (LOSS, *REWARDS, LENGTH_CORRELATION)

    center_coef: NonNegative = 0.0
    append_eos: bool = True

    def formula(self) -> list[str]:
        center = f" + {self.center_coef:g} (r_chosen + r_rejected)^2" if self.center_coef else ""
        end = "its end-of-text token" if self.append_eos else "its last token"
        return [
            f"loss = -log sigmoid(r_chosen - r_rejected - margin){center}",
            f"r = output of the model for prompt and response, at {end}; margin: datapool.args.margin_column, else 0",
        ]


@dataclass(frozen=True, kw_only=True)
class ResponseArguments(PreferenceArguments):
    """Arguments of the objectives that train a language model.

    Args:
        max_response_length: maximum number of tokens of a response, with its end token; longer ones are truncated, and
            their number is reported. Default: what the model accepts after the prompt.
        logits_budget_mb: limit in MiB for the logits that a forward pass stores for its backward pass. If they need
            more, they are recomputed in chunks of this size.
    """

    max_response_length: Count | None = None
    logits_budget_mb: Annotated[float, Ge(1)] = 512


@dataclass(frozen=True, kw_only=True)
class ReferenceArguments(ResponseArguments):
    """Arguments of the objectives with a reference model.

    Args:
        beta: weight of the log-ratio in the reward that it implies; a larger one keeps the model closer to the
            reference.
        reference_model: model of this hub id or local folder; default: the initial model.
        reference_update_iterations: number of optimizer steps between two updates of the reference with the model's
            weights (TR-DPO, arXiv 2404.09656). The reference then stays in memory and reads every batch; null never
            updates it.
        reference_mixing: weight of the model in these updates, where the old reference has the rest.
    """

    needs_reference: ClassVar[bool] = True

    beta: Positive = 0.1
    reference_model: str | None = None
    reference_update_iterations: Count | None = None
    reference_mixing: AboveZero = 1.0

    def issues(self) -> Iterator[ConfigIssue]:
        yield from super().issues()
        # Compared with the default: an objective checks its arguments again, with all values.
        if self.reference_mixing != 1 and self.reference_update_iterations is None:
            yield ConfigIssue("reference_mixing", "has no effect without reference_update_iterations")

    def _log_ratio(self, kind: str = "sum") -> str:
        reference = "the initial model" if self.reference_model is None else self.reference_model
        if self.reference_update_iterations is not None:
            reference += f", every {self.reference_update_iterations} steps mixed with {self.reference_mixing:g} pi"
        return f"l = {kind} over a response's tokens of log pi - log pi_ref; reference: {reference}"


@dataclass(frozen=True, kw_only=True)
class DPOArguments(ReferenceArguments):
    """Arguments of `dpo`.

    Args:
        loss: loss of the difference of rewards: `sigmoid` is DPO's; `hinge` that of SLiC (arXiv 2309.06657); `robust`
            removes the effect of swapped labels from the mean of `sigmoid` (arXiv 2403.00409).
        label_smoothing: probability that the labels of a pair are swapped: with `sigmoid` conservative DPO; with
            `robust` it must be above 0.
        sft_weight: weight of the negative log-likelihood of the better response, per token (RPO, arXiv 2404.19733).
    """

    loss: Literal["sigmoid", "hinge", "robust"] = "sigmoid"
    label_smoothing: Swapped = 0.0
    sft_weight: NonNegative = 0.0

    def issues(self) -> Iterator[ConfigIssue]:
        yield from super().issues()
        if self.loss == "hinge" and self.label_smoothing:
            yield ConfigIssue("label_smoothing", "has no effect with loss: hinge")
        if self.loss == "robust" and not self.label_smoothing:
            yield ConfigIssue("label_smoothing", "must be above 0 with loss: robust")

    def formula(self) -> list[str]:
        e = self.label_smoothing
        loss = {
            "sigmoid": f"-{1 - e:g} log sigmoid(d) - {e:g} log sigmoid(-d)" if e else "-log sigmoid(d)",
            "robust": f"(-{1 - e:g} log sigmoid(d) + {e:g} log sigmoid(-d)) / {1 - 2 * e:g}",
            "hinge": "max(0, 1 - d)",
        }[self.loss]
        nll = f" + {self.sft_weight:g} (-mean log pi of the chosen response's tokens)" if self.sft_weight else ""
        return [f"loss = {loss}{nll}", f"d = {self.beta:g} (l_chosen - l_rejected)", self._log_ratio()]


@dataclass(frozen=True, kw_only=True)
class IPOArguments(ReferenceArguments):
    """Arguments of `ipo`.

    Args:
        beta: the log-ratios are to differ by 1 / (2 beta).
        length_average: a log-ratio is the mean over the tokens of a response, as in common implementations; false: the
            sum, as in the paper.
    """

    length_average: bool = True

    def formula(self) -> list[str]:
        kind = "mean" if self.length_average else "sum"
        return [f"loss = (l_chosen - l_rejected - {1 / (2 * self.beta):g})^2", self._log_ratio(kind)]


@dataclass(frozen=True, kw_only=True)
class KTOArguments(ReferenceArguments):
    """Arguments of `kto`.

    Args:
        desirable_weight: weight of good responses.
        undesirable_weight: weight of bad responses. The paper recommends weights that balance the two classes.
    """

    reads_labels: ClassVar[bool] = True
    keys: ClassVar[tuple[str, ...]] = (LOSS, *REWARDS[:3], *LOG_PROBS, REFERENCE_POINT)

    desirable_weight: NonNegative = 1.0
    undesirable_weight: NonNegative = 1.0

    def formula(self) -> list[str]:
        return [
            f"loss = {self.desirable_weight:g} (1 - sigmoid({self.beta:g} (l - z0))) of a good response,",
            f"       {self.undesirable_weight:g} (1 - sigmoid({self.beta:g} (z0 - l))) of a bad one",
            "z0 = max(0, mean of l over the optimizer step, each response with the prompt of another one)",
            self._log_ratio(),
        ]


@dataclass(frozen=True, kw_only=True)
class ORPOArguments(ResponseArguments):
    """Arguments of `orpo`.

    Args:
        odds_ratio_weight: weight of the odds ratio, lambda of the paper.
    """

    keys: ClassVar[tuple[str, ...]] = (LOSS, *MEANS, *LOG_PROBS, LOG_ODDS_RATIO)

    odds_ratio_weight: NonNegative = 0.1

    def formula(self) -> list[str]:
        return [
            f"loss = -m_chosen - {self.odds_ratio_weight:g} log sigmoid(log odds(m_chosen) - log odds(m_rejected))",
            "m = mean log pi over a response's tokens; odds(m) = exp(m) / (1 - exp(m))",
        ]


@dataclass(frozen=True, kw_only=True)
class SimPOArguments(ResponseArguments):
    """Arguments of `simpo`.

    Args:
        beta: weight of the mean log-probs.
        gamma: margin by which the weighted mean log-probs are to differ.
    """

    keys: ClassVar[tuple[str, ...]] = (LOSS, *MEANS, *LOG_PROBS)

    beta: Positive = 2.0
    gamma: NonNegative = 1.0

    def formula(self) -> list[str]:
        return [
            f"loss = -log sigmoid({self.beta:g} (m_chosen - m_rejected) - {self.gamma:g})",
            "m = mean log pi over a response's tokens",
        ]
