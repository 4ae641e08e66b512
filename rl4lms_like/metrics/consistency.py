"""Consistency of summaries with their documents: SummaC, by models of natural language inference.

The document is the whole prompt, including its prefix and suffix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from rl4lms_like.core.devices import Device
from rl4lms_like.metrics.base import ScoreMetric
from rl4lms_like.scoring.score import Texts
from rl4lms_like.scoring.summac import (
    Aggregation,
    Head,
    Imager,
    NliLabels,
    Operation,
    n_even_bins,
    require_head,
    zero_shot,
)
from rl4lms_like.system.numbers import Count


@dataclass(eq=False)
class SummaCZSMetric(ScoreMetric):
    """SummaC-ZS: entailment minus contradiction of the summary's chunks by the document's, from -1 to 1.

    Args:
        model_name: `snli-base`, `snli-large`, `mnli-base`, `mnli`, `anli`, `vitc-base`, `vitc`, `vitc-only`; a hub id;
            or a local folder with an NLI model.
        granularity: unit of the chunks: `paragraph`, `sentence`, `document`, `2sents` or `mixed`; two units joined by a
            hyphen are those of documents and summaries, `document-sentence`.
        op1: reduction over the document's chunks.
        op2: reduction over the summary's chunks.
        use_ent: use the entailment probability.
        use_con: use the contradiction probability.
        imager_load_cache: has no effect, because nothing is cached on disk; accepted for RL4LMs' configs.
        use_cache: keep the model's outputs, so that scoring the same summary of a document again costs nothing.
        max_doc_sents: maximum number of chunks per document.
        device: device of the model; `auto` uses a GPU if available.
        batch_size: pairs of chunks per forward pass.
    """

    id = "summaCZS"
    keys = ("consistency/summaczs",)

    model_name: str = "mnli"
    granularity: str = "paragraph"
    op1: Operation = "max"
    op2: Operation = "mean"
    use_ent: bool = True
    use_con: bool = True
    imager_load_cache: bool = True
    use_cache: bool = True
    max_doc_sents: Count = 100
    device: Device = "auto"
    batch_size: Count = 20

    def __post_init__(self) -> None:
        if not self.use_ent and not self.use_con:
            raise ValueError("use_ent and use_con are both false: set at least one of them to true")
        self.imager = Imager(self.model_name, self)

    def per_text(self, texts: Texts) -> list[float]:
        """Return the score of each text against its prompt.

        A text without a chunk, such as an empty one, scores 0, or 1 if only `use_con` is set.
        """
        # An image is [3, n_document_chunks, n_summary_chunks]: entailment, contradiction, neutral of each pair.
        scores = []
        for image in self.imager.images(texts.prompts, texts.responses):
            scores.append(zero_shot(image, op1=self.op1, op2=self.op2, use_ent=self.use_ent, use_con=self.use_con))
        return scores


@dataclass(eq=False)
class SummaCConvMetric(ScoreMetric):
    """SummaC-Conv: consistency of the summary with its document according to a trained head, from 0 to 1.

    Args:
        models: NLI models, as `model_name` of `summaCZS`.
        bins: bins of the histograms: `percentile`, or `even` and the number of bins of equal width, as in `even50`.
        granularity: unit of the chunks, as in `summaCZS`.
        nli_labels: labels that are used: `e` entailment, `c` contradiction, `n` neutral.
        device: device of the models; `auto` uses a GPU if available.
        start_file: file of the trained head, required; the published one is for `models: [vitc]`, `bins: percentile`.
        imager_load_cache: has no effect, because nothing is cached on disk; accepted for RL4LMs' configs.
        agg: reduction over the chunks of a summary.
        norm_histo: use densities instead of counts, together with the numbers of chunks.
        use_cache: keep the models' outputs.
        max_doc_sents: maximum number of chunks per document.
        batch_size: pairs of chunks per forward pass.
    """

    id = "summaCConv"
    keys = ("consistency/summacconv",)

    models: Sequence[str] = ("mnli", "anli", "vitc")
    bins: str = "even50"
    granularity: str = "sentence"
    nli_labels: NliLabels = "e"
    device: Device = "auto"
    start_file: str | None = None
    imager_load_cache: bool = True
    agg: Aggregation = "mean"
    norm_histo: bool = False
    use_cache: bool = True
    max_doc_sents: Count = 100
    batch_size: Count = 20

    def __post_init__(self) -> None:
        if not self.models:
            raise ValueError("models: expected at least one NLI model")
        if self.bins != "percentile":
            n_even_bins(self.bins)  # raises an error for another name

        # The size of the head's input depends on all of these: a head that was trained with others cannot be loaded.
        start_file = require_head(self.start_file, self.needed_by)
        self.head = Head(
            start_file,
            n_models=len(self.models),
            bins=self.bins,
            nli_labels=self.nli_labels,
            agg=self.agg,
            norm_histo=self.norm_histo,
        )
        self.imagers = [Imager(name, self) for name in self.models]

    def per_text(self, texts: Texts) -> list[float]:
        """Return the score of each text against its prompt."""
        images_by_model = [imager.images(texts.prompts, texts.responses) for imager in self.imagers]

        # The head reads the images of all models as one, [3 * n_models, n_document_chunks, n_summary_chunks].
        scores = []
        for images_of_text in zip(*images_by_model, strict=True):
            layers = list(chain.from_iterable(images_of_text))
            scores.append(self.head.score(layers))
        return scores
