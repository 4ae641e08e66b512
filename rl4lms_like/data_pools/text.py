"""Pool of plain texts: the beginning of a text is the prompt, the rest is the reference.

text       Once upon a time there was a cat. It slept.
prompt     Once upon a time                              prompt_words: 4
reference  there was a cat. It slept.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from rl4lms_like.core.errors import DataPoolError
from rl4lms_like.core.numbers import Count
from rl4lms_like.core.sample import Sample
from rl4lms_like.data_pools.base import TextGenPool, flattened
from rl4lms_like.data_pools.splits import DataFiles, Splitting, open_text

_WORD = re.compile(r"\S+")
_SENTENCE = re.compile(r"\S.*?[.!?][\"'”’)]*(?=\s|$)", re.DOTALL)


class TextPool(TextGenPool):
    """Texts of a plain-text file: one per line, or separated by a given string."""

    @classmethod
    @flattened
    def prepare(
        cls,
        split: str,
        *,
        files: DataFiles,
        separator: str | None = None,
        prompt_words: Count | None = None,
        prompt_sentences: Count | None = None,
        prompt_prefix: str = "",
        prompt_suffix: str = "",
        splitting: Splitting,
    ) -> TextGenPool:
        """Build the pool of a split.

        Args:
            split: `train`, `val` or `test`.
            separator: separator of texts, such as `<|endoftext|>`; default: the end of a line.
            prompt_words: number of words of each text in the prompt.
            prompt_sentences: number of sentences of each text in the prompt, instead of words. Default: the whole text.
            prompt_prefix: text prepended to every prompt.
            prompt_suffix: text appended to every prompt.
        """
        if prompt_words and prompt_sentences:
            raise DataPoolError("set prompt_words or prompt_sentences, not both")
        unit, n_units = (_SENTENCE, prompt_sentences) if prompt_sentences else (_WORD, prompt_words)
        file = files.file(split)
        samples = []
        for index, text in files.rows(_texts(file, separator), split, splitting):
            opening, rest = _cut(text, unit, n_units)
            prompt = f"{prompt_prefix}{opening}{prompt_suffix}"
            samples.append(Sample(f"{split}_{index}", prompt, [rest] if rest else []))
        return cls.of(samples, split, str(file))


def _texts(file: Path, separator: str | None) -> Iterator[str]:
    """Yield the texts of a file, stripped; empty texts are skipped."""
    with open_text(file, newline=None) as lines:
        parts = lines if separator is None else lines.read().split(separator)
        yield from filter(None, (part.strip() for part in parts))


def _cut(text: str, unit: re.Pattern[str], n_units: int | None) -> tuple[str, str]:
    """Split a text after its first `n_units` words or sentences; a shorter text is returned whole."""
    if n_units is None:
        return text, ""
    ends = [match.end() for match, _ in zip(unit.finditer(text), range(n_units), strict=False)]
    end = ends[-1] if len(ends) == n_units else len(text)
    return text[:end], text[end:].strip()
