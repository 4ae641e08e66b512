"""Create a tokenizer and a small random model for generated texts.

tokenizer   byte-level (one token per frequent word, bytes for all others) or a short list of words; id 0 begins, ends
            and pads a text
model       GPT-2 or T5, a few layers, no dropout
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

import torch
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

SPECIAL_TOKEN = "<|endoftext|>"
"""Begins, ends and pads a text; id 0."""

Family = Literal["gpt2", "t5"]


def make_tokenizer(texts: Sequence[str], vocab_size: int = 1024) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with the most frequent words of `texts`, each with its leading space, as tokens.

    Words beyond `vocab_size` are encoded as bytes, so every text can be encoded and decoded without loss. Compared with
    merges, whole words halve the vocabulary that a given corpus needs, and prevent a small model from joining word
    pieces to words that do not exist.
    """
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    counts = Counter(word for text in texts for word, _ in split.pre_tokenize_str(text))
    first = [SPECIAL_TOKEN, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words = sorted((word for word in counts if len(word) > 1), key=lambda word: (-counts[word], word))
    vocabulary = [*first, *words[: max(0, vocab_size - len(first))]]
    ids = {token: id for id, token in enumerate(vocabulary)}
    backend = Tokenizer(models.BPE(vocab=ids, merges=[], ignore_merges=True))
    backend.pre_tokenizer = split
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
    backend.pre_tokenizer = (
        pre_tokenizers.WhitespaceSplit() if separated else pre_tokenizers.Split(Regex("."), "isolated")
    )
    if not separated:
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
    family: Literal["gpt2", "t5"] = "gpt2",
    n_layer: int = 2,
    n_embd: int = 64,
    n_head: int = 4,
    n_positions: int = 96,
    seed: int = 0,
) -> PreTrainedModel:
    """Return a small model without dropout, with weights drawn from `seed`. Torch's global generator is unchanged."""
    make = _t5 if family == "t5" else _gpt2
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make(len(tokenizer), n_layer, n_embd, n_head, n_positions)


def _gpt2(vocab_size: int, n_layer: int, n_embd: int, n_head: int, n_positions: int) -> PreTrainedModel:
    """Return a GPT-2 with weights scaled for a width of 64 and GPT-2's activation in one kernel."""
    config = GPT2Config(
        vocab_size=vocab_size,
        n_layer=n_layer,
        n_embd=n_embd,
        n_head=n_head,
        n_positions=n_positions,
        activation_function="gelu_pytorch_tanh",
        initializer_range=0.1,  # GPT-2's 0.02 is for a width of 768
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    return GPT2LMHeadModel(config)


def _t5(vocab_size: int, n_layer: int, n_embd: int, n_head: int, n_positions: int) -> PreTrainedModel:
    """Return a T5 with `n_layer` encoder and decoder layers; positions are relative, `n_positions` is only recorded."""
    config = T5Config.from_dict(
        {
            "vocab_size": vocab_size,
            "num_layers": n_layer,
            "num_decoder_layers": n_layer,
            "d_model": n_embd,
            "d_ff": 4 * n_embd,
            "d_kv": n_embd // n_head,
            "num_heads": n_head,
            "n_positions": n_positions,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "pad_token_id": 0,
        }
    )
    return T5ForConditionalGeneration(config)
