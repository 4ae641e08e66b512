"""Base class of rewards that score the finished text, which are most rewards of the library.

    scores(prompts, responses, references, meta_infos)  ->  [n]      one number per text; implemented by subclasses
    __call__(..., dones)                                ->  [n]      the same where `dones` is True, 0 elsewhere

The metric of the same name calls the same function of `scoring`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from rl4lms_like.rewards.base import BatchedRewardFunction
from rl4lms_like.rewards.call import as_list


class TextReward(BatchedRewardFunction):
    """Terminal reward that scores all finished responses of a batch in one call."""

    terminal = True

    @abstractmethod
    def scores(
        self,
        prompt_texts: list[str],
        gen_texts: list[str],
        ref_texts: list[list[str]],
        meta_infos: list[dict[str, Any] | None],
    ) -> Sequence[float]:
        """Return one finite number for each of the `n` finished responses; all arguments have length `n`."""

    def __call__(
        self,
        prompt_texts: list[str],
        gen_texts: list[str],
        ref_texts: list[list[str]],
        dones: list[bool],
        meta_infos: list[dict[str, Any] | None] | None = None,
    ) -> list[float]:
        """Return the scores of finished responses and 0 for unfinished ones, which are not passed to `scores`."""
        metas = meta_infos if meta_infos is not None else [None] * len(gen_texts)
        finished = [index for index, done in enumerate(dones) if done]
        rewards = [0.0] * len(gen_texts)
        if finished:
            found = self.scores(
                [prompt_texts[index] for index in finished],
                [gen_texts[index] for index in finished],
                [ref_texts[index] for index in finished],
                [metas[index] for index in finished],
            )
            scores = as_list(found)
            if scores is None:
                raise ValueError(f"expected a list of {len(finished)} scores, got {found!r:.60}")
            if len(scores) != len(finished):
                raise ValueError(f"{len(scores)} scores for {len(finished)} texts")
            for index, score in zip(finished, scores, strict=True):
                rewards[index] = score
        return rewards
