"""Mixtures of experts: log-probs are those of `generate`, and the balancing loss is that of transformers."""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
)
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from rl4lms_like.algorithms.ppo import PPO
from rl4lms_like.algorithms.trpo import TRPO
from rl4lms_like.config.load import parse_config
from rl4lms_like.offline.assemble_preferences import assemble_preferences
from rl4lms_like.offline.assemble_supervised import assemble_supervised
from rl4lms_like.on_policy.assemble import assemble
from rl4lms_like.policies.parity import parity_gap
from rl4lms_like.policies.routing import BalancingLoss, Routing
from rl4lms_like.run import train_config
from rl4lms_like.system.errors import ModelError
from rl4lms_like.testing import models
from tests.algorithms.test_update import build
from tests.builders import make_policy
from tests.config_errors import raises_at
from tests.expert_models import FAMILIES, save_experts
from tests.offline.preferences.preference_runs import blocks, lines, written
from tests.oracles.test_shared_prompts import grouped, separate

EXACT = 1e-5
COEFFICIENT = 0.3


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory, tiny_tokenizer):
    """A model with a balancing loss."""
    folder = tmp_path_factory.mktemp(request.param)
    config = {"output_router_logits": True, "router_aux_loss_coef": COEFFICIENT}
    return save_experts(folder, request.param, tiny_tokenizer, **config)


@pytest.fixture(scope="module")
def policy(folder):
    return make_policy("causal", folder, value_head_init="default")


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory, tiny_tokenizer):
    config = {"output_router_logits": True, "router_aux_loss_coef": COEFFICIENT}
    return save_experts(tmp_path_factory.mktemp("mixtral"), "mixtral", tiny_tokenizer, **config)


def texts_of(episodes):
    """Return the tokens of each episode that another one follows."""
    texts = []
    for i in range(episodes.n_episodes):
        prompt = episodes.prompt_ids[i][episodes.prompt_mask[i]]
        response = episodes.response_ids[i][episodes.response_mask[i]]
        texts.append(torch.cat([prompt, response])[:-1])
    return texts


def transformers_loss(model, texts):
    """Return the loss of transformers on texts that are read one by one, without padding."""
    outputs = [model(input_ids=ids[None], output_router_logits=True) for ids in texts if len(ids)]
    layers = tuple(torch.cat(layer) for layer in zip(*(output.router_logits for output in outputs), strict=True))
    return load_balancing_loss_func(layers, layers[0].shape[1], model.config.num_experts_per_tok)


def recorded(policy, episodes) -> Routing:
    with policy.reader.recorded_routing() as record:
        policy.action_scores(episodes)
    return record.routing


# --- log-probs --------------------------------------------------------------------------------------------------------


def test_log_probs_are_those_of_generate(policy):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, policy.vocab_size, (6, 12), generator=generator)
    mask = torch.arange(12) >= 12 - torch.tensor([1, 12, 3, 7, 2, 9])[:, None]
    assert parity_gap(policy.reader, ids, mask, max_new_tokens=14) < EXACT


def test_padding_and_the_batch_never_change_a_log_prob(policy):
    episodes = separate(grouped(policy))
    log_prob = policy.score(episodes).log_prob
    torch.testing.assert_close(policy.score(episodes.widened(17, 23)).log_prob, log_prob, atol=EXACT, rtol=EXACT)
    order = torch.tensor([4, 0, 5, 2])
    expected = log_prob[episodes.token_index(order)]
    torch.testing.assert_close(policy.score(episodes.select(order)).log_prob, expected, atol=EXACT, rtol=EXACT)


# --- the loss of a forward pass ---------------------------------------------------------------------------------------


def test_it_is_the_loss_of_transformers(policy):
    """The value and the gradient, of padded episodes with separate and with shared prompts."""
    model = policy.policy_model
    for episodes in (separate(grouped(policy)), grouped(policy)):
        expected = transformers_loss(model, texts_of(episodes))
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        expected_gradients = torch.autograd.grad(expected, weights, allow_unused=True)

        routing = recorded(policy, episodes)
        loss = routing.loss(routing.detach())
        gradients = torch.autograd.grad(loss, weights, allow_unused=True)
        assert float(loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-6)
        for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
            assert (gradient is None) == (expected_gradient is None)
            if gradient is not None:
                torch.testing.assert_close(gradient, expected_gradient, atol=EXACT, rtol=1e-4)


def test_it_is_the_loss_of_the_models_own_forward_in_one_batch(policy):
    """To the last bit, where no token is padding and the last tokens are not read."""
    model = policy.policy_model
    ids = torch.randint(0, policy.vocab_size, (5, 9), generator=torch.Generator().manual_seed(0))
    full = torch.ones_like(ids).bool()
    episodes = dataclasses.replace(
        separate(grouped(policy)).select(torch.arange(5)),
        **{"prompt_ids": ids[:, :4], "prompt_mask": full[:, :4], "response_ids": ids[:, 4:]},
        **{"response_mask": full[:, 4:], "observed": None},
    )
    routing = recorded(policy, episodes)
    with torch.no_grad():
        expected = model(input_ids=ids[:, :-1], output_router_logits=True).aux_loss
    assert float(routing.loss(routing)) == float(expected)


def test_parts_of_a_step_add_up_to_the_loss_of_the_step(policy):
    episodes = separate(grouped(policy))
    whole = recorded(policy, episodes)
    parts = [recorded(policy, episodes.select(torch.tensor(rows))) for rows in ([0, 3, 4], [1], [2, 5, 6, 7])]
    balancing = BalancingLoss(COEFFICIENT)
    balancing.begin_step(parts)
    total = sum(balancing.part(part) for part in parts)
    assert float(total) == pytest.approx(COEFFICIENT * float(whole.loss(whole)), abs=1e-6)
    assert float(balancing.value) == pytest.approx(float(whole.loss(whole)), abs=1e-6)

    # The rule of transformers' Trainer adds up the losses of the micro-batches, which is another number.
    trainer_total = sum(float(part.loss(part)) for part in parts)
    assert abs(trainer_total - float(whole.loss(whole))) > 1


# --- runs of RL -------------------------------------------------------------------------------------------------------


class Stopped(PPO):
    """Keeps the gradient of the step, and takes none."""

    def clip_and_step(self, logged):
        self.gradient = {
            name: weight.grad.clone() for name, weight in self.policy.named_parameters() if weight.grad is not None
        }
        self.logged = {name: float(value) for name, value in logged.items()}


def one_step(folder, tokenizer, algorithm=Stopped, **policy_kwargs):
    built = build(
        algorithm, folder, tokenizer, policy_kwargs={"critic": "shared", **policy_kwargs},
        n_envs=6, batch_size=10_000, n_epochs=1,
    )  # fmt: skip
    built.learn_iteration(0, 1)
    return built


@pytest.mark.parametrize("option", [{}, {"gradient_checkpointing": True}])
def test_an_update_adds_the_loss_with_the_coefficient_of_the_model(option, mixtral, tiny_tokenizer):
    built = one_step(mixtral, tiny_tokenizer, **option)
    gradient = built.gradient
    logged = built.logged
    built.balancing = None
    built.train()

    model = built.policy.policy_model.eval()
    loss = transformers_loss(model, texts_of(built.rollout_buffer.episodes))
    assert logged["balancing"] == pytest.approx(float(loss), abs=EXACT)
    assert logged["loss"] - built.logged["loss"] == pytest.approx(COEFFICIENT * float(loss), abs=EXACT)

    model.zero_grad()
    (COEFFICIENT * loss).backward()
    is_nonzero = False
    for name, weight in model.named_parameters():
        added = gradient[f"policy_model.{name}"] - built.gradient[f"policy_model.{name}"]
        expected = torch.zeros_like(weight) if weight.grad is None else weight.grad
        torch.testing.assert_close(added, expected, atol=2e-5, rtol=1e-3)
        is_nonzero |= float(expected.abs().max()) > 0.01
    assert is_nonzero


def test_micro_batches_never_change_the_loss_and_its_gradient(mixtral, tiny_tokenizer):
    built = one_step(mixtral, tiny_tokenizer)
    gradient, logged = built.gradient, built.logged
    for micro_batch_size in (60, 1):
        built.arguments = dataclasses.replace(built.arguments, micro_batch_size=micro_batch_size)
        built.train()
        assert built.logged["balancing"] == pytest.approx(logged["balancing"], abs=EXACT)
        assert built.logged["loss"] == pytest.approx(logged["loss"], abs=EXACT)
        for name, expected in gradient.items():
            torch.testing.assert_close(built.gradient[name], expected, atol=EXACT, rtol=1e-3, msg=name)


def test_a_run_logs_the_loss_and_saves_a_model_that_has_it(mixtral, tiny_config, tmp_path):
    mapping = copy.deepcopy(tiny_config)
    mapping["tokenizer"]["model_name"] = str(mixtral)
    mapping["alg"]["policy"]["args"]["model_name"] = str(mixtral)
    run = train_config(parse_config(mapping), base_path_to_store_results=tmp_path, experiment_name="run", quiet=True)
    logged = lines(run / "training_info.jsonl")
    losses = [line["ppo/balancing_loss"] for line in logged if "ppo/balancing_loss" in line]
    assert losses and all(loss > 1 for loss in losses)
    saved = json.loads((run / "model" / "config.json").read_text())
    assert saved["output_router_logits"] and saved["router_aux_loss_coef"] == COEFFICIENT
    assert AutoModelForCausalLM.from_pretrained(run / "model").config.output_router_logits


def test_without_the_setting_nothing_is_added(tmp_path, tiny_tokenizer):
    folder = save_experts(tmp_path, "mixtral", tiny_tokenizer)
    built = one_step(folder, tiny_tokenizer)
    assert built.balancing is None and "balancing" not in built.logged


@pytest.mark.parametrize("family", ["trpo", "seq2seq"])
def test_what_has_no_such_loss_is_refused(family, mixtral, tiny_tokenizer, tiny_config, tmp_path):
    """TRPO, whose step is none along a gradient; encoder-decoder models, whose experts have a limited capacity."""
    if family == "trpo":
        mapping = copy.deepcopy(tiny_config)
        mapping["tokenizer"]["model_name"] = str(mixtral)
        mapping["alg"] |= {"id": "trpo", "args": {"n_steps": 8}}
        mapping["alg"]["policy"]["args"]["model_name"] = str(mixtral)
        with raises_at("alg.policy.args.model_name", mentions="output_router_logits"):
            assemble(parse_config(mapping))
        with pytest.raises(ModelError, match="output_router_logits"):
            build(TRPO, mixtral, tiny_tokenizer)
    else:
        special = {"vocab_size": len(tiny_tokenizer), "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
        size = {"d_model": 16, "d_ff": 16, "d_kv": 8, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2}
        config = SwitchTransformersConfig(**special, **size, num_experts=2, output_router_logits=True)
        models.save_model(tmp_path, SwitchTransformersForConditionalGeneration(config), tiny_tokenizer)
        with pytest.raises(ModelError, match="output_router_logits"):
            make_policy("seq2seq", tmp_path)


# --- supervised and preference runs -----------------------------------------------------------------------------------


def offline_blocks(id, folder, model, **training_args):
    """Return the config of a run of two steps, with six texts or pairs of unequal lengths each."""
    arguments = {"max_steps": 2, "logging_steps": 1, "optim": "sgd", "max_grad_norm": 1e9, **training_args}
    mapping = blocks(id, model, written(folder), **arguments)
    mapping["alg"]["training_args"].setdefault("per_device_train_batch_size", 6)
    if id == "supervised":
        mapping["datapool"] = {"id": "tests.offline.supervised.test_trainer:Uneven"}
        del mapping["alg"]["args"]
    mapping["train_evaluation"] = {"eval_batch_size": 6, "generate": False}
    return mapping


def offline_run(mapping, folder):
    """Return the logged numbers of each step, and the weights after the last."""
    run = train_config(parse_config(mapping), base_path_to_store_results=folder, experiment_name="run", quiet=True)
    weights = AutoModelForCausalLM.from_pretrained(run / "model").state_dict()
    return [line for line in lines(run / "training_info.jsonl")], weights


OFFLINE = {"supervised": "supervised/balancing_loss", "dpo": "preference/balancing_loss"}
"""Run -> the key of its balancing loss."""


@pytest.mark.parametrize("id", OFFLINE)
def test_the_micro_batches_of_an_offline_step_change_nothing(id, mixtral, tmp_path):
    results = []
    for size in (6, 2, 1):
        (tmp_path / str(size)).mkdir()
        sizes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 6 // size}
        results.append(offline_run(offline_blocks(id, tmp_path / str(size), mixtral, **sizes), tmp_path / str(size)))
    (logged, weights), *others = results
    before = AutoModelForCausalLM.from_pretrained(mixtral).state_dict()
    assert any(float((weights[name] - before[name]).abs().max()) > 1e-4 for name in weights if "gate.weight" in name)
    for other_logged, other_weights in others:
        for line, other in zip(logged, other_logged, strict=True):
            for key in (OFFLINE[id], f"{OFFLINE[id].split('/')[0]}/loss"):
                assert other.get(key) == (pytest.approx(line[key], abs=EXACT) if key in line else None), key
        for name, expected in weights.items():
            torch.testing.assert_close(other_weights[name], expected, atol=EXACT, rtol=1e-4, msg=name)


@pytest.mark.parametrize("id", OFFLINE)
def test_an_offline_step_adds_the_loss_of_transformers(id, mixtral, tmp_path):
    """The value that is logged, the loss, and the gradient, which is the change of the weights in a step of SGD."""
    without = copy_without_loss(mixtral, tmp_path / "without")
    arguments = {"max_steps": 1, "lr_scheduler_type": "constant", "per_device_train_batch_size": 12}
    (tmp_path / "with").mkdir()
    logged, weights = offline_run(offline_blocks(id, tmp_path / "with", mixtral, **arguments), tmp_path / "with")
    other, other_weights = offline_run(offline_blocks(id, tmp_path, without, **arguments), tmp_path)

    config = parse_config(offline_blocks(id, tmp_path, mixtral, **arguments))
    run = assemble_supervised(config) if id == "supervised" else assemble_preferences(config)
    model = run.model
    loss = transformers_loss(model, texts_of_step(id, run))
    key = OFFLINE[id]
    assert logged[0][key] == pytest.approx(float(loss.detach()), abs=EXACT)
    loss_key = f"{key.split('/')[0]}/loss"
    assert logged[0][loss_key] - other[0][loss_key] == pytest.approx(COEFFICIENT * float(loss.detach()), abs=EXACT)

    (COEFFICIENT * loss).backward()
    rate = 1e-2
    for name, weight in model.named_parameters():
        added = (other_weights[name] - weights[name]) / rate
        expected = torch.zeros_like(weight) if weight.grad is None else weight.grad
        torch.testing.assert_close(added, expected, atol=1e-4, rtol=1e-2, msg=name)


def copy_without_loss(model, folder):
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "output_router_logits": False}))
    return folder


def texts_of_step(id, run):
    """Return the tokens that another one follows, of all rows of a step in which all examples are."""
    texts = []
    for row in run.examples["train"].rows:
        if id == "supervised":
            texts.append(torch.tensor(row["input_ids"][:-1]))
        else:
            texts += [torch.tensor([*row["prompt"], *response][:-1]) for response in row["responses"]]
    return texts
