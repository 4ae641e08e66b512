"""The training ends when the score on `val` no longer improves, also of a run that was stopped and goes on."""

from __future__ import annotations

import json

import pytest

from rl4lms_like.config.load import parse_config
from rl4lms_like.core.sample import Sample
from rl4lms_like.data_pools.base import TextGenPool
from rl4lms_like.run import resume
from tests.config_errors import raises_at
from tests.configs import run_blocks
from tests.on_policy.test_best_model import Scripted
from tests.robustness.killed_runs import files_of
from tests.training.resuming.test_resume import StoppedError, blocks, started, stop_after


class OnlyTrain(TextGenPool):
    """A pool without held-out samples."""

    @classmethod
    def prepare(cls, split):
        return cls([Sample("0", "The film")] if split == "train" else [])


SCRIPTED = "tests.on_policy.test_best_model:Scripted"


def mapping(model, mode="max", patience=2, n_iters=6, **keys):
    evaluation = {
        "eval_batch_size": 6,
        "n_iters": n_iters,
        "eval_every": 1,
        "save_every": 1,
        "metrics": [{"id": SCRIPTED}],
        "early_stopping": {"metric": "test/scripted", "mode": mode, "patience": patience},
    }
    return blocks("causal", model, "ppo") | {"train_evaluation": evaluation | keys}


def n_iterations(folder):
    return len((folder / "training_info.jsonl").read_text().splitlines())


@pytest.mark.parametrize(
    ("mode", "patience", "scores", "n"),
    [
        ("max", 2, [0.2, 0.5, 0.4, 0.5, 0.9, 0.9, 0.9], 3),  # an equal score is not better
        ("max", 1, [0.9, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0], 1),  # the evaluation before training counts
        ("min", 2, [0.9, 0.8, 0.7, 0.75, 0.6, 0.65, 0.5], 6),
        (
            "max",
            2,
            [0.1, float("nan"), 0.2, float("nan"), float("inf"), 0.9, 0.9],
            4,
        ),  # what is no number is no progress
        ("max", 3, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7], 6),
    ],
)
def test_the_training_ends_after_so_many_evaluations_without_a_better_score(
    mode, patience, scores, n, tmp_path, tiny_gpt2_dir
):
    Scripted.message = scores
    folder = started(mapping(tiny_gpt2_dir, mode, patience), tmp_path)
    assert n_iterations(folder) == n
    assert (folder / "finished.json").is_file() and (folder / "model" / "model.safetensors").is_file()
    assert ("early_stopping" in (folder / "log.txt").read_text()) == (n < 6)
    tested = [json.loads(line)["epoch"] for line in (folder / "test_split_metrics.jsonl").read_text().splitlines()]
    assert tested == [0, n]


def test_a_run_that_has_ended_early_is_finished(tmp_path, tiny_gpt2_dir):
    Scripted.message = [0.9, 0.1, 0.1, 0.2, 0.2, 0.2, 0.2]
    folder = started(mapping(tiny_gpt2_dir), tmp_path)
    before = files_of(folder)
    assert resume(folder, quiet=True) == folder
    assert files_of(folder) == before


@pytest.mark.parametrize("iteration", [1, 2, 3])
def test_a_stopped_run_ends_where_the_uninterrupted_one_does(iteration, tmp_path, tiny_gpt2_dir, monkeypatch):
    Scripted.message = [0.2, 0.9, 0.3, 0.5, 0.8, 0.7, 0.9]
    expected = started(mapping(tiny_gpt2_dir, patience=3), tmp_path, "whole")
    assert n_iterations(expected) == 4
    with monkeypatch.context() as patch, pytest.raises(StoppedError):
        stop_after(patch, iteration, "rollout")
        started(mapping(tiny_gpt2_dir, patience=3), tmp_path)
    assert files_of(resume(tmp_path / "rl4lm_exps" / "run", quiet=True)) == files_of(expected)


def test_it_may_be_set_on_resuming(tmp_path, tiny_gpt2_dir, monkeypatch):
    Scripted.message = [0.2, 0.9, 0.3, 0.5, 0.8, 0.7, 0.9]
    without = mapping(tiny_gpt2_dir, early_stopping=None)
    with monkeypatch.context() as patch, pytest.raises(StoppedError):
        stop_after(patch, 1, "rollout")
        started(without, tmp_path)
    setting = "train_evaluation.early_stopping={metric: test/scripted, mode: max, patience: 1}"
    folder = resume(tmp_path / "rl4lm_exps" / "run", overrides=[setting], quiet=True)
    assert n_iterations(folder) == 5, "0.3, 0.5, 0.8, 0.7: counted from the resumption on"


def test_its_metric_is_checked_like_that_of_the_best_model(tmp_path, tiny_gpt2_dir):
    config = run_blocks()
    config["train_evaluation"]["metrics"] = [{"id": "length"}]
    config["train_evaluation"]["early_stopping"] = {"metric": "length/word", "mode": "max", "patience": 2}
    with raises_at("train_evaluation.early_stopping.metric", mentions="'length/words'"):
        parse_config(config)
    config["train_evaluation"]["early_stopping"] = {"metric": "length/words", "mode": "most", "patience": 0}
    with raises_at("train_evaluation.early_stopping.mode", "train_evaluation.early_stopping.patience"):
        parse_config(config)

    Scripted.message = [0.2]
    unknown = mapping(tiny_gpt2_dir)
    unknown["train_evaluation"]["early_stopping"]["metric"] = "test/other"
    with raises_at("train_evaluation.early_stopping.metric"):
        started(unknown, tmp_path)


def test_it_needs_samples_to_evaluate(tmp_path, tiny_gpt2_dir):
    without = mapping(tiny_gpt2_dir)
    without["datapool"] = {"id": "tests.on_policy.test_early_stopping:OnlyTrain"}
    with raises_at("train_evaluation.early_stopping"):
        started(without, tmp_path)


def test_patience_that_outlasts_the_run_is_noticed():
    config = run_blocks()
    config["train_evaluation"] |= {"metrics": [{"id": "length"}], "n_iters": 20, "eval_every": 10}
    early_stopping = {"metric": "length/words", "mode": "max", "patience": 1}
    config["train_evaluation"]["early_stopping"] = early_stopping
    place = "train_evaluation.early_stopping.patience"
    assert place not in {notice.path for notice in parse_config(config).notices}
    early_stopping["patience"] = 2
    assert place in {notice.path for notice in parse_config(config).notices}


def test_scores_of_another_metric_are_none_to_improve_on(tmp_path, tiny_gpt2_dir):
    Scripted.message = [0.9] * 3
    folder = started(mapping(tiny_gpt2_dir, patience=5, n_iters=2), tmp_path)
    Scripted.message = [0.9] * 9
    overrides = [
        "train_evaluation.n_iters=5",
        "train_evaluation.early_stopping={metric: test/scripted, mode: min, patience: 3}",
    ]
    (folder / "finished.json").unlink()
    assert n_iterations(resume(folder, overrides=overrides, quiet=True)) == 5, "two before the change do not count"
