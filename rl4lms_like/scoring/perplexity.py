"""How surprising texts are to a causal language model.

response_surprisals   responses, each read after its prompt
    ids      [bos?] prompt tokens | response tokens        encoded apart, as the policy saw and wrote them
    score             not counted | -log p(token | all before)

strided_perplexity    one long text, in windows that overlap
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
    """For each response the sum of its tokens' negative log-probs, in nats, and how many were scored.

    A token without anything before it (no prompt, no BOS) cannot be scored. Texts longer than the model's positions
    lose the beginning of their prompt.

    Args:
        model: causal, in evaluation mode.
        tokenizer: the model's own.
        prompt_texts: `n` texts.
        generated_texts: `n` texts, without special tokens.
        batch_size: texts per forward pass; texts of similar length go together.
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
    """Perplexity of one text that may be longer than the model's positions: transformers' published recipe, as RL4LMs.

    Step `i` reads the tokens up to `i + stride`, `window` of them at most, and counts the last `stride`: their mean
    negative log-prob, times their number. The result is `exp` of the sum over all steps by the number of tokens. The
    text's first token has nothing before it; the mean of the others stands in for it.

    Args:
        model: causal; its mode is restored afterwards.
        ids: the text.
        stride: tokens that are counted at a time; more than a window are cut to it.
        window: tokens that are read at a time.

    Returns:
        NaN for a text without two tokens, infinity beyond a float.
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
    """`exp` of the mean of `n_tokens` negative log-probs; infinite beyond a float, NaN of NaN and for no tokens."""
    if not n_tokens:
        return math.nan
    mean = total / n_tokens
    return math.inf if mean >= 700 else math.exp(mean)


@contextmanager
def _evaluating(model: PreTrainedModel) -> Iterator[None]:
    """The model in evaluation mode; each of its modules is in the mode it was in afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _totals(model: PreTrainedModel, rows: list[torch.Tensor], counts: list[int]) -> list[float]:
    """Summed surprisal of the last `counts[i]` tokens of each row; rows are padded on the right."""
    import torch

    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(model.device)
    lengths = torch.tensor([len(row) for row in rows], device=model.device)
    positions = torch.arange(ids.shape[1], device=model.device)
    logits = model(input_ids=ids, attention_mask=(positions < lengths[:, None]).long()).logits[:, :-1].float()
    surprisals = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    first = (lengths - torch.tensor(counts, device=model.device))[:, None]
    counted = (positions[1:] >= first) & (positions[1:] < lengths[:, None])
    return torch.where(counted, surprisals, 0.0).double().sum(dim=1).tolist()
