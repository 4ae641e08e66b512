"""Configs of tiny runs."""

from __future__ import annotations

import copy

import pytest


@pytest.fixture
def tiny_config(tiny_gpt2_dir):
    """A run of three iterations on the tiny GPT-2, as plain data."""
    return copy.deepcopy(
        {
            "tokenizer": {"model_name": str(tiny_gpt2_dir)},
            "reward_fn": {"id": "increasing_numbers", "args": {"min_tokens": 8}},
            "datapool": {"id": "dummy_pool", "args": {"prompt": "Count with me:", "n_samples": 6}},
            "env": {"n_envs": 4, "args": {"max_prompt_length": 16, "max_episode_length": 8, "terminate_on_eos": True}},
            "alg": {
                "id": "ppo",
                "args": {"n_steps": 8, "batch_size": 16, "n_epochs": 2, "learning_rate": 1e-3},
                "kl_div": {"coeff": 0.01, "target_kl": 0.2},
                "policy": {
                    "id": "causal_lm_actor_critic_policy",
                    "args": {
                        "model_name": str(tiny_gpt2_dir),
                        "value_head_init": "default",  # most rewards here are 0: the values make the advantages
                        "generation_kwargs": {"do_sample": True, "top_k": 0, "max_new_tokens": 8},
                    },
                },
            },
            "train_evaluation": {
                "eval_batch_size": 4,
                "n_iters": 3,
                "eval_every": 2,
                "save_every": 2,
                "metrics": [{"id": "increasing_numbers", "args": {"min_tokens": 8}}, {"id": "length"}],
            },
        }
    )


@pytest.fixture
def tiny_seq2seq_config(tiny_config, tiny_t5_dir):
    """The same run on the tiny T5."""
    tiny_config["tokenizer"]["model_name"] = str(tiny_t5_dir)
    tiny_config["alg"]["policy"]["id"] = "seq2seq_lm_actor_critic_policy"
    tiny_config["alg"]["policy"]["args"]["model_name"] = str(tiny_t5_dir)
    tiny_config["env"]["args"]["context_start_token"] = 0
    return tiny_config
