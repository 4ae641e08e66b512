"""Examples as text for `check`: which tokens are learned, and which are only read.

not learned  '<s><|im_start|>user⏎Why?<|im_end|>⏎<|im_start|>assistant⏎'
learned      'So.<|im_end|>'
not learned  '⏎'
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from transformers import PreTrainedTokenizerBase

from rl4lms_like.core.continuation import Continuations
from rl4lms_like.offline.pairs import Row
from rl4lms_like.training.components import shortened
from rl4lms_like.training.examples import NOT_LEARNED, Example

LEARNED = "learned"
READ = "not learned"


def example_lines(
    tokenizer: PreTrainedTokenizerBase, example: Example, *, is_encoder_decoder: bool
) -> list[tuple[str, str]]:
    """Return a supervised example as lines of name and text, one for each stretch of tokens learned or not learned."""
    ids, labels = example["input_ids"], example["labels"]

    # The input of a seq2seq model is never learned, and its response is a text of its own.
    if is_encoder_decoder:
        return [(f"  {READ}", _text(tokenizer, ids)), (f"  {LEARNED}", _text(tokenizer, labels))]
    return _stretches(tokenizer, ids, [label != NOT_LEARNED for label in labels])


def row_lines(
    tokenizer: PreTrainedTokenizerBase,
    row: Row,
    *,
    is_encoder_decoder: bool,
    has_language_model: bool,
    reads_labels: bool,
) -> list[tuple[str, str]]:
    """Return a row of a preference run as lines of name and text."""
    prompt = row["prompt"]
    second_prompt = row.get("rejected_prompt", prompt)

    # A reward model learns no tokens but a number: it reads both texts.
    if not has_language_model:
        chosen, rejected = row["responses"]
        return [
            ("  chosen", _text(tokenizer, [*prompt, *chosen])),
            ("  rejected", _text(tokenizer, [*second_prompt, *rejected])),
        ]

    # With labels, the second response is one to another prompt, which only estimates z0.
    names = (f"{LEARNED}: chosen", f"{LEARNED}: rejected")
    if reads_labels:
        label = "good" if row["is_desirable"] else "bad"
        names = (f"{LEARNED}: {label}", f"{READ}: to another prompt, for z0")
    lines = [(f"  {READ}", _text(tokenizer, prompt))]
    continuations = Continuations(tokenizer, follows_prompt=not is_encoder_decoder, skips_special_tokens=False)
    for name, response in zip(names, row["responses"], strict=True):
        lines.append((f"  {name}", shortened(continuations.text(prompt, response))))
    return lines


def _text(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return shortened(str(tokenizer.decode(ids)))


def _stretches(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], is_learned: Sequence[bool]
) -> list[tuple[str, str]]:
    """Return the texts of consecutive tokens that are learned, or are not."""
    continuations = Continuations(tokenizer, skips_special_tokens=False)
    lines = []
    start = 0
    for learned, stretch in groupby(is_learned):
        end = start + len(list(stretch))
        text = continuations.text(ids[:start], ids[start:end])
        lines.append((f"  {LEARNED if learned else READ}", shortened(text)))
        start = end
    return lines
