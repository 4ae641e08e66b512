"""Texts to score, where only some of their columns matter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl4lms_like.scoring.score import Texts


def texts(
    responses: Sequence[str],
    references: Sequence[Sequence[str]] | None = None,
    *,
    prompts: Sequence[str] | None = None,
    metas: Sequence[Mapping[str, Any] | None] | None = None,
) -> Texts:
    n = len(responses)
    return Texts(
        list(prompts or [""] * n),
        list(responses),
        [list(each) for each in references or [[]] * n],
        [None if meta is None else dict(meta) for meta in metas or [None] * n],
    )
