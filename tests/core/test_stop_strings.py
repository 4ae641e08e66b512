"""Stop strings: the first token that completes one in the decoded text, found without decoding every prefix."""

from __future__ import annotations

import numpy as np
import pytest

from rl4lms_like.core.stop_strings import StopStrings, stop_strings_of


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
