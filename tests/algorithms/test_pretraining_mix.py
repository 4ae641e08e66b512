"""Texts in every step of an RL run (`alg.ptx`): their gradient is added, and nothing else changes."""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from rl4lms_like.algorithms import ALGORITHMS
from rl4lms_like.algorithms.pretraining_mix import PretrainingMix, Text
from rl4lms_like.config.load import parse_config
from rl4lms_like.on_policy.assemble import assemble
from rl4lms_like.run import resume, train_config
from rl4lms_like.system.errors import CheckpointError, ConfigError, DataPoolError
from tests.config_errors import raises_at
from tests.offline.preferences.preference_runs import lines

TEXTS = [
    "The sea is blue, and the moss is green.",
    "A letter was lost in the town.",
    "Count with me: 1 2 3 4 5 6 7 8 9 10.",
    "Nobody asked, and nobody knew.",
    "Rain.",
]
PAIRS = [("The sea is", "blue"), ("The moss is", "green as ever"), ("The sun is", "gold")]


def written(folder, *, with_prompts=False):
    rows = [{"text": text} for text in TEXTS]
    if with_prompts:
        rows = [{"prompt": prompt, "completion": completion} for prompt, completion in PAIRS]
    file = folder / "texts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"id": "jsonl", "args": {"data_files": {"train": str(file)}}}


def with_ptx(mapping, folder, *, coeff=0.5, with_prompts=False, **fields):
    mapping = copy.deepcopy(mapping)
    data = written(folder, with_prompts=with_prompts)
    mapping["alg"]["ptx"] = {"data": data, "coeff": coeff, "batch_size": 3, **fields}
    return mapping


def gradients_of_first_step(mapping):
    """Return the run, and the gradient and the logged numbers of its first optimizer step, which is not taken."""
    run = assemble(parse_config(mapping))
    algorithm = run.algorithm
    steps = []

    def keep(logged):
        gradient = {name: w.grad.clone() for name, w in run.policy.named_parameters() if w.grad is not None}
        steps.append((gradient, {name: float(value) for name, value in logged.items()}))

    algorithm.clip_and_step = keep
    algorithm.learn_iteration(0, 1)
    return run, *steps[0]


def run_of(mapping, folder, name="run"):
    return train_config(parse_config(mapping), base_path_to_store_results=folder, experiment_name=name, quiet=True)


# --- the gradient -----------------------------------------------------------------------------------------------------


def loss_of_texts(model, tokenizer, texts):
    """Return the loss of a plain language model: the mean over the tokens of all texts, one text after the other."""
    total = torch.zeros(())
    n_tokens = 0
    for text in texts:
        ids = torch.tensor([*tokenizer(text)["input_ids"], tokenizer.eos_token_id])
        log_probs = model(input_ids=ids[None]).logits[0, :-1].log_softmax(dim=-1)
        total = total - log_probs.gather(1, ids[1:, None]).sum()
        n_tokens += len(ids) - 1
    return total / n_tokens


def texts_in_first_step(run, tokenizer):
    texts = []
    for text in run.algorithm.ptx.texts_of_step(0):
        texts.append(tokenizer.decode([*text.prompt, *text.response], skip_special_tokens=True))
    return texts


@pytest.mark.parametrize("id", ["ppo", "grpo"])
def test_the_gradient_is_that_of_the_algorithm_plus_that_of_a_language_model(id, tiny_config, tiny_gpt2_dir, tmp_path):
    tiny_config["alg"] |= {"id": id}
    if id == "grpo":
        tiny_config["alg"]["args"] |= {"group_size": 2}
        tiny_config["alg"]["policy"]["args"].pop("value_head_init")
    run, gradient, logged = gradients_of_first_step(with_ptx(tiny_config, tmp_path, coeff=0.7))
    _, plain, plain_logged = gradients_of_first_step(tiny_config)

    tokenizer = AutoTokenizer.from_pretrained(tiny_gpt2_dir)
    texts = texts_in_first_step(run, tokenizer)
    assert len(texts) == 3 and set(texts) <= set(TEXTS)
    model = AutoModelForCausalLM.from_pretrained(tiny_gpt2_dir).eval()
    loss = loss_of_texts(model, tokenizer, texts)
    loss.backward()
    assert logged["ptx"] == pytest.approx(float(loss.detach()), abs=1e-6)
    assert logged["loss"] - plain_logged["loss"] == pytest.approx(0.7 * float(loss.detach()), abs=1e-5)
    assert "ptx" not in plain_logged

    for name, weight in model.named_parameters():
        added = gradient[f"policy_model.{name}"] - plain[f"policy_model.{name}"]
        torch.testing.assert_close(added, 0.7 * weight.grad, atol=1e-6, rtol=1e-4, msg=name)
    for name in plain:
        if not name.startswith("policy_model."):
            assert torch.equal(gradient[name], plain[name])


@pytest.mark.parametrize("family", ["causal", "seq2seq"])
def test_of_prompts_with_references_the_references_are_learned(family, request, tmp_path):
    config = request.getfixturevalue("tiny_config" if family == "causal" else "tiny_seq2seq_config")
    folder = config["alg"]["policy"]["args"]["model_name"]
    _, gradient, logged = gradients_of_first_step(with_ptx(config, tmp_path, coeff=1.0, with_prompts=True))
    _, plain, _ = gradients_of_first_step(config)

    tokenizer = AutoTokenizer.from_pretrained(folder)
    kind = AutoModelForCausalLM if family == "causal" else AutoModelForSeq2SeqLM
    model = kind.from_pretrained(folder).eval()
    total = torch.zeros(())
    n_tokens = 0
    for prompt, completion in PAIRS:
        prompt_ids = torch.tensor(tokenizer(prompt)["input_ids"])
        if family == "causal":
            end = [tokenizer.eos_token_id]
            ids = torch.tensor([*tokenizer(f"{prompt} {completion}")["input_ids"], *end])
            response = ids[len(prompt_ids) :]
            logits = model(input_ids=ids[None]).logits[0, len(prompt_ids) - 1 : -1]
        else:
            response = torch.tensor(tokenizer(completion)["input_ids"])
            logits = model(input_ids=prompt_ids[None], labels=response[None]).logits[0]
        total = total - logits.log_softmax(dim=-1).gather(1, response[:, None]).sum()
        n_tokens += len(response)
    loss = total / n_tokens
    loss.backward()
    assert logged["ptx"] == pytest.approx(float(loss.detach()), abs=1e-5)
    for name, weight in model.named_parameters():
        added = gradient[f"policy_model.{name}"] - plain[f"policy_model.{name}"]
        torch.testing.assert_close(added, weight.grad, atol=1e-5, rtol=1e-3, msg=name)


def test_micro_batches_never_change_the_gradient(tiny_config, tmp_path):
    mapping = with_ptx(tiny_config, tmp_path, batch_size=5)
    _, gradient, logged = gradients_of_first_step(mapping)
    for size in (40, 1):
        mapping["alg"]["args"]["micro_batch_size"] = size
        _, other, other_logged = gradients_of_first_step(mapping)
        assert other_logged["ptx"] == pytest.approx(logged["ptx"], abs=1e-6)
        for name, expected in gradient.items():
            torch.testing.assert_close(other[name], expected, atol=2e-6, rtol=1e-3, msg=name)


def test_only_learned_tokens_are_learned(tiny_config, tmp_path):
    """Of a text with a part in the middle that is only read, as of a dialogue."""
    run = assemble(parse_config(tiny_config))
    prompt, response = [5, 6], [7, 8, 9, 10]
    text = Text(prompt=prompt, response=response, is_learned=[True, False, False, True])
    mix = PretrainingMix(texts=[text], coeff=1.0, batch_size=1, seed=0, pad_token_id=0)
    (loss,) = mix.losses(run.policy, 0, micro_batch_size=None, ranks=run.ranks)
    ids = torch.tensor([[*prompt, *response]], device=run.policy.device)
    log_probs = run.policy.policy_model(input_ids=ids).logits[0, :-1].log_softmax(dim=-1)
    expected = -(log_probs[1, 7] + log_probs[4, 10]) / 2
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-6)


# --- the texts of a step ----------------------------------------------------------------------------------------------


def test_the_texts_of_a_step_depend_on_seed_and_step_alone():
    texts = [Text(prompt=[i], response=[i], is_learned=[True]) for i in range(5)]
    mix = PretrainingMix(texts=texts, coeff=1.0, batch_size=3, seed=4, pad_token_id=0)
    steps = [[text.prompt[0] for text in mix.texts_of_step(step)] for step in range(10)]
    assert steps == [[text.prompt[0] for text in mix.texts_of_step(step)] for step in range(10)]
    in_order = [number for step in steps for number in step]
    passes = [in_order[start : start + 5] for start in range(0, 30, 5)]
    assert all(sorted(numbers) == [0, 1, 2, 3, 4] for numbers in passes)
    assert len({tuple(numbers) for numbers in passes}) > 1
    other = dataclasses.replace(mix, seed=5)
    assert [[text.prompt[0] for text in other.texts_of_step(step)] for step in range(10)] != steps


def test_long_texts_are_divided(tiny_config, tmp_path):
    run = assemble(parse_config(with_ptx(tiny_config, tmp_path, max_length=4)))
    texts = run.algorithm.ptx.texts
    assert max(len(text.prompt) + len(text.response) for text in texts) == 4
    n_tokens = sum(len(run.tokenizer(text)["input_ids"]) for text in TEXTS)
    assert sum(len(text.response) for text in texts) == n_tokens  # of each text all but the first token, and the end


# --- runs -------------------------------------------------------------------------------------------------------------


def test_a_coefficient_of_0_is_a_run_without(tiny_config, tmp_path):
    plain = run_of(tiny_config, tmp_path, "plain")
    zero = run_of(with_ptx(tiny_config, tmp_path, coeff=0), tmp_path, "zero")
    one = run_of(with_ptx(tiny_config, tmp_path, coeff=1.0), tmp_path, "one")
    weights = [(run / "model" / "model.safetensors").read_bytes() for run in (plain, zero, one)]
    assert weights[0] == weights[1]
    assert weights[0] != weights[2]
    assert not any("ppo/ptx_loss" in line for line in lines(zero / "training_info.jsonl"))


def test_training_lowers_the_loss_and_a_resumed_run_is_equal(tiny_config, tmp_path):
    whole = run_of(with_ptx(tiny_config, tmp_path, coeff=1.0), tmp_path, "whole")
    losses = [line["ppo/ptx_loss"] for line in lines(whole / "training_info.jsonl") if "ppo/ptx_loss" in line]
    assert len(losses) == 3 and losses[-1] < losses[0]

    resumed = tmp_path / "resumed"
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "model")
    resume(resumed, quiet=True)
    file = "model/model.safetensors"
    assert (resumed / file).read_bytes() == (whole / file).read_bytes()
    log = "training_info.jsonl"
    resumed_losses = [line["ppo/ptx_loss"] for line in lines(resumed / log) if "ppo/ptx_loss" in line]
    assert resumed_losses == losses


def test_a_run_that_has_begun_keeps_its_texts(tiny_config, tmp_path):
    tiny_config["train_evaluation"]["save_every"] = 1
    mapping = with_ptx(tiny_config, tmp_path)
    run = run_of(mapping, tmp_path)
    shutil.rmtree(run / "model")
    file = mapping["alg"]["ptx"]["data"]["args"]["data_files"]["train"]
    with open(file, "a") as texts:
        texts.write('{"text": "One more."}\n')
    with pytest.raises(CheckpointError, match=r"the texts of alg\.ptx are not those of the run"):
        resume(run, quiet=True)


SETTINGS = {
    "online_dpo": {"kl_div": {"coeff": 0.1}},
    "opd": {"kl_div": {"coeff": 1.0}},
    "maxrl": {"args": {"group_size": 2, "n_steps": 8, "scale": "none"}},
}


@pytest.mark.parametrize("id", sorted(set(ALGORITHMS) - {"trpo"}))
def test_every_algorithm_with_gradient_steps_adds_the_loss(id, tiny_config, tiny_gpt2_dir, tmp_path):
    alg = {"id": id, "args": {"n_steps": 8, "learning_rate": 1e-3}, "kl_div": {"coeff": 0.01}}
    policy = copy.deepcopy(tiny_config["alg"]["policy"])
    policy["args"].pop("value_head_init")
    if id == "nlpo":
        policy["id"] = "maskable_causal_lm_actor_critic_policy"
        policy["args"]["top_mask"] = 20
    if id == "opd":
        policy["args"]["teacher_model"] = str(shutil.copytree(tiny_gpt2_dir, tmp_path / "teacher"))
    if id == "sao":
        alg["args"]["critic_only_iterations"] = 0
    if id == "vapo":
        alg["args"]["critic_pretrain"] = None
    if id not in ("ppo", "nlpo", "a2c", "vapo", "sao", "opd"):
        alg["args"]["group_size"] = 4
    tiny_config["alg"] = {**alg, "policy": policy, **SETTINGS.get(id, {})}
    tiny_config["reward_fn"] = {"id": "tests.builders:LowTokens"}
    tiny_config["train_evaluation"] |= {"n_iters": 1, "save_model": False, "metrics": []}
    run = run_of(with_ptx(tiny_config, tmp_path), tmp_path)
    assert any(line.get("ppo/ptx_loss", 0) > 1 for line in lines(run / "training_info.jsonl"))


# --- what is refused --------------------------------------------------------------------------------------------------


def test_algorithms_without_gradient_steps_are_refused(tiny_config, tmp_path):
    mapping = with_ptx(tiny_config, tmp_path)
    mapping["alg"] |= {"id": "trpo", "args": {"n_steps": 8}}
    with raises_at("alg.ptx", mentions="trpo"):
        parse_config(mapping)
    mapping["alg"] |= {"id": "stable_baselines3:PPO", "args": {"n_steps": 8, "batch_size": 8}}
    with raises_at("alg.ptx", mentions="stable_baselines3:PPO"):
        assemble(parse_config(mapping))


@pytest.mark.parametrize(
    ("ptx", "path"),
    [
        ({"coeff": 1.0}, "alg.ptx.data"),
        ({"data": {"id": "dummy_pool", "args": {"prompt": "x"}}}, "alg.ptx.coeff"),
        ({"data": {"id": "dummy_pool", "args": {"prompt": "x"}}, "coeff": -1.0}, "alg.ptx.coeff"),
        ({"data": {"id": "no_such_pool"}, "coeff": 1.0}, "alg.ptx.data.id"),
        ({"data": {"id": "dummy_pool", "args": {"nothing": 1}}, "coeff": 1.0}, "alg.ptx.data.args.nothing"),
        ({"data": {"id": "jsonl", "args": {}}, "coeff": 1.0}, "alg.ptx.data.args"),
    ],
)
def test_errors_have_the_path_of_their_key(ptx, path, tiny_config):
    tiny_config["alg"]["ptx"] = ptx
    with raises_at(path, among_others=True):
        parse_config(tiny_config)


def test_a_missing_file_is_found_before_anything_is_loaded(tiny_config):
    data = {"id": "jsonl", "args": {"path": "nowhere.jsonl"}}
    tiny_config["alg"]["ptx"] = {"data": data, "coeff": 1.0}
    with raises_at("alg.ptx.data.args.path"):
        parse_config(tiny_config, data=True)


def test_a_pool_with_nothing_to_learn_is_refused(tiny_config, tiny_seq2seq_config, tmp_path):
    tiny_config["alg"]["ptx"] = {"data": {"id": "dummy_pool", "args": {"prompt": "x"}}, "coeff": 1.0}
    with pytest.raises(DataPoolError, match=r"alg\.ptx\.data"):
        assemble(parse_config(tiny_config))
    with pytest.raises((DataPoolError, ConfigError), match="without prompts"):
        assemble(parse_config(with_ptx(tiny_seq2seq_config, tmp_path)))
