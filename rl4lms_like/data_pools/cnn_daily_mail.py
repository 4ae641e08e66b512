"""CNN / DailyMail (Hermann et al. 2015, version 3.0.0 of See et al. 2017): news articles and their highlights.

    prompt      Summarize: (CNN) -- Harry Potter star ...       prompt_prefix, article, prompt_suffix
    reference   highlights, one per line

Two published formats are supported besides tables. Story files have `@highlight` lines after the article. Their split
is given by folders or by lists of URLs; the name of a story file is the SHA-1 of its URL. PreSumm's JSON (Liu and
Lapata 2019) has sentences of lower-case tokens, which are joined by spaces.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from rl4lms_like.core.sample import Sample
from rl4lms_like.data_pools.base import TextGenPool, flattened
from rl4lms_like.data_pools.published import HubTable, PublishedPool, Source
from rl4lms_like.data_pools.splits import names_of
from rl4lms_like.data_pools.tables import LocatedRow, cell, json_rows, open_text, text_cell, text_lines
from rl4lms_like.scoring.nltk_data import require_data, words
from rl4lms_like.system.errors import DataPoolError
from rl4lms_like.system.numbers import Count

_HIGHLIGHT = "@highlight"
_SENTENCE_ENDS = (".", "!", "?", "'", "`", '"', "\u2019", "\u201d", ")")


def article_and_highlights(story: str) -> dict[str, str]:
    """Return the columns of a story. Lines without final punctuation get a full stop, as in the hub's columns."""
    article: list[str] = []
    highlights: list[str] = []

    # Lines belong to the article until the first `@highlight`; one mark stands before each highlight.
    section = article
    for raw_line in re.split(r"[\r\n]+", story):
        line = raw_line.strip()
        if line.startswith(_HIGHLIGHT):
            section = highlights
        elif line:
            section.append(line if line.endswith(_SENTENCE_ENDS) else f"{line} .")
    return {"article": " ".join(article), "highlights": "\n".join(highlights)}


def _stories(folder: Path, split: str) -> Iterator[LocatedRow] | None:
    """Return the rows of story files in a folder of the split or in a list of URLs, or None if there are none."""
    for name in names_of(split):
        if files := sorted((folder / name).glob("*.story")):
            return _read_stories(files)

    # Lists for all stories (See et al.: all_val.txt; PreSumm: mapping_valid.txt), not for CNN or DailyMail alone.
    list_names: list[str] = []
    for name in names_of(split):
        list_names += [f"all_{name}.txt", f"mapping_{name}.txt"]
    listings = sorted(file for file in folder.rglob("*.txt") if file.name in list_names)
    if not listings:
        return None
    return _read_stories(_listed(folder, listings[0]))


def _listed(folder: Path, listing: Path) -> list[Path]:
    """Return the story files of a list of URLs, in the order of the list."""
    stories = {file.stem: file for file in folder.rglob("*.story")}
    addresses = filter(None, map(str.strip, text_lines(listing)))
    names = [hashlib.sha1(address.encode()).hexdigest() for address in addresses]

    # All missing stories are counted: one is an accident, most of them another folder.
    missing = [number for number, name in enumerate(names, start=1) if name not in stories]
    if missing:
        raise DataPoolError(
            f"{listing}, line {missing[0]}: no story {names[missing[0] - 1]}.story below {folder} "
            f"({len(missing)} of {len(names)} are missing)"
        )
    return [stories[name] for name in names]


def _read_stories(files: list[Path]) -> Iterator[LocatedRow]:
    for file in files:
        with open_text(file) as lines:
            yield str(file), article_and_highlights(lines.read())


def _presumm(folder: Path, split: str) -> Iterator[LocatedRow] | None:
    """Return the rows of PreSumm's files of a split, or None if there are none."""
    pattern = re.compile(rf".*\.(?:{'|'.join(names_of(split))})\.(\d+)\.json")
    numbered: list[tuple[int, Path]] = []
    for file in folder.glob("*.json"):
        if match := pattern.fullmatch(file.name):
            numbered.append((int(match[1]), file))
    if not numbered:
        return None

    # By number: as texts, `cnndm.train.10.json` would come before `cnndm.train.2.json`.
    return _read_presumm([file for _, file in sorted(numbered)])


def _read_presumm(files: list[Path]) -> Iterator[LocatedRow]:
    for file in files:
        for where, row in json_rows(file):
            # Both columns are lists of sentences, and a sentence a list of tokens.
            sentences = {}
            for name in ("src", "tgt"):
                try:
                    sentences[name] = [" ".join(tokens) for tokens in cell(row, name, where)]
                except TypeError as error:
                    raise DataPoolError(f"{where}, column {name!r}: expected sentences of tokens: {error}") from error
            yield where, {"article": " ".join(sentences["src"]), "highlights": "\n".join(sentences["tgt"])}


class CNNDailyMail(PublishedPool):
    """News articles as prompts, with their highlights as references."""

    id = "cnn_daily_mail"
    hub = HubTable("abisee/cnn_dailymail", "3.0.0")
    layouts = (_stories, _presumm)

    @classmethod
    @flattened
    def prepare(
        cls,
        split: str,
        prompt_suffix: str = "",
        prompt_prefix: str = "",
        truncate_article: Count | None = None,
        *,
        source: Source,
    ) -> TextGenPool:
        """Build the pool of a split.

        Args:
            prompt_suffix: text appended to the article.
            prompt_prefix: text prepended to the article.
            truncate_article: maximum number of NLTK word tokens of the article in the prompt, joined by spaces.
            data_dir: a local copy: stories `{train,val,test}/*.story`, or stories anywhere with lists of URLs,
                `all_{train,val,test}.txt` or `mapping_{train,valid,test}.txt`; PreSumm's `*.{train,valid,test}.*.json`;
                or tables with the columns article, highlights (see `published`).

        Raises:
            MissingExtraError: NLTK is needed for truncation and not installed; or see `TextGenPool.prepare`.
            MissingResourceError: NLTK's punkt_tab is needed for truncation and not found.
        """
        if truncate_article is not None:
            require_data(cls.needed_by(), "punkt_tab")

        def samples() -> Iterator[Sample]:
            for index, (where, row) in enumerate(cls.rows(split, source)):
                article = text_cell(row, "article", where)
                if truncate_article is not None:
                    article = " ".join(words(article, cls.needed_by())[:truncate_article])
                prompt = f"{prompt_prefix}{article}{prompt_suffix}"
                yield Sample(f"{split}_{index}", prompt, [text_cell(row, "highlights", where)])

        return cls.of(samples(), split, cls.id, source.max_size)
