"""An engine as a user writes one: all responses repeat one token."""

from __future__ import annotations

import torch

from rl4lms_like.core.episodes import EpisodeBatch
from rl4lms_like.engines.base import GenerationEngine


class Constant(GenerationEngine):
    """Engine that repeats a token."""

    def __init__(self, token: int, length: int = 3) -> None:
        self.token, self.length = token, length
        self.updates = self.rests = 0

    def generate(self, prompt_ids, prompt_mask, *, record_log_prob=False, **arguments):
        ids = torch.full((len(prompt_ids), self.length), self.token)
        mask = torch.ones_like(ids).bool()
        log_prob = torch.zeros(ids.numel()) if record_log_prob else None
        return EpisodeBatch(prompt_ids, prompt_mask.bool(), ids, mask, ~mask[:, 0], behavior_log_prob=log_prob)

    def update(self, policy):
        self.updates += 1

    def gaps(self, episodes, log_prob):
        return {"probability": float(log_prob.exp().mean())}

    def rest(self):
        self.rests += 1
