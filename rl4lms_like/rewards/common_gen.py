"""Penalties for CommonGen sentences that repeat their concepts or the instruction instead of using the concepts.

prompt      generate a sentence with: dog run field.
repeats     "... dog run field ...", "generate a sentence with: ...", "... generate ...", "... sentence ..."
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl4lms_like.rewards.text import ScoreReward
from rl4lms_like.scoring.score import Texts

PREFIX = "generate a sentence with: "  # beginning of RL4LMs' CommonGen prompts
INSTRUCTION_WORDS = ("generate", "sentence")


class CommonGenPenaltyShapingFunction(ScoreReward):
    """Shaping reward: -1 for a sentence that only lists its concepts or repeats its instruction, else 0.

    Args:
        prefix: text before the concepts in every prompt; if a prompt lacks it, the concepts are read from
            `meta_data["concepts"]`.
    """

    def __init__(self, prefix: str = PREFIX) -> None:
        if not prefix:
            raise ValueError("prefix: expected some text, got '', which every prompt starts with")
        self.prefix = prefix

    def per_text(self, texts: Texts) -> list[float]:
        rewards = []
        for prompt, response, meta_info in zip(texts.prompts, texts.responses, texts.metas, strict=True):
            rewards.append(repeat_penalty(prompt, response, meta_info, prefix=self.prefix))
        return rewards


class BatchedCommonGenPenaltyShapingFunction(CommonGenPenaltyShapingFunction):
    """Same reward under RL4LMs' second name; in this library one class handles batches and single texts."""


def repeat_penalty(
    prompt_text: str, generated_text: str, meta_info: Mapping[str, Any] | None = None, *, prefix: str = PREFIX
) -> float:
    """Return -1 if the sentence has the concepts in a row, the prefix, `generate` or `sentence`, in any case; or 0."""
    text = generated_text.lower()
    phrases = (concepts_in_a_row(prompt_text, meta_info, prefix=prefix), prefix, *INSTRUCTION_WORDS)
    # As substrings, as in RL4LMs: a sentence with the word "generated" is punished, too.
    return -1.0 if any(phrase.lower() in text for phrase in phrases) else 0.0


def concepts_in_a_row(prompt_text: str, meta_info: Mapping[str, Any] | None = None, *, prefix: str = PREFIX) -> str:
    """Return the concepts of the prompt: the text after the prefix without its last character, the end token.

    For a prompt without the prefix they are `meta_info["concepts"]`, joined by spaces. Without any: a `ValueError`.
    """
    # The prompt of `dog run field` is "generate a sentence with: dog run field." with one character as its end.
    _, prefix_in_prompt, after_prefix = prompt_text.partition(prefix)
    concepts = after_prefix.partition(prefix)[0][:-1]
    if prefix_in_prompt and concepts.strip():
        return concepts

    listed: Sequence[str] = (meta_info or {}).get("concepts") or ()
    if not listed:
        raise ValueError(
            f"no concepts: the prompt {prompt_text[:60]!r} has no text after {prefix!r}, and the sample's meta_data "
            "has no 'concepts'; set the beginning of your prompts as `prefix`, or use the data pool 'commongen'"
        )
    return " ".join(listed)
