"""Penalties for degenerate CommonGen sentences."""

from __future__ import annotations

from typing import Any

from rl4lms_like.rewards.text import TextReward
from rl4lms_like.scoring.concepts import PREFIX, repeat_penalty


class CommonGenPenaltyShapingFunction(TextReward):
    """Shaping reward: -1 for a sentence that only lists its concepts or repeats its instruction, else 0.

    Args:
        prefix: text before the concepts in every prompt; if a prompt lacks it, the concepts are read from
            `meta_data["concepts"]`.
    """

    def __init__(self, prefix: str = PREFIX) -> None:
        if not prefix:
            raise ValueError("prefix: expected some text, got '', which every prompt starts with")
        self.prefix = prefix

    def scores(
        self,
        prompt_texts: list[str],
        gen_texts: list[str],
        ref_texts: list[list[str]],
        meta_infos: list[dict[str, Any] | None],
    ) -> list[float]:
        return [
            repeat_penalty(prompt, generated, meta_info, prefix=self.prefix)
            for prompt, generated, meta_info in zip(prompt_texts, gen_texts, meta_infos, strict=True)
        ]


class BatchedCommonGenPenaltyShapingFunction(CommonGenPenaltyShapingFunction):
    """Same reward under RL4LMs' second name; in this library one class handles batches and single texts.

    Args:
        prefix: text before the concepts in every prompt; if a prompt lacks it, the concepts are read from
            `meta_data["concepts"]`.
    """
