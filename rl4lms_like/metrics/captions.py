"""Metrics for captions and other single sentences about a scene: CIDEr-D and SPICE."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rl4lms_like.core.numbers import Positive
from rl4lms_like.metrics.base import BaseMetric, MetricResults
from rl4lms_like.scoring.cider import cider, existing_file, frequencies_of_file, require_cider
from rl4lms_like.scoring.spice import require_spice, spice


class CIDERMetric(BaseMetric):
    """CIDEr-D of each text against all its references, from 0 to 10.

    Args:
        references_file: source of the document frequencies, as for the reward `spider`. By default they come from the
            references of the split, as published. Scores of splits of different sizes are then not comparable, and a
            split of one text scores 0.
    """

    needs_references = True

    def __init__(self, references_file: str | None = None) -> None:
        self.references_file = references_file
        require_cider("the metric 'cider'")
        if references_file is not None:
            existing_file(references_file)

    def compute(
        self,
        prompt_texts: list[str],
        generated_texts: list[str],
        reference_texts: list[list[str]],
        meta_infos: list[dict[str, Any] | None] | None = None,
        model: Any = None,
        split_name: str | None = None,
    ) -> MetricResults:
        """Compute `lexical/cider` of each text, and the mean; texts without references are NaN and excluded."""
        frequencies = None if self.references_file is None else frequencies_of_file(self.references_file)
        scores = cider(generated_texts, reference_texts, frequencies)
        return {"lexical/cider": (scores, _mean(scores))}


class SpiceMetric(BaseMetric):
    """SPICE's F of each text against all its references, from 0 to 1, by the authors' Java program.

    Args:
        java_memory: maximum memory of SPICE's Java process.
        timeout: seconds after which a SPICE run is stopped.
    """

    needs_references = True

    def __init__(self, java_memory: str = "8G", timeout: Positive = 1800.0) -> None:
        self.java_memory = java_memory
        self.timeout = timeout
        require_spice("the metric 'spice'")

    def compute(
        self,
        prompt_texts: list[str],
        generated_texts: list[str],
        reference_texts: list[list[str]],
        meta_infos: list[dict[str, Any] | None] | None = None,
        model: Any = None,
        split_name: str | None = None,
    ) -> MetricResults:
        """Compute `lexical/spice` of each text, and the mean; texts without references are NaN and excluded."""
        scores = spice(generated_texts, reference_texts, java_memory=self.java_memory, timeout=self.timeout)
        return {"lexical/spice": (scores, _mean(scores))}


def _mean(scores: Sequence[float]) -> float:
    known = [score for score in scores if not math.isnan(score)]
    return sum(known) / len(known) if known else math.nan
