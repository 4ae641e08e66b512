"""Language-model loss on texts in every optimizer step of the policy (PPO-ptx of InstructGPT, arXiv 2203.02155).

    loss = loss of the algorithm + coeff * 1/n sum_t -log pi(token_t | text before it)

The sum is over the learned tokens of `batch_size` texts, n their number. Which texts a step has depends on the seed and
on the number of the step alone. So there is no state to resume, only a digest by which a resumed run finds out that it
has other texts, and neither the size of micro-batches nor the number of processes changes them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl4lms_like.core.episodes import EpisodeBatch, PassLimits, own_batches, padded
from rl4lms_like.core.seeding import derived_seed
from rl4lms_like.policies.base import LMActorCriticPolicy
from rl4lms_like.system.ranks import Ranks


@dataclass(frozen=True)
class Text:
    """Text as token ids, of which some are learned.

    Args:
        prompt: what is only read, at least one token.
        response: what follows; its last token is learned.
        is_learned: of each token of the response.
    """

    prompt: Sequence[int]
    response: Sequence[int]
    is_learned: Sequence[bool]


@dataclass(frozen=True, kw_only=True)
class PretrainingMix:
    """Texts on which a policy is trained in each step, besides its own responses.

    Args:
        texts: all texts, at least one.
        coeff: weight of their loss.
        batch_size: number of texts of a step.
        seed: seed of their order.
        pad_token_id: padding of token ids; it has no effect.
    """

    texts: Sequence[Text]
    coeff: float
    batch_size: int
    seed: int
    pad_token_id: int

    def texts_of_step(self, step: int) -> list[Text]:
        """Return the texts of an optimizer step, counted from 0: pass after pass over all, each in another order."""
        orders: dict[int, list[int]] = {}  # of each pass
        texts = []
        for position in range(step * self.batch_size, (step + 1) * self.batch_size):
            n_passes, i = divmod(position, len(self.texts))
            if n_passes not in orders:
                generator = torch.Generator().manual_seed(derived_seed(self.seed, "ptx", n_passes))
                orders[n_passes] = torch.randperm(len(self.texts), generator=generator).tolist()
            texts.append(self.texts[orders[n_passes][i]])
        return texts

    def digest(self) -> str:
        """Return the SHA-256 of the token ids of all texts."""
        ids = hashlib.sha256()
        for text in self.texts:
            ids.update(repr((list(text.prompt), list(text.response), list(text.is_learned))).encode())
        return ids.hexdigest()

    def losses(
        self, policy: LMActorCriticPolicy, step: int, *, micro_batch_size: int | None, ranks: Ranks
    ) -> Iterator[Tensor]:
        """Yield the parts of the loss of an optimizer step, without `coeff`, one for each micro-batch of this process.

        Args:
            policy: the policy.
            step: number of the optimizer step, from 0.
            micro_batch_size: maximum number of tokens of a micro-batch; None for no limit.
            ranks: the processes that train together.
        """
        episodes = self._episodes(self.texts_of_step(step), policy).to(policy.device)
        n_learned = episodes.n_tokens  # of all micro-batches and processes
        limits = PassLimits(micro_batch_size)
        for group in own_batches(episodes, limits, ranks, in_step=policy.is_sharded):
            # An empty group: a pass that only keeps step with the other processes.
            part = episodes.select(group or [0])
            total = -policy.action_scores(part).log_prob.sum()
            yield (1.0 if group else 0.0) * total / n_learned

    def _episodes(self, texts: Sequence[Text], policy: LMActorCriticPolicy) -> EpisodeBatch:
        """Return texts as episodes whose actions are the learned tokens."""
        side = policy.reader.prompt_side
        prompt_ids, prompt_mask = padded([text.prompt for text in texts], self.pad_token_id, side=side)
        response_ids, response_mask = padded([text.response for text in texts], self.pad_token_id)
        is_learned, _ = padded([[int(learned) for learned in text.is_learned] for text in texts])
        observed = response_mask & ~is_learned.bool()
        return EpisodeBatch(
            prompt_ids=prompt_ids,
            prompt_mask=prompt_mask,
            response_ids=response_ids,
            response_mask=response_mask,
            terminated=response_mask[:, 0],  # without effect on log-probs
            prompt_side=side,
            observed=observed if bool(observed.any()) else None,
        )
