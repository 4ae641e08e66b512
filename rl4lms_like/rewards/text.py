"""Base classes of rewards that score the finished response, which are most rewards of the library."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from rl4lms_like.core.generated import Generated
from rl4lms_like.core.observation import Observation
from rl4lms_like.rewards.base import GeneratedReward, RewardFunction
from rl4lms_like.rewards.call import as_list
from rl4lms_like.scoring.score import Score, Texts, require_references


class TextReward(GeneratedReward):
    """Terminal reward that scores all finished responses of a batch in one call.

    Examples:
        >>> class FullStop(TextReward):
        ...     def scores(self, texts):
        ...         return [1.0 if response.endswith(".") else 0.0 for response in texts.responses]
        >>> FullStop()(["Why?"] * 2, ["It is so.", "It is."], [[], []], [True, False])
        [1.0, 0.0]
    """

    terminal = True

    @abstractmethod
    def scores(self, texts: Texts) -> Sequence[float]:
        """Return one finite number for each of the `n` finished responses."""

    def scores_of(self, generated: Sequence[Generated]) -> Sequence[float]:
        return self.scores(Texts.of(generated))

    def __call__(
        self,
        prompt_texts: list[str],
        gen_texts: list[str],
        ref_texts: list[list[str]],
        dones: list[bool],
        meta_infos: list[dict[str, Any] | None] | None = None,
    ) -> list[float]:
        """Return the scores of finished responses and 0 for unfinished ones, which are not passed to `scores`."""
        rewards = [0.0] * len(gen_texts)
        finished = [index for index, done in enumerate(dones) if done]
        if not finished:
            return rewards

        # One call for all finished responses: a model scores them in batches, a server gets them in few requests.
        texts = Texts(prompt_texts, gen_texts, ref_texts, meta_infos or [None] * len(gen_texts))
        returned = self.scores(texts.chosen(finished))

        # A subclass may return a list, an array or a tensor. Too few scores would be assigned to the wrong responses.
        scores = as_list(returned)
        if scores is None:
            raise ValueError(f"expected a list of {len(finished)} scores, got {returned!r:.60}")
        if len(scores) != len(finished):
            raise ValueError(f"{len(scores)} scores for {len(finished)} texts")
        for index, score in zip(finished, scores, strict=True):
            rewards[index] = score
        return rewards


class ScoreReward(TextReward, Score):
    """Reward that is the score of each finished response; a sample without the references it needs is an error."""

    kind = "reward"

    def scores(self, texts: Texts) -> Sequence[float]:
        # Checked here, not in the score: a metric excludes such a sample, but a reward of 0 would train the policy.
        if self.needs_references:
            require_references(texts.prompts, texts.references)
        return self.per_text(texts)


class LastTokenReward(RewardFunction):
    """Reward of the last token of an episode; 0 for all others.

    Examples:
        >>> class ShortResponse(LastTokenReward):
        ...     def score(self, observation):
        ...         return 1.0 if observation.n_actions <= 20 else 0.0
    """

    terminal = True

    @abstractmethod
    def score(self, observation: Observation) -> float:
        """Return the reward of an episode, given its last observation."""

    def __call__(
        self,
        prev_observation: Observation,
        action: int,
        current_observation: Observation,
        done: bool,
        meta_info: dict[str, Any] | None = None,
    ) -> float:
        """Return the score at the last token, 0 before."""
        return self.score(current_observation) if done else 0.0
