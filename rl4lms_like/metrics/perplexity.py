"""Fluency of responses as a frozen language model sees it, usually the one that training started from."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

from rl4lms_like.core.errors import ModelError
from rl4lms_like.core.numbers import Count
from rl4lms_like.metrics.base import BaseMetric, MetricResults
from rl4lms_like.scoring.perplexity import response_surprisals


class ReferencePerplexity(BaseMetric):
    """Perplexity of the responses, given their prompts, under a frozen causal language model.

    Low is fluent by that model's taste; a policy that only writes safe phrases also scores low.

    Args:
        model_name: hub id or local folder of the causal model; its own tokenizer is used.
        batch_size: texts per forward pass.
        device: `auto` (a GPU if there is one), `cpu`, `cuda` ...
    """

    def __init__(self, model_name: str, batch_size: Count = 32, device: str = "auto") -> None:
        self.model_name = model_name
        self.batch_size = batch_size
        self.device = device

    def compute(
        self,
        prompt_texts: list[str],
        generated_texts: list[str],
        reference_texts: list[list[str]],
        meta_infos: list[dict[str, Any] | None] | None = None,
        model: Any = None,
        split_name: str | None = None,
    ) -> MetricResults:
        """`fluency_metrics/reference_perplexity`: of each text, and `exp` of the mean over all their tokens.

        A text without tokens has the score NaN and does not count.
        """
        reference, tokenizer = self._loaded
        surprisals = response_surprisals(
            reference, tokenizer, prompt_texts, generated_texts, batch_size=self.batch_size
        )
        scores = [_perplexity(total, n_tokens) for total, n_tokens in surprisals]
        overall = _perplexity(sum(total for total, _ in surprisals), sum(n_tokens for _, n_tokens in surprisals))
        return {"fluency_metrics/reference_perplexity": (scores, overall)}

    @cached_property
    def _loaded(self) -> tuple[Any, Any]:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(self.model_name)
            model: Any = AutoModelForCausalLM.from_pretrained(self.model_name, dtype=torch.float32)
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(f"cannot load the reference model {self.model_name!r}: {error}") from error
        chosen = ("cuda" if torch.cuda.is_available() else "cpu") if self.device == "auto" else self.device
        return model.to(chosen).eval().requires_grad_(False), tokenizer


def _perplexity(total: float, n_tokens: int) -> float:
    """`exp` of the mean; infinite where that is beyond a float, NaN for no tokens."""
    if not n_tokens:
        return math.nan
    mean = total / n_tokens
    return math.exp(mean) if mean < 700 else math.inf
