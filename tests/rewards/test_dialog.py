"""`intent_accuracy`: the intent, and METEOR of each response."""

from __future__ import annotations

import pytest

from rl4lms_like.core.sample import Sample
from rl4lms_like.metrics import METRICS
from rl4lms_like.rewards import REWARDS
from rl4lms_like.scoring.meteor import meteor
from rl4lms_like.system.errors import MissingResourceError
from rl4lms_like.testing.checkers import check_metric, check_reward_function
from tests.local_models import LOCAL_MODELS

SAMPLES = [
    Sample("0", "was it good? <EOU>", ["a joy from start to finish<EOU>"], {"intent": [1], "emotion": [0]}),
    Sample("1", "hi<EOU>count with me <EOU>", ["1 2 3<EOU>", "one, two"], {"intent": [2], "emotion": [0]}),
    Sample("2", "on the museum <EOU>", ["it bought paintings<EOU>"], {"intent": [4], "emotion": [0]}),
]
PROMPTS = [sample.prompt_or_input_text for sample in SAMPLES]
REFERENCES = [sample.references for sample in SAMPLES]
METAS = [sample.meta_data for sample in SAMPLES]
TEXTS = ["a joy from the start", "one two three", ""]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("intents")
    LOCAL_MODELS["intents"](path)
    return str(path)


def rewards(folder, texts=TEXTS, rows=slice(None), **args):
    reward = REWARDS.get("intent_accuracy", {"model_name": folder, **args})
    dones = [True] * len(texts[rows])
    return reward(PROMPTS[rows], texts[rows], REFERENCES[rows], dones, METAS[rows])


@pytest.mark.usefixtures("language_data")
def test_it_is_the_intent_plus_this_responses_meteor(folder):
    """D-19: RL4LMs added the mean METEOR of all responses scored so far."""
    scores, accuracy = METRICS.get("intent_accuracy", {"model_name": folder}).compute(
        PROMPTS, TEXTS, REFERENCES, METAS
    )["intent/accuracy"]
    assert set(scores) <= {0.0, 1.0} and accuracy == pytest.approx(sum(scores) / 3)
    expected = [0.25 * match + 0.75 * m for match, m in zip(scores, meteor(TEXTS, REFERENCES), strict=True)]
    together = rewards(folder, intent_coeff=0.25, auto_coeff=0.75)
    assert together == pytest.approx(expected)
    alone = [rewards(folder, rows=slice(i, i + 1), intent_coeff=0.25, auto_coeff=0.75)[0] for i in range(3)]
    assert alone == pytest.approx(together)


def test_without_shaping_it_is_the_intent_alone_and_needs_no_words(folder, monkeypatch):
    monkeypatch.setattr("rl4lms_like.rewards.learned.require_data", lambda *names: pytest.fail("not needed"))
    paid = rewards(folder, shape=False, intent_coeff=2.0)
    scores, _ = METRICS.get("intent_accuracy", {"model_name": folder}).compute(PROMPTS, TEXTS, REFERENCES, METAS)[
        "intent/accuracy"
    ]
    assert paid == [2 * score for score in scores]


def test_missing_words_are_an_error_when_it_is_built(monkeypatch):
    def missing(name, *files):
        raise MissingResourceError("WordNet", needed_by=name, command="c", offline="o")

    monkeypatch.setattr("rl4lms_like.rewards.learned.require_data", missing)
    with pytest.raises(MissingResourceError):
        REWARDS.get("intent_accuracy")
    assert METRICS.get("intent_accuracy").classifier.model_name.startswith("rajkumarrrk/")


def test_the_target_is_seen_where_the_classifier_sees_it(folder):
    metric = METRICS.get("intent_accuracy", {"model_name": folder})
    hits = [
        metric.compute(PROMPTS[:1], TEXTS[:1], REFERENCES[:1], [{"intent": [intent]}])["intent/accuracy"][1]
        for intent in (1, 2, 3, 4)
    ]
    assert sorted(hits) == [0, 0, 0, 1]


@pytest.mark.usefixtures("language_data")
def test_they_pass_the_checkers(folder):
    check_reward_function(REWARDS.get("intent_accuracy", {"model_name": folder}), SAMPLES)
    metric = METRICS.get("intent_accuracy", {"model_name": folder})
    check_metric(metric, SAMPLES, keys=METRICS.entry("intent_accuracy").keys)
