"""Human preference for a sentence by a T5 that was tuned to answer `good` or `bad` (RL4LMs' model for CommonGen).

P(good) = exp(g) / (exp(g) + exp(b)), where g and b are the logits of the two words at the first step of the decoder
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl4lms_like.core.devices import existing_device
from rl4lms_like.core.disk import with_home
from rl4lms_like.core.errors import MissingResourceError, ModelError
from rl4lms_like.core.model_weights import cannot_load, load_complete, place_of
from rl4lms_like.scoring.classifier import batches_by_length
from rl4lms_like.scoring.frozen import FrozenModel, Loaded, longest_input, require_finite

BASE = "google-t5/t5-11b"
"""Model from which the published weights were tuned; it provides config and tokenizer."""

WEIGHTS_FILE = "t5-11b~commongen_prefs.pt"
_WEIGHTS_URL = f"https://storage.googleapis.com/ai2-jack-public/rl4lms_preference_models/{WEIGHTS_FILE}"


class PreferenceT5(FrozenModel):
    """Preference model: a whole checkpoint, or a file of weights for a base model.

    Args:
        model_name: hub id or local folder; None: `google-t5/t5-11b`, which needs `weights`.
        weights: a `.pt` file of weights, as published by RL4LMs; config and tokenizer are then those of `model_name`.
        device: `auto`, `cpu`, `cuda:1` ...
        dtype: dtype of the weights.
        needed_by: name of the component, for error messages.

    Raises:
        MissingResourceError: neither is given; the message has the command that downloads the published weights.
        ModelError: the folder or the file does not exist.
    """

    def __init__(self, model_name: str | None, weights: str | None, *, device: str, dtype: str, needed_by: str) -> None:
        if model_name is None and weights is None:
            raise MissingResourceError(
                "the preference model, a tuned T5-11B that is not on the hub",
                needed_by=needed_by,
                command=f"curl -LO {_WEIGHTS_URL}, and set `weights` to the file",
                offline=f"copy that file and the config and tokenizer of {BASE}; set `weights` and `model_name` to "
                "them. Your own T5 that answers good or bad needs only `model_name`",
            )
        self.weights = weights
        super().__init__(
            model_name or BASE,
            "AutoModelForSeq2SeqLM",
            role="preference model",
            device=device,
            dtype=dtype,
            truncation_side="right",
        )
        if weights is not None and not with_home(weights).is_file():
            raise ModelError(f"there is no file {weights!r} with the weights of the preference model")

    def _check_weights(self) -> None:
        if self.weights is None:
            super()._check_weights()

    def _load(self) -> Loaded:
        return super()._load() if self.weights is None else self._from_weights(with_home(self.weights))

    def _from_weights(self, file: Path) -> Loaded:
        import torch
        from transformers import AutoConfig, AutoTokenizer, T5ForConditionalGeneration

        place = place_of(self.model_name)
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                place, truncation_side=self.truncation_side, trust_remote_code=False
            )
            config = AutoConfig.from_pretrained(place, trust_remote_code=False)
        except Exception as error:
            raise ModelError(cannot_load("base of the preference model", self.model_name, error)) from error
        try:
            state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            state = state.get("model_state_dict", state)
            config.vocab_size = len(state["shared.weight"])  # the embeddings were resized in training
            model = load_complete(
                T5ForConditionalGeneration,
                None,
                role=self.role,
                model_name=str(file),
                config=config,
                state_dict=state,
                dtype=getattr(torch, self.dtype),
            )
        except ModelError:
            raise
        except Exception as error:
            raise ModelError(f"cannot load {str(file)!r} into {self.model_name!r}: {error}") from error
        return Loaded(model.to(existing_device(self.device)).eval().requires_grad_(False), tokenizer)


@dataclass(frozen=True)
class PreferenceScorer:
    """Preference model with its batch size.

    Args:
        frozen: the model.
        batch_size: texts per forward pass.
    """

    frozen: PreferenceT5
    batch_size: int

    def probabilities(self, texts: Sequence[str]) -> list[float]:
        """Return P(good) of each text, from 0 to 1.

        Raises:
            ModelError: the model cannot be loaded or returns NaN, or its tokenizer does not distinguish the two words.
        """
        import torch

        model, tokenizer = self.frozen.model, self.frozen.tokenizer
        good, bad = (tokenizer(word)["input_ids"][0] for word in ("good", "bad"))
        if good == bad:
            raise ModelError(f"the tokenizer of {self.frozen.model_name!r} starts 'good' and 'bad' with the same token")
        if not texts:
            return []
        limit = longest_input(model, tokenizer)
        rows = tokenizer(list(texts), truncation=limit is not None, max_length=limit, verbose=False)["input_ids"]
        rows = [row or [tokenizer.eos_token_id] for row in rows]
        results = torch.zeros(len(texts))
        with torch.inference_mode():
            for chosen in batches_by_length(rows, self.batch_size):
                logits = _first_step(model, [rows[index] for index in chosen])
                results[chosen] = (logits[:, good] - logits[:, bad]).sigmoid().cpu()
        require_finite(results, self.frozen.role, self.frozen.model_name)
        return results.tolist()


def preference_rewards(
    scorer: PreferenceScorer,
    generated_texts: Sequence[str],
    concepts: Sequence[Sequence[str]],
    *,
    concept_penalty_coeff: float,
) -> list[float]:
    """Return P(good) / (1 + coefficient x number of missing concepts) of each text."""
    missing = [n_missing(text, each) for text, each in zip(generated_texts, concepts, strict=True)]
    chances = scorer.probabilities(generated_texts)
    return [chance / (1 + concept_penalty_coeff * n) for chance, n in zip(chances, missing, strict=True)]


def n_missing(text: str, concepts: Sequence[str]) -> int:
    """Return the number of concepts that are not a substring of the lower-cased text."""
    lowered = text.lower()
    return sum(concept not in lowered for concept in concepts)


def _first_step(model: Any, rows: list[list[int]]) -> Any:
    """Return the logits of the decoder's first step, `[n, n_vocabulary]`, float32."""
    import torch

    device = next(model.parameters()).device
    ids = torch.nn.utils.rnn.pad_sequence(list(map(torch.tensor, rows)), True, model.config.pad_token_id or 0)
    lengths = torch.tensor([len(row) for row in rows])
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    start = torch.full((len(rows), 1), model.config.decoder_start_token_id)
    inputs = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": start}
    return model(**{name: tensor.to(device) for name, tensor in inputs.items()}).logits[:, 0].float()
