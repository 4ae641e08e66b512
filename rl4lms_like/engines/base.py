"""Base class of generation engines.

    rollout, evaluation ─ policy.generate ─ engine.update(policy) ─ engine.generate ─> EpisodeBatch
    policy.score ─ engine.gaps ─> difference of the engine's log-probs from those that are trained
    update of the policy ─ engine.rest

`policies.policy_engine` decides when `update` and `rest` are called.

The log-probs that are trained are always the policy's own. Those of an external engine are the `behavior_log_prob` of
the episodes, which algorithms can use to correct for the difference (`importance_correction`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from rl4lms_like.core.episodes import EpisodeBatch


class GenerationEngine(ABC):
    """Generator of responses with a policy's weights.

    Attributes:
        samples_policy: the recorded log-probs are those of the policy under its `generation_kwargs`. Then one of
            exactly 0 is an error where the policy is not sure of the token.
    """

    samples_policy: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """Name of the engine in errors."""
        return f"the engine {type(self).__name__}"

    @abstractmethod
    def generate(
        self,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        *,
        eos_token_ids: Sequence[int],
        max_new_tokens: int | None = None,
        generation_kwargs: Mapping[str, Any] | None = None,
        seed: int | None = None,
        record_log_prob: bool = False,
        first_token_temperature: float | None = None,
        tokenizer: Any = None,
    ) -> EpisodeBatch:
        """Generate one response per prompt.

        Args:
            prompt_ids: `[n, prompt_len]`, padded on either side.
            prompt_mask: `[n, prompt_len]`, True or 1 on real tokens.
            eos_token_ids: tokens that end a response; if empty, all responses reach the length limit.
            max_new_tokens: the environment's limit.
            generation_kwargs: arguments of transformers' `generate`; a policy passes its own by default.
            seed: seed of the sampling.
            record_log_prob: store the log-probs of the distribution that is sampled from as the episodes'
                `behavior_log_prob`.
            first_token_temperature: temperature of the first token; default: that of all tokens.
            tokenizer: decodes responses; required if the arguments have `stop_strings`.

        Returns:
            The finished episodes.
        """

    def update(self, policy: Any) -> Any:  # noqa: B027  (an engine with the policy's own model has nothing to do)
        """Pass on the policy's weights if they changed; called before every `generate`.

        With several processes, only the main one calls it, before all of them generate. If they split the weights, the
        others take part in `policy.full_weights()`, `policy.fingerprint()` and `policy.log_prob(episodes)`; other
        passes of the policy are not possible here then.

        Args:
            policy: an `LMActorCriticPolicy`.

        Returns:
            What the other processes need to generate, given to their `follow`; by default nothing.
        """

    def follow(self, state: Any) -> None:  # noqa: B027
        """Generate with what `update` has returned in the main process; called in the others after each `update`."""

    def gaps(self, episodes: EpisodeBatch, log_prob: Tensor) -> dict[str, float]:
        """Return logged numbers about the difference of the engine's log-probs from the policy's.

        Args:
            episodes: of a rollout of this engine. They have no `behavior_log_prob` if they were generated with older
                weights than those that it has now.
            log_prob: `[n_tokens]`, of the policy with its current weights.
        """
        return {}

    def rest(self) -> None:  # noqa: B027
        """Release resources until the next `update`; called before an update of the policy, but not with `ahead`."""
