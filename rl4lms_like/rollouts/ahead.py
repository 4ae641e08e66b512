"""Generation batches whose prompts have been drawn, and those that an engine generates during the update before them.

end of rollout k ─ draw the prompts of rollout k + 1 ─ the engine generates them in a thread ─> rollout k + 1
                   update k ────────────────────────────────────────────────────────────────┘
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rl4lms_like.core.episodes import EpisodeBatch
from rl4lms_like.core.sample import Sample

if TYPE_CHECKING:
    from rl4lms_like.policies.base import LMActorCriticPolicy

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class DrawnBatch:
    """Generation batch whose prompts have been drawn.

    Args:
        samples: its prompts, one for each environment.
        prompt_ids: `[n, prompt_len]`.
        prompt_mask: `[n, prompt_len]`.
        seed: seed of the sampling.
        responses: its episodes, if they are generated in the background.
    """

    samples: Sequence[Sample]
    prompt_ids: Tensor
    prompt_mask: Tensor
    seed: int
    responses: Future[EpisodeBatch] | None = None

    @property
    def sample_ids(self) -> list[str]:
        """Ids of the samples."""
        return [str(sample.id) for sample in self.samples]


@dataclass(frozen=True)
class AheadBatches:
    """The generation batches of a rollout that are generated during the update before it.

    Args:
        sampler: state of the sampler before their prompts were drawn.
        batches: the batches, in order.
    """

    sampler: Mapping[str, Any]
    batches: tuple[DrawnBatch, ...]

    def state(self, timeout: float | None = None) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Wait for the engine; return what restores the batches: numbers in JSON's types, and tensors.

        There are no tensors of a batch that the engine failed to generate, or not within `timeout` seconds.
        """
        futures = [batch.responses for batch in self.batches if batch.responses is not None]
        if not all(future.done() for future in futures):
            logger.info("waiting for the responses that the engine generates, to save them")
            if wait(futures, timeout).not_done:
                text = "the engine took more than %g s: a resumed run generates its next rollout with other weights"
                logger.warning(text, timeout)
        batches = [{"seed": batch.seed, "sample_ids": batch.sample_ids} for batch in self.batches]
        tensors: dict[str, Tensor] = {}
        for index, batch in enumerate(self.batches):
            if batch.responses is not None and batch.responses.done() and batch.responses.exception() is None:
                episodes = batch.responses.result()
                found = {field.name: getattr(episodes, field.name) for field in fields(episodes)}
                tensors |= {f"{index}.{name}": each for name, each in found.items() if isinstance(each, Tensor)}
        return {"sampler": self.sampler, "batches": batches}, tensors


def generate_in_background(
    policy: LMActorCriticPolicy, calls: Sequence[tuple[Tensor, Tensor, Mapping[str, Any]]]
) -> list[Future[EpisodeBatch]]:
    """Generate in a thread, one call after the other, with the weights that the policy's external engine has now.

    Args:
        policy: it passes no weights to the engine before all calls have ended.
        calls: prompts, their masks and the keyword arguments of each call of `generate`.

    Returns:
        The episodes of each call; after one that fails, all have its error.
    """
    responses: list[Future[EpisodeBatch]] = [Future() for _ in calls]

    @torch.no_grad()
    def work() -> None:
        failure: BaseException | None = None
        given = policy.arguments.generation_kwargs
        for future, (prompt_ids, prompt_mask, arguments) in zip(responses, calls, strict=True):
            try:
                if failure is not None:
                    raise failure
                found = policy.engine.generate(prompt_ids, prompt_mask, generation_kwargs=given, **arguments)
            except BaseException as error:
                failure = error
                future.set_exception(error)
            else:
                future.set_result(found)

    policy.in_background = responses
    threading.Thread(target=work, name="generation", daemon=True).start()
    return responses


def restored_responses(index: int, tensors: Mapping[str, Tensor]) -> Future[EpisodeBatch] | None:
    """Return the episodes of a batch from the tensors of `AheadBatches.state`; None if there are none."""
    own: dict[str, Any] = {
        name.partition(".")[2]: each for name, each in tensors.items() if name.startswith(f"{index}.")
    }
    if not own:
        return None
    responses: Future[EpisodeBatch] = Future()
    responses.set_result(EpisodeBatch(**own))
    return responses
