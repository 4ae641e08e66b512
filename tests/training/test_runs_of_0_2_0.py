"""Runs, kept rollouts and `save` files that version 0.2.0 wrote continue as they did with that version."""

from __future__ import annotations

import json
import shutil

import pytest
import stable_baselines3
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from rl4lms_like import PPO, Sample, TextVecEnv, with_text_rollouts
from rl4lms_like.config.load import parse_config
from rl4lms_like.rewards.synthetic import RewardIncreasingNumbers
from rl4lms_like.run import resume, train_config
from tests.conftest import REPOSITORY

ANOTHER_MACHINE = {"atol": 1e-4, "rtol": 1e-3}
"""Tolerance of weights after some steps: another processor sums in another order."""


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The files of that version, in the working folder, to which the paths in them are relative."""
    folder = shutil.copytree(REPOSITORY / "tests" / "data" / "run_0_2_0", tmp_path / "files")
    monkeypatch.chdir(folder)
    return folder


def weights_of(file):
    return torch.cat([weight.flatten() for _, weight in sorted(load_file(file).items())])


def test_a_run_that_was_interrupted_in_an_update_ends_as_it_would_have(files):
    start = weights_of(files / "model" / "model.safetensors")
    expected = weights_of(files / "expected.safetensors")
    folder = resume(files / "stopped", quiet=True)
    weights = weights_of(folder / "model" / "model.safetensors")
    torch.testing.assert_close(weights, expected, **ANOTHER_MACHINE)
    assert float((weights - start).norm()) > 10 * float((weights - expected).norm())

    lines = [json.loads(line) for line in (folder / "rollout_info.jsonl").read_text().splitlines()]
    before = [json.loads(line) for line in (files / "expected_rollout_info.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [1, 2, 3]
    for line, line_before in zip(lines, before, strict=True):
        assert line.keys() >= line_before.keys()  # later versions may log more
    # The third rollout may be sampled differently on another processor; the update that is resumed has the second.
    for line, line_before in zip(lines[:2], before, strict=False):
        for key in ("rollout_info/ep_rew", "rollout_info/kl_div_mean", "rollout_info/ep_kl_rew"):
            assert line[key] == pytest.approx(line_before[key], abs=1e-4)


def test_its_rollouts_are_replayed(files):
    config = json.loads((files / "stopped" / "config.json").read_text())
    config["train_evaluation"] |= {"replay": str(files / "stopped"), "save_rollouts": False}
    folder = train_config(
        parse_config(config), base_path_to_store_results=files, experiment_name="replayed", quiet=True
    )
    assert "with the stored log-probs and values" in (folder / "log.txt").read_text()
    lines = [json.loads(line) for line in (folder / "rollout_info.jsonl").read_text().splitlines()]
    before = json.loads((files / "expected_rollout_info.jsonl").read_text().splitlines()[0])
    assert len(lines) == 2
    assert lines[0]["rollout_info/ep_rew"] == pytest.approx(before["rollout_info/ep_rew"])


@pytest.mark.parametrize(
    ("algorithm", "name"), [(PPO, "ours"), (with_text_rollouts(stable_baselines3.PPO), "sb3")], ids=["ours", "sb3"]
)
def test_a_saved_algorithm_learns_on_with_its_options(algorithm, name, files):
    tokenizer = AutoTokenizer.from_pretrained(files / "model")
    prompts = [Sample("0", "The film was"), Sample("1", "I went to see it")]
    env = TextVecEnv(
        4, tokenizer, RewardIncreasingNumbers(8), prompts, max_prompt_length=6, max_episode_length=6,
        terminate_on_eos=True,
    )  # fmt: skip
    built = algorithm.load(files / f"{name}.zip", env=env, device="cpu")
    assert built.collector.options.norm_reward
    assert built.collector.options.sort_by_length == built.rollout_buffer.sort_by_length == (name == "ours")

    built.learn(24)
    sums = [float(parameter.detach().double().sum()) for parameter in built.policy.parameters()]
    assert sums == pytest.approx(json.loads((files / "after_load.json").read_text())[name], abs=2e-3)
