"""Describe the samples of a data pool, for `check`.

train   1,000 samples; 12 prompts are longer than 64 tokens (up to 93) and cut; 3 without references
val     100 samples; all prompts within 64 tokens (up to 60)
prompt  'Summarise: ...'
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rl4lms_like.core.sample import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

N_COUNTED = 10_000
"""Number of prompts per split whose tokens are counted, which takes some seconds. Later prompts are not counted."""

N_PROMPTS = 2
"""Number of `train` prompts that are shown."""

SHOWN_START, SHOWN_END = 300, 100
"""Number of characters shown of a long prompt, from its start and its end, where a pool adds its suffix."""


def data_lines(
    samples: Mapping[str, Sequence[Sample]],
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_prompt_length: int = 0,
) -> list[tuple[str, str]]:
    """Return the contents of each split, and the first prompts.

    Args:
        samples: by split; `train` has at least one.
        tokenizer: counts the tokens of prompts; with None they are not counted.
        max_prompt_length: tokens; longer prompts are truncated.
    """
    rows = []
    for split, members in samples.items():
        parts = [f"{len(members):,} samples"]
        if tokenizer is not None and members:
            prompts = [sample.prompt_or_input_text for sample in members]
            parts.append(prompt_lengths(prompts, tokenizer, max_prompt_length))
        without = sum(not sample.references for sample in members)
        if without:
            parts.append(f"{'all' if without == len(members) else f'{without:,}'} without references")
        rows.append((split, "; ".join(parts)))
    rows += [("prompt", _shown(sample.prompt_or_input_text)) for sample in samples["train"][:N_PROMPTS]]
    return rows


def prompt_lengths(prompts: Sequence[str], tokenizer: PreTrainedTokenizerBase, max_prompt_length: int) -> str:
    """Return how many prompts are longer than `max_prompt_length` tokens, and the length of the longest, in words."""
    counted = list(prompts[:N_COUNTED])
    lengths = [len(ids) for ids in tokenizer(counted, truncation=False, verbose=False)["input_ids"]]
    longer = sum(length > max_prompt_length for length in lengths)
    of = "" if len(counted) == len(prompts) else f" of the first {len(counted):,}"
    if not longer:
        return f"all prompts{of} within {max_prompt_length:,} tokens (up to {max(lengths):,})"
    return f"{longer:,} prompts{of} are longer than {max_prompt_length:,} tokens (up to {max(lengths):,}) and cut"


def _shown(prompt: str) -> str:
    if len(prompt) <= SHOWN_START + SHOWN_END:
        return repr(prompt)
    return f"{prompt[:SHOWN_START]!r} ... {prompt[-SHOWN_END:]!r}"
