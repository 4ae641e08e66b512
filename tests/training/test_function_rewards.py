"""Runs whose reward and metrics are Python functions: trained, resumed, changed, evaluated."""

from __future__ import annotations

import json
import os

import pytest

from rl4lms_like.cli import main
from rl4lms_like.config.load import parse_config
from rl4lms_like.inference import evaluate_run, generate_texts
from rl4lms_like.on_policy.assemble import assemble
from rl4lms_like.rewards.python_function import reward_block
from rl4lms_like.run import resume, train_config
from rl4lms_like.system.errors import ConfigError, RL4LMsLikeError
from rl4lms_like.training.resuming.accepted_changes import read_changes
from rl4lms_like.training.resuming.resume import resumption
from tests.config_errors import raises_at
from tests.robustness.killed_runs import files_of
from tests.training.resuming.test_resume import StoppedError, blocks, stop_after


def score(responses, sentiment_of_prompt=None):
    return [len(set(text)) / 10 for text in responses]


def half(completions, **kwargs):
    return [0.5 if len(text) % 2 else None for text in completions]


def short(response):
    return float(len(response) < 5)


@pytest.fixture
def mapping(tiny_gpt2_dir):
    mapping = blocks("causal", tiny_gpt2_dir, "ppo")
    evaluation = {"eval_batch_size": 6, "n_iters": 3, "eval_every": 2, "save_every": 1, "keep_last": 3}
    return mapping | {"reward_fn": [score, (half, 0.5)], "train_evaluation": evaluation}


def trained(mapping, folder):
    return train_config(parse_config(mapping), base_path_to_store_results=folder, experiment_name="run", quiet=True)


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_run_with_functions_reports_its_parts_and_leaves_none_out_of_their_means(mapping, tmp_path):
    evaluation = mapping["train_evaluation"] | {"metrics": [short, {"id": "reward"}], "save_rollouts": True}
    folder = trained(mapping | {"train_evaluation": evaluation}, tmp_path)

    rollout = lines(folder / "rollout_info.jsonl")[0]
    assert rollout["rollout_info/reward/half"] == 0.25 and rollout["rollout_info/reward/half_std"] == 0
    episodes = lines(next((folder / "rollouts").glob("*1.jsonl")))
    parts = [episode["reward_parts"] for episode in episodes]
    assert {part["half"] for part in parts} <= {0.25, None} and None in {part["half"] for part in parts}
    for episode in episodes:
        part = episode["reward_parts"]
        assert episode["reward"] == pytest.approx(part["score"] + (part["half"] or 0))

    metrics = lines(folder / "val_split_metrics.jsonl")[0]["metrics"]
    assert set(metrics) == {"python/short", "reward/mean", "reward/std", "reward/parts/score", "reward/parts/half"}
    assert metrics["reward/parts/half"] == 0.25

    config = json.loads((folder / "config.json").read_text())
    names = [part["args"]["function"] for part in config["reward_fn"]["args"]["rewards"]]
    assert [name.partition("@")[0] for name in names] == [f"{__name__}:score", f"{__name__}:half"]


def test_kept_rollouts_with_parts_that_returned_none_can_be_replayed(mapping, tmp_path):
    evaluation = mapping["train_evaluation"] | {"save_rollouts": True}
    folder = trained(mapping | {"train_evaluation": evaluation}, tmp_path / "kept")
    replayed = mapping["train_evaluation"] | {"replay": str(folder)}
    again = trained(mapping | {"train_evaluation": replayed}, tmp_path / "replayed")
    assert files_of(again)["model/model.safetensors"] == files_of(folder)["model/model.safetensors"]


# --- resuming ---------------------------------------------------------------------------------------------------------


def stopped(mapping, folder, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(StoppedError):
        stop_after(patch, 2, "rollout")
        trained(mapping, folder)
    return folder / "rl4lm_exps" / "run"


def test_the_same_script_resumes_the_run_and_ends_alike(mapping, tmp_path, monkeypatch):
    whole = trained(mapping, tmp_path / "whole")
    folder = stopped(mapping, tmp_path / "stopped", monkeypatch)
    assert trained(mapping, tmp_path / "stopped") == folder
    assert files_of(folder) == files_of(whole)


def test_an_importable_function_is_found_again_by_resume(mapping, tmp_path, monkeypatch):
    folder = stopped(mapping, tmp_path, monkeypatch)
    resume(folder, quiet=True)
    assert (folder / "finished.json").exists()


def local_function(factor):
    def score(responses):
        return [factor * len(text) / 100 for text in responses]

    return score


def edited():
    def score(responses):
        return [len(text) / 200 for text in responses]

    return score


def test_a_function_that_cannot_be_imported_is_asked_for_by_its_name(mapping, tmp_path, monkeypatch):
    folder = stopped(mapping | {"reward_fn": local_function(1)}, tmp_path, monkeypatch)
    with pytest.raises(ConfigError, match=r"'local_function.<locals>.score' was given in Python .*reward=score"):
        resume(folder, quiet=True)

    resume(folder, values={"reward_fn": reward_block(local_function(1))}, quiet=True)
    assert (folder / "finished.json").exists() and read_changes(folder) == ()


def test_a_changed_function_is_refused_unless_it_is_accepted_and_then_listed(mapping, tmp_path, monkeypatch):
    folder = stopped(mapping | {"reward_fn": local_function(1)}, tmp_path, monkeypatch)
    changed = {"reward_fn": reward_block(edited())}
    with raises_at("reward_fn.args.function", mentions="cannot change on resuming"):
        resumption(folder, values=changed)

    resume(folder, values=changed, accepted=["reward_fn"], quiet=True)
    (change,) = read_changes(folder)
    assert change.iteration == 2 and change.path == "reward_fn.args.function"
    assert [name.partition("@")[0] for name in (change.old, change.new)] == [
        f"{__name__}:local_function.<locals>.score",
        f"{__name__}:edited.<locals>.score",
    ]
    assert json.loads((folder / "config.json").read_text())["reward_fn"]["args"]["function"] == change.new


def test_an_edited_script_starts_a_new_run_and_says_which_function_differs(mapping, tmp_path, monkeypatch):
    stopped(mapping | {"reward_fn": local_function(1)}, tmp_path, monkeypatch)
    folder = trained(mapping | {"reward_fn": edited()}, tmp_path)
    assert folder.name == "run_2"
    before = reward_block(local_function(1))["args"]["function"]
    now = reward_block(edited())["args"]["function"]
    (line,) = [line for line in (folder / "log.txt").read_text().splitlines() if "its config differs" in line]
    assert "reward_fn.args.function" in line and before[-20:] in line and now[-20:] in line


# --- commands on a folder of a function -------------------------------------------------------------------------------


def test_commands_work_without_the_function_and_name_it_where_they_need_it(mapping, tmp_path, capsys):
    metrics = {"metrics": [{"id": "length"}]}
    folder = trained(
        mapping | {"reward_fn": local_function(1), "train_evaluation": mapping["train_evaluation"] | metrics}, tmp_path
    )
    assert evaluate_run(folder, split="val").keys() == {"length/words"}
    assert len(generate_texts(folder, ["The film"])) == 1
    assert main(["report", str(folder)]) == 0
    assert main(["evaluate", str(folder), "--split", "val"]) == 0


def test_an_evaluation_that_reports_the_reward_by_default_goes_on_without_it(mapping, tmp_path, capsys):
    folder = trained(mapping | {"reward_fn": local_function(1)}, tmp_path)
    assert lines(folder / "val_split_metrics.jsonl")[0]["metrics"].keys() == {"reward/mean", "reward/std"}
    assert evaluate_run(folder, split="val") == {}
    assert "the run's own reward is not reported: " in (message := capsys.readouterr().err)
    assert "score' was given in Python" in message


def test_an_evaluation_of_the_reward_names_a_function_that_it_lacks(mapping, tmp_path):
    metrics = {"metrics": [{"id": "reward"}]}
    folder = trained(
        mapping | {"reward_fn": local_function(1), "train_evaluation": mapping["train_evaluation"] | metrics}, tmp_path
    )
    with pytest.raises(RL4LMsLikeError, match="score' was given in Python"):
        evaluate_run(folder, split="val")


# --- mistakes before a model is loaded --------------------------------------------------------------------------------


def needs_column(responses, topik):
    return [0.0] * len(responses)


def test_a_parameter_that_is_no_column_is_an_error_before_a_model_is_loaded(mapping, monkeypatch):
    def load(*_, **__):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("rl4lms_like.policies.loading.load_model", load)
    with raises_at("reward_fn", mentions="topik"):
        assemble(parse_config(mapping | {"reward_fn": [score, needs_column]}))
    evaluation = mapping["train_evaluation"] | {"metrics": [{"id": "length"}, needs_column]}
    with raises_at("train_evaluation.metrics.1", mentions="topik"):
        assemble(parse_config(mapping | {"train_evaluation": evaluation}))


class Reward:
    def __call__(self, responses):
        return [0.0] * len(responses)


def test_mistakes_in_functions_are_errors_of_the_config(mapping):
    with raises_at("reward_fn", mentions="got the class Reward"):
        parse_config(mapping | {"reward_fn": Reward})
    with raises_at("reward_fn", mentions="weight"):
        parse_config(mapping | {"reward_fn": [(score, None)]})
    with raises_at("train_evaluation.metrics.0", mentions="got the class Reward"):
        parse_config(mapping | {"train_evaluation": mapping["train_evaluation"] | {"metrics": [Reward]}})


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_file_may_name_a_function_by_import_path_or_file(mapping, tmp_path, monkeypatch):
    (tmp_path / "file_rewards.py").write_text("def score(responses, word):\n    return [1.0 for _ in responses]\n")
    monkeypatch.setenv("RL4LMS_LIKE_CODE", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    for path in ("file_rewards:score", os.fspath(tmp_path / "file_rewards.py:score")):
        config = parse_config(mapping | {"reward_fn": {"id": path, "args": {"word": "a"}}})
        assert config.reward_fn.id == "python"
        assert config.reward_fn.args == {"function": path, "kwargs": {"word": "a"}}
