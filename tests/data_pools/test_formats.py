"""Published formats are recognised by their first row, and become the prompts and responses that are meant."""

from __future__ import annotations

import json
from typing import get_args

import pytest

from rl4lms_like.data_pools import DATA_POOLS
from rl4lms_like.data_pools.formats import CONVERTERS, SIGNS, FormatName, RowFormat, common_turns
from rl4lms_like.system.errors import DataPoolError
from rl4lms_like.system.wording import help_of
from tests.conftest import REPOSITORY

CONVERSATION = {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}]}
WITH_INPUT = {"instruction": "Add {input}.", "input": "2 and {instruction}", "output": "4"}
ALPACA = {"instruction": "Name a town.", "input": "", "output": "Ulm"}
HH = {
    "chosen": "\n\nHuman: Hi\n\nAssistant: Hello.\n\nHuman: Is it?\n\nAssistant: Yes, it is.",
    "rejected": "\n\nHuman: Hi\n\nAssistant: Hello.\n\nHuman: Is it?\n\nAssistant: Yes.\n\nHuman: Eh?\n\nAssistant: So",
}
ASKED = {"role": "user", "content": "Why?"}
SAID = {"role": "assistant", "content": "So."}
HH_PROMPT = "\n\nHuman: Hi\n\nAssistant: Hello.\n\nHuman: Is it?\n\nAssistant:"
ULTRA = {
    "instruction": "Why?",
    "completions": [
        {"response": "Hm.", "overall_score": 10.0, "fine-grained_score": 2.0},
        {"response": "So.", "overall_score": 7.0, "fine-grained_score": 4.5},
        {"response": "No.", "overall_score": 3.0, "fine-grained_score": None},
    ],
}


def pool(folder, id, rows, name="rows.json", **args):
    """A pool of a JSON list of these rows."""
    (folder / name).write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return DATA_POOLS.get(id, {"split": "train", "data_files": {"train": str(folder / name)}, **args})


def facts(samples):
    return [(sample.messages or sample.prompt_or_input_text, sample.references) for sample in samples]


def test_every_format_is_named_where_a_reader_looks():
    page = (REPOSITORY / "docs" / "configuration.md").read_text(encoding="utf-8")
    help_text = help_of(RowFormat)["format"]
    for format in CONVERTERS:
        assert format in SIGNS and f"`{format}`" in help_text and f"\n| `{format}`" in page
    assert set(get_args(FormatName)) == {"columns", *CONVERTERS}


@pytest.mark.parametrize(
    ("format", "rows", "expected"),
    [
        ("sharegpt", [CONVERSATION], [([{"role": "user", "content": "Why?"}], ["So."])]),
        (
            "alpaca",
            [ALPACA, WITH_INPUT],
            [("Name a town.", ["Ulm"]), ("Add {input}.\n\n2 and {instruction}", ["4"])],
        ),
        ("hh", [HH], [(HH_PROMPT, [" Yes, it is."])]),
        ("ultrafeedback", [ULTRA, ULTRA | {"completions": []}], [("Why?", ["So."]), ("Why?", [])]),
        ("prompt_completion", [{"prompt": "Why?", "completion": "So."}], [("Why?", ["So."])]),
        ("prompt_completion", [{"prompt": [ASKED], "completion": [SAID]}], [([ASKED], ["So."])]),
        ("messages", [{"messages": [ASKED, SAID]}, {"messages": [ASKED]}], [([ASKED], ["So."]), ([ASKED], [])]),
        ("text", [{"text": "All of it."}], [("", ["All of it."])]),
    ],
)
def test_rows_of_a_format_are_recognised_and_learned(format, rows, expected, tmp_path):
    read = pool(tmp_path, "jsonl", rows)
    assert facts(read.samples) == expected
    assert read.row_format.startswith(f"{format} (recognised by")

    # The same if it is named, and with a table of another kind.
    assert facts(pool(tmp_path, "jsonl", rows, format=format).samples) == expected
    with pytest.raises(DataPoolError, match="set prompt_column"):
        pool(tmp_path, "jsonl", rows, format="columns")
    with pytest.raises(DataPoolError, match=f"format: {format}"):
        pool(tmp_path, "jsonl", rows, format=format, prompt_column="instruction")


def test_of_conversations_all_turns_are_learned_and_of_prompts_with_completions_the_completion(tmp_path):
    learned = {}
    for rows in (
        [CONVERSATION],
        [{"messages": [ASKED, SAID]}],
        [{"text": "a"}],
        [{"prompt": [ASKED], "completion": [SAID]}],
    ):
        read = pool(tmp_path, "jsonl", rows)
        learned[read.row_format.partition(" ")[0]] = read.samples[0].learned
    assert learned == {
        "sharegpt": "conversation",
        "messages": "conversation",
        "text": "text",
        "prompt_completion": "response",
    }


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": [ASKED], "completion": [SAID, ASKED, SAID]}, "got 3 messages; put those before the last one"),
        ({"prompt": [ASKED], "completion": [ASKED]}, "one message of the assistant"),
        ({"prompt": "Why?", "completion": 3}, "column 'completion'"),
        ({"prompt": "Why?", "completion": SAID}, "expected text or messages"),
    ],
)
def test_completions_are_a_text_or_one_message_of_the_assistant(row, message, tmp_path):
    with pytest.raises(DataPoolError, match=message):
        pool(tmp_path, "jsonl", [row])


@pytest.mark.parametrize("row", [{"text": "a"}, {"messages": [ASKED, SAID]}])
def test_rows_without_two_responses_are_no_preferences(row, tmp_path):
    with pytest.raises(DataPoolError, match="have no preferences; they are for supervised runs"):
        pool(tmp_path, "preferences", [row])


def test_completions_with_labels_are_preferences(tmp_path):
    rows = [
        {"prompt": "Why?", "completion": "So.", "label": True},
        {"prompt": [ASKED], "completion": [SAID], "label": False},
    ]
    good, bad = pool(tmp_path, "preferences", rows).samples
    assert (good.chosen, good.rejected, bad.chosen, bad.rejected) == ("So.", None, None, "So.")
    assert bad.messages == [ASKED]


def test_parquet_files_and_saved_datasets_are_read_as_json_files(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [CONVERSATION, {"conversations": [*CONVERSATION["conversations"], {"from": "human", "value": "And?"}]}]
    expected = facts(pool(tmp_path, "jsonl", rows).samples)
    assert expected[1][1] == []
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(tmp_path / "rows.parquet")
    args = {"split": "train", "data_files": {"train": str(tmp_path / "rows.parquet")}}
    assert facts(DATA_POOLS.get("jsonl", args).samples) == expected
    datasets.DatasetDict({"train": table}).save_to_disk(tmp_path / "saved")
    args = {"split": "train", "path": str(tmp_path / "saved"), "split_ratios": [1.0, 0.0, 0.0]}
    assert sorted(map(str, facts(DATA_POOLS.get("hf_dataset", args).samples))) == sorted(map(str, expected))


def test_columns_of_json_lists_and_parquet_files_are_read(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    rows = [{"q": "Why?", "a": "So."}, {"q": "How?", "a": "Hm."}]
    lines = tmp_path / "lines.json"
    args = {"prompt_column": "q", "reference_column": "a"}
    expected = facts(pool(tmp_path, "jsonl", rows, **args).samples)
    assert expected == [("Why?", ["So."]), ("How?", ["Hm."])]
    for written, expected_of_file in (
        ("".join(json.dumps(row) + "\n" for row in rows), expected),
        (json.dumps({"version": 1, "data": rows}, indent=1), expected),
        (json.dumps(rows[0]), expected[:1]),
    ):
        lines.write_text(written)
        read = DATA_POOLS.get("jsonl", {"split": "train", "data_files": {"train": str(lines)}, **args})
        assert facts(read.samples) == expected_of_file
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    args |= {"split": "train", "data_files": {"train": str(tmp_path / "rows.parquet")}}
    assert facts(DATA_POOLS.get("jsonl", args).samples) == expected


def test_roles_system_messages_tools_and_calls_of_sharegpt(tmp_path):
    turns = [
        {"from": "human", "value": "How warm is it?"},
        {"from": "function_call", "value": '{"name": "weather", "arguments": {}}'},
        {"from": "observation", "value": "-3"},
        {"from": "gpt", "value": "Cold."},
    ]
    tools = [{"type": "function", "function": {"name": "weather"}}]
    rows = [{"conversations": turns, "system": "Be brief.", "tools": json.dumps(tools)}]
    (sample,) = pool(tmp_path, "jsonl", rows).samples
    assert [message["role"] for message in sample.messages] == ["system", "user", "assistant", "tool"]
    assert sample.messages[2]["tool_calls"] == [{"type": "function", "function": {"name": "weather", "arguments": {}}}]
    assert (sample.references, sample.tools) == (["Cold."], tools)

    # A call is also a response.
    (sample,) = pool(tmp_path, "jsonl", [{"conversations": turns[:2]}]).samples
    assert list(sample.response_messages) == sample.references


def test_earlier_turns_of_alpaca_are_messages(tmp_path):
    row = WITH_INPUT | {"system": "Be brief.", "history": [["Hi", "Hello."]]}
    (sample,) = pool(tmp_path, "jsonl", [row]).samples
    assert [message["role"] for message in sample.messages] == ["system", "user", "assistant", "user"]


def test_an_input_template_joins_instruction_and_input(tmp_path):
    template = "### Input:\n{input}\n### Instruction:\n{instruction}"
    (sample,) = pool(tmp_path, "jsonl", [WITH_INPUT], input_template=template).samples
    assert sample.prompt_or_input_text == "### Input:\n2 and {instruction}\n### Instruction:\nAdd {input}."
    with pytest.raises(DataPoolError, match="input_template"):
        pool(tmp_path, "jsonl", [WITH_INPUT], input_template="{instruction}")
    with pytest.raises(DataPoolError, match="input_template"):
        pool(tmp_path, "jsonl", [CONVERSATION], input_template=template)


@pytest.mark.parametrize(
    ("format", "row", "expected"),
    [
        ("hh", HH, (HH_PROMPT, " Yes, it is.", " Yes.\n\nHuman: Eh?\n\nAssistant: So")),
        ("ultrafeedback", ULTRA, ("Why?", "So.", "Hm.")),
        ("alpaca", {"instruction": "Go", "input": "on", "chosen": "a", "rejected": "b"}, ("Go\n\non", "a", "b")),
        (
            "sharegpt",
            {
                "conversations": CONVERSATION["conversations"][:1],
                "chosen": {"from": "gpt", "value": "a"},
                "rejected": {"from": "gpt", "value": "b"},
            },
            ("Why?", "a", "b"),
        ),
    ],
)
def test_preferences_of_a_format(format, row, expected, tmp_path):
    read = pool(tmp_path, "preferences", [row])
    (sample,) = read.samples
    assert (sample.prompt_or_input_text, sample.chosen, sample.rejected) == expected
    assert not sample.is_implicit
    assert read.row_format.startswith(f"{format} (recognised by")
    with pytest.raises(DataPoolError, match=f"format: {format}"):
        pool(tmp_path, "preferences", [row], format=format, chosen_column="other")


def test_hh_as_columns_has_the_common_beginning_as_prompt(tmp_path):
    read = pool(tmp_path, "preferences", [HH], format="columns")
    assert read.samples[0].prompt_or_input_text == f"{HH_PROMPT}"
    close = {"chosen": HH["chosen"], "rejected": HH["chosen"].replace("it is", "it was")}
    assert pool(tmp_path, "preferences", [close], format="columns").samples[0].prompt_or_input_text.endswith("Yes, it")
    assert pool(tmp_path, "preferences", [close]).samples[0].prompt_or_input_text == HH_PROMPT


def test_the_difference_of_scores_can_be_the_margin(tmp_path):
    (sample,) = pool(tmp_path, "preferences", [ULTRA], margin_column="margin").samples
    assert sample.margin == 2.5


def test_a_score_too_large_for_a_number_counts_as_none(tmp_path):
    broken = {"response": "Oh.", "overall_score": 10**400}
    (sample,) = pool(tmp_path, "preferences", [ULTRA | {"completions": [broken, *ULTRA["completions"]]}]).samples
    assert (sample.chosen, sample.rejected) == ("So.", "Hm.")


def test_answers_with_equal_scores_are_left_out_and_counted(tmp_path):
    equal = ULTRA | {"completions": ULTRA["completions"][:1] * 2}
    read = pool(tmp_path, "preferences", [ULTRA, equal, ULTRA | {"completions": []}, ULTRA])
    assert [sample.id for sample in read.samples] == ["train_0", "train_3"]
    assert "2 rows without a preference" in read.row_format


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        ("\n\nHuman: a\n\nAssistant: b", "\n\nHuman: a\n\nAssistant: b", "\n\nHuman: a\n\nAssistant:"),
        ("\n\nHuman: a\n\nAssistant:", "\n\nHuman: a\n\nAssistant: b", "\n\nHuman: a\n\nAssistant:"),
        ("\n\nHuman: a\n\nAssis", "\n\nHuman: a\n\nAssistant: b", ""),
        ("\n\nHuman: a\n\nAssistant: b", "\n\nHuman: b\n\nAssistant: b", ""),
    ],
)
def test_the_prompt_of_hh_ends_where_the_last_common_turn_begins(chosen, rejected, prompt):
    assert common_turns(chosen, rejected) == prompt


def test_an_empty_file_has_no_samples_whatever_its_format_is(tmp_path):
    with pytest.raises(DataPoolError, match="no samples"):
        pool(tmp_path, "jsonl", [], input_template="{input} {instruction}")


@pytest.mark.parametrize(
    ("format", "row"),
    [
        ("sharegpt", {"conversations": "Why?"}),
        ("sharegpt", {"conversations": [{"from": "nobody", "value": "Why?"}]}),
        ("sharegpt", {"conversations": [{"from": "human", "value": None}]}),
        ("sharegpt", {"conversations": [{"from": "function_call", "value": "no JSON"}]}),
        ("sharegpt", {"conversations": [{"from": "function_call", "value": "3"}]}),
        ("sharegpt", {"conversations": [{"from": ["human"], "value": "Why?"}]}),
        ("sharegpt", {"conversations": [{"from": "human", "value": "\ud800"}]}),
        ("sharegpt", {"conversations": CONVERSATION["conversations"][1:]}),
        ("sharegpt", {}),
        ("alpaca", {"instruction": "Why?"}),
        ("alpaca", ALPACA | {"input": 3}),
        ("alpaca", ALPACA | {"history": [["one"]]}),
        ("hh", {"chosen": "a", "rejected": "b"}),
        ("ultrafeedback", {"instruction": "Why?", "completions": [3]}),
        ("ultrafeedback", {"instruction": "Why?", "completions": [{"response": 3, "overall_score": 1}]}),
    ],
)
def test_a_row_that_is_not_of_the_format_is_named(format, row, tmp_path):
    with pytest.raises(DataPoolError, match=r"rows.json, entry 0"):
        pool(tmp_path, "jsonl", [row], format=format)
