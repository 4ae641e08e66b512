"""AdamW with moments in 8 bits: what it computes and stores, runs that are resumed, saved algorithms, refusals."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file

from rl4lms_like.algorithms.ppo import PPO
from rl4lms_like.config.load import parse_config
from rl4lms_like.estimates.memory import estimate_memory
from rl4lms_like.policies.base import CausalLMActorCriticPolicy
from rl4lms_like.policies.optimizers import make_optimizer, optimizer_class_of, parameter_groups
from rl4lms_like.run import resume, train_config
from rl4lms_like.system.errors import MissingExtraError
from rl4lms_like.testing import models
from rl4lms_like.training.resuming.states import load_optimizer, optimizer_state
from tests.builders import make_env
from tests.config_errors import raises_at
from tests.configs import run_blocks

pytest.importorskip("torchao")

IN_8_BITS = {"id": "adamw_8bit"}
SAMPLING = {"do_sample": True, "top_k": 0}


@pytest.fixture(scope="module")
def wide_dir(tmp_path_factory, tiny_tokenizer):
    """Folder of a GPT-2 whose matrices have 4096 elements and more."""
    model = models.make_causal_lm("gpt2", tiny_tokenizer, hidden_size=64)
    return models.save_model(tmp_path_factory.mktemp("wide"), model, tiny_tokenizer)


def make(id, *weights, **kwargs):
    groups = parameter_groups(weights, [], weight_decay=0.01)
    return make_optimizer(optimizer_class_of(id), groups, learning_rate=1e-2, optimizer_kwargs=kwargs)


def bytes_of(moments):
    return sum(tensor.numel() * tensor.element_size() for tensor in moments.values() if tensor.ndim)


def steps(weights, optimizer, n_steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for step in range(n_steps):
        optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step)  # a number, as schedules set it
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator) * (1 + weight.detach().abs())
        optimizer.step()


def pair(shape):
    torch.manual_seed(1)
    start = torch.randn(shape)
    return torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())


def test_small_weights_take_the_steps_of_torch():
    ours, theirs = pair((63, 64))
    steps([ours], make("adamw_8bit", ours), 5)
    steps([theirs], make("adamw", theirs), 5)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_moments_of_large_weights_are_those_of_torch_up_to_the_rounding_of_their_blocks():
    ours, theirs = pair((64, 128))
    optimizer, reference = make("adamw_8bit", ours), make("adamw", theirs)
    steps([ours], optimizer, 1)
    steps([theirs], reference, 1)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)  # the first step reads no stored moment
    for name in ("exp_avg", "exp_avg_sq"):
        stored = optimizer.state[ours][name].dequantize().reshape(-1, 256)
        exact = reference.state[theirs][name].reshape(-1, 256)
        scale = exact.abs().amax(dim=1, keepdim=True)
        assert 0 < float(((stored - exact) / scale).abs().max()) < 0.02

    # After more steps the weights differ by a small part of what they moved.
    start = theirs.detach().clone()
    steps([ours], optimizer, 20, seed=1)
    steps([theirs], reference, 20, seed=1)
    moved, apart = (theirs - start).norm(), (ours - theirs).norm()
    assert 0 < float(apart.detach()) < 0.05 * float(moved.detach())


@pytest.mark.parametrize("block_size", [256, 64])
def test_state_is_small_and_restored_by_bytes(block_size):
    weights = [pair((256, 128))[0], pair((100,))[0]]
    optimizer = make("adamw_8bit", *weights, block_size=block_size)
    steps(weights, optimizer, 3)
    moments, numbers = optimizer_state(optimizer)
    assert all(type(tensor) is torch.Tensor for tensor in moments.values())
    n_large, n_small, n_values = 256 * 128, 100, 256
    assert bytes_of(moments) == 2 * (n_large + 4 * n_large // block_size + 4 * n_values) + 2 * 4 * n_small

    others = [torch.nn.Parameter(weight.detach().clone()) for weight in weights]
    restored = make("adamw_8bit", *others, block_size=block_size)
    saved = {name.removeprefix("optimizer."): tensor.clone() for name, tensor in moments.items()}
    for name in [name for name in saved if name.endswith(".scale")]:
        saved[name] = saved[name].flatten()  # as earlier versions stored them
    load_optimizer(restored, numbers, saved)
    steps(weights, optimizer, 3, seed=2)
    steps(others, restored, 3, seed=2)
    assert all(torch.equal(weight, other) for weight, other in zip(weights, others, strict=True))


# --- runs -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def config(tiny_config, wide_dir):
    tiny_config["tokenizer"]["model_name"] = str(wide_dir)
    tiny_config["alg"]["policy"]["args"] |= {"model_name": str(wide_dir), "optimizer": IN_8_BITS}
    tiny_config["train_evaluation"] |= {"n_iters": 3, "max_eval_samples": 2, "save_every": 1}
    return tiny_config


def test_a_resumed_run_has_the_bytes_of_an_uninterrupted_one(config, tmp_path):
    folder = train_config(parse_config(config), base_path_to_store_results=tmp_path, experiment_name="run", quiet=True)
    saved = load_file(folder / "checkpoints" / "iteration_00002" / "training_state.safetensors")
    assert any(name.endswith("exp_avg.codes") for name in saved)

    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    shutil.rmtree(copy / "model")
    shutil.rmtree(copy / "checkpoints" / "iteration_00003")
    resume(copy, quiet=True)
    expected, resumed = (load_file(run / "model" / "model.safetensors") for run in (folder, copy))
    assert expected.keys() == resumed.keys()
    assert all(torch.equal(resumed[name], tensor) for name, tensor in expected.items())


def test_an_algorithm_is_saved_and_goes_on(wide_dir, tiny_tokenizer, tmp_path):
    kwargs = {"model_name": str(wide_dir), "optimizer": IN_8_BITS, "generation_kwargs": SAMPLING}
    env = make_env(tiny_tokenizer, wide_dir)
    built = PPO(CausalLMActorCriticPolicy, env, n_steps=10, batch_size=40, n_epochs=1, policy_kwargs=kwargs, seed=0)
    built.learn(40)
    built.save(tmp_path / "saved.zip")
    again = PPO.load(tmp_path / "saved.zip", env=make_env(tiny_tokenizer, wide_dir), device="cpu")
    before, after = optimizer_state(built.policy.optimizer)[0], optimizer_state(again.policy.optimizer)[0]
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    again.learn(40)


@pytest.mark.parametrize("critic", ["separate", "none"])
def test_the_estimate_has_the_bytes_of_the_moments(wide_dir, critic):
    blocks = run_blocks()
    args = {"model_name": str(wide_dir), "critic": critic, "optimizer": IN_8_BITS, "generation_kwargs": SAMPLING}
    blocks["alg"]["policy"]["args"] = args
    if critic == "none":
        blocks["alg"] |= {"id": "grpo"}
        blocks["alg"]["args"] |= {"group_size": 2}
    estimate = estimate_memory(parse_config(blocks)).parts["optimizer state"]

    model = models.AutoModelForCausalLM.from_pretrained(wide_dir)
    weights = list(model.parameters())
    optimizer = make("adamw_8bit", *weights)
    steps(weights, optimizer, 1)
    of_policy = bytes_of(optimizer_state(optimizer)[0])
    if critic == "none":
        assert estimate == of_policy
    else:
        assert estimate == pytest.approx(
            2 * of_policy, rel=0.05
        )  # the critic has a value head more, and no output layer
    assert of_policy < 0.4 * 8 * sum(weight.numel() for weight in weights)


# --- refusals -------------------------------------------------------------------------------------------------------

POLICY = "alg.policy.args"


@pytest.mark.parametrize(
    "optimizer", [{"id": "sgd"}, {}, {"id": "adamw_8bit", "block_size": 64}, {"id": ["adamw"]}], ids=str
)
def test_other_blocks_are_refused(optimizer):
    blocks = run_blocks()
    blocks["alg"]["policy"]["args"]["optimizer"] = optimizer
    with raises_at(f"{POLICY}.optimizer", mentions="adamw_8bit"):
        parse_config(blocks)


def test_what_has_another_optimizer_is_refused():
    blocks = run_blocks()
    blocks["alg"]["policy"]["args"]["optimizer"] = IN_8_BITS
    blocks["alg"] |= {"id": "a2c", "args": {"n_steps": 10}}
    with raises_at(f"{POLICY}.optimizer", mentions="use_rms_prop"):
        parse_config(blocks)
    blocks["alg"]["args"]["use_rms_prop"] = False
    assert parse_config(blocks).alg.policy.args["optimizer"] == IN_8_BITS


def test_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="torchao"):
        optimizer_class_of("adamw_8bit")
