"""Rollout collection, from prompts to a full buffer.

prompts   = env.reset()                  `group_size` episodes in a row have the same prompt
episodes  = policy.generate(prompts)     [n, response_len]
rewards   = env.play(episodes)           [n_tokens] task rewards; a reward of the whole text is at its last token
                                         with dynamic sampling, groups with equal rewards are left out
          until there are n_episodes episodes or at least n_tokens tokens
scores    = policy.score(episodes)       [n_tokens] values, log_prob, entropy, ref_log_prob, raw_log_prob
buffer.add(rewards)                      minus the KL penalty if `placement` is `reward`; then advantages and returns
kl.step, recorder, prompt sampler        from log-ratios and rewards; then the next rollout may be generated ahead

`n_tokens` counts the response tokens that the policy chose, its actions. `log_prob` is over the tokens that a mask
allowed, `raw_log_prob` and `ref_log_prob` are over the whole vocabulary; without masks `log_prob` equals
`raw_log_prob`. Algorithms without a critic replace the advantages (`GroupPolicyGradient.prepare_rollout`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypeVar

import torch
from stable_baselines3.common.vec_env import VecEnv
from torch import Tensor

from rl4lms_like.core.devices import to_device
from rl4lms_like.core.episodes import EpisodeBatch, PassLimits, own_batches
from rl4lms_like.core.observation import TextLayout
from rl4lms_like.core.seeding import SeedStream, derived_seed
from rl4lms_like.envs.dialogue_vec_env import DialogueVecEnv
from rl4lms_like.envs.stepping import play_by_stepping
from rl4lms_like.policies.base import LMActorCriticPolicy
from rl4lms_like.policies.teacher_forcing import EpisodeScores
from rl4lms_like.rewards.call import TokenRewards
from rl4lms_like.rollouts.after_rollout import engine_gaps, update_sampler
from rl4lms_like.rollouts.ahead import DrawnBatch, NextRollouts
from rl4lms_like.rollouts.buffer import EpisodeBuffer
from rl4lms_like.rollouts.kl import KLController
from rl4lms_like.rollouts.play_dialogues import play_dialogues, prompt_rows_within
from rl4lms_like.rollouts.rollout import (
    Rollout,
    RolloutBatch,
    RolloutOptions,
    RolloutRecorder,
    RolloutSource,
    rollout_statistics,
    token_rewards,
)
from rl4lms_like.system.errors import ConfigError, ConfigIssue, EngineError, ModelError, RL4LMsLikeError
from rl4lms_like.system.out_of_memory import blame_memory_errors_on
from rl4lms_like.system.ranks import Ranks

T = TypeVar("T")


@dataclass(frozen=True)
class EnvTraits:
    """Attributes of environments that a collector reads once; they are equal in all of them.

    Args:
        max_episode_length: tokens; longer episodes are truncated.
        eos_token_ids: tokens that end an episode; none if the environment does not end episodes by them.
        tokenizer: finds stop strings in the responses; None without stop strings.
        layout: encodes prompts, and knows their pictures.
        plays_episodes: whether it plays whole episodes (`TextVecEnv.play`) instead of single tokens.
    """

    max_episode_length: int
    eos_token_ids: list[int]
    tokenizer: Any
    layout: TextLayout
    plays_episodes: bool

    @classmethod
    def of(cls, env: VecEnv) -> EnvTraits:
        """Read the traits of a vectorised environment of `TextGenEnv`s."""

        def attribute(name: str) -> Any:
            return env.get_attr(name, [0])[0]

        return cls(
            max_episode_length=attribute("max_episode_length"),
            eos_token_ids=sorted(attribute("eos_token_ids")) if attribute("terminate_on_eos") else [],
            tokenizer=attribute("layout").tokenizer if attribute("stop_strings") else None,
            layout=attribute("layout"),
            # The class, not the object: a wrapper forwards attributes, but does its own work in `step`.
            plays_episodes=hasattr(type(env), "play"),
        )


class RolloutCollector:
    """Collector that fills a buffer with whole episodes.

    Args:
        env: a `TextVecEnv`, or any vectorised environment of `TextGenEnv`s.
        policy: generates the episodes and scores them.
        kl: controller of the KL coefficient.
        options: see `RolloutOptions`.
        seed: seed of the sampling.
        checks_ratio: whether the update compares the log-probs of its first minibatch with those of the rollout, which
            allows using those of the sampling.
        ranks: the processes that generate the episodes of a rollout together; `env` has those of this process.

    Attributes:
        next_rollouts: generation batches of the next rollouts that an engine generates during updates.
        episode_infos: total reward, length and sample of each episode of the last rollout.

    Raises:
        ConfigError: `group_size` does not divide the number of environments, or that does not divide `n_episodes`.
        RL4LMsLikeError: groups are requested of an environment that steps token by token.
    """

    def __init__(
        self,
        env: VecEnv,
        policy: LMActorCriticPolicy,
        *,
        kl: KLController,
        options: RolloutOptions | None = None,
        seed: int = 0,
        checks_ratio: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        self.policy = policy
        self.checks_ratio = checks_ratio
        self.kl = kl
        self.options = options or RolloutOptions()
        self.ranks = ranks or Ranks()
        self.seeds = SeedStream(seed, "rollout")
        self.episode_infos: list[dict[str, Any]] = []
        self._seconds: dict[str, float] = {}

        self._replay: RolloutSource | None = None
        self._recorder: RolloutRecorder | None = None
        self.next_rollouts = NextRollouts(self)
        self.use(env)

    def use(self, env: VecEnv) -> None:
        """Use this environment from now on."""
        self.next_rollouts.forget()  # its prompts are those of the environment before
        self.env = env
        self.traits = EnvTraits.of(env)
        (layout,) = env.get_attr("layout", [0])
        if layout.continuations.follows_prompt and self.policy.reader.is_encoder_decoder:
            message = "missing: the first decoder token of the policy, whose responses do not continue their prompts"
            raise ConfigError([ConfigIssue("context_start_token", message)], "the environment")

        # A config's rules have checked its settings, but not how a user's policy computes its scores.
        needs_log_probs = self.options.corrects_by_ratios and self.policy.arguments.generates_in_other_dtype
        if needs_log_probs and self._replay is None and not self.uses_sampler_log_probs:
            message = "samples from another distribution, whose log-probs this policy cannot use; remove it"
            raise ConfigError([ConfigIssue("policy_kwargs.generation_dtype", message)], "the arguments")

        if self.generates_ahead and not self.traits.plays_episodes:
            raise RL4LMsLikeError("an engine that generates ahead requires a TextVecEnv that is not wrapped")
        group_size = self.options.group_size
        if group_size > 1 and not self.traits.plays_episodes:
            raise RL4LMsLikeError("several responses per prompt (group_size) require a TextVecEnv that is not wrapped")
        if env.num_envs % group_size:
            message = f"{env.num_envs} responses cannot be divided into groups of {group_size} (group_size)"
            raise ConfigError([ConfigIssue("n_envs", message)], "the environment")
        n_episodes = self.options.n_episodes
        if n_episodes is not None and n_episodes % self.n_envs:
            message = f"must be a multiple of n_envs, {self.n_envs} episodes that are generated together"
            raise ConfigError([ConfigIssue("n_episodes", f"{message}; got {n_episodes}")], "the arguments")

    def attach(self, *, replay: RolloutSource | None = None, recorder: RolloutRecorder | None = None) -> None:
        """Replay or record the rollouts from now on.

        Args:
            replay: source of rollouts that are then not generated; None = all are generated.
            recorder: keeps each rollout on disk; None = they are not kept.
        """
        self._replay = replay
        self._recorder = recorder

    @property
    def n_envs(self) -> int:
        """Number of environments of all processes."""
        return self.env.num_envs * self.ranks.size

    @property
    def generates_ahead(self) -> bool:
        """True if an engine generates the next rollout during the update on this one."""
        return self.policy.arguments.is_ahead and self._replay is None

    @property
    def uses_sampler_log_probs(self) -> bool:
        """True if log-probs and entropies that are recorded while sampling replace the policy's pass."""
        is_sampled = self._replay is None and self.options.first_token_temperature is None
        # In another precision, importance weights would compare them with those of that pass.
        is_right_dtype = self.options.corrects_by_ratios or not self.policy.arguments.generates_in_other_dtype
        return self.checks_ratio and is_sampled and is_right_dtype and self.policy.uses_sampler_log_probs

    @property
    def is_off_policy(self) -> bool:
        """True if another policy generated the episodes; its log-probs are their `behavior_log_prob`."""
        if self._replay is not None:
            return self._replay.is_off_policy
        return self.policy.arguments.is_ahead

    @property
    def max_episode_length(self) -> int:
        """Length in tokens at which episodes are truncated."""
        return self.traits.max_episode_length

    @property
    def eos_token_ids(self) -> list[int]:
        """Tokens that end an episode."""
        return self.traits.eos_token_ids

    # --- a rollout --------------------------------------------------------------------------------------------------

    def collect(
        self,
        buffer: EpisodeBuffer,
        n_tokens: int,
        *,
        updates_policy: bool = True,
        on_batch: Callable[[], None] | None = None,
    ) -> dict[str, float]:
        """Fill an empty buffer with a rollout, or with as much of it as the limit of dynamic sampling allows.

        Args:
            buffer: afterwards it has advantages and returns, too.
            n_tokens: minimum number of tokens of all processes; without effect if the options have `n_episodes`.
            updates_policy: False if no update of the policy follows, as in the critic's pretraining. Then the KL
                coefficient stays, and the next rollout is not generated ahead.
            on_batch: called before each generation batch.

        Returns:
            Logged statistics of the rollout, under RL4LMs' keys.
        """
        self._seconds = {"generate_s": 0.0, "play_s": 0.0, "score_s": 0.0}

        # Episodes with the task's reward and the policy's scores of each token: generated now, or read from the
        # rollouts that an earlier run kept.
        if self._replay is None:
            rollout = self._generate_rollout(n_tokens, updates_policy=updates_policy, on_batch=on_batch)
        else:
            with self._timed("score_s"):
                rollout = self._replay.next_rollout(updates_policy=updates_policy)
        self.episode_infos = rollout.episode_infos()

        # The reward of each token, with the KL penalty if `placement` is `reward`; then advantages and returns.
        rewards, kl_rewards = token_rewards(rollout, self.kl, norm_reward=self.options.norm_reward)
        has_reference = self.policy.has_reference
        for batch, batch_rewards in zip(rollout.batches, rewards, strict=True):
            scores = batch.known_scores()
            buffer.add(
                batch.episodes,
                batch_rewards,
                scores.values,
                scores.log_prob,
                last_values=self._bootstrap_values(batch.episodes),
                kl=batch.ref_log_ratio if has_reference else None,
                episode_rewards=batch.episode_sums(batch.rewards),
            )
        buffer.compute_returns_and_advantage()
        info = rollout_statistics(rollout, kl_rewards if has_reference else None, has_critic=self.policy.has_critic)

        # The controller steps after the rewards are computed: `placement: reward` has used the old coefficient,
        # `advantage` and `loss` use the new one in the update that follows. The one in use is logged.
        coeff = self.kl.coeff
        if updates_policy:
            self.kl.step(rollout.ref_log_ratio, rollout.lengths)
        info["rollout_info/kl_coeff"] = coeff if self.kl.placement == "reward" else self.kl.coeff

        # The recorder comes first: it keeps the state of the random generators, from which what follows may draw.
        if self._recorder is not None:
            self._recorder.record(rollout)
        info |= engine_gaps(
            rollout,
            buffer,
            self.policy,
            self.ranks,
            eos_token_ids=self.eos_token_ids,
            max_new_tokens=self.max_episode_length,
        )

        # The prompt sampler learns from this rollout before the prompts of the next one are drawn.
        info |= update_sampler(rollout, self.env)
        if updates_policy and self.generates_ahead:
            self.next_rollouts.start(n_batches=len(rollout.generated))
        return info | {f"time/{name}": seconds for name, seconds in self._seconds.items()}

    def _bootstrap_values(self, episodes: EpisodeBatch) -> Tensor | None:
        """Return the critic's value after each episode that hit the length limit, else 0 `[n]`; None if not used.

        Such an episode is not over: the critic can say what would have followed.
        """
        if not self.options.bootstrap_truncated:
            return None
        with blame_memory_errors_on("scoring"):
            last_values = torch.cat(self._by_part(episodes, self.policy.final_values))
        return last_values.masked_fill(episodes.terminated, 0.0)

    # --- generating -------------------------------------------------------------------------------------------------

    def _generate_rollout(self, n_tokens: int, *, updates_policy: bool, on_batch: Callable[[], None] | None) -> Rollout:
        """Generate a rollout of `n_episodes` episodes or at least `n_tokens` tokens, if dynamic sampling allows it."""
        generated: list[RolloutBatch] = []
        kept: list[RolloutBatch] = []
        factor = self.options.dynamic_sampling

        # Sizes count episodes or tokens.
        n_episodes = self.options.n_episodes
        size = n_tokens if n_episodes is None else n_episodes
        n_generated = 0
        n_kept = 0
        self.next_rollouts.begin()
        while n_kept < size:
            if factor is not None and n_generated >= factor * size:
                break
            if on_batch is not None:
                on_batch()
            batch = self.generation_batch()
            generated.append(batch)
            n_generated += batch.episodes.n_tokens if n_episodes is None else batch.episodes.n_episodes

            # Groups with equal rewards have advantages of 0: they would only make the update smaller (DAPO, arXiv
            # 2503.14476, section 3.2).
            if factor is not None:
                index = batch.groups_differ().nonzero().squeeze(1).tolist()
                if not len(index):
                    continue
                batch = batch.select(index)

            # Surplus groups are dropped: a rollout has exactly `n_episodes` episodes, which are whole groups.
            if n_episodes is not None and n_kept + batch.episodes.n_episodes > n_episodes:
                batch = batch.select(range(n_episodes - n_kept))
            kept.append(batch)
            n_kept += batch.episodes.n_tokens if n_episodes is None else batch.episodes.n_episodes
        self.next_rollouts.drop_rest()

        # If all groups were left out, the last batch stays: an update needs a rollout.
        if not kept:
            kept = generated[-1:]

        # Batch by batch, as they were generated: another padded width could change the last bit of a score.
        batches = []
        for batch in kept:
            score = self.score_sampled if self.uses_sampler_log_probs else self.score
            with self._timed("score_s"):
                scores = score(batch.episodes)
            batches.append(replace(batch, episodes=self._without_scores(batch.episodes), scores=scores))
        return Rollout(batches, generated, updates_policy=updates_policy)

    def _without_scores(self, episodes: EpisodeBatch) -> EpisodeBatch:
        """Return the episodes without what was recorded only to score them."""
        if self._records_log_prob:
            return episodes.without("behavior_entropy")
        return episodes.without("behavior_entropy", "behavior_log_prob", "turn_position")

    def generation_batch(self) -> RolloutBatch:
        """Generate and play an episode in each environment of all processes."""
        # Responses that were generated ahead need no new weights, for which the engine would have to finish the others.
        if not self.next_rollouts.has_responses:
            self.policy.engine.prepare(self.policy)
        with self.policy.gathered():
            return RolloutBatch.joined(self.ranks.gather_from(self._batch_of_this_process))

    def _batch_of_this_process(self) -> RolloutBatch:
        """Generate and play an episode in each environment of this process."""
        drawn = self.next_rollouts.pop() or self.draw_prompts()

        # Responses: sampled now, or by the engine during an update before this rollout.
        with self._timed("generate_s"):
            with blame_memory_errors_on("generation"):
                if isinstance(self.env, DialogueVecEnv):
                    episodes = self._played_dialogues(self.env, drawn.seed)
                elif drawn.responses is None:
                    arguments = self.sampling_arguments(drawn.seed)
                    if drawn.pictures is not None:
                        arguments["pictures"] = drawn.pictures
                    episodes = self.policy.generate(drawn.prompt_ids, drawn.prompt_mask, **arguments)
                else:
                    episodes = drawn.responses.result()
                    self.policy.engine.check_ids(episodes, self.policy.vocab_size)
                    episodes = episodes.to(self.policy.device)
                    if episodes.behavior_log_prob is None:
                        raise EngineError("the engine returned no log-probs of its responses, which ahead needs")
            # The episodes of a group share a prompt: `group_ids` compares their rewards, `prompt_rows` lets passes over
            # them compute the prompt once.
            if self.options.group_size > 1:
                rows = torch.arange(episodes.n_episodes, device=episodes.response_ids.device) // self.options.group_size
                episodes = replace(episodes, group_ids=rows, prompt_rows=rows)
                if isinstance(self.env, DialogueVecEnv):  # an environment may draw its first text
                    episodes = replace(episodes, prompt_rows=prompt_rows_within(rows, episodes))

        # Task rewards of the tokens `[n_tokens]`; an environment that is not a `TextVecEnv` gives them step by step.
        with self._timed("play_s"):
            if self.traits.plays_episodes:
                env: Any = self.env
                total = env.play(episodes)
                played = TokenRewards(total, getattr(env, "reward_parts", {}))
            else:
                played = play_by_stepping(self.env, episodes)

        device = episodes.response_ids.device
        reward_parts = {}
        for name, part in played.parts.items():
            reward_parts[name] = to_device(torch.as_tensor(part, dtype=torch.float32), device)
        rewards = to_device(torch.as_tensor(played.total, dtype=torch.float32), device)
        episode_numbers = {}
        for name, numbers in getattr(self.env, "episode_numbers", {}).items():
            episode_numbers[name] = to_device(torch.as_tensor(numbers, dtype=torch.float32), device)
        return RolloutBatch(episodes, rewards, reward_parts, drawn.sample_ids, episode_numbers)

    def _played_dialogues(self, env: DialogueVecEnv, seed: int) -> EpisodeBatch:
        """Play the episodes that the environments have started."""
        arguments = self.sampling_arguments(seed)
        del arguments["max_new_tokens"]  # turns and episodes have limits of their own
        arguments["generation_kwargs"] = self.policy.arguments.generation_kwargs
        return play_dialogues(self.policy, env.dialogues, **arguments)

    def draw_prompts(self) -> DrawnBatch:
        """Draw the prompts of a generation batch, and the seed of its sampling."""
        if self.traits.plays_episodes:  # another algorithm with the same environment may have changed it
            self.env.group_size = self.options.group_size  # type: ignore[attr-defined]
        observation = self.env.reset()
        assert isinstance(observation, dict)
        # Copies: what a vectorised environment returns may be a buffer of its own.
        prompt_ids = torch.as_tensor(observation["prompt_or_input_encoded_pt"]).clone()
        prompt_mask = torch.as_tensor(observation["prompt_or_input_attention_mask_pt"]).clone()
        samples = self.env.get_attr("sample")
        numbers = self.traits.layout.numbers(samples)
        pictures = None if numbers is None else torch.tensor(numbers)
        return DrawnBatch(samples, prompt_ids.long(), prompt_mask, self.seeds.next(), pictures=pictures)

    def sampling_arguments(self, seed: int) -> dict[str, Any]:
        """Return keyword arguments of `generate` for a batch with this seed."""
        arguments: dict[str, Any] = {
            "eos_token_ids": self.eos_token_ids,
            "max_new_tokens": self.max_episode_length,
            # The main process samples as a single process does.
            "seed": derived_seed(seed, "rank", self.ranks.rank) if self.ranks.rank else seed,
        }
        if self.traits.tokenizer is not None:
            arguments["tokenizer"] = self.traits.tokenizer

        if self._records_log_prob or self.uses_sampler_log_probs:
            first = self.options.first_token_temperature
            arguments |= {"record_log_prob": True, "first_token_temperature": first}
        if self.uses_sampler_log_probs:
            arguments["record_entropy"] = True
        if self.policy.arguments.generates_in_other_dtype:
            arguments["dtype"] = self.policy.arguments.generation_dtype
        return arguments

    @property
    def _records_log_prob(self) -> bool:
        """True if the episodes keep the log-probs of the distribution that was sampled from.

        Without temperature, top-k and the like, that is the policy's own, whose log-probs the scores have anyway.
        """
        is_other = self.policy.engine.external is not None or self.policy.samples_other_distribution
        return self.options.first_token_temperature is not None or self.options.record_log_prob or is_other

    # --- scoring ----------------------------------------------------------------------------------------------------

    def score(self, episodes: EpisodeBatch) -> EpisodeScores:
        """Score episodes with the current policy.

        Raises:
            ModelError: a score is not finite.
        """
        return self._scored(episodes, self.policy.score)

    def score_sampled(self, episodes: EpisodeBatch) -> EpisodeScores:
        """Score episodes of the current policy whose log-probs and entropies were recorded while sampling.

        Raises:
            ModelError: a score is not finite.
        """
        return self._scored(episodes, self.policy.score_sampled)

    def _scored(self, episodes: EpisodeBatch, compute: Callable[[EpisodeBatch], EpisodeScores]) -> EpisodeScores:
        """Return the scores that a method of the policy computes, which must be finite."""
        with blame_memory_errors_on("scoring"):
            scored = self._by_part(episodes, compute)
        scores = EpisodeScores(*(torch.cat(fields) for fields in zip(*scored, strict=True)))

        # A number that is not finite would spread from one token to all advantages, and from there to the weights.
        fields = scores._asdict()
        are_finite = torch.stack([torch.isfinite(field).all() for field in fields.values()]).tolist()
        for (name, field), is_finite in zip(fields.items(), are_finite, strict=True):
            if not is_finite:
                raise ModelError(
                    f"{int((~torch.isfinite(field)).sum())} of {len(field)} tokens of a rollout have a {name} that is "
                    f"not finite: the policy has diverged (lower alg.args.learning_rate or raise kl_div.coeff)"
                )
        return scores

    def _by_part(self, episodes: EpisodeBatch, compute: Callable[[EpisodeBatch], T]) -> list[T]:
        """Return the results for all parts of some episodes, each of at most `score_batch_size` tokens.

        Each process computes those of its own episodes. Sharded forward passes are collective:
        `own_batches` adds passes that do not count, so that all processes make equally many.
        """

        def of_this_process() -> list[T]:
            limits = PassLimits(self.options.score_batch_size, shares_prompts=self.policy.shares_prompts)
            batches = own_batches(episodes, limits, self.ranks, in_step=self.policy.is_sharded)
            if batches and len(batches[0]) == episodes.n_episodes:
                return [compute(episodes)]

            # An empty batch is a pass that only keeps step with the other processes: its result does not count.
            results = []
            for rows in batches:
                result = compute(episodes.select(rows or [0]))
                if rows:
                    results.append(result)
            return results

        if self.policy.is_sharded:  # the others wait in a pass, where they learn of an error when this process ends
            by_process = self.ranks.gather(of_this_process())
        else:
            by_process = self.ranks.gather_from(of_this_process)
        return list(chain.from_iterable(by_process))

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        """Add the duration of the block to the logged seconds of the rollout."""
        start = time.perf_counter()
        yield
        self._seconds[name] += time.perf_counter() - start

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state that changes during a run; `next_rollouts` have their own in a checkpoint."""
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
