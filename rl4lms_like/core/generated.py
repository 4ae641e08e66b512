"""A generated response with the sample of its prompt: what rewards and metrics may read of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl4lms_like.core.pictures import Picture
from rl4lms_like.core.sample import Sample


@dataclass(frozen=True, eq=False)
class Generated:
    """Response to the prompt of a sample.

    Args:
        sample: prompt, references and `meta_data`.
        text: text of the response.
        prompt_ids: token ids of the prompt `[prompt_length]`, truncated, not padded; None if only texts are known.
        response_ids: token ids of the response `[response_length]`; None if only texts are known.
        steps: texts of its steps; None if it was not split.
        environment_reward: sum of the rewards of the steps of `env.dialogue`, whose last turn the response then is;
            None of a single response.
    """

    sample: Sample
    text: str
    prompt_ids: np.ndarray | None = None
    response_ids: np.ndarray | None = None
    steps: tuple[str, ...] | None = None
    environment_reward: float | None = None


def of_texts(
    prompts: Sequence[str],
    texts: Sequence[str],
    references: Sequence[Sequence[str]],
    meta_infos: Sequence[dict[str, Any] | None] | None,
    images: Sequence[tuple[Picture, ...]] | None = None,
) -> list[Generated]:
    """Return responses of which only the texts and pictures are known.

    All arguments have length `n`; references that are not needed may be empty.
    """
    responses = []
    for index, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        meta_info = None if meta_infos is None else meta_infos[index]
        pictures = () if images is None else images[index]
        sample = Sample(str(index), prompt, list(references[index]) if references else [], meta_info, images=pictures)
        responses.append(Generated(sample, text))
    return responses
