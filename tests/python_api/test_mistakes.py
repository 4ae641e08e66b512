"""Mistakes in Python: one message that names the argument and the way out, before a model is loaded."""

from __future__ import annotations

import datetime
import math
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from rl4lms_like import Run
from rl4lms_like.system.errors import ConfigError
from tests.builders import LowTokens
from tests.config_errors import raises_at

PROMPTS = ["Count with me: 1", "Count with me: 2"]
PAIRS = [{"prompt": "a", "completion": " b"}]


def length(responses):
    return [float(len(response)) for response in responses]


def loaded(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def quantised(folder):
    model = loaded(folder)
    model.config.quantization_config = {"quant_method": "bitsandbytes"}
    return model


# Name -> arguments of Run in place of the valid ones, the argument that the only message names, and what it mentions.
MISTAKES = {
    "unknown setting": ({"learnig_rate": 1e-5}, "learnig_rate", "learning_rate"),
    "text for a number": ({"learning_rate": "fast"}, "learning_rate", "number"),
    "negative number": ({"learning_rate": -1e-5}, "learning_rate", "above 0"),
    "NaN": ({"learning_rate": math.nan}, "learning_rate", "nan"),
    "fraction for a count": ({"n_iters": 0.5}, "n_iters", "whole number"),
    "misspelled algorithm": ({"algorithm": "gropo"}, "algorithm", "'grpo'"),
    "no model": ({"model": None}, "model", "folder"),
    "missing folder": ({"model": "./nowhere"}, "model", "no such folder"),
    "module for a model": ({"model": torch.nn.Linear(1, 1)}, "model", "Linear"),
    "adapters": ({"model": lambda folder: get_peft_model(loaded(folder), LoraConfig())}, "model", "merge_and_unload"),
    "quantised model": ({"model": quantised}, "model", "quantization_config"),
    "loaded without tokenizer": ({"model": loaded}, "tokenizer", "tokenizer="),
    "number for a tokenizer": ({"tokenizer": 5}, "tokenizer", "5"),
    "no prompts": ({"prompts": None}, "prompts", "missing"),
    "empty list": ({"prompts": []}, "prompts", "at least one"),
    "one text": ({"prompts": "Tell me"}, "prompts", "['Tell me']"),
    "number as a prompt": ({"prompts": ["a", 5]}, "prompts", "entry 1"),
    "NaN in a column": ({"prompts": [{"prompt": "a", "x": math.nan}]}, "prompts", "'x'"),
    "date in a column": ({"prompts": [{"prompt": "a", "day": datetime.date.today()}]}, "prompts", "'day'"),
    "no column of prompts": ({"prompts": [{"question": "a"}]}, "prompts", "question"),
    "unequal columns": ({"prompts": [{"prompt": "a", "b": 1}, {"prompt": "c"}]}, "prompts", "entry 1"),
    "one row": ({"prompts": {"prompt": "a"}}, "prompts", "train"),
    "eval prompts twice": ({"prompts": {"train": ["a"], "val": ["b"]}, "eval_prompts": ["c"]}, "eval_prompts", "twice"),
    "eval prompts of a pool": ({"prompts": "sums", "eval_prompts": ["c"]}, "eval_prompts", "splits"),
    "no reward": ({"reward": None}, "reward", "function"),
    "class": ({"reward": LowTokens}, "reward", "LowTokens"),
    "number as a reward": ({"reward": 3}, "reward", "3"),
    "misspelled reward": ({"reward": "sentimnt"}, "reward.id", "'sentiment'"),
    "misspelled second reward": ({"reward": [length, "sentimnt"]}, "reward.1.id", "'sentiment'"),
    "too few weights": ({"reward": [length, length], "reward_weights": [1.0]}, "reward_weights", "2"),
    "weights of one reward": ({"reward_weights": [1.0]}, "reward_weights", "one reward"),
    "misspelled metric": ({"metrics": ["lenght"]}, "metrics.0.id", "'length'"),
    "both units": ({"n_episodes": 64, "n_steps": 128}, "n_episodes", "n_steps"),
    "no multiple of a group": ({"n_episodes": 30}, "n_episodes", "8"),
    "two meanings": ({"target_kl": 0.1}, "target_kl", "kl_target"),
    "length of what": ({"max_length": 10}, "max_length", "max_new_tokens"),
    "given twice": ({"n_envs": 8, "env": {"n_envs": 8}}, "n_envs", "'env'"),
    "number for a block": ({"env": 8}, "env", "dictionary"),
    "algorithm in a block": ({"alg": {"id": "ppo"}}, "alg.id", "algorithm"),
    "setting of another kind": ({"num_train_epochs": 2}, "num_train_epochs", "given texts"),
    "rewards for dpo": ({"algorithm": "dpo", "data": PAIRS, "prompts": None}, "reward", "data"),
    "folder": ({"folder": 3}, "folder", "3"),
    "two names of a split": ({"prompts": {"train": ["a"], "validation": ["b"], "dev": ["c"]}}, "prompts", "'dev'"),
    "numbers as keys": ({"prompts": [{"prompt": "a", "x": [{1: 2}]}]}, "prompts", "'x' of entry 0 has the key 1"),
    "tuple in a column": ({"prompts": [{"prompt": "a", "x": (1, 2)}]}, "prompts", "'x' of entry 0"),
    "triple as a reward": ({"reward": [(length, 1, 2)]}, "reward", "pairs"),
    "number among rewards": ({"reward": [length, 3]}, "reward", "3"),
    "text for a policy": ({"alg": {"policy": "x"}}, "alg.policy", "mapping"),
    "settings twice": ({"max_new_tokens": 3, "generation_kwargs": {"max_new_tokens": 3}}, "max_new_tokens", "twice"),
}
OFFLINE_MISTAKES = {
    "column of pairs": ({"algorithm": "dpo", "data": PAIRS}, "data", "'chosen'"),
    "no text to learn": ({"algorithm": "sft", "data": ["a", "b"]}, "data", "reference_column"),
    "two meanings": ({"algorithm": "sft", "data": PAIRS, "use_cache": True}, "use_cache", "training_args"),
    "iterations": ({"algorithm": "sft", "data": PAIRS, "n_iters": 3}, "n_iters", "rollouts"),
    "list of unknown columns": ({"algorithm": "sft", "data": PAIRS, "reference_column": ["a"]}, "data", "'a'"),
    "frame without a column": ({"algorithm": "sft", "data": pd.DataFrame({"body": ["a"]})}, "data", "body"),
}


@pytest.fixture
def loads(monkeypatch):
    """Models whose weights are loaded from a folder."""
    names = []
    load = PreTrainedModel.from_pretrained.__func__

    def record(cls, name, *args, **kwargs):
        if kwargs.get("device_map") != "meta":  # there, only names and shapes of weights are read
            names.append(name)
        return load(cls, name, *args, **kwargs)

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", classmethod(record))
    return names


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_message_that_names_the_argument(mistake, tiny_gpt2_dir, loads):
    wrong, argument, mentioned = MISTAKES[mistake]
    given = {"model": tiny_gpt2_dir, "prompts": PROMPTS, "reward": length} | wrong
    if callable(given["model"]) and not isinstance(given["model"], torch.nn.Module):
        given["model"] = given["model"](tiny_gpt2_dir)
    loads.clear()
    with pytest.raises(ConfigError) as caught:
        Run(**given)
    (issue,) = caught.value.issues
    assert issue.path == argument and mentioned in issue.message
    assert str(caught.value).startswith("1 error in the arguments of Run:\n")
    assert loads == []


@pytest.mark.parametrize("mistake", OFFLINE_MISTAKES)
def test_so_is_one_in_a_run_that_learns_from_data(mistake, tiny_gpt2_dir, loads):
    wrong, argument, mentioned = OFFLINE_MISTAKES[mistake]
    with pytest.raises(ConfigError) as caught:
        Run(tiny_gpt2_dir, **wrong)
    (issue,) = caught.value.issues
    assert issue.path == argument and mentioned in issue.message
    assert loads == []


def misnamed(responses, topik):
    return [0.0] * len(responses)


# Found where the data or the models are read, also before a model is loaded.
LATER = {
    "parameter that is no column": ({"reward": misnamed}, "reward", "'topic'"),
    "function of nothing": ({"reward": lambda: 3}, "reward.args", "responses"),
    "device": ({"device": "gpu"}, "device", "cuda"),
    "too long": ({"max_new_tokens": 500}, "max_prompt_length, max_new_tokens", "128 positions"),
}


@pytest.mark.parametrize("mistake", LATER)
def test_what_only_the_data_show_is_found_before_a_model_is_loaded(mistake, tiny_gpt2_dir, loads, tmp_path):
    wrong, argument, mentioned = LATER[mistake]
    rows = [{"prompt": prompt, "topic": "numbers"} for prompt in PROMPTS]
    given = {"prompts": rows, "reward": length, "folder": tmp_path / "a" / "run"} | wrong
    run = Run(tiny_gpt2_dir, **given)
    for act in (run.check, run.train):
        with pytest.raises(ConfigError) as caught:
            act()
        (issue,) = caught.value.issues
        assert issue.path == argument and mentioned in issue.message
    assert not (tmp_path / "a" / "run").exists()
    assert loads == []


def test_the_name_of_a_file_is_no_config():
    with raises_at("config", mentions="Run.from_file('x.yml')"):
        Run(config="x.yml")


# Setting of TRL -> what Run has in its place.
OF_TRL = {
    "num_generations": "group_size",
    "epsilon": "clip_range",
    "beta": "kl_coeff",
    "lora_r": "peft",
    "output_dir": "folder",
    "max_completion_length": "max_new_tokens",
    "num_train_epochs": "n_iters",
    "reward_funcs": "reward",
    "report_to": "train(log_to_wandb=True)",
    "policy_loss_type": "algorithm",
    "cliprange_value": "clip_range_vf, which this algorithm does not have",
}


@pytest.mark.parametrize("name", OF_TRL)
def test_a_name_of_trl_is_answered_with_the_argument_of_run(name, tiny_gpt2_dir):
    with pytest.raises(ConfigError) as caught:
        Run(tiny_gpt2_dir, PROMPTS, length, **{name: 1})
    (issue,) = caught.value.issues
    assert issue.path == name and f"the equivalent is {OF_TRL[name]}" in issue.message


@pytest.mark.parametrize(("name", "argument"), [("rpo_alpha", "sft_weight"), ("output_dir", "folder")])
def test_so_is_one_in_a_run_with_preferences(name, argument, tiny_gpt2_dir):
    pairs = [{"prompt": "a", "chosen": " b", "rejected": " c"}]
    with pytest.raises(ConfigError, match=f"the equivalent is {argument}"):
        Run(tiny_gpt2_dir, data=pairs, algorithm="dpo", **{name: 1})


GENERATIONS = {
    "a row": ({"prompts": {"prompt": "1"}}, "prompts"),
    "nothing": ({"prompts": None}, "prompts"),
    "misspelled decoding": ({"decoding": "sample"}, "decoding"),
    "no response": ({"n": 0}, "n"),
    "text for a number": ({"n": "2"}, "n"),
    "no token": ({"max_new_tokens": 0}, "max_new_tokens"),
    "cold": ({"temperature": 0}, "temperature"),
    "negative": ({"top_k": -1}, "top_k"),
}


@pytest.mark.parametrize("mistake", GENERATIONS)
def test_so_is_one_in_a_generation(mistake, tiny_gpt2_dir, loads):
    wrong, argument = GENERATIONS[mistake]
    run = Run(tiny_gpt2_dir, PROMPTS, length)
    with pytest.raises(ConfigError) as caught:
        run.generate(**({"prompts": "1"} | wrong))
    (issue,) = caught.value.issues
    assert issue.path == argument and loads == []


@pytest.mark.parametrize(("split", "way_out"), [("val", "give eval_prompts"), ("test", "give prompts={'train'")])
def test_an_evaluation_names_where_a_missing_split_is_given(split, way_out, tiny_gpt2_dir):
    with pytest.raises(ConfigError, match=way_out):
        Run(tiny_gpt2_dir, PROMPTS, length).evaluate(split)


def test_all_mistakes_are_reported_together(tiny_gpt2_dir):
    with pytest.raises(ConfigError) as caught:
        Run(tiny_gpt2_dir, None, None, learnig_rate=1e-5, n_iters=0.5, env={"n_envz": 3})
    assert {issue.path for issue in caught.value.issues} == {
        "prompts",
        "reward",
        "learnig_rate",
        "n_iters",
        "env.n_envz",
    }


def test_a_model_with_shorter_numbers_is_noticed(tiny_gpt2_dir):
    model, tokenizer = loaded(tiny_gpt2_dir, dtype=torch.bfloat16), AutoTokenizer.from_pretrained(tiny_gpt2_dir)
    run = Run(model, PROMPTS, length, tokenizer=tokenizer)
    assert [notice.path for notice in run.config.notices].count("model") == 1


def test_a_changed_function_is_refused_with_the_way_out(tiny_gpt2_dir, tmp_path):
    sizes = {"n_episodes": 8, "max_new_tokens": 4, "n_iters": 1}
    run = Run(tiny_gpt2_dir, PROMPTS, length, folder=tmp_path / "a" / "run", **sizes).train(quiet=True)

    def changed(responses):
        return [1.0 + len(response) for response in responses]

    again = Run.from_folder(run.folder, reward=changed)
    with pytest.raises(ConfigError) as caught:
        again.train(n_iters=2, quiet=True)
    (issue,) = caught.value.issues
    assert issue.path.startswith("reward") and "train(change=['reward'])" in issue.message
    assert again.train(n_iters=2, change=["reward"], quiet=True).n_done == 2
    assert (run.folder / "accepted_changes.json").is_file()


UNGUARDED = """
from rl4lms_like import Run

def length(responses):
    return [float(len(response)) for response in responses]

{guard}
    run = Run(MODEL, ["a", "b"], length, folder=FOLDER, n_iters=1, n_episodes=8, max_new_tokens=4, reward_workers=1)
    run.train(quiet=True)
"""


@pytest.mark.parametrize("guard", ["if True:", 'if __name__ == "__main__":'])
def test_a_script_without_a_guard_for_its_processes_is_refused(guard, tiny_gpt2_dir, tmp_path):
    folder = tmp_path / "a" / "run"
    text = UNGUARDED.format(guard=guard).replace("MODEL", repr(str(tiny_gpt2_dir))).replace("FOLDER", repr(str(folder)))
    script = tmp_path / "script.py"
    script.write_text(text)
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=False)
    if guard == "if True:":
        assert ran.returncode == 1 and "reward_workers" in ran.stderr and "__main__" in ran.stderr
        assert not folder.exists()
    else:
        assert ran.returncode == 0, ran.stderr
        assert (Path(folder) / "finished.json").is_file()
