"""Runs that start from the adapters of another run: supervised, preferences, RL, in every order.

What a run saves is loaded as everybody loads it, by transformers or PEFT alone, and continues prompts as the run did.
"""

from __future__ import annotations

import copy
import itertools
import json
import math

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rl4lms_like.config.load import parse_config
from rl4lms_like.offline.trainer import SupervisedTrainer
from rl4lms_like.on_policy.trainer import OnPolicyTrainer
from rl4lms_like.policies.loading import load_model
from rl4lms_like.run import resume, train_config
from tests.offline.preferences.preference_runs import blocks as preference_blocks
from tests.offline.preferences.preference_runs import written
from tests.offline.supervised.test_resume import stopped
from tests.offline.supervised.test_trainer import six_steps
from tests.on_policy.test_best_model import Scripted
from tests.robustness.killed_runs import files_of
from tests.training.resuming.test_resume import StoppedError, stop_after

peft_package = pytest.importorskip("peft")

LORA = {
    "supervised": {"r": 4, "lora_alpha": 16, "target_modules": "all-linear"},
    "dpo": {"r": 2, "lora_alpha": 3, "use_rslora": True},
    "ppo": {"r": 3, "lora_alpha": 9, "target_modules": ["c_proj"]},
}
"""Adapters of the stages, which differ in rank, scale and layers."""


def run(mapping, folder, name):
    return train_config(parse_config(mapping), base_path_to_store_results=folder, experiment_name=name, quiet=True)


@pytest.fixture
def config_of(tiny_config, tmp_path):
    """Return the config of a stage on a model."""

    def make(stage, model, **changes):
        if stage == "supervised":
            mapping = six_steps("causal", model)
            mapping["alg"]["training_args"] |= {"learning_rate": 3e-2, "save_steps": 2}
        elif stage == "ppo":
            mapping = copy.deepcopy(tiny_config)
            mapping["tokenizer"]["model_name"] = str(model)
            mapping["alg"]["args"]["learning_rate"] = 3e-2
            mapping["alg"]["policy"]["args"] |= {"model_name": str(model), "peft": LORA["ppo"], **changes}
            return mapping
        else:
            mapping = preference_blocks(stage, model, written(tmp_path), num_train_epochs=4, learning_rate=0.1)
        mapping["alg"] |= {"peft": LORA.get(stage, LORA["dpo"])} | changes
        return mapping

    return make


def greedy_texts(folder, model):
    """Return what a model writes, with nothing but transformers."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = []
    for prompt in ("The sea is", "Count with me:", "The film in town 0 was"):
        inputs = tokenizer(prompt, return_tensors="pt")
        with torch.no_grad():
            ids = model.eval().generate(
                **inputs, do_sample=False, max_new_tokens=12, pad_token_id=tokenizer.pad_token_id
            )
        texts.append(tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :]))
    return texts


def trained_models(monkeypatch):
    """Record the models in memory at the end of runs."""
    ended = []
    models = {
        OnPolicyTrainer: lambda owner: owner.run.policy.policy_model,
        SupervisedTrainer: lambda owner: owner.run.model,
    }
    for trainer, model_of in models.items():
        original = trainer.train_and_eval

        def train_and_eval(self, original=original, model_of=model_of):
            original(self)
            ended.append(model_of(self))

        monkeypatch.setattr(trainer, "train_and_eval", train_and_eval)
    return ended


@pytest.mark.parametrize("order", list(itertools.permutations(LORA)), ids="-".join)
def test_after_every_stage_plain_loading_gives_the_texts_of_the_run(
    order, config_of, tiny_gpt2_dir, tmp_path, monkeypatch
):
    ended = trained_models(monkeypatch)
    model = tiny_gpt2_dir
    texts = [greedy_texts(tiny_gpt2_dir, AutoModelForCausalLM.from_pretrained(tiny_gpt2_dir))]
    for stage in order:
        folder = run(config_of(stage, model), tmp_path, stage)
        model = folder / "model"
        expected = greedy_texts(model, ended[-1])
        for auto in (AutoModelForCausalLM, peft_package.AutoPeftModelForCausalLM):
            assert greedy_texts(model, auto.from_pretrained(model)) == expected
        texts.append(expected)
        config = json.loads((model / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == str(tiny_gpt2_dir)
    assert texts[0] != texts[1] != texts[2] != texts[3]


@pytest.fixture(scope="module")
def first_stage(tmp_path_factory, tiny_gpt2_dir):
    """The model of a supervised run with adapters."""
    mapping = six_steps("causal", tiny_gpt2_dir)
    mapping["alg"] |= {"peft": LORA["supervised"]}
    mapping["alg"]["training_args"] |= {"learning_rate": 3e-2}
    return run(mapping, tmp_path_factory.mktemp("first"), "first") / "model"


@pytest.mark.parametrize("critic", ["separate", "shared"])
def test_the_best_model_and_checkpoints_of_rl_load_plainly(critic, first_stage, config_of, tmp_path):
    mapping = config_of("ppo", first_stage, critic=critic)
    Scripted.message = [0.0, 0.1, 0.2]
    mapping["train_evaluation"] |= {"metrics": [{"id": f"{Scripted.__module__}:Scripted"}]}
    mapping["train_evaluation"]["keep_best"] = {"metric": "test/scripted", "mode": "max"}
    mapping["train_evaluation"] |= {"n_iters": 2, "eval_every": 1, "save_every": 1}
    folder = run(mapping, tmp_path, "second")
    first = json.loads((folder / "rollout_info.jsonl").read_text().splitlines()[0])
    assert first["rollout_info/kl_div_mean"] == pytest.approx(0, abs=1e-6)
    saved = [folder / "model", folder / "best", *sorted((folder / "checkpoints").glob("iteration_*"))]
    assert len(saved) == 4
    for path in saved:
        check_plain_loading(path, first_stage)


def test_checkpoints_of_preferences_load_plainly_and_their_reference_is_the_first_stage(
    first_stage, config_of, tmp_path
):
    mapping = config_of("dpo", first_stage, merge_on_save=True)
    mapping["alg"]["training_args"] |= {"save_steps": 4}
    folder = run(mapping, tmp_path, "second")
    before = json.loads((folder / "val_split_metrics.jsonl").read_text().splitlines()[0])["metrics"]
    assert before["preference/loss"] == pytest.approx(math.log(2), abs=1e-6)
    for path in (folder / "checkpoints").glob("checkpoint-*"):
        check_plain_loading(path, first_stage)
    assert not (folder / "model" / "adapter_config.json").exists()


def check_plain_loading(path, first_stage):
    """Check that transformers and PEFT load the model that this library loads, which is not that of the first stage."""
    ids = torch.arange(2, 14)[None]
    with torch.no_grad():
        expected = load_model(AutoModelForCausalLM, str(path))[0].eval()(ids).logits
        for auto in (AutoModelForCausalLM, peft_package.AutoPeftModelForCausalLM):
            torch.testing.assert_close(auto.from_pretrained(path).eval()(ids).logits, expected, rtol=0, atol=2e-5)
        first = AutoModelForCausalLM.from_pretrained(first_stage).eval()(ids).logits
    assert (first - expected).abs().max() > 1e-3


def test_the_best_checkpoint_of_a_second_stage_is_its_final_model(first_stage, config_of, tmp_path):
    mapping = config_of("dpo", first_stage)
    mapping["alg"]["training_args"] |= {
        "load_best_model_at_end": True, "metric_for_best_model": "rewards/margins", "greater_is_better": False,
        "eval_strategy": "steps", "eval_steps": 4, "save_steps": 4,
    }  # fmt: skip
    folder = run(mapping, tmp_path, "second")
    best = folder / "checkpoints" / "checkpoint-4" / "adapter_model.safetensors"
    assert (folder / "model" / "adapter_model.safetensors").read_bytes() == best.read_bytes()


def test_a_reward_model_of_a_second_stage_chooses_its_best_checkpoint(first_stage, config_of, tmp_path):
    mapping = config_of("reward_model", first_stage, merge_on_save=True)
    mapping["alg"]["training_args"] |= {
        "load_best_model_at_end": True, "metric_for_best_model": "rewards/margins", "greater_is_better": False,
        "eval_strategy": "steps", "eval_steps": 4, "save_steps": 4,
    }  # fmt: skip
    folder = run(mapping, tmp_path, "second")
    ids = torch.arange(2, 14)[None]
    best = AutoModelForSequenceClassification.from_pretrained(folder / "checkpoints" / "checkpoint-4", num_labels=1)
    best.load_state_dict(load_file(folder / "checkpoints" / "checkpoint-4" / "head.safetensors"), strict=False)
    final = AutoModelForSequenceClassification.from_pretrained(folder / "model")
    best.config.pad_token_id = final.config.pad_token_id
    with torch.no_grad():
        torch.testing.assert_close(best.eval()(ids).logits, final.eval()(ids).logits, rtol=0, atol=2e-5)


def test_a_stopped_second_stage_of_preferences_is_resumed_to_the_same_files(
    first_stage, config_of, tmp_path, monkeypatch
):
    mapping = config_of("dpo", first_stage)
    mapping["alg"]["training_args"] |= {"save_steps": 2, "load_best_model_at_end": True, "eval_strategy": "steps"}
    mapping["alg"]["training_args"] |= {"eval_steps": 2}
    expected = run(mapping, tmp_path, "whole")
    folder = stopped(mapping, tmp_path, 5, monkeypatch)
    assert resume(folder, quiet=True) == folder
    assert files_of(folder) == files_of(expected)


@pytest.mark.parametrize("critic", ["separate", "shared"])
def test_a_stopped_second_stage_of_rl_is_resumed_to_the_same_files(
    critic, first_stage, config_of, tmp_path, monkeypatch
):
    mapping = config_of("ppo", first_stage, critic=critic)
    mapping["train_evaluation"] |= {"n_iters": 4, "save_every": 2}
    expected = run(mapping, tmp_path, "whole")
    with monkeypatch.context() as patch, pytest.raises(StoppedError):
        stop_after(patch, 3, "files")
        run(mapping, tmp_path, "run")
    folder = tmp_path / "rl4lm_exps" / "run"
    assert resume(folder, quiet=True) == folder
    assert files_of(folder) == files_of(expected)
