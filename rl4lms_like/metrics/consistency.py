"""Whether summaries say only what their documents say: SummaC, by models of natural language inference.

The document is the prompt as it stands, its prefix and suffix included.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from rl4lms_like.core.devices import Device
from rl4lms_like.core.numbers import Count
from rl4lms_like.metrics.base import BaseMetric, MetricResults
from rl4lms_like.scoring.summac import Imager, Operation, zero_shot
from rl4lms_like.scoring.summac_head import Aggregation, Head, NliLabels, concatenated, n_even_bins, require_head


class SummaCZSMetric(BaseMetric):
    """SummaC-ZS: entailment minus contradiction of the summary's chunks by the document's, from -1 to 1.

    Args:
        model_name: `snli-base`, `snli-large`, `mnli-base`, `mnli`, `anli`, `vitc-base`, `vitc`, `vitc-only`; a hub id;
            or a local folder with an NLI model.
        granularity: `paragraph`, `sentence`, `document`, `2sents`, `mixed`; of documents and summaries apart with a
            hyphen, `document-sentence`.
        op1: over the document's chunks.
        op2: over the summary's chunks.
        use_ent: count entailment.
        use_con: count contradiction.
        imager_load_cache: accepted for RL4LMs' configs and without meaning: nothing is cached on disk.
        use_cache: keep the model's answers, so that the same summary of a document costs nothing again.
        max_doc_sents: chunks of a document that are looked at.
        device: where the model runs.
        batch_size: pairs of chunks per forward pass.
    """

    def __init__(
        self,
        model_name: str = "mnli",
        granularity: str = "paragraph",
        op1: Operation = "max",
        op2: Operation = "mean",
        use_ent: bool = True,
        use_con: bool = True,
        imager_load_cache: bool = True,
        use_cache: bool = True,
        max_doc_sents: Count = 100,
        device: Device = "auto",
        batch_size: Count = 20,
    ) -> None:
        if not use_ent and not use_con:
            raise ValueError("use_ent and use_con are both false: nothing is left to count")
        self.op1: Operation = op1
        self.op2: Operation = op2
        self.use_ent = use_ent
        self.use_con = use_con
        self.imager = Imager(
            model_name,
            granularity=granularity,
            use_cache=use_cache,
            max_doc_sents=max_doc_sents,
            device=device,
            batch_size=batch_size,
            needed_by="the metric 'summaCZS'",
        )

    def compute(
        self,
        prompt_texts: list[str],
        generated_texts: list[str],
        reference_texts: list[list[str]],
        meta_infos: list[dict[str, Any] | None] | None = None,
        model: Any = None,
        split_name: str | None = None,
    ) -> MetricResults:
        """`consistency/summaczs`: of each text against its prompt, and their mean.

        A text without a chunk, say an empty one, entails and contradicts nothing: 0, or 1 with `use_con` alone.
        """
        scores = [
            zero_shot(image, op1=self.op1, op2=self.op2, use_ent=self.use_ent, use_con=self.use_con)
            for image in self.imager.images(prompt_texts, generated_texts)
        ]
        return {"consistency/summaczs": (scores, fmean(scores))}


class SummaCConvMetric(BaseMetric):
    """SummaC-Conv: how consistent a trained head finds the summary with its document, from 0 to 1.

    Args:
        models: NLI models, as `model_name` of `summaCZS`.
        bins: of the histograms: `percentile`, or `even50`, so many of equal width.
        granularity: what chunks are, as in `summaCZS`.
        nli_labels: which of entailment, contradiction and neutral are read.
        device: where the models run.
        start_file: the trained head; the published one is for `models: [vitc]`, `bins: percentile`. Must be given.
        imager_load_cache: accepted for RL4LMs' configs and without meaning: nothing is cached on disk.
        agg: how the chunks of a summary become one.
        norm_histo: histograms of shares, with the numbers of chunks beside them.
        use_cache: keep the models' answers.
        max_doc_sents: chunks of a document that are looked at.
        batch_size: pairs of chunks per forward pass.
    """

    def __init__(
        self,
        models: Sequence[str] = ("mnli", "anli", "vitc"),
        bins: str = "even50",
        granularity: str = "sentence",
        nli_labels: NliLabels = "e",
        device: Device = "auto",
        start_file: str | None = None,
        imager_load_cache: bool = True,
        agg: Aggregation = "mean",
        norm_histo: bool = False,
        use_cache: bool = True,
        max_doc_sents: Count = 100,
        batch_size: Count = 20,
    ) -> None:
        if not models:
            raise ValueError("models: expected at least one NLI model")
        if bins != "percentile":
            n_even_bins(bins)
        start_file = require_head(start_file, "the metric 'summaCConv'")
        self.head = Head(start_file, len(models), bins, nli_labels, agg, norm_histo)
        self.imagers = [
            Imager(
                name,
                granularity=granularity,
                use_cache=use_cache,
                max_doc_sents=max_doc_sents,
                device=device,
                batch_size=batch_size,
                needed_by="the metric 'summaCConv'",
            )
            for name in models
        ]

    def compute(
        self,
        prompt_texts: list[str],
        generated_texts: list[str],
        reference_texts: list[list[str]],
        meta_infos: list[dict[str, Any] | None] | None = None,
        model: Any = None,
        split_name: str | None = None,
    ) -> MetricResults:
        """`consistency/summacconv`: of each text against its prompt, and their mean."""
        images = zip(*(imager.images(prompt_texts, generated_texts) for imager in self.imagers), strict=True)
        scores = [self.head.score(concatenated(of_pair)) for of_pair in images]
        return {"consistency/summacconv": (scores, fmean(scores))}
