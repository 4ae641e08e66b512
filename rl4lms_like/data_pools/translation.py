"""Translation pairs: the text in one language is the prompt, its translation is the reference.

row          {"translation": {"en": "A dog.", "de": "Ein Hund."}}        or columns en and de
prompt       translate English to German: A dog.                         prompt_prefix, text, prompt_suffix
local files  train.en train.de val.en val.de test.en test.de             line n of one translates line n of the other
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from rl4lms_like.core.errors import DataPoolError
from rl4lms_like.core.numbers import Count
from rl4lms_like.core.sample import Sample
from rl4lms_like.data_pools.base import TextGenPool
from rl4lms_like.data_pools.columns import text_cell
from rl4lms_like.data_pools.hub import CONVERTED, HubTable
from rl4lms_like.data_pools.published import Layout, Published, PublishedPool, Source, first_file
from rl4lms_like.data_pools.splits import SPLITS, names_of, not_empty
from rl4lms_like.data_pools.tables import LocatedRow, paired_lines

PREPROCESSED_WMT14 = HubTable("stas/wmt14-en-de-pre-processed", "ende", CONVERTED)
NEWS_COMMENTARY = HubTable("Helsinki-NLP/news_commentary", "de-en")
WMT16 = HubTable("wmt/wmt16", "de-en")
IWSLT2017 = HubTable("IWSLT/iwslt2017", "iwslt2017-de-en", CONVERTED)

_FLICKR_TEST = "test_2016_flickr"  # Multi30k's name of the test split reported in papers


@dataclass(frozen=True)
class _Pair:
    """Pool id, languages, and the text around the source text."""

    pool: str
    source: str
    target: str
    prefix: str = ""
    suffix: str = ""

    def samples(self, split: str, source: Source, default: HubTable, max_size: int | None) -> list[Sample]:
        languages = f"{self.source}, {self.target}"
        parallel = Layout(
            f"{{train,val,test}}.{self.source} with {{train,val,test}}.{self.target}, also .gz, valid, validation or "
            f"dev for val, {_FLICKR_TEST} for test, .{self.source}-{self.target} before the ending, or .source and "
            ".target as endings",
            partial(_parallel, languages=(self.source, self.target)),
        )
        published = Published(self.pool, f"translation (with {languages}) or {languages}", (parallel,))
        samples = []
        for index, (where, row) in enumerate(published.rows(split, source, default)):
            if index == max_size:
                break
            prompt = f"{self.prefix}{_text(row, self.source, where)}{self.suffix}"
            samples.append(Sample(f"{split}_{index}", prompt, [_text(row, self.target, where)]))
        return not_empty(samples, split, self.pool)


class WMT(PublishedPool):
    """Translation pairs of any dataset with a column `translation`; WMT datasets by short name, e.g. `wmt16`."""

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
    ) -> WMT:
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

        Raises:
            DataPoolError: the data cannot be loaded or found; the message lists the supported files.
            MissingExtraError: `datasets` is needed and not installed.
        """
        path = f"wmt/{wmt_id}" if re.fullmatch(r"wmt\d+", wmt_id) else wmt_id
        pair = _Pair("wmt16", source_language, target_language, prompt_prefix, prompt_suffix)
        source = Source(data_dir, None, None, revision)
        configs = [hub_config] if hub_config else [f"{pair.source}-{pair.target}", f"{pair.target}-{pair.source}"]
        for config in configs[:-1]:
            try:
                return cls(pair.samples(split, source, HubTable(path, config), max_size))
            except DataPoolError as error:
                if data_dir is not None or not isinstance(error.__cause__, ValueError):
                    raise  # the other configuration is tried only if this one does not exist (a ValueError)
        return cls(pair.samples(split, source, HubTable(path, configs[-1]), max_size))


class EnglishToGerman(PublishedPool):
    """Base class of pools with English prompts and German references; subclasses define the dataset."""

    pool: ClassVar[str]
    """Id of the pool."""
    tables: ClassVar[Mapping[str, HubTable]]
    """Hub table of each split."""

    @classmethod
    def prepare(
        cls,
        split: str,
        prompt_suffix: str = "",
        prompt_prefix: str = "",
        data_dir: str | None = None,
        hub_id: str | None = None,
        hub_config: str | None = None,
        revision: str | None = None,
        max_size: Count | None = None,
    ) -> TextGenPool:
        """Build the pool of a split.

        Args:
            split: `train`, `val` or `test`.
            prompt_suffix: text appended to the English text.
            prompt_prefix: text prepended to the English text.
            data_dir: a local copy of all three splits, in the files of `WMT`, or `train.source` with `train.target`.
            hub_id: another hub repository for all three splits, with the column translation.
            hub_config: configuration of the hub repository.
            revision: branch, tag or commit of the hub repository.
            max_size: maximum number of samples per split.

        Raises:
            DataPoolError: the data cannot be loaded or found; the message lists the supported files.
            MissingExtraError: `datasets` is needed and not installed.
        """
        names_of(split)
        pair = _Pair(cls.pool, "en", "de", prompt_prefix, prompt_suffix)
        source = Source(data_dir, hub_id, hub_config, revision)
        return cls(pair.samples(split, source, cls.tables[split], max_size))


class WMT14PreprocessedEnDe(EnglishToGerman):
    """English to German: the training data of WMT 14 as prepared by Ott et al. (2018)."""

    pool = "wmt14_processed_en_de"
    tables = dict.fromkeys(SPLITS, PREPROCESSED_WMT14)


class WMT16NewsOnlyDatasetEnDe(EnglishToGerman):
    """English to German: News Commentary for training, the news of WMT 16 for validation and test."""

    pool = "wmt16newsonly"
    tables: ClassVar = {"train": NEWS_COMMENTARY, "val": WMT16, "test": WMT16}


class IWSLT2017EnDe(EnglishToGerman):
    """English to German: talks from the IWSLT 2017 evaluation campaign."""

    pool = "iwslt2017en_de"
    tables = dict.fromkeys(SPLITS, IWSLT2017)


def _text(row: Mapping[str, Any], language: str, where: str) -> str:
    return text_cell(row, f"translation.{language}" if "translation" in row else language, where)


def _parallel(folder: Path, split: str, languages: tuple[str, str]) -> Iterator[LocatedRow] | None:
    source, target = languages
    names = [*names_of(split), *([_FLICKR_TEST] if split == "test" else [])]
    endings = [
        (source, target),
        (f"{source}-{target}.{source}", f"{source}-{target}.{target}"),
        (f"{target}-{source}.{source}", f"{target}-{source}.{target}"),
        ("source", "target"),
    ]
    for name in names:
        for here, there in endings:
            left, right = first_file(folder, f"{name}.{here}"), first_file(folder, f"{name}.{there}")
            if left and right:
                return ((where, {source: a, target: b}) for where, a, b in paired_lines(left, right))
    return None
