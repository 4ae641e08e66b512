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
from typing import Any, NamedTuple

from rl4lms_like.core.sample import Sample
from rl4lms_like.data_pools.base import TextGenPool, flattened
from rl4lms_like.data_pools.published import CONVERTED, HubTable, PublishedPool, Source, files_of
from rl4lms_like.data_pools.tables import LocatedRow, cell, text_cell, text_lines, texts_cell
from rl4lms_like.system.errors import DataPoolError
from rl4lms_like.system.numbers import Count
from rl4lms_like.system.wording import shown

END_OF_UTTERANCE = "__eou__"

_COMMA_BETWEEN = re.compile(r"(?<! ),|,(?! )")  # in tokenised text a comma has spaces on both sides


def utterances_of(text: str) -> list[str]:
    """Split a text at `__eou__`, which ends each utterance; utterances are not stripped, the last may lack the mark."""
    utterances = text.split(END_OF_UTTERANCE)
    return utterances if utterances[-1].strip() else utterances[:-1]


def _side_by_side(texts: Path, acts: Path, emotions: Path) -> Iterator[LocatedRow]:
    """Yield the dialogues of DailyDialog's own files: line n of each of the three is of dialogue n."""
    files = (text_lines(file) for file in (texts, acts, emotions))
    for number, (text, act, emotion) in enumerate(zip_longest(*files, fillvalue=""), start=1):
        if not text.strip() and not act.strip() and not emotion.strip():
            continue

        # One label for each utterance. A file that is shorter gives empty lines, whose counts differ below.
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
    """Yield the (context, response) pairs of a file, which is not CSV: quotes are incomplete."""
    for number, line in enumerate(text_lines(file), start=1):
        text = line.rstrip("\r\n")
        is_header = number == 1 and text == "context,response"
        if text.strip() and not is_header:
            context, response = _pair(text)
            yield f"{file}, line {number}", {"context": context, "response": response}


def _pair(line: str) -> tuple[str, str | None]:
    """Return context and response; the response is None if the line has no separator.

    Texts with a comma are quoted, but the quotes at the two ends of the line may be missing.
    """
    # A comma next to a quote is the separator: both texts are quoted, or one of them.
    for separator in ('","', '",', ',"'):
        context, separator_in_line, response = line.partition(separator)
        if separator_in_line:
            return context.strip('"'), response.strip('"')

    # Without quotes, it is the comma that is not part of the tokenised text.
    comma = _COMMA_BETWEEN.search(line)
    if comma is None:
        return line, None
    return line[: comma.start()], line[comma.end() :]


class DailyDialog(PublishedPool):
    """Last utterances of a dialogue as prompts, with the next one as the reference."""

    EOU_TOKEN = "<EOU>"
    """End-of-utterance mark."""

    id = "daily_dialog"
    hub = HubTable("li2017dailydialog/daily_dialog", "default", CONVERTED)
    layouts = (
        files_of(_side_by_side, "dialogues_{0}.txt", "dialogues_act_{0}.txt", "dialogues_emotion_{0}.txt"),
        files_of(_side_by_side, "{0}/dialogues_{0}.txt", "{0}/dialogues_act_{0}.txt", "{0}/dialogues_emotion_{0}.txt"),
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
        n_utterances = 0
        longest_context = 0
        for where, row in cls.rows(split, source):
            turns = list(_turns(row, where))
            longest_context = max(longest_context, len(turns) - 1)
            for index in range(context_size, len(turns)):
                turn = turns[index]
                if not turn.is_reference:
                    continue
                context = cls.EOU_TOKEN.join(str(earlier.text) for earlier in turns[index - context_size : index])
                references = [] if turn.text is None else [f"{turn.text}{cls.EOU_TOKEN}"]
                sample_id = f"{split}_{n_utterances + index}"  # the number of the utterance in the split
                samples.append(Sample(sample_id, f"{context} {cls.EOU_TOKEN}", references, turn.labels))
            n_utterances += len(turns)
            if source.max_size is not None and len(samples) >= source.max_size:
                break

        # Without this check the message would be that of an empty file.
        if longest_context and not samples:
            raise DataPoolError(
                f"daily_dialog: no utterance of the split {split!r} has {context_size} before it, at most "
                f"{longest_context}: reduce context_size"
            )
        return cls.of(samples, split, cls.id, source.max_size)


class _Turn(NamedTuple):
    """Utterance of a dialogue; the text is None for a missing response."""

    text: str | None
    is_reference: bool
    labels: dict[str, Any] | None = None


def _turns(row: Mapping[str, Any], where: str) -> Iterator[_Turn]:
    """Yield the utterances of a dialogue, or of a context and its response.

    Dialogues that are already split repeat their utterances in several contexts: only the response is a reference.
    """
    if "dialog" not in row and "context" in row:
        response = cell(row, "response", where)
        for text in utterances_of(text_cell(row, "context", where)):
            yield _Turn(text, is_reference=False)
        yield _Turn(None if response is None else text_cell(row, "response", where), is_reference=True)
        return

    # Labels of one number in a list: rewards and metrics for DailyDialog read them in RL4LMs' form.
    texts = texts_cell(row, "dialog", where)
    emotions = _labels(row, "emotion", len(texts), where)
    acts = _labels(row, "act", len(texts), where)
    for text, emotion, act in zip(texts, emotions, acts, strict=True):
        yield _Turn(text, is_reference=True, labels={"emotion": [emotion], "intent": [act]})


def _labels(row: Mapping[str, Any], name: str, count: int, where: str) -> Sequence[int]:
    labels = cell(row, name, where)
    if not isinstance(labels, list) or len(labels) != count:
        raise DataPoolError(
            f"{where}, column {name!r}: expected one number per utterance, {count}, got {shown(labels)}"
        )
    return labels
