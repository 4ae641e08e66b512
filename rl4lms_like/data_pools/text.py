"""Pool of plain texts: the beginning of a text is the prompt, the rest is the reference.

text       Once upon a time there was a cat. It slept.
prompt     Once upon a time                              prompt_words: 4
reference  there was a cat. It slept.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from rl4lms_like.core.errors import DataPoolError
from rl4lms_like.core.numbers import Count
from rl4lms_like.core.sample import Sample
from rl4lms_like.data_pools.base import TextGenPool
from rl4lms_like.data_pools.splits import file_of, not_empty, open_text, rows_of_split

_WORD = re.compile(r"\S+")
_SENTENCE = re.compile(r"\S.*?[.!?][\"'”’)]*(?=\s|$)", re.DOTALL)


class TextPool(TextGenPool):
    """Texts of a plain-text file: one per line, or separated by a given string."""

    @classmethod
    def prepare(
        cls,
        split: str,
        path: str | None = None,
        data_files: dict[str, str] | None = None,
        separator: str | None = None,
        prompt_words: Count | None = None,
        prompt_sentences: Count | None = None,
        prompt_prefix: str = "",
        prompt_suffix: str = "",
        max_size: Count | None = None,
        split_ratios: Sequence[float] = (0.8, 0.1, 0.1),
        seed: int = 0,
    ) -> TextPool:
        """Build the pool of a split.

        Args:
            split: `train`, `val` or `test`.
            path: one file for all splits, divided by `split_ratios`.
            data_files: one file for each split.
            separator: separator of texts, such as `<|endoftext|>`; default: the end of a line.
            prompt_words: number of words of each text in the prompt.
            prompt_sentences: number of sentences of each text in the prompt, instead of words. Default: the whole text.
            prompt_prefix: text prepended to every prompt.
            prompt_suffix: text appended to every prompt.
            max_size: maximum number of samples per split.
            split_ratios: fractions of train, val and test if they come from one file.
            seed: seed of the shuffle before splitting.

        Raises:
            DataPoolError: the file cannot be read, or contains no text for the split.
        """
        if prompt_words and prompt_sentences:
            raise DataPoolError("set prompt_words or prompt_sentences, not both")
        unit, n_units = (_SENTENCE, prompt_sentences) if prompt_sentences else (_WORD, prompt_words)
        file, owned = file_of(split, path, data_files)
        texts = _texts(file, separator)
        rows = rows_of_split(texts, split, owned=owned, split_ratios=split_ratios, seed=seed, max_size=max_size)
        samples = []
        for index, text in rows:
            opening, rest = _cut(text, unit, n_units)
            prompt = f"{prompt_prefix}{opening}{prompt_suffix}"
            samples.append(Sample(f"{split}_{index}", prompt, [rest] if rest else []))
        return cls(not_empty(samples, split, str(file)))


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
