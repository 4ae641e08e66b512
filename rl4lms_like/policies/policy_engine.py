"""Life cycle of the engine that generates a policy's responses: when it gets the policy's weights, and when it rests.

    one process            update ─ generate             before each generation, if a weight changed since the last one
    several processes      prepare ─ generate            the main process updates the engine, then all generate with it
    update of the policy   rest                          for instance, a server on the same GPU frees its memory

With `ahead` the engine generates rollouts during the updates of the policy:

    generate_in_background ─ update of the policy ─ update (waits until the responses are generated)

There several processes wait for each other's responses, before the main process passes on weights.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from rl4lms_like.core.episodes import EpisodeBatch
from rl4lms_like.core.sampled_log_probs import impossible_ids, impossible_log_probs
from rl4lms_like.engines.base import GenerationEngine
from rl4lms_like.system.errors import EngineError
from rl4lms_like.system.ranks import Ranks


class EnginePolicy(Protocol):
    """A policy, as its engine needs it."""

    def led_by_main(self) -> AbstractContextManager[None]:
        """Let the main process read weights within the context, also where several processes have split them."""


class PolicyEngine:
    """The engine of a policy. If the policy's own model generates, there is nothing to update, and no method does work.

    Args:
        external: engine with its own copy of the weights; None if the policy's own model generates.
        is_ahead: rollouts are generated during the updates before them (`ahead`).

    Attributes:
        ranks: processes that generate with this engine; the main one updates it for all and lets it rest.
    """

    def __init__(self, external: GenerationEngine | None = None, *, is_ahead: bool = False) -> None:
        self.external = external
        self.is_ahead = is_ahead
        self.ranks = Ranks()
        self._in_background: list[Future[EpisodeBatch]] = []

    def share(self, ranks: Ranks) -> None:
        """Use the engine together with these processes from now on."""
        self.ranks = ranks

    def prepare(self, policy: EnginePolicy) -> None:
        """Let several processes `pass_on` the weights before they generate; one process does in `update`."""
        if self.ranks.size > 1:
            self.pass_on(policy)

    def pass_on(self, policy: EnginePolicy) -> None:
        """Update the engine for all processes, after what they generate in the background; all call this together.

        Raises:
            EngineError: the engine failed; in the other processes a `RankError`.
        """
        if self.external is None:
            return

        # The main process must not pass on weights before the responses of all are generated.
        if self.is_ahead:
            self._wait()
            self.ranks.any(False)

        # The others take part in what the main process reads, until it has finished or failed; then they get its error.
        if not self.ranks.is_main:
            with policy.led_by_main():
                pass
        state = self.ranks.from_main(lambda: self._lead_update(policy))
        if not self.ranks.is_main:
            self.external.follow(state)

    def _lead_update(self, policy: EnginePolicy) -> Any:
        with policy.led_by_main():
            return self.update(policy)

    def update(self, policy: EnginePolicy) -> Any:
        """Pass on the policy's weights if they changed, after what is generated in the background.

        Only the main process does: all processes have the same weights and the same engine.

        Returns:
            The result of the engine's own `update`.

        Raises:
            EngineError: the engine failed.
        """
        if self.external is None or not self.ranks.is_main:
            return None

        self._wait()
        return self.external.update(policy)

    def _wait(self) -> None:
        """Wait until the responses of this process are generated.

        New weights in the middle of a response would make its log-probs those of no policy.
        """
        wait(self._in_background)
        self._in_background = []

    def rest(self) -> None:
        """Let the engine release resources, at the start of an update of the policy."""
        # With `ahead` it generates during the update.
        if self.external is not None and self.ranks.is_main and not self.is_ahead:
            self.external.rest()

    def generate(self, prompt_ids: Tensor, prompt_mask: Tensor, **arguments: Any) -> EpisodeBatch:
        """Generate with the external engine; see `GenerationEngine.generate`.

        Raises:
            EngineError: the engine failed, or a log-prob of its tokens cannot be.
        """
        assert self.external is not None
        episodes = self.external.generate(prompt_ids, prompt_mask, **arguments)
        if episodes.behavior_log_prob is not None:
            problem = impossible_log_probs(episodes.behavior_log_prob)
            if problem is not None:
                raise EngineError(f"{self.external.name}: {problem}")
        return episodes

    def check_ids(self, episodes: EpisodeBatch, vocab_size: int) -> None:
        """Raise an `EngineError` if an engine's responses have tokens that the policy does not have."""
        if self.external is None:
            return
        problem = impossible_ids(episodes.response_ids[episodes.response_mask], vocab_size)
        if problem is not None:
            raise EngineError(f"{self.external.name} returned {problem}")

    def generate_in_background(
        self, calls: Sequence[tuple[Tensor, Tensor, Mapping[str, Any]]]
    ) -> list[Future[EpisodeBatch]]:
        """Generate in a thread, one call after the other, with the weights that the external engine has now.

        Args:
            calls: prompts, their masks and the keyword arguments of each call of `GenerationEngine.generate`.

        Returns:
            The episodes of each call; after one that fails, all have its error.
        """
        assert self.external is not None, "the policy's own model cannot generate while it is updated"
        responses: list[Future[EpisodeBatch]] = [Future() for _ in calls]

        # torch's gradient mode belongs to a thread, so that of the caller is not the one of this function.
        @torch.no_grad()
        def work() -> None:
            # After a failure no call is tried: the run ends at the first one, so the others would only delay that.
            failure: BaseException | None = None
            for future, (prompt_ids, prompt_mask, arguments) in zip(responses, calls, strict=True):
                try:
                    if failure is not None:
                        raise failure
                    episodes = self.generate(prompt_ids, prompt_mask, **arguments)
                except BaseException as error:
                    failure = error
                    future.set_exception(error)
                else:
                    future.set_result(episodes)

        # A daemon: a server that does not answer must not keep an interrupted run from ending.
        self._in_background = responses
        threading.Thread(target=work, name="generation", daemon=True).start()
        return responses
