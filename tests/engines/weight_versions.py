"""Which weights of a run generated a rollout: those under which a plain model gives the log-probs of the sampling."""

from __future__ import annotations

import copy
from typing import Any

import torch

from rl4lms_like.core.episodes import EpisodeBatch


class WeightVersions:
    """Weights at the end of each rollout of a run, that is, before each update.

    Attributes:
        of_rollouts: for each rollout, the number of the version that generated it; 0 = before the first update.
    """

    def __init__(self) -> None:
        self.models: list[Any] = []
        self.of_rollouts: list[int] = []

    def add_rollout(self, model: Any, episodes: EpisodeBatch) -> None:
        """Keep the weights at the end of a rollout, and find those of its episodes; call it once for each rollout."""
        self.models.append(copy.deepcopy(model).eval())
        assert episodes.behavior_log_prob is not None
        gaps = [float((log_probs(each, episodes) - episodes.behavior_log_prob).abs().mean()) for each in self.models]

        # Only one version fits, the others are clearly apart.
        best, *others = sorted(gaps)
        assert best < 1e-5 and all(gap > 1e-4 for gap in others), gaps
        self.of_rollouts.append(gaps.index(best))


@torch.no_grad()
def log_probs(model: Any, episodes: EpisodeBatch) -> torch.Tensor:
    """Return the log-prob of each response token, one text after the other."""
    results = []
    for row in range(episodes.n_episodes):
        prompt = episodes.prompt_ids[row][episodes.prompt_mask[row]]
        response = episodes.response_ids[row][episodes.response_mask[row]]
        logits = model(torch.cat([prompt, response])[None]).logits[0]
        of_tokens = logits[len(prompt) - 1 : -1].float().log_softmax(dim=-1)
        results.append(of_tokens.gather(1, response[:, None]).squeeze(1))
    return torch.cat(results)
