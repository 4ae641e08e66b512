"""BLEURT (Sellam et al., 2020): score of a reference and a candidate by a BERT that was tuned on human ratings.

The published TensorFlow checkpoints are on the hub as plain BERT with one logit. BLEURT-20 and its distilled sizes have
another architecture and are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

from rl4lms_like.scoring.classifier import Classifier, classifier

DEFAULT = "bleurt-base-128"

CHECKPOINTS = MappingProxyType(
    {
        f"bleurt-{size}-{length}": (f"Elron/bleurt-{size}-{length}", length)
        for size in ("tiny", "base", "large")
        for length in (128, 512)
    }
)
"""Published name -> hub id of the plain BERT, and the maximum number of tokens of a pair."""


def bleurt_classifier(
    checkpoint: str | None, *, batch_size: int, device: str, dtype: str, max_length: int | None = None
) -> Classifier:
    """Return the checkpoint as a classifier of pairs.

    Args:
        checkpoint: a published name, a hub id or a local folder of a BERT with one logit; None: `bleurt-base-128`.
        batch_size: pairs per forward pass.
        device: `auto`, `cpu`, `cuda:1` ...
        dtype: dtype of the weights.
        max_length: maximum tokens per pair; None: the training length of a published checkpoint, or the model's limit.

    Raises:
        ModelError: the name can only be a local folder, which does not exist, or the model has several logits.
        ValueError: a published checkpoint that is not plain BERT.
    """
    name = checkpoint or DEFAULT
    if name.startswith("BLEURT-20"):
        raise ValueError(f"{name} is not plain BERT and cannot be loaded; available: {', '.join(CHECKPOINTS)}")
    hub_id, tuned_with = CHECKPOINTS.get(name, (name, dict(CHECKPOINTS.values()).get(name)))
    scorer = classifier(
        hub_id,
        batch_size=batch_size,
        device=device,
        dtype=dtype,
        role="BLEURT checkpoint",
        truncation_side="right",
        max_length=max_length or tuned_with,
    )
    scorer.check_label(None)
    return scorer


def bleurt_scores(
    scorer: Classifier, generated_texts: Sequence[str], references: Sequence[Sequence[str]]
) -> list[float]:
    """Return the best score over its references for each text, roughly from -1 to 1; each text has at least one.

    In pairs that are too long, the end of the longer text is cut, as in the original. Empty texts are scored as others.
    """
    pairs = [(reference, text) for text, each in zip(generated_texts, references, strict=True) for reference in each]
    distinct = list(dict.fromkeys(pairs))
    index = scorer.label_index(None)
    logits = scorer.logits([reference for reference, _ in distinct], [text for _, text in distinct])
    score_of = dict(zip(distinct, logits[:, index].tolist(), strict=True))
    return [
        max(score_of[reference, text] for reference in each)
        for text, each in zip(generated_texts, references, strict=True)
    ]
