"""Batched surprisals are those of one text at a time, by the definition."""

from __future__ import annotations

import math

import pytest
import torch

from rl4lms_like.metrics.perplexity import perplexity, response_surprisals, strided_perplexity
from rl4lms_like.testing import models

PROMPTS = ["The film", "Nobody knew, and nobody asked!", "", "A", "The film"]
RESPONSES = [" was good.", " ", " 1 2 3", "", " opens with a quiet morning in a small town by the sea."]


@pytest.mark.parametrize("family", ["gpt2", "opt", "llama"])
def test_equals_one_text_at_a_time(tiny_tokenizer, family):
    model = models.make_causal_lm(family, tiny_tokenizer, scale=10.0)
    batched = response_surprisals(model, tiny_tokenizer, PROMPTS, RESPONSES, batch_size=3)
    for prompt, response, (total, n_scored) in zip(PROMPTS, RESPONSES, batched, strict=True):
        context = tiny_tokenizer(prompt)["input_ids"]
        ids = context + tiny_tokenizer(response)["input_ids"]
        first = max(len(context), 1)  # the very first token has nothing before it
        expected = 0.0
        if len(ids) > first:
            with torch.no_grad():
                log_probs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            expected = -sum(float(log_probs[place - 1, ids[place]]) for place in range(first, len(ids)))
        assert n_scored == max(len(ids) - first, 0)
        assert total == pytest.approx(expected, abs=1e-3)


def test_long_texts_lose_the_beginning_of_their_prompt(tiny_tokenizer):
    model = models.make_causal_lm("gpt2", tiny_tokenizer, n_positions=16)
    (total, n_scored), (same, _) = response_surprisals(
        model, tiny_tokenizer, ["0 1 2 3 " * 20, ("0 1 2 3 " * 20)[4:]], [" good"] * 2, batch_size=2
    )
    assert n_scored == len(tiny_tokenizer(" good")["input_ids"])
    assert total == pytest.approx(same, abs=1e-5)


@pytest.mark.parametrize("size", [1.0, 1e4])
def test_a_model_that_breaks_down_has_no_perplexity_and_a_bad_one_an_infinite_one(tiny_tokenizer, size):
    model = models.make_causal_lm("gpt2", tiny_tokenizer)
    with torch.no_grad():
        model.lm_head.weight.mul_(float("nan") if size == 1 else size)
    ids = tiny_tokenizer("The film was good.")["input_ids"]
    (total, n_scored), *_ = response_surprisals(model, tiny_tokenizer, [""], ["The film was good."], batch_size=1)
    found = (strided_perplexity(model, ids, stride=4, window=16), perplexity(total, n_scored))
    assert all(math.isnan(value) if size == 1 else value == math.inf for value in found)
