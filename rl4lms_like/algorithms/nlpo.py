"""Natural language policy optimisation (Ramamurthy et al., arXiv 2210.01241, algorithm 1).

    mask model psi     a copy of the policy, updated every mu iterations
    V_psi(s)           tokens that psi allows in state s: its top-p set, for instance
    policy             pi(a | s) over V_psi(s), renormalised; 0 for all other tokens

A mask is chosen once, in the rollout, and stored with its action (`EpisodeBatch.allowed`). The update reads it from
there, so that old and new log-probs of the ratio are over the same tokens.
"""

from __future__ import annotations

from typing import Any

from stable_baselines3.common.vec_env import VecEnv

from rl4lms_like.algorithms.arguments import NLPOArguments
from rl4lms_like.algorithms.ppo import PPO
from rl4lms_like.policies.masked import MaskablePolicy
from rl4lms_like.system.errors import ModelError


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
        # The mask never forbids a special token: without the end token no episode could end. A loaded algorithm without
        # an environment has them in its arguments.
        if self.env is not None:
            self.policy_kwargs.setdefault("special_token_ids", special_tokens(self.env))

        super()._setup_model()

    def train(self) -> None:
        """Run PPO's update, then copy the policy to the mask model if an interval is complete."""
        super().train()

        # psi <- theta every mu iterations; the next rollout is the first one with the new masks. As in a step, the run
        # cannot be resumed while only some weights have moved.
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
