"""A combination pays the weighted sum of its parts, whatever their kinds, and says what each part added."""

from __future__ import annotations

import numpy as np
import pytest

from rl4lms_like.core.observation import Observation, TextLayout
from rl4lms_like.core.sample import Sample
from rl4lms_like.rewards import BatchedRewardFunction, RewardFunction
from rl4lms_like.rewards.base import RewardPart
from rl4lms_like.rewards.call import (
    is_batched,
    is_terminal,
    score_episodes,
    score_episodes_in_parts,
    score_transition,
    score_transition_in_parts,
)
from rl4lms_like.rewards.combine import CombinedReward, shaped
from rl4lms_like.rewards.sentiment import SentimentReward
from rl4lms_like.rewards.synthetic import RewardIncreasingNumbers
from rl4lms_like.system.errors import RewardError
from rl4lms_like.testing.checkers import check_reward_function


class EveryToken(RewardFunction):
    """Pays a third for every letter so far."""

    def __call__(self, prev_observation, action, current_observation, done, meta_info=None):
        return len(current_observation.context_text) / 3


class EveryTokenBatched(BatchedRewardFunction):
    """Pays a seventh for every word of prompt and response so far, and more at the end."""

    def __call__(self, prompt_texts, gen_texts, ref_texts, dones, meta_infos=None):
        rows = zip(prompt_texts, gen_texts, dones, strict=True)
        return [len((prompt + text).split()) / 7 + done for prompt, text, done in rows]


class Raises(BatchedRewardFunction):
    terminal = True

    def __call__(self, prompt_texts, gen_texts, ref_texts, dones, meta_infos=None):
        raise KeyError("topic")


class Huge(RewardFunction):
    terminal = True

    def __call__(self, prev_observation, action, current_observation, done, meta_info=None):
        return 3e38


def of_all_kinds() -> CombinedReward:
    return CombinedReward(
        [
            RewardPart(EveryToken(), 0.1, "letters"),
            RewardPart(EveryTokenBatched(), -0.7, "words"),
            RewardPart(SentimentReward(), 1.3, "sentiment"),
            RewardPart(RewardIncreasingNumbers(4), 0.9, "numbers"),
        ]
    )


@pytest.fixture
def episodes(tiny_tokenizer):
    layout = TextLayout(tiny_tokenizer, 16, 40)
    texts = [(" a wonderful film", " 1 2 3 4"), ("It was", " terrible, terrible!"), ("", " 7")]
    written = [np.asarray(tiny_tokenizer(text, add_special_tokens=False)["input_ids"]) for _, text in texts]
    return [
        Observation(Sample(f"s{index}", prompt), layout.encode(prompt), ids, len(ids), layout)
        for index, ((prompt, _), ids) in enumerate(zip(texts, written, strict=True))
    ]


def test_the_sum_is_that_of_the_parts_for_all_kinds_of_parts(episodes):
    combined = of_all_kinds()
    total, parts = score_episodes_in_parts(combined, episodes)
    expected = np.zeros(len(total))
    for part in combined.parts:
        values = np.asarray([float(value) for value in score_episodes(part.reward, episodes)])
        np.testing.assert_allclose(parts[part.name], part.weight * values, rtol=1e-6)
        expected = expected + parts[part.name]
    assert list(parts) == ["letters", "words", "sentiment", "numbers"]
    np.testing.assert_array_equal(total, expected.astype(np.float32))
    assert np.count_nonzero(parts["sentiment"]) <= len(episodes) < np.count_nonzero(parts["letters"])


def test_token_by_token_and_whole_episodes_pay_exactly_the_same(episodes):
    combined = of_all_kinds()
    total, parts = score_episodes_in_parts(combined, episodes)
    stepped = [
        score_transition_in_parts(
            combined,
            episode.after(step),
            int(episode.action_ids[step]),
            episode.after(step + 1),
            step + 1 == episode.n_actions,
        )
        for episode in episodes
        for step in range(episode.n_actions)
    ]
    np.testing.assert_array_equal(total, np.asarray([paid for paid, _ in stepped], dtype=np.float32))
    for name, values in parts.items():
        np.testing.assert_array_equal(values, [shares[name] for _, shares in stepped])


def test_parts_that_have_parts_are_told_one_by_one(episodes):
    inner = CombinedReward([RewardPart(SentimentReward(), 2.0), RewardPart(RewardIncreasingNumbers(4), name="numbers")])
    outer = CombinedReward([RewardPart(inner, 0.5, "inner"), RewardPart(EveryToken(), name="letters")])
    total, parts = score_episodes_in_parts(outer, episodes)
    assert list(parts) == ["inner/SentimentReward", "inner/numbers", "letters"]
    np.testing.assert_allclose(parts["inner/SentimentReward"], score_episodes(SentimentReward(), episodes), rtol=1e-6)
    np.testing.assert_array_equal(total, sum(parts.values()).astype(np.float32))
    np.testing.assert_allclose(
        total, 0.5 * score_episodes(inner, episodes) + score_episodes(EveryToken(), episodes), rtol=1e-6
    )


def test_a_combination_is_what_its_parts_are():
    terminal = CombinedReward([RewardPart(RewardIncreasingNumbers(4)), RewardPart(SentimentReward())])
    dense = CombinedReward([RewardPart(RewardIncreasingNumbers(4)), RewardPart(EveryToken())])
    assert is_terminal(terminal) and not is_terminal(dense)
    assert is_batched(terminal) and not is_batched(dense)
    assert is_batched(CombinedReward([RewardPart(terminal)]))


def test_it_passes_the_checker():
    check_reward_function(of_all_kinds())
    check_reward_function(shaped(SentimentReward(), "sentiment", RewardIncreasingNumbers(4), "increasing_numbers"))


def test_a_wrapper_may_call_it_like_any_reward(episodes):
    combined, last = of_all_kinds(), episodes[0]
    before, action = last.after(last.n_actions - 1), int(last.action_ids[-1])
    assert combined(before, action, last, True) == score_transition(combined, before, action, last, True)


def test_a_part_that_fails_is_named(episodes):
    combined = CombinedReward([RewardPart(SentimentReward()), RewardPart(Raises(), name="topics")])
    with pytest.raises(RewardError, match=r"'topics': Raises .* 3.*KeyError: 'topic'"):
        score_episodes(combined, episodes)
    last = episodes[0]
    with pytest.raises(RewardError, match=r"'topics': Raises .* 1.*KeyError: 'topic'"):
        score_transition(combined, last.after(0), 5, last, True)


def test_a_sum_that_is_no_finite_number_is_refused(episodes):
    combined = CombinedReward([RewardPart(Huge(), name="a"), RewardPart(Huge(), name="b")])
    with pytest.raises(RewardError, match=r"CombinedReward .*6e\+38"):
        score_episodes(combined, episodes)
    with pytest.raises(RewardError, match=r"CombinedReward .*6e\+38"):
        score_transition(combined, episodes[0].after(0), 5, episodes[0], True)


def test_two_parts_of_one_name_are_refused():
    with pytest.raises(ValueError, match="'SentimentReward'"):
        CombinedReward([RewardPart(SentimentReward()), RewardPart(SentimentReward(False))])
    with pytest.raises(ValueError):
        CombinedReward([])


def test_shaping_by_the_same_reward_gets_a_name_of_its_own():
    both = shaped(SentimentReward(), "sentiment", SentimentReward(False), "sentiment")
    assert [part.name for part in both.parts] == ["sentiment", "sentiment_shaping"]


def test_parts_whose_names_meet_are_told_together_and_none_is_lost(episodes):
    inner = CombinedReward([RewardPart(RewardIncreasingNumbers(4), name="b")])
    outer = CombinedReward([RewardPart(inner, name="a"), RewardPart(EveryToken(), name="a/b")])
    total, parts = score_episodes_in_parts(outer, episodes)
    expected = score_episodes(RewardIncreasingNumbers(4), episodes) + score_episodes(EveryToken(), episodes)
    np.testing.assert_allclose(total, expected, rtol=1e-6)
    np.testing.assert_array_equal(total, parts["a/b"].astype(np.float32))
    last = episodes[0]
    stepped = score_transition_in_parts(outer, last.after(last.n_actions - 1), int(last.action_ids[-1]), last, True)
    assert stepped.total == stepped.parts["a/b"] == pytest.approx(float(total[last.n_actions - 1]))
