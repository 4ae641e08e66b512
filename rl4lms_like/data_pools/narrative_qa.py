r"""NarrativeQA (Kočiský et al. 2018) as prepared by UnifiedQA: questions about summaries of stories.

    line         Who is the hero? \n A tale of ...<tab>Tom's friend       one of several lines per question
    prompt       who is the hero? \n a tale of ...                        lower case; `\n` stays two characters
    references   toms friend                                              lower case, stripped; all answers

Apostrophes are removed from both. Lines are not parsed as CSV: quotes have no meaning, and `NA` is an answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from rl4lms_like.core.errors import DataPoolError
from rl4lms_like.core.numbers import Count
from rl4lms_like.core.sample import Sample
from rl4lms_like.core.wording import shown
from rl4lms_like.data_pools.columns import cell, text_cell
from rl4lms_like.data_pools.hub import downloaded
from rl4lms_like.data_pools.published import Layout, Published, PublishedPool, Source, first_file
from rl4lms_like.data_pools.splits import names_of, not_empty, text_lines
from rl4lms_like.data_pools.tables import LocatedRow

URL = "https://storage.googleapis.com/unifiedqa/data/narrativeqa/{name}.tsv"

_FILES = {"train": "train", "val": "dev", "test": "test"}
_SEPARATOR = r" \n "


class NarrativeQA(PublishedPool):
    """Questions with the summary of a story as prompts, with their answers as references."""

    @classmethod
    def prepare(
        cls,
        split: str,
        data_dir: str | None = None,
        hub_id: str | None = None,
        hub_config: str | None = None,
        revision: str | None = None,
        max_size: Count | None = None,
    ) -> NarrativeQA:
        """Build the pool of a split. By default UnifiedQA's files are downloaded once.

        Args:
            split: `train`, `val` or `test`.
            data_dir: a local copy: UnifiedQA's `{train,dev,test}.tsv` (no header, prompt and answer), or tables with
                the columns question, answers, document.summary.text (see `published`).
            hub_id: a hub repository with these columns, used instead, such as `deepmind/narrativeqa`, which also
                contains the stories (several GB).
            hub_config: configuration of the hub repository.
            revision: branch, tag or commit of the hub repository.
            max_size: maximum number of samples per split.

        Raises:
            DataPoolError: the data cannot be downloaded, loaded or found; the message lists the supported files.
            MissingExtraError: `datasets` is needed and not installed.
        """
        source = Source(data_dir, hub_id, hub_config, revision)
        published = Published("narrative_qa", "question, answers, document.summary.text", (UNIFIED_QA,))
        names_of(split)
        if source == Source():
            rows = _pairs(downloaded(URL.format(name=_FILES[split]), published.needed_by))
        else:
            rows = published.rows(split, source, None)
        answers: dict[str, list[str]] = {}
        for where, row in rows:
            prompt, found = _prompt_and_answers(row, where)
            answers.setdefault(prompt, []).extend(found)
        samples = [
            Sample(f"{split}_{index}", normalized(prompt), [normalized(text).strip() for text in texts])
            for index, (prompt, texts) in enumerate(islice(answers.items(), max_size))
        ]
        return cls(not_empty(samples, split, "narrative_qa"))


def normalized(text: str) -> str:
    """Convert a text to lower case and remove apostrophes."""
    return text.lower().replace("'", "")


def _prompt_and_answers(row: Mapping[str, Any], where: str) -> tuple[str, list[str]]:
    if "prompt" in row:
        return text_cell(row, "prompt", where), [text_cell(row, "answer", where)]
    question, answers = cell(row, "question", where), cell(row, "answers", where)
    question = (
        text_cell(question, "text", where) if isinstance(question, Mapping) else text_cell(row, "question", where)
    )
    if isinstance(answers, Mapping):  # `datasets` stores a list of dicts column by column
        answers = cell(answers, "text", where)
    if not isinstance(answers, list):
        raise DataPoolError(f"{where}, column 'answers': expected a list, got {shown(answers)}")
    texts = [
        text_cell(answer if isinstance(answer, Mapping) else {"text": answer}, "text", where) for answer in answers
    ]
    return f"{question}{_SEPARATOR}{text_cell(row, 'document.summary.text', where)}", texts


def _unified_qa(folder: Path, split: str) -> Iterator[LocatedRow] | None:
    file = first_file(folder, *(f"{name}.tsv" for name in names_of(split)))
    return None if file is None else _pairs(file)


def _pairs(file: Path) -> Iterator[LocatedRow]:
    for number, line in enumerate(text_lines(file), start=1):
        if not line.strip():
            continue
        columns = line.rstrip("\r\n").split("\t")
        where = f"{file}, line {number}"
        if len(columns) != 2:
            raise DataPoolError(f"{where}: expected prompt and answer with a tab between, got {len(columns)} columns")
        yield where, dict(zip(("prompt", "answer"), columns, strict=True))


UNIFIED_QA = Layout("train.tsv, dev.tsv, test.tsv of UnifiedQA: prompt, tab, answer", _unified_qa)
