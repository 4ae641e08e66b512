"""Arguments of the critic-free algorithms: one class of building blocks, and one class of defaults for each id.

    A = (R - baseline) / scale          what a response is compared with
    loss(r, A), aggregated              how tokens are weighted; r = pi / pi_old

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Gt

from rl4lms_like.algorithms.arguments import CorrectedArguments
from rl4lms_like.algorithms.preference_arguments import Swapped
from rl4lms_like.core.kl_estimators import Placement
from rl4lms_like.system.errors import ConfigIssue
from rl4lms_like.system.numbers import AboveZero, Count, Fraction, NonNegative, Positive

Baseline = Literal["mean", "leave_one_out", "length_weighted", "none"]
Scale = Literal["group", "batch", "mean", "whiten", "none"]
RatioLevel = Literal["token", "sequence"]
Surrogate = Literal["clip", "geometric", "cispo", "cpgd"]
Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm"]
EPS = 1e-4
"""Added to standard deviations of rewards."""


@dataclass(frozen=True, kw_only=True)
class CriticFreeArguments(CorrectedArguments):
    """Arguments of the algorithms without a critic; each id has other defaults.

    Args:
        gamma: discount factor of the rewards after a token, with `baseline: none`; otherwise 1.
        batch_size: approximate number of tokens per minibatch; it is filled with whole episodes. null uses the whole
            rollout.
        minibatch_episodes: number of episodes per minibatch, in place of `batch_size`; a multiple of `group_size`.
        n_epochs: number of passes over a rollout in each update.
        group_size: number of responses to each prompt, which are compared with each other. It must divide `n_envs`.
        task_reward: learn from the rewards. If false, they are only logged, and the KL to the reference (`alg.kl_div`)
            is all that is minimized.
        baseline: what is subtracted from the reward of a response: the `mean` of its group, the mean of the others
            (`leave_one_out`), the mean weighted by the numbers of tokens (`length_weighted`, OPO, arXiv 2505.23585), or
            nothing (`none`: the sum of the rewards after each token is its advantage).
        scale: what the difference is divided by: the standard deviation of the `group`, that of all rewards of the
            rollout (`batch`), the `mean` of the group (MaxRL, arXiv 2602.02710, for rewards of 0 and 1), or nothing.
            `whiten`: the advantages of all tokens of the rollout get mean 0 and standard deviation 1.
        ratio_level: probability ratio of each `token`, or of the whole `sequence`: the geometric mean of its tokens'
            (GSPO, arXiv 2507.18071).
        surrogate: loss of a token: `clip` is PPO's; `geometric` the clipped geometric mean of the ratios of a response
            (GMPO, arXiv 2507.20673); `cispo` the log-prob, weighted with a limited ratio (arXiv 2506.13585); `cpgd` the
            clipped log-ratio (arXiv 2505.12504).
        clip_range: distance below 1 at which the ratio is clipped; with `geometric`, of the log-ratio from 0.
        clip_range_high: distance above 1 (with `geometric`, above 0) at which the ratio is clipped; default:
            `clip_range`.
        dual_clip: for `clip`: largest ratio of actions with a negative advantage (arXiv 1912.09729); default: no limit.
        drift_coef: weight of KL(old policy ‖ new policy), which keeps the update close to the rollout's policy.
        loss_aggregation: mean of the tokens' losses over all tokens (`token_mean`), over responses of the mean over
            tokens (`seq_mean_token_mean`), or over responses of the sum over tokens, divided by the length of the
            longest possible response (`seq_mean_token_sum_norm`).
        dynamic_sampling: leave out groups whose rewards are all equal, and generate further ones until the rollout is
            full, at most this many times its tokens, or with `n_episodes` its episodes (DAPO, arXiv 2503.14476, uses
            10). null keeps all groups.
        overlong_buffer: fraction of the longest possible response over which a penalty for long responses grows from 0
            to 1; null has no penalty. Groups are left out by their rewards without it.
        first_token_temperature: temperature of the first token of a response, for more different responses (FIRE
            sampling, arXiv 2410.21236, uses 10); default: that of `generation_kwargs`.
        target_kl: stop the update when the approximate KL to the rollout's policy exceeds 1.5 times this value; null
            never stops it. This is not `alg.kl_div.target_kl`, the target of the KL controller.
        length_sorted_minibatches: pack episodes of similar length together: less padding, but minibatches that differ
            more.
    """

    needs_critic: ClassVar[bool] = False
    kl_in_loss: ClassVar[bool] = True
    kl_placement: ClassVar[Placement] = "loss"

    learning_rate: Positive = 1e-5
    n_steps: Count = 2048
    gamma: Fraction = 1.0
    gae_lambda: Fraction = 1.0
    max_grad_norm: Positive | None = 1.0
    batch_size: Count | None = 1024
    minibatch_episodes: Count | None = None
    n_epochs: Count = 1
    group_size: Count = 8
    task_reward: bool = True
    baseline: Baseline = "mean"
    scale: Scale = "group"
    ratio_level: RatioLevel = "token"
    surrogate: Surrogate = "clip"
    clip_range: Positive = 0.2
    clip_range_high: Positive | None = None
    dual_clip: Annotated[float, Gt(1)] | None = None
    drift_coef: NonNegative = 0.0
    loss_aggregation: Aggregation = "seq_mean_token_mean"
    dynamic_sampling: Count | None = None
    overlong_buffer: AboveZero | None = None
    first_token_temperature: Positive | None = None
    target_kl: Positive | None = None
    length_sorted_minibatches: bool = False

    @property
    def clip_high(self) -> float:
        """Clipping distance above 1."""
        return self.clip_range if self.clip_range_high is None else self.clip_range_high

    def formula(self) -> list[str]:
        """Return the advantage and the loss with the values of these arguments, line by line."""
        reference = "teacher" if self.needs_teacher else "reference"

        # The advantage of a response, or of a token.
        difference = {
            "mean": "R - mean(R of the group)",
            "leave_one_out": "R - mean(R of the others in the group)",
            "length_weighted": "R - sum(tokens * R) / sum(tokens) of the group",
            "none": f"sum of the rewards from the token on, discounted by {self.gamma:g}",
        }[self.baseline]
        advantage = {
            "group": f"({difference}) / (std(R of the group) + {EPS:g})",
            "batch": f"({difference}) / (std(R of the rollout) + {EPS:g})",
            "mean": f"({difference}) / mean(R of the group), for rewards of 0 and 1",
            "whiten": f"whitened over the tokens of the rollout: {difference}",
            "none": difference,
        }[self.scale]
        advantage = advantage if self.task_reward else ""
        if self.kl_placement == "advantage":
            advantage = f"{advantage} - kl_div.coeff * k1(pi_old, {reference}) of the token".strip()

        # The terms of a token's loss, and how they are averaged.
        terms = [self._surrogate_formula()]
        if self.drift_coef:
            terms.append(f"{self.drift_coef:g} (r - 1 - log r)")
        if self.kl_placement == "loss":
            terms.append(f"kl_div.coeff * {self.kl_estimator}(pi, {reference})")
        mean = {
            "token_mean": "mean over tokens",
            "seq_mean_token_mean": "mean over responses of the mean over tokens",
            "seq_mean_token_sum_norm": "mean over responses of the sum over tokens / longest possible response",
        }[self.loss_aggregation]

        reward = "R: reward" + (" - kl_div.coeff * k1(pi, reference)" if self.kl_placement == "reward" else "")
        if self.overlong_buffer is not None:
            reward += f", penalty of up to 1 in the last {self.overlong_buffer:.0%} of the longest possible response"
        ratio = "token" if self.ratio_level == "token" else "response (geometric mean of its tokens)"
        lines = [
            f"{self.group_size} response{'s' * (self.group_size > 1)} per prompt; {reward}",
            f"A = {advantage}",
            f"loss = {mean} of {' + '.join(terms)}",
            f"r = pi / pi_old of each {ratio}",
        ]
        if self.dynamic_sampling is not None:
            lines.append(f"groups with equal rewards are replaced, at most {self.dynamic_sampling} times the rollout")
        return lines

    def _surrogate_formula(self) -> str:
        low = 1 - self.clip_range
        high = 1 + self.clip_high
        mean_log_ratio = "mean over the response of log r"
        formula = {
            "clip": f"-min(r A, clip(r, {low:g}, {high:g}) A)",
            "geometric": f"-A exp({mean_log_ratio}, limited to {-self.clip_range:g} (A < 0) or {self.clip_high:g} "
            "(A > 0))",
            "cispo": f"-stop_gradient(min(r, {high:g})) A log pi",
            "cpgd": f"-min(A log r, A clip(log r, log {low:g}, log {high:g}))",
        }[self.surrogate]
        return formula if self.dual_clip is None else f"{formula}, at most {self.dual_clip:g} |A| where A < 0"

    def issues(self) -> Iterator[ConfigIssue]:
        yield from self._advantage_issues()
        yield from self._reward_issues()
        yield from self._surrogate_issues()

        # What is only logged cannot be shaped.
        if not self.task_reward:
            message = "has no effect with task_reward: false, where rewards are only logged"
            for key in ("baseline", "scale"):
                if getattr(self, key) != getattr(type(self), key):
                    yield ConfigIssue(key, message)
            for key in ("dynamic_sampling", "overlong_buffer"):
                if getattr(self, key) is not None:
                    yield ConfigIssue(key, message)

        # The reference of the KL can follow the policy, a teacher cannot.
        if self.reference_update_iterations is not None and self.needs_teacher:
            message = "would change the teacher, which stays as it is; remove it"
            yield ConfigIssue("reference_update_iterations", message)
        yield from super().issues()

    def _advantage_issues(self) -> Iterator[ConfigIssue]:
        # A group of one response has neither a mean to compare with nor a standard deviation.
        divides_by_group = self.scale in ("group", "batch", "mean")
        if self.group_size == 1 and self.task_reward and (self.baseline != "none" or divides_by_group):
            others = "" if self.is_pairwise else ", or baseline: none with scale: whiten or none"
            message = f"1 leaves nothing to compare with; use 2 or more{others}"
            yield ConfigIssue("group_size", message)
        if self.group_size == 1 and self.dynamic_sampling is not None:
            message = "compares the rewards of a group, which has one response with group_size: 1"
            yield ConfigIssue("dynamic_sampling", message)
        if self.group_size > 1 and self.baseline == "none" and divides_by_group:
            message = f"{self.scale} divides differences from the group's mean; with baseline: none use whiten or none"
            yield ConfigIssue("scale", message)

    def _reward_issues(self) -> Iterator[ConfigIssue]:
        # `scale: mean` divides by a success rate: the mean of rewards that are 0 or 1.
        if self.scale == "mean" and self.overlong_buffer is not None:
            message = "makes rewards that are not 0 or 1, which scale: mean requires; set it to null"
            yield ConfigIssue("overlong_buffer", message)

        # Discounting is for the rewards after a token; lambda is for values.
        if self.baseline != "none" and self.gamma != 1:
            message = "has no effect: with a baseline, all tokens of a response have the same advantage"
            yield ConfigIssue("gamma", message)
        if self.gae_lambda != 1:
            yield ConfigIssue("gae_lambda", "has no effect without a critic; remove it")
        if self.gae_length_alpha is not None:
            yield ConfigIssue("gae_length_alpha", "has no effect without a critic")

    def _surrogate_issues(self) -> Iterator[ConfigIssue]:
        message = f"has no effect with surrogate: {self.surrogate}"
        if self.surrogate != "clip" and self.ratio_level != "token":
            yield ConfigIssue("ratio_level", message)
        if self.surrogate != "clip" and self.dual_clip is not None:
            yield ConfigIssue("dual_clip", message)

        # A weight of the log-prob is limited from above only. The default of `clip_range` is no setting.
        if self.surrogate == "cispo" and "clip_range" in self.given:
            yield ConfigIssue("clip_range", f"{message} (clip_range_high has)")
        if self.surrogate == "cpgd" and self.clip_range >= 1:
            message = "must be below 1 with surrogate: cpgd, which takes the log of 1 - clip_range"
            yield ConfigIssue("clip_range", message)


@dataclass(frozen=True, kw_only=True)
class GRPOArguments(CriticFreeArguments):
    """Arguments of `grpo` (arXiv 2402.03300): rewards relative to mean and standard deviation of their group."""


@dataclass(frozen=True, kw_only=True)
class DrGRPOArguments(CriticFreeArguments):
    """Arguments of `dr_grpo` (arXiv 2503.20783): those of `grpo` with other defaults.

    No division by the standard deviation or by the length of a response, which bias GRPO.
    """

    scale: Scale = "none"
    loss_aggregation: Aggregation = "seq_mean_token_sum_norm"


@dataclass(frozen=True, kw_only=True)
class DAPOArguments(CriticFreeArguments):
    """Arguments of `dapo` (arXiv 2503.14476): those of `grpo` with other defaults.

    A higher upper clipping distance, groups with equal rewards replaced, a mean over tokens, and a penalty for long
    responses. The paper uses no KL penalty (`alg.kl_div.coeff: 0`).
    """

    group_size: Count = 16
    clip_range_high: Positive | None = 0.28
    loss_aggregation: Aggregation = "token_mean"
    dynamic_sampling: Count | None = 10
    overlong_buffer: AboveZero | None = 0.2


@dataclass(frozen=True, kw_only=True)
class GSPOArguments(CriticFreeArguments):
    """Arguments of `gspo` (arXiv 2507.18071): those of `grpo` with one clipped ratio for each response."""

    ratio_level: RatioLevel = "sequence"
    clip_range: Positive = 3e-4
    clip_range_high: Positive | None = 4e-4


@dataclass(frozen=True, kw_only=True)
class GMPOArguments(CriticFreeArguments):
    """Arguments of `gmpo` (arXiv 2507.20673): those of `grpo` with the geometric mean of clipped ratios."""

    surrogate: Surrogate = "geometric"
    clip_range: Positive = 0.4


@dataclass(frozen=True, kw_only=True)
class CPGDArguments(CriticFreeArguments):
    """Arguments of `cpgd` (arXiv 2505.12504): those of `grpo` with clipped log-ratios and a penalty for drift."""

    surrogate: Surrogate = "cpgd"
    scale: Scale = "none"
    loss_aggregation: Aggregation = "token_mean"
    drift_coef: NonNegative = 0.1


@dataclass(frozen=True, kw_only=True)
class CISPOArguments(CriticFreeArguments):
    """Arguments of `cispo` (arXiv 2506.13585): those of `grpo` with limited ratios as weights of the log-probs."""

    surrogate: Surrogate = "cispo"
    clip_range_high: Positive | None = 4.0
    loss_aggregation: Aggregation = "token_mean"


@dataclass(frozen=True, kw_only=True)
class RLOOArguments(CriticFreeArguments):
    """Arguments of `rloo` (arXiv 2402.14740): rewards relative to the mean of the other responses to the prompt."""

    kl_placement: ClassVar[Placement] = "reward"

    group_size: Count = 4
    baseline: Baseline = "leave_one_out"
    scale: Scale = "none"
    loss_aggregation: Aggregation = "seq_mean_token_sum_norm"


@dataclass(frozen=True, kw_only=True)
class ReinforcePPArguments(CriticFreeArguments):
    """Arguments of `reinforce_pp` (REINFORCE++, arXiv 2501.03262): one response per prompt, whitened returns."""

    kl_placement: ClassVar[Placement] = "reward"

    group_size: Count = 1
    baseline: Baseline = "none"
    scale: Scale = "whiten"
    loss_aggregation: Aggregation = "token_mean"


@dataclass(frozen=True, kw_only=True)
class ReinforcePPBaselineArguments(CriticFreeArguments):
    """Arguments of `reinforce_pp_baseline` (arXiv 2501.03262): differences from the group's mean, whitened."""

    kl_estimator: ClassVar[Literal["k2", "k3"]] = "k2"

    scale: Scale = "whiten"
    loss_aggregation: Aggregation = "token_mean"


@dataclass(frozen=True, kw_only=True)
class OPOArguments(CriticFreeArguments):
    """Arguments of `opo` (arXiv 2505.23585): the baseline of least variance, a mean weighted by lengths.

    The paper uses one step per rollout (`batch_size: null`) and no KL penalty.
    """

    baseline: Baseline = "length_weighted"
    scale: Scale = "none"
    loss_aggregation: Aggregation = "token_mean"


@dataclass(frozen=True, kw_only=True)
class MaxRLArguments(CriticFreeArguments):
    """Arguments of `maxrl` (arXiv 2602.02710): advantages divided by the success rate, for rewards of 0 and 1."""

    scale: Scale = "mean"
    loss_aggregation: Aggregation = "seq_mean_token_sum_norm"


@dataclass(frozen=True, kw_only=True)
class OPDArguments(CriticFreeArguments):
    """Arguments of `opd` (on-policy distillation): the KL from the policy to a teacher, on the policy's own samples.

    With `task_reward`, the advantages of `grpo` are added. For adapters (`peft`), 1e-4 suits `learning_rate` better.
    """

    needs_reference: ClassVar[bool] = True
    needs_teacher: ClassVar[bool] = True
    kl_placement: ClassVar[Placement] = "advantage"

    learning_rate: Positive = 5e-5
    group_size: Count = 4
    task_reward: bool = False
    loss_aggregation: Aggregation = "token_mean"


_WITHOUT_ADVANTAGES = (
    *("task_reward", "baseline", "scale", "ratio_level", "surrogate", "clip_range", "clip_range_high", "dual_clip"),
    *("drift_coef", "loss_aggregation", "importance_correction", "correction_range"),
)
"""Arguments without effect in `online_dpo`, which has no advantages and no ratios to the policy of the rollout."""


@dataclass(frozen=True, kw_only=True)
class OnlineDPOArguments(CriticFreeArguments):
    """Arguments of `online_dpo` (arXiv 2402.04792): the loss of DPO for the best and the worst response to a prompt.

    `alg.kl_div.coeff` is beta. Arguments for advantages and ratios are refused, since they have no effect.

    Args:
        loss: `sigmoid` is that of DPO (arXiv 2305.18290), `ipo` that of IPO (arXiv 2310.12036), `hinge` that of SLiC
            (arXiv 2305.10425).
        label_smoothing: for `sigmoid`: probability that the reward prefers the wrong response.
    """

    needs_reference: ClassVar[bool] = True
    kl_coeff: ClassVar[float] = 0.1
    is_pairwise: ClassVar[bool] = True
    has_ratios: ClassVar[bool] = False

    batch_size: Count | None = None
    group_size: Count = 2
    loss: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    label_smoothing: Swapped = 0.0

    def formula(self) -> list[str]:
        """Return the loss with the values of these arguments, line by line."""
        difference = "beta (l_best - l_worst)"
        sigmoid = f"-log sigmoid({difference})"
        if self.label_smoothing:
            sigmoid = f"-{1 - self.label_smoothing:g} log sigmoid({difference})"
            sigmoid += f" - {self.label_smoothing:g} log sigmoid(-{difference})"
        loss = {
            "sigmoid": sigmoid,
            "ipo": "(l_best - l_worst - 1 / (2 beta))^2",
            "hinge": f"max(0, 1 - {difference})",
        }[self.loss]

        lines = [
            f"best and worst of {self.group_size} responses to a prompt by their reward; equal rewards are no pair",
            f"loss = mean over the pairs of {loss}",
            "l = sum over a response's tokens of log pi - log pi_ref; beta: kl_div.coeff",
        ]
        if self.dynamic_sampling is not None:
            lines.append(f"groups with equal rewards are replaced, at most {self.dynamic_sampling} times the rollout")
        return lines

    def issues(self) -> Iterator[ConfigIssue]:
        issues = []
        for key in _WITHOUT_ADVANTAGES:
            if getattr(self, key) != getattr(type(self), key):
                issues.append(ConfigIssue(key, "has no effect on pairs, which have no advantages; remove it"))
        if self.label_smoothing and self.loss != "sigmoid":
            issues.append(ConfigIssue("label_smoothing", f"has no effect with loss: {self.loss}"))
        yield from issues

        # Rules about the values of those keys would say how to correct what is to be removed.
        refused = {issue.path for issue in issues}
        for issue in super().issues():
            if issue.path not in refused:
                yield issue
