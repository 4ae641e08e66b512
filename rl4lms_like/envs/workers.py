"""Worker processes for slow Python rewards.

    parent                                  worker 1 .. n_workers
    score(episodes) -- chunks of episodes ->  score_episodes_in_parts(reward, chunk)
          [n_tokens] <- rewards ------------

    a process ends, or a chunk times out          all processes are restarted and unfinished chunks are scored again;
                                                  chunks in progress come first, one at a time
    it happens again in the same batch            an error that names the samples in progress

Reward, tokenizer and environment variables are sent once, when a process starts; a chunk holds samples and token ids.
A reward that keeps state between calls, or whose values depend on the rest of its batch, receives one chunk and not all
episodes. Restarted processes begin with the state of the reward that was sent at first.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any, TypeAlias

import cloudpickle  # type: ignore[import-untyped]
import numpy as np

from rl4lms_like.core.errors import RewardError
from rl4lms_like.core.observation import Observation, TextLayout
from rl4lms_like.core.sample import Sample
from rl4lms_like.core.wording import raised
from rl4lms_like.rewards.base import AnyReward
from rl4lms_like.rewards.call import TokenRewards, is_batched, named, score_episodes_in_parts

logger = logging.getLogger(__name__)

_Parcel: TypeAlias = "tuple[Sample, np.ndarray, np.ndarray]"
"""Picklable form of an episode: sample, prompt ids, response ids."""

_CHUNKS_PER_WORKER = 4
"""More chunks than workers balance episodes of unequal cost; batched rewards get one chunk per worker."""

_LOOK_EVERY = 1.0
"""Seconds between two checks for chunks that exceed the timeout."""

_TO_END = 5.0
"""Seconds to wait for the processes of a broken pool to end before they are killed."""

_N_NAMED = 3
"""Maximum number of samples named in an error; the others are counted."""


class _Lost(Exception):  # noqa: N818  (internal: leads to a second attempt)
    """Loss of processes that ended or timed out; `places` are the indices of the chunks in progress."""

    def __init__(self, how: str, places: list[int]) -> None:
        super().__init__(how)
        self.places = places


class RewardWorkers:
    """Pool of processes that score finished episodes.

    Args:
        reward_fn: the task's reward; it is pickled, so it must not hold open files, locks or the like.
        layout: shapes and tokenizer of the observations.
        n_workers: number of processes.
        timeout: time limit of a chunk in seconds, without the start of the process; None for no limit.

    Attributes:
        restarts: number of restarts of the pool.

    Raises:
        RewardError: the reward cannot be pickled.
    """

    def __init__(self, reward_fn: AnyReward, layout: TextLayout, n_workers: int, timeout: float | None = None) -> None:
        self._name = type(reward_fn).__name__
        self._n_workers, self._timeout = n_workers, timeout
        self._n_chunks = n_workers if is_batched(reward_fn) else n_workers * _CHUNKS_PER_WORKER
        self.restarts = 0
        try:
            self._payload = cloudpickle.dumps((reward_fn, layout))
        except (TypeError, pickle.PicklingError, AttributeError, NotImplementedError) as error:
            raise RewardError(
                f"{self._name} cannot be sent to reward workers, because it cannot be pickled: {error}. "
                "Create such objects in the first call of the reward, or set env.reward_workers to 0"
            ) from error
        methods = multiprocessing.get_all_start_methods()
        self._context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
        self._since = self._context.RawArray("d", self._n_chunks)  # start time of each chunk; 0 before
        self._pool: ProcessPoolExecutor | None = None

    def _started(self) -> ProcessPoolExecutor:
        received = (self._payload, dict(os.environ), self._since)
        return ProcessPoolExecutor(self._n_workers, self._context, initializer=_receive, initargs=received)

    def score(self, episodes: Sequence[Observation]) -> TokenRewards:
        """Return the rewards of all tokens, as `score_episodes_in_parts` does.

        Raises:
            RewardError: the reward failed in a worker, or processes ended or timed out twice.
        """
        size = -(-len(episodes) // self._n_chunks)
        chunks = [episodes[start : start + size] for start in range(0, len(episodes), size)]
        paid: dict[int, TokenRewards] = {}
        try:
            self._run(chunks, range(len(chunks)), paid)
        except _Lost as lost:
            left = [place for place in range(len(chunks)) if place not in paid]
            logger.warning(
                "the reward %s %s. Its processes are restarted and their state is lost; %d of %d episodes are "
                "scored again. In progress: %s",
                *(self._name, lost, sum(len(chunks[place]) for place in left), len(episodes)),
                _listed(chunks, lost.places) or "none",
            )
            self.restarts += 1
            try:
                for place in lost.places:  # alone, to find the failing one
                    self._run(chunks, [place], paid)
                self._run(chunks, [place for place in left if place not in paid], paid)
            except _Lost as again:
                raise RewardError(
                    f"the reward {self._name} {again}, for the second time in a batch of {len(episodes)}. In "
                    f"progress: {_listed(chunks, again.places)}"
                ) from again
        in_order = [paid[place] for place in range(len(chunks))]
        parts = {name: np.concatenate([chunk.parts[name] for chunk in in_order]) for name in in_order[0].parts}
        return TokenRewards(np.concatenate([chunk.total for chunk in in_order]), parts)

    def _run(
        self, chunks: Sequence[Sequence[Observation]], places: Iterable[int], paid: dict[int, TokenRewards]
    ) -> None:
        """Add the rewards of the chunks at `places` to `paid`. All processes are stopped if it raises."""
        self._pool = pool = self._pool or self._started()
        futures = {}
        try:
            for place in places:
                self._since[place] = 0.0
                futures[self._sent(pool, place, chunks[place])] = place
            waiting = set(futures)
            while waiting:
                done, waiting = wait(waiting, self._timeout and min(_LOOK_EVERY, self._timeout / 2), FIRST_COMPLETED)
                paid |= {futures[future]: future.result() for future in done if future.exception() is None}
                for future in done:
                    future.result()
                started = {place: self._since[place] for future in waiting if self._since[place := futures[future]]}
                now = time.monotonic()
                late = sorted(place for place in started if self._timeout and now - started[place] > self._timeout)
                if late:
                    raise _Lost(f"was not done within {self._timeout:g} s (env.reward_timeout)", late)
        except BrokenProcessPool as error:
            processes = list((pool._processes or {}).values())
            _let_end(processes)
            self._kill()
            left_open = [place for place in futures.values() if place not in paid]
            began = [place for place in left_open if self._since[place]]
            raise _Lost(f"lost a process, which {_end_of(processes)}", began or left_open) from error
        except BaseException:
            self._kill()
            raise

    def _sent(self, pool: ProcessPoolExecutor, place: int, chunk: Sequence[Observation]) -> Future[TokenRewards]:
        """Submit a chunk; the first chunks start the processes."""
        parcels = [(each.sample, np.array(each.prompt_ids), np.array(each.action_ids)) for each in chunk]
        try:
            return pool.submit(_score, place, parcels)
        except BrokenProcessPool:
            raise
        except (OSError, EOFError, RuntimeError) as error:
            raise RewardError(
                f"the {self._n_workers} processes of env.reward_workers cannot be started: {raised(error)}. Check "
                f"the limit on processes and the length of TMPDIR ({tempfile.gettempdir()}), or set "
                "env.reward_workers to 0"
            ) from error

    def _kill(self) -> None:
        """Kill the processes and their child processes; the next chunk starts new ones."""
        pool, self._pool = self._pool, None
        if pool is not None:
            for group, process in list((pool._processes or {}).items()):
                with suppress(AttributeError, OSError):  # no process groups here, or this group does not exist
                    os.killpg(group, signal.SIGKILL)
                process.kill()
            with suppress(RuntimeError):  # the pool's own thread may not have started
                pool.shutdown(wait=True, cancel_futures=True)

    def close(self) -> None:
        """Stop the processes."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)


def _listed(chunks: Sequence[Sequence[Observation]], places: Sequence[int]) -> str:
    """Return the first samples of these chunks and the number of the others, for messages."""
    episodes = [episode for place in places for episode in chunks[place]]
    more = f" and {len(episodes) - _N_NAMED} more" if len(episodes) > _N_NAMED else ""
    return ", ".join(named(episode) for episode in episodes[:_N_NAMED]) + more


def _let_end(processes: Sequence[BaseProcess]) -> None:
    """Wait up to `_TO_END` seconds for the processes of a broken pool, which the pool has terminated."""
    running = {process.sentinel for process in processes}
    until = time.monotonic() + _TO_END
    while running and (left := until - time.monotonic()) > 0:
        running -= set(connection.wait(running, left))


def _end_of(processes: Sequence[BaseProcess]) -> str:
    """Describe how the first process of a broken pool ended; the others were terminated by the pool."""
    codes = [process.exitcode for process in processes]
    code = next((code for code in codes if code not in (None, 0, -signal.SIGTERM)), codes[0] if codes else None)
    if code is None:
        return "ended while it started"
    if code == -getattr(signal, "SIGKILL", 9):
        return "was killed from outside (SIGKILL; out of memory?)"
    if code > 0:
        return f"ended with exit status {code}"
    is_named = -code in set(signal.Signals)  # real-time signals have no names
    return f"ended by the signal {signal.Signals(-code).name if is_named else -code}"


_payload = b""
_since: Any = None
_received: tuple[AnyReward, TextLayout] | None = None


def _receive(payload: bytes, environment: dict[str, str], since: Any) -> None:
    """Initialise a worker process; the reward stays pickled until the first chunk, so that errors reach the caller.

    `environment` is sent because the fork server keeps the environment variables of its own start.
    """
    global _payload, _since
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent handles it
    with suppress(AttributeError, OSError):  # Windows
        os.setpgid(0, 0)  # own process group, so that child processes can be killed with it
        for each in (signal.SIGTTIN, signal.SIGTTOU):  # sent to background groups that use the terminal; would stop it
            signal.signal(each, signal.SIG_IGN)
    os.environ.update(environment)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    _payload, _since = payload, since
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Exit when the parent process has ended; otherwise the worker would wait for work forever."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        with suppress(AttributeError):  # Windows
            if os.getpgrp() == os.getpid():
                os.killpg(0, signal.SIGKILL)
        os._exit(1)


def _score(place: int, parcels: list[_Parcel]) -> TokenRewards:
    global _received
    if _received is None:
        try:
            _received = pickle.loads(_payload)
        except Exception as error:
            raise RewardError(f"the reward cannot be unpickled in a worker: {error}") from error
    reward_fn, layout = _received
    _since[place] = time.monotonic()
    return score_episodes_in_parts(
        reward_fn, [Observation(sample, prompt, actions, len(actions), layout) for sample, prompt, actions in parcels]
    )
