"""Environments of several turns for tests, and their vectorised environment on a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium

from rl4lms_like.core.sample import Sample
from rl4lms_like.envs.dialogue_vec_env import DialogueVecEnv
from rl4lms_like.envs.dialogues import DialogueSettings
from rl4lms_like.rewards.environment import EnvironmentReward

ANSWERS = ("higher", " lower than that", "", "Nobody knew, and nobody asked! ", "é")


class Chatter(gymnasium.Env):
    """Everything that can differ is drawn from the seed and depends on what was written: texts, rewards, the end."""

    observation_space = action_space = gymnasium.spaces.Text(64)

    def __init__(self, *, end: float = 0.2, log: list | None = None) -> None:
        self.end = end
        self.log = log  # of the texts that `step` received

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        first = f"{options['sample'].prompt_or_input_text} {self.np_random.integers(100)}"
        return first[: self.np_random.integers(3, 12)], {"metrics": {"drawn": float(self.np_random.integers(5))}}

    def step(self, action):
        if self.log is not None:
            self.log.append(action)
        answer = ANSWERS[(len(action) + int(self.np_random.integers(len(ANSWERS)))) % len(ANSWERS)]
        # Also what was written counts: members of a group have the same seed.
        reward = float(self.np_random.normal()) + len(action) % 5
        ends = self.np_random.random() < self.end * (1 + len(action) % 3) / 2
        return answer, reward, bool(ends), False, {}


class Scripted(gymnasium.Env):
    """Returns a given answer, reward and end in each turn; ends with the last."""

    def __init__(self, *steps: tuple[Any, ...], first: Any = "Count with me") -> None:
        self.steps, self.first, self.turn = steps, first, 0

    def reset(self, *, seed=None, options=None):
        self.turn = 0
        return self.first, {}

    def step(self, action):
        self.turn += 1
        return self.steps[min(self.turn, len(self.steps)) - 1]


def dialogue_env(
    tokenizer: Any, model_dir: Path, make: Any = Chatter, *, n_envs=8, seed=0, reward=None, **options: Any
) -> DialogueVecEnv:
    """A vectorised environment of dialogues that fits a tiny model."""
    from transformers import AutoConfig

    limits = {"max_turns": 4, "max_turn_length": 5, "max_episode_length": 40}
    of_settings = {*limits, "template", "threads", "timeout"}
    limits |= {name: value for name, value in options.items() if name in of_settings}
    of_env = {name: value for name, value in options.items() if name not in of_settings}
    env = DialogueVecEnv(
        n_envs,
        tokenizer,
        reward or EnvironmentReward(),
        [Sample(str(i), f"Count {i}") for i in range(7)],
        vocab_size=AutoConfig.from_pretrained(model_dir).vocab_size,
        settings=DialogueSettings("chatter", make, **limits),
        env_seed=seed,
        **{"max_prompt_length": 14, "terminate_on_eos": True, **of_env},
    )
    env.seed(seed)
    return env
