"""Questions with several tries, such as those of the data pool `reasoning_gym`."""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium import spaces

from rl4lms_like.scoring.reasoning_gym import ReasoningGym
from rl4lms_like.scoring.score import Texts
from rl4lms_like.system.numbers import Count, NonNegative


class Retries(gymnasium.Env[Any, str]):
    """Question of a sample, with several tries to answer it.

    A turn is an answer. One whose score is below 1 is answered with `again`, until the last try.

    Score: that of the last answer, minus `cost` for each wrong answer before it. The best possible score is 1.

    Metrics: `correct`, `tries`.

    Args:
        tries: number of answers.
        cost: points of a wrong answer that is not the last one.
        again: the text after a wrong answer.
        strict: compare with the reference of the sample; if false, by the scorer of reasoning-gym, which needs samples
            of the pool `reasoning_gym`.
        extract: regular expression that finds the answer in a turn; see the reward `reasoning_gym`.
    """

    observation_space = spaces.Text(1_000_000, min_length=0)
    action_space = spaces.Text(1_000_000, min_length=0)

    def __init__(
        self,
        tries: Count = 2,
        cost: NonNegative = 0.1,
        again: str = "That is wrong. Try again.\n",
        strict: bool = True,
        extract: str | None = None,
    ) -> None:
        self.tries = tries
        self.cost = cost
        self.again = again
        self._score = ReasoningGym(strict=strict, extract=extract)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Return the prompt of `options["sample"]`.

        Raises:
            ValueError: there is no sample, or it has no reference.
        """
        super().reset(seed=seed)
        # There is no right answer to compare with in the numbered episodes of a run without a data pool.
        sample = (options or {}).get("sample")
        if sample is None or not sample.references:
            raise ValueError("questions with several tries need samples with a reference, from a data pool")
        self.sample = sample
        self.n_tries = 0
        return sample.messages or sample.prompt_or_input_text, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Score an answer."""
        texts = Texts(
            responses=[action],
            references=[self.sample.references],
            prompts=[self.sample.prompt_or_input_text],
            metas=[self.sample.meta_data],
        )
        score = float(self._score.per_text(texts)[0])
        self.n_tries += 1
        metrics = {"correct": float(score == 1.0), "tries": float(self.n_tries)}

        # The score of an answer counts only if it is the last one; every earlier one has the same cost.
        if score == 1.0 or self.n_tries >= self.tries:
            return "", score, True, False, {"metrics": metrics}
        return self.again, -self.cost, False, False, {"metrics": metrics}
