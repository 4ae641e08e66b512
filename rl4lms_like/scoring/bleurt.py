"""BLEURT (Sellam et al., 2020): score of a reference and a candidate by a BERT that was tuned on human ratings.

The published TensorFlow checkpoints are on the hub as plain BERT with one logit. BLEURT-20 and its distilled sizes have
another architecture and are not.
"""

from __future__ import annotations

from dataclasses import dataclass

from rl4lms_like.core.numbers import Count
from rl4lms_like.scoring.classifier import classifier_of
from rl4lms_like.scoring.frozen import ModelArguments
from rl4lms_like.scoring.score import Score, Texts

DEFAULT = "bleurt-base-128"

CHECKPOINTS = {
    f"bleurt-{size}-{length}": (f"Elron/bleurt-{size}-{length}", length)
    for size in ("tiny", "base", "large")
    for length in (128, 512)
}
"""Published name -> hub id of the plain BERT, and the maximum number of tokens of a pair."""


@dataclass(eq=False)
class Bleurt(ModelArguments, Score):
    """BLEURT (Sellam et al., 2020) against the best reference, roughly from -1 to 1.

    In pairs that are too long, the end of the longer text is cut, as in the original. Empty texts are scored as others.

    Args:
        checkpoint: `bleurt-base-128` (the default), another published checkpoint with BERT's architecture
            (`bleurt-tiny-128` to `bleurt-large-512`), or the hub id or local folder of a BERT with one logit.
        max_length: maximum tokens per pair; default: the length used to train the published checkpoint. Local copies
            do not store it: set 128 for a copy of `bleurt-base-128`.
    """

    needs_references = True

    checkpoint: str | None = None
    max_length: Count | None = None

    def __post_init__(self) -> None:
        name = self.checkpoint or DEFAULT
        if name.startswith("BLEURT-20"):
            raise ValueError(f"{name} is not plain BERT and cannot be loaded; available: {', '.join(CHECKPOINTS)}")
        hub_id, tuned_with = CHECKPOINTS.get(name, (name, dict(CHECKPOINTS.values()).get(name)))
        limit = self.max_length or tuned_with
        self.classifier = classifier_of(
            self, hub_id, role="BLEURT checkpoint", truncation_side="right", max_length=limit
        )
        self.classifier.check_label(None)

    def per_text(self, texts: Texts) -> list[float]:
        pairs, index = texts.pairs(), self.classifier.label_index(None)
        logits = self.classifier.logits([reference for _, reference in pairs], [text for text, _ in pairs])
        return texts.best(dict(zip(pairs, logits[:, index].tolist(), strict=True)))
