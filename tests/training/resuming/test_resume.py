"""A run that was stopped and goes on ends as one that was not: weights, files, everything but clock times."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from rl4lms_like.cli import main
from rl4lms_like.config.load import parse_config
from rl4lms_like.config.yaml_file import dump_yaml
from rl4lms_like.on_policy.trainer import OnPolicyTrainer
from rl4lms_like.rewards.base import RewardFunction
from rl4lms_like.run import resume, train_config
from rl4lms_like.system.errors import CheckpointError, OutOfMemoryError
from rl4lms_like.tracking.base import Tracker
from rl4lms_like.training.resuming import checkpoints
from rl4lms_like.training.resuming.checkpoints import read_checkpoint
from rl4lms_like.training.resuming.resume import MAY_CHANGE, resumption, rounding_notices
from tests.config_errors import raises_at
from tests.conftest import REPOSITORY
from tests.forked import forked
from tests.robustness.killed_runs import files_of

ALGORITHMS = {
    "ppo": {"n_steps": 10, "batch_size": 40, "n_epochs": 2, "learning_rate": 1e-3},
    "nlpo": {"n_steps": 10, "batch_size": 40, "n_epochs": 2, "learning_rate": 1e-3},
    "a2c": {"n_steps": 10, "learning_rate": 1e-3},
    "trpo": {"n_steps": 10, "batch_size": 40, "n_critic_updates": 2, "sub_sampling_factor": 2, "target_kl": 0.01},
}
PAIRS = [("causal", "ppo"), ("causal", "a2c"), ("seq2seq", "trpo"), ("seq2seq", "nlpo")]
"""Families and algorithms; seq2seq models once without masks and once with them."""
N_ITERS = 5


class Stateful(RewardFunction):
    """Pays more from call to call: what it has counted is part of the run."""

    terminal = True

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, prev_observation, action, current_observation, done, meta_info=None) -> float:
        self.calls += 1
        return 0.01 * self.calls + len(set(current_observation.context_text)) / 10

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


class Drawing(RewardFunction):
    """Draws from the global generators, as people's code does."""

    terminal = True

    def __call__(self, prev_observation, action, current_observation, done, meta_info=None) -> float:
        return random.random() + float(np.random.rand()) + float(torch.rand(())) if done else 0.0


class StoppedError(Exception):
    pass


def blocks(family: str, folder, algorithm: str) -> dict:
    masked = algorithm == "nlpo"
    policy = f"{'maskable_' * masked}{family}_lm_actor_critic_policy"
    policy_args = {
        "model_name": str(folder),
        "generation_kwargs": {"do_sample": True, "top_k": 0, "max_new_tokens": 8},
    }
    if masked:
        policy_args |= {
            "mask_type": "learned_top_p",
            "top_mask": 0.8,
            "target_update_iterations": 2,
            "min_tokens_to_keep": 5,
        }
    return {
        "tokenizer": {"model_name": str(folder)},
        "reward_fn": {"id": "tests.training.resuming.test_resume:Stateful"},
        "datapool": {"id": "film_opinions", "args": {"n_train": 30, "n_eval": 6}},
        "env": {"n_envs": 8, "args": {"max_prompt_length": 12, "max_episode_length": 8, "terminate_on_eos": True}},
        "alg": {
            "id": algorithm,
            "args": ALGORITHMS[algorithm],
            "kl_div": {"coeff": 0.1, "target_kl": 0.05},
            "policy": {"id": policy, "args": policy_args},
        },
        "train_evaluation": {
            "eval_batch_size": 6, "n_iters": N_ITERS, "eval_every": 2, "save_every": 2, "metrics": [{"id": "length"}],
        },
        "seed": 3,
        "device": "cpu",
    }  # fmt: skip


def started(mapping, folder, name="run"):
    return train_config(parse_config(mapping), base_path_to_store_results=folder, experiment_name=name, quiet=True)


def stop_after(monkeypatch, iteration: int, during: str) -> None:
    """The run ends in the iteration after `iteration`: before its update, or after it."""
    original = OnPolicyTrainer._iterate

    def iterate(self):
        if self.current_iter == iteration:
            if during == "rollout":
                self.run.env.reset()  # prompts were drawn, random numbers used
            else:
                original(self)
            raise StoppedError
        original(self)

    monkeypatch.setattr(OnPolicyTrainer, "_iterate", iterate)


@pytest.fixture(scope="module")
def whole(request, tmp_path_factory, tiny_gpt2_dir, tiny_t5_dir):
    """Runs that nothing stopped, made when asked for."""
    made = {}

    def get(family, algorithm):
        if (family, algorithm) not in made:
            mapping = blocks(family, tiny_gpt2_dir if family == "causal" else tiny_t5_dir, algorithm)
            made[family, algorithm] = mapping, started(mapping, tmp_path_factory.mktemp("whole"))
        return made[family, algorithm]

    return get


@pytest.mark.parametrize(("family", "algorithm"), PAIRS)
def test_a_stopped_run_goes_on_to_the_same_end(family, algorithm, whole, tmp_path, monkeypatch):
    mapping, expected = whole(family, algorithm)
    with monkeypatch.context() as patch, pytest.raises(StoppedError):
        stop_after(patch, 3, "files" if family == "causal" else "rollout")
        started(mapping, tmp_path)
    folder = resume(tmp_path / "rl4lm_exps" / "run", quiet=True)
    assert files_of(folder) == files_of(expected)


@pytest.mark.parametrize(("algorithm", "family", "args"), [
    ("grpo", "causal", {"group_size": 4, "n_epochs": 2, "reference_update_iterations": 2, "reference_mixing": 0.6}),
    ("ppo", "causal", {"n_epochs": 2, "reference_update_iterations": 2, "reference_mixing": 0.6}),
    ("trpo", "seq2seq", {"reference_update_iterations": 1}),
    ("dapo", "seq2seq", {"group_size": 2, "first_token_temperature": 10.0, "importance_correction": "tis"}),
])  # fmt: skip
def test_groups_and_their_sampling_go_on_too(
    algorithm, family, args, tmp_path, monkeypatch, tiny_gpt2_dir, tiny_t5_dir
):
    mapping = blocks(family, tiny_gpt2_dir if family == "causal" else tiny_t5_dir, "ppo")
    mapping["alg"] |= {"id": algorithm, "args": {"n_steps": 10, "batch_size": 40, "learning_rate": 1e-3, **args}}
    mapping["alg"]["policy"]["args"]["generation_kwargs"]["temperature"] = 0.9
    expected = started(mapping, tmp_path, "whole")
    with monkeypatch.context() as patch, pytest.raises(StoppedError):
        stop_after(patch, 3, "rollout")
        started(mapping, tmp_path)
    assert files_of(resume(tmp_path / "rl4lm_exps" / "run", quiet=True)) == files_of(expected)


def test_success_rates_of_prompts_go_on(tmp_path, monkeypatch, tiny_gpt2_dir):
    mapping = blocks("causal", tiny_gpt2_dir, "ppo")
    mapping["datapool"]["sampler"] = {"id": "difficulty", "args": {"success_from": 0.9, "weights": [0.01, 1, 0.01]}}
    expected = started(mapping, tmp_path, "whole")
    with monkeypatch.context() as patch, pytest.raises(StoppedError):
        stop_after(patch, 3, "files")
        started(mapping, tmp_path, "stopped")
    assert files_of(resume(tmp_path / "rl4lm_exps" / "stopped", quiet=True)) == files_of(expected)
    rollouts = [json.loads(line) for line in (expected / "rollout_info.jsonl").read_text().splitlines()]
    fractions = [
        [line[f"rollout_info/sampler/{bin}"] for bin in ("too_hard", "useful", "too_easy")] for line in rollouts
    ]
    assert all(sum(of_bins) == pytest.approx(1) for of_bins in fractions) and fractions[0] != fractions[-1]


@pytest.mark.parametrize("during", ["rollout", "files"])
def test_passes_over_the_prompts_go_on(during, tmp_path, monkeypatch, tiny_gpt2_dir):
    mapping = blocks("causal", tiny_gpt2_dir, "ppo")
    mapping["datapool"]["sampler"] = {"id": "shuffled"}
    mapping["alg"] |= {"id": "grpo", "args": {"n_episodes": 16, "group_size": 4, "learning_rate": 1e-3}}
    expected = started(mapping, tmp_path, "whole")
    with monkeypatch.context() as patch, pytest.raises(StoppedError):
        stop_after(patch, 3, during)
        started(mapping, tmp_path, "stopped")
    assert files_of(resume(tmp_path / "rl4lm_exps" / "stopped", quiet=True)) == files_of(expected)
    rollouts = [json.loads(line) for line in (expected / "rollout_info.jsonl").read_text().splitlines()]
    n_passes = [line["rollout_info/sampler/n_passes"] for line in rollouts]
    assert n_passes == pytest.approx([4 * iteration / 30 for iteration in range(1, N_ITERS + 1)])


@pytest.mark.parametrize("vec_env", ["dummy", "subproc"])
def test_environments_that_step_go_on_with_their_prompts(vec_env, whole, tmp_path, monkeypatch, tiny_gpt2_dir):
    mapping = blocks("causal", tiny_gpt2_dir, "ppo")
    mapping["reward_fn"] = {"id": "sentiment"}
    mapping["env"] |= {"vec_env": vec_env, "n_envs": 2}
    mapping["alg"]["args"] = ALGORITHMS["ppo"] | {"n_steps": 40}
    expected = started(mapping, tmp_path, "whole")
    with monkeypatch.context() as patch, pytest.raises(StoppedError):
        stop_after(patch, 3, "rollout")
        started(mapping, tmp_path)
    assert files_of(resume(tmp_path / "rl4lm_exps" / "run", quiet=True)) == files_of(expected)


def test_what_a_reward_draws_in_a_process_of_its_own_comes_from_the_seed(tmp_path, monkeypatch, tiny_gpt2_dir):
    mapping = blocks("causal", tiny_gpt2_dir, "ppo")
    mapping["reward_fn"] = {"id": f"{__name__}:Drawing"}
    mapping["env"] |= {"vec_env": "subproc", "n_envs": 1}
    mapping["train_evaluation"]["n_iters"] = 2
    expected = started(mapping, tmp_path, "whole")
    with monkeypatch.context() as patch, pytest.raises(StoppedError):
        stop_after(patch, 1, "rollout")
        started(mapping, tmp_path)
    assert files_of(resume(tmp_path / "rl4lm_exps" / "run", quiet=True)) == files_of(expected)
    rewards = [json.loads(line) for line in (expected / "rollout_info.jsonl").read_text().splitlines()]
    assert rewards[0]["rollout_info/ep_rew"] != rewards[1]["rollout_info/ep_rew"]


def test_adapters_shared_critics_and_other_options_go_on_too(tmp_path, monkeypatch, tiny_gpt2_dir):
    mapping = blocks("causal", tiny_gpt2_dir, "nlpo")
    mapping["alg"]["policy"]["args"] |= {"peft": {"r": 2}, "critic": "shared", "mask_ema": 0.5}
    mapping["alg"]["args"] = ALGORITHMS["nlpo"] | {
        "learning_rate_schedule": "cosine",
        "warmup_iterations": 4,
        "length_sorted_minibatches": True,
    }
    expected = started(mapping, tmp_path, "whole")
    with monkeypatch.context() as patch, pytest.raises(StoppedError):
        stop_after(patch, 3, "files")
        started(mapping, tmp_path)
    assert files_of(resume(tmp_path / "rl4lm_exps" / "run", quiet=True)) == files_of(expected)


@pytest.fixture(scope="module")
def ended(tmp_path_factory, tiny_gpt2_dir):
    """The folder of a run that ended in its last iteration; checkpoints after 2 and 4. Only to be read or copied."""
    base = tmp_path_factory.mktemp("ended")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(StoppedError):
        stop_after(patch, 4, "rollout")
        started(blocks("causal", tiny_gpt2_dir, "ppo"), base)
    return base / "rl4lm_exps" / "run"


@pytest.fixture
def stopped(ended, tmp_path):
    return shutil.copytree(ended, tmp_path / "rl4lm_exps" / "run")


def test_an_older_checkpoint_by_name_leads_to_the_same_end(stopped, whole):
    folder = resume(stopped / "checkpoints" / "iteration_00002", quiet=True)
    assert files_of(folder) == files_of(whole("causal", "ppo")[1])


def test_killed_while_it_goes_back_it_goes_on_from_there(stopped, monkeypatch):
    older, original = stopped / "checkpoints" / "iteration_00002", Tracker.cut_files

    def cut_and_end(self, sizes):
        original(self, sizes)
        raise StoppedError

    with monkeypatch.context() as patch, pytest.raises(StoppedError):
        patch.setattr(Tracker, "cut_files", cut_and_end)
        resume(older, quiet=True)
    assert resumption(stopped).checkpoint == older


def test_a_finished_run_only_ends_again(whole, tmp_path):
    _, expected = whole("causal", "ppo")
    copy = tmp_path / "project" / "copy"
    shutil.copytree(expected, copy)
    assert files_of(resume(copy, quiet=True)) == files_of(expected)


def test_more_iterations_go_on_where_the_run_was_finished(whole, tmp_path):
    mapping, expected = whole("causal", "ppo")
    copy = tmp_path / "project" / "copy"
    shutil.copytree(expected, copy)
    folder = resume(copy, overrides=["train_evaluation.n_iters=7"], quiet=True)
    mapping = {**mapping, "train_evaluation": {**mapping["train_evaluation"], "n_iters": 7}}
    longer = files_of(started(mapping, tmp_path, "longer"))
    found = files_of(folder)
    for name in ("model/model.safetensors", "rollout_info.jsonl", "training_info.jsonl"):
        assert found[name] == longer[name]


@pytest.mark.parametrize("damage", ["cut", "flip", "missing", "manifest", "foreign"])
def test_a_damaged_checkpoint_is_refused_and_the_older_one_offered(stopped, damage):
    newest = stopped / "checkpoints" / "iteration_00004"
    tensors = newest / checkpoints.TENSORS
    content = bytearray(tensors.read_bytes())
    if damage == "cut":
        tensors.write_bytes(content[:-7])
    elif damage == "flip":
        content[len(content) // 2] ^= 1
        tensors.write_bytes(content)
    elif damage == "missing":
        tensors.unlink()
    elif damage == "manifest":
        (newest / checkpoints.MANIFEST).write_text("{")
    else:
        manifest = json.loads((newest / checkpoints.MANIFEST).read_text())
        (newest / checkpoints.MANIFEST).write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(CheckpointError) as caught:
        resume(stopped, quiet=True)
    assert "iteration_00004" in str(caught.value)
    assert f"an older one is intact: --resume {stopped / 'checkpoints' / 'iteration_00002'}" in str(caught.value)


def test_what_would_make_it_another_run_is_refused_with_the_differences(stopped):
    with raises_at("alg.args.learning_rate", "seed", mentions="0.001"):
        resumption(stopped, ["alg.args.learning_rate=0.1", "seed=4", "train_evaluation.n_iters=9"])


def test_differences_are_found_within_lists(tmp_path, whole):
    run = tmp_path / "project" / "copy"
    shutil.copytree(whole("causal", "ppo")[1], run)
    with raises_at("train_evaluation.metrics.0.name", mentions="'words'"):
        resumption(run, ["train_evaluation.metrics.0.name=words"])


def test_the_length_of_a_scheduled_run_cannot_change(tmp_path, monkeypatch, tiny_gpt2_dir):
    mapping = blocks("causal", tiny_gpt2_dir, "ppo")
    mapping["alg"]["args"] = ALGORITHMS["ppo"] | {"learning_rate_schedule": "linear"}
    with monkeypatch.context() as patch, pytest.raises(StoppedError):
        stop_after(patch, 2, "rollout")
        started(mapping, tmp_path)
    with raises_at("train_evaluation.n_iters"):
        resumption(tmp_path / "rl4lm_exps" / "run", ["train_evaluation.n_iters=9"])


def test_another_model_under_the_same_name_is_refused(tmp_path, tiny_gpt2_dir, monkeypatch):
    from safetensors.torch import load_file, save_file

    model = tmp_path / "model"
    shutil.copytree(tiny_gpt2_dir, model)
    with monkeypatch.context() as patch, pytest.raises(StoppedError):
        stop_after(patch, 2, "rollout")
        started(blocks("causal", model, "ppo"), tmp_path)
    weights = {name: weight + 0.01 for name, weight in load_file(model / "model.safetensors").items()}
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"iteration_00002|iteration_00001|interrupted"):
        resume(tmp_path / "rl4lm_exps" / "run", quiet=True)


def test_the_newest_two_keep_their_training_state_and_all_their_model(whole, tmp_path, tiny_gpt2_dir):
    mapping = blocks("causal", tiny_gpt2_dir, "ppo")
    mapping["train_evaluation"]["save_every"] = 1
    folder = started(mapping, tmp_path)
    found = sorted((folder / "checkpoints").iterdir())
    assert [path.name for path in found] == [f"iteration_{k:05d}" for k in range(1, N_ITERS + 1)]
    assert [(path / checkpoints.TENSORS).is_file() for path in found] == [False, False, False, True, True]
    assert all((path / "model.safetensors").is_file() for path in found)
    read_checkpoint(found[-1])


def test_nothing_to_go_on_from_is_said(tmp_path, capsys, whole):
    assert main(["train", "--resume", str(tmp_path)]) == 1
    assert "is not a run folder" in capsys.readouterr().err
    _, expected = whole("causal", "ppo")
    copy = tmp_path / "project" / "copy"
    shutil.copytree(expected, copy)
    shutil.rmtree(copy / "checkpoints")
    assert main(["train", "--resume", str(copy)]) == 1
    error = capsys.readouterr().err
    assert "no checkpoint to resume from" in error and "Traceback" not in error


def test_two_processes_never_write_to_one_folder(stopped, capsys):
    code = (
        "import sys, pathlib; from rl4lms_like.tracking.run_folder import hold; "
        "lock = hold(pathlib.Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(stopped)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    before = files_of(stopped)
    try:
        assert other.stdout.readline() == "held\n"
        assert main(["train", "--resume", str(stopped)]) == 1
        assert "another process is writing to" in capsys.readouterr().err
        assert files_of(stopped) == before
    finally:
        other.communicate("")
    assert files_of(resume(stopped, quiet=True))["config.json"] == before["config.json"]


def test_a_run_that_ends_early_says_how_it_goes_on(ended):
    log = (ended / "log.txt").read_text()
    assert f"to resume after iteration_00004: rl4lms-like train --resume {ended}" in log
    saved = sorted(path.name for path in (ended / "checkpoints").iterdir())
    assert saved == ["iteration_00002", "iteration_00004"], "the last holds all of it already"


def test_where_the_memory_ran_out_the_keys_that_need_less_of_it_may_change(tmp_path, monkeypatch, tiny_gpt2_dir):
    """On the way `micro_batch_size` and `gradient_checkpointing` change; numbers then differ by rounding only."""
    from rl4lms_like.policies.base import LMActorCriticPolicy

    mapping = blocks("causal", tiny_gpt2_dir, "ppo")
    mapping["train_evaluation"] |= {"n_iters": 2, "eval_every": 9}
    roomy = started(mapping, tmp_path, "roomy")
    original = LMActorCriticPolicy.evaluate_actions

    def evaluate_actions(self, episodes, actions=None):  # without actions a rollout is scored
        keeps_activations = torch.is_grad_enabled() and not self.training  # making them anew needs that mode
        if actions is not None and (len(actions) > 20 or keeps_activations):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return original(self, episodes, actions)

    monkeypatch.setattr(LMActorCriticPolicy, "evaluate_actions", evaluate_actions)
    with pytest.raises(OutOfMemoryError):
        started(mapping, tmp_path)
    folder = tmp_path / "rl4lm_exps" / "run"
    message = "add --set alg.args.micro_batch_size=... or --set alg.policy.args.gradient_checkpointing=...; other keys"
    assert message in (folder / "log.txt").read_text()
    with pytest.raises(OutOfMemoryError):
        resume(folder, overrides=["alg.args.micro_batch_size=16"], quiet=True)
    mapping["alg"]["args"] = ALGORITHMS["ppo"] | {"micro_batch_size": 16}
    mapping["alg"]["policy"]["args"]["gradient_checkpointing"] = True
    assert started(mapping, tmp_path) == folder
    log = (folder / "log.txt").read_text()
    assert "alg.args.micro_batch_size changes from null to 16: from here on, results may differ" in log
    assert "alg.policy.args.gradient_checkpointing changes from null to true" in log
    assert json.loads((folder / "config.json").read_text())["alg"]["args"]["micro_batch_size"] == 16
    numbers, expected = (
        [json.loads(line) for line in (run / "training_info.jsonl").read_text().splitlines()] for run in (folder, roomy)
    )
    for line, whole in zip(numbers, expected, strict=True):
        for key in ("ppo/loss", "ppo/approx_kl", "train/grad_norm", "train/n_updates"):
            assert line[key] == pytest.approx(whole[key], rel=1e-3, abs=1e-6)


def test_the_docs_page_names_every_key_that_may_change():
    page = (REPOSITORY / "docs" / "resume.md").read_text(encoding="utf-8")
    named = {name for words in re.findall(r"`([\w.]+)`", page) for name in (words, words.rpartition(".")[2])}
    assert {key.rpartition(".")[2] for key in MAY_CHANGE} <= named


def test_a_run_that_goes_on_as_it_was_is_told_of_no_rounding():
    before = {"n_threads": 2, "alg": {"args": {}, "policy": {"args": {}}}}
    explicit = {"args": {"micro_batch_size": None}, "policy": {"args": {"gradient_checkpointing": False}}}
    assert rounding_notices(before, {**before, "alg": explicit}) == []
    assert [notice.split()[0] for notice in rounding_notices(before, {**before, "n_threads": 3})] == ["n_threads"]


@pytest.mark.slow
def test_killed_at_any_moment_it_goes_on_to_the_same_end(whole, tmp_path, tiny_gpt2_dir):
    """SIGKILL, in its own process, at moments spread over the run; the commands of a user."""
    mapping, expected = whole("causal", "ppo")
    mapping["train_evaluation"]["save_every"] = 1
    expected = started(mapping, tmp_path, "whole")
    config = tmp_path / "config.yml"
    config.write_text(dump_yaml(mapping))
    folder, output = tmp_path / "rl4lm_exps" / "killed", tmp_path / "output.txt"
    kills = 0
    for attempt in range(12):
        found = checkpoints.checkpoints_in(folder / "checkpoints")
        if not found and folder.exists():
            shutil.rmtree(folder)
        which = ["--resume", str(folder)] if found else [str(config), "--experiment_name", "killed"]
        process = forked(["train", *which], tmp_path, output)
        n_before = len(found)
        while process.is_alive() and kills < 2:
            if len(checkpoints.checkpoints_in(folder / "checkpoints")) > n_before:
                time.sleep(0.06 * attempt)
                process.kill()
                kills += 1
                break
            time.sleep(0.01)
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL, output.read_text()
    assert kills >= 2
    assert process.exitcode == 0
    assert files_of(folder) == files_of(expected)
