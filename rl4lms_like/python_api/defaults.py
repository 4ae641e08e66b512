"""Settings that a run in Python has if they are not given, written out in its config.

A file must say its sizes, and its defaults are RL4LMs'. In Python, a run has to learn something with nothing but a
model, prompts and a reward: responses end at the end-of-text token, all tokens can be sampled, sizes count responses,
and without a critic there is no KL penalty.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from rl4lms_like.algorithms import ALGORITHMS, OBJECTIVES
from rl4lms_like.algorithms.arguments import OnPolicyArguments
from rl4lms_like.config.binding import RunKind
from rl4lms_like.data_pools import SAMPLERS
from rl4lms_like.envs.arguments import EnvArguments
from rl4lms_like.python_api.setting_names import GENERATION, is_set, put_default
from rl4lms_like.system.errors import RL4LMsLikeError
from rl4lms_like.system.schema import at, signature_of

RESPONSE_LENGTH = 64
"""Tokens of a response."""

PROMPT_LENGTH = 512
"""Tokens of a prompt, if the model has as many positions."""

N_ITERS = 50
N_EVALUATIONS = 5
"""Evaluations on `val` during a run."""

EVAL_BATCH_SIZE = 64
"""Prompts of an evaluation that are generated together."""

N_TOGETHER = 64
"""Responses of a rollout that are generated together, unless a group is larger."""

N_EPISODES = 64
"""Responses of a rollout."""

N_GROUPS = 8
"""Prompts of a rollout with groups of responses, at least."""

N_MINIBATCHES = 4
"""Minibatches of a rollout, with a critic."""

KL_COEFF = 0.1
"""Coefficient of the KL penalty, with a critic."""


def add_defaults(
    blocks: dict[str, Any], kind: RunKind, algorithm: str, model: str, tokenizer: str, network: PretrainedConfig | None
) -> None:
    """Set what the blocks of a run leave out.

    Args:
        blocks: blocks of a config, with what was given.
        kind: kind of the run.
        algorithm: id of the algorithm or objective.
        model: name or folder of the model.
        tokenizer: name or folder of the tokenizer.
        network: config of the model; None if it could not be loaded, which is reported elsewhere.
    """
    put_default(blocks, "tokenizer.model_name", tokenizer)
    put_default(blocks, "train_evaluation.eval_batch_size", EVAL_BATCH_SIZE)
    is_seq2seq = network is not None and bool(network.is_encoder_decoder)
    if kind == "on_policy":
        _add_rl_defaults(blocks, algorithm, model, network, is_seq2seq=is_seq2seq)
        return

    put_default(blocks, "alg.id", algorithm)
    put_default(blocks, "alg.model_name", model)
    model_type = "seq2seq" if is_seq2seq else "causal"
    if network is not None and _reads_images(network, blocks):
        model_type = "vision"
    put_default(blocks, "alg.model_type", model_type)
    # A reward model writes no text.
    signature: Any = OBJECTIVES.signature(algorithm) if kind == "preference" else None
    if signature is None or signature.has_language_model:
        _add_generation(blocks, "alg.generation_kwargs")


def _add_generation(blocks: dict[str, Any], path: str, *, with_length: bool = True) -> None:
    """Sample from the whole distribution of the model, which transformers limits to 50 tokens.

    Turns of a dialogue have a length of their own.
    """
    for name, value in {"do_sample": True, "top_k": 0}.items():
        put_default(blocks, f"{path}.{name}", value)
    if with_length:
        put_default(blocks, f"{path}.max_new_tokens", RESPONSE_LENGTH)


def _dialogue_length(network: PretrainedConfig | None) -> int:
    """Return the length of episodes of several turns: that of `env.args`, or half of the positions of the model."""
    positions = None if network is None else getattr(network.get_text_config(), "max_position_embeddings", None)
    longest = EnvArguments.max_episode_length
    return min(longest, positions // 2) if isinstance(positions, int) else longest


def _reads_images(network: PretrainedConfig, blocks: Mapping[str, Any]) -> bool:
    """Return whether a model gets prompts with images: if there are any, or if it is no model of texts alone."""
    if getattr(network, "vision_config", None) is None or network.is_encoder_decoder:
        return False
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    has_images = at(blocks, "datapool.args.image_column") is not None or at(blocks, "datapool.id") == "shapes"
    return has_images or network.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def _add_rl_defaults(
    blocks: dict[str, Any], algorithm: str, model: str, network: PretrainedConfig | None, *, is_seq2seq: bool
) -> None:
    arguments = _arguments_of(algorithm)
    put_default(blocks, "alg.id", algorithm)
    _add_sizes(blocks, arguments)

    # Without a critic, the reference is one more model in memory for a penalty that most recipes leave out. Algorithms
    # that cannot learn without a reference have their usual coefficient.
    coeff = KL_COEFF if arguments.needs_critic else 0.0
    if arguments.needs_reference or arguments.needs_teacher:
        coeff = arguments.kl_coeff
    put_default(blocks, "alg.kl_div.coeff", coeff)

    is_dialogue = at(blocks, "env.dialogue") is not None
    family = "seq2seq_lm" if is_seq2seq else "causal_lm"
    prefix = "maskable_" if algorithm == "nlpo" else ""
    if network is not None and _reads_images(network, blocks):
        family = "vision_lm"
        prefix = ""  # there is none with masks, and the rules of `nlpo` say so
    put_default(blocks, "alg.policy.id", f"{prefix}{family}_actor_critic_policy")
    put_default(blocks, "alg.policy.args.model_name", model)
    _add_generation(blocks, GENERATION, with_length=not is_dialogue)

    # Lengths. A seq2seq model begins its response with a token of its own. An episode of several turns gets at most
    # half of the model's positions.
    response = at(blocks, f"{GENERATION}.max_new_tokens") or RESPONSE_LENGTH
    if is_dialogue:
        response = at(blocks, "env.args.max_episode_length") or _dialogue_length(network)
    put_default(blocks, "env.args.terminate_on_eos", True)
    put_default(blocks, "env.args.max_episode_length", response)
    put_default(blocks, "env.args.max_prompt_length", _prompt_length(network, response))
    if is_seq2seq and network is not None:
        put_default(blocks, "env.args.context_start_token", network.decoder_start_token_id)

    # Each prompt is used equally often, unless prompts have weights.
    if "shuffled" in SAMPLERS and not is_set(blocks, "env.args.priority_scale"):
        put_default(blocks, "datapool.sampler", {"id": "shuffled"})

    put_default(blocks, "train_evaluation.n_iters", N_ITERS)
    n_iters = at(blocks, "train_evaluation.n_iters")
    eval_every = n_iters // N_EVALUATIONS if isinstance(n_iters, int) else N_ITERS
    put_default(blocks, "train_evaluation.eval_every", max(eval_every, 1))


def _arguments_of(algorithm: str) -> Any:
    """Return the class of an algorithm's arguments, or the base class of all of them."""
    try:
        target: Any = ALGORITHMS.signature(algorithm)
    except RL4LMsLikeError:  # reported where the config is checked
        return OnPolicyArguments
    target = getattr(target, "arguments_class", target)
    return target if hasattr(target, "needs_critic") else OnPolicyArguments


def _add_sizes(blocks: dict[str, Any], arguments: Any) -> None:
    """Count the sizes of rollouts and minibatches in responses, unless they are given in tokens."""
    known = {argument.name for argument in signature_of(arguments).arguments}
    group_size = at(blocks, "alg.args.group_size") or getattr(arguments, "group_size", 1)
    if not isinstance(group_size, int):
        group_size = 1
    counts_tokens = is_set(blocks, "alg.args.n_steps")
    counts_tokens = counts_tokens or (
        is_set(blocks, "alg.args.batch_size") and not is_set(blocks, "alg.args.n_episodes")
    )
    if counts_tokens or "n_episodes" not in known:
        put_default(blocks, "env.n_envs", max(N_TOGETHER - N_TOGETHER % group_size, group_size))
        return

    # Whole rollouts of the responses that are generated together, if their number is given.
    size = max(N_EPISODES - N_EPISODES % group_size, N_GROUPS * group_size)
    n_envs = at(blocks, "env.n_envs")
    if isinstance(n_envs, int) and n_envs > 0:
        unit = math.lcm(n_envs, group_size)
        size = math.ceil(size / unit) * unit
    put_default(blocks, "alg.args.n_episodes", size)

    n_episodes = at(blocks, "alg.args.n_episodes")
    if not isinstance(n_episodes, int) or n_episodes < 1:
        return

    put_default(blocks, "env.n_envs", _n_together(n_episodes, group_size))
    if "minibatch_episodes" in known and not is_set(blocks, "alg.args.batch_size"):
        can_be_divided = n_episodes % (N_MINIBATCHES * group_size) == 0
        n_minibatches = N_MINIBATCHES if arguments.needs_critic and can_be_divided else 1
        minibatch = n_episodes // n_minibatches
        put_default(blocks, "alg.args.minibatch_episodes", max(minibatch - minibatch % group_size, group_size))


def _n_together(n_episodes: int, group_size: int) -> int:
    """Return the largest divisor of a rollout that is at most `N_TOGETHER` and has whole groups.

    If groups do not fit into a rollout, it is the size of a group, which the check of the config reports.
    """
    for n_envs in range(min(max(N_TOGETHER, group_size), n_episodes), 0, -1):
        if n_episodes % n_envs == 0 and n_envs % group_size == 0:
            return n_envs
    return group_size


def _prompt_length(network: PretrainedConfig | None, response: Any) -> int:
    """Return the length of prompts that leaves room for responses among the positions of the model."""
    positions = None
    if network is not None and not network.is_encoder_decoder:
        positions = getattr(network.get_text_config(), "max_position_embeddings", None)
    if not isinstance(positions, int) or not isinstance(response, int):
        return PROMPT_LENGTH
    return max(min(PROMPT_LENGTH, positions - response), 1)
