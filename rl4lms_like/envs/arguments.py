"""The `env` block and its `args`: all arguments of the environment with their defaults. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from rl4lms_like.system.errors import ConfigIssue
from rl4lms_like.system.numbers import Count, NonNegative, Positive, Processes, Prompts, Whole
from rl4lms_like.system.schema import Block, coerced_mapping


@dataclass(frozen=True, kw_only=True)
class EnvArguments(Block):
    """Arguments of the text environment.

    Args:
        max_episode_length: T: maximum number of tokens of a response. An episode that reaches it is truncated.
        max_prompt_length: P: maximum number of tokens of a prompt. Longer prompts are truncated. Default: the
            tokenizer's `model_max_length`.
        terminate_on_eos: whether the end-of-text token terminates an episode.
        context_start_token: first decoder token of an encoder-decoder model (T5: 0, BART: 2). null is for causal
            models, for which another value has no effect.
        prompt_truncation_side: side on which long prompts are truncated.
        priority_scale: exponent of the samples' weights: the probability of a sample is proportional to its weight to
            this power. 0 gives all samples the same probability.
    """

    max_episode_length: Count = 512
    max_prompt_length: Count | None = None
    terminate_on_eos: bool = False
    context_start_token: Whole | None = None
    prompt_truncation_side: Literal["left", "right"] = "left"
    priority_scale: NonNegative = 0.0


EnvArgs = Annotated[dict[str, Any], AfterValidator(partial(coerced_mapping, EnvArguments))]
"""Type of a mapping with arguments of the environment."""


@dataclass(frozen=True, kw_only=True)
class EnvConfig(Block):
    """The `env` block.

    Args:
        n_envs: number of prompts that are generated together.
        vec_env: `text` generates whole episodes in this process. `dummy` and `subproc` are vectorized environments of
            Stable-Baselines3, which step token by token.
        reward_workers: number of processes that compute rewards; 0 computes them in this process.
        reward_timeout: time limit in seconds for computing the rewards of `n_envs` episodes; with `reward_workers`, of
            the part that one worker gets. null sets no limit.
        args: arguments of `TextGenEnv`.
    """

    n_envs: Prompts = 1
    vec_env: Literal["text", "dummy", "subproc"] = "text"
    reward_workers: Processes = 0
    reward_timeout: Positive | None = None
    args: EnvArgs = field(default_factory=dict)

    @cached_property
    def arguments(self) -> EnvArguments:
        """Typed view of `args`."""
        return EnvArguments(**self.args)

    def issues(self) -> Iterator[ConfigIssue]:
        if self.vec_env == "text":
            return
        for key in ("reward_workers", "reward_timeout"):
            if getattr(self, key):
                text = f"requires vec_env 'text', got {self.vec_env!r}, which calls the reward in each step"
                yield ConfigIssue(key, text)
