"""Games of TextArena for one player.

    TextArena    game.step(text) -> done, info     game.get_observation() -> messages since the last call
    here         step(text) -> messages of the game as one text, the game's reward at its end

TextArena's games draw from Python's global random numbers and seed them. Each game here has a state of its own for
them, which is put in place during a call and taken out after it.
"""

from __future__ import annotations

import difflib
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rl4lms_like.system.errors import ConfigError, ConfigIssue, import_extra

_GLOBAL_RANDOM = threading.Lock()
"""Held while a game uses the global random numbers: `step` may be called in several threads."""

_RAW = "-raw"
"""Ends the id of a game that returns its messages one by one, not the whole text so far."""


class TextArenaGame(gymnasium.Env[str, str]):
    """A game of TextArena for one player, such as `GuessTheNumber-v0`, `Hangman-v0`, `Mastermind-v0` or `Sudoku-v0`.

    The first text has the rules. An answer has the messages of the game without the player's own. The reward is that of
    the game, at its end; invalid moves are answered until the game ends because of them.

    Metrics: `invalid_move`, whether the game ended because of one.

    Args:
        game: id of the game, without `-raw` or `-train`.
        args: arguments of the game, such as `{min_number: 1, max_number: 7}`.

    Raises:
        MissingExtraError: textarena is not installed.
        ConfigError: there is no such game.
    """

    observation_space = spaces.Text(1_000_000, min_length=0)
    action_space = spaces.Text(1_000_000, min_length=0)

    def __init__(self, game: str, args: dict[str, Any] | None = None) -> None:
        package = import_extra("textarena", extra="textarena", needed_by="the environment 'textarena'")

        # Each game is also registered with wrappers that return the whole text so far, which the policy has read.
        ids = package.envs.registration.ENV_REGISTRY
        if f"{game}{_RAW}" not in ids:
            games = [id.removesuffix(_RAW) for id in ids if id.endswith(_RAW)]
            near = difflib.get_close_matches(game, games, n=3)
            raise ConfigError([ConfigIssue("game", f"TextArena has no game {game!r}; similar: {', '.join(near)}")])

        # Some games draw already when they are created; `reset` seeds them again.
        self._random_state = _state_of(0)
        with self._own_random_numbers():
            self._game = package.make(f"{game}{_RAW}", **(args or {}))
        self._own_action = package.ObservationType.PLAYER_ACTION

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start a game; its seed determines it.

        Raises:
            ConfigError: the game is not one for one player.
        """
        super().reset(seed=seed)

        # Drawn, not `seed` itself: without a seed the games continue as those of `np_random` do.
        seed_of_game = int(self.np_random.integers(2**31))
        self._random_state = _state_of(seed_of_game)
        with self._own_random_numbers():
            try:
                self._game.reset(num_players=1, seed=seed_of_game)
            except AssertionError as error:  # how TextArena reports a wrong number of players
                raise ConfigError([ConfigIssue("game", f"it is not a game for one player: {error}")]) from error
            return self._messages(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Make a move."""
        with self._own_random_numbers():
            is_over, _ = self._game.step(action)
            text = self._messages()
            if not is_over:
                return text, 0.0, False, False, {"metrics": {"invalid_move": 0.0}}

            # Player number -> reward, and what the game reports of that player.
            rewards, infos = self._game.close()

        # Some games end without a message; the reason of the end is then the answer.
        metrics = {"invalid_move": float(bool(infos[0].get("invalid_move")))}
        answer = text or f"{infos[0].get('reason', '')}\n"
        return answer, float(rewards[0]), True, False, {"metrics": metrics}

    def _messages(self) -> str:
        """Return the new messages of the game as a text."""
        # Tuples of sender, text and kind; the player's turns are among them.
        _, messages = self._game.get_observation()
        texts = [text for _, text, kind in messages if kind != self._own_action]
        return "".join(f"{text.strip()}\n" for text in texts)

    @contextmanager
    def _own_random_numbers(self) -> Iterator[None]:
        """Replace the state of the global random numbers of Python and NumPy by this game's."""
        with _GLOBAL_RANDOM:
            outside = random.getstate(), np.random.get_state()
            random.setstate(self._random_state[0])
            np.random.set_state(self._random_state[1])

            # Also after an error, which must leave the random numbers of the run as they were.
            try:
                yield
            finally:
                self._random_state = random.getstate(), np.random.get_state()
                random.setstate(outside[0])
                np.random.set_state(outside[1])


def _state_of(seed: int) -> tuple[Any, Any]:
    """Return the states of Python's and NumPy's global random numbers after seeding them."""
    return random.Random(seed).getstate(), np.random.RandomState(seed).get_state()
