"""Classes that were written for the `environment_factory` of TRL's GRPOTrainer, unchanged.

TRL    reset(**columns) -> text or None     appended to the last message of the prompt
       public methods                       tools of the model
       get_reward() -> number               reward of the episode
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from rl4lms_like.core.sample import Sample
from rl4lms_like.core.turns import Answer
from rl4lms_like.envs.tools import ToolEnv
from rl4lms_like.system.errors import ConfigError, ConfigIssue
from rl4lms_like.system.import_paths import imported
from rl4lms_like.system.wording import excerpt, raised


class TrlEnvironment(ToolEnv):
    """Environment of a class for TRL's `environment_factory`.

    `reset` of the class gets the columns of the sample: `prompt`, and what `meta_columns` of the data pool selects. The
    reward of a turn is the change of `get_reward()`, so that their sum is its last value, also if `max_turns` ends the
    episode; a class without this method leaves the reward to `reward_fn`. TRL calls `get_reward` once, at the end of a
    rollout; here it is called after each turn, and should not change the environment.

    TRL answers every exception of a tool. Here these are the exceptions in the attribute `tool_errors` of the class, by
    default `ValueError`; all others are bugs, and end the run.

    Metrics: those of `ToolEnv`.

    Args:
        environment: the class, or its import path such as `my_module:WordleEnv`; or a function that returns an object.

    Raises:
        ConfigError: it cannot be imported, or what it creates has no method `reset`.
    """

    def __init__(self, environment: Any) -> None:
        try:
            factory = imported(environment) if isinstance(environment, str) else environment
        except Exception as error:  # importing a user's module runs the user's code
            issue = ConfigIssue("environment", f"cannot import {environment!r}: {raised(error)}")
            raise ConfigError([issue], "the environment for TRL") from error
        self._wrapped = factory()
        if not callable(getattr(self._wrapped, "reset", None)):
            issue = ConfigIssue("environment", f"{excerpt(self._wrapped)} has no method `reset`")
            raise ConfigError([issue], "the environment for TRL")
        self.tool_errors = getattr(self._wrapped, "tool_errors", ToolEnv.tool_errors)  # type: ignore[misc]

    @functools.cached_property
    def tools(self) -> dict[str, Callable[..., Any]]:
        """Tools by name: all methods without underscore except `reset` and `get_reward`.

        As in TRL, class methods are among them, and static methods, which are plain functions, are not.
        """
        tools: dict[str, Callable[..., Any]] = {}
        for name, method in inspect.getmembers(self._wrapped, predicate=inspect.ismethod):
            if name not in ("reset", "get_reward") and not name.startswith("_"):
                tools[name] = method
        return tools

    def start(self, sample: Sample) -> Answer:
        """Reset the class and return the prompt with what `reset` returned at its end.

        Raises:
            TypeError: `reset` returned neither a text nor None.
        """
        # TRL passes the row of the data set as keyword arguments.
        prompt = super().start(sample)
        columns = {"prompt": prompt, **(sample.meta_data or {})}
        observation = self._wrapped.reset(**columns)
        self._total = 0.0

        # TRL appends a text to the last message of the prompt.
        if observation is None:
            return prompt
        if not isinstance(observation, str):
            raise TypeError(f"reset returned {excerpt(observation)}; expected a text or None")
        if isinstance(prompt, str):
            return prompt + observation
        return [*prompt[:-1], {**prompt[-1], "content": prompt[-1]["content"] + observation}]

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Make the calls of a turn; see `ToolEnv.step`."""
        answer, _, terminated, truncated, info = super().step(action)
        if not hasattr(self._wrapped, "get_reward"):
            return answer, 0.0, terminated, truncated, info

        # r_t = R_t - R_{t-1}: `get_reward` returns the reward of the episode so far.
        total = self._wrapped.get_reward()
        if inspect.isawaitable(total):
            total = self.event_loop.run(_awaited(total))
        reward = float(total) - self._total
        self._total = float(total)
        return answer, reward, terminated, truncated, info


async def _awaited(result: Any) -> Any:
    return await result
