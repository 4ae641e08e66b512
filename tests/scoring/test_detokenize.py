"""Moses' English detokenizer in Python; every expectation is what the Perl script prints."""

from __future__ import annotations

import pytest

from rl4lms_like.scoring.totto import detokenize


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('he said : " it \'s 5 % of $ 7,230 " .', 'he said: "it\'s 5% of $7,230".'),
        ("the jones ' house , i 'm told", "the jones' house, i'm told"),
        ("' quoted ' and ' again '", "'quoted' and 'again'"),
        ("( 2012 ) and [ 3 ]", "(2012) and [3]"),
        ("a @-@ b &apos;s &amp;lt; &#91;", "a-b's &lt; ["),
        ("日本 語 has ｱ", "日本語 has ｱ"),
        ("हिन्दी 's", "हिन्दी's"),
        ("„ so “ ``", "„so“ ``"),
        ("two  spaces  ", "two spaces"),
        ("cell|||a .\tcell|||b", "cell|||a .\tcell|||b"),
    ],
)
def test_words_lean_on_each_other_as_in_the_script(line, expected):
    assert detokenize(line) == expected


@pytest.mark.parametrize("line", ["", "   ", "<null>", "< a , b >"])
def test_blank_lines_and_markup_stay_as_they_are(line):
    assert detokenize(line) == line
