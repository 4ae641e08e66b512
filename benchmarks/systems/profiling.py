"""CPU seconds of each part of our iteration: methods are timed where they are called, everything else is "other".

    rollout   generate · play · score (policy + value + reference)
    update    forward · backward · clip · optimizer step

The clock is read twice a call and a part is a few calls an iteration, so that timing does not change what is timed.
torch's profiler does change it, so `operators` is for the warm-up iteration.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

from rl4lms_like.algorithms.ppo import PPO

OPERATORS = 15


@contextmanager
def operators(*, wanted: bool) -> Iterator[dict[str, Any]]:
    """Runs a block under torch's profiler.

    Args:
        wanted: False runs it without.

    Yields:
        A dict that afterwards holds `operators`, the dearest ones with their own seconds and their calls, and
        `operators_s`, the seconds of all.
    """
    extras: dict[str, Any] = {}
    if not wanted:
        yield extras
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        yield extras
    averages = sorted(profiler.key_averages(), key=lambda event: event.self_cpu_time_total, reverse=True)
    extras["operators_s"] = sum(event.self_cpu_time_total for event in averages) / 1e6
    extras["operators"] = [
        {"operator": event.key, "self_s": event.self_cpu_time_total / 1e6, "calls": event.count}
        for event in averages[:OPERATORS]
    ]


class Parts:
    """CPU seconds by part since the last `take`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inside: str | None = None

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, its time added to `part` unless it is called inside another part."""

        @wraps(call)
        def timed_call(*args: Any, **kwargs: Any) -> Any:
            if self._inside is not None:
                return call(*args, **kwargs)
            self._inside = part
            start = time.process_time()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds[part] = self.seconds.get(part, 0.0) + time.process_time() - start
                self._inside = None

        return timed_call

    def take(self) -> dict[str, float]:
        """The seconds so far, which start again from nothing."""
        taken, self.seconds = self.seconds, {}
        return taken


def watch_parts(algorithm: PPO) -> Parts:
    """Time the parts of an algorithm's iterations from now on."""
    parts = Parts()

    def watch(owner: Any, method: str, part: str) -> None:
        setattr(owner, method, parts.timed(part, getattr(owner, method)))

    policy, collector = algorithm.policy, algorithm.collector
    watch(policy, "generate", "rollout: generate")
    watch(algorithm.env, "reset", "rollout: prompts")
    watch(algorithm.env, "play", "rollout: rewards")
    for method in ("score", "score_sampled"):  # the second one with log-probs of the sampling
        watch(policy, method, "rollout: score (policy, critic, reference)")
    watch(algorithm.rollout_buffer, "compute_returns_and_advantage", "rollout: advantages")
    watch(algorithm, "loss", "update: forward")
    watch(torch.Tensor, "backward", "update: backward")
    watch(torch.nn.utils, "clip_grad_norm_", "update: clip gradients")
    watch(policy.optimizer, "zero_grad", "update: zero gradients")
    watch(policy.optimizer, "step", "update: optimizer step")
    assert collector.env is algorithm.env
    return parts
