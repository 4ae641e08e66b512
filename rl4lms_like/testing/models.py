"""Tiny random language models of many families, created from configs without a network.

    tokenizer = make_tokenizer()                      byte-level BPE, trained when called
    model = make_causal_lm("gpt2", tokenizer)         2 layers, hidden size 32, float32, seeded
    folder = save_model(path, model, tokenizer)       loaded by `from_pretrained`

All family-specific settings are in `_dimensions`; a new family is a new row. The models keep their family's conventions
(dropout, attention windows, decoder start token), because tests need to cover them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

PAD_TOKEN = "<pad>"
EOS_TOKEN = "<eos>"
UNK_TOKEN = "<unk>"

SENTENCES: Sequence[str] = (
    "The film opens with a quiet morning in a small town by the sea.",
    "I saw this comedy with my sister, and we laughed from start to finish.",
    "A wonderful story, but the ending seemed slow and a little cold.",
    "On 12 March 1998 the museum bought 34 paintings for 5,670 dollars.",
    "Count with me: 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20.",
    "Who wrote the letter? Nobody knew, and nobody asked!",
)

CAUSAL_FAMILIES: Sequence[str] = ("gpt2", "opt", "gpt_neox", "llama", "qwen2", "mistral", "gemma", "gemma2")
SEQ2SEQ_FAMILIES: Sequence[str] = ("t5", "bart", "marian", "mbart")

_EAGER_ONLY = frozenset({"gemma2"})
_START_WITH_PAD = frozenset({"t5", "marian"})  # the others' decoders start with the end token
_END_IS_FORCED = frozenset({"bart", "marian", "mbart"})  # their configs force the end token at the length limit


def make_tokenizer(
    texts: Iterable[str] = SENTENCES, vocab_size: int = 320, *, append_eos: bool = False
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on ``texts``; encoding and decoding preserves any string.

    Args:
        texts: training texts.
        vocab_size: maximum vocabulary size; 2 special tokens and 256 bytes are always included.
        append_eos: append the end token to every encoded text, as T5's and BART's tokenizers do.

    Returns:
        A tokenizer with pad token 0 and end token 1; the end token is also the start token.
    """
    # Bytes, so that no text is unknown; without a prefix space, so that decoding gives back the same text.
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()

    # The order of the special tokens determines their ids: 0 pads, 1 ends.
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD_TOKEN, EOS_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer=trainer)

    # No text gives an unknown token, but without one `AutoTokenizer` adds a token for some families.
    return _wrap(bpe, append_eos=append_eos, unk_token=EOS_TOKEN)


def make_word_tokenizer(words: Iterable[str], *, append_eos: bool = False) -> PreTrainedTokenizerFast:
    """Return a tokenizer with the vocabulary ``words``, split at white space, for toy tasks with few actions.

    Args:
        words: one token each, in this order after the 3 special tokens; unknown words become the third of those.
        append_eos: append the end token to every encoded text.
    """
    tokens = (PAD_TOKEN, EOS_TOKEN, UNK_TOKEN, *words)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    splitter = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK_TOKEN))
    splitter.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _wrap(splitter, append_eos=append_eos, unk_token=UNK_TOKEN)


def _wrap(tokenizer: Tokenizer, *, append_eos: bool, **special_tokens: str) -> PreTrainedTokenizerFast:
    """Return the tokenizer with the interface of transformers, and the special tokens that all have."""
    if append_eos:
        eos_id = tokenizer.token_to_id(EOS_TOKEN)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"$A {EOS_TOKEN}", pair=f"$A {EOS_TOKEN} $B {EOS_TOKEN}", special_tokens=[(EOS_TOKEN, eos_id)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD_TOKEN,
        eos_token=EOS_TOKEN,
        bos_token=EOS_TOKEN,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        **special_tokens,
    )


def make_causal_lm(
    family: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    hidden_size: int = 32,
    n_layers: int = 2,
    n_heads: int = 4,
    n_positions: int = 128,
    scale: float = 1.0,
    seed: int = 0,
    **config: Any,
) -> PreTrainedModel:
    """Return a random decoder-only model.

    Args:
        family: one of `CAUSAL_FAMILIES`.
        tokenizer: determines the vocabulary size and the special tokens.
        hidden_size: hidden size.
        n_layers: number of transformer blocks.
        n_heads: number of attention heads; must divide the hidden size.
        n_positions: maximum length of prompt and response together, if the family has such a limit.
        scale: multiplies the family's initial weight scale. With 1 most families are near-uniform, suitable for
            training from scratch; with 10 (T5: 1) they are far from uniform, suitable for comparing log-probs.
        seed: seed of the weights; the global random state is not changed.
        **config: further arguments of the family's config; they override the ones set here.

    Raises:
        ValueError: the family is unknown.
    """
    dimensions = _dimensions(
        CAUSAL_FAMILIES,
        family,
        size=hidden_size,
        layers=n_layers,
        heads=n_heads,
        positions=n_positions,
        scale=scale,
    )

    return _make(AutoModelForCausalLM, family, tokenizer, dimensions=dimensions, overrides=config, seed=seed)


def make_seq2seq_lm(
    family: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    hidden_size: int = 32,
    n_layers: int = 2,
    n_heads: int = 4,
    n_positions: int = 128,
    scale: float = 1.0,
    seed: int = 0,
    **config: Any,
) -> PreTrainedModel:
    """Return a random encoder-decoder model with ``n_layers`` in both encoder and decoder.

    The arguments are those of `make_causal_lm`; ``family`` is one of `SEQ2SEQ_FAMILIES`.

    Raises:
        ValueError: the family is unknown.
    """
    dimensions = _dimensions(
        SEQ2SEQ_FAMILIES,
        family,
        size=hidden_size,
        layers=n_layers,
        heads=n_heads,
        positions=n_positions,
        scale=scale,
    )

    # Conventions of the families that a policy has to follow: how a response starts, and that it always ends.
    starts_with_pad = family in _START_WITH_PAD
    dimensions["decoder_start_token_id"] = tokenizer.pad_token_id if starts_with_pad else tokenizer.eos_token_id
    if family in _END_IS_FORCED:
        dimensions["forced_eos_token_id"] = tokenizer.eos_token_id
    return _make(AutoModelForSeq2SeqLM, family, tokenizer, dimensions=dimensions, overrides=config, seed=seed)


def save_model(path: Path | str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Path:
    """Save model and tokenizer in one folder for `from_pretrained`; return the folder."""
    folder = Path(path)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _dimensions(
    families: Sequence[str], family: str, *, size: int, layers: int, heads: int, positions: int, scale: float
) -> dict[str, Any]:
    """Return arguments of `AutoConfig.for_model`, without vocabulary and special tokens.

    Transformers maps the common names to those of the family (`hidden_size` to GPT-2's `n_embd`).
    """
    if family not in families:
        raise ValueError(f"unknown family {family!r}; known: {', '.join(families)}")

    # What several families have in common, each from the one before: learned or rotary positions, fewer key heads
    # (grouped attention), a size of a head that is no quotient of others, attention to the last 8 tokens only.
    limit = {"max_position_embeddings": positions}
    rotary = limit | {"intermediate_size": 4 * size, "initializer_range": 0.02 * scale}
    grouped = rotary | {"num_key_value_heads": max(1, heads // 2)}
    gemma = grouped | {"head_dim": size // heads}
    windowed = gemma | {"sliding_window": 8}

    # BART's names for encoder and decoder; the common names below are those of the encoder.
    bart = limit | {"decoder_layers": layers, "decoder_attention_heads": heads, "init_std": 0.02 * scale}
    bart |= {"encoder_ffn_dim": 4 * size, "decoder_ffn_dim": 4 * size}

    rows: dict[str, dict[str, Any]] = {
        "gpt2": limit | {"initializer_range": 0.02 * scale},
        "opt": limit | {"word_embed_proj_dim": size, "ffn_dim": 4 * size, "init_std": 0.02 * scale},
        "gpt_neox": rotary,
        "llama": grouped,
        "qwen2": grouped,
        "mistral": windowed,
        "gemma": gemma,
        "gemma2": windowed | {"query_pre_attn_scalar": size // heads},
        "t5": {
            "d_ff": 4 * size,
            "d_kv": size // heads,
            "num_decoder_layers": layers,
            "initializer_factor": float(scale),
        },
        "bart": bart,
        "marian": bart,
        "mbart": bart,
    }
    return {"hidden_size": size, "num_hidden_layers": layers, "num_attention_heads": heads} | rows[family]


def _make(
    auto_class: Any,
    family: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    dimensions: Mapping[str, Any],
    overrides: Mapping[str, Any],
    seed: int,
) -> PreTrainedModel:
    # An override may use the family's name for a common one (`n_embd` for `hidden_size`); both would contradict.
    family_names = CONFIG_MAPPING[family].attribute_map
    arguments = {name: value for name, value in dimensions.items() if family_names.get(name) not in overrides}
    arguments |= overrides

    special_tokens = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = AutoConfig.for_model(family, vocab_size=len(tokenizer), **(special_tokens | arguments))
    attention = {"attn_implementation": "eager"} if family in _EAGER_ONLY else {}

    # The caller's random numbers must not depend on whether a model was made.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto_class.from_config(config, dtype=torch.float32, **attention)
    return model.eval()
