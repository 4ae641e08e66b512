"""Natural language policy optimisation (Ramamurthy et al., arXiv 2210.01241, algorithm 1)."""

from __future__ import annotations

from typing import Any

from stable_baselines3.common.vec_env import VecEnv

from rl4lms_like.algorithms.arguments import NLPOArguments
from rl4lms_like.algorithms.ppo import PPO
from rl4lms_like.core.errors import ModelError
from rl4lms_like.policies.masked import MaskablePolicy


class NLPO(PPO):
    """PPO whose sampling, ratio and entropy are restricted to the tokens that a mask model allows.

    The mask model is a copy of the policy that is updated every `target_update_iterations` iterations, after the
    policy's update. The KL in the reward is computed from the full distributions.

    Attributes:
        n_iterations: number of completed updates; saved, so that mask updates keep their interval in resumed runs.
    """

    arguments_class = NLPOArguments
    policy: MaskablePolicy  # type: ignore[assignment]

    def __init__(self, policy: Any, env: Any, **arguments: Any) -> None:
        if isinstance(policy, type) and not issubclass(policy, MaskablePolicy):
            raise ModelError(
                f"NLPO needs a maskable policy, got {policy.__name__}: use MaskableCausalLMActorCriticPolicy or "
                f"MaskableSeq2SeqLMActorCriticPolicy"
            )
        super().__init__(policy, env, **arguments)

    def _setup_model(self) -> None:
        if self.env is not None:  # without an environment, the loaded arguments contain them
            self.policy_kwargs.setdefault("special_token_ids", special_tokens(self.env))
        super()._setup_model()

    def train(self) -> None:
        """Run PPO's update, then copy the policy to the mask model if an interval is complete."""
        super().train()
        interval = self.policy.arguments.target_update_iterations
        if self.n_iterations % interval == 0:
            self.weights_change()
            self.policy.update_mask_model()
        self.logger.record("nlpo/mask_updates", self.n_iterations // interval)

    def training_state(self) -> dict[str, Any]:
        """Return the state of every algorithm, and the number of completed updates."""
        return {**super().training_state(), "n_iterations": self.n_iterations}


def special_tokens(env: VecEnv) -> list[int]:
    """Return the special tokens of an environment's tokenizer and the tokens that end its episodes."""
    tokenizer = env.get_attr("layout", [0])[0].tokenizer
    return sorted({*tokenizer.all_special_ids, *env.get_attr("eos_token_ids", [0])[0]})
