"""Rollout collection, from prompts to a full buffer.

prompts  = env.reset()                      `group_size` episodes in a row have the same prompt
episodes = policy.generate(prompts)         [n, response_len]
rewards  = env.play(episodes)               [n_tokens]; with dynamic sampling, groups with equal rewards are left out
scores   = policy.score(episodes)           [n_tokens] values, log_prob, entropy, ref_log_prob, raw_log_prob
buffer.add(shape(rewards, scores))          KL penalty and normalisation; advantages are computed at the end
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
from stable_baselines3.common.vec_env import VecEnv
from torch import Tensor

from rl4lms_like.core.advantages import rewards_differ
from rl4lms_like.core.episodes import EpisodeBatch, own_batches
from rl4lms_like.core.errors import (
    CheckpointError,
    ConfigError,
    ConfigIssue,
    EngineError,
    ModelError,
    RL4LMsLikeError,
)
from rl4lms_like.core.losses import effective_sample_size, kl_estimate
from rl4lms_like.core.out_of_memory import in_part
from rl4lms_like.core.ranks import Ranks
from rl4lms_like.core.seeding import SeedStream, derived_seed
from rl4lms_like.core.token_masks import n_allowed
from rl4lms_like.envs.stepping import play_by_stepping
from rl4lms_like.policies.base import LMActorCriticPolicy
from rl4lms_like.policies.teacher_forcing import EpisodeScores
from rl4lms_like.rewards.call import TokenRewards
from rl4lms_like.rollouts.ahead import AheadBatches, DrawnBatch, generate_in_background, restored_responses
from rl4lms_like.rollouts.buffer import EpisodeBuffer
from rl4lms_like.rollouts.kl import KLController

T = TypeVar("T")

_PROMPT = ("prompt_or_input_encoded_pt", "prompt_or_input_attention_mask_pt")

EQUAL = 1e-5
"""A standard deviation of episode totals below this fraction of the largest total is a rounding error."""


class PlayedEpisodes(NamedTuple):
    """One generation batch: episodes, task rewards `[n_tokens]`, and the components of the rewards."""

    episodes: EpisodeBatch
    rewards: Tensor
    reward_parts: Mapping[str, Tensor] = MappingProxyType({})
    sample_ids: Sequence[str] = ()

    def select(self, index: Tensor) -> PlayedEpisodes:
        """Return some of the episodes, in the order of the index `[k]`."""
        tokens = self.episodes.token_index(index)
        parts = {name: part[tokens] for name, part in self.reward_parts.items()}
        sample_ids = [self.sample_ids[i] for i in index.tolist()]
        return PlayedEpisodes(self.episodes.select(index), self.rewards[tokens], parts, sample_ids)

    @staticmethod
    def joined(batches: Sequence[PlayedEpisodes]) -> PlayedEpisodes:
        """Concatenate the batches of several processes."""
        if len(batches) == 1:
            return batches[0]
        return PlayedEpisodes(
            EpisodeBatch.concatenated([batch.episodes for batch in batches]),
            torch.cat([batch.rewards for batch in batches]),
            {name: torch.cat([batch.reward_parts[name] for batch in batches]) for name in batches[0].reward_parts},
            [sample_id for batch in batches for sample_id in batch.sample_ids],
        )

    def differing(self) -> Tensor:
        """Return whether the rewards of each episode's group differ `[n]`, bool."""
        assert self.episodes.group_ids is not None
        return rewards_differ(episode_sums(self.episodes, self.rewards), self.episodes.group_ids)


class ScoredEpisodes(NamedTuple):
    """Played episodes with the policy's scores."""

    episodes: EpisodeBatch
    rewards: Tensor
    scores: EpisodeScores
    reward_parts: Mapping[str, Tensor] = MappingProxyType({})
    sample_ids: Sequence[str] = ()

    @property
    def played(self) -> PlayedEpisodes:
        """The same episodes without the scores."""
        return PlayedEpisodes(self.episodes, self.rewards, self.reward_parts, self.sample_ids)

    def infos(self) -> list[dict[str, Any]]:
        """Return total task reward `r`, length `l` (as Stable-Baselines3's `Monitor`) and sample of each episode."""
        totals = episode_sums(self.episodes, self.rewards).tolist()
        rows = zip(totals, self.episodes.lengths.tolist(), self.sample_ids, strict=True)
        return [{"r": r, "l": n, "sample_id": sample_id} for r, n, sample_id in rows]


class RolloutCollector:
    """Collector that fills a buffer with whole episodes.

    Args:
        env: a `TextVecEnv`, or any vectorised environment of `TextGenEnv`s.
        policy: generates the episodes and scores them.
        kl: controller of the KL coefficient.
        norm_reward: divide the task rewards of a rollout by the standard deviation of its episodes' totals. They are
            not centred, because a constant per token would reward or penalise length.
        bootstrap_truncated: add the critic's value after episodes that hit the length limit.
        score_batch_size: tokens per scoring pass; None = a whole generation batch at once.
        group_size: number of responses to each prompt.
        dynamic_sampling: leave out groups whose rewards are all equal, and generate at most this many times the tokens
            of a rollout. If all groups are left out, the last generation batch is kept. None keeps all groups.
        first_token_temperature: see `TextGenerator.generate`.
        record_log_prob: store the log-probs of the sampled distribution even if it is the policy's own; otherwise they
            are only stored if it is another one.
        seed: seed of the sampling.
        ranks: the processes that generate the episodes of a rollout together; `env` has those of this process.

    Attributes:
        replay: returns the generation batches of a rollout, which is then not generated; its argument is True for a
            rollout of the critic's pretraining.
        on_rollout: called with the generation batches of each rollout, and the same flag.
        on_batch: called before each generation batch.
        ahead: the next rollout, if it is generated in the background.

    Raises:
        ConfigError: `group_size` does not divide the number of environments.
        RL4LMsLikeError: groups are requested of an environment that steps token by token.
    """

    def __init__(
        self,
        env: VecEnv,
        policy: LMActorCriticPolicy,
        *,
        kl: KLController,
        norm_reward: bool = False,
        bootstrap_truncated: bool = False,
        score_batch_size: int | None = None,
        group_size: int = 1,
        dynamic_sampling: int | None = None,
        first_token_temperature: float | None = None,
        record_log_prob: bool = False,
        seed: int = 0,
        ranks: Ranks | None = None,
    ) -> None:
        self.policy = policy
        self.ranks = ranks or Ranks()
        self.group_size = group_size
        self.dynamic_sampling = dynamic_sampling
        self.first_token_temperature = first_token_temperature
        self.record_log_prob = record_log_prob
        self.kl = kl
        self.norm_reward = norm_reward
        self.bootstrap_truncated = bootstrap_truncated
        self.score_batch_size = score_batch_size
        self.seeds = SeedStream(seed, "rollout")
        self.episode_infos: list[dict[str, Any]] = []
        self.replay: Callable[[bool], list[ScoredEpisodes]] | None = None
        self.on_rollout: Callable[[list[ScoredEpisodes], bool], None] | None = None
        self.on_batch: Callable[[], None] = _nothing
        self.ahead: AheadBatches | None
        self._waiting: list[DrawnBatch]
        self.use(env)

    def use(self, env: VecEnv) -> None:
        """Use this environment from now on."""
        self.env = env
        self.max_episode_length: int = env.get_attr("max_episode_length", [0])[0]
        ends = env.get_attr("terminate_on_eos", [0])[0]
        self.eos_token_ids: list[int] = sorted(env.get_attr("eos_token_ids", [0])[0]) if ends else []
        self.tokenizer: Any = None  # for stop strings
        if env.get_attr("stop_strings", [0])[0]:
            self.tokenizer = env.get_attr("layout", [0])[0].tokenizer
        # Check the class, not the object: a wrapper forwards attributes, but does its own work in `step`.
        self._plays = hasattr(type(env), "play")
        self.ahead, self._waiting = None, []
        if self._is_ahead and not self._plays:
            raise RL4LMsLikeError("an engine that generates ahead requires a TextVecEnv that is not wrapped")
        if self.group_size > 1 and not self._plays:
            raise RL4LMsLikeError("several responses per prompt (group_size) require a TextVecEnv that is not wrapped")
        if env.num_envs % self.group_size:
            message = f"{env.num_envs} responses cannot be divided into groups of {self.group_size} (group_size)"
            raise ConfigError([ConfigIssue("n_envs", message)], "the environment")

    def collect(self, buffer: EpisodeBuffer, n_tokens: int, *, adapt_kl: bool = True) -> dict[str, float]:
        """Fill an empty buffer with at least `n_tokens` tokens; `adapt_kl` then updates the KL coefficient.

        Returns:
            Logged statistics of the rollout, under RL4LMs' keys.
        """
        seconds = {"generate_s": 0.0, "play_s": 0.0, "score_s": 0.0}
        if self.replay is None:
            generated, kept = self._generated(n_tokens, seconds)
            parts = [self._scored(batch, seconds) for batch in kept]
        else:
            start = time.perf_counter()
            parts = self.replay(not adapt_kl)
            generated = [part.played for part in parts]
            seconds["score_s"] = time.perf_counter() - start
        if self.on_rollout is not None:
            self.on_rollout(parts, not adapt_kl)
        scale = self._reward_scale(parts) if self.norm_reward else 1.0
        kl_rewards = [self._kl_reward(part) for part in parts]
        for part, kl_reward in zip(parts, kl_rewards, strict=True):
            buffer.add(
                part.episodes,
                part.rewards * scale + kl_reward,
                part.scores.values,
                part.scores.log_prob,
                self._last_values(part.episodes),
                part.scores.raw_log_prob - part.scores.ref_log_prob if self.policy.has_reference else None,
                episode_sums(part.episodes, part.rewards),
            )
        buffer.compute_returns_and_advantage()
        self.episode_infos = [info for part in parts for info in part.infos()]
        info = rollout_info(generated, parts, kl_rewards if self.policy.has_reference else None)
        if not self.policy.has_critic:
            del info["rollout_info/values"], info["rollout_info/values_std"]
        if (engine := self.policy.external_engine) is not None and self.replay is None:
            assert buffer.episodes is not None
            episodes = buffer.episodes
            if self._is_ahead:  # generated with older weights; the engine scores some again
                self.policy.update_engine()
                episodes = replace(episodes, behavior_log_prob=None)
            gaps = self.ranks.from_main(lambda: engine.gaps(episodes, buffer.log_probs))
            info |= {f"rollout_info/engine/{name}": value for name, value in gaps.items()}
        coeff = self.kl.coeff
        if adapt_kl:
            kl = torch.cat([part.scores.raw_log_prob - part.scores.ref_log_prob for part in parts])
            self.kl.step(kl, torch.cat([part.episodes.lengths for part in parts]))
        # The rewards had the old coefficient; the loss of the following update has the new one.
        info["rollout_info/kl_coeff"] = coeff if self.kl.placement == "reward" else self.kl.coeff
        if (restarts := getattr(self.env, "reward_restarts", None)) is not None:
            info["time/reward_restarts"] = restarts
        if (update_sampler := getattr(self.env, "update_sampler", None)) is not None:
            ids = [id for batch in generated for id in batch.sample_ids]
            totals = torch.cat([episode_sums(batch.episodes, batch.rewards) for batch in generated])
            logged = update_sampler(ids, totals.tolist())  # also of prompts whose groups are left out
            info |= {f"rollout_info/sampler/{name}": float(value) for name, value in logged.items()}
        if self._is_ahead and adapt_kl:  # not for a rollout of the critic's pretraining
            self.ahead = self._generate_ahead(len(generated))
        return info | {f"time/{name}": value for name, value in seconds.items()}

    def _generated(self, n_tokens: int, seconds: dict[str, float]) -> tuple[list[PlayedEpisodes], list[PlayedEpisodes]]:
        """Return generation batches, and what is kept of them: at least `n_tokens` tokens if the limit allows it."""
        generated: list[PlayedEpisodes] = []
        kept: list[PlayedEpisodes] = []
        n_generated = n_kept = 0
        while n_kept < n_tokens:
            if self.dynamic_sampling is not None and n_generated >= self.dynamic_sampling * n_tokens:
                break
            batch = self._batch(seconds)
            generated.append(batch)
            n_generated += batch.episodes.n_tokens
            if self.dynamic_sampling is not None:
                index = batch.differing().nonzero().squeeze(1)
                if not len(index):
                    continue
                batch = batch.select(index)
            kept.append(batch)
            n_kept += batch.episodes.n_tokens
        self._waiting = []  # batches that turn out not to be needed
        return generated, kept or generated[-1:]

    @property
    def n_envs(self) -> int:
        """Number of environments of all processes."""
        return self.env.num_envs * self.ranks.size

    def _batch(self, seconds: dict[str, float]) -> PlayedEpisodes:
        self.on_batch()
        self.policy.prepare_engine(self.ranks)
        with self.policy.gathered(to_generate=True):
            return PlayedEpisodes.joined(self.ranks.gather_from(lambda: self._own_batch(seconds)))

    def _own_batch(self, seconds: dict[str, float]) -> PlayedEpisodes:
        """Generate and play the episodes of this process."""
        batch = self._next_ahead() if self._waiting else self._draw()
        start = time.perf_counter()
        with in_part("generation"):
            if batch.responses is None:
                episodes = self.policy.generate(batch.prompt_ids, batch.prompt_mask, **self._sampling(batch))
            else:
                episodes = batch.responses.result().to(self.policy.device)
                if episodes.behavior_log_prob is None:
                    raise EngineError("the engine returned no log-probs of its responses, which ahead: 1 needs")
        if self.group_size > 1:
            rows = torch.arange(episodes.n_episodes, device=episodes.response_ids.device) // self.group_size
            episodes = replace(episodes, group_ids=rows, prompt_rows=rows)
        generated = time.perf_counter()
        rewards, parts = self._play(episodes)
        seconds["generate_s"] += generated - start
        seconds["play_s"] += time.perf_counter() - generated
        device = episodes.response_ids.device
        on_device = {name: torch.as_tensor(part, dtype=torch.float32).to(device) for name, part in parts.items()}
        paid = torch.as_tensor(rewards, dtype=torch.float32).to(device)
        return PlayedEpisodes(episodes, paid, on_device, batch.sample_ids)

    def _draw(self) -> DrawnBatch:
        """Draw the prompts of a generation batch."""
        if self._plays:  # another algorithm with the same environment may have changed it
            self.env.group_size = self.group_size  # type: ignore[attr-defined]
        observation = self.env.reset()
        assert isinstance(observation, dict)
        ids, mask = (torch.as_tensor(observation[key]).clone() for key in _PROMPT)
        return DrawnBatch(self.env.get_attr("sample"), ids.long(), mask, self.seeds.next())

    @property
    def _is_ahead(self) -> bool:
        return self.policy.arguments.is_ahead and self.replay is None

    def _generate_ahead(self, n_batches: int) -> AheadBatches:
        """Start generating the next rollout's first generation batches in the background."""
        sampler = deepcopy(self.env.envs[0].sampler.state_dict())  # type: ignore[attr-defined]
        drawn = [self._draw() for _ in range(n_batches)]
        calls = [(batch.prompt_ids, batch.prompt_mask, self._sampling(batch)) for batch in drawn]
        responses = generate_in_background(self.policy, calls)
        self._waiting = [replace(batch, responses=each) for batch, each in zip(drawn, responses, strict=True)]
        return AheadBatches(sampler, tuple(self._waiting))

    def _next_ahead(self) -> DrawnBatch:
        """Return the next batch that was drawn ahead, and start its episodes in the environments."""
        batch = self._waiting.pop(0)
        self.env.start(batch.samples)  # type: ignore[attr-defined]
        return batch

    def load_ahead(self, numbers: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Restore the state returned by `AheadBatches.state`: draw the prompts again.

        Raises:
            CheckpointError: the sampler draws other prompts.
        """
        self.env.envs[0].sampler.load_state_dict(deepcopy(numbers["sampler"]))  # type: ignore[attr-defined]
        seeds = self.seeds.state_dict()
        self._waiting = []
        for index, saved in enumerate(numbers["batches"]):
            batch = replace(self._draw(), seed=saved["seed"], responses=restored_responses(index, tensors))
            if batch.sample_ids != saved["sample_ids"]:
                raise CheckpointError("the sampler does not draw the prompts of the saved responses again")
            self._waiting.append(batch)
        self.seeds.load_state_dict(seeds)
        self.ahead = AheadBatches(numbers["sampler"], tuple(self._waiting))

    def _sampling(self, batch: DrawnBatch) -> dict[str, Any]:
        """Return keyword arguments of `generate`; few if the policy's own distribution is sampled to its end."""
        arguments = {
            "eos_token_ids": self.eos_token_ids,
            "max_new_tokens": self.max_episode_length,
            "seed": derived_seed(batch.seed, "rank", self.ranks.rank) if self.ranks.rank else batch.seed,
            **({} if self.tokenizer is None else {"tokenizer": self.tokenizer}),
        }
        first = self.first_token_temperature
        is_own = self.policy.external_engine is None and not self.policy.samples_other_distribution
        if first is None and not self.record_log_prob and is_own:
            return arguments
        return {**arguments, "record_log_prob": True, "first_token_temperature": first}

    def _scored(self, played: PlayedEpisodes, seconds: dict[str, float]) -> ScoredEpisodes:
        start = time.perf_counter()
        scores = self.score(played.episodes)
        seconds["score_s"] += time.perf_counter() - start
        return ScoredEpisodes(played.episodes, played.rewards, scores, played.reward_parts, played.sample_ids)

    def _play(self, episodes: EpisodeBatch) -> TokenRewards:
        if not self._plays:
            return play_by_stepping(self.env, episodes)
        rewards = self.env.play(episodes)  # type: ignore[attr-defined]
        return TokenRewards(rewards, getattr(self.env, "reward_parts", {}))

    def score(self, episodes: EpisodeBatch) -> EpisodeScores:
        """Score episodes with the current policy.

        Raises:
            ModelError: a score is not finite.
        """
        with in_part("scoring"):
            parts = self._of_all(episodes, self.policy.score)
        scores = EpisodeScores(*(torch.cat(fields) for fields in zip(*parts, strict=True)))
        for name, field in scores._asdict().items():
            if not bool(torch.isfinite(field).all()):
                raise ModelError(
                    f"{int((~torch.isfinite(field)).sum())} of {len(field)} tokens of a rollout have a {name} that is "
                    f"not finite: the policy has diverged (lower alg.args.learning_rate or raise kl_div.coeff)"
                )
        return scores

    def _of_all(self, episodes: EpisodeBatch, compute: Callable[[EpisodeBatch], T]) -> list[T]:
        """Return the results for all parts of some episodes; each process computes its own ones.

        If weights are split over the processes, all make the same number of passes; those for no part do not count.
        """

        def of_this_process() -> list[T]:
            own, further = self._parts(episodes)
            results = [compute(part) for part in [*own, *further]]
            return results[: len(own)]

        if self.policy.is_sharded:  # the others wait in a pass, where they learn of an error when this process ends
            own = self.ranks.gather(of_this_process())
        else:
            own = self.ranks.gather_from(of_this_process)
        return [result for results in own for result in results]

    def _parts(self, episodes: EpisodeBatch) -> tuple[list[EpisodeBatch], list[EpisodeBatch]]:
        """Return the episodes of this process, in batches of at most `score_batch_size` tokens; and further batches."""
        device, in_step = episodes.response_ids.device, self.policy.is_sharded
        groups = own_batches(episodes, self.score_batch_size, self.ranks, in_step=in_step)
        if groups and len(groups[0]) == episodes.n_episodes:
            return [episodes], []
        own = [episodes.select(torch.tensor(group, device=device)) for group in groups if group]
        return own, [episodes.select(torch.tensor([0], device=device))] * (len(groups) - len(own))

    def _kl_reward(self, part: ScoredEpisodes) -> Tensor:
        if self.kl.placement != "reward":
            return torch.zeros_like(part.rewards)
        estimator: Any = self.kl.estimator
        return -self.kl.coeff * kl_estimate(part.scores.raw_log_prob, part.scores.ref_log_prob, estimator)

    def _last_values(self, episodes: EpisodeBatch) -> Tensor | None:
        if not self.bootstrap_truncated:
            return None
        with in_part("scoring"):
            values = torch.cat(self._of_all(episodes, self.policy.final_values))
        return values.masked_fill(episodes.terminated, 0.0)

    def _reward_scale(self, parts: list[ScoredEpisodes]) -> float:
        totals = torch.cat([episode_sums(part.episodes, part.rewards) for part in parts])
        spread = float(totals.double().std()) if len(totals) > 1 else 0.0
        return 1.0 / spread if spread > EQUAL * float(totals.abs().max()) else 1.0

    def state_dict(self) -> dict[str, Any]:
        """Return the state that changes during a run."""
        return {
            "seeds": self.seeds.state_dict(),
            "kl": self.kl.state_dict(),
            "episode_infos": [dict(info) for info in self.episode_infos],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state returned by `state_dict`."""
        self.seeds.load_state_dict(state["seeds"])
        self.kl.load_state_dict(state["kl"])
        self.episode_infos = [dict(info) for info in state["episode_infos"]]


def _nothing() -> None:
    """Do nothing; the default of `on_batch`."""


def episode_sums(episodes: EpisodeBatch, field: Tensor) -> Tensor:
    """Return the sum of a flat field over each episode `[n]`."""
    return episodes.pad(field).sum(dim=1)


def rollout_info(
    generated: Sequence[PlayedEpisodes], parts: Sequence[ScoredEpisodes], kl_rewards: Sequence[Tensor] | None
) -> dict[str, float]:
    """Compute means (and, under `<name>_std`, standard deviations) of a rollout, under RL4LMs' keys.

    Rewards are those of all generated episodes, all other numbers those of the episodes that are kept.

    Args:
        generated: the generation batches.
        parts: what is kept of them.
        kl_rewards: KL penalties of their rewards; None without a reference. Then the KL is not logged.
    """
    scores = EpisodeScores(*(torch.cat(fields) for fields in zip(*(part.scores for part in parts), strict=True)))
    series = {
        "ep_rew": torch.cat([episode_sums(batch.episodes, batch.rewards) for batch in generated]),
        "ep_lens": torch.cat([part.episodes.lengths for part in parts]),
        "log_prob": scores.log_prob,
        "values": scores.values,
        "entropy": scores.entropy,
    }
    for name in generated[0].reward_parts:
        shares = [episode_sums(batch.episodes, batch.reward_parts[name]) for batch in generated]
        series[f"reward/{name}"] = torch.cat(shares)
    if kl_rewards is not None:
        series["kl_div_mean"] = scores.raw_log_prob - scores.ref_log_prob
        series["ref_log_prob"] = scores.ref_log_prob
        series["ep_kl_rew"] = torch.cat(
            [episode_sums(part.episodes, kl) for part, kl in zip(parts, kl_rewards, strict=True)]
        )
    masks = [part.episodes.allowed for part in parts if part.episodes.allowed is not None]
    if masks:
        series["raw_log_prob"] = scores.raw_log_prob
        series["n_allowed"] = torch.cat([n_allowed(mask) for mask in masks])
    info = {}
    for name, values in series.items():
        info[f"rollout_info/{name}"] = float(values.double().mean())
        info[f"rollout_info/{name}_std"] = float(values.double().std(unbiased=False))
    terminated = torch.cat([part.episodes.terminated for part in parts])
    info["rollout_info/n_episodes"] = len(terminated)
    info["rollout_info/n_tokens"] = len(scores.values)
    info["rollout_info/truncated_share"] = float((~terminated).double().mean())
    if generated[0].episodes.group_ids is not None:
        # Groups have the same size, so fractions of episodes are those of groups.
        differing = torch.cat([batch.differing() for batch in generated])
        info["rollout_info/groups_differing_share"] = float(differing.double().mean())
        n_kept = len(terminated) if len(terminated) == len(differing) or bool(differing.any()) else 0
        info["rollout_info/groups_kept_share"] = n_kept / len(differing)
    behavior = [part.episodes.behavior_log_prob for part in parts if part.episodes.behavior_log_prob is not None]
    if behavior:
        weights = (scores.log_prob - torch.cat(behavior)).exp()
        info["rollout_info/importance_weight"] = float(weights.double().mean())
        info["rollout_info/effective_sample_size"] = effective_sample_size(weights)
    return info
