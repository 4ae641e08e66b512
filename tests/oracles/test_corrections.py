"""What RL4LMs got wrong and this library does not, where no other test says so."""

import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, GenerationConfig

from rl4lms_like.config.load import parse_config
from rl4lms_like.on_policy.assemble import build_env
from rl4lms_like.testing import models
from rl4lms_like.training.inputs import load_model_config
from tests.builders import make_env, make_policy


def test_nothing_is_sampled_as_a_checkpoints_own_generation_config_says(tmp_path, tiny_tokenizer):
    """A temperature of nearly 0 and a forced first token in the checkpoint would make all responses equal."""
    model = models.make_seq2seq_lm("bart", tiny_tokenizer)
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1e-3,
        forced_bos_token_id=7,
        max_length=3,
        eos_token_id=1,
        pad_token_id=0,
        decoder_start_token_id=model.config.decoder_start_token_id,
    )
    folder = models.save_model(tmp_path / "bart", model, tiny_tokenizer)
    policy = make_policy("seq2seq", folder)
    ids = torch.randint(2, 320, (1, 5)).repeat(6, 1)
    episodes = policy.generate(ids, torch.ones_like(ids), eos_token_ids=[], max_new_tokens=6, seed=0)
    assert episodes.response_ids.shape == (6, 6)
    assert len({tuple(row) for row in episodes.response_ids.tolist()}) == 6
    assert set(episodes.response_ids[:, 0].tolist()) != {7}
    saved = policy.save_model(tmp_path / "saved", tiny_tokenizer)
    again = AutoModelForSeq2SeqLM.from_pretrained(saved).generation_config
    assert again.temperature == 1e-3 and again.forced_bos_token_id == 7


def test_building_a_policy_leaves_transformers_classes_alone(tiny_gpt2_dir):
    cls = type(AutoModelForCausalLM.from_pretrained(tiny_gpt2_dir))
    before = (cls.__bases__, cls.generate, cls.forward)
    make_policy("causal", tiny_gpt2_dir)
    assert (cls.__bases__, cls.generate, cls.forward) == before


@pytest.mark.parametrize(
    ("generation_kwargs", "limit"),
    [({"max_new_tokens": 5}, 5), ({"max_new_tokens": 50}, 8), ({}, 8), ({"max_length": 6}, 6)],
)
def test_an_episode_ends_where_generation_does(generation_kwargs, limit, tiny_tokenizer, tiny_gpt2_dir):
    config = parse_config(
        {
            "tokenizer": {"model_name": str(tiny_gpt2_dir)},
            "reward_fn": {"id": "sentiment"},
            "datapool": {"id": "dummy_pool", "args": {"prompt": "Count"}},
            "env": {"args": {"max_prompt_length": 8, "max_episode_length": 8}},
            "alg": {
                "id": "ppo",
                "kl_div": {"coeff": 0.1},
                "policy": {
                    "id": "causal_lm_actor_critic_policy",
                    "args": {"model_name": str(tiny_gpt2_dir), "generation_kwargs": generation_kwargs},
                },
            },
            "train_evaluation": {"eval_batch_size": 1, "n_iters": 1, "eval_every": 1},
        }
    )
    one = make_env(tiny_tokenizer, tiny_gpt2_dir).envs[0]
    from rl4lms_like.policies.arguments import PolicyArguments

    model_config = load_model_config(PolicyArguments(model_name=str(tiny_gpt2_dir)))
    env = build_env(config, tiny_tokenizer, one.reward_function, one.sampler.samples, model_config)
    assert env.get_attr("max_episode_length", [0]) == [limit]


def test_min_length_counts_new_tokens_of_causal_models_and_the_start_token_of_others(tiny_gpt2_dir, tiny_t5_dir):
    for family, folder, least in (("causal", tiny_gpt2_dir, 6), ("seq2seq", tiny_t5_dir, 5)):
        policy = make_policy(family, folder)
        ids = torch.randint(2, 320, (32, 4))
        # Half of the vocabulary ends a response, so that only the minimum keeps responses alive.
        ends = list(range(1, 320, 2))
        episodes = policy.generate(
            ids,
            torch.ones_like(ids),
            eos_token_ids=ends,
            max_new_tokens=12,
            generation_kwargs={"do_sample": True, "top_k": 0, "min_length": 6, "max_new_tokens": 12},
            seed=0,
        )
        assert int(episodes.lengths.min()) == least + 1


def test_everything_runs_without_a_gpu():
    """Where CUDA is hidden, building and importing everything still works."""
    code = (
        "import rl4lms_like as r; [getattr(r, name) for name in r.__all__]; import torch; "
        "assert not torch.cuda.is_available()"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={**__import__("os").environ, "CUDA_VISIBLE_DEVICES": ""}
    )
