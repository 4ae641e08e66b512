"""The configs for chat models: those of the 8B model run with a tiny one of its family, and GRPO on GSM8K learns."""

from __future__ import annotations

import json
import random
import threading

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from rl4lms_like.config.load import load_config
from rl4lms_like.preview import preview
from rl4lms_like.python_api.python_run import train
from rl4lms_like.rewards.learned import RewardModel
from rl4lms_like.rewards.server import RewardServer
from rl4lms_like.testing.models import make_causal_lm, save_model
from tests.chat_models import chat_tokenizer
from tests.conftest import REPOSITORY
from tests.engines.vllm_server import VllmServer
from tests.training.test_task_configs import overrides, write_chat_data

FOLDER = REPOSITORY / "task_configs"
OFFLINE = {
    "train_evaluation.max_eval_samples": 2,
    "alg.generation_kwargs.max_new_tokens": 4,
    "alg.training_args.max_steps": 1,
    "alg.training_args.gradient_accumulation_steps": 1,
    "alg.training_args.warmup_steps": 0,
    "alg.training_args.bf16": "false",
    "alg.peft.r": 2,
}
ON_POLICY = {
    "env.n_envs": 8,
    "env.args.max_prompt_length": 64,
    "env.args.max_episode_length": 6,
    "alg.args.n_episodes": 8,
    "alg.args.minibatch_episodes": 8,
    "alg.args.micro_batch_size": 400,
    "alg.policy.args.peft.r": 2,
    "alg.policy.args.generation_kwargs.max_new_tokens": 6,
    "train_evaluation.n_iters": 1,
    "train_evaluation.eval_batch_size": 8,
}


@pytest.fixture(scope="module")
def tiny_qwen3(tmp_path_factory):
    """A random Qwen3 of two layers, whose tokenizer has Qwen's turns."""
    tokenizer = chat_tokenizer()
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"head_dim": 8, "intermediate_size": 64, "max_position_embeddings": 4096, "vocab_size": len(tokenizer)}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **sizes))
    return str(save_model(tmp_path_factory.mktemp("qwen3"), model, tokenizer))


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """The current folder, with the files that the configs name."""
    monkeypatch.chdir(tmp_path)
    write_chat_data(tmp_path)
    (tmp_path / "gsm8k").mkdir()
    for split in ("train", "test"):
        (tmp_path / "gsm8k" / f"{split}.jsonl").write_text('{"question": "1 and 1?", "answer": "#### 2"}\n' * 203)
    return tmp_path


def models(path, folder) -> dict[str, str]:
    return {"tokenizer.model_name": json.dumps(folder), path: json.dumps(folder)}


@pytest.mark.parametrize("name", ["sft", "reward_model", "dpo"])
def test_an_offline_config_of_the_8b_model_trains_a_tiny_one(name, tiny_qwen3, workplace):
    values = dict(OFFLINE)
    if name == "reward_model":  # which generates nothing
        values = {path: value for path, value in values.items() if "generation" not in path and "max_eval" not in path}
    values |= models("alg.model_name", tiny_qwen3)
    file = FOLDER / "qwen3_8b" / f"{name}.yml"
    assert "<|im_end|>" in "".join(preview(load_config(file, overrides(values))))

    folder = train(file, experiment_name=name, overrides=overrides(values))
    config = json.loads((folder / "model" / "config.json").read_text()) if name != "dpo" else None
    if config is not None:  # merged: whole weights of the family
        assert config["model_type"] == "qwen3"
        loader = AutoModelForSequenceClassification if name == "reward_model" else AutoModelForCausalLM
        loader.from_pretrained(folder / "model")


@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_an_rl_config_of_the_8b_model_trains_a_tiny_one(name, tiny_qwen3, workplace):
    engine = VllmServer(tiny_qwen3)
    classifier = AutoModelForSequenceClassification.from_pretrained(tiny_qwen3, num_labels=1)
    reward_folder = save_model(workplace / "rm", classifier, chat_tokenizer())
    reward = RewardModel(str(reward_folder), template="chat", append_eos=False)
    scorer = RewardServer(reward.scores, host="127.0.0.1", port=0, max_texts=16)
    threading.Thread(target=scorer.serve_forever, daemon=True).start()

    values = ON_POLICY | models("alg.policy.args.model_name", tiny_qwen3)
    values["alg.policy.args.engine.args.url"] = engine.url
    if name == "ppo":
        values |= {"reward_fn.args.url": scorer.url, "alg.args.critic_only_iterations": 0}
    else:
        values |= {"train_evaluation.generation_kwargs.max_new_tokens": 6}
    try:
        folder = train(FOLDER / "qwen3_8b" / f"{name}.yml", experiment_name=name, overrides=overrides(values))
    finally:
        scorer.shutdown()
        scorer.server_close()
        engine.close()
    (line,) = (folder / "rollout_info.jsonl").read_text().splitlines()
    logged = json.loads(line)
    assert logged["rollout_info/n_episodes"] == 8
    assert logged["rollout_info/engine/mean_gap"] < 0.05
    assert (folder / "model").is_dir()


ALL_WEIGHTS = {
    "ppo": {"alg.policy.args.peft": "null"},
    "grpo": {"alg.policy.args.peft": "null"},
    "sft": {"alg.peft": "null", "alg.merge_on_save": "false"},
    "reward_model": {"alg.peft": "null", "alg.merge_on_save": "false"},
    "dpo": {"alg.peft": "null"},
}
"""File -> changes with which all weights are trained instead of adapters, as docs/scaling.md has them."""


@pytest.mark.parametrize("name", ALL_WEIGHTS)
def test_all_weights_of_the_8b_model_can_be_trained_split(name, tiny_qwen3, workplace):
    values = {"distributed.strategy": "fsdp", **ALL_WEIGHTS[name]}
    page = (REPOSITORY / "docs" / "scaling.md").read_text()
    for path, value in values.items():
        assert f"--set {path}={value}" in page

    is_rl = name in ("ppo", "grpo")
    values |= models("alg.policy.args.model_name" if is_rl else "alg.model_name", tiny_qwen3)
    lines = "".join(preview(load_config(FOLDER / "qwen3_8b" / f"{name}.yml", overrides(values))))
    assert "<|im_end|>" in lines and ("peak of each of 8 processes" in lines) == (name in ("ppo", "grpo", "sft"))


QUESTIONS = [f"{a} and {6 - a}?" for a in range(7)]
"""Sums of 6."""


def save_tiny_solver(folder) -> str:
    """A chat model that answers the questions in GSM8K's format; half of the answers of its training are random."""
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}"
        "{% if m.role == 'assistant' %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    )
    model = make_causal_lm("qwen2", tokenizer, n_positions=512)
    draw = random.Random(0)
    rows = []
    for question in QUESTIONS * 4:
        written = 6 if draw.random() < 0.5 else draw.randrange(10)
        rows.append(tokenizer(f"{question}#### {written}<|im_end|>", add_special_tokens=False)["input_ids"])
    ids = torch.full((len(rows), max(map(len, rows))), -100)
    for row, tokens in zip(ids, rows, strict=True):
        row[: len(tokens)] = torch.tensor(tokens)

    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(60):
        loss = model(input_ids=ids.clamp(min=0), attention_mask=(ids >= 0).long(), labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return str(save_model(folder, model, tokenizer))


def test_grpo_on_gsm8k_learns(tmp_path, monkeypatch):
    """The accuracy of sampled answers rises with a tiny chat model that was made for it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gsm8k").mkdir()
    rows = "".join(json.dumps({"question": question, "answer": "#### 6"}) + "\n" for question in QUESTIONS)
    for split, n in (("train", 5), ("test", 1)):
        (tmp_path / "gsm8k" / f"{split}.jsonl").write_text(rows * n)
    model = save_tiny_solver(tmp_path / "tiny")
    values = models("alg.policy.args.model_name", model) | {
        "datapool.args.n_val": 7,
        "env.args.max_prompt_length": 16,
        "env.args.max_episode_length": 12,
        "alg.args.learning_rate": 1e-3,
        "alg.args.micro_batch_size": "null",
        "alg.policy.args.generation_kwargs.max_new_tokens": 12,
        "alg.policy.args.dtype": "float32",
        "alg.policy.args.gradient_checkpointing": "false",
        "train_evaluation.generation_kwargs": "null",
        "train_evaluation.n_iters": 10,
        "train_evaluation.eval_every": 10,
    }
    folder = train(FOLDER / "gsm8k" / "chat_grpo.yml", experiment_name="grpo", overrides=overrides(values))
    lines = (folder / "rollout_info.jsonl").read_text().splitlines()
    rewards = [json.loads(line)["rollout_info/ep_rew"] for line in lines]
    assert rewards[0] < 0.4, rewards
    assert sum(rewards[-3:]) / 3 > 0.6, rewards
