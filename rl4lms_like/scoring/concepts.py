"""Penalty for sentences that repeat their concepts or the instruction instead of using the concepts (CommonGen).

prompt      generate a sentence with: dog run field.
repeats     "... dog run field ...", "generate a sentence with: ...", "... generate ...", "... sentence ..."
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

PREFIX = "generate a sentence with: "
"""Beginning of RL4LMs' CommonGen prompts."""

INSTRUCTION_WORDS = ("generate", "sentence")


def repeat_penalty(
    prompt_text: str, generated_text: str, meta_info: Mapping[str, Any] | None = None, *, prefix: str = PREFIX
) -> float:
    """Return -1 if the sentence has the concepts in a row, the prefix, `generate` or `sentence`, in any case; else 0.

    Raises:
        ValueError: the prompt lacks the prefix and `meta_info` has no `concepts`.
    """
    text = generated_text.lower()
    phrases = (concepts_in_a_row(prompt_text, meta_info, prefix=prefix), prefix, *INSTRUCTION_WORDS)
    return -1.0 if any(phrase.lower() in text for phrase in phrases) else 0.0


def concepts_in_a_row(prompt_text: str, meta_info: Mapping[str, Any] | None = None, *, prefix: str = PREFIX) -> str:
    """Return the concepts of the prompt: the text after the prefix without its last character, the end token.

    For a prompt without the prefix they are `meta_info["concepts"]`, set by the data pool `commongen`, joined by
    spaces.

    Raises:
        ValueError: neither has concepts.
    """
    _, found, behind = prompt_text.partition(prefix)
    concepts = behind.partition(prefix)[0][:-1]
    if found and concepts.strip():
        return concepts
    listed: Sequence[str] = (meta_info or {}).get("concepts") or ()
    if not listed:
        raise ValueError(
            f"no concepts: the prompt {prompt_text[:60]!r} has no text after {prefix!r}, and the sample's meta_data "
            "has no 'concepts'; set the beginning of your prompts as `prefix`, or use the data pool 'commongen'"
        )
    return " ".join(listed)
