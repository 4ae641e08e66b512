"""What a model writes for held-out prompts: reward, second scorer, perplexity, KL, distinct n-grams, samples.

    prompts of `test` ─ plain sampling by transformers ─> responses ─┬─ reward of the task, second scorer
                                                                     ├─ distinct 2-grams, length
                                                                     └─ log-probs: of the model, of the initial model

    KL = mean over tokens of log p_model - log p_start             nats per token, of plainly sampled responses
    perplexity = exp(-mean over tokens of log p_start)             how likely the initial model finds the responses

Texts and log-probs are transformers' own, and not made by the code that trains.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.real_model import FormatTask, is_one_word, is_right
from benchmarks.study.arms import Answers
from benchmarks.study.opinions import trained_classifier
from benchmarks.study.tasks import STORY_TOKENS, FilmSentences, Stories, story_score
from rl4lms_like.core.sample import Sample
from rl4lms_like.metrics.diversity import distinct_n
from rl4lms_like.policies.loading import load_model
from rl4lms_like.scoring.sentiment import sentiment

N_TOKENS = {"film": 24, "story": STORY_TOKENS, "format": 10}
"""Task -> maximum length of a response."""
POOLS = {"film": FilmSentences, "story": Stories, "format": FormatTask}
BATCH_SIZE = 20
N_SHOWN = 8
"""Samples that are kept of each model."""


@dataclass(frozen=True)
class Response:
    """A response to a prompt: its ids, without what follows the end token, and its text."""

    prompt_ids: list[int]
    ids: list[int]
    text: str


def measured(
    task: str, trained_model: Path | None, start: str, answers: Answers, *, seed: int, n_prompts: int
) -> dict[str, Any]:
    """Return the numbers of a model, and its first responses as `samples`.

    Args:
        task: `film`, `story` or `format`.
        trained_model: folder of the trained model or its adapters; None: the initial model.
        start: name of the initial model.
        answers: how the model answers.
        seed: of the sampling.
        n_prompts: number of prompts of `test`.
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(start)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    first: Any = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32).eval()
    model: Any = first
    if trained_model is not None:
        model = load_model(AutoModelForCausalLM, str(trained_model))[0].eval()

    samples = [sample for sample, _ in POOLS[task].prepare("test")][:n_prompts]
    torch.manual_seed(seed)
    responses = [
        best_response(task, sample, candidates)
        for sample, candidates in zip(samples, sampled(model, tokenizer, samples, answers, N_TOKENS[task]), strict=True)
    ]

    texts = [response.text for response in responses]
    log_probs = token_log_probs(first, responses)
    numbers = {
        "reward": fmean(score(task, sample, text) for sample, text in zip(samples, texts, strict=True)),
        "perplexity": math.exp(-fmean(log_probs)),
        "distinct-2": distinct_n(texts, 2),
        "tokens": fmean(len(response.ids) for response in responses),
    }
    if task == "film":
        numbers["second scorer"] = fmean(trained_classifier()(texts))
    # Of the best of several responses, and with a nucleus, the distribution is another one than the model's.
    if answers == Answers():
        numbers["KL"] = fmean(token_log_probs(model, responses)) - fmean(log_probs) if model is not first else 0.0
    shown = [f"{sample.prompt_or_input_text} | {text}" for sample, text in zip(samples, texts, strict=True)]
    return numbers | {"samples": shown[:N_SHOWN]}


def score(task: str, sample: Sample, text: str) -> float:
    """Return the task's reward of a response."""
    if task == "film":
        return sentiment(text)
    if task == "story":
        return story_score(text, sample.references[0])
    return float(is_one_word(text)) + float(is_right(text, sample.references[0]))


def best_response(task: str, sample: Sample, candidates: Sequence[Response]) -> Response:
    """Return the response with the highest reward, the first one of several."""
    return max(candidates, key=lambda response: score(task, sample, response.text))


@torch.no_grad()
def sampled(
    model: Any, tokenizer: Any, samples: Sequence[Sample], answers: Answers, n_tokens: int
) -> list[list[Response]]:
    """Return the responses to each prompt."""
    prompts = [prompt_ids(tokenizer, sample) for sample in samples]
    responses: list[list[Response]] = []
    for start in range(0, len(prompts), BATCH_SIZE):
        batch = prompts[start : start + BATCH_SIZE]
        width = max(map(len, batch))
        ids = torch.tensor([[tokenizer.pad_token_id] * (width - len(prompt)) + prompt for prompt in batch])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch])
        generated = model.generate(
            input_ids=ids, attention_mask=mask, do_sample=True, top_k=0, top_p=answers.top_p, max_new_tokens=n_tokens,
            num_return_sequences=answers.n, pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
        rows = [until_end(row, tokenizer.eos_token_id) for row in generated[:, width:].tolist()]
        for i, prompt in enumerate(batch):
            of_prompt = rows[i * answers.n : (i + 1) * answers.n]
            responses.append(
                [Response(prompt, row, tokenizer.decode(row, skip_special_tokens=True)) for row in of_prompt]
            )
    return responses


def prompt_ids(tokenizer: Any, sample: Sample) -> list[int]:
    """Return the ids that a model continues: the text, or the messages in the tokenizer's chat format."""
    if sample.messages is None:
        ids: list[int] = tokenizer(sample.prompt_or_input_text)["input_ids"]
        return ids
    text = tokenizer.apply_chat_template(sample.messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def until_end(ids: Sequence[int], end: int) -> list[int]:
    """Return the ids up to the first end token, with it."""
    return list(ids[: ids.index(end) + 1]) if end in ids else list(ids)


@torch.no_grad()
def token_log_probs(model: Any, responses: Sequence[Response]) -> list[float]:
    """Return the log-prob of every token of all responses, one forward pass without padding for each."""
    log_probs: list[float] = []
    for response in responses:
        ids: Tensor = torch.tensor([response.prompt_ids + response.ids])
        n_prompt = len(response.prompt_ids)
        logits = model(ids).logits[0, n_prompt - 1 : -1]
        log_probs += torch.log_softmax(logits, dim=-1).gather(1, ids[0, n_prompt:, None]).squeeze(1).tolist()
    return log_probs
