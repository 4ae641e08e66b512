"""Configs of runs that are checked, never started."""

from __future__ import annotations

from typing import Any


def run_blocks() -> dict[str, Any]:
    """An RL run, in RL4LMs' keys."""
    return {
        "tokenizer": {"model_name": "gpt2", "padding_side": "left"},
        "reward_fn": {"id": "increasing_numbers", "args": {"min_tokens": 20}},
        "datapool": {"id": "dummy_pool", "args": {"prompt": "<|endoftext|>", "n_samples": 50}},
        "env": {"n_envs": 10, "args": {"max_prompt_length": 5, "max_episode_length": 20, "terminate_on_eos": True}},
        "alg": {
            "id": "ppo",
            "args": {"n_steps": 128, "batch_size": 128, "learning_rate": 1e-6, "n_epochs": 5},
            "kl_div": {"coeff": 0.02, "target_kl": 2},
            "policy": {
                "id": "causal_lm_actor_critic_policy",
                "args": {
                    "model_name": "gpt2",
                    "generation_kwargs": {"do_sample": True, "top_k": 0, "max_new_tokens": 20},
                },
            },
        },
        "train_evaluation": {
            "eval_batch_size": 100,
            "n_iters": 100,
            "eval_every": 10,
            "metrics": [{"id": "increasing_numbers", "args": {"min_tokens": 20}}],
        },
    }


def supervised_blocks() -> dict[str, Any]:
    """A supervised run, in RL4LMs' keys."""
    return {
        "tokenizer": {"model_name": "t5-base", "max_length": 64},
        "datapool": {"id": "dummy_pool", "args": {"prompt": "x"}},
        "alg": {
            "id": "supervised",
            "model_type": "seq2seq",
            "model_name": "t5-base",
            "generation_kwargs": {"num_beams": 5, "max_new_tokens": 20, "post_processing_fn": None},
            "training_args": {"num_train_epochs": 4, "learning_rate": 1e-5},
        },
        "train_evaluation": {"eval_batch_size": 100, "metrics": [{"id": "dates"}]},
    }
