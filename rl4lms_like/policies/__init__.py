"""Language models as actor-critic policies, one policy per model family.

from rl4lms_like.policies import POLICIES
POLICIES.resolve("causal_lm_actor_critic_policy")     imports torch; the table does not
"""

from __future__ import annotations

from rl4lms_like.system.registry import Entry, Registry, derived_from

_ARGUMENTS = "rl4lms_like.policies.arguments:PolicyArguments"
_VISION_ARGUMENTS = "rl4lms_like.policies.arguments:VisionPolicyArguments"
_MASKABLE_ARGUMENTS = "rl4lms_like.policies.arguments:MaskablePolicyArguments"

POLICIES = Registry(
    "policy",
    group="rl4lms_like.policies",
    misfit=derived_from("stable_baselines3.common.policies:BasePolicy"),
    table={
        "causal_lm_actor_critic_policy": Entry(
            "rl4lms_like.policies.base:CausalLMActorCriticPolicy",
            "decoder-only language model (GPT-2, Llama, Qwen ...) with a separate or shared critic",
            arguments=_ARGUMENTS,
        ),
        "seq2seq_lm_actor_critic_policy": Entry(
            "rl4lms_like.policies.base:Seq2SeqLMActorCriticPolicy",
            "encoder-decoder language model (T5, BART, Marian ...) with a separate or shared critic",
            arguments=_ARGUMENTS,
        ),
        "vision_lm_actor_critic_policy": Entry(
            "rl4lms_like.policies.vision:VisionLMActorCriticPolicy",
            "vision-language model (Qwen-VL, Idefics3, LLaVA, PaliGemma, Gemma 3 ...) with a separate or shared critic",
            arguments=_VISION_ARGUMENTS,
        ),
        "maskable_causal_lm_actor_critic_policy": Entry(
            "rl4lms_like.policies.masked:MaskableCausalLMActorCriticPolicy",
            "decoder-only language model restricted to the tokens that a mask model allows; for nlpo",
            arguments=_MASKABLE_ARGUMENTS,
        ),
        "maskable_seq2seq_lm_actor_critic_policy": Entry(
            "rl4lms_like.policies.masked:MaskableSeq2SeqLMActorCriticPolicy",
            "encoder-decoder language model restricted to the tokens that a mask model allows; for nlpo",
            arguments=_MASKABLE_ARGUMENTS,
        ),
    },
)
"""Policies by id (`alg.policy.id`)."""


def is_causal(id: str) -> bool:
    """Return whether a policy is for decoder-only models, by its id: those of encoder-decoder models say so."""
    return "seq2seq" not in id


__all__ = ["POLICIES", "is_causal"]
