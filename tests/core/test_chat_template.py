"""Chat templates: messages become the texts and tokens that transformers makes of them, and errors name the cause."""

from __future__ import annotations

import signal
import time
from datetime import date

import pytest

from rl4lms_like.core.chat_template import ChatTemplate, set_template_date
from rl4lms_like.core.observation import TextLayout
from rl4lms_like.core.pictures import Picture
from rl4lms_like.core.sample import Sample
from rl4lms_like.system.errors import DataPoolError
from tests.chat_models import BOS, CHATML, END, FORGETFUL, MARKED, NO_SYSTEM, PLAIN, START, chat_tokenizer
from tests.config_errors import raises_at

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Who wrote the letter?"},
    {"role": "assistant", "content": "Nobody."},
    {"role": "user", "content": "And the film?"},
]


@pytest.fixture
def tokenizer():
    return chat_tokenizer()


def test_a_text_is_the_message_of_a_user(tokenizer):
    sample = ChatTemplate(tokenizer).with_rendered_prompt(Sample("0", "Who knew?"))
    assert sample.rendered_prompt == f"{BOS}{START}user\nWho knew?{END}\n{START}assistant\n"
    assert sample.prompt_or_input_text == "Who knew?"


def test_several_messages_are_rendered_and_rewards_read_their_contents(tokenizer):
    sample = ChatTemplate(tokenizer, "unused").with_rendered_prompt(Sample.of_messages("0", TURNS))
    assert sample.rendered_prompt == tokenizer.apply_chat_template(TURNS, tokenize=False, add_generation_prompt=True)
    assert sample.prompt_or_input_text == "Be brief.\n\nWho wrote the letter?\n\nNobody.\n\nAnd the film?"


def test_a_system_prompt_is_put_before_messages_without_one(tokenizer):
    sample = ChatTemplate(tokenizer, "Be kind.").with_rendered_prompt(Sample("0", "Who knew?"))
    assert sample.rendered_prompt.startswith(f"{BOS}{START}system\nBe kind.{END}\n{START}user\n")
    assert [message["role"] for message in sample.messages] == ["system", "user"]


def test_ids_are_those_of_transformers_with_one_bos(tokenizer):
    sample = ChatTemplate(tokenizer).with_rendered_prompt(Sample.of_messages("0", TURNS))
    ids = TextLayout(tokenizer, 1000, 1).encode(sample).tolist()
    assert ids == tokenizer.apply_chat_template(TURNS, add_generation_prompt=True)["input_ids"]
    assert ids.count(tokenizer.bos_token_id) == 1 == tokenizer("plain")["input_ids"].count(tokenizer.bos_token_id)
    plain = Sample("1", "plain")
    together = TextLayout(tokenizer, 1000, 1).encode_all([sample, plain])
    assert [each.tolist() for each in together] == [ids, tokenizer("plain")["input_ids"]]


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (CHATML, END),
        (CHATML.replace(END, " <eos>"), "<eos>"),
        (CHATML.replace(END, "\n<|im_start|>"), START),
        (PLAIN, None),
    ],
)
def test_the_special_token_after_an_answer_ends_the_turn(template, end):
    tokenizer = chat_tokenizer(template)
    expected = None if end is None else tokenizer.convert_tokens_to_ids(end)
    assert ChatTemplate(tokenizer).end_of_turn == expected


def test_a_prompt_that_ends_with_an_answer_is_refused(tokenizer):
    with pytest.raises(DataPoolError, match="'train_7'"):
        ChatTemplate(tokenizer).with_rendered_prompt(Sample.of_messages("train_7", TURNS[:3]))


def test_a_template_that_refuses_messages_is_named_with_sample_and_reason():
    template = ChatTemplate(chat_tokenizer(NO_SYSTEM), "Be kind.")
    with raises_at("tokenizer.chat_template", mentions="'train_7'"):
        template.with_rendered_prompt(Sample("train_7", "Hi"))
    with raises_at("tokenizer.chat_template", mentions="no system role here"):
        template.with_rendered_prompt(Sample("train_7", "Hi"))


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_the_assistant_writes_its_messages_and_their_end_tokens(template):
    tokenizer = chat_tokenizer(template)
    conversation = [*TURNS, {"role": "assistant", "content": "An old town, naïve and cold."}]
    ids, written = ChatTemplate(tokenizer).encode(conversation)
    assert ids == tokenizer.apply_chat_template(conversation)["input_ids"]
    runs = tokenizer.decode([id if kept else tokenizer.pad_token_id for id, kept in zip(ids, written, strict=True)])
    assert [run for run in runs.split("<pad>") if run] == [f"Nobody.{END}", f"An old town, naïve and cold.{END}"]


def test_without_special_tokens_the_whole_rest_is_written():
    tokenizer = chat_tokenizer(PLAIN)
    ids, written = ChatTemplate(tokenizer).encode([*TURNS[1:3], *TURNS[3:]])
    assert tokenizer.decode([id for id, kept in zip(ids, written, strict=True) if kept]) == "Nobody.\n"


def test_a_template_that_changes_earlier_messages_is_an_error_unless_it_marks_the_answers():
    with raises_at("tokenizer.chat_template", mentions="{% generation %}"):
        ChatTemplate(chat_tokenizer(FORGETFUL)).encode(TURNS)


def test_a_template_whose_loops_never_end_is_an_error_with_the_sample(tokenizer, monkeypatch):
    inner = "{% for i in range(99999) %}{% for i in range(99999) %}{% endfor %}{% endfor %}"
    tokenizer.chat_template = inner + "{{ messages[0].content }}"
    monkeypatch.setattr("rl4lms_like.core.chat_template.RENDERING_S", 0.2)
    start = time.monotonic()
    with raises_at("tokenizer.chat_template", mentions="sample 'a'"):
        ChatTemplate(tokenizer).with_rendered_prompt(Sample("a", "Hello", []))
    assert time.monotonic() - start < 5
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_the_time_limit_holds_for_all_renderings_of_a_message_with_tool_calls(tokenizer, monkeypatch):
    inner = "{% for i in range(99999) %}{% for i in range(99) %}{% endfor %}{% endfor %}"
    tokenizer.chat_template = inner + "{{ messages[0].content }}"
    monkeypatch.setattr("rl4lms_like.core.chat_template.RENDERING_S", 0.05)
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    turns = [*TURNS[1:2], {"role": "assistant", "content": None, "tool_calls": [call]}]
    with raises_at("tokenizer.chat_template", mentions="took longer than"):
        ChatTemplate(tokenizer).render(turns, where="sample 'a'")


def test_marked_answers_that_the_template_refuses_are_an_error_with_the_sample():
    refuses = "{% if messages[-1].content == 'No.' %}{{ raise_exception('not this answer') }}{% endif %}"
    template = ChatTemplate(chat_tokenizer(refuses + MARKED))
    turns = [*TURNS[1:2], {"role": "assistant", "content": "No."}]
    with raises_at("tokenizer.chat_template", mentions="sample 'a'"):
        template.encode(turns, where="sample 'a'")


def test_marks_count_only_in_the_template_that_is_used():
    """The one for tools has none, so the tokens of the answers are found by their characters."""
    tokenizer = chat_tokenizer({"default": MARKED, "tool_use": CHATML})
    tools = [{"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}]
    ids, is_written = ChatTemplate(tokenizer).encode(TURNS[1:3], tools=tools)
    written_ids = [id for id, kept in zip(ids, is_written, strict=True) if kept]
    assert tokenizer.decode(written_ids) == f"Nobody.{END}"


@pytest.mark.parametrize(
    "template",
    [
        "\n{{ strftime_now('%d %b %Y') }}{{ messages[0].content }}",
        "  \t{% if strftime_now is defined %}\n{{ strftime_now('%A, %-d. %B %y; %j') }}{% endif %}\n",
        "\n  {%- macro today() %}{{ strftime_now('%Y-%m-%d') }}{% endmacro %}\n {{ today() + '.' }}\n",
        "{%- if not date_string is defined %}{%- set date_string = strftime_now('%d %b %Y') %}{%- endif %}\n"
        "{{- bos_token }}{{- 'Today Date: ' + date_string }}",
    ],
    ids=["text", "block", "macro", "Llama 3.2"],
)
def test_the_date_that_a_template_writes_is_the_only_change_of_a_fixed_date(tokenizer, template):
    """Compared with what transformers renders, on the same day."""
    tokenizer.chat_template = template
    with_clock = ChatTemplate(tokenizer).render(TURNS)
    set_template_date(tokenizer, date.today().isoformat())
    assert ChatTemplate(tokenizer).render(TURNS) == with_clock or date.today() != tokenizer.template_date
    set_template_date(tokenizer, "2001-02-03")
    assert ChatTemplate(tokenizer).render(TURNS) != with_clock


# As in templates of vision-language models: some read parts and texts, some nothing but parts.
OF_PARTS = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}{{- '[IMG]' -}}{%- elif part['type'] == 'text' -%}{{- part['text'] -}}{%- endif -%}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
OF_BOTH = OF_PARTS.replace(
    "{%- for part in message['content'] -%}",
    "{%- if message['content'] is string -%}{{- message['content'] -}}{%- else -%}"
    "{%- for part in message['content'] -%}",
).replace("{%- endfor -%}\n{{- '<|im_end|>", "{%- endfor -%}{%- endif -%}\n{{- '<|im_end|>")
FIGURE = Picture(contents=b"of a file")


@pytest.mark.parametrize("template", [OF_PARTS, OF_BOTH])
def test_a_template_writes_the_place_of_each_image(template):
    parts = [{"role": "user", "content": [{"type": "text", "text": "Is "}, {"type": "image"}]}]
    samples = {
        "[IMG]Why?": Sample("0", "Why?", images=(FIGURE,)),
        "[IMG] or [IMG]?": Sample("0", "<image> or <image>?", images=(FIGURE, FIGURE)),
        "Is [IMG]": Sample.of_messages("0", parts, images=(FIGURE,)),
        "Is <image> a tag?": Sample("0", "Is <image> a tag?"),  # without images, it is a text
    }
    for content, sample in samples.items():
        rendered = ChatTemplate(chat_tokenizer(template), "Be kind.").with_rendered_prompt(sample).rendered_prompt
        assert rendered == f"{START}system\nBe kind.{END}\n{START}user\n{content}{END}\n{START}assistant\n"


@pytest.mark.parametrize("template", [OF_PARTS, OF_BOTH])
def test_a_template_of_parts_writes_answers_and_their_end(template):
    tokenizer = chat_tokenizer(template)
    chat = ChatTemplate(tokenizer)
    assert chat.end_of_turn == tokenizer.convert_tokens_to_ids(END)
    prompt = chat.with_rendered_prompt(Sample("0", "Why?", images=(FIGURE,))).messages
    ids, written = chat.encode([*prompt, {"role": "assistant", "content": "So."}])
    assert tokenizer.decode([id for id, is_written in zip(ids, written, strict=True) if is_written]) == f"So.{END}"


def test_another_number_of_places_than_images_is_refused(tokenizer):
    with pytest.raises(DataPoolError, match="2 places"):
        ChatTemplate(tokenizer).with_rendered_prompt(Sample("0", "<image> <image>", images=(FIGURE,)))


def test_a_template_of_texts_gets_texts(tokenizer):
    rendered = ChatTemplate(tokenizer).with_rendered_prompt(Sample("0", "Why?")).rendered_prompt
    assert rendered == f"{BOS}{START}user\nWhy?{END}\n{START}assistant\n"
