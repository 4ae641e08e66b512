"""Batches with drawn prompts, possibly generated during the preceding update.

end of rollout k ─ draw the prompts of rollout k + 1 ─ the engine generates them in a thread ─> rollout k + 1
                   update k ────────────────────────────────────────────────────────────────┘
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from rl4lms_like.core.episodes import EpisodeBatch
from rl4lms_like.core.sample import Sample
from rl4lms_like.system.errors import CheckpointError

if TYPE_CHECKING:
    from rl4lms_like.core.seeding import SeedStream
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
        pictures: `[n]`, numbers of the prompts' pictures; None if the model reads texts only.
    """

    samples: Sequence[Sample]
    prompt_ids: Tensor
    prompt_mask: Tensor
    seed: int
    responses: Future[EpisodeBatch] | None = None
    pictures: Tensor | None = None

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
        # All batches are waited for together: the timeout is for the whole rollout.
        futures = [batch.responses for batch in self.batches if batch.responses is not None]
        if not all(future.done() for future in futures):
            logger.info("waiting for the responses that the engine generates, to save them")
            if wait(futures, timeout).not_done:
                message = "the engine took more than %g s: a resumed run generates its next rollout with other weights"
                logger.warning(message, timeout)

        # A batch without tensors is generated again by the resumed run, from the same prompts and seed.
        batches = []
        tensors: dict[str, Tensor] = {}  # `<index of the batch>.<field of EpisodeBatch>`
        for index, batch in enumerate(self.batches):
            batches.append({"seed": batch.seed, "sample_ids": batch.sample_ids})
            responses = batch.responses
            if responses is None or not responses.done() or responses.exception() is not None:
                continue
            for field in fields(EpisodeBatch):
                value = getattr(responses.result(), field.name)
                if isinstance(value, Tensor):
                    tensors[f"{index}.{field.name}"] = value
        return {"sampler": self.sampler, "batches": batches}, tensors


class Collector(Protocol):
    """Part of a `RolloutCollector` that draws the prompts of its next rollout; `env` is a `TextVecEnv`."""

    env: Any
    policy: LMActorCriticPolicy
    seeds: SeedStream

    def draw_prompts(self) -> DrawnBatch:
        """Draw the prompts of a generation batch, and the seed of its sampling."""

    def sampling_arguments(self, seed: int) -> dict[str, Any]:
        """Return keyword arguments of `generate` for a batch with this seed."""


class NextRollout:
    """First generation batches of the next rollout, which an engine generates during the update on this one.

    At the end of a rollout it draws the prompts of as many batches as that one needed. Those of batches that are not
    needed are put back.

    Args:
        collector: draws the prompts and has the options of the sampling.

    Attributes:
        for_checkpoint: what a checkpoint keeps of them; None = nothing has been generated ahead.
    """

    def __init__(self, collector: Collector) -> None:
        self.collector = collector
        self.for_checkpoint: AheadBatches | None = None
        self._pending: list[DrawnBatch] = []

    def start(self, n_batches: int) -> None:
        """Draw the prompts of `n_batches` batches, and start generating; the sampler must know the rewards by now."""
        collector = self.collector

        # The sampler's state before the draw is what a resumed run draws the same prompts from.
        sampler = deepcopy(collector.env.envs[0].sampler.state_dict())
        drawn = [self._draw() for _ in range(n_batches)]
        calls = []
        for batch in drawn:
            arguments = collector.sampling_arguments(batch.seed)
            arguments["generation_kwargs"] = collector.policy.arguments.generation_kwargs
            calls.append((batch.prompt_ids, batch.prompt_mask, arguments))
        responses = collector.policy.engine.generate_in_background(calls)
        for batch, future in zip(drawn, responses, strict=True):
            self._pending.append(replace(batch, responses=future))
        self.for_checkpoint = AheadBatches(sampler, tuple(self._pending))

    def pop(self) -> DrawnBatch | None:
        """Return the next batch and start its episodes in the environments; None if none is left."""
        if not self._pending:
            return None
        batch = self._pending.pop(0)
        self.collector.env.start(batch.samples)
        return batch

    def drop_rest(self) -> None:
        """Drop batches that the rollout turned out not to need."""
        if self._pending:
            self.collector.env.put_back(len(self._pending))
        self._pending = []

    def forget(self) -> None:
        """Drop all batches, also for checkpoints; their environment must still be that of the collector."""
        self.drop_rest()
        self.for_checkpoint = None

    def _draw(self) -> DrawnBatch:
        """Draw the prompts of a batch whose episodes are played later, so that no `reset` may put them back."""
        batch = self.collector.draw_prompts()
        self.collector.env.keep_prompts()
        return batch

    def load(self, numbers: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Restore the state returned by `AheadBatches.state`: draw the prompts again.

        Raises:
            CheckpointError: the sampler draws other prompts.
        """
        collector = self.collector
        collector.env.envs[0].sampler.load_state_dict(deepcopy(numbers["sampler"]))

        # Drawing again uses up seeds, which the state of the collector has already counted.
        seeds = collector.seeds.state_dict()
        pending = []
        for index, saved in enumerate(numbers["batches"]):
            batch = self._draw()
            if batch.sample_ids != saved["sample_ids"]:
                raise CheckpointError("the sampler does not draw the prompts of the saved responses again")
            pending.append(replace(batch, seed=saved["seed"], responses=restored_responses(index, tensors)))
        collector.seeds.load_state_dict(seeds)

        self._pending = pending
        self.for_checkpoint = AheadBatches(numbers["sampler"], tuple(pending))


def restored_responses(index: int, tensors: Mapping[str, Tensor]) -> Future[EpisodeBatch] | None:
    """Return the episodes of a batch from the tensors of `AheadBatches.state`; None if there are none."""
    fields_of_batch: dict[str, Any] = {}
    for name, tensor in tensors.items():
        number, _, field = name.partition(".")
        if number == str(index):
            fields_of_batch[field] = tensor
    if not fields_of_batch:
        return None

    responses: Future[EpisodeBatch] = Future()
    responses.set_result(EpisodeBatch(**fields_of_batch))
    return responses
