"""Trust region policy optimisation (Schulman et al., arXiv 1502.05477).

    policy    one step per rollout along F⁻¹g, limited by the mean KL to the rollout's policy
    critic    separate gradient steps; with `critic: shared` only of its head, since the trunk belongs to the policy

The optimizer only updates the critic. g is the gradient of the surrogate mean(ratio A) over the whole rollout, F the
Fisher matrix over whole episodes of it. Old and new distributions are compared batch by batch, and not stored.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl4lms_like.algorithms.arguments import TRPOArguments
from rl4lms_like.algorithms.base import OnPolicyTextAlgorithm
from rl4lms_like.algorithms.fisher import FisherMatrix, FlatParameters
from rl4lms_like.core.losses import approximate_kl, surrogate, value_error
from rl4lms_like.core.objective import Objective
from rl4lms_like.core.seeding import SeedStream
from rl4lms_like.core.token_scores import scores_of_logits
from rl4lms_like.core.trust_region import Solution, backtracking, categorical_kl, conjugate_gradient, largest_step
from rl4lms_like.rollouts.buffer import Minibatch

_STEP_NUMBERS = ("line_search_success", "step_size", "kl", "surrogate_gain")
"""Names of the logged numbers of a step of the policy."""
SMALLEST_NORM = 1e-30
"""In place of the norm of a gradient that is 0, by which nothing can be divided."""


class TRPO(OnPolicyTextAlgorithm):
    """TRPO on whole episodes; its arguments are those of `TRPOArguments`.

    On the same rollouts its steps equal those of SB3-contrib's TRPO, except for the random start of the latter's
    conjugate gradient.

    Raises:
        ConfigError: the policy's arguments select something without second derivatives.
        ModelError: the model has a balancing loss.
    """

    arguments_class = TRPOArguments
    arguments: TRPOArguments
    learns_off_policy = False  # its trust region and line search are means over episodes of the current policy

    adds_balancing_loss = False  # the line search would have to compare it, too

    def __init__(self, policy: Any, env: Any, **arguments: Any) -> None:
        super().__init__(policy, env, **arguments)
        self.batch_size = self.arguments.batch_size

    def policy_defaults(self, policy_kwargs: Mapping[str, Any]) -> dict[str, Any]:
        # Fused attention has no second derivatives, which products with the Fisher matrix need.
        return {"attn_implementation": "eager"}

    def _setup_model(self) -> None:
        super()._setup_model()
        self.share_seeds = SeedStream(self.sampling_seed, "fisher share")

    def loss(self, minibatch: Minibatch) -> Objective:
        """Return surrogate and negative entropy with gradients, and the critic's error in the rollout without."""
        # L_t = -r_t A_t without a clip: the trust region takes its place. r_t is 1 here, its gradient that of log pi.
        scores = self.policy.action_scores(minibatch.observations)
        log_ratio = scores.log_prob - minibatch.old_log_prob  # log r_t, [n_actions]
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
            # The policy: one step on the whole rollout, or none in an iteration of the critic alone. It does not count
            # as a minibatch: a resumed pass skips as many of the critic's minibatches as are counted.
            if not progress.steps and not self._is_critic_only:
                (rollout,) = self.rollout_buffer.get(None)
                with self.hooks.interruption.finishing("the policy's step"):
                    progress.steps.append(self._policy_step(rollout))
                self._step_done()

            # The critic: gradient steps on minibatches, limited by no trust region.
            n_passes = self.arguments.n_critic_updates
            minibatch_episodes = self.arguments.minibatch_episodes
            for _, minibatch in progress.remaining(self.rollout_buffer, n_passes, self.batch_size, minibatch_episodes):
                self._finish_minibatch(self.critic_step(minibatch))

        self.policy.free_update_memory()
        self.guard.end_update(len(progress.steps))

        # Only a step of the policy has a ratio. There is one, or none in an iteration of the critic alone.
        policy_steps = [step for step in progress.steps if "ratio_gap" in step]
        critic_steps = [step for step in progress.steps if "ratio_gap" not in step]
        self._record_means(critic_steps, ("value",))
        for step in policy_steps:
            self._record_means([step], ("policy", "entropy", "approx_kl", "grad_norm"))
            for name in (*_STEP_NUMBERS, "cg_residual"):
                self.logger.record(f"trpo/{name}", float(step[name]))
        ratio_gap = policy_steps[0]["ratio_gap"] if policy_steps else None
        self._log_update(ratio_gap, time.perf_counter() - start)
        self._update_reference()

    def _policy_step(self, rollout: Minibatch) -> dict[str, Tensor]:
        """Take a trust-region step and return its logged scalars."""
        # g = gradient of mean(r_t A_t) + ent_coef * entropy at the rollout's policy, over the whole rollout.
        actor = FlatParameters(self._parameters_of("actor"))
        gradient, info = self._gradient(rollout, actor)
        self.check_sampler(info)
        if not self._is_accepted(info):
            return self._no_step(info)

        # s = sqrt(2 target_kl / xᵀAx) x with A x = g: the direction of F⁻¹g, up to the edge of the region in which the
        # quadratic model of the KL, ½ sᵀAs, is at most target_kl.
        solution = self._direction(rollout, actor, gradient)
        step = largest_step(solution, gradient, self.arguments.target_kl)
        problem = f"the conjugate gradient found no finite step in optimizer step {self._n_updates + 1}"
        if not self.guard.accepts(bool(torch.isfinite(step).all()), problem, "Raise alg.args.cg_damping"):
            return self._no_step(info)
        info["cg_residual"] = solution.residual.norm() / gradient.norm().clamp_min(SMALLEST_NORM)

        # Both models are local, so the step is shortened until the true KL and surrogate agree with them. The means at
        # the new policy replace those of the gradient in the log.
        return info | self._line_search(rollout, actor, step, info["loss"])

    def _gradient(self, rollout: Minibatch, actor: FlatParameters) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the gradient `[n]` of the maximised surrogate over the whole rollout, and its logged scalars."""
        # Losses are minimised and the surrogate is maximised: g = -grad L.
        gradient = torch.zeros_like(actor.vector())
        objectives: list[Objective] = []
        for loss, objective in self.micro_losses(
            rollout, self.arguments.micro_batch_size, response_tokens=self._response_tokens_per_pass
        ):
            gradient -= actor.flat(actor.gradient(loss))
            objectives.append(objective)
        self.ranks.sum(gradient)

        info = self._summary(self._gather_terms(objectives), rollout.weights)
        info["grad_norm"] = gradient.norm()
        return gradient, info

    def _no_step(self, info: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the logged scalars of a skipped policy step."""
        zero = torch.zeros_like(info["ratio_gap"])
        return {"ratio_gap": info["ratio_gap"], "cg_residual": zero, **dict.fromkeys(_STEP_NUMBERS, zero)}

    def _direction(self, rollout: Minibatch, actor: FlatParameters, gradient: Tensor) -> Solution:
        """Solve for F⁻¹g with damping."""
        damping = self.arguments.cg_damping
        episodes = self._fisher_episodes(rollout)
        batches = [batch.observations for batch, _ in self._passes(episodes)]
        fisher = FisherMatrix(self.policy.action_logits, batches, actor, len(episodes.actions))

        # A v = F v + λ v. F is only semidefinite: without λ, directions that change no distribution have no limit. The
        # sum comes before the damping, which would otherwise count once per process.
        def product(vector: Tensor) -> Tensor:
            result = fisher @ vector
            self.ranks.sum(result)
            return result.add_(vector, alpha=damping)

        return conjugate_gradient(product, gradient, max_steps=self.arguments.cg_max_steps)

    @torch.no_grad()
    def _line_search(self, rollout: Minibatch, actor: FlatParameters, step: Tensor, loss: Tensor) -> dict[str, Tensor]:
        """Take the longest tried fraction of the step that improves the surrogate in the trust region, or no step."""
        options = self.arguments
        start = actor.vector()  # theta, [n]
        no_step = dict.fromkeys((*_STEP_NUMBERS, "approx_kl"), torch.zeros(()))
        if not bool(step.any()):
            return no_step  # equal advantages, for instance, have no gradient

        # theta + c^k s, k = 0, 1, ...: the first one with KL(pi_old ‖ pi) < target_kl and a smaller loss.
        for fraction in backtracking(options.line_search_shrinking_factor, options.line_search_max_iter):
            candidate = start + fraction * step
            means = self._compared(rollout, actor, candidate)
            if bool((means["kl"] < options.target_kl) & (means["loss"] < loss)):  # waits for the device, once a try
                self.weights_change()
                actor.load(candidate)
                self._n_updates += 1
                means["line_search_success"] = torch.tensor(1.0)
                means["step_size"] = torch.tensor(fraction)
                means["surrogate_gain"] = loss - means["loss"]
                return means

        # The parameters have not moved, to the last bit: `_compared` only replaces them for a while.
        return no_step

    def _compared(self, rollout: Minibatch, actor: FlatParameters, candidate: Tensor) -> dict[str, Tensor]:
        """Return the mean loss at other parameters `[n]`, and their mean KL to the current ones, over the rollout."""
        names = ("policy", "entropy", "kl", "approx_kl")
        means = torch.zeros(len(names), device=candidate.device)

        # Two matrices `[n_tokens, vocab]` at a time, old and new: the distributions of a whole rollout are not stored.
        for batch, fraction in self._passes(rollout):
            episodes = batch.observations
            with actor.at_offset(candidate):
                new_logits = self.policy.action_logits(episodes)
            kl = categorical_kl(self.policy.action_logits(episodes), new_logits).mean()
            log_prob, entropy = scores_of_logits(new_logits, batch.actions)
            log_ratio = log_prob - batch.old_log_prob
            loss = surrogate(log_ratio, batch.advantages)

            # A batch counts with its fraction of the rollout's actions: sum_i (n_i / n) mean_i = mean over all n.
            terms = torch.stack([loss.mean(), -entropy.mean(), kl, approximate_kl(log_ratio)])
            means += fraction * terms
        self.ranks.sum(means)

        by_name = dict(zip(names, means, strict=True))
        return by_name | {"loss": by_name["policy"] + self.ent_coef * by_name["entropy"]}

    def _fisher_episodes(self, rollout: Minibatch) -> Minibatch:
        """Return the episodes of the Fisher matrix."""
        # A fraction of them is enough for a direction, and makes each product cheaper. Sorted, so that they keep the
        # order of the buffer.
        episodes = rollout.observations
        rng = np.random.default_rng(self.share_seeds.next())
        n_chosen = math.ceil(episodes.n_episodes / self.arguments.sub_sampling_factor)
        index = np.sort(rng.permutation(episodes.n_episodes)[:n_chosen])
        return self.rollout_buffer.samples(index.tolist())

    def _passes(self, episodes: Minibatch) -> Iterator[tuple[Minibatch, float]]:
        """Split episodes as `_split` does, into passes whose logits fit into memory."""
        return self._split(episodes, self.arguments.micro_batch_size, response_tokens=self._response_tokens_per_pass)

    @property
    def _response_tokens_per_pass(self) -> int:
        """Response tokens per pass, such that a few matrices `[tokens, vocab]` take twice the logits budget."""
        # 4 bytes per logit, and half the tokens that fit: several matrices are in memory together, such as the old and
        # the new logits.
        return max(int(self.policy.arguments.logits_budget_mb * 2**20 / 8) // self.policy.vocab_size, 1)

    def training_state(self) -> dict[str, Any]:
        """Return the state of every algorithm, and the seeds that select the episodes of the Fisher matrix."""
        return {**super().training_state(), "share_seeds": self.share_seeds.state_dict()}

    def load_training_state(self, state: dict[str, Any]) -> None:
        """Restore the state returned by `training_state`."""
        super().load_training_state(state)
        self.share_seeds.load_state_dict(state["share_seeds"])
