"""What was to score, as people read it: a sample in an error, a batch in the file that a failed run leaves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rl4lms_like.core.observation import Observation
from rl4lms_like.core.sample import Sample

_EXCERPT = 60


def named(state: Observation) -> str:
    """A sample as errors name it: its id, and how its prompt begins."""
    text = state.prompt_or_input_text
    excerpt = text if len(text) <= _EXCERPT else f"{text[: _EXCERPT - 3]}..."
    return f"sample {state.sample.id!r} (prompt {excerpt!r})"


def texts_to_score(samples: Sequence[Sample], responses: Sequence[str]) -> list[dict[str, Any]]:
    """What a reward was to score, one mapping a response, for the file that a failed run keeps it in."""
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
