"""The best model on `val` is kept, and a run that goes on keeps the same one; checkpoints that are too many go."""

from __future__ import annotations

import errno
import json
import shutil
from typing import ClassVar

import pytest
from transformers import AutoModelForCausalLM

from rl4lms_like.config.load import parse_config
from rl4lms_like.inference import evaluate_run, generate_texts
from rl4lms_like.metrics.base import BaseMetric
from rl4lms_like.on_policy import best_model as callbacks
from rl4lms_like.run import resume
from rl4lms_like.system.errors import RL4LMsLikeError
from rl4lms_like.training.resuming import checkpoints
from tests.config_errors import raises_at
from tests.configs import run_blocks
from tests.robustness.killed_runs import files_of
from tests.training.resuming.test_resume import StoppedError, blocks, started, stop_after


class Scripted(BaseMetric):
    """Says on `val` what it was told, at one evaluation after the other; how many were asked is part of the run."""

    message: ClassVar[list] = []

    def __init__(self) -> None:
        self.calls = 0

    def compute(self, prompt_texts, generated_texts, reference_texts, meta_infos=None, model=None, split_name=None):
        if split_name != "val":
            return {"test/scripted": (None, 0.0)}
        self.calls += 1
        return {"test/scripted": (None, Scripted.message[self.calls - 1])}

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


def mapping(model, mode="max", **keys):
    evaluation = {
        "eval_batch_size": 6, "n_iters": 4, "eval_every": 1, "save_every": 1,
        "metrics": [{"id": f"{__name__}:Scripted"}], "keep_best": {"metric": "test/scripted", "mode": mode},
    }  # fmt: skip
    return blocks("causal", model, "ppo") | {"train_evaluation": evaluation | keys}


def best(folder):
    return json.loads((folder / "best" / "best.json").read_text())


def names(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


# --- keep_best --------------------------------------------------------------------------------------------------------


def test_the_best_model_is_kept_with_its_score_and_is_ready_for_use(tmp_path, tiny_gpt2_dir):
    Scripted.message = [0.2, 0.3, 0.8, float("nan"), 0.8]
    folder = started(mapping(tiny_gpt2_dir), tmp_path)
    assert best(folder) == {"epoch": 2, "metric": "test/scripted", "mode": "max", "score": 0.8}
    saved = (folder / "best" / "model.safetensors").read_bytes()
    assert saved == (folder / "checkpoints" / "iteration_00002" / "model.safetensors").read_bytes()
    assert AutoModelForCausalLM.from_pretrained(folder / "best")
    assert set(evaluate_run(folder / "best", split="test", output=tmp_path)) == {"test/scripted"}
    assert len(generate_texts(folder / "best", ["The film"], max_new_tokens=4)) == 1


@pytest.mark.parametrize(
    ("mode", "message", "epoch"),
    [
        ("max", [0.9, 0.3, 0.8, 0.1, 0.9], None),
        ("min", [0.9, float("-inf"), 0.8, 0.1, 0.9], 3),
        ("max", [float("nan"), float("nan"), -0.5, float("inf"), -0.7], 2),
    ],
)
def test_iteration_0_is_the_bar_and_what_is_no_number_is_never_best(mode, message, epoch, tmp_path, tiny_gpt2_dir):
    Scripted.message = message
    folder = started(mapping(tiny_gpt2_dir, mode, save_model=False), tmp_path)
    assert (folder / "best").is_dir() == (epoch is not None)
    if epoch is not None:
        assert best(folder)["epoch"] == epoch


def test_a_run_that_goes_on_keeps_the_same_best_model(tmp_path, tiny_gpt2_dir, monkeypatch):
    Scripted.message = [0.2, 0.9, 0.3, 0.5, 0.95]
    expected = started(mapping(tiny_gpt2_dir, save_every=2), tmp_path, "whole")
    assert best(expected)["epoch"] == 4
    for iteration in (1, 3):  # before and after the checkpoint: written again, or not at all
        with monkeypatch.context() as patch, pytest.raises(StoppedError):
            stop_after(patch, iteration, "rollout")
            started(mapping(tiny_gpt2_dir, save_every=2), tmp_path, f"run_{iteration}")
        folder = tmp_path / "rl4lm_exps" / f"run_{iteration}"
        assert best(folder)["epoch"] == 1
        if iteration == 3:
            assert resume(folder, quiet=True) == folder
            assert files_of(folder) == files_of(expected)


def test_a_disk_that_is_full_is_said_with_the_way_out_and_the_best_model_is_chosen_then(
    tmp_path, tiny_gpt2_dir, monkeypatch
):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    Scripted.message = [0.2, 0.1, 0.9, 0.3, 0.8]
    settings = {"n_iters": 2, "save_every": 9}
    with monkeypatch.context() as patch, pytest.raises(RL4LMsLikeError, match="No space left"):
        patch.setattr(callbacks, "write_folder", full)
        started(mapping(tiny_gpt2_dir, **settings), tmp_path)
    folder = started(mapping(tiny_gpt2_dir, **settings), tmp_path)
    assert best(folder)["epoch"] == 2
    lines = (folder / "val_split_metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [0, 1, 2]


def test_the_bar_of_a_run_that_goes_on_is_that_of_the_checkpoint(tmp_path, tiny_gpt2_dir, monkeypatch):
    Scripted.message = [0.2, 0.9, 0.3, 0.5, 0.8]
    with monkeypatch.context() as patch, pytest.raises(StoppedError):
        stop_after(patch, 3, "rollout")
        started(mapping(tiny_gpt2_dir), tmp_path)
    folder = resume(tmp_path / "rl4lm_exps" / "run", quiet=True)
    assert best(folder)["epoch"] == 1


def test_a_misspelt_metric_is_a_mistake_before_anything_is_loaded():
    config = run_blocks()
    config["train_evaluation"]["metrics"] = [{"id": "length", "name": "all"}, {"id": "distinct_n"}]
    for metric in ("length/word/all", "length/words"):
        config["train_evaluation"]["keep_best"] = {"metric": metric, "mode": "max"}
        with raises_at("train_evaluation.keep_best.metric", mentions="'length/words/all'"):
            parse_config(config)
    for metric in ("length/words/all", "diversity_metrics/distinct-2"):
        config["train_evaluation"]["keep_best"] = {"metric": metric, "mode": "max"}
        assert parse_config(config).train_evaluation.keep_best.metric == metric
    config["train_evaluation"]["metrics"] = []
    with raises_at("train_evaluation.keep_best.metric"):
        parse_config(config)


def test_a_metric_that_only_the_first_evaluation_can_name_is_checked_there(tmp_path, tiny_gpt2_dir):
    Scripted.message = [0.1]
    wrong = mapping(tiny_gpt2_dir)
    wrong["train_evaluation"]["keep_best"]["metric"] = "test/skripted"
    with raises_at("train_evaluation.keep_best.metric", mentions="'test/scripted'"):
        started(wrong, tmp_path)
    assert not (tmp_path / "rl4lm_exps" / "run" / "rollout_info.jsonl").exists()


# --- keep_last --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [1, 3])
def test_the_newest_checkpoints_stay_whole_and_older_ones_go(keep, tmp_path, tiny_gpt2_dir):
    Scripted.message = [0.0] * 5
    folder = started(mapping(tiny_gpt2_dir, keep_last=keep, keep_best=None), tmp_path)
    assert names(folder) == [f"iteration_{n:05d}" for n in range(5 - keep, 5)]
    for path in (folder / "checkpoints").iterdir():
        checkpoints.read_checkpoint(path)


def test_the_only_checkpoint_is_replaced_after_the_next_is_written(tmp_path, tiny_gpt2_dir, monkeypatch):
    Scripted.message = [0.0] * 5
    seen = []
    removed = checkpoints.remove_older

    def remove_older(base, *rest):
        seen.append([path.name for path in checkpoints.checkpoints_in(base)])
        removed(base, *rest)

    monkeypatch.setattr(checkpoints, "remove_older", remove_older)
    folder = started(mapping(tiny_gpt2_dir, keep_last=1, n_iters=2), tmp_path)
    assert seen == [["iteration_00001"], ["iteration_00001", "iteration_00002"]]
    assert names(folder) == ["iteration_00002"]


def test_what_a_kill_left_is_removed_when_the_run_goes_on(tmp_path, tiny_gpt2_dir, monkeypatch):
    Scripted.message = [0.0] * 5
    expected = started(mapping(tiny_gpt2_dir, keep_last=1, save_every=3), tmp_path, "whole")
    monkeypatch.setattr(checkpoints, "remove_older", lambda *arguments: None)
    with monkeypatch.context() as patch, pytest.raises(StoppedError):
        stop_after(patch, 3, "rollout")
        started(mapping(tiny_gpt2_dir, keep_last=1, save_every=3), tmp_path)
    monkeypatch.undo()
    folder = tmp_path / "rl4lm_exps" / "run"
    left = folder / "checkpoints" / "iteration_00002"
    left.mkdir()
    (left / "config.json").write_text("{}")  # half of it is removed already
    assert files_of(resume(folder, quiet=True)) == files_of(expected)


def test_going_back_to_an_older_checkpoint_does_not_remove_it(tmp_path, tiny_gpt2_dir):
    Scripted.message = [0.0] * 9
    folder = started(mapping(tiny_gpt2_dir, keep_best=None), tmp_path)
    asked = ["train_evaluation.keep_last=1", "train_evaluation.save_every=4"]
    resume(folder / "checkpoints" / "iteration_00003", overrides=asked, quiet=True)
    assert names(folder) == ["iteration_00004"]


def test_keep_last_without_checkpoints_is_a_mistake():
    config = run_blocks()
    config["train_evaluation"] |= {"keep_last": 2, "save_model": False}
    with raises_at("train_evaluation", mentions="keep_last"):
        parse_config(config)


def test_an_unfinished_run_answers_with_its_best_model_else_with_its_newest(
    tmp_path, tiny_gpt2_dir, capsys, monkeypatch
):
    Scripted.message = [0.2, 0.8, 0.3, 0.3]
    stop_after(monkeypatch, 2, "rollout")
    with pytest.raises(StoppedError):
        started(mapping(tiny_gpt2_dir), tmp_path)
    folder = tmp_path / "rl4lm_exps" / "run"
    assert not (folder / "model").exists()

    used = []
    for name in ("best", "checkpoints/iteration_00002", "checkpoints/iteration_00001"):
        texts = generate_texts(folder, ["The film"], decoding="greedy")
        assert texts == generate_texts(folder / name, ["The film"], decoding="greedy")
        used.append(f"using its model {folder / name}" in capsys.readouterr().err)
        if name == "best":
            assert set(evaluate_run(folder, split="test", output=tmp_path)) == {"test/scripted"}
        shutil.rmtree(folder / name)
    assert all(used)

    shutil.rmtree(folder / "checkpoints")
    for answer in (lambda: generate_texts(folder, ["The film"]), lambda: evaluate_run(folder)):
        with pytest.raises(RL4LMsLikeError, match="has no model"):
            answer()
