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
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

from rl4lms_like.core.sample import Sample
from rl4lms_like.system.errors import ConfigError, ConfigIssue, DataPoolError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEY = "tokenizer.chat_template"

Message: TypeAlias = "dict[str, Any]"
"""`role` and `content`; templates may read further keys."""

_MARKED = re.compile(r"\{%-?\s*generation\b")
"""The tag with which a template marks what the assistant writes."""

_CONTENT = "X7Q"
"""A content that occurs nowhere else in a rendered conversation."""


_DIRECTIVE = re.compile(r"%-?[A-Za-z]")
_SPACES_BEFORE_BLOCK = re.compile(r"[ \t]+\{[%#](?!\+)")

_DATE = "template_date"
"""Attribute of a tokenizer with the day that its chat template writes as today."""


def set_template_date(tokenizer: PreTrainedTokenizerBase, day: str) -> None:
    """Fix the date that the tokenizer's chat template writes as today; it is not saved with the tokenizer."""
    setattr(tokenizer, _DATE, date.fromisoformat(day))


def dated_template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the tokenizer's chat template with the date of `set_template_date`; None if that changes nothing.

    Example:
        >>> from types import SimpleNamespace
        >>> tokenizer = SimpleNamespace(get_chat_template=lambda: "{{ strftime_now('%d %b') }}")
        >>> set_template_date(tokenizer, "2026-11-20")
        >>> dated_template(tokenizer).partition("{% endmacro %}")[0]
        '{% macro strftime_now(format) %}{{ format.replace("%b", "Nov").replace("%d", "20") }}'
    """
    day = getattr(tokenizer, _DATE, None)
    if day is None:
        return None
    template = str(tokenizer.get_chat_template())
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


def chat_template_issue(message: str) -> ConfigError:
    """Return an error about the chat template."""
    return ConfigError([ConfigIssue(KEY, message)])


@dataclass(frozen=True)
class ChatTemplate:
    """Template of a tokenizer, which renders messages as text.

    Args:
        tokenizer: has a chat template.
        system_prompt: system message that is put before messages without one.
    """

    tokenizer: PreTrainedTokenizerBase
    system_prompt: str | None = None

    def with_rendered_prompt(self, sample: Sample) -> Sample:
        """Return the sample with all its messages and its rendered prompt; a text is the message of a user.

        Raises:
            ConfigError: the template does not accept the messages; the error names the sample.
            DataPoolError: the last message is one of the assistant.
        """
        messages = list(sample.messages or [{"role": "user", "content": sample.prompt_or_input_text}])

        # Not in front of another one: many templates accept a single system message, and only as the first.
        if self.system_prompt is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        if messages[-1]["role"] == "assistant":
            raise DataPoolError(
                f"the messages of sample {sample.id!r} end with one of the assistant, so there is nothing to respond "
                f"to; datapool.args.last_message_as_reference: true makes it the reference"
            )

        rendered = self.render(messages, add_generation_prompt=True, where=f"sample {sample.id!r}")
        return replace(sample, messages=messages, rendered_prompt=rendered)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False, where: str = "") -> str:
        """Return messages as text.

        Args:
            messages: the messages.
            add_generation_prompt: end with the beginning of the assistant's message.
            where: description of the messages for the error.

        Raises:
            ConfigError: the template does not accept them.
        """
        try:
            rendered = self.tokenizer.apply_chat_template(
                list(messages),
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                chat_template=dated_template(self.tokenizer),
            )
        except Exception as error:
            # Templates are programs of the model's authors, and may raise anything. Usually it is the order of the
            # roles.
            roles = ", ".join(str(message["role"]) for message in messages)
            of = f" of {where}" if where else ""
            raise chat_template_issue(
                f"the chat template of {self.tokenizer.name_or_path!r} does not accept the messages{of} ({roles}): "
                f"{error}"
            ) from error

        return str(rendered)

    @cached_property
    def end_of_turn(self) -> int | None:
        """Id of the first special token after a message of the assistant; None if the template writes none."""
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _CONTENT}]
        after = self.render(turns).rpartition(_CONTENT)[2]

        # Tokens such as <|im_end|> may be added tokens without being special ones to the tokenizer.
        special = {*self.tokenizer.all_special_ids, *self.tokenizer.added_tokens_decoder}
        ids = self.tokenizer(after, add_special_tokens=False)["input_ids"]
        return next((id for id in ids if id in special), None)

    def encode(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """Return the ids of a conversation, and which of them the assistant writes: its messages with their end tokens.

        Raises:
            ConfigError: these tokens cannot be determined, because the rendered text of a message depends on the
                following ones and the template does not mark what the assistant writes (`{% generation %}`).
        """
        encoded: Any
        if _MARKED.search(str(self.tokenizer.chat_template)):
            encoded = self.tokenizer.apply_chat_template(
                list(messages),
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
                chat_template=dated_template(self.tokenizer),
            )
            ids = encoded["input_ids"]
            return ids, self._until_ends(ids, list(map(bool, encoded["assistant_masks"])))

        # Without marks: the tokens whose characters are within a message of the assistant. A token that reaches over
        # the edge is not among them, since the template writes a part of it.
        spans = self._assistant_spans(messages)
        encoded = self.tokenizer(
            self.render(messages), add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        is_written = []
        for start, end in encoded["offset_mapping"]:
            is_written.append(any(first <= start and end <= last for first, last in spans))
        return encoded["input_ids"], self._until_ends(encoded["input_ids"], is_written)

    def _assistant_spans(self, messages: Sequence[Message]) -> list[tuple[int, int]]:
        """Return the first and the last character of each of the assistant's messages in the rendered text."""
        conversation = self.render(messages)
        spans: list[tuple[int, int]] = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue

            # The message is what the text of all messages so far has in addition to that of the ones before it. Some
            # templates change earlier messages, for instance by removing their reasoning: then there is no such
            # difference.
            before = self.render(messages[:index], add_generation_prompt=True)
            after = self.render(messages[: index + 1])
            if not (after.startswith(before) and conversation.startswith(after)):
                raise chat_template_issue(
                    f"the chat template of {self.tokenizer.name_or_path!r} renders a message differently when others "
                    f"follow, so the assistant's tokens cannot be found; use a template with {{% generation %}}"
                )
            spans.append((len(before), len(after)))
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
