"""Adapters of the experts and routers of a mixture of experts: they train, are merged, and are loaded by PEFT."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rl4lms_like.algorithms.ppo import PPO
from rl4lms_like.config.load import parse_config
from rl4lms_like.policies.loading import load_model
from rl4lms_like.policies.lora import add_lora, has_lora, merged, require_stackable
from rl4lms_like.run import resume, train_config
from rl4lms_like.system.errors import ModelError
from tests.algorithms.test_update import build
from tests.builders import make_policy
from tests.expert_models import FAMILIES, save_experts
from tests.oracles.test_shared_prompts import grouped

peft_package = pytest.importorskip("peft")

LORA = {"r": 4, "lora_alpha": 16, "target_modules": "all-linear"}
EXACT = 1e-5


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory, tiny_tokenizer):
    return save_experts(tmp_path_factory.mktemp(request.param), request.param, tiny_tokenizer)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory, tiny_tokenizer):
    return save_experts(tmp_path_factory.mktemp("mixtral"), "mixtral", tiny_tokenizer)


def changed(policy):
    """Give the adapters values with which they add something."""
    generator = torch.Generator().manual_seed(1)
    for name, weight in policy.policy_model.named_parameters():
        if "lora_" in name:
            weight.data += 0.1 * torch.randn(weight.shape, generator=generator)
    return policy


def logits_of(model, episodes):
    """Return the logits of the first prompt and response, without padding."""
    prompt = episodes.prompt_ids[0][episodes.prompt_mask[0]]
    response = episodes.response_ids[0][episodes.response_mask[0]]
    with torch.no_grad():
        return model.eval()(input_ids=torch.cat([prompt, response])[None]).logits


def test_all_linear_layers_have_adapters_and_the_base_is_shared(folder):
    policy = make_policy("causal", folder, peft=LORA)
    model = policy.policy_model
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    for part in ("q_proj", "mlp.gate", "mlp.experts.base_layer.lora_A", "mlp.experts.lora_A"):
        assert any(part in name for name in trained), part
    assert all("lora_" in name for name in trained)
    base = {name.replace(".base_layer", ""): weight for name, weight in model.named_parameters()}
    for name, weight in policy.ref_model.named_parameters():
        assert base[name].data_ptr() == weight.data_ptr(), name


def test_merged_adapters_give_the_same_outputs(folder, tmp_path):
    """Merged in memory, saved as a whole model, and loaded by PEFT from the saved adapters."""
    policy = changed(make_policy("causal", folder, peft=LORA))
    episodes = grouped(policy)
    expected = logits_of(policy.policy_model, episodes)
    base = AutoModelForCausalLM.from_pretrained(folder)
    before = {name: weight.clone() for name, weight in base.state_dict().items()}
    assert float((logits_of(base, episodes) - expected).abs().max()) > 0.1

    whole = merged(policy.policy_model)
    assert not has_lora(whole)
    assert {name for name, _ in whole.named_parameters()} == {name for name, _ in base.named_parameters()}
    torch.testing.assert_close(logits_of(whole, episodes), expected, atol=1e-4, rtol=EXACT)
    torch.testing.assert_close(logits_of(policy.policy_model, episodes), expected, atol=0, rtol=0)

    policy.save_model(tmp_path / "adapters")
    by_peft = peft_package.PeftModel.from_pretrained(base, tmp_path / "adapters")
    torch.testing.assert_close(logits_of(by_peft, episodes), expected, atol=1e-4, rtol=EXACT)
    for name, weight in AutoModelForCausalLM.from_pretrained(folder).state_dict().items():
        assert torch.equal(weight, before[name])

    loaded, _ = load_model(AutoModelForCausalLM, str(tmp_path / "adapters"))
    torch.testing.assert_close(logits_of(loaded, episodes), expected, atol=1e-4, rtol=EXACT)

    merging = changed(make_policy("causal", folder, peft=LORA, merge_on_save=True))
    merging.save_model(tmp_path / "whole")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    torch.testing.assert_close(logits_of(saved, episodes), expected, atol=1e-4, rtol=EXACT)


@pytest.mark.parametrize("option", [{}, {"gradient_checkpointing": True}])
def test_the_gradient_is_that_of_plain_peft(option, mixtral):
    policy = changed(make_policy("causal", mixtral, peft=LORA, critic="none", **option))
    episodes = grouped(policy)
    policy.set_training_mode(True)
    policy.action_scores(episodes).log_prob.sum().backward()

    plain = peft_package.get_peft_model(
        AutoModelForCausalLM.from_pretrained(mixtral),
        peft_package.LoraConfig(task_type="CAUSAL_LM", **LORA),
    )
    weights = dict(policy.policy_model.named_parameters())
    with torch.no_grad():
        for name, weight in plain.base_model.model.named_parameters():
            if "lora_" in name:
                weight.copy_(weights[name])
    total = torch.zeros(())
    for i in range(episodes.n_episodes):
        prompt = episodes.prompt_ids[i][episodes.prompt_mask[i]]
        response = episodes.response_ids[i][episodes.response_mask[i]]
        ids = torch.cat([prompt, response])
        log_probs = plain(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1].log_softmax(dim=-1)
        is_action = episodes.action_mask[i][episodes.response_mask[i]]
        total = total + log_probs.gather(1, response[:, None])[is_action].sum()
    total.backward()
    for name, weight in plain.base_model.model.named_parameters():
        if "lora_" in name:
            torch.testing.assert_close(weights[name].grad, weight.grad, atol=2e-3, rtol=1e-3, msg=name)


def test_an_update_changes_adapters_of_experts_only(mixtral, tiny_tokenizer):
    built = build(PPO, mixtral, tiny_tokenizer, policy_kwargs={"peft": LORA}, learning_rate=1e-2)
    before = {name: weight.clone() for name, weight in built.policy.policy_model.named_parameters()}
    built.learn_iteration(0, 1)
    moved = {name for name, w in built.policy.policy_model.named_parameters() if not torch.equal(w, before[name])}
    assert any("mlp.experts.lora_B" in name for name in moved)
    assert any("mlp.experts.base_layer.lora_B" in name for name in moved)
    assert all("lora_" in name for name in moved)


def test_a_resumed_run_equals_the_uninterrupted_one(mixtral, tiny_config, tmp_path):
    tiny_config["tokenizer"]["model_name"] = str(mixtral)
    tiny_config["alg"]["policy"]["args"] |= {"model_name": str(mixtral), "peft": LORA}
    config = parse_config(tiny_config)
    whole = train_config(config, base_path_to_store_results=tmp_path, experiment_name="whole", quiet=True)
    stopped = tmp_path / "stopped"
    shutil.copytree(whole, stopped)
    for newer in ("model", "checkpoints/iteration_00003"):
        shutil.rmtree(stopped / newer, ignore_errors=True)
    resume(stopped, quiet=True)
    expected = load_file(whole / "model" / "adapter_model.safetensors")
    assert any("experts" in name for name in expected)
    for name, weight in load_file(stopped / "model" / "adapter_model.safetensors").items():
        assert torch.equal(weight, expected[name]), name
    config_file = "model/adapter_config.json"
    assert (whole / config_file).read_bytes() == (stopped / config_file).read_bytes()
    targets = json.loads((whole / config_file).read_text())["target_parameters"]
    assert targets == ["down_proj", "gate.weight", "gate_up_proj"]


def test_further_adapters_can_only_be_saved_merged(mixtral, tmp_path):
    changed(make_policy("causal", mixtral, peft=LORA)).save_model(tmp_path)
    model, _ = load_model(AutoModelForCausalLM, str(tmp_path))
    add_lora(model, LORA, dropout=False)
    with pytest.raises(ModelError, match="merge_on_save"):
        require_stackable(model)


def test_a_family_without_default_layers_says_what_to_set(mixtral):
    with pytest.raises(ModelError, match="target_modules"):
        make_policy("causal", mixtral, peft={"r": 4})
