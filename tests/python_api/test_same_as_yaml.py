"""A run in Python has the config of a file, and trains to the same bytes."""

from __future__ import annotations

import json

import pytest
import yaml

from rl4lms_like import Run
from rl4lms_like.python_api.python_run import train

PROMPTS = [{"prompt": f"Count with me: {number}", "topic": "numbers"} for number in range(6)]
EVAL_PROMPTS = ["Count on: 3", "Count on: 4"]
PAIRS = [{"prompt": f"{n} is", "chosen": " a number", "rejected": " cold"} for n in range(8)]
TEXTS = [{"prompt": f"{n} is", "completion": " a number of mine"} for n in range(8)]
REWARD = {"id": "tests.builders:LowTokens"}
GENERATION = {"do_sample": True, "top_k": 0, "max_new_tokens": 8}


def on_policy(model: str, id: str, args: dict, coeff: float) -> dict:
    return {
        "tokenizer": {"model_name": model},
        "reward_fn": REWARD,
        "datapool": {
            "id": "jsonl",
            "args": {"prompt_column": "prompt", "meta_columns": ["topic"]},
            "sampler": {"id": "shuffled"},
        },
        "env": {
            "n_envs": 16,
            "args": {"max_prompt_length": 120, "max_episode_length": 8, "terminate_on_eos": True},
        },
        "alg": {
            "id": id,
            "args": args,
            "kl_div": {"coeff": coeff},
            "policy": {
                "id": "causal_lm_actor_critic_policy",
                "args": {"model_name": model, "generation_kwargs": GENERATION},
            },
        },
        "train_evaluation": {
            "eval_batch_size": 64,
            "n_iters": 2,
            "eval_every": 1,
            "metrics": [{"id": "length"}],
        },
    }


def offline(model: str, id: str, pool: dict) -> dict:
    return {
        "tokenizer": {"model_name": model},
        "datapool": pool,
        "alg": {
            "id": id,
            "model_type": "causal",
            "model_name": model,
            "generation_kwargs": GENERATION,
            "training_args": {"max_steps": 4, "per_device_train_batch_size": 4, "learning_rate": 1e-3},
        },
        "train_evaluation": {"eval_batch_size": 64},
    }


SIZES = {"n_episodes": 16, "learning_rate": 1e-3}
OFFLINE = {"max_steps": 4, "per_device_train_batch_size": 4, "learning_rate": 1e-3, "max_new_tokens": 8}
ROLLOUTS = {
    "prompts": PROMPTS,
    "eval_prompts": EVAL_PROMPTS,
    "reward": REWARD,
    "metrics": ["length"],
    "n_iters": 2,
    "max_new_tokens": 8,
    **SIZES,
}
CASES = {
    "grpo": ({**ROLLOUTS, "group_size": 4}, PROMPTS),
    "ppo": ({**ROLLOUTS, "n_epochs": 2}, PROMPTS),
    "dpo": ({"data": PAIRS, **OFFLINE}, PAIRS),
    "sft": ({"data": TEXTS, **OFFLINE}, TEXTS),
}


def blocks_of(id: str, model: str, rows_file: str, eval_file: str) -> dict:
    """The file that a user would write for the same run."""
    if id in ("grpo", "ppo"):
        further = {"group_size": 4, "minibatch_episodes": 16}
        if id == "ppo":
            further = {"minibatch_episodes": 4, "n_epochs": 2}
        blocks = on_policy(model, id, SIZES | further, 0.0 if id == "grpo" else 0.1)
        blocks["datapool"]["args"]["data_files"] = {"train": rows_file, "val": eval_file, "test": None}
        return blocks
    if id == "dpo":
        pool = {"id": "preferences", "args": {"data_files": {"train": rows_file, "val": None, "test": None}}}
        return offline(model, "dpo", pool)
    pool = {"id": "jsonl", "args": {"data_files": {"train": rows_file, "val": None, "test": None}}}
    pool["args"] |= {"prompt_column": "prompt", "reference_column": "completion"}
    return offline(model, "supervised", pool)


@pytest.mark.parametrize("id", CASES)
def test_a_file_and_python_train_to_the_same_bytes(id, tiny_gpt2_dir, tmp_path):
    arguments, rows = CASES[id]
    eval_rows = [{"prompt": prompt, "topic": "numbers"} for prompt in EVAL_PROMPTS]
    if "eval_prompts" in arguments:
        arguments = arguments | {"eval_prompts": eval_rows}
    for name, lines in (("rows", rows), ("eval_rows", eval_rows)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = (str(tmp_path / "rows.jsonl"), str(tmp_path / "eval_rows.jsonl"))
    file = tmp_path / "run.yml"
    file.write_text(yaml.safe_dump(blocks_of(id, str(tiny_gpt2_dir), *files)))

    in_python = Run(str(tiny_gpt2_dir), algorithm=id, folder=tmp_path / "a" / "in_python", **arguments)
    from_file = Run.from_file(file).config
    configs = [in_python.config.to_dict(), from_file.to_dict()]
    for config in configs:
        del config["datapool"]["args"]["data_files"]
    assert configs[0] == configs[1]

    in_python.train(quiet=True)
    folder = train(file, base_path_to_store_results=tmp_path, experiment_name="from_file")
    weights = [path / "model" / "model.safetensors" for path in (in_python.folder, folder)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    initial = (tiny_gpt2_dir / "model.safetensors").read_bytes()
    assert weights[0].read_bytes() != initial
