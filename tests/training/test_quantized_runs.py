"""Runs with a quantized base: the same bytes when resumed, the trained model in every file, refusals."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rl4lms_like.algorithms.ppo import PPO
from rl4lms_like.config.load import parse_config
from rl4lms_like.inference import evaluate_run, generate_texts
from rl4lms_like.on_policy.assemble import assemble
from rl4lms_like.policies.arguments import VisionPolicyArguments
from rl4lms_like.policies.base import CausalLMActorCriticPolicy
from rl4lms_like.policies.loading import load_model
from rl4lms_like.policies.lora import saved_quantization
from rl4lms_like.policies.quantized_layers import quantization_of
from rl4lms_like.run import resume, train_config
from rl4lms_like.system.errors import MissingExtraError, ModelError
from tests.builders import make_env, make_policy
from tests.config_errors import raises_at

pytest.importorskip("bitsandbytes")
pytest.importorskip("torchao")
pytest.importorskip("peft")

NF4 = {"id": "nf4", "double": True}
ADAPTERS = {"r": 4, "lora_alpha": 16, "target_modules": "all-linear"}


@pytest.fixture
def config(tiny_config):
    tiny_config["alg"]["policy"]["args"] |= {"peft": ADAPTERS, "quantization": NF4}
    tiny_config["alg"]["args"]["learning_rate"] = 1e-2
    tiny_config["train_evaluation"] |= {"n_iters": 2, "max_eval_samples": 2, "save_every": 1}
    return tiny_config


def run(config, folder, name="run"):
    return train_config(parse_config(config), base_path_to_store_results=folder, experiment_name=name, quiet=True)


def log_probs(model, ids):
    with torch.no_grad():
        return model.eval()(ids).logits.log_softmax(dim=-1)


def test_a_run_is_resumed_evaluated_and_loaded_as_it_was_trained(config, tmp_path):
    folder = run(config, tmp_path)
    expected = load_file(folder / "model" / "adapter_model.safetensors")
    assert saved_quantization(str(folder / "model")) == NF4

    # As after an interruption in the second iteration.
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    shutil.rmtree(copy / "model")
    shutil.rmtree(copy / "checkpoints" / "iteration_00002")
    resume(copy, quiet=True)
    resumed = load_file(copy / "model" / "adapter_model.safetensors")
    assert resumed.keys() == expected.keys()
    assert all(torch.equal(resumed[name], tensor) for name, tensor in expected.items())
    assert any(float(tensor.abs().max()) for name, tensor in expected.items() if "lora_B" in name)

    # The policy itself, with the trained adapters.
    policy = assemble(parse_config(config)).policy
    for name, weight in policy.policy_model.named_parameters():
        if weight.requires_grad:
            weight.data.copy_(expected[f"base_model.model.{name.replace('.default', '')}"])
    ids = torch.arange(5, 15)[None]
    trained = log_probs(policy.policy_model, ids)

    # Loaded with this library, also by the commands, it is that model; with the original base it is another one.
    model, _ = load_model(AutoModelForCausalLM, str(folder / "model"))
    assert quantization_of(model) is None
    torch.testing.assert_close(log_probs(model, ids), trained, rtol=0, atol=1e-5)
    rounded_away = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert float((log_probs(rounded_away, ids) - trained).abs().max()) > 1e-3
    assert evaluate_run(folder, decoding="greedy", limit=1)
    assert generate_texts(folder, ["Count with me"], decoding="greedy", max_new_tokens=3)

    # Of the adapters on a quantized base and of others, there is no sum.
    args = config["alg"]["policy"]["args"] | {"model_name": str(folder / "model")}
    for quantization in (None, NF4):
        config["alg"]["policy"]["args"] = args | {"quantization": quantization}
        with pytest.raises(ModelError, match="merge_on_save"):
            assemble(parse_config(config))


def test_the_merged_model_is_one_of_transformers(config, tmp_path):
    config["alg"]["policy"]["args"]["merge_on_save"] = True
    config["train_evaluation"]["n_iters"] = 1
    folder = run(config, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert "quantization_config" not in json.loads((folder / "model" / "config.json").read_text())
    assert not any("scales" in name for name, _ in model.named_parameters())


def test_an_algorithm_is_saved_and_loaded(tiny_gpt2_dir, tiny_tokenizer, tmp_path):
    env = make_env(tiny_tokenizer, tiny_gpt2_dir)
    kwargs = {"model_name": str(tiny_gpt2_dir), "peft": ADAPTERS, "quantization": NF4}
    kwargs["generation_kwargs"] = {"do_sample": True, "top_k": 0}
    built = PPO(CausalLMActorCriticPolicy, env, n_steps=10, batch_size=40, learning_rate=1e-2, policy_kwargs=kwargs)
    built.learn(80)
    built.save(tmp_path / "saved.zip")
    again = PPO.load(tmp_path / "saved.zip", env=make_env(tiny_tokenizer, tiny_gpt2_dir), device="cpu")
    before, after = built.policy.state_dict(), again.policy.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    ids = torch.arange(5, 15)[None]
    assert torch.equal(log_probs(built.policy.policy_model, ids), log_probs(again.policy.policy_model, ids))


# --- refusals -------------------------------------------------------------------------------------------------------

POLICY = "alg.policy.args"


@pytest.mark.parametrize(
    ("changes", "path", "words"),
    [
        ({"peft": None}, "quantization", "only adapters can be trained"),
        ({"quantization": {"id": "llm_int8"}}, "quantization.id", "depend on padding"),
        ({"quantization": {"id": "nf3"}}, "quantization.id", "use nf4 or int8"),
        ({"quantization": {"bits": 4}}, "quantization", "expected a mapping with an id"),
        ({"quantization": {"id": "int8", "double": True}}, "quantization.double", "unknown key"),
        ({"quantization": {"id": "nf4", "double": "often"}}, "quantization.double", "true or false"),
        ({"peft": {"use_dora": True}}, "peft.use_dora", "rescales"),
        ({"compile": True}, "compile", "not supported with quantization"),
        ({"reference_dtype": "bfloat16"}, "reference_dtype", "quantization replaces"),
    ],
)
def test_what_a_quantized_base_does_not_work_with_is_refused(changes, path, words, config):
    config["alg"]["policy"]["args"] |= changes
    with raises_at(f"{POLICY}.{path}", mentions=words):
        parse_config(config)


def test_other_refusals_name_their_keys(config):
    args = config["alg"]["policy"]["args"]
    args["generation_dtype"] = "bfloat16"
    config["alg"]["args"]["importance_correction"] = "tis"
    with raises_at(f"{POLICY}.generation_dtype", mentions="quantization replaces"):
        parse_config(config)


def test_a_vision_policy_is_refused():
    options = {"model_name": "x", "peft": ADAPTERS, "quantization": NF4}
    assert [issue.path for issue in VisionPolicyArguments(**options).issues()] == ["quantization"]


def test_a_missing_package_is_named_before_a_model_loads(config, monkeypatch):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *args: None if name == "bitsandbytes" else find(name))
    monkeypatch.setattr("rl4lms_like.on_policy.assemble.load_model_config", None)
    with pytest.raises(MissingExtraError) as caught:
        assemble(parse_config(config))
    assert caught.value.extra == "bitsandbytes"


def test_masks_need_no_mask_model(tiny_gpt2_dir):
    from tests.builders import MASKABLE

    options = {"peft": ADAPTERS, "quantization": NF4, "policies": MASKABLE, "top_mask": 20}
    assert make_policy("causal", tiny_gpt2_dir, mask_type="topk", **options).mask_model is None
    with raises_at("quantization", mentions="mask_type: topk"):
        make_policy("causal", tiny_gpt2_dir, **options)
