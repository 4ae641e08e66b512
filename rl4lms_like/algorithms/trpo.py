"""Trust region policy optimisation (Schulman et al., arXiv 1502.05477).

    policy    one step per rollout along F⁻¹g, limited by the mean KL to the rollout's policy
    critic    separate gradient steps; with `critic: shared` only of its head, since the trunk belongs to the policy

The optimizer only updates the critic. g is the gradient of the surrogate mean(ratio A) over the whole rollout, F the
Fisher matrix over whole episodes of it. Old and new distributions are compared batch by batch, and not stored.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl4lms_like.algorithms.arguments import TRPOArguments, without_second_derivatives
from rl4lms_like.algorithms.base import OnPolicyTextAlgorithm
from rl4lms_like.algorithms.fisher import FisherMatrix, FlatParameters
from rl4lms_like.core.errors import ConfigError
from rl4lms_like.core.losses import approximate_kl, surrogate, value_error
from rl4lms_like.core.objective import Objective
from rl4lms_like.core.seeding import SeedStream
from rl4lms_like.core.token_scores import scores_of_logits
from rl4lms_like.core.trust_region import (
    Solution,
    backtracking,
    categorical_kl,
    conjugate_gradient,
    largest_step,
)
from rl4lms_like.rollouts.buffer import Minibatch


class TRPO(OnPolicyTextAlgorithm):
    """TRPO on whole episodes; its arguments are those of `TRPOArguments`.

    On the same rollouts its steps equal those of SB3-contrib's TRPO, except for the random start of the latter's
    conjugate gradient.

    Raises:
        ConfigError: the policy's arguments select something without second derivatives.
    """

    arguments_class = TRPOArguments
    arguments: TRPOArguments
    learns_off_policy = False  # its trust region and line search are means over episodes of the current policy

    def __init__(
        self, policy: Any, env: Any, *, policy_kwargs: Mapping[str, Any] | None = None, **arguments: Any
    ) -> None:
        issues = without_second_derivatives(policy_kwargs or {})
        if issues:
            raise ConfigError(issues, source="policy_kwargs")
        super().__init__(policy, env, policy_kwargs=dict(policy_kwargs or {}), **arguments)
        self.batch_size = self.arguments.batch_size

    def policy_defaults(self, given: Mapping[str, Any]) -> dict[str, Any]:
        return {"attn_implementation": "eager"}  # fused attention has no second derivatives

    def _setup_model(self) -> None:
        super()._setup_model()
        self.share_seeds = SeedStream(self.sampling_seed, "fisher share")

    def loss(self, minibatch: Minibatch) -> Objective:
        """Return surrogate and negative entropy with gradients, and the critic's error in the rollout without."""
        scores = self.policy.action_scores(minibatch.observations)
        log_ratio = scores.log_prob - minibatch.old_log_prob
        return Objective(
            policy=surrogate(log_ratio, minibatch.advantages),
            value=value_error(minibatch.old_values, minibatch.returns),
            entropy=-scores.entropy,
            log_ratio=log_ratio.detach(),
        )

    def total_loss(self, objective: Objective, weights: Tensor) -> Tensor:
        """Return the loss without the critic's part, since the critic has separate steps."""
        return super().total_loss(objective._replace(value=None), weights)

    @property
    def normalization(self) -> str | None:
        return "rollout" if self.arguments.normalize_advantage else None

    # --- the update -----------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Take one step of the policy, then the critic's steps on the rollout in the buffer; or the remaining ones."""
        start = time.perf_counter()
        with self._update_context() as progress:
            if not progress.steps and not self._is_critic_only:
                (rollout,) = self.rollout_buffer.get(None)
                with self.hooks.interruption.finishing("the policy's step"):
                    progress.steps.append(self._policy_step(rollout))
                self._step_done()

            for _, minibatch in progress.remaining(
                self.rollout_buffer, self.arguments.n_critic_updates, self.batch_size
            ):
                self._finish_minibatch(self.critic_step(minibatch))
        self.policy.optimizer.zero_grad()
        self.guard.end_update(len(progress.steps))

        # One step of the policy, or none in an iteration of the critic alone.
        policy_steps = [step for step in progress.steps if "ratio_gap" in step]
        self._record_means([step for step in progress.steps if "ratio_gap" not in step], ("value",))
        for step in policy_steps:
            self._record_means([step], ("policy", "entropy", "approx_kl", "grad_norm"))
            for name in (*_OF_A_STEP, "cg_residual"):
                self.logger.record(f"trpo/{name}", float(step[name]))
        ratio_gap = policy_steps[0]["ratio_gap"] if policy_steps else None
        self._log_fit(ratio_gap, time.perf_counter() - start)

    def _policy_step(self, rollout: Minibatch) -> dict[str, Tensor]:
        """Take a trust-region step and return its logged scalars."""
        actor = FlatParameters(self._parameters_of("actor"))
        gradient, info = self._gradient(rollout, actor)
        if not self._is_accepted(info):
            return self._no_step(info)
        solution = self._direction(rollout, actor, gradient)
        step = largest_step(solution, gradient, self.arguments.target_kl)
        found = f"the conjugate gradient found no finite step in optimizer step {self._n_updates + 1}"
        if not self.guard.accepts(bool(torch.isfinite(step).all()), found, "Raise alg.args.cg_damping"):
            return self._no_step(info)
        info["cg_residual"] = solution.residual.norm() / gradient.norm().clamp_min(1e-30)
        return info | self._line_search(rollout, actor, step, info["loss"])

    def _gradient(self, rollout: Minibatch, actor: FlatParameters) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the gradient `[n]` of the maximised surrogate over the whole rollout, and its logged scalars."""
        gradient = torch.zeros_like(actor.vector())
        parts: list[Objective] = []
        for loss, objective in self.micro_losses(rollout, self._tokens_per_pass):
            gradient -= actor.flat(actor.gradient(loss))
            parts.append(objective)
        self.ranks.sum(gradient)
        info = self._summary(self._gather_terms(parts), rollout.weights)
        info["grad_norm"] = gradient.norm()
        return gradient, info

    def _no_step(self, info: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the logged scalars of a skipped policy step."""
        zero = torch.zeros(())
        return {"ratio_gap": info["ratio_gap"], "cg_residual": zero, **dict.fromkeys(_OF_A_STEP, zero)}

    def _direction(self, rollout: Minibatch, actor: FlatParameters, gradient: Tensor) -> Solution:
        """Solve for F⁻¹g with damping."""
        damping = self.arguments.cg_damping
        episodes = self._fisher_episodes(rollout)
        batches = [batch.observations for batch, _ in self._split(episodes, self._tokens_per_pass)]
        fisher = FisherMatrix(self.policy.action_logits, batches, actor, len(episodes.actions))

        def product(vector: Tensor) -> Tensor:
            result = fisher @ vector
            self.ranks.sum(result)
            return result.add_(vector, alpha=damping)

        return conjugate_gradient(product, gradient, max_steps=self.arguments.cg_max_steps)

    @torch.no_grad()
    def _line_search(self, rollout: Minibatch, actor: FlatParameters, step: Tensor, loss: Tensor) -> dict[str, Tensor]:
        """Take the longest tried fraction of the step that improves the surrogate in the trust region, or no step."""
        options = self.arguments
        start = actor.vector()
        shares = backtracking(options.line_search_shrinking_factor, options.line_search_max_iter)
        for fraction in shares if bool(step.any()) else ():
            there = start + fraction * step
            found = self._compared(rollout, actor, there)
            if found["kl"] < options.target_kl and found["loss"] < loss:
                self.weights_change()
                actor.load(there)
                self._n_updates += 1
                gain = loss - found["loss"]
                taken = {"line_search_success": 1.0, "step_size": fraction}
                return found | {name: torch.tensor(value) for name, value in taken.items()} | {"surrogate_gain": gain}
        return dict.fromkeys((*_OF_A_STEP, "approx_kl"), torch.zeros(()))

    def _compared(self, rollout: Minibatch, actor: FlatParameters, there: Tensor) -> dict[str, Tensor]:
        """Return the mean loss at other parameters, and their mean KL to the current ones, over the rollout."""
        names = ("policy", "entropy", "kl", "approx_kl")
        means = torch.zeros(len(names), device=there.device)
        for batch, fraction in self._split(rollout, self._tokens_per_pass):
            episodes = batch.observations
            with actor.at_offset(there):
                new_logits = self.policy.action_logits(episodes)
            kl = categorical_kl(self.policy.action_logits(episodes), new_logits).mean()
            log_prob, entropy = scores_of_logits(new_logits, batch.actions)
            log_ratio = log_prob - batch.old_log_prob
            loss = surrogate(log_ratio, batch.advantages)
            terms = torch.stack([loss.mean(), -entropy.mean(), kl, approximate_kl(log_ratio)])
            means += fraction * terms
        self.ranks.sum(means)
        found = dict(zip(names, means, strict=True))
        return found | {"loss": found["policy"] + self.ent_coef * found["entropy"]}

    def _fisher_episodes(self, rollout: Minibatch) -> Minibatch:
        """Return the episodes of the Fisher matrix."""
        episodes = rollout.observations
        rng = np.random.default_rng(self.share_seeds.next())
        wanted = math.ceil(episodes.n_episodes / self.arguments.sub_sampling_factor)
        chosen = np.sort(rng.permutation(episodes.n_episodes)[:wanted])
        return self.rollout_buffer.samples(torch.as_tensor(chosen, device=episodes.response_ids.device))

    @property
    def _tokens_per_pass(self) -> int:
        """Tokens per pass, such that a few matrices `[tokens, vocab]` take about twice the policy's logits budget."""
        budget = int(self.policy.arguments.logits_budget_mb * 2**20 / 8) // self.policy.vocab_size
        return max(min(budget, self.arguments.micro_batch_size or budget), 1)

    def training_state(self) -> dict[str, Any]:
        """Return the state of every algorithm, and the seeds that select the episodes of the Fisher matrix."""
        return {**super().training_state(), "share_seeds": self.share_seeds.state_dict()}

    def load_training_state(self, state: dict[str, Any]) -> None:
        """Restore the state returned by `training_state`."""
        super().load_training_state(state)
        self.share_seeds.load_state_dict(state["share_seeds"])


_OF_A_STEP = ("line_search_success", "step_size", "kl", "surrogate_gain")
