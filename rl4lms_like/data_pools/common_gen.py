"""CommonGen (Lin et al. 2020): sentences that use all concepts of a set.

row        {"concepts": [field, look, stand], "target": "The player stood ..."}     one of several rows per set
prompt     generate a sentence with: field look stand.                 prefix, separator, end token
train      one sample per pair of set and sentence
val, test  one sample per set, with all its sentences as references
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rl4lms_like.core.sample import Sample
from rl4lms_like.data_pools.base import TextGenPool, flattened
from rl4lms_like.data_pools.published import CONVERTED, HubTable, PublishedPool, Source, files_of
from rl4lms_like.data_pools.tables import LocatedRow, json_line_rows, paired_lines, text_cell, texts_cell
from rl4lms_like.system.errors import DataPoolError
from rl4lms_like.system.wording import shown


def _scenes(file: Path) -> Iterator[LocatedRow]:
    """Yield the rows of a scene file; `field_N#look_V` are the concepts field (noun) and look (verb)."""
    for where, row in json_line_rows(file):
        marked = text_cell(row, "concept_set", where).split("#")
        concepts = [concept.rpartition("_")[0] or concept for concept in marked]
        yield where, {"concepts": concepts, "references": texts_cell(row, "scene", where), "target": None}


def _parallel(concepts: Path, sentences: Path) -> Iterator[LocatedRow]:
    for where, words, sentence in paired_lines(concepts, sentences):
        yield where, {"concepts": words.split(), "target": sentence}


class CommonGen(PublishedPool):
    """Sets of concepts as prompts, with sentences that use them as references."""

    id = "commongen"
    hub = HubTable("GEM/common_gen", "default", CONVERTED)
    layouts = (
        files_of(_scenes, "commongen.{0}.jsonl"),
        files_of(_parallel, "commongen.{0}.src_alpha.txt", "commongen.{0}.tgt.txt"),
        files_of(_parallel, "{0}.src_alpha.txt", "{0}.tgt.txt"),
    )

    @classmethod
    @flattened
    def prepare(
        cls,
        split: str,
        concept_separator_token: str = " ",
        concept_end_token: str = " ",
        prefix: str = "summarize: ",
        group_train: bool = False,
        *,
        source: Source,
    ) -> TextGenPool:
        """Build the pool of a split.

        `meta_data` holds the `concepts`. A set without sentences (published test split) has no references.

        Args:
            concept_separator_token: text between concepts.
            concept_end_token: text after the last concept.
            prefix: text before the first concept.
            group_train: use one sample per set in the training split too, with all its sentences as references.
            data_dir: a local copy: `commongen.{train,dev,test}.jsonl` (concept_set, scene), or
                `commongen.{train,dev,test}.src_alpha.txt` with `.tgt.txt`, or tables with the columns concepts,
                target or references (see `published`).
            hub_id: another hub repository with these columns, such as `allenai/common_gen`.
        """
        rows = cls.rows(split, source)

        # Metrics compare with all sentences of a set. Training has them one by one, as RL4LMs: a set with more
        # sentences is drawn more often.
        pairs = _by_set(rows) if split != "train" or group_train else _one_by_one(rows)

        def samples() -> Iterator[Sample]:
            for index, (concepts, sentences) in enumerate(pairs):
                prompt = f"{prefix}{concept_separator_token.join(concepts)}{concept_end_token}"
                yield Sample(f"{split}_{index}", prompt, sentences, {"concepts": concepts})

        return cls.of(samples(), split, cls.id, source.max_size)


def _one_by_one(rows: Iterator[LocatedRow]) -> Iterator[tuple[list[str], list[str]]]:
    """Yield each sentence with its set; a set without sentences occurs once."""
    for where, row in rows:
        concepts, sentences = _pair(row, where)
        for sentence in sentences:
            yield concepts, [sentence]
        if not sentences:
            yield concepts, []


def _by_set(rows: Iterator[LocatedRow]) -> Iterator[tuple[list[str], list[str]]]:
    """Yield the sets in order of first occurrence, each with its sentences in order.

    A row with `references` is a complete set: the published data has separate sets for `style` as a verb and as a noun.
    """
    sets: dict[tuple[str, ...], tuple[list[str], list[str]]] = {}
    for where, row in rows:
        concepts, sentences = _pair(row, where)
        # A complete set has the key of its row. Others are found by their concepts, whose order differs between rows.
        key = (where,) if row.get("references") else tuple(sorted(concepts))
        _, sentences_of_set = sets.setdefault(key, (concepts, []))
        sentences_of_set += sentences
    yield from sets.values()


def _pair(row: Mapping[str, Any], where: str) -> tuple[list[str], list[str]]:
    """Return the concepts and sentences of a row; `references`, if present, include `target`."""
    concepts = texts_cell(row, "concepts", where)
    if not concepts:
        raise DataPoolError(f"{where}, column 'concepts': expected at least one concept, got {shown(row['concepts'])}")

    # The published test split has empty sentences, which are no references.
    column = "references" if row.get("references") else "target"
    return concepts, [sentence for sentence in texts_cell(row, column, where) if sentence.strip()]
