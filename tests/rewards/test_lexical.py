"""Rewards of overlap with references: what they promise, and RL4LMs' defects that they do not have."""

from __future__ import annotations

import pytest

from rl4lms_like.core.observation import Observation
from rl4lms_like.core.sample import Sample
from rl4lms_like.rewards import REWARDS
from rl4lms_like.rewards.call import score_episodes
from rl4lms_like.system.errors import MissingResourceError, RewardError
from rl4lms_like.testing.checkers import check_reward_function
from tests.rewards_in_workers import EpisodesOfTexts

pytestmark = pytest.mark.usefixtures("language_data")

ARGS = {
    "meteor": {},
    "rouge": {"rouge_type": "rouge2"},
    "rouge_combined": {},
    "rouge_l_max": {},
    "bleu": {},
    "sacre_bleu": {},
    "ter": {},
    "chrf": {},
}
SENTENCE = "The cat sat on the warm mat"


def reward_of(id, generated, references, args=None):
    reward = REWARDS.get(id, {**ARGS[id], **(args or {})})
    return reward(["prompt"], [generated], [references], [True])[0]


@pytest.mark.parametrize("id", ARGS)
def test_every_reward_passes_the_checker(id):
    check_reward_function(REWARDS.get(id, ARGS[id]))


@pytest.mark.parametrize("id", ARGS)
def test_a_reference_earns_the_most(id):
    assert reward_of(id, SENTENCE, [SENTENCE]) == pytest.approx(1.0, abs=0.002)


@pytest.mark.parametrize("id", ARGS)
def test_nothing_generated_earns_nothing(id):
    """RL4LMs' BLEU returned the text 'n/a' here, which stopped the run (D-17)."""
    assert reward_of(id, "", [SENTENCE]) == 0.0
    assert reward_of("bleu", "", [SENTENCE, "another"]) == 0.0


@pytest.mark.parametrize("id", ARGS)
def test_a_sample_without_references_is_named(id):
    texts = EpisodesOfTexts([Sample("a", "the prompt of a", [SENTENCE]), Sample("b", "that of b", [])], ["x", "y"])
    episodes: list[Observation] = texts.episodes
    with pytest.raises(RewardError, match=r"text 1 of 2 .*'that of b'"):
        score_episodes(REWARDS.get(id, ARGS[id]), episodes)


def test_meteor_of_an_exact_match_is_near_one_whatever_other_references_say():
    """RL4LMs compared with the text of the list: 0.617 and 0.272 (D-03)."""
    expected = 1 - 0.5 / 7**3
    assert reward_of("meteor", SENTENCE, [SENTENCE]) == pytest.approx(expected)
    assert reward_of("meteor", SENTENCE, ["Nobody slept here", SENTENCE]) == pytest.approx(expected)


def test_meteor_matches_forms_stems_and_synonyms():
    whole = reward_of("meteor", "quick cats", ["quick cats"])
    assert reward_of("meteor", "quick cat", ["quick cats"]) == pytest.approx(whole)
    assert reward_of("meteor", "fast cats", ["quick cats"]) == pytest.approx(whole)
    assert reward_of("meteor", "green cats", ["quick cats"]) < whole


@pytest.mark.parametrize("rouge_type", ["rouge1", "rouge2", "rougeL", "rougeLsum"])
def test_rouge_with_several_references_takes_the_best(rouge_type):
    """RL4LMs compared with the text of the list: 0.63 (D-03)."""
    references = ["Nobody slept here", SENTENCE]
    assert reward_of("rouge", SENTENCE, references, {"rouge_type": rouge_type, "use_single_ref": False}) == 1.0
    assert reward_of("rouge", SENTENCE, references, {"rouge_type": rouge_type}) == 0.0


def test_ter_goes_below_zero_for_more_edits_than_the_reference_has_words():
    assert reward_of("ter", "a b c d e f", ["x y"]) == pytest.approx(1 - 6 / 2)


def test_sacre_bleu_names_tokenizers_that_there_are():
    with pytest.raises(ValueError, match=r"'words'.*zh, 13a"):
        REWARDS.get("sacre_bleu", {"tokenize": "words"})


def test_sacre_bleu_says_how_to_get_the_model_of_a_tokenizer(monkeypatch):
    """sacrebleu fetches it when it is built; without a network it only said that some name is not known."""

    def no_network(*_, **__):
        raise OSError("Name or service not known")

    monkeypatch.setattr("sacrebleu.metrics.bleu.BLEU.__init__", no_network)
    with pytest.raises(MissingResourceError) as caught:
        REWARDS.get("sacre_bleu", {"tokenize": "flores200"})
    assert "sacrebleu.BLEU(tokenize='flores200')" in str(caught.value)
