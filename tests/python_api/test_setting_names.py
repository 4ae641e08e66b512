"""Flat names of settings: one table, which the page has, and a decision for each name with several meanings."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl4lms_like import Run
from rl4lms_like.algorithms import ALGORITHMS, OBJECTIVES
from rl4lms_like.python_api.setting_names import flat_names, is_ambiguous
from scripts.docs.python_settings import with_tables

PAGE = Path(__file__).resolve().parents[2] / "docs" / "python.md"


def test_the_page_has_the_settings():
    text = PAGE.read_text(encoding="utf-8")
    assert with_tables(text) == text, "python -m scripts.docs.python_settings docs/python.md"


def test_every_name_has_one_meaning_or_is_known_to_have_several():
    ambiguous = set()
    for kind, registry in (("on_policy", ALGORITHMS), ("preference", OBJECTIVES)):
        for id in registry.ids():
            names = flat_names(kind, id)
            ambiguous |= {(kind, name) for name, paths in names.items() if is_ambiguous(name, paths)}
    assert ambiguous == {("preference", "use_cache")}


SETTINGS = {
    "learning_rate": (1e-4, "alg.args.learning_rate"),
    "kl_coeff": (0.2, "alg.kl_div.coeff"),
    "kl_target": (0.1, "alg.kl_div.target_kl"),
    "top_k": (5, "alg.policy.args.generation_kwargs.top_k"),
    "peft": ({"r": 4}, "alg.policy.args.peft"),
    "save_every": (7, "train_evaluation.save_every"),
    "max_prompt_length": (9, "env.args.max_prompt_length"),
    "reward_timeout": (3.0, "env.reward_timeout"),
    "seed": (4, "seed"),
    "system_prompt": ("Be brief.", "tokenizer.system_prompt"),
    "prompt_prefix": ("Q: ", "datapool.args.prompt_prefix"),
    "sampler": ({"id": "difficulty"}, "datapool.sampler"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_is_where_a_file_has_it(name, tiny_gpt2_dir):
    value, path = SETTINGS[name]
    further = {"kl_coeff": 0.1} if name == "kl_target" else {}
    further |= {"chat_template": str(PAGE)} if name == "system_prompt" else {}
    run = Run(tiny_gpt2_dir, ["a", "b"], "sentiment", **{name: value}, **further)
    found = run.config.to_dict()
    for key in path.split("."):
        found = found[key]
    if isinstance(value, dict):
        assert value.items() <= found.items()
    else:
        assert found == value


def test_a_block_is_merged_with_settings(tiny_gpt2_dir):
    run = Run(tiny_gpt2_dir, ["a"], "sentiment", env={"args": {"terminate_on_eos": False}}, max_prompt_length=5)
    assert run.config.env.args["terminate_on_eos"] is False and run.config.env.args["max_prompt_length"] == 5
    run = Run(tiny_gpt2_dir, ["a"], "sentiment", generation_kwargs={"temperature": 0.5}, max_new_tokens=3)
    expected = {"temperature": 0.5, "max_new_tokens": 3, "do_sample": True, "top_k": 0}
    assert run.config.alg.policy.args["generation_kwargs"] == expected


def test_settings_have_one_meaning_in_any_order_and_stay_as_they_were_given(tiny_gpt2_dir):
    shared = {"temperature": 0.5}
    first = Run(tiny_gpt2_dir, ["a"], "sentiment", max_new_tokens=3, generation_kwargs=shared)
    second = Run(tiny_gpt2_dir, ["a"], "sentiment", generation_kwargs=shared, max_new_tokens=3)
    assert first.config == second.config and shared == {"temperature": 0.5}


def test_a_block_of_null_is_an_empty_one(tiny_gpt2_dir):
    run = Run(tiny_gpt2_dir, ["a"], "sentiment", alg={"args": None}, learning_rate=1e-4)
    assert run.config.alg.args["learning_rate"] == 1e-4


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_rollout_is_a_multiple_of_the_responses_that_are_generated_together(algorithm, tiny_gpt2_dir):
    arguments = Run(tiny_gpt2_dir, ["a"], "sentiment", algorithm=algorithm, n_envs=48).config.alg.args
    assert arguments["n_episodes"] == 96 and arguments["minibatch_episodes"] in (24, 96)


def test_the_defaults_of_python_are_written_out(tiny_gpt2_dir):
    config = Run(tiny_gpt2_dir, ["a", "b"], "sentiment").config.to_dict()
    assert config["alg"]["args"] == {"n_episodes": 64, "minibatch_episodes": 64}
    assert config["alg"]["kl_div"]["coeff"] == 0
    assert config["env"]["n_envs"] == 64 and config["env"]["args"]["terminate_on_eos"] is True
    assert config["env"]["args"] == {"terminate_on_eos": True, "max_episode_length": 64, "max_prompt_length": 64}
    assert config["datapool"]["sampler"]["id"] == "shuffled"
    assert config["alg"]["policy"]["args"]["generation_kwargs"]["top_k"] == 0
    assert Run(tiny_gpt2_dir, ["a"], "sentiment", algorithm="ppo").config.alg.kl_div.coeff > 0


def test_a_seq2seq_model_gets_its_policy_and_its_start_token(tiny_t5_dir):
    config = Run(tiny_t5_dir, ["a", "b"], "sentiment").config
    assert config.alg.policy.id == "seq2seq_lm_actor_critic_policy" and config.env.args["context_start_token"] == 0
    assert (
        Run(tiny_t5_dir, data=[{"prompt": "a", "completion": "b"}], algorithm="sft").config.alg.model_type == "seq2seq"
    )
