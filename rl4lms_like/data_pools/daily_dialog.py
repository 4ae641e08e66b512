"""DailyDialog (Li et al. 2017): the next utterance of a dialogue.

    utterances   a  b  c  d                                 context_size: 2
    prompt       a<EOU>b <EOU>     b<EOU>c <EOU>            the last two, joined by `<EOU>`, then a space and `<EOU>`
    reference    c<EOU>            d<EOU>
    meta_data    {"emotion": [0..6], "intent": [1..4]}      of the utterance that is the reference

`<EOU>` is plain text, not a special token.

DailyDialog's own files have one dialogue per line with `__eou__` after every utterance, and two more files with one
label per utterance. Files of (context, response) pairs hold dialogues that are already split.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rl4lms_like.core.errors import DataPoolError
from rl4lms_like.core.numbers import Count
from rl4lms_like.core.sample import Sample
from rl4lms_like.core.wording import shown
from rl4lms_like.data_pools.base import TextGenPool, flattened
from rl4lms_like.data_pools.published import CONVERTED, HubTable, PublishedPool, Source, files_of
from rl4lms_like.data_pools.tables import LocatedRow, cell, text_cell, text_lines, texts_cell

END_OF_UTTERANCE = "__eou__"

_COMMA_BETWEEN = re.compile(r"(?<! ),|,(?! )")  # in tokenised text a comma has spaces on both sides


def utterances_of(text: str) -> list[str]:
    """Split a text at `__eou__`, which ends each utterance; utterances are not stripped, the last may lack the mark."""
    utterances = text.split(END_OF_UTTERANCE)
    return utterances if utterances[-1].strip() else utterances[:-1]


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


class DailyDialog(PublishedPool):
    """Last utterances of a dialogue as prompts, with the next one as the reference."""

    EOU_TOKEN = "<EOU>"
    """End-of-utterance mark."""

    id = "daily_dialog"
    hub = HubTable("li2017dailydialog/daily_dialog", "default", CONVERTED)
    layouts = (
        files_of(_side_by_side, *(f"dialogues_{kind}{{0}}.txt" for kind in ("", "act_", "emotion_"))),
        files_of(_side_by_side, *(f"{{0}}/dialogues_{kind}{{0}}.txt" for kind in ("", "act_", "emotion_"))),
        files_of(_cut_dialogues, "{0}.txt"),
    )

    @classmethod
    @flattened
    def prepare(cls, split: str, context_size: Count, *, source: Source) -> TextGenPool:
        """Build the pool of a split: one sample per utterance with `context_size` utterances before it.

        Args:
            context_size: number of utterances in a prompt.
            data_dir: a local copy: DailyDialog's own `dialogues_train.txt`, `dialogues_act_train.txt` and
                `dialogues_emotion_train.txt` (validation, test), directly there or in a subfolder per split; or
                `{train,dev,test}.txt` with lines `context,response` (no `meta_data`; a line without response has no
                reference); or tables with the columns dialog, act, emotion or context, response (see `published`).
        """
        samples: list[Sample] = []
        number, longest = 0, 0
        for where, row in cls.rows(split, source):
            utterances = list(_turns(row, where))
            longest = max(longest, len(utterances) - 1)
            earlier = [text for text, _ in utterances if text is not None]
            for turn, (text, meta_data) in enumerate(utterances):
                if turn >= context_size and (meta_data is not None or turn == len(utterances) - 1):
                    context = cls.EOU_TOKEN.join(earlier[turn - context_size : turn])
                    references = [] if text is None else [f"{text}{cls.EOU_TOKEN}"]
                    prompt = f"{context} {cls.EOU_TOKEN}"
                    samples.append(Sample(f"{split}_{number}", prompt, references, meta_data))
                number += 1
            if source.max_size is not None and len(samples) >= source.max_size:
                break
        if longest and not samples:
            raise DataPoolError(
                f"daily_dialog: no utterance of the split {split!r} has {context_size} before it, at most {longest}: "
                "reduce context_size"
            )
        return cls.of(samples, split, cls.id, source.max_size)


def _turns(row: Mapping[str, Any], where: str) -> Iterator[tuple[str | None, dict[str, Any] | None]]:
    """Yield utterances with metadata; of a context-response pair only the last is a reference, None if missing."""
    if "dialog" not in row and "context" in row:
        response = cell(row, "response", where)
        yield from ((text, None) for text in utterances_of(text_cell(row, "context", where)))
        yield (None if response is None else text_cell(row, "response", where)), None
        return
    texts = texts_cell(row, "dialog", where)
    emotions, acts = (_labels(row, name, len(texts), where) for name in ("emotion", "act"))
    for text, emotion, act in zip(texts, emotions, acts, strict=True):
        yield text, {"emotion": [emotion], "intent": [act]}


def _labels(row: Mapping[str, Any], name: str, count: int, where: str) -> Sequence[int]:
    labels = cell(row, name, where)
    if not isinstance(labels, list) or len(labels) != count:
        raise DataPoolError(
            f"{where}, column {name!r}: expected one number per utterance, {count}, got {shown(labels)}"
        )
    return labels
