"""Scores by sacrebleu are no heavier than the texts of one call."""

from __future__ import annotations

import pytest
from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a
from sacrebleu.tokenizers.tokenizer_intl import TokenizerV14International
from sacrebleu.tokenizers.tokenizer_re import TokenizerRegexp
from sacrebleu.tokenizers.tokenizer_ter import TercomTokenizer

from rl4lms_like.scoring.translation import SacreBleuScore, TranslationEditRate
from tests.texts import texts


@pytest.mark.parametrize(
    ("score", "tokenizers"),
    [
        (SacreBleuScore(), [Tokenizer13a, TokenizerRegexp]),
        (SacreBleuScore(tokenize="intl"), [TokenizerV14International]),
        (TranslationEditRate(), [TercomTokenizer]),
    ],
    ids=["13a", "intl", "ter"],
)
def test_no_text_is_kept_once_it_is_scored(score, tokenizers):
    """sacrebleu keeps 65,536 texts for each tokenizer: of a long training gigabytes, in every reward worker."""
    score.with_overall(texts(["a text of this training", "another one"], [["its reference"], ["a second", "a third"]]))
    assert [tokenizer.__call__.cache_info().currsize for tokenizer in tokenizers] == [0] * len(tokenizers)
