"""Tokenizers of many families, trained on the texts below when a test calls for them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from rl4lms_like.testing.models import SENTENCES

CODE = '''def area(width, height):
    """Return the area."""
    if width < 0:
        raise ValueError(f"width: {width!r}")
\treturn width * height  # 3.5 * 2 = 7


class Box:
        pass
'''

TEXTS: Sequence[str] = (
    *SENTENCES,
    CODE,
    "2+2=4, 10/10;  two  spaces,   three.\n\n\tA tab; trailing spaces   \n",
    "Zoë’s film, “naïve” — c’était déjà vu… Привет, мир! 你好，世界。日本語のテキスト",
    "🎬👍🏽 a family: 👨‍👩‍👧‍👦, flags: 🇫🇷🇯🇵, and the sea 🌊🌊!\nEnd.",
)
"""Text, code, indentation, several scripts, emoji of several code points, line ends."""

SPECIAL = ["<s>", "</s>", "<unk>"]
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)


def _fast(backend: Tokenizer, **arguments: Any) -> PreTrainedTokenizerFast:
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, **(special | arguments)
    )


def _begin_with_bos(backend: Tokenizer, *, ends: bool = False) -> None:
    """Let the tokenizer put a token before each text, and one after it if `ends`."""
    ids = [("<s>", backend.token_to_id("<s>")), ("</s>", backend.token_to_id("</s>"))]
    end = " </s>" if ends else ""
    backend.post_processor = processors.TemplateProcessing(
        single=f"<s> $A{end}", pair=f"<s> $A <s> $B{end}", special_tokens=ids
    )


def byte_level(*, add_prefix_space: bool = False, merges: bool = True) -> PreTrainedTokenizerFast:
    """GPT-2's kind; without merges each byte is a token."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    size = 420 if merges else len(alphabet) + len(SPECIAL)
    backend.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(vocab_size=size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False),
    )
    return _fast(backend)


def tiktoken_like() -> PreTrainedTokenizerFast:
    """Llama 3's kind: other borders between words than GPT-2's, and a token before each text."""
    backend = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(_CL100K), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(vocab_size=450, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False),
    )
    _begin_with_bos(backend)
    return _fast(backend)


def with_added_tokens(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """Return the tokenizer with tokens in its texts that are special, or only added."""
    tokenizer.add_tokens([AddedToken("<think>", special=True, normalized=False)], special_tokens=True)
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("sea", normalized=False)])
    return tokenizer


def llama_like(*, dummy_prefix: bool = True, ends: bool = False) -> PreTrainedTokenizerFast:
    """SentencePiece's BPE: ▁ for spaces, unknown characters as bytes; Gemma's kind without the dummy prefix."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    to_underscore = normalizers.Replace(" ", "▁")
    backend.normalizer = to_underscore
    backend.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    characters = [*sorted(set("".join(SENTENCES)) - {" "}), "▁"]
    backend.train_from_iterator(
        SENTENCES,
        trainers.BpeTrainer(
            vocab_size=520,
            special_tokens=[*SPECIAL, *_BYTES],
            initial_alphabet=characters,
            limit_alphabet=len(characters),
            show_progress=False,
        ),
    )

    # Only the training needs words, and the tokens of bytes are special to the trainer only.
    described = json.loads(backend.to_str())
    described["added_tokens"] = [token for token in described["added_tokens"] if token["content"] in SPECIAL]
    backend = Tokenizer.from_str(json.dumps(described))
    backend.pre_tokenizer = None
    replace = decoders.Replace("▁", " ")
    fallback = [replace, decoders.ByteFallback(), decoders.Fuse()]
    if dummy_prefix:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), to_underscore])
        fallback.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(fallback)
    _begin_with_bos(backend, ends=ends)
    return _fast(backend)


def metaspace(scheme: str, *, unigram: bool = False, seq2seq: bool = False) -> PreTrainedTokenizerFast:
    """SentencePiece's kind as converted by later versions (Mistral), or its unigram model (T5)."""
    pieces = sorted(set("".join(TEXTS)) - set(" ") | {"▁"})
    words = sorted({f"▁{word}" for text in TEXTS for word in text.split()})
    if unigram:
        vocabulary = [(token, 0.0) for token in SPECIAL] + [(piece, -9.0) for piece in pieces if piece != "▁"]
        vocabulary += [("▁", -3.0)] + [(word, -6.0) for word in words]
        backend = Tokenizer(models.Unigram(vocabulary, unk_id=2))
        backend.add_special_tokens(SPECIAL)
    else:
        backend = Tokenizer(models.BPE(unk_token="<unk>"))
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
        backend.train_from_iterator(
            TEXTS,
            trainers.BpeTrainer(vocab_size=600, special_tokens=SPECIAL, initial_alphabet=pieces, show_progress=False),
        )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    if seq2seq:
        ids = [("</s>", backend.token_to_id("</s>"))]
        backend.post_processor = processors.TemplateProcessing(
            single="$A </s>", pair="$A </s> $B </s>", special_tokens=ids
        )
    else:
        _begin_with_bos(backend)
    return _fast(backend)


def word_piece() -> PreTrainedTokenizerFast:
    """BERT's kind, whose decoder removes the space before a full stop again."""
    backend = Tokenizer(models.WordPiece(unk_token="<unk>"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=False)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=True)
    backend.train_from_iterator(
        TEXTS, trainers.WordPieceTrainer(vocab_size=600, special_tokens=SPECIAL, show_progress=False)
    )
    _begin_with_bos(backend, ends=True)
    return _fast(backend)


def end_of_word() -> PreTrainedTokenizerFast:
    """GPT-1's kind: the last piece of a word has a suffix, which is decoded to a space."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.BPEDecoder(suffix="</w>")
    backend.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(vocab_size=700, special_tokens=SPECIAL, end_of_word_suffix="</w>", show_progress=False),
    )
    return _fast(backend)


CAUSAL: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "byte-level": byte_level,
    "byte-level with a prefix space": lambda: byte_level(add_prefix_space=True),
    "bytes": lambda: byte_level(merges=False),
    "tiktoken": tiktoken_like,
    "byte-level with added tokens": lambda: with_added_tokens(byte_level()),
    "llama": llama_like,
    "llama without dummy prefix": lambda: llama_like(dummy_prefix=False),
    "llama with added tokens": lambda: with_added_tokens(llama_like()),
    "metaspace first": lambda: metaspace("first"),
    "metaspace always": lambda: metaspace("always"),
    "unigram": lambda: metaspace("always", unigram=True),
    "end of word": end_of_word,
}
"""Tokenizers of models that continue their prompts."""

SEQ2SEQ: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "word piece": word_piece,
    "unigram": lambda: metaspace("always", unigram=True, seq2seq=True),
}
"""Tokenizers of models whose responses are texts of their own."""
