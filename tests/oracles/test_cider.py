"""CIDEr-D is pycocoevalcap's, on RL4LMs' tokens, for real captions and for odd ones."""

from __future__ import annotations

import json
import random

import pytest

from rl4lms_like.metrics.lexical import CIDERMetric
from rl4lms_like.rewards.lexical import SpiderRewardFunction
from rl4lms_like.scoring.captions import cider, tokens
from rl4lms_like.scoring.score import Texts

ODD = ["", " ", "日本語の文章。", "The", "!!! ???", "Собака бежит по полю.", "a " * 2000, "a dog\n\n runs\tfast"]


def cases(shared_dir, n: int) -> tuple[list[str], list[list[str]]]:
    """One scene of a concept set as the text, the others as references; words dropped, doubled, or of another set."""
    lines = (shared_dir / "data" / "commongen" / "commongen.dev.jsonl").read_text(encoding="utf-8").splitlines()
    scenes = [row["scene"] for row in map(json.loads, lines) if len(row["scene"]) > 1][:n]
    rng = random.Random(0)
    texts = []
    for index, scene in enumerate(scenes):
        words = (scene[0] if index % 5 else scenes[index - 1][0]).split()
        kept = [word for word in words if rng.random() < 0.8] or words
        texts.append(" ".join(kept + kept[-2:] * (index % 3)) if index % 4 else scene[-1])
    return texts, [scene[1:] for scene in scenes]


def of_the_package(texts: list[str], references: list[list[str]]) -> tuple[float, list[float]]:
    from pycocoevalcap.cider.cider import Cider

    spaced = [" ".join(tokens(text)) for text in texts]
    wanted = {index: [" ".join(tokens(text)) for text in group] for index, group in enumerate(references)}
    mean, scores = Cider().compute_score(wanted, {index: [text] for index, text in enumerate(spaced)})
    return float(mean), [float(score) for score in scores]


def test_scores_are_the_packages_on_real_captions_and_odd_texts(shared_dir):
    texts, references = cases(shared_dir, 300)
    texts += [*ODD, "A dog runs."]
    references += [["A dog runs across the field.", text] for text in ODD] + [["A dog runs."]]
    assert len(texts) > 300
    mean, expected = of_the_package(texts, references)
    assert cider(texts, references) == pytest.approx(expected, abs=1e-9)
    scores, found = CIDERMetric().compute([""] * len(texts), texts, references)["lexical/cider"]
    assert found == pytest.approx(mean, abs=1e-9)
    assert scores == pytest.approx(expected, abs=1e-9)
    assert max(expected) > 5


def test_the_reward_is_the_packages_score_times_its_coefficient(shared_dir):
    texts, references = cases(shared_dir, 40)
    samples = Texts(texts, texts, references, [None] * 40)
    rewards = SpiderRewardFunction(spice_coeff=0.0, cider_coeff=0.5).scores(samples)
    assert rewards == pytest.approx([0.5 * score for score in of_the_package(texts, references)[1]], abs=1e-9)


def test_a_batch_alone_with_the_frequencies_of_its_split_scores_as_within_it(shared_dir, tmp_path):
    texts, references = cases(shared_dir, 60)
    file = tmp_path / "references.jsonl"
    file.write_text("".join(json.dumps({"references": group}) + "\n" for group in references), encoding="utf-8")
    reward = SpiderRewardFunction(0.0, 1.0, references_file=str(file))
    pairs = zip(texts, references, strict=True)
    alone = [reward.scores(Texts([""], [text], [group], [None]))[0] for text, group in pairs]
    assert alone == pytest.approx(of_the_package(texts, references)[1], abs=1e-9)
