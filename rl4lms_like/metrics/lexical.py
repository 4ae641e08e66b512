"""Metrics of overlap with references, tables and scenes; the scores are those of the rewards with the same ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rl4lms_like.metrics.base import MetricResults, ScoreMetric, TextsMetric
from rl4lms_like.scoring.bleu import Bleu
from rl4lms_like.scoring.captions import cider, frequencies_of_file, require_spice, spice
from rl4lms_like.scoring.meteor import Meteor
from rl4lms_like.scoring.rouge import ROUGE_TYPES, RougeLMaxScore, require_rouge, rouge
from rl4lms_like.scoring.score import Texts, existing_file, mean
from rl4lms_like.scoring.totto import SUBSETS, TottoSample, bleu, parent, totto_samples
from rl4lms_like.scoring.translation import ChrF, SacreBleuScore, TranslationEditRate
from rl4lms_like.system.errors import import_extra
from rl4lms_like.system.numbers import Positive


class MeteorMetric(Meteor, ScoreMetric):
    """METEOR against the best reference, from 0 to 1, of each text and on average."""

    keys = ("lexical/meteor",)


@dataclass(eq=False)
class RougeMetric(TextsMetric):
    """ROUGE F-measures with stemming, from 0 to 1, of each text and on average.

    Args:
        use_single_ref: compare with the first reference; False: with the best for each type.
    """

    needs_references = True
    keys = tuple(f"lexical/rouge_{rouge_type}" for rouge_type in ROUGE_TYPES)

    use_single_ref: bool = True

    def __post_init__(self) -> None:
        require_rouge("the metric 'rouge'")

    def results(self, texts: Texts) -> MetricResults:
        # With several references, the best is chosen for each type: it may be another one for ROUGE-1 than for ROUGE-L.
        by_type = rouge(texts.responses, texts.references, use_single_ref=self.use_single_ref)
        return {f"lexical/rouge_{rouge_type}": (scores, mean(scores)) for rouge_type, scores in by_type.items()}


class RougeLMax(RougeLMaxScore, ScoreMetric):
    """ROUGE-L as py-rouge defines it, against the best reference, from 0 to 1, of each text and on average."""

    keys = ("lexical/rouge_l_max",)


class BLEUMetric(Bleu, ScoreMetric):
    """BLEU-4, from 0 to 1, of each text and of the corpus, which is not the mean over texts."""

    keys = ("lexical/bleu",)


class SacreBLEUMetric(SacreBleuScore, ScoreMetric):
    """BLEU by sacrebleu, from 0 to 1, of each text and of the corpus, which is not the mean over texts."""

    keys = ("lexical/sacrebleu",)


class TERMetric(TranslationEditRate, ScoreMetric):
    """Translation edit rate (lower is better) of each text and of the corpus, where long references weigh more."""

    keys = ("lexical/ter",)


class chrFmetric(ChrF, ScoreMetric):  # noqa: N801 - RL4LMs' name
    """chrF, from 0 to 1, of each text and of the corpus, from the summed counts."""

    keys = ("lexical/chrf",)


class ParentToTTo(TextsMetric):
    """PARENT as computed by ToTTo's script: against the table and against its sentences."""

    def __init__(self) -> None:
        import_extra("sacrebleu", extra="lexical", needed_by="the metric 'parent_totto'")

    def results(self, texts: Texts) -> MetricResults:
        """Compute `table_to_text/parent_<subset>/precision`, `.../recall` and `table_to_text/parent_<subset>_f_score`.

        The subsets are `overall`, `overlap` and `non_overlap`. Means are over the texts whose table has a reference;
        NaN if there is none. The F-score of each text is reported with `overall`.
        """
        samples = totto_samples(texts.metas, "the metric 'parent_totto'")
        scores = parent(texts.responses, samples)  # [n], each with precision, recall and F

        # `overlap`: the header names of the table occur in the training split; None stands for all texts.
        results: MetricResults = {}
        for name, overlap in SUBSETS.items():
            subset = [scores[index] for index in _of_subset(samples, overlap)]
            key = f"table_to_text/parent_{name}"
            results[f"{key}/precision"] = (None, mean([score.precision for score in subset]))
            results[f"{key}/recall"] = (None, mean([score.recall for score in subset]))
            f_scores = [score.f_score for score in scores] if overlap is None else None
            results[f"{key}_f_score"] = (f_scores, mean([score.f_score for score in subset]))
        return results


class BLEUToTTo(TextsMetric):
    """BLEU-4 as computed by ToTTo's script: sacrebleu on lower-cased, detokenised lines."""

    def __init__(self) -> None:
        import_extra("sacrebleu", extra="lexical", needed_by="the metric 'bleu_totto'")

    def results(self, texts: Texts) -> MetricResults:
        """Compute `table_to_text/bleu_overall`, `.../bleu_overlap`, `.../bleu_non_overlap`; NaN without texts."""
        samples = totto_samples(texts.metas, "the metric 'bleu_totto'")

        # BLEU of a corpus is not a mean over texts: it is recomputed for each subset, without scores of single texts.
        results: MetricResults = {}
        for name, overlap in SUBSETS.items():
            indices = _of_subset(samples, overlap)
            responses = [texts.responses[index] for index in indices]
            tables = [samples[index] for index in indices]
            results[f"table_to_text/bleu_{name}"] = (None, bleu(responses, tables))
        return results


def _of_subset(samples: Sequence[TottoSample], overlap: bool | None) -> list[int]:
    """Return the indices of the samples in a subset that have references."""
    indices = []
    for index, sample in enumerate(samples):
        if sample.n_written and (overlap is None or sample.overlap == overlap):
            indices.append(index)
    return indices


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
        import_extra("spacy", extra="captions", needed_by=self.needed_by)
        if self.references_file is not None:
            existing_file(self.references_file, "references_file")

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
