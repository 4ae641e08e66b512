"""Adapters and the critic's choices from a config: mistakes, memory, whole runs, what is done with their folders."""

from __future__ import annotations

import copy
import json

import pytest
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from rl4lms_like.config.load import parse_config
from rl4lms_like.estimates.memory import estimate_memory
from rl4lms_like.inference import evaluate_run, generate_texts
from rl4lms_like.on_policy.assemble import assemble
from rl4lms_like.policies.loading import load_model
from rl4lms_like.run import train_config
from rl4lms_like.system.errors import ConfigError, MissingExtraError
from rl4lms_like.testing import models
from tests.builders import make_policy
from tests.config_errors import raises_at

pytest.importorskip("peft")

LORA = {"r": 4, "lora_alpha": 8}


def policy_args(config):
    return config["alg"]["policy"]["args"]


def run(config, folder, name="run"):
    return train_config(parse_config(config), base_path_to_store_results=folder, experiment_name=name, quiet=True)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(params=["causal", "seq2seq"])
def config(request):
    chosen = request.getfixturevalue("tiny_config" if request.param == "causal" else "tiny_seq2seq_config")
    policy_args(chosen)["peft"] = dict(LORA)
    chosen["train_evaluation"] |= {"n_iters": 2, "max_eval_samples": 2, "save_every": 20}
    return chosen


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("peft", "key", "message"),
    [
        ({"lora_alpa": 8}, ".lora_alpa", "unknown key; did you mean 'lora_alpha'?"),
        ({"r": 0}, ".r", "expected a whole number of at least 1, got 0"),
        ({"modules_to_save": ["lm_head"]}, ".modules_to_save", "is not supported"),
        ({"bias": "all"}, ".bias", "expected 'none', got 'all'"),
        ({"peft_type": "IA3"}, ".peft_type", "expected 'LORA', got 'IA3'"),
        (
            {"init_lora_weights": "pissa"},
            ".init_lora_weights",
            "expected true, 'gaussian' or 'orthogonal', got 'pissa'",
        ),
        ("lora", "", "expected a mapping"),
        ({"target_modules": []}, ".target_modules", "is empty"),
        ({"target_modules": "c_(attn"}, ".target_modules", "'c_(attn' is not a valid regular expression: missing )"),
        ({"rank_pattern": {"c_[attn": 2}}, ".rank_pattern", "'c_[attn' is not a valid regular expression"),
    ],
)
def test_a_field_that_lora_does_not_have_is_a_mistake(peft, key, message, tiny_config):
    policy_args(tiny_config)["peft"] = peft
    with pytest.raises(ConfigError) as caught:
        parse_config(tiny_config)
    issue = caught.value.issues[0]
    assert issue.path == f"alg.policy.args.peft{key}" and message in issue.message
    assert len(caught.value.issues) == 1


def test_contradictions_are_issues(tiny_config):
    args = policy_args(tiny_config)
    args |= {"critic": "shared", "critic_model": "./nowhere", "merge_on_save": True}
    place = "alg.policy.args"
    with raises_at(f"{place}.critic_model", f"{place}.critic_model", f"{place}.merge_on_save", mentions="'./nowhere'"):
        parse_config(tiny_config)


def test_what_only_peft_knows_is_found_before_a_model_loads(tiny_config, monkeypatch):
    policy_args(tiny_config)["peft"] = {"target_modules": "all-linear", "layers_to_transform": [0]}
    monkeypatch.setattr("rl4lms_like.on_policy.assemble.load_model_config", None)
    with raises_at("alg.policy.args.peft", mentions="`layers_to_transform`"):
        assemble(parse_config(tiny_config))


def test_a_missing_peft_is_found_before_a_model_loads(tiny_config, monkeypatch):
    policy_args(tiny_config)["peft"] = {}
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    monkeypatch.setattr("rl4lms_like.on_policy.assemble.load_model_config", None)
    with pytest.raises(MissingExtraError) as caught:
        assemble(parse_config(tiny_config))
    assert caught.value.extra == "peft"


def test_a_critic_with_too_few_positions_is_a_mistake(tiny_config, tiny_tokenizer, tmp_path):
    short = models.make_causal_lm("gpt2", tiny_tokenizer, n_positions=16)
    policy_args(tiny_config)["critic_model"] = str(models.save_model(tmp_path / "short", short, tiny_tokenizer))
    with raises_at("env.args", mentions="16"):
        assemble(parse_config(tiny_config))


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("critic", ["separate", "shared", "another"])
def test_the_estimate_counts_what_a_policy_has(critic, config, tmp_path):
    causal = "causal" in config["alg"]["policy"]["id"]
    tokenizer = models.make_tokenizer(append_eos=not causal)
    make = models.make_causal_lm if causal else models.make_seq2seq_lm
    args = policy_args(config)
    if critic == "another":
        wider = make("llama" if causal else "bart", tokenizer, hidden_size=48)
        args["critic_model"] = str(models.save_model(tmp_path / "wider", wider, tokenizer))
    else:
        args["critic"] = critic
    others = {key: value for key, value in args.items() if key != "model_name"}
    policy = make_policy("causal" if causal else "seq2seq", args["model_name"], **others)
    parts = estimate_memory(parse_config(config)).parts
    weights = parts["policy weights"] + parts["critic weights"] + parts["reference weights"]
    assert weights == 4 * sum(p.numel() for p in policy.parameters())
    trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    assert parts["gradients"] == 4 * trained and parts["optimizer state"] == 8 * trained
    assert parts["reference weights"] == 0


def test_adapters_need_less(config):
    with_adapters = estimate_memory(parse_config(config))
    policy_args(config)["peft"] = None
    whole = estimate_memory(parse_config(config))
    assert with_adapters.parts["gradients"] < whole.parts["gradients"] / 4
    assert with_adapters.peak - with_adapters.parts["process"] < whole.peak - whole.parts["process"]


# --- runs -------------------------------------------------------------------------------------------------------------


def weights_agree(first, second):
    for mine, theirs in zip(first.parameters(), second.parameters(), strict=True):
        assert (mine - theirs).abs().max() < 1e-6


@pytest.mark.parametrize("algorithm", ["ppo", "a2c"])
def test_a_run_leaves_adapters_behind_that_everything_reads(algorithm, config, tmp_path, capsys):
    if algorithm == "a2c":
        config["alg"] |= {"id": "a2c", "args": {"n_steps": 8, "learning_rate": 1e-3}}
    folder = run(config, tmp_path)
    assert all(line["train/ratio_gap"] < 1e-5 for line in lines(folder / "training_info.jsonl"))
    rollouts = lines(folder / "rollout_info.jsonl")
    assert abs(rollouts[0]["rollout_info/kl_div_mean"]) < 1e-6 < abs(rollouts[-1]["rollout_info/kl_div_mean"])
    assert (folder / "model" / "adapter_model.safetensors").exists()
    assert not (folder / "model" / "model.safetensors").exists()
    scores = evaluate_run(folder, decoding="greedy")
    assert scores and f"files in {folder}" in capsys.readouterr().out
    assert generate_texts(folder, ["Count"], decoding="greedy") == generate_texts(
        folder / "model", ["Count"], decoding="greedy", max_new_tokens=8
    )


def test_merging_on_save_gives_the_same_model(config, tmp_path):
    adapters = run(config, tmp_path, "adapters")
    merging = copy.deepcopy(config)
    policy_args(merging)["merge_on_save"] = True
    whole = run(merging, tmp_path, "whole")
    auto = AutoModelForCausalLM if "causal" in config["alg"]["policy"]["id"] else AutoModelForSeq2SeqLM
    weights_agree(load_model(auto, str(adapters / "model"))[0], auto.from_pretrained(whole / "model"))


def test_one_seed_one_adapter(tiny_config, tmp_path):
    policy_args(tiny_config)["peft"] = dict(LORA)
    tiny_config["train_evaluation"] |= {"n_iters": 1, "eval_every": 100, "metrics": [], "max_eval_samples": 1}
    first, second = (run(tiny_config, tmp_path, name) for name in ("first", "second"))
    other = run({**tiny_config, "seed": 1}, tmp_path, "other")
    a, b, c = ((folder / "model" / "adapter_model.safetensors").read_bytes() for folder in (first, second, other))
    assert a == b != c


@pytest.mark.parametrize("peft", [None, LORA], ids=["full", "lora"])
def test_a_run_goes_on_from_an_adapter(peft, config, tmp_path):
    first = run(config, tmp_path, "first")
    config["tokenizer"]["model_name"] = policy_args(config)["model_name"] = str(first / "model")
    policy_args(config)["peft"] = peft
    second = run(config, tmp_path, "second")
    assert lines(second / "rollout_info.jsonl")[0]["rollout_info/kl_div_mean"] == pytest.approx(0, abs=1e-6)
    assert lines(first / "rollout_info.jsonl")[-1]["rollout_info/kl_div_mean"] != 0
    assert (second / "model" / ("model.safetensors" if peft is None else "adapter_model.safetensors")).exists()
    assert evaluate_run(second, decoding="greedy")
