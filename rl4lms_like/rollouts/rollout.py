"""A rollout: whole episodes with the task reward and the policy's scores of every token.

    EpisodeBatch ─ played ─ scored ─> RolloutBatch ─┐
    EpisodeBatch ─ played ─ scored ─> RolloutBatch ─┴─> Rollout ─ EpisodeBuffer ─> Minibatch ─ loss ─> Objective

The generation batches of a rollout stay apart until they are in the buffer. Each is padded to the width of its own
longest response, and a sum over a wider row may differ in its last bit. So a rollout that is read from disk, or scored
again, gives the same numbers as the one that was generated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from rl4lms_like.core.advantages import rewards_differ
from rl4lms_like.core.episodes import EpisodeBatch
from rl4lms_like.core.losses import effective_sample_size, kl_estimate
from rl4lms_like.core.token_masks import n_allowed
from rl4lms_like.policies.teacher_forcing import EpisodeScores
from rl4lms_like.rollouts.kl import KLController

EQUAL = 1e-5
"""A standard deviation of episode totals below this fraction of the largest total is a rounding error."""


@dataclass(frozen=True)
class RolloutOptions:
    """Options of rollouts. They do not change during a run.

    Args:
        norm_reward: divide the task rewards of a rollout by the standard deviation of its episodes' totals. They are
            not centred, because a constant per token would reward or penalise length.
        bootstrap_truncated: let returns and advantages of episodes that hit the length limit continue with the critic's
            value after their last token.
        score_batch_size: tokens of prompts and responses per scoring pass; None = a whole generation batch at once.
        n_episodes: number of episodes of a rollout, a multiple of the number of environments of all processes; None =
            the size of a rollout is a number of tokens.
        group_size: number of responses to each prompt.
        dynamic_sampling: None keeps all groups. A number leaves out groups whose rewards are all equal, and generates
            at most this many times the tokens of a rollout, or its episodes if it has `n_episodes`. If all groups are
            left out, the last generation batch is kept.
        first_token_temperature: see `TextGenerator.generate`.
        record_log_prob: store the log-probs of the sampled distribution even if it is the policy's own; otherwise they
            are only stored if it is another one.
        corrects_by_ratios: if responses are generated in another precision, the log-probs of their sampling are those
            that ratios of the loss are to.
        sort_by_length: see `EpisodeBuffer`.
        value_gae_lambda: see `EpisodeBuffer`.
        gae_length_alpha: see `EpisodeBuffer`.
    """

    norm_reward: bool = False
    bootstrap_truncated: bool = False
    score_batch_size: int | None = None
    n_episodes: int | None = None
    group_size: int = 1
    dynamic_sampling: int | None = None
    first_token_temperature: float | None = None
    record_log_prob: bool = False
    corrects_by_ratios: bool = False
    sort_by_length: bool = False
    value_gae_lambda: float | None = None
    gae_length_alpha: float | None = None


@dataclass(frozen=True, eq=False)
class RolloutBatch:
    """One generation batch of a rollout.

    Args:
        episodes: `n` whole episodes.
        rewards: task rewards `[n_tokens]`, without the KL penalty.
        reward_parts: name -> contribution of that part of a combined reward `[n_tokens]`, NaN where it returned None.
        sample_ids: ids of the samples that the prompts are from, `n`.
        episode_numbers: name -> number of each episode that its environment reported `[n]`, NaN where it did not; empty
            without `env.dialogue`, and in a replay.
        scores: of the policy, its critic and its reference; None = not scored yet.
    """

    episodes: EpisodeBatch
    rewards: Tensor
    reward_parts: Mapping[str, Tensor]
    sample_ids: Sequence[str]
    episode_numbers: Mapping[str, Tensor] = field(default_factory=dict)
    scores: EpisodeScores | None = None

    def known_scores(self) -> EpisodeScores:
        """Return the scores of a batch that has them."""
        assert self.scores is not None
        return self.scores

    @property
    def ref_log_ratio(self) -> Tensor:
        """Log-prob of each sampled token under the policy minus that under the reference, k1 `[n_tokens]`.

        Both are over the whole vocabulary, also if a mask restricted the sampling.
        """
        scores = self.known_scores()
        return scores.raw_log_prob - scores.ref_log_prob

    def episode_sums(self, field: Tensor) -> Tensor:
        """Return the sum of a flat field `[n_tokens]` over each episode `[n]`."""
        return self.episodes.pad(field).sum(dim=1)

    def groups_differ(self) -> Tensor:
        """Return whether the rewards of each episode's group differ `[n]`, bool."""
        assert self.episodes.group_ids is not None
        return rewards_differ(self.episode_sums(self.rewards), self.episodes.group_ids)

    def select(self, index: Tensor | Sequence[int]) -> RolloutBatch:
        """Return some of the episodes, in the order of the index `[k]`, before they are scored."""
        tokens = self.episodes.token_index(index)  # positions in flat fields
        return RolloutBatch(
            self.episodes.select(index),
            self.rewards[tokens],
            {name: part[tokens] for name, part in self.reward_parts.items()},
            [self.sample_ids[int(row)] for row in index],
            {name: numbers[index] for name, numbers in self.episode_numbers.items()},
        )

    @staticmethod
    def joined(batches: Sequence[RolloutBatch]) -> RolloutBatch:
        """Concatenate the batches that several processes generated together, before they are scored."""
        if len(batches) == 1:
            return batches[0]

        reward_parts: dict[str, Tensor] = {}
        for name in batches[0].reward_parts:
            reward_parts[name] = torch.cat([batch.reward_parts[name] for batch in batches])
        sample_ids: list[str] = []
        for batch in batches:
            sample_ids += batch.sample_ids
        episodes = EpisodeBatch.concatenated([batch.episodes for batch in batches])
        rewards = torch.cat([batch.rewards for batch in batches])
        return RolloutBatch(episodes, rewards, reward_parts, sample_ids, joined_numbers(batches))


def joined_numbers(batches: Sequence[RolloutBatch]) -> dict[str, Tensor]:
    """Return the numbers of the episodes of all batches by name, each `[n]`; NaN where a batch has no such number."""
    joined: dict[str, Tensor] = {}
    for name in dict.fromkeys(name for batch in batches for name in batch.episode_numbers):
        numbers = []
        for batch in batches:
            missing = torch.full((batch.episodes.n_episodes,), torch.nan, device=batch.rewards.device)
            numbers.append(batch.episode_numbers.get(name, missing))
        joined[name] = torch.cat(numbers)
    return joined


@dataclass(frozen=True, eq=False)
class Rollout:
    """The episodes of one update.

    Args:
        batches: generation batches, scored, without the groups that dynamic sampling left out. Only these are trained
            on and, if rollouts are kept on disk, recorded.
        generated: every generation batch with all of its groups, not scored; in a replay the same as `batches`. The
            logged `ep_rew`, `reward/<part>` and shares of groups, and the prompt sampler, are of these.
        updates_policy: False if no update of the policy follows, as in the critic's pretraining.
        is_replayed: True if it comes from disk, where an earlier run kept it.
    """

    batches: Sequence[RolloutBatch]
    generated: Sequence[RolloutBatch]
    updates_policy: bool = True
    is_replayed: bool = False

    @property
    def scores(self) -> EpisodeScores:
        """Scores of all batches, each field `[n_tokens]`."""
        fields = zip(*(batch.known_scores() for batch in self.batches), strict=True)
        return EpisodeScores(*(torch.cat(field) for field in fields))

    @property
    def ref_log_ratio(self) -> Tensor:
        """Log-prob of each sampled token under the policy minus that under the reference, k1 `[n_tokens]`.

        Both are over the whole vocabulary, also if a mask restricted the sampling.
        """
        return torch.cat([batch.ref_log_ratio for batch in self.batches])

    @property
    def lengths(self) -> Tensor:
        """Number of actions of each episode `[n]`."""
        return torch.cat([batch.episodes.lengths for batch in self.batches])

    @property
    def episode_rewards(self) -> Tensor:
        """Total task reward of each episode `[n]`."""
        return torch.cat([batch.episode_sums(batch.rewards) for batch in self.batches])

    def episode_infos(self) -> list[dict[str, Any]]:
        """Return total task reward `r`, length `l` (as Stable-Baselines3's `Monitor`) and sample of each episode."""
        infos: list[dict[str, Any]] = []
        for batch in self.batches:
            totals = batch.episode_sums(batch.rewards).tolist()
            lengths = batch.episodes.lengths.tolist()
            for reward, length, sample_id in zip(totals, lengths, batch.sample_ids, strict=True):
                infos.append({"r": reward, "l": length, "sample_id": sample_id})
        return infos


class RolloutSource(Protocol):
    """Source of rollouts that are not generated, such as those that an earlier run kept on disk."""

    @property
    def is_off_policy(self) -> bool:
        """True if the episodes are of another policy, whose log-probs are their `behavior_log_prob`."""

    def next_rollout(self, *, updates_policy: bool) -> Rollout:
        """Return the next rollout of the iterations, or the next one of the critic's pretraining."""


class RolloutRecorder(Protocol):
    """Recorder of rollouts, such as the one that keeps them on disk."""

    def record(self, rollout: Rollout) -> None:
        """Called once the rewards of a rollout are in the buffer."""


def token_rewards(
    rollout: Rollout, kl: KLController, *, norm_reward: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    """Compute the reward of each token.

        r_t = task_t / std(episode totals) - coeff * KL_t        KL_t: an estimate of log pi(a_t) - log ref(a_t)

    The division needs `norm_reward`. The task's reward is at the token that the reward function gives it to: at the
    last one for a reward of the whole text. The estimators of the KL are in `core.kl_estimators`. The penalty has one
    of three placements (`alg.kl_div.placement`; with a critic only the first):

        reward       in r_t, here
        advantage    subtracted from the advantage of the token alone: `algorithms.policy_gradient`, `prepare_rollout`
        loss         a term of the loss: `algorithms.policy_gradient`, `loss`

    Two things come later: algorithms without a critic add the penalty for overlong responses, 0 to -1, to the reward of
    the last action (`algorithms.policy_gradient`, `_padded_rewards`), and with `bootstrap_truncated` the critic's value
    continues the returns of episodes that hit the length limit (`RolloutCollector.collect`).

    Args:
        rollout: played and scored.
        kl: coefficient, estimator and placement of the penalty.
        norm_reward: divide by the standard deviation; otherwise by 1.

    Returns:
        By batch: the rewards `[n_tokens]`, and the KL's part of them.
    """
    # Only the task's part is scaled: the penalty is in nats, and its coefficient is what the controller adapts.
    # Totals that differ by rounding errors only have no scale.
    scale = 1.0
    if norm_reward and len(rollout.lengths) > 1:
        totals = rollout.episode_rewards  # [n_episodes]
        deviation = float(totals.double().std())
        if deviation > EQUAL * float(totals.abs().max()):
            scale = 1.0 / deviation

    rewards = []
    kl_rewards = []
    for batch in rollout.batches:
        # Both log-probs are over the whole vocabulary, also where a mask restricts the sampling.
        kl_reward = torch.zeros_like(batch.rewards)
        if kl.placement == "reward":
            scores = batch.known_scores()
            kl_reward = -kl.coeff * kl_estimate(scores.raw_log_prob, scores.ref_log_prob, kl.estimator)
        rewards.append(batch.rewards * scale + kl_reward)
        kl_rewards.append(kl_reward)
    return rewards, kl_rewards


def rollout_statistics(
    rollout: Rollout, kl_rewards: Sequence[Tensor] | None, *, has_critic: bool = True
) -> dict[str, float]:
    """Compute means (and, under `<name>_std`, standard deviations) of a rollout, under RL4LMs' keys.

    `ep_rew`, `reward/<part>`, `environment/<name>` and the shares of groups are of all generated episodes, all other
    numbers of those that dynamic sampling did not leave out.

    Args:
        rollout: played and scored.
        kl_rewards: the KL's part of each batch's rewards; None without a reference, whose KL is then not logged.
        has_critic: False leaves out the values, which are then zeros.
    """
    means: dict[str, Tensor] = {}
    for name, values in _series(rollout, kl_rewards, has_critic).items():
        # A part of the reward, or an environment, may have left out some episodes; they do not count in the mean.
        if name.startswith(("reward/", "environment/")):
            values = values[~values.isnan()]
            if not len(values):
                continue
        means[f"rollout_info/{name}"] = values.double().mean()
        means[f"rollout_info/{name}_std"] = values.double().std(unbiased=False)

    # All are read from the device at once.
    info: dict[str, float] = dict(zip(means, torch.stack(list(means.values())).tolist(), strict=True))
    terminated = torch.cat([batch.episodes.terminated for batch in rollout.batches])
    info["rollout_info/n_episodes"] = len(terminated)
    info["rollout_info/n_tokens"] = sum(len(batch.rewards) for batch in rollout.batches)
    info["rollout_info/truncated_share"] = float((~terminated).double().mean())
    return info | _statistics_of_groups(rollout) | _statistics_of_sampling(rollout)


def _series(rollout: Rollout, kl_rewards: Sequence[Tensor] | None, has_critic: bool) -> dict[str, Tensor]:
    """Return the numbers whose mean is logged, by name: rewards and lengths of episodes, all others of tokens."""
    batches = rollout.batches
    scores = rollout.scores
    # The task's rewards as the reward function returned them, neither scaled nor with the KL penalty.
    series = {
        "ep_rew": torch.cat([batch.episode_sums(batch.rewards) for batch in rollout.generated]),
        "ep_lens": rollout.lengths,
        "log_prob": scores.log_prob,
    }
    if has_critic:
        series["values"] = scores.values
    series["entropy"] = scores.entropy
    for name in rollout.generated[0].reward_parts:
        sums = [batch.episode_sums(batch.reward_parts[name]) for batch in rollout.generated]
        series[f"reward/{name}"] = torch.cat(sums)
    for name, numbers in joined_numbers(rollout.generated).items():
        series[f"environment/{name}"] = numbers

    # The KL's own estimate k1, whatever the estimator of the penalty, so that runs can be compared.
    if kl_rewards is not None:
        series["kl_div_mean"] = rollout.ref_log_ratio
        series["ref_log_prob"] = scores.ref_log_prob
        sums = [batch.episode_sums(kl_reward) for batch, kl_reward in zip(batches, kl_rewards, strict=True)]
        series["ep_kl_rew"] = torch.cat(sums)

    # With masks, `log_prob` is over the allowed tokens only, and `raw_log_prob` over the whole vocabulary.
    masks = [batch.episodes.allowed for batch in batches if batch.episodes.allowed is not None]
    if masks:
        series["raw_log_prob"] = scores.raw_log_prob
        series["n_allowed"] = torch.cat([n_allowed(mask) for mask in masks])
    return series


def _statistics_of_groups(rollout: Rollout) -> dict[str, float]:
    """Return the fractions of groups whose rewards differ, and that are kept; nothing without groups."""
    if rollout.generated[0].episodes.group_ids is None:
        return {}

    # Counted in episodes: groups have the same size, so these are the fractions of groups.
    differing = torch.cat([batch.groups_differ() for batch in rollout.generated])
    n_kept = len(rollout.lengths)
    if n_kept < len(differing) and not bool(differing.any()):
        n_kept = 0  # the last batch is in the rollout although all of its groups should be left out
    return {
        "rollout_info/groups_differing_share": float(differing.double().mean()),
        "rollout_info/groups_kept_share": n_kept / len(differing),
    }


def _statistics_of_sampling(rollout: Rollout) -> dict[str, float]:
    """Return how far the distribution of the sampling was from the policy; nothing if that was not recorded."""
    behavior = []
    for batch in rollout.batches:
        if batch.episodes.behavior_log_prob is not None:
            behavior.append(batch.episodes.behavior_log_prob)
    if not behavior:
        return {}

    weights = (rollout.scores.log_prob - torch.cat(behavior)).exp()  # pi / mu, [n_tokens]
    return {
        "rollout_info/importance_weight": float(weights.double().mean()),
        "rollout_info/effective_sample_size": effective_sample_size(weights),
    }
