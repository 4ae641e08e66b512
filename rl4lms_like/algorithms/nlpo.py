"""Natural language policy optimisation (Ramamurthy et al., arXiv 2210.01241, algorithm 1)."""

from __future__ import annotations

from typing import Any

from stable_baselines3.common.vec_env import VecEnv

from rl4lms_like.algorithms.arguments import NLPOArguments
from rl4lms_like.algorithms.ppo import PPO
from rl4lms_like.core.errors import ModelError
from rl4lms_like.policies.masked import MaskablePolicy


class NLPO(PPO):
    """PPO in which sampling, ratio and entropy see only the tokens that a mask model allows.

    The mask model is a copy of the policy that is refreshed every `target_update_iterations` iterations, after the
    update. The KL in the reward is that of the whole distributions.

    Attributes:
        n_iterations: completed updates; with it the refreshes go on where they were.
    """

    arguments_class = NLPOArguments
    policy: MaskablePolicy  # type: ignore[assignment]

    def __init__(self, policy: Any, env: Any, **arguments: Any) -> None:
        if isinstance(policy, type) and not issubclass(policy, MaskablePolicy):
            raise ModelError(
                f"NLPO needs a maskable policy, got {policy.__name__}: take MaskableCausalLMActorCriticPolicy or "
                f"MaskableSeq2SeqLMActorCriticPolicy"
            )
        self.n_iterations = 0
        super().__init__(policy, env, **arguments)

    def _setup_model(self) -> None:
        if self.env is not None:  # loaded without one, the saved arguments have them
            self.policy_kwargs.setdefault("special_token_ids", special_tokens(self.env))
        super()._setup_model()

    def train(self) -> None:
        """PPO's update; then, when it is time, the mask model takes over the policy."""
        super().train()
        self.n_iterations += 1
        interval = self.policy.arguments.target_update_iterations
        if self.n_iterations % interval == 0:
            self._weights_change()
            self.policy.update_mask_model()
        self.logger.record("nlpo/mask_updates", self.n_iterations // interval)

    def training_state(self) -> dict[str, Any]:
        """As of every algorithm, and how many updates count towards the next refresh."""
        return {**super().training_state(), "n_iterations": self.n_iterations}

    def load_training_state(self, state: dict[str, Any]) -> None:
        """Takes over what `training_state` gave."""
        super().load_training_state(state)
        self.n_iterations = state["n_iterations"]


def special_tokens(env: VecEnv) -> list[int]:
    """The special tokens of an environment's tokenizer, and what ends its episodes."""
    tokenizer = env.get_attr("layout", [0])[0].tokenizer
    return sorted({*tokenizer.all_special_ids, *env.get_attr("eos_token_ids", [0])[0]})
