"""The audit finds what is wrong with faulty rewards, each by its kind, and nothing in good ones."""

from __future__ import annotations

import itertools
import time
from collections import Counter

import pytest

from rl4lms_like.core.observation import TextLayout
from rl4lms_like.core.sample import Sample
from rl4lms_like.rewards.audit import KINDS, audit_reward, n_calls
from rl4lms_like.rewards.base import RewardFunction, RewardPart
from rl4lms_like.rewards.combine import CombinedReward
from rl4lms_like.rewards.probes import Probes
from rl4lms_like.rewards.text import TextReward
from rl4lms_like.testing.models import make_tokenizer

SAMPLES = (
    Sample("film", "The film was", ["a joy from start to finish."]),
    Sample("sum", "What is 30 + 12?", ["42"]),
    Sample("museum", "Last year the museum", ["bought 34 old paintings."]),
)


@pytest.fixture(scope="module")
def layout():
    texts = [f"{sample.prompt_or_input_text} {sample.references[0]}" for sample in SAMPLES] * 2
    return TextLayout(make_tokenizer(texts, 800), max_prompt_length=64, max_context_length=512)


@pytest.fixture
def probes(layout):
    return Probes(SAMPLES, layout)


class OfTexts(TextReward):
    """A function of response, references and prompt."""

    def __init__(self, score):
        self.score = score

    def scores(self, texts):
        rows = zip(texts.responses, texts.references, texts.prompts, strict=True)
        return [self.score(response, references[0], prompt) for response, references, prompt in rows]


def exact(text, reference, prompt):
    return float(text.split() == reference.split())


def bigrams(text):
    words = ["", *text.split(), ""]
    return Counter(itertools.pairwise(words))


def f1_of_bigrams(text, reference, prompt):
    ours, theirs = bigrams(text), bigrams(reference)
    return 2 * (ours & theirs).total() / (ours.total() + theirs.total())


def shortness(text, reference, prompt):
    return 1 / (1 + len(text.split()))


def repeats_words(text, reference, prompt):
    """All words are the reference's, in its order, and any of them may be repeated."""
    words, expected = text.split(), reference.split()
    if not words or not set(words) <= set(expected):
        return 0.0
    places = [expected.index(word) for word in words]
    return float(places == sorted(places))


def overlap_with_prompt(text, reference, prompt):
    return exact(text, reference, prompt) + (prompt in text)


def contains(text, reference, prompt):
    return float(reference in text) if len(text.split()) < 100 else 0.0


def begins(text, reference, prompt):
    return float(text.split()[: len(reference.split())] == reference.split())


def words_alone(text, reference, prompt):
    return float(sorted(text.split()) == sorted(reference.split()))


def joys(text, reference, prompt):
    return text.count("joy") / 10


def begins_and_is_brief(text, reference, prompt):
    words = text.split()
    return exact(text, " ".join(reference.split()[: len(words)]), prompt) * (2 - len(words) / 10) if words else 0.0


def not_stripped(text, reference, prompt):
    return float(text == reference)


def of_four_words(text, reference, prompt):
    return exact(text, reference, prompt) if len(text.split()) > 3 else 0.0


def large(text, reference, prompt):
    return 50 * exact(text, reference, prompt)


def divides(text, reference, prompt):
    return exact(text, reference, prompt) / len(text.split())


def quadratic(text, reference, prompt):
    time.sleep(len(text.split()) ** 2 * 4e-7)
    return exact(text, reference, prompt)


class Noisy(OfTexts):
    def __init__(self):
        super().__init__(exact)
        self.count = itertools.count()

    def scores(self, texts):
        return [score + 0.01 * next(self.count) for score in super().scores(texts)]


class ByPosition(OfTexts):
    def scores(self, texts):
        return [score + 0.01 * place for place, score in enumerate(super().scores(texts))]


class Centred(OfTexts):
    def scores(self, texts):
        scores = super().scores(texts)
        return [score - sum(scores) / len(scores) for score in scores]


class OnlyTogether(OfTexts):
    def scores(self, texts):
        if len(texts.responses) == 1:
            raise ValueError("one text has no rank")
        return super().scores(texts)


class ReadsPadding(RewardFunction):
    terminal = True

    def __call__(self, prev_observation, action, current_observation, done, meta_info=None):
        text, (reference,) = current_observation.context_text, current_observation.target_or_reference_texts
        is_right = exact(text, reference, "")
        return is_right * float(current_observation.prompt_or_input_attention_mask_pt.float().mean()) if done else 0.0


FAULTY = {
    "empty": OfTexts(shortness),
    "repetition": OfTexts(repeats_words),
    "prompt_copy": OfTexts(overlap_with_prompt),
    "answer_list": OfTexts(contains),
    "long_tail": OfTexts(begins),
    "word_order": OfTexts(words_alone),
    "verbosity": OfTexts(joys),
    "truncation": OfTexts(begins_and_is_brief),
    "whitespace": OfTexts(not_stripped),
    "padding": ReadsPadding(),
    "reference": OfTexts(of_four_words),
    "constant": OfTexts(lambda *texts: 0.5),
    "magnitude": OfTexts(large),
    "unstable": Noisy(),
    "order": ByPosition(exact),
    "batch": Centred(exact),
    "alone": OnlyTogether(exact),
    "failure": OfTexts(divides),
    "slow": OfTexts(quadratic),
}
"""Kind of defect -> a reward that has it."""


def kinds(result):
    return {finding.kind for finding in result.findings}


@pytest.mark.parametrize("kind", KINDS)
def test_a_defect_is_found_by_its_kind_and_by_no_other(kind, probes):
    (result,) = audit_reward(FAULTY[kind], probes)
    assert kinds(result) == {kind}, [finding.message for finding in result.findings]


class CalledForEachToken(RewardFunction):
    n_calls = 0

    def __call__(self, prev_observation, action, current_observation, done, meta_info=None):
        self.n_calls += 1
        (reference,) = current_observation.target_or_reference_texts
        return exact(current_observation.context_text, reference, "") if done else 0.0


@pytest.mark.parametrize("reward", [OfTexts(exact), OfTexts(f1_of_bigrams), CalledForEachToken()])
def test_a_good_reward_has_no_findings(reward, probes):
    (result,) = audit_reward(reward, probes)
    assert result.findings == [] and result.errors == []
    assert result.rewards["reference"] == pytest.approx(1.0)
    assert result.ms_alone > 0 and result.ms_together > 0


def test_a_reward_without_references_is_compared_with_the_best_of_them(layout, probes):
    good = OfTexts(lambda text, reference, prompt: float("joy" in text and len(text.split()) < 10))
    assert audit_reward(good, probes)[0].findings == []
    bare = [Sample(one.id, one.prompt_or_input_text, []) for one in SAMPLES]
    alone = Probes(bare, layout)

    class Short(TextReward):
        def scores(self, texts):
            return [shortness(text, "", "") for text in texts.responses]

    assert kinds(audit_reward(Short(), alone)[0]) == {"empty"}


def test_parts_of_a_sum_are_audited_by_name_and_add_up(probes):
    parts = [RewardPart(OfTexts(exact), name="right"), RewardPart(OfTexts(shortness), weight=0.5, name="short")]
    whole, right, short = audit_reward(CombinedReward(parts), probes)
    assert [whole.name, right.name, short.name] == ["", "right", "short"]
    assert (kinds(whole), kinds(right), kinds(short)) == (set(), set(), {"empty"})
    for name, paid in whole.rewards.items():
        assert paid == pytest.approx(right.rewards[name] + short.rewards[name])
    assert short.rewards["empty"] == pytest.approx(0.5)


def test_a_text_without_a_finite_reward_is_a_failure_and_the_others_are_audited(probes):
    reward = OfTexts(lambda *texts: float("nan") if "1 2 3" in texts[0] else not_stripped(*texts))
    (result,) = audit_reward(reward, probes)
    assert kinds(result) == {"failure", "whitespace"}
    assert [name for name, paid in result.rewards.items() if paid != paid] == ["answer_list"]


class Counts(OfTexts):
    def __init__(self, score):
        super().__init__(score)
        self.n_calls = 0

    def scores(self, texts):
        self.n_calls += 1
        return super().scores(texts)


@pytest.mark.parametrize("reward", [Counts(exact), Counts(divides), CalledForEachToken()])
def test_the_number_of_calls_is_known_before(reward, probes):
    most = n_calls(reward, probes)
    audit_reward(reward, probes)
    assert 0.8 * most < reward.n_calls <= most


def test_a_reward_that_always_fails_is_not_called_for_each_text(probes):
    reward = Counts(lambda *texts: 1 / 0)
    (result,) = audit_reward(reward, probes)
    assert kinds(result) == {"failure"} and reward.n_calls < 6
    assert all("ZeroDivisionError" in error for error in result.errors)
