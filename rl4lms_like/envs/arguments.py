"""Arguments of the environment (the `env.args` block), with defaults and meaning. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rl4lms_like.system.numbers import Count, NonNegative, Whole


@dataclass(frozen=True, kw_only=True)
class EnvArguments:
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
