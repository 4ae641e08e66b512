"""What is printed of texts that others wrote."""

from __future__ import annotations

import pytest

from rl4lms_like.system.wording import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [("a\x1b[2Jb", "a\\x1b[2Jb"), ("learning\u202erate", "learning\\u202erate"), ("\u2067x\u2069", "\\u2067x\\u2069")],
    ids=["clears the screen", "turns the direction", "isolates"],
)
def test_what_would_steer_a_terminal_is_spelt_out(text, shown):
    assert printable(text) == shown


@pytest.mark.parametrize("text", ["two\n\tlines", "naïve 映画 שלום 👩‍👧"])
def test_other_texts_stay_as_they_are(text):
    assert printable(text) == text
