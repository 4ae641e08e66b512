"""Metrics for texts about tables: ToTTo's two published scores, for the whole split and its two subsets."""

from __future__ import annotations

from collections.abc import Sequence

from rl4lms_like.metrics.base import MetricResults, TextsMetric
from rl4lms_like.scoring.parent import parent, require_parent
from rl4lms_like.scoring.score import Texts, mean
from rl4lms_like.scoring.totto import SUBSETS, TottoSample, bleu, totto_samples


class ParentToTTo(TextsMetric):
    """PARENT as computed by ToTTo's script: against the table and against its sentences."""

    def __init__(self) -> None:
        require_parent("the metric 'parent_totto'")

    def results(self, texts: Texts) -> MetricResults:
        """Compute `table_to_text/parent_<subset>/precision`, `.../recall` and `table_to_text/parent_<subset>_f_score`.

        The subsets are `overall`, `overlap` and `non_overlap`. Means are over the texts whose table has a reference;
        NaN if there is none. The F-score of each text is reported with `overall`.
        """
        samples = totto_samples(texts.metas, "the metric 'parent_totto'")
        scores = parent(texts.responses, samples)
        results: MetricResults = {}
        for name, overlap in SUBSETS.items():
            chosen = [scores[index] for index in _of_subset(samples, overlap)]
            key = f"table_to_text/parent_{name}"
            results[f"{key}/precision"] = (None, mean([score.precision for score in chosen]))
            results[f"{key}/recall"] = (None, mean([score.recall for score in chosen]))
            of_texts = [score.f_score for score in scores] if overlap is None else None
            results[f"{key}_f_score"] = (of_texts, mean([score.f_score for score in chosen]))
        return results


class BLEUToTTo(TextsMetric):
    """BLEU-4 as computed by ToTTo's script: sacrebleu on lower-cased, detokenised lines."""

    def __init__(self) -> None:
        require_parent("the metric 'bleu_totto'")

    def results(self, texts: Texts) -> MetricResults:
        """Compute `table_to_text/bleu_overall`, `.../bleu_overlap`, `.../bleu_non_overlap`; NaN without texts."""
        samples = totto_samples(texts.metas, "the metric 'bleu_totto'")
        results: MetricResults = {}
        for name, overlap in SUBSETS.items():
            chosen = _of_subset(samples, overlap)
            responses, tables = [texts.responses[index] for index in chosen], [samples[index] for index in chosen]
            results[f"table_to_text/bleu_{name}"] = (None, bleu(responses, tables))
        return results


def _of_subset(samples: Sequence[TottoSample], overlap: bool | None) -> list[int]:
    """Return the indices of the samples in a subset that have references."""
    return [
        index
        for index, sample in enumerate(samples)
        if sample.n_written and (overlap is None or sample.overlap == overlap)
    ]
