"""Cross-entropy of references after prompts with pictures.

    ids       [pad  p1  p2  p3 | r1  r2  pad]      p: text and placeholders of pictures; r: the reference
    labels    [  -  -   -   -  | r1  r2   - ]      and, of conversations, the earlier messages of the assistant

The texts are read as a policy reads them (`policies.vision_reader`): the arguments of the forward pass are the model's
own, and placeholders are no possible tokens. So what is learned is the distribution that generates.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl4lms_like.core.devices import to_device
from rl4lms_like.core.episodes import EpisodeBatch, padded
from rl4lms_like.core.token_scores import scores_of_logits, token_scores
from rl4lms_like.offline.objective import Batch, TokenObjective
from rl4lms_like.policies.routing import BalancingLoss, Routing
from rl4lms_like.policies.vision_reader import VisionReader
from rl4lms_like.training.examples import NOT_LEARNED, Example, n_learned


@dataclass
class VisionCrossEntropy(TokenObjective):
    """Cross-entropy of the learned tokens of a vision-language model, over the tokens that responses can have.

    Args:
        reader: reader of the model.
        pad_token_id: padding of token ids; it has no effect.
        logits_budget: largest number of logits in memory; None: no limit.
        dtype: data type of autocast; None for none.
        balancing: see `TrainingObjective`.
    """

    reader: VisionReader
    pad_token_id: int
    logits_budget: int | None
    dtype: torch.dtype | None = None
    balancing: BalancingLoss | None = None

    def collate(self, rows: Sequence[Example]) -> dict[str, Tensor]:
        prompts = []
        responses = []
        labels_of_prompts = []
        labels_of_responses = []
        for row in rows:
            n_prompt = row["n_prompt"]
            prompts.append(row["input_ids"][:n_prompt])
            responses.append(row["input_ids"][n_prompt:])
            labels_of_prompts.append(row["labels"][:n_prompt])
            labels_of_responses.append(row["labels"][n_prompt:])

        prompt_ids, prompt_mask = padded(prompts, self.pad_token_id, side="left")  # [n, prompt_len]
        response_ids, response_mask = padded(responses, self.pad_token_id)  # [n, response_len]
        of_prompts, _ = padded(labels_of_prompts, NOT_LEARNED, side="left")
        of_responses, _ = padded(labels_of_responses, NOT_LEARNED)
        return {
            "prompt_ids": prompt_ids,
            "prompt_mask": prompt_mask,
            "response_ids": response_ids,
            "response_mask": response_mask,
            "labels": torch.cat([of_prompts, of_responses], dim=1),  # [n, prompt_len + response_len]
            "pictures": torch.tensor([row["pictures"] for row in rows]),  # [n]
        }

    def loss(self, model: Any, batch: Batch, n_items: Any = None) -> Tensor:
        is_balanced = self.balancing is not None and model.training
        with self.reader.recorded_routing() if is_balanced else nullcontext() as record, self._autocast():
            log_prob = self._log_probs(batch)

        # A mean over the learned tokens of the optimizer step, not of the micro-batch: all tokens have equal weight.
        n = n_learned(batch["labels"]) if n_items is None else n_items
        loss = -log_prob.sum() / torch.as_tensor(n).clamp_min(1)
        if self.balancing is not None and record is not None:
            loss = loss + self.balancing.part(record.routing)
        return loss

    def _log_probs(self, batch: Batch) -> Tensor:
        """Compute the log-probs of the learned tokens of a batch `[n_learned]`."""
        # The state at a token is for the next one, [n, prompt_len + response_len - 1, d].
        labels = to_device(batch["labels"][:, 1:], self.reader.device)
        is_learned = labels != NOT_LEARNED
        targets = labels[is_learned]
        episodes = self._episodes(batch)

        # Only the logits of the learned tokens, and as many at a time as the budget allows.
        if self.reader.head_scale is None:
            logits = self.reader.scored_logits_of_all_tokens(episodes)
            return scores_of_logits(logits[is_learned], targets)[0]
        states = self.reader.states_of_all_tokens(episodes)
        budget = sys.maxsize if self.logits_budget is None else self.logits_budget
        return token_scores(states[is_learned], self.reader.head(), targets, logits_budget=budget)[0]

    def _episodes(self, batch: Batch) -> EpisodeBatch:
        episodes = EpisodeBatch(
            prompt_ids=batch["prompt_ids"],
            prompt_mask=batch["prompt_mask"],
            response_ids=batch["response_ids"],
            response_mask=batch["response_mask"],
            terminated=batch["response_mask"][:, 0],  # without effect on log-probs
            pictures=batch["pictures"],
        )
        return episodes.to(self.reader.device)

    def _autocast(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.dtype is None else torch.autocast(self.reader.device.type, dtype=self.dtype)

    def routing(self, model: Any, batch: Batch) -> Routing:
        with self.reader.recorded_routing() as record, self._autocast():
            self._log_probs(batch)
        return record.routing
