"""ToTTo (Parikh et al. 2020): one sentence about the highlighted cells of a Wikipedia table.

prompt       <table> ... </table><page_title> ... </section_title> <table> ... </table>
             the table without titles, then again with titles, as in RL4LMs; see `totto_text`
references   the final sentence of each annotator: one in train, three in val, none in test
meta_data    {"raw_table": the row}, with `sentence_annotations` as a list of dicts and `overlap_subset` as a bool
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from rl4lms_like.core.errors import DataPoolError
from rl4lms_like.core.numbers import Count
from rl4lms_like.core.sample import Sample
from rl4lms_like.data_pools.columns import cell
from rl4lms_like.data_pools.hub import CONVERTED, HubTable
from rl4lms_like.data_pools.published import Layout, Published, PublishedPool, Source, first_file
from rl4lms_like.data_pools.splits import names_of, not_empty
from rl4lms_like.data_pools.tables import LocatedRow, json_line_rows
from rl4lms_like.data_pools.totto_text import full_text, highlighted_text, titles_text

HUB = HubTable("google-research-datasets/totto", "default", CONVERTED)

STAGES = ("original_sentence", "sentence_after_deletion", "sentence_after_ambiguity", "final_sentence")
"""Fields of an annotation: the sentence after each editing step."""

_LINEARISE = {"subtable": highlighted_text, "fulltable": full_text}


class ToTTo(PublishedPool):
    """Tables with highlighted cells as prompts, with sentences about these cells as references."""

    @classmethod
    def prepare(
        cls,
        split: str,
        representation: Literal["subtable", "fulltable"] = "subtable",
        data_dir: str | None = None,
        hub_id: str | None = None,
        hub_config: str | None = None,
        revision: str | None = None,
        max_size: Count | None = None,
    ) -> ToTTo:
        """Build the pool of a split.

        Args:
            split: `train`, `val` or `test`.
            representation: `subtable`, the highlighted cells with their headers, or `fulltable`, all cells.
            data_dir: a local copy: `totto_{train,dev,test}_data.jsonl` (`unlabeled_totto_test_data.jsonl`), there or in
                its folder `totto_data`; the project's samples `{train,dev}_sample.jsonl`; or tables with the columns
                table, highlighted_cells, table_page_title, table_section_title, sentence_annotations (see `published`).
            hub_id: another hub repository with these columns.
            hub_config: configuration of the hub repository.
            revision: branch, tag or commit of the hub repository.
            max_size: maximum number of samples per split.

        Raises:
            DataPoolError: the data cannot be loaded or found; the message lists the supported files.
            MissingExtraError: `datasets` is needed and not installed.
        """
        published = Published("totto", _COLUMNS, (RELEASED, SAMPLES))
        samples = []
        for index, (where, row) in enumerate(
            published.rows(split, Source(data_dir, hub_id, hub_config, revision), HUB)
        ):
            if index == max_size:
                break
            raw = raw_table(row, where)
            finals = [annotation["final_sentence"] for annotation in raw["sentence_annotations"]]
            references = [sentence for sentence in finals if sentence]
            prompt = prompt_of(raw, representation, where)
            samples.append(Sample(f"{split}_{index}", prompt, references, {"raw_table": raw}))
        return cls(not_empty(samples, split, "totto"))


def prompt_of(row: Mapping[str, Any], representation: str, where: str) -> str:
    """Return the prompt of a row: the table as text without titles, then again with titles.

    Raises:
        DataPoolError: the row does not have ToTTo's format.
    """
    linearise = _LINEARISE.get(representation)
    if linearise is None:
        raise DataPoolError(f"unknown representation {representation!r}; known: {', '.join(_LINEARISE)}")
    titles = titles_text(cell(row, "table_page_title", where), cell(row, "table_section_title", where))
    try:
        text = linearise(row["table"], [(line, place) for line, place in row["highlighted_cells"]])
        return f"{text}{titles}{text}"
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise DataPoolError(f"{where}: not a table with highlighted cells: {type(error).__name__}: {error}") from error


def raw_table(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Convert a row to the format of the published files, which ToTTo's own evaluation reads.

    Raises:
        DataPoolError: a column is missing, or the annotations do not have ToTTo's format.
    """
    for name in ("table", "highlighted_cells"):
        cell(row, name, where)
    annotations = row.get("sentence_annotations") or []
    try:
        if isinstance(annotations, Mapping):  # `datasets` stores a list of dicts column by column
            columns = (annotations[stage] for stage in STAGES)
            annotations = [dict(zip(STAGES, values, strict=True)) for values in zip(*columns, strict=True)]
        texts = [{stage: annotation[stage] for stage in STAGES} for annotation in annotations]
    except (KeyError, TypeError, ValueError) as error:
        wanted = f"expected annotations with {', '.join(STAGES)}"
        raise DataPoolError(f"{where}, column 'sentence_annotations': {wanted}: {error!r}") from error
    overlaps = row.get("overlap_subset") in (True, "True")
    return {**row, "sentence_annotations": texts, "overlap_subset": overlaps}


def _released(folder: Path, split: str) -> Iterator[LocatedRow] | None:
    names = [f"totto_{name}_data.jsonl" for name in names_of(split)]
    names += [f"unlabeled_{name}" for name in names]
    file = first_file(folder, *names) or first_file(folder / "totto_data", *names)
    return None if file is None else json_line_rows(file)


def _samples(folder: Path, split: str) -> Iterator[LocatedRow] | None:
    file = first_file(folder, *(f"{name}_sample.jsonl" for name in names_of(split)))
    return None if file is None else json_line_rows(file)


_COLUMNS = "table, highlighted_cells, table_page_title, table_section_title, sentence_annotations"
RELEASED = Layout(
    "totto_{train,dev,test}_data.jsonl or unlabeled_totto_test_data.jsonl, also in totto_data/", _released
)
SAMPLES = Layout("{train,dev,test}_sample.jsonl", _samples)
