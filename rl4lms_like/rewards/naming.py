"""Readable descriptions of samples, for error messages and for the file that a failed run writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rl4lms_like.core.observation import Observation
from rl4lms_like.core.sample import Sample

_EXCERPT = 60


def named(state: Observation) -> str:
    """Return the description of a sample for error messages: its id and the beginning of its prompt."""
    text = state.prompt_or_input_text
    excerpt = text if len(text) <= _EXCERPT else f"{text[: _EXCERPT - 3]}..."
    return f"sample {state.sample.id!r} (prompt {excerpt!r})"


def texts_to_score(samples: Sequence[Sample], responses: Sequence[str]) -> list[dict[str, Any]]:
    """Return the inputs of a failed reward, one mapping per response, for the file that a failed run writes."""
    return [
        {
            "sample_id": sample.id,
            "prompt_text": sample.prompt_or_input_text,
            "generated_text": response,
            "references": list(sample.references),
            "meta_info": sample.meta_data,
        }
        for sample, response in zip(samples, responses, strict=True)
    ]
