"""Estimate the peak memory of a run, by part, before any weight is loaded; advise when memory runs out.

    always         weights of policy, critic, reference and mask model, their average; optimizer state; masks
    update         + activations of one forward pass + logits + the gradients that exist at the same time, of
                     responses, or of the texts of `alg.ptx`
    rollout        + gradients of the last update + KV cache + logits of one scoring pass
                     - the optimizer state, if `offload: moments` moves it from a GPU to main memory

The networks are built from their configs with fake tensors, which have shapes but no memory. A forward pass records the
tensors that it would keep for the backward pass, so the estimate needs no table of model families. In bytes:

    weights        4 per parameter; the critic is the policy without its output layer, the reference a copy; with
                   adapters (`peft`) they share one base, unless it is split, and only the critic's adapters are added
    gradients      4 per trained parameter; they grow while activations are freed, so in a single pass only those of
                   the output layer coexist with all activations; with micro-batches or checkpointing, all of them
    activations    tensors kept by the forward passes of policy and critic, for a micro-batch with whole prompts; on a
                   GPU with `activation_offload` those of one layer at a time
    logits         2 buffers of float32 [tokens, vocabulary], each at most `logits_budget_mb`
    KV cache       2 x layers x kv heads x head width x tokens x 4, for the prompts generated together; none with an
                   external engine
    mask model     as many weights as the policy, and a separate KV cache (maskable policies)
    quantized      of linear layers with `quantization`: the stored bytes of each weight and its scales, in every part
                   above; and 4 for each weight of the largest one, which is dequantized for a product
    loading        with `quantization`: 4 per parameter of a model, which is read in float32 and then quantized, and the
                   quantized weights of those before it
    merged weights 4 per weight of a linear layer with adapters, of policy and critic (`speedups.merged_adapters`)
    bfloat16       2 for each weight of a linear layer: of the reference with `reference_dtype`, and in the rollout of
                   the policy, output layer included, with `generation_dtype`
    packed         in the rollout, 4 for each weight that `speedups.packed_weights` copies
    average        4 per trained parameter, with `bias_power` 12 (`train_evaluation.average`)
    TRPO           activations of two graphs at once, 4 buffers of logits of half the budget each, 7 vectors as long as
                   the trained parameters; no optimizer state for the policy
    masks          1 bit for each token of a rollout and each token of the vocabulary, once in parts and once joined
    process        current memory of Python and its libraries (main memory only)
    split weights  with `distributed.strategy: fsdp`, weights, gradients and optimizer state divided by the number of
                   processes, those of each network apart, since the parts of a base are not shared
                             + the policy's whole weights in the rollout (they are gathered to generate)
                             + in the update whole weights and gradients of three blocks and of all that is in no block,
                               with adapters only the weights; with `reshard_after_forward: false` whole weights of all
                               blocks of policy and critic

A supervised run (`estimate_supervised_memory`) has one network, which is trained with its dropout. Its split weights
are gathered if evaluations generate. If the logits of a whole batch fit into `alg.logits_budget_mb`, they are four
float32 buffers [tokens of prompts and references, vocabulary]; otherwise two buffers [learned tokens, vocabulary], each
at most that budget. With `packing`, activations and whole logits are those of the packed rows of the longest examples
that were encoded; in a run of RL, responses of full length have nothing to pack.

Not counted: the data set, reward and metric models. The verdict has two numbers: the peak for responses of full length,
and the larger one of this and of the peak for the shortest responses, with the largest measured excess. A rollout of
short responses has more episodes, each with its prompt. docs/configuration.md compares estimates with measurements.
"""

from __future__ import annotations

import math
import os
import resource
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM
from transformers.initialization import no_init_weights

from rl4lms_like.config.added_tokens import with_created_models
from rl4lms_like.config.binding import with_defaults
from rl4lms_like.config.load import parse_config
from rl4lms_like.config.run_config import AnyConfig, RunConfig, SupervisedConfig
from rl4lms_like.config.yaml_file import apply_overrides
from rl4lms_like.core.token_masks import packed_size
from rl4lms_like.engines.arguments import DEFAULT_LENGTH
from rl4lms_like.estimates.budget import BatchPlan, plan_batches
from rl4lms_like.policies import quantized_layers
from rl4lms_like.policies.arguments import ADAMW, ADAMW_8BIT, OWN_ENGINE, PolicyArguments, VisionPolicyArguments
from rl4lms_like.policies.faster_layers import fuse_activations
from rl4lms_like.policies.generating_weights import MIN_STEPS, can_pack, n_packed_weights
from rl4lms_like.policies.loading import whole_checkpoint
from rl4lms_like.policies.lora import add_lora
from rl4lms_like.policies.low_precision import n_linear_weights
from rl4lms_like.policies.merged_adapters import mergeable_layers
from rl4lms_like.policies.optimizers import bytes_of_moments
from rl4lms_like.policies.quantized_layers import LAYERS, QuantizedLinear
from rl4lms_like.policies.sharding import blocks_of
from rl4lms_like.policies.speedups import no_speedups
from rl4lms_like.policies.teacher_forcing import PromptCache
from rl4lms_like.policies.vision_parts import freeze_vision, within_scope
from rl4lms_like.system.disk import with_home
from rl4lms_like.system.errors import ConfigError, ModelError, OutOfMemoryError
from rl4lms_like.system.ranks import n_processes
from rl4lms_like.system.schema import at
from rl4lms_like.system.wording import shown

FLOAT = 4
HALF = 2
UNUSED = 0.1
"""Largest part of the estimated tensors that a run does not need at its peak."""

FREED = 0.3
"""Freed memory that an allocator cannot use for the next tensors, for each byte of tensors."""

FREED_BLOCKS = 128 * 2**20
"""The same for small runs, bytes: glibc keeps freed blocks of up to 32 MiB, here four of the largest."""

FREED_BY_ADAPTERS = {"float32": 0.8, "bfloat16": 0.5}
"""Freed memory in addition on a CPU, for each byte of activations of a model with adapters."""

STARTED = 30 * 2**20
"""Bytes of a process that exist after its first passes only: code of kernels, threads (measured with a tiny model)."""

N_PROCESSES = (2, 4, 8)
"""Numbers of processes for which `check` estimates the memory of each, if they split the weights."""

TRAINER_BYTES = 80 * 2**20
"""Main memory of the libraries that transformers' Trainer needs, which are not loaded by `check`."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Estimated memory in bytes, by part in order of allocation, for responses of full length."""

    parts: dict[str, int]
    other_gradients: int  # the gradients that exist at the same time as the activations
    device: str  # `cpu` or `cuda`
    available: int  # on that device
    gathered: int = 0  # split weights and gradients that are whole in the update
    freed_by_adapters: int = 0  # memory that the allocator cannot use again
    offloaded: int = 0  # moments that are not on the device in the rollout
    loading: int = 0  # peak before the first rollout; 0 if the run needs more in any case
    n_parameters: int = 0  # of the policy's model
    parameters: str = ""  # numbers of weights that are trained, of all weights, by network
    shortest: MemoryEstimate | None = None  # the same for the shortest responses

    @property
    def update(self) -> int:
        """Peak of the update, bytes."""
        # At the start of the backward pass all activations exist, at its end all gradients.
        passing = self.parts["activations"] + self.parts["logits"] + self.other_gradients
        return self._always + self.gathered + max(passing, self.parts["gradients"])

    @property
    def rollout(self) -> int:
        """Peak of the rollout, bytes."""
        # Generation and scoring follow each other. The gradients are those of the last update.
        copies = self.parts.get("gathered policy", 0) + self.parts.get("generating weights", 0)
        generation = self.parts["KV cache"] + copies
        always = self._always - self.offloaded
        return always + self.parts["gradients"] + max(generation, self.parts["logits"])

    @property
    def _always(self) -> int:
        passing = ("activations", "logits", "gradients", "KV cache", "gathered policy", "generating weights")
        return sum(size for name, size in self.parts.items() if name not in passing)

    @property
    def peak(self) -> int:
        """Peak of the run: the largest of `update`, `rollout` and `loading`, bytes."""
        return max(self.update, self.rollout, self.loading)

    @property
    def tensors(self) -> int:
        """Size of all tensors at the peak, bytes."""
        return self.peak - self.parts.get("process", 0)

    @property
    def lower(self) -> int:
        """Smallest peak of a run with responses of full length, bytes."""
        return self.peak - int(UNUSED * self.tensors)

    @property
    def upper(self) -> int:
        """Largest peak of the run, whether its responses are of full length or the shortest ones, bytes."""
        freed = max(int(FREED * self.tensors), min(self.tensors, FREED_BLOCKS)) + self.freed_by_adapters
        largest = self.peak + freed
        return largest if self.shortest is None else max(largest, self.shortest.upper)

    @property
    def verdict(self) -> str:
        """Message that says if the run fits on the device."""
        kind = "memory" if self.device == "cpu" else "GPU memory"
        size = f"{gibibytes(self.lower)} to {gibibytes(self.upper)} of {gibibytes(self.available)} {kind}"
        if self.upper <= self.available:
            return f"fits: {size}"

        # Between the two numbers a run may fit or not; it depends on the lengths of its responses too.
        verdict = "tight" if self.lower <= self.available else "does not fit"
        return f"{verdict}: {size}"


@dataclass(frozen=True)
class SupervisedMemoryEstimate(MemoryEstimate):
    """Estimated memory of a supervised run; `rollout` is the peak of its evaluations."""

    @property
    def rollout(self) -> int:
        """Peak of the evaluations, bytes: of generation. The gradients of the last step are freed by then."""
        return self._always + self.parts["KV cache"] + self.parts.get("gathered policy", 0)


def estimate_memory(config: RunConfig, n_processes: int = 1, *, gpu_bytes: int | None = None) -> MemoryEstimate:
    """Estimate the peak memory of a run from the model's config; reads local folders and the cache, not the network.

    With several processes this is the memory of each. Networks on devices of their own are not counted.

    Args:
        config: of the run.
        n_processes: number of processes.
        gpu_bytes: memory of the GPU of each process, which this machine need not have; default: the device of this
            machine on which the run would be.

    Raises:
        ModelError: the model's config is neither in a folder nor in the cache, or cannot be built.
    """
    config = with_created_models(config, local_files_only=True)
    blocks = with_defaults(config.to_dict())
    policy_args = blocks["alg"]["policy"]["args"]
    args = blocks["alg"]["args"]
    arguments = PolicyArguments.known_in(policy_args)
    device, available = _device(config) if gpu_bytes is None else ("cuda", gpu_bytes)
    n_parts = n_processes if config.distributed.strategy == "fsdp" else 1
    bytes_per_weight = FLOAT / n_parts  # of trained weights, in each process
    is_split = n_parts > 1
    generates = arguments.engine["id"] == OWN_ENGINE

    # The networks. Those on devices of their own need none of this device's memory.
    if config.alg.policy.reads_pictures:
        arguments = VisionPolicyArguments.known_in(policy_args)
    policy = NetworkShapes(
        arguments.model_name,
        arguments,
        causal=config.is_causal,
        offloads_activations=device == "cuda" and arguments.activation_offload,
    )
    critic = _critic(policy, is_split=is_split) if arguments.critic_device is None else _Critic(0, 0, None)
    has_reference = config.alg.kl_div.coeff > 0 and arguments.reference_device is None
    reference = _reference_network(policy) if has_reference else None
    reference_bytes = _reference(policy, reference, is_split=is_split) if has_reference else 0
    if has_reference and arguments.reference_dtype == "bfloat16":
        reference_bytes = _reference_in_bfloat16(policy, reference_bytes)
    role = "reference" if arguments.teacher_model is None else "teacher"

    # Of maskable policies. `topk` masks need no mask model, only the masks themselves.
    n_mask_models = 1 if policy_args.get("mask_type") in ("learned_top_k", "learned_top_p") else 0
    mask_bytes = packed_size(int(policy.config.vocab_size)) if "mask_type" in policy_args else 0

    # AdamW has two moments for each trained weight, RMSProp one. Those of a critic are like those of the policy. Mask
    # models and gathered weights are not split.
    moments_per_weight = FLOAT / n_parts
    if not args.get("use_rms_prop"):
        moments_per_weight = policy.moments(n_parts) / max(policy.trained, 1)
    n_trained = policy.trained + critic.n_trained
    parameters = f"{policy.trained:,} of {policy.parameters:,} of the policy"
    if critic.n_trained:
        parameters += f", {critic.n_trained:,} of the critic"

    # In the order in which their checkpoints are read. A critic of the policy's checkpoint is a copy.
    others = [network for network in (critic.network, reference) if network not in (None, policy)]
    loaded = [policy, *others]
    gathered = 0
    if is_split:
        gathered = _gathered(
            policy,
            critic.network,
            has_reference=reference_bytes > 0,
            reshards=config.distributed.reshard_after_forward,
        )
    always = {
        "process": _process() + STARTED if device == "cpu" else 0,
        "policy weights": policy.size // n_parts,
        "critic weights": critic.size // n_parts,
        f"{role} weights": reference_bytes // n_parts,
        "dequantized weight": policy.largest_dequantized,
        "mask model weights": FLOAT * n_mask_models * policy.parameters,
        "averaged weights": FLOAT * _n_averages(config) * policy.trained,
        "merged weights": 0 if is_split else FLOAT * _n_merged(policy, critic.network),
    }

    # On a CPU, models are quantized where they are used.
    loading = _loading(loaded, always["process"]) if device == "cpu" else 0

    def of_responses(*, shortest: bool) -> MemoryEstimate:
        """Return the estimate for responses of one length."""
        # Without a limit for prompts, they may fill what the response leaves of the model's positions.
        plan = plan_batches(config, shortest=shortest)
        if plan.prompt_tokens is None:
            prompt_tokens = max(policy.positions - plan.response_tokens, 1)
            plan = plan_batches(config, shortest=shortest, prompt_tokens=prompt_tokens)
        plan = plan.of_process(n_processes)

        networks = [policy] if critic.network is None else [policy, critic.network]
        sizes = {
            **always,
            "masks": 2 * plan.tokens_per_rollout * mask_bytes,
            "optimizer state": int(moments_per_weight * n_trained),
            "gradients": int(bytes_per_weight * n_trained),
            "activations": sum(network.activations(plan) for network in networks),
            "logits": policy.logits(plan),
            "KV cache": (1 + n_mask_models) * policy.cache(plan) if generates else 0,
            "gathered policy": policy.size if is_split and generates else 0,
        }
        if arguments.generates_in_other_dtype and arguments.generation_dtype == "bfloat16":
            sizes["generating weights"] = HALF * policy.linear_with_head
        elif device == "cpu" and not is_split and _packs_weights(arguments, plan):
            sizes["generating weights"] = FLOAT * policy.packed
        other_gradients = _gradients_with_activations(policy, plan, sizes["gradients"])

        if not shortest:
            texts = _longest_texts(config, policy, plan, n_processes)
            other_gradients = _with_texts(sizes, other_gradients, policy, texts)

        # TRPO: no optimizer for the policy, but 7 vectors as long as its trained weights: gradient, step, initial
        # weights, and four of the conjugate gradient.
        if "cg_max_steps" in args:
            sizes |= _of_fisher_products(policy, plan)
            sizes["optimizer state"] = int(moments_per_weight * critic.n_trained)
            other_gradients = 7 * FLOAT * policy.trained

        # A layer with a separate adapter frees tensors as large as the one that it keeps, and glibc does not use a
        # freed aligned block again for an aligned tensor of the same size.
        freed_by_adapters = 0
        has_separate_adapters = arguments.peft is not None and (is_split or not arguments.merges_adapters)
        if device == "cpu" and has_separate_adapters:
            freed_by_adapters = int(FREED_BY_ADAPTERS[arguments.dtype] * sizes["activations"])
        return MemoryEstimate(
            sizes,
            other_gradients,
            device,
            available,
            gathered=gathered,
            freed_by_adapters=freed_by_adapters,
            offloaded=sizes["optimizer state"] if device == "cuda" and arguments.offload == "moments" else 0,
            loading=loading,
            n_parameters=policy.parameters,
            parameters=parameters,
        )

    return replace(of_responses(shortest=False), shortest=of_responses(shortest=True))


def estimate_supervised_memory(
    config: SupervisedConfig,
    *,
    prompt_tokens: int,
    response_tokens: int,
    packed: tuple[int, int] | None = None,
    n_processes: int = 1,
    gpu_bytes: int | None = None,
) -> SupervisedMemoryEstimate:
    """Estimate the peak memory of a supervised run, for examples of one length; with several processes, that of each.

    Args:
        config: of the run.
        prompt_tokens: of the longest prompt.
        response_tokens: of the longest reference, with its end.
        packed: numbers of rows and of columns of the batch of the longest examples with `packing`, of one process;
            None: padded rows.
        n_processes: number of processes, which divide each batch.
        gpu_bytes: see `estimate_memory`.

    Raises:
        ModelError: the model's config is neither in a folder nor in the cache, or cannot be built.
    """
    config = with_created_models(config, local_files_only=True)
    training = config.alg.training_args
    causal = config.is_causal
    device, available = _device(config) if gpu_bytes is None else ("cuda", gpu_bytes)

    # The arguments of a policy with the same model.
    known: dict[str, Any] = {
        "model_name": config.alg.model_name,
        "peft": config.alg.peft,
        "attn_implementation": config.alg.attn_implementation,
        "quantization": config.alg.quantization,
        "train_vision": config.alg.train_vision,
        "gradient_checkpointing": bool(training.get("gradient_checkpointing")),
        "dtype": "bfloat16" if training.get("bf16") else "float32",
        "optimizer": {"id": ADAMW_8BIT if training.get("optim") == "adamw_torch_8bit" else ADAMW},
        "speedups": no_speedups(),  # these runs have none
    }
    arguments = (VisionPolicyArguments if config.reads_pictures else PolicyArguments).known_in(known)
    model = NetworkShapes(
        config.alg.model_name,
        arguments,
        causal=causal,
        has_dropout=True,
        offloads_activations=device == "cuda" and config.alg.activation_offload,
    )

    # Without groups, a pass over `batch_size` examples. An evaluation generates `eval_batch_size` texts at once.
    batch_size = math.ceil(int(training.get("per_device_train_batch_size") or 8) / n_processes)
    n_rows, width = packed or (batch_size, prompt_tokens + response_tokens)
    plan = BatchPlan(
        is_in_episodes=True,
        tokens_per_rollout=batch_size * response_tokens,
        response_tokens=response_tokens,
        actions=response_tokens,
        prompt_tokens=width - response_tokens,  # so that a packed row has its width
        prompts_per_batch=math.ceil(config.train_evaluation.eval_batch_size / n_processes),
        group_size=1,
        generation_batches=1,
        episodes=n_rows,
        minibatch_episodes=n_rows,
        micro_batch_size=None,
        shares_prompts=False,
        minibatches=1,
        n_epochs=1,
        n_iters=1,
        rl4lms_steps_per_iteration=None,
    )
    kwargs = config.alg.generation_kwargs
    max_new_tokens = int(kwargs.get("max_new_tokens") or kwargs.get("max_length") or DEFAULT_LENGTH)
    generation = replace(plan, prompt_tokens=prompt_tokens, response_tokens=max_new_tokens)

    generates = config.train_evaluation.generate
    n_parts = n_processes if config.distributed.strategy == "fsdp" else 1

    # A causal model computes logits of its prompts, too, if it computes whole ones.
    n_positions = n_rows * (width if causal else response_tokens)
    n_learned = batch_size * response_tokens
    logits = _logits_of_texts(config, int(model.config.vocab_size), n_positions=n_positions, n_learned=n_learned)

    sizes = {
        "process": _process() + TRAINER_BYTES if device == "cpu" else 0,
        "model weights": model.size // n_parts,
        "dequantized weight": model.largest_dequantized,
        "averaged weights": FLOAT * _n_averages(config) * model.trained,
        "optimizer state": int(model.moments(n_parts)),
        "gradients": FLOAT * model.trained // n_parts,
        "activations": model.activations(plan),
        "logits": logits,
        "KV cache": model.cache(generation) if generates else 0,
        "gathered policy": model.size if generates and n_parts > 1 else 0,
    }

    gathered = 0
    if n_parts > 1:
        gathered = _gathered(model, None, has_reference=False, reshards=config.distributed.reshard_after_forward)

    # With several passes per step, all gradients exist during the later ones.
    is_single_pass = int(training.get("gradient_accumulation_steps") or 1) == 1
    gradients = sizes["gradients"]
    if is_single_pass and config.alg.peft is None and not known["gradient_checkpointing"]:
        gradients = FLOAT * model.output_layer // n_parts

    freed_by_adapters = 0
    if device == "cpu" and config.alg.peft is not None:
        freed_by_adapters = int(FREED_BY_ADAPTERS[known["dtype"]] * sizes["activations"])

    parameters = f"{model.trained:,} of {model.parameters:,}"
    return SupervisedMemoryEstimate(
        sizes,
        gradients,
        device,
        available,
        gathered=gathered,
        freed_by_adapters=freed_by_adapters,
        loading=_loading([model], sizes["process"]) if device == "cpu" else 0,
        n_parameters=model.parameters,
        parameters=parameters,
    )


def _logits_of_texts(config: SupervisedConfig, vocab_size: int, *, n_positions: int, n_learned: int) -> int:
    """Return the bytes of the logits of a supervised loss and its gradient.

    Args:
        config: of the run.
        vocab_size: logits of a position.
        n_positions: positions of a batch, of which whole logits are computed.
        n_learned: learned tokens of a batch.
    """
    # Whole logits: the model's output, the copy without the last token, their log-softmax, and a gradient.
    whole = FLOAT * n_positions * vocab_size
    budget_mb = None if config.alg.needs_whole_logits else config.alg.logits_budget_mb
    if budget_mb is None or whole <= budget_mb * 2**20:
        return 4 * whole

    # Above the budget: logits and probabilities of the learned tokens, in chunks.
    learned = FLOAT * n_learned * vocab_size
    return 2 * min(learned, int(budget_mb * 2**20))


def _gradients_with_activations(policy: NetworkShapes, plan: BatchPlan, gradients: int) -> int:
    """Return the bytes of the gradients that exist at the same time as all activations of a forward pass."""
    # In a single pass, gradients grow while activations are freed: with all activations, only the first gradient
    # exists, that of the output layer. With several passes, all gradients exist since the first one.
    is_single_pass = plan.micro_batch_episodes == plan.minibatch_episodes
    if is_single_pass and not policy.arguments.gradient_checkpointing and policy.arguments.peft is None:
        return FLOAT * policy.output_layer
    return gradients


def _with_texts(sizes: dict[str, int], other_gradients: int, policy: NetworkShapes, texts: BatchPlan | None) -> int:
    """Replace the sizes of the responses by those of the texts of `alg.ptx`, in place, if these need more memory.

    Args:
        sizes: bytes by part.
        other_gradients: bytes of the gradients that exist at the same time as the activations of the responses.
        policy: reads both.
        texts: batch sizes of the texts; None without them.

    Returns:
        The bytes of gradients that exist at the same time as the activations in `sizes`.
    """
    if texts is None:
        return other_gradients

    # The policy reads them after the responses, when all gradients exist.
    of_texts = {"activations": policy.activations(texts), "logits": policy.logits(texts)}
    of_responses = sizes["activations"] + sizes["logits"] + other_gradients
    if sum(of_texts.values()) + sizes["gradients"] <= of_responses:
        return other_gradients
    sizes |= of_texts
    return sizes["gradients"]


def _longest_texts(config: RunConfig, policy: NetworkShapes, plan: BatchPlan, n_processes: int) -> BatchPlan | None:
    """Return the batch sizes of the texts of `alg.ptx` in an optimizer step, of full length; None without them."""
    ptx = config.alg.ptx
    if ptx is None or not ptx.coeff:
        return None

    # A causal model learns all tokens but the first; an encoder-decoder model reads a prompt as well.
    n_tokens = min(ptx.max_length, policy.positions)
    return replace(
        plan,
        prompt_tokens=1 if policy.causal else n_tokens,
        response_tokens=n_tokens - 1 if policy.causal else n_tokens,
        group_size=1,
        shares_prompts=False,
        minibatch_episodes=math.ceil(ptx.batch_size / n_processes),
    )


class _Critic(NamedTuple):
    size: int  # bytes of the weights that are not the policy's too
    n_trained: int
    network: NetworkShapes | None  # None if there is no forward pass of its own


def _critic(policy: NetworkShapes, *, is_split: bool) -> _Critic:
    # A value head has one weight for each hidden unit.
    arguments = policy.arguments
    if arguments.critic == "none":
        return _Critic(0, 0, None)
    if arguments.critic == "shared":
        return _Critic(FLOAT * policy.width, policy.width, None)

    # A copy of the policy shares its frozen weights, but not the parts of split ones.
    if arguments.critic_model in (None, arguments.model_name):
        n_trained = policy.trained_trunk + policy.width
        size = policy.trunk_size + FLOAT * policy.width if is_split else FLOAT * n_trained
        return _Critic(size, n_trained, policy)
    network = NetworkShapes(
        str(arguments.critic_model),
        arguments,
        causal=policy.causal,
        offloads_activations=policy.offloads_activations,
    )
    size = network.trunk_size + FLOAT * network.width
    return _Critic(size, network.trained_trunk + network.width, network)


def _of_fisher_products(policy: NetworkShapes, plan: BatchPlan) -> dict[str, int]:
    """Return the bytes of activations and logits in TRPO's products with the Fisher matrix."""
    # Fused attention has no second derivatives.
    eager_arguments = replace(policy.arguments, attn_implementation="eager")
    eager = NetworkShapes(policy.model_name, eager_arguments, causal=policy.causal)

    # Response tokens of a batch: two float32 numbers for each token of the vocabulary, within the budget for logits.
    n_tokens = int(policy.arguments.logits_budget_mb * 2**20 / 8) // int(policy.config.vocab_size)
    n_episodes = max(n_tokens // plan.response_tokens, 1)
    batch = replace(plan, minibatch_episodes=min(n_episodes, plan.episodes))

    # The model's graph, and that of its derivative, which is about twice as large.
    return {"activations": 3 * eager.activations(batch), "logits": 2 * eager.logits(batch)}


def _gathered(
    policy: NetworkShapes, critic: NetworkShapes | None, *, has_reference: bool, reshards: bool = True
) -> int:
    """Return the bytes of split weights and gradients that are whole at once in the update.

    Args:
        policy: the model that is trained.
        critic: its own network; None if there is none.
        has_reference: the reference makes passes in the update.
        reshards: `distributed.reshard_after_forward`.
    """
    # Blocks are gathered one after the other, the next one before the last one is freed; the rest stays whole. In
    # networks that are trained, gradients are added, of a block and of the rest. Those of adapters are small.
    n_gradients = 1 if policy.arguments.peft is None else 0
    size = n_gradients * policy.largest_block + (1 + n_gradients) * policy.outside_blocks
    size += 2 * policy.largest_block if reshards else policy.size - policy.outside_blocks
    if critic is not None:
        size += (1 + n_gradients) * critic.outside_blocks
        size += 0 if reshards else critic.size - critic.outside_blocks
    if has_reference:
        size += policy.outside_blocks
    return size


def _n_merged(policy: NetworkShapes, critic: NetworkShapes | None) -> int:
    """Return the number of weights into which the adapters of policy and critic are merged."""
    if not policy.arguments.merges_adapters:
        return 0
    return policy.mergeable + (0 if critic is None else critic.mergeable)


def _n_averages(config: RunConfig | SupervisedConfig) -> int:
    """Return how many copies of the trained weights their average needs."""
    average = config.train_evaluation.average
    if average is None:
        return 0
    return 1 if average.bias_power is None else 3


def _loading(networks: Sequence[NetworkShapes], process: int) -> int:
    """Return the peak memory while networks are read in float32 and quantized, one after the other.

    Args:
        networks: in the order in which their checkpoints are read.
        process: bytes of the process without them.

    Returns:
        Bytes; 0 without quantization.
    """
    if networks[0].arguments.quantization is None:
        return 0

    # A network in float32, next to the quantized ones before it.
    peak = 0
    size = process
    for network in networks:
        n_frozen = network.parameters - network.trained  # all but the adapters, which are added later
        peak = max(peak, size + FLOAT * n_frozen)
        size += network.size
    return peak


def _reference_network(policy: NetworkShapes) -> NetworkShapes | None:
    """Return the shapes of a reference or teacher from another checkpoint; None if it is that of the policy."""
    arguments = policy.arguments
    if arguments.kl_model in (None, arguments.model_name):
        return None
    whole = replace(arguments, peft=None)  # quantized too, with `quantization`
    return NetworkShapes(str(arguments.kl_model), whole, causal=policy.causal)


def _reference(policy: NetworkShapes, other: NetworkShapes | None, *, is_split: bool) -> int:
    """Return the bytes of the reference's weights that are not shared with the policy.

    Args:
        policy: the model that is trained.
        other: returned by `_reference_network`.
        is_split: weights are split over several processes.
    """
    if other is not None:
        return other.size

    # The reference of a policy with adapters is the base under them, which is in memory already, but for the parts of
    # a split one.
    if policy.arguments.peft is None:
        return policy.size
    return policy.size - FLOAT * policy.trained if is_split else 0


def _reference_in_bfloat16(policy: NetworkShapes, size: int) -> int:
    """Return the bytes of the reference with linear layers in bfloat16.

    Args:
        policy: shapes of the policy.
        size: see `_reference`.
    """
    # With adapters it shares the rest of the base, but its linear layers are copies.
    arguments = policy.arguments
    whole = replace(arguments, peft=None)
    network = NetworkShapes(str(arguments.kl_model or arguments.model_name), whole, causal=policy.causal)
    return HALF * network.linear + max(size - FLOAT * network.linear, 0)


class NetworkShapes:
    """Shapes of one network of a policy, built from its config with fake tensors, which have no memory.

    Of the name, a hub id or a local folder, only local files are read.

    Raises:
        ModelError: its config is neither in a folder nor in the cache, or no network can be built from it.
    """

    def __init__(
        self,
        model_name: str,
        arguments: PolicyArguments,
        *,
        causal: bool,
        has_dropout: bool = False,
        offloads_activations: bool = False,
    ) -> None:
        name = whole_checkpoint(str(with_home(model_name)), local_files_only=True)
        try:
            self.config: Any = AutoConfig.from_pretrained(
                name, local_files_only=True, trust_remote_code=arguments.trust_remote_code
            )
        except (OSError, ValueError) as error:
            raise ModelError(f"{model_name!r} is neither a folder with a model nor in the local cache") from error
        self.model_name = model_name
        self.arguments = arguments
        self.causal = causal
        self.offloads_activations = offloads_activations
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._saved_bytes: dict[BatchPlan, int] = {}
        try:
            self._model = self._built()
        except (ValueError, ImportError, ModelError) as error:
            raise ModelError(f"cannot build {model_name!r} from its config: {error}") from error

        # Dropout keeps its masks. What leaves out whole layers at random cannot be done with fake tensors.
        model = self._model
        if has_dropout:
            model.train()
            for module in model.modules():
                if hasattr(module, "layerdrop"):
                    module.training = False

        # The config of a model that also reads images has one for its text model.
        self._has_vision = getattr(self.config, "vision_config", None) is not None
        if causal:
            self.config = self.config.get_text_config()
        self.width = int(self.config.hidden_size)
        self.output_layer = int(self.config.vocab_size) * self.width

        # `parameters` of a module has tied weights once. Quantized ones have fewer bytes.
        self.parameters = quantized_layers.n_weights(model)
        self.trained = n_weights(model.parameters(), only_trained=True)
        self._trained_shapes = [weight.shape for weight in model.parameters() if weight.requires_grad]
        self.size = n_bytes(model.parameters())
        quantized = [layer.n_weights for layer in model.modules() if isinstance(layer, QuantizedLinear)]
        self.largest_dequantized = FLOAT * max(quantized, default=0)

        # Of the base, in the layers whose adapters can be merged.
        self.mergeable = 0
        if arguments.peft is not None:
            self.mergeable = n_weights(layer.base_layer.weight for layer in mergeable_layers(model))
        # Linear layers, which may be stored or copied in bfloat16.
        self.linear = n_linear_weights(model)
        self.linear_with_head = n_linear_weights(model, with_head=True)
        self.packed = n_packed_weights(model)

        # Weights of a critic: all without the output layer. Encoder and decoder share embeddings, which count once.
        modules = [model.base_model] if causal else [model.get_encoder(), model.get_decoder()]
        trunk: dict[int, torch.Tensor] = {}
        for module in modules:
            trunk |= {id(weight): weight for weight in module.parameters()}
        self.trunk_size = n_bytes(trunk.values())
        self.trained_trunk = n_weights(trunk.values(), only_trained=True)

        # What is gathered one after the other, and what stays whole, if weights are split over processes.
        blocks = [n_bytes(block.parameters()) for block in blocks_of(model)]
        self.largest_block = max(blocks, default=0)
        self.outside_blocks = self.size - sum(blocks)

    def _built(self) -> Any:
        auto_class: Any = AutoModelForCausalLM if self.causal else AutoModelForSeq2SeqLM
        if isinstance(self.arguments, VisionPolicyArguments):
            auto_class = AutoModelForImageTextToText
        attention = self.arguments.attn_implementation
        options = {} if attention is None else {"attn_implementation": attention}
        # Without the numbers of initial weights: some ways to draw them read a tensor, and fake ones have no numbers.
        with self._mode, no_init_weights():
            model: Any = auto_class.from_config(self.config, dtype=torch.float32, **options).eval()
            model.tie_weights()
        train_vision = self.arguments.trained_vision
        freeze_vision(model, train_vision)
        if self.arguments.used_speedups.fused_activations:
            fuse_activations(model)
        if self.arguments.quantization is not None:
            with self._mode:
                quantized_layers.quantize(model, self.arguments.quantization, layer_class=_QuantizedShapes)
        if self.arguments.peft is None:
            return model

        # PEFT creates empty adapters on the `meta` device, where no forward pass can mix them with fake tensors.
        add_lora(model, within_scope(model, self.arguments.peft, train_vision), dropout=False, empty=True)
        adapters = [(name, weight) for name, weight in model.named_parameters() if weight.is_meta]
        for path, weight in adapters:
            module, _, name = path.rpartition(".")
            with self._mode:
                fake = torch.nn.Parameter(torch.empty(weight.shape), requires_grad=weight.requires_grad)
            model.get_submodule(module).register_parameter(name, fake)
        return model

    def moments(self, n_parts: int) -> float:
        """Return the bytes of the optimizer's moments in one of `n_parts` processes that split them."""
        return bytes_of_moments(self._trained_shapes, self.arguments, n_parts)

    def activations(self, plan: BatchPlan) -> int:
        """Return the bytes kept between the forward and the backward pass of one micro-batch."""
        n = plan.micro_batch_episodes
        # Actor and critic often have the same shapes, and all responses may have one length: one pass for each plan.
        if plan not in self._saved_bytes:
            self._saved_bytes[plan] = self._saved(plan)
        size = self._saved_bytes[plan]

        # Then only the input of each layer is kept, or nothing, and the rest of one layer at a time.
        if self.offloads_activations:
            size = size // self._n_layers
        elif self.arguments.gradient_checkpointing:
            inputs = self._n_layers * n * (_n_prompt(plan) + plan.response_tokens) * self.width * FLOAT
            size = size // self._n_layers + inputs
        return size

    def logits(self, plan: BatchPlan) -> int:
        """Return the bytes of the two buffers in which log-probs and their gradients are computed."""
        whole = FLOAT * plan.micro_batch_episodes * plan.response_tokens * int(self.config.vocab_size)
        return 2 * min(whole, int(self.arguments.logits_budget_mb * 2**20))

    def cache(self, plan: BatchPlan) -> int:
        """Return the bytes of keys and values while `n_envs` prompts are continued to full length."""
        # Some families have fewer heads for keys and values than for queries, or heads of another width.
        n_heads = getattr(self.config, "num_key_value_heads", None) or self.config.num_attention_heads
        head_width = getattr(self.config, "head_dim", None) or self.width // self.config.num_attention_heads
        n_tokens = _n_prompt(plan) + plan.response_tokens
        return 2 * self._n_layers * int(n_heads * head_width) * n_tokens * plan.prompts_per_batch * FLOAT

    @property
    def _n_layers(self) -> int:
        """Number of layers of the decoder."""
        names = ("num_decoder_layers", "decoder_layers", "num_hidden_layers")
        return int(next(getattr(self.config, name) for name in names if getattr(self.config, name, None)))

    @property
    def positions(self) -> int:
        """Number of positions of the model."""
        limit = getattr(self.config, "max_position_embeddings", None) or getattr(self.config, "n_positions", None)
        return int(limit or 512)

    def _saved(self, plan: BatchPlan) -> int:
        """Return the bytes of the distinct storages that a forward pass saves, without parameters."""
        # Of a model that also reads images, the language model, which needs the most; it gets the images as embeddings.
        model = self._model
        base = model.get_decoder() if self._has_vision else getattr(model, "base_model", model)
        n = plan.micro_batch_episodes
        n_prompts = plan.prompts_of(n)
        n_prompt = _n_prompt(plan)
        n_response = plan.response_tokens
        weights = {weight.untyped_storage()._cdata for weight in model.parameters()}
        sizes: dict[int, int] = {}
        alive = []  # prevents that a storage is freed and its address is reused by another

        def save(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in weights:
                sizes[storage._cdata] = storage.nbytes()
                alive.append(storage)
            return tensor

        def load(tensor: torch.Tensor) -> torch.Tensor:
            return tensor

        # Without the output layer: the logits are counted on their own.
        is_half = self.arguments.dtype == "bfloat16"
        autocast: Any = torch.autocast("cpu", dtype=torch.bfloat16) if is_half else nullcontext()
        with self._mode, autocast, torch.autograd.graph.saved_tensors_hooks(save, load):
            # Different prompts, and the prompt of each response.
            prompts = torch.ones(n_prompts, n_prompt, dtype=torch.long)
            rows = torch.arange(n) % n_prompts
            responses = torch.ones(n, n_response, dtype=torch.long)
            if not self.causal:
                mask = torch.ones_like(prompts)
                encoded = model.get_encoder()(input_ids=prompts, attention_mask=mask).last_hidden_state
                model.get_decoder()(
                    input_ids=responses,
                    encoder_hidden_states=encoded if n_prompts == n else encoded.index_select(0, rows),
                    encoder_attention_mask=torch.ones(n, n_prompt, dtype=torch.long),
                    use_cache=False,
                )
            elif n_prompts == n:
                ids = torch.cat([prompts, responses], dim=1)[:, :-1]  # the last token chooses none
                base(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
            else:
                # As in `CausalReader`: first the prompts, whose keys and values the responses then read.
                cache = PromptCache()
                mask = torch.ones_like(prompts)
                base(input_ids=prompts, attention_mask=mask, past_key_values=cache, use_cache=True)
                cache.rows = rows
                if n_response > 1:
                    mask = torch.ones(n, n_prompt + n_response - 1, dtype=torch.long)
                    base(input_ids=responses[:, :-1], attention_mask=mask, past_key_values=cache, use_cache=True)
        return sum(sizes.values())


class _QuantizedShapes(QuantizedLinear):
    """Quantized layer without values: libraries keep tables that they compute, and fake ones would stay there."""

    def _store(self, weight: torch.Tensor, quantization: Mapping[str, Any]) -> None:
        layer_class = LAYERS[quantization["id"]]
        n_out, n_in = weight.shape
        for name, (shape, dtype) in layer_class.stored(n_out, n_in, quantization).items():
            self._keep(**{name: torch.empty(shape, dtype=dtype)})

    def dequantized(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(self.out_features, self.in_features, dtype=dtype)


def _packs_weights(arguments: PolicyArguments, plan: BatchPlan) -> bool:
    """Return whether a policy on this machine's processor generates in float32 with packed weights."""
    is_long = plan.response_tokens >= MIN_STEPS
    return is_long and arguments.generates_packed and can_pack(arguments.used_speedups)


def _n_prompt(plan: BatchPlan) -> int:
    assert plan.prompt_tokens is not None
    return max(plan.prompt_tokens, 1)


def n_weights(weights: Iterable[torch.Tensor], *, only_trained: bool = False) -> int:
    """Return the number of weights in some tensors, or only of those that are trained."""
    return sum(weight.numel() for weight in weights if weight.requires_grad or not only_trained)


def n_bytes(weights: Iterable[torch.Tensor]) -> int:
    """Return the bytes of some tensors."""
    return sum(weight.numel() * weight.element_size() for weight in weights)


def gibibytes(size: int) -> str:
    """Format a number of bytes: `1.50 GiB`, `12 MiB` or `30 KiB`."""
    if size >= 2**30:
        return f"{size / 2**30:.2f} GiB"
    return f"{size / 2**20:.0f} MiB" if size >= 2**20 else f"{size / 2**10:.0f} KiB"


def _device(config: RunConfig | SupervisedConfig) -> tuple[str, int]:
    # Free memory of the GPU, since other processes may use it; all memory that this process may use of the machine.
    name = config.device
    if isinstance(config, RunConfig):
        name = config.alg.args.get("device") or name
    if torch.cuda.is_available() and (name == "auto" or name.startswith("cuda")):
        return "cuda", torch.cuda.mem_get_info("cuda" if name == "auto" else name)[0]
    return "cpu", main_memory()


def main_memory() -> int:
    """Return the bytes of main memory that this process may use: the machine's, or the limit of its container."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # The file has a number of bytes, or `max` for no limit.
    file = Path("/sys/fs/cgroup/memory.max")
    limit = file.read_text().strip() if file.exists() else "max"
    return min(total, int(limit)) if limit.isdecimal() else total


def _process() -> int:
    """Return the bytes of main memory that this process uses now."""
    # Not its peak: a process that was started by a large one begins with the peak of that one (`ru_maxrss`).
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in KiB, except on macOS
    return peak if sys.platform == "darwin" else peak * 1024


_POLICY = "alg.policy.args"
_ARGS = "alg.training_args"
_EVALUATED = "train_evaluation"
_LENGTHS = (f"{_POLICY}.generation_kwargs.max_new_tokens", "env.args.max_prompt_length")
_NETWORKS = (f"{_POLICY}.critic: shared", f"{_POLICY}.peft: {{r: 8}}")
_MICRO = "alg.args.micro_batch_size"
_BUDGET = f"{_POLICY}.logits_budget_mb"
_BATCH = f"{_EVALUATED}.eval_batch_size"
_CHECKPOINTING = f"{_POLICY}.gradient_checkpointing: true"
_HALF = f"{_POLICY}.dtype: bfloat16"
_OFFLINE_BUDGET = "alg.logits_budget_mb"
_STEP = ("per_device_train_batch_size", "gradient_checkpointing: true", "bf16: true")

KEYS: dict[str, tuple[str, ...]] = {
    "loading": (*_NETWORKS, "alg.kl_div.coeff: 0"),
    "generation": ("env.n_envs", *_LENGTHS, *_NETWORKS),
    "scoring": (_MICRO, _BUDGET, *_LENGTHS, *_NETWORKS),
    "update": (_MICRO, _CHECKPOINTING, _BUDGET, _HALF, *_NETWORKS, *_LENGTHS),
    "evaluation": (_BATCH, f"{_EVALUATED}.generation_kwargs.max_new_tokens", _LENGTHS[1]),
}
"""Part -> settings that need less memory there, cheapest first; a key without a value should be smaller."""

SUPERVISED_KEYS: dict[str, tuple[str, ...]] = {
    "loading": ("alg.peft: {r: 8}",),
    "update": (*(f"{_ARGS}.{key}" for key in _STEP), _OFFLINE_BUDGET, "tokenizer.max_length", "alg.peft: {r: 8}"),
    "evaluation": (_BATCH, f"{_ARGS}.per_device_eval_batch_size", "alg.generation_kwargs.max_new_tokens"),
}


@contextmanager
def explaining(config: AnyConfig) -> Iterator[None]:
    """Add advice on the run's config to an `OutOfMemoryError`.

        out of memory in the update: CUDA out of memory. Tried to allocate 2.00 GiB ...
          estimate: update 9.61 GiB, rollout 7.20 GiB; policy weights 0.46 GiB, optimizer state 1.85 GiB ...
          needs less: a smaller alg.args.micro_batch_size (now null), alg.policy.args.gradient_checkpointing: true ...

    Raises:
        OutOfMemoryError: raised in the block, with advice: estimate, main memory, keys.
    """
    try:
        yield
    except OutOfMemoryError as error:
        lines = [_estimate(config)] if isinstance(config, RunConfig) else []
        if not torch.cuda.is_initialized():  # torch's own message says how much of a GPU is used
            lines.append(f"memory of the machine: {gibibytes(main_memory())}")

        # Only what the run does not have yet, and what its other settings allow.
        blocks = with_defaults(config.to_dict())
        table = KEYS if isinstance(config, RunConfig) else SUPERVISED_KEYS
        advised = []
        for key in table.get(error.part, ()):
            advice = _advice(key, blocks)
            if advice is not None and _is_accepted(key, config):
                advised.append(advice)
        if advised:
            lines.append(f"needs less: {', '.join(advised)}")
        raise OutOfMemoryError(error.part, error.text, lines) from error


def _estimate(config: RunConfig) -> str:
    try:
        estimate = estimate_memory(config, n_processes())
    except Exception as error:  # must not hide the out-of-memory error
        return f"no estimate: {error}"

    # Without the memory of the process, which by now includes that of the run itself.
    sizes = []
    for name, size in estimate.parts.items():
        if size and name != "process":
            sizes.append(f"{name} {gibibytes(size)}")
    peaks = f"update {gibibytes(estimate.update)}, rollout {gibibytes(estimate.rollout)}"
    return f"estimate: {peaks}; {', '.join(sizes)}"


def _advice(key: str, blocks: dict[str, Any]) -> str | None:
    """Return the advice for a key, with its value; None if it is set already."""
    path, _, advised_value = key.partition(": ")
    value = at(blocks, path)

    # An advised value: `{r: 8}`, `shared`, `true` or `0`, which a config may have as `0.0`.
    if advised_value:
        is_set = isinstance(value, dict) or str(value).lower() in (advised_value, f"{advised_value}.0")
        return None if is_set else key

    # A smaller value: not below 1, and not of arguments of evaluations that are those of the rollouts.
    if value == 1 or (path.startswith("train_evaluation.generation") and value is None):
        return None
    return f"a smaller {path} ({'is' if value is not None else 'now'} {shown(value)})"


def _is_accepted(key: str, config: AnyConfig) -> bool:
    """Return whether the config is valid with the advised value: opd needs its KL, for instance, grpo has no critic."""
    path, _, advised_value = key.partition(": ")
    if path == _OFFLINE_BUDGET:
        return isinstance(config, SupervisedConfig) and not config.alg.needs_whole_logits
    if not advised_value:  # a smaller value
        return True

    # The whole block of the KL, since its target is no longer valid without a penalty.
    block, _, name = path.rpartition(".")
    override = f"{path}={advised_value}"
    if block == "alg.kl_div":
        override = f"{block}={{{name}: {advised_value}}}"
    changed, issues = apply_overrides(config.to_dict(), [override])
    try:
        parse_config(changed, issues=issues)
    except ConfigError:
        return False
    return True
