"""Chat templates: prompts as messages, rendered by the template of the tokenizer.

    messages    system: Be brief.   user: What is 2 + 2?
    rendered    <|im_start|>system⏎Be brief.<|im_end|>⏎<|im_start|>user⏎What is 2 + 2?<|im_end|>⏎<|im_start|>assistant⏎
    response    4<|im_end|>

The template writes all special tokens, so no other ones are added when a rendered prompt is encoded. The token that it
writes after a message of the assistant ends a response.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

from rl4lms_like.core.pictures import messages_with_places, with_parts
from rl4lms_like.core.sample import SPOKEN_KEYS, Message, Sample
from rl4lms_like.core.tool_messages import as_plain_messages, with_plain_responses
from rl4lms_like.system.deadline import deadline
from rl4lms_like.system.disk import with_home
from rl4lms_like.system.errors import ConfigError, ConfigIssue, DataPoolError, RL4LMsLikeError
from rl4lms_like.system.regular_files import LARGEST_TEMPLATE, read_small
from rl4lms_like.system.wording import beginning

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEY = "tokenizer.chat_template"
TOOLS_KEY = "tokenizer.tools_in_system"

CHATML = "chatml"
"""Value of `tokenizer.chat_template` that stands for the following template."""
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
CHATML_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- message['content'] + '<|im_end|>' -}}{%- endgeneration -%}
{%- else -%}
{{- message['content'] + '<|im_end|>' -}}
{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
"""Marks what the assistant writes. Like most ChatML templates, it begins with no BOS token."""

_MARKER = re.compile(r"<\|[^|<>\s]+\|>|<(?:start|end)_of_turn>")
"""Texts that are special tokens of chat formats."""

Tools: TypeAlias = "Sequence[dict[str, Any]] | None"
"""Descriptions of functions that a model may call, as JSON schemas."""

RENDERING_S = 10.0
"""Seconds after which the rendering of one conversation is given up: nested loops of a template may never end."""

_MARKED = re.compile(r"\{%-?\s*generation\b")
"""The tag with which a template marks what the assistant writes."""

PLACEHOLDER = "X7Q"
"""A content that occurs nowhere else in a rendered conversation."""

PLACEHOLDER_TURN: list[Message] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": PLACEHOLDER}]
"""The shortest conversation in which the assistant has written something."""

_DIRECTIVE = re.compile(r"%-?[A-Za-z]")
_SPACES_BEFORE_BLOCK = re.compile(r"[ \t]+\{[%#](?!\+)")

_DATE = "template_date"
"""Attribute of a tokenizer with the day that its chat template writes as today."""


def set_template_date(tokenizer: PreTrainedTokenizerBase, day: str) -> None:
    """Fix the date that the tokenizer's chat template writes as today; it is not saved with the tokenizer."""
    setattr(tokenizer, _DATE, date.fromisoformat(day))


def dated_template(tokenizer: PreTrainedTokenizerBase, tools: Tools = None) -> str | None:
    """Return the tokenizer's chat template with the date of `set_template_date`; None if that changes nothing.

    Examples:
        >>> from types import SimpleNamespace
        >>> tokenizer = SimpleNamespace(get_chat_template=lambda tools: "{{ strftime_now('%d %b') }}")
        >>> set_template_date(tokenizer, "2026-11-20")
        >>> dated_template(tokenizer).partition("{% endmacro %}")[0]
        '{% macro strftime_now(format) %}{{ format.replace("%b", "Nov").replace("%d", "20") }}'
    """
    day = getattr(tokenizer, _DATE, None)
    if day is None:
        return None
    # A tokenizer may have a template of its own for prompts with tools.
    template = str(tokenizer.get_chat_template(tools=list(tools) if tools else None))
    if "strftime_now" not in template:
        return None

    # transformers gives templates the function `strftime_now`, and passes no other functions to them. A macro of that
    # name hides it. It replaces the directives of `strftime` that occur in the template.
    replacements = ""
    for directive in sorted(set(_DIRECTIVE.findall(template))):
        with suppress(ValueError):  # on Windows, of what looks like a directive
            replacements += f".replace({json.dumps(directive)}, {json.dumps(day.strftime(directive))})"
    macro = f"{{% macro strftime_now(format) %}}{{{{ format{replacements} }}}}{{% endmacro %}}"

    # The empty expression keeps a line break at the beginning, which is removed after a block. Spaces before a block
    # are removed at the beginning of a line only, where the template now no longer begins.
    if _SPACES_BEFORE_BLOCK.match(template):
        template = template.lstrip(" \t")
    return macro + "{{ '' }}" + template


def template_text(chat_template: str) -> str:
    """Return the template of a `chat_template` that is not a boolean: ChatML, or the content of a file.

    Raises:
        ConfigError: the file cannot be read.
    """
    if chat_template == CHATML:
        return CHATML_TEMPLATE
    try:
        return read_small(with_home(chat_template), LARGEST_TEMPLATE).decode("utf-8")
    except (OSError, UnicodeError, RL4LMsLikeError) as error:
        raise chat_template_issue(f"cannot read {chat_template!r}: {error}") from error


def require_markers(tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that the special texts which a chat template writes are tokens, and that one ends the assistant's turn.

    Raises:
        ConfigError: they are not; the message names the key that adds them.
    """
    template = ChatTemplate(tokenizer)
    rendered = template.render(PLACEHOLDER_TURN)
    with suppress(ConfigError):  # of a template without system messages
        rendered += template.render([{"role": "system", "content": "a"}, *PLACEHOLDER_TURN])

    markers = list(dict.fromkeys(_MARKER.findall(rendered)))
    known = ids_of_tokens(tokenizer, markers)
    missing = [marker for marker in markers if marker not in known]
    if missing:
        n_pieces = len(tokenizer(missing[0], add_special_tokens=False)["input_ids"])
        pieces = "unknown to" if n_pieces == 1 else f"{n_pieces} tokens of"
        raise chat_template_issue(
            f"its {missing[0]!r} is {pieces} {tokenizer.name_or_path!r}, which has no such token; add the tokens of "
            f"the template: tokenizer.add_tokens: {json.dumps(missing)}"
        )
    if template.end_of_turn is None:
        raise chat_template_issue(
            f"it writes no special token of {tokenizer.name_or_path!r} after a message of the assistant, so that no "
            f"response would end; use one that does, such as chatml, or name the token that it writes in "
            f"tokenizer.add_tokens"
        )


def ids_of_tokens(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> dict[str, int]:
    """Return the ids of the texts that a tokenizer encodes as one token."""
    ids = {}
    for text in texts:
        # Encoded as in a prompt: the vocabulary may spell it differently, as byte-level tokenizers do with "é". A text
        # that is one unknown token is no token.
        encoded = tokenizer(text, add_special_tokens=False)["input_ids"]
        is_unknown = encoded == [tokenizer.unk_token_id] and text != tokenizer.unk_token
        if len(encoded) == 1 and not is_unknown:
            ids[text] = int(encoded[0])
    return ids


def chat_template_issue(message: str) -> ConfigError:
    """Return an error about the chat template."""
    return ConfigError([ConfigIssue(KEY, message)])


@dataclass(frozen=True)
class ChatTemplate:
    """Template of a tokenizer, which renders messages as text.

    Args:
        tokenizer: has a chat template.
        system_prompt: system message that is put before messages without one.
        tools_in_system: write tools, their calls and their results as plain messages, for templates that do not write
            them: the schemas into the system message, the results into a message of the user.
    """

    tokenizer: PreTrainedTokenizerBase
    system_prompt: str | None = None
    tools_in_system: bool = False

    def with_rendered_prompt(self, sample: Sample) -> Sample:
        """Return the sample with all its messages and its rendered prompt; a text is the message of a user.

        Raises:
            ConfigError: the template does not accept the messages; the error names the sample.
            DataPoolError: the last message is one of the assistant.
        """
        if sample.learned == "text":  # no message of anybody
            return sample
        messages = list(sample.messages or [{"role": "user", "content": sample.prompt_or_input_text}])

        # Not in front of another one: many templates accept a single system message, and only as the first.
        if self.system_prompt is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        if self.tools_in_system:
            sample = with_plain_responses(sample)
            messages = as_plain_messages(messages, sample.tools)
            sample = replace(sample, tools=None)  # the system message has them now

        # The template writes the tokens of a vision model at the place of each picture.
        if sample.images:
            messages = with_parts(messages_with_places(messages, len(sample.images)))
        if messages[-1]["role"] == "assistant":
            raise DataPoolError(
                f"the messages of sample {sample.id!r} end with one of the assistant, so there is nothing to respond "
                f"to; datapool.args.last_message_as_reference: true makes it the reference"
            )

        where = f"sample {sample.id!r}"
        rendered = self.render(messages, add_generation_prompt=True, tools=sample.tools, where=where)
        if sample.tools and rendered == self.render(messages, add_generation_prompt=True, where=where):
            raise self._not_written("the tools", where)

        # Earlier calls, too: a supervised run learns all messages of the assistant. Their reasoning may be left out.
        if any(message.get("tool_calls") for message in messages):
            without_calls = []
            for message in messages:
                without_calls.append({key: value for key, value in message.items() if key != "tool_calls"})
            if rendered == self.render(without_calls, add_generation_prompt=True, tools=sample.tools, where=where):
                raise self._not_written("the `tool_calls` of the prompt", where)
        sample = replace(sample, messages=messages, rendered_prompt=rendered)
        return self._with_written_responses(sample) if sample.response_messages else sample

    def _with_written_responses(self, sample: Sample) -> Sample:
        """Return the sample with the texts that the model is to write for responses that are whole messages."""
        where = f"sample {sample.id!r}"
        texts: dict[str, str] = {}
        messages: dict[str, Message | list[Message]] = {}
        for text in sample.response_messages:
            turns = list(sample.messages or ())
            response = sample.response_turns(text)
            rendered = self.render([*turns, *response], tools=sample.tools, where=where)

            # A tool call without its call would teach the model to end at once, and reasoning to leave it out.
            for keys in SPOKEN_KEYS:
                present = [key for message in response for key in keys if message.get(key)]
                shortened = []
                for message in response:
                    shortened.append({key: value for key, value in message.items() if key not in keys})
                if present and self.render([*turns, *shortened], tools=sample.tools, where=where) == rendered:
                    raise self._not_written(f"`{present[0]}` of the response", where)

            # Other keys, such as the date of a message, may have no effect: then the response is its content.
            plain = {"role": "assistant", "content": response[0]["content"] or ""}
            if len(response) == 1 and self.render([*turns, plain], tools=sample.tools, where=where) == rendered:
                texts[text] = plain["content"]
                continue
            prompt = self._prompt_before(rendered, turns, tools=sample.tools, where=where)
            texts[text] = self._until_end_of_turn(rendered[len(prompt) :], has_turns=len(response) > 1)
            messages[texts[text]] = sample.response_messages[text]
        return sample.with_responses(texts, messages)

    def _until_end_of_turn(self, text: str, *, has_turns: bool) -> str:
        """Return the text up to the token that ends its turn; up to the last one if it has several turns."""
        end = self.end_of_turn
        token = None if end is None else str(self.tokenizer.convert_ids_to_tokens(end))
        if token is None or token not in text:
            return text
        return text.rpartition(token)[0] if has_turns else text.partition(token)[0]

    def _not_written(self, what: str, where: str) -> ConfigError:
        return chat_template_issue(
            f"the chat template of {self.tokenizer.name_or_path!r} does not write {what} of {where}; use a template "
            f"that does, set {TOOLS_KEY}: true, or remove them from the data"
        )

    def _prompt_before(self, rendered: str, messages: Sequence[Message], *, tools: Tools, where: str) -> str:
        """Return the text from which a response is generated, with which its rendered conversation must begin.

        Args:
            rendered: the text of the messages and of the response.
            messages: the messages before the response.
            tools: the tools of the sample.
            where: description of the messages for the error.

        Raises:
            ConfigError: the response is rendered after another text.
        """
        prompt = self.render(messages, add_generation_prompt=True, tools=tools, where=where)
        if rendered.startswith(prompt):
            return prompt

        # Either only the beginning of the assistant's message is another one, or already the messages before it.
        of = f" of {where}" if where else ""
        name = f"the chat template of {self.tokenizer.name_or_path!r}"
        before = self.render(messages, tools=tools, where=where)
        if rendered.startswith(before) and prompt.startswith(before):
            raise chat_template_issue(
                f"{name} lets a generated response begin with {prompt[len(before) :]!r}, but writes the response{of} "
                f"as {beginning(rendered[len(before) :])}; use a template that begins both in the same way"
            )
        raise chat_template_issue(
            f"{name} renders the messages{of} differently when a message of the assistant follows, so its tokens "
            f"cannot be found; use a template with {{% generation %}}"
        )

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        tools: Tools = None,
        where: str = "",
    ) -> str:
        """Return messages as text.

        Args:
            messages: the messages.
            add_generation_prompt: end with the beginning of the assistant's message.
            tools: descriptions of functions that the model may call.
            where: description of the messages for the error.

        Raises:
            ConfigError: the template does not accept them, or does not write the result of a tool.
        """
        arguments: dict[str, Any] = {"tokenize": False, "add_generation_prompt": add_generation_prompt}
        rendered = str(self._applied(messages, tools=tools, where=where, **arguments))

        # Some templates skip roles that they do not know, or results without a call in `tool_calls` before them: the
        # model would call a tool and never see what it returned.
        others = []
        for message in messages:
            others.append({**message, "content": PLACEHOLDER} if message["role"] == "tool" else message)
        has_results = any(message["role"] == "tool" and message["content"] != PLACEHOLDER for message in messages)
        if has_results and self._applied(others, tools=tools, where=where, **arguments) == rendered:
            raise self._not_written("the results of tools", where or "these messages")
        return rendered

    def _applied(self, messages: Sequence[Message], *, tools: Tools, where: str, **arguments: Any) -> Any:
        """Return what `apply_chat_template` makes of messages, with these arguments; for errors, see `render`."""
        if self.tools_in_system:
            messages = as_plain_messages(messages, tools)
            tools = None
        has_parts = any(isinstance(message.get("content"), list) for message in messages)
        try:
            with deadline(RENDERING_S, "rendering"):
                if has_parts or self._reads_parts_only:
                    messages = [_with_text_part(message) for message in messages]
                return self.tokenizer.apply_chat_template(
                    self._readable(messages, tools),
                    tools=list(tools) if tools else None,
                    chat_template=dated_template(self.tokenizer, tools),
                    **arguments,
                )
        except Exception as error:
            # Templates are programs of the model's authors, and may raise anything. Usually it is the order of the
            # roles.
            roles = ", ".join(str(message["role"]) for message in messages)
            of = f" of {where}" if where else ""
            has_calls = any(message["role"] == "tool" or message.get("tool_calls") for message in messages)
            hint = f"; {TOOLS_KEY}: true writes results and calls of tools as plain messages" if has_calls else ""
            raise chat_template_issue(
                f"the chat template of {self.tokenizer.name_or_path!r} does not accept the messages{of} ({roles}): "
                f"{error}{hint}"
            ) from error

    def _readable(self, messages: Sequence[Message], tools: Tools) -> list[Message]:
        """Return the messages with missing contents and arguments of tool calls in a form that the template can read.

        Contents are None, else an empty text. Arguments are objects, else JSON texts.
        """
        if not any(message.get("content") is None or message.get("tool_calls") for message in messages):
            return list(messages)

        # A template that encodes arguments as JSON would encode a text twice; one that joins texts fails for an object.
        for convert in (_as_object, _as_text):
            with_arguments = [_with_arguments(message, convert) for message in messages]
            with_texts = [{**message, "content": message.get("content") or ""} for message in with_arguments]

            # Older versions of transformers pass None on, which Jinja writes as "None": the model would learn this
            # word. Newer ones remove the key. Some templates test for either, and differ for an empty text.
            n_written = self._n_none(with_arguments, tools)
            n_expected = self._n_none(with_texts, tools)
            if n_written is not None and n_expected in (n_written, None):
                return with_arguments
            if n_expected is not None:
                return with_texts
        return list(messages)  # for the error of `render`

    def _n_none(self, messages: Sequence[Message], tools: Tools) -> int | None:
        """Return how often rendered messages have the text "None"; None if the template does not accept them."""
        arguments: Any = {"tools": list(tools) if tools else None, "tokenize": False}
        try:
            return str(self.tokenizer.apply_chat_template(list(messages), **arguments)).count("None")
        except TimeoutError:  # of the deadline, which interrupts only once
            raise
        except Exception:  # templates may raise anything
            return None

    @cached_property
    def _reads_parts_only(self) -> bool:
        """True for a template that writes nothing of contents that are texts, such as some of vision models."""
        of_parts = [_with_text_part(message) for message in PLACEHOLDER_TURN]
        try:
            if PLACEHOLDER in str(self.tokenizer.apply_chat_template(PLACEHOLDER_TURN, tokenize=False)):
                return False
            return PLACEHOLDER in str(self.tokenizer.apply_chat_template(of_parts, tokenize=False))
        except TimeoutError:  # of the deadline, which interrupts only once
            raise
        except Exception:  # templates may raise anything; the rendering of the actual messages reports it
            return False

    @cached_property
    def end_of_turn(self) -> int | None:
        """Id of the first special token after a message of the assistant; None if the template writes none."""
        after = self.render(PLACEHOLDER_TURN).rpartition(PLACEHOLDER)[2]

        # Tokens such as <|im_end|> may be added tokens without being special ones to the tokenizer.
        special = {*self.tokenizer.all_special_ids, *self.tokenizer.added_tokens_decoder}

        # An unknown character is no end, but some tokenizers have one token for the end and for what is unknown.
        if str(self.tokenizer.unk_token) not in after:
            special.discard(self.tokenizer.unk_token_id)
        ids = self.tokenizer(after, add_special_tokens=False)["input_ids"]
        return next((id for id in ids if id in special), None)

    def encode(
        self, messages: Sequence[Message], *, tools: Tools = None, last_only: bool = False, where: str = ""
    ) -> tuple[list[int], list[bool]]:
        """Return the ids of a conversation, and which of them the assistant writes: its messages with their end tokens.

        Args:
            messages: the conversation.
            tools: descriptions of functions that the model may call.
            last_only: the assistant's last message is enough; without marks, only its tokens are found.
            where: description of the messages for the error.

        Raises:
            ConfigError: the template does not accept the messages; or these tokens cannot be determined, because the
                rendered text of a message depends on the following ones and the template does not mark what the
                assistant writes (`{% generation %}`).
        """
        encoded: Any
        # A tokenizer may have a template of its own for prompts with tools.
        of_tools = list(tools) if tools and not self.tools_in_system else None
        template = self.tokenizer.get_chat_template(tools=of_tools)
        if _MARKED.search(template):
            encoded = self._applied(
                messages,
                tools=tools,
                where=where,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
            ids = encoded["input_ids"]
            return ids, self._until_ends(ids, list(map(bool, encoded["assistant_masks"])))

        # Without marks: the tokens whose characters are within a message of the assistant. A token that reaches over
        # the edge is not among them, since the template writes a part of it.
        conversation = self.render(messages, tools=tools, where=where)
        spans = self._assistant_spans(messages, conversation, tools=tools, last_only=last_only, where=where)
        encoded = self.tokenizer(conversation, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        is_written = []
        for start, end in encoded["offset_mapping"]:
            is_written.append(any(first <= start and end <= last for first, last in spans))
        return encoded["input_ids"], self._until_ends(encoded["input_ids"], is_written)

    def _assistant_spans(
        self, messages: Sequence[Message], conversation: str, *, tools: Tools, last_only: bool, where: str
    ) -> list[tuple[int, int]]:
        """Return the first and the last character of each of the assistant's messages in the rendered text."""
        spans: list[tuple[int, int]] = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant" or (last_only and index < len(messages) - 1):
                continue

            # The message is what the text of all messages so far has in addition to that of the ones before it.
            after = self.render(messages[: index + 1], tools=tools, where=where)
            prompt = self._prompt_before(after, messages[:index], tools=tools, where=where)

            # Some templates change earlier messages, for instance by removing their reasoning: then there is no such
            # difference.
            if not conversation.startswith(after):
                of = f" of {where}" if where else ""
                raise chat_template_issue(
                    f"the chat template of {self.tokenizer.name_or_path!r} renders message {index + 1}{of} "
                    f"differently when others follow, so the assistant's tokens cannot be found; use a template with "
                    f"{{% generation %}}, or data in which only the last message is the assistant's"
                )
            spans.append((len(prompt), len(after)))
        return spans

    def _until_ends(self, ids: Sequence[int], written: list[bool]) -> list[bool]:
        """Return the mask with each message's end token, and without what the template writes after it."""
        # The end token is learned also if the marks leave it out: without it a response would never end. What follows
        # it, such as a line break, is never generated.
        mask = []
        has_ended = True  # before the first message
        was_written = False
        for id, is_written in zip(ids, written, strict=True):
            if is_written and not was_written:
                has_ended = False

            mask.append(not has_ended and (is_written or id == self.end_of_turn))
            has_ended = has_ended or id == self.end_of_turn or not is_written
            was_written = is_written
        return mask


def _with_text_part(message: Message) -> Message:
    """Return a message whose content, if it is a text, is a list with one part."""
    if not isinstance(message.get("content"), str):
        return message
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _with_arguments(message: Message, convert: Callable[[Any], Any]) -> Message:
    """Return a message with converted arguments of its tool calls."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function", call)
        if "arguments" in function:
            function = {**function, "arguments": convert(function["arguments"])}
        calls.append({**call, "function": function} if "function" in call else function)
    return {**message, "tool_calls": calls}


def _as_object(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):  # a text of another kind
        return arguments
    return value if isinstance(value, dict) else arguments


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
