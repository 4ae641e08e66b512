"""Rollout buffer of whole episodes with the interface of Stable-Baselines3.

    add(episodes, rewards, values, log_probs)      as often as needed
    compute_returns_and_advantage()                once
    get(batch_size) -> Minibatch                   observations: EpisodeBatch; other fields flat [n_tokens]

With it, unmodified Stable-Baselines3 algorithms can train a language model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rl4lms_like.core.advantages import generalized_advantages, length_adaptive_lambda
from rl4lms_like.core.devices import to_device
from rl4lms_like.core.episodes import EpisodeBatch, pack_episodes

SORTING_WINDOW = 4
"""With `sort_by_length`, episodes are sorted within windows of this many minibatches, to keep the order random."""


class Minibatch(NamedTuple):
    """Whole episodes and numbers of their actions; the first six names are those of Stable-Baselines3.

    Flat fields have one entry for each action, episode after episode. The update sets the last three, once it knows the
    whole minibatch; see `OnPolicyTextAlgorithm.prepare_minibatch`.

    Args:
        observations: the episodes.
        actions: `[n_actions]`, token ids.
        old_values: `[n_actions]`, the critic's values in the rollout.
        old_log_prob: `[n_actions]`, log-probs in the rollout.
        advantages: `[n_actions]`.
        returns: `[n_actions]`.
        ref_log_prob: `[n_actions]`, log-probs under the reference; without one those in the rollout.
        episode_rewards: `[n_actions]`, the task reward of an action's whole episode, without the KL penalty.
        weights: `[n_actions]`, weights of the actions in the policy's loss; see `core.objective.action_weights`.
        nll_weights: `[n_actions]`, weights of the actions in PPO's negative log-likelihood of good episodes; None
            without that term.
        fraction_in_band: `[]`, fraction of all actions of the minibatch whose ratio is in PPO's `ratio_band`; None
            where the loss can compute it, because the minibatch is not split.
    """

    observations: EpisodeBatch
    actions: Tensor
    old_values: Tensor
    old_log_prob: Tensor
    advantages: Tensor
    returns: Tensor
    ref_log_prob: Tensor
    episode_rewards: Tensor
    weights: Tensor
    nll_weights: Tensor | None = None
    fraction_in_band: Tensor | None = None

    def select(self, index: Tensor | Sequence[int]) -> Minibatch:
        """Return some of the episodes, in the order of the index `[k]`, with their flat fields."""
        tokens = self.observations.token_index(index)  # positions in flat fields
        return Minibatch(
            observations=self.observations.select(index),
            actions=self.actions[tokens],
            old_values=self.old_values[tokens],
            old_log_prob=self.old_log_prob[tokens],
            advantages=self.advantages[tokens],
            returns=self.returns[tokens],
            ref_log_prob=self.ref_log_prob[tokens],
            episode_rewards=self.episode_rewards[tokens],
            weights=self.weights[tokens],
            nll_weights=None if self.nll_weights is None else self.nll_weights[tokens],
            fraction_in_band=self.fraction_in_band,  # of the whole minibatch
        )


@dataclass(frozen=True, eq=False)
class AddedEpisodes:
    """Episodes as they were added to a buffer, before advantages can be computed.

    Args:
        episodes: `n` whole episodes.
        rewards: `[n_tokens]`, including the KL penalty.
        values: `[n_tokens]`.
        log_probs: `[n_tokens]`.
        episode_rewards: `[n_tokens]`, the task reward of each token's whole episode.
        last_values: `[n]`, the value after each episode's end.
        kl: `[n_tokens]`, log-prob under the policy minus that under the reference; None without a reference.
    """

    episodes: EpisodeBatch
    rewards: Tensor
    values: Tensor
    log_probs: Tensor
    episode_rewards: Tensor
    last_values: Tensor
    kl: Tensor | None


@dataclass(eq=False)
class TokenFields:
    """Numbers of all tokens of a rollout, each `[n_tokens]`, episode after episode.

    Args:
        rewards: including the KL penalty.
        values: of the critic in the rollout.
        log_probs: of the policy in the rollout.
        advantages: of the actions; an algorithm may replace them before its first step.
        returns: targets of the critic.
        episode_rewards: the task reward of each token's whole episode.
        kl: log-prob under the policy minus that under the reference; None without a reference.
    """

    rewards: Tensor
    values: Tensor
    log_probs: Tensor
    advantages: Tensor
    returns: Tensor
    episode_rewards: Tensor
    kl: Tensor | None


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
        self.reset()

    # --- a rollout, in this order -----------------------------------------------------------------------------------

    def reset(self) -> None:
        """Remove all episodes."""
        self._added: list[AddedEpisodes] = []
        self._fields: TokenFields | None = None
        self.episodes: EpisodeBatch | None = None
        self.n_tokens = 0

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
        if not bool((episodes.layout.lengths > 0).all()):
            raise ValueError("an episode has no actions: all of its tokens come from the environment")
        flat_fields = {"rewards": rewards, "values": values, "log_probs": log_probs}
        if kl is not None:
            flat_fields["kl"] = kl
        for name, field in flat_fields.items():
            if field.shape != (episodes.n_tokens,):
                raise ValueError(f"{name} has shape {tuple(field.shape)}, the episodes have {episodes.n_tokens} tokens")

        if last_values is None:
            last_values = torch.zeros(episodes.n_episodes)
        if episode_rewards is None:
            episode_rewards = episodes.pad(rewards).sum(dim=1)  # [n]
        lengths = episodes.lengths.to(episode_rewards.device)
        of_actions = episode_rewards.repeat_interleave(lengths, output_size=episodes.n_tokens)
        added = AddedEpisodes(
            episodes=episodes.to(self.device),
            rewards=to_device(rewards, self.device, self.dtype),
            values=to_device(values, self.device, self.dtype),
            log_probs=to_device(log_probs, self.device, self.dtype),
            episode_rewards=to_device(of_actions, self.device, self.dtype),
            last_values=to_device(last_values, self.device, self.dtype),
            kl=None if kl is None else to_device(kl, self.device, self.dtype),
        )
        self._added.append(added)
        self.n_tokens += episodes.n_tokens

    def compute_returns_and_advantage(self, last_values: Any = None, dones: Any = None) -> None:
        """Compute advantages and returns within each episode; the arguments are Stable-Baselines3's and ignored."""
        self.episodes = EpisodeBatch.concatenated([added.episodes for added in self._added])
        rewards = self._joined("rewards")  # [n_tokens]
        values = self._joined("values")  # [n_tokens]
        ends = self._joined("last_values")  # [n_episodes]

        # Advantages: the lambda is the same for all episodes, or grows with their length (VAPO, arXiv 2504.05118).
        policy_lambda: float | Tensor = self.gae_lambda
        if self.gae_length_alpha is not None:
            policy_lambda = length_adaptive_lambda(self.episodes.lengths, self.gae_length_alpha)  # [n_episodes]
        advantages, returns = self._generalized_advantages(rewards, values, ends, policy_lambda)

        # The critic's targets may have a lambda of their own (VC-PPO, arXiv 2503.01491: 1, Monte-Carlo returns).
        critic_lambda = self.gae_lambda if self.value_gae_lambda is None else self.value_gae_lambda
        if self.gae_length_alpha is not None or critic_lambda != self.gae_lambda:
            _, returns = self._generalized_advantages(rewards, values, ends, critic_lambda)

        has_reference = self._added[0].kl is not None
        self._fields = TokenFields(
            rewards=rewards,
            values=values,
            log_probs=self._joined("log_probs"),
            advantages=advantages,
            returns=returns,
            episode_rewards=self._joined("episode_rewards"),
            kl=self._joined("kl") if has_reference else None,
        )

    def _joined(self, name: str) -> Tensor:
        """Return a field of all added episodes."""
        return torch.cat([getattr(added, name) for added in self._added])

    def _generalized_advantages(
        self, rewards: Tensor, values: Tensor, last_values: Tensor, gae_lambda: float | Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return advantages and returns `[n_tokens]`, the first two arguments being `[n_tokens]` too."""
        assert self.episodes is not None
        advantages, returns = generalized_advantages(
            self.episodes.pad(rewards),
            self.episodes.pad(values),
            self.episodes.action_mask,
            gamma=self.gamma,
            gae_lambda=gae_lambda,
            last_values=last_values,
        )
        return self.episodes.flat(advantages), self.episodes.flat(returns)

    def get(self, batch_size: int | None = None, minibatch_episodes: int | None = None) -> Iterator[Minibatch]:
        """Iterate once over the episodes in a new random order.

        Args:
            batch_size: approximate number of tokens per minibatch; None = the whole rollout at once.
            minibatch_episodes: number of episodes per minibatch, in place of a number of tokens.
        """
        assert self.episodes is not None, "call compute_returns_and_advantage first"
        if minibatch_episodes is not None:
            minibatches = self._draw_minibatches([1] * self.episodes.n_episodes, minibatch_episodes)
        elif batch_size is not None:
            minibatches = self._draw_minibatches(self.episodes.layout.response_lengths.tolist(), batch_size)
        else:
            minibatches = [list(range(self.episodes.n_episodes))]
        for rows in minibatches:
            yield self.samples(rows)

    def samples(self, episodes: Tensor | Sequence[int]) -> Minibatch:
        """Return the episodes of these rows `[k]` and their fields; all actions have weight 1."""
        assert self.episodes is not None
        flat = self._known_fields()
        tokens = self.episodes.token_index(episodes)  # positions in flat fields
        chosen = self.episodes.select(episodes)

        # log ref = log pi - (log pi - log ref): the buffer keeps the difference, which is what the KL is made of.
        log_prob = flat.log_probs[tokens]
        ref_log_prob = log_prob - (0.0 if flat.kl is None else flat.kl[tokens])
        returns = flat.returns[tokens]
        return Minibatch(
            observations=chosen,
            actions=chosen.actions,
            old_values=flat.values[tokens],
            old_log_prob=log_prob,
            advantages=flat.advantages[tokens],
            returns=returns,
            ref_log_prob=ref_log_prob,
            episode_rewards=flat.episode_rewards[tokens],
            weights=torch.ones_like(returns),
        )

    def _draw_minibatches(self, sizes: list[int], batch_size: int) -> list[list[int]]:
        """Return the rows of each minibatch, in random order.

        Episodes that share a prompt are shuffled and packed as one unit, so that a minibatch computes it only once.

        Args:
            sizes: of each episode: its number of tokens, or 1 if minibatches are counted in episodes.
            batch_size: of a minibatch, in the same unit.
        """
        assert self.episodes is not None
        layout = self.episodes.layout
        rows = layout.group_ids if self.keeps_groups else layout.prompt_rows
        units = self.episodes.together(rows)
        order = []
        for unit in self._rng.permutation(len(units)):
            order += units[unit]
        if not self.sort_by_length:
            return pack_episodes(sizes, order, batch_size, rows, keeps_groups=self.keeps_groups)

        # A unit is sorted by its longest episode: that is the width to which the others are padded.
        lengths = layout.response_lengths.tolist()
        longest = {}
        for episodes in units:
            for episode in episodes:
                longest[episode] = max(lengths[other] for other in episodes)

        # Sorting only within windows of a few minibatches keeps most of the random order, which the gradient needs.
        minibatches: list[list[int]] = []
        for window in pack_episodes(sizes, order, SORTING_WINDOW * batch_size, rows, keeps_groups=self.keeps_groups):
            by_length = sorted(window, key=longest.__getitem__)
            minibatches += pack_episodes(sizes, by_length, batch_size, rows, keeps_groups=self.keeps_groups)
        return [minibatches[i] for i in self._rng.permutation(len(minibatches))]

    # --- checkpoints ------------------------------------------------------------------------------------------------

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
        tensors = {name: getattr(self.episodes, name) for name in _EPISODE_FIELDS}
        tensors |= {name: getattr(self._known_fields(), name) for name in _TOKEN_FIELDS}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def load_rollout(self, rollout: Mapping[str, Tensor], prompt_side: Literal["left", "right"]) -> None:
        """Restore the tensors returned by `rollout`; prompts are padded on `prompt_side`."""
        self.reset()
        tensors = {name: to_device(tensor, self.device) for name, tensor in rollout.items()}
        episode_fields: dict[str, Any] = {name: tensors.get(name) for name in _EPISODE_FIELDS}
        # Without a reference there is no `kl`.
        token_fields: dict[str, Any] = {name: tensors.get(name) for name in _TOKEN_FIELDS}
        self.episodes = EpisodeBatch(**episode_fields, prompt_side=prompt_side)
        self._fields = TokenFields(**token_fields)
        self.n_tokens = self.episodes.n_tokens

    # --- numbers of all tokens --------------------------------------------------------------------------------------

    @property
    def full(self) -> bool:
        """True once advantages have been computed."""
        return self.episodes is not None

    def _known_fields(self) -> TokenFields:
        assert self._fields is not None, "call compute_returns_and_advantage first"
        return self._fields

    @property
    def rewards(self) -> np.ndarray:
        """Rewards `[n_tokens]`, including the KL penalty."""
        return np.asarray(self._known_fields().rewards.cpu().numpy())

    @property
    def values(self) -> np.ndarray:
        """Values `[n_tokens]`; NumPy, as Stable-Baselines3 expects."""
        return np.asarray(self._known_fields().values.cpu().numpy())

    @property
    def returns(self) -> np.ndarray:
        """Returns `[n_tokens]`; NumPy, as Stable-Baselines3 expects."""
        return np.asarray(self._known_fields().returns.cpu().numpy())

    @property
    def log_probs(self) -> Tensor:
        """Log-probs `[n_tokens]` under the policy that generated the episodes."""
        return self._known_fields().log_probs

    @property
    def kl(self) -> Tensor | None:
        """Log-prob under the policy minus that under the reference `[n_tokens]`; None without a reference."""
        return self._known_fields().kl

    @property
    def advantages(self) -> Tensor:
        """Advantages `[n_tokens]`."""
        return self._known_fields().advantages

    @advantages.setter
    def advantages(self, advantages: Tensor) -> None:
        self._known_fields().advantages = advantages


_EPISODE_FIELDS = tuple(field.name for field in fields(EpisodeBatch) if field.name != "prompt_side")
_TOKEN_FIELDS = tuple(field.name for field in fields(TokenFields))
