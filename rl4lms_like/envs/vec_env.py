"""Vectorised environment with n episodes in one process, stepped like any SB3 `VecEnv` or scored as whole episodes.

    prompts  = env.reset()             n prompts, all drawn by one sampler: arrays [n, P], [n, T] and [n, P + T]
    rewards  = env.play(episodes)      [n_tokens], equal to stepping through `episodes` token by token

    episode 0  a b c           rewards of `play`:   r_a r_b r_c r_d r_e     flat, without padding
    episode 1  d e             a terminal reward:   0   0   r_c 0   r_e     at the last token of each episode

`play` calls a terminal reward for last tokens only. Observations decode their text when it is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from stable_baselines3.common.vec_env import DummyVecEnv

from rl4lms_like.core.episodes import EpisodeBatch
from rl4lms_like.core.observation import Observation, TextLayout
from rl4lms_like.core.sample import Sample
from rl4lms_like.envs.arguments import EnvConfig
from rl4lms_like.envs.env import TextGenEnv
from rl4lms_like.envs.scoring import EpisodeScorer
from rl4lms_like.rewards.call import texts_to_score
from rl4lms_like.system.errors import RewardError
from rl4lms_like.system.ranks import Ranks
from rl4lms_like.system.schema import checked_block


class TextVecEnv(DummyVecEnv):
    """`n_envs` text environments that share sampler, encoded prompts and reward.

    Args:
        n_envs: number of parallel episodes.
        args: the arguments of `TextGenEnv`, by position.
        reward_workers: number of processes that score the episodes in `play`; 0 scores them in this process.
        reward_timeout: time limit of the reward in seconds for the episodes of one `play`; with workers, for one
            worker's chunk of them. None for no limit.
        ranks: the processes that generate a rollout together, each with `n_envs` environments. All samplers draw the
            prompts of all environments, so that they stay equal.
        kwargs: the arguments of `TextGenEnv`, by name.

    Attributes:
        reward_parts: name -> contribution of that part of a combined reward to the rewards that `play` returned last,
            flat `[n_tokens]`; empty if the reward has no parts.
        scorer: computes the rewards of finished episodes.
        group_size: `reset` draws one prompt for this many consecutive environments; it divides `n_envs`.

    Raises:
        ConfigError: an argument without a usable default is missing, or `reward_timeout` requires workers here.
        DataPoolError: there are no samples to draw.
        RewardError: `reward_workers` is above 0 and the reward cannot be sent to another process.
    """

    envs: list[TextGenEnv]  # type: ignore[assignment]

    def __init__(
        self,
        n_envs: int,
        *args: Any,
        reward_workers: int = 0,
        reward_timeout: float | None = None,
        ranks: Ranks | None = None,
        **kwargs: Any,
    ) -> None:
        settings = {"n_envs": n_envs, "reward_workers": reward_workers, "reward_timeout": reward_timeout}
        checked_block(EnvConfig, settings, "the arguments of the environment")

        # Siblings share one sampler: prompts do not depend on how they are divided among the environments.
        first = TextGenEnv(*args, **kwargs)
        super().__init__([first.sibling] * n_envs)
        self.group_size = 1
        self.ranks = ranks or Ranks()
        self._n_unplayed = 0  # prompts that the last `reset` drew, until an episode of theirs is played

        self.reward_parts: dict[str, np.ndarray] = {}
        self.scorer = EpisodeScorer(first.reward_function, first.layout, reward_workers, reward_timeout)

    @property
    def layout(self) -> TextLayout:
        """Shapes and tokenizer of all observations."""
        return self.envs[0].layout

    @property
    def samples(self) -> list[Sample]:
        """Samples of the current episodes `[n_envs]`; kept after `play`, until the next `reset`."""
        return [env.sample for env in self.envs]

    def seed(self, seed: int | None = None) -> Sequence[int | None]:
        """Seed the sampler, which draws the prompts of all environments."""
        seeds = super().seed(seed)
        # SB3 would pass the seeds to each environment's `reset`, and each would seed the shared sampler again.
        self._reset_seeds()
        if seeds[0] is not None:
            self.envs[0].sampler.seed(seeds[0])
            self.keep_prompts()
        return seeds

    def reset(self) -> Any:
        """Start an episode in each environment, those of a group with the same sample.

        Prompts of the last `reset` that no episode was played of are put back first: `learn` resets before it collects
        its first rollout, for instance, which resets again.
        """
        self.envs[0].sampler.put_back(self._n_unplayed)
        observation = self._start_next()
        self._n_unplayed = self._n_prompts
        return observation

    @property
    def _n_prompts(self) -> int:
        """Number of prompts that a `reset` draws: one for each group of all processes."""
        return self.num_envs * self.ranks.size // self.group_size

    def _start_next(self) -> Any:
        """Start an episode in each environment with the next prompts of the sampler."""
        # Environments that draw their prompts themselves keep the encoded ones.
        if self.group_size == 1 and self.ranks.size == 1:
            return super().reset()
        return self.start(self._next_samples())

    def _next_samples(self) -> list[Sample]:
        """Draw a sample for each group of all processes; return those of this process `[n_envs]`."""
        all_samples = []
        for sample in self.envs[0].sampler.sample(self._n_prompts):
            all_samples += [sample] * self.group_size
        first = self.num_envs * self.ranks.rank
        return all_samples[first : first + self.num_envs]

    def start(self, samples: Sequence[Sample]) -> Any:
        """Start an episode in each environment, with these samples in place of those of the sampler."""
        self.keep_prompts()
        self.set_options([{"sample": sample} for sample in samples])
        return super().reset()

    def keep_prompts(self) -> None:
        """Count the prompts of the last `reset` as used, so that the next one does not put them back."""
        self._n_unplayed = 0

    def put_back(self, n_batches: int) -> None:
        """Put back the prompts of the last resets, of which no episode was played."""
        self.envs[0].sampler.put_back(n_batches * self._n_prompts)

    def step_async(self, actions: np.ndarray) -> None:
        """Call `DummyVecEnv.step_async`: episodes of the current prompts are played."""
        self.keep_prompts()
        super().step_async(actions)

    def play(self, episodes: EpisodeBatch) -> np.ndarray:
        """Return the task rewards of whole responses to the current prompts; call `reset` afterwards.

        Args:
            episodes: one for each environment, in their order.

        Returns:
            Flat `[n_tokens]` float32. `done` is True at the last token of every episode, terminated or truncated.

        Raises:
            ValueError: the episodes do not match the environments.
            RewardError: the reward failed, or did not return one finite number for each request; the error's `texts`
                holds the texts.
        """
        final_states = self._final_states(episodes)

        # The environments' own episodes are over: `step` must not continue them.
        for env in self.envs:
            env.leave()
        self.keep_prompts()

        try:
            rewards = self.scorer.score(final_states)
        except RewardError as error:
            error.texts = texts_to_score(self.samples, [state.context_text for state in final_states])
            raise
        self.reward_parts = rewards.parts
        return rewards.total

    @property
    def reward_restarts(self) -> int | None:
        """Number of restarts of the reward workers; None without workers."""
        return self.scorer.restarts

    def _final_states(self, episodes: EpisodeBatch) -> list[Observation]:
        """Return the last observation of each episode `[n_envs]`."""
        if episodes.n_episodes != self.num_envs:
            raise ValueError(f"expected {self.num_envs} episodes, one for each environment, got {episodes.n_episodes}")
        if any(env.over or env.observation.n_actions for env in self.envs):
            raise ValueError("play() scores whole responses to new prompts; call reset() first")

        lengths = episodes.lengths.tolist()
        limit = self.envs[0].max_episode_length
        if not (min(lengths) >= 1 and max(lengths) <= limit):
            raise ValueError(f"responses must have 1 to {limit} tokens, got {min(lengths)} to {max(lengths)}")

        # The last state stands for the whole episode: `Observation.after` gives the earlier ones, and all of them are
        # views of one row of `responses`.
        responses = episodes.response_ids.cpu().numpy()  # [n_envs, response_len], right-padded
        states = []
        for env, response, length in zip(self.envs, responses, lengths, strict=True):
            prompt = env.observation
            state = Observation(prompt.sample, prompt.prompt_ids, response, n_actions=length, layout=prompt.layout)
            states.append(state)
        return states

    def update_sampler(self, sample_ids: Sequence[str], rewards: Sequence[float]) -> dict[str, float]:
        """Pass the total task rewards of a rollout's episodes to the sampler, and return what it logs, by name."""
        return self.envs[0].sampler.update(sample_ids, rewards)

    def state_dict(self) -> dict[str, Any]:
        """Return the sampler's position and the state of the reward in this process, in JSON types."""
        return self.envs[0].state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state returned by `state_dict`; takes effect at the next `reset`."""
        self.envs[0].load_state_dict(state)
        self.keep_prompts()  # the sampler's position is no longer after those of the last `reset`

    def close(self) -> None:
        """Stop the reward workers, if there are any."""
        self.scorer.close()
        super().close()
