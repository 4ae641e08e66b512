"""Rollout buffer of whole episodes with the interface of Stable-Baselines3.

    add(episodes, rewards, values, log_probs)      as often as needed
    compute_returns_and_advantage()                once
    get(batch_size) -> Minibatch                   observations: EpisodeBatch; other fields flat [n_tokens]

With it, unmodified Stable-Baselines3 algorithms can train a language model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rl4lms_like.core.advantages import generalized_advantages, length_adaptive_lambda
from rl4lms_like.core.episodes import EpisodeBatch, pack_episodes

SORTING_WINDOW = 4
"""With `sort_by_length`, episodes are sorted within windows of this many minibatches, to keep the order random."""


class Minibatch(NamedTuple):
    """Whole episodes and data of their actions; the first six names are those of Stable-Baselines3.

    Args:
        observations: the episodes.
        actions: `[n_actions]`, token ids, episode after episode; the following fields have the same order.
        old_values: `[n_actions]`, the critic's values in the rollout.
        old_log_prob: `[n_actions]`, log-probs in the rollout.
        advantages: `[n_actions]`.
        returns: `[n_actions]`.
        weights: `[n_actions]`, weights of the actions in the policy's loss; see `core.objective.action_weights`.
        episode_rewards: `[n_actions]`, the task reward of an action's whole episode, without the KL penalty.
        nll_weights: `[n_actions]`, weights of the actions in the negative log-likelihood of good episodes.
        ref_log_prob: `[n_actions]`, log-probs under the reference; without one those in the rollout.
    """

    observations: EpisodeBatch
    actions: Tensor
    old_values: Tensor
    old_log_prob: Tensor
    advantages: Tensor
    returns: Tensor
    weights: Tensor
    episode_rewards: Tensor
    nll_weights: Tensor
    ref_log_prob: Tensor


class EpisodeBuffer:
    """Episodes of one rollout with rewards, values, log-probs and advantages of their tokens.

    The signature is that of Stable-Baselines3's `RolloutBuffer`.

    Args:
        buffer_size: for compatibility with Stable-Baselines3, ignored: a rollout has as many tokens as its episodes.
        observation_space: for compatibility with Stable-Baselines3, ignored.
        action_space: for compatibility with Stable-Baselines3, ignored.
        device: device of the episodes and fields.
        gae_lambda: lambda of the advantages.
        gamma: discount factor.
        n_envs: for compatibility with Stable-Baselines3, ignored.
        sort_by_length: pack episodes of similar length together.
        value_gae_lambda: lambda of the critic's targets; default: `gae_lambda`.
        gae_length_alpha: alpha of the length-adaptive lambda of the advantages; see `length_adaptive_lambda`. Default:
            `gae_lambda` for all lengths.
    """

    dtype = torch.float32
    """Type of the fields; float64 for exact gradients (`testing.tabular`)."""
    keeps_groups = False
    """True if a minibatch must contain all episodes of a group."""

    def __init__(
        self,
        buffer_size: int = 0,
        observation_space: spaces.Space | None = None,
        action_space: spaces.Space | None = None,
        device: torch.device | str = "cpu",
        gae_lambda: float = 0.95,
        gamma: float = 0.99,
        n_envs: int = 1,
        *,
        sort_by_length: bool = False,
        value_gae_lambda: float | None = None,
        gae_length_alpha: float | None = None,
    ) -> None:
        self.buffer_size = buffer_size
        self.device = torch.device("cpu" if device == "auto" else device)
        self.gae_lambda = gae_lambda
        self.gamma = gamma
        self.n_envs = n_envs
        self.sort_by_length = sort_by_length
        self.value_gae_lambda = value_gae_lambda
        self.gae_length_alpha = gae_length_alpha
        self._rng = np.random.default_rng()
        self.episodes: EpisodeBatch | None = None
        self.reset()

    def seed(self, seed: int) -> None:
        """Seed the order of minibatches."""
        self._rng = np.random.default_rng(seed)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the random number generator. Episodes are not included."""
        return {"rng": self._rng.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state returned by `state_dict`."""
        self._rng.bit_generator.state = state["rng"]

    def rollout(self) -> dict[str, Tensor]:
        """Return the episodes and all fields of their tokens, by name; `load_rollout` restores them."""
        assert self.episodes is not None
        parts = {name: getattr(self.episodes, name) for name in _OF_EPISODES}
        parts |= {name: getattr(self, f"_{name}") for name in _OF_TOKENS}
        return {name: part for name, part in parts.items() if part is not None}

    def load_rollout(self, rollout: Mapping[str, Tensor], prompt_side: Literal["left", "right"]) -> None:
        """Restore the tensors returned by `rollout`; prompts are padded on `prompt_side`."""
        self.reset()
        parts = {name: part.to(self.device) for name, part in rollout.items()}
        parts.setdefault("episode_rewards", torch.full_like(parts["rewards"], math.nan))  # of an older version
        of_episodes: dict[str, Any] = {name: parts.get(name) for name in _OF_EPISODES}
        self.episodes = EpisodeBatch(**of_episodes, prompt_side=prompt_side)
        self.n_tokens = self.episodes.n_tokens
        for name in _OF_TOKENS:
            setattr(self, f"_{name}", parts.get(name))

    def reset(self) -> None:
        """Remove all episodes."""
        self._parts: list[tuple[EpisodeBatch, Tensor, Tensor, Tensor, Tensor, Tensor]] = []
        self._kl_parts: list[Tensor] = []
        self.n_tokens = 0
        self.episodes = None

    @property
    def full(self) -> bool:
        """True once advantages have been computed."""
        return self.episodes is not None

    def add(
        self,
        episodes: EpisodeBatch,
        rewards: Tensor,
        values: Tensor,
        log_probs: Tensor,
        last_values: Tensor | None = None,
        kl: Tensor | None = None,
        episode_rewards: Tensor | None = None,
    ) -> None:
        """Add episodes with their flat fields.

        Args:
            episodes: `n` whole episodes.
            rewards: `[n_tokens]`, including the KL penalty.
            values: `[n_tokens]`.
            log_probs: `[n_tokens]`, under the policy that generated the episodes.
            last_values: `[n]`, the value after each episode's end; default: 0.
            kl: `[n_tokens]`, log-prob under the policy minus that under the reference. None = there is no reference.
            episode_rewards: `[n]`, the task reward of each episode; default: the sum of its `rewards`.

        Raises:
            ValueError: a field does not have one entry per action, or an episode has no actions.
        """
        if not bool((episodes.lengths > 0).all()):
            raise ValueError("an episode has no actions: all of its tokens come from the environment")
        if last_values is None:
            last_values = torch.zeros(episodes.n_episodes)
        fields = {"rewards": rewards, "values": values, "log_probs": log_probs}
        fields |= {} if kl is None else {"kl": kl}
        for name, field in fields.items():
            if field.shape != (episodes.n_tokens,):
                raise ValueError(f"{name} has shape {tuple(field.shape)}, the episodes have {episodes.n_tokens} tokens")
        if episode_rewards is None:
            episode_rewards = episodes.pad(rewards).sum(dim=1)
        of_actions = episode_rewards.repeat_interleave(episodes.lengths)
        given = (rewards, values, log_probs, last_values, of_actions)
        flat = [field.to(self.device, self.dtype) for field in given]
        self._parts.append((episodes.to(self.device), flat[0], flat[1], flat[2], flat[3], flat[4]))
        if kl is not None:
            self._kl_parts.append(kl.to(self.device, self.dtype))
        self.n_tokens += episodes.n_tokens

    def compute_returns_and_advantage(self, last_values: Any = None, dones: Any = None) -> None:
        """Compute advantages and returns within each episode; the arguments are Stable-Baselines3's and ignored."""
        batches, rewards, values, log_probs, ends, episode_rewards = zip(*self._parts, strict=True)
        self.episodes = EpisodeBatch.concatenated(batches)
        self._rewards, self._values, self._log_probs = torch.cat(rewards), torch.cat(values), torch.cat(log_probs)
        self._episode_rewards = torch.cat(episode_rewards)
        self._kl = torch.cat(self._kl_parts) if self._kl_parts else None
        alpha, last_values = self.gae_length_alpha, torch.cat(ends)
        of_policy = self.gae_lambda if alpha is None else length_adaptive_lambda(self.episodes.lengths, alpha)
        self._advantages, self._returns = self._generalized_advantages(of_policy, last_values)
        of_critic = self.gae_lambda if self.value_gae_lambda is None else self.value_gae_lambda
        if alpha is not None or of_critic != self.gae_lambda:
            self._returns = self._generalized_advantages(of_critic, last_values)[1]

    def _generalized_advantages(self, gae_lambda: float | Tensor, last_values: Tensor) -> tuple[Tensor, Tensor]:
        """Return advantages and returns `[n_tokens]`."""
        assert self.episodes is not None
        mask = self.episodes.action_mask
        advantages, returns = generalized_advantages(
            self.episodes.pad(self._rewards),
            self.episodes.pad(self._values),
            mask,
            gamma=self.gamma,
            gae_lambda=gae_lambda,
            last_values=last_values,
        )
        return advantages[mask], returns[mask]

    def get(self, batch_size: int | None = None) -> Iterator[Minibatch]:
        """Iterate once over the episodes in a new random order.

        Args:
            batch_size: approximate number of tokens per minibatch; None = the whole rollout at once.
        """
        assert self.episodes is not None, "call compute_returns_and_advantage first"
        if batch_size is None:
            groups = [list(range(self.episodes.n_episodes))]
        else:
            groups = self._minibatches(self.episodes.response_lengths.tolist(), batch_size)
        for group in groups:
            yield self.samples(torch.tensor(group, device=self.device))

    def samples(self, episodes: Tensor) -> Minibatch:
        """Return some episodes and their fields; all actions have weight 1."""
        assert self.episodes is not None
        tokens = self.episodes.token_index(episodes)
        chosen = self.episodes.select(episodes)
        return Minibatch(
            observations=chosen,
            actions=chosen.actions,
            old_values=self._values[tokens],
            old_log_prob=self._log_probs[tokens],
            advantages=self._advantages[tokens],
            returns=self._returns[tokens],
            weights=torch.ones_like(self._returns[tokens]),
            episode_rewards=self._episode_rewards[tokens],
            nll_weights=torch.zeros_like(self._returns[tokens]),
            ref_log_prob=self._log_probs[tokens] - (0.0 if self._kl is None else self._kl[tokens]),
        )

    def _minibatches(self, lengths: list[int], batch_size: int) -> list[list[int]]:
        """Return the episodes of each minibatch; those with the same prompt are shuffled and packed as one unit."""
        assert self.episodes is not None
        rows = self.episodes.group_ids if self.keeps_groups else self.episodes.prompt_rows
        units = self.episodes.together(rows)
        order = [episode for i in self._rng.permutation(len(units)) for episode in units[i]]
        if not self.sort_by_length:
            return pack_episodes(lengths, order, batch_size, rows, keeps_groups=self.keeps_groups)
        longest = {episode: max(lengths[other] for other in unit) for unit in units for episode in unit}
        groups: list[list[int]] = []
        for window in pack_episodes(lengths, order, SORTING_WINDOW * batch_size, rows, keeps_groups=self.keeps_groups):
            by_length = sorted(window, key=longest.__getitem__)
            groups += pack_episodes(lengths, by_length, batch_size, rows, keeps_groups=self.keeps_groups)
        return [groups[i] for i in self._rng.permutation(len(groups))]

    @property
    def rewards(self) -> np.ndarray:
        """Rewards `[n_tokens]`, including the KL penalty."""
        return np.asarray(self._rewards.cpu().numpy())

    @property
    def values(self) -> np.ndarray:
        """Values `[n_tokens]`; NumPy, as Stable-Baselines3 expects."""
        return np.asarray(self._values.cpu().numpy())

    @property
    def returns(self) -> np.ndarray:
        """Returns `[n_tokens]`; NumPy, as Stable-Baselines3 expects."""
        return np.asarray(self._returns.cpu().numpy())

    @property
    def log_probs(self) -> Tensor:
        """Log-probs `[n_tokens]` under the policy that generated the episodes."""
        return self._log_probs

    @property
    def kl(self) -> Tensor | None:
        """Log-prob under the policy minus that under the reference `[n_tokens]`; None without a reference."""
        return self._kl

    @property
    def advantages(self) -> Tensor:
        """Advantages `[n_tokens]`."""
        return self._advantages

    @advantages.setter
    def advantages(self, advantages: Tensor) -> None:
        self._advantages = advantages


_OF_EPISODES = tuple(field.name for field in fields(EpisodeBatch) if field.name != "prompt_side")
_OF_TOKENS = ("rewards", "values", "log_probs", "kl", "advantages", "returns", "episode_rewards")
