"""Language model without memory: built from its config with fake tensors, to measure what a forward pass keeps.

parameters   all            trained         changed by an update: all of them, or the adapters (`peft`)
trunk        without the    trained_trunk   those of the trained ones that a critic has
             output layer
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from rl4lms_like.core.disk import with_home
from rl4lms_like.core.errors import ModelError
from rl4lms_like.policies.arguments import PolicyArguments
from rl4lms_like.training.estimates.budget import BatchPlan

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

FLOAT = 4


class NetworkShapes:
    """Shapes of one network of a policy, without weights.

    Args:
        model_name: hub id or local folder; only local files are read.
        arguments: of the policy.
        causal: true for decoder-only, false for encoder-decoder models.

    Attributes:
        parameters: number of parameters, adapters included.
        trained: number of trained parameters.
        trunk: number of parameters that a critic has.
        trained_trunk: number of trained parameters that a critic has.
        output_layer: number of parameters of the layer that computes logits.
        width: size of the hidden states.

    Raises:
        ModelError: its config is neither in a folder nor in the cache, or no network can be built from it.
    """

    def __init__(self, model_name: str, arguments: PolicyArguments, *, causal: bool) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        config = _model_config(model_name, arguments)
        self.config = config.get_text_config() if causal else config
        self.arguments, self.causal = arguments, causal
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._model = self._built(config, model_name)
        everything = list(self._model.parameters())
        trunk = list({id(p): p for p in self._trunk_parameters()}.values())
        self.parameters = sum(p.numel() for p in everything)
        self.trained = sum(p.numel() for p in everything if p.requires_grad)
        self.trunk = sum(p.numel() for p in trunk)
        self.trained_trunk = sum(p.numel() for p in trunk if p.requires_grad)
        self.output_layer = int(self.config.vocab_size * self.config.hidden_size)
        self.width = int(self.config.hidden_size)

    def _built(self, config: PretrainedConfig, model_name: str) -> PreTrainedModel:
        import torch
        from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

        from rl4lms_like.policies.lora import add_lora

        auto_class = AutoModelForCausalLM if self.causal else AutoModelForSeq2SeqLM
        attention = self.arguments.attn_implementation
        options = {} if attention is None else {"attn_implementation": attention}
        try:
            with self._mode:
                model: PreTrainedModel = auto_class.from_config(config, dtype=torch.float32, **options).eval()
            if self.arguments.peft is not None:
                add_lora(model, self.arguments.peft, dropout=False, empty=True)
                self._take_in(model)
        except (ValueError, ImportError, ModelError) as error:
            raise ModelError(f"cannot build {model_name!r} from its config: {error}") from error
        return model

    def _take_in(self, model: PreTrainedModel) -> None:
        """Replace parameters on the `meta` device by fake tensors."""
        import torch
        from torch import nn

        for module in model.modules():
            for name, weight in list(module.named_parameters(recurse=False)):
                if weight.is_meta:
                    with self._mode:
                        made = nn.Parameter(torch.empty(weight.shape), requires_grad=weight.requires_grad)
                    module.register_parameter(name, made)

    def activations(self, plan: BatchPlan) -> int:
        """Return the bytes kept between the forward and the backward pass of one micro-batch."""
        n, prompt, response = plan.micro_batch_episodes, self._prompt(plan), plan.response_tokens
        kept = self._kept(n, prompt, response)
        if self.arguments.gradient_checkpointing:
            kept = kept // self._layers + self._layers * n * (prompt + response) * self.width * FLOAT
        return kept

    def logits(self, plan: BatchPlan) -> int:
        """Return the bytes of the two buffers in which log-probs and their gradients are computed."""
        tokens = plan.micro_batch_episodes * plan.response_tokens
        whole = FLOAT * tokens * int(self.config.vocab_size)
        return 2 * min(whole, int(self.arguments.logits_budget_mb * 2**20))

    def cache(self, plan: BatchPlan) -> int:
        """Return the bytes of keys and values while `n_envs` prompts are continued to full length."""
        heads = getattr(self.config, "num_key_value_heads", None) or self.config.num_attention_heads
        width = getattr(self.config, "head_dim", None) or self.config.hidden_size // self.config.num_attention_heads
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
        import torch

        own = {p.untyped_storage()._cdata for p in self._model.parameters()}
        sizes: dict[int, int] = {}
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


def _model_config(model_name: str, arguments: PolicyArguments) -> PretrainedConfig:
    from transformers import AutoConfig

    from rl4lms_like.policies.loading import whole_checkpoint

    name = whole_checkpoint(str(with_home(model_name)), local_files_only=True)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            name, local_files_only=True, trust_remote_code=arguments.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise ModelError(f"{model_name!r} is neither a folder with a model nor in the local cache") from error
    return config
