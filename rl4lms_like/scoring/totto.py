"""ToTTo's samples as its published evaluation reads them (Parikh et al., 2020): lower-cased, detokenised lines.

meta_data["raw_table"]    table, page and section title, section text, highlighted cells, sentences, overlap_subset
references                the final sentences, at least three; `<null>` where there are fewer
precision entries         every cell of the table, the titles, the section's text
recall entries            the highlighted cells, the titles

Nothing is written to files and no Perl is started: `detokenize` is Moses' detokenizer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl4lms_like.scoring.detokenize import detokenize

N_REFERENCES = 3
NULL = "<null>"
"""What stands for an empty text and for a reference that is not there."""

SUBSETS: Mapping[str, bool | None] = {"overall": None, "overlap": True, "non_overlap": False}
"""The parts of ToTTo's development set, and what `overlap_subset` of their samples is."""

_LINE_BREAKS = re.compile("[\r\n]")
_SEPARATORS = re.compile("[\t\r\n]")


@dataclass(frozen=True)
class TottoSample:
    """What the scripts' files say of one sample.

    Args:
        references: three lines or more.
        n_written: how many of them somebody wrote; 0 in ToTTo's hidden test set.
        precision_entries: values that the text may mention.
        recall_entries: values that it should mention.
        overlap: whether its table's header occurs in the training set.
    """

    references: tuple[str, ...]
    n_written: int
    precision_entries: tuple[str, ...]
    recall_entries: tuple[str, ...]
    overlap: bool


def totto_samples(meta_infos: Sequence[Mapping[str, Any] | None], needed_by: str) -> list[TottoSample]:
    """The samples behind `meta_infos`; the same table is read once.

    Raises:
        ValueError: one of them has no `raw_table`, or its table has not ToTTo's form.
    """
    read: dict[int, TottoSample] = {}
    samples = []
    for index, meta_info in enumerate(meta_infos):
        table = (meta_info or {}).get("raw_table")
        if table is None:
            raise ValueError(
                f"{needed_by} compares with tables, and the meta_data of text {index} has no 'raw_table'; "
                "the data pool 'totto' gives it"
            )
        if id(table) not in read:
            try:
                read[id(table)] = totto_sample(table)
            except ValueError as error:
                raise ValueError(f"text {index}: {error}") from error
        samples.append(read[id(table)])
    return samples


def totto_sample(raw_table: Mapping[str, Any]) -> TottoSample:
    """One sample as the scripts see it.

    Raises:
        ValueError: it has not ToTTo's form.
    """
    try:
        table, titles = raw_table["table"], list(_titles(raw_table))
        highlighted = [table[row][column] for row, column in raw_table["highlighted_cells"]]
        written = [text for text in _final_sentences(raw_table) if text.strip()]
        cells = [cell for row in table for cell in row]
        extra = [f"section_text|||{_one_line(text)}"] if (text := raw_table.get("table_section_text")) else []
        precision_entries = _entries([*_cells(cells), *titles, *extra])
        recall_entries = _entries([*_cells(highlighted), *titles])
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"raw_table has not ToTTo's form: {type(error).__name__}: {error}") from error
    references = [*written, *[NULL] * (N_REFERENCES - len(written))]
    return TottoSample(
        references=tuple(totto_line(text) for text in references),
        n_written=len(written),
        precision_entries=precision_entries,
        recall_entries=recall_entries,
        overlap=raw_table.get("overlap_subset") in (True, "True"),  # the hub has it as text
    )


def totto_line(text: str) -> str:
    """A text as the scripts compare it: on one line, lower-cased, detokenised; `<null>` if there is none."""
    return detokenize((_LINE_BREAKS.sub(" ", text).strip() or NULL).lower())


def bleu(generated_texts: Sequence[str], samples: Sequence[TottoSample]) -> float:
    """Corpus BLEU-4 from 0 to 1, as sacrebleu's command line gives it; NaN where no sample has a reference."""
    from sacrebleu.metrics import BLEU  # type: ignore[attr-defined, unused-ignore]

    pairs = [(totto_line(text), one) for text, one in zip(generated_texts, samples, strict=True) if one.n_written]
    if not pairs:
        return math.nan
    n_streams = max(len(sample.references) for _, sample in pairs)
    streams = [
        [sample.references[index] if index < len(sample.references) else NULL for _, sample in pairs]
        for index in range(n_streams)
    ]
    return float(BLEU(force=True).corpus_score([text for text, _ in pairs], streams).score) / 100


def _titles(raw_table: Mapping[str, Any]) -> Iterator[str]:
    for name in ("page_title", "section_title"):
        if text := raw_table[f"table_{name}"]:
            yield f"{name}|||{_one_line(text)}"


def _final_sentences(raw_table: Mapping[str, Any]) -> list[str]:
    """ToTTo's own form has a list of annotations, the hub's a table of columns."""
    annotations = raw_table["sentence_annotations"]
    if isinstance(annotations, Mapping):
        return list(annotations.get("final_sentence", []))
    return [annotation["final_sentence"] for annotation in annotations]


def _cells(cells: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for cell in cells:
        if value := cell["value"].strip():
            yield f"{'header' if cell['is_header'] else 'cell'}|||{_one_line(value)}"


def _one_line(value: str) -> str:
    return _SEPARATORS.sub(" ", value.replace("|", "-"))


def _entries(pairs: Sequence[str]) -> tuple[str, ...]:
    """The values, detokenised together as the one line that they are in the scripts' files."""
    line = detokenize("\t".join(pairs).lower())
    return tuple(entry.partition("|||")[2].strip() for entry in line.split("\t"))
