"""ToTTo samples as read by its published evaluation scripts (Parikh et al., 2020), and their scores: BLEU and PARENT.

meta_data["raw_table"]    table, page and section title, section text, highlighted cells, sentences, overlap_subset
references                the final sentences, at least three; `<null>` if there are fewer
precision entries         every cell of the table, the titles, the section's text
recall entries            the highlighted cells, the titles

All are lower-cased, detokenised lines. No files are written and no Perl is run: `detokenize` implements Moses'
detokenizer.

PARENT (Dhingra et al., 2019) is the overlap of a text with its references and with its table:

precision   over the text's n-grams: 1 if in the reference, else the fraction of their tokens that are in the table
recall      over the reference's n-grams, each weighted by that fraction: 1 if in the text
            and over the highlighted cells: the fraction of each that occurs in the text in order
F           of both, for the reference where it is best
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, zip_longest
from typing import Any, NamedTuple

from rl4lms_like.scoring.bleu import ORDER, ngrams
from rl4lms_like.scoring.rouge import lcs_length

N_REFERENCES = 3
SMOOTHING = 1e-5  # replacement for a precision or recall of 0 above unigrams, and for a recall of 0
NULL = "<null>"  # placeholder for an empty text and for a missing reference
SUBSETS: Mapping[str, bool | None] = {"overall": None, "overlap": True, "non_overlap": False}
"""Subsets of ToTTo's development set -> the value of `overlap_subset` in their samples; None: any."""

_MARKUP = re.compile(r"<.+>")
_ENTITIES = {
    "&bar;": "|", "&#124;": "|", "&lt;": "<", "&gt;": ">", "&bra;": "[", "&ket;": "]", "&quot;": '"', "&apos;": "'",
    "&#91;": "[", "&#93;": "]",
}  # fmt: skip
_ENTITY = re.compile("|".join(_ENTITIES))
_SPACES = re.compile(" +")
_CLOSING = frozenset(",.?!:;\\%}])")
_OPENING = frozenset("([{¿¡")
_QUOTES = frozenset("'\"„“`")
_CURLY = frozenset("„“”")
_CJK = (
    *((0x2E80, 0xA4CF), (0xA840, 0xA87F), (0xAC00, 0xD7AF), (0xF900, 0xFAFF)),
    *((0xFE30, 0xFE4F), (0xFF65, 0xFFDC), (0x1100, 0x11FF), (0x20000, 0x2FFFF)),
)
_LINE_BREAKS = re.compile("[\r\n]")
_SEPARATORS = re.compile("[\t\r\n]")


@dataclass(frozen=True)
class TottoSample:
    """One sample as in the scripts' files."""

    references: tuple[str, ...]  # three lines or more
    n_written: int  # number of references that are not placeholders; 0 in ToTTo's hidden test set
    precision_entries: tuple[str, ...]  # values that the text may mention
    recall_entries: tuple[str, ...]  # values that the text should mention
    overlap: bool  # True if the table's header occurs in the training set


def totto_samples(meta_infos: Sequence[Mapping[str, Any] | None], needed_by: str) -> list[TottoSample]:
    """Return the samples of `meta_infos`, each with a `raw_table`; one that occurs several times is processed once."""
    read: dict[int, TottoSample] = {}
    samples = []
    for index, meta_info in enumerate(meta_infos):
        table = (meta_info or {}).get("raw_table")
        if table is None:
            missing = f"the meta_data of text {index} has no 'raw_table', which the data pool 'totto' provides"
            raise ValueError(f"{needed_by}: {missing}")

        # By identity: the responses of a group share the table object, and comparing tables would take long.
        if id(table) not in read:
            try:
                read[id(table)] = totto_sample(table)
            except ValueError as error:
                raise ValueError(f"text {index}: {error}") from error
        samples.append(read[id(table)])
    return samples


def totto_sample(raw_table: Mapping[str, Any]) -> TottoSample:
    """Return one sample as in the scripts' files; a table that does not have ToTTo's form is a `ValueError`."""
    try:
        table = raw_table["table"]
        titles = list(_titles(raw_table))
        highlighted = [table[row][column] for row, column in raw_table["highlighted_cells"]]
        written = [text for text in _final_sentences(raw_table) if text.strip()]

        # A text may mention all cells, the titles and the section's text; it should mention the highlighted cells and
        # the titles. The scripts' order: entries of a line are detokenised together.
        cells = list(chain.from_iterable(table))
        section_texts = []
        if raw_table.get("table_section_text"):
            section_texts.append(f"section_text|||{_one_line(raw_table['table_section_text'])}")
        precision_entries = _entries([*_cells(cells), *titles, *section_texts])
        recall_entries = _entries([*_cells(highlighted), *titles])
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"raw_table does not have ToTTo's form: {type(error).__name__}: {error}") from error

    # The scripts' files have a fixed number of reference lines.
    references = [*written, *[NULL] * (N_REFERENCES - len(written))]
    return TottoSample(
        references=tuple(totto_line(text) for text in references),
        n_written=len(written),
        precision_entries=precision_entries,
        recall_entries=recall_entries,
        overlap=raw_table.get("overlap_subset") in (True, "True"),  # a string in the hub's version
    )


def totto_line(text: str) -> str:
    """Return a text as the scripts compare it: on one line, lower-cased, detokenised; `<null>` if it is empty."""
    return detokenize((_LINE_BREAKS.sub(" ", text).strip() or NULL).lower())


def bleu(generated_texts: Sequence[str], samples: Sequence[TottoSample]) -> float:
    """Return corpus BLEU-4 from 0 to 1, as by sacrebleu's command line; NaN if no sample has a reference."""
    from sacrebleu.metrics import BLEU  # type: ignore[attr-defined, unused-ignore]

    lines = []
    references = []
    for text, sample in zip(generated_texts, samples, strict=True):
        if sample.n_written:
            lines.append(totto_line(text))
            references.append(sample.references)
    if not lines:
        return math.nan

    # sacrebleu reads the k-th references of all texts as one stream; a text with fewer of them has placeholders.
    streams = [list(stream) for stream in zip_longest(*references, fillvalue=NULL)]
    return float(BLEU(force=True).corpus_score(lines, streams).score) / 100


def _titles(raw_table: Mapping[str, Any]) -> Iterator[str]:
    for name in ("page_title", "section_title"):
        title = raw_table[f"table_{name}"]
        if title:
            yield f"{name}|||{_one_line(title)}"


def _final_sentences(raw_table: Mapping[str, Any]) -> list[str]:
    """Return the final sentences of ToTTo's own form, a list of annotations, or of the hub's, a dict of columns."""
    annotations = raw_table["sentence_annotations"]
    if isinstance(annotations, Mapping):
        return list(annotations.get("final_sentence", []))
    return [annotation["final_sentence"] for annotation in annotations]


def _cells(cells: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for cell in cells:
        value = cell["value"].strip()
        if value:
            kind = "header" if cell["is_header"] else "cell"
            yield f"{kind}|||{_one_line(value)}"


def _one_line(value: str) -> str:
    # In the scripts' files, tabs separate entries and "|||" the kind from the value.
    return _SEPARATORS.sub(" ", value.replace("|", "-"))


def _entries(pairs: Sequence[str]) -> tuple[str, ...]:
    """Return the values, detokenised together because they are on one line in the scripts' files."""
    line = detokenize("\t".join(pairs).lower())
    return tuple(entry.partition("|||")[2].strip() for entry in line.split("\t"))


def detokenize(line: str) -> str:
    """Return the line with English spacing, as Moses' detokenizer does.

    A line that is one piece of markup, such as `<null>`, stays unchanged.

    A word is joined to the word before it, the word after it, both or neither. Quotation marks alternate between
    opening and closing: `he said : " it 's 5 % "` becomes `he said: "it's 5%"`.
    Words are separated by single spaces; tabs and other white space belong to the words around them.
    """
    if not line.strip() or _MARKUP.fullmatch(line):
        return line

    # `&amp;` comes last: "&amp;lt;" is the text "&lt;", not "<".
    text = f" {line} ".replace(" @-@ ", "-")
    text = _ENTITY.sub(lambda match: _ENTITIES[match[0]], text).replace("&amp;", "&")
    words = text.rstrip(" ").split(" ")

    pieces: list[str] = []
    space = " "
    previous = ""
    quotes: Counter[str] = Counter()
    for word in words:
        joins_previous, joins_next = _joins(word, previous, quotes)
        pieces.append(word if joins_previous else space + word)
        space = "" if joins_next else " "
        previous = word
    return _SPACES.sub(" ", "".join(pieces)).strip(" ")


def _joins(word: str, previous: str, quotes: Counter[str]) -> tuple[bool, bool]:
    """Return whether to omit the space before a word and the one after it; counts the quotation marks."""
    if not word:
        return False, False
    if _is_cjk(word[0]):
        return bool(previous) and _is_cjk(previous[-1]), False

    # `( 5 )` is "(5)" and `$ 5` is "$5": Sc is Unicode's category of currency signs.
    if all(character in _OPENING or unicodedata.category(character) == "Sc" for character in word):
        return False, True
    if _CLOSING.issuperset(word) or _is_contraction(word, previous):
        return True, False
    if not _QUOTES.issuperset(word):
        return False, False

    # The first mark of a kind opens, the second closes. Curly marks count as straight ones.
    mark = '"' if _CURLY.issuperset(word) else word
    closes = quotes[mark] % 2 == 1
    if not closes and word == "'" and previous.endswith("s"):  # a possessive: the Jones' house
        return True, False
    quotes[mark] += 1
    return closes, not closes


def _is_contraction(word: str, previous: str) -> bool:
    """Return whether a word is a contraction such as `'s` after a letter, a vowel sign or a digit."""
    if len(word) < 2 or word[0] != "'" or not word[1].isalpha() or not previous:
        return False
    # Mc is Unicode's category of vowel signs that take space, as at the end of Hindi words.
    return previous[-1].isalpha() or previous[-1].isdecimal() or unicodedata.category(previous[-1]) == "Mc"


def _is_cjk(character: str) -> bool:
    """Return whether the character belongs to a script that is written without spaces between words."""
    return any(first <= ord(character) <= last for first, last in _CJK)


class Parent(NamedTuple):
    """Scores of one text, each from 0 to 1."""

    precision: float
    recall: float
    f_score: float


def parent(generated_texts: Sequence[str], samples: Sequence[TottoSample]) -> list[Parent]:
    """Return the scores of each text against its sample; NaN for a sample without references.

    Lambda, the weight of the table in the recall, is the fraction of the highlighted cells that the reference does not
    mention. Values without tokens are left out; a sample without values has no table recall. An empty text is read as
    `<null>`, as in the script.
    """
    tables: dict[int, _Table] = {}
    scores = []
    for text, sample in zip(generated_texts, samples, strict=True):
        if not sample.n_written:
            scores.append(Parent(math.nan, math.nan, math.nan))
            continue

        # By identity, as in `totto_samples`, which returns one object for all texts of a table.
        if id(sample) not in tables:
            tables[id(sample)] = _Table(sample)
        scores.append(tables[id(sample)].score(_tokens(totto_line(text))))
    return scores


class _Side:
    """N-grams of a text by order: their counts, and the fraction of their tokens that are in the table."""

    def __init__(self, tokens: Sequence[str], values: Collection[str]) -> None:
        # w(g): fraction of the n-gram's tokens that are in the table, the word overlap model of Dhingra et al.
        is_in_table = [token in values for token in tokens]
        self.tokens = tokens
        self.counts: list[Counter[tuple[str, ...]]] = []
        self.weights: list[dict[tuple[str, ...], float]] = []
        for order in range(1, ORDER + 1):
            grams = list(ngrams(tokens, order))
            fractions = [sum(flags) / order for flags in ngrams(is_in_table, order)]
            self.counts.append(Counter(grams))
            self.weights.append(dict(zip(grams, fractions, strict=True)))


class _Table:
    """Sample that is tokenised once for all texts that are compared with it."""

    def __init__(self, sample: TottoSample) -> None:
        # Two spaces keep the entries apart for the tokenizer, which looks at neighbouring characters.
        self.values = frozenset(_tokens("  ".join(sample.precision_entries)))
        self.entries = [tokens for tokens in map(_tokens, sample.recall_entries) if tokens]

        # Each distinct reference with its lambda, the weight of the table in the recall: what the reference itself does
        # not mention of the table, a text need not mention either.
        self.references: list[tuple[_Side, float]] = []
        for reference in dict.fromkeys(sample.references):
            tokens = _tokens(reference)
            self.references.append((_Side(tokens, self.values), 1.0 - self._mentioned(tokens)))

    def score(self, tokens: list[str]) -> Parent:
        text = _Side(tokens, self.values)
        mentioned = self._mentioned(tokens)

        # R = R_reference^(1 - lambda) R_table^lambda,   F = 2 P R / (P + R); the 1e-8 is the script's.
        scores = []
        for reference, table_weight in self.references:
            precision = _precision(text, reference)
            recall = _recall(text, reference) ** (1 - table_weight) * (mentioned or SMOOTHING) ** table_weight
            scores.append(Parent(precision, recall, 2 * precision * recall / (precision + recall + 1e-8)))
        return max(scores, key=lambda score: score.f_score)

    def _mentioned(self, tokens: Sequence[str]) -> float:
        """Return the mean fraction of an entry that the text contains in order; 1 without entries."""
        if not self.entries:
            return 1.0

        # Mean over the entries of LCS(entry, text) / len(entry), the table recall.
        fractions = [lcs_length(entry, tokens) / len(entry) for entry in self.entries]
        return sum(fractions) / len(self.entries)


def _precision(text: _Side, reference: _Side) -> float:
    # P_n = mean over the text's n-grams g of Pr(g in reference) + Pr(g not in reference) w(g), where Pr(g in reference)
    # is the fraction of the occurrences of g that the reference has, too.
    by_order = []

    for counts, weights, reference_counts in zip(text.counts, text.weights, reference.counts, strict=True):
        entailed = 0.0
        for ngram, count in counts.items():
            in_reference = min(count, reference_counts.get(ngram, 0))
            entailed += in_reference + (count - in_reference) * weights[ngram]
        by_order.append(entailed / counts.total() if counts else 0.0)
    return _geometric_mean(by_order, otherwise=0.0)


def _recall(text: _Side, reference: _Side) -> float:
    # R_n = sum of w(g) over the reference's n-grams that the text has, too / sum of w(g) over all: a text need not say
    # what the reference says but the table does not.
    by_order = []
    for counts, weights, text_counts in zip(reference.counts, reference.weights, text.counts, strict=True):
        in_table = sum(count * weights[ngram] for ngram, count in counts.items())
        in_both = sum(min(count, text_counts.get(ngram, 0)) * weights[ngram] for ngram, count in counts.items())
        by_order.append(in_both / in_table if in_table else 1.0)
    return _geometric_mean(by_order, otherwise=SMOOTHING)


def _geometric_mean(by_order: Sequence[float], *, otherwise: float) -> float:
    """Return the mean with orders above the first smoothed; `otherwise` if the first is 0."""
    if not by_order[0]:
        return otherwise
    return math.exp(sum(math.log(value or SMOOTHING) for value in by_order) / len(by_order))


def _tokens(line: str) -> list[str]:
    return _tokenizer()(line.strip()).split()


@cache
def _tokenizer() -> Any:
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

    return Tokenizer13a()
