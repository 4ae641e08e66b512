"""Averaged weights are a plain recurrence over the weights of saved checkpoints, are saved, evaluated and resumed."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from rl4lms_like.config.load import parse_config
from rl4lms_like.inference import evaluate_run
from rl4lms_like.offline.assemble_preferences import assemble_preferences
from rl4lms_like.offline.assemble_supervised import assemble_supervised
from rl4lms_like.run import resume
from rl4lms_like.system.errors import CheckpointError
from tests.config_errors import raises_at
from tests.offline.preferences import preference_runs
from tests.offline.supervised.test_resume import started, stopped
from tests.offline.supervised.test_trainer import six_steps
from tests.robustness.killed_runs import files_of
from tests.training.resuming.test_resume import StoppedError, stop_after

EMA = {"decay": 0.7, "every": 2}
BEMA = {"decay": None, "every": 1, "ema_power": 0.6, "bias_power": 0.3, "lag": 2.0}


def rl(average, model, tmp_path):
    """Four iterations, with a checkpoint after each."""
    made = {
        "tokenizer": {"model_name": str(model)},
        "reward_fn": {"id": "increasing_numbers", "args": {"min_tokens": 8}},
        "datapool": {"id": "dummy_pool", "args": {"prompt": "Count with me:", "n_samples": 6}},
        "env": {"n_envs": 4, "args": {"max_prompt_length": 16, "max_episode_length": 8, "terminate_on_eos": True}},
        "alg": {
            "id": "ppo",
            "args": {"n_steps": 8, "batch_size": 16, "n_epochs": 2, "learning_rate": 1e-2},
            "kl_div": {"coeff": 0.01},
            "policy": {"id": "causal_lm_actor_critic_policy", "args": {
                "model_name": str(model), "value_head_init": "default",
                "generation_kwargs": {"do_sample": True, "top_k": 0, "max_new_tokens": 8},
            }},
        },
        "train_evaluation": {"eval_batch_size": 4, "n_iters": 4, "eval_every": 4, "save_every": 1, "average": average},
    }  # fmt: skip
    return made


def supervised(average, model, tmp_path):
    """Six steps, with a checkpoint after each."""
    made = six_steps("causal", model)
    made["alg"]["training_args"] |= {"save_steps": 1, "save_total_limit": None}
    made["train_evaluation"]["average"] = average
    return made


def preferences(average, model, tmp_path):
    made = preference_runs.blocks("dpo", model, preference_runs.written(tmp_path))
    made["alg"]["training_args"] |= {"save_steps": 1, "save_strategy": "steps"}
    made["train_evaluation"]["average"] = average
    return made


RUNS = {"rl": rl, "supervised": supervised, "preference": preferences}


def weights_of(folder):
    """Float64, by name; of adapters, their factors."""
    file = folder / "adapter_model.safetensors"
    return {name: w.double() for name, w in load_file(file if file.is_file() else folder / "model.safetensors").items()}


def recurrence(average, weights):
    """The average of w_0 ... w_T, in float64."""
    mean = {name: weight.clone() for name, weight in weights[0].items()}
    result = mean
    for t, of_step in enumerate(weights[1:], 1):
        if t % average.get("every", 1):
            continue
        beta = 1 - average["decay"] if average["decay"] else (average["lag"] + t) ** -average["ema_power"]
        mean = {name: (1 - beta) * mean[name] + beta * of_step[name] for name in mean}
        result = mean
        if "bias_power" in average:
            alpha = (average["lag"] + t) ** -average["bias_power"]
            result = {name: mean[name] + alpha * (of_step[name] - weights[0][name]) for name in mean}
    return result


@pytest.mark.parametrize("average", [EMA, BEMA], ids=["ema", "bema"])
@pytest.mark.parametrize("kind", RUNS)
def test_it_is_the_recurrence_over_the_saved_checkpoints(kind, average, tiny_gpt2_dir, tmp_path):
    mapping = RUNS[kind](average, tiny_gpt2_dir, tmp_path)
    folder = started(mapping, tmp_path)
    name = "iteration_{:05d}" if kind == "rl" else "checkpoint-{}"
    n_steps = 4 if kind == "rl" else 6
    weights = [weights_of(tiny_gpt2_dir)]
    weights += [weights_of(folder / "checkpoints" / name.format(step)) for step in range(1, n_steps + 1)]
    saved = weights_of(folder / "average")
    expected = recurrence(average, weights)
    assert saved.keys() == expected.keys()
    for key, weight in expected.items():
        assert torch.allclose(saved[key], weight, atol=1e-6, rtol=1e-6), key
    assert any(not torch.allclose(saved[key], weights[-1][key], atol=1e-4) for key in saved), "other than the last"
    assert AutoModelForCausalLM.from_pretrained(folder / "average").config.model_type == "gpt2"


@pytest.mark.parametrize("kind", RUNS)
def test_the_trained_model_is_that_of_a_run_without(kind, tiny_gpt2_dir, tmp_path):
    mapping = RUNS[kind](EMA, tiny_gpt2_dir, tmp_path)
    folder = started(mapping, tmp_path)
    without = started(RUNS[kind](None, tiny_gpt2_dir, tmp_path), tmp_path, "without")
    assert weights_file(folder) == weights_file(without)
    own, other = files_of(folder), files_of(without)
    for file in ("training_info.jsonl", "val_split_metrics.jsonl"):
        assert own.get(file) == other.get(file), file

    # The averaged model is evaluated once, after the training, under the names of its own splits.
    (averaged,) = own["average_val_split_metrics.jsonl"]
    last = own["val_split_metrics.jsonl"][-1]
    assert averaged["epoch"] == last["epoch"] and averaged["metrics"].keys() == last["metrics"].keys()
    if kind == "preference":
        assert averaged["metrics"]["preference/loss"] != last["metrics"]["preference/loss"]


def test_the_command_evaluates_the_averaged_model(tiny_gpt2_dir, tmp_path):
    folder = started(rl(EMA, tiny_gpt2_dir, tmp_path) | {"seed": 3}, tmp_path)
    (logged,) = files_of(folder)["average_test_split_metrics.jsonl"]
    scores = evaluate_run(folder / "average", split="test", seed=3, batch_size=4)  # those of the run
    assert scores == pytest.approx(logged["metrics"])


def test_an_average_that_was_never_updated_is_reported_and_not_saved(tiny_gpt2_dir, tmp_path):
    folder = started(supervised({"every": 7}, tiny_gpt2_dir, tmp_path), tmp_path)
    assert "the run ended before the first update" in (folder / "log.txt").read_text()
    assert not (folder / "average").exists() and not list(folder.glob("average_*"))


def test_an_average_cannot_be_added_to_a_run_that_has_begun(tiny_gpt2_dir, tmp_path, monkeypatch):
    mapping = rl(None, tiny_gpt2_dir, tmp_path)
    with monkeypatch.context() as patch, pytest.raises(StoppedError):
        stop_after(patch, 2, "files")
        started(mapping, tmp_path)
    folder = tmp_path / "rl4lm_exps" / "run"
    changes = {"values": {"train_evaluation.average": {"decay": 0.5}}, "accepted": ["train_evaluation.average"]}
    with pytest.raises(CheckpointError, match="no averaged weights"):
        resume(folder, quiet=True, **changes)


@pytest.mark.parametrize("kind", ["supervised", "preference"])
def test_an_offline_average_begins_on_the_device_of_the_training(kind, tiny_gpt2_dir, tmp_path, monkeypatch):
    """The Trainer moves the model only after it is built, with weights of which the average then has no copy."""
    moved = []
    monkeypatch.setattr(nn.Module, "to", lambda module, device: moved.append((module, device)) or module)
    config = parse_config(RUNS[kind](EMA, tiny_gpt2_dir, tmp_path))
    run = assemble_supervised(config) if kind == "supervised" else assemble_preferences(config)
    assert (run.model, torch.device("cpu")) in moved


def weights_file(folder):
    return (folder / "model" / "model.safetensors").read_bytes()


def test_factors_of_adapters_are_averaged(tiny_gpt2_dir, tmp_path):
    mapping = supervised(BEMA, tiny_gpt2_dir, tmp_path)
    mapping["alg"]["peft"] = {"r": 2, "lora_alpha": 4, "target_modules": ["c_attn"]}
    folder = started(mapping, tmp_path)
    weights = [weights_of(folder / "checkpoints" / f"checkpoint-{step}") for step in range(1, 7)]

    # The factors before training: B is 0, A does not change in the first step because its gradient is B's.
    before = {name: torch.zeros_like(w) if "lora_B" in name else w for name, w in weights[0].items()}
    saved = weights_of(folder / "average")
    for key, weight in recurrence(BEMA, [before, *weights]).items():
        assert torch.allclose(saved[key], weight, atol=1e-6, rtol=1e-6), key


@pytest.mark.parametrize("average", [EMA, BEMA], ids=["ema", "bema"])
@pytest.mark.parametrize("during", ["rollout", "files"])
def test_a_stopped_rl_run_goes_on_to_the_same_bytes(during, average, tiny_gpt2_dir, tmp_path, monkeypatch):
    mapping = rl(average, tiny_gpt2_dir, tmp_path)
    mapping["train_evaluation"] |= {"save_every": 2, "eval_every": 1, "metrics": [{"id": "length"}]}
    expected = started(mapping, tmp_path, "whole")
    with monkeypatch.context() as patch, pytest.raises(StoppedError):
        stop_after(patch, 3, during)
        started(mapping, tmp_path)
    folder = tmp_path / "rl4lm_exps" / "run"
    assert files_of(resume(folder, quiet=True)) == files_of(expected)
    assert json.loads((expected / "average_test_split_metrics.jsonl").read_text())["epoch"] == 4


@pytest.mark.parametrize("kind", ["supervised", "preference"])
def test_a_stopped_offline_run_goes_on_to_the_same_bytes(kind, tiny_gpt2_dir, tmp_path, monkeypatch):
    mapping = RUNS[kind](BEMA, tiny_gpt2_dir, tmp_path)
    mapping["alg"]["training_args"]["save_steps"] = 2
    expected = started(mapping, tmp_path, "whole")

    folder = stopped(mapping, tmp_path, 3, monkeypatch)
    assert files_of(resume(folder, quiet=True)) == files_of(expected)


@pytest.mark.parametrize(("average", "path"), [
    ({"decay": 1.0}, "decay"),
    ({"decay": 0.9, "ema_power": 0.4}, "ema_power"),
    ({"lag": 3.0}, "lag"),
    ({"every": 5}, "every"),
])  # fmt: skip
def test_what_has_no_effect_is_an_error(average, path, tiny_gpt2_dir, tmp_path):
    with raises_at(f"train_evaluation.average.{path}"):
        parse_config(rl(average, tiny_gpt2_dir, tmp_path))


def test_split_weights_cannot_be_averaged(tiny_gpt2_dir, tmp_path):
    with raises_at("train_evaluation.average"):
        parse_config(rl(EMA, tiny_gpt2_dir, tmp_path) | {"distributed": {"strategy": "fsdp"}})
