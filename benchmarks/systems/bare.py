"""A bare loop: the work that no PPO on a language model can avoid, and nothing else. The yardstick.

    rollout    prompts -> sampled responses (KV cache) -> reward -> log-probs of policy and reference, values (no grad)
               -> rewards with KL penalty -> GAE
    update     epochs x minibatches: forward of policy and critic, backward, one fused AdamW step

No padding, no masks, no entropy, no statistics, no logging. Logits exist for response positions only. The gradient
is clipped only if asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from benchmarks import workload
from benchmarks.systems.worker import Worker
from benchmarks.workload import Shape


@dataclass(frozen=True)
class Rollout:
    """What an update needs: all `[n, response_len]`, but `input_ids [n, prompt_len + response_len]`."""

    input_ids: Tensor
    log_probs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor


def gae(rewards: Tensor, values: Tensor, *, gamma: float, gae_lambda: float) -> Tensor:
    """Advantages of whole episodes that all have the same length.

    Args:
        rewards: `[n, response_len]`.
        values: `[n, response_len]`.
        gamma: discount.
        gae_lambda: lambda of arXiv 1506.02438.

    Returns:
        `[n, response_len]`.
    """
    advantages = torch.empty_like(rewards)
    next_value = next_advantage = torch.zeros_like(rewards[:, 0])
    for step in reversed(range(rewards.shape[1])):
        delta = rewards[:, step] + gamma * next_value - values[:, step]
        next_advantage = advantages[:, step] = delta + gamma * gae_lambda * next_advantage
        next_value = values[:, step]
    return advantages


class BareLoop:
    """Policy, critic and reference, each a network of its own, and one optimizer.

    Args:
        shape: of the work.
        model: folder of the starting weights.
        max_grad_norm: clip the gradient's norm; default: no clipping.
        learning_rate: of policy and critic.
    """

    def __init__(
        self,
        shape: Shape,
        model: str,
        *,
        max_grad_norm: float | None = None,
        learning_rate: float = workload.LEARNING_RATE,
    ) -> None:
        self.shape = shape
        self.max_grad_norm = max_grad_norm
        # GPT-2's activation as one operation, which this library has as a speedup: both loops do the same work.
        config = AutoConfig.from_pretrained(model)
        if getattr(config, "activation_function", None) == "gelu_new":
            config.activation_function = "gelu_pytorch_tanh"
        self.policy = AutoModelForCausalLM.from_pretrained(model, config=config)
        self.reference = AutoModelForCausalLM.from_pretrained(model, config=config).requires_grad_(False)
        self.critic = AutoModel.from_pretrained(model, config=config)
        self.value_head = nn.Linear(shape.n_embd, 1)
        self.parameters = [*self.policy.parameters(), *self.critic.parameters(), *self.value_head.parameters()]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=learning_rate, fused=True)

    @torch.no_grad()
    def generate(self, prompt_ids: Tensor) -> Tensor:
        """Sample responses of full length.

        Args:
            prompt_ids: `[n, prompt_len]`.

        Returns:
            Prompts and responses `[n, prompt_len + response_len]`.
        """
        cache = DynamicCache()
        ids, tokens = [prompt_ids], prompt_ids
        for _ in range(self.shape.response_len):
            logits = self.policy(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            tokens = torch.multinomial(logits[:, -1].softmax(dim=-1), num_samples=1)
            ids.append(tokens)
        return torch.cat(ids, dim=1)

    def log_probs(self, model: PreTrainedModel, input_ids: Tensor) -> Tensor:
        """Log-probabilities `[n, response_len]` of the responses in `input_ids`, under `model`."""
        logits = model.get_output_embeddings()(self._choosing_states(model.base_model, input_ids))
        responses = input_ids[:, self.shape.prompt_len :]
        return -F.cross_entropy(logits.flatten(0, 1), responses.flatten(), reduction="none").view_as(responses)

    def values(self, input_ids: Tensor) -> Tensor:
        """The critic's values `[n, response_len]` before each response token."""
        return self.value_head(self._choosing_states(self.critic, input_ids)).squeeze(-1)

    def _choosing_states(self, trunk: nn.Module, input_ids: Tensor) -> Tensor:
        """Hidden states where the response tokens were chosen `[n, response_len, d]`; the last token chose nothing."""
        hidden = trunk(input_ids=input_ids[:, :-1], use_cache=False).last_hidden_state
        return hidden[:, self.shape.prompt_len - 1 :]

    @torch.no_grad()
    def rollout(self, prompt_ids: Tensor) -> Rollout:
        """Generate, score and give credit.

        Args:
            prompt_ids: `[n, prompt_len]`.
        """
        input_ids = self.generate(prompt_ids)
        log_probs = self.log_probs(self.policy, input_ids)
        rewards = -workload.KL_COEF * (log_probs - self.log_probs(self.reference, input_ids))
        rewards[:, -1] += workload.reward(input_ids[:, self.shape.prompt_len :])
        values = self.values(input_ids)
        advantages = gae(rewards, values, gamma=workload.GAMMA, gae_lambda=workload.GAE_LAMBDA)
        return Rollout(input_ids, log_probs, values, advantages, advantages + values)

    def loss(self, rollout: Rollout, rows: Tensor) -> Tensor:
        """PPO's clipped surrogate and the squared value error of some episodes (`rows`), a scalar."""
        input_ids, advantages = rollout.input_ids[rows], rollout.advantages[rows]
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        ratio = (self.log_probs(self.policy, input_ids) - rollout.log_probs[rows]).exp()
        clipped = ratio.clamp(1 - workload.CLIP_RANGE, 1 + workload.CLIP_RANGE)
        policy_loss = -torch.min(ratio * advantages, clipped * advantages).mean()
        return policy_loss + workload.VF_COEF * F.mse_loss(self.values(input_ids), rollout.returns[rows])

    def update(self, rollout: Rollout) -> int:
        """Epochs of minibatches.

        Returns:
            The number of optimizer steps.
        """
        steps = 0
        for _ in range(self.shape.n_epochs):
            for rows in torch.randperm(len(rollout.input_ids)).split(self.shape.minibatch):
                self.optimizer.zero_grad()
                self.loss(rollout, rows).backward()
                if self.max_grad_norm is not None:
                    nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm)
                self.optimizer.step()
                steps += 1
        return steps


def main() -> None:
    """Serve the driver."""
    worker = Worker()
    loop = BareLoop(worker.shape, worker.model, max_grad_norm=worker.job.get("bare_max_grad_norm"))
    worker.ready()
    iteration = 0
    while worker.next_iteration():
        rollout = loop.rollout(workload.prompts(worker.shape, iteration, seed=worker.seed))
        worker.rollout_done()
        steps = loop.update(rollout)
        worker.iteration_done(optimizer_steps=steps, response_tokens=rollout.log_probs.numel())
        iteration += 1


if __name__ == "__main__":
    main()
