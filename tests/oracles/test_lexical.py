"""Scores of overlap equal their reference packages, on real pairs and on texts that are easy to stumble over."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path

import pytest

from benchmarks.real_pairs import real_pairs
from rl4lms_like.core.sample import Sample
from rl4lms_like.metrics import METRICS
from rl4lms_like.metrics.call import compute_metric
from rl4lms_like.rewards import REWARDS
from rl4lms_like.rewards.text import TextReward
from rl4lms_like.scoring import nltk_data
from tests.lexical_texts import EXTREME_PAIRS
from tests.rewards_in_workers import EpisodesOfTexts

N_REAL = 300


@pytest.fixture(scope="module")
def pairs(shared_dir):
    return real_pairs(shared_dir / "data", N_REAL) + EXTREME_PAIRS


@pytest.fixture(scope="module")
def golden(shared_dir):
    stored = json.loads((Path(__file__).parent / "lexical_golden.json").read_text())
    texts = json.dumps(real_pairs(shared_dir / "data", N_REAL))
    assert hashlib.sha256(texts.encode()).hexdigest() == stored["texts"], "other texts than the stored numbers are of"
    return stored


def rewards_of(id, pairs, args=None):
    reward = REWARDS.get(id, args)
    texts, references = zip(*pairs, strict=True)
    return reward([""] * len(pairs), list(texts), list(references), [True] * len(pairs))


def metric_of(id, pairs, args=None):
    texts, references = zip(*pairs, strict=True)
    return compute_metric(METRICS.get(id, args), [""] * len(pairs), list(texts), list(references))


def test_meteor_is_nltks(language_data, pairs):
    from nltk import word_tokenize
    from nltk.translate.meteor_score import meteor_score

    pairs = pairs[:200] + pairs[N_REAL:]
    wordnet = nltk_data.wordnet()
    expected = [
        meteor_score([word_tokenize(text) for text in texts], word_tokenize(generated), wordnet=wordnet)
        for generated, texts in pairs
    ]
    assert rewards_of("meteor", pairs) == expected
    assert metric_of("meteor", pairs)["lexical/meteor"] == (expected, pytest.approx(sum(expected) / len(expected)))


@pytest.mark.parametrize("use_single_ref", [True, False])
def test_rouge_is_rouge_scores(pairs, use_single_ref):
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rouge1", "rouge2", "rougeL", "rougeLsum"], use_stemmer=True)
    results = metric_of("rouge", pairs, {"use_single_ref": use_single_ref})
    expected = [scorer.score_multi(texts[:1] if use_single_ref else texts, generated) for generated, texts in pairs]
    for rouge_type in scorer.rouge_types:
        scores = [score[rouge_type].fmeasure for score in expected]
        assert results[f"lexical/rouge_{rouge_type}"] == (scores, pytest.approx(sum(scores) / len(scores)))
        args = {"rouge_type": rouge_type, "use_single_ref": use_single_ref}
        assert rewards_of("rouge", pairs, args) == scores
    if use_single_ref:
        means = [sum(score[kind].fmeasure for kind in ("rouge1", "rouge2", "rougeL")) / 3 for score in expected]
        assert rewards_of("rouge_combined", pairs) == pytest.approx(means, abs=1e-12)


def test_rouge_l_max_is_py_rouges(language_data, pairs, golden):
    for case in golden["rouge_l_max"]:
        assert rewards_of("rouge_l_max", pairs, case["args"]) == pytest.approx(case["scores"], abs=1e-9), case["args"]
    args, scores = golden["rouge_l_max"][1]["args"], golden["rouge_l_max"][1]["scores"]
    assert metric_of("rouge_l_max", pairs, args)["lexical/rouge_l_max"][0] == pytest.approx(scores, abs=1e-9)


def test_bleu_is_hugging_faces(pairs, golden):
    """Where that fails (null), nothing was generated or there is nothing to compare with: 0 here."""
    expected = [score or 0.0 for score in golden["bleu"]["scores"]]
    assert rewards_of("bleu", pairs) == pytest.approx(expected, abs=1e-9)
    scores, corpus = metric_of("bleu", pairs)["lexical/bleu"]
    assert scores == pytest.approx(expected, abs=1e-9)
    assert corpus == pytest.approx(golden["bleu"]["corpus"], abs=1e-12)


def test_bleu_of_one_reference_is_sacrebleus_without_tokenizer_and_smoothing(pairs):
    from sacrebleu.metrics import BLEU

    theirs = BLEU(tokenize="none", smooth_method="none", force=True)
    single = [(generated, texts[:1]) for generated, texts in pairs]
    scores, corpus = metric_of("bleu", single)["lexical/bleu"]
    expected = [theirs.corpus_score([generated], [texts]).score / 100 for generated, texts in single]
    assert scores == pytest.approx(expected, abs=1e-9)
    texts = [generated for generated, _ in single]
    assert corpus == pytest.approx(theirs.corpus_score(texts, [[one for _, (one,) in single]]).score / 100)


def padded(references):
    """Lists of references as sacrebleu takes them, with None for what a sample has not."""
    most = max(map(len, references))
    return [[texts[index] if index < len(texts) else None for texts in references] for index in range(most)]


@pytest.mark.parametrize(
    "args",
    [
        {},
        {"lowercase": True, "tokenize": "intl"},
        {"smooth_method": "add-k", "smooth_value": 1, "tokenize": "char"},
        {"smooth_method": "floor", "use_effective_order": True},
        {"smooth_method": "none", "force": True, "tokenize": "zh"},
    ],
)
def test_sacre_bleu_is_sacrebleus(pairs, args):
    from sacrebleu.metrics import BLEU

    theirs = BLEU(**{"effective_order" if name == "use_effective_order" else name: args[name] for name in args})
    texts, references = zip(*pairs, strict=True)
    expected = [theirs.corpus_score([text], padded([refs])).score / 100 for text, refs in pairs]
    assert rewards_of("sacre_bleu", pairs, args) == expected
    scores, corpus = metric_of("sacre_bleu", pairs, args)["lexical/sacrebleu"]
    assert scores == expected
    assert corpus == theirs.corpus_score(texts, padded(references)).score / 100


def test_ter_is_sacrebleus(pairs):
    """Of a long text that equals its reference, for sacrebleu takes minutes for thousands of words that differ."""
    from sacrebleu.metrics import TER

    *others, (_, (long,)) = pairs
    pairs = [*others, (long, [long])]
    texts, references = zip(*pairs, strict=True)
    expected = [TER().sentence_score(text, refs).score / 100 for text, refs in pairs]
    assert rewards_of("ter", pairs) == [1 - score for score in expected]
    assert metric_of("ter", pairs)["lexical/ter"] == (
        expected,
        TER().corpus_score(texts, padded(references)).score / 100,
    )


def test_chrf_is_sacrebleus(pairs):
    from sacrebleu.metrics import CHRF

    texts, references = zip(*pairs, strict=True)
    expected = [CHRF().sentence_score(text, refs).score / 100 for text, refs in pairs]
    assert rewards_of("chrf", pairs) == expected
    assert metric_of("chrf", pairs)["lexical/chrf"] == (
        expected,
        CHRF().corpus_score(texts, padded(references)).score / 100,
    )


def test_diversity_is_gem_metrics(language_data, pairs, golden):
    for window_size, expected in golden["diversity"].items():
        chosen = pairs if window_size == "100" else pairs[:20]
        results = metric_of("diversity", chosen, {"window_size": int(window_size)})
        assert {key.removeprefix("diversity_metrics/"): value for key, (_, value) in results.items()} == pytest.approx(
            expected, rel=1e-9
        )


REWARDS_OF_OVERLAP = {
    "meteor": {},
    "rouge": {"rouge_type": "rougeLsum", "use_single_ref": False},
    "rouge_combined": {},
    "rouge_l_max": {},
    "bleu": {},
    "sacre_bleu": {},
    "ter": {},
    "chrf": {},
}


@pytest.fixture(scope="module")
def episodes(pairs):
    chosen = random.Random(0).sample(pairs[:N_REAL], 40) + pairs[N_REAL:-1]
    samples = [Sample(str(index), "", texts) for index, (_, texts) in enumerate(chosen)]
    return EpisodesOfTexts(samples, [text for text, _ in chosen])


@pytest.mark.parametrize("id", REWARDS_OF_OVERLAP)
def test_a_text_scores_alone_what_it_scores_in_a_batch(language_data, episodes, id):
    reward = REWARDS.get(id, REWARDS_OF_OVERLAP[id])
    together = episodes.together(reward)
    assert together == episodes.alone(reward)
    assert len(set(together)) > 5


class OneAfterTheOther(TextReward):
    """The scores of many rewards at once, each weighed apart."""

    def __init__(self, rewards):
        self.rewards = rewards

    def scores(self, texts):
        columns = [reward.scores(texts) for reward in self.rewards]
        return [sum(score * 2**place for place, score in enumerate(row)) for row in zip(*columns, strict=True)]


def test_reward_workers_score_as_the_process_itself_does(language_data, episodes):
    reward = OneAfterTheOther([REWARDS.get(id, args) for id, args in REWARDS_OF_OVERLAP.items()])
    assert episodes.in_workers(reward) == episodes.together(reward)
