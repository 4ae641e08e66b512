"""Items of data pools: prompts with references, and prompts with preferences."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, TypeVar

from rl4lms_like.core.pictures import Picture, identity_of, images_of_messages, messages_with_places
from rl4lms_like.system.errors import DataPoolError

Learned: TypeAlias = Literal["response", "conversation", "text"]
"""Part of a sample that a supervised run learns; see `Sample.learned`."""

SampleT = TypeVar("SampleT", bound="Sample")

Message: TypeAlias = "dict[str, Any]"
"""`role` and `content`, and further keys that a chat template reads."""

SPOKEN_KEYS = (("reasoning_content", "reasoning", "thinking"), ("tool_calls",))
"""Keys of an assistant's message with what the model is to write, besides `content`; names of the same together."""


@dataclass(frozen=True)
class Sample:
    """Prompt with the references for its responses.

    Args:
        id: unique within its split.
        prompt_or_input_text: the prompt of a causal model, the input of a seq2seq model; for rewards and
            metrics.
        references: texts that a good response resembles; may be empty.
        meta_data: additional data for rewards and metrics, which receive it as `meta_info`.
        messages: the prompt as messages with `role` and `content`; None if it is a text. `prompt_or_input_text` then
            has their contents, separated by empty lines.
        rendered_prompt: the prompt as the model reads it, rendered by a chat template with all special tokens; None
            without one, then the model reads `prompt_or_input_text`.
        tools: descriptions of functions that the model may call, for the chat template; None if there are none.
        response_messages: text of a response -> the assistant's message that it stands for, or the messages of a
            conversation that goes on for several turns. Responses that have nothing but a content are not in it. Before
            a chat template has rendered the messages, their text is JSON.
        learned: what a supervised run learns: the `response` to the prompt; in a `conversation`, also the earlier
            messages of the assistant; of a `text`, which is a reference without a prompt, all of it.
        images: the pictures of the prompt, in the order of their places in it: `<image>` in its text or messages.
        truncated: texts of responses that ended at a length limit. No end token follows them, so that a model does not
            learn to end there.
    """

    id: str
    prompt_or_input_text: str
    references: list[str] = field(default_factory=list)
    meta_data: dict[str, Any] | None = None
    messages: list[dict[str, Any]] | None = None
    rendered_prompt: str | None = None
    tools: list[dict[str, Any]] | None = None
    response_messages: dict[str, Message | list[Message]] = field(default_factory=dict)
    learned: Learned = "response"
    images: tuple[Picture, ...] = ()
    truncated: frozenset[str] = frozenset()

    @classmethod
    def of_messages(
        cls,
        id: str,
        messages: Sequence[dict[str, Any]],
        references: Sequence[str] = (),
        meta_data: dict[str, Any] | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
        images: tuple[Picture, ...] = (),
    ) -> Sample:
        """Return a sample whose prompt is a list of messages with `role` and `content`.

        Without a place for the images, they are put first in the first message of the user. Parts of messages may
        have images, too; relative paths of these start at the working directory.

        Raises:
            DataPoolError: the messages have another number of places than images, or a part that is neither a text nor
                a local image; or there are images within the messages and besides them.
        """
        in_messages = tuple(Picture.of(image) for _, image in images_of_messages(messages))
        if images and in_messages:
            raise DataPoolError("images are in the messages and given besides them; keep one of both")
        images = images or in_messages
        messages = messages_with_places(messages, len(images))

        # For rewards and metrics, which read a text; the model reads the messages, as a chat template renders them. A
        # message that only calls tools has no content.
        contents = [message.get("content") for message in messages]
        prompt = "\n\n".join(content for content in contents if content is not None)

        return cls(
            id=id,
            prompt_or_input_text=prompt,
            references=list(references),
            meta_data=meta_data,
            messages=messages,
            tools=list(tools) if tools else None,
            images=images,
        )

    @property
    def identity(self) -> str:
        """Text that is equal for samples with the same prompt: text and pictures, of which the files are read."""
        return identity_of(self.prompt_or_input_text, self.images)

    def response_turns(self, text: str) -> list[Message]:
        """Return the messages of one of the sample's responses: one of the assistant, or several turns."""
        messages = self.response_messages.get(text, {"role": "assistant", "content": text})
        return messages if isinstance(messages, list) else [messages]

    def with_responses(
        self: SampleT, texts: Mapping[str, str], messages: dict[str, Message | list[Message]]
    ) -> SampleT:
        """Return the sample with other texts for some of its responses (old -> new), and with these messages."""
        references = [texts.get(reference, reference) for reference in self.references]
        truncated = frozenset(texts.get(text, text) for text in self.truncated)
        return replace(self, references=references, response_messages=messages, truncated=truncated)


@dataclass(frozen=True)
class Preference(Sample):
    """Prompt with a preferred and a rejected response, or with one response that is labelled as good or bad.

    `references` has the preferred (or good) response, so that other runs can learn from it.

    Args:
        rejected: the response that is not preferred (or bad); None if the only response is a good one.
        margin: how much better the preferred response is, in the units of a reward model.
        is_implicit: the prompt is the common beginning of both responses.
    """

    rejected: str | None = None
    margin: float = 0.0
    is_implicit: bool = False

    @property
    def chosen(self) -> str | None:
        """The preferred (or good) response; None if the only response is a bad one."""
        return self.references[0] if self.references else None

    def with_responses(self, texts: Mapping[str, str], messages: dict[str, Message | list[Message]]) -> Preference:
        """Return the preference with other texts for some of its responses (old -> new), and with these messages."""
        rejected = None if self.rejected is None else texts.get(self.rejected, self.rejected)
        return replace(super().with_responses(texts, messages), rejected=rejected)


def response_text(messages: Sequence[Message]) -> tuple[str, dict[str, Message | list[Message]]]:
    """Return the text of a response for a sample, and the entry of `response_messages` if it needs one.

    Examples:
        >>> response_text([{"role": "assistant", "content": "Yes."}])
        ('Yes.', {})
    """
    response = list(messages)
    first = response[0]
    if len(response) == 1 and set(first) == {"role", "content"} and first["content"] is not None:
        return first["content"], {}

    # What else is in it is only known to a chat template. Until then, the whole messages are its text, so that two
    # messages with the same content and different tool calls are not the same response.
    value = response if len(response) > 1 else dict(first)
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text, {text: value}
