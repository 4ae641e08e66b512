"""Tools, calls and results: by real chat templates, and as plain messages where a template does not write them."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from rl4lms_like.core.chat_template import ChatTemplate
from rl4lms_like.core.sample import Sample
from rl4lms_like.core.tool_messages import as_plain_messages
from rl4lms_like.system.errors import ConfigError
from tests.chat_models import CHATML, NO_SYSTEM, chat_tokenizer
from tests.conftest import REPOSITORY

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
QUESTION = {"role": "user", "content": "What is 3 + 4?"}
CALL = {
    "role": "assistant",
    "content": "I add.",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 3, "b": 4}}}],
}
RESULT = {"role": "tool", "name": "add", "content": "the result is seven"}
WRITTEN_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>'


def templates_of_trl() -> Path | None:
    """The folder `chat_templates` of the package trl, which may be installed for the benchmarks only."""
    spec = find_spec("trl")
    folders = [Path(spec.origin).parent / "chat_templates"] if spec and spec.origin else []
    folders += (REPOSITORY / "benchmarks" / ".envs").glob("*/lib/python*/site-packages/trl/chat_templates")
    return next((folder for folder in folders if folder.is_dir()), None)


def template_named(name: str) -> ChatTemplate:
    folder = templates_of_trl()
    if folder is None or not (folder / f"{name}.jinja").is_file():
        pytest.skip(f"needs the chat template {name} of the package trl")
    tokenizer = chat_tokenizer((folder / f"{name}.jinja").read_text(encoding="utf-8"))
    return ChatTemplate(tokenizer)


WRITE_TOOLS = ("qwen2_5", "qwen3", "llama3_1", "glm4moe", "lfm2_2_5", "nemotron_3_nano")
LEAVE_TOOLS_OUT = ("gemma3", "phi3", "cohere", "llama3", "deepseekv3", "qwen2_5_vl")


@pytest.mark.parametrize("name", WRITE_TOOLS)
def test_real_templates_that_write_tools_calls_and_results(name):
    template = template_named(name)
    prompt = template.with_rendered_prompt(Sample.of_messages("0", [QUESTION, CALL, RESULT], tools=[ADD]))
    assert "Add two numbers." in prompt.rendered_prompt
    assert prompt.rendered_prompt.index("Add two numbers.") < prompt.rendered_prompt.index("the result is seven")

    # A result that follows what the model has written itself, as in a dialogue.
    written = {"role": "assistant", "content": f"I add.\n{WRITTEN_CALL}"}
    rendered = template.render([QUESTION, written, RESULT], tools=[ADD], add_generation_prompt=True)
    assert "the result is seven" in rendered.partition(WRITTEN_CALL)[2]


@pytest.mark.parametrize("name", LEAVE_TOOLS_OUT)
def test_real_templates_that_leave_tools_out_name_the_key(name):
    template = template_named(name)
    with pytest.raises(ConfigError, match=r"does not write the tools of sample '0'.*tools_in_system: true"):
        template.with_rendered_prompt(Sample.of_messages("0", [QUESTION], tools=[ADD]))


@pytest.mark.parametrize("name", ["gemma3", "cohere", "phi3", "phi3_5", "cohere2", "gptoss"])
def test_real_templates_that_skip_or_refuse_a_result_name_the_key(name):
    answered = [QUESTION, {"role": "assistant", "content": "I add."}, RESULT]
    with pytest.raises(ConfigError, match="tools_in_system: true"):
        template_named(name).render(answered, add_generation_prompt=True, where="sample '0'")


@pytest.mark.parametrize("name", [*LEAVE_TOOLS_OUT, *WRITE_TOOLS, "phi3_5", "cohere2"])
def test_tools_in_system_works_with_real_templates(name):
    template = ChatTemplate(template_named(name).tokenizer, tools_in_system=True)
    messages = [QUESTION, CALL, RESULT, {**RESULT, "content": "and eight"}]
    prompt = template.with_rendered_prompt(Sample.of_messages("0", messages, tools=[ADD])).rendered_prompt
    parts = ["Add two numbers.", "What is 3 + 4?", "I add.", '{"name": "add", "arguments": {"a": 3, "b": 4}}']
    places = [prompt.index(part) for part in [*parts, "the result is seven", "and eight"]]
    assert places == sorted(places)


def test_plain_messages():
    plain = as_plain_messages([QUESTION, CALL, RESULT, {**RESULT, "content": "8"}, CALL], [ADD])
    assert [message["role"] for message in plain] == ["system", "user", "assistant", "user", "assistant"]
    assert json.dumps(ADD) in plain[0]["content"]
    assert plain[1] is QUESTION
    assert plain[2] == {"role": "assistant", "content": f"I add.\n{WRITTEN_CALL}"}
    result = "<tool_response>\nthe result is seven\n</tool_response>\n<tool_response>\n8\n</tool_response>"
    assert plain[3] == {"role": "user", "content": result}


def test_the_schemas_follow_a_system_message_and_arguments_may_be_texts():
    system = {"role": "system", "content": "Be brief."}
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add", "arguments": '{"a": 3, "b": 4}'}]}
    plain = as_plain_messages([system, QUESTION, call], [ADD])
    assert plain[0]["content"].startswith("Be brief.\n\nYou may call") and len(plain) == 3
    assert plain[2] == {"role": "assistant", "content": WRITTEN_CALL}


def test_a_sample_is_rendered_as_its_plain_messages():
    tokenizer = chat_tokenizer(CHATML)
    template = ChatTemplate(tokenizer, system_prompt="Be brief.", tools_in_system=True)
    text = json.dumps(CALL)
    sample = Sample("0", "", [text], messages=[QUESTION, CALL, RESULT], tools=[ADD], response_messages={text: CALL})
    rendered = template.with_rendered_prompt(sample)
    plain = as_plain_messages([{"role": "system", "content": "Be brief."}, QUESTION, CALL, RESULT], [ADD])
    assert rendered.rendered_prompt == ChatTemplate(tokenizer).render(plain, add_generation_prompt=True)
    assert rendered.references == [f"I add.\n{WRITTEN_CALL}"]
    assert rendered.tools is None

    # The conversation is encoded alike with and without the option from then on.
    conversation = [*rendered.messages, *rendered.response_turns(rendered.references[0])]
    assert ChatTemplate(tokenizer).encode(conversation) == template.encode([*rendered.messages, CALL])


def test_without_tools_nothing_changes():
    messages = [{"role": "system", "content": "Be brief."}, QUESTION, {"role": "assistant", "content": "7"}, QUESTION]
    tokenizer = chat_tokenizer(CHATML)
    sample = Sample.of_messages("0", messages)
    assert ChatTemplate(tokenizer, tools_in_system=True).with_rendered_prompt(sample) == ChatTemplate(
        tokenizer
    ).with_rendered_prompt(sample)


def test_a_template_that_skips_results_is_an_error_and_one_without_system_messages_too():
    skips = "{% for message in messages if message.role != 'tool' %}{{ message.content }}{% endfor %}"
    with pytest.raises(ConfigError, match=r"does not write the results of tools of sample 'a'.*tools_in_system"):
        ChatTemplate(chat_tokenizer(skips)).render([QUESTION, RESULT], where="sample 'a'")
    template = ChatTemplate(chat_tokenizer(NO_SYSTEM), tools_in_system=True)
    with pytest.raises(ConfigError, match="no system role here"):
        template.with_rendered_prompt(Sample.of_messages("0", [QUESTION], tools=[ADD]))


def test_arguments_that_are_no_json_are_written_as_a_text():
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": "3 and 4"}]}
    (message,) = as_plain_messages([call], tools=None)
    assert message["content"] == '<tool_call>\n{"name": "add", "arguments": "3 and 4"}\n</tool_call>'
