"""Answers to questions of reasoning-gym: equal to the stored answer, or as the package's own scorers score them.

    strict    " 8 "  -->  "8"  ==  "8"  <--  the sample's reference                                      1, else 0
    graded    " 8 "  -->  "8"  -->  score_answer("8", entry) of the question's data set                  0 to 1

The pool `reasoning_gym` stores data set, config and entry of each question in `meta_data`, for the scorers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rl4lms_like.scoring.answers import ExactMatch, compiled, extracted
from rl4lms_like.scoring.score import Score, Texts
from rl4lms_like.system.errors import import_extra, require_extra

# Keys of `meta_data`: name and config of the data set, and its entry with the question.
DATASET = "dataset"
CONFIG = "config"
ENTRY = "entry"


@dataclass(eq=False)
class ReasoningGym(Score):
    """1 for each response that is the stored answer, else 0; with `strict: false`, the package's own score.

    Args:
        strict: compare with the stored answer only. If false, call the package's scorer of the question's data set,
            which needs samples of the pool `reasoning_gym`.
        extract: regular expression that finds the answer in a response: the first group of its last match. A response
            without a match is wrong. Default: the whole response.
    """

    id = "reasoning_gym"
    needs_references = True

    strict: bool = True
    extract: str | None = None

    def __post_init__(self) -> None:
        self._extract = None if self.extract is None else compiled(self.extract)
        if not self.strict:
            require_extra("reasoning_gym", extra="reasoning", needed_by=self.needed_by)

    def per_text(self, texts: Texts) -> list[float]:
        answers = [self._answer(response) for response in texts.responses]
        scores = [0.0] * len(answers)

        # An empty answer is wrong, even if a reference is empty or the package's scorer pays for it.
        if self.strict:
            is_equal = ExactMatch().per_text(texts._replace(responses=answers))
            for index, answer in enumerate(answers):
                if answer:
                    scores[index] = is_equal[index]
        else:
            for index, answer in enumerate(answers):
                if answer:
                    scores[index] = self._graded(answer, texts.metas[index])
        return scores

    def _answer(self, response: str) -> str:
        """Return the answer with its white space collapsed; empty without one."""
        answer = response if self._extract is None else extracted(response, self._extract)
        return "" if answer is None else " ".join(answer.split())

    def _graded(self, answer: str, meta: Mapping[str, Any] | None) -> float:
        if not meta or not {DATASET, CONFIG, ENTRY} <= meta.keys():
            raise ValueError("strict: false needs samples of the pool 'reasoning_gym', whose meta_data has the entry")
        data_set = create(meta[DATASET], json.dumps(meta[CONFIG]), self.needed_by)
        return float(data_set.score_answer(answer, meta[ENTRY]))


@lru_cache(maxsize=8)  # a run has one data set, and its scorer may depend on the config
def create(name: str, config: str, needed_by: str, **size_and_seed: int) -> Any:
    """Return a data set of reasoning-gym; `config` has its other arguments as JSON.

    Raises:
        MissingExtraError: the package is not installed.
        TypeError, ValueError, AssertionError: the package does not know the data set, an argument or a value.
    """
    package = import_extra("reasoning_gym", extra="reasoning", needed_by=needed_by)
    return package.create_dataset(name, **json.loads(config), **size_and_seed)
