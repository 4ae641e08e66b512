"""Observation of an episode, passed to policies and rewards: the prompt and the response so far.

    prompt_or_input   [P]    left-padded prompt ids
    context           [T]    the response so far, right-aligned, left-padded; starts with `context_start_token` if given
    input             [P+T]  prompt and context joined, left-padded

An observation is immutable and stores only ids. Texts and arrays are computed when they are first read, so that
playing a whole episode costs one decode, not one per token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from rl4lms_like.core.continuation import Continuations
from rl4lms_like.core.sample import Sample
from rl4lms_like.system.errors import DataPoolError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

KEYS = ("prompt_or_input", "context", "input")
"""Names of the three sequences of an observation; each has `<key>_encoded_pt` and `<key>_attention_mask_pt`."""

NO_LIMIT = 2**31
"""Maximum prompt length that truncates no prompt."""


class PromptEncoder(Protocol):
    """Encoder of prompts with pictures (`core.picture_encoder.PictureEncoder`)."""

    def encode(self, sample: Sample, max_length: int) -> np.ndarray:
        """Return the ids `[length]` of a prompt with pictures; it is an error if there are more than `max_length`."""

    def refuse_placeholders(self, sample: Sample | str, ids: np.ndarray) -> None:
        """Raise if the ids of a text without pictures have a placeholder of one."""

    def number(self, sample: Sample) -> int:
        """Return the number of a sample's pictures; 0 without pictures."""


@dataclass(frozen=True)
class TextLayout:
    """Tokenizer and sequence lengths, shared by all observations of an environment.

    Args:
        tokenizer: encodes prompts, decodes responses.
        max_prompt_length: P, in tokens; longer prompts are truncated on `prompt_truncation_side`.
        max_context_length: T, in tokens.
        context_start_token: first context token of an encoder-decoder model, else None.
        prompt_truncation_side: `left` or `right`.
        is_encoder_decoder: whether a response is a text of its own instead of the continuation of its prompt; also
            implied by a `context_start_token`.
        pictures: encodes prompts with pictures; None if the model reads texts only.
    """

    tokenizer: PreTrainedTokenizerBase
    max_prompt_length: int
    max_context_length: int
    context_start_token: int | None = None
    prompt_truncation_side: Literal["left", "right"] = "left"
    is_encoder_decoder: bool = False
    pictures: PromptEncoder | None = None

    @cached_property
    def continuations(self) -> Continuations:
        """Texts and ids of responses."""
        is_encoder_decoder = self.is_encoder_decoder or self.context_start_token is not None
        return Continuations(self.tokenizer, follows_prompt=not is_encoder_decoder)

    @property
    def pad_token_id(self) -> int:
        """Padding id: the tokenizer's pad token, else its EOS token, else 0."""
        # GPT-2's tokenizer, for instance, has no pad token. Masks exclude the padding, so any id would do.
        for id in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id):
            if id is not None:
                return int(id)
        return 0

    def encode(self, prompt: str | Sample) -> np.ndarray:
        """Return prompt ids `[length]` with the tokenizer's special tokens, truncated to `max_prompt_length`."""
        return self.encode_all([prompt])[0]

    def encode_all(self, prompts: Sequence[str | Sample], max_length: int | None = None) -> list[np.ndarray]:
        """Return the ids of several prompts, texts or samples, with one tokenizer call.

        They are truncated to `max_length` tokens, by default to `max_prompt_length`.
        Special tokens are added to a text, and truncation keeps them, but no end token to the prompt of a causal model.
        A prompt that a chat template rendered contains its special tokens, and none are added.

        Raises:
            DataPoolError: a prompt has pictures that the model does not read, or is too long with them; or a prompt
                without pictures has a placeholder of one.
        """
        if self.pictures is not None:
            limit = self.max_prompt_length if max_length is None else max_length
            return [self._encoded_for_vision(self.pictures, prompt, limit) for prompt in prompts]
        refuse_images(prompts)
        return self._encoded_texts(prompts, max_length)

    def numbers(self, samples: Sequence[Sample]) -> list[int] | None:
        """Return the numbers of the samples' pictures, 0 without pictures; None if the model reads texts only."""
        return None if self.pictures is None else [self.pictures.number(sample) for sample in samples]

    def _encoded_for_vision(self, pictures: PromptEncoder, prompt: str | Sample, max_length: int) -> np.ndarray:
        """Return the ids of a prompt of a vision-language model."""
        if isinstance(prompt, Sample) and prompt.images:
            return pictures.encode(prompt, max_length)
        (ids,) = self._encoded_texts([prompt], max_length)
        pictures.refuse_placeholders(prompt, ids)
        return ids

    def _encoded_texts(self, prompts: Sequence[str | Sample], max_length: int | None) -> list[np.ndarray]:
        """Return the ids of prompts without pictures; arguments as in `encode_all`."""
        is_rendered = [isinstance(prompt, Sample) and prompt.rendered_prompt is not None for prompt in prompts]
        if any(is_rendered) and not all(is_rendered):
            # One call has one setting of `add_special_tokens`.
            return [self._encoded_texts([prompt], max_length)[0] for prompt in prompts]

        texts = [_text_of(prompt) for prompt in prompts]
        with _truncating_on(self.prompt_truncation_side, self.tokenizer):
            # A tokenizer that appends an end token does so after truncation.
            n_appended = 0 if any(is_rendered) else len(self.continuations.appended_ids)
            encoded = self.tokenizer(
                texts,
                add_special_tokens=not any(is_rendered),
                truncation=True,
                max_length=(self.max_prompt_length if max_length is None else max_length) + n_appended,
                padding=False,
                verbose=False,
            )
        return [np.asarray(ids[: len(ids) - n_appended], dtype=np.int64) for ids in encoded["input_ids"]]


def refuse_images(prompts: Sequence[str | Sample]) -> None:
    """Raise if one of the prompts of a model that reads texts only has images.

    Raises:
        DataPoolError: a prompt has images.
    """
    for prompt in prompts:
        if isinstance(prompt, Sample) and prompt.images:
            raise DataPoolError(
                f"the prompt of sample {prompt.id!r} has images, which the model of this run does not read: train a "
                f"vision-language model with alg.policy.id: vision_lm_actor_critic_policy (on given texts, with "
                f"alg.model_type: vision), or remove the images (of image_column, or in the messages)"
            )


def _text_of(prompt: str | Sample) -> str:
    """Return the text that a model reads as its prompt."""
    if isinstance(prompt, str):
        return prompt
    return prompt.prompt_or_input_text if prompt.rendered_prompt is None else prompt.rendered_prompt


@contextmanager
def _truncating_on(side: str, tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
    """Let the tokenizer truncate on `side`, and restore its settings afterwards.

    A fast tokenizer's backend keeps the length limit of its last call, and would save it into `tokenizer.json`.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    side_before = tokenizer.truncation_side
    limit_before = backend and backend.truncation

    tokenizer.truncation_side = side
    try:
        yield
    finally:
        tokenizer.truncation_side = side_before
        if backend and limit_before:
            backend.enable_truncation(**limit_before)
        elif backend:
            backend.no_truncation()


def _tensor(key: str, doc: str) -> property:
    """Return a property with a copy of one of an observation's `arrays`, as RL4LMs' rewards read it."""

    # A copy, since NumPy's read-only flag does not protect a tensor that shares the memory.
    def read(observation: Observation) -> torch.Tensor:
        import torch

        return torch.from_numpy(observation.arrays[key]).clone().unsqueeze(0)

    return property(read, doc=doc)


@dataclass(frozen=True, eq=False, repr=False)
class Observation:
    """State of an episode after `n_actions` tokens.

    Args:
        sample: sample from which the episode was started; source of the prompt.
        prompt_ids: prompt ids `[prompt_length]`, truncated, not padded; read-only.
        _action_ids: response ids `[at least n_actions]`; several observations of an episode may share one array.
        n_actions: number of response tokens so far.
        layout: tokenizer and sequence lengths.
    """

    sample: Sample
    prompt_ids: np.ndarray
    _action_ids: np.ndarray
    n_actions: int
    layout: TextLayout

    def __post_init__(self) -> None:
        # All observations of an episode share the array, so a reward that writes to it would change the others.
        object.__setattr__(self, "prompt_ids", _read_only(self.prompt_ids))

    @classmethod
    def init_from_sample(
        cls,
        sample: Sample,
        tokenizer: PreTrainedTokenizerBase,
        max_input_length: int,
        max_context_length: int,
        prompt_truncation_side: Literal["left", "right"] = "left",
        context_start_token: int | None = None,
        meta_info: dict[str, Any] | None = None,
    ) -> Observation:
        """Return the observation before the first token (RL4LMs' constructor)."""
        layout = TextLayout(
            tokenizer=tokenizer,
            max_prompt_length=max_input_length,
            max_context_length=max_context_length,
            context_start_token=context_start_token,
            prompt_truncation_side=prompt_truncation_side,
        )

        # RL4LMs passes the meta data next to the sample. Here an observation reads it from its sample.
        if meta_info is not None:
            sample = replace(sample, meta_data=meta_info)

        no_actions = np.empty(0, dtype=np.int64)
        return cls(sample, layout.encode(sample), _action_ids=no_actions, n_actions=0, layout=layout)

    def update(self, action: int, tokenizer: PreTrainedTokenizerBase | None = None) -> Observation:
        """Return the observation after one more token; `tokenizer` is part of RL4LMs' signature and is ignored."""
        action_ids = np.append(self.action_ids, np.int64(action))
        return replace(self, _action_ids=action_ids, n_actions=len(action_ids))

    def after(self, n_actions: int) -> Observation:
        """Return the observation of this episode after its first `n_actions` tokens; the action array is shared."""
        if n_actions == self.n_actions:
            return self  # with the text that it may have decoded already
        return replace(self, n_actions=n_actions)

    @property
    def action_ids(self) -> np.ndarray:
        """Response ids so far `[n_actions]`; read-only."""
        return _read_only(self._action_ids[: self.n_actions])

    @property
    def prompt_or_input_text(self) -> str:
        """Prompt text, not truncated."""
        return self.sample.prompt_or_input_text

    @cached_property
    def context_text(self) -> str:
        """Text of the response so far as the continuation of the prompt, without special tokens; empty at the start."""
        if not self.n_actions:
            return ""
        return self.layout.continuations.text(self.prompt_ids, self._action_ids[: self.n_actions])

    @property
    def target_or_reference_texts(self) -> list[str]:
        """References of the sample."""
        return self.sample.references

    @property
    def meta_info(self) -> dict[str, Any] | None:
        """`meta_data` of the sample."""
        return self.sample.meta_data

    @cached_property
    def action_history(self) -> list[str]:
        """Response tokens so far, as strings of the tokenizer's vocabulary."""
        return list(self.layout.tokenizer.convert_ids_to_tokens(self.action_ids.tolist()))

    @cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        """Six arrays of the Gymnasium observation, int64: ids and masks of the three sequences."""
        # The context has its last T tokens; an encoder-decoder model's starts with its start token.
        layout = self.layout
        context = self.action_ids
        if layout.context_start_token is not None:
            context = np.concatenate([np.asarray([layout.context_start_token], dtype=np.int64), context])
        context = context[-layout.max_context_length :]

        # "input" joins the ids, not the padded arrays: its padding is on the left only.
        joined = np.concatenate([self.prompt_ids, context])
        sequences = {
            "prompt_or_input": (self.prompt_ids, layout.max_prompt_length),
            "context": (context, layout.max_context_length),
            "input": (joined, layout.max_prompt_length + layout.max_context_length),
        }
        arrays = {}
        for key, (ids, length) in sequences.items():
            arrays[f"{key}_encoded_pt"] = _left_padded(ids, length, layout.pad_token_id)
            arrays[f"{key}_attention_mask_pt"] = _left_padded(np.ones_like(ids), length, 0)
        return arrays

    def to_dict(self) -> dict[str, np.ndarray]:
        """Return the Gymnasium observation as a new dict of copied arrays."""
        return {key: array.copy() for key, array in self.arrays.items()}

    prompt_or_input_encoded_pt = _tensor("prompt_or_input_encoded_pt", "Prompt ids `[1, P]`.")
    prompt_or_input_attention_mask_pt = _tensor("prompt_or_input_attention_mask_pt", "Mask `[1, P]`, 1 on real tokens.")
    context_encoded_pt = _tensor("context_encoded_pt", "Context ids `[1, T]`.")
    context_attention_mask_pt = _tensor("context_attention_mask_pt", "Context mask `[1, T]`.")
    input_encoded_pt = _tensor("input_encoded_pt", "Prompt and context ids `[1, P+T]`.")
    input_attention_mask_pt = _tensor("input_attention_mask_pt", "Prompt and context mask `[1, P+T]`.")

    def __repr__(self) -> str:
        return f"Observation(prompt={self.prompt_or_input_text!r}, context={self.context_text!r})"


def _read_only(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.flags.writeable = False
    return view


def _left_padded(ids: np.ndarray, length: int, fill: int) -> np.ndarray:
    padded = np.full(length, fill, dtype=np.int64)
    if len(ids):
        padded[length - len(ids) :] = ids
    return padded
