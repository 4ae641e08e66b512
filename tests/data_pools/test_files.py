"""Columns of local JSON-lines and CSV files become samples; what cannot be read is named by file, line and column."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from rl4lms_like.core.sample import Sample
from rl4lms_like.data_pools.files import CsvPool, JsonlPool
from rl4lms_like.system.errors import DataPoolError
from rl4lms_like.testing.checkers import check_data_pool

ROWS = [
    {"q": f"Why {index}?", "answers": [f"So {index}.", "No."], "best": f"So {index}.", "info": {"topic": index}}
    for index in range(20)
]


@pytest.fixture
def jsonl(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n\n".join(json.dumps(row) for row in ROWS) + "\n")
    return str(path)


@pytest.fixture
def write(tmp_path):
    def to_file(text, name="file"):
        path = tmp_path / name
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return str(path)

    return to_file


def test_fields_become_samples(jsonl):
    pool = JsonlPool.prepare(
        "train",
        data_files={"train": jsonl},
        prompt_column="q",
        prompt_prefix="Q: ",
        prompt_suffix=" A:",
        reference_column=["answers", "best"],
        meta_columns=["info.topic"],
    )
    assert len(pool) == 20
    assert pool[3] == (
        Sample("train_3", "Q: Why 3? A:", ["So 3.", "No.", "So 3."], {"info.topic": 3}),
        1.0,
    )


TURNS = [
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "So."},
]


def test_messages_become_samples(write):
    file = write(json.dumps({"turns": [*TURNS, TURNS[0]], "a": "No."}))
    args = {"data_files": {"train": file}, "prompt_column": "turns"}
    (sample,) = JsonlPool.prepare("train", **args, reference_column="a").samples
    assert sample == Sample("train_0", "Why?\n\nSo.\n\nWhy?", ["No."], None, [*TURNS, TURNS[0]])
    with pytest.raises(DataPoolError, match=r"file, line 1.*prompt_suffix"):
        JsonlPool.prepare("train", **args, prompt_suffix=" A:")
    with pytest.raises(DataPoolError, match=r"file, line 1.*'turns'.*last_message_as_reference"):
        JsonlPool.prepare("train", **args, last_message_as_reference=True)


def test_the_last_message_can_be_the_reference(write):
    file = write(json.dumps({"turns": TURNS, "a": "No."}))
    args = {"data_files": {"train": file}, "prompt_column": "turns", "last_message_as_reference": True}
    (sample,) = JsonlPool.prepare("train", **args, reference_column="a").samples
    assert sample == Sample("train_0", "Why?", ["No.", "So."], None, TURNS[:1], learned="conversation")


@pytest.mark.parametrize("turns", [[], [{"role": "user"}], [{"content": "a"}], ["a"], {"role": "user"}, 3])
def test_what_is_no_message_is_named(turns, write):
    file = write(json.dumps({"turns": turns}))
    with pytest.raises(DataPoolError, match=r"file, line 1, column 'turns'.*messages"):
        JsonlPool.prepare("train", data_files={"train": file}, prompt_column="turns")


def test_one_file_is_shared_out(jsonl):
    pools = {split: JsonlPool.prepare(split, path=jsonl, prompt_column="q") for split in ("train", "val", "test")}
    assert {split: len(pool) for split, pool in pools.items()} == {"train": 16, "val": 2, "test": 2}
    prompts = [sample.prompt_or_input_text for pool in pools.values() for sample in pool.samples]
    assert sorted(prompts) == sorted(row["q"] for row in ROWS)


def test_max_size_limits_each_split(jsonl):
    assert len(JsonlPool.prepare("train", path=jsonl, prompt_column="q", max_size=5)) == 5
    assert len(JsonlPool.prepare("train", data_files={"train": jsonl}, prompt_column="q", max_size=5)) == 5


def test_reading_stops_at_max_size(write):
    path = write('{"q": "a"}\n{"q": "b"}\nbroken\n')
    assert len(JsonlPool.prepare("train", data_files={"train": path}, prompt_column="q", max_size=2)) == 2


def test_no_reference_is_no_reference(write):
    path = write('{"q": "a", "r": null}\n{"q": "b", "r": []}\n')
    pool = JsonlPool.prepare("test", data_files={"test": path}, prompt_column="q", reference_column="r")
    assert [sample.references for sample in pool.samples] == [[], []]


@pytest.mark.parametrize(
    ("text", "data"),
    [
        ('{"q": "a"}\n{"q": "b"\n', "file, line 2, character 10: "),
        ('{"q": "a"}\n\n["b"]\n', r'file, line 3: .*\["b"\]'),
        ('{"q": "a"}\n{"question": "b"}\n', "file, line 2: .*'q'.* question"),
        ('{"q": 3}\n', "file, line 1, column 'q': .* 3$"),
        ('{"q": "a", "r": [1]}\n', r"file, line 1, column 'r': .*\[1\]"),
        ('{"q": "a"}\n{"q": "b", "i": {"k": 1, "k": 2}}\n', "file, line 2, .*'k'"),
        (b'{"q": "\xff"}\n', "file: .*utf-8"),
        ("", "file: .*'train'"),
    ],
)
def test_what_is_wrong_with_json_lines_is_named(write, text, data):
    reference_column = "r" if "'r'" in data else None
    with pytest.raises(DataPoolError, match=data):
        JsonlPool.prepare(
            "train", data_files={"train": write(text)}, prompt_column="q", reference_column=reference_column
        )


def test_a_near_miss_is_suggested(write):
    with pytest.raises(DataPoolError, match=r"'promt' .*'prompt'"):
        JsonlPool.prepare("train", data_files={"train": write('{"prompt": "a"}')}, prompt_column="promt")


@pytest.mark.parametrize("pool", [JsonlPool, CsvPool])
def test_a_missing_file_is_named(tmp_path, pool):
    with pytest.raises(DataPoolError):
        pool.prepare("train", path=str(tmp_path / "nowhere"), prompt_column="q")


@pytest.mark.parametrize("pool", [JsonlPool, CsvPool])
def test_devices_and_pipes_are_refused_instead_of_read_without_end(tmp_path, pool):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in ("/dev/zero", str(pipe)):
        with pytest.raises(DataPoolError, match=path):
            pool.prepare("train", path=path, prompt_column="q")


def test_columns_without_a_name_may_be_several(write):
    path = write("q,,\nWhy?,,\n")
    assert CsvPool.prepare("val", data_files={"val": path}, prompt_column="q").samples[0].prompt_or_input_text == "Why?"


def test_csv_columns_become_samples(write):
    path = write('id,q,a\n1,"Why, then?","So.\nNo."\n2,What?,That.\n')
    args = {"data_files": {"val": path}, "prompt_column": "q", "reference_column": "a", "meta_columns": ["id"]}
    assert CsvPool.prepare("val", **args).samples == [
        Sample("val_0", "Why, then?", ["So.\nNo."], {"id": "1"}),
        Sample("val_1", "What?", ["That."], {"id": "2"}),
    ]


@pytest.mark.parametrize(("name", "delimiter"), [("a.tsv", None), ("a.txt", "\t")])
def test_other_delimiters(write, name, delimiter):
    path = write("q\ta\nWhy, then?\tSo.\n", name)
    pool = CsvPool.prepare("val", data_files={"val": path}, prompt_column="q", delimiter=delimiter)
    assert pool.samples[0].prompt_or_input_text == "Why, then?"


@pytest.mark.parametrize(
    ("text", "data"),
    [
        ("q,a\nWhy?,So.\nWhat?\n", r"file, line 3: 1 .* 2 .*\(q, a\)"),
        ('q,a\nWhy?,"So.\n', "file, line 2: "),
        ("q,a,a,q,,\nWhy?,So.,No.,1,,\n", "file, line 1: .*'q', 'a'"),
        ("question,a\nWhy?,So.\n", "file, line 2: .*'q'"),
        ("q,a\n", "file: .*'train'"),
    ],
)
def test_what_is_wrong_with_csv_is_named(write, text, data):
    with pytest.raises(DataPoolError, match=data):
        CsvPool.prepare("train", data_files={"train": write(text)}, prompt_column="q")


def test_packed_files_are_read(write):
    path = write(gzip.compress(b"q\nWhy?\n"), "a.csv.gz")
    assert CsvPool.prepare("val", data_files={"val": path}, prompt_column="q").samples[0].prompt_or_input_text == "Why?"
    packed = gzip.compress(b"q\nWhy?\n")
    for broken in (packed[:-4], packed[:10] + b"\xff" * 8, b"q\nWhy?\n"):
        with pytest.raises(DataPoolError, match=r"b.csv.gz"):
            CsvPool.prepare("val", data_files={"val": write(broken, "b.csv.gz")}, prompt_column="q")


def test_both_pass_the_checker(jsonl, write):
    check_data_pool(JsonlPool, path=jsonl, prompt_column="q", reference_column="answers", meta_columns=["info"])
    table = "q,a\n" + "".join(f"Why {index}?,So.\n" for index in range(10))
    check_data_pool(CsvPool, path=write(table), prompt_column="q", reference_column="a")


def test_a_real_file(shared_dir):
    path = str(shared_dir / "data/commongen/commongen.dev.jsonl")
    pool = JsonlPool.prepare(
        "val", path=path, prompt_column="concept_set", reference_column="scene", split_ratios=(0, 1, 0)
    )
    assert len(pool) > 900
    assert all("#" in sample.prompt_or_input_text and len(sample.references) >= 2 for sample in pool.samples)


def test_files_below_the_home_folder_are_found(write, monkeypatch):
    file = Path(write('{"q": "Why?"}\n', "a.jsonl"))
    monkeypatch.setenv("HOME", str(file.parent))
    args = {"prompt_column": "q", "split_ratios": (1, 0, 0)}
    assert len(JsonlPool.prepare("train", path="~/a.jsonl", **args)) == 1
    assert len(JsonlPool.prepare("train", data_files={"train": "~/a.jsonl"}, **args)) == 1


def test_half_a_character_is_no_text(write):
    path = write('{"q": "Why \\ud83d"}\n', "a.jsonl")
    with pytest.raises(DataPoolError, match=r"a.jsonl, line 1, column 'q': .*'Why .ud83d'"):
        JsonlPool.prepare("val", data_files={"val": path}, prompt_column="q")


def test_a_long_value_is_shortened_in_messages(write):
    path = write('{"q": [' + ", ".join(["1"] * 1000) + "]}", "a.jsonl")
    with pytest.raises(DataPoolError) as raised:
        JsonlPool.prepare("val", data_files={"val": path}, prompt_column="q")
    assert len(str(raised.value)) < len(path) + 100
