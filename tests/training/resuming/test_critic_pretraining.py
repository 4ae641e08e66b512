"""Pretraining of the critic is part of a run: stopped anywhere in it, the run ends as one that was not stopped."""

import json

import pytest
import torch
from safetensors.torch import load_file

from rl4lms_like.algorithms.critic_pretraining import CriticPretrainer
from rl4lms_like.cli import main
from rl4lms_like.config.yaml_file import dump_yaml
from rl4lms_like.run import resume
from tests.robustness.killed_runs import files_of
from tests.training.resuming.test_resume import StoppedError, blocks, started

PRETRAIN = {"max_rollouts": 3, "patience": 3, "n_epochs": 2}


@pytest.fixture
def mapping(tiny_gpt2_dir):
    mapping = blocks("causal", tiny_gpt2_dir, "ppo")
    mapping["alg"]["args"] = {**mapping["alg"]["args"], "critic_pretrain": PRETRAIN, "critic_only_iterations": 1}
    mapping["train_evaluation"] |= {"n_iters": 2}
    return mapping


@pytest.mark.parametrize(("error", "after"), [(KeyboardInterrupt, 2), (StoppedError, 2), (KeyboardInterrupt, 3)])
def test_a_run_stopped_after_a_rollout_of_its_pretraining_ends_alike(error, after, mapping, tmp_path, monkeypatch):
    expected = started(mapping, tmp_path / "whole")
    mark = CriticPretrainer.progress

    def progress(self, explained):
        if len(self.explained) == after:
            raise error
        return mark(self, explained)

    with monkeypatch.context() as patch, pytest.raises(error):
        patch.setattr(CriticPretrainer, "progress", progress)
        started(mapping, tmp_path)
    folder = resume(tmp_path / "rl4lm_exps" / "run", quiet=True)
    assert files_of(folder) == files_of(expected)
    assert (folder / "critic" / "value_head.safetensors").is_file()  # also in `files_of`
    first = json.loads((folder / "training_info.jsonl").read_text().splitlines()[0])
    assert "ppo/policy_gradient_loss" not in first and "ppo/value_loss" in first


def test_the_command_saves_a_critic_that_a_run_starts_from(mapping, tmp_path, capsys):
    del mapping["alg"]["args"]["critic_only_iterations"]
    file = tmp_path / "run.yml"
    file.write_text(dump_yaml(mapping))
    saved = tmp_path / "critic"
    assert main(["pretrain-critic", str(file), "--output", str(saved), "--set", "seed=3"]) == 0
    assert capsys.readouterr().out.count("explained variance") == 3
    folder = started(mapping, tmp_path)
    for name in ("model.safetensors", "value_head.safetensors"):
        ours, theirs = load_file(saved / name), load_file(folder / "critic" / name)
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    mapping["alg"]["args"]["critic_pretrain"] = None
    mapping["alg"]["policy"]["args"]["critic_model"] = str(saved)
    mapping["train_evaluation"]["n_iters"] = 1
    values = [
        json.loads((started(mapping, tmp_path, name) / "rollout_info.jsonl").read_text())["rollout_info/values"]
        for name in ("from_critic",)
    ]
    assert values[0] != 0


def test_a_supervised_run_has_no_critic(tmp_path, tiny_gpt2_dir, capsys):
    config = {
        "tokenizer": {"model_name": str(tiny_gpt2_dir)},
        "datapool": {"id": "film_opinions", "args": {"n_train": 4, "n_eval": 1}},
        "alg": {"id": "supervised", "model_type": "causal", "model_name": str(tiny_gpt2_dir)},
        "train_evaluation": {"eval_batch_size": 1},
    }
    (tmp_path / "run.yml").write_text(dump_yaml(config))
    assert main(["pretrain-critic", str(tmp_path / "run.yml")]) == 2
    assert "alg.id" in capsys.readouterr().err
