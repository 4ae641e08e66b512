"""Slow Python rewards in processes of their own.

    parent                                  worker 1 .. n_workers
    score(episodes) -- chunks of episodes ->  score_episodes_in_parts(reward, chunk)
          [n_tokens] <- rewards ------------

Reward, tokenizer and environment variables travel once, when a process starts; a chunk carries samples and token ids.
A reward that keeps state between calls, or whose values depend on the rest of its batch, sees a chunk and not all
episodes.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeAlias

import cloudpickle  # type: ignore[import-untyped]
import numpy as np

from rl4lms_like.core.errors import RewardError
from rl4lms_like.core.observation import Observation, TextLayout
from rl4lms_like.core.sample import Sample
from rl4lms_like.rewards.call import AnyReward, TokenRewards, is_batched, score_episodes_in_parts

_Parcel: TypeAlias = "tuple[Sample, np.ndarray, np.ndarray]"
"""An episode on its way: sample, prompt ids, response ids."""

_CHUNKS_PER_WORKER = 4
"""More chunks than workers even out episodes of unequal cost; batched rewards get one chunk a worker."""


class RewardWorkers:
    """A pool of processes that score finished episodes.

    Args:
        reward_fn: the task's reward; it is pickled, so it must not hold open files, locks or the like.
        layout: shapes and tokenizer of the observations.
        n_workers: processes.

    Raises:
        RewardError: the reward cannot be pickled.
    """

    def __init__(self, reward_fn: AnyReward, layout: TextLayout, n_workers: int) -> None:
        self._name = type(reward_fn).__name__
        n_chunks = n_workers if is_batched(reward_fn) else n_workers * _CHUNKS_PER_WORKER
        self._n_chunks = n_chunks
        try:
            payload = cloudpickle.dumps((reward_fn, layout))
        except (TypeError, pickle.PicklingError, AttributeError, NotImplementedError) as error:
            raise RewardError(
                f"{self._name} cannot be sent to reward workers, because it cannot be pickled: {error}. "
                "Create what it holds at its first call, or set env.reward_workers to 0"
            ) from error
        methods = multiprocessing.get_all_start_methods()
        context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
        self._pool = ProcessPoolExecutor(
            n_workers, mp_context=context, initializer=_receive, initargs=(payload, dict(os.environ))
        )

    def score(self, episodes: Sequence[Observation]) -> TokenRewards:
        """The rewards of all tokens, as `score_episodes_in_parts` returns them.

        Raises:
            RewardError: the reward failed in a worker, or a worker's process ended.
        """
        parcels = [(episode.sample, np.array(episode.prompt_ids), np.array(episode.action_ids)) for episode in episodes]
        size = -(-len(parcels) // self._n_chunks)
        chunks = [parcels[start : start + size] for start in range(0, len(parcels), size)]
        try:
            paid = list(self._pool.map(_score, chunks))
        except BrokenProcessPool as error:
            raise RewardError(
                f"a worker process of {self._name} ended while it scored {len(parcels)} episodes: "
                "killed from outside (memory?) or by the reward itself"
            ) from error
        parts = {name: np.concatenate([chunk.parts[name] for chunk in paid]) for name in paid[0].parts}
        return TokenRewards(np.concatenate([chunk.total for chunk in paid]), parts)

    def close(self) -> None:
        """Ends the processes."""
        self._pool.shutdown(wait=True, cancel_futures=True)


_payload = b""
_received: tuple[AnyReward, TextLayout] | None = None


def _receive(payload: bytes, environment: dict[str, str]) -> None:
    """Keeps reward and layout as bytes until the first chunk, so that a failure to unpickle has a caller to go to.

    The server that forks workers has the environment of the first time it was needed, which may have changed since.
    """
    global _payload
    os.environ.update(environment)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    _payload = payload
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A pool's processes wait for work for ever where theirs was killed."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)


def _score(parcels: list[_Parcel]) -> TokenRewards:
    global _received
    if _received is None:
        try:
            _received = pickle.loads(_payload)
        except Exception as error:
            raise RewardError(f"the reward cannot be unpickled in a worker: {error}") from error
    reward_fn, layout = _received
    return score_episodes_in_parts(
        reward_fn, [Observation(sample, prompt, actions, len(actions), layout) for sample, prompt, actions in parcels]
    )
