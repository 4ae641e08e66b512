"""Adapters instead of weights: one base in memory, everything else as without them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from rl4lms_like.algorithms import ALGORITHMS
from rl4lms_like.policies import POLICIES
from rl4lms_like.policies.loading import load_model, load_model_config, load_tokenizer, whole_checkpoint
from rl4lms_like.policies.lora import add_lora, has_lora, load_adapters
from rl4lms_like.policies.parity import check_parity
from rl4lms_like.rollouts.kl import FixedKLController
from rl4lms_like.system.errors import MissingExtraError, ModelError
from rl4lms_like.testing import models
from tests.builders import SAMPLING, make_env, make_policy

peft_package = pytest.importorskip("peft")

LORA = {"r": 4, "lora_alpha": 16}
FAMILIES = {"gpt2": "causal", "llama": "causal", "t5": "seq2seq", "bart": "seq2seq"}
AUTO = {"causal": AutoModelForCausalLM, "seq2seq": AutoModelForSeq2SeqLM}
LOADERS = {
    "model": lambda name: load_model(AutoModelForCausalLM, name),
    "tokenizer": load_tokenizer,
    "config": load_model_config,
    "weights": whole_checkpoint,
}
STEPS = {
    "sao": {"n_steps": 20, "critic_only_iterations": 0},
    "ppo": {"n_steps": 20, "batch_size": 80, "n_epochs": 2, "learning_rate": 3e-3},
    "a2c": {"n_steps": 20, "learning_rate": 3e-3},
    "dapo": {"n_steps": 20, "group_size": 8},
    "maxrl": {"n_steps": 20, "scale": "none"},  # the rewards here are not 0 or 1
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    folder, saved = tmp_path_factory.mktemp("families"), {}
    for family, kind in FAMILIES.items():
        tokenizer = models.make_tokenizer(append_eos=kind == "seq2seq")
        make = models.make_causal_lm if kind == "causal" else models.make_seq2seq_lm
        saved[family] = models.save_model(folder / family, make(family, tokenizer), tokenizer)
    return saved


@pytest.fixture(params=FAMILIES)
def family(request, checkpoints) -> tuple[str, Path]:
    """A family's kind and its checkpoint."""
    return FAMILIES[request.param], checkpoints[request.param]


def make_algorithm(id: str, kind: str, model_dir: Path, *, n_envs=8, arguments=None, **policy):
    maskable = "maskable_" if id == "nlpo" else ""
    policy_class = POLICIES.resolve(f"{maskable}{kind}_lm_actor_critic_policy")
    policy_kwargs = {"model_name": str(model_dir), "generation_kwargs": SAMPLING, "peft": LORA, **policy}
    env = make_env(load_tokenizer(str(model_dir)), model_dir, n_envs=n_envs, terminate_on_eos=False)
    return ALGORITHMS.resolve(id)(
        policy_class,
        env,
        policy_kwargs=policy_kwargs,
        kl_controller=FixedKLController(0.001, placement={"opd": "advantage", "online_dpo": "loss"}.get(id, "reward")),
        seed=0,
        device="cpu",
        **(arguments or STEPS.get(id, {"n_steps": 20})),
    )


def addresses(model) -> dict[str, int]:
    """Where the base's weights lie, by their names without adapters."""
    named = model.named_parameters(remove_duplicate=False)
    return {name.replace(".base_layer", ""): weight.data_ptr() for name, weight in named if "lora_" not in name}


def adapters(model) -> dict[str, torch.Tensor]:
    return {name: weight for name, weight in model.named_parameters() if "lora_" in name}


def episodes_of(policy, model_dir):
    env = make_env(load_tokenizer(str(model_dir)), model_dir, n_envs=4, terminate_on_eos=False)
    prompts = env.reset()
    return policy.generate(
        torch.as_tensor(prompts["prompt_or_input_encoded_pt"]),
        torch.as_tensor(prompts["prompt_or_input_attention_mask_pt"]),
        eos_token_ids=[],
        max_new_tokens=6,
        seed=0,
    )


def changed(policy):
    """Adapters that no longer add nothing."""
    generator = torch.Generator().manual_seed(1)
    for weight in adapters(policy.policy_model).values():
        weight.data += 0.1 * torch.randn(weight.shape, generator=generator)
    return policy


# --- one base ---------------------------------------------------------------------------------------------------------


def test_policy_critic_and_reference_have_one_base(family):
    policy = make_policy(*family, peft=LORA)
    base, critic = addresses(policy.policy_model), addresses(policy.value_model)
    assert addresses(policy.ref_model) == base
    assert critic.items() <= base.items() and len(critic) > 10
    assert not has_lora(policy.ref_model)
    own, other = adapters(policy.policy_model), adapters(policy.value_model)
    assert own and other and {p.data_ptr() for p in own.values()}.isdisjoint(p.data_ptr() for p in other.values())


def test_one_base_survives_a_move(checkpoints):
    policy = make_policy("causal", checkpoints["gpt2"], peft=LORA)
    policy.to(torch.float64).to(torch.float32)
    assert addresses(policy.ref_model) == addresses(policy.policy_model)
    head, embedding = policy.policy_model.lm_head.weight, policy.policy_model.transformer.wte.weight
    assert head.data_ptr() == embedding.data_ptr()


def test_only_adapters_and_the_value_head_are_trained(family):
    policy = make_policy(*family, peft=LORA)
    values, log_prob, entropy = policy.evaluate_actions(episodes_of(policy, family[1]))
    (values.sum() + log_prob.sum() + entropy.sum()).backward()
    trained = {name for name, weight in policy.named_parameters() if weight.grad is not None}
    assert all("lora_" in name or name == "value_head.weight" for name in trained)
    assert {name for name, weight in policy.named_parameters() if weight.requires_grad} == trained
    in_optimizer = sum(p.numel() for group in policy.optimizer.param_groups for p in group["params"])
    assert in_optimizer == sum(p.numel() for p in policy.parameters() if p.requires_grad)
    assert {group["role"] for group in policy.optimizer.param_groups} == {"actor", "critic"}


def test_adapters_follow_the_seed(checkpoints):
    first, again = (make_policy("causal", checkpoints["gpt2"], peft=LORA) for _ in range(2))
    for name, weight in adapters(first.policy_model).items():
        assert torch.equal(weight, adapters(again.policy_model)[name])
    assert not torch.equal(*(next(iter(adapters(model).values())) for model in (first.policy_model, first.value_model)))


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("critic", ["separate", "shared"])
def test_the_base_never_changes_and_ratios_begin_at_one(family, critic):
    kind, model_dir = family
    algorithm = make_algorithm("ppo", kind, model_dir, critic=critic)
    policy = algorithm.policy
    before = {name: weight.clone() for name, weight in policy.ref_model.state_dict().items()}
    episodes = episodes_of(policy, model_dir)
    start = policy.score(episodes)
    assert torch.equal(start.ref_log_prob, start.log_prob)
    for iteration in range(2):
        algorithm.learn_iteration(iteration, 2)
        assert algorithm.logger.name_to_value["train/ratio_gap"] < 1e-5
    end = policy.score(episodes)
    assert torch.equal(end.ref_log_prob, start.ref_log_prob)
    assert (end.log_prob - start.log_prob).abs().max() > 1e-4
    for name, weight in policy.ref_model.state_dict().items():
        assert torch.equal(weight, before[name]), name
    check_parity(policy.reader, "trained")
    check_parity(policy.ref_reader, "reference")


@pytest.mark.parametrize("id", list(ALGORITHMS))
def test_every_algorithm_trains_adapters(id, checkpoints, tmp_path):
    tokenizer = models.make_tokenizer()
    teacher = models.save_model(tmp_path, models.make_causal_lm("gpt2", tokenizer, seed=1), tokenizer)
    own = {"nlpo": {"top_mask": 20, "target_update_iterations": 1}, "opd": {"teacher_model": str(teacher)}}
    kwargs = own.get(id, {})
    algorithm = make_algorithm(id, "causal", checkpoints["gpt2"], **kwargs)
    before = {name: weight.clone() for name, weight in adapters(algorithm.policy.policy_model).items()}
    base = {name: weight.clone() for name, weight in algorithm.policy.ref_model.state_dict().items()}
    for iteration in range(2):
        algorithm.learn_iteration(iteration, 2)
    after = adapters(algorithm.policy.policy_model)
    assert any(not torch.equal(after[name], before[name]) for name in before)
    for name, weight in algorithm.policy.ref_model.state_dict().items():
        assert torch.equal(weight, base[name]), name


def test_checkpointed_activations_change_no_gradient(family):
    kind, model_dir = family
    gradients = []
    for checkpointing in (False, True):
        policy = changed(make_policy(kind, model_dir, peft=LORA, gradient_checkpointing=checkpointing))
        policy.set_training_mode(True)
        values, log_prob, entropy = policy.evaluate_actions(episodes_of(policy, model_dir))
        (values.sum() + log_prob.mean() - entropy.mean()).backward()
        gradients.append({name: p.grad for name, p in policy.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("dropout", "rate"), [(False, 0.0), (True, 0.5)])
def test_adapter_dropout_is_on_only_with_dropout(dropout, rate, checkpoints):
    peft = {**LORA, "lora_dropout": 0.5}
    policy = make_policy("causal", checkpoints["gpt2"], peft=peft, dropout=dropout, gradient_checkpointing=True)
    policy = changed(policy)
    episodes = episodes_of(policy, checkpoints["gpt2"])
    policy.set_training_mode(True)
    first, second = (policy.evaluate_actions(episodes)[1].detach() for _ in range(2))
    assert torch.equal(first, second) == (rate == 0)


# --- saving and loading -----------------------------------------------------------------------------------------------


def logits_of(model, kind):
    ids = torch.arange(2, 14)[None]
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if kind == "seq2seq" else {})
    with torch.no_grad():
        return model.eval()(**inputs).logits


def size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


VARIANTS = {"plain": {}, "dora": {"use_dora": True}, "rslora": {"use_rslora": True, "init_lora_weights": "gaussian"}}
CASES = [*((name, "plain") for name in FAMILIES), ("gpt2", "dora"), ("t5", "dora"), ("gpt2", "rslora")]


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_saved_adapters_load_to_the_same_logits(name, variant, checkpoints, tmp_path):
    kind, model_dir, peft = FAMILIES[name], checkpoints[name], LORA | VARIANTS[variant]
    policy = changed(make_policy(kind, model_dir, peft=peft))
    tokenizer = load_tokenizer(str(model_dir))
    saved = policy.save_model(tmp_path / "adapter", tokenizer)
    assert size(saved) < size(model_dir) / 4
    assert not list(saved.glob("model*"))
    expected = logits_of(policy.policy_model, kind)
    loaded, _ = load_model(AUTO[kind], str(saved))
    assert not has_lora(loaded) and all(p.requires_grad for p in loaded.parameters())
    torch.testing.assert_close(logits_of(loaded, kind), expected, rtol=0, atol=1e-5)
    by_peft = peft_package.PeftModel.from_pretrained(AUTO[kind].from_pretrained(model_dir), saved)
    torch.testing.assert_close(logits_of(by_peft, kind), expected, rtol=0, atol=1e-6)
    by_transformers = AUTO[kind].from_pretrained(saved)
    torch.testing.assert_close(logits_of(by_transformers, kind), expected, rtol=0, atol=1e-6)
    assert load_tokenizer(str(saved)).get_vocab() == tokenizer.get_vocab()


def test_merged_weights_need_no_peft(family, tmp_path, monkeypatch):
    kind, model_dir = family
    policy = changed(make_policy(kind, model_dir, peft=LORA, merge_on_save=True))
    before = {name: weight.clone() for name, weight in policy.state_dict().items()}
    expected = logits_of(policy.policy_model, kind)
    saved = policy.save_model(tmp_path / "merged")
    assert not (saved / "adapter_config.json").exists()
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    loaded = AUTO[kind].from_pretrained(saved)
    torch.testing.assert_close(logits_of(loaded, kind), expected, rtol=0, atol=1e-5)
    assert all(torch.equal(weight, before[name]) for name, weight in policy.state_dict().items())
    assert has_lora(policy.policy_model)
    assert torch.equal(logits_of(policy.policy_model, kind), expected)


def test_a_policy_on_an_adapter_starts_from_the_tuned_model(family, tmp_path):
    kind, model_dir = family
    tuned = changed(make_policy(kind, model_dir, peft=LORA))
    first = tuned.save_model(tmp_path / "first", load_tokenizer(str(model_dir)))
    again = make_env_free_policy(kind, first, vocabulary=tuned.vocab_size, peft=LORA)
    expected = logits_of(tuned.policy_model, kind)
    for model in (again.policy_model, again.ref_model):
        torch.testing.assert_close(logits_of(model, kind), expected, rtol=0, atol=1e-5)
    second = changed(again).save_model(tmp_path / "second")
    assert json.loads((second / "adapter_config.json").read_text())["base_model_name_or_path"] == str(
        model_dir.resolve()
    )
    assert whole_checkpoint(str(second)) == str(model_dir.resolve())
    loaded, _ = load_model(AUTO[kind], str(second))
    torch.testing.assert_close(logits_of(loaded, kind), logits_of(again.policy_model, kind), rtol=0, atol=1e-5)


def make_env_free_policy(kind, model_dir, *, vocabulary, **arguments):
    from gymnasium import spaces

    torch.manual_seed(0)
    return POLICIES.resolve(f"{kind}_lm_actor_critic_policy")(
        spaces.Dict({}), spaces.Discrete(vocabulary), lambda _: 1e-3, model_name=str(model_dir), **arguments
    )


def test_a_missing_base_is_named(checkpoints, tmp_path):
    base = shutil.copytree(checkpoints["gpt2"], tmp_path / "base")
    saved = make_policy("causal", base, peft=LORA).save_model(tmp_path / "adapter")
    shutil.rmtree(base)
    with pytest.raises(ModelError, match=str(base)):
        load_model(AutoModelForCausalLM, str(saved))


@pytest.mark.parametrize("base", [None, "", 5, ["gpt2"]])
def test_an_adapter_without_the_name_of_a_base_says_so(base, checkpoints, tmp_path):
    saved = make_policy("causal", checkpoints["gpt2"], peft=LORA).save_model(tmp_path / "adapter")
    file = saved / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": base}))
    for load in LOADERS.values():
        with pytest.raises(ModelError, match=f"{saved}.*base_model_name_or_path"):
            load(str(saved))


@pytest.mark.parametrize("load", LOADERS)
@pytest.mark.parametrize("bases", [("first",), ("first", "second"), ("first", "second", "third")], ids=len)
def test_adapters_that_are_based_on_each_other_are_refused(bases, load, tmp_path):
    for index, name in enumerate(bases):
        config = {"peft_type": "LORA", "base_model_name_or_path": str(tmp_path / bases[(index + 1) % len(bases)])}
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(config))

    # A model that is no part of the cycle, but leads to it.
    outer = {"peft_type": "LORA", "base_model_name_or_path": str(tmp_path / "first")}
    (tmp_path / "outer").mkdir()
    (tmp_path / "outer" / "adapter_config.json").write_text(json.dumps(outer))
    for name in ("first", "outer"):
        with pytest.raises(ModelError, match=f"^the adapter '{tmp_path / 'first'}' is its own base model"):
            LOADERS[load](str(tmp_path / name))


def test_an_adapter_with_a_tokenizer_has_it_also_without_its_base(checkpoints, tmp_path):
    base = shutil.copytree(checkpoints["gpt2"], tmp_path / "base")
    tokenizer = load_tokenizer(str(base))
    saved = make_policy("causal", base, peft=LORA).save_model(tmp_path / "adapter", tokenizer)
    shutil.rmtree(base)
    assert load_tokenizer(str(saved)).get_vocab() == tokenizer.get_vocab()


@pytest.mark.parametrize("load", ["model", "tokenizer", "config"])
def test_a_name_that_no_file_can_have_is_a_model_error(load):
    with pytest.raises(ModelError, match="cannot load"):
        LOADERS[load]("models/tiny\0gpt2")


def test_a_folder_below_home_is_a_model_like_any_other(checkpoints, tmp_path, monkeypatch):
    adapter = changed(make_policy("causal", checkpoints["gpt2"], peft=LORA))
    adapter.save_model(tmp_path / "adapter", load_tokenizer(str(checkpoints["gpt2"])))
    shutil.copytree(checkpoints["gpt2"], tmp_path / "whole")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("whole", "adapter"):
        model, _ = load_model(AutoModelForCausalLM, f"~/{name}")
        assert not has_lora(model) and load_tokenizer(f"~/{name}").eos_token is not None
    assert whole_checkpoint("~/whole") == str(tmp_path / "whole")
    again = make_env_free_policy("causal", "~/whole", vocabulary=adapter.vocab_size, peft=LORA)
    saved = again.save_model(tmp_path / "second")
    assert json.loads((saved / "adapter_config.json").read_text())["base_model_name_or_path"] == str(tmp_path / "whole")


def test_an_adapter_of_another_model_is_refused(checkpoints, tmp_path):
    saved = make_policy("causal", checkpoints["gpt2"], peft=LORA).save_model(tmp_path / "adapter")
    file = saved / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": str(checkpoints["llama"])}))
    with pytest.raises(ModelError, match=str(saved)):
        load_model(AutoModelForCausalLM, str(saved))


# --- what does not fit ------------------------------------------------------------------------------------------------


def test_a_file_without_one_of_the_adapters_is_refused(checkpoints, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(checkpoints["gpt2"])
    add_lora(model, {"r": 2}, dropout=False)
    file = tmp_path / "adapter_model.safetensors"
    weights = peft_package.get_peft_model_state_dict(model, save_embedding_layers=False)
    save_file(weights, file)
    load_adapters(model, file)

    lost = next(name for name in weights if "lora_B" in name)
    save_file({name: weight for name, weight in weights.items() if name != lost}, file)
    with pytest.raises(ModelError, match=re.escape(lost.removesuffix(".weight"))):
        load_adapters(model, file)


def test_an_adapter_of_the_output_layer_is_read_through_the_model(checkpoints):
    policy = make_policy("causal", checkpoints["llama"], peft={**LORA, "target_modules": ["lm_head", "q_proj"]})
    assert policy.reader.head_scale is None
    assert policy.ref_reader.head_scale is not None
    check_parity(changed(policy).reader, "changed")


@pytest.mark.parametrize(("family", "target"), [("gpt2", "lm_head"), ("gpt2", "wte"), ("t5", "shared")])
def test_tied_weights_take_no_adapter(family, target, checkpoints):
    with pytest.raises(ModelError, match=target):
        make_policy(FAMILIES[family], checkpoints[family], peft={**LORA, "target_modules": [target]})


def test_modules_that_are_not_there_are_named(checkpoints):
    with pytest.raises(ModelError, match="nowhere"):
        make_policy("causal", checkpoints["gpt2"], peft={"target_modules": ".*nowhere"})


@pytest.mark.parametrize(
    ("peft", "name"),
    [
        ({"target_modules": ["c_attn", "c_prjo"]}, r"peft\.target_modules: 'c_prjo' .*'c_proj'"),
        ({"target_modules": "all-linear", "exclude_modules": ["nope"]}, "exclude_modules: 'nope'"),
        ({"target_modules": ["c_attn", "query_key_value"]}, "'query_key_value' .*its layers: c_attn, c_fc, c_proj"),
        ({"target_modules": ["c_attn"], "rank_pattern": {"h.7.attn.c_attn": 2}}, r"peft\.rank_pattern: 'h\.7"),
    ],
)
def test_every_name_must_be_that_of_a_layer(peft, name, checkpoints):
    """PEFT is content if one name of a list fits: a typo would leave layers without adapters."""
    with pytest.raises(ModelError, match=name):
        make_policy("causal", checkpoints["gpt2"], peft=peft)


def test_a_name_may_be_that_of_the_critics_layers_only(checkpoints):
    peft = {**LORA, "target_modules": ["c_attn", "q_proj"], "rank_pattern": {r"h\.\d\.attn\.c_attn": 2}}
    policy = make_policy("causal", checkpoints["gpt2"], peft=peft, critic_model=str(checkpoints["llama"]))
    assert any("q_proj" in name for name in adapters(policy.value_model))
    assert all(weight.shape[0] == 2 for name, weight in adapters(policy.policy_model).items() if "lora_A" in name)


def test_without_peft_the_extra_is_named(checkpoints, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(MissingExtraError) as caught:
        make_policy("causal", checkpoints["gpt2"], peft=LORA)
    assert caught.value.extra == "peft"
