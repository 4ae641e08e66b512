"""How surprising responses are to a frozen causal language model that reads them after their prompts.

ids    [bos?] prompt tokens | response tokens        encoded apart, as the policy saw and wrote them
score           not counted | -log p(token | all before)
"""

from __future__ import annotations

from collections.abc import Sequence
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
