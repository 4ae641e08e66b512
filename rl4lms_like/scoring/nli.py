"""Natural language inference: probabilities that one text entails another, contradicts it, or neither.

CARDS            the checkpoints that SummaC was published with, and the order of their labels
any other name   a hub id or local folder, whose config names its three labels
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rl4lms_like.core.devices import existing_device
from rl4lms_like.core.errors import ModelError
from rl4lms_like.scoring.classifier import classifier
from rl4lms_like.scoring.frozen import FrozenModel

if TYPE_CHECKING:
    import numpy as np

MAX_LENGTH = 500
"""Maximum number of tokens of both texts together, as in SummaC."""

_TOKENIZED_AT_ONCE = 4096
"""Number of pairs; the tokens of all chunk pairs of a split would fill the memory."""


class Labels(NamedTuple):
    """Index of the logit of each label."""

    entailment: int
    contradiction: int
    neutral: int


CARDS: Mapping[str, tuple[str, Labels]] = {
    "snli-base": ("boychaboy/SNLI_roberta-base", Labels(0, 2, 1)),
    "snli-large": ("boychaboy/SNLI_roberta-large", Labels(0, 2, 1)),
    "mnli-base": ("microsoft/deberta-base-mnli", Labels(2, 0, 1)),
    "mnli": ("roberta-large-mnli", Labels(2, 0, 1)),
    "anli": ("ynie/roberta-large-snli_mnli_fever_anli_R1_R2_R3-nli", Labels(0, 2, 1)),
    "vitc-base": ("tals/albert-base-vitaminc-mnli", Labels(0, 1, 2)),
    "vitc": ("tals/albert-xlarge-vitaminc-mnli", Labels(0, 1, 2)),
    "vitc-only": ("tals/albert-xlarge-vitaminc", Labels(0, 1, 2)),
}


class NliModel:
    """NLI checkpoint for pairs of texts; loaded at first use, pickled as its name alone.

    Args:
        name: a key of `CARDS`, a hub id, or a local folder.
        device: `auto`, `cpu`, `cuda:1` ...; on a GPU the weights are float16, as published.
        batch_size: pairs per forward pass.

    Raises:
        ModelError: the name can only be a local folder, which does not exist, or its labels are not recognised.
        ValueError: there is no such device.
    """

    def __init__(self, name: str, *, device: str = "auto", batch_size: int = 20) -> None:
        checkpoint = CARDS[name][0] if name in CARDS else name
        self.labels = next((labels for card, labels in CARDS.values() if card == checkpoint), None)
        dtype = "float16" if existing_device(device).startswith("cuda") else "float32"
        self.classifier = classifier(
            checkpoint,
            batch_size=batch_size,
            device=device,
            dtype=dtype,
            role="NLI model",
            truncation_side="right",
            max_length=MAX_LENGTH,
        )
        config = self.frozen.local_config() if self.labels is None else None
        if config is not None:
            self.labels = labels_of(config.id2label, checkpoint)

    @property
    def frozen(self) -> FrozenModel:
        """The checkpoint."""
        return self.classifier.frozen

    def probabilities(self, pairs: Sequence[tuple[str, str]]) -> np.ndarray:
        """Return the probabilities of entailment, contradiction and neutral.

        In pairs that are too long, the end of the longer text is cut, then of both.

        Args:
            pairs: `n` pairs of premise and hypothesis.

        Returns:
            `[n, 3]` float64, in the order of `Labels`.

        Raises:
            ModelError: the checkpoint cannot be loaded, its labels are not these three, or it returns NaN.
        """
        import numpy as np

        order = list(self.labels or labels_of(self.frozen.model.config.id2label, self.frozen.model_name))
        found = np.zeros((len(pairs), 3))
        for start in range(0, len(pairs), _TOKENIZED_AT_ONCE):
            premises, hypotheses = zip(*pairs[start : start + _TOKENIZED_AT_ONCE], strict=True)
            logits = self.classifier.logits(premises, hypotheses)
            found[start : start + _TOKENIZED_AT_ONCE] = logits.softmax(dim=1)[:, order].double().numpy()
        return found


def labels_of(id2label: Mapping[int, str], model_name: str) -> Labels:
    """Return the logit indices by the label names in a checkpoint's config; VitaminC has `SUPPORTS` and `REFUTES`.

    Raises:
        ModelError: there are not three labels, or their names are not recognised.
    """
    names = {int(index): label.lower() for index, label in id2label.items()}
    entailment = [index for index, label in names.items() if label.startswith(("entail", "support"))]
    contradiction = [index for index, label in names.items() if label.startswith(("contradict", "refute"))]
    if len(names) != 3 or len(entailment) != 1 or len(contradiction) != 1:
        raise ModelError(
            f"the NLI model {model_name!r} has the labels {list(id2label.values())}; expected three, of which "
            "one is 'entailment' and one 'contradiction': name them in id2label of its config.json, or use one of "
            f"{', '.join(CARDS)}"
        )
    (neutral,) = set(names) - {entailment[0], contradiction[0]}
    return Labels(entailment[0], contradiction[0], neutral)
