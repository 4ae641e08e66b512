"""Dataclasses for `alg.args`; names and defaults follow Stable-Baselines3. This module does not import torch.

A rule about the arguments alone is the method `issues` of their class. Those that also read the policy or the KL are in
`algorithms.rules`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, cast

from annotated_types import Gt, Interval

from rl4lms_like.core.kl_estimators import Placement
from rl4lms_like.system.errors import ConfigIssue
from rl4lms_like.system.numbers import AboveZero, Count, Fraction, NonNegative, Positive, Seed, Whole
from rl4lms_like.system.schema import Block

Correction = Literal["none", "tis", "icepop", "sequence_mask"]
NO_CORRECTION: Correction = "none"


@dataclass(frozen=True, kw_only=True)
class CriticPretraining:
    """Settings of value pretraining (VC-PPO, arXiv 2503.01491): the critic learns the returns of the starting policy.

    The policy is not changed. The targets are Monte-Carlo returns (lambda = 1). Pretraining ends when the explained
    variance of new rollouts, measured before the critic is trained on them, no longer rises.

    Args:
        max_rollouts: maximum number of rollouts.
        n_epochs: passes of the critic over each rollout.
        learning_rate: learning rate; default: the critic's in training.
        min_gain: increase of the explained variance that counts as progress.
        patience: rollouts without progress after which pretraining ends.
    """

    max_rollouts: Count = 20
    n_epochs: Count = 4
    learning_rate: Positive | None = None
    min_gain: NonNegative = 0.01
    patience: Count = 2


@dataclass(frozen=True, kw_only=True)
class OnPolicyArguments(Block):
    """Arguments of all on-policy algorithms.

    Args:
        learning_rate: learning rate of the policy. The default suits pretrained models of about 100M parameters.
        critic_learning_rate: learning rate of the critic (with `critic: shared`, of its head); default: ten times
            `learning_rate`.
        learning_rate_schedule: `constant`, or a `linear` or `cosine` decay to 0 over the run.
        warmup_iterations: number of iterations at the start in which the learning rates rise linearly to those of the
            schedule; the first one has 1 / (warmup_iterations + 1) of it.
        n_steps: size of a rollout in tokens, divided by `n_envs`: whole episodes are collected until there are at least
            `n_steps * n_envs` tokens.
        n_episodes: size of a rollout in episodes of all processes, in place of `n_steps`; a multiple of `n_envs`.
        group_size: number of responses to each prompt; they are generated together. It must divide `n_envs`.
        gamma: discount factor.
        gae_lambda: lambda of generalized advantage estimation (arXiv 1506.02438).
        value_gae_lambda: lambda of the critic's targets (VC-PPO, arXiv 2503.01491, uses 1); default: `gae_lambda`.
        gae_length_alpha: alpha of the length-adaptive lambda of the advantages, max(0, 1 - 1 / (alpha l)) for an
            episode of l actions (VAPO, arXiv 2504.05118, uses 0.05 for thousands of actions). It replaces `gae_lambda`,
            which then applies to the critic's targets only.
        critic_pretrain: train the critic on rollouts of the starting policy before the first iteration; `{}` has all
            defaults, see `CriticPretraining`. Default: none.
        critic_only_iterations: number of iterations at the start in which only the critic is trained.
        bootstrap_truncated: add the critic's value after the last token of an episode that reached the length limit.
        ent_coef: weight of the entropy bonus.
        vf_coef: weight of the value loss.
        max_grad_norm: maximum norm of the gradient. Actor and critic are clipped separately, with `critic: shared`
            together. null does not clip.
        reference_update_iterations: number of iterations between two updates of the reference model of the KL penalty
            with the policy's weights; null never updates it.
        reference_mixing: weight of the policy in these updates, where the old reference has the rest.
        non_finite: what to do if loss or gradient are NaN or infinite: `stop` ends the run; `skip` skips this optimizer
            step, and ends the run if all steps of an update were skipped. In both cases the weights do not change.
        micro_batch_size: maximum number of tokens per forward pass, of prompts and responses, with their padding (at
            least one episode). A prompt that is computed once for several responses counts once. Minibatches are split
            to limit the memory; their gradient does not change. Default: no split.
        seed: seed of the rollouts and minibatches; default: the config's top-level `seed`.
        device: device as at the top level; default: the config's top-level `device`.
        verbose: 1 or 2 prints Stable-Baselines3's table after every iteration.
        tensorboard_log: folder for TensorBoard event files.
        use_sde: setting of Stable-Baselines3 for continuous actions; must be false.
        sde_sample_freq: setting of Stable-Baselines3 without an effect here.
        create_eval_env: key of old configs without an effect.
    """

    CRITIC_FACTOR: ClassVar[float] = 10.0  # above 1: the critic is trained from scratch, the policy is pretrained
    """Default ratio of the learning rates of critic and policy, measured in `docs/hyperparameters.md`."""

    needs_critic: ClassVar[bool] = True
    """True if the algorithm learns values. If not, its policy has no critic, and `Minibatch.old_values` are 0."""
    kl_in_loss: ClassVar[bool] = False
    """True if the KL penalty can be part of advantages or loss (`alg.kl_div.placement: advantage` or `loss`)."""
    kl_placement: ClassVar[Placement] = "reward"
    """Default of `alg.kl_div.placement`."""
    kl_estimator: ClassVar[Literal["k2", "k3"]] = "k3"
    """Default of `alg.kl_div.estimator` with `placement: loss`; otherwise it is `k1`."""
    needs_reference: ClassVar[bool] = False
    """True if the algorithm cannot learn without a reference."""
    kl_coeff: ClassVar[float] = 1.0
    """Usual coefficient of the KL of an algorithm that cannot learn without it, for messages."""
    is_pairwise: ClassVar[bool] = False
    """True if the loss compares two responses by their log-ratios to the reference."""
    needs_teacher: ClassVar[bool] = False
    """True if the reference of the KL is another model, from which the policy learns (`teacher_model`)."""
    IN_EPISODES: ClassVar[dict[str, str]] = {"n_episodes": "n_steps", "minibatch_episodes": "batch_size"}
    """Size in episodes -> the size in tokens that it replaces, whose default then does not apply."""

    # Options that only some algorithms have, with the values that turn them off. Without annotations they are no
    # fields: `alg.args` has them only if the class of the algorithm's arguments declares them.
    critic_epochs = cast("int | None", None)
    normalize_advantage = cast('bool | Literal["rollout"]', False)
    importance_correction = NO_CORRECTION
    correction_range = cast("tuple[float, float] | None", None)
    dynamic_sampling = cast("int | None", None)
    first_token_temperature = cast("float | None", None)
    length_sorted_minibatches = False
    minibatch_episodes = cast("int | None", None)

    learning_rate: Positive
    critic_learning_rate: Positive | None = None
    learning_rate_schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_iterations: Whole = 0
    n_steps: Count
    n_episodes: Count | None = None
    group_size: Count = 1
    gamma: Fraction = 0.99
    gae_lambda: Fraction = 0.95
    value_gae_lambda: Fraction | None = None
    gae_length_alpha: Positive | None = None
    critic_pretrain: CriticPretraining | None = None
    critic_only_iterations: Whole = 0
    bootstrap_truncated: bool = False
    ent_coef: float = 0.0
    vf_coef: NonNegative = 0.5
    max_grad_norm: Positive | None = 0.5
    non_finite: Literal["stop", "skip"] = "stop"
    reference_update_iterations: Count | None = None
    reference_mixing: AboveZero = 1.0
    micro_batch_size: Count | None = None
    seed: Seed | None = None
    device: str | None = None
    verbose: Literal[0, 1, 2] = 0
    tensorboard_log: str | None = None
    use_sde: Literal[False] = False
    sde_sample_freq: Literal[-1] = -1
    create_eval_env: bool = False

    @property
    def corrects_by_ratios(self) -> bool:
        """True if only the ratios of the loss can correct for a sampling in another precision."""
        return False

    def issues(self) -> Iterator[ConfigIssue]:
        # Compared with the default: a resolved config has all keys.
        if self.reference_mixing != 1 and self.reference_update_iterations is None:
            yield ConfigIssue("reference_mixing", "has no effect without reference_update_iterations")
        for in_episodes, in_tokens in self.IN_EPISODES.items():
            if getattr(self, in_episodes) is None:
                continue
            if in_tokens in self.given and getattr(self, in_tokens) is not None:
                yield ConfigIssue(in_episodes, f"{in_tokens} sets the same size, in tokens; remove one of them")

        minibatch = self.minibatch_episodes
        if minibatch is None:
            return
        if self.n_episodes is not None and minibatch > self.n_episodes:
            message = f"{minibatch} is more than a rollout has (n_episodes: {self.n_episodes})"
            yield ConfigIssue("minibatch_episodes", message)

        # Responses to one prompt are packed together, so that a minibatch computes the prompt once.
        if minibatch % self.group_size:
            message = f"must be a multiple of group_size, {self.group_size}; got {minibatch}"
            yield ConfigIssue("minibatch_episodes", message)


CORRECTION_RANGES = {"tis": (0.0, 2.0), "icepop": (0.5, 5.0), "sequence_mask": (0.5, 2.0)}
"""Default limits of the importance weights."""


@dataclass(frozen=True, kw_only=True)
class CorrectedArguments(OnPolicyArguments):
    """Arguments of algorithms that can correct for tokens of another distribution.

    Args:
        importance_correction: weights for tokens that were sampled from another distribution than the trained one
            (temperature, top-p, top-k, first token, an engine with other precision): `tis` limits them, `icepop` leaves
            out tokens with a weight outside `correction_range`, `sequence_mask` responses whose geometric mean of the
            weights is outside.
        correction_range: lower and upper limit of the weights; default: 0 and 2 for `tis`, 0.5 and 5 for `icepop`, 0.5
            and 2 for `sequence_mask`.
    """

    has_ratios: ClassVar[bool] = True
    """True if the loss has ratios, which correct for another distribution if it is the one that they are to."""

    importance_correction: Correction = "none"
    correction_range: tuple[NonNegative, Positive] | None = None

    @property
    def corrects_by_ratios(self) -> bool:
        return self.has_ratios and self.importance_correction == "none"

    def issues(self) -> Iterator[ConfigIssue]:
        yield from super().issues()
        limits = self.correction_range
        if limits is not None and not limits[0] <= 1 <= limits[1]:
            message = f"must contain 1, the weight of tokens of the same policy; got {list(limits)}"
            yield ConfigIssue("correction_range", message)


@dataclass(frozen=True, kw_only=True)
class PPOArguments(CorrectedArguments):
    """Arguments of `ppo` (arXiv 1707.06347).

    Args:
        batch_size: approximate number of tokens per minibatch; it is filled with whole episodes.
        minibatch_episodes: number of episodes per minibatch, in place of `batch_size`; a multiple of `group_size`.
        n_epochs: number of passes over a rollout in each update.
        critic_epochs: number of passes of the critic; default: `n_epochs`. Passes after `n_epochs` train only the
            critic.
        clip_range: epsilon of the clipped ratio, which is limited to 1 ± epsilon.
        clip_range_high: distance above 1 at which the ratio is clipped (DAPO, arXiv 2503.14476); default: `clip_range`.
        dual_clip: largest ratio of actions with a negative advantage (arXiv 1912.09729); default: no limit.
        ratio_band: lowest and highest ratio; actions with another ratio are left out of the policy's loss and of its
            mean, instead of clipping (SAO, arXiv 2607.07508, uses 0.2 and 4).
        nll_coef: weight of the negative log-likelihood of good episodes (VAPO, arXiv 2504.05118).
        nll_threshold: smallest task reward of a good episode.
        clip_range_vf: maximum change of a token's value in an update (clipped); default: no clipping.
        normalize_advantage: `rollout` normalizes once over the whole rollout. true normalizes within each minibatch,
            like Stable-Baselines3; if a minibatch has only one episode, good and bad episodes then get the same mean
            advantage. false does not normalize.
        target_kl: stop the update when the approximate KL to the rollout's policy exceeds 1.5 times this value; null
            never stops it. This is not `alg.kl_div.target_kl`, the target of the KL controller.
        length_sorted_minibatches: pack episodes of similar length together: less padding, but minibatches that differ
            more.
        loss_aggregation: mean of the tokens' policy losses over all tokens (`token_mean`), over responses of the mean
            over tokens (`seq_mean_token_mean`), or over responses of the sum over tokens, divided by the length of the
            longest possible response (`seq_mean_token_sum_norm`); default: `token_mean`.
    """

    learning_rate: Positive = 1e-5
    n_steps: Count = 2048
    batch_size: Count = 64
    minibatch_episodes: Count | None = None
    n_epochs: Count = 10
    critic_epochs: Count | None = None
    clip_range: Positive = 0.2
    clip_range_high: Positive | None = None
    dual_clip: Annotated[float, Gt(1)] | None = None
    ratio_band: tuple[NonNegative, Positive] | None = None
    nll_coef: NonNegative = 0.0
    nll_threshold: float = 1.0
    clip_range_vf: Positive | None = None
    normalize_advantage: bool | Literal["rollout"] = "rollout"
    target_kl: Positive | None = None
    length_sorted_minibatches: bool = False
    loss_aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm"] | None = None

    def issues(self) -> Iterator[ConfigIssue]:
        yield from super().issues()
        band = self.ratio_band
        if band is not None and not band[0] < 1 < band[1]:
            yield ConfigIssue("ratio_band", f"must contain 1, the ratio in the first minibatch; got {list(band)}")

        # Compared with the defaults of the class: those of VAPO clip, and a band may be added to them.
        defaults = type(self)
        if band is not None:
            message = "has no effect with ratio_band, which replaces clipping; remove one of them"
            for key in ("clip_range", "clip_range_high", "dual_clip"):
                if getattr(self, key) not in (None, getattr(defaults, key)):
                    yield ConfigIssue(key, message)
        if self.nll_threshold != defaults.nll_threshold and not self.nll_coef:
            yield ConfigIssue("nll_threshold", "has no effect with nll_coef: 0")


@dataclass(frozen=True, kw_only=True)
class NLPOArguments(PPOArguments):
    """Arguments of `nlpo` (arXiv 2210.01241): those of `ppo`. Its policy has the arguments of the masks."""


@dataclass(frozen=True, kw_only=True)
class VAPOArguments(PPOArguments):
    """Arguments of `vapo` (arXiv 2504.05118): those of `ppo` with other defaults.

    A length-adaptive lambda for the advantages and lambda 1 for the critic's targets, a pretrained critic, a higher
    upper clipping distance, and the negative log-likelihood of good episodes. Set `nll_threshold` to the reward of a
    good episode, and a larger `gae_length_alpha` for responses of fewer than a hundred tokens.
    """

    CRITIC_FACTOR: ClassVar[float] = 2.0

    gae_lambda: Fraction = 1.0
    gae_length_alpha: Positive | None = 0.05
    critic_pretrain: CriticPretraining | None = CriticPretraining()
    clip_range_high: Positive | None = 0.28
    nll_coef: NonNegative = 0.1


@dataclass(frozen=True, kw_only=True)
class SAOArguments(PPOArguments):
    """Arguments of `sao` (arXiv 2607.07508): those of `ppo` with other defaults.

    One response per prompt, one pass of the policy and two of the critic. Actions whose ratio leaves a band are left
    out of the loss. The attention of a separate critic is frozen (`critic_frozen` of the policy), and the first ten
    iterations train only the critic.
    """

    CRITIC_FACTOR: ClassVar[float] = 5.0

    n_epochs: Count = 1
    critic_epochs: Count | None = 2
    ratio_band: tuple[NonNegative, Positive] | None = (0.2, 4.0)
    critic_only_iterations: Whole = 10


@dataclass(frozen=True, kw_only=True)
class A2CArguments(CorrectedArguments):
    """Arguments of `a2c` (arXiv 1602.01783).

    Args:
        rms_prop_eps: epsilon of RMSprop.
        use_rms_prop: use RMSprop (alpha 0.99). false uses the policy's own optimizer, AdamW.
        normalize_advantage: normalize advantages over the whole rollout.
    """

    has_ratios: ClassVar[bool] = False

    learning_rate: Positive = 5e-5
    n_steps: Count = 5
    gae_lambda: Fraction = 1.0
    rms_prop_eps: Positive = 1e-5
    use_rms_prop: bool = True
    normalize_advantage: bool = False


@dataclass(frozen=True, kw_only=True)
class TRPOArguments(OnPolicyArguments):
    """Arguments of `trpo` (arXiv 1502.05477).

    Args:
        learning_rate: learning rate of the critic; the trust region determines the size of the policy's step.
        critic_learning_rate: learning rate of the critic; replaces `learning_rate`.
        batch_size: approximate number of tokens per minibatch of the critic's updates; it is filled with whole
            episodes.
        minibatch_episodes: number of episodes per minibatch of the critic's updates, in place of `batch_size`; a
            multiple of `group_size`.
        ent_coef: weight of an entropy bonus in the surrogate objective.
        vf_coef: factor of the critic's loss.
        max_grad_norm: maximum norm of the critic's gradient. null does not clip.
        micro_batch_size: maximum number of tokens per forward pass, of prompts and responses, with their padding (at
            least one episode); default: no limit. In any case a pass has at most as many response tokens as have
            logits in half of `logits_budget_mb`. If the episodes of the Fisher matrix need more than one pass, every
            product recomputes the graph.
        normalize_advantage: normalize advantages over the whole rollout.
        target_kl: size of the trust region: maximum of the mean KL from the rollout's policy to the new one, in nats
            per token. This is not `alg.kl_div.target_kl`, the target of the KL controller.
        cg_max_steps: maximum number of steps of the conjugate gradient; each needs one product with the Fisher matrix.
        cg_damping: constant added to the diagonal of the Fisher matrix.
        line_search_shrinking_factor: factor by which each attempt of the line search is shorter than the previous one.
        line_search_max_iter: maximum number of attempts of the line search. If none is accepted, the policy does not
            change.
        n_critic_updates: number of passes of the critic over a rollout in each update.
        sub_sampling_factor: compute the Fisher matrix on one of this many episodes, resampled for each update. Gradient
            and line search use all episodes.
    """

    CRITIC_FACTOR: ClassVar[float] = 1.0

    learning_rate: Positive = 1e-4
    n_steps: Count = 2048
    batch_size: Count = 128
    minibatch_episodes: Count | None = None
    vf_coef: NonNegative = 1.0
    max_grad_norm: Positive | None = None
    normalize_advantage: bool = True
    target_kl: Positive = 0.01
    cg_max_steps: Count = 15
    cg_damping: NonNegative = 0.1
    line_search_shrinking_factor: Annotated[float, Interval(gt=0, lt=1)] = 0.8
    line_search_max_iter: Count = 10
    n_critic_updates: Count = 10
    sub_sampling_factor: Count = 1
