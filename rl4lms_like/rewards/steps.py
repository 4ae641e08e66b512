r"""Rewards of the steps of a response, each credited to the token that ends the step.

    response   add  2  to 3 .\n\n   that is  5 \n\n   so  5 <eos>       separator: \n\n
    reward      0   0   0 0   .9     0    0  0  .8     0  0    .4       the last step ends with the response

A step ends at the token with which the text of the response first contains the separator after it; such a token may
also hold the beginning of the next step. A separator that is a special token is found by its id, since texts do not
have those. Between two separators without a text there is no step, nor between the last one and the end.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cache
from statistics import fmean
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import MinLen

from rl4lms_like.core.continuation import stripped_tokens
from rl4lms_like.core.generated import Generated
from rl4lms_like.core.observation import Observation
from rl4lms_like.rewards.base import EpisodeReward
from rl4lms_like.rewards.call import as_list, finite_number, named
from rl4lms_like.scoring.frozen import ModelArguments
from rl4lms_like.scoring.python_function import StepFunctionScore
from rl4lms_like.scoring.steps import StepClassifier
from rl4lms_like.system.numbers import Whole
from rl4lms_like.system.wording import agreement, excerpt

SEPARATOR = "\n\n"
Aggregate = Literal["mean", "min", "last"]


@dataclass(frozen=True)
class Step:
    """Step of a response.

    Args:
        text: without the separator.
        end: number of tokens of the response up to the end of the step, at least 1.
    """

    text: str
    end: int


def split_steps(episode: Observation, separator: str) -> list[Step]:
    """Return the steps of a response; one without a text is a single step with an empty text."""
    special_id = stripped_tokens(episode.layout.tokenizer).get(separator)
    pieces = _pieces_of_text(episode, separator) if special_id is None else _pieces_of_ids(episode, special_id)

    # White space is no step: a text that ends with the separator has none after it.
    steps = [piece for piece in pieces if piece.text.strip()]
    return steps or [Step("", episode.n_actions)]


def _pieces_of_text(episode: Observation, separator: str) -> list[Step]:
    """Return the pieces between the separators in the text of a response."""
    text = episode.context_text

    # Number of characters of the text that the first n tokens have. It grows with n, so that a position is found in
    # log2(n) decoded texts instead of n, of which the positions share the first ones.
    @cache
    def n_characters(n_actions: int) -> int:
        return agreement(episode.after(n_actions).context_text, text)

    texts = text.split(separator)
    pieces = []
    end_in_text = 0
    for piece in texts[:-1]:
        end_in_text += len(piece) + len(separator)
        end = bisect_left(range(episode.n_actions), end_in_text, key=n_characters)
        pieces.append(Step(piece, end))
    return [*pieces, Step(texts[-1], episode.n_actions)]


def _pieces_of_ids(episode: Observation, separator_id: int) -> list[Step]:
    """Return the pieces between the tokens with an id that the text of a response does not have."""
    ends = [int(index) + 1 for index in np.flatnonzero(episode.action_ids == separator_id)]
    pieces = []
    start_in_text = 0
    for end in [*ends, episode.n_actions]:
        text = episode.after(end).context_text
        pieces.append(Step(text[start_in_text:], end))
        start_in_text = len(text)
    return pieces


@dataclass(eq=False, kw_only=True)
class StepReward(EpisodeReward):
    """Base class of rewards that score the steps of a response.

    Args:
        separator: text, or special token of the policy's tokenizer, that ends a step.
        aggregate: one reward at the last token of the response: the `mean` of the scores of its steps, the lowest one
            (`min`) or that of the `last` step. null: the score of each step, at the last token of the step. Algorithms
            that compare responses to one prompt need one reward, since the sum of the scores rewards more steps.
    """

    separator: Annotated[str, MinLen(1)] = SEPARATOR
    aggregate: Aggregate | None = None

    @property
    def terminal(self) -> bool:  # type: ignore[override]
        """True if the whole reward is at the last token."""
        return self.aggregate is not None

    @abstractmethod
    def step_scores(self, episodes: Sequence[Observation], steps: Sequence[Sequence[str]]) -> Sequence[Any]:
        """Return a list with one finite number for each step of each response.

        Args:
            episodes: `n` finished responses.
            steps: the texts of their steps, at least one for each response.
        """

    def rewards_of(self, episodes: Sequence[Observation]) -> list[list[float]]:
        """Return the rewards of all tokens of each response."""
        steps_of_episodes = [split_steps(episode, self.separator) for episode in episodes]
        texts = [[step.text for step in steps] for steps in steps_of_episodes]
        scores_of_episodes = self.step_scores(episodes, texts)

        rewards_of_episodes = []
        for episode, steps, returned in zip(episodes, steps_of_episodes, scores_of_episodes, strict=True):
            scores = _checked_scores(returned, len(steps), episode)
            rewards = [0.0] * episode.n_actions
            if self.aggregate is not None:
                rewards[-1] = _aggregated(scores, self.aggregate)
            else:
                for step, score in zip(steps, scores, strict=True):
                    rewards[step.end - 1] += score  # a token may end several steps
            rewards_of_episodes.append(rewards)
        return rewards_of_episodes

    def __call__(
        self,
        prev_observation: Observation,
        action: int,
        current_observation: Observation,
        done: bool,
        meta_info: dict[str, Any] | None = None,
    ) -> float:
        """Return the reward of a response at its last token, 0 before; without `aggregate`, raise a `ValueError`."""
        if self.aggregate is None:
            raise ValueError(
                "the scores of steps are known when the response is finished, but were asked for token by token, by an "
                "environment or by another reward: set aggregate to mean, min or last"
            )
        return self.rewards_of([current_observation])[0][-1] if done else 0.0


def _checked_scores(returned: Any, n_steps: int, episode: Observation) -> list[float]:
    """Return the scores of a response's steps; a `ValueError` if they are not one finite number for each step."""
    # Fewer scores would credit the wrong steps, and `min` would hide a NaN.
    values = as_list(returned)
    numbers = [] if values is None else [finite_number(value) for value in values]
    scores = [number for number in numbers if number is not None]
    if values is None or len(scores) != len(values) or len(scores) != n_steps:
        steps = "1 step" if n_steps == 1 else f"{n_steps} steps"
        raise ValueError(f"expected one finite number for each of {steps} of {named(episode)}, got {excerpt(returned)}")
    return scores


def _aggregated(scores: Sequence[float], aggregate: Aggregate) -> float:
    if aggregate == "mean":
        return fmean(scores)
    return min(scores) if aggregate == "min" else scores[-1]


@dataclass(eq=False)
class ProcessReward(ModelArguments, StepReward):
    """Probability of a label of each step, from a process reward model: a token classifier, as of TRL's `PRMTrainer`.

    The model reads the prompt and all steps, each followed by `model_separator`, at whose last token it has its label.

    Args:
        model_name: hub id or local folder of a token classifier.
        model_separator: text or special token after each step in the training of the model; default: `separator`.
        label: index or name of the label of a good step.
        trust_remote_code: run code shipped with the checkpoint.
    """

    model_name: str
    _: KW_ONLY
    model_separator: Annotated[str, MinLen(1)] | None = None
    label: Whole | str = 1
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        self.classifier = StepClassifier(
            self.model_name, device=self.device, dtype=self.dtype, trust_remote_code=self.trust_remote_code
        )
        self.classifier.check_label(self.label)

    def step_scores(self, episodes: Sequence[Observation], steps: Sequence[Sequence[str]]) -> list[list[float]]:
        return self.classifier.probabilities(
            [episode.prompt_or_input_text for episode in episodes],
            steps,
            separator=self.model_separator or self.separator,
            label=self.label,
            batch_size=self.batch_size,
        )


@dataclass(eq=False, repr=False)  # `kwargs` may contain secrets
class StepFunctionReward(StepFunctionScore, StepReward):
    """List of scores that a Python function returns for the steps of a response, one call per response.

    The function has a parameter `steps`, the list of their texts; `response`, `prompt`, `references`, `meta_info` and
    columns of the data are passed by name, too.
    """

    batched: bool | None = field(init=False, default=False)

    @property
    def is_local(self) -> bool:  # type: ignore[override]
        """False for an async function, which waits for another service."""
        return not self.is_async

    def step_scores(self, episodes: Sequence[Observation], steps: Sequence[Sequence[str]]) -> Sequence[Any]:
        generated = []
        for episode, texts in zip(episodes, steps, strict=True):
            response = Generated(episode.sample, episode.context_text, episode.prompt_ids, episode.action_ids)
            generated.append(replace(response, steps=tuple(texts)))
        values: Sequence[Any] = self.values(generated)
        return values
