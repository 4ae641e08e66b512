"""Which networks a policy has, and where their weights come from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rl4lms_like.algorithms.ppo import PPO
from rl4lms_like.policies.loading import load_model, save_language_model
from rl4lms_like.system.errors import ModelError
from rl4lms_like.testing import models
from tests.builders import POLICIES, SAMPLING, make_env, make_policy
from tests.config_errors import raises_at

LORA = {"r": 4}


@pytest.fixture(scope="module")
def wider(tmp_path_factory, tiny_tokenizer) -> dict[str, Path]:
    """Models of another width, and of another number of blocks."""
    folder = tmp_path_factory.mktemp("wider")
    seq2seq = models.make_tokenizer(append_eos=True)
    made = {
        "gpt2": models.make_causal_lm("gpt2", tiny_tokenizer, hidden_size=48, n_layers=3),
        "llama": models.make_causal_lm("llama", tiny_tokenizer, hidden_size=48),
        "t5": models.make_seq2seq_lm("t5", seq2seq, hidden_size=48),
        "bart": models.make_seq2seq_lm("bart", seq2seq, hidden_size=48),
    }
    return {name: models.save_model(folder / name, model, tiny_tokenizer) for name, model in made.items()}


@pytest.fixture(params=["gpt2", "llama", "t5", "bart"])
def case(request, wider, tiny_gpt2_dir, tiny_t5_dir, tiny_tokenizer):
    """A policy's kind and checkpoint, its tokenizer, and a wider critic's checkpoint."""
    if request.param in ("gpt2", "llama"):
        return "causal", tiny_gpt2_dir, tiny_tokenizer, wider[request.param]
    return "seq2seq", tiny_t5_dir, models.make_tokenizer(append_eos=True), wider[request.param]


@pytest.mark.parametrize("peft", [None, LORA], ids=["full", "lora"])
def test_a_critic_from_another_checkpoint_is_trained(case, peft):
    if peft:
        pytest.importorskip("peft")
    kind, model_dir, tokenizer, critic_model = case
    algorithm = PPO(
        POLICIES[kind],
        make_env(tokenizer, model_dir, n_envs=4),
        policy_kwargs={
            "model_name": str(model_dir),
            "critic_model": str(critic_model),
            "generation_kwargs": SAMPLING,
            "value_head_init": "zero",
            "peft": peft,
        },
        n_steps=10,
        batch_size=40,
        n_epochs=2,
        learning_rate=1e-3,
        critic_learning_rate=1e-2,
        seed=0,
        device="cpu",
    )
    policy = algorithm.policy
    assert policy.value_head.weight.shape == (1, 48) and not policy.value_head.weight.any()
    before = {name: weight.clone() for name, weight in policy.value_model.state_dict().items()}
    for iteration in range(2):
        algorithm.learn_iteration(iteration, 2)
        assert algorithm.logger.name_to_value["train/ratio_gap"] < 1e-5
    after = policy.value_model.state_dict()
    moved = {name for name, weight in after.items() if not torch.equal(weight, before[name])}
    assert moved and (not peft or all("lora_" in name for name in moved))
    rates = {group["role"]: group["lr"] for group in policy.optimizer.param_groups}
    assert rates == {"actor": pytest.approx(1e-3), "critic": pytest.approx(1e-2)}


def test_a_critic_of_the_same_checkpoint_equals_the_policys_network(tiny_gpt2_dir):
    named = make_policy("causal", tiny_gpt2_dir, critic_model=str(tiny_gpt2_dir))
    default = make_policy("causal", tiny_gpt2_dir)
    for mine, theirs in zip(named.value_model.parameters(), default.value_model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_critic_of_the_other_family_is_refused(tiny_gpt2_dir, tiny_t5_dir):
    with pytest.raises(ModelError, match=str(tiny_t5_dir)):
        make_policy("causal", tiny_gpt2_dir, critic_model=str(tiny_t5_dir))


@pytest.mark.parametrize(("role", "more"), [("critic", -1), ("reference", -1), ("reference", 1)])
def test_a_model_with_other_tokens_is_refused(role, more, tiny_gpt2_dir, tiny_tokenizer, tmp_path):
    """A critic only reads tokens, so it may have more of them; see the techniques of critics."""
    n_tokens = len(tiny_tokenizer)
    other = models.make_causal_lm("gpt2", tiny_tokenizer)
    other.resize_token_embeddings(n_tokens + more)
    folder = models.save_model(tmp_path / "other", other, tiny_tokenizer)
    with pytest.raises(ModelError, match=f"{role} .*{n_tokens + more}.* {n_tokens}"):
        make_policy("causal", tiny_gpt2_dir, **{f"{role}_model": str(folder)})


def test_a_shared_critic_has_no_checkpoint_of_its_own(tiny_gpt2_dir):
    with raises_at("critic_model"):
        make_policy("causal", tiny_gpt2_dir, critic="shared", critic_model=str(tiny_gpt2_dir))


@pytest.mark.parametrize("critic", ["separate", "shared"])
def test_without_adapters_what_is_trained_is_nobody_elses(critic, tiny_gpt2_dir):
    policy = make_policy("causal", tiny_gpt2_dir, critic=critic)
    trained = {p.data_ptr() for p in policy.policy_model.parameters()}
    assert trained.isdisjoint(p.data_ptr() for p in policy.ref_model.parameters())
    assert policy.value_model is None or trained.isdisjoint(p.data_ptr() for p in policy.value_model.parameters())


def test_dropout_of_nested_configs_is_off_and_saved_again(tmp_path, tiny_tokenizer):
    """A model of texts and images has a config for each of them."""
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    rates = {
        "text_config": {"vocab_size": len(tiny_tokenizer), "attention_dropout": 0.5, **size},
        "vision_config": {"image_size": 28, "patch_size": 14, "attention_dropout": 0.25, **size},
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma3", **rates))
    folder = models.save_model(tmp_path / "gemma3", model, tiny_tokenizer)
    ids = torch.arange(10)[None]
    for dropout in (False, True):
        loaded, found = load_model(AutoModelForCausalLM, str(folder), dropout=dropout)
        with torch.no_grad():
            expected = loaded.eval()(input_ids=ids).logits
            got = loaded.train()(input_ids=ids, token_type_ids=torch.zeros_like(ids)).logits
        assert torch.allclose(got, expected, atol=1e-5) != dropout
        save_language_model(loaded, tmp_path / "saved", checkpoint_dropout=found)
        saved = AutoConfig.from_pretrained(tmp_path / "saved")
        assert (saved.text_config.attention_dropout, saved.vision_config.attention_dropout) == (0.5, 0.25)
