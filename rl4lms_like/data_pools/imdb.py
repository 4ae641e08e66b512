"""IMDb film reviews (Maas et al. 2011): the first half of a review's words is the prompt.

    review       w1 w2 w3 w4 w5            split at single spaces; half of the words, rounded down
    prompt       w1 w2
    reference    w1 w2 w3 w4 w5  (imdb)    w3 w4 w5  (imdb_seq2seq)

    published    train [25000]             test [25000]
    shuffled     train [20000] val [5000]  test [5000]

The published training reviews are shuffled once for `train` and `val`, so these have no row in common. The order is
that of `datasets`' `shuffle(seed)` and therefore equals RL4LMs' order for the same seed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rl4lms_like.core.sample import Sample
from rl4lms_like.data_pools.base import TextGenPool, flattened
from rl4lms_like.data_pools.published import HubTable, PublishedPool, Source
from rl4lms_like.data_pools.splits import names_of
from rl4lms_like.data_pools.tables import LocatedRow, cell, open_text, text_cell
from rl4lms_like.system.errors import DataPoolError
from rl4lms_like.system.numbers import Fraction

TRAIN_FRACTION = 0.8
N_TEST = 5000
POSITIVE = 1

_LABELS = {"neg": 0, "pos": POSITIVE}


def _acl_imdb(folder: Path, split: str) -> Iterator[LocatedRow] | None:
    """Return the rows of the published folders, or None if they do not exist; a layout of `PublishedPool`."""
    for root in (folder, folder / "aclImdb"):
        if all((root / split / name).is_dir() for name in _LABELS):
            return _text_files(root / split)
    return None


def _text_files(folder: Path) -> Iterator[LocatedRow]:
    for name, label in _LABELS.items():
        for file in sorted((folder / name).glob("*.txt"), key=_numbers_first):
            with open_text(file) as lines:
                yield str(file), {"text": lines.read(), "label": label}


def _numbers_first(file: Path) -> tuple[int, str]:
    """Return a sort key by leading number: `12_7.txt` comes after `9_8.txt`."""
    number = re.match(r"\d+", file.name)
    return int(number[0]) if number else 0, file.name


class IMDB(PublishedPool):
    """First halves of film reviews of either sentiment as prompts, with the whole review as reference."""

    id = "imdb"
    hub = HubTable("stanfordnlp/imdb", "plain_text")
    layouts = (_acl_imdb,)

    @classmethod
    @flattened
    def prepare(cls, split: str, seed: int = 42, *, source: Source) -> TextGenPool:
        """Build the pool of a split.

        Args:
            seed: seed of the shuffle; the default is that of RL4LMs' configs.
            data_dir: a local copy: `aclImdb` (`train/pos/*.txt`, `train/neg/*.txt`, `test/pos/*.txt`, ...), or tables
                named `train` and `test` with the columns text, label (see `published`).
        """

        def samples() -> Iterator[Sample]:
            for index, (where, row) in enumerate(cls._shuffled(split, seed, source)):
                review = text_cell(row, "text", where)
                # The whole review is the reference, not its second half: as in RL4LMs.
                yield Sample(f"{split}_{index}", halves(review)[0], [review])

        return cls.of(samples(), split, cls.id, source.max_size)

    @classmethod
    def _shuffled(cls, split: str, seed: int, source: Source) -> list[LocatedRow]:
        """Return the rows of a split in shuffled order."""
        names_of(split)
        rows = list(cls.rows("test" if split == "test" else "train", source))

        # `datasets`' `shuffle(seed)` draws the same permutation. The rows are shuffled before they are divided, because
        # they are stored by label: all negative reviews, then all positive ones.
        order = np.random.default_rng(seed).permutation(len(rows))
        n_train = int(len(rows) * TRAIN_FRACTION)
        indices = {"train": order[:n_train], "val": order[n_train:], "test": order[:N_TEST]}[split]
        return [rows[index] for index in indices]


class IMDBForSeq2Seq(IMDB):
    """Film reviews for supervised training: positive ones in `train`, both sentiments in `val` and `test`."""

    id = "imdb_seq2seq"

    @classmethod
    @flattened
    def prepare(cls, split: str, positive_ratio: Fraction = 1.0, seed: int = 42, *, source: Source) -> TextGenPool:
        """Build the pool of a split.

        Args:
            positive_ratio: fraction of the positive training reviews to use.
            seed: seed of the shuffle; with the same seed the splits are those of `imdb`.
            data_dir: a local copy, as for `imdb`: `aclImdb` (`train/pos/*.txt`, `train/neg/*.txt`, `test/pos/*.txt`,
                ...), or tables named `train` and `test` with the columns text, label (see `published`).
        """
        samples = []
        for index, (where, row) in enumerate(cls._shuffled(split, seed, source)):
            if split != "train" or _label(row, where) == POSITIVE:
                review = text_cell(row, "text", where)
                opening, continuation = halves(review)
                samples.append(Sample(f"{split}_{index}", opening, [continuation], {"reference": review}))

        # `causal_perplexity` reads `meta_data["reference"]`. The fraction is of the positive reviews, in their order.
        if split == "train":
            samples = samples[: int(len(samples) * positive_ratio)]
        return cls.of(samples, split, cls.id, source.max_size)


def halves(review: str) -> tuple[str, str]:
    """Return the first half of a review's words, rounded down, and the rest; words are split at single spaces."""
    words = review.split(" ")
    middle = len(words) // 2
    return " ".join(words[:middle]), " ".join(words[middle:])


def _label(row: Mapping[str, Any], where: str) -> int:
    value = cell(row, "label", where)
    try:
        return int(value)
    except (TypeError, ValueError) as error:
        raise DataPoolError(f"{where}, column 'label': expected 0 or 1, got {value!r}") from error
