"""One item of a data pool."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Sample:
    """Prompt with the references for its responses.

    Args:
        id: unique within its split.
        prompt_or_input_text: the prompt of a causal model, the input of a seq2seq model.
        references: texts that a good response resembles; may be empty.
        meta_data: additional data for rewards and metrics, which receive it as `meta_info`.
    """

    id: str
    prompt_or_input_text: str
    references: list[str] = field(default_factory=list)
    meta_data: dict[str, Any] | None = None
