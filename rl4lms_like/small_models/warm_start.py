"""Train a small language model on generated texts, in seconds on one CPU thread.

    film_opinions(n, seed) -> make_tokenizer -> make_model -> train_language_model -> folder for `from_pretrained`

Two families: `gpt2` learns whole texts; `t5` reads the first words of a text and learns to write the rest. One token,
id 0, ends and pads texts. Results are bitwise reproducible for a seed: weights, batches and prompt lengths come from
generators created here, and only one thread is used.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from rl4lms_like.core.episodes import padded
from rl4lms_like.data_pools.film_opinions import TABLE, film_opinions, split_opinion
from rl4lms_like.tracking.run_folder import write_whole

SPECIAL_TOKEN = "<|endoftext|>"
"""Begins, ends and pads a text; id 0."""

Family = Literal["gpt2", "t5"]

RECORD = "warm_start.json"
"""File next to the model with its settings and its held-out perplexity; written last."""

Example = tuple[list[int], list[int]]
"""Input ids and target ids; if a causal model learns whole texts, the first list is empty."""


@dataclass(frozen=True, kw_only=True)
class WarmStartSettings:
    """All settings that determine the weights of a warm start."""

    family: Family = "gpt2"  # or `t5`, with `n_layer` encoder and as many decoder layers
    seed: int = 0  # of texts, weights and batches
    n_texts: int = 20_000  # film opinions to train on
    n_held_out: int = 400  # opinions with other openings, for the perplexity
    vocab_size: int = 1024  # at most
    n_layer: int = 2
    n_embd: int = 64
    n_head: int = 4
    n_positions: int = 96  # maximum text length of `gpt2` in tokens
    steps: int = 1600
    lr: float = 1e-2  # maximum
    batch_size: int = 16  # texts per step


def make_tokenizer(texts: Sequence[str], vocab_size: int = 1024) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with the most frequent words of `texts`, each with its leading space, as tokens.

    Words beyond `vocab_size` are encoded as bytes, so every text can be encoded and decoded without loss. Compared with
    merges, whole words halve the vocabulary that a given corpus needs, and prevent a small model from joining word
    pieces to words that do not exist.
    """
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(_words(text))

    # Single bytes are tokens already. Words of equal frequency in the order of the alphabet, for equal ids in each run.
    words = [word for word in counts if len(word) > 1]
    words.sort(key=lambda word: (-counts[word], word))
    return _byte_level(words[: max(0, vocab_size - len(_BYTES))])


def make_spelling_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with the words without digits that occur in a tenth of `texts` as tokens.

    These are the words of an instruction. Names and numbers, which vary, are spelled in bytes: a model can learn to add
    digits or to reverse letters.
    """
    counts: Counter[str] = Counter()  # of texts with the word
    for text in texts:
        counts.update(word for word in set(_words(text)) if not any(map(str.isdigit, word)))
    return _byte_level(sorted(word for word in counts if len(word) > 1 and 10 * counts[word] >= len(texts)))


_SPLIT = pre_tokenizers.ByteLevel(add_prefix_space=False)
_BYTES = (SPECIAL_TOKEN, *sorted(pre_tokenizers.ByteLevel.alphabet()))


def _words(text: str) -> list[str]:
    """Return the words of a text, each with its leading space, in the alphabet of byte-level tokenizers."""
    return [word for word, _ in _SPLIT.pre_tokenize_str(text)]


def _byte_level(words: Iterable[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer for these words; all others are encoded as bytes."""
    ids = {token: id for id, token in enumerate([*_BYTES, *words])}
    # Without merges, a word is one token if it is in the vocabulary, and bytes otherwise.
    backend = Tokenizer(models.BPE(vocab=ids, merges=[], ignore_merges=True))
    backend.pre_tokenizer = _SPLIT
    backend.decoder = decoders.ByteLevel()
    return _with_special_token(backend)


def make_word_tokenizer(words: Sequence[str], *, separated: bool = True) -> PreTrainedTokenizerFast:
    """Return a tokenizer for these words; every other word is encoded as the special token.

    Args:
        words: one token each.
        separated: words are separated by spaces; if false, each character is a word.
    """
    vocabulary = {token: id for id, token in enumerate([SPECIAL_TOKEN, *words])}
    backend = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token=SPECIAL_TOKEN))
    # Without a decoder, tokens are joined by spaces; characters are joined by nothing.
    if separated:
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    else:
        backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
        backend.decoder = decoders.Fuse()
    return _with_special_token(backend)


def _with_special_token(backend: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=SPECIAL_TOKEN,
        eos_token=SPECIAL_TOKEN,
        pad_token=SPECIAL_TOKEN,
        clean_up_tokenization_spaces=False,
    )


def make_model(
    tokenizer: PreTrainedTokenizerBase,
    *,
    family: Family = "gpt2",
    n_layer: int = 2,
    n_embd: int = 64,
    n_head: int = 4,
    n_positions: int = 96,
    seed: int = 0,
) -> PreTrainedModel:
    """Return a small model without dropout, with weights drawn from `seed`. Torch's global generator is unchanged.

    T5 has `n_layer` encoder and as many decoder layers; its positions are relative, so `n_positions` is only recorded.
    """
    # The special token, id 0, begins, ends and pads.
    arguments: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "n_positions": n_positions,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)

        # GPT-2's activation in one kernel. Its own initial scale, 0.02, is for a width of 768.
        if family == "gpt2":
            arguments |= {"n_layer": n_layer, "n_embd": n_embd, "n_head": n_head}
            arguments |= {"initializer_range": 0.1, "activation_function": "gelu_pytorch_tanh"}
            arguments |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
            return GPT2LMHeadModel(GPT2Config(**arguments))

        arguments |= {"num_layers": n_layer, "num_decoder_layers": n_layer, "num_heads": n_head, "dropout_rate": 0.0}
        arguments |= {"d_model": n_embd, "d_ff": 4 * n_embd, "d_kv": n_embd // n_head, "decoder_start_token_id": 0}
        return T5ForConditionalGeneration(T5Config.from_dict(arguments))


def train_language_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str] | Sequence[tuple[str, str]],
    *,
    steps: int,
    lr: float = 1e-2,
    batch_size: int = 16,
    seed: int = 0,
) -> None:
    """Train a model in place by maximum likelihood, with AdamW, linear warm-up to `lr` and linear decay to 0.

    The texts are whole, or pairs of prompt and response; for a causal model they must fit its positions. A causal model
    learns whole texts; an encoder-decoder reads a text's first words and learns the rest. The loss is over real tokens
    and the end token; of a pair, only over those of the response. A batch has texts of similar length.
    """
    examples = _examples(model, tokenizer, texts, seed)

    # Warm-up over the first sixteenth of the steps; both factors apply there.
    n_warm_up = max(1, steps // 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / n_warm_up, 1.0) * (1 - step / steps)
    )

    model.train()
    with one_thread():
        for batch in islice(_batches(examples, batch_size, seed), steps):
            loss = _losses(model, batch).mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    model.eval()


@torch.no_grad()
def perplexity(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, seed: int = 0
) -> float:
    """Return exp of the mean loss per target token (for a causal model, all but a text's first), the end included."""
    examples = _examples(model, tokenizer, texts, seed)
    with one_thread():
        losses = [_losses(model, examples[start : start + 50]) for start in range(0, len(examples), 50)]
    return math.exp(torch.cat(losses).mean().item())


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread: fastest for small models, and reproducible because the order of summation is fixed."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(n_threads)


def _examples(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str] | Sequence[tuple[str, str]],
    seed: int,
) -> list[Example]:
    # Each target ends with the special token, id 0. Pairs: only the response is learned.
    if isinstance(texts[0], tuple):
        prompt_texts, response_texts = zip(*texts, strict=True)
        prompts = tokenizer(list(prompt_texts))["input_ids"]
        responses = tokenizer(list(response_texts))["input_ids"]
        return [(prompt, [*response, 0]) for prompt, response in zip(prompts, responses, strict=True)]
    if not model.config.is_encoder_decoder:
        return [([], [*ids, 0]) for ids in tokenizer(list(texts))["input_ids"]]

    # An encoder-decoder reads the first 5 to 7 words. The words after them begin with a space, as within a text.
    rng = random.Random(f"{seed}-prompts")
    beginnings = []
    continuations = []
    for text in texts:
        beginning, continuation = split_opinion(str(text), rng.randint(5, 7))
        beginnings.append(beginning)
        continuations.append(f" {continuation}")
    prompts = tokenizer(beginnings)["input_ids"]
    targets = tokenizer(continuations)["input_ids"]
    return [(prompt, [*target, 0]) for prompt, target in zip(prompts, targets, strict=True)]


def _batches(examples: Sequence[Example], batch_size: int, seed: int) -> Iterator[list[Example]]:
    """Yield endless epochs of batches of examples with similar lengths."""
    rng = random.Random(f"{seed}-batches")
    pool_size = 50 * batch_size
    while True:
        shuffled = rng.sample(examples, len(examples))

        # Sorted within pools of 50 batches: little padding, but other batches in each epoch.
        batches = []
        for pool_start in range(0, len(shuffled), pool_size):
            pool = sorted(shuffled[pool_start : pool_start + pool_size], key=lambda example: len(example[1]))
            for start in range(0, len(pool), batch_size):
                batches.append(pool[start : start + batch_size])

        # Otherwise short texts would come first in each pool.
        rng.shuffle(batches)
        yield from batches


def _losses(model: PreTrainedModel, batch: Sequence[Example]) -> torch.Tensor:
    """Return the negative log-likelihood `[n_tokens]` of the target tokens in nats. Padding is on the right."""
    # ids, mask [n, length] of the targets, and logits [n, length, vocab] that predict them.
    if model.config.is_encoder_decoder:
        ids, mask = padded([target for _, target in batch])
        prompt_ids, prompt_mask = padded([prompt for prompt, _ in batch])
        start = torch.full_like(ids[:, :1], model.config.decoder_start_token_id)
        inputs = torch.cat([start, ids[:, :-1]], dim=1)
        logits = model(input_ids=prompt_ids, attention_mask=prompt_mask.long(), decoder_input_ids=inputs).logits
    else:
        # Padding on the right is after all real tokens, which therefore never attend to it: no mask is needed.
        ids, mask = padded([[*prompt, *target] for prompt, target in batch])
        prompt_lengths = torch.tensor([len(prompt) for prompt, _ in batch])
        mask &= torch.arange(ids.shape[1]) >= prompt_lengths[:, None]
        logits = model(input_ids=ids[:, :-1]).logits
        ids = ids[:, 1:]
        mask = mask[:, 1:]

    return F.cross_entropy(logits[mask], ids[mask], reduction="none")


def make_warm_start(folder: str | Path, settings: WarmStartSettings | None = None) -> float:
    """Train a model on film opinions and save it with its tokenizer; reuse a folder with the same settings.

    Returns:
        Its perplexity per token on held-out texts.
    """
    folder = Path(folder)
    settings = settings or WarmStartSettings()
    # Everything that determines the weights: the settings, and the grammar that generates the texts.
    expected = {**asdict(settings), "grammar": hashlib.sha256(TABLE.encode()).hexdigest()}
    file = folder / RECORD
    record = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}

    # The record is removed first and written last, so that it is never beside another model, or an incomplete one.
    if record.get("settings") != expected:
        file.unlink(missing_ok=True)
        texts = film_opinions(settings.n_texts, settings.seed)
        tokenizer = make_tokenizer(texts, settings.vocab_size)
        model = train_and_save(folder, tokenizer, settings, texts)
        held_out = film_opinions(settings.n_held_out, settings.seed, split="val")
        record = {"settings": expected, "perplexity": perplexity(model, tokenizer, held_out)}
        write_whole(file, json.dumps(record, indent=2) + "\n")
    return float(record["perplexity"])


def train_and_save(
    folder: Path, tokenizer: PreTrainedTokenizerBase, settings: Any, texts: Sequence[str] | Sequence[tuple[str, str]]
) -> PreTrainedModel:
    """Train a model with the sizes and the schedule of some settings; save it with its tokenizer, and return it."""
    sizes = ("family", "n_layer", "n_embd", "n_head", "n_positions", "seed")
    model = make_model(tokenizer, **{name: getattr(settings, name) for name in sizes})
    schedule = {name: getattr(settings, name) for name in ("steps", "lr", "batch_size", "seed")}
    train_language_model(model, tokenizer, texts, **schedule)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model
