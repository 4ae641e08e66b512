"""Rows of table files: every format gives the same rows, and says where each stands."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import datasets
import pyarrow.parquet
import pytest

from rl4lms_like.data_pools.tables import paired_lines, table_rows
from rl4lms_like.system.errors import DataPoolError, MissingExtraError

ROWS = [{"q": "Why,\nthen?", "a": "So."}, {"q": "Wörum?", "a": ""}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
CSV = 'q,a\n"Why,\nthen?",So.\nWörum?,""\n'


@pytest.mark.parametrize(
    ("name", "content", "first", "second"),
    [
        ("a.jsonl", LINES, "line 1", "line 2"),
        ("a.jsonl.gz", gzip.compress(LINES.encode()), "line 1", "line 2"),
        ("a.json", json.dumps(ROWS, indent=1), "entry 0", "entry 1"),
        ("a.json", json.dumps({"language": "en", "values": ROWS}), "entry 0", "entry 1"),
        ("a.json", LINES, "line 1", "line 2"),
        ("a.csv", CSV, "line 3", "line 4"),
        ("a.tsv", CSV.replace("q,a", "q\ta").replace('",S', '"\tS').replace('?,"', '?\t"'), "line 3", "line 4"),
    ],
)
def test_every_format_gives_the_same_rows(lay, name, content, first, second):
    file = Path(lay({name: content})) / name
    assert list(table_rows(file)) == [(f"{file}, {first}", ROWS[0]), (f"{file}, {second}", ROWS[1])]


def test_parquet_rows_keep_nested_values(tmp_path):
    rows = [
        {"translation": {"en": "a", "de": "b"}, "all": ["x", "y"], "n": 1},
        {"translation": None, "all": [], "n": 2},
    ]
    file = tmp_path / "a.parquet"
    datasets.Dataset.from_list(rows).to_parquet(str(file))
    assert list(table_rows(file)) == [(f"{file}, row {number}", row) for number, row in enumerate(rows)]


def test_parquet_columns_of_one_name_are_refused(tmp_path):
    file = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table([[1], [2]], names=["q", "q"]), file)
    with pytest.raises(DataPoolError, match=r"a.parquet: .*'q'"):
        list(table_rows(file))


def test_a_json_file_with_one_object_is_one_row(lay):
    folder = lay({"a.json": json.dumps({"title": "x", "tags": ["a", "b"]})})
    assert [row for _, row in table_rows(Path(folder) / "a.json")] == [{"title": "x", "tags": ["a", "b"]}]


@pytest.mark.parametrize(
    ("name", "content", "data"),
    [
        ("a.json", '[{"q": 1},\n {"q": 2]', "a.json, line 2, character 9: "),
        ("a.json", '[{"q": 1}, 2]', "a.json, entry 1: .* 2$"),
        ("a.json", '[{"q": 1, "q": 2}]', "a.json, .*'q'"),
        ("a.json", "3", "a.json: .* 3$"),
        ("a.parquet", "no parquet", "a.parquet: "),
    ],
)
def test_what_cannot_be_read_is_named(lay, name, content, data):
    with pytest.raises(DataPoolError, match=data):
        list(table_rows(Path(lay({name: content})) / name))


def test_parquet_names_its_extra(lay, no_datasets):
    with pytest.raises(MissingExtraError) as caught:
        list(table_rows(Path(lay({"a.parquet": "x"})) / "a.parquet"))
    assert caught.value.extra == "data"


def test_parallel_lines_are_paired_and_must_be_as_many(lay):
    folder = Path(lay({"a.en": "One.\r\n\nThree\x0b.\n", "a.de": "Eins.\n\nDrei."}))
    left, right = folder / "a.en", folder / "a.de"
    assert [(a, b) for _, a, b in paired_lines(left, right)] == [("One.", "Eins."), ("", ""), ("Three\x0b.", "Drei.")]
    right.write_text("Eins.\n")
    with pytest.raises(DataPoolError, match=r"a.de .* 1 .*a.en"):
        list(paired_lines(left, right))


@pytest.mark.parametrize("broken", ["a.en.gz", "a.de.gz"])
def test_of_two_files_the_broken_one_is_named(lay, broken):
    packed = gzip.compress(b"One.\n" * 1000)
    folder = Path(lay({name: packed[:-8] if name == broken else packed for name in ("a.en.gz", "a.de.gz")}))
    with pytest.raises(DataPoolError, match=broken):
        list(paired_lines(folder / "a.en.gz", folder / "a.de.gz"))


def test_a_value_may_be_long(lay):
    text = "word " * 40_000
    folder = Path(lay({"A.CSV": f"q\n{text}\n", "a.TSV.GZ": gzip.compress(f"q\tr\n{text}\tb\n".encode())}))
    assert [[row for _, row in table_rows(folder / name)] for name in ("A.CSV", "a.TSV.GZ")] == [
        [{"q": text}],
        [{"q": text, "r": "b"}],
    ]


@pytest.mark.parametrize("value", ["[" * 100_000, "9" * 10_000], ids=["deep", "many digits"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_json_that_python_cannot_read_is_an_error_with_the_file_and_line(name, value, tmp_path):
    file = tmp_path / name
    file.write_text('{"a": 1}\n{"a": ' + value + "}\n" if name == "a.jsonl" else '[{"a": ' + value + "}]")
    with pytest.raises(DataPoolError, match=r"a\.jsonl, line 2" if name == "a.jsonl" else r"a\.json"):
        list(table_rows(file))
