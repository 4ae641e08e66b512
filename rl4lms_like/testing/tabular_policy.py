"""Policy that is a table of logits, for the exact gradients of `testing.tabular`; optimizer that changes nothing."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from gymnasium import spaces
from stable_baselines3.common.policies import BasePolicy
from torch import Tensor, nn

from rl4lms_like.core.episodes import EpisodeBatch
from rl4lms_like.core.token_masks import pack
from rl4lms_like.core.token_scores import Distributions, masked_logits, vocabulary_kl
from rl4lms_like.policies.arguments import MaskablePolicyArguments
from rl4lms_like.policies.masked import MaskablePolicy, MaskRule
from rl4lms_like.policies.policy_engine import PolicyEngine
from rl4lms_like.policies.teacher_forcing import ActionScores, EpisodeScores

VOCABULARY = 3
LENGTH = 3
END = 0
"""Token that ends a response, if responses have different lengths."""

_STATES = 16
"""Prefixes of at most two tokens as numbers in base 4, whose digits are the tokens plus 1."""


class TabularPolicy(MaskablePolicy):
    """Actor-critic policy whose logits and values are tables, with the interface of a language model's policy.

    Args:
        observation_space: of the environment.
        action_space: of the environment.
        lr_schedule: ignored.
        n_prompts: number of prompts.
        critic: `none` for an algorithm without a critic.
        seed: seed of the tables.
        ignored: arguments of language-model policies.
    """

    vocab_size = VOCABULARY
    has_reference = True
    has_critic = True
    shares_prompts = False
    uses_sampler_log_probs = False

    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        lr_schedule: Any,
        *,
        n_prompts: int = 1,
        critic: Any = "separate",
        seed: int = 0,
        **ignored: Any,
    ) -> None:
        BasePolicy.__init__(self, observation_space, action_space)  # the other bases load language models

        # Rows of prompt p: 16 p + number of the prefix. Random, so that policy, reference and mask differ everywhere.
        generator = torch.Generator().manual_seed(seed)
        size = n_prompts * _STATES

        def table(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))

        self.logits = table(size, VOCABULARY)
        self.values = table(size)
        self.ref_logits = table(size, VOCABULARY).requires_grad_(False)
        self.mask_logits = table(size, VOCABULARY).requires_grad_(False)

        self.arguments = MaskablePolicyArguments(model_name="tabular", top_mask=2, critic=critic)
        self.engine = PolicyEngine()
        self.has_critic = critic != "none"
        groups = [{"params": [self.logits], "role": "actor"}, {"params": [self.values], "role": "critic"}]
        self.optimizer = Recorder(groups if self.has_critic else groups[:1])

    def set_training_mode(self, mode: bool) -> None:
        """Do nothing: a table has no dropout."""

    def update_mask_model(self) -> None:
        """Do nothing: no step changes the policy."""

    def states(self, episodes: EpisodeBatch) -> Tensor:
        """Return the state of each action, flat `[n_tokens]`."""
        # A prompt is one token, besides padding that a test may have added: its number. [n, 1]
        prompts = (episodes.prompt_ids * episodes.prompt_mask).sum(dim=1, keepdim=True)

        # The sum of the digits before each token `[n, response_len]`: 0 for the first one, at most 15 for the third.
        digits = (episodes.response_ids + 1) * 4 ** torch.arange(episodes.response_ids.shape[1])
        prefixes = digits.cumsum(1) - digits
        return (_STATES * prompts + prefixes)[episodes.action_mask]

    def masks(self, episodes: EpisodeBatch) -> Tensor:
        """Return the allowed tokens of each action: the two most probable ones of the mask model, and the end token."""
        rule = MaskRule("learned_top_k", self.arguments.top_mask, special_token_ids=(END,))
        return pack(rule.allowed(self.mask_logits[self.states(episodes)]))

    def action_logits(self, observations: EpisodeBatch, temperatures: Sequence[float] = (1.0,) * LENGTH) -> Tensor:
        """Return the logits `[n_tokens, 3]` of all actions, divided by the temperature of each position."""
        logits = self.logits[self.states(observations)]
        if observations.allowed is not None:
            logits = masked_logits(logits, observations.allowed)

        # One temperature for each position `[response_len]`, 1 for padded columns; then that of each action.
        width = observations.response_ids.shape[1]
        by_position = torch.tensor([*temperatures, *[1.0] * width], dtype=logits.dtype)[:width]
        by_action = by_position.expand(observations.action_mask.shape)[observations.action_mask]
        return logits / by_action[:, None]

    def sampling_log_prob(self, observations: EpisodeBatch, temperatures: Sequence[float]) -> Tensor:
        """Return log-probs of all actions under the distribution of sampling at these temperatures `[n_tokens]`."""
        return _chosen(self.action_logits(observations, temperatures), observations)

    def action_scores(self, observations: EpisodeBatch) -> ActionScores:
        """Return log-probs and entropies of all actions."""
        logits = self.action_logits(observations)
        log_probs = logits.log_softmax(dim=-1)  # [n_tokens, 3]
        log_prob = _chosen(logits, observations)
        entropy = -(log_probs.exp() * log_probs).sum(dim=-1)

        # With masks it is that of the whole vocabulary, and a constant.
        raw_log_prob = log_prob
        if observations.allowed is not None:
            raw_log_prob = _chosen(self.logits.detach()[self.states(observations)], observations)
        return ActionScores(log_prob, entropy, raw_log_prob, None)

    def reference_kl(self, observations: EpisodeBatch, scores: ActionScores, *, top_k: int | None = None) -> Tensor:
        """Return the KL to the reference of all actions' distributions `[n_tokens]`."""
        states = self.states(observations)
        policy = Distributions(self.logits[states], None)
        reference = Distributions(self.ref_logits[states], None)
        return vocabulary_kl(policy, reference, top_k=top_k, logits_budget=10**6)

    def predict_values(self, observations: EpisodeBatch) -> Tensor:
        """Return the values of all actions' states."""
        values = self.values[self.states(observations)]
        return values if self.has_critic else torch.zeros_like(values)

    def evaluate_actions(self, observations: EpisodeBatch, actions: Any = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return values, log-probs and entropies of all actions."""
        scores = self.action_scores(observations)
        return self.predict_values(observations), scores.log_prob, scores.entropy

    @torch.no_grad()
    def score(self, episodes: EpisodeBatch) -> EpisodeScores:
        """Return what a rollout stores."""
        log_prob, entropy, raw_log_prob, _ = self.action_scores(episodes)
        ref_log_prob = _chosen(self.ref_logits[self.states(episodes)], episodes)
        return EpisodeScores(self.predict_values(episodes), log_prob, entropy, ref_log_prob, raw_log_prob)


def _chosen(logits: Tensor, episodes: EpisodeBatch) -> Tensor:
    """Return the log-prob of each action `[n_tokens]` from logits `[n_tokens, 3]`."""
    return logits.log_softmax(dim=-1).gather(1, episodes.actions[:, None]).squeeze(1)


class Recorder(torch.optim.Optimizer):
    """Stores the first gradient of each parameter and changes no parameter.

    Args:
        groups: parameter groups of an optimizer.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {"lr": 1.0})
        self.first: dict[Tensor, Tensor] = {}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Store the gradients of parameters that had none before."""
        for parameter in itertools.chain.from_iterable(group["params"] for group in self.param_groups):
            if parameter.grad is not None:
                self.first.setdefault(parameter, parameter.grad.clone())
