"""Metrics that check answers: the fraction of right ones, at least one of k is right (pass@k), most are (maj@k)."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from rl4lms_like.core.numbers import Count, Finite
from rl4lms_like.core.schema import ComponentOf
from rl4lms_like.core.wording import InWords
from rl4lms_like.metrics.base import MetricResults, ScoreMetric, TextsMetric
from rl4lms_like.scoring.answers import ExactMatch, Regex
from rl4lms_like.scoring.math_answers import MathEqual
from rl4lms_like.scoring.reasoning_gym import ReasoningGym
from rl4lms_like.scoring.score import Texts, mean

_SCORER = InWords("the id of a batched reward, or its id and args")


class RegexMetric(Regex, ScoreMetric):
    """Fraction of responses that match a Python regular expression."""

    keys = ("answers/regex",)


class ExactMatchMetric(ExactMatch, ScoreMetric):
    """Fraction of responses that equal one of their references; responses without references are excluded."""

    keys = ("answers/exact_match",)


class MathEqualMetric(MathEqual, ScoreMetric):
    r"""Fraction of responses whose final number or LaTeX answer equals a reference.

    The answer is the content of the last `\boxed{}`, else the text after the last `####`, else the last number.
    Responses without references are excluded.
    """

    keys = ("answers/math_equal",)


class ReasoningGymMetric(ReasoningGym, ScoreMetric):
    """Fraction of responses that are the stored answer; with `strict: false`, the mean of the package's own scores.

    Responses without references are excluded.
    """

    keys = ("answers/reasoning_gym",)


class SampledAnswers(TextsMetric):
    """Base of metrics whose score of a prompt depends on k of its samples.

    Args:
        correct_from: minimum score of a right sample.
    """

    name: ClassVar[str]
    needs_answers: ClassVar[bool] = False
    """True if the scorer must also extract the answers."""

    def __init__(
        self,
        k: list[Count] | None = None,
        scorer: Annotated[Any, ComponentOf("BatchedRewardFunction"), _SCORER] | None = None,
        correct_from: Finite = 1.0,
    ) -> None:
        self.k = [1] if k is None else list(k)
        if not self.k:
            raise ValueError("k: expected at least one number of samples")
        if self.needs_answers and not hasattr(scorer or ExactMatch, "answers"):
            raise ValueError(f"scorer: {type(scorer).__name__} extracts no answers; use exact_match or math_equal")
        self.scorer = scorer
        self.needs_references = scorer is None or getattr(scorer, "needs_references", False)
        self.correct_from = correct_from
        self.keys = tuple(f"answers/{self.name}@{k}" for k in self.k)

    @abstractmethod
    def scores(self, groups: Sequence[list[int]], right: Sequence[bool], texts: Texts) -> list[list[float]]:
        """Return the score of each prompt, for each of the numbers `k`.

        `groups` has the indices of the samples of each prompt, at least as many as the largest k.
        """

    def results(self, texts: Texts) -> MetricResults:
        """Compute the score for each k: each text has that of its prompt, the split the mean over prompts."""
        right = self._right(texts)
        groups = groups_of(texts.prompts)
        self._check_samples(groups)
        results: MetricResults = {}
        for key, scores in zip(self.keys, self.scores(list(groups.values()), right, texts), strict=True):
            of_prompt = dict(zip(groups, scores, strict=True))
            results[key] = ([of_prompt[prompt] for prompt in texts.prompts], mean(list(of_prompt.values())))
        return results

    def _right(self, texts: Texts) -> list[bool]:
        """Return whether each response is right."""
        if self.scorer is None:
            return list(map(bool, ExactMatch().per_text(texts)))
        prompts, responses, references, metas = texts
        scores = self.scorer(prompts, responses, references, [True] * len(responses), metas)
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
                f"{self.name}@{most} needs at least {most} samples of each prompt; {len(few)} of {len(groups)} prompts "
                f"have fewer, {few[0][:60]!r} has {len(groups[few[0]])}: repeat the prompts in the data pool, or lower "
                f"k"
            )


class PassAtK(SampledAnswers):
    """pass@k: unbiased estimate of the probability that one of k samples of a prompt is right (arXiv 2107.03374).

    Texts with equal prompts are samples of one prompt. Let the data pool repeat each prompt at least k times, and
    enable sampling in evaluations (`train_evaluation.generation_kwargs.do_sample`). The estimator is eq. 1 of the
    paper. If the scorer needs references, prompts without any are excluded.

    Args:
        k: numbers of attempts, a list.
        scorer: reward that decides whether a sample is right, `{id, args}`: `exact_match`, `math_equal`, `regex`,
            `python` or any other batched reward; null: `exact_match` with its default arguments.
    """

    name = "pass"

    def scores(self, groups: Sequence[list[int]], right: Sequence[bool], texts: Texts) -> list[list[float]]:
        counts = [(len(places), sum(right[place] for place in places)) for places in groups]
        return [[pass_at_k(n, c, k) for n, c in counts] for k in self.k]


class MajAtK(SampledAnswers):
    """maj@k: fraction of right answers by majority vote over k samples of a prompt (self-consistency, 2203.11171).

    Each k consecutive samples of a prompt vote for their extracted, normalized answers; samples beyond a multiple of k
    do not vote. The most frequent answer wins; of several, the one that was sampled first (as in
    lm-evaluation-harness). Samples without an answer do not vote, and without any vote the result is wrong. Samples
    belong to prompts as in `pass_at_k`.

    Args:
        k: numbers of samples that vote, a list.
        scorer: reward that extracts the answer and decides whether it is right, `{id, args}`: `exact_match` or
            `math_equal`; null: `exact_match` with its default arguments.
    """

    name = "maj"
    needs_answers = True

    def scores(self, groups: Sequence[list[int]], right: Sequence[bool], texts: Texts) -> list[list[float]]:
        answers = (self.scorer or ExactMatch()).answers(texts)

        def is_right(voters: Sequence[int]) -> bool:
            votes = [place for place in voters if answers[place] is not None]
            won = Counter(answers[place] for place in votes).most_common(1)  # of equal counts, the first one
            return bool(won) and right[next(place for place in votes if answers[place] == won[0][0])]

        def score(places: list[int], k: int) -> float:
            return mean([float(is_right(places[start : start + k])) for start in range(0, len(places) - k + 1, k)])

        return [[score(places, k) for places in groups] for k in self.k]


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return 1 - C(n - c, k) / C(n, k), their eq. 1, for k attempts and n samples (at least k), c of them right."""
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def groups_of(texts: Sequence[str]) -> dict[str, list[int]]:
    """Return the indices at which each text occurs."""
    groups: dict[str, list[int]] = {}
    for place, text in enumerate(texts):
        groups.setdefault(text, []).append(place)
    return groups
