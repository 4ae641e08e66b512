"""Each speedup against the path without it: scores, gradients and trained weights are equal up to rounding."""

from __future__ import annotations

import pytest
import torch
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.activations import NewGELUActivation
from transformers.integrations import sdpa_attention

from rl4lms_like.algorithms.ppo import PPO
from rl4lms_like.core import products
from rl4lms_like.policies.faster_layers import IS_GROUPED, ONEDNN_CLASSES
from rl4lms_like.policies.loading import load_tokenizer
from rl4lms_like.policies.speedups import no_speedups
from rl4lms_like.testing import models
from tests.algorithms.test_update import build, parameters
from tests.builders import episodes_of_lengths, make_policy
from tests.oracles.test_shared_prompts import gradients, grouped, separate

GRADIENTS = 1e-4
"""Largest difference of gradients, relative to their norm."""
STEP = 0.01
"""Largest difference of trained weights, relative to an optimizer step."""

CONFIGS = {
    "gpt2": {},
    "llama": {"num_key_value_heads": 2},
    "qwen2": {"num_key_value_heads": 2},
    "gemma2": {"num_key_value_heads": 2},
    "t5": {"feed_forward_proj": "gated-gelu"},
}
"""Family -> config; the activation of gated T5 is GPT-2's, and Gemma 2 only has an attention that copies."""
APPLICABLE = {
    "fused_activations": ("gpt2", "t5"),
    "grouped_attention": ("llama", "qwen2"),
    "onednn": tuple(CONFIGS),
}
CASES = [pytest.param(key, family, id=f"{key}-{family}") for key, names in APPLICABLE.items() for family in names]

needs_onednn = pytest.mark.skipif(products.why_mkl() is not None, reason=str(products.why_mkl()))


@pytest.fixture(autouse=True)
def products_of_any_size(monkeypatch):
    """Let tiny models use oneDNN's operator too."""
    monkeypatch.setattr(products, "MIN_ROWS", 1)
    monkeypatch.setattr(products, "MIN_SIDE", 1)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder, saved = tmp_path_factory.mktemp("families"), {}
    for family, config in CONFIGS.items():
        tokenizer = models.make_tokenizer(append_eos=family == "t5")
        if family == "t5":
            model = models.make_seq2seq_lm(family, tokenizer, scale=1.0, **config)
        else:
            model = models.make_causal_lm(family, tokenizer, scale=5.0, **config)
        saved[family] = models.save_model(folder / family, model, tokenizer)
    return saved


@pytest.fixture
def case(request, checkpoints):
    """A speedup, and the kind and the checkpoint of a family that has it."""
    key, family = request.param
    if key == "onednn" and products.why_mkl() is not None:
        pytest.skip(products.why_mkl())
    return key, "seq2seq" if family == "t5" else "causal", checkpoints[family]


def test_every_speedup_has_a_case():
    # The first one changes no number. Of the others, the modules test_merged_adapters, test_sampler_log_probs,
    # test_decoding and test_packed_weights have the cases.
    elsewhere = {"keep_freed_memory", "merged_adapters", "sampler_log_probs", "fast_decoding", "packed_weights"}
    assert elsewhere | set(APPLICABLE) == set(no_speedups())


def only(*keys):
    return {"speedups": no_speedups() | dict.fromkeys(keys, True)}


def n_changed(model):
    """Number of layers that each speedup has changed."""
    layers = list(model.modules())
    return {
        "fused_activations": sum(isinstance(layer, torch.nn.GELU) for layer in layers),
        "grouped_attention": sum(hasattr(layer, IS_GROUPED) for layer in layers),
        "onednn": sum(type(layer) in ONEDNN_CLASSES.values() for layer in layers),
    }


def assert_close_gradients(actual, expected):
    assert float(expected.norm()) > 1e-2
    assert float((actual - expected).norm()) < GRADIENTS * float(expected.norm())


every_case = pytest.mark.parametrize(
    "case", [case.values for case in CASES], ids=[case.id for case in CASES], indirect=True
)


@every_case
@pytest.mark.parametrize("adapters", [{}, {"peft": {"r": 4, "lora_alpha": 16}}], ids=["whole", "lora"])
def test_scores_and_gradients_are_those_without_it(case, adapters):
    if adapters:
        pytest.importorskip("peft")
    key, kind, folder = case
    plain = make_policy(kind, folder, value_head_init="default", **adapters, **only())
    fast = make_policy(kind, folder, value_head_init="default", **adapters, **only(key))
    for network in (fast.policy_model, fast.value_model, fast.ref_model):
        changed = n_changed(network)
        assert [name for name, n in changed.items() if n] == [key]
    assert not any(n_changed(plain.policy_model).values())

    # Responses of unequal length to prompts of unequal length, so that there are masks.
    episodes = grouped(plain)
    for part in (episodes, separate(episodes)):
        expected = plain.score(part)
        for name, scores in fast.score(part)._asdict().items():
            torch.testing.assert_close(scores, getattr(expected, name), atol=5e-5, rtol=1e-5, msg=name)
        assert_close_gradients(gradients(fast, part), gradients(plain, part))


@every_case
def test_weights_after_an_update_with_micro_batches_are_those_without_it(case):
    key, kind, folder = case
    trained = []
    for keys in ((), (key,)):
        algorithm = build(
            PPO,
            folder,
            load_tokenizer(str(folder)),
            kind,
            policy_kwargs=only(*keys),
            reward=lambda response: float(len(response) % 7),
            micro_batch_size=30,
        )
        initial = parameters(algorithm)
        algorithm.learn_iteration(0, 1000)
        trained.append(parameters(algorithm))
    plain, fast = trained
    step = float((plain - initial).norm())
    assert step > 0.1
    assert float((fast - plain).norm()) < STEP * step


def test_without_masks_and_with_one_query_transformers_attends(checkpoints, monkeypatch):
    """It has its own ways without copies there; with a mask, only ours is called."""
    calls = []
    own = sdpa_attention.sdpa_attention_forward
    monkeypatch.setattr(
        "rl4lms_like.policies.faster_layers.sdpa_attention_forward",
        lambda *args, **kwargs: calls.append(args[1].shape[2]) or own(*args, **kwargs),
    )
    model = make_policy("causal", checkpoints["llama"], **only("grouped_attention")).policy_model
    ids, mask = torch.ones(2, 4, dtype=torch.int64), torch.ones(2, 4, dtype=torch.int64)
    mask[0, 0] = 0
    calls.clear()
    model(input_ids=ids, attention_mask=mask)
    assert calls == []
    model(input_ids=ids)
    assert set(calls) == {4}


def test_a_model_of_another_run_keeps_its_attention(checkpoints):
    make_policy("causal", checkpoints["llama"], **only("grouped_attention"))
    model = AutoModelForCausalLM.from_pretrained(checkpoints["llama"])
    ids, mask = torch.arange(8).view(2, 4), torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    with_ours = torch.autograd.grad(model(input_ids=ids, attention_mask=mask).logits.sum(), list(model.parameters()))
    ours = AttentionInterface()["sdpa"]
    try:
        AttentionInterface.register("sdpa", sdpa_attention.sdpa_attention_forward)
        expected = torch.autograd.grad(model(input_ids=ids, attention_mask=mask).logits.sum(), list(model.parameters()))
    finally:
        AttentionInterface.register("sdpa", ours)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(with_ours, expected, strict=True))


def test_a_fused_activation_keeps_one_tensor_for_the_backward_pass():
    x = torch.randn(8, 16, requires_grad=True)
    kept = []
    for activation in (NewGELUActivation(), torch.nn.GELU(approximate="tanh")):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, sizes=sizes: sizes.append(t.data_ptr()) or t, lambda t: t
        ):
            activation(x)
        kept.append(len(set(sizes)))
    assert kept[1] == 1 < kept[0]


@needs_onednn
def test_processors_with_another_product_and_compiled_networks_keep_their_layers(checkpoints, monkeypatch):
    compiled = make_policy("causal", checkpoints["gpt2"], compile=True, **only("onednn"))
    assert n_changed(compiled.policy_model)["onednn"] == 0
    monkeypatch.setattr("rl4lms_like.policies.faster_layers.why_mkl", lambda: "another processor")
    other = make_policy("causal", checkpoints["gpt2"], **only("onednn"))
    assert n_changed(other.policy_model)["onednn"] == 0


def test_a_saved_model_is_that_of_the_checkpoint(checkpoints, tmp_path):
    policy = make_policy("causal", checkpoints["gpt2"])
    assert any(n_changed(policy.policy_model).values())
    policy.save_model(tmp_path / "saved")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    original = AutoModelForCausalLM.from_pretrained(checkpoints["gpt2"])
    assert saved.config.activation_function == original.config.activation_function == "gelu_new"
    for (name, weight), (expected_name, expected) in zip(
        saved.state_dict().items(), original.state_dict().items(), strict=True
    ):
        assert name == expected_name
        assert torch.equal(weight, expected)


@needs_onednn
def test_the_logits_of_a_rollout_use_the_operator(checkpoints):
    policy = make_policy("causal", checkpoints["gpt2"], **only("onednn"))
    episodes = episodes_of_lengths([9, 4], vocab_size=300)
    with torch.profiler.profile() as profile:
        policy.score(episodes)
    counts = {event.key: event.count for event in profile.key_averages()}

    # Policy, critic and reference; policy and reference also have a head.
    n_layers = n_changed(policy.value_model)["onednn"]
    assert counts["mkldnn::_linear_pointwise"] == 3 * n_layers + 2
