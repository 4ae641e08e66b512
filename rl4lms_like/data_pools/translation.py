"""Translation pairs: the text in one language is the prompt, its translation is the reference.

row          {"translation": {"en": "A dog.", "de": "Ein Hund."}}        or columns en and de
prompt       translate English to German: A dog.                         prompt_prefix, text, prompt_suffix
local files  train.en train.de val.en val.de test.en test.de             line n of one translates line n of the other
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from rl4lms_like.core.sample import Sample
from rl4lms_like.data_pools.base import TextGenPool, flattened
from rl4lms_like.data_pools.published import CONVERTED, HubTable, PublishedPool, Source, files_of
from rl4lms_like.data_pools.tables import LocatedRow, paired_lines, text_cell
from rl4lms_like.system.errors import DataPoolError
from rl4lms_like.system.numbers import Count

_FLICKR = "{0}_2016_flickr"  # Multi30k's name of the test split reported in papers


class _Translation(PublishedPool):
    """Pool of texts in one language as prompts, with their translations as references."""

    @classmethod
    def _of_pairs(
        cls, split: str, languages: tuple[str, str], *, prefix: str, suffix: str, source: Source, hub: HubTable
    ) -> TextGenPool:
        """Build the pool of a split; `languages` are those of prompts and of references."""
        prompt_language, reference_language = languages

        # Usual names of two parallel files: train.en, train.en-de.en (WMT, either order), train.source.
        endings = [(prompt_language, reference_language)]
        for pair in (f"{prompt_language}-{reference_language}", f"{reference_language}-{prompt_language}"):
            endings.append((f"{pair}.{prompt_language}", f"{pair}.{reference_language}"))
        endings.append(("source", "target"))

        # `{0}` stands for the split. In this order: a folder with both test sets of Multi30k has `test.en` first.
        layouts = []
        for name in ("{0}", _FLICKR):
            for prompt_ending, reference_ending in endings:
                files = (f"{name}.{prompt_ending}", f"{name}.{reference_ending}")
                layouts.append(files_of(partial(_pairs, languages), *files))

        def samples() -> Iterator[Sample]:
            for index, (where, row) in enumerate(cls.rows(split, source, hub, layouts)):
                prompt = f"{prefix}{_text(row, prompt_language, where)}{suffix}"
                yield Sample(f"{split}_{index}", prompt, [_text(row, reference_language, where)])

        return cls.of(samples(), split, cls.id, source.max_size)


class WMT(_Translation):
    """Translation pairs of any dataset with a column `translation`; WMT datasets by short name, e.g. `wmt16`."""

    id = "wmt16"

    @classmethod
    def prepare(
        cls,
        split: str,
        source_language: str,
        target_language: str,
        wmt_id: str = "wmt16",
        prompt_suffix: str = "",
        prompt_prefix: str = "",
        data_dir: str | None = None,
        hub_config: str | None = None,
        revision: str | None = None,
        max_size: Count | None = None,
    ) -> TextGenPool:
        """Build the pool of a split.

        Args:
            split: `train`, `val` or `test`.
            source_language: language code of the prompts, e.g. `en`.
            target_language: language code of the references, e.g. `de`.
            wmt_id: hub id of the dataset; `wmt16` means `wmt/wmt16`.
            prompt_suffix: text appended to the source text.
            prompt_prefix: text prepended to the source text.
            data_dir: a local copy: parallel text files `train.en`, `train.de`, `val.en`, ..., plain or gzip-compressed
                (also Multi30k's `test_2016_flickr.en.gz`), or tables with the column translation (see `published`).
            hub_config: configuration of the hub repository; default: source-target, else target-source.
            revision: branch, tag or commit of the hub repository.
            max_size: maximum number of samples per split.
        """
        path = f"wmt/{wmt_id}" if re.fullmatch(r"wmt\d+", wmt_id) else wmt_id
        source = Source(data_dir=data_dir, revision=revision, max_size=max_size)
        pool = partial(
            cls._of_pairs, split, (source_language, target_language), prefix=prompt_prefix, suffix=prompt_suffix
        )
        if hub_config:
            return pool(source=source, hub=HubTable(path, hub_config))

        # A repository has a pair in one of the two orders: WMT 16 has `de-en`, but not `en-de`. The second is tried
        # only if the first does not exist, which `datasets` reports as a ValueError, and not after other errors.
        try:
            return pool(source=source, hub=HubTable(path, f"{source_language}-{target_language}"))
        except DataPoolError as error:
            if data_dir is not None or not isinstance(error.__cause__, ValueError):
                raise
        return pool(source=source, hub=HubTable(path, f"{target_language}-{source_language}"))


class EnglishToGerman(_Translation):
    """Base class of pools with English prompts and German references; subclasses define the dataset."""

    tables: ClassVar[Mapping[str, HubTable]] = {}
    """Hub tables of splits that do not come from `hub`."""

    @classmethod
    @flattened
    def prepare(cls, split: str, prompt_suffix: str = "", prompt_prefix: str = "", *, source: Source) -> TextGenPool:
        """Build the pool of a split.

        Args:
            prompt_suffix: text appended to the English text.
            prompt_prefix: text prepended to the English text.
            data_dir: a local copy of all three splits, in the files of `WMT`, or `train.source` with `train.target`.
            hub_id: another hub repository for all three splits, with the column translation.
        """
        hub = cls.tables.get(split, cls.hub)
        assert hub is not None
        return cls._of_pairs(split, ("en", "de"), prefix=prompt_prefix, suffix=prompt_suffix, source=source, hub=hub)


class WMT14PreprocessedEnDe(EnglishToGerman):
    """English to German: the training data of WMT 14 as prepared by Ott et al. (2018)."""

    id = "wmt14_processed_en_de"
    hub = HubTable("stas/wmt14-en-de-pre-processed", "ende", CONVERTED)


class WMT16NewsOnlyDatasetEnDe(EnglishToGerman):
    """English to German: News Commentary for training, the news of WMT 16 for validation and test."""

    id = "wmt16newsonly"
    hub = HubTable("wmt/wmt16", "de-en")
    tables: ClassVar = {"train": HubTable("Helsinki-NLP/news_commentary", "de-en")}


class IWSLT2017EnDe(EnglishToGerman):
    """English to German: talks from the IWSLT 2017 evaluation campaign."""

    id = "iwslt2017en_de"
    hub = HubTable("IWSLT/iwslt2017", "iwslt2017-de-en", CONVERTED)


def _text(row: Mapping[str, Any], language: str, where: str) -> str:
    # Hub tables have one column `translation` with both languages; parallel files give one column for each.
    column = f"translation.{language}" if "translation" in row else language
    return text_cell(row, column, where)


def _pairs(languages: tuple[str, str], left: Path, right: Path) -> Iterator[LocatedRow]:
    for where, *texts in paired_lines(left, right):
        yield where, dict(zip(languages, texts, strict=True))
