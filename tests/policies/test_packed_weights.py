"""Generation with packed weights: the distribution of the policy as it is now, which is not changed."""

from __future__ import annotations

import pytest
import torch

from rl4lms_like.algorithms.policy_gradient import GRPO
from rl4lms_like.config.load import parse_config
from rl4lms_like.core import products
from rl4lms_like.estimates.memory import estimate_memory
from rl4lms_like.policies import generating_weights
from rl4lms_like.policies.speedups import all_speedups, no_speedups
from rl4lms_like.testing import models
from tests.algorithms.test_update import build
from tests.builders import SAMPLING, make_policy
from tests.configs import run_blocks

pytestmark = pytest.mark.skipif(products.why_mkl() is not None, reason=str(products.why_mkl()))

FAMILIES = {"gpt2": {}, "llama": {"num_key_value_heads": 2}, "qwen2": {}, "gemma2": {}, "t5": {}}
ADAPTERS = {"r": 4, "target_modules": "all-linear", "init_lora_weights": "gaussian"}
ON = {"speedups": no_speedups() | {"packed_weights": True}}


@pytest.fixture(autouse=True)
def weights_of_any_size(monkeypatch):
    """Let tiny models pack their weights too; count the products with them."""
    counted = []
    multiply = generating_weights.product_with_packed
    monkeypatch.setattr(products, "MIN_PACKED", 1)
    monkeypatch.setattr(
        generating_weights,
        "product_with_packed",
        lambda *tensors, **named: counted.append(1) or multiply(*tensors, **named),
    )
    return counted


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory, tiny_tokenizer):
    """Kind and folder of a random model far from uniform."""
    is_causal = request.param != "t5"
    make = models.make_causal_lm if is_causal else models.make_seq2seq_lm
    model = make(request.param, tiny_tokenizer, scale=5.0 if is_causal else 1.0, **FAMILIES[request.param])
    folder = models.save_model(tmp_path_factory.mktemp(request.param), model, tiny_tokenizer)
    return "causal" if is_causal else "seq2seq", folder


def generate(policy, n_tokens=12, **options):
    ids = torch.arange(24).reshape(4, 6)
    options |= {"eos_token_ids": [], "max_new_tokens": n_tokens, "record_log_prob": True, "seed": 1}
    return policy.generate(ids, torch.ones_like(ids), **options)


def move_adapters(policy, seed):
    """Change the adapters, as an optimizer step does."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in policy.policy_model.named_parameters():
        if "lora_B" in name:
            weight.data.copy_(0.1 * torch.randn(weight.shape, generator=generator))


@pytest.mark.parametrize("merges", [None, False, True], ids=["whole", "adapters", "merged adapters"])
def test_the_distribution_is_that_of_a_pass_with_the_weights_of_now(family, merges, weights_of_any_size):
    kind, folder = family
    settings = {"speedups": ON["speedups"] | {"merged_adapters": bool(merges)}}
    policy = make_policy(kind, folder, critic="none", peft=None if merges is None else ADAPTERS, **settings)
    for seed in (0, 1):
        move_adapters(policy, seed)
        episodes = generate(policy)
        torch.testing.assert_close(episodes.behavior_log_prob, policy.score(episodes).log_prob, atol=5e-5, rtol=1e-5)
    assert weights_of_any_size
    assert not any("forward" in vars(layer) for layer in policy.policy_model.modules()), "every layer is restored"


@pytest.mark.parametrize("peft", [None, ADAPTERS], ids=["whole", "adapters"])
def test_in_bfloat16_they_are_those_without_packing(family, peft, weights_of_any_size):
    kind, folder = family
    policies = [make_policy(kind, folder, critic="none", peft=peft, speedups=block) for block in (None, no_speedups())]
    scores = []
    for policy in policies:
        move_adapters(policy, 0)
        n_before = len(weights_of_any_size)
        episodes = generate(policy, dtype="bfloat16")
        scores.append((episodes.behavior_log_prob, policy.score(episodes).log_prob))
        assert (len(weights_of_any_size) > n_before) == policy.arguments.used_speedups.packed_weights
    for recorded, exact in scores:
        assert 1e-5 < float((recorded - exact).abs().max()) < 0.1


def test_a_short_response_and_another_argument_do_without(tiny_gpt2_dir, weights_of_any_size):
    policy = make_policy("causal", tiny_gpt2_dir, **ON)
    generate(policy, n_tokens=generating_weights.MIN_STEPS - 1)
    generate(make_policy("causal", tiny_gpt2_dir, speedups=no_speedups()))
    generate(make_policy("causal", tiny_gpt2_dir, dtype="bfloat16", **ON))
    assert not weights_of_any_size
    assert not make_policy("causal", tiny_gpt2_dir, compile=True, **ON).generator.packs_weights
    generate(policy, n_tokens=generating_weights.MIN_STEPS)
    assert weights_of_any_size


def test_small_weights_are_not_packed(tiny_gpt2_dir, weights_of_any_size, monkeypatch):
    monkeypatch.setattr(products, "MIN_PACKED", 2**16)
    generate(make_policy("causal", tiny_gpt2_dir, **ON))
    assert not weights_of_any_size


def test_a_first_ratio_of_an_update_is_one(tiny_gpt2_dir, tiny_tokenizer, weights_of_any_size):
    built = build(GRPO, tiny_gpt2_dir, tiny_tokenizer, group_size=4, policy_kwargs={"speedups": all_speedups()})
    built.learn_iteration(0, 1)
    assert weights_of_any_size and float(built.logger.name_to_value["train/ratio_gap"]) < 1e-4


def test_an_encoder_that_reads_the_prompts_once_is_not_packed(tiny_t5_dir, monkeypatch):
    policy = make_policy("seq2seq", tiny_t5_dir, **ON)
    packed = []
    monkeypatch.setattr(
        generating_weights, "packed", lambda weight: packed.append(weight.numel()) or products.packed(weight)
    )
    generate(policy)
    layers = [layer for layer in policy.policy_model.decoder.modules() if type(layer) is torch.nn.Linear]
    head = policy.policy_model.get_output_embeddings()
    assert sorted(packed) == sorted(layer.weight.numel() for layer in (*layers, head))
    assert sum(packed) == generating_weights.n_packed_weights(policy.policy_model)


def test_the_turns_of_dialogues_share_the_copies_of_the_first(tiny_gpt2_dir, monkeypatch):
    policy = make_policy("causal", tiny_gpt2_dir, speedups=ON["speedups"] | {"fast_decoding": True})
    packed = []
    monkeypatch.setattr(generating_weights, "packed", lambda weight: packed.append(1) or products.packed(weight))
    contexts = policy.new_contexts()
    ids = torch.arange(24).reshape(4, 6)
    settings = {"eos_token_ids": [], "max_new_tokens": 8, "record_log_prob": True, "seed": 1}
    first = policy.generate(ids, torch.ones_like(ids), contexts=contexts, **settings)
    n_copies = len(packed)

    texts = torch.cat([ids, first.response_ids, ids[:, :3]], dim=1)
    second = policy.generate(texts, torch.ones_like(texts), contexts=contexts, **settings)
    assert 0 < n_copies == len(packed)
    torch.testing.assert_close(second.behavior_log_prob, policy.score(second).log_prob, atol=5e-5, rtol=1e-5)

    # Those of the next dialogues are made of the weights of then.
    policy.generate(ids, torch.ones_like(ids), contexts=policy.new_contexts(), **settings)
    assert len(packed) == 2 * n_copies


@pytest.mark.parametrize("peft", [None, {"r": 4, "target_modules": "all-linear"}], ids=["whole", "adapters"])
def test_the_estimate_has_the_copies(tiny_gpt2_dir, peft):
    blocks = run_blocks()
    policy = blocks["alg"]["policy"]["args"]
    policy |= {"model_name": str(tiny_gpt2_dir), "peft": peft, "generation_kwargs": {**SAMPLING, "max_new_tokens": 10}}
    blocks["env"]["args"]["max_episode_length"] = 10
    policy["speedups"] = no_speedups()
    assert "generating weights" not in estimate_memory(parse_config(blocks)).parts
    policy["speedups"] = all_speedups()
    made = make_policy("causal", tiny_gpt2_dir)
    head = made.policy_model.get_output_embeddings().weight
    matrices = [weight for name, weight in made.policy_model.named_parameters() if ".h." in name and weight.ndim == 2]
    expected = 4 * sum(weight.numel() for weight in (head, *matrices))
    assert estimate_memory(parse_config(blocks)).parts["generating weights"] == expected

    blocks["env"]["args"]["max_episode_length"] = policy["generation_kwargs"]["max_new_tokens"] = 5
    assert "generating weights" not in estimate_memory(parse_config(blocks)).parts, "too short to be packed"
