"""MDP of text generation, and environments that answer.

An episode of one turn: a state is a prompt and the response so far, an action is the next token.

    arguments   EnvArguments      the `env.args` block; does not import torch
    env         TextGenEnv        one episode, token by token (Gymnasium)
    vec_env     TextVecEnv        n episodes in one process; `play` scores whole responses at once
    stepping    play_by_stepping  the same rewards from any vectorised TextGenEnv, token by token
                make_vec_env      builds the vectorised environment selected by the config
    workers     RewardWorkers     slow Python rewards in worker processes

An episode of several turns: an action is the text of a turn, and the environment answers it with a text. Any
`gymnasium.Env` over texts is such an environment, and `ENVIRONMENTS` has those with an id.

    reset(seed=, options={"sample": Sample}) -> text, info                                 the prompt of the first turn
    step(text)                               -> text, reward, terminated, truncated, info  the answer to a turn

    text                a str, or messages with `role` and `content` for a chat template
    info["tools"]       of `reset`: JSON schemas of functions that the model may call
    info["metrics"]     numbers of the episode so far, name -> number; those of its last turn are averaged and logged
    player()            optional method: the next turn of a scripted player, from what a player can know

    tools               ToolEnv: public methods that the model calls in its text; FunctionTools: plain functions
    games               text games and tasks with scripted players
    adapters            TextArena, questions with retries, classes written for TRL
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium

from rl4lms_like.system.errors import ConfigError, ConfigIssue
from rl4lms_like.system.registry import Entry, Registry, derived_from
from rl4lms_like.system.secrets import with_values
from rl4lms_like.system.wording import raised

ENV_ID = "rl4lms_like/TextGen-v0"


def register_envs() -> None:
    """Register `gymnasium.make("rl4lms_like/TextGen-v0", ...)`, when `rl4lms_like` is imported.

    Gymnasium 1.0 no longer loads plugins.
    """
    if ENV_ID not in gymnasium.registry:
        gymnasium.register(ENV_ID, entry_point="rl4lms_like.envs.env:TextGenEnv")


class Environments(Registry):
    """Environments that answer, by id, by import path, or by the id under which Gymnasium has them.

    An id of Gymnasium comes first: a package that registers its environments there needs no other registration here.
    """

    def entry(self, id: str) -> Entry:
        """Return the row of `id`; see `Registry.entry`."""
        spec = gymnasium.registry.get(id)
        if spec is None:
            return super().entry(id)
        return Entry(spec.entry_point, "registered with Gymnasium")

    def resolve(self, id: str) -> Any:
        """Return the class or function that creates the environment; see `Registry.resolve`."""
        spec = gymnasium.registry.get(id)
        if spec is None:
            return super().resolve(id)

        # Whoever registered it with Gymnasium chose its code, as with this registry's `register`.
        if not isinstance(spec.entry_point, str):
            return spec.entry_point
        try:
            return gymnasium.envs.registration.load_env_creator(spec.entry_point)
        except Exception as error:  # importing a user's module runs the user's code
            message = f"cannot import {spec.entry_point!r}, the environment {id!r} of Gymnasium: {raised(error)}"
            raise ConfigError([ConfigIssue("", message)], f"the {self.kind} id") from error

    def signature(self, id: str) -> Callable[..., Any]:
        """Return the callable whose signature lists the `args` of the environment; see `Registry.signature`."""
        spec = gymnasium.registry.get(id)
        if spec is None:
            return super().signature(id)
        # Arguments that were given when it was registered are defaults.
        creator: Callable[..., Any] = self.resolve(id)
        return functools.partial(creator, **spec.kwargs) if spec.kwargs else creator

    def get(self, id: str, kwargs: Mapping[str, Any] | None = None) -> Any:
        """Build the environment with `kwargs`; one of Gymnasium with the wrappers of `gymnasium.make`."""
        if id not in gymnasium.registry:
            return super().get(id, kwargs)

        # Without Gymnasium's checker, which warns of each text that is longer than its space, and of messages.
        env = gymnasium.make(id, disable_env_checker=True, **with_values(kwargs or {}))

        # Gymnasium registers environments of all kinds, such as CartPole: an action must be a text.
        if not isinstance(env.action_space, gymnasium.spaces.Text):
            message = f"the actions of {id!r} are {env.action_space}; expected texts: spaces.Text"
            raise ConfigError([ConfigIssue("", message)], f"the {self.kind} id")
        return env


ENVIRONMENTS = Environments(
    "environment",
    group="rl4lms_like.environments",
    misfit=derived_from("gymnasium.core:Env"),
    table={
        "guess_number": Entry(
            "rl4lms_like.envs.games.guess_number:GuessNumber", "a number to guess; the answers are higher and lower"
        ),
        "calculator": Entry(
            "rl4lms_like.envs.games.calculator:Calculator",
            "a sum, and a calculator that may be asked first",
        ),
        "word_game": Entry("rl4lms_like.envs.games.word_game:WordGame", "a word to guess, letter by letter"),
        "shop": Entry(
            "rl4lms_like.envs.games.shop:Shop",
            "a shop; the model sells a scripted customer one thing",
        ),
        "object": Entry("rl4lms_like.envs.built:copied_environment", "an environment that was built in Python"),
        "tools": Entry(
            "rl4lms_like.envs.tools:FunctionTools", "functions that the model may call; `reward_fn` scores its answer"
        ),
        "reasoning_gym": Entry(
            "rl4lms_like.envs.adapters.retries:Retries", "questions of a data pool, with several tries"
        ),
        "textarena": Entry(
            "rl4lms_like.envs.adapters.textarena:TextArenaGame",
            "a game of TextArena for one player",
            needs="extra 'textarena'",
        ),
        "trl_environment": Entry(
            "rl4lms_like.envs.adapters.trl_environment:TrlEnvironment",
            "a class that was written for TRL's `environment_factory`",
        ),
    },
)
