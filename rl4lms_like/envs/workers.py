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

from rl4lms_like.core.observation import Observation, TextLayout
from rl4lms_like.core.sample import Sample
from rl4lms_like.rewards.base import AnyReward
from rl4lms_like.rewards.call import TokenRewards, is_batched, named, score_episodes_in_parts
from rl4lms_like.system.component_state import load_state, state_of
from rl4lms_like.system.errors import RewardError
from rl4lms_like.system.wording import raised

logger = logging.getLogger(__name__)

_Parcel: TypeAlias = "tuple[Sample, np.ndarray, np.ndarray]"
"""Picklable form of an episode: sample, prompt ids, response ids."""

_CHUNKS_PER_WORKER = 4
"""More chunks than workers balance episodes of unequal cost; batched rewards get one chunk per worker."""

_CHECK_EVERY = 1.0
"""Seconds between two checks for chunks that exceed the timeout."""

_SECONDS_TO_END = 5.0
"""Seconds to wait for the processes of a broken pool to end before they are killed."""

_N_NAMED = 3
"""Maximum number of samples named in an error; the others are counted."""


class _Lost(Exception):  # noqa: N818  (internal: leads to a second attempt)
    """Loss of processes that ended or timed out.

    Attributes:
        in_progress: indices of the chunks that the processes were scoring.
        scored: index -> rewards of the chunks that were done before.
    """

    def __init__(self, how: str, in_progress: list[int], scored: dict[int, TokenRewards]) -> None:
        super().__init__(how)
        self.in_progress = in_progress
        self.scored = scored


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
        self._n_workers = n_workers
        self._timeout = timeout
        self._n_chunks = n_workers if is_batched(reward_fn) else n_workers * _CHUNKS_PER_WORKER
        self.restarts = 0
        self._keeps_state = False

        # cloudpickle also pickles classes of a script or notebook, which the workers cannot import.
        try:
            self._payload = cloudpickle.dumps((reward_fn, layout))
        except (TypeError, pickle.PicklingError, AttributeError, NotImplementedError) as error:
            raise RewardError(
                f"{self._name} cannot be sent to reward workers, because it cannot be pickled: {error}. "
                "Create such objects in the first call of the reward, or set env.reward_workers to 0"
            ) from error

        # Not "fork": a copy of this process would have its CUDA context, which CUDA forbids, and its threads' locks.
        methods = multiprocessing.get_all_start_methods()
        self._context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
        # Start of each chunk on the monotonic clock in seconds, written by the workers; 0 = not started.
        self._started_at = self._context.RawArray("d", self._n_chunks)
        self._pool: ProcessPoolExecutor | None = None

    def score(self, episodes: Sequence[Observation], *, keeps_state: bool = False) -> TokenRewards:
        """Return the rewards of all tokens, as `score_episodes_in_parts` does.

        With `keeps_state` each worker restores the state that the reward had before the chunk.

        Raises:
            RewardError: the reward failed in a worker, or processes ended or timed out twice.
        """
        self._keeps_state = keeps_state

        # At most `_n_chunks` chunks of consecutive episodes, so that joining them restores the order of the tokens.
        size = -(-len(episodes) // self._n_chunks)  # rounded up
        chunks = [episodes[start : start + size] for start in range(0, len(episodes), size)]
        try:
            scored = self._run(chunks, range(len(chunks)))
        except _Lost as loss:
            scored = self._score_again(chunks, loss)

        # [n_tokens], in total and of each part of a combined reward.
        in_order = [scored[index] for index in range(len(chunks))]
        reward_parts = {}
        for name in in_order[0].parts:
            reward_parts[name] = np.concatenate([rewards.parts[name] for rewards in in_order])
        return TokenRewards(np.concatenate([rewards.total for rewards in in_order]), reward_parts)

    def _score_again(self, chunks: Sequence[Sequence[Observation]], loss: _Lost) -> dict[int, TokenRewards]:
        """Score the chunks that were not done before the loss; return the rewards of all chunks, by index."""
        scored = dict(loss.scored)
        unscored = [index for index in range(len(chunks)) if index not in scored]
        n_episodes = sum(len(chunk) for chunk in chunks)
        logger.warning(
            "the reward %s %s. Its processes are restarted and their state is lost; %d of %d episodes are "
            "scored again. In progress: %s",
            *(self._name, loss, sum(len(chunks[index]) for index in unscored), n_episodes),
            _listed(chunks, loss.in_progress) or "none",
        )
        self.restarts += 1

        # Chunks that were in progress run alone, one after the other: a second failure then names only its samples.
        try:
            for index in loss.in_progress:
                scored |= self._run(chunks, [index])
            scored |= self._run(chunks, [index for index in unscored if index not in scored])
        except _Lost as second_loss:
            raise RewardError(
                f"the reward {self._name} {second_loss}, for the second time in a batch of {n_episodes}. In "
                f"progress: {_listed(chunks, second_loss.in_progress)}"
            ) from second_loss
        return scored

    def _run(self, chunks: Sequence[Sequence[Observation]], indices: Iterable[int]) -> dict[int, TokenRewards]:
        """Return the rewards of the chunks at `indices`, by index. All processes are stopped if it raises."""
        if self._pool is None:
            received = (self._payload, dict(os.environ), self._started_at)
            self._pool = ProcessPoolExecutor(self._n_workers, self._context, initializer=_receive, initargs=received)
        pool = self._pool

        futures: dict[Future[TokenRewards], int] = {}
        scored: dict[int, TokenRewards] = {}
        try:
            for index in indices:
                self._started_at[index] = 0.0
                futures[self._submit(pool, index, chunks[index])] = index

            waiting = set(futures)
            check_every = self._timeout and min(_CHECK_EVERY, self._timeout / 2)  # None: return when a chunk is done
            while waiting:
                done, waiting = wait(waiting, check_every, FIRST_COMPLETED)
                # First keep the rewards of all chunks that succeeded, then raise the first failure: what is scored by
                # then need not be scored again.
                for future in done:
                    if future.exception() is None:
                        scored[futures[future]] = future.result()
                for future in done:
                    future.result()
                late = self._late([futures[future] for future in waiting])
                if late:
                    raise _Lost(f"was not done within {self._timeout:g} s (env.reward_timeout)", late, scored)
        except BrokenProcessPool as error:
            raise self._loss(pool, set(futures.values()) - set(scored), scored) from error
        except BaseException:
            self._kill()
            raise
        return scored

    def _loss(self, pool: ProcessPoolExecutor, unscored: set[int], scored: dict[int, TokenRewards]) -> _Lost:
        """Stop all processes of a broken pool, and return how the first of them ended."""
        # The exit status is there only when a process has ended, and `_kill` would replace it by its own signal.
        processes = list((pool._processes or {}).values())
        _wait_for_ends(processes)
        self._kill()

        # If no chunk has started, the processes ended while they started: then no chunk is more suspect than another.
        in_progress = [index for index in sorted(unscored) if self._started_at[index]]
        return _Lost(f"lost a process, which {_end_of(processes)}", in_progress or sorted(unscored), scored)

    def _late(self, unfinished: Sequence[int]) -> list[int]:
        """Return the chunks that run for longer than the time limit, in order; chunks in the queue do not run yet."""
        if not self._timeout:
            return []
        started = [index for index in unfinished if self._started_at[index]]
        now = time.monotonic()
        return sorted(index for index in started if now - self._started_at[index] > self._timeout)

    def _submit(self, pool: ProcessPoolExecutor, index: int, chunk: Sequence[Observation]) -> Future[TokenRewards]:
        """Submit a chunk; the first chunks start the processes."""
        parcels: list[_Parcel] = []
        for episode in chunk:
            parcels.append((episode.sample, np.array(episode.prompt_ids), np.array(episode.action_ids)))
        try:
            return pool.submit(_score, index, parcels, self._keeps_state)
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
        pool = self._pool
        self._pool = None
        if pool is None:
            return

        # A worker leads a process group of its own number: programs that the reward has started are in it.
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


def _listed(chunks: Sequence[Sequence[Observation]], indices: Sequence[int]) -> str:
    """Return the first samples of these chunks and the number of the others, for messages."""
    episodes: list[Observation] = []
    for index in indices:
        episodes += chunks[index]
    more = f" and {len(episodes) - _N_NAMED} more" if len(episodes) > _N_NAMED else ""
    return ", ".join(named(episode) for episode in episodes[:_N_NAMED]) + more


def _wait_for_ends(processes: Sequence[BaseProcess]) -> None:
    """Wait up to `_SECONDS_TO_END` for the processes of a broken pool, which the pool has terminated."""
    running = {process.sentinel for process in processes}
    until = time.monotonic() + _SECONDS_TO_END
    while running and (seconds := until - time.monotonic()) > 0:
        running -= set(connection.wait(running, seconds))


def _end_of(processes: Sequence[BaseProcess]) -> str:
    """Describe how the first process of a broken pool ended; the others were terminated by the pool."""
    codes = [process.exitcode for process in processes]
    first_code = codes[0] if codes else None
    # The pool's SIGTERM is not the cause, unless all processes ended by one.
    code = next((code for code in codes if code not in (None, 0, -signal.SIGTERM)), first_code)

    # Exit codes below 0 are signals, as in `subprocess`.
    if code is None:
        return "ended while it started"
    if code == -getattr(signal, "SIGKILL", 9):
        return "was killed from outside (SIGKILL; out of memory?)"
    if code > 0:
        return f"ended with exit status {code}"
    is_named = -code in set(signal.Signals)  # real-time signals have no names
    return f"ended by the signal {signal.Signals(-code).name if is_named else -code}"


# State of a worker process; in the parent it stays as it is.
_payload = b""
_started_at: Any = None
_received: tuple[AnyReward, TextLayout] | None = None


def _receive(payload: bytes, environment: dict[str, str], started_at: Any) -> None:
    """Initialise a worker process; the reward stays pickled until the first chunk, so that errors reach the caller.

    `environment` is sent because the fork server keeps the environment variables of its own start.
    """
    global _payload, _started_at
    _payload = payload
    _started_at = started_at

    # Ctrl-C reaches all processes; the parent handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    # A process group for this worker, so that its child processes can be killed with it. The system stops a background
    # group that uses the terminal, by these two signals.
    with suppress(AttributeError, OSError):  # Windows
        os.setpgid(0, 0)
        for terminal_signal in (signal.SIGTTIN, signal.SIGTTOU):
            signal.signal(terminal_signal, signal.SIG_IGN)

    # One thread for each worker: with the default, every worker would start as many as there are cores.
    os.environ.update(environment)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Exit when the parent process has ended; otherwise the worker would wait for work forever."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    parent.join()

    # Only a group of its own: another one would have processes that are not the worker's.
    with suppress(AttributeError):  # Windows
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _score(index: int, parcels: list[_Parcel], keeps_state: bool) -> TokenRewards:
    """Score a chunk in a worker; with `keeps_state` restore the state of the reward afterwards."""
    # At the first chunk, not when the process starts: there an error would only break the pool.
    global _received
    if _received is None:
        try:
            _received = pickle.loads(_payload)
        except Exception as error:
            raise RewardError(f"the reward cannot be unpickled in a worker: {error}") from error
    reward_fn, layout = _received

    # After unpickling, which may import much: only the reward counts towards the time limit. Processes of one machine
    # share the monotonic clock.
    _started_at[index] = time.monotonic()
    episodes = []
    for sample, prompt_ids, action_ids in parcels:
        episodes.append(Observation(sample, prompt_ids, action_ids, n_actions=len(action_ids), layout=layout))

    state = state_of(reward_fn) if keeps_state else None
    try:
        return score_episodes_in_parts(reward_fn, episodes)
    finally:
        if state is not None:
            load_state(reward_fn, state)
