"""Reward from a model of human preferences, for sentences made of given concepts (CommonGen).

The model is a T5 that was tuned to answer `good` or `bad`. P(good) = exp(g) / (exp(g) + exp(b)), where g and b are the
logits of the two words at the first step of the decoder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rl4lms_like.core.devices import Device, Dtype
from rl4lms_like.core.model_weights import load_complete, place_of
from rl4lms_like.rewards.text import ScoreReward
from rl4lms_like.scoring.frozen import FrozenModel, batches_by_length, longest_input, model_inputs, require_finite
from rl4lms_like.scoring.meteor import meteor
from rl4lms_like.scoring.nltk_data import require_data
from rl4lms_like.scoring.score import Texts
from rl4lms_like.system.disk import with_home
from rl4lms_like.system.errors import MissingResourceError, ModelError
from rl4lms_like.system.numbers import Count, Finite, NonNegative

BASE = "google-t5/t5-11b"  # model from which the published weights were tuned; it provides config and tokenizer
WEIGHTS_FILE = "t5-11b~commongen_prefs.pt"
_WEIGHTS_URL = f"https://storage.googleapis.com/ai2-jack-public/rl4lms_preference_models/{WEIGHTS_FILE}"


@dataclass(eq=False)
class CommonGenPrefRM(ScoreReward):
    """Probability that people prefer the response, from RL4LMs' T5 that outputs `good` or `bad`.

    P(good) / (1 + `concept_penalty_coeff` x missing concepts) + `meteor_coeff` METEOR. The T5 reads the response alone.
    The concepts are `meta_data["concepts"]`; a concept is missing if the lower-cased response does not contain it.

    Args:
        model_type: size of the published model; only one exists, so this has no effect.
        device: device of the model; `auto` uses a GPU if available.
        batch_size: texts per forward pass.
        concept_penalty_coeff: strength of the penalty for missing concepts.
        meteor_coeff: weight of METEOR against the references.
        model_name: hub id or local folder of a T5 that outputs `good` or `bad`. With `weights`: the T5 that the weights
            belong to, by default `google-t5/t5-11b`.
        weights: a `.pt` file with weights, as published by RL4LMs.
        dtype: data type of the weights.
    """

    id = "common_gen_preference_model"

    model_type: Literal["11b"] = "11b"
    device: Device = "auto"
    batch_size: Count = 8
    concept_penalty_coeff: NonNegative = 0.0
    meteor_coeff: Finite = 0.0
    model_name: str | None = None
    weights: str | None = None
    dtype: Dtype = "float32"

    def __post_init__(self) -> None:
        # Only METEOR compares with references, and only METEOR needs NLTK's data.
        self.needs_references = bool(self.meteor_coeff)
        if self.meteor_coeff:
            require_data(self.needed_by, "punkt_tab", "wordnet")

        self.model = PreferenceT5(
            self.model_name, self.weights, device=self.device, dtype=self.dtype, needed_by=self.needed_by
        )

    def per_text(self, texts: Texts) -> list[float]:
        rewards = self.probabilities(texts.responses)

        # P(good) / (1 + c x missing concepts). Without concepts in `meta_data` this is an error, but only if c > 0.
        if self.concept_penalty_coeff:
            rewards = self._less_for_missing_concepts(rewards, texts)

        if not self.meteor_coeff:
            return rewards
        meteor_scores = meteor(texts.responses, texts.references)
        return [reward + self.meteor_coeff * score for reward, score in zip(rewards, meteor_scores, strict=True)]

    def _less_for_missing_concepts(self, rewards: Sequence[float], texts: Texts) -> list[float]:
        reduced = []
        for reward, meta, prompt, response in zip(rewards, texts.metas, texts.prompts, texts.responses, strict=True):
            missing = n_missing(response, _concepts(meta, prompt))
            reduced.append(reward / (1 + self.concept_penalty_coeff * missing))
        return reduced

    def probabilities(self, texts: Sequence[str]) -> list[float]:
        """Return P(good) of each text, from 0 to 1.

        Raises:
            ModelError: the model cannot be loaded or returns NaN, or its tokenizer does not distinguish the two words.
        """
        import torch

        model = self.model.model
        tokenizer = self.model.tokenizer
        good_id = tokenizer("good")["input_ids"][0]
        bad_id = tokenizer("bad")["input_ids"][0]
        if good_id == bad_id:
            raise ModelError(f"the tokenizer of {self.model.model_name!r} starts 'good' and 'bad' with the same token")
        if not texts:
            return []

        # A tokenizer without special tokens makes an empty row of an empty text, which the encoder cannot read.
        limit = longest_input(model, tokenizer)
        rows = tokenizer(list(texts), truncation=limit is not None, max_length=limit, verbose=False)["input_ids"]
        rows = [row or [tokenizer.eos_token_id] for row in rows]

        # exp(g) / (exp(g) + exp(b)) = sigmoid(g - b) `[n]`: the softmax over the two words alone.
        chances = torch.zeros(len(texts))
        with torch.inference_mode():
            for indices in batches_by_length(rows, self.batch_size):
                logits = _first_step(model, [rows[index] for index in indices])
                chances[indices] = (logits[:, good_id] - logits[:, bad_id]).sigmoid().cpu()
        require_finite(chances, self.model.role, self.model.model_name)
        return chances.tolist()


class PreferenceT5(FrozenModel):
    """Preference model: a whole checkpoint, or a file of weights for a base model; arguments as in `CommonGenPrefRM`.

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

        # Before `super().__init__`, which calls `_check_weights`.
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
        # With a file of weights, the folder of the base model needs only its config and its tokenizer.
        if self.weights is None:
            super()._check_weights()

    def _load_model(self, dtype: Any) -> Any:
        if self.weights is None:
            return super()._load_model(dtype)

        import torch
        from transformers import AutoConfig, T5ForConditionalGeneration

        # `weights_only` runs no code of the file. With `mmap` it is read as it is needed: the published one has the
        # weights of 11 billion parameters.
        file = with_home(self.weights)
        try:
            config = AutoConfig.from_pretrained(place_of(self.model_name), trust_remote_code=False)
            state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            state = state.get("model_state_dict", state)
            config.vocab_size = len(state["shared.weight"])  # the embeddings were resized in training
            return load_complete(
                T5ForConditionalGeneration,
                None,
                role=self.role,
                model_name=str(file),
                config=config,
                state_dict=state,
                dtype=dtype,
            )
        except ModelError:
            raise
        except Exception as error:
            raise ModelError(f"cannot load {str(file)!r} into {self.model_name!r}: {error}") from error


def n_missing(text: str, concepts: Sequence[str]) -> int:
    """Return the number of concepts that are not a substring of the lower-cased text."""
    # Inflected forms count: "dogs run" has the concepts dog and run. The concepts themselves are not lower-cased.
    return sum(concept not in text.lower() for concept in concepts)


def _first_step(model: Any, rows: list[list[int]]) -> Any:
    """Return the logits of the decoder's first step, `[n, n_vocabulary]`, float32."""
    import torch

    # The decoder gets only its start token `[n, 1]`: its first output is the model's answer, good or bad.
    device = next(model.parameters()).device
    start = torch.full((len(rows), 1), model.config.decoder_start_token_id, device=device)
    inputs = model_inputs(rows, model.config.pad_token_id or 0, device)
    return model(**inputs, decoder_input_ids=start).logits[:, 0].float()


def _concepts(meta_info: Mapping[str, Any] | None, prompt: str) -> list[str]:
    concepts = (meta_info or {}).get("concepts")
    if not isinstance(concepts, (list, tuple)):
        raise ValueError(
            f"the sample with the prompt {prompt[:60]!r} has no concepts: its meta_data needs a list `concepts`, as "
            f"provided by the data pool 'commongen', got {concepts!r}"
        )
    return [str(concept) for concept in concepts]
