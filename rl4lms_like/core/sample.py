"""One item of a data pool."""

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
        text = "\n\n".join(message["content"] for message in messages)
        return cls(id, text, list(references), meta_data, list(messages))
