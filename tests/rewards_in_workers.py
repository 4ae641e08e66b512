"""A reward's numbers by the ways in which it is called."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rl4lms_like.core.observation import Observation, TextLayout
from rl4lms_like.core.sample import Sample
from rl4lms_like.envs.workers import RewardWorkers
from rl4lms_like.rewards.base import AnyReward
from rl4lms_like.rewards.call import score_episodes, score_transition
from rl4lms_like.testing.models import make_tokenizer


class EpisodesOfTexts:
    """Finished episodes whose responses are given texts.

    Args:
        samples: with the references.
        responses: one for each sample.
    """

    def __init__(self, samples: Sequence[Sample], responses: Sequence[str]) -> None:
        tokenizer = make_tokenizer()
        written = [np.asarray(tokenizer(text + "<eos>", add_special_tokens=False)["input_ids"]) for text in responses]
        self.layout = TextLayout(tokenizer, max_prompt_length=4, max_context_length=max(map(len, written)))
        prompts = self.layout.encode_all([sample.prompt_or_input_text for sample in samples])
        self.episodes = [
            Observation(sample, prompt, response, len(response), self.layout)
            for sample, prompt, response in zip(samples, prompts, written, strict=True)
        ]
        self._last_tokens = np.cumsum([episode.n_actions for episode in self.episodes]) - 1

    def together(self, reward_fn: AnyReward) -> list[float]:
        """What each earns when all are scored in one call."""
        return score_episodes(reward_fn, self.episodes)[self._last_tokens].tolist()

    def alone(self, reward_fn: AnyReward) -> list[float]:
        """The same, one by one, as `TextGenEnv.step` pays it."""
        paid = [
            score_transition(reward_fn, each.after(each.n_actions - 1), int(each.action_ids[-1]), each, True)
            for each in self.episodes
        ]
        return np.asarray(paid, dtype=np.float32).tolist()

    def in_workers(self, reward_fn: AnyReward) -> list[float]:
        """The same, in two processes."""
        workers = RewardWorkers(reward_fn, self.layout, n_workers=2)
        try:
            return workers.score(self.episodes).total[self._last_tokens].tolist()
        finally:
            workers.close()
