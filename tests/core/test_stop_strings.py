"""Stop strings: the first token that completes one in the decoded text, found without decoding every prefix."""

from __future__ import annotations

import numpy as np
import pytest

from rl4lms_like.core.stop_strings import StopStrings, stop_strings_of
from tests.tokenizer_families import llama_like


@pytest.mark.parametrize(("given", "strings"), [(None, ()), ("a", ("a",)), (["a", "b c"], ("a", "b c")), ([], ())])
def test_one_text_or_a_list(given, strings):
    assert stop_strings_of({"stop_strings": given}) == strings
    assert stop_strings_of(None) == stop_strings_of({}) == ()


def test_the_first_completing_token_is_that_of_a_search_of_every_prefix(tiny_tokenizer):
    generator = np.random.default_rng(0)
    stops = StopStrings((" a", "é", "\n\n", "the sea"), tiny_tokenizer)
    pieces = tiny_tokenizer("the sea, a café\n\n<eos> by the town", add_special_tokens=False)["input_ids"]
    n_found = 0
    for _ in range(300):
        ids = generator.choice([*pieces, 0, 1], 12).tolist()
        every = [n for n in range(1, len(ids) + 1) if stops.found(ids[:n])]
        expected = every[0] if every else None
        assert stops.n_tokens(ids) == expected
        ends = [n for n in range(1, (expected or len(ids)) + 1) if stops.found_at_end(ids[:n])]
        assert ends == ([] if expected is None else [expected])
        n_found += expected is not None
    assert 30 < n_found < 300


def test_a_stop_string_may_end_within_a_token_and_special_tokens_may_interrupt_it(tiny_tokenizer):
    ids = tiny_tokenizer("by the sea", add_special_tokens=False)["input_ids"]
    assert StopStrings(("y th",), tiny_tokenizer).n_tokens(ids) == next(
        n for n in range(len(ids) + 1) if "y th" in tiny_tokenizer.decode(ids[:n])
    )
    interrupted = [ids[0], *[0] * 20, *ids[1:]]
    assert StopStrings(("by the sea",), tiny_tokenizer).n_tokens(interrupted) == len(interrupted)


def test_a_response_begins_with_the_space_that_its_prompt_leaves_to_it():
    tokenizer = llama_like()
    prompt_ids = tokenizer("The film was")["input_ids"]
    ids = tokenizer("The film was good. It")["input_ids"][len(prompt_ids) :]
    n_first_word = next(n for n in range(len(ids)) if "good" in tokenizer.decode(ids[:n]))
    stops = StopStrings((" good",), tokenizer)
    assert stops.n_tokens(ids, prompt_ids) == n_first_word
    assert stops.n_tokens(ids) is None  # a text of its own has no space before it
    for n in range(1, n_first_word + 1):
        assert stops.found_at_end(ids[:n], prompt_ids) == (n == n_first_word)

    # A string that begins in the prompt is none of the response.
    assert StopStrings(("was good",), tokenizer).n_tokens(ids, prompt_ids) is None
    assert not StopStrings(("was good",), tokenizer).found_at_end(ids[:n_first_word], prompt_ids)


def test_a_stop_string_of_bytes_ends_a_response_of_bytes():
    tokenizer = llama_like()
    prompt_ids = tokenizer("日本語のテキスト。你好")["input_ids"]
    ids = tokenizer("世界。", add_special_tokens=False)["input_ids"][1:]  # without the space at the beginning
    for stop in ("世", "界。", "。"):
        stops = StopStrings((stop,), tokenizer)
        n_tokens = stops.n_tokens(ids, prompt_ids)
        assert "世界。".startswith(tokenizer.decode(ids[:n_tokens])) and stop in tokenizer.decode(ids[:n_tokens])
        assert stops.found_at_end(ids[:n_tokens], prompt_ids)


@pytest.mark.parametrize("n_before", range(1, 9))
def test_a_stop_string_that_begins_with_bytes_may_end_with_an_ordinary_token(n_before):
    """The last tokens may begin within one of the characters, which makes the bytes after it undecodable."""
    tokenizer = llama_like()
    prompt_ids = tokenizer("The film was")["input_ids"]
    ids = tokenizer("日" * n_before + "本a", add_special_tokens=False)["input_ids"]
    stops = StopStrings(("本a",), tokenizer)
    ends = [n for n in range(1, len(ids) + 1) if stops.found_at_end(ids[:n], prompt_ids)]
    assert ends == [len(ids)] == [stops.n_tokens(ids, prompt_ids)]
