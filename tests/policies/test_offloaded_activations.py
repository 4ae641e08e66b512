"""Activations in main memory from the forward to the backward pass: copies with their layout, the same gradients."""

from __future__ import annotations

import pytest
import torch

from rl4lms_like.config.load import parse_config
from rl4lms_like.config.yaml_file import apply_values
from rl4lms_like.estimates.memory import estimate_memory
from rl4lms_like.policies.offloaded_activations import MIN_BYTES, saved_in_main_memory, to_main_memory
from rl4lms_like.run import train_config
from tests.builders import episodes_of_lengths, make_policy
from tests.config_errors import raises_at
from tests.configs import run_blocks, supervised_blocks
from tests.offline.preferences import preference_runs

LENGTHS = [5, 2, 7, 4]


class Seen(torch.autograd.Function):
    """Identity that saves its input, and lists what its backward pass gets."""

    @staticmethod
    def forward(ctx, x, seen):
        ctx.save_for_backward(x)
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.seen += ctx.saved_tensors
        return gradient, None


def saved(tensor, weights=()):
    """Return what a backward pass gets of a saved tensor."""
    seen = []
    with saved_in_main_memory(weights):
        total = Seen.apply(tensor, seen).sum()
    total.backward()
    return seen[0]


@pytest.mark.parametrize("change", [
    lambda x: x,
    lambda x: x.transpose(0, 2),
    lambda x: x[:, 3:, 1::2],
    lambda x: x[:1, :, None].expand(5, -1, 3, -1),
    lambda x: x.bfloat16(),
], ids=["whole", "transposed", "with gaps", "repeated", "bfloat16"])  # fmt: skip
def test_a_copy_has_values_type_and_layout(change):
    tensor = change(torch.randn(8, 9, 40, requires_grad=True))
    copy = saved(tensor)
    assert address_of(copy) != address_of(tensor)
    assert copy.dtype == tensor.dtype and copy.stride() == tensor.stride()
    assert torch.equal(copy, tensor)


def test_weights_and_small_tensors_stay():
    weight = torch.randn(64, 64, requires_grad=True)
    assert saved(weight.T, [weight]).data_ptr() == weight.data_ptr() != saved(weight.T).data_ptr()
    small = torch.randn(MIN_BYTES // 4 - 1, requires_grad=True)
    assert saved(small).data_ptr() == small.data_ptr()


def test_a_weight_that_has_changed_is_an_error():
    weight = torch.randn(64, 64, requires_grad=True)
    with saved_in_main_memory([weight]):
        total = (torch.ones(2, 64, requires_grad=True) @ weight).sum()
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="a saved tensor has changed"):
        total.backward()


def gradients(policy):
    """Return loss and gradients of a pass over episodes in which each token counts otherwise."""
    policy.set_training_mode(True)
    side = policy.reader.prompt_side
    episodes = episodes_of_lengths(LENGTHS, vocab_size=policy.vocab_size, prompt_lengths=[3, 5, 4, 3], side=side)
    values, log_prob, entropy = policy.evaluate_actions(episodes)
    weights = torch.linspace(-1, 1, len(log_prob))
    loss = (weights * log_prob).sum() + values.square().sum() + 0.1 * entropy.sum()
    loss.backward()
    found = {name: weight.grad for name, weight in policy.named_parameters() if weight.grad is not None}
    return float(loss.detach()), found


def record_copies(patch):
    """Return a list of the addresses of all tensors that are copied from now on."""
    addresses = []

    def recorded(tensor):
        addresses.append(address_of(tensor))
        return to_main_memory(tensor)

    patch.setattr("rl4lms_like.policies.offloaded_activations.to_main_memory", recorded)
    return addresses


def address_of(tensor):
    return tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize(("kind", "arguments"), [
    ("causal", {}),
    ("causal", {"critic": "shared", "gradient_checkpointing": True}),
    ("causal", {"dtype": "bfloat16", "packing": "auto"}),
    ("causal", {"peft": {"r": 2, "target_modules": "all-linear"}}),
    ("causal", {"peft": {"r": 2, "target_modules": "all-linear"}, "quantization": {"id": "nf4"}}),
    ("seq2seq", {}),
    ("seq2seq", {"gradient_checkpointing": True}),
], ids=str)  # fmt: skip
def test_loss_and_gradients_are_the_same_bit_for_bit(kind, arguments, tiny_gpt2_dir, tiny_t5_dir, monkeypatch):
    folder = {"causal": tiny_gpt2_dir, "seq2seq": tiny_t5_dir}[kind]
    loss, expected = gradients(make_policy(kind, folder, use_reference=False, **arguments))
    policy = make_policy(kind, folder, use_reference=False, activation_offload=True, **arguments)
    copies = record_copies(monkeypatch)

    # Of passes without gradients, nothing is saved. Adapters are merged here.
    policy.score(episodes_of_lengths(LENGTHS, vocab_size=policy.vocab_size, side=policy.reader.prompt_side))
    assert not copies
    offloaded_loss, offloaded = gradients(policy)
    assert copies and loss == offloaded_loss and offloaded.keys() == expected.keys()
    assert all(torch.equal(offloaded[name], gradient) for name, gradient in expected.items())

    # No copies of weights, whether they are trained, frozen, quantized or merged.
    merged = [weight for adapters in policy.merged_adapters.values() for weight in adapters.weights]
    weights = [*policy.parameters(), *policy.buffers(), *merged]
    assert not set(copies) & {address_of(weight) for weight in weights}


@pytest.mark.parametrize(("changes", "path"), [
    ({"alg.policy.args.compile": True}, "alg.policy.args.activation_offload"),
    ({"distributed.strategy": "fsdp"}, "alg.policy.args.activation_offload"),
    ({"alg.id": "trpo", "alg.args": {}}, "alg.policy.args.activation_offload"),
])  # fmt: skip
def test_what_it_does_not_work_with_is_refused(changes, path):
    blocks, _ = apply_values(run_blocks(), {path: True, **changes}, "test")
    with raises_at(path):
        parse_config(blocks)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_gpu_has_the_activations_of_one_layer(checkpointing, deeper_gpt2_dir):
    blocks = run_blocks()
    blocks["alg"]["policy"]["args"] |= {"model_name": str(deeper_gpt2_dir), "gradient_checkpointing": checkpointing}
    sizes = {}
    for key, gpu_bytes in ((False, 10**12), (True, 10**12), (True, None)):
        blocks["alg"]["policy"]["args"]["activation_offload"] = key
        sizes[key, gpu_bytes] = estimate_memory(parse_config(blocks), gpu_bytes=gpu_bytes).parts["activations"]
    without, offloaded, on_cpu = sizes.values()
    assert on_cpu == without > offloaded
    if not checkpointing:
        assert offloaded == pytest.approx(without / 2, rel=1e-3)  # of its two layers


@pytest.mark.parametrize("id", ["supervised", "dpo"])
def test_a_run_on_given_texts_has_the_same_weights(id, tiny_gpt2_dir, tmp_path, monkeypatch):
    if id == "supervised":
        blocks = supervised_blocks()
        blocks["tokenizer"]["model_name"] = blocks["alg"]["model_name"] = str(tiny_gpt2_dir)
        blocks["alg"] |= {"model_type": "causal", "training_args": {}}
        blocks["datapool"] = {"id": "film_opinions", "args": {"n_train": 6, "n_eval": 3}}
    else:
        blocks = preference_runs.blocks("dpo", tiny_gpt2_dir, preference_runs.written(tmp_path))
    blocks["alg"]["training_args"] |= {"max_steps": 1, "save_strategy": "no"}
    blocks["train_evaluation"] |= {"generate": False, "metrics": []}
    weights = []
    copies = record_copies(monkeypatch)
    for name in ("without", "with"):
        config = parse_config(blocks)
        folder = train_config(config, base_path_to_store_results=tmp_path, experiment_name=name, quiet=True)
        weights.append((folder / "model" / "model.safetensors").read_bytes())
        blocks["alg"]["activation_offload"] = True
    assert copies and weights[0] == weights[1]
