"""The batch arithmetic of `check`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl4lms_like.config.load import parse_config
from rl4lms_like.estimates.budget import plan_batches
from tests.configs import run_blocks

THEIRS = Path(__file__).parents[2] / "../shared/spec/rl4lms_configs.json"


@pytest.fixture
def run():
    return run_blocks()


def planned(run, *, n_envs=10, n_steps=128, length=20, batch_size=64, micro=None, n_epochs=5, n_iters=100):
    run["env"]["n_envs"] = n_envs
    run["env"]["args"]["max_episode_length"] = length
    run["alg"]["policy"]["args"]["generation_kwargs"]["max_new_tokens"] = length
    run["alg"]["args"] = {
        "n_steps": n_steps,
        "batch_size": batch_size,
        "micro_batch_size": micro,
        "n_epochs": n_epochs,
        "learning_rate": 1e-5,
    }
    run["train_evaluation"]["n_iters"] = n_iters
    return plan_batches(parse_config(run))


def test_a_run_is_counted(run):
    plan = planned(run)
    assert plan.tokens_per_rollout == 1280
    assert plan.generation_batches == 7
    assert plan.episodes == 70
    assert plan.minibatch_episodes == 3
    assert plan.minibatches == 24
    assert plan.steps_per_iteration == 120
    assert plan.steps == 12_000
    assert plan.tokens == 128_000


def test_the_shorter_of_both_limits_counts(run):
    run["env"]["args"]["max_episode_length"] = 50
    assert plan_batches(parse_config(run)).response_tokens == 20
    run["env"]["args"]["max_episode_length"] = 7
    assert plan_batches(parse_config(run)).response_tokens == 7


def test_a2c_makes_one_step_per_rollout(run):
    run["alg"]["id"] = "a2c"
    run["alg"]["args"] = {"n_steps": 20}
    plan = plan_batches(parse_config(run))
    assert (plan.minibatches, plan.n_epochs, plan.steps) == (1, 1, 100)
    assert plan.minibatch_episodes == plan.episodes == 10


def test_micro_batches_split_a_minibatch(run):
    """Responses of 20 tokens after prompts of 5."""
    plan = planned(run, batch_size=200, micro=55)
    assert (plan.minibatch_episodes, plan.micro_batch_episodes) == (10, 2)
    assert dict(plan.lines())["forward passes"] == (
        "of 2 episodes in the update (at most 55 tokens of prompts and responses)"
    )
    assert planned(run, batch_size=200, micro=10).micro_batch_episodes == 1


@pytest.mark.parametrize(("micro", "shares_prompts", "n_episodes"), [
    (85, True, 4), (200, True, 8), (84, True, 3), (10, True, 1), (85, False, 3), (200, False, 8)
])  # fmt: skip
def test_a_shared_prompt_counts_once_in_a_pass(run, micro, shares_prompts, n_episodes):
    """Prompts of 5 tokens, each with 4 responses of 20."""
    run["env"]["n_envs"] = 8
    run["alg"] |= {"id": "grpo", "args": {"n_steps": 20, "batch_size": 160, "micro_batch_size": micro}}
    run["alg"]["args"]["group_size"] = 4
    plan = plan_batches(parse_config(run), shares_prompts=shares_prompts)
    assert plan.micro_batch_episodes == n_episodes


def test_the_shortest_responses_are_more_episodes(run):
    run["alg"]["args"] |= {"n_steps": 20, "batch_size": 100}
    config = parse_config(run)
    assert plan_batches(config).episodes == 10
    shortest = plan_batches(config, shortest=True)
    assert (shortest.response_tokens, shortest.episodes, shortest.minibatch_episodes) == (1, 200, 100)

    # The config may say that they are longer, or that all are of full length.
    kwargs = run["alg"]["policy"]["args"]["generation_kwargs"]
    kwargs["min_new_tokens"] = 4
    assert plan_batches(parse_config(run), shortest=True).response_tokens == 4
    del kwargs["min_new_tokens"]
    run["env"]["args"]["terminate_on_eos"] = False
    assert plan_batches(parse_config(run), shortest=True).response_tokens == 20


def test_what_people_read_has_the_numbers(run):
    text = dict(planned(run).lines())
    assert text["tokens per rollout"] == "at least 1,280"
    assert text["optimizer steps"] == "120 per iteration (RL4LMs: 100), 12,000 in all"
    assert text["tokens in all"] == "at least 128,000 in 100 iterations"


@pytest.mark.skipif(not THEIRS.exists(), reason=f"RL4LMs' configs are not at {THEIRS}")
@pytest.mark.parametrize(
    ("name", "generations"),
    [
        ("imdb_text_continuation/gpt2_ppo.yml", 3),
        ("iwslt2017/t5_ppo.yml", 4),
        ("narrative_qa/t5_ppo_on_supervised.yml", 11),
        ("synthetic_generate_dates/gpt2_ppo.yml", 5),
        ("totto/t5_ppo.yml", 6),
    ],
)
def test_generation_batches_of_their_configs(name, generations):
    config = parse_config(json.loads(THEIRS.read_text())[name], components=False)
    assert plan_batches(config).generation_batches == generations


COUNT = st.integers(1, 600)


@settings(deadline=None, max_examples=40)
@given(COUNT, COUNT, COUNT, COUNT, st.none() | COUNT, st.integers(1, 9))
def test_the_plan_covers_a_rollout_and_no_more(n_envs, n_steps, length, batch_size, micro, n_epochs):
    run = {
        "tokenizer": {"model_name": "gpt2"},
        "reward_fn": {"id": "sentiment"},
        "datapool": {"id": "dummy_pool", "args": {"prompt": "x"}},
        "env": {"args": {}},
        "alg": {
            "id": "ppo",
            "kl_div": {"coeff": 0},
            "policy": {
                "id": "causal_lm_actor_critic_policy",
                "args": {"model_name": "gpt2", "generation_kwargs": {}},
            },
        },
        "train_evaluation": {"eval_batch_size": 1, "n_iters": 1, "eval_every": 1},
    }
    plan = planned(
        run, n_envs=n_envs, n_steps=n_steps, length=length, batch_size=batch_size, micro=micro, n_epochs=n_epochs
    )
    assert plan.episodes * length >= plan.tokens_per_rollout > (plan.episodes - n_envs) * length
    assert plan.minibatches * plan.minibatch_episodes >= plan.episodes
    assert (plan.minibatches - 1) * plan.minibatch_episodes < plan.episodes
    assert plan.minibatch_episodes == 1 or plan.minibatch_episodes * length <= batch_size
    assert 1 <= plan.micro_batch_episodes <= plan.minibatch_episodes <= plan.episodes
    assert plan.steps_per_iteration == n_epochs * plan.minibatches
    assert plan.steps == 100 * plan.steps_per_iteration
