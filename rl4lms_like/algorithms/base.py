"""Base class of on-policy algorithms: epochs over a rollout, minibatches with one optimizer step each, micro-batches.

    train    rollout ─ epochs ─ minibatches of whole episodes; after the policy's epochs, the critic's alone
             minibatch ─ prepare ─ micro-batches ─ gradients, summed over processes ─ early stop ─ clip ─ step
    loss     micro-batch ─> Objective: one number per action and term

An algorithm defines its `loss`, and may override the methods listed at `OnPolicyTextAlgorithm`. Rollouts come from
`rollouts.text_rollouts`. An action is a response token that the policy chose; flat fields `[n_actions]` have them
episode after episode.
"""

from __future__ import annotations

import math
import time
import warnings
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any, ClassVar

import torch
from gymnasium import spaces
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.vec_env import VecEnv
from torch import Tensor

from rl4lms_like.algorithms import ALGORITHMS
from rl4lms_like.algorithms.arguments import CORRECTION_RANGES, CriticPretraining, OnPolicyArguments
from rl4lms_like.algorithms.critic_pretraining import CriticPretrainer
from rl4lms_like.algorithms.pretraining_mix import PretrainingMix
from rl4lms_like.algorithms.rules import RULES, Algorithm
from rl4lms_like.algorithms.schedules import learning_rate_schedule
from rl4lms_like.algorithms.step_guard import StepGuard
from rl4lms_like.core.advantages import normalized
from rl4lms_like.core.devices import to_device
from rl4lms_like.core.episodes import PassLimits, own_batches
from rl4lms_like.core.keys_elsewhere import refuse_names_of_elsewhere
from rl4lms_like.core.losses import approximate_kl, correction_weights, explained_variance, value_error
from rl4lms_like.core.objective import LossAggregation, Objective, action_weights, weighted_mean
from rl4lms_like.core.seeding import derived_seed
from rl4lms_like.policies import speedups
from rl4lms_like.policies.arguments import shared_arguments
from rl4lms_like.policies.base import LMActorCriticPolicy
from rl4lms_like.policies.merged_adapters import CHECK_EVERY, N_COMPARED
from rl4lms_like.policies.routing import BalancingLoss
from rl4lms_like.policies.sharding import whole
from rl4lms_like.rollouts.buffer import EpisodeBuffer, Minibatch
from rl4lms_like.rollouts.kl import KLConfig, KLController
from rl4lms_like.rollouts.progress import Logged, UpdateProgress, UpdateStage
from rl4lms_like.rollouts.rollout import RolloutOptions
from rl4lms_like.rollouts.text_rollouts import TextRollouts
from rl4lms_like.system.errors import ConfigError, ConfigIssue, ModelError
from rl4lms_like.system.interruption import Interruption
from rl4lms_like.system.out_of_memory import blame_memory_errors_on
from rl4lms_like.system.ranks import Ranks
from rl4lms_like.system.schema import broken_rules, read_block

RATIO_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.4}
"""Distance from 1 above which the first probability ratio of an update causes a warning.

Rounding in bfloat16 (8 bits) gives up to 0.04 in tiny models and 0.22 in one of 135M parameters. Weights that are one
update old give 0.7 to 0.9 (medians of `python -m benchmarks.healthy_runs`).
"""
SAMPLER_TOLERANCE = {"ratio_gap": 0.05, "approx_kl": 0.01}
"""Limits above which the first minibatch shows that the sampler's log-probs are not those of the policy.

`ratio_gap` is the largest distance of a ratio from 1: rounding in float32 gives about 1e-4, a sampling at temperature
0.9 ratios of 0.5 to 2. `approx_kl` is the mean, nats per token, if responses were generated in bfloat16, whose single
ratios may be far from 1: rounding gives about 1e-4.
"""
NO_BALANCING_LOSS = (
    "output_router_logits: true in its config.json, and this algorithm cannot add the balancing loss: set it to false "
    "there to train without, or choose another algorithm"
)
"""End of a message about a mixture of experts."""
TERMS = ("policy", "value", "entropy", "kl", "nll")
"""Terms of an `Objective` whose means are logged."""
LOG_KEYS = {
    "policy": "ppo/policy_gradient_loss",
    "value": "ppo/value_loss",
    "entropy": "ppo/entropy_loss",
    "kl": "ppo/kl_loss",
    "nll": "ppo/nll_loss",
    "balancing": "ppo/balancing_loss",
    "ptx": "ppo/ptx_loss",
    "loss": "ppo/loss",
    "approx_kl": "ppo/approx_kl",
    "clip_fraction": "ppo/clip_fraction",
    "minibatch_episodes": "train/minibatch_episodes",
    "grad_norm": "train/grad_norm",
    "critic_grad_norm": "train/critic_grad_norm",
}
"""Keys of the logged means of an update, by the name of the number in a step. All algorithms have RL4LMs' names."""


class OnPolicyTextAlgorithm(TextRollouts, OnPolicyAlgorithm):
    """Base class of the library's algorithms.

    An algorithm defines `loss`. It may also override these methods, which `train` calls in this order:

        prepare_rollout      once per rollout: advantages of all of its actions
        skip_minibatch       a minibatch that has nothing to learn from
        prepare_minibatch    what depends on a whole minibatch: normalised advantages, weights of its actions
        micro_losses         losses of the parts of a minibatch
        total_loss           the terms of the loss, added up
        clip_and_step        clipping; if all is finite, `weights_change` and the optimizer step

    and the properties `normalization` and `ratio_limits`, and `policy_defaults`.

    Args:
        policy: class of the policy.
        env: a `TextVecEnv`, or any vectorised environment of `TextGenEnv`s.
        policy_kwargs: arguments of the policy, see `PolicyArguments`.
        kl_controller: controller of the KL coefficient; default: no penalty.
        norm_reward: see `RolloutOptions`.
        ranks: the processes that train together; default: this one alone.
        arguments: see the algorithm's `arguments_class`.
    """

    arguments_class: ClassVar[type[OnPolicyArguments]]
    policy: LMActorCriticPolicy  # type: ignore[assignment]
    rollout_buffer: EpisodeBuffer  # type: ignore[assignment]

    n_epochs: int = 1
    """Number of passes of the policy over a rollout."""
    batch_size: int | None = None
    """Approximate number of tokens of a minibatch; None = the whole rollout. `minibatch_episodes` replaces it."""
    target_kl: float | None = None
    """An update ends when the KL to the policy of its rollout exceeds 1.5 times this; None = it never ends early.

    Not to be confused with the target of the KL controller (`alg.kl_div.target_kl`), which stops nothing."""
    loss_aggregation: LossAggregation = "token_mean"
    """Averaging of the policy's loss over a minibatch, see `core.objective.action_weights`."""
    loss_norm: float | None = None
    """Constant of `seq_mean_token_sum_norm`; None = the length of the longest possible response."""
    checks_first_ratio: ClassVar[bool] = True
    learns_off_policy: ClassVar[bool] = True
    """True if the update uses `Minibatch.weights`, which can correct for episodes of another policy."""
    n_together: ClassVar[int] = 1
    """Number of consecutive episodes of a minibatch that have one loss, so that micro-batches do not separate them."""
    balancing: BalancingLoss | None = None
    """Loss that balances the use of the experts of a mixture of experts; None if the model has none."""
    ptx: PretrainingMix | None = None
    """Texts on which the policy is also trained (`alg.ptx`); set before the first update."""
    adds_balancing_loss: ClassVar[bool] = True
    """True if the update adds that loss; otherwise, models that have one are refused."""
    warns_of_ratio: bool = True
    """Warn of a first ratio different from 1; False after the warning, or if the run doctor reports it."""

    def __init__(
        self,
        policy: type[LMActorCriticPolicy],
        env: Any,
        *,
        policy_kwargs: dict[str, Any] | None = None,
        kl_controller: KLController | None = None,
        norm_reward: bool = False,
        ranks: Ranks | None = None,
        _init_setup_model: bool = True,
        **arguments: Any,
    ) -> None:
        refuse_names_of_elsewhere(type(self).__name__, arguments, self.arguments_class.__dataclass_fields__, "alg.args")
        policy_kwargs = dict(policy_kwargs or {})
        kl = kl_controller.config(norm_reward) if kl_controller else KLConfig(coeff=0.0, norm_reward=norm_reward)
        # A loaded algorithm gets its policy and its KL from its file.
        self.arguments = self._checked_arguments(arguments, policy_kwargs, kl if _init_setup_model else None)
        options = self.arguments
        self._n_updates = 0
        self.n_iterations = 0
        self.pretraining = None if options.critic_pretrain is None else CriticPretrainer(options.critic_pretrain)
        self.guard = StepGuard(options.non_finite)
        for name, default in self.policy_defaults(policy_kwargs).items():
            if policy_kwargs.get(name) is None:
                policy_kwargs[name] = default

        super().__init__(
            policy,
            env,
            kl_controller=kl_controller,
            rollout_options=self._rollout_options(norm_reward),
            ranks=ranks,
            # Stable-Baselines3's arguments.
            learning_rate=learning_rate_schedule(options.learning_rate, options.learning_rate_schedule),
            n_steps=options.n_steps,
            gamma=options.gamma,
            gae_lambda=options.gae_lambda,
            ent_coef=options.ent_coef,
            vf_coef=options.vf_coef,
            max_grad_norm=math.inf if options.max_grad_norm is None else options.max_grad_norm,
            use_sde=options.use_sde,
            sde_sample_freq=options.sde_sample_freq,
            policy_kwargs=policy_kwargs,
            tensorboard_log=options.tensorboard_log,
            verbose=options.verbose,
            seed=options.seed,
            device=options.device or "auto",
            supported_action_spaces=(spaces.Discrete,),
            _init_setup_model=_init_setup_model,
        )

    def _rollout_options(self, norm_reward: bool) -> RolloutOptions:
        """Return the options of the rollouts, which are among the algorithm's arguments."""
        arguments = self.arguments
        return RolloutOptions(
            norm_reward=norm_reward,
            bootstrap_truncated=arguments.bootstrap_truncated,
            score_batch_size=arguments.micro_batch_size,  # a scoring pass needs less memory than an update's
            n_episodes=arguments.n_episodes,
            group_size=arguments.group_size,
            dynamic_sampling=arguments.dynamic_sampling,
            first_token_temperature=arguments.first_token_temperature,
            record_log_prob=arguments.importance_correction != "none",
            corrects_by_ratios=arguments.corrects_by_ratios,
            sort_by_length=arguments.length_sorted_minibatches,
            value_gae_lambda=arguments.value_gae_lambda,
            gae_length_alpha=arguments.gae_length_alpha,
        )

    def _checked_arguments(
        self, arguments: Mapping[str, Any], policy_kwargs: Mapping[str, Any], kl: KLConfig | None
    ) -> OnPolicyArguments:
        """Return the arguments after the checks of a config, with its messages.

        Args:
            arguments: keyword arguments.
            policy_kwargs: arguments of the policy, which checks the values of its own itself.
            kl: the KL penalty; None for a loaded algorithm, whose policy is unknown too.

        Raises:
            ConfigError: lists all errors.
        """
        options, issues = read_block(self.arguments_class, arguments)
        blocks: dict[str, Any] = {}
        if options is not None:
            issues = list(options.issues())
            id = ALGORITHMS.id_of(type(self)) or type(self).__name__
            blocks["alg"] = Algorithm(id, options, vars(options))

        if kl is not None:
            blocks["kl_div"] = kl
            policy, policy_issues = shared_arguments(policy_kwargs)
            issues += [issue.below("policy_kwargs") for issue in policy_issues]
            if policy is not None:
                blocks["policy"] = policy

        # Rules have the paths of a config; here, these are keyword arguments.
        names = {"args.": "", "policy.args.": "policy_kwargs.", "kl_div.": "kl_controller."}
        for issue in broken_rules(RULES, blocks):
            prefix = next(prefix for prefix in names if issue.path.startswith(prefix))
            issues.append(ConfigIssue(names[prefix] + issue.path.removeprefix(prefix), issue.message))
        if issues or options is None:
            raise ConfigError(issues, source=f"the arguments of {type(self).__name__}")
        return options

    def policy_defaults(self, policy_kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the algorithm's defaults for policy arguments; those in `policy_kwargs` take precedence."""
        return {} if self.arguments.needs_critic else {"critic": "none"}

    @abstractmethod
    def loss(self, minibatch: Minibatch) -> Objective:
        """Return the terms of the algorithm's loss on some whole episodes, one number per action."""

    def _setup_model(self) -> None:
        super()._setup_model()

        # A reference that moves must be in the checkpoints; one that does not is loaded again.
        if self.arguments.reference_update_iterations is not None:
            self.policy.allow_reference_updates()

        # Models with mixtures of experts have a loss of their own, which is added to that of each optimizer step.
        coefficient = self.policy.balancing_coefficient
        if coefficient and not self.adds_balancing_loss:
            raise ModelError(f"{self.policy.arguments.model_name!r} has {NO_BALANCING_LOSS}")
        self.balancing = BalancingLoss(coefficient) if coefficient else None

    # --- the update -------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Run one update on the rollout in the buffer, or the rest of an interrupted one."""
        start = time.perf_counter()
        buffer = self.rollout_buffer

        # In the first iterations the policy may have no epoch. Critic and policy may make different numbers of passes.
        n_epochs = 0 if self._is_critic_only else self.n_epochs
        n_passes = max(n_epochs, self._critic_epochs)

        with self._update_context() as progress:
            minibatches = progress.remaining(buffer, n_passes, self.batch_size, self.arguments.minibatch_episodes)
            for epoch, minibatch in minibatches:
                # After the policy's epochs, the critic is trained alone.
                if epoch > n_epochs:
                    self._finish_minibatch(self.critic_step(minibatch))
                    continue

                # A minibatch may have nothing to learn from: online DPO needs a pair of responses.
                skipped = self.skip_minibatch(minibatch)
                if skipped is not None:
                    self._finish_minibatch(skipped)
                    continue

                # What depends on all actions of the minibatch, before it is split.
                minibatch = self.prepare_minibatch(minibatch)

                # A micro-batch counts with its fraction of the minibatch's actions: sum_i (n_i / n) mean_i(loss) is the
                # mean over all n actions. So neither the size of micro-batches nor the number of processes changes the
                # gradient.
                self.policy.optimizer.zero_grad()
                objectives = []
                for loss, objective in self.micro_losses(minibatch, self.arguments.micro_batch_size):
                    loss.backward()
                    objectives.append(objective)
                    del loss  # with its graph: freed only during the next pass, it raised the peak by a tenth
                ptx_loss = self._add_gradient_of_texts()
                self._sum_gradients(self.policy.parameters())

                # Over all processes: each must decide the same below.
                logged = self._summary(self._gather_terms(objectives), minibatch.weights)
                self.check_sampler(logged)
                logged["minibatch_episodes"] = torch.full_like(logged["loss"], minibatch.observations.n_episodes)
                if self.balancing is not None:
                    logged["balancing"] = self.balancing.value
                    logged["loss"] = logged["loss"] + self.balancing.coefficient * logged["balancing"]
                if self.ptx is not None:
                    logged["ptx"] = ptx_loss
                    logged["loss"] = logged["loss"] + self.ptx.coeff * ptx_loss

                # Early stop (`alg.args.target_kl`), before the step: the gradient is discarded, and all remaining
                # passes are skipped, also the critic's. As in Stable-Baselines3, the KL is that of this minibatch to
                # the policy of the rollout, mean((ratio - 1) - log ratio), and may be up to 1.5 times its target. To
                # compare it, the process waits for the device, once per optimizer step.
                if self.target_kl is not None and float(logged["approx_kl"]) > 1.5 * self.target_kl:
                    progress.steps.append(logged)
                    break

                self.clip_and_step(logged)
                self._finish_minibatch(logged)

        self.policy.free_update_memory()
        self.guard.end_update(len(progress.steps))

        # Means over the minibatches, with the one that ended the update. If that was the first one, no gradient norm
        # was computed: NaN is logged.
        norms = {name for name, _ in self._clipped_together()}
        self._record_means(progress.steps, [name for name in LOG_KEYS if name in progress.steps[0] or name in norms])
        self.logger.record("train/epochs", progress.epoch)
        self.logger.record("train/optimizer_steps", len(progress.steps))
        self._log_update(progress.steps[0].get("ratio_gap"), time.perf_counter() - start)
        self._update_reference()

    def _update_reference(self) -> None:
        """Update the reference model of the KL penalty after an update of the policy, if an interval is complete."""
        interval = self.arguments.reference_update_iterations
        if interval is None:
            return

        # After the policy's last step: the reference becomes, or moves towards, what this iteration has learned.
        if self.n_iterations % interval == 0:
            self.weights_change()  # as in a step, the run cannot be resumed while only some weights have moved
            self.policy.update_reference(self.arguments.reference_mixing)
        self.logger.record("train/reference_updates", self.n_iterations // interval)

    def skip_minibatch(self, minibatch: Minibatch) -> Logged | None:
        """Return the logged scalars of a minibatch that has nothing to learn from; None if a step is taken on it."""
        return None

    def critic_step(self, minibatch: Minibatch) -> Logged:
        """Take a gradient step of the critic only; with `critic: shared` of its head, since the trunk is the policy's.

        The optimizer skips the policy's parameters, because they have no gradients.
        """
        self.policy.optimizer.zero_grad()
        error = torch.zeros_like(minibatch.returns[0])
        for micro_batch, fraction in self._split(minibatch, self.arguments.micro_batch_size):
            values = self.policy.predict_values(micro_batch.observations)
            part = fraction * value_error(values, micro_batch.returns).mean()
            (self.vf_coef * part).backward()
            error += part.detach()
        self._sum_gradients(self._parameters_of("critic"))
        self.ranks.sum(error)

        logged = {"value": error, "loss": self.vf_coef * error}
        self.clip_and_step(logged)
        return logged

    def clip_and_step(self, logged: Logged) -> None:
        """Clip the gradients and step; a skipped step does not contribute to the logged means."""
        for name, parameters in self._clipped_together():
            logged[name] = whole(torch.nn.utils.clip_grad_norm_(parameters, self.max_grad_norm))

        if self._is_accepted(logged):
            # From here to the end of the step the update cannot be resumed: some of the weights have moved.
            self.weights_change()
            self.policy.optimizer.step()
            self._n_updates += 1
        else:
            self.policy.optimizer.zero_grad()
            for name in logged.keys() - {"ratio_gap"}:  # the gap does not depend on the loss
                logged[name] = torch.full_like(logged[name], math.nan)

    def _clipped_together(self) -> list[tuple[str, Iterable[torch.nn.Parameter]]]:
        """Return the name of each logged gradient norm, and the parameters over which it is computed.

        A separate critic is clipped by its own norm. Otherwise, with large rewards, its gradient would scale the
        actor's gradient down to almost 0. With a shared critic, both share the trunk and are clipped together.
        """
        if self.policy.arguments.critic != "separate":
            return [("grad_norm", self.policy.parameters())]
        return [("grad_norm", self._parameters_of("actor")), ("critic_grad_norm", self._parameters_of("critic"))]

    def _parameters_of(self, role: str) -> list[torch.nn.Parameter]:
        parameters: list[torch.nn.Parameter] = []
        for group in self.policy.optimizer.param_groups:
            if group["role"] == role:
                parameters += group["params"]
        return parameters

    def _is_accepted(self, logged: Mapping[str, Tensor]) -> bool:
        """Return whether the step may be taken, that is, loss and gradient are finite; see `StepGuard`."""
        # The process waits for the device here, once per optimizer step: weights that are not finite would be lost.
        loss = logged["loss"]
        grad_norm = logged["grad_norm"] + logged.get("critic_grad_norm", 0.0)
        is_finite = bool(torch.isfinite(loss + grad_norm))
        problem = ""
        if not is_finite:
            numbers = f"the loss is {float(loss):g} and its gradient's norm {float(grad_norm):g}"
            problem = f"{numbers} in optimizer step {self._n_updates + 1}"
        return self.guard.accepts(is_finite, problem, "Lower alg.args.learning_rate, or check the rewards")

    # --- a minibatch and its parts ----------------------------------------------------------------------------------

    def prepare_minibatch(self, minibatch: Minibatch) -> Minibatch:
        """Return a minibatch with what depends on all of it: normalised advantages, and weights of its actions."""
        if self.normalization == "minibatch":
            minibatch = minibatch._replace(advantages=normalized(minibatch.advantages, minibatch.returns))
        if self.loss_aggregation != "token_mean":
            minibatch = minibatch._replace(weights=self._action_weights(minibatch))
        return self._corrected(minibatch)

    def _corrected(self, minibatch: Minibatch) -> Minibatch:
        """Return a minibatch with weights that correct for actions that were sampled from another distribution."""
        behavior_log_prob = minibatch.observations.behavior_log_prob  # log mu, [n_actions]
        kind = self.arguments.importance_correction
        if kind == "none" and self.is_off_policy:
            kind = "tis"  # truncated importance sampling
        if kind == "none" or behavior_log_prob is None:
            return minibatch

        # The weight is made of pi / mu, with pi the policy at the start of the update and mu the one that generated:
        # `tis` takes min(pi / mu, limit), the others leave out what is outside of two limits. An action with weight 0
        # does not count: the mean is over the others.
        lengths = minibatch.observations.lengths
        limits = self.arguments.correction_range or CORRECTION_RANGES[kind]
        correction = correction_weights(minibatch.old_log_prob - behavior_log_prob, lengths, kind, *limits)
        weights = self._action_weights(minibatch, kept=correction > 0)
        return minibatch._replace(weights=weights * correction)

    def _action_weights(self, minibatch: Minibatch, kept: Tensor | None = None) -> Tensor:
        """Return the weights of the actions of a whole minibatch `[n_actions]`; see `action_weights`."""
        # In main memory, where the lengths are. With a correction, this waits for the device once per optimizer step.
        lengths = minibatch.observations.layout.lengths
        if kept is not None:
            kept = kept.cpu()
        weights = action_weights(lengths, self.loss_aggregation, self._norm_constant, kept)
        return to_device(weights, minibatch.weights.device)

    @property
    def is_off_policy(self) -> bool:
        """True if the episodes are of another policy, whose log-probs are their `behavior_log_prob`.

        That is so in a replay of another policy's rollouts, and with rollouts that are generated ahead.
        """
        return self.collector is not None and self.collector.is_off_policy

    @property
    def _norm_constant(self) -> float:
        """Constant of `seq_mean_token_sum_norm`."""
        return self.collector.max_episode_length if self.loss_norm is None else self.loss_norm

    def micro_losses(
        self, minibatch: Minibatch, micro_batch_size: int | None, *, response_tokens: int | None = None
    ) -> Iterator[tuple[Tensor, Objective]]:
        """Yield each micro-batch's part of the minibatch's loss, and its detached terms.

        With several processes these are the micro-batches of this process.
        """
        self._count_routing(minibatch, micro_batch_size)
        for micro_batch, fraction in self._split(minibatch, micro_batch_size, response_tokens=response_tokens):
            yield self._micro_loss(micro_batch, fraction)

    def _micro_loss(self, micro_batch: Minibatch, fraction: float) -> tuple[Tensor, Objective]:
        # A function of its own: a variable of the generator would keep the graph until the next forward pass has ended.
        if self.balancing is None:
            objective = self.loss(micro_batch)
            loss = fraction * self.total_loss(objective, micro_batch.weights)
        else:
            with self.policy.reader.recorded_routing() as record:
                objective = self.loss(micro_batch)
            loss = fraction * self.total_loss(objective, micro_batch.weights)

            # It is a sum over tokens, divided by those of the whole minibatch; a pass that does not count adds nothing.
            loss = loss + (1.0 if fraction else 0.0) * self.balancing.part(record.routing)

        terms = objective.detach() if fraction else objective.detach().empty()
        return loss, terms

    def _count_routing(self, minibatch: Minibatch, micro_batch_size: int | None) -> None:
        """Count how the tokens of a minibatch are sent to the experts of a model with a balancing loss."""
        if self.balancing is None:
            return

        # A minibatch in one part is counted by the forward pass of its loss.
        if micro_batch_size is None and self.ranks.size == 1:
            self.balancing.begin_step(None)
            return

        passes = []
        with torch.no_grad():
            for micro_batch, fraction in self._split(minibatch, micro_batch_size):
                with self.policy.reader.recorded_routing() as record:
                    self.policy.action_scores(micro_batch.observations)
                if fraction:  # 0: a pass that only keeps step with the other processes
                    passes.append(record.routing)
        self.balancing.begin_step(chain.from_iterable(self.ranks.gather(passes)))

    def _split(
        self, minibatch: Minibatch, micro_batch_size: int | None, *, response_tokens: int | None = None
    ) -> Iterator[tuple[Minibatch, float]]:
        """Split this process's part of a minibatch into micro-batches.

        Args:
            minibatch: whole episodes.
            micro_batch_size: maximum number of tokens of prompts and responses in a micro-batch, see `PassLimits`.
            response_tokens: maximum number of response tokens in it.

        Yields:
            Whole episodes, and their fraction of the minibatch's actions. There is nothing if there are too few
            episodes for all processes. But sharded forward passes are collective: `own_batches` then adds passes that
            do not count (fraction 0), so that all processes make equally many.
        """
        episodes = minibatch.observations
        is_sharded = self.policy.is_sharded
        limits = PassLimits(micro_batch_size, response_tokens, shares_prompts=self.policy.shares_prompts)
        for group in own_batches(episodes, limits, self.ranks, self.n_together, in_step=is_sharded):
            if len(group) == episodes.n_episodes:
                yield minibatch, 1.0
                return

            # An empty group: a pass with any episodes, to keep step with the other processes.
            micro_batch = minibatch.select(group or range(self.n_together))
            fraction = len(micro_batch.actions) / len(minibatch.actions)
            yield micro_batch, fraction if group else 0.0

    def _add_gradient_of_texts(self) -> Tensor:
        """Add the gradient of the loss on the texts of `ptx`, if there are any; return the loss of all processes."""
        total = torch.zeros((), device=self.policy.device)
        if self.ptx is not None:
            size = self.arguments.micro_batch_size
            for loss in self.ptx.losses(self.policy, self._n_updates, micro_batch_size=size, ranks=self.ranks):
                (self.ptx.coeff * loss).backward()
                total += loss.detach()
            self.ranks.sum(total)
        return total

    def _sum_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Replace gradients by their sums over all processes, unless the backward pass has done so."""
        if not self.policy.is_sharded:
            self.ranks.sum_gradients(parameters)

    def _gather_terms(self, objectives: list[Objective]) -> Objective:
        """Return the terms of all micro-batches, of all processes."""
        return Objective.joined(list(chain.from_iterable(self.ranks.gather(objectives))))

    def total_loss(self, objective: Objective, weights: Tensor) -> Tensor:
        """Return the loss to be minimised: policy + vf_coef value + ent_coef (-entropy) + kl."""
        total = weighted_mean("policy", objective.policy, weights)
        if objective.value is not None:
            total = total + self.vf_coef * objective.value.mean()
        if objective.entropy is not None and self.ent_coef:
            total = total + self.ent_coef * objective.entropy.mean()
        if objective.kl is not None:  # the term has its coefficient
            total = total + weighted_mean("kl", objective.kl, weights)
        return total

    def _summary(self, objective: Objective, weights: Tensor) -> Logged:
        """Return the logged means over a minibatch."""
        logged: Logged = {}
        for name in TERMS:
            term = getattr(objective, name)
            if term is not None:
                logged[name] = weighted_mean(name, term, weights)
        logged["loss"] = self.total_loss(objective, weights)

        log_ratio = objective.log_ratio  # [n_actions]
        ratio = log_ratio.exp()
        logged["approx_kl"] = approximate_kl(log_ratio)
        logged["ratio_gap"] = (ratio - 1).abs().max()
        clipped = objective.clipped
        if clipped is None:
            low, high = self.ratio_limits
            clipped = (ratio < low) | (ratio > high)
        logged["clip_fraction"] = clipped.float().mean()
        return logged

    def check_sampler(self, logged: Mapping[str, Tensor]) -> None:
        """Check that log-probs which were recorded while sampling are those of the policy, before its first step.

        Args:
            logged: summary of a minibatch.

        Raises:
            ModelError: they are not.
        """
        # After the first step, ratios differ from 1 because the weights have changed.
        assert self.update_progress is not None
        is_first = not any("ratio_gap" in step for step in self.update_progress.steps)
        if not is_first or not self._has_sampler_log_probs:
            return

        measure = "approx_kl" if self.policy.arguments.generates_in_other_dtype else "ratio_gap"
        gap = float(logged[measure])
        if gap > SAMPLER_TOLERANCE[measure]:
            raise ModelError(
                f"the log-probs that were recorded while sampling are not those of the policy: {measure} of the first "
                f"minibatch is {gap:.2g} (limit {SAMPLER_TOLERANCE[measure]}). Compute them in a pass of their own: "
                f"{speedups.PATH}.sampler_log_probs: false"
            )

    @property
    def _has_sampler_log_probs(self) -> bool:
        """True if the log-probs of the rollout were recorded while sampling."""
        return self.collector is not None and self.collector.uses_sampler_log_probs

    # --- begin and end of an update ---------------------------------------------------------------------------------

    @contextmanager
    def _update_context(self) -> Iterator[UpdateProgress]:
        """Prepare policy, learning rate and rollout for an update; yield its progress."""
        if self.update_progress is None or self.update_progress.is_finished:
            self.update_progress = UpdateProgress()
        progress = self.update_progress
        self.policy.set_training_mode(True)
        self._update_learning_rate(self.policy.optimizer)

        # Once per rollout, also if the update is interrupted: normalising twice is not the same as once.
        if progress.stage is UpdateStage.NEW:
            self.prepare_rollout()

        # Ctrl-C waits for the end of a step; then `on_step` ends the run, where its state is complete.
        with self.hooks.interruption.finishing("this minibatch"):
            if not progress.steps:  # a new update, which can be resumed from its start
                self._step_done()
            yield progress
        progress.stage = UpdateStage.FINISHED
        self.n_iterations += 1

    def prepare_rollout(self) -> None:
        """Change the rollout's advantages once before its update."""
        if self.normalization == "rollout":
            buffer = self.rollout_buffer
            buffer.advantages = normalized(buffer.advantages, torch.as_tensor(buffer.returns).to(buffer.advantages))

    def _finish_minibatch(self, logged: Logged) -> None:
        """Count a minibatch and its logged scalars: an interrupted run resumes after the last one that is finished."""
        assert self.update_progress is not None
        self.update_progress.steps.append(logged)
        self.update_progress.n_done += 1
        self._step_done()

    def _step_done(self) -> None:
        """Record that the update can be resumed from the current weights, and call `hooks.on_step`."""
        assert self.update_progress is not None
        self.update_progress.stage = UpdateStage.BETWEEN_STEPS
        self.hooks.on_step()

    def weights_change(self) -> None:
        """Record that weights are about to change: the update cannot be resumed until the end of the current step."""
        if self.update_progress is not None:
            self.update_progress.weights_change()

    @property
    def normalization(self) -> str | None:
        """Scope of the normalisation of advantages: `minibatch`, `rollout` or None."""
        choice = self.arguments.normalize_advantage
        if choice is True:
            return "minibatch"
        return choice or None  # "rollout", or false

    @property
    def ratio_limits(self) -> tuple[float, float]:
        """Ratios below and above which the loss is clipped or masked."""
        return -math.inf, math.inf

    @property
    def _critic_epochs(self) -> int:
        """Number of passes of the critic over a rollout."""
        return self.arguments.critic_epochs or self.n_epochs

    @property
    def _is_critic_only(self) -> bool:
        """True in the first iterations if they train only the critic."""
        return self.n_iterations < self.arguments.critic_only_iterations

    # --- pretraining of the critic ----------------------------------------------------------------------------------

    def pretrain_critic(self, interruption: Interruption | None = None) -> Iterator[float]:
        """Train the critic on rollouts of the starting policy, as far as that is requested and not done yet.

        Value pretraining (VC-PPO, arXiv 2503.01491): the critic's targets are Monte-Carlo returns (lambda = 1).

        Args:
            interruption: of a training loop.

        Yields:
            For each rollout, the explained variance of its returns before the critic was trained on it. The run can be
            resumed from there.
        """
        if self.pretraining is None:
            return
        interruption = interruption or Interruption()
        n_tokens = self.arguments.n_steps * self.collector.n_envs
        while not self.pretraining.is_over:
            # A buffer of its own: the algorithm's has another lambda, and its random state is that of the iterations.
            buffer = EpisodeBuffer(device=self.device, gamma=self.arguments.gamma, gae_lambda=1.0)
            buffer.seed(derived_seed(self.sampling_seed, "critic pretraining", len(self.pretraining.explained)))
            self.policy.set_training_mode(False)
            with interruption.at_any_moment():
                self.collector.collect(buffer, n_tokens, updates_policy=False)

            # A new `UpdateProgress` cannot be resumed: a run that ends while weights change repeats the rollout.
            with interruption.finishing("this update of the critic"), blame_memory_errors_on("update"):
                self.update_progress = UpdateProgress()
                self._train_critic(buffer, self.pretraining.settings)
                self.update_progress = None

            # The buffer's values are those of the rollout, so this is the critic before it was trained.
            values = torch.as_tensor(buffer.values)
            returns = torch.as_tensor(buffer.returns)
            explained = explained_variance(values, returns)
            self.pretraining.explained.append(explained)
            yield explained

    def _train_critic(self, buffer: EpisodeBuffer, settings: CriticPretraining) -> None:
        """Make passes of the critic over a rollout."""
        self.policy.set_training_mode(True)
        learning_rate = settings.learning_rate
        if learning_rate is None:
            learning_rate = self.lr_schedule(1.0) * self.critic_factor
        for group in self.policy.optimizer.param_groups:
            group["lr"] = learning_rate

        n_steps = 0
        for _ in range(settings.n_epochs):
            for minibatch in buffer.get(self.batch_size, self.arguments.minibatch_episodes):
                self.critic_step(minibatch)
                n_steps += 1
        self.policy.free_update_memory()
        self.guard.end_update(n_steps)

    # --- rollouts and checkpoints -----------------------------------------------------------------------------------

    def collect_rollouts(self, env: VecEnv, *args: Any, **kwargs: Any) -> bool:
        """Collect a rollout; before the first one, pretrain the critic if that is requested and not done yet."""
        # Only for `learn`: a trainer has pretrained it already.
        if self.pretraining is not None:
            self._use(env)
            for _ in self.pretrain_critic():
                pass
        is_continued = super().collect_rollouts(env, *args, **kwargs)

        # Not in the first iteration, in which adapters still add nothing.
        if self.policy.merged_adapters and self.n_iterations % CHECK_EVERY == 1:
            self._compare_merged_adapters()
        return is_continued

    def _compare_merged_adapters(self) -> None:
        """Log how far log-probs with merged adapters differ from those without, in some responses of the rollout."""
        episodes = self.rollout_buffer.episodes
        assert episodes is not None
        n_responses = min(self.rollout_options.group_size, N_COMPARED)
        some = episodes.select(torch.arange(n_responses, device=episodes.response_ids.device)).trimmed()
        self.logger.record("rollout_info/merged_gap", self.policy.merged_gap(some))

    @property
    def has_sampled(self) -> bool:
        """True once the environment has been used, for training or for pretraining the critic."""
        return super().has_sampled or bool(self.pretraining and self.pretraining.explained)

    def training_state(self) -> dict[str, Any]:
        """Return the state that all algorithms have, and the numbers of skipped steps; the policy has the weights."""
        state = {**super().training_state(), "left_out": self.guard.state_dict(), "n_iterations": self.n_iterations}
        if self.pretraining is not None:
            state["critic_pretraining"] = self.pretraining.state_dict()
        return state

    def load_training_state(self, state: dict[str, Any]) -> None:
        """Restore the state returned by `training_state`."""
        super().load_training_state(state)
        self.guard.load_state_dict(state["left_out"])
        self.n_iterations = state.get("n_iterations", 0)
        if self.pretraining is not None:
            self.pretraining.load_state_dict(state["critic_pretraining"])

    # --- learning rates and log -------------------------------------------------------------------------------------

    def _update_learning_rate(self, optimizers: Any) -> None:
        """Set the learning rates as Stable-Baselines3 does, with warmup and a separate rate for the critic."""
        learning_rate = self.lr_schedule(self._current_progress_remaining)
        warmup_iterations = self.arguments.warmup_iterations
        if self.n_iterations < warmup_iterations:
            learning_rate *= (self.n_iterations + 1) / (warmup_iterations + 1)
        self.logger.record("train/learning_rate", learning_rate)
        for group in optimizers.param_groups:
            group["lr"] = learning_rate * (self.critic_factor if group["role"] == "critic" else 1.0)

    @property
    def critic_factor(self) -> float:
        """Ratio of the learning rates of critic and policy."""
        critic_rate = self.arguments.critic_learning_rate
        return self.arguments.CRITIC_FACTOR if critic_rate is None else critic_rate / self.arguments.learning_rate

    def _record_means(self, steps: list[Logged], names: Iterable[str]) -> None:
        """Log means over the update's steps without the skipped ones, whose numbers are NaN."""
        means: dict[str, Tensor] = {}
        for name in names:
            # Steps that a resumed update has read from its checkpoint are in main memory.
            values = [to_device(step[name], self.device) for step in steps if name in step]
            means[name] = torch.stack(values).nanmean() if values else torch.full((), math.nan, device=self.device)

        # Read all at once, at the end of the update: until here, no step has waited for its numbers.
        if means:
            for name, mean in zip(means, torch.stack(list(means.values())).tolist(), strict=True):
                self.logger.record(LOG_KEYS[name], mean)

    def _log_update(self, ratio_gap: Tensor | None, seconds: float) -> None:
        """Log the critic's explained variance, and the gap between the log-probs of rollout and first minibatch.

        Without a step of the policy, there is no gap.
        """
        if self.policy.has_critic:
            values = torch.as_tensor(self.rollout_buffer.values)
            returns = torch.as_tensor(self.rollout_buffer.returns)
            self.logger.record("ppo/explained_variance", explained_variance(values, returns))
        gap = 0.0 if ratio_gap is None else float(ratio_gap)
        if ratio_gap is not None:
            self.logger.record("train/ratio_gap", gap)
        self.logger.record("train/n_updates", self._n_updates)
        if self.guard.non_finite == "skip":
            self.logger.record("train/skipped_steps", self.guard.skipped)
        self.logger.record("time/update_s", seconds)

        # The first minibatch has the weights of the rollout: its ratios are 1, unless the two passes differ.
        if self.warns_of_ratio and gap > self.ratio_tolerance:
            self.warns_of_ratio = False
            warnings.warn(
                f"the first minibatch's ratio differs from 1 by {gap:.2g}: its log-probs are not those of the rollout. "
                f"Likely cause: {self.likely_ratio_cause}. This warning is shown once",
                stacklevel=2,
            )

    @property
    def ratio_tolerance(self) -> float:
        """Distance from 1 up to which rounding explains the first ratio."""
        options = self.policy.arguments
        is_rounded = self._has_sampler_log_probs and options.generates_in_other_dtype
        return RATIO_TOLERANCE["bfloat16" if is_rounded else options.dtype]

    @property
    def likely_ratio_cause(self) -> str:
        """Likely reason for a first ratio different from 1."""
        options = self.policy.arguments
        if options.dropout:
            return "dropout is active in updates (policy.args.dropout)"
        if options.dtype != "float32":
            return f"changed weights, or {options.dtype} rounding; try dtype: float32"
        if self._has_sampler_log_probs:
            return f"sampling computes other log-probs than the update; try {speedups.PATH}.sampler_log_probs: false"
        remedy = "compile: false" if options.compile else "attn_implementation: eager"
        return f"the model's outputs depend on the batch; try {remedy}"
