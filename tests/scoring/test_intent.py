"""The classifier of intents reads what it was trained on."""

from __future__ import annotations

import pytest

from rl4lms_like.scoring.classifier import IntentMatch, last_utterance
from tests.local_models import LOCAL_MODELS
from tests.texts import texts


@pytest.fixture(scope="module")
def scorer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("intents")
    LOCAL_MODELS["intents"](folder)
    return IntentMatch(str(folder), batch_size=2)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Hi.<EOU>How are you? <EOU>", "How are you? "),
        ("How are you? <EOU>", "How are you? "),
        ("Hi.<EOU>How are you?", "How are you?"),
        ("Hi", "Hi"),
        ("", ""),
        ("<EOU><EOU>", ""),
    ],
)
def test_the_last_utterance(prompt, expected):
    assert last_utterance(prompt) == expected


def test_the_classifier_reads_utterance_separator_response(scorer):
    """D-21: RL4LMs' metric left the separator out."""
    prompts = ["a film<EOU>was it good? <EOU>", "count with me<EOU>", ""]
    responses = ["a joy from start to finish<EOU>", "", "1 2 3"]
    asked = ["was it good? <EOU>a joy from start to finish<EOU>", "count with me<EOU>", "<EOU>1 2 3"]
    seen = scorer.classifier.logits(asked).argmax(dim=1).tolist()
    for intent in (1, 2, 3, 4):
        metas = [{"intent": [intent], "emotion": [0]}] * 3
        got = scorer.per_text(texts(responses, prompts=prompts, metas=metas))
        assert got == [float(label + 1 == intent) for label in seen]


@pytest.mark.parametrize("meta", [None, {}, {"intent": []}, {"intent": 2}, {"intent": "2"}])
def test_a_sample_without_an_intent_is_named(scorer, meta):
    with pytest.raises(ValueError, match="'Hello"):
        scorer.per_text(texts(["you"], prompts=["Hello"], metas=[meta]))


@pytest.mark.parametrize("intent", [0, 5])
def test_an_intent_that_the_classifier_does_not_know_is_an_error(scorer, intent):
    with pytest.raises(ValueError, match=f"'Hello' .* {intent};"):
        scorer.per_text(texts(["you"], prompts=["Hello"], metas=[{"intent": [intent]}]))
