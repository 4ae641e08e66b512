"""Base classes of metrics; users derive from `BaseMetric`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeAlias

from rl4lms_like.core.generated import Generated, of_texts
from rl4lms_like.scoring.score import Score, Texts

MetricResults: TypeAlias = "dict[str, tuple[list[float] | None, float]]"
"""Key -> (one score per generation or None, one score for the split)."""


class BaseMetric(ABC):
    """Metric of the generations of one split.

    A subclass defines `compute`; its constructor has the `args` of a config. The scores of each text appear next to the
    texts in the run's files, those of the split in the run's curves:

        class EndsWithFullStop(BaseMetric):
            def compute(self, prompt_texts, generated_texts, reference_texts, meta_infos=None, model=None,
                        split_name=None):
                scores = [float(text.endswith(".")) for text in generated_texts]
                return {"form/full_stop": (scores, sum(scores) / len(scores))}

    A score that is not defined for a text, such as one without references, is NaN.

    Attributes:
        needs_references: True if there is no score without references. A run that evaluates only samples without
            references is then rejected before a model is loaded.
    """

    needs_references: bool = False

    @abstractmethod
    def compute(
        self,
        prompt_texts: list[str],
        generated_texts: list[str],
        reference_texts: list[list[str]],
        meta_infos: list[dict[str, Any] | None] | None = None,
        model: Any = None,
        split_name: str | None = None,
    ) -> MetricResults:
        """Score `n` generations; the lists have length `n`.

        Args:
            prompt_texts: the raw prompts.
            generated_texts: the response to each prompt.
            reference_texts: references of each sample; the lists may be empty.
            meta_infos: `meta_data` of each sample.
            model: the language model that is evaluated (a transformers model), for metrics of the model itself.
            split_name: `train`, `val` or `test`.

        Returns:
            Key -> (one score per generation or None, one score for the split). Keys are `family/name`.
        """


class GeneratedMetric(BaseMetric):
    """Metric of the library that reads more of a response than its text: messages of the prompt, token ids."""

    @abstractmethod
    def results_of(self, generated: Sequence[Generated]) -> MetricResults:
        """Compute the results of `n` responses."""

    def compute(
        self,
        prompt_texts: list[str],
        generated_texts: list[str],
        reference_texts: list[list[str]],
        meta_infos: list[dict[str, Any] | None] | None = None,
        model: Any = None,
        split_name: str | None = None,
    ) -> MetricResults:
        """Compute the results of texts alone; an evaluation calls `results_of`."""
        return self.results_of(of_texts(prompt_texts, generated_texts, reference_texts, meta_infos))


class TextsMetric(GeneratedMetric):
    """Metric of texts, and of the pictures of their prompts.

    If it needs references, texts without any are NaN and excluded.

    Attributes:
        keys: keys of its results, which are NaN if it needs references and no text has any.
    """

    keys: tuple[str, ...] = ()

    @abstractmethod
    def results(self, texts: Texts) -> MetricResults:
        """Compute the results; each text has a reference if `needs_references` is True."""

    def results_of(self, generated: Sequence[Generated]) -> MetricResults:
        texts = Texts.of(generated)
        n_texts = len(texts.responses)
        if not self.needs_references:
            return self.results(texts)

        # Texts without references are left out before anything is computed, since corpus scores such as BLEU are not
        # means of the texts' scores.
        indices = [index for index, references in enumerate(texts.references) if references]
        if not indices:
            return {key: ([math.nan] * n_texts, math.nan) for key in self.keys}
        results = self.results(texts.chosen(indices))

        # One score for each generation again: NaN where there are no references.
        results_of_all: MetricResults = {}
        for key, (scores, overall) in results.items():
            if scores is None:
                results_of_all[key] = (None, overall)
                continue
            scores_of_all = [math.nan] * n_texts
            for index, score in zip(indices, scores, strict=True):
                scores_of_all[index] = score
            results_of_all[key] = (scores_of_all, overall)
        return results_of_all


class ScoreMetric(TextsMetric, Score):
    """Metric that reports a score of each text and of all texts together, under the only one of its `keys`."""

    kind = "metric"

    def results(self, texts: Texts) -> MetricResults:
        (key,) = self.keys
        return {key: self.with_overall(texts)}


class NamedMetric(BaseMetric):
    """Metric whose keys end in a name, so that a run can have several instances of one metric.

    {id: learned_reward, args: ..., name: toxicity}   reports `semantic/learned_automodel_metric/toxicity`

    Args:
        metric: the metric that computes the results.
        name: name that is appended to each of its keys, after a slash.
    """

    def __init__(self, metric: BaseMetric, name: str) -> None:
        self.metric = metric
        self.name = name
        self.needs_references = metric.needs_references

    def compute(self, *args: Any, **kwargs: Any) -> MetricResults:
        """Compute the metric's results under the longer keys."""
        return self.renamed(self.metric.compute(*args, **kwargs))

    def renamed(self, results: MetricResults) -> MetricResults:
        """Return results of the metric under the longer keys."""
        return {named_key(key, self.name): value for key, value in results.items()}


def named_key(key: str, name: str) -> str:
    """Return the key followed by the name, such as `semantic/learned_automodel_metric/toxicity`."""
    return f"{key}/{name}"
