"""Metric pass@k: probability that at least one of k samples of a prompt is right."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Annotated, Any

from rl4lms_like.core.numbers import Count, Finite
from rl4lms_like.core.schema import ComponentOf
from rl4lms_like.core.wording import InWords
from rl4lms_like.metrics.base import BaseMetric, MetricResults
from rl4lms_like.scoring.answers import Normalisation, exact_matches
from rl4lms_like.scoring.pass_at_k import groups_of, pass_at_k

_SCORER = InWords("the id of a batched reward, or its id and args")


class PassAtK(BaseMetric):
    """pass@k: unbiased estimate of the probability that one of k samples of a prompt is right (arXiv 2107.03374).

    Texts with equal prompts are samples of one prompt. Let the data pool repeat each prompt at least k times, and
    enable sampling in evaluations (`train_evaluation.generation_kwargs.do_sample`). The estimator is eq. 1 of the
    paper. Without a scorer, prompts without references are excluded.

    Args:
        k: numbers of attempts, a list.
        scorer: reward that decides whether a sample is right, `{id, args}`: `exact_match`, `math_equal`, `regex`,
            `python` or any other batched reward; null: `exact_match` with its default arguments.
        correct_from: minimum score of a right sample.
    """

    def __init__(
        self,
        k: list[Count] | None = None,
        scorer: Annotated[Any, ComponentOf("BatchedRewardFunction"), _SCORER] | None = None,
        correct_from: Finite = 1.0,
    ) -> None:
        self.k = [1] if k is None else list(k)
        if not self.k:
            raise ValueError("k: expected at least one number of attempts")
        self.scorer = scorer
        self.needs_references = scorer is None or getattr(scorer, "needs_references", False)
        self.correct_from = correct_from

    def compute(
        self,
        prompt_texts: list[str],
        generated_texts: list[str],
        reference_texts: list[list[str]],
        meta_infos: list[dict[str, Any] | None] | None = None,
        model: Any = None,
        split_name: str | None = None,
    ) -> MetricResults:
        """Compute `answers/pass@<k>` for each k: each text has that of its prompt, the split the mean over prompts."""
        right = self._right(prompt_texts, generated_texts, reference_texts, meta_infos)
        groups = groups_of(prompt_texts)
        self._check_samples(groups)
        results: MetricResults = {}
        for k in self.k:
            passed = {prompt: _passed([right[place] for place in places], k) for prompt, places in groups.items()}
            told = [share for share in passed.values() if not math.isnan(share)]
            overall = fmean(told) if told else math.nan
            results[f"answers/pass@{k}"] = ([passed[prompt] for prompt in prompt_texts], overall)
        return results

    def _right(
        self,
        prompts: list[str],
        responses: list[str],
        references: list[list[str]],
        metas: list[dict[str, Any] | None] | None,
    ) -> Sequence[bool | None]:
        """Return whether each text is right; None if it has no references."""
        if self.scorer is None:
            return exact_matches(responses, references, Normalisation())
        scores = self.scorer(prompts, responses, references, [True] * len(responses), metas or [None] * len(responses))
        if len(scores) != len(responses):
            raise ValueError(f"{type(self.scorer).__name__} returned {len(scores)} scores for {len(responses)} texts")
        numbers = [float(score) for score in scores]
        if any(map(math.isnan, numbers)):
            place = next(place for place, number in enumerate(numbers) if math.isnan(number))
            raise ValueError(f"{type(self.scorer).__name__} returned NaN for text {place}, {responses[place][:60]!r}")
        return [number >= self.correct_from for number in numbers]

    def _check_samples(self, groups: dict[str, list[int]]) -> None:
        most = max(self.k)
        few = [prompt for prompt, places in groups.items() if len(places) < most]
        if few:
            raise ValueError(
                f"pass@{most} needs at least {most} samples of each prompt; {len(few)} of {len(groups)} prompts have "
                f"fewer, {few[0][:60]!r} has {len(groups[few[0]])}: repeat the prompts in the data pool, or lower k"
            )


def _passed(right: Sequence[bool | None], k: int) -> float:
    """Return pass@k of one prompt's samples; NaN if they have no references."""
    return math.nan if None in right else pass_at_k(len(right), sum(map(bool, right)), k)
