"""What CommonGen sentences should not do."""

from __future__ import annotations

from typing import Any

from rl4lms_like.rewards.text import TextReward
from rl4lms_like.scoring.concepts import PREFIX, repeat_penalty


class CommonGenPenaltyShapingFunction(TextReward):
    """-1 for a sentence that only says its concepts in a row or repeats its instruction, else 0; meant as shaping.

    Args:
        prefix: what stands before the concepts in every prompt; a prompt that lacks it has its concepts in
            `meta_data["concepts"]`.
    """

    def __init__(self, prefix: str = PREFIX) -> None:
        if not prefix:
            raise ValueError("prefix: expected some text, got ''; every text has that")
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
    """The same under RL4LMs' second name; here every reward takes batches and single texts alike.

    Args:
        prefix: what stands before the concepts in every prompt; a prompt that lacks it has its concepts in
            `meta_data["concepts"]`.
    """
