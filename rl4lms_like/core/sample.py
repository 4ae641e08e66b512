"""Items of data pools: prompts with references, and prompts with preferences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


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
    """

    id: str
    prompt_or_input_text: str
    references: list[str] = field(default_factory=list)
    meta_data: dict[str, Any] | None = None
    messages: list[dict[str, Any]] | None = None
    rendered_prompt: str | None = None

    @classmethod
    def of_messages(
        cls,
        id: str,
        messages: Sequence[dict[str, Any]],
        references: Sequence[str] = (),
        meta_data: dict[str, Any] | None = None,
    ) -> Sample:
        """Return a sample whose prompt is a list of messages with `role` and `content`."""
        # For rewards and metrics, which read a text; the model reads the messages, as a chat template renders them.
        prompt = "\n\n".join(message["content"] for message in messages)

        return cls(
            id=id,
            prompt_or_input_text=prompt,
            references=list(references),
            meta_data=meta_data,
            messages=list(messages),
        )


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
