"""Episodes of the games, played by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import pytest

Player = Callable[[Any], str]


def played(env: gymnasium.Env, player: Player, seed: int, max_turns: int = 50, **options: Any) -> dict[str, Any]:
    """Texts, rewards and the end of an episode in which `player(env)` writes each turn."""
    text, _ = env.reset(seed=seed, options=options or None)
    texts = [text]
    rewards = []
    terminated = False
    for _ in range(max_turns):
        turn = player(env)
        text, reward, terminated, truncated, info = env.step(turn)
        texts += [turn, text]
        rewards.append(reward)
        if terminated or truncated:
            break
    return {"texts": texts, "rewards": rewards, "terminated": terminated, "metrics": info["metrics"]}


def mean_score(env: gymnasium.Env, player: Player, n_episodes: int) -> float:
    """Mean sum of rewards over the episodes with seeds 0 to n - 1."""
    return sum(sum(played(env, player, seed)["rewards"]) for seed in range(n_episodes)) / n_episodes


def scripted(env: Any) -> str:
    """The environment's own player."""
    return str(env.player())


@pytest.fixture
def no_global_random_numbers():
    """Fail if the test changes the state of the global generators of Python or NumPy."""
    import random

    import numpy as np

    before = random.getstate(), np.random.get_state()[1].tolist(), np.random.get_state()[2]
    yield
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), np.random.get_state()[2])
