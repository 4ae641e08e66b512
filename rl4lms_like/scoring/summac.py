"""SummaC: consistency of a summary with its document, by natural language inference (Laban et al., 2022).

chunks     a text's paragraphs, sentences, pairs of sentences ..., those of more than 10 characters
image      [3, n_document_chunks, n_summary_chunks]   entailment, contradiction, neutral of each pair of chunks
zero-shot  mean over the summary's chunks of the best document chunk's score                  -1 to 1
conv       a trained head on histograms of the image's columns (`summac_head`)                 0 to 1
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from rl4lms_like.scoring.nli import NliModel
from rl4lms_like.scoring.nltk_data import require_sentences, sentences

if TYPE_CHECKING:
    import numpy as np

NEEDS = "extra 'lexical', NLTK's punkt_tab"
SHORTEST_CHUNK = 11
"""Minimum number of characters of a chunk; shorter chunks are left out."""

UNITS = ("paragraph", "sentence", "document", "2sents", "mixed")
Operation: TypeAlias = Literal["min", "mean", "max"]

_LARGEST_CACHE = 1000


class Imager:
    """NLI model that computes the images of document-summary pairs.

    Args:
        model_name: a key of `nli.CARDS`, a hub id, or a local folder.
        granularity: unit of the chunks, such as `paragraph`, or of documents and summaries: `paragraph-sentence`.
        use_cache: keep images, so that a pair that is scored again costs nothing.
        max_doc_sents: maximum number of chunks per document.
        device: device of the model.
        batch_size: pairs of chunks per forward pass.
        needed_by: name of the component, for error messages.

    Raises:
        ValueError: unknown granularity or device.
        MissingResourceError: NLTK's `punkt_tab` is not installed.
        ModelError: the name can only be a local folder, which does not exist.
    """

    def __init__(
        self,
        model_name: str,
        *,
        granularity: str,
        use_cache: bool,
        max_doc_sents: int,
        device: str,
        batch_size: int,
        needed_by: str,
    ) -> None:
        units = granularity.split("-")
        if len(units) > 2 or not set(units) <= set(UNITS):
            raise ValueError(f"granularity: expected one or two (document-summary) of {UNITS}, got {granularity!r}")
        self.document_unit, self.summary_unit = units[0], units[-1]
        if set(units) & {"sentence", "2sents", "mixed"}:
            require_sentences(needed_by)
        self.use_cache = use_cache
        self.max_doc_sents = max_doc_sents
        self.nli = NliModel(model_name, device=device, batch_size=batch_size)
        self._cache: dict[tuple[str, str], np.ndarray] = {}

    def images(self, documents: Sequence[str], summaries: Sequence[str]) -> list[np.ndarray]:
        """Return the image of each pair; zeros of shape `[3, 1, 1]` if a text has no chunk."""
        wanted = list(dict.fromkeys(zip(documents, summaries, strict=True)))
        known = {pair: self._cache[pair] for pair in wanted if pair in self._cache}
        known |= self._made([pair for pair in wanted if pair not in known])
        if self.use_cache:
            self._cache = dict(list((self._cache | known).items())[-_LARGEST_CACHE:])
        return [known[pair] for pair in zip(documents, summaries, strict=True)]

    def _made(self, pairs: Sequence[tuple[str, str]]) -> dict[tuple[str, str], np.ndarray]:
        """Compute the images; the chunk pairs of all texts go through the model together."""
        import numpy as np

        shapes, asked = [], []
        for document, summary in pairs:
            premises = chunks(document, self.document_unit)[: self.max_doc_sents]
            hypotheses = chunks(summary, self.summary_unit)
            shapes.append((len(premises), len(hypotheses)))
            asked += [(premise, hypothesis) for premise in premises for hypothesis in hypotheses]
        answers = self.nli.probabilities(asked) if asked else np.zeros((0, 3))
        images, start = {}, 0
        for pair, (n_premises, n_hypotheses) in zip(pairs, shapes, strict=True):
            size = n_premises * n_hypotheses
            image = answers[start : start + size].T.reshape(3, n_premises, n_hypotheses) if size else None
            images[pair] = np.zeros((3, 1, 1)) if image is None else image.copy()
            start += size
        return images

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_cache": {}}


def zero_shot(image: np.ndarray, *, op1: Operation, op2: Operation, use_ent: bool, use_con: bool) -> float:
    """Return SummaC-ZS of an image: `op1` over the document's chunks, then `op2` over the summary's.

    The score of a chunk is entailment minus contradiction. If only one of the two is used, it is entailment, or 1 minus
    contradiction.
    """
    by_chunk = getattr(image[:2], op1)(axis=1)
    entailment = by_chunk[0] if use_ent else 1.0
    scores = entailment - by_chunk[1] if use_con else entailment
    return float(getattr(scores, op2)())


def chunks(text: str, unit: str) -> list[str]:
    """Split a text into units; a `document` is the whole text, however short."""
    if unit == "document":
        return [text]
    if unit == "paragraph":
        return _long_enough(part.strip() for part in text.split("\n\n" if "\n\n" in text else "\n"))
    split = _long_enough(sentences(text))
    if unit == "2sents":
        return [" ".join(split[index : index + 2]) for index in range(len(split))]
    return split + chunks(text, "paragraph") if unit == "mixed" else split


def _long_enough(parts: Iterable[str]) -> list[str]:
    return [part for part in parts if len(part) >= SHORTEST_CHUNK]
