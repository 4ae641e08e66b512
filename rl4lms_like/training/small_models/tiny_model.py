"""The `tiny_model` block of a config: a model that is trained on the prompts and answers of the run's data pool.

    datapool ─ train ─ prompts and first references ─┬─ tokenizer: words of the instruction, characters of the rest
                                                     └─ maximum likelihood of answers, a part of them wrong ─> folder

It stands for a model that was pretrained: its answers have the right form and are right now and then, so that
reinforcement learning has something to improve. The config names it `embedded/tiny_model` wherever a model is named.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rl4lms_like.core.errors import ConfigError, ConfigIssue, DataPoolError
from rl4lms_like.core.numbers import Count, Fraction, Positive, Seed

Pair = tuple[str, str]
"""Prompt and response."""


@dataclass(frozen=True, kw_only=True)
class TinyModelConfig:
    """The `tiny_model` block: architecture and training of the model `embedded/tiny_model`.

    It is trained on prompts of the data pool's split `train` with their first references, and created when it is first
    used. The loss is over the references only. Words without digits that occur in a tenth of the prompts are one token
    each; all others are spelled in characters.

    Args:
        family: `gpt2`, or `t5` with `n_layer` encoder and as many decoder layers.
        n_layer: number of layers.
        n_embd: width of the hidden states.
        n_head: number of attention heads; a divisor of `n_embd`.
        n_positions: maximum number of tokens of prompt and response together.
        steps: number of optimizer steps.
        batch_size: number of texts per step.
        lr: maximum learning rate.
        wrong_answers: fraction of the texts in which the reference is that of another, random prompt. The model is then
            less often right than without them.
        seed: seed of weights and texts; independent of the run's seed.
    """

    family: Literal["gpt2", "t5"] = "gpt2"
    n_layer: Count = 2
    n_embd: Count = 64
    n_head: Count = 4
    n_positions: Count = 96
    steps: Count = 600
    batch_size: Count = 128
    lr: Positive = 3e-3
    wrong_answers: Fraction = 0.5
    seed: Seed = 0

    def __post_init__(self) -> None:
        if self.n_embd % self.n_head:
            raise ValueError(f"n_head {self.n_head} does not divide n_embd {self.n_embd}")


def pairs_of(pool: Any) -> list[Pair]:
    """Return the prompt and the first reference of each sample of a pool.

    Raises:
        DataPoolError: no sample has a reference.
    """
    pairs = [(sample.prompt_or_input_text, sample.references[0]) for sample, _ in pool if sample.references]
    if not pairs:
        raise DataPoolError("no sample of the split 'train' has a reference, on which tiny_model could be trained")
    return pairs


def digest(settings: TinyModelConfig, pairs: Sequence[Pair]) -> str:
    """Return a text that differs for other settings or other training texts."""
    return hashlib.sha256(json.dumps([asdict(settings), pairs]).encode()).hexdigest()[:16]


def make_tiny_model(folder: Path, settings: TinyModelConfig, pairs: Sequence[Pair]) -> None:
    """Train a model on pairs of prompt and answer, and save it with its tokenizer.

    Raises:
        ConfigError: the model has too few positions for them.
    """
    from rl4lms_like.training.small_models.warm_start import make_model, make_spelling_tokenizer, train_language_model

    tokenizer = make_spelling_tokenizer([prompt for prompt, _ in pairs])
    sizes = ("family", "n_layer", "n_embd", "n_head", "n_positions", "seed")
    model = make_model(tokenizer, **{name: getattr(settings, name) for name in sizes})
    schedule = {name: getattr(settings, name) for name in ("steps", "lr", "batch_size", "seed")}
    needed = max(sum(len(tokenizer(text)["input_ids"]) for text in pair) + 1 for pair in pairs)
    if needed > settings.n_positions:
        text = f"prompt, response and end token need up to {needed} positions, the model has {settings.n_positions}"
        raise ConfigError([ConfigIssue("tiny_model.n_positions", text)])
    texts = partly_wrong(pairs, settings.steps * settings.batch_size, settings.wrong_answers, settings.seed)
    train_language_model(model, tokenizer, texts, **schedule)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def partly_wrong(pairs: Sequence[Pair], n: int, wrong: float, seed: int) -> list[Pair]:
    """Draw `n` pairs with replacement; each has the answer of another random pair with probability `wrong`."""
    rng = random.Random(f"{seed}-pairs")
    drawn = [rng.choice(pairs) for _ in range(n)]
    return [(prompt, rng.choice(pairs)[1] if rng.random() < wrong else answer) for prompt, answer in drawn]
