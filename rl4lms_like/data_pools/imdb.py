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

from rl4lms_like.core.errors import DataPoolError
from rl4lms_like.core.numbers import Count, Share
from rl4lms_like.core.sample import Sample
from rl4lms_like.data_pools.columns import cell, text_cell
from rl4lms_like.data_pools.hub import HubTable
from rl4lms_like.data_pools.published import Layout, Published, PublishedPool, Source
from rl4lms_like.data_pools.splits import names_of, not_empty, open_text
from rl4lms_like.data_pools.tables import LocatedRow

HUB = HubTable("stanfordnlp/imdb", "plain_text")
TRAIN_SHARE = 0.8
N_TEST = 5000
POSITIVE = 1

_LABELS = {"neg": 0, "pos": POSITIVE}


class IMDB(PublishedPool):
    """First halves of film reviews of either sentiment as prompts, with the whole review as reference."""

    @classmethod
    def prepare(
        cls,
        split: str,
        seed: int = 42,
        data_dir: str | None = None,
        hub_id: str | None = None,
        hub_config: str | None = None,
        revision: str | None = None,
        max_size: Count | None = None,
    ) -> IMDB:
        """Build the pool of a split.

        Args:
            split: `train`, `val` or `test`.
            seed: seed of the shuffle; the default is that of RL4LMs' configs.
            data_dir: a local copy: `aclImdb` (`train/pos/*.txt`, `train/neg/*.txt`, `test/pos/*.txt`, ...), or tables
                named `train` and `test` with the columns text, label (see `published`).
            hub_id: another hub repository with these columns.
            hub_config: configuration of the hub repository.
            revision: branch, tag or commit of the hub repository.
            max_size: maximum number of samples per split.

        Raises:
            DataPoolError: the reviews cannot be loaded or found; the message lists the supported files.
            MissingExtraError: `datasets` is needed and not installed.
        """
        source = Source(data_dir, hub_id, hub_config, revision)
        samples = []
        for index, (where, row) in enumerate(_reviews("imdb", split, seed, source)[:max_size]):
            review = text_cell(row, "text", where)
            samples.append(Sample(f"{split}_{index}", halves(review)[0], [review]))
        return cls(not_empty(samples, split, "imdb"))


class IMDBForSeq2Seq(PublishedPool):
    """Film reviews for supervised training: positive ones in `train`, both sentiments in `val` and `test`."""

    @classmethod
    def prepare(
        cls,
        split: str,
        positive_ratio: Share = 1.0,
        seed: int = 42,
        data_dir: str | None = None,
        hub_id: str | None = None,
        hub_config: str | None = None,
        revision: str | None = None,
        max_size: Count | None = None,
    ) -> IMDBForSeq2Seq:
        """Build the pool of a split.

        Args:
            split: `train`, `val` or `test`.
            positive_ratio: fraction of the positive training reviews to use.
            seed: seed of the shuffle; with the same seed the splits are those of `imdb`.
            data_dir: same as for `imdb`.
            hub_id: another hub repository with the columns text, label.
            hub_config: configuration of the hub repository.
            revision: branch, tag or commit of the hub repository.
            max_size: maximum number of samples per split.

        Raises:
            DataPoolError: the reviews cannot be loaded or found; the message lists the supported files.
            MissingExtraError: `datasets` is needed and not installed.
        """
        source = Source(data_dir, hub_id, hub_config, revision)
        samples = []
        for index, (where, row) in enumerate(_reviews("imdb_seq2seq", split, seed, source)):
            if split == "train" and _label(row, where) != POSITIVE:
                continue
            review = text_cell(row, "text", where)
            opening, rest = halves(review)
            samples.append(Sample(f"{split}_{index}", opening, [rest], {"reference": review}))
        if split == "train":
            samples = samples[: int(len(samples) * positive_ratio)]
        return cls(not_empty(samples[:max_size], split, "imdb_seq2seq"))


def halves(review: str) -> tuple[str, str]:
    """Return the first half of a review's words, rounded down, and the rest; words are split at single spaces."""
    words = review.split(" ")
    middle = len(words) // 2
    return " ".join(words[:middle]), " ".join(words[middle:])


def _reviews(pool: str, split: str, seed: int, source: Source) -> list[LocatedRow]:
    names_of(split)
    rows = list(Published(pool, "text, label", (ACL_IMDB,)).rows("test" if split == "test" else "train", source, HUB))
    order = np.random.default_rng(seed).permutation(len(rows))
    n_train = int(len(rows) * TRAIN_SHARE)
    chosen = {"train": order[:n_train], "val": order[n_train:], "test": order[:N_TEST]}[split]
    return [rows[index] for index in chosen]


def _label(row: Mapping[str, Any], where: str) -> int:
    value = cell(row, "label", where)
    try:
        return int(value)
    except (TypeError, ValueError) as error:
        raise DataPoolError(f"{where}, column 'label': expected 0 or 1, got {value!r}") from error


def _acl_imdb(folder: Path, split: str) -> Iterator[LocatedRow] | None:
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
    """Sort key by leading number: `12_7.txt` comes after `9_8.txt`."""
    number = re.match(r"\d+", file.name)
    return int(number[0]) if number else 0, file.name


ACL_IMDB = Layout("train/pos/*.txt, train/neg/*.txt, test/pos/*.txt, test/neg/*.txt (aclImdb)", _acl_imdb)
