"""The pool of preferences reads pairs and labels of any table, and finds the prompt that both responses share."""

from __future__ import annotations

import json

import pytest

from rl4lms_like.core.sample import Preference
from rl4lms_like.data_pools import DATA_POOLS
from rl4lms_like.data_pools.preferences import common_beginning
from rl4lms_like.system.errors import DataPoolError

USER = {"role": "user", "content": "Is it good?"}
GOOD = {"role": "assistant", "content": "Very."}
BAD = {"role": "assistant", "content": "No."}
PAIR = {"prompt": "It was", "chosen": "good", "rejected": "bad"}


def read(folder, rows, name="pairs.jsonl", **args) -> list[Preference]:
    text = "".join(json.dumps(row) + "\n" for row in rows) if isinstance(rows, list) else rows
    (folder / name).write_text(text, encoding="utf-8")
    return DATA_POOLS.get(
        "preferences", {"split": "train", "data_files": {"train": str(folder / name)}, **args}
    ).samples


def test_pairs_with_a_prompt(tmp_path):
    (sample,) = read(tmp_path, [PAIR | {"by": 0.5}], margin_column="by")
    assert sample == Preference("train_0", "It was", ["good"], rejected="bad", margin=0.5)
    assert sample.chosen == "good"


def test_columns_have_any_name_in_any_format(tmp_path):
    names = {"prompt_column": "q", "chosen_column": "a.best", "rejected_column": "a.worst"}
    (sample,) = read(tmp_path, [{"q": "Why?", "a": {"best": "So.", "worst": "Hm."}}], **names)
    assert (sample.prompt_or_input_text, sample.chosen, sample.rejected) == ("Why?", "So.", "Hm.")
    for name, sign in (("pairs.csv", ","), ("pairs.tsv", "\t")):
        text = "".join(f"{sign.join(row)}\n" for row in (PAIR.keys(), PAIR.values()))
        (sample,) = read(tmp_path, text, name)
        assert (sample.prompt_or_input_text, sample.chosen, sample.rejected) == ("It was", "good", "bad")


def test_a_dataset_saved_to_disk(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.DatasetDict({"train": datasets.Dataset.from_list([PAIR] * 3)}).save_to_disk(tmp_path / "saved")
    args = {"split": "train", "dataset": str(tmp_path / "saved"), "split_ratios": [1.0, 0.0, 0.0]}
    assert [sample.rejected for sample in DATA_POOLS.get("preferences", args).samples] == ["bad"] * 3
    with pytest.raises(DataPoolError):
        DATA_POOLS.get("preferences", args | {"path": "pairs.jsonl"})


def test_the_first_rows_of_one_split_of_a_dataset_are_divided(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = {split: [PAIR | {"prompt": f"{split} {n}"} for n in range(10)] for split in ("train", "test")}
    tables = {split: datasets.Dataset.from_list(each) for split, each in rows.items()}
    datasets.DatasetDict(tables).save_to_disk(tmp_path / "saved")
    args = {"dataset": str(tmp_path / "saved"), "divided_split": "train", "max_rows": 6, "split_ratios": [0.5, 0.5, 0]}
    pools = [DATA_POOLS.get("preferences", {"split": split, **args}).samples for split in ("train", "val", "test")]
    assert [len(pool) for pool in pools] == [3, 3, 0]
    prompts = {sample.prompt_or_input_text for pool in pools for sample in pool}
    assert prompts == {f"train {n}" for n in range(6)}
    for wrong in ({"divided_split": "dev"}, {"split_names": {"train": "test"}}):
        with pytest.raises(DataPoolError, match="divided_split"):
            DATA_POOLS.get("preferences", {"split": "train", **args, **wrong})


def test_an_implicit_prompt_is_the_common_beginning_up_to_a_word(tmp_path):
    pair = {"chosen": "Bot: Yes, it was.", "rejected": "Bot: Yesterday."}
    (sample,) = read(tmp_path, [pair])
    assert (sample.prompt_or_input_text, sample.chosen, sample.rejected) == ("Bot:", " Yes, it was.", " Yesterday.")
    assert sample.is_implicit and not read(tmp_path, [PAIR])[0].is_implicit


def test_a_prompt_given_as_messages_is_not_implicit(tmp_path):
    turns = {
        name: [{"role": "user", "content": "Was it?"}, {"role": "assistant", "content": name}]
        for name in ("chosen", "rejected")
    }
    assert not read(tmp_path, [turns])[0].is_implicit


@pytest.mark.parametrize(
    ("chosen", "rejected", "beginning"),
    [
        ("a b", "a b c", "a"),
        ("a b", "a b", "a"),
        ("a", "b", ""),
        ("", "b", ""),
        ("one\n\ntwo x", "one\n\ntwo y", "one\n\ntwo"),
        ("x" * 100_000 + " a", "x" * 100_000 + " b", "x" * 100_000),
    ],
)
def test_the_common_beginning_is_followed_by_white_space_or_nothing(chosen, rejected, beginning):
    assert common_beginning(chosen, rejected) == beginning


@pytest.mark.parametrize(
    "row",
    [
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": [USER], "chosen": "Very.", "rejected": "No."},
        {"prompt": "Is it good?", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
    ],
)
def test_conversations_end_with_the_response(row, tmp_path):
    (sample,) = read(tmp_path, [row])
    assert (sample.messages, sample.chosen, sample.rejected) == ([USER], "Very.", "No.")


def test_labels_in_any_spelling(tmp_path):
    rows = [
        {"prompt": "It was", "response": str(number), "label": label}
        for number, label in enumerate([True, "False", 1, "0"])
    ]
    samples = read(tmp_path, rows, label_column="label")
    assert [(sample.chosen, sample.rejected) for sample in samples] == [
        ("0", None),
        (None, "1"),
        ("2", None),
        (None, "3"),
    ]


def test_truncated_responses_are_marked_by_a_column(tmp_path):
    rows = [PAIR | {"chosen_truncated": True}, PAIR | {"chosen_truncated": False, "rejected_truncated": "true"}, PAIR]
    assert [sample.truncated for sample in read(tmp_path, rows)] == [{"good"}, {"bad"}, set()]
    row = {"prompt": "It was", "text": "bad", "text_truncated": True, "label": False}
    (sample,) = read(tmp_path, [row], label_column="label", response_column="text")
    assert sample.truncated == {"bad"}

    # Of an empty response there is nothing else to learn than its end.
    (sample,) = read(tmp_path, [PAIR | {"chosen": "", "chosen_truncated": True}])
    assert sample.truncated == set()


@pytest.mark.parametrize("empty", [None, ""])
def test_a_completion_with_an_empty_label_is_left_out_and_counted(empty, tmp_path):
    rows = [{"prompt": "It was", "completion": "good", "label": label} for label in (empty, True, empty)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    pool = DATA_POOLS.get("preferences", {"split": "train", "data_files": {"train": str(tmp_path / "rows.jsonl")}})
    assert [sample.id for sample in pool.samples] == ["train_1"]
    assert "2 rows without a preference left out" in pool.row_format

    # With a named column, the row has an error.
    with pytest.raises(DataPoolError, match=r"line 1, column 'label'"):
        read(tmp_path, rows, label_column="label", response_column="completion")


@pytest.mark.parametrize(
    ("row", "args"),
    [
        (PAIR | {"chosen": None}, {}),
        ({"prompt": "It was", "chosen": "good"}, {}),
        (PAIR, {"prompt_column": "question"}),
        (PAIR, {"margin_column": "chosen"}),
        (PAIR | {"by": 10**400}, {"margin_column": "by"}),
        (PAIR | {"chosen_truncated": "perhaps"}, {}),
        ({"chosen": [USER, GOOD], "rejected": [BAD]}, {}),
        ({"chosen": [USER, GOOD], "rejected": [GOOD, BAD]}, {}),
        ({"chosen": [USER], "rejected": [USER]}, {}),
        ({"prompt": "What?", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, {}),
        ({"prompt": "It was", "response": "good", "label": "perhaps"}, {"label_column": "label"}),
        ({"response": "good", "label": True}, {"label_column": "label"}),
    ],
)
def test_an_error_names_the_row(row, args, tmp_path):
    with pytest.raises(DataPoolError, match=r"pairs\.jsonl, line 1"):
        read(tmp_path, [row], **args)


def test_a_file_of_another_format_is_refused(tmp_path):
    with pytest.raises(DataPoolError, match=r"\.jsonl"):
        read(tmp_path, "x", "pairs.docx")
