"""The metrics of the table: keys, values, and the checker."""

from __future__ import annotations

import math

import pytest
import torch

from rl4lms_like.metrics import METRICS
from rl4lms_like.metrics.call import compute_metric
from rl4lms_like.metrics.perplexity import ReferencePerplexity
from rl4lms_like.scoring.sentiment import sentiment
from rl4lms_like.system.errors import MetricError, ModelError
from rl4lms_like.testing import models
from rl4lms_like.testing.checkers import check_metric

PROMPTS = ["The film was", "It was", "On"]
TEXTS = [" a wonderful 1 2 3 joy.", " terrible.", " 2022-10-04 terrible."]


@pytest.fixture
def arguments(tiny_gpt2_dir):
    return {"increasing_numbers": {"min_tokens": 2}, "reference_perplexity": {"model_name": str(tiny_gpt2_dir)}}


def computed(id, args=None, texts=TEXTS):
    return compute_metric(METRICS.get(id, args), PROMPTS[: len(texts)], texts, [[]] * len(texts))


@pytest.mark.parametrize(
    "id", ["increasing_numbers", "dates", "sentiment", "distinct_n", "length", "reference_perplexity"]
)
def test_every_metric_passes_the_checker(id, arguments):
    check_metric(METRICS.get(id, arguments.get(id)))


def test_synthetic_scores_have_rl4lms_keys():
    numbers = computed("increasing_numbers", {"min_tokens": 2})["synthetic/increasing_numbers_in_text"]
    assert numbers == ([3 / 6, 0.0, 0.0], pytest.approx(0.5 / 3))
    assert computed("dates") == {"synthetic/dates_in_text": ([0.0, 0.0, 1.0], pytest.approx(1 / 3))}


def test_sentiment_reads_prompt_and_response():
    results = computed("sentiment")
    expected = [sentiment(prompt + text) for prompt, text in zip(PROMPTS, TEXTS, strict=True)]
    assert results["semantic/sentiment"] == (expected, pytest.approx(sum(expected) / 3))
    assert results["semantic/sentiment_positive"] == ([1.0, 0.0, 0.0], pytest.approx(1 / 3))


def test_length_counts_words():
    assert computed("length") == {"length/words": ([6.0, 1.0, 2.0], 3.0)}


def test_distinct_n_reports_four_numbers():
    results = computed("distinct_n", texts=[" a b.", " a b.", " c."])
    assert results == {
        "diversity_metrics/distinct-1": (None, 4 / 8),
        "diversity_metrics/distinct-2": (None, 3 / 5),
        "diversity_metrics/top_sentence_share": (None, 2 / 3),
        "diversity_metrics/unique_texts": (None, 2 / 3),
    }


def test_reference_perplexity_is_of_tokens_given_the_prompt(tiny_gpt2_dir, tiny_tokenizer):
    args = {"model_name": str(tiny_gpt2_dir)}
    scores, overall = computed("reference_perplexity", args)["fluency_metrics/reference_perplexity"]
    model = models.make_causal_lm("gpt2", tiny_tokenizer, n_layers=1)
    surprisals = []
    for prompt, text in zip(PROMPTS, TEXTS, strict=True):
        context, ids = tiny_tokenizer(prompt)["input_ids"], tiny_tokenizer(text)["input_ids"]
        with torch.no_grad():
            log_probs = model(torch.tensor([context + ids])).logits[0].log_softmax(-1)
        surprisals.append([-float(log_probs[len(context) + place - 1, id]) for place, id in enumerate(ids)])
    assert scores == pytest.approx([math.exp(sum(text) / len(text)) for text in surprisals], rel=1e-4)
    tokens = [surprisal for text in surprisals for surprisal in text]
    assert overall == pytest.approx(math.exp(sum(tokens) / len(tokens)), rel=1e-4)


def test_an_empty_text_has_no_perplexity_and_does_not_count(tiny_gpt2_dir):
    metric = ReferencePerplexity(str(tiny_gpt2_dir))
    with_empty = compute_metric(metric, PROMPTS[:2], [TEXTS[0], ""], [[], []])["fluency_metrics/reference_perplexity"]
    alone = compute_metric(metric, PROMPTS[:1], TEXTS[:1], [[]])["fluency_metrics/reference_perplexity"]
    assert math.isnan(with_empty[0][1])
    assert with_empty[1] == pytest.approx(alone[1])


def test_perplexity_prefers_sentences_to_salad(shared_dir):
    metric = ReferencePerplexity(str(shared_dir / "models/stories260K"))
    texts = [" there was a little girl named Lily.", " Lily a there girl. named little was"]
    scores, _ = compute_metric(metric, ["Once upon a time"] * 2, texts, [[], []])[
        "fluency_metrics/reference_perplexity"
    ]
    assert scores[0] < 5 < 20 < scores[1]


def test_a_reference_model_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ModelError):
        ReferencePerplexity(str(tmp_path / "nowhere"))
    metric = ReferencePerplexity(str(tmp_path))
    with pytest.raises(MetricError) as caught:
        compute_metric(metric, PROMPTS, TEXTS, [[]] * 3)
    assert isinstance(caught.value.__cause__, ModelError)
