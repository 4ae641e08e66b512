"""Responses are whole messages: reasoning, tool calls and tools reach the template, and what it writes is learned."""

from __future__ import annotations

import json

import pytest

from rl4lms_like.config.run_config import TokenizerConfig
from rl4lms_like.core.sample import Sample
from rl4lms_like.data_pools import DATA_POOLS
from rl4lms_like.offline.pairs import encode_pairs, encode_texts
from rl4lms_like.system.errors import DataPoolError
from rl4lms_like.training.examples import NOT_LEARNED, ExampleEncoder
from rl4lms_like.training.inputs import render_prompts
from tests.chat_models import CHATML, END, MARKED, OPENS_REASONING, REASONING, chat_tokenizer
from tests.config_errors import raises_at

USER = {"role": "user", "content": "How warm is it?"}
ANSWER = {"role": "assistant", "content": "It is cold."}
THOUGHT = ANSWER | {"reasoning_content": "It is winter."}
OTHER_THOUGHT = ANSWER | {"reasoning_content": "I do not know."}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"town": "Ulm"}}}],
}
RESULT = {"role": "tool", "content": "-3"}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]


def samples_of(folder, pool, rows, tokenizer, *, template=True, **args) -> list[Sample]:
    """Samples of a file with rendered prompts, as a run reads them."""
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    prepared = DATA_POOLS.get(pool, {"split": "train", "data_files": {"train": str(file)}, **args})
    config = TokenizerConfig(model_name="unused", chat_template=template)
    return [sample for sample, _ in render_prompts({"train": prepared}, config, tokenizer)["train"]]


def supervised(folder, turns, tokenizer, **columns) -> list[Sample]:
    row = {"turns": turns, **columns}
    return samples_of(folder, "jsonl", [row], tokenizer, prompt_column="turns", last_message_as_reference=True)


def encoder(tokenizer) -> ExampleEncoder:
    return ExampleEncoder(
        tokenizer=tokenizer,
        is_encoder_decoder=False,
        max_prompt_length=1000,
        max_length=2000,
        end_token_id=tokenizer.eos_token_id,
    )


def learned(tokenizer, row) -> str:
    return tokenizer.decode([label for label in row["labels"] if label != NOT_LEARNED])


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (ANSWER, "<think>\n\n</think>\n\nIt is cold."),
        (THOUGHT, "<think>\nIt is winter.\n</think>\n\nIt is cold."),
        (
            CALL,
            '<think>\n\n</think>\n\n<tool_call>\n{"name": "weather", "arguments": {"town": "Ulm"}}\n</tool_call>',
        ),
    ],
)
def test_what_the_template_writes_of_a_message_is_learned(message, text, tmp_path):
    tokenizer = chat_tokenizer(REASONING)
    (sample,) = supervised(tmp_path, [USER, message], tokenizer, tools=TOOLS)
    (row,) = encoder(tokenizer).encode([sample]).rows
    assert row["input_ids"] == tokenizer.apply_chat_template([USER, message], tools=TOOLS)["input_ids"]
    assert learned(tokenizer, row) == text + END


@pytest.mark.parametrize("arguments", [{"town": "Ulm"}, '{"town": "Ulm"}'])
@pytest.mark.parametrize(
    "written", ["call.function.arguments | tojson", "call.function.arguments + ''", "call.function.arguments.items()"]
)
def test_arguments_of_calls_are_read_by_every_template(written, arguments, tmp_path):
    tokenizer = chat_tokenizer(REASONING.replace("call.function | tojson", written))
    function = {"name": "weather", "arguments": arguments}
    (sample,) = supervised(tmp_path, [USER, CALL | {"tool_calls": [{"function": function}]}], tokenizer)
    text = "dict_items([('town', 'Ulm')])" if "items" in written else '{"town": "Ulm"}'
    assert f"<tool_call>\n{text}\n</tool_call>" in sample.references[0]
    assert learned(tokenizer, encoder(tokenizer).encode([sample]).rows[0]) == sample.references[0] + END


def test_the_reference_of_a_whole_message_is_what_the_model_is_to_write(tmp_path):
    tokenizer = chat_tokenizer(REASONING)
    (sample,) = supervised(tmp_path, [USER, THOUGHT], tokenizer)
    assert sample.references == ["<think>\nIt is winter.\n</think>\n\nIt is cold."]

    # Of a message with nothing but a content, or keys that the template does not read, it is the content.
    for message in (ANSWER, ANSWER | {"date": "yesterday"}):
        (sample,) = supervised(tmp_path, [USER, message], tokenizer)
        assert sample.references == ["It is cold."]
        assert sample.response_messages == {}


def test_tools_and_earlier_tool_calls_are_in_the_prompt(tmp_path):
    tokenizer = chat_tokenizer(REASONING)
    turns = [USER, CALL, RESULT]
    rows = [{"turns": turns, "functions": json.dumps(TOOLS)}]
    (sample,) = samples_of(tmp_path, "jsonl", rows, tokenizer, prompt_column="turns", tools_column="functions")
    expected = tokenizer.apply_chat_template(turns, tools=TOOLS, tokenize=False, add_generation_prompt=True)
    assert sample.rendered_prompt == expected
    assert sample.prompt_or_input_text == "How warm is it?\n\n-3"


def test_keys_that_a_table_fills_in_are_not_part_of_a_message(tmp_path):
    tokenizer = chat_tokenizer(REASONING.replace("message.reasoning_content or ''", "'reasoning_content' in message"))
    filled = [USER | {"reasoning_content": None, "tool_calls": None}, ANSWER | {"reasoning_content": None}]
    (sample,) = supervised(tmp_path, filled, tokenizer, tools=None)
    assert sample.messages == [USER]
    assert learned(tokenizer, encoder(tokenizer).encode([sample]).rows[0]).startswith("<think>\nFalse\n")


@pytest.mark.parametrize("good_and_bad", [(THOUGHT, OTHER_THOUGHT), (THOUGHT, ANSWER), (CALL, ANSWER)])
def test_pairs_that_differ_only_in_reasoning_or_calls_are_not_identical(good_and_bad, tmp_path):
    tokenizer = chat_tokenizer(REASONING)
    good, bad = good_and_bad
    rows = [{"chosen": [USER, good], "rejected": [USER, bad]}, {"chosen": [USER, good], "rejected": [USER, good]}]
    samples = samples_of(tmp_path, "preferences", rows, tokenizer)
    pairs = encode_pairs(encoder(tokenizer), samples)
    assert (pairs.n_identical, pairs.n_empty, pairs.n_implicit) == (1, 0, 0)
    for message, ids in zip(good_and_bad, pairs.rows[0]["responses"], strict=True):
        whole = tokenizer.apply_chat_template([USER, message])["input_ids"]
        assert [*pairs.rows[0]["prompt"], *ids] == whole[: len(whole) - whole[::-1].index(ids[-1])]
        assert tokenizer.decode(ids).endswith(END)


def test_a_reward_model_reads_whole_messages(tmp_path):
    tokenizer = chat_tokenizer(REASONING)
    rows = [{"chosen": [USER, CALL], "rejected": [USER, THOUGHT], "tools": TOOLS}]
    samples = samples_of(tmp_path, "preferences", rows, tokenizer)
    (row,) = encode_texts(encoder(tokenizer), samples, append_eos=False, split_beginning=False).rows
    for message, ids in zip((CALL, THOUGHT), row["responses"], strict=True):
        assert ids == tokenizer.apply_chat_template([USER, message], tools=TOOLS)["input_ids"]


def test_preferences_need_only_the_last_response_of_a_template_that_changes_earlier_ones(tmp_path):
    tokenizer = chat_tokenizer(REASONING)
    before = [USER, THOUGHT, USER]
    rows = [{"chosen": [*before, THOUGHT], "rejected": [*before, ANSWER]}]
    (row,) = encode_pairs(encoder(tokenizer), samples_of(tmp_path, "preferences", rows, tokenizer)).rows
    whole = tokenizer.apply_chat_template([*before, THOUGHT])["input_ids"]
    assert [*row["prompt"], *row["responses"][0]] == whole[: len(row["prompt"]) + len(row["responses"][0])]
    assert tokenizer.decode(row["responses"][0]) == f"<think>\nIt is winter.\n</think>\n\nIt is cold.{END}"

    # Supervised training learns the earlier messages, too.
    with raises_at("tokenizer.chat_template", mentions="message 2 of sample 'train_0'"):
        encoder(tokenizer).encode(supervised(tmp_path, [*before, THOUGHT], tokenizer))


def test_a_template_that_begins_generated_responses_in_another_way_is_named(tmp_path):
    tokenizer = chat_tokenizer(OPENS_REASONING)
    with raises_at("tokenizer.chat_template", mentions=r"'<|im_start|>assistant\n<think>\n'"):
        encoder(tokenizer).encode(supervised(tmp_path, [USER, ANSWER], tokenizer))


@pytest.mark.parametrize(
    ("message", "key"),
    [(CALL, "tool_calls"), (THOUGHT, "reasoning_content"), (THOUGHT | {"thinking": "Hm."}, "reasoning_content")],
)
def test_a_template_that_does_not_write_a_response_is_refused(message, key, tmp_path):
    with raises_at("tokenizer.chat_template", mentions=f"`{key}` of the response of sample 'train_0'"):
        supervised(tmp_path, [USER, message], chat_tokenizer(CHATML))


def test_a_template_that_does_not_write_earlier_tool_calls_is_refused(tmp_path):
    with raises_at("tokenizer.chat_template", mentions="does not write the `tool_calls` of the prompt"):
        supervised(tmp_path, [USER, CALL, RESULT, ANSWER], chat_tokenizer(CHATML))


def test_a_template_that_does_not_write_tools_is_refused(tmp_path):
    with raises_at("tokenizer.chat_template", mentions="does not write the tools of sample 'train_0'"):
        supervised(tmp_path, [USER, ANSWER], chat_tokenizer(CHATML), tools=TOOLS)


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_a_missing_content_is_not_written_as_a_word(template, tmp_path):
    calls = "{{ message.content }}{{ message.tool_calls[0].function.name if message.tool_calls }}"
    tokenizer = chat_tokenizer(template.replace("{{ message.content }}", calls))
    (sample,) = supervised(tmp_path, [USER, CALL], tokenizer)
    assert learned(tokenizer, encoder(tokenizer).encode([sample]).rows[0]) == f"weather{END}"


def test_a_template_that_tests_for_a_missing_content_gets_none(tmp_path):
    calls = "{{ message.content if message.content is string else 'calls' }}"
    tokenizer = chat_tokenizer(REASONING.replace("{{ message.content or '' }}", calls))
    (sample,) = supervised(tmp_path, [USER, CALL], tokenizer)
    assert "</think>\n\ncalls<tool_call>" in sample.references[0]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None},
        {"role": "user", "content": None},
        CALL | {"tool_calls": []},
        CALL | {"tool_calls": "[3]"},
        CALL | {"tool_calls": "no JSON"},
    ],
)
def test_a_message_without_anything_to_say_is_refused(message, tmp_path):
    with pytest.raises(DataPoolError, match=r"rows.jsonl, line 1, column 'turns'"):
        supervised(tmp_path, [USER, message], chat_tokenizer(REASONING))


def test_whole_messages_need_a_template(tmp_path):
    rows = [{"prompt": "Hi", "chosen": [CALL], "rejected": [ANSWER]}]
    with raises_at("tokenizer.chat_template", mentions="'train_0'"):
        samples_of(tmp_path, "preferences", rows, None, template=False)
