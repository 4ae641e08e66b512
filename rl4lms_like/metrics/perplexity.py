"""Perplexity of the responses under a frozen model, and of the references under the trained model.

reference_perplexity   fluency of the responses under a frozen model, for example the initial model
    ids      [bos?] prompt tokens | response tokens        encoded separately, as in rollouts
    score             not counted | -log p(token | all before)

causal_perplexity      RL4LMs' perplexity of human-written texts under the trained model; ignores the responses
    window   context, not counted | the next `stride` tokens        of one long text, in overlapping windows
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from rl4lms_like.core.devices import Device
from rl4lms_like.core.errors import ModelError
from rl4lms_like.core.model_weights import cannot_load, place_of, require_folder
from rl4lms_like.core.numbers import Count
from rl4lms_like.metrics.base import BaseMetric, MetricResults, ScoreMetric
from rl4lms_like.scoring.classifier import batches_by_length
from rl4lms_like.scoring.frozen import FrozenModel, model_inputs, n_positions
from rl4lms_like.scoring.score import Texts

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_LONGEST_WINDOW = 2048


class ReferencePerplexity(ScoreMetric):
    """Perplexity of the responses, given their prompts, under a frozen causal language model.

    Low values mean fluent texts according to that model; a policy that only writes generic phrases also scores low.

    Args:
        model_name: hub id or local folder of the causal model; its own tokenizer is used.
        batch_size: texts per forward pass.
        device: device of the model; `auto` uses a GPU if available.
    """

    keys = ("fluency_metrics/reference_perplexity",)

    def __init__(self, model_name: str, batch_size: Count = 32, device: Device = "auto") -> None:
        self.batch_size = batch_size
        self.reference = FrozenModel(model_name, "AutoModelForCausalLM", role="reference model", device=device)

    def per_text(self, texts: Texts) -> list[float]:
        return self.with_overall(texts)[0]

    def with_overall(self, texts: Texts) -> tuple[list[float], float]:
        """Return the perplexity of each text, and `exp` of the mean over all tokens; NaN for a text without tokens."""
        surprisals = response_surprisals(
            self.reference.model, self.reference.tokenizer, texts.prompts, texts.responses, batch_size=self.batch_size
        )
        scores = [perplexity(total, n_tokens) for total, n_tokens in surprisals]
        return scores, perplexity(sum(total for total, _ in surprisals), sum(n_tokens for _, n_tokens in surprisals))


@dataclass(eq=False)
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

    stride: Count
    tokenizer_id: str
    model_type: Literal["causal"] = "causal"
    use_text_from_meta_data: bool = False
    max_length: Count | None = None

    def __post_init__(self) -> None:
        require_folder("tokenizer of causal_perplexity", self.tokenizer_id)
        self.needs_references = not self.use_text_from_meta_data

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


def response_surprisals(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt_texts: Sequence[str],
    generated_texts: Sequence[str],
    *,
    batch_size: int,
) -> list[tuple[float, int]]:
    """Return for each response the sum of its tokens' negative log-probs, in nats, and the number of scored tokens.

    A token without a preceding token (no prompt, no BOS) cannot be scored. If a text has more tokens than the model has
    positions, the beginning of its prompt is cut. The model is causal and in evaluation mode.
    """
    import torch

    limit = getattr(model.config, "max_position_embeddings", None)
    rows = []
    for prompt, generated in zip(prompt_texts, generated_texts, strict=True):
        response_ids = tokenizer(generated, add_special_tokens=False, verbose=False)["input_ids"]
        ids = [*tokenizer(prompt, verbose=False)["input_ids"], *response_ids][-limit if limit else None :]
        rows.append((ids, min(len(response_ids), len(ids) - 1)))
    results = [(0.0, 0)] * len(rows)
    scorable = [index for index, (_, n_scored) in enumerate(rows) if n_scored > 0]
    with torch.inference_mode():
        for batch in batches_by_length([rows[index][0] for index in scorable], batch_size):
            chosen = [scorable[place] for place in batch]
            totals = _totals(model, *zip(*(rows[index] for index in chosen), strict=True))
            for index, total in zip(chosen, totals, strict=True):
                results[index] = (total, rows[index][1])
    return results


def strided_perplexity(model: PreTrainedModel, ids: Sequence[int], *, stride: int, window: int) -> float:
    """Return the perplexity of one long text in windows, as in transformers' documentation and RL4LMs.

    The step at position `i` reads up to `window` tokens that end at `i + stride`, and scores the last `stride` of them:
    their mean negative log-prob, times their number. The result is `exp` of the sum over all steps divided by the
    number of tokens. The first token of the text has no context; it gets the mean of the others of its step. It is NaN
    for fewer than two tokens, and infinity beyond the range of a float.
    """
    import torch

    text = torch.tensor(ids, device=next(model.parameters()).device)
    stride = min(stride, window)
    total, n_counted = 0.0, 0
    with _evaluating(model), torch.no_grad():
        for start in range(0, len(ids), stride):
            end = min(start + stride, len(ids))
            begin = max(start + stride - window, 0)
            first = max(start, begin + 1)  # the first token of a window cannot be predicted
            if first >= end:
                continue
            logits = model(input_ids=text[None, begin:end]).logits[0, first - begin - 1 : end - begin - 1].float()
            mean = torch.nn.functional.cross_entropy(logits, text[first:end])
            total, n_counted = total + float(mean) * (end - start), n_counted + end - start
    return perplexity(total, n_counted)


def perplexity(total: float, n_tokens: int) -> float:
    """Return `exp` of the mean of `n_tokens` negative log-probs; infinity beyond a float, NaN for NaN or no tokens."""
    if not n_tokens:
        return math.nan
    mean = total / n_tokens
    return math.inf if mean >= 700 else math.exp(mean)


@contextmanager
def _evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Set the model to evaluation mode, and restore the mode of each module afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _totals(model: PreTrainedModel, rows: Sequence[list[int]], counts: Sequence[int]) -> list[float]:
    """Return the summed negative log-probs of the last `counts[i]` tokens of each row."""
    import torch

    inputs = model_inputs(rows, 0, model.device)
    ids, lengths = inputs["input_ids"], inputs["attention_mask"].sum(dim=1)
    positions = torch.arange(ids.shape[1], device=model.device)
    logits = model(**inputs).logits[:, :-1].float()
    surprisals = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    first = (lengths - torch.tensor(counts, device=model.device))[:, None]
    counted = (positions[1:] >= first) & (positions[1:] < lengths[:, None])
    return torch.where(counted, surprisals, 0.0).double().sum(dim=1).tolist()
