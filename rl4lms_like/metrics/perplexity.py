"""Perplexity of the responses under a frozen model, and of the references under the trained model.

reference_perplexity   fluency of the responses under a frozen model, for example the initial model
    ids      [bos?] prompt tokens | response tokens        which continue the prompt's, as in rollouts
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
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

from rl4lms_like.core.continuation import Continuations
from rl4lms_like.core.devices import Device
from rl4lms_like.core.model_weights import cannot_load, place_of, require_folder
from rl4lms_like.metrics.base import BaseMetric, MetricResults, ScoreMetric
from rl4lms_like.scoring.frozen import FrozenModel, batches_by_length, model_inputs, n_positions
from rl4lms_like.scoring.score import Texts
from rl4lms_like.system.errors import ModelError
from rl4lms_like.system.numbers import Count

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

        # exp(sum of -log p / number of tokens), not the mean of the texts' perplexities: long texts weigh more.
        total = sum(total for total, _ in surprisals)
        n_tokens = sum(n_tokens for _, n_tokens in surprisals)
        return scores, perplexity(total, n_tokens)


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

        # The tokenizer is that of the config, which need not be the model's. On a GPU, an id beyond the embedding would
        # end the process with a CUDA error.
        n_known = model.get_input_embeddings().num_embeddings
        if ids and max(ids) >= n_known:
            raise ValueError(f"the tokenizer {self.tokenizer_id!r} has more tokens than the {n_known} of the model")

        window = self.max_length or min(n_positions(model) or _LONGEST_WINDOW, _LONGEST_WINDOW)
        result = strided_perplexity(model, ids, stride=self.stride, window=window)
        return {"fluency_metrics/perplexity": (None, result)}

    def _texts(self, reference_texts: list[list[str]], meta_infos: list[dict[str, Any] | None] | None) -> list[str]:
        """Return all references, or the text that each sample's `meta_data` has."""
        if not self.use_text_from_meta_data:
            return list(chain.from_iterable(reference_texts))
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

    # Token ids of prompt and response, and the number of response tokens that have a token before them. The response's
    # continue those of the prompt, as in rollouts: encoded together, a token could span the boundary.
    continuations = Continuations(tokenizer)
    limit = getattr(model.config, "max_position_embeddings", None)
    rows: list[list[int]] = []
    n_scored: list[int] = []
    for prompt, generated in zip(prompt_texts, generated_texts, strict=True):
        (prompt_ids,) = continuations.whole_ids([prompt])
        response_ids = continuations.ids_or_alone(prompt, generated)
        ids = [*prompt_ids, *response_ids][-limit if limit else None :]
        rows.append(ids)
        n_scored.append(min(len(response_ids), len(ids) - 1))

    # An empty text stays at no tokens. Texts of similar length share a batch, which saves padding.
    results = [(0.0, 0)] * len(rows)
    scorable = [index for index, count in enumerate(n_scored) if count > 0]
    with torch.inference_mode():
        for batch in batches_by_length([rows[index] for index in scorable], batch_size):
            indices = [scorable[position] for position in batch]  # the batch counts scorable texts, not all texts
            totals = _totals(model, [rows[index] for index in indices], [n_scored[index] for index in indices])
            for index, total in zip(indices, totals, strict=True):
                results[index] = (total, n_scored[index])
    return results


def strided_perplexity(model: PreTrainedModel, ids: Sequence[int], *, stride: int, window: int) -> float:
    """Return the perplexity of one long text in windows, as in transformers' documentation and RL4LMs.

    The step at position `i` reads up to `window` tokens that end at `i + stride`, and scores the last `stride` of them:
    their mean negative log-prob, times their number. The result is `exp` of the sum over all steps divided by the
    number of tokens. The first token of the text has no context; it gets the mean of the others of its step. It is NaN
    for fewer than two tokens, and infinity beyond the range of a float.
    """
    import torch

    text = torch.tensor(ids, device=next(model.parameters()).device)  # [n_tokens]
    stride = min(stride, window)
    total = 0.0
    n_counted = 0
    with _evaluating(model), torch.no_grad():
        for start in range(0, len(ids), stride):
            # The window is [begin, end); the tokens [first, end) are scored, given those before them in it.
            end = min(start + stride, len(ids))
            begin = max(start + stride - window, 0)
            first = max(start, begin + 1)  # the first token of a window cannot be predicted
            if first >= end:
                continue

            # The logits at position i predict the token at i + 1: hence one position earlier.
            logits = model(input_ids=text[None, begin:end]).logits[0, first - begin - 1 : end - begin - 1].float()
            mean = torch.nn.functional.cross_entropy(logits, text[first:end])

            # Times all tokens of the step, also one without context, which is what transformers' documentation does.
            total += float(mean) * (end - start)
            n_counted += end - start
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

    inputs = model_inputs(rows, 0, model.device)  # right-padded, [n, row_len]
    ids = inputs["input_ids"]
    lengths = inputs["attention_mask"].sum(dim=1)  # [n]

    # -log p(token | all before) of tokens 1 ... row_len - 1, [n, row_len - 1].
    logits = model(**inputs).logits[:, :-1].float()
    surprisals = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")

    # Only the last tokens of each row are counted, and no padding. Sums in float64: a response may be long.
    positions = torch.arange(ids.shape[1], device=model.device)
    first = (lengths - torch.tensor(counts, device=model.device))[:, None]
    is_counted = (positions[1:] >= first) & (positions[1:] < lengths[:, None])
    return torch.where(is_counted, surprisals, 0.0).double().sum(dim=1).tolist()
