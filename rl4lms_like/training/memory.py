"""How much memory a run will need at its peak, by part, before any weight is loaded.

    always         weights of policy, critic and reference; optimizer state
    update         + activations of one forward pass + logits + the gradients that stand beside them
    rollout        + gradients of the last update + KV cache + logits of one scoring pass

The networks are built from their configs alone, without memory, and a forward pass over shapes only is asked which
tensors it would keep for the backward pass. So the estimate needs no table of families. In bytes:

    weights        4 per parameter; the critic is the policy without its output layer, the reference a copy
    gradients      4 per trained parameter; they grow while activations are freed, so beside the activations of a
                   single pass stand the output layer's only; all, after another micro-batch or with checkpointing
    activations    what the forward passes of policy and critic keep, for one micro-batch of full-length episodes
    logits         2 buffers of float32 [tokens, vocabulary], each at most `logits_budget_mb`
    KV cache       2 x layers x kv heads x head width x tokens x 4, for the prompts generated together
    process        what Python and its libraries hold now (main memory only)

Not counted: the data set, reward and metric models. Allocators keep freed memory in pieces that do not fit again; the
verdict leaves a quarter for them, the most that was seen. docs/configuration.md has estimates beside measurements.
"""

from __future__ import annotations

import os
import resource
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl4lms_like.core.errors import ModelError
from rl4lms_like.policies.arguments import PolicyArguments
from rl4lms_like.training.binding import with_defaults
from rl4lms_like.training.budget import BatchPlan, plan_batches
from rl4lms_like.training.config import RunConfig
from rl4lms_like.training.notices import is_causal

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

FLOAT = 4
SLACK = 1.25
"""Peak of a process over what its tensors need, at worst as measured."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes by part, in the order they are made.

    Args:
        parts: name -> bytes.
        gradients_beside: bytes of the gradients that are there while the activations are.
        device: `cpu` or `cuda`.
        available: bytes of that device.
    """

    parts: dict[str, int]
    gradients_beside: int
    device: str
    available: int

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
        """The larger of the two, bytes."""
        return max(self.update, self.rollout)

    @property
    def verdict(self) -> str:
        """Whether that fits on the device, and what would help."""
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
    """The peak of a run, from the model's config alone; looks at local folders and the cache, not at the network.

    Raises:
        ModelError: the model's config is neither in a folder nor in the cache, or cannot be built.
    """
    blocks = with_defaults(config.to_dict())
    arguments = PolicyArguments.known_in(blocks["alg"]["policy"]["args"])
    plan = plan_batches(config)
    model = _Shapes(_model_config(arguments), arguments, causal=is_causal(blocks))
    device, available = _device(config)
    trained = model.policy + model.critic
    state = 1 if blocks["alg"]["args"].get("use_rms_prop") else 2
    parts = {
        "process": _process() if device == "cpu" else 0,
        "policy weights": FLOAT * model.policy,
        "critic weights": FLOAT * model.critic,
        "reference weights": FLOAT * model.policy if config.alg.kl_div.coeff > 0 else 0,
        "optimizer state": FLOAT * state * trained,
        "gradients": FLOAT * trained,
        "activations": model.activations(plan),
        "logits": model.logits(plan),
        "KV cache": model.cache(plan),
    }
    single = plan.micro_batch_episodes == plan.minibatch_episodes and not arguments.gradient_checkpointing
    beside = FLOAT * model.output_layer if single else parts["gradients"]
    return MemoryEstimate(parts, beside, device, available)


class _Shapes:
    """A language model as shapes: it can be asked what a forward pass would keep, and holds nothing.

    Attributes:
        policy: its parameters.
        critic: those of the critic.
        output_layer: those of the layer that makes logits.
    """

    def __init__(self, config: PretrainedConfig, arguments: PolicyArguments, *, causal: bool) -> None:
        import torch
        from torch._subclasses.fake_tensor import FakeTensorMode
        from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

        self.config = config.get_text_config() if causal else config
        self.arguments, self.causal = arguments, causal
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        auto_class = AutoModelForCausalLM if causal else AutoModelForSeq2SeqLM
        attention = arguments.attn_implementation
        options = {} if attention is None else {"attn_implementation": attention}
        try:
            with self._mode:
                self._model: PreTrainedModel = auto_class.from_config(config, dtype=torch.float32, **options).eval()
        except (ValueError, ImportError) as error:
            raise ModelError(f"cannot build {arguments.model_name!r} from its config: {error}") from error
        self.policy = sum(p.numel() for p in self._model.parameters())
        self.output_layer = int(self.config.vocab_size * self.config.hidden_size)
        self.critic = int(self.config.hidden_size)
        if arguments.critic == "separate":
            self.critic += sum(p.numel() for p in {id(p): p for p in self._trunk_parameters()}.values())

    def activations(self, plan: BatchPlan) -> int:
        """Bytes kept between the forward and the backward pass of one micro-batch, by policy and critic."""
        n, prompt, response = plan.micro_batch_episodes, self._prompt(plan), plan.response_tokens
        kept = self._kept(n, prompt, response)
        if self.arguments.gradient_checkpointing:
            kept = kept // self._layers + self._layers * n * (prompt + response) * self.config.hidden_size * FLOAT
        return kept * (2 if self.arguments.critic == "separate" else 1)

    def logits(self, plan: BatchPlan) -> int:
        """Bytes of the two buffers that log-probs and their gradients are made in."""
        tokens = plan.micro_batch_episodes * plan.response_tokens
        whole = FLOAT * tokens * int(self.config.vocab_size)
        return 2 * min(whole, int(self.arguments.logits_budget_mb * 2**20))

    def cache(self, plan: BatchPlan) -> int:
        """Bytes of keys and values while `n_envs` prompts are continued to full length."""
        heads = getattr(self.config, "num_key_value_heads", None) or self.config.num_attention_heads
        width = getattr(self.config, "head_dim", None) or self.config.hidden_size // self.config.num_attention_heads
        tokens = self._prompt(plan) + plan.response_tokens
        return 2 * self._layers * int(heads * width) * tokens * plan.prompts_per_batch * FLOAT

    @property
    def _layers(self) -> int:
        """Of the decoder."""
        names = ("num_decoder_layers", "decoder_layers", "num_hidden_layers")
        return int(next(getattr(self.config, name) for name in names if getattr(self.config, name, None)))

    def _prompt(self, plan: BatchPlan) -> int:
        if plan.prompt_tokens is not None:
            return plan.prompt_tokens
        limit = getattr(self.config, "max_position_embeddings", None) or getattr(self.config, "n_positions", None)
        return max(int(limit or 512) - plan.response_tokens, 1)

    def _kept(self, n: int, prompt: int, response: int) -> int:
        """Bytes of the distinct storages a forward pass saves, parameters aside."""
        import torch

        own = {p.untyped_storage()._cdata for p in self._model.parameters()}
        sizes: dict[int, int] = {}
        alive = []  # a storage that is freed could lend its address to the next

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in own:
                sizes[storage._cdata] = storage.nbytes()
                alive.append(storage)
            return tensor

        half = self.arguments.dtype == "bfloat16"
        autocast: Any = torch.autocast("cpu", dtype=torch.bfloat16) if half else nullcontext()
        with self._mode, autocast, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            self._forward(n, prompt, response)
        return sum(sizes.values())

    def _forward(self, n: int, prompt: int, response: int) -> None:
        import torch

        if self.causal:
            ids = torch.ones(n, prompt + response, dtype=torch.long)
            self._model.base_model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
            return
        ids, taken = torch.ones(n, prompt, dtype=torch.long), torch.ones(n, response, dtype=torch.long)
        mask = torch.ones_like(ids)
        encoded = self._model.get_encoder()(input_ids=ids, attention_mask=mask).last_hidden_state
        self._model.get_decoder()(
            input_ids=taken, encoder_hidden_states=encoded, encoder_attention_mask=mask, use_cache=False
        )

    def _trunk_parameters(self) -> list[Any]:
        trunks = [self._model.base_model] if self.causal else [self._model.get_encoder(), self._model.get_decoder()]
        return [parameter for trunk in trunks for parameter in trunk.parameters()]


def gibibytes(size: int) -> str:
    """`1.50 GiB`, `12 MiB` or `30 KiB`."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20)):
        if size >= scale:
            return f"{size / scale:.2f} {unit}" if unit == "GiB" else f"{size / scale:.0f} {unit}"
    return f"{size / 2**10:.0f} KiB"


def _model_config(arguments: PolicyArguments) -> PretrainedConfig:
    from transformers import AutoConfig

    name = str(Path(arguments.model_name).expanduser())
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            name, local_files_only=True, trust_remote_code=arguments.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise ModelError(f"{arguments.model_name!r} is neither a folder with a model nor in the local cache") from error
    return config


def _device(config: RunConfig) -> tuple[str, int]:
    import torch

    name = config.alg.args.get("device") or config.device
    if torch.cuda.is_available() and (name == "auto" or name.startswith("cuda")):
        return "cuda", torch.cuda.mem_get_info("cuda" if name == "auto" else name)[0]
    return "cpu", main_memory()


def main_memory() -> int:
    """Bytes of main memory that this process may use: the machine's, or its container's limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    return min(total, int(text)) if text.isdecimal() else total


def _process() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
