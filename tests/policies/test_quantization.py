"""Quantized bases with adapters: the numbers of the dequantized weights, one copy in memory, exact merge and saves."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from rl4lms_like.config.load import parse_config
from rl4lms_like.estimates.memory import estimate_memory
from rl4lms_like.policies.lora import merged
from rl4lms_like.policies.quantized_layers import (
    LAYERS,
    QuantizedLinear,
    n_weights,
    plain_layer,
    quantization_of,
    quantize,
)
from rl4lms_like.system.errors import ModelError
from rl4lms_like.testing import models
from tests.builders import SAMPLING, make_policy
from tests.configs import run_blocks

pytest.importorskip("bitsandbytes")
pytest.importorskip("torchao")
pytest.importorskip("peft")

METHODS = {"nf4": {"id": "nf4"}, "double": {"id": "nf4", "double": True}, "int8": {"id": "int8"}}
ADAPTERS = {"r": 4, "lora_alpha": 16, "target_modules": "all-linear"}
FAMILIES = {"gpt2": "causal", "llama": "causal", "t5": "seq2seq", "bart": "seq2seq"}
AUTO = {"causal": AutoModelForCausalLM, "seq2seq": AutoModelForSeq2SeqLM}


@pytest.fixture(params=METHODS)
def quantization(request):
    return METHODS[request.param]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    """Family and folder of a random model far from uniform."""
    kind = FAMILIES[request.param]
    tokenizer = models.make_tokenizer(append_eos=kind == "seq2seq")
    make = models.make_causal_lm if kind == "causal" else models.make_seq2seq_lm
    model = make(request.param, tokenizer, scale=5.0 if kind == "causal" else 1.0)
    return kind, models.save_model(tmp_path_factory.mktemp(request.param), model, tokenizer)


def move_adapters(policy, size=0.1):
    """Give the adapters values that change the outputs, as after some steps."""
    generator = torch.Generator().manual_seed(0)
    for name, weight in policy.policy_model.named_parameters():
        if "lora_B" in name:
            weight.data.copy_(size * torch.randn(weight.shape, generator=generator))


def is_quantized(model):
    has_layers = any(isinstance(module, QuantizedLinear) for module in model.modules())
    assert has_layers == (quantization_of(model) is not None)
    return has_layers


def probe(policy):
    return policy._probe(policy.reader)


# --- one layer ------------------------------------------------------------------------------------------------------

NF4 = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
       -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
       0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]  # fmt: skip
"""The 16 values of QLoRA's appendix E."""


@pytest.mark.parametrize("shape", [(96, 64), (96, 80), (24, 32)], ids=["rows of blocks", "uneven rows", "short rows"])
def test_nf4_takes_the_nearest_of_sixteen_values_in_each_block_of_64(shape):
    layer = nn.Linear(shape[1], shape[0])
    blocks = layer.weight.detach().reshape(-1, 64)
    largest = blocks.abs().amax(dim=1, keepdim=True)
    values = torch.tensor(NF4)
    nearest = values[((blocks / largest)[..., None] - values).abs().argmin(dim=-1)] * largest
    quantized = LAYERS["nf4"](layer, {"id": "nf4"})
    torch.testing.assert_close(quantized.dequantized(), nearest.reshape(shape), rtol=1e-5, atol=1e-7)
    double = LAYERS["nf4"](layer, {"id": "nf4", "double": True}).dequantized()
    assert 0 < float((double - nearest.reshape(shape)).abs().max()) < 0.02 * float(largest.max())


def test_int8_rounds_each_row_and_computes_what_torchao_does():
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    layer = nn.Linear(80, 96)
    quantized = LAYERS["int8"](layer, {"id": "int8"})
    weight = layer.weight.detach()
    step = weight.abs().amax(dim=1, keepdim=True) / 127
    assert float(((quantized.dequantized() - weight) / step).abs().max()) < 0.51
    inputs = torch.randn(5, 80)
    quantize_(layer, Int8WeightOnlyConfig(set_inductor_config=False))
    torch.testing.assert_close(quantized(inputs), layer(inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(96, 64), (24, 80), (16, 24)])
def test_a_layer_and_all_of_its_derivatives_are_those_of_its_dequantized_weight(quantization, shape):
    layer = LAYERS[quantization["id"]](nn.Linear(shape[1], shape[0]), quantization)
    plain = plain_layer(layer)
    assert type(plain) is nn.Linear and plain.weight.shape == shape and plain.bias is layer.bias
    inputs = torch.randn(2, 3, shape[1], requires_grad=True)
    results = []
    for module in (layer, plain):
        (first,) = torch.autograd.grad(module(inputs).pow(3).sum(), inputs, create_graph=True)
        (second,) = torch.autograd.grad(first.pow(2).sum(), inputs)
        results.append((module(inputs), first, second))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(inputs).dtype == torch.bfloat16
        torch.testing.assert_close(layer(inputs), plain(inputs), rtol=0.02, atol=0.02)


def test_a_layer_keeps_nothing_of_the_size_of_its_weight_for_the_backward_pass(quantization):
    layer = LAYERS[quantization["id"]](nn.Linear(512, 512), quantization)
    kept = []
    inputs = torch.randn(2, 512, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda tensor: tensor):
        layer(inputs).sum()
    assert sum(tensor.numel() for tensor in kept) < 512 * 16


def test_bytes_of_a_layer(quantization):
    layer = LAYERS[quantization["id"]](nn.Linear(512, 512, bias=False), quantization)
    n = 512 * 512
    scales = {"nf4": 4 * n // 64, "int8": 4 * 512}[quantization["id"]]
    if quantization.get("double"):
        scales = n // 64 + 4 * n // 64 // 256 + 4 + 4 * 256
    expected = n // 2 + scales if quantization["id"] == "nf4" else n + scales
    assert sum(weight.nbytes for weight in layer.parameters()) == expected
    assert n_weights(layer) == n
    assert not any(weight.requires_grad for weight in layer.parameters())


# --- policies -------------------------------------------------------------------------------------------------------


def test_a_policy_reads_its_dequantized_weights_and_its_first_kl_is_zero(family, quantization):
    kind, folder = family
    policy = make_policy(kind, folder, peft=ADAPTERS, quantization=quantization)
    plain = AUTO[kind].from_pretrained(folder, dtype=torch.float32)
    n_trained = sum(weight.numel() for weight in policy.policy_model.parameters() if weight.requires_grad)
    assert policy.n_parameters == plain.num_parameters() + n_trained

    # The same weights in a plain model of transformers.
    layers = {name: layer for name, layer in policy.ref_model.named_modules() if isinstance(layer, QuantizedLinear)}
    assert len(layers) > 3
    for name, layer in layers.items():
        weight = layer.dequantized()
        plain.get_submodule(name).weight.data.copy_(weight.T if layer.is_transposed else weight)
    saved = models.save_model(
        folder.parent / f"{folder.name}_plain", plain, models.make_tokenizer(append_eos=kind == "seq2seq")
    )
    other = make_policy(kind, saved, critic="none", use_reference=False)
    scores = policy.score(probe(policy))
    torch.testing.assert_close(scores.log_prob, other.score(probe(policy)).log_prob, rtol=0, atol=1e-5)
    torch.testing.assert_close(scores.log_prob, scores.ref_log_prob, rtol=0, atol=1e-6)


def test_networks_share_the_quantized_weights(family, quantization):
    kind, folder = family
    policy = make_policy(kind, folder, peft=ADAPTERS, quantization=quantization)
    frozen = {id(weight) for weight in policy.policy_model.parameters() if not weight.requires_grad}
    for network in (policy.value_model, policy.ref_model):
        assert is_quantized(network) and quantization_of(network) == quantization
        assert {id(weight) for weight in network.parameters() if not weight.requires_grad} <= frozen


def test_adapters_are_merged_exactly_into_plain_layers(family, quantization, tmp_path):
    kind, folder = family
    policy = make_policy(kind, folder, peft=ADAPTERS, quantization=quantization, merge_on_save=True, critic="none")
    move_adapters(policy)
    log_prob = policy.score(probe(policy)).log_prob
    whole = merged(policy.policy_model)
    assert not is_quantized(whole) and is_quantized(policy.policy_model)
    assert sum(w.numel() for w in whole.parameters()) == AUTO[kind].from_pretrained(folder).num_parameters()
    assert torch.equal(policy.score(probe(policy)).log_prob, log_prob), "the policy is unchanged"

    saved = policy.save_model(tmp_path / "saved", models.make_tokenizer(append_eos=kind == "seq2seq"))
    other = make_policy(kind, saved, critic="none", use_reference=False)
    torch.testing.assert_close(other.score(probe(policy)).log_prob, log_prob, rtol=0, atol=1e-5)
    start = policy.score(probe(policy)).ref_log_prob
    assert float((log_prob - start).abs().max()) > 0.01, "the adapters matter"


def test_layers_without_adapters_are_merged_too(tiny_gpt2_dir, quantization):
    policy = make_policy(
        "causal", tiny_gpt2_dir, peft={"r": 2, "target_modules": ["c_attn"]}, quantization=quantization, critic="none"
    )
    assert not is_quantized(merged(policy.policy_model))


def test_what_the_family_keeps_in_float32_is_not_quantized():
    tokenizer = models.make_tokenizer(append_eos=True)
    t5 = models.make_seq2seq_lm("t5", tokenizer)
    quantize(t5, {"id": "int8"})
    kinds = {name.rpartition(".")[2]: type(layer) for name, layer in t5.named_modules()}
    assert kinds["wo"] is nn.Linear and kinds["lm_head"] is nn.Linear and kinds["q"] is LAYERS["int8"]


# --- gradients ------------------------------------------------------------------------------------------------------


def gradients(policy):
    policy.action_scores(probe(policy)).log_prob.mean().backward()
    found = {name: weight.grad for name, weight in policy.policy_model.named_parameters() if weight.grad is not None}
    policy.zero_grad()
    return found


def test_gradients_of_adapters_are_those_over_a_plain_model(family, quantization):
    kind, folder = family
    policy = make_policy(kind, folder, peft=ADAPTERS, quantization=quantization, critic="none")
    move_adapters(policy)
    expected = gradients(policy)
    for layer in list(policy.policy_model.modules()):
        base = getattr(layer, "base_layer", None)
        if isinstance(base, QuantizedLinear):
            plain = nn.Linear(base.in_features, base.out_features, bias=base.bias is not None)
            plain.weight.data.copy_(base.dequantized())
            if base.bias is not None:
                plain.bias.data.copy_(base.bias)
            layer.base_layer = plain.requires_grad_(False)
    found = gradients(policy)
    assert found.keys() == expected.keys() and any("lora_A" in name for name in found)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)


def test_checkpointed_activations_give_the_same_gradients(tiny_gpt2_dir, quantization):
    found = []
    for checkpointing in (False, True):
        options = {"critic": "none", "gradient_checkpointing": checkpointing}
        policy = make_policy("causal", tiny_gpt2_dir, peft=ADAPTERS, quantization=quantization, **options)
        move_adapters(policy)
        policy.set_training_mode(True)
        found.append(gradients(policy))
    for name, gradient in found[0].items():
        torch.testing.assert_close(gradient, found[1][name], rtol=1e-5, atol=1e-7)


def test_the_check_leaves_adapters_gradients_and_random_numbers_as_they_were(tiny_gpt2_dir):
    policy = make_policy("causal", tiny_gpt2_dir, peft=ADAPTERS, quantization={"id": "nf4"}, critic="none")
    for name, weight in policy.policy_model.named_parameters():
        assert weight.grad is None
        if "lora_B" in name:
            assert torch.equal(weight, torch.zeros_like(weight))
    before = torch.random.get_rng_state()
    policy._check_gradients()
    assert torch.equal(torch.random.get_rng_state(), before)


def detached(self, input, bias):
    """The product of a kernel that has no gradient, as that of bitsandbytes for AVX512-BF16."""
    weight = self.dequantized()
    return torch.nn.functional.linear(input.detach(), weight, bias)


def halved(self, input, bias):
    """The product of a kernel with a wrong gradient."""
    output = torch.nn.functional.linear(input, self.dequantized(), bias)
    return output.detach() + (output - output.detach()) / 2


@pytest.mark.parametrize("product", [detached, halved])
def test_a_kernel_that_loses_gradients_is_found_and_its_layers_are_named(family, product, monkeypatch):
    kind, folder = family
    policy = make_policy(kind, folder, peft=ADAPTERS, quantization={"id": "nf4"}, critic="none")
    expected = policy.score(probe(policy)).log_prob
    monkeypatch.setattr(QuantizedLinear, "_product", product)
    torch.testing.assert_close(policy.score(probe(policy)).log_prob, expected, rtol=0, atol=1e-5)
    first = next(name for name, layer in policy.policy_model.named_modules() if isinstance(layer, QuantizedLinear))
    with pytest.raises(ModelError, match=rf"finite differences(.|\n)*{first} and"):
        make_policy(kind, folder, peft=ADAPTERS, quantization={"id": "nf4"}, critic="none")


def test_the_layers_of_bitsandbytes_would_be_found_where_they_lose_gradients(tiny_tokenizer, tmp_path, monkeypatch):
    from bitsandbytes.functional import has_avx512bf16
    from bitsandbytes.nn import Linear4bit, Params4bit

    if not has_avx512bf16():
        pytest.skip("this processor has no AVX512-BF16")

    def product(self, input, bias):
        layer = Linear4bit(self.in_features, self.out_features, bias=False, quant_type="nf4")
        layer.weight = Params4bit(self.dequantized().clone(), quant_type="nf4", module=layer)
        layer.to("cpu").eval()
        with torch.no_grad():
            layer(input.detach())  # a rollout, in which the kernel packs the weights
        output = layer(input)
        return output if bias is None else output + bias

    # Rows of a whole block, which those layers need.
    model = models.make_causal_lm("gpt2", tiny_tokenizer, hidden_size=64, scale=5.0)
    folder = models.save_model(tmp_path / "wide", model, tiny_tokenizer)
    monkeypatch.setattr(QuantizedLinear, "_product", product)
    with pytest.raises(ModelError, match="finite differences"):
        make_policy("causal", folder, peft=ADAPTERS, quantization={"id": "nf4"}, critic="none")


# --- memory ---------------------------------------------------------------------------------------------------------


def stored_bytes(*networks):
    """Bytes of the weights of networks, shared ones once."""
    weights = {id(weight): weight.nbytes for network in networks for weight in network.parameters()}
    return sum(weights.values())


@pytest.mark.parametrize("critic", ["separate", "shared"])
def test_the_estimate_has_the_bytes_of_the_weights(family, quantization, critic):
    kind, folder = family
    blocks = run_blocks()
    options = {"peft": ADAPTERS, "quantization": quantization, "critic": critic}
    blocks["alg"]["policy"]["id"] = f"{kind}_lm_actor_critic_policy"
    blocks["alg"]["policy"]["args"] = {"model_name": str(folder), "generation_kwargs": dict(SAMPLING), **options}
    blocks["alg"]["kl_div"] = {"coeff": 0.1}
    estimate = estimate_memory(parse_config(blocks))
    policy = make_policy(kind, folder, **options)
    networks = (policy.policy_model, policy.value_model, policy.ref_model, policy.value_head)
    real = stored_bytes(*(network for network in networks if network is not None))
    names = ("policy weights", "critic weights", "reference weights")
    assert sum(estimate.parts[name] for name in names) == real
    assert estimate.n_parameters == policy.n_parameters
    whole = AUTO[kind].from_pretrained(folder, dtype=torch.float32)
    assert estimate.loading == estimate.parts["process"] + stored_bytes(whole)


@pytest.mark.parametrize("factor", [1, 3], ids=["same size", "larger"])
def test_the_estimate_of_the_loading_has_the_models_one_after_the_other(
    factor, tiny_gpt2_dir, tiny_tokenizer, tmp_path
):
    wide = models.make_causal_lm("gpt2", tiny_tokenizer, hidden_size=32 * factor)
    folder = models.save_model(tmp_path / "reference", wide, tiny_tokenizer)
    blocks = run_blocks()
    args = {"model_name": str(tiny_gpt2_dir), "generation_kwargs": dict(SAMPLING), "reference_model": str(folder)}
    args |= {"peft": ADAPTERS, "quantization": {"id": "nf4"}, "critic": "shared"}
    blocks["alg"]["policy"]["args"] = args
    blocks["alg"]["kl_div"] = {"coeff": 0.1}
    estimate = estimate_memory(parse_config(blocks))

    # The policy is quantized, and the reference is not yet.
    policy = estimate.parts["policy weights"]
    assert estimate.loading == estimate.parts["process"] + policy + stored_bytes(wide)
