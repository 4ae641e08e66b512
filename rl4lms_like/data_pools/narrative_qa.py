r"""NarrativeQA (Kočiský et al. 2018) as prepared by UnifiedQA: questions about summaries of stories.

    line         Who is the hero? \n A tale of ...<tab>Tom's friend       one of several lines per question
    prompt       who is the hero? \n a tale of ...                        lower case; `\n` stays two characters
    references   toms friend                                              lower case, stripped; all answers

Apostrophes are removed from both. Lines are not parsed as CSV: quotes have no meaning, and `NA` is an answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rl4lms_like.core.sample import Sample
from rl4lms_like.data_pools.base import TextGenPool, flattened
from rl4lms_like.data_pools.published import PublishedPool, Source, downloaded, files_of
from rl4lms_like.data_pools.splits import names_of
from rl4lms_like.data_pools.tables import LocatedRow, cell, text_cell, text_lines
from rl4lms_like.system.errors import DataPoolError
from rl4lms_like.system.wording import shown

URL = "https://storage.googleapis.com/unifiedqa/data/narrativeqa/{name}.tsv"

_FILES = {"train": "train", "val": "dev", "test": "test"}
_SEPARATOR = r" \n "


def _pairs(file: Path) -> Iterator[LocatedRow]:
    for number, line in enumerate(text_lines(file), start=1):
        if not line.strip():
            continue

        # Not `rstrip`: an answer may be empty, and its tab must stay.
        columns = line.rstrip("\r\n").split("\t")
        where = f"{file}, line {number}"
        if len(columns) != 2:
            raise DataPoolError(f"{where}: expected prompt and answer with a tab between, got {len(columns)} columns")
        yield where, dict(zip(("prompt", "answer"), columns, strict=True))


class NarrativeQA(PublishedPool):
    """Questions with the summary of a story as prompts, with their answers as references."""

    id = "narrative_qa"
    layouts = (files_of(_pairs, "{0}.tsv"),)

    @classmethod
    @flattened
    def prepare(cls, split: str, *, source: Source) -> TextGenPool:
        """Build the pool of a split. By default UnifiedQA's files are downloaded once.

        Args:
            data_dir: a local copy: UnifiedQA's `{train,dev,test}.tsv` (no header, prompt and answer), or tables with
                the columns question, answers, document.summary.text (see `published`).
            hub_id: a hub repository with these columns, used instead, such as `deepmind/narrativeqa`, which also
                contains the stories (several GB).
        """
        names_of(split)
        if source.is_default:
            rows = _pairs(downloaded(URL.format(name=_FILES[split]), cls.needed_by()))
        else:
            rows = cls.rows(split, source)

        # All answers to a question before the first sample: its lines need not follow each other.
        answers: dict[str, list[str]] = {}
        for where, row in rows:
            prompt, answers_of_row = _prompt_and_answers(row, where)
            answers.setdefault(prompt, []).extend(answers_of_row)

        samples = []
        for index, (prompt, texts) in enumerate(answers.items()):
            references = [normalized(text).strip() for text in texts]
            samples.append(Sample(f"{split}_{index}", normalized(prompt), references))
        return cls.of(samples, split, cls.id, source.max_size)


def normalized(text: str) -> str:
    """Convert a text to lower case and remove apostrophes."""
    return text.lower().replace("'", "")


def _prompt_and_answers(row: Mapping[str, Any], where: str) -> tuple[str, list[str]]:
    """Return the prompt and the answers of a row of UnifiedQA's files or of the hub's table."""
    if "prompt" in row:
        return text_cell(row, "prompt", where), [text_cell(row, "answer", where)]

    # Question and answers are texts or objects with `text`; `datasets` stores a list of objects column by column.
    question_column = "question.text" if isinstance(row.get("question"), Mapping) else "question"
    answers_column = "answers.text" if isinstance(row.get("answers"), Mapping) else "answers"
    question = text_cell(row, question_column, where)
    answers = cell(row, answers_column, where)
    if not isinstance(answers, list):
        raise DataPoolError(f"{where}, column 'answers': expected a list, got {shown(answers)}")

    texts = []
    for answer in answers:
        answer_row = answer if isinstance(answer, Mapping) else {"text": answer}
        texts.append(text_cell(answer_row, "text", where))
    return f"{question}{_SEPARATOR}{text_cell(row, 'document.summary.text', where)}", texts
