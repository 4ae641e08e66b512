"""The text of a response and the ids of a text, as continuations of prompts of any tokenizer."""

from __future__ import annotations

import random
from functools import cache
from itertools import takewhile

import pytest
from transformers import AutoTokenizer

from rl4lms_like.core.continuation import Continuations
from tests import tokenizer_families
from tests.tokenizer_families import CAUSAL, SEQ2SEQ, TEXTS, llama_like

N_SPLITS = 200

INSERTED = ["<think>", "<tool>", "</s>"]
"""Texts that some of the tokenizers have as special or added tokens."""

LOSSLESS = [name for name in CAUSAL if name != "end of word"]
"""Tokenizers that decode a text to itself; the other one normalizes white space."""


trained = cache(lambda name: CAUSAL[name]())


@pytest.fixture
def tokenizer(name, request):
    if name == "stories260K":
        return AutoTokenizer.from_pretrained(request.getfixturevalue("shared_dir") / "models/stories260K")
    return trained(name)


def passages(seed):
    """Yield passages of the texts, some with special and added tokens in them."""
    draw = random.Random(seed)
    whole = "\n".join(TEXTS)
    for _ in range(N_SPLITS):
        start = draw.randrange(len(whole) - 60)
        text = whole[start : start + draw.randrange(2, 60)]
        if draw.random() < 0.2:
            middle = draw.randrange(len(text))
            text = text[:middle] + draw.choice(INSERTED) + text[middle:]
        yield draw, text


@pytest.mark.parametrize("name", [*CAUSAL, "stories260K"])
def test_the_text_of_a_response_is_the_decoded_whole_after_the_prompt(name, tokenizer):
    continuations = Continuations(tokenizer)
    n_alone = 0
    for draw, text in passages(1):
        # Long prompts, too, of which only the end is decoded with the response.
        ids = tokenizer(draw.choice([text, "The film. " * 9 + text]))["input_ids"]
        border = draw.randrange(len(ids) + 1)

        # Every prefix of the prompt is a witness of what is the prompt's: that of all tokens, unless the border cuts a
        # character.
        whole = tokenizer.decode(ids, skip_special_tokens=True)
        n_prompt = 0
        for n in range(border + 1):
            pairs = zip(tokenizer.decode(ids[:n], skip_special_tokens=True), whole, strict=False)
            n_prompt = max(n_prompt, len(list(takewhile(lambda pair: pair[0] == pair[1], pairs))))
        response = continuations.text(ids[:border], ids[border:])
        assert response == whole[n_prompt:]
        n_alone += response == tokenizer.decode(ids[border:], skip_special_tokens=True)
    assert n_alone < N_SPLITS  # the tokenizer cuts characters, or decodes the beginning of a text differently


@pytest.mark.parametrize("name", [*LOSSLESS, "stories260K"])
def test_the_ids_of_a_text_continue_those_of_the_prompt(name, tokenizer):
    continuations = Continuations(tokenizer)
    n_borders = 0
    for draw, text in passages(2):
        border = draw.randrange(len(text) + 1)
        starts = {text.find(token): token for token in INSERTED if token in text}
        if any(start < border < start + len(token) for start, token in starts.items()):
            continue  # within a special token, which is none then
        prompt, response = text[:border], text[border:]
        (ids,) = continuations.ids([prompt], [response])
        prompt_ids = tokenizer(prompt)["input_ids"]
        whole = tokenizer(text)["input_ids"]

        # At a token border they are the ids of the whole; elsewhere they are decoded to it.
        if whole[: len(prompt_ids)] == prompt_ids:
            assert prompt_ids + ids == whole
            n_borders += 1
        assert tokenizer.decode(prompt_ids + ids) == tokenizer.decode(whole)
    assert N_SPLITS // 10 < n_borders < N_SPLITS


@pytest.mark.parametrize("name", SEQ2SEQ)
def test_the_response_of_an_encoder_decoder_is_a_text_of_its_own(name):
    tokenizer = SEQ2SEQ[name]()
    continuations = Continuations(tokenizer, follows_prompt=False)
    for _, text in passages(3):
        ids = tokenizer(text)["input_ids"]
        assert continuations.text(tokenizer("The film")["input_ids"], ids) == tokenizer.decode(
            ids, skip_special_tokens=True
        )


def test_a_character_that_the_border_cuts_belongs_to_the_response():
    for tokenizer in (tokenizer_families.byte_level(merges=False), llama_like()):
        continuations = Continuations(tokenizer)
        ids = tokenizer("日本", add_special_tokens=False)["input_ids"]
        n_bytes = len("日本".encode())
        prompt, response = ids[: -n_bytes + 4], ids[-n_bytes + 4 :]
        assert continuations.text(prompt, response) == "本"
        assert continuations.text(prompt, response[:-1]) in ("", "\ufffd")


def test_spaces_of_a_sentencepiece_tokenizer_are_those_of_the_text():
    tokenizer = llama_like()
    continuations = Continuations(tokenizer)
    for prompt, response in [("The film was", " good."), ("2+2=", "4"), ("if x:\n", "    return 1"), ("So ", "it is")]:
        (ids,) = continuations.ids([prompt], [response])
        assert continuations.text(tokenizer(prompt)["input_ids"], ids) == response
    assert tokenizer.decode(tokenizer(" good.")["input_ids"], skip_special_tokens=True) == " good."
    assert tokenizer.convert_ids_to_tokens(continuations.ids(["2+2="], ["4"])[0]) == ["4"]


def test_the_rest_of_a_special_token_that_the_border_cuts_is_plain_text():
    tokenizer = llama_like()
    (ids,) = Continuations(tokenizer).ids(["the end</"], ["s>s"])
    assert tokenizer.decode(tokenizer("the end</")["input_ids"] + ids) == "<s> the end</s>s"
    assert tokenizer.eos_token_id not in ids


def test_a_text_that_no_ids_continue_has_none():
    tokenizer = CAUSAL["end of word"]()
    continuations = Continuations(tokenizer)
    assert continuations.ids(["The fil"], ["m"]) == [None]
    (ids,) = continuations.ids(["The film"], [" was"])
    assert ids == tokenizer("was")["input_ids"]
