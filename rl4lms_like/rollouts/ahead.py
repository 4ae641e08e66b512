"""Batches with drawn prompts, possibly generated during the preceding updates.

end of rollout n ─ draw the prompts of rollout n + k ─ the engine generates them in a thread ─> rollout n + k
                   update n ─ rollout n + 1 ─ update n + 1 ─ ... ─ update n + k - 1 ────────┘

`k` is `ahead` in the config of the engine. Rollout n + k is sampled with the weights before update n. The first `k`
rollouts after rollout 0 are all sampled at its end, with the first weights.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from rl4lms_like.core.episodes import EpisodeBatch
from rl4lms_like.core.sample import Sample
from rl4lms_like.system.errors import CheckpointError

if TYPE_CHECKING:
    from rl4lms_like.core.seeding import SeedStream
    from rl4lms_like.policies.base import LMActorCriticPolicy
    from rl4lms_like.system.ranks import Ranks

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
class AheadBatch:
    """Checkpoint's view of a batch that is generated ahead.

    Args:
        seed: seed of the sampling.
        sample_ids: ids of its prompts.
        responses: its episodes; None if they are generated when the rollout begins.
    """

    seed: int
    sample_ids: Sequence[str]
    responses: Future[EpisodeBatch] | None = None

    @property
    def episodes(self) -> EpisodeBatch | None:
        """The episodes; None if they are not finished, or if the engine failed."""
        responses = self.responses
        if responses is None or not responses.done() or responses.exception() is not None:
            return None
        return responses.result()


@dataclass(frozen=True)
class AheadRollout:
    """Checkpoint's view of a rollout that is generated ahead.

    Args:
        sampler: state of the sampler before the prompts were drawn.
        batches: the generation batches, in order.
    """

    sampler: Mapping[str, Any]
    batches: tuple[AheadBatch, ...]

    def numbers(self) -> dict[str, Any]:
        """Return all but the responses, in JSON's types."""
        batches = [{"seed": batch.seed, "sample_ids": list(batch.sample_ids)} for batch in self.batches]
        return {"sampler": self.sampler, "batches": batches}


def wait_for_responses(rollouts: Sequence[AheadRollout], timeout: float | None = None) -> None:
    """Wait for the engine, at most `timeout` seconds for all rollouts together."""
    futures = [batch.responses for rollout in rollouts for batch in rollout.batches if batch.responses is not None]
    if not all(future.done() for future in futures):
        logger.info("waiting for the responses that the engine generates, to save them")
        if wait(futures, timeout).not_done:
            message = "the engine took more than %g s: a resumed run generates its next rollout with other weights"
            logger.warning(message, timeout)


def ahead_state(
    rollouts: Sequence[AheadRollout], timeout: float | None = None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Wait for the engine; return what restores at least one rollout: numbers in JSON's types, and tensors.

    There are no tensors of a batch that the engine failed to generate, or not within `timeout` seconds: a resumed run
    generates it again, from the same prompts and seed.
    """
    wait_for_responses(rollouts, timeout)

    # Checkpoints of earlier versions have the numbers of one rollout: further ones are in a key of their own.
    first, *later = [rollout.numbers() for rollout in rollouts]
    numbers = {**first, "later": later} if later else first

    tensors: dict[str, Tensor] = {}  # `<index of the batch among those of all rollouts>.<field of EpisodeBatch>`
    for index, batch in enumerate(chain.from_iterable(rollout.batches for rollout in rollouts)):
        episodes = batch.episodes
        if episodes is None:
            continue
        for field in fields(EpisodeBatch):
            value = getattr(episodes, field.name)
            if isinstance(value, Tensor):
                tensors[f"{index}.{field.name}"] = value
    return numbers, tensors


def gathered_responses(
    rollouts: Sequence[AheadRollout], ranks: Ranks, timeout: float | None = None
) -> tuple[AheadRollout, ...]:
    """Return the rollouts with the prompts and responses of all processes, as one process would have generated them.

    All processes call this together. A batch that one of them has not finished within `timeout` seconds has none.
    """
    if ranks.size == 1:
        return tuple(rollouts)
    wait_for_responses(rollouts, timeout)
    own = [[(batch.sample_ids, batch.episodes) for batch in rollout.batches] for rollout in rollouts]
    by_rank = ranks.gather(own)

    joined = []
    for number, rollout in enumerate(rollouts):
        batches = []
        for index, batch in enumerate(rollout.batches):
            parts = [of_rank[number][index] for of_rank in by_rank]
            sample_ids = list(chain.from_iterable(ids for ids, _ in parts))
            episodes = [of_rank for _, of_rank in parts if of_rank is not None]
            responses = None
            if len(episodes) == ranks.size:
                responses = finished(EpisodeBatch.concatenated(episodes))
            batches.append(AheadBatch(batch.seed, sample_ids, responses))
        joined.append(AheadRollout(rollout.sampler, tuple(batches)))
    return tuple(joined)


def without_responses(rollouts: Sequence[AheadRollout]) -> tuple[AheadRollout, ...]:
    """Return the rollouts as if nothing of them had been generated."""
    stripped = []
    for rollout in rollouts:
        batches = tuple(replace(batch, responses=None) for batch in rollout.batches)
        stripped.append(replace(rollout, batches=batches))
    return tuple(stripped)


class Collector(Protocol):
    """Part of a `RolloutCollector` that draws the prompts of its next rollouts; `env` is a `TextVecEnv`."""

    env: Any
    policy: LMActorCriticPolicy
    seeds: SeedStream
    ranks: Ranks

    def draw_prompts(self) -> DrawnBatch:
        """Draw the prompts of a generation batch, and the seed of its sampling."""

    def sampling_arguments(self, seed: int) -> dict[str, Any]:
        """Return keyword arguments of `generate` for a batch with this seed."""


class NextRollouts:
    """Queue of the first generation batches of the next rollouts, which an engine generates during updates.

    At the end of a rollout it draws the prompts of the rollout `ahead` rollouts later, as many batches as this one
    needed. Prompts of batches that turn out not to be needed are put back, if none have been drawn after them.

    Args:
        collector: draws the prompts and has the options of the sampling.
    """

    def __init__(self, collector: Collector) -> None:
        self.collector = collector
        self._queue: deque[tuple[AheadRollout, list[DrawnBatch]]] = deque()
        self._rest: list[DrawnBatch] = []  # batches of the current rollout

    @property
    def for_checkpoint(self) -> tuple[AheadRollout, ...]:
        """What a checkpoint keeps of the rollouts that have not begun."""
        return tuple(rollout for rollout, _ in self._queue)

    def start(self, n_batches: int) -> None:
        """Fill the queue with rollouts of `n_batches` batches, and start generating them.

        The sampler must know the rewards by now, and the engine the weights.
        """
        # At the end of the first rollout all of the queue is missing, later one rollout.
        collector = self.collector
        missing = []
        for _ in range(collector.policy.arguments.n_ahead - len(self._queue)):
            # The sampler's state before the draw is what a resumed run draws the same prompts from.
            sampler = deepcopy(collector.env.envs[0].sampler.state_dict())
            missing.append((sampler, [self._draw() for _ in range(n_batches)]))

        # All in one thread: the calls of an engine follow each other.
        calls = []
        for batch in chain.from_iterable(drawn for _, drawn in missing):
            arguments = collector.sampling_arguments(batch.seed)
            arguments["generation_kwargs"] = collector.policy.arguments.generation_kwargs
            calls.append((batch.prompt_ids, batch.prompt_mask, arguments))
        responses = iter(collector.policy.engine.generate_in_background(calls))
        for sampler, drawn in missing:
            self._append(sampler, [replace(batch, responses=next(responses)) for batch in drawn])

    def begin(self) -> None:
        """Begin the next rollout of the queue, if there is one."""
        self._rest = self._queue.popleft()[1] if self._queue else []

    @property
    def has_responses(self) -> bool:
        """True if the next batch of the current rollout is generated ahead; the same in all processes."""
        return bool(self._rest) and self._rest[0].responses is not None

    def pop(self) -> DrawnBatch | None:
        """Return the next batch of the current rollout and start its episodes; None if none is left."""
        if not self._rest:
            return None
        batch = self._rest.pop(0)
        self.collector.env.start(batch.samples)
        return batch

    def drop_rest(self) -> None:
        """Drop batches that the rollout turned out not to need."""
        # A sampler undoes its last draws only; those after them are generated already.
        if self._rest and not self._queue:
            self.collector.env.put_back(len(self._rest))
        self._rest = []

    def forget(self) -> None:
        """Drop all batches, also for checkpoints; their environment must still be that of the collector."""
        n_batches = len(self._rest) + sum(len(drawn) for _, drawn in self._queue)
        if n_batches:
            self.collector.env.put_back(n_batches)
        self._rest = []
        self._queue.clear()

    def _draw(self) -> DrawnBatch:
        """Draw the prompts of a batch whose episodes are played later, so that no `reset` may put them back."""
        batch = self.collector.draw_prompts()
        self.collector.env.keep_prompts()
        return batch

    def _append(self, sampler: Mapping[str, Any], drawn: list[DrawnBatch]) -> None:
        batches = tuple(AheadBatch(batch.seed, batch.sample_ids, batch.responses) for batch in drawn)
        self._queue.append((AheadRollout(sampler, batches), drawn))

    def load(self, numbers: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Restore the state returned by `ahead_state`, of any number of processes: draw the prompts again.

        Raises:
            CheckpointError: the sampler draws other prompts.
        """
        # Drawing again uses up prompts and seeds that the states of sampler and collector have already counted.
        collector = self.collector
        sampler = collector.env.envs[0].sampler
        sampler_after = deepcopy(sampler.state_dict())
        seeds_after = collector.seeds.state_dict()

        self._queue.clear()
        index = 0
        for rollout in (numbers, *numbers.get("later", ())):
            sampler.load_state_dict(deepcopy(rollout["sampler"]))
            drawn = []
            for saved in rollout["batches"]:
                batch = self._draw()
                episodes = saved_episodes(index, tensors)
                index += 1
                responses = None
                if episodes is not None:
                    responses = finished(self._own_part(episodes, batch, saved["sample_ids"]))
                drawn.append(replace(batch, seed=saved["seed"], responses=responses))
            self._append(rollout["sampler"], drawn)
        sampler.load_state_dict(sampler_after)
        collector.seeds.load_state_dict(seeds_after)

    def _own_part(self, episodes: EpisodeBatch, batch: DrawnBatch, sample_ids: Sequence[str]) -> EpisodeBatch:
        """Return the responses to the prompts of this process, of those to the prompts of all processes."""
        ranks = self.collector.ranks
        size = len(batch.samples)
        first = ranks.rank * size
        if len(sample_ids) != ranks.size * size or list(sample_ids[first : first + size]) != batch.sample_ids:
            raise CheckpointError("the sampler does not draw the prompts of the saved responses again")
        if ranks.size == 1:
            return episodes

        # In the width of all: that of the whole rollout does not depend on whether the run was resumed.
        own = episodes.select(range(first, first + size))
        return own.widened(episodes.prompt_ids.shape[1], episodes.response_ids.shape[1])


def saved_episodes(index: int, tensors: Mapping[str, Tensor]) -> EpisodeBatch | None:
    """Return the episodes of a batch from the tensors of `ahead_state`; None if there are none."""
    fields_of_batch: dict[str, Any] = {}
    for name, tensor in tensors.items():
        number, _, field = name.partition(".")
        if number == str(index):
            fields_of_batch[field] = tensor
    return EpisodeBatch(**fields_of_batch) if fields_of_batch else None


def finished(episodes: EpisodeBatch) -> Future[EpisodeBatch]:
    """Return a future that has its result."""
    responses: Future[EpisodeBatch] = Future()
    responses.set_result(episodes)
    return responses
