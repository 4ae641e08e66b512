"""How each argument of the pools is seen to act: by id, then by argument.

Where a published data set comes from is seen in its samples, of a hub whose texts say what they were asked for by:

    hub_id: me/mine     prompt "path me/mine"        asked by `path`, `config` or `revision`
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.arguments import pools_files
from tests.arguments.seen import Acts, Sight, Silent, Tried, samples
from tests.catalogue import Places


def _translated(text: str) -> dict[str, Any]:
    return {"translation": {"en": text, "de": text}}


def _review(text: str) -> dict[str, Any]:
    return {"text": text, "label": 1}


def _highlighted(text: str) -> dict[str, Any]:
    cell = {"value": text, "is_header": False, "column_span": 1, "row_span": 1}
    titles = {"table_page_title": "", "table_section_title": ""}
    return {"table": [[cell]], "highlighted_cells": [[0, 0]], "sentence_annotations": None, **titles}


COLUMNS: dict[str, Callable[[str], dict[str, Any]]] = {
    "imdb": _review,
    "imdb_seq2seq": _review,
    "commongen": lambda text: {"concepts": [text], "target": text},
    "totto": _highlighted,
    "cnn_daily_mail": lambda text: {"article": text, "highlights": text},
    "narrative_qa": lambda text: {"question": text, "answers": [text], "document": {"summary": {"text": text}}},
    "wmt16": _translated,
    "wmt14_processed_en_de": _translated,
    "wmt16newsonly": _translated,
    "iwslt2017en_de": _translated,
    "crd3": lambda text: {"turns": [{"names": ["MATT"], "utterances": [text]}] * 3},
    "daily_dialog": lambda text: {"dialog": [text] * 7, "act": [1] * 7, "emotion": [0] * 7},
}
"""A row of the hub with one text, by the pool that reads it."""


def served(by: str) -> Sight:
    """Samples of a hub whose texts say what they were asked for by: `path`, `config` or `revision`."""

    def see(tried: Tried) -> Any:
        import datasets
        import huggingface_hub

        def asked(**parts: str | None) -> Any:
            return datasets.Dataset.from_list([COLUMNS[tried.id](f"{by} {parts[by]}")] * 5)

        def load_dataset(path: str, name: str | None = None, *, revision: str | None = None) -> Any:
            table = asked(path=path, config=name, revision=revision)
            return datasets.DatasetDict(dict.fromkeys(("train", "validation", "test"), table))

        def snapshot_download(path: str, *, repo_type: str, revision: str, allow_patterns: str) -> str:
            folder = tried.places.root / "conversions"
            place = (folder / allow_patterns).parent
            place.mkdir(parents=True, exist_ok=True)
            table = asked(path=path, config=allow_patterns.split("/")[0], revision=revision)
            table.to_parquet(str(place / "0000.parquet"))
            return str(folder)

        tried.patch.setattr(datasets, "load_dataset", load_dataset)
        tried.patch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        return samples(tried)

    return see


def other_copy(pool: str) -> Callable[[Places], str]:
    """A folder with one table of the pool's columns."""

    def write(places: Places) -> str:
        folder = Path(places.root) / f"other_{pool}"
        folder.mkdir(exist_ok=True)
        lines = [json.dumps(COLUMNS[pool](f"another text {number}")) + "\n" for number in range(5)]
        (folder / "train.jsonl").write_text("".join(lines), encoding="utf-8")
        return str(folder)

    return write


def _published(
    pool: str, *, repository: str = "hub_id", others: Mapping[str, Any] | None = None, **own: Acts | Silent
) -> dict[str, Acts | Silent]:
    """Rows of a pool's own arguments, and of those that say where from.

    Args:
        pool: its id.
        repository: the argument that names one of the hub.
        beside: what makes it read the hub.
        own: its own arguments.
    """

    def on_hub(value: str, by: str) -> Acts:
        return Acts(value, served(by), others=others or {}, without=["data_dir"])

    return {
        **own,
        repository: on_hub("me/mine", "path"),
        "hub_config": on_hub("small", "config"),
        "revision": on_hub("v2", "revision"),
        "data_dir": Acts(other_copy(pool), samples),
        "max_size": Acts(2, samples),
    }


_AROUND: dict[str, Acts | Silent] = {
    "prompt_prefix": Acts("Say: ", samples),
    "prompt_suffix": Acts(" in short:", samples),
}
_NOT_FETCHED = {"hub_id": "owner/set"}

ROWS: dict[str, dict[str, Acts | Silent]] = {
    **pools_files.ROWS,
    "reasoning_gym": {
        "dataset": Acts("gcd", samples, also={"config": None}),
        "config": Acts({"max_digits": 2}, samples),
        "size": Acts(20, samples),
        "seed": Acts(1, samples),
        "max_size": Acts(3, samples),
        "split_ratios": Acts([0.4, 0.3, 0.3], samples),
        **_AROUND,
    },
    "imdb": _published("imdb", seed=Acts(2, samples)),
    "imdb_seq2seq": _published("imdb_seq2seq", seed=Acts(2, samples), positive_ratio=Acts(0.8, samples)),
    "commongen": _published(
        "commongen",
        prefix=Acts("say: ", samples),
        concept_separator_token=Acts("#", samples),
        concept_end_token=Acts(";", samples),
        group_train=Acts(True, samples),
    ),
    "totto": _published("totto", representation=Acts("subtable", samples)),
    "cnn_daily_mail": _published("cnn_daily_mail", truncate_article=Acts(5, samples), **_AROUND),
    "narrative_qa": _published("narrative_qa", others=_NOT_FETCHED),
    "wmt16": _published(
        "wmt16",
        repository="wmt_id",
        source_language=Acts("de", samples),
        target_language=Acts("en", samples),
        **_AROUND,
    ),
    "wmt14_processed_en_de": _published("wmt14_processed_en_de", **_AROUND),
    "wmt16newsonly": _published("wmt16newsonly", **_AROUND),
    "iwslt2017en_de": _published("iwslt2017en_de", **_AROUND),
    "crd3": _published("crd3", others=_NOT_FETCHED, max_context_size=Acts(2, samples)),
    "daily_dialog": _published("daily_dialog", context_size=Acts(2, samples)),
}
