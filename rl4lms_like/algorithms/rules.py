"""Rules among an algorithm, its policy and its KL penalty: the three things that its constructor receives.

A config and a constructor that is called in Python run the same rules (`broken_rules`), so that both give the same
messages. Paths are relative to a config's `alg` block: `args.gamma`, `policy.args.critic`, `kl_div.coeff`. This module
does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rl4lms_like.algorithms.arguments import CorrectedArguments, OnPolicyArguments, TRPOArguments
from rl4lms_like.algorithms.critic_free_arguments import CriticFreeArguments
from rl4lms_like.policies.arguments import MaskablePolicyArguments, PolicyArguments
from rl4lms_like.rollouts.kl import KLConfig
from rl4lms_like.system.errors import ConfigIssue
from rl4lms_like.system.schema import Rule

Issues = Iterator[ConfigIssue]

OF_CRITICS = (
    "critic_learning_rate",
    "bootstrap_truncated",
    "vf_coef",
    "value_gae_lambda",
    "critic_pretrain",
    "critic_only_iterations",
    "critic_epochs",
)
"""Arguments without effect if the algorithm has no critic."""

_PROBABILITIES = "needs the probabilities of single samples: set do_sample: true and no beams"


@dataclass(frozen=True)
class Algorithm:
    """An algorithm, for rules.

    Args:
        id: its name in messages.
        arguments: its arguments; neutral ones for an algorithm of another library.
        values: all of its arguments by name, defaults included, also of an algorithm of another library.
    """

    id: str
    arguments: OnPolicyArguments
    values: Mapping[str, Any]


# --- the critic -----------------------------------------------------------------------------------------------------


def critic_where_values_are_learned(alg: Algorithm, policy: PolicyArguments) -> Issues:
    """Check that the policy has a critic if and only if the algorithm learns values."""
    if alg.arguments.needs_critic:
        if policy.critic == "none":
            message = f"{alg.id} learns values: choose separate or shared, or an algorithm without a critic"
            yield ConfigIssue("policy.args.critic", message)
        if policy.critic == "shared" and alg.arguments.critic_pretrain is not None:
            message = "needs critic: separate; a shared critic has no weights of its own to save. Set it to null"
            yield ConfigIssue("args.critic_pretrain", message)
        return

    # The default `separate` is no setting: it becomes `none`.
    message = f"{alg.id} learns no values (no critic); remove it"
    if "critic" in policy.given and policy.critic != "none":
        yield ConfigIssue("policy.args.critic", message)
    for key in ("critic_model", "critic_device", "critic_frozen"):
        if getattr(policy, key):
            yield ConfigIssue(f"policy.args.{key}", message)


def arguments_of_critics(alg: Algorithm) -> Issues:
    """Find arguments for a critic that are set for an algorithm without one."""
    if alg.arguments.needs_critic:
        return
    for key in OF_CRITICS:
        if key in alg.arguments.given and getattr(alg.arguments, key):
            yield ConfigIssue(f"args.{key}", f"{alg.id} learns no values (no critic); remove it")


# --- sampling -------------------------------------------------------------------------------------------------------


def probabilities_of_samples(alg: Algorithm, policy: PolicyArguments) -> Issues:
    """Check that importance weights can be computed, and that rollouts of older weights have them."""
    arguments = alg.arguments
    if arguments.first_token_temperature is not None and policy.is_greedy:
        yield ConfigIssue("args.first_token_temperature", _PROBABILITIES)
    if not isinstance(arguments, CorrectedArguments):
        return

    # Rollouts that are generated ahead are corrected in any case, by default with `tis`.
    corrects = policy.is_ahead or arguments.importance_correction != "none"
    if not corrects and arguments.correction_range is not None:
        yield ConfigIssue("args.correction_range", "has no effect without importance_correction")
    if corrects and policy.is_greedy:
        yield ConfigIssue("args.importance_correction", _PROBABILITIES)
    if policy.is_ahead and "importance_correction" in arguments.given and arguments.importance_correction == "none":
        message = "none leaves rollouts of older weights (engine.ahead) uncorrected; remove it for tis"
        yield ConfigIssue("args.importance_correction", message)


def can_have_ratios_to_sampling(policy: PolicyArguments) -> bool:
    """Return whether the log-probs of a sampling in another precision can be those that the ratios of a loss are to.

    They take the place of the policy's pass over the rollout, whose states a shared critic reads, and in which masks of
    allowed tokens are chosen.
    """
    records = policy.used_speedups.sampler_log_probs and policy.samples_policy
    return records and policy.critic != "shared" and not isinstance(policy, MaskablePolicyArguments)


def precision_of_sampling(alg: Algorithm, policy: PolicyArguments) -> Issues:
    """Check that the loss corrects for rollouts in another precision, by its ratios or weights; pairs need neither."""
    if not policy.generates_in_other_dtype or alg.arguments.is_pairwise:
        return
    message = f"{policy.generation_dtype} samples from another distribution than dtype: {policy.dtype}"
    if not isinstance(alg.arguments, CorrectedArguments):
        yield ConfigIssue("policy.args.generation_dtype", f"{message}, for which {alg.id} cannot correct; remove it")
    elif alg.arguments.importance_correction == "none":
        has_ratios = alg.arguments.corrects_by_ratios and alg.arguments.first_token_temperature is None
        if has_ratios and can_have_ratios_to_sampling(policy):
            return
        message += "; set alg.args.importance_correction: tis, or remove it"
        yield ConfigIssue("policy.args.generation_dtype", message)


# --- the networks ---------------------------------------------------------------------------------------------------


def reference_or_teacher(alg: Algorithm, policy: PolicyArguments) -> Issues:
    """Check that an algorithm has a teacher if and only if it learns from one, and then no other reference."""
    # A reference that follows the policy needs weights of its own, and takes steps that bfloat16 would lose.
    arguments = alg.arguments
    if arguments.reference_update_iterations is not None and policy.reference_dtype == "bfloat16":
        message = "cannot be used with reference_dtype: bfloat16, in which small changes are lost; remove one of them"
        yield ConfigIssue("args.reference_update_iterations", message)
    if arguments.reference_update_iterations is not None and policy.peft is not None:
        message = "cannot be used with peft, whose reference is the base model of the adapters"
        yield ConfigIssue("args.reference_update_iterations", message)

    if not alg.arguments.needs_teacher:
        if policy.teacher_model is not None:
            message = f"{alg.id} has no teacher: use opd, or reference_model for the model of the KL penalty"
            yield ConfigIssue("policy.args.teacher_model", message)
        return

    if policy.teacher_model is None:
        yield ConfigIssue("policy.args.teacher_model", f"{alg.id} learns from a teacher: set its hub id or folder")
    elif policy.teacher_model == policy.model_name:
        message = "is the model that is trained, from which it has nothing to learn"
        yield ConfigIssue("policy.args.teacher_model", message)
    if policy.reference_model is not None:
        message = f"{alg.id} measures the KL to teacher_model; remove it"
        yield ConfigIssue("policy.args.reference_model", message)


def second_derivatives(alg: Algorithm, policy: PolicyArguments) -> Issues:
    """Check that the networks of `trpo` can be differentiated twice, for products with the Fisher matrix."""
    if not isinstance(alg.arguments, TRPOArguments):
        return
    attention = policy.attn_implementation
    if attention not in (None, "eager"):
        message = f"{attention!r} has no second derivatives, which trpo needs; leave it out, or use eager"
        yield ConfigIssue("policy.args.attn_implementation", message)
    if policy.compile:
        message = "compiled networks have no second derivatives, which trpo needs; leave it out"
        yield ConfigIssue("policy.args.compile", message)
    if policy.activation_offload:
        message = "is not supported by trpo, whose passes are differentiated twice; leave it out"
        yield ConfigIssue("policy.args.activation_offload", message)
    if policy.dropout:
        message = "with dropout, trpo's trust region would measure noise; leave it out"
        yield ConfigIssue("policy.args.dropout", message)


# --- the KL penalty -------------------------------------------------------------------------------------------------


def placement_of_kl(alg: Algorithm, kl_div: KLConfig) -> Issues:
    """Check that the loss of the algorithm can contain the penalty: only that of critic-free ones does."""
    if kl_div.placement in ("advantage", "loss") and not alg.arguments.kl_in_loss:
        message = f"the loss of {alg.id} has no KL penalty: use reward, or a critic-free algorithm such as grpo"
        yield ConfigIssue("kl_div.placement", message)


def kl_that_is_needed(alg: Algorithm, kl_div: KLConfig) -> Issues:
    """Check that an algorithm which learns from the KL alone, or updates its reference, has a KL."""
    if kl_div.coeff != 0:
        return
    arguments = alg.arguments
    learns_from_kl_alone = isinstance(arguments, CriticFreeArguments) and not arguments.task_reward
    if arguments.needs_reference or learns_from_kl_alone:
        message = f"0 leaves {alg.id} without the KL that it needs: use {arguments.kl_coeff:g}"
        yield ConfigIssue("kl_div.coeff", message)
    if arguments.reference_update_iterations is not None:
        message = "0 loads no reference model, which reference_update_iterations updates"
        yield ConfigIssue("kl_div.coeff", message)


def kl_of_pairs(alg: Algorithm, kl_div: KLConfig) -> Issues:
    """Find settings of the KL that have no effect on a loss of pairs, which has the log-ratios itself."""
    if not alg.arguments.is_pairwise:
        return
    message = f"has no effect: the loss of {alg.id} has the log-ratios to the reference themselves; remove it"
    # The default of the estimator depends on the placement, which is then the only setting.
    if kl_div.placement not in (None, "loss"):
        yield ConfigIssue("kl_div.placement", message.replace("remove it", "use loss"))
    elif kl_div.estimator not in (None, "k3"):
        yield ConfigIssue("kl_div.estimator", message)
    if kl_div.norm_reward:
        yield ConfigIssue("kl_div.norm_reward", message)


def kl_beside_rewards(alg: Algorithm, kl_div: KLConfig) -> Issues:
    """Find changes of the rewards where these are only logged, or have to stay 0 and 1."""
    arguments = alg.arguments
    if not isinstance(arguments, CriticFreeArguments):
        return
    if not arguments.task_reward:
        message = "has no effect with alg.args.task_reward: false, where rewards are only logged"
        if kl_div.placement == "reward":
            yield ConfigIssue("kl_div.placement", f"reward {message}; use advantage or loss")
        if kl_div.norm_reward:
            yield ConfigIssue("kl_div.norm_reward", message)

    # `scale: mean` divides by a success rate.
    if arguments.scale == "mean":
        message = "makes rewards that are not 0 or 1, which scale: mean requires"
        if kl_div.placement == "reward" and kl_div.coeff:
            yield ConfigIssue("kl_div.placement", f"reward {message}; use loss")
        if kl_div.norm_reward:
            yield ConfigIssue("kl_div.norm_reward", message)


RULES: tuple[Rule, ...] = (
    critic_where_values_are_learned,
    arguments_of_critics,
    probabilities_of_samples,
    precision_of_sampling,
    reference_or_teacher,
    second_derivatives,
    placement_of_kl,
    kl_that_is_needed,
    kl_of_pairs,
    kl_beside_rewards,
)
"""All rules of this module."""
