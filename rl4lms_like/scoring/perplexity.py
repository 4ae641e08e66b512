"""Negative log-probs and perplexity of texts under a causal language model.

response_surprisals   responses, each given its prompt
    ids      [bos?] prompt tokens | response tokens        encoded separately, as in rollouts
    score             not counted | -log p(token | all before)

strided_perplexity    one long text, in overlapping windows
    window   context, not counted | the next `stride` tokens
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


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
    positions, the beginning of its prompt is cut.

    Args:
        model: causal model in evaluation mode.
        tokenizer: the model's own tokenizer.
        prompt_texts: `n` texts.
        generated_texts: `n` texts, without special tokens.
        batch_size: texts per forward pass; batches have texts of similar length.
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
    order = sorted(scorable, key=lambda index: len(rows[index][0]))
    with torch.inference_mode():
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            batch = [torch.tensor(rows[index][0]) for index in chosen]
            counts = [rows[index][1] for index in chosen]
            for index, total, n_scored in zip(chosen, _totals(model, batch, counts), counts, strict=True):
                results[index] = (total, n_scored)
    return results


def strided_perplexity(model: PreTrainedModel, ids: Sequence[int], *, stride: int, window: int) -> float:
    """Return the perplexity of one long text in windows, as in transformers' documentation and RL4LMs.

    The step at position `i` reads up to `window` tokens that end at `i + stride`, and scores the last `stride` of them:
    their mean negative log-prob, times their number. The result is `exp` of the sum over all steps divided by the
    number of tokens. The first token of the text has no context; it gets the mean of the others of its step.

    Args:
        model: causal model; its mode is restored afterwards.
        ids: token ids of the text.
        stride: tokens that are scored per step; at most `window`.
        window: maximum number of tokens that are read per step.

    Returns:
        The perplexity; NaN for fewer than two tokens, infinity beyond the range of a float.
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


def _totals(model: PreTrainedModel, rows: list[torch.Tensor], counts: list[int]) -> list[float]:
    """Return the summed negative log-probs of the last `counts[i]` tokens of each row, padded on the right."""
    import torch

    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(model.device)
    lengths = torch.tensor([len(row) for row in rows], device=model.device)
    positions = torch.arange(ids.shape[1], device=model.device)
    logits = model(input_ids=ids, attention_mask=(positions < lengths[:, None]).long()).logits[:, :-1].float()
    surprisals = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    first = (lengths - torch.tensor(counts, device=model.device))[:, None]
    counted = (positions[1:] >= first) & (positions[1:] < lengths[:, None])
    return torch.where(counted, surprisals, 0.0).double().sum(dim=1).tolist()
