"""Pairs of a text and its references from real data, the same ones at every call.

concepts      a person's sentence, and those of others about the same concepts (CommonGen)
captions      an image's caption in English or German with words left out and swapped, and the caption (Multi30k)
replies       what was said, and what another said elsewhere: little in common (DailyDialog)
summaries     the first three sentences of an article, and its highlights, one a line (CNN/Daily Mail)
"""

from __future__ import annotations

import csv
import gzip
import json
import random
from collections.abc import Iterator
from itertools import chain, islice, pairwise
from pathlib import Path

Pair = tuple[str, list[str]]

_SHARES = {"summaries": 0, "replies": 0.2, "concepts": 0.25}
"""Of the pairs; there are only six summaries, which all take part, and captions fill the rest."""


def real_pairs(data: Path, n: int) -> list[Pair]:
    """`n` pairs, at most about 40,000.

    Args:
        data: the folder with `commongen`, `multi30k`, `dailydialog` and `cnndm_sample`.
        n: how many.
    """
    pairs = list(summaries(data))[:n]
    pairs += islice(replies(data), int(n * _SHARES["replies"]))
    pairs += islice(concepts(data), int(n * _SHARES["concepts"]))
    pairs += islice(captions(data), n - len(pairs))
    random.Random(0).shuffle(pairs)
    return pairs


def concepts(data: Path) -> Iterator[Pair]:
    for split in ("dev", "test"):
        for line in (data / "commongen" / f"commongen.{split}.jsonl").read_text(encoding="utf-8").splitlines():
            *others, last = json.loads(line)["scene"]
            if others:
                yield last, others


def captions(data: Path) -> Iterator[Pair]:
    rng = random.Random(0)
    for split in ("val", "test_2016_flickr", "train"):
        texts = [_lines(data / "multi30k" / f"{split}.{language}.gz") for language in ("en", "de")]
        for caption in chain.from_iterable(zip(*texts, strict=True)):
            yield _edited(caption, rng), [caption]


def replies(data: Path) -> Iterator[Pair]:
    with (data / "dailydialog" / "dev.txt").open(encoding="utf-8", newline="") as lines:
        message = [row[1] for row in csv.reader(lines) if len(row) == 2]
    for one, other in pairwise(message):
        yield one, [other]


def summaries(data: Path) -> Iterator[Pair]:
    for article in json.loads((data / "cnndm_sample" / "cnndm_sample.train.0.json").read_text(encoding="utf-8")):
        first, highlights = ("\n".join(map(" ".join, article[part][:n])) for part, n in (("src", 3), ("tgt", None)))
        yield first, [highlights]


def _edited(text: str, rng: random.Random) -> str:
    words = [word for word in text.split() if rng.random() > 0.15]
    for index in range(len(words) - 1):
        if rng.random() < 0.1:
            words[index], words[index + 1] = words[index + 1], words[index]
    return " ".join(words)


def _lines(path: Path) -> list[str]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [line.strip() for line in lines]
