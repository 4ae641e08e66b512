"""Scores of responses, from which two adapters make rewards and metrics.

    class Meteor(Score)                                 arguments, requirements and computation
    class MeteorRewardFunction(Meteor, ScoreReward)     one number per finished response
    class MeteorMetric(Meteor, ScoreMetric)             the same numbers, and one of all texts together

A sample without references is an error in a reward. In a metric its score is NaN, and it is excluded from means and
corpus scores.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, NamedTuple, TypeVar

from rl4lms_like.core.generated import Generated
from rl4lms_like.core.pictures import Picture, identity_of
from rl4lms_like.system.disk import with_home
from rl4lms_like.system.wording import beginning

T = TypeVar("T")


class Texts(NamedTuple):
    """Prompts, responses, references and `meta_data` of `n` samples; each list has length `n`.

    `images` are the pictures of the prompts; None if no prompt has any.
    """

    prompts: list[str]
    responses: list[str]
    references: list[list[str]]
    metas: list[dict[str, Any] | None]
    images: list[tuple[Picture, ...]] | None = None

    @classmethod
    def of(cls, generated: Sequence[Generated]) -> Texts:
        """Return the texts of responses, and the pictures of their prompts."""
        images = [item.sample.images for item in generated]
        return cls(
            prompts=[item.sample.prompt_or_input_text for item in generated],
            responses=[item.text for item in generated],
            references=[item.sample.references for item in generated],
            metas=[item.sample.meta_data for item in generated],
            images=images if any(images) else None,
        )

    @property
    def identities(self) -> list[str]:
        """`Sample.identity` of each sample, which is equal for responses to the same text and pictures."""
        if self.images is None:
            return self.prompts
        return [identity_of(prompt, images) for prompt, images in zip(self.prompts, self.images, strict=True)]

    def chosen(self, indices: Sequence[int]) -> Texts:
        """Return the samples at these indices."""
        return Texts(
            prompts=[self.prompts[index] for index in indices],
            responses=[self.responses[index] for index in indices],
            references=[self.references[index] for index in indices],
            metas=[self.metas[index] for index in indices],
            images=None if self.images is None else [self.images[index] for index in indices],
        )

    def to_read(self, *, with_prompts: bool) -> list[str]:
        """Return each response, appended to its prompt or alone."""
        if not with_prompts:
            return self.responses
        return [prompt + response for prompt, response in zip(self.prompts, self.responses, strict=True)]

    def pairs(self) -> list[tuple[str, str]]:
        """Return each response with each of its references, without repetitions."""
        # The keys of a dict, which keep their order: a model scores a pair once, however often it occurs in a batch.
        pairs: dict[tuple[str, str], None] = {}
        for response, references in zip(self.responses, self.references, strict=True):
            pairs |= dict.fromkeys((response, reference) for reference in references)
        return list(pairs)

    def best(self, score_of: dict[tuple[str, str], float]) -> list[float]:
        """Return the best score of each response over its references, from the scores of `pairs`."""
        best_scores = []
        for response, references in zip(self.responses, self.references, strict=True):
            best_scores.append(max(score_of[response, reference] for reference in references))
        return best_scores


class Score(ABC):
    """Score of responses. The constructor of a subclass has the arguments of its reward and its metric.

    Attributes:
        id: the id in configs, for error messages.
        kind: `reward` or `metric`; set by the adapters.
        needs_references: True if there is no score without references.
    """

    id: ClassVar[str] = ""
    kind: ClassVar[str] = "score"
    needs_references: bool

    @property
    def needed_by(self) -> str:
        """Name of the component in messages about missing packages and files."""
        return f"the {self.kind} {self.id!r}"

    @abstractmethod
    def per_text(self, texts: Texts) -> list[float]:
        """Return one number for each response; each has a reference if `needs_references` is True."""

    def with_overall(self, texts: Texts) -> tuple[list[float], float]:
        """Return one number for each response, and one for all of them together: by default the mean."""
        scores = self.per_text(texts)
        return scores, mean(scores)


def require_references(prompt_texts: Sequence[str], references: Sequence[Sequence[str]]) -> None:
    """Raise a `ValueError` that names the first sample without references."""
    for index, (prompt, sample_references) in enumerate(zip(prompt_texts, references, strict=True)):
        if not sample_references:
            where = f"text {index} of {len(references)}"
            raise ValueError(f"{where} has no references to compare with (prompt {beginning(prompt)})")


def readings(references: Sequence[Sequence[str]], read: Callable[[tuple[str, ...]], T]) -> Iterator[T]:
    """Yield `read(references)` for each sample, computed once for equal references and kept only while needed."""
    # The responses of a group share their references. A reading can be large (stems, n-grams), so it is kept only
    # until the last of its samples: then a split of thousands of samples does not fill the memory.
    n_left = Counter(map(tuple, references))
    shared_readings: dict[tuple[str, ...], T] = {}
    for texts in map(tuple, references):
        reading = shared_readings.pop(texts) if texts in shared_readings else read(texts)

        n_left[texts] -= 1
        if n_left[texts]:
            shared_readings[texts] = reading
        yield reading


def mean(scores: Sequence[float]) -> float:
    """Return the mean of the scores that are not NaN, or NaN if there are none."""
    known = [score for score in scores if not math.isnan(score)]
    return fmean(known) if known else math.nan


def existing_file(path: str, argument: str) -> Path:
    """Return the path of a file, or raise a `ValueError` with the argument's name if there is none."""
    file = with_home(path)
    if not file.is_file():
        raise ValueError(f"{argument}: there is no file {file.absolute()}")
    return file


def json_texts(line: str, field: str, where: str, *, bare: bool) -> list[str]:
    """Return the texts of a line of JSON: an object with a text or a list of texts under the key `field`.

    With `bare`, also texts without an object are accepted. A line of another form is a `ValueError` that names `where`.
    """
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:  # also of a number with too many digits
        raise ValueError(f"{where}: not JSON: {error}") from error

    # {"references": ["a", "b"]}, {"references": "a"}, or with `bare` also ["a", "b"] and "a".
    if isinstance(value, dict):
        value = value.get(field)
    elif not bare:
        value = None
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{where}: expected {'text, a list of texts, or ' * bare}an object with these as {field!r}")
    return texts
