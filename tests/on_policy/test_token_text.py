"""Pieces of text, one for each token, that joined are the text of all."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rl4lms_like.on_policy.token_credit import text_pieces
from rl4lms_like.testing.models import make_tokenizer

TEXT = "Zoë’s film, “naïve” — it's 10/10 🎬👍🏽!\n\tOui.  "


def llama_like():
    """SentencePiece's way: ▁ for spaces, the first of which is dropped; unknown characters as bytes."""
    words = ["▁", "▁film", "f", "i", "l", "m", "▁it", "'", "s", ",", "."]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = [("<unk>", 0.0), ("</s>", 0.0), *((word, -float(i)) for i, word in enumerate(words))]
    vocab += [(byte, -50.0) for byte in bytes_]
    backend = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")


def bert_like():
    """WordPiece, whose clean-up takes the space before a full stop away again."""
    words = ["[UNK]", "[SEP]", "do", "n", "'", "t", "film", "##s", ".", ",", "it", "##n", "!"]
    backend = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=True)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="[SEP]", unk_token="[UNK]", clean_up_tokenization_spaces=True
    )


TOKENIZERS = {"byte-level": make_tokenizer, "sentencepiece": llama_like, "wordpiece": bert_like}


def decoder_of(tokenizer):
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_pieces_of_any_tokens_are_the_text_of_all_of_them(kind):
    decode = decoder_of(TOKENIZERS[kind]())
    size = len(TOKENIZERS[kind]())
    draw = random.Random(7)
    for length in [0, 1, 2, *range(3, 40)]:
        ids = [draw.randrange(size) for _ in range(length)]
        pieces = text_pieces(decode, ids)
        assert len(pieces) == length
        assert "".join(pieces) == decode(ids)


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_a_real_text_comes_back_whole_and_no_piece_has_half_a_character(kind):
    tokenizer = TOKENIZERS[kind]()
    pieces = text_pieces(decoder_of(tokenizer), tokenizer(TEXT)["input_ids"])
    assert "".join(pieces) == TEXT
    assert not any("\ufffd" in piece for piece in pieces)
    assert "" in pieces and "🎬" in pieces  # its last byte's token has it, the tokens before have nothing


def test_spaces_belong_to_the_word_after_them():
    llama = llama_like()
    ids = llama.convert_tokens_to_ids(["▁film", "▁film", "s", ".", "</s>"])
    assert text_pieces(decoder_of(llama), ids) == ["film", " film", "s", ".", ""]


def test_what_clean_up_takes_away_is_in_no_piece():
    bert = bert_like()
    ids = bert.convert_tokens_to_ids(["film", "##s", ".", "do", "n", "'", "t", "!"])
    assert decoder_of(bert)(ids) == "films. don't!"
    pieces = text_pieces(decoder_of(bert), ids)
    assert "".join(pieces) == "films. don't!"
    assert pieces[:4] == ["film", "s", ".", " do"]


def test_bytes_that_are_no_character_stay_in_the_token_that_has_them():
    tokenizer = make_tokenizer()
    (half, *_) = tokenizer("é", add_special_tokens=False)["input_ids"]
    word = tokenizer(" the", add_special_tokens=False)["input_ids"]
    assert text_pieces(decoder_of(tokenizer), [*word, half, *word]) == [" the", "\ufffd", " the"]
