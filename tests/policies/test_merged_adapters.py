"""Merged adapters compute what PEFT's separate ones do, and are never stale."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from rl4lms_like.config.run_config import AverageConfig
from rl4lms_like.core import products
from rl4lms_like.core.episodes import EpisodeBatch
from rl4lms_like.policies import merged_adapters
from rl4lms_like.policies.loading import load_tokenizer
from rl4lms_like.policies.merged_adapters import MergedAdapters, mergeable_layers
from rl4lms_like.system.errors import ModelError
from rl4lms_like.testing import models
from rl4lms_like.training.averages import average_of
from tests.builders import MASKABLE, POLICIES, episodes_of_lengths, make_policy
from tests.policies.test_lora import adapters, make_algorithm

pytest.importorskip("peft")

LORA = {"r": 4, "lora_alpha": 16, "target_modules": "all-linear"}
SEPARATE = {"speedups": {"merged_adapters": False}}
FAMILIES = {"llama": "causal", "qwen2": "causal", "gemma2": "causal", "gpt2": "causal", "t5": "seq2seq"}
LAYERS = {"llama": 14, "qwen2": 14, "gemma2": 14, "gpt2": 8, "t5": 32}
"""Number of linear layers of two blocks; T5's have an encoder and a decoder with two attentions, and gated products."""
N_ITERATIONS = 2  # of the compared runs


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder, saved = tmp_path_factory.mktemp("families"), {}
    for family, kind in FAMILIES.items():
        tokenizer = models.make_tokenizer(append_eos=kind == "seq2seq")
        make = models.make_causal_lm if kind == "causal" else models.make_seq2seq_lm
        # Far from uniform: the log-probs depend on every layer.
        model = make(family, tokenizer, scale=1.0 if kind == "seq2seq" else 10.0)
        saved[family] = models.save_model(folder / family, model, tokenizer)
    return saved


@pytest.fixture(params=FAMILIES)
def family(request, checkpoints):
    """A family's name, its kind and its checkpoint."""
    return request.param, FAMILIES[request.param], checkpoints[request.param]


def changed(policy):
    """Adapters of policy and critic that no longer add nothing."""
    generator = torch.Generator().manual_seed(1)
    for weight in adapters(policy).values():
        weight.data += 0.1 * torch.randn(weight.shape, generator=generator)
    return policy


def pair(kind, folder, **arguments):
    """A policy with merged adapters, and one with separate ones; their adapters are the same and change the output."""
    merged = changed(make_policy(kind, folder, **{"peft": LORA, "value_head_init": "default", **arguments}))
    separate = make_policy(kind, folder, **{"peft": LORA, **SEPARATE, **arguments})
    separate.load_state_dict(merged.state_dict())
    return merged, separate


def episodes(kind, *, groups=False) -> EpisodeBatch:
    """Episodes of different lengths, with padding; in groups of two responses to a prompt."""
    batch = episodes_of_lengths(
        [5, 3, 1, 6], prompt_lengths=[4, 4, 2, 2], side="right" if kind == "seq2seq" else "left", response_padding=1
    )
    if not groups:
        return batch
    rows = torch.tensor([0, 0, 2, 2])
    return replace(
        batch,
        prompt_ids=batch.prompt_ids[rows],
        prompt_mask=batch.prompt_mask[rows],
        group_ids=torch.tensor([0, 0, 1, 1]),
        prompt_rows=torch.tensor([0, 0, 1, 1]),
    )


def gradients(policy, batch) -> dict[str, torch.Tensor]:
    values, log_prob, entropy = policy.evaluate_actions(batch)
    weights = torch.linspace(-1, 1, len(log_prob))
    policy.zero_grad()
    (weights @ log_prob + 0.1 * entropy.sum() + (values**2).sum()).backward()
    return {name: weight.grad for name, weight in policy.named_parameters() if weight.requires_grad}


def log_probs(policy, batch):
    with torch.no_grad():
        return policy.action_scores(batch).log_prob


def assert_same_log_probs(merged, separate, batch):
    assert torch.allclose(log_probs(merged, batch), log_probs(separate, batch), atol=2e-5)


# --- the same numbers -------------------------------------------------------------------------------------------------


def test_all_linear_layers_are_merged(family):
    name, kind, folder = family
    assert len(mergeable_layers(make_policy(kind, folder, peft=LORA).policy_model)) == LAYERS[name]


@pytest.mark.parametrize("groups", [False, True], ids=["prompts", "shared_prompts"])
def test_scores_and_gradients_are_those_of_separate_adapters(family, groups):
    _, kind, folder = family
    merged, separate = pair(kind, folder)
    batch = episodes(kind, groups=groups)
    for mine, theirs in zip(merged.score(batch), separate.score(batch), strict=True):
        assert torch.allclose(mine, theirs, atol=2e-5)
    assert torch.allclose(merged.final_values(batch), separate.final_values(batch), atol=2e-5)
    assert torch.allclose(merged.predict_values(batch), separate.predict_values(batch), atol=2e-5)

    mine, theirs = gradients(merged, batch), gradients(separate, batch)
    assert mine.keys() == theirs.keys() and len(mine) > 20
    for name, gradient in theirs.items():
        assert float(gradient.norm()) > 0
        assert float((mine[name] - gradient).norm()) <= 1e-4 * float(gradient.norm()), name


@pytest.mark.skipif(products.why_mkl() is not None, reason=str(products.why_mkl()))
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_merged_products_by_onednn(checkpoints, name, monkeypatch):
    monkeypatch.setattr(products, "MIN_ROWS", 1)
    monkeypatch.setattr(products, "MIN_SIDE", 1)
    merged, _ = pair("causal", checkpoints[name], use_reference=False, critic="none")
    off = {"speedups": dict.fromkeys(merged.arguments.used_speedups.__dataclass_fields__, False)}
    plain = make_policy("causal", checkpoints[name], peft=LORA, use_reference=False, critic="none", **off)
    plain.load_state_dict(merged.state_dict())

    with torch.profiler.profile() as profile:
        mine = gradients(merged, episodes("causal"))
    for key, gradient in gradients(plain, episodes("causal")).items():
        assert float((mine[key] - gradient).norm()) <= 1e-4 * float(gradient.norm()), key

    # One product a layer in each direction, without a gradient of the first layers' inputs; and those of the head.
    counts = {event.key: event.count for event in profile.key_averages()}
    n_first = 3 if name == "llama" else 1
    assert counts["mkldnn::_linear_pointwise"] >= 2 * LAYERS[name] - n_first


def test_generated_texts_are_those_of_separate_adapters(family):
    _, kind, folder = family
    batch = episodes(kind)
    merged, separate = pair(kind, folder)
    prompts = (batch.prompt_ids, batch.prompt_mask)
    mine, theirs = (p.generate(*prompts, eos_token_ids=[1], max_new_tokens=8, seed=3) for p in (merged, separate))
    assert torch.equal(mine.response_ids, theirs.response_ids)


@pytest.mark.parametrize("critic", ["separate", "shared"])
def test_a_critic_has_merged_adapters_of_its_own(checkpoints, critic):
    merged, separate = pair("causal", checkpoints["llama"], critic=critic)
    batch = episodes("causal")
    mine, theirs = gradients(merged, batch), gradients(separate, batch)
    for name, gradient in theirs.items():
        assert float((mine[name] - gradient).norm()) <= 1e-4 * float(gradient.norm()), name
    is_separate = any(name.startswith("value_model") for name in theirs)
    assert is_separate == (critic == "separate")


@pytest.mark.parametrize(
    "peft",
    [{"use_rslora": True}, {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 3}}, {"target_modules": None}],
    ids=["rslora", "patterns", "default_layers"],
)
def test_scales_and_ranks_of_layers_are_peft_s(checkpoints, peft):
    merged, separate = pair("causal", checkpoints["llama"], peft={**LORA, **peft})
    assert_same_log_probs(merged, separate, episodes("causal"))


def test_other_layers_remain_those_of_peft(checkpoints):
    # Embeddings, an output layer with an adapter, and trained rows of tokens.
    for fields in ({"target_modules": ["q_proj", "embed_tokens"]}, {"target_modules": ["q_proj", "lm_head"]}):
        merged, separate = pair("causal", checkpoints["qwen2"], peft={**LORA, **fields})
        assert_same_log_probs(merged, separate, episodes("causal"))
    merged, separate = pair("causal", checkpoints["llama"], peft={**LORA, "trainable_token_indices": [3, 4]})
    assert_same_log_probs(merged, separate, episodes("causal"))
    mine, theirs = gradients(merged, episodes("causal")), gradients(separate, episodes("causal"))
    for name, gradient in theirs.items():
        assert torch.allclose(mine[name], gradient, atol=1e-4), name


def test_the_mask_model_and_its_policy(checkpoints):
    arguments = {"policies": MASKABLE, "top_mask": 20}
    merged, separate = pair("causal", checkpoints["gpt2"], **arguments)
    for policy in (merged, separate):
        policy.update_mask_model()
    batch = episodes("causal")
    prompts = (batch.prompt_ids, batch.prompt_mask)
    mine, theirs = (p.generate(*prompts, eos_token_ids=[], max_new_tokens=6, seed=3) for p in (merged, separate))
    assert torch.equal(mine.response_ids, theirs.response_ids) and torch.equal(mine.allowed, theirs.allowed)
    assert_same_log_probs(merged, separate, mine)


# --- one update -------------------------------------------------------------------------------------------------------

UPDATES = {
    "ppo": {"n_steps": 20, "batch_size": 80, "n_epochs": 2, "micro_batch_size": 60},
    "grpo": {"n_steps": 20, "group_size": 4, "micro_batch_size": 100, "n_epochs": 2, "batch_size": 100},
    "trpo": {"n_steps": 20},
}


@pytest.mark.parametrize("id", UPDATES)
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_weights_after_updates_are_those_of_separate_adapters(checkpoints, name, id):
    before, trained = {}, []
    for speedups in ({}, SEPARATE):
        # AdamW's default turns rounding errors of gradients that are almost 0 into full steps.
        optimizer = {"optimizer_kwargs": {"eps": 1e-5}}
        arguments = {**UPDATES[id], "learning_rate": 1e-3}
        algorithm = make_algorithm(
            id, FAMILIES[name], checkpoints[name], arguments=arguments, peft=LORA, **optimizer, **speedups
        )
        before = copy.deepcopy(adapters(algorithm.policy))
        for iteration in range(N_ITERATIONS):
            algorithm.learn_iteration(iteration, N_ITERATIONS)
        trained.append((algorithm.rollout_buffer.episodes, adapters(algorithm.policy)))

    (mine_read, mine), (theirs_read, theirs) = trained
    assert torch.equal(mine_read.response_ids, theirs_read.response_ids)
    for key, weight in theirs.items():
        step = (weight - before[key]).abs().max()
        assert step > 0
        assert (mine[key] - weight).abs().max() <= 0.01 * step, key


def test_only_one_derivative_is_possible(checkpoints):
    policy = changed(make_policy("causal", checkpoints["llama"], peft=LORA))
    first = adapters(policy.policy_model)
    log_prob = policy.action_scores(episodes("causal")).log_prob.sum()
    (gradient, *_) = torch.autograd.grad(log_prob, list(first.values()), create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


# --- never stale ------------------------------------------------------------------------------------------------------


def step_of_fused_adamw(policy):
    versions = [weight._version for weight in adapters(policy.policy_model).values()]
    loss = policy.action_scores(episodes("causal")).log_prob.sum()
    loss.backward()
    for group in policy.optimizer.param_groups:
        assert group["fused"]
        group["lr"] = 0.1
    policy.optimizer.step()
    # This is why torch's version counter cannot be relied on.
    assert [weight._version for weight in adapters(policy.policy_model).values()] == versions


def write_to_the_data(policy):
    with torch.no_grad():
        for weight in adapters(policy.policy_model).values():
            weight.data.mul_(1.5)


def replace_the_data(policy):
    for weight in adapters(policy.policy_model).values():
        weight.data = 1.5 * weight.data


def load_another_base(policy):
    state = policy.state_dict()
    for name in state:
        if "base_layer" in name:
            state[name] = 1.5 * state[name]
    policy.load_state_dict(state)


def load_training_state(policy):
    for name, weight in policy.training_state().items():
        if "lora_B" in name:
            weight.copy_(0.5 * weight)


CHANGES = [step_of_fused_adamw, write_to_the_data, replace_the_data, load_another_base, load_training_state]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_merged_weights_follow_every_change(checkpoints, change):
    merged, separate = pair("causal", checkpoints["llama"])
    batch = episodes("causal")
    before = log_probs(merged, batch)
    change(merged)
    separate.load_state_dict(merged.state_dict())
    assert (log_probs(separate, batch) - before).abs().max() > 1e-2  # stale weights would be far away
    assert_same_log_probs(merged, separate, batch)


def test_a_gpu_is_asked_once_in_a_step(checkpoints, monkeypatch):
    """It would have to finish its work for each micro-batch otherwise."""
    merged, separate = pair("causal", checkpoints["llama"], critic="none")
    monkeypatch.setattr(merged_adapters, "_waits", lambda weights: True)
    batch = episodes("causal")
    n_comparisons = 0
    equal = torch.equal

    def counted(*tensors):
        nonlocal n_comparisons
        n_comparisons += 1
        return equal(*tensors)

    with torch.no_grad():
        merged.score(batch)
    monkeypatch.setattr(torch, "equal", counted)
    for n_steps in range(3):  # the first minibatch has the weights of the scores
        for _ in range(3):
            merged.action_scores(batch).log_prob.sum().backward()
        merged.optimizer.step()
        assert n_comparisons == n_steps

    # The next pass has the new weights, and passes without gradients are compared: an average leaves no sign.
    separate.load_state_dict(merged.state_dict())
    log_prob, expected = (policy.action_scores(batch).log_prob for policy in (merged, separate))
    assert torch.allclose(log_prob, expected, atol=2e-5)
    write_to_the_data(merged)
    separate.load_state_dict(merged.state_dict())
    with torch.no_grad():
        assert_same_log_probs(merged, separate, batch)


def test_merged_weights_follow_averages_and_back(checkpoints):
    merged, _ = pair("causal", checkpoints["llama"])
    batch = episodes("causal")
    average = average_of(AverageConfig(decay=0.5), merged.policy_model)
    write_to_the_data(merged)
    before = log_probs(merged, batch)
    average.update(1)
    with average.in_model():
        assert (log_probs(merged, batch) - before).abs().max() > 1e-2
    assert torch.equal(log_probs(merged, batch), before)


def test_merged_weights_follow_a_move_to_other_numbers(checkpoints):
    merged, _ = pair("causal", checkpoints["llama"])
    batch = episodes("causal")
    before = log_probs(merged, batch)
    assert torch.allclose(log_probs(merged.to(torch.float64), batch), before, atol=1e-4)
    assert torch.allclose(log_probs(merged.to(torch.float32), batch), before, atol=1e-6)


def test_a_graph_with_earlier_weights_is_not_differentiated_with_later_ones(checkpoints):
    merged, _ = pair("causal", checkpoints["llama"])
    loss = merged.action_scores(episodes("causal")).log_prob.sum()
    write_to_the_data(merged)
    log_probs(merged, episodes("causal"))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_stale_weight_is_found_by_the_comparison_with_separate_adapters(checkpoints, monkeypatch):
    algorithm = grpo(checkpoints["llama"])
    algorithm.learn_iteration(0, 4)
    algorithm.learn_iteration(1, 4)
    assert 0 < logged(algorithm, "rollout_info/merged_gap") < 1e-4

    # As if the change of the adapters went unnoticed in all passes from here on.
    monkeypatch.setattr(MergedAdapters, "refresh", lambda self, **_: None)
    changed(algorithm.policy)
    with pytest.raises(ModelError, match=r"speedups\.merged_adapters: false"):
        algorithm.policy.merged_gap(algorithm.rollout_buffer.episodes)


def test_the_comparison_is_made_in_the_second_iteration_and_every_ten_from_there(checkpoints, monkeypatch):
    compared, n_iterations = [], 13
    algorithm = grpo(checkpoints["llama"])
    merged_gap = algorithm.policy.merged_gap

    def counted(batch):
        compared.append((algorithm.n_iterations, batch.n_episodes))
        return merged_gap(batch)

    monkeypatch.setattr(algorithm.policy, "merged_gap", counted)
    for iteration in range(n_iterations):
        algorithm.learn_iteration(iteration, n_iterations)
    assert compared == [(1, 4), (11, 4)]


def test_without_merged_adapters_there_is_nothing_to_compare(checkpoints):
    algorithm = grpo(checkpoints["llama"], **SEPARATE)
    for iteration in range(2):
        algorithm.learn_iteration(iteration, 2)
    assert not algorithm.policy.merged_adapters
    assert logged(algorithm, "rollout_info/merged_gap") is None


def grpo(folder, **arguments):
    return make_algorithm("grpo", "causal", folder, arguments=UPDATES["grpo"], peft=LORA, **arguments)


def logged(algorithm, key):
    return algorithm.logger.name_to_value.get(key)


# --- nothing else changes ---------------------------------------------------------------------------------------------


def test_the_frozen_weights_stay_as_they_are(checkpoints):
    policy = make_policy("causal", checkpoints["gpt2"], peft=LORA)
    reference = {name: weight.clone() for name, weight in policy.ref_model.state_dict().items()}
    gradients(changed(policy), episodes("causal"))
    for name, weight in policy.ref_model.state_dict().items():
        assert torch.equal(weight, reference[name])


def test_outside_of_a_pass_the_model_is_peft_s(checkpoints, tmp_path):
    merged, separate = pair("causal", checkpoints["llama"])
    gradients(merged, episodes("causal"))
    assert merged.state_dict().keys() == separate.state_dict().keys()
    assert not any("forward" in vars(module) for module in merged.modules())
    tokenizer = load_tokenizer(str(checkpoints["llama"]))
    for policy, name in ((merged, "merged"), (separate, "separate")):
        policy.save_model(tmp_path / name, tokenizer)
    for file in (tmp_path / "merged").iterdir():
        assert file.read_bytes() == (tmp_path / "separate" / file.name).read_bytes()


def test_a_saved_algorithm_continues_with_the_same_numbers(checkpoints, tmp_path):
    algorithm = grpo(checkpoints["llama"])
    algorithm.learn_iteration(0, 2)
    algorithm.save(tmp_path / "saved.zip")
    again = type(algorithm).load(tmp_path / "saved.zip", device="cpu")
    assert again.policy.merged_adapters
    batch = episodes("causal")
    assert torch.equal(log_probs(again.policy, batch), log_probs(algorithm.policy, batch))
    for name, gradient in gradients(algorithm.policy, batch).items():
        assert torch.equal(gradients(again.policy, batch)[name], gradient)


def test_after_an_exception_the_model_is_peft_s(checkpoints):
    policy = make_policy("causal", checkpoints["llama"], peft=LORA)
    with pytest.raises(ValueError, match="in a pass"), MergedAdapters(policy.policy_model).in_use():
        raise ValueError("in a pass")
    assert not any("forward" in vars(module) for module in policy.modules())


@pytest.mark.parametrize(
    "arguments",
    [
        SEPARATE,
        {"dtype": "bfloat16"},
        {"gradient_checkpointing": True},
        {"compile": True},
        {"peft": {**LORA, "use_dora": True}},
        {"dropout": True, "peft": {**LORA, "lora_dropout": 0.1}},
        {"peft": None},
    ],
    ids=lambda arguments: next(reversed(arguments)),
)
def test_adapters_are_not_merged_where_that_is_not_exact(checkpoints, arguments):
    arguments = {"peft": LORA, **arguments}
    fields = POLICIES["causal"].arguments_class(model_name="any", **arguments)
    assert not fields.merges_adapters


def test_lora_dropout_that_is_not_active_is_no_obstacle(checkpoints):
    peft = {**LORA, "lora_dropout": 0.1}
    merged, separate = pair("causal", checkpoints["llama"], peft=peft)
    assert len(mergeable_layers(merged.policy_model)) == LAYERS["llama"]
    assert_same_log_probs(merged, separate, episodes("causal"))
