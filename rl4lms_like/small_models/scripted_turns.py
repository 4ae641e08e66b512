r"""Turns of an environment's scripted player as texts that a small model can learn.

prompt     Guess a number from 1 to 15:\n8<|endoftext|>lower\n      everything before the turn, as in a rollout
response   4                                                       the turn; its end token is added in training
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rl4lms_like.core.sample import Sample
from rl4lms_like.envs.dialogues import episode_seed
from rl4lms_like.system.errors import ModelError
from rl4lms_like.system.wording import raised

N_EPISODES = 2000
"""Number of episodes that are played."""

END = "<|endoftext|>"
"""Ends a turn; the special token of `small_models.warm_start`."""


def has_player(env: Any) -> bool:
    """Return whether an environment has a scripted player."""
    return callable(getattr(_unwrapped(env), "player", None))


def next_turn(env: Any) -> str:
    """Return what the scripted player of an environment would write next."""
    return str(_unwrapped(env).player())


def _unwrapped(env: Any) -> Any:
    """Return an environment without the wrappers of `gymnasium.make`, which hide the method `player`."""
    return getattr(env, "unwrapped", env)


def turns_of_player(env: Any, samples: Sequence[Sample], max_turns: int, seed: int) -> list[tuple[str, str]]:
    """Return pairs of the text before a turn and the turn, of many episodes.

    Args:
        env: environment with a method `player`.
        samples: samples of the episodes, one after the other, and again from the first one.
        max_turns: maximum number of turns of an episode.
        seed: seed of the episodes, which are none of the splits `val` and `test`.

    Raises:
        ModelError: the environment plays messages instead of texts, or fails.
    """
    pairs = []
    for number in range(N_EPISODES):
        sample = samples[number % len(samples)]

        # In the split `train`, so that no game is one of an evaluation, whose seeds are of other splits.
        try:
            pairs += _turns_of_episode(env, sample, max_turns, episode_seed(seed, "train", 0, number))
        except (ModelError, KeyboardInterrupt):
            raise
        except BaseException as error:  # of the user's code
            name = type(_unwrapped(env)).__name__
            message = f"the environment {name} with sample {sample.id!r} failed while its scripted player played"
            raise ModelError(f"{message}: {raised(error)}") from error
    return pairs


def _turns_of_episode(env: Any, sample: Sample, max_turns: int, seed: int) -> list[tuple[str, str]]:
    """Return the pairs of one episode."""
    # The text so far, as the model will read it in a rollout: each turn ends with its end token.
    pairs = []
    text, _ = env.reset(seed=seed, options={"sample": sample})
    for _ in range(max_turns):
        if not isinstance(text, str):
            raise ModelError("tiny_model learns texts, and the environment plays messages; use another model")
        turn = next_turn(env)
        pairs.append((text, turn))
        answer, _, terminated, truncated, _ = env.step(turn)
        if terminated or truncated:
            break
        text = f"{text}{turn}{END}{answer}" if isinstance(answer, str) else answer
    return pairs
