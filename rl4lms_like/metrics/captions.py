"""Metrics for captions and other single sentences about a scene: CIDEr-D and SPICE."""

from __future__ import annotations

from dataclasses import dataclass

from rl4lms_like.core.numbers import Positive
from rl4lms_like.metrics.base import ScoreMetric
from rl4lms_like.scoring.cider import cider, existing_file, frequencies_of_file, require_cider
from rl4lms_like.scoring.score import Texts
from rl4lms_like.scoring.spice import require_spice, spice


@dataclass(eq=False)
class CIDERMetric(ScoreMetric):
    """CIDEr-D of each text against all its references, from 0 to 10.

    Args:
        references_file: source of the document frequencies, as for the reward `spider`. By default they come from the
            references of the split, as published. Scores of splits of different sizes are then not comparable, and a
            split of one text scores 0.
    """

    id = "cider"
    needs_references = True
    keys = ("lexical/cider",)

    references_file: str | None = None

    def __post_init__(self) -> None:
        require_cider(self.needed_by)
        if self.references_file is not None:
            existing_file(self.references_file)

    def per_text(self, texts: Texts) -> list[float]:
        frequencies = None if self.references_file is None else frequencies_of_file(self.references_file)
        return cider(texts.responses, texts.references, frequencies)


@dataclass(eq=False)
class SpiceMetric(ScoreMetric):
    """SPICE's F of each text against all its references, from 0 to 1, by the authors' Java program.

    Args:
        java_memory: maximum memory of SPICE's Java process.
        timeout: seconds after which a SPICE run is stopped.
    """

    id = "spice"
    needs_references = True
    keys = ("lexical/spice",)

    java_memory: str = "8G"
    timeout: Positive = 1800.0

    def __post_init__(self) -> None:
        require_spice(self.needed_by)

    def per_text(self, texts: Texts) -> list[float]:
        return spice(texts.responses, texts.references, java_memory=self.java_memory, timeout=self.timeout)
