"""Language model as an actor-critic policy.

    policy_model   the language model that is trained
    value_model    the critic's own network, with the same initial weights or others; None with `critic: shared`
    value_head     hidden state -> value; None with `critic: none`
    ref_model      frozen reference or teacher for the KL divergence; None if no KL is requested

`generate` samples episodes, `evaluate_actions` scores them in one teacher-forced pass. The signature is that of a
Stable-Baselines3 actor-critic policy, with an `EpisodeBatch` instead of the observations.

Models are loaded and saved by `policies.loading`, run by the readers of `policies.teacher_forcing`, and split over
processes by `policies.sharding`. What generates the responses is `policies.policy_engine`'s concern.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from gymnasium import spaces
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.type_aliases import Schedule
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel, PreTrainedTokenizerBase

from rl4lms_like.core.episodes import EpisodeBatch
from rl4lms_like.core.keys_elsewhere import refuse_names_of_elsewhere
from rl4lms_like.core.picture_encoder import PictureEncoder
from rl4lms_like.core.products import linear
from rl4lms_like.core.token_scores import vocabulary_kl
from rl4lms_like.engines import ENGINES
from rl4lms_like.engines.arguments import generate_arguments
from rl4lms_like.policies.arguments import (
    ADAMW,
    OWN_ENGINE,
    PolicyArguments,
    samples_other_distribution,
)
from rl4lms_like.policies.decoding import Contexts
from rl4lms_like.policies.faster_layers import speed_up
from rl4lms_like.policies.full_weights import full_weights
from rl4lms_like.policies.generating_weights import can_pack
from rl4lms_like.policies.generation import TextGenerator, separate_warpers
from rl4lms_like.policies.gradient_check import check_gradients
from rl4lms_like.policies.loading import (
    freeze,
    load_networks,
    load_value_head,
    save_language_model,
    save_value_head,
    save_whole,
)
from rl4lms_like.policies.lora import save_adapters
from rl4lms_like.policies.merged_adapters import TOLERANCE, MergedAdapters
from rl4lms_like.policies.optimizers import (
    make_optimizer,
    offload_moments,
    optimizer_class_of,
    parameter_groups,
    return_moments,
)
from rl4lms_like.policies.parity import (
    check_decoding,
    check_packing,
    check_parity,
    check_sharing,
    first_episodes,
    probe_episodes,
    require_finite,
    require_independent_positions,
)
from rl4lms_like.policies.policy_engine import PolicyEngine
from rl4lms_like.policies.quantized_layers import n_weights
from rl4lms_like.policies.sharding import led_by_main, own_part, process_mesh, shard, with_all
from rl4lms_like.policies.teacher_forcing import ActionScores, CausalReader, EpisodeReader, EpisodeScores, Seq2SeqReader
from rl4lms_like.system.errors import ConfigError, ModelError
from rl4lms_like.system.freed_memory import keep_freed_memory
from rl4lms_like.system.schema import checked_block

_PASS = "pass"
_FINGERPRINT = "fingerprint"
"""Names of what the other processes compute together with the main one within `led_by_main`."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of a number -> the integer type of the same size."""


class LMActorCriticPolicy(BasePolicy):
    """Base class of the causal and the seq2seq policy.

    Args:
        observation_space: observation space of the environment.
        action_space: `Discrete(vocabulary)`.
        lr_schedule: learning rate schedule of Stable-Baselines3.
        use_reference: load a reference model.
        device: device of the networks; the checks run there.
        sharded: split the weights of all networks over the processes of torch's process group.
        reshard_after_forward: of split weights, see `ShardedNetwork`.
        optimizer_class: Stable-Baselines3's argument; its A2C passes RMSprop here.
        use_sde: Stable-Baselines3's argument; must be False.
        arguments: see the policy's `arguments_class`.

    Raises:
        ModelError: a checkpoint cannot be loaded, or does not match the action space.
        ParityError: teacher-forced log-probs differ from those of generation.
    """

    is_sharded = False
    """True if the weights are split over several processes, which then make all passes together."""
    balancing_coefficient = 0.0
    """Coefficient of the balancing loss of a mixture of experts (`policies.routing`); 0 if the model has none."""
    _sharded: Sequence[Any] = ()
    _updates_reference = False
    _offloads_moments = False
    engine: PolicyEngine
    """Generates the responses of rollouts and evaluations: the policy's own model, or an external engine."""
    pictures: PictureEncoder | None = None
    """Encoder of prompts with pictures; None if the model reads texts only."""
    reader_class: ClassVar[Any]
    auto_class: ClassVar[Any]
    arguments_class: ClassVar[type[PolicyArguments]] = PolicyArguments

    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        lr_schedule: Schedule,
        *,
        use_reference: bool = True,
        device: torch.device | str = "cpu",
        sharded: bool = False,
        reshard_after_forward: bool = True,
        optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
        use_sde: bool = False,
        **arguments: Any,
    ) -> None:
        known = self.arguments_class.__dataclass_fields__
        refuse_names_of_elsewhere(type(self).__name__, arguments, known, "alg.policy.args")
        self.arguments = checked_block(self.arguments_class, arguments, "the policy's arguments")
        super().__init__(
            observation_space,
            action_space,
            optimizer_class=optimizer_class,
            optimizer_kwargs=dict(self.arguments.optimizer_kwargs),
        )

        # Before the first large tensors are made.
        if self.arguments.used_speedups.keep_freed_memory and torch.device(device).type == "cpu":
            keep_freed_memory()
        self.is_sharded = sharded
        self._load(use_reference)
        self._check_vocabulary()
        computes_eagerly = torch.device(device).type == "cpu" and not sharded and not self.arguments.compile
        for network in (self.policy_model, self.value_model, self.ref_model):
            if network is not None:
                speed_up(network, self.arguments.used_speedups, computes_eagerly=computes_eagerly)

        # Weights are split before they are moved: a whole model may not fit on the device of one process. The parts of
        # each block then go there one block at a time.
        mesh = process_mesh(device) if sharded else None
        if mesh is not None:
            readers = [reader for reader in (self.reader, self.value_reader, self.ref_reader) if reader is not None]
            self._sharded = [
                reader.split_weights(mesh, reshard_after_forward=reshard_after_forward) for reader in readers
            ]
        self.to(device)

        # For their passes only: what is saved, and what an optimizer changes, are the adapters. Split weights are whole
        # for a pass of their block only, and copies with adapters merged into them would stay whole.
        product = linear if self.arguments.used_speedups.onednn else functional.linear
        self.merged_adapters: dict[EpisodeReader, MergedAdapters] = {}
        if self.arguments.merges_adapters and not sharded:
            for reader in (self.reader, self.value_reader):
                if reader is not None:
                    self.merged_adapters[reader] = MergedAdapters(reader.model, product=product)
        self.generator.merged_adapters = self.merged_adapters.get(self.reader)
        if self.arguments.activation_offload:
            for reader in (self.reader, self.value_reader):
                if reader is not None:
                    reader.offload_activations(self.merged_adapters.get(reader))
        self.generator.packs_weights = computes_eagerly and can_pack(self.arguments.used_speedups)

        # The first passes of the models, in the mode of a rollout: with dropout no two of them would agree. An
        # exception in them means that the family has an interface which is not supported.
        self.set_training_mode(False)
        with first_episodes(self.policy_model, self.arguments.model_name):
            self._build_heads()
            self.to(device)  # the new value head
            self._check_parity()
            if self.arguments.quantization is not None:
                self._check_gradients()
        self._reshard()
        if mesh is not None and self.value_head is not None:
            self._sharded = [*self._sharded, shard(self.value_head, mesh)]

        # The environment's observations are as long as its longest text: prompt and response together.
        space = getattr(observation_space, "spaces", {}).get("input_encoded_pt")
        longest = None if space is None else space.shape[0]
        require_independent_positions(self.policy_model, self.arguments.model_name, longest)
        others = ((self.value_model, self.arguments.critic_model), (self.ref_model, self.arguments.kl_model))
        for network, name in others:
            if network is not None and name is not None:
                require_independent_positions(network, name, longest)

        # Last: splitting replaces parameters, and an optimizer would keep the ones before.
        groups = parameter_groups(
            self.policy_model.parameters(), self._critic_parameters(), weight_decay=self.arguments.weight_decay
        )
        if self.arguments.optimizer["id"] != ADAMW:
            optimizer_class = optimizer_class_of(self.arguments.optimizer["id"])
        self.optimizer = make_optimizer(
            optimizer_class,
            groups,
            learning_rate=lr_schedule(1),
            optimizer_kwargs=self.arguments.optimizer_kwargs,
        )
        if self.arguments.offload == "moments":
            self.optimizer.register_step_pre_hook(return_moments)
            self._offloads_moments = True

    # --- construction -------------------------------------------------------------------------------------------

    def _load(self, use_reference: bool) -> None:
        """Build the engine, load the networks, and build what reads and generates with them."""
        options = self.arguments

        # Before a model is loaded: neither a wrong combination nor an engine that cannot be built should take minutes.
        issues = list(options.family_issues(is_causal=self.auto_class is not AutoModelForSeq2SeqLM))
        if issues:
            raise ConfigError(issues, "the policy's arguments")
        external = None
        if options.engine["id"] != OWN_ENGINE:
            external = ENGINES.get(options.engine["id"], options.engine.get("args"))
        self.engine = PolicyEngine(external, is_ahead=options.is_ahead)

        networks = load_networks(self.auto_class, options, use_reference=use_reference, split=self.is_sharded)
        self.policy_model: PreTrainedModel = networks.policy
        self.value_model: PreTrainedModel | None = networks.critic
        self.ref_model: PreTrainedModel | None = networks.reference
        self._saved_dropout = networks.dropout_rates

        # `compile` is for the networks that are trained.
        self.reader: EpisodeReader = self._new_reader(self.policy_model, compile=options.compile)
        self.balancing_coefficient = self.reader.balancing_coefficient
        self.value_reader: EpisodeReader | None = None
        if self.value_model is not None:
            self.value_reader = self._new_reader(self.value_model, compile=options.compile)
        self.ref_reader: EpisodeReader | None = None
        if self.ref_model is not None:
            self.ref_reader = self._new_reader(self.ref_model)
        self.generator = self._new_generator(
            generation_kwargs=options.generation_kwargs,
            prompt_truncation_side=options.prompt_truncation_side,
            bfloat16=options.dtype == "bfloat16",
        )

    def _new_reader(self, model: PreTrainedModel, *, compile: bool = False) -> EpisodeReader:
        """Return a reader of one of the networks."""
        reader: EpisodeReader = self.reader_class(model, compile=compile)
        return reader

    def _new_generator(self, **options: Any) -> TextGenerator:
        """Return the generator of the policy's own model."""
        return TextGenerator(self.policy_model, **options)

    def _check_vocabulary(self) -> None:
        assert isinstance(self.action_space, spaces.Discrete)
        if int(self.action_space.n) != self.vocab_size:
            raise ModelError(
                f"{self.arguments.model_name!r} has {self.vocab_size} output tokens, but the environment's action "
                f"space has {self.action_space.n}: build the environment with vocab_size={self.vocab_size}"
            )

        role_of_reference = "reference" if self.arguments.teacher_model is None else "teacher"
        for role, model in (("critic", self.value_model), (role_of_reference, self.ref_model)):
            if model is None:
                continue

            # Models of one tokenizer may have differently padded vocabularies. A larger one has all tokens of the
            # policy, which is enough for a critic and for a teacher.
            n_tokens = _vocab_size(model)
            is_valid = n_tokens == self.vocab_size or (role != "reference" and n_tokens > self.vocab_size)
            if not is_valid:
                name = getattr(self.arguments, f"{role}_model")
                raise ModelError(
                    f"the {role} {name!r} has {n_tokens} tokens, but the policy {self.arguments.model_name!r} has "
                    f"{self.vocab_size}: both must have the same vocabulary"
                )

    def _build_heads(self) -> None:
        """Choose how logits are computed from hidden states, and add the critic's head to a network that works."""
        for reader in (self.reader, self.ref_reader):
            if reader is not None:
                reader.probe_head(self._probe(reader))

        # The critic's states must be finite, and their width d is that of the value head; [n_tokens, d].
        self.value_head: nn.Linear | None = None
        reader = self.value_reader or self.reader
        with torch.no_grad():
            states = reader.states(self._probe(reader))
        name = self.arguments.critic_model or self.arguments.model_name
        require_finite(self.value_model or self.policy_model, name, states)
        if self.arguments.critic == "none":
            return

        # Values are 0 at first: torch's initialization gives random ones that are larger than most rewards.
        self.value_head = nn.Linear(states.shape[1], 1, bias=False)
        if self.arguments.value_head_init == "zero":
            nn.init.zeros_(self.value_head.weight)
        if self.arguments.critic_model is not None:
            load_value_head(self.value_head, self.arguments.critic_model)

        # After the pass above, split weights are still whole, and those would be frozen instead of their parts.
        self._reshard()
        if self.value_model is not None:
            freeze(self.value_model, self.arguments.critic_frozen)

    def _probe(self, reader: EpisodeReader) -> EpisodeBatch:
        """Return short episodes for the first passes of a network, on its device."""
        return probe_episodes(self.vocab_size, reader.prompt_side).to(reader.device)

    def _check_parity(self) -> None:
        """Check the log-probs of each checkpoint, and where a prompt may be computed once for all of its responses."""
        arguments = self.arguments
        in_bfloat16 = "flash" in (arguments.attn_implementation or "")  # kernels without float32 support

        # A reference without a checkpoint of its own is a copy of the policy, and needs no check.
        checked = [(self.reader, arguments.model_name, in_bfloat16)]
        is_rounded = in_bfloat16 or arguments.reference_dtype == "bfloat16"
        if self.ref_reader is not None and arguments.kl_model is not None:
            checked.append((self.ref_reader, arguments.kl_model, is_rounded))
        excluded = arguments.generation_kwargs.get("suppress_tokens") or ()
        for reader, name, is_coarse in checked:
            self._check_log_probs(reader, name, in_bfloat16=is_coarse, never_written=excluded)

        if arguments.used_speedups.fast_decoding and type(self.generator).has_decode_loop:
            self.generator.uses_decode_loop = check_decoding(self.reader, arguments.model_name, in_bfloat16=in_bfloat16)

        if arguments.packing is not None:
            self._set_packing(in_bfloat16=in_bfloat16)

        # With split weights, all prompts are computed for each response: a prompt that is computed once is a pass of
        # its own, which the other processes may not need, but would have to make.
        self.generator.shares_prompts = False
        if self.is_sharded:
            return
        self.reader.shares_prompts = self._may_share(self.reader, arguments.model_name, in_bfloat16=in_bfloat16)
        self.generator.shares_prompts = self.reader.shares_prompts

        # Copies of the policy share prompts as it does; another checkpoint may have another architecture.
        critic = (self.value_reader, arguments.critic_model, False, in_bfloat16)
        reference = (self.ref_reader, arguments.kl_model, True, is_rounded)
        for other, checkpoint, has_head, is_coarse in (critic, reference):
            if other is None:
                continue
            if checkpoint is None:
                other.shares_prompts = self.reader.shares_prompts
            else:
                other.shares_prompts = self._may_share(other, checkpoint, has_head=has_head, in_bfloat16=is_coarse)

    def _set_packing(self, *, in_bfloat16: bool) -> None:
        """Let the networks whose outputs stay the same compute packed rows; see `parity.check_packing`."""
        arguments = self.arguments
        networks = (
            (self.reader, arguments.model_name, True),
            (self.value_reader, arguments.critic_model, False),
            (self.ref_reader, arguments.kl_model, True),
        )
        for reader, checkpoint, has_head in networks:
            if reader is None:
                continue
            # Copies of the policy pack as it does; another checkpoint may have another architecture.
            if checkpoint is None:
                reader.packing = self.reader.packing
                continue
            is_rounded = in_bfloat16 or (reader is self.ref_reader and arguments.reference_dtype == "bfloat16")
            reader.packing = check_packing(reader, checkpoint, has_head=has_head, in_bfloat16=is_rounded)

    def _check_log_probs(self, reader: EpisodeReader, name: str, **options: Any) -> None:
        """Check a reader's log-probs; see `parity.check_parity`."""
        check_parity(reader, name, **options)

    def _may_share(self, reader: EpisodeReader, name: str, **options: Any) -> bool:
        """Return whether a reader may compute a prompt once for all of its responses; see `parity.check_sharing`."""
        return check_sharing(reader, name, **options)

    def _check_gradients(self) -> None:
        """Check that quantized layers give the adapters their gradients, in the mode of an update without dropout."""
        self.train(self.arguments.gradient_checkpointing and not self.arguments.dropout)
        check_gradients(self.reader, self.arguments.model_name, self._probe(self.reader))
        self.set_training_mode(False)

    def _critic_parameters(self) -> Iterator[nn.Parameter]:
        if self.value_model is not None:
            yield from self.value_model.parameters()
        if self.value_head is not None:
            yield from self.value_head.parameters()

    def to(self, *args: Any, **kwargs: Any) -> LMActorCriticPolicy:
        """Move the networks; critic and reference model stay on devices of their own, if the arguments name any."""
        devices = {
            "ref_model": self.arguments.reference_device,
            "value_model": self.arguments.critic_device,
            "value_head": self.arguments.critic_device,
        }
        for name, network in self.named_children():
            device = devices.get(name)
            if device is not None:
                network.to(device)
            else:
                network.to(*args, **kwargs)
        return self

    # --- properties ---------------------------------------------------------------------------------------------

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the model's vocabulary."""
        return _vocab_size(self.policy_model)

    @property
    def model(self) -> PreTrainedModel:
        """The language model that is trained; used by metrics that take a model."""
        return self.policy_model

    @property
    def n_parameters(self) -> int:
        """Number of parameters of the language model."""
        return n_weights(self.policy_model)

    @property
    def prompt_truncation_side(self) -> Literal["left", "right"]:
        """Side on which long prompts are truncated in evaluation."""
        return self.arguments.prompt_truncation_side

    @property
    def has_reference(self) -> bool:
        """True if there is a reference model; without one the KL is 0."""
        return self.ref_model is not None

    @property
    def has_critic(self) -> bool:
        """True if there is a critic; without one all values are 0."""
        return self.value_head is not None

    @property
    def shares_prompts(self) -> bool:
        """True if every network computes a prompt once for all of its responses in a pass, in the current mode."""
        readers = [reader for reader in (self.reader, self.value_reader, self.ref_reader) if reader is not None]
        return all(reader.shares_prompts and not reader.model.training for reader in readers)

    @property
    def _logits_budget(self) -> int:
        """Number of float32 logits, of 4 bytes each, that `logits_budget_mb` allows."""
        return int(self.arguments.logits_budget_mb * 2**20 / 4)

    def set_training_mode(self, mode: bool) -> None:
        """Set training mode; Stable-Baselines3 calls this before updates. Dropout stays off unless configured.

        Gradient checkpointing works only in training mode, so it enables training mode too; all dropout rates are then
        0 unless `dropout` is on. In training mode the engine rests, outside of it the moments may be in main memory.
        """
        self.train(mode and (self.arguments.dropout or self.arguments.gradient_checkpointing))
        if self.ref_model is not None:
            self.ref_model.eval()

        # Here, since this is the only call that every algorithm of Stable-Baselines3 makes before an update.
        if mode:
            self.engine.rest()

        # The call before every rollout, also of Stable-Baselines3's algorithms, and after a checkpoint was loaded.
        elif self._offloads_moments:
            offload_moments(self.optimizer)

    def free_update_memory(self) -> None:
        """Free what only updates need, at the end of one: the gradients, and with `offload` the moments' memory."""
        self.optimizer.zero_grad()
        if self._offloads_moments:
            offload_moments(self.optimizer)

    def _autocast(self, reader: EpisodeReader | None = None) -> AbstractContextManager[Any]:
        """Compute in bfloat16 within the block, if `dtype` says so, on the reader's device (default: the policy's)."""
        if self.arguments.dtype != "bfloat16":
            return nullcontext()
        device = (reader or self.reader).device
        return torch.autocast(device.type, dtype=torch.bfloat16)

    def merging(self, reader: EpisodeReader | None = None) -> AbstractContextManager[None]:
        """Compute passes of a reader (default: the policy's) with merged adapters within the block, if it has any.

        Such a pass can be differentiated once.
        """
        adapters = self.merged_adapters.get(reader or self.reader)
        return nullcontext() if adapters is None else adapters.in_use()

    @torch.no_grad()
    def merged_gap(self, episodes: EpisodeBatch) -> float:
        """Return the largest difference of log-probs of actions with merged and with separate adapters, in nats.

        Raises:
            ModelError: it is more than rounding.
        """
        merged_log_prob = self.action_scores(episodes).log_prob
        log_prob = self.reader.scores(episodes, logits_budget=self._logits_budget).log_prob
        gap = float((merged_log_prob - log_prob).abs().max())

        # `not <=` instead of `>`: NaN is an error too.
        if not gap <= TOLERANCE:
            raise ModelError(
                f"log-probs with merged adapters differ by {gap:.3g} nats from those with separate ones, and rounding "
                f"explains at most {TOLERANCE}: set alg.policy.args.speedups.merged_adapters: false. The run can be "
                f"resumed with --change alg.policy.args.speedups.merged_adapters=false"
            )
        return gap

    # --- generation ---------------------------------------------------------------------------------------------

    @property
    def stays_split(self) -> bool:
        """True if weights are split over several processes, also while an external engine generates."""
        return self.is_sharded and self.engine.external is not None

    def gathered(self) -> AbstractContextManager[None]:
        """Keep the language model whole within the block, in which it generates; not if an external engine does.

        Several processes that have split its weights enter it together. Within it, each calls the model as often as it
        needs.
        """
        return self.reader.gathered() if self.is_sharded and not self.stays_split else nullcontext()

    @torch.no_grad()
    def generate(
        self,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        *,
        eos_token_ids: Sequence[int],
        max_new_tokens: int | None = None,
        generation_kwargs: Mapping[str, Any] | None = None,
        seed: int | None = None,
        **sampling: Any,
    ) -> EpisodeBatch:
        """Generate one response per prompt with the policy's engine; see `GenerationEngine.generate`.

        Returns:
            The finished episodes, on the policy's device.
        """
        # Split weights can only be read by all processes together, and so `PolicyEngine.prepare` has passed them on.
        if not self.is_sharded:
            self.engine.update(self)

        # The policy's own generator was built with its arguments, an external engine without them.
        generate = self.generator.generate
        merging = self.merging()
        if self.engine.external is not None:
            generate = self.engine.generate
            merging = nullcontext()
            if generation_kwargs is None:
                generation_kwargs = self.arguments.generation_kwargs

        with self.gathered(), merging:
            episodes = generate(
                prompt_ids,
                prompt_mask,
                eos_token_ids=eos_token_ids,
                max_new_tokens=max_new_tokens,
                generation_kwargs=generation_kwargs,
                seed=seed,
                **sampling,
            )
        self.engine.check_ids(episodes, self.vocab_size)
        return episodes.to(self.device)

    def new_contexts(self) -> Contexts | None:
        """Return a new argument `contexts` of `generate`; see `TextGenerator.new_contexts`."""
        return None if self.engine.external is not None else self.generator.new_contexts()

    @property
    def samples_other_distribution(self) -> bool:
        """True if `generation_kwargs` sample from another distribution than the one that is trained."""
        return samples_other_distribution(self.arguments.generation_kwargs)

    @torch.no_grad()
    def generation_log_prob(
        self, episodes: EpisodeBatch, *, eos_token_ids: Sequence[int], max_new_tokens: int | None
    ) -> Tensor:
        """Return the log-prob of each action under the distribution that `generation_kwargs` sample from `[n_tokens]`.

        Greedy responses have those of the model, as an engine gives them.

        Args:
            episodes: the episodes.
            eos_token_ids: tokens that end a response; a minimum length excludes them.
            max_new_tokens: the environment's limit.
        """
        arguments = generate_arguments(
            self.arguments.generation_kwargs,
            max_new_tokens=max_new_tokens,
            eos_token_ids=eos_token_ids,
            is_encoder_decoder=self.reader.prompt_side == "right",
        )
        logits = self.action_logits(episodes)  # [n_tokens, vocab]
        if arguments.get("min_new_tokens"):
            n_before = episodes.n_before_in_turn()
            is_too_early = (n_before < arguments["min_new_tokens"]).unsqueeze(1)
            is_end = torch.zeros_like(logits[:1], dtype=torch.bool)
            is_end[:, list(eos_token_ids)] = True
            logits = logits.masked_fill(is_too_early & is_end, -torch.inf)

        processors = []
        if arguments.get("do_sample"):
            processors = separate_warpers(arguments, None, self.device)[1]
        for processor in processors:
            logits = processor(episodes.response_ids, logits)
        return logits.log_softmax(dim=-1).gather(1, episodes.actions.unsqueeze(1)).squeeze(1)

    @property
    def uses_sampler_log_probs(self) -> bool:
        """True if the log-probs of plain sampling replace the policy's pass over a rollout; see `score_sampled`."""
        arguments = self.arguments
        if not (arguments.used_speedups.sampler_log_probs and arguments.samples_policy):
            return False

        # A shared critic reads the states of this pass.
        if self.has_critic and self.value_reader is None:
            return False

        # A user's subclass may compute another distribution than the one that is sampled, and a maskable policy samples
        # from a part of the vocabulary.
        computing = ("evaluate_actions", "action_scores", "score", "generate", "_read")
        is_overridden = any(getattr(type(self), name) is not getattr(LMActorCriticPolicy, name) for name in computing)
        return not is_overridden and type(self.generator) is TextGenerator

    # --- scoring ------------------------------------------------------------------------------------------------

    def evaluate_actions(
        self, observations: EpisodeBatch, actions: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute values, log-probs and entropies of all actions of the episodes, with gradients.

        Args:
            observations: the episodes.
            actions: Stable-Baselines3's argument; unused, since the episodes contain their actions.

        Returns:
            Values, log-probs and entropies, each flat `[n_tokens]`, float32.
        """
        values, scores = self._read(observations)
        return values, scores.log_prob, scores.entropy

    def action_scores(self, observations: EpisodeBatch) -> ActionScores:
        """Compute log-probs and entropies of all actions, with gradients; runs only the policy's network."""
        with self._autocast(), self.merging():
            return self.reader.scores(observations, logits_budget=self._logits_budget)

    def predict_values(self, observations: EpisodeBatch) -> Tensor:
        """Return the critic's values of all actions `[n_tokens]`, with gradients for the critic's own parameters.

        With `critic: shared` these are the value head's, since the trunk belongs to the actor. With `critic: none` all
        values are 0.
        """
        if not self.has_critic:
            return torch.zeros(observations.n_tokens, device=self.device)
        if self.value_reader is not None:
            return self._value_of(self._states(self.value_reader, observations))

        # `critic: shared`: the value loss must not move the trunk.
        with torch.no_grad():
            states = self._states(self.reader, observations)
        return self._value_of(states)

    def _states(self, reader: EpisodeReader, episodes: EpisodeBatch) -> Tensor:
        """Return the hidden states of all actions `[n_tokens, d]`, on the reader's device."""
        with self._autocast(reader), self.merging(reader):
            return reader.states(episodes.to(reader.device))

    def reference_kl(self, observations: EpisodeBatch, scores: ActionScores, *, top_k: int | None = None) -> Tensor:
        """Compute the KL from the policy to the reference of each action's distribution, over the vocabulary.

        Args:
            observations: the episodes.
            scores: their `action_scores`.
            top_k: see `core.token_scores.vocabulary_kl`.

        Returns:
            `[n_tokens]`, with gradients for the policy.
        """
        assert self.ref_reader is not None

        # The hidden states of `scores` have their graph, so that the policy's pass is not made again.
        with self._autocast(), self.merging():
            policy = self.reader.distributions(observations, scores.states)
        with self._autocast(self.ref_reader), torch.no_grad():
            reference = self.ref_reader.distributions(observations.to(self.ref_reader.device))
        return vocabulary_kl(policy, reference, top_k=top_k, logits_budget=self._logits_budget)

    def action_logits(self, observations: EpisodeBatch) -> Tensor:
        """Return the policy's logits `[n_tokens, vocab]` for all actions, float32, twice differentiable.

        Tokens that the episodes do not allow have a logit far below all others.
        """
        with self._autocast():
            return self.reader.action_logits(observations)

    @torch.no_grad()
    def score(self, episodes: EpisodeBatch) -> EpisodeScores:
        """Return the values, log-probs and entropies that a rollout stores, without gradients."""
        self.set_training_mode(False)

        # Through `evaluate_actions` where it has all that is needed: a policy of a user may override it.
        if episodes.allowed is None:
            values, log_prob, entropy = self.evaluate_actions(episodes)
            raw_log_prob = log_prob
        else:
            values, (log_prob, entropy, raw_log_prob, _) = self._read(episodes)
        return EpisodeScores(values, log_prob, entropy, self._ref_log_prob(episodes, raw_log_prob), raw_log_prob)

    @torch.no_grad()
    def score_sampled(self, episodes: EpisodeBatch) -> EpisodeScores:
        """Return what `score` returns, with log-probs and entropies that were recorded while sampling.

        Values and the reference's log-probs need their passes; that of the policy itself is saved.
        """
        self.set_training_mode(False)
        log_prob, entropy = episodes.behavior_log_prob, episodes.behavior_entropy
        assert log_prob is not None and entropy is not None
        values = self.predict_values(episodes)
        return EpisodeScores(values, log_prob, entropy, self._ref_log_prob(episodes, log_prob), log_prob)

    def _ref_log_prob(self, episodes: EpisodeBatch, raw_log_prob: Tensor) -> Tensor:
        """Return the reference's log-prob of each action `[n_tokens]`; without a reference, that of the policy."""
        if self.ref_reader is None:
            return raw_log_prob

        # The KL is that of the full distributions, so the reference is not masked.
        unmasked = episodes.without_masks().to(self.ref_reader.device)
        with self._autocast(self.ref_reader):
            ref_log_prob = self.ref_reader.log_probs(unmasked, logits_budget=self._logits_budget)
        return ref_log_prob.to(self.device)

    @torch.no_grad()
    def final_values(self, episodes: EpisodeBatch) -> Tensor:
        """Return the critic's value after each episode's last token `[n]`."""
        if not self.has_critic:
            return torch.zeros(episodes.n_episodes, device=self.device)
        reader = self.value_reader or self.reader
        with self._autocast(reader), self.merging(reader):
            return self._value_of(reader.final_states(episodes.to(reader.device)))

    def _read(self, episodes: EpisodeBatch) -> tuple[Tensor, ActionScores]:
        """Return values and scores of all actions, from one forward pass each of critic and policy."""
        with self._autocast(), self.merging():
            scores = self.reader.scores(episodes, logits_budget=self._logits_budget)
            if not self.has_critic:
                return torch.zeros(episodes.n_tokens, device=self.device), scores

            # `critic: shared`: the value head reads the policy's own states, through which its gradients flow too.
            # A model whose logits are no linear function of its states computes them in a pass of their own.
            states = scores.states
            if self.value_reader is not None:
                states = self._states(self.value_reader, episodes)
            elif states is None:
                states = self._states(self.reader, episodes)
            return self._value_of(states), scores

    def _value_of(self, states: Tensor) -> Tensor:
        """Return the values `[n]` of hidden states `[n, d]`, on the policy's device."""
        assert self.value_head is not None
        # In float32 also with `dtype: bfloat16`, whose 8 bits would be too coarse for returns and their differences.
        with torch.autocast(states.device.type, enabled=False):
            values: Tensor = self.value_head(states.float()).squeeze(-1)
        return values.to(self.device)

    # --- one step at a time (Stable-Baselines3's `predict`) --------------------------------------------------------

    def forward(self, observation: dict[str, Tensor], deterministic: bool = False) -> Tensor:
        """Choose the next token of each environment `[n]`."""
        return self._predict(observation, deterministic)

    def _predict(self, observation: Any, deterministic: bool = False) -> Tensor:
        """Choose from the model's own distribution; `generation_kwargs` apply to rollouts and evaluations only."""
        with torch.no_grad(), self._autocast():
            logits = self._next_token_logits(observation)
        if deterministic:
            return logits.argmax(dim=-1)
        return torch.multinomial(logits.softmax(dim=-1), 1).squeeze(1)

    def _next_token_logits(self, observation: Any) -> Tensor:
        """Return the logits `[n, vocab]` of a single step."""
        return self.reader.next_token_logits(observation)

    # --- state of a run -----------------------------------------------------------------------------------------

    def training_state(self) -> dict[str, Tensor]:
        """Return trained parameters and buffers by name, each once. The tensors are not copied."""
        state = {name: parameter.data for name, parameter in self.named_parameters() if parameter.requires_grad}

        # A reference that follows the policy changes too, although no optimizer trains it.
        if self._updates_reference and self.ref_model is not None:
            state |= {f"ref_model.{name}": parameter.data for name, parameter in self.ref_model.named_parameters()}

        # The reference's buffers stay those of its checkpoint.
        for name, buffer in self.named_buffers():
            if not name.startswith("ref_model."):
                state[name] = buffer
        return state

    def allow_reference_updates(self) -> None:
        """Make the reference model's weights part of the training state.

        Raises:
            ModelError: the reference model has weights of other shapes than the policy.
        """
        self._updates_reference = True
        if self.ref_model is None:
            return
        shapes = [weight.shape for weight in self.policy_model.parameters()]
        if [weight.shape for weight in self.ref_model.parameters()] != shapes:
            raise ModelError("the reference model cannot be updated: its weights have other shapes than the policy's")

    @torch.no_grad()
    def update_reference(self, fraction: float) -> None:
        """Change the reference model's weights in place to `fraction * policy + (1 - fraction) * reference`."""
        if self.ref_model is None:
            return
        self._reshard()
        for mine, theirs in zip(self.ref_model.parameters(), self.policy_model.parameters(), strict=True):
            if fraction == 1.0:
                mine.copy_(theirs)
            else:
                mine.lerp_(theirs.to(mine.device), fraction)

    # --- saving, and passing weights on -------------------------------------------------------------------------

    def led_by_main(
        self, *, with_optimizer: bool = False, works: Mapping[str, Callable[[], Any]] | None = None
    ) -> AbstractContextManager[None]:
        """Let the main process read, save and pass on split weights within the block; the processes enter it together.

        Only the main one does the block's work, while the others take part in what it reads: see
        `sharding.led_by_main`.

        Args:
            with_optimizer: also the moments of the optimizer.
            works: further works of the other processes, as in `sharding.led_by_main`.
        """
        if not self.is_sharded:
            return nullcontext()
        self._reshard()
        reference = self.ref_model if self._updates_reference else None  # a fixed one is in no checkpoint
        networks = (self.policy_model, self.value_model, self.value_head, reference)
        modules = [network for network in networks if network is not None]
        works_of_policy = {_PASS: self._take_part_in_pass, _FINGERPRINT: self._summed_bits}
        return led_by_main(modules, self.optimizer if with_optimizer else None, works_of_policy | dict(works or {}))

    def _take_part_in_pass(self) -> None:
        """Make a pass of the language model without episodes of this process."""
        self.log_prob(self._probe(self.reader))

    def _reshard(self) -> None:
        """Free split weights that are whole since the last pass; required before they are read or changed."""
        for network in self._sharded:
            network.reshard()

    def fingerprint(self) -> Tensor:
        """Return one number for each weight of the language model; it changes if one of the weight's bits changes.

        If the weights are split, only the main process may call this, within `led_by_main`.
        """
        with_all(_FINGERPRINT)
        return self._summed_bits()

    @torch.no_grad()
    def _summed_bits(self) -> Tensor:
        """Return the sum of the bits of each weight `[n_weights]`, over all processes that have a part of it."""
        # Bits are summed as integers: a sum of floats would lose small changes of large weights in rounding.
        sums = []
        for weight in self.policy_model.parameters():
            bits = own_part(weight.detach()).contiguous().view(_BITS[weight.element_size()])
            sums.append(bits.sum(dtype=torch.int64).cpu())
        total = torch.stack(sums)
        if self.is_sharded:
            torch.distributed.all_reduce(total)
        return total

    @torch.no_grad()
    def log_prob(self, episodes: EpisodeBatch) -> Tensor:
        """Return the log-probs of all actions `[n_tokens]`, for the comparison with those of an engine.

        If the weights are split, only the main process may call this, within `led_by_main`.
        """
        with_all(_PASS)
        self.set_training_mode(False)
        log_prob = self.action_scores(episodes.to(self.device)).log_prob
        self._reshard()  # split weights are read as such afterwards
        return log_prob.float().cpu()

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and values of the language model's weights, as a checkpoint of the plain model has them.

        Adapters are merged, and tied weights come under each of their names. Split weights are whole; no more than one
        transformer block is in memory at a time. If the weights are split, only the main process may call this, within
        `led_by_main`, in which it also updates an engine.
        """
        return full_weights(self.policy_model)

    def write_full_weights(self, folder: Path) -> None:
        """Write `full_weights` with the model's config to a folder, as an engine loads them.

        Raises:
            OSError: the folder cannot be written.
        """
        save_whole(self.policy_model, folder, self._saved_dropout, tied=True)

    def write_adapters(self, folder: Path) -> None:
        """Write the adapters to a folder as PEFT saves them, also if `merge_on_save` is set.

        Raises:
            OSError: the folder cannot be written.
        """
        save_adapters(self.policy_model, folder)

    def save_model(
        self,
        folder: str | Path,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        eos_token_ids: Collection[int] = (),
    ) -> Path:
        """Save the language model and the tokenizer so that `AutoModel*.from_pretrained(folder)` loads them.

        With `peft` only the adapters are saved, unless `merge_on_save` is set. Dropout rates and the generation config
        are those of the initial checkpoint, but for the end tokens if `eos_token_ids` are given.
        """
        return save_language_model(
            self.policy_model,
            folder,
            tokenizer,
            checkpoint_dropout=self._saved_dropout,
            merge=self.arguments.merge_on_save,
            eos_token_ids=eos_token_ids,
        )

    def save_critic(self, folder: str | Path) -> Path:
        """Save the network and the head of a separate critic; `critic_model: folder` loads both.

        Raises:
            ModelError: the policy has no separate critic.
            OSError: the folder cannot be written.
        """
        if self.value_model is None or self.value_head is None:
            raise ModelError("only a separate critic can be saved: this policy has critic: " + self.arguments.critic)

        # The rates that are known are those of the policy's checkpoint, which a critic from another one does not have.
        rates = self._saved_dropout if self.arguments.critic_model is None else {}
        folder = save_language_model(self.value_model, folder, checkpoint_dropout=rates)
        save_value_head(self.value_head, folder)
        return folder

    def _get_constructor_parameters(self) -> dict[str, Any]:
        return {
            "observation_space": self.observation_space,
            "action_space": self.action_space,
            "lr_schedule": self._dummy_schedule,
            "use_reference": self.ref_model is not None,
            **asdict(self.arguments),
        }


class CausalLMActorCriticPolicy(LMActorCriticPolicy):
    """Actor-critic policy of any `AutoModelForCausalLM`: GPT-2, OPT, GPT-NeoX, Llama, Qwen, Mistral, Gemma ..."""

    reader_class = CausalReader
    auto_class = AutoModelForCausalLM


class Seq2SeqLMActorCriticPolicy(LMActorCriticPolicy):
    """Actor-critic policy of any `AutoModelForSeq2SeqLM`: T5, BART, Marian, mBART, Blenderbot ..."""

    reader_class = Seq2SeqReader
    auto_class = AutoModelForSeq2SeqLM


def _vocab_size(model: PreTrainedModel) -> int:
    return int(model.config.get_text_config().vocab_size)
