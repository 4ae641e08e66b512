"""A language model as an actor-critic.

    policy_model   the language model that is trained
    value_model    the critic's own network, from the same weights or others; absent with `critic: shared`
    value_head     hidden state -> value; absent with `critic: none`
    ref_model      frozen copy that KL is measured against; absent where no KL is asked for

`generate` writes episodes, `evaluate_actions` scores them in one teacher-forced pass. The signature is that of a
Stable-Baselines3 actor-critic policy, with an `EpisodeBatch` in the place of the observations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from gymnasium import spaces
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.type_aliases import Schedule
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rl4lms_like.core.episodes import EpisodeBatch
from rl4lms_like.core.errors import ModelError
from rl4lms_like.policies.arguments import PolicyArguments
from rl4lms_like.policies.networks import load_networks
from rl4lms_like.policies.optimizer import make_optimizer, parameter_groups
from rl4lms_like.policies.parity import (
    check_parity,
    first_episodes,
    probe_episodes,
    require_finite,
    warn_of_dynamic_positions,
)
from rl4lms_like.policies.saving import save_language_model
from rl4lms_like.policies.teacher_forcing import ActionScores, EpisodeReader, EpisodeScores
from rl4lms_like.policies.writing import TextWriter


class LMActorCriticPolicy(BasePolicy):
    """Base of the causal and the seq2seq policy.

    Args:
        observation_space: of the environment.
        action_space: `Discrete(vocabulary)`.
        lr_schedule: Stable-Baselines3's.
        use_reference: load a reference model.
        device: where the networks live; they are checked there.
        optimizer_class: Stable-Baselines3's argument; its A2C passes RMSprop here.
        use_sde: Stable-Baselines3's; must be False.
        arguments: see the policy's `arguments_class`.

    Raises:
        ModelError: a checkpoint cannot be loaded, or does not fit the action space.
        ParityError: its teacher-forced log-probs are not the ones it samples with.
    """

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
        optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
        use_sde: bool = False,
        **arguments: Any,
    ) -> None:
        self.arguments = self.arguments_class(**arguments)
        super().__init__(
            observation_space,
            action_space,
            optimizer_class=optimizer_class,
            optimizer_kwargs=dict(self.arguments.optimizer_kwargs),
        )
        self._load(use_reference)
        self._check_vocabulary()
        self.to(device)
        self.set_training_mode(False)
        with first_episodes(self.policy_model, self.arguments.model_name):
            self._build_heads()
            self.to(device)
            self._check_parity()
        space = getattr(observation_space, "spaces", {}).get("input_encoded_pt")
        longest = None if space is None else space.shape[0]
        warn_of_dynamic_positions(self.policy_model, self.arguments.model_name, longest)
        self.optimizer = make_optimizer(
            optimizer_class,
            parameter_groups(
                self.policy_model.parameters(), self._critic_parameters(), weight_decay=self.arguments.weight_decay
            ),
            learning_rate=lr_schedule(1),
            optimizer_kwargs=self.arguments.optimizer_kwargs,
        )

    # --- construction -------------------------------------------------------------------------------------------

    def _load(self, use_reference: bool) -> None:
        options = self.arguments
        networks = load_networks(self.auto_class, options, use_reference=use_reference)
        self.policy_model: PreTrainedModel = networks.policy
        self.value_model: PreTrainedModel | None = networks.critic
        self.ref_model: PreTrainedModel | None = networks.reference
        self._saved_dropout = networks.dropout_rates
        self.reader: EpisodeReader = self.reader_class(self.policy_model, compile=options.compile)
        self.value_reader: EpisodeReader | None = (
            None if self.value_model is None else self.reader_class(self.value_model, compile=options.compile)
        )
        self.ref_reader: EpisodeReader | None = None if self.ref_model is None else self.reader_class(self.ref_model)
        self.writer = TextWriter(
            self.policy_model,
            generation_kwargs=options.generation_kwargs,
            prompt_truncation_side=options.prompt_truncation_side,
            bfloat16=options.dtype == "bfloat16",
        )

    def _check_vocabulary(self) -> None:
        assert isinstance(self.action_space, spaces.Discrete)
        if int(self.action_space.n) != self.vocab_size:
            raise ModelError(
                f"{self.arguments.model_name!r} has {self.vocab_size} output tokens, the environment's action space "
                f"{self.action_space.n}: build it with vocab_size={self.vocab_size}"
            )
        reference = self.ref_model
        if reference is not None and reference.config.get_text_config().vocab_size != self.vocab_size:
            raise ModelError(
                f"the reference {self.arguments.reference_model!r} has "
                f"{reference.config.get_text_config().vocab_size} tokens, the policy {self.vocab_size}"
            )

    def _build_heads(self) -> None:
        probe = probe_episodes(self.vocab_size, self.reader.prompt_side).to(self.policy_model.device)
        for reader in (self.reader, self.ref_reader):
            if reader is not None:
                reader.probe_head(probe)
        self.value_head: nn.Linear | None = None
        with torch.no_grad():
            states = (self.value_reader or self.reader).states(probe)
        name = self.arguments.critic_model or self.arguments.model_name
        require_finite(self.value_model or self.policy_model, name, states)
        if self.arguments.critic == "none":
            return
        self.value_head = nn.Linear(states.shape[1], 1, bias=False)
        if self.arguments.value_head_init == "zero":
            nn.init.zeros_(self.value_head.weight)

    def _check_parity(self) -> None:
        needs_bfloat16 = "flash" in (self.arguments.attn_implementation or "")
        excluded = self.arguments.generation_kwargs.get("suppress_tokens") or ()
        checked = [(self.reader, self.arguments.model_name)]
        if self.ref_reader is not None and self.arguments.reference_model is not None:
            checked.append((self.ref_reader, self.arguments.reference_model))
        for reader, name in checked:
            check_parity(reader, name, in_bfloat16=needs_bfloat16, never_written=excluded)

    def _critic_parameters(self) -> Iterator[nn.Parameter]:
        if self.value_model is not None:
            yield from self.value_model.parameters()
        if self.value_head is not None:
            yield from self.value_head.parameters()

    # --- facts --------------------------------------------------------------------------------------------------

    @property
    def vocab_size(self) -> int:
        """The number of tokens the model chooses from."""
        return int(self.policy_model.config.get_text_config().vocab_size)

    @property
    def model(self) -> PreTrainedModel:
        """The language model that is trained, for metrics of the model itself."""
        return self.policy_model

    @property
    def n_parameters(self) -> int:
        """Parameters of the language model."""
        return sum(parameter.numel() for parameter in self.policy_model.parameters())

    @property
    def prompt_truncation_side(self) -> Literal["left", "right"]:
        """Which side of a long prompt is cut in evaluation."""
        return self.arguments.prompt_truncation_side

    @property
    def has_reference(self) -> bool:
        """Whether there is a reference; without one the KL is 0."""
        return self.ref_model is not None

    @property
    def has_critic(self) -> bool:
        """Whether there is a critic; without one all values are 0."""
        return self.value_head is not None

    @property
    def _logits_budget(self) -> int:
        return int(self.arguments.logits_budget_mb * 2**20 / 4)

    def set_training_mode(self, mode: bool) -> None:
        """Stable-Baselines3 switches to training before updates; dropout stays off unless the config asks for it.

        Gradient checkpointing works in training mode only; all dropout rates are 0 then.
        """
        self.train(mode and (self.arguments.dropout or self.arguments.gradient_checkpointing))
        if self.ref_model is not None:
            self.ref_model.eval()

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.arguments.dtype == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    # --- writing ------------------------------------------------------------------------------------------------

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
    ) -> EpisodeBatch:
        """One response for each prompt.

        Args:
            prompt_ids: `[n, prompt_len]`, padded on either side.
            prompt_mask: `[n, prompt_len]`, True or 1 on real tokens.
            eos_token_ids: tokens that end a response; empty = all responses run to the length limit.
            max_new_tokens: the environment's limit.
            generation_kwargs: default: those of the policy.
            seed: of the sampling; None draws from torch's global generator.

        Returns:
            The finished episodes, on the policy's device.
        """
        return self.writer.generate(
            prompt_ids,
            prompt_mask,
            eos_token_ids=eos_token_ids,
            max_new_tokens=max_new_tokens,
            generation_kwargs=generation_kwargs,
            seed=seed,
        )

    # --- scoring ------------------------------------------------------------------------------------------------

    def evaluate_actions(
        self, observations: EpisodeBatch, actions: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Values, log-probs and entropies of all actions of some episodes, with gradients.

        Args:
            observations: the episodes.
            actions: Stable-Baselines3's argument; the episodes know their actions.

        Returns:
            Values, log-prob and entropy, each flat `[n_tokens]`, float32.
        """
        values, scores = self._read(observations)
        return values, scores.log_prob, scores.entropy

    def action_scores(self, observations: EpisodeBatch) -> ActionScores:
        """Log-probs and entropies of all actions, with gradients; asks the policy's network alone."""
        with self._autocast():
            return self.reader.scores(observations, logits_budget=self._logits_budget)

    def predict_values(self, observations: EpisodeBatch) -> Tensor:
        """The critic's values of all actions `[n_tokens]`, with gradients for what is the critic's alone.

        With `critic: shared` that is its head: the trunk is the actor's. With `critic: none` they are 0.
        """
        if not self.has_critic:
            return self._no_values(observations.n_tokens)
        with self._autocast():
            if self.value_reader is not None:
                return self._value_of(self.value_reader.states(observations))
            with torch.no_grad():
                states = self.reader.states(observations)
            return self._value_of(states)

    def action_logits(self, observations: EpisodeBatch) -> Tensor:
        """The policy's logits `[n_tokens, vocab]` for all actions, float32, twice differentiable.

        Tokens that the episodes do not allow have a logit far below all others.
        """
        with self._autocast():
            return self.reader.action_logits(observations)

    @torch.no_grad()
    def score(self, episodes: EpisodeBatch) -> EpisodeScores:
        """Everything a rollout needs to know of its episodes, without gradients."""
        self.set_training_mode(False)
        if episodes.allowed is None:
            values, log_prob, entropy = self.evaluate_actions(episodes)
            raw_log_prob = log_prob
        else:
            values, (log_prob, entropy, raw_log_prob, _) = self._read(episodes)
        if self.ref_reader is None:
            return EpisodeScores(values, log_prob, entropy, raw_log_prob, raw_log_prob)
        with self._autocast():
            unmasked = replace(episodes, allowed=None)
            ref_log_prob = self.ref_reader.scores(unmasked, logits_budget=self._logits_budget).log_prob
        return EpisodeScores(values, log_prob, entropy, ref_log_prob, raw_log_prob)

    @torch.no_grad()
    def final_values(self, episodes: EpisodeBatch) -> Tensor:
        """The critic's value after each episode's last token `[n]`."""
        if not self.has_critic:
            return self._no_values(episodes.n_episodes)
        with self._autocast():
            states = (self.value_reader or self.reader).final_states(episodes)
            return self._value_of(states)

    def _read(self, episodes: EpisodeBatch) -> tuple[Tensor, ActionScores]:
        """Values and scores of all actions, from one forward pass each of critic and policy."""
        with self._autocast():
            scores = self.reader.scores(episodes, logits_budget=self._logits_budget)
            return self._values(episodes, scores.states), scores

    def _values(self, episodes: EpisodeBatch, states: Tensor | None) -> Tensor:
        if not self.has_critic:
            return self._no_values(episodes.n_tokens)
        if self.value_reader is not None:
            states = self.value_reader.states(episodes)
        elif states is None:
            states = self.reader.states(episodes)
        return self._value_of(states)

    def _no_values(self, n: int) -> Tensor:
        return torch.zeros(n, device=self.device)

    def _value_of(self, states: Tensor) -> Tensor:
        assert self.value_head is not None
        with torch.autocast(self.device.type, enabled=False):
            values: Tensor = self.value_head(states.float()).squeeze(-1)
        return values

    # --- one step at a time (Stable-Baselines3's `predict`) --------------------------------------------------------

    def forward(self, observation: dict[str, Tensor], deterministic: bool = False) -> Tensor:
        """The next token for each environment `[n]`."""
        return self._predict(observation, deterministic)

    def _predict(self, observation: Any, deterministic: bool = False) -> Tensor:
        """From the model's own distribution: `generation_kwargs` shape rollouts and evaluations, not single steps."""
        with torch.no_grad(), self._autocast():
            logits = self._next_token_logits(observation)
        if deterministic:
            return logits.argmax(dim=-1)
        return torch.multinomial(logits.softmax(dim=-1), 1).squeeze(1)

    def _next_token_logits(self, observation: Any) -> Tensor:
        """Logits `[n, vocab]` that a single step chooses by."""
        return self.reader.next_token_logits(observation)

    # --- what changes during a run ------------------------------------------------------------------------------

    def training_state(self) -> dict[str, Tensor]:
        """Trained parameters and buffers by name, each once: the tensors themselves, not copies."""
        named = {name: parameter.data for name, parameter in self.named_parameters() if parameter.requires_grad}
        return named | {name: buffer for name, buffer in self.named_buffers() if not name.startswith("ref_model.")}

    # --- saving -------------------------------------------------------------------------------------------------

    def save_model(self, folder: str | Path, tokenizer: PreTrainedTokenizerBase | None = None) -> Path:
        """Writes the language model so that `AutoModel*.from_pretrained(folder)` loads it, the tokenizer beside it.

        With `peft` that are the adapters alone, unless `merge_on_save` asks for a whole model. Dropout rates and the
        generation config are those of the checkpoint it started from.
        """
        return save_language_model(
            self.policy_model,
            folder,
            tokenizer,
            checkpoint_dropout=self._saved_dropout,
            merge=self.arguments.merge_on_save,
        )

    def _get_constructor_parameters(self) -> dict[str, Any]:
        return {
            "observation_space": self.observation_space,
            "action_space": self.action_space,
            "lr_schedule": self._dummy_schedule,
            "use_reference": self.ref_model is not None,
            **asdict(self.arguments),
        }
