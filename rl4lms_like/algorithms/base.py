"""What on-policy algorithms share: epochs over a rollout, minibatches, micro-batches, one optimizer step each.

    rollout ─ epochs ─ minibatches of whole episodes ─ micro-batches for memory ─ loss(micro-batch)

An algorithm is its `loss`; everything here is the same for all of them.
"""

from __future__ import annotations

import math
import time
import warnings
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from gymnasium import spaces
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from torch import Tensor

from rl4lms_like.algorithms.arguments import OnPolicyArguments, critic_mistakes, value_mistakes
from rl4lms_like.algorithms.schedules import learning_rate_schedule
from rl4lms_like.algorithms.step_guard import StepGuard
from rl4lms_like.core.advantages import normalized
from rl4lms_like.core.episodes import pack_episodes
from rl4lms_like.core.errors import ConfigError
from rl4lms_like.core.losses import approximate_kl, explained_variance
from rl4lms_like.core.objective import LossAggregation, Objective, action_weights, weighted_mean
from rl4lms_like.policies.base import LMActorCriticPolicy
from rl4lms_like.rollouts.adapt import TextRollouts
from rl4lms_like.rollouts.buffer import EpisodeBuffer, Minibatch
from rl4lms_like.rollouts.kl import KLController
from rl4lms_like.rollouts.progress import UpdateProgress

RATIO_TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2}
"""First ratios further from 1 than this are warned of."""


class OnPolicyTextAlgorithm(TextRollouts, OnPolicyAlgorithm):  # type: ignore[misc]
    """Base of the library's algorithms.

    Args:
        policy: the policy's class.
        env: a `TextVecEnv`, or any vectorised environment of `TextGenEnv`s.
        policy_kwargs: arguments of the policy, see `PolicyArguments`.
        kl_controller: what the KL to the reference costs; default: nothing.
        norm_reward: see `RolloutCollector`.
        arguments: see the algorithm's `arguments_class`.
    """

    arguments_class: ClassVar[type[OnPolicyArguments]]
    policy: LMActorCriticPolicy  # type: ignore[assignment]
    rollout_buffer: EpisodeBuffer  # type: ignore[assignment]

    n_epochs: int = 1
    batch_size: int | None = None
    target_kl: float | None = None
    loss_aggregation: LossAggregation = "token_mean"
    loss_norm: float | None = None
    """How the policy's loss is averaged over a minibatch, see `core.objective.action_weights`."""
    warns_of_ratio: bool = True
    """Whether a first ratio off 1 is still to be warned of; False where a run's doctor tells."""

    def __init__(
        self,
        policy: type[LMActorCriticPolicy],
        env: Any,
        *,
        policy_kwargs: dict[str, Any] | None = None,
        kl_controller: KLController | None = None,
        norm_reward: bool = False,
        _init_setup_model: bool = True,
        **arguments: Any,
    ) -> None:
        self.arguments = self.arguments_class(**arguments)
        options = self.arguments
        name = type(self).__name__
        if mistakes := critic_mistakes(options, policy_kwargs or {}, name) + value_mistakes(options, arguments, name):
            raise ConfigError(mistakes, source="arguments and policy_kwargs")
        self._n_updates = 0
        self.guard = StepGuard(options.non_finite)
        super().__init__(
            policy,
            env,
            kl_controller=kl_controller,
            norm_reward=norm_reward,
            bootstrap_truncated=options.bootstrap_truncated,
            score_batch_size=options.micro_batch_size,
            sort_by_length=getattr(options, "length_sorted_minibatches", False),
            learning_rate=learning_rate_schedule(options.learning_rate, options.learning_rate_schedule),
            n_steps=options.n_steps,
            gamma=options.gamma,
            gae_lambda=options.gae_lambda,
            ent_coef=options.ent_coef,
            vf_coef=options.vf_coef,
            max_grad_norm=math.inf if options.max_grad_norm is None else options.max_grad_norm,
            use_sde=options.use_sde,
            sde_sample_freq=options.sde_sample_freq,
            policy_kwargs=_filled(policy_kwargs or {}, self._policy_defaults()),
            tensorboard_log=options.tensorboard_log,
            verbose=options.verbose,
            seed=options.seed,
            device=options.device or "auto",
            supported_action_spaces=(spaces.Discrete,),
            _init_setup_model=_init_setup_model,
        )

    def _policy_defaults(self) -> dict[str, Any]:
        """Policy arguments that the algorithm brings along."""
        return {} if self.arguments.needs_critic else {"critic": "none"}

    @abstractmethod
    def loss(self, minibatch: Minibatch) -> Objective:
        """The algorithm: the terms of its loss on some whole episodes, one number per action."""

    # --- the update -----------------------------------------------------------------------------------------------

    def train(self) -> None:
        """One update on the rollout in the buffer, or the rest of one that was stopped."""
        start = time.perf_counter()
        with self._updating() as update:
            for minibatch in update.minibatches(self.rollout_buffer, self.n_epochs, self.batch_size, self._step_done):
                if not self._step(minibatch, update.steps):
                    break
        self.policy.optimizer.zero_grad()  # gradients need not lie in memory during the next rollout
        self.guard.end_update(len(update.steps))
        self._log_update(update.steps, update.epoch, time.perf_counter() - start)

    @contextmanager
    def _updating(self) -> Iterator[UpdateProgress]:
        """Prepares policy, learning rate and rollout for the steps of an update; tells how far it is."""
        if self.update is None or self.update.is_over:
            self.update = UpdateProgress()
        update = self.update
        self.policy.set_training_mode(True)
        self._update_learning_rate(self.policy.optimizer)
        if not update.has_begun and self._normalization == "rollout":
            buffer = self.rollout_buffer
            buffer.advantages = normalized(buffer.advantages, torch.as_tensor(buffer.returns).to(buffer.advantages))
        update.has_begun = True
        with self.interruption.finishing("this minibatch"):
            if not update.steps:
                self._step_done()
            yield update
        update.is_over = True

    def _step_done(self) -> None:
        """The weights are those after a whole number of steps: a run that is stopped here goes on from here."""
        assert self.update is not None
        self.update.can_go_on = True
        self.on_step()

    def _weights_change(self) -> None:
        """From here to the end of a step there is nothing to go on from."""
        if self.update is not None:
            self.update.can_go_on = False

    def _step(self, minibatch: Minibatch, steps: list[dict[str, Tensor]]) -> bool:
        """One optimizer step; False, and no step, once the policy is too far from the rollout's."""
        if self._normalization == "minibatch":
            minibatch = minibatch._replace(advantages=normalized(minibatch.advantages, minibatch.returns))
        if self.loss_aggregation != "token_mean":
            lengths = minibatch.observations.lengths
            minibatch = minibatch._replace(weights=action_weights(lengths, self.loss_aggregation, self.loss_norm))
        self.policy.optimizer.zero_grad()
        parts: list[Objective] = []
        for loss, objective in self._micro_losses(minibatch, self.arguments.micro_batch_size):
            loss.backward()
            parts.append(objective)
        info = self._summary(Objective.joined(parts), minibatch.weights)
        info["minibatch_episodes"] = torch.tensor(float(minibatch.observations.n_episodes))
        steps.append(info)
        if self.target_kl is not None and float(info["approx_kl"]) > 1.5 * self.target_kl:
            return False
        self._optimizer_step(info)
        return True

    def _micro_losses(self, minibatch: Minibatch, micro_batch_size: int | None) -> Iterator[tuple[Tensor, Objective]]:
        """Each micro-batch's part of the minibatch's loss, and its detached terms."""
        for micro_batch in split(minibatch, micro_batch_size):
            objective = self.loss(micro_batch)
            share = len(micro_batch.actions) / len(minibatch.actions)
            yield share * self._total(objective, micro_batch.weights), objective.detach()

    def _total(self, objective: Objective, weights: Tensor) -> Tensor:
        """The loss that is minimised."""
        total = weighted_mean("policy", objective.policy, weights)
        if objective.value is not None:
            total = total + self.vf_coef * objective.value.mean()
        if objective.entropy is not None and self.ent_coef:
            total = total + self.ent_coef * objective.entropy.mean()
        return total if objective.kl is None else total + weighted_mean("kl", objective.kl, weights)

    def _summary(self, objective: Objective, weights: Tensor) -> dict[str, Tensor]:
        """The means over a minibatch that are logged."""
        terms = {name: getattr(objective, name) for name in _TERMS}
        info = {name: weighted_mean(name, term, weights) for name, term in terms.items() if term is not None}
        ratio = objective.log_ratio
        info["loss"] = self._total(objective, weights)
        info["approx_kl"] = approximate_kl(ratio)
        info["ratio_gap"] = (ratio.exp() - 1).abs().max()
        info["clip_fraction"] = ((ratio.exp() - 1).abs() > self._clip_range).float().mean()
        return info

    def _optimizer_step(self, info: dict[str, Tensor]) -> None:
        """Clip the gradients and step; a step that is left out adds nothing to the logged means.

        A separate critic is clipped by its own norm: with rewards of an unusual size its gradient would otherwise scale
        the actor's down to nothing. With a shared critic both gradients meet in the trunk and are clipped together.
        """
        for name, parameters in self._clipped_together():
            info[name] = torch.nn.utils.clip_grad_norm_(parameters, self.max_grad_norm)
        if self._is_accepted(info):
            self._weights_change()
            self.policy.optimizer.step()
            self._n_updates += 1
        else:
            self.policy.optimizer.zero_grad()
            info |= {name: torch.full_like(info[name], math.nan) for name in info.keys() - {"ratio_gap"}}

    def _clipped_together(self) -> list[tuple[str, Iterable[torch.nn.Parameter]]]:
        """The name of each logged gradient norm, and the parameters that it is taken over."""
        if self.policy.arguments.critic != "separate":
            return [("grad_norm", self.policy.parameters())]
        return [("grad_norm", self._parameters_of("actor")), ("critic_grad_norm", self._parameters_of("critic"))]

    def _parameters_of(self, role: str) -> list[torch.nn.Parameter]:
        groups = self.policy.optimizer.param_groups
        return [parameter for group in groups if group["role"] == role for parameter in group["params"]]

    def _is_accepted(self, info: Mapping[str, Tensor]) -> bool:
        """Whether a step may be taken: loss and gradient are finite. See `StepGuard`."""
        loss, grad_norm = info["loss"], info["grad_norm"] + info.get("critic_grad_norm", 0.0)
        finite = bool(torch.isfinite(loss + grad_norm))
        found = "" if finite else f"the loss is {float(loss):g} and its gradient's norm {float(grad_norm):g} in update "
        way_out = "Lower alg.args.learning_rate, or see what the reward pays"
        return self.guard.accepts(finite, f"{found}{self._n_updates + 1}", way_out)

    @property
    def _normalization(self) -> str | None:
        """Over what advantages are normalised: `minibatch`, `rollout` or None."""
        choice = getattr(self.arguments, "normalize_advantage", False)
        return "minibatch" if choice is True else choice or None

    @property
    def _clip_range(self) -> float:
        return float(getattr(self.arguments, "clip_range", math.inf))

    def training_state(self) -> dict[str, Any]:
        """As of every algorithm, and the steps that were left out."""
        return {**super().training_state(), "left_out": self.guard.state_dict()}

    def load_training_state(self, state: dict[str, Any]) -> None:
        """Takes over what `training_state` gave."""
        super().load_training_state(state)
        self.guard.load_state_dict(state["left_out"])

    # --- learning rates and log -------------------------------------------------------------------------------------

    def _update_learning_rate(self, optimizers: Any) -> None:
        """Stable-Baselines3's, with the critic's own rate."""
        learning_rate = self.lr_schedule(self._current_progress_remaining)
        self.logger.record("train/learning_rate", learning_rate)
        options = self.arguments
        own = options.critic_learning_rate
        factor = options.CRITIC_FACTOR if own is None else own / options.learning_rate
        for group in optimizers.param_groups:
            group["lr"] = learning_rate * (factor if group["role"] == "critic" else 1.0)

    def _log_update(self, steps: list[dict[str, Tensor]], epochs: int, seconds: float) -> None:
        self._record_means(steps, [name for name in _KEYS if name in steps[0]])
        self.logger.record("train/epochs", epochs)
        self.logger.record("train/optimizer_steps", len(steps))
        self._log_fit(float(steps[0]["ratio_gap"]), seconds)

    def _record_means(self, steps: list[dict[str, Tensor]], names: Iterable[str]) -> None:
        """Means over the update's steps but those that were left out, whose numbers are NaN."""
        for name in names:
            values = [step[name] for step in steps if name in step]
            self.logger.record(_KEYS[name], float(torch.stack(values).nanmean()) if values else math.nan)

    def _log_fit(self, gap: float, seconds: float) -> None:
        """What every update tells: how the critic fits, whether the update started where the rollout ended."""
        if self.policy.has_critic:
            values, returns = torch.as_tensor(self.rollout_buffer.values), torch.as_tensor(self.rollout_buffer.returns)
            self.logger.record("ppo/explained_variance", explained_variance(values, returns))
        self.logger.record("train/ratio_gap", gap)
        self.logger.record("train/n_updates", self._n_updates)
        if self.guard.non_finite == "skip":
            self.logger.record("train/skipped_steps", self.guard.skipped)
        self.logger.record("time/update_s", seconds)
        if self.warns_of_ratio and gap > RATIO_TOLERANCE[self.policy.arguments.dtype]:
            self.warns_of_ratio = False
            warnings.warn(
                f"the first minibatch's ratio is off 1 by {gap:.2g}: the update starts from other log-probs than the "
                f"rollout's. Likely cause: {self.likely_ratio_cause}. Said once",
                stacklevel=2,
            )

    @property
    def likely_ratio_cause(self) -> str:
        """Why an update's first ratio would be off 1."""
        options = self.policy.arguments
        if options.dropout:
            return "dropout is on in updates (policy.args.dropout)"
        if options.dtype != "float32":
            return f"{options.dtype} rounds differently at other padded widths; try dtype: float32"
        return "the model's forward depends on its batch; try attn_implementation: eager or compile: false"


_TERMS = ("policy", "value", "entropy", "kl")
_KEYS = {
    "policy": "ppo/policy_gradient_loss",
    "value": "ppo/value_loss",
    "entropy": "ppo/entropy_loss",
    "kl": "ppo/kl_loss",
    "loss": "ppo/loss",
    "approx_kl": "ppo/approx_kl",
    "clip_fraction": "ppo/clip_fraction",
    "grad_norm": "train/grad_norm",
    "critic_grad_norm": "train/critic_grad_norm",
    "minibatch_episodes": "train/minibatch_episodes",
}


def _filled(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """What was given, and defaults for what was not, or was left at None."""
    return {**given, **{name: value for name, value in defaults.items() if given.get(name) is None}}


def split(minibatch: Minibatch, micro_batch_size: int | None) -> Iterator[Minibatch]:
    """A minibatch in parts of about `micro_batch_size` tokens, whole episodes each.

    Args:
        minibatch: whole episodes and their flat fields.
        micro_batch_size: tokens; None = one part.
    """
    episodes = minibatch.observations
    if micro_batch_size is None or int(episodes.response_lengths.sum()) <= micro_batch_size:
        yield minibatch
        return
    for group in pack_episodes(episodes.response_lengths.tolist(), range(episodes.n_episodes), micro_batch_size):
        index = torch.tensor(group, device=episodes.response_ids.device)
        tokens = episodes.token_index(index)
        fields: Any = minibatch[1:]
        yield Minibatch(episodes.select(index), *(field[tokens] for field in fields))
