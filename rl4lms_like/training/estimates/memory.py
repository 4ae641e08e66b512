"""Estimate the peak memory of a run, by part, before any weight is loaded; advise when memory runs out.

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
    split weights  with `distributed.strategy: fsdp`, weights, gradients and optimizer state divided by the number of
                   processes; + the policy's whole weights in the rollout (they are gathered to generate)
                             + in the update whole weights and gradients of three blocks and of all that is in no block

Not counted: the data set, reward and metric models. Freed memory is fragmented and cannot all be reused; the verdict
adds 25 % for that, the largest measured excess. docs/configuration.md compares estimates with measurements.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from rl4lms_like.core.disk import with_home
from rl4lms_like.core.errors import ConfigError, ModelError, OutOfMemoryError
from rl4lms_like.core.ranks import n_processes
from rl4lms_like.core.schema import at
from rl4lms_like.core.token_masks import packed_size
from rl4lms_like.core.wording import shown
from rl4lms_like.policies.arguments import PolicyArguments
from rl4lms_like.policies.loading import whole_checkpoint
from rl4lms_like.policies.lora import add_lora
from rl4lms_like.policies.sharding import blocks_of
from rl4lms_like.training.config.binding import with_defaults
from rl4lms_like.training.config.notices import is_causal
from rl4lms_like.training.config.run_config import AnyConfig, RunConfig, parse_config
from rl4lms_like.training.config.yaml_file import apply_overrides
from rl4lms_like.training.estimates.budget import BatchPlan, plan_batches
from rl4lms_like.training.small_models.embedded import with_embedded_models

FLOAT = 4
SLACK = 1.25
"""Largest measured ratio of a process's peak memory to the memory of its tensors."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Estimated memory in bytes, by part in order of allocation."""

    parts: dict[str, int]
    other_gradients: int  # the gradients that exist at the same time as the activations
    device: str  # `cpu` or `cuda`
    available: int  # on that device
    gathered: int = 0  # split weights and gradients that are whole in the update

    @property
    def n_parameters(self) -> int:
        """Number of parameters of the policy's model."""
        return self.parts["policy weights"] // FLOAT

    @property
    def update(self) -> int:
        """Peak of the update, bytes."""
        passing = self.parts["activations"] + self.parts["logits"] + self.other_gradients
        return self._always + self.gathered + max(passing, self.parts["gradients"])

    @property
    def rollout(self) -> int:
        """Peak of the rollout, bytes."""
        generation = self.parts["KV cache"] + self.parts.get("gathered policy", 0)
        return self._always + self.parts["gradients"] + max(generation, self.parts["logits"])

    @property
    def _always(self) -> int:
        passing = ("activations", "logits", "gradients", "KV cache", "gathered policy")
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
        return (
            f"{'tight' if self.peak <= self.available else 'does not fit'}: {of}; a smaller alg.args.micro_batch_size, "
            "critic: shared, gradient_checkpointing: true or dtype: bfloat16 (alg.policy.args) need less"
        )


def estimate_memory(config: RunConfig, n_processes: int = 1) -> MemoryEstimate:
    """Estimate the peak memory of a run from the model's config; reads local folders and the cache, not the network.

    With several processes this is the memory of each. Networks on devices of their own are not counted.

    Raises:
        ModelError: the model's config is neither in a folder nor in the cache, or cannot be built.
    """
    config = with_embedded_models(config)
    blocks = with_defaults(config.to_dict())
    policy_args, args = blocks["alg"]["policy"]["args"], blocks["alg"]["args"]
    arguments, plan = PolicyArguments.known_in(policy_args), plan_batches(config).of_process(n_processes)
    n_parts = n_processes if config.distributed.strategy == "fsdp" else 1
    part = FLOAT / n_parts  # bytes of a weight in each process
    policy = NetworkShapes(arguments.model_name, arguments, causal=is_causal(blocks))
    critic_weights, critic_trained, critic = _critic(policy) if arguments.critic_device is None else (0, 0, None)
    device, available = _device(config)
    trained = policy.trained + critic_trained
    n_mask_models = 1 if policy_args.get("mask_type") in ("learned_top_k", "learned_top_p") else 0
    mask_bytes = packed_size(int(policy.config.vocab_size)) if "mask_type" in policy_args else 0
    role = "reference" if arguments.teacher_model is None else "teacher"
    is_here = config.alg.kl_div.coeff > 0 and arguments.reference_device is None
    reference = _reference(policy) if is_here else 0
    parts = {
        "process": _process() if device == "cpu" else 0,
        "policy weights": int(part * policy.parameters),
        "critic weights": int(part * critic_weights),
        f"{role} weights": int(part * reference),
        "mask model weights": FLOAT * n_mask_models * policy.parameters,
        "masks": 2 * plan.tokens_per_rollout * mask_bytes,
        "optimizer state": int(part * (1 if args.get("use_rms_prop") else 2) * trained),
        "gradients": int(part * trained),
        "activations": policy.activations(plan) + (critic.activations(plan) if critic else 0),
        "logits": policy.logits(plan),
        "KV cache": (1 + n_mask_models) * policy.cache(plan),
        "gathered policy": FLOAT * policy.parameters if n_parts > 1 else 0,
    }
    networks = (2, policy), (2 if critic else 0, critic or policy), (1 if reference else 0, policy)
    whole = 3 * policy.largest_block + sum(copies * network.outside_blocks for copies, network in networks)
    single = plan.micro_batch_episodes == plan.minibatch_episodes and not arguments.gradient_checkpointing
    others = FLOAT * policy.output_layer if single and arguments.peft is None else parts["gradients"]
    if "cg_max_steps" in args:  # TRPO: the graph of its Fisher products, no optimizer state for the policy
        eager = NetworkShapes(policy.model_name, replace(arguments, attn_implementation="eager"), causal=policy.causal)
        budget = int(arguments.logits_budget_mb * 2**20 / 8) // int(policy.config.vocab_size)
        episodes = max(min(budget, args.get("micro_batch_size") or budget) // plan.response_tokens, 1)
        batch = replace(plan, micro_batch_episodes=min(episodes, plan.episodes))
        parts["optimizer state"] = 2 * FLOAT * critic_trained
        parts["activations"] = 3 * eager.activations(batch)  # the model's graph, and that of its derivative
        parts["logits"] = 2 * eager.logits(batch)
        others = 7 * FLOAT * policy.trained  # gradient, step, initial weights, four vectors of the conjugate gradient
    return MemoryEstimate(parts, others, device, available, gathered=FLOAT * whole if n_parts > 1 else 0)


def _critic(policy: NetworkShapes) -> tuple[int, int, NetworkShapes | None]:
    """Return the number of the critic's own weights, of the trained ones, and its network if it has one."""
    arguments = policy.arguments
    if arguments.critic == "none":
        return 0, 0, None
    if arguments.critic == "shared":
        return policy.width, policy.width, None
    if arguments.critic_model in (None, arguments.model_name):
        own = policy.trained_trunk + policy.width  # frozen weights are shared with the policy
        return own, own, policy
    network = NetworkShapes(str(arguments.critic_model), arguments, causal=policy.causal)
    return network.trunk + network.width, network.trained_trunk + network.width, network


def _reference(policy: NetworkShapes) -> int:
    """Return the number of weights of the reference that are not shared with the policy."""
    arguments = policy.arguments
    if arguments.kl_model not in (None, arguments.model_name):
        whole = replace(arguments, peft=None)
        return NetworkShapes(str(arguments.kl_model), whole, causal=policy.causal).parameters
    return policy.parameters if arguments.peft is None else 0


class NetworkShapes:
    """Shapes of one network of a policy, built from its config with fake tensors, which have no memory.

    Of the name, a hub id or a local folder, only local files are read.

    Raises:
        ModelError: its config is neither in a folder nor in the cache, or no network can be built from it.
    """

    def __init__(self, model_name: str, arguments: PolicyArguments, *, causal: bool) -> None:
        name = whole_checkpoint(str(with_home(model_name)), local_files_only=True)
        try:
            self.config: Any = AutoConfig.from_pretrained(
                name, local_files_only=True, trust_remote_code=arguments.trust_remote_code
            )
        except (OSError, ValueError) as error:
            raise ModelError(f"{model_name!r} is neither a folder with a model nor in the local cache") from error
        self.model_name, self.arguments, self.causal = model_name, arguments, causal
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        try:
            self._model = self._built()
        except (ValueError, ImportError, ModelError) as error:
            raise ModelError(f"cannot build {model_name!r} from its config: {error}") from error
        model = self._model
        self.config = self.config.get_text_config() if causal else self.config
        everything = list(model.parameters())
        trunks = [model.base_model] if causal else [model.get_encoder(), model.get_decoder()]
        trunk = {id(p): p for part in trunks for p in part.parameters()}.values()  # tied weights count once
        self.parameters = sum(p.numel() for p in everything)
        self.trained = sum(p.numel() for p in everything if p.requires_grad)
        self.trunk = sum(p.numel() for p in trunk)  # parameters of a critic: all without the output layer
        self.trained_trunk = sum(p.numel() for p in trunk if p.requires_grad)
        blocks = [sum(p.numel() for p in block.parameters()) for block in blocks_of(model)]
        self.largest_block, self.outside_blocks = max(blocks, default=0), self.parameters - sum(blocks)
        self.width = int(self.config.hidden_size)
        self.output_layer = int(self.config.vocab_size) * self.width

    def _built(self) -> Any:
        auto_class = AutoModelForCausalLM if self.causal else AutoModelForSeq2SeqLM
        attention = self.arguments.attn_implementation
        options = {} if attention is None else {"attn_implementation": attention}
        with self._mode:
            model: Any = auto_class.from_config(self.config, dtype=torch.float32, **options).eval()
        if self.arguments.peft is not None:
            add_lora(model, self.arguments.peft, dropout=False, empty=True)
            adapters = [(name, weight) for name, weight in model.named_parameters() if weight.is_meta]
            for name, weight in adapters:  # these are on the `meta` device; replace them by fake tensors
                module, _, own_name = name.rpartition(".")
                with self._mode:
                    fake = torch.nn.Parameter(torch.empty(weight.shape), requires_grad=weight.requires_grad)
                model.get_submodule(module).register_parameter(own_name, fake)
        return model

    def activations(self, plan: BatchPlan) -> int:
        """Return the bytes kept between the forward and the backward pass of one micro-batch."""
        n, prompt, response = plan.micro_batch_episodes, self._prompt(plan), plan.response_tokens
        kept = self._kept(n, prompt, response)
        if self.arguments.gradient_checkpointing:
            kept = kept // self._layers + self._layers * n * (prompt + response) * self.width * FLOAT
        return kept

    def logits(self, plan: BatchPlan) -> int:
        """Return the bytes of the two buffers in which log-probs and their gradients are computed."""
        whole = FLOAT * plan.micro_batch_episodes * plan.response_tokens * int(self.config.vocab_size)
        return 2 * min(whole, int(self.arguments.logits_budget_mb * 2**20))

    def cache(self, plan: BatchPlan) -> int:
        """Return the bytes of keys and values while `n_envs` prompts are continued to full length."""
        heads = getattr(self.config, "num_key_value_heads", None) or self.config.num_attention_heads
        width = getattr(self.config, "head_dim", None) or self.width // self.config.num_attention_heads
        tokens = self._prompt(plan) + plan.response_tokens
        return 2 * self._layers * int(heads * width) * tokens * plan.prompts_per_batch * FLOAT

    @property
    def _layers(self) -> int:
        """Number of layers of the decoder."""
        names = ("num_decoder_layers", "decoder_layers", "num_hidden_layers")
        return int(next(getattr(self.config, name) for name in names if getattr(self.config, name, None)))

    def _prompt(self, plan: BatchPlan) -> int:
        if plan.prompt_tokens is not None:
            return plan.prompt_tokens
        limit = getattr(self.config, "max_position_embeddings", None) or getattr(self.config, "n_positions", None)
        return max(int(limit or 512) - plan.response_tokens, 1)

    def _kept(self, n: int, prompt: int, response: int) -> int:
        """Return the bytes of the distinct storages that a forward pass saves, without parameters."""
        model, sizes = self._model, {}
        own = {p.untyped_storage()._cdata for p in model.parameters()}
        alive = []  # prevents that a storage is freed and its address is reused by another

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in own:
                sizes[storage._cdata] = storage.nbytes()
                alive.append(storage)
            return tensor

        half = self.arguments.dtype == "bfloat16"
        autocast: Any = torch.autocast("cpu", dtype=torch.bfloat16) if half else nullcontext()
        with self._mode, autocast, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            ids = torch.ones(n, prompt + response if self.causal else prompt, dtype=torch.long)
            mask = torch.ones_like(ids)
            if self.causal:
                model.base_model(input_ids=ids, attention_mask=mask, use_cache=False)
            else:
                encoded = model.get_encoder()(input_ids=ids, attention_mask=mask).last_hidden_state
                inputs = {"input_ids": torch.ones(n, response, dtype=torch.long), "encoder_hidden_states": encoded}
                model.get_decoder()(**inputs, encoder_attention_mask=mask, use_cache=False)
        return sum(sizes.values())


def gibibytes(size: int) -> str:
    """Format a number of bytes: `1.50 GiB`, `12 MiB` or `30 KiB`."""
    if size >= 2**30:
        return f"{size / 2**30:.2f} GiB"
    return f"{size / 2**20:.0f} MiB" if size >= 2**20 else f"{size / 2**10:.0f} KiB"


def _device(config: RunConfig) -> tuple[str, int]:
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


_POLICY, _ARGS, _EVALUATED = "alg.policy.args", "alg.training_args", "train_evaluation"
_LENGTHS = (f"{_POLICY}.generation_kwargs.max_new_tokens", "env.args.max_prompt_length")
_NETWORKS = (f"{_POLICY}.critic: shared", f"{_POLICY}.peft: {{r: 8}}")
_MICRO, _BUDGET, _BATCH = "alg.args.micro_batch_size", f"{_POLICY}.logits_budget_mb", f"{_EVALUATED}.eval_batch_size"
_CHECKPOINTING, _HALF = f"{_POLICY}.gradient_checkpointing: true", f"{_POLICY}.dtype: bfloat16"
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
    "update": (*(f"{_ARGS}.{key}" for key in _STEP), "tokenizer.max_length", "alg.peft: {r: 8}"),
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
        blocks = with_defaults(config.to_dict())
        table = KEYS if isinstance(config, RunConfig) else SUPERVISED_KEYS
        if keys := [
            advice
            for key in table.get(error.part, ())
            if (advice := _advice(key, blocks)) and _is_accepted(key, config)
        ]:
            lines.append(f"needs less: {', '.join(keys)}")
        raise OutOfMemoryError(error.part, error.text, lines) from error


def _estimate(config: RunConfig) -> str:
    try:
        estimate = estimate_memory(config, n_processes())
    except Exception as error:  # must not hide the out-of-memory error
        return f"no estimate: {error}"
    own = {name: size for name, size in estimate.parts.items() if name != "process"}  # includes the run itself by now
    parts = ", ".join(f"{name} {gibibytes(size)}" for name, size in own.items() if size)
    return f"estimate: update {gibibytes(estimate.update)}, rollout {gibibytes(estimate.rollout)}; {parts}"


def _advice(key: str, blocks: dict[str, Any]) -> str | None:
    """Return the advice for a key, with its value; None if it is set already."""
    path, _, wanted = key.partition(": ")
    value = at(blocks, path)
    if wanted:
        is_set = isinstance(value, dict) or str(value).lower() in (wanted, f"{wanted}.0")
        return None if is_set else key
    if value == 1 or (path.startswith("train_evaluation.generation") and value is None):
        return None
    return f"a smaller {path} ({'is' if value is not None else 'now'} {shown(value)})"


def _is_accepted(key: str, config: AnyConfig) -> bool:
    """Return whether the config is valid with the advised value: opd needs its KL, for instance, grpo has no critic."""
    path, _, wanted = key.partition(": ")
    if not wanted:  # a smaller value
        return True
    block, _, last = path.rpartition(".")
    override = f"{block}={{{last}: {wanted}}}" if block == "alg.kl_div" else f"{path}={wanted}"  # without a target
    changed, issues = apply_overrides(config.to_dict(), [override])
    try:
        parse_config(changed, issues=issues)
    except ConfigError:
        return False
    return True
