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
    """Generation batch of this process whose prompts have been drawn.

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

    @property
    def finished_responses(self) -> EpisodeBatch | None:
        """The episodes; None if they are not generated in the background, not finished, or if the engine failed."""
        responses = self.responses
        if responses is None or not responses.done() or responses.exception() is not None:
            return None
        return responses.result()


@dataclass(frozen=True)
class AheadRollout:
    """First generation batches of a rollout that has not begun.

    Args:
        sampler: state of the sampler before their prompts were drawn.
        batches: the batches, in order.
    """

    sampler: Mapping[str, Any]
    batches: tuple[DrawnBatch, ...]

    def without_responses(self) -> AheadRollout:
        """Return the same prompts, whose responses are generated when the rollout begins."""
        return replace(self, batches=tuple(replace(batch, responses=None) for batch in self.batches))


def ahead_state(
    rollouts: Sequence[AheadRollout], ranks: Ranks, timeout: float | None = None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Wait for the engine; return what restores at least one rollout: numbers in JSON's types, and tensors.

    All processes call this together and get the state of all, which has the form of that of one process. There are no
    tensors of a batch that the engine failed to generate, or not within `timeout` seconds, for one of the processes: a
    resumed run generates it when its rollout begins, from the same prompts and seed.
    """
    batches = [batch for rollout in rollouts for batch in rollout.batches]
    unfinished = [batch.responses for batch in batches if batch.responses is not None and not batch.responses.done()]
    if unfinished:
        logger.info("waiting for the responses that the engine generates, to save them")
        if wait(unfinished, timeout).not_done:
            message = "the engine took more than %g s: a resumed run generates its next rollout with other weights"
            logger.warning(message, timeout)
    of_ranks = ranks.gather([(batch.sample_ids, batch.finished_responses) for batch in batches])

    states = []
    tensors: dict[str, Tensor] = {}  # `<index of the batch among those of all rollouts>.<field of EpisodeBatch>`
    index = 0
    for rollout in rollouts:
        saved_batches = []
        for batch in rollout.batches:
            # The environments of a process follow those of the process before it.
            ids_of_ranks, responses_of_ranks = zip(*(of_rank[index] for of_rank in of_ranks), strict=True)
            saved_batches.append({"seed": batch.seed, "sample_ids": list(chain.from_iterable(ids_of_ranks))})
            if all(responses is not None for responses in responses_of_ranks):
                tensors |= tensors_of(EpisodeBatch.concatenated(responses_of_ranks), prefix=f"{index}.")
            index += 1
        states.append({"sampler": rollout.sampler, "batches": saved_batches})

    # Checkpoints of earlier versions have the numbers of one rollout: further ones are in a key of their own.
    first, *later = states
    return {**first, "later": later} if later else first, tensors


def tensors_of(episodes: EpisodeBatch, prefix: str) -> dict[str, Tensor]:
    """Return the tensors of episodes by the names of their fields, after a prefix."""
    tensors = {}
    for field in fields(EpisodeBatch):
        value = getattr(episodes, field.name)
        if isinstance(value, Tensor):
            tensors[prefix + field.name] = value
    return tensors


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
        self._queue: deque[AheadRollout] = deque()
        self._rest: deque[DrawnBatch] = deque()  # batches of the current rollout

    @property
    def for_checkpoint(self) -> tuple[AheadRollout, ...]:
        """The rollouts that have not begun."""
        return tuple(self._queue)

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
            missing.append(AheadRollout(sampler, tuple(self._draw() for _ in range(n_batches))))

        # All in one thread: the calls of an engine follow each other.
        calls = []
        for batch in chain.from_iterable(rollout.batches for rollout in missing):
            arguments = collector.sampling_arguments(batch.seed)
            arguments["generation_kwargs"] = collector.policy.arguments.generation_kwargs
            calls.append((batch.prompt_ids, batch.prompt_mask, arguments))
        responses = iter(collector.policy.engine.generate_in_background(calls))
        for rollout in missing:
            batches = tuple(replace(batch, responses=next(responses)) for batch in rollout.batches)
            self._queue.append(replace(rollout, batches=batches))

    def begin(self) -> None:
        """Begin the next rollout of the queue, if there is one."""
        self._rest = deque(self._queue.popleft().batches) if self._queue else deque()

    @property
    def has_responses(self) -> bool:
        """True if the next batch of the current rollout is generated ahead; the same in all processes."""
        return bool(self._rest) and self._rest[0].responses is not None

    def pop(self) -> DrawnBatch | None:
        """Return the next batch of the current rollout and start its episodes; None if none is left."""
        if not self._rest:
            return None
        batch = self._rest.popleft()
        self.collector.env.start(batch.samples)
        return batch

    def drop_rest(self) -> None:
        """Drop batches that the rollout turned out not to need."""
        # A sampler undoes its last draws only; those after them are generated already.
        if self._rest and not self._queue:
            self.collector.env.put_back(len(self._rest))
        self._rest.clear()

    def forget(self) -> None:
        """Drop all batches, also for checkpoints; their environment must still be that of the collector."""
        n_batches = len(self._rest) + sum(len(rollout.batches) for rollout in self._queue)
        if n_batches:
            self.collector.env.put_back(n_batches)
        self._rest.clear()
        self._queue.clear()

    def _draw(self) -> DrawnBatch:
        """Draw the prompts of a batch whose episodes are played later, so that no `reset` may put them back."""
        batch = self.collector.draw_prompts()
        self.collector.env.keep_prompts()
        return batch

    def load(self, numbers: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Restore the state returned by `ahead_state`, of any number of processes: draw the prompts again.

        Raises:
            CheckpointError: the sampler draws other prompts.
        """
        # Drawing again uses up seeds, which the state of the collector has already counted. The sampler's state after
        # the last draw is the one that it has.
        collector = self.collector
        seeds = collector.seeds.state_dict()

        self._queue.clear()
        index = 0
        for rollout in (numbers, *numbers.get("later", ())):
            collector.env.envs[0].sampler.load_state_dict(deepcopy(rollout["sampler"]))
            batches = []
            for saved in rollout["batches"]:
                batch = self._draw()
                episodes = saved_episodes(index, tensors)
                index += 1
                responses = None
                if episodes is not None:
                    responses = finished(self._part_of_this_process(episodes, batch, saved["sample_ids"]))
                batches.append(replace(batch, seed=saved["seed"], responses=responses))
            self._queue.append(AheadRollout(rollout["sampler"], tuple(batches)))
        collector.seeds.load_state_dict(seeds)

    def _part_of_this_process(
        self, episodes: EpisodeBatch, batch: DrawnBatch, sample_ids: Sequence[str]
    ) -> EpisodeBatch:
        """Return the responses to the prompts of this process, of those to the prompts of all processes."""
        ranks = self.collector.ranks
        size = len(batch.samples)
        first = ranks.rank * size
        if len(sample_ids) != ranks.size * size or list(sample_ids[first : first + size]) != batch.sample_ids:
            raise CheckpointError("the sampler does not draw the prompts of the saved responses again")
        if ranks.size == 1:
            return episodes

        # In the width of all: that of the whole rollout does not depend on whether the run was resumed.
        part = episodes.select(range(first, first + size))
        return part.widened(episodes.prompt_ids.shape[1], episodes.response_ids.shape[1])


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
