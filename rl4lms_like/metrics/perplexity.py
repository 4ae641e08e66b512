"""Perplexity of the responses under a frozen model, and of the references under the trained model.

reference_perplexity   fluency of the responses under a frozen model, for example the initial model
causal_perplexity      RL4LMs' perplexity of human-written texts under the trained model; ignores the responses
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Literal

from rl4lms_like.core.devices import Device
from rl4lms_like.core.errors import ModelError
from rl4lms_like.core.model_weights import cannot_load, place_of, require_folder
from rl4lms_like.core.numbers import Count
from rl4lms_like.metrics.base import BaseMetric, MetricResults
from rl4lms_like.scoring.frozen import FrozenModel, n_positions
from rl4lms_like.scoring.perplexity import perplexity, response_surprisals, strided_perplexity

_LONGEST_WINDOW = 2048


class ReferencePerplexity(BaseMetric):
    """Perplexity of the responses, given their prompts, under a frozen causal language model.

    Low values mean fluent texts according to that model; a policy that only writes generic phrases also scores low.

    Args:
        model_name: hub id or local folder of the causal model; its own tokenizer is used.
        batch_size: texts per forward pass.
        device: device of the model; `auto` uses a GPU if available.
    """

    def __init__(self, model_name: str, batch_size: Count = 32, device: Device = "auto") -> None:
        self.batch_size = batch_size
        self.reference = FrozenModel(model_name, "AutoModelForCausalLM", role="reference model", device=device)

    def compute(
        self,
        prompt_texts: list[str],
        generated_texts: list[str],
        reference_texts: list[list[str]],
        meta_infos: list[dict[str, Any] | None] | None = None,
        model: Any = None,
        split_name: str | None = None,
    ) -> MetricResults:
        """Compute `fluency_metrics/reference_perplexity` of each text, and `exp` of the mean over all their tokens.

        A text without tokens is NaN and excluded.
        """
        surprisals = response_surprisals(
            self.reference.model, self.reference.tokenizer, prompt_texts, generated_texts, batch_size=self.batch_size
        )
        scores = [perplexity(total, n_tokens) for total, n_tokens in surprisals]
        overall = perplexity(sum(total for total, _ in surprisals), sum(n_tokens for _, n_tokens in surprisals))
        return {"fluency_metrics/reference_perplexity": (scores, overall)}


class Perplexity(BaseMetric):
    """Perplexity of the references under the evaluated model, in windows; the responses are ignored.

    It rises if training worsens the model's fit to human-written texts. This is RL4LMs' `causal_perplexity`, computed
    as in transformers' documentation: all references, separated by an empty line, are one text.

    Args:
        stride: tokens scored per step, given as many preceding tokens as fit into the window; at most a window.
        tokenizer_id: hub id or local folder of the model's tokenizer.
        model_type: has no effect: only decoder-only models are supported.
        use_text_from_meta_data: use `meta_data["reference"]` instead of the references.
        max_length: tokens of a window; default: the model's number of positions, at most 2048.
    """

    def __init__(
        self,
        stride: Count,
        tokenizer_id: str,
        model_type: Literal["causal"] = "causal",
        use_text_from_meta_data: bool = False,
        max_length: Count | None = None,
    ) -> None:
        require_folder("tokenizer of causal_perplexity", tokenizer_id)
        self.stride = stride
        self.tokenizer_id = tokenizer_id
        self.model_type = model_type
        self.use_text_from_meta_data = use_text_from_meta_data
        self.needs_references = not use_text_from_meta_data
        self.max_length = max_length

    def compute(
        self,
        prompt_texts: list[str],
        generated_texts: list[str],
        reference_texts: list[list[str]],
        meta_infos: list[dict[str, Any] | None] | None = None,
        model: Any = None,
        split_name: str | None = None,
    ) -> MetricResults:
        """Compute `fluency_metrics/perplexity` of the whole split; none for the split `train`, NaN without references.

        Raises:
            ValueError: there is no model, it is not decoder-only, or it has fewer tokens than the tokenizer.
        """
        if split_name == "train":
            return {}
        if model is None:
            raise ValueError("causal_perplexity needs the evaluated model, but none was given")
        if model.config.is_encoder_decoder:
            raise ValueError(f"causal_perplexity supports only decoder-only models, not {type(model).__name__}")
        texts = self._texts(reference_texts, meta_infos)
        ids = self._tokenizer("\n\n".join(texts), verbose=False)["input_ids"] if texts else []
        n_known = model.get_input_embeddings().num_embeddings
        if ids and max(ids) >= n_known:
            raise ValueError(f"the tokenizer {self.tokenizer_id!r} has more tokens than the {n_known} of the model")
        window = self.max_length or min(n_positions(model) or _LONGEST_WINDOW, _LONGEST_WINDOW)
        result = strided_perplexity(model, ids, stride=self.stride, window=window)
        return {"fluency_metrics/perplexity": (None, result)}

    def _texts(self, reference_texts: list[list[str]], meta_infos: list[dict[str, Any] | None] | None) -> list[str]:
        if not self.use_text_from_meta_data:
            return [text for references in reference_texts for text in references]
        texts = [(meta or {}).get("reference") for meta in meta_infos or [None] * len(reference_texts)]
        if any(not isinstance(text, str) for text in texts):
            raise ValueError("a sample's meta_data has no text `reference`, which use_text_from_meta_data requires")
        return [str(text) for text in texts]

    @cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(place_of(self.tokenizer_id), trust_remote_code=False)
        except Exception as error:
            raise ModelError(cannot_load("tokenizer of causal_perplexity", self.tokenizer_id, error)) from error
