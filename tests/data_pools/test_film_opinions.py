"""The film opinions: distinct, deterministic, half cheerful, and held-out prompts are really held out."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections import Counter

import pytest

from rl4lms_like.data_pools.film_opinions import (
    RULES,
    FilmOpinions,
    film_opinions,
    opening,
    split_of,
    split_opinion,
    write,
)
from rl4lms_like.system.errors import DataPoolError

N = 3000


def words_of(text: str) -> list[str]:
    return re.findall(r"[a-z-]+", text.lower())


def words(symbol: str) -> list[str]:
    """The options of a symbol whose options contain no symbols."""
    return ["".join(option) for option in RULES[symbol]]


@pytest.fixture(scope="module")
def texts() -> tuple[str, ...]:
    return film_opinions(N, seed=0)


def test_opinions_are_distinct_and_a_prefix_of_more_opinions(texts):
    assert len(set(texts)) == N
    assert film_opinions(50, seed=0) == texts[:50]


def test_seeds_draw_different_opinions(texts):
    assert len(set(film_opinions(200, seed=1)) & set(texts)) < 10


def test_another_process_with_another_hash_seed_writes_the_same_opinions(texts):
    program = "from rl4lms_like.data_pools.film_opinions import film_opinions; print('\\n'.join(film_opinions(40, 0)))"
    for hash_seed in ("1", "2"):
        answer = subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            check=True,
        )
        assert answer.stdout.splitlines() == list(texts[:40])


def test_opinions_are_one_to_three_well_formed_sentences(texts):
    for text in texts:
        sentences = text.removesuffix(".").split(". ")
        assert 1 <= len(sentences) <= 3
        assert text.endswith(".") and all(sentence[0].isupper() for sentence in sentences)
        assert "  " not in text and "{" not in text and " ," not in text and " ." not in text
        assert not any(clash in f" {text.lower()}" for clash in (" a a", " a e", " a i", " a o", " an b", " an f"))


def test_no_opinion_uses_an_adjective_twice(texts):
    adjectives = {word for kind in ("good", "bad", "plain") for word in words(kind)}
    for text in texts:
        counts = Counter(word for word in words_of(text) if word in adjectives - {"long", "quiet", "old"})
        assert max(counts.values(), default=1) == 1, text


def test_vader_agrees_with_the_moods():
    sentiment = pytest.importorskip("vaderSentiment.vaderSentiment").SentimentIntensityAnalyzer()
    rng = random.Random(0)

    def fraction(mood: str, sign: int) -> float:
        scores = [sentiment.polarity_scores(write(mood, rng))["compound"] for _ in range(300)]
        return sum(sign * score >= 0.05 for score in scores) / len(scores)

    assert fraction("praise", +1) > 0.99
    assert fraction("blame", -1) > 0.99
    assert fraction("shrug", +1) + fraction("shrug", -1) < 0.5


def test_sentiment_is_mixed(texts):
    sentiment = pytest.importorskip("vaderSentiment.vaderSentiment").SentimentIntensityAnalyzer()
    scores = [sentiment.polarity_scores(text)["compound"] for text in texts[:1500]]
    positive = sum(score >= 0.05 for score in scores) / len(scores)
    negative = sum(score <= -0.05 for score in scores) / len(scores)
    assert 0.42 < positive < 0.55
    assert 0.35 < negative < 0.5
    assert positive + negative < 0.97


def test_the_adjectives_carry_the_sentiment_and_the_rest_of_the_scene_does_not():
    lexicon = pytest.importorskip("vaderSentiment.vaderSentiment").SentimentIntensityAnalyzer().lexicon
    assert min(lexicon[word] for word in words("good")) > 0
    assert max(lexicon[word] for word in words("bad")) < 0
    for symbol in ("plain", "genre", "origin", "kin", "where", "when", "occasion", "thing", "things", "player", "hero"):
        found = {word for option in RULES[symbol] for word in words_of("".join(option[::2]))}
        assert not found & lexicon.keys(), symbol


def test_no_closing_remark_is_a_stock_phrase(texts):
    [(_, most)] = Counter(text.removesuffix(".").split(". ")[-1] for text in texts).most_common(1)
    assert most / N < 0.02


def test_every_rule_is_defined_and_used():
    symbols = {symbol for options in RULES.values() for option in options for symbol in option[1::2]}
    assert symbols | {"praise", "blame", "shrug"} == set(RULES)


def test_an_opening_belongs_to_one_split(texts):
    assert {split_of(text) for text in texts} == {"train"}
    for split in ("val", "test"):
        held_out = film_opinions(100, seed=0, split=split)
        assert {split_of(text) for text in held_out} == {split}
        assert len({opening(text) for text in held_out}) == 100


def test_held_out_prompts_occur_nowhere_in_the_training_texts():
    corpus = "\n".join(film_opinions(20_000, seed=0))
    for split in ("val", "test"):
        prompts = [sample.prompt_or_input_text for sample in FilmOpinions.prepare(split).samples]
        assert len(prompts) == len(set(prompts)) == 200
        assert [prompt for prompt in prompts if prompt in corpus] == []


def test_prompt_and_reference_make_up_the_opinion(texts):
    samples = FilmOpinions.prepare("train", n_train=500).samples
    assert [f"{sample.prompt_or_input_text} {sample.references[0]}" for sample in samples] == list(texts[:500])
    assert {len(sample.prompt_or_input_text.split()) for sample in samples} == {5, 6, 7}
    assert min(len(sample.references[0].split()) for sample in samples) >= 2
    assert [sample.id for sample in samples[:2]] == ["train_0", "train_1"]


def test_a_short_opinion_still_leaves_something_to_say():
    assert split_opinion("This Korean legend was sweet and clever.", 7) == (
        "This Korean legend was sweet",
        "and clever.",
    )


def test_the_pool_is_deterministic_and_depends_on_its_seed():
    first, again, other = (FilmOpinions.prepare("val", n_eval=20, seed=seed).samples for seed in (0, 0, 1))
    assert first == again
    assert first != other


def test_prompts_too_short_to_be_held_out_are_refused():
    with pytest.raises(DataPoolError):
        FilmOpinions.prepare("train", prompt_words=[3, 7])
    with pytest.raises(DataPoolError):
        FilmOpinions.prepare("train", prompt_words=[7, 6])


def test_an_unknown_split_is_named():
    with pytest.raises(DataPoolError):
        FilmOpinions.prepare("dev")
