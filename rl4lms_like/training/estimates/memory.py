"""Estimate the peak memory of a run, by part, before any weight is loaded.

    always         weights of policy, critic, reference and mask model; optimizer state; masks
    update         + activations of one forward pass + logits + the gradients that exist at the same time
    rollout        + gradients of the last update + KV cache + logits of one scoring pass

The networks are built from their configs with fake tensors, which have shapes but no memory. A forward pass records the
tensors that it would keep for the backward pass, so the estimate needs no table of model families. In bytes:

    weights        4 per parameter; the critic is the policy without its output layer, the reference a copy; with
                   adapters (`peft`) they share one base, and only the critic's adapters are added
    gradients      4 per trained parameter; they grow while activations are freed, so in a single pass only those of
                   the output layer coexist with all activations; with micro-batches or checkpointing, all of them
    activations    tensors kept by the forward passes of policy and critic, for a micro-batch of full-length episodes
    logits         2 buffers of float32 [tokens, vocabulary], each at most `logits_budget_mb`
    KV cache       2 x layers x kv heads x head width x tokens x 4, for the prompts generated together
    mask model     as many weights as the policy, and a separate KV cache (maskable policies)
    TRPO           activations of two graphs at once, 4 buffers of logits of half the budget each, 7 vectors as long as
                   the trained parameters; no optimizer state for the policy
    masks          1 bit for each token of a rollout and each token of the vocabulary, once in parts and once joined
    process        current memory of Python and its libraries (main memory only)

Not counted: the data set, reward and metric models. Freed memory is fragmented and cannot all be reused; the verdict
adds 25 % for that, the largest measured excess. docs/configuration.md compares estimates with measurements.
"""

from __future__ import annotations

import os
import resource
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from rl4lms_like.policies.arguments import PolicyArguments
from rl4lms_like.training.config.binding import with_defaults
from rl4lms_like.training.config.notices import is_causal
from rl4lms_like.training.config.run_config import RunConfig
from rl4lms_like.training.estimates.budget import BatchPlan, plan_batches
from rl4lms_like.training.estimates.network_shapes import FLOAT, NetworkShapes
from rl4lms_like.training.small_models.embedded import with_embedded_models

SLACK = 1.25
"""Largest measured ratio of a process's peak memory to the memory of its tensors."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Estimated memory in bytes, by part in order of allocation.

    Args:
        parts: name -> bytes.
        gradients_beside: bytes of the gradients that exist at the same time as the activations.
        device: `cpu` or `cuda`.
        available: available bytes of that device.
    """

    parts: dict[str, int]
    gradients_beside: int
    device: str
    available: int

    @property
    def n_parameters(self) -> int:
        """Number of parameters of the policy's model."""
        return self.parts["policy weights"] // FLOAT

    @property
    def update(self) -> int:
        """Peak of the update, bytes."""
        parts = self.parts
        passing = parts["activations"] + parts["logits"] + self.gradients_beside
        return self._always + max(passing, parts["gradients"])

    @property
    def rollout(self) -> int:
        """Peak of the rollout, bytes."""
        parts = self.parts
        return self._always + parts["gradients"] + max(parts["KV cache"], parts["logits"])

    @property
    def _always(self) -> int:
        passing = ("activations", "logits", "gradients", "KV cache")
        return sum(size for name, size in self.parts.items() if name not in passing)

    @property
    def peak(self) -> int:
        """Peak of the run: the larger of `update` and `rollout`, bytes."""
        return max(self.update, self.rollout)

    @property
    def verdict(self) -> str:
        """Message that says if the run fits on the device, and if not, which settings need less memory."""
        kind = "memory" if self.device == "cpu" else "GPU memory"
        of = f"{gibibytes(self.peak)} to {gibibytes(int(SLACK * self.peak))} of {gibibytes(self.available)} {kind}"
        if SLACK * self.peak <= self.available:
            return f"fits: {of}"
        levers = (
            "a smaller alg.args.micro_batch_size, critic: shared, gradient_checkpointing: true or dtype: bfloat16 "
            "(alg.policy.args) need less"
        )
        return f"{'tight' if self.peak <= self.available else 'does not fit'}: {of}; {levers}"


def estimate_memory(config: RunConfig) -> MemoryEstimate:
    """Estimate the peak memory of a run from the model's config; reads local folders and the cache, not the network.

    Raises:
        ModelError: the model's config is neither in a folder nor in the cache, or cannot be built.
    """
    from rl4lms_like.core.token_masks import packed_size

    config = with_embedded_models(config)
    blocks = with_defaults(config.to_dict())
    policy_args = blocks["alg"]["policy"]["args"]
    arguments = PolicyArguments.known_in(policy_args)
    plan = plan_batches(config)
    policy = NetworkShapes(arguments.model_name, arguments, causal=is_causal(blocks))
    critic = _critic(policy, arguments)
    device, available = _device(config)
    trained = policy.trained + critic.trained
    n_mask_models = 1 if policy_args.get("mask_type") in ("learned_top_k", "learned_top_p") else 0
    mask_bytes = packed_size(int(policy.config.vocab_size)) if "mask_type" in policy_args else 0
    state = 1 if blocks["alg"]["args"].get("use_rms_prop") else 2
    parts = {
        "process": _process() if device == "cpu" else 0,
        "policy weights": FLOAT * policy.parameters,
        "critic weights": FLOAT * critic.weights,
        "reference weights": FLOAT * _reference(policy, arguments) if config.alg.kl_div.coeff > 0 else 0,
        "mask model weights": FLOAT * n_mask_models * policy.parameters,
        "masks": 2 * plan.tokens_per_rollout * mask_bytes,
        "optimizer state": FLOAT * state * trained,
        "gradients": FLOAT * trained,
        "activations": policy.activations(plan) + (critic.network.activations(plan) if critic.network else 0),
        "logits": policy.logits(plan),
        "KV cache": (1 + n_mask_models) * policy.cache(plan),
    }
    single = plan.micro_batch_episodes == plan.minibatch_episodes and not arguments.gradient_checkpointing
    whole = arguments.peft is None and single
    beside = FLOAT * policy.output_layer if whole else parts["gradients"]
    if "cg_max_steps" in blocks["alg"]["args"]:
        parts |= _trust_region(policy, critic, plan, blocks["alg"]["args"].get("micro_batch_size"))
        beside = 7 * FLOAT * policy.trained  # gradient, step, initial weights, four vectors of the conjugate gradient
    return MemoryEstimate(parts, beside, device, available)


def _trust_region(
    policy: NetworkShapes, critic: _Critic, plan: BatchPlan, micro_batch_size: int | None
) -> dict[str, int]:
    """Return the parts that differ for TRPO: the graph of its Fisher products, no optimizer state for the policy."""
    eager = NetworkShapes(
        policy.arguments.model_name, replace(policy.arguments, attn_implementation="eager"), causal=policy.causal
    )
    budget = int(policy.arguments.logits_budget_mb * 2**20 / 8) // int(policy.config.vocab_size)
    episodes = max(min(budget, micro_batch_size or budget) // plan.response_tokens, 1)
    batch = replace(plan, micro_batch_episodes=min(episodes, plan.episodes))
    return {
        "optimizer state": 2 * FLOAT * critic.trained,
        "activations": 3 * eager.activations(batch),  # the model's graph, and that of its derivative
        "logits": 2 * eager.logits(batch),
    }


class _Critic(NamedTuple):
    """Number of the critic's own weights, of the trained ones (both with value head), and its network if it has one."""

    weights: int
    trained: int
    network: NetworkShapes | None


def _critic(policy: NetworkShapes, arguments: PolicyArguments) -> _Critic:
    if arguments.critic == "none":
        return _Critic(0, 0, None)
    if arguments.critic == "shared":
        return _Critic(policy.width, policy.width, None)
    if arguments.critic_model in (None, arguments.model_name):
        own = policy.trained_trunk + policy.width  # frozen weights are shared with the policy
        return _Critic(own, own, policy)
    network = NetworkShapes(str(arguments.critic_model), arguments, causal=policy.causal)
    return _Critic(network.trunk + network.width, network.trained_trunk + network.width, network)


def _reference(policy: NetworkShapes, arguments: PolicyArguments) -> int:
    """Return the number of weights of the reference that are not shared with the policy."""
    if arguments.reference_model not in (None, arguments.model_name):
        whole = replace(arguments, peft=None)
        return NetworkShapes(str(arguments.reference_model), whole, causal=policy.causal).parameters
    return policy.parameters if arguments.peft is None else 0


def gibibytes(size: int) -> str:
    """Format a number of bytes: `1.50 GiB`, `12 MiB` or `30 KiB`."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20)):
        if size >= scale:
            return f"{size / scale:.2f} {unit}" if unit == "GiB" else f"{size / scale:.0f} {unit}"
    return f"{size / 2**10:.0f} KiB"


def _device(config: RunConfig) -> tuple[str, int]:
    import torch

    name = config.alg.args.get("device") or config.device
    if torch.cuda.is_available() and (name == "auto" or name.startswith("cuda")):
        return "cuda", torch.cuda.mem_get_info("cuda" if name == "auto" else name)[0]
    return "cpu", main_memory()


def main_memory() -> int:
    """Return the bytes of main memory that this process may use: the machine's, or the limit of its container."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    return min(total, int(text)) if text.isdecimal() else total


def _process() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
