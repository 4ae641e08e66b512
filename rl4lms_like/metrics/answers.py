"""Metrics that check answers: the fraction of right ones, at least one of k is right (pass@k), most are (maj@k)."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from rl4lms_like.core.generated import of_texts
from rl4lms_like.metrics.base import MetricResults, ScoreMetric, TextsMetric
from rl4lms_like.scoring.answers import ExactMatch, Regex
from rl4lms_like.scoring.math_answers import MathEqual
from rl4lms_like.scoring.reasoning_gym import ReasoningGym
from rl4lms_like.scoring.score import Texts, mean
from rl4lms_like.system.numbers import Count, Finite
from rl4lms_like.system.schema import ComponentOf
from rl4lms_like.system.wording import InWords

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

        # A vote compares answers, and a reward gives only a number: it must also have a method `answers`.
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
        is_right = self._right(texts)
        identities = texts.identities  # equal texts with different pictures are different prompts
        groups = groups_of(identities)

        # With fewer than k samples neither is defined: pass@k draws k of n, and maj@k would have no whole vote.
        largest_k = max(self.k)
        short = [indices for indices in groups.values() if len(indices) < largest_k]
        if short:
            raise ValueError(
                f"{self.name}@{largest_k} needs at least {largest_k} samples of each prompt; {len(short)} of "
                f"{len(groups)} prompts have fewer, {texts.prompts[short[0][0]][:60]!r} has {len(short[0])}: repeat "
                f"the prompts in the data pool, or lower k"
            )

        # The mean is over prompts, not over texts: a prompt with more samples weighs as much as any other.
        results: MetricResults = {}
        for key, scores in zip(self.keys, self.scores(list(groups.values()), is_right, texts), strict=True):
            score_by_prompt = dict(zip(groups, scores, strict=True))
            results[key] = ([score_by_prompt[identity] for identity in identities], mean(scores))
        return results

    def _right(self, texts: Texts) -> list[bool]:
        """Return whether each response is right."""
        if self.scorer is None:
            return list(map(bool, ExactMatch().per_text(texts)))
        prompts, responses, references, metas, images = texts
        if hasattr(self.scorer, "scores_of"):  # it may read the pictures
            scores = self.scorer.scores_of(of_texts(prompts, responses, references, metas, images))
        else:
            scores = self.scorer(prompts, responses, references, [True] * len(responses), metas)

        # A reward of the user's: in a run its results are checked by `rewards.call`, which is not used here.
        scorer_name = type(self.scorer).__name__
        if len(scores) != len(responses):
            raise ValueError(f"{scorer_name} returned {len(scores)} scores for {len(responses)} texts")
        numbers = [float(score) for score in scores]
        for index, number in enumerate(numbers):
            if math.isnan(number):  # not >= anything, so it would count as wrong
                raise ValueError(f"{scorer_name} returned NaN for text {index}, {responses[index][:60]!r}")
        return [number >= self.correct_from for number in numbers]


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
        # n samples of each prompt, c of them right.
        counts: list[tuple[int, int]] = []
        for indices in groups:
            counts.append((len(indices), sum(right[index] for index in indices)))

        scores = []
        for k in self.k:
            scores.append([pass_at_k(n, c, k) for n, c in counts])
        return scores


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

        def wins(voters: Sequence[int]) -> bool:
            """Return whether the winner of a vote among these samples is right."""
            voters = [index for index in voters if answers[index] is not None]
            if not voters:
                return False

            # Of equal counts, `most_common` returns the answer that was inserted first.
            [(winner, _)] = Counter(answers[index] for index in voters).most_common(1)
            first_voter = next(index for index in voters if answers[index] == winner)
            return right[first_voter]

        # Votes of k consecutive samples each: samples 0 to k - 1, k to 2k - 1, ...
        scores = []
        for k in self.k:
            scores_of_k = []
            for indices in groups:
                starts = range(0, len(indices) - k + 1, k)
                scores_of_k.append(mean([float(wins(indices[start : start + k])) for start in starts]))
            scores.append(scores_of_k)
        return scores


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return 1 - C(n - c, k) / C(n, k), their eq. 1, for k attempts and n samples (at least k), c of them right."""
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def groups_of(texts: Sequence[str]) -> dict[str, list[int]]:
    """Return the indices at which each text occurs."""
    groups: dict[str, list[int]] = {}
    for index, text in enumerate(texts):
        groups.setdefault(text, []).append(index)
    return groups
