"""Readers of dialogue files: rows with the utterances of a dialogue and their labels.

    row   {"dialog": ["Hi .", "Hello ."], "act": [1, 1], "emotion": [0, 4]}       DailyDialog's columns on the hub

DailyDialog's own files (Li et al. 2017) have one dialogue per line with `__eou__` after every utterance, and two more
files with one label per utterance. Files of (context, response) pairs hold dialogues that are already split.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rl4lms_like.core.errors import DataPoolError
from rl4lms_like.data_pools.published import Layout, first_file
from rl4lms_like.data_pools.splits import names_of, text_lines
from rl4lms_like.data_pools.tables import LocatedRow

END_OF_UTTERANCE = "__eou__"

_COMMA_BETWEEN = re.compile(r"(?<! ),|,(?! )")  # in tokenised text a comma has spaces on both sides


def utterances_of(text: str) -> list[str]:
    """Split a text at `__eou__`, which ends each utterance; utterances are not stripped, the last may lack the mark."""
    utterances = text.split(END_OF_UTTERANCE)
    return utterances if utterances[-1].strip() else utterances[:-1]


def _original(folder: Path, split: str) -> Iterator[LocatedRow] | None:
    for name in names_of(split):
        for place in (folder, folder / name):
            texts, acts, emotions = (
                first_file(place, f"dialogues_{kind}{name}.txt") for kind in ("", "act_", "emotion_")
            )
            if texts and acts and emotions:
                return _side_by_side(texts, acts, emotions)
    return None


def _side_by_side(texts: Path, acts: Path, emotions: Path) -> Iterator[LocatedRow]:
    files = (text_lines(file) for file in (texts, acts, emotions))
    for number, (text, act, emotion) in enumerate(zip_longest(*files, fillvalue=""), start=1):
        if not text.strip() and not act.strip() and not emotion.strip():
            continue
        row: dict[str, list[Any]] = {
            "dialog": utterances_of(text.rstrip("\r\n")),
            "act": _numbers(act, f"{acts}, line {number}"),
            "emotion": _numbers(emotion, f"{emotions}, line {number}"),
        }
        counts = {column: len(values) for column, values in row.items()}
        if len(set(counts.values())) > 1:
            raise DataPoolError(
                f"{texts}, line {number}: {counts['dialog']} utterances, but {counts['act']} acts and "
                f"{counts['emotion']} emotions in line {number} of the label files"
            )
        yield f"{texts}, line {number}", row


def _numbers(line: str, where: str) -> list[int]:
    try:
        return [int(number) for number in line.split()]
    except ValueError as error:
        raise DataPoolError(f"{where}: expected whole numbers, got {line.strip()[:60]!r}") from error


def _pairs(folder: Path, split: str) -> Iterator[LocatedRow] | None:
    file = first_file(folder, *(f"{name}.txt" for name in names_of(split)))
    return None if file is None else _cut_dialogues(file)


def _cut_dialogues(file: Path) -> Iterator[LocatedRow]:
    for number, line in enumerate(text_lines(file), start=1):
        text = line.rstrip("\r\n")
        if text.strip() and (number, text) != (1, "context,response"):
            context, response = _pair(text)
            yield f"{file}, line {number}", {"context": context, "response": response}


def _pair(line: str) -> tuple[str, str | None]:
    """Return context and response; the response is None if the line has no separator.

    Texts with a comma are quoted, but the quotes at the two ends of the line may be missing.
    """
    for divider, quote in (('","', '"'), ('",', '"'), (',"', '"')):
        context, found, response = line.partition(divider)
        if found:
            return context.strip(quote), response.strip(quote)
    comma = _COMMA_BETWEEN.search(line)
    return (line[: comma.start()], line[comma.end() :]) if comma else (line, None)


ORIGINAL = Layout(
    "dialogues_train.txt with dialogues_act_train.txt and dialogues_emotion_train.txt, ..._validation.txt, "
    "..._test.txt; also in folders train/, validation/, test/",
    _original,
)
PAIRS = Layout("{train,dev,test}.txt with lines `context,response`", _pairs)
