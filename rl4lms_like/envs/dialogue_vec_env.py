"""Vectorised environment whose episodes are dialogues with users' environments.

prompts  = env.reset()            first texts of the environments
episodes                          `rollouts.play_dialogues`: turns of the policy, answers of `env.dialogues`
rewards  = env.play(episodes)     [n_tokens]

episode 0   a1 a2 | o o | a3 a4 a5      a: actions, o: observed tokens
rewards      0 r1         0  0  r2      r: of each turn, at its last action; that of `reward_fn` is added to the last
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from rl4lms_like.core.episodes import EpisodeBatch
from rl4lms_like.core.observation import Observation
from rl4lms_like.core.sample import Sample
from rl4lms_like.envs.dialogues import Dialogues, DialogueSettings, episode_seed
from rl4lms_like.envs.vec_env import TextVecEnv
from rl4lms_like.rewards.base import AnyReward
from rl4lms_like.rewards.call import is_terminal, leaves
from rl4lms_like.rewards.environment import EnvironmentReward
from rl4lms_like.system.errors import ConfigError, ConfigIssue

ENVIRONMENT = "environment"
"""Name of the environment's part of the reward."""
REWARD_FN = "reward_fn"
"""Name of the part of a reward function without parts of its own."""


def token_reward_issues(reward_fn: AnyReward) -> Iterator[ConfigIssue]:
    """Yield an error for each part of a reward that scores single tokens; the last turn is read as a whole."""
    for leaf in leaves(reward_fn):
        if not is_terminal(leaf.reward):
            name = f"its part {leaf.name!r}" if leaf.name else type(leaf.reward).__name__
            message = f"{name} scores single tokens; with env.dialogue it must score whole texts (terminal = True)"
            yield ConfigIssue("reward_fn", message)


class DialogueVecEnv(TextVecEnv):
    """`TextVecEnv` whose episodes are dialogues.

    Args:
        n_envs: number of parallel episodes.
        args: the arguments of `TextGenEnv`, by position.
        settings: environment of the user, and limits.
        env_seed: from which the seeds of the environments are derived.
        kwargs: the arguments of `TextVecEnv`, by name, without `max_episode_length`.

    Attributes:
        dialogues: the episodes of the last `reset`.
        episode_numbers: name -> number of each episode of the last `play` `[n_envs]`, NaN where the environment did not
            report it.
        n_played: number of batches that have been played.
    """

    def __init__(self, n_envs: int, *args: Any, settings: DialogueSettings, env_seed: int = 0, **kwargs: Any) -> None:
        super().__init__(n_envs, *args, max_episode_length=settings.max_episode_length, **kwargs)
        self.dialogues = Dialogues(settings, self.layout)
        self.episode_numbers: dict[str, np.ndarray] = {}
        self.n_played = 0
        self._env_seed = env_seed
        reward_fn = self.envs[0].reward_function
        self._has_reward_fn = not isinstance(reward_fn, EnvironmentReward)
        if issues := list(token_reward_issues(reward_fn)):
            raise ConfigError(issues, "the environment")

        # Not with the first episodes: an environment that cannot be built is found before weights are loaded.
        self.dialogues.build(n_envs)

    def _start_next(self) -> Any:
        """Start dialogues with the next samples: the environments draw no prompts themselves."""
        return self.start(self._next_samples())

    def start(self, samples: Sequence[Sample]) -> Any:
        """Start an episode in each environment, with these samples in place of those of the sampler."""
        # From the number of batches that were played, not of those that were started: a batch that is started again
        # without having been played has the same seeds.
        first = self.num_envs * self.ranks.rank
        seeds = []
        for row in range(len(samples)):
            group = (first + row) // self.group_size
            seeds.append(episode_seed(self._env_seed, "train", self.n_played, group))
        return super().start([dialogue.sample for dialogue in self.dialogues.start(samples, seeds)])

    def play(self, episodes: EpisodeBatch) -> np.ndarray:
        """Return the rewards of the episodes that were played with `dialogues`; call `reset` afterwards.

        Args:
            episodes: those of `dialogues`, in their order.

        Returns:
            Flat `[n_tokens]` float32: those of the turns, and of the reward function at the last action of an episode.

        Raises:
            ValueError: the episodes are not those of the environments.
            RewardError: the reward failed.
        """
        of_reward_fn = super().play(episodes)  # one number for each action of a last turn
        self.n_played += 1

        # Flat positions of the last action of each turn and of each episode: the borders of turns are those of the
        # dialogues, since nothing separates two turns where an answer is empty.
        n_actions = []
        turn_rewards = []
        for dialogue in self.dialogues.running:
            n_actions += [turn.n_actions for turn in dialogue.turns]
            turn_rewards += [turn.reward for turn in dialogue.turns]
        total = np.zeros(sum(n_actions), dtype=np.float32)
        total[np.cumsum(n_actions) - 1] = turn_rewards
        self.episode_numbers = self._numbers()
        if not self._has_reward_fn:
            self.reward_parts = {}
            return total

        parts = {ENVIRONMENT: total.astype(np.float64)}
        for name, values in (self.reward_parts or {REWARD_FN: of_reward_fn}).items():
            parts[name] = self._at_episode_ends(values.astype(np.float64))
        self.reward_parts = parts
        return total + self._at_episode_ends(of_reward_fn)

    def _at_episode_ends(self, values: np.ndarray) -> np.ndarray:
        """Return numbers of the actions of all last turns, whose last ones count, as numbers of all actions."""
        last_turns = [dialogue.turns[-1].n_actions for dialogue in self.dialogues.running]
        episodes = [sum(turn.n_actions for turn in dialogue.turns) for dialogue in self.dialogues.running]
        of_all = np.zeros(sum(episodes), dtype=values.dtype)
        of_all[np.cumsum(episodes) - 1] = values[np.cumsum(last_turns) - 1]
        return of_all

    def _numbers(self) -> dict[str, np.ndarray]:
        """Return the numbers of the episodes by name, each `[n_envs]`."""
        of_episodes = [dialogue.numbers for dialogue in self.dialogues.running]
        names = sorted({name for numbers in of_episodes for name in numbers})
        return {name: np.array([numbers.get(name, np.nan) for numbers in of_episodes]) for name in names}

    def _final_states(self, episodes: EpisodeBatch) -> list[Observation]:
        """Return what the reward function reads of each episode: the last turn, and all turns in `meta_info`."""
        running = self.dialogues.running
        lengths = [sum(turn.n_actions for turn in dialogue.turns) for dialogue in running]
        if episodes.lengths.tolist() != lengths or not all(lengths):
            raise ValueError("expected the episodes that were played with `dialogues`, got others")
        if any(env.over for env in self.envs):
            raise ValueError("play() scores episodes that were played after a reset; call reset() first")

        states = []
        actions_of_episodes = episodes.actions.cpu().split(lengths)  # each [n_actions]
        for env, dialogue, actions in zip(self.envs, running, actions_of_episodes, strict=True):
            last_turn = actions[-dialogue.turns[-1].n_actions :].numpy()
            states.append(
                Observation(
                    dialogue.finished_sample(),
                    dialogue.prompt_ids,
                    last_turn,
                    n_actions=len(last_turn),
                    layout=env.layout,
                )
            )
        return states

    def state_dict(self) -> dict[str, Any]:
        """Return the state of a `TextVecEnv`, and the number of played batches, from which seeds are derived."""
        return super().state_dict() | {"n_played": self.n_played}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state returned by `state_dict`."""
        super().load_state_dict(state)
        self.n_played = state["n_played"]

    def close(self) -> None:
        """Close the users' environments, and stop the reward workers, if there are any."""
        self.dialogues.close()
        super().close()
