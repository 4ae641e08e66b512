"""The same value is refused with the same words in a config and in Python, where an object is built from it."""

from __future__ import annotations

import pytest
from gymnasium import spaces

from rl4lms_like.algorithms import preference_arguments
from rl4lms_like.algorithms.policy_gradient import GRPO, OPD
from rl4lms_like.algorithms.ppo import PPO
from rl4lms_like.algorithms.trpo import TRPO
from rl4lms_like.config.load import parse_config
from rl4lms_like.config.yaml_file import apply_values
from rl4lms_like.envs.env import TextGenEnv
from rl4lms_like.envs.vec_env import TextVecEnv
from rl4lms_like.offline import preference_objectives
from rl4lms_like.policies.base import CausalLMActorCriticPolicy
from rl4lms_like.policies.masked import MaskableCausalLMActorCriticPolicy
from rl4lms_like.rollouts.kl import FixedKLController
from rl4lms_like.system.errors import ConfigError
from tests.configs import run_blocks

POLICY = {"model_name": "gpt2"}


def issues_of(build):
    with pytest.raises(ConfigError) as caught:
        build()
    return {issue.path: issue.message for issue in caught.value.issues}


def algorithm(cls, policy_kwargs=None, **arguments):
    return lambda: cls(None, None, policy_kwargs=POLICY | (policy_kwargs or {}), **arguments)


def policy(cls=CausalLMActorCriticPolicy, **arguments):
    return lambda: cls(spaces.Dict({}), spaces.Discrete(3), lambda _: 0.0, **POLICY, **arguments)


def objective(name, **arguments):
    made = getattr(preference_arguments, f"{name}Arguments")(**arguments)
    cls = getattr(preference_objectives, name)
    return lambda: cls(arguments=made, reader=None, pad_token_id=0, eval_batch_size=1)


def environment(**arguments):
    return lambda: TextGenEnv(None, None, [], **arguments)


NLPO = {"alg.id": "nlpo", "alg.args": {}, "alg.policy.id": "maskable_causal_lm_actor_critic_policy"}
MASKABLE = MaskableCausalLMActorCriticPolicy

ALGORITHMS = {
    "ppo n_steps": ({"alg.args.n_steps": -1}, algorithm(PPO, n_steps=-1), "n_steps"),
    "ppo gamma": ({"alg.args.gamma": 2}, algorithm(PPO, gamma=2), "gamma"),
    "ppo learning_rate": ({"alg.args.learning_rate": "fast"}, algorithm(PPO, learning_rate="fast"), "learning_rate"),
    "ppo unknown": ({"alg.args.n_stepz": 3}, algorithm(PPO, n_stepz=3), "n_stepz"),
    "ppo ratio_band": ({"alg.args.ratio_band": [2, 3]}, algorithm(PPO, ratio_band=[2, 3]), "ratio_band"),
    "ppo critic": (
        {"alg.policy.args.critic": "none"},
        algorithm(PPO, {"critic": "none"}),
        "policy_kwargs.critic",
    ),
    "ppo placement": (
        {"alg.kl_div": {"coeff": 0.1, "placement": "loss"}},
        algorithm(PPO, kl_controller=FixedKLController(0.1, placement="loss")),
        "kl_controller.placement",
    ),
    "ppo critic_pretrain": (
        {"alg.args.critic_pretrain": {"max_rollouts": 0}},
        algorithm(PPO, critic_pretrain={"max_rollouts": 0}),
        "critic_pretrain.max_rollouts",
    ),
    "grpo group_size": ({"alg.id": "grpo", "alg.args": {"group_size": 1}}, algorithm(GRPO, group_size=1), "group_size"),
    "grpo scale": ({"alg.id": "grpo", "alg.args": {"scale": "median"}}, algorithm(GRPO, scale="median"), "scale"),
    "grpo vf_coef": ({"alg.id": "grpo", "alg.args": {"vf_coef": 0.5}}, algorithm(GRPO, vf_coef=0.5), "vf_coef"),
    "trpo compile": (
        {"alg.id": "trpo", "alg.args": {}, "alg.policy.args.compile": True},
        algorithm(TRPO, {"compile": True}),
        "policy_kwargs.compile",
    ),
    "opd teacher": ({"alg.id": "opd", "alg.args": {}}, algorithm(OPD), "policy_kwargs.teacher_model"),
}
POLICIES = {
    "dtype": ({"alg.policy.args.dtype": "float16"}, policy(dtype="float16"), "dtype"),
    "top_p": (
        {"alg.policy.args.generation_kwargs": {"top_p": 1.5}},
        policy(generation_kwargs={"top_p": 1.5}),
        "generation_kwargs.top_p",
    ),
    "rank": ({"alg.policy.args.peft": {"r": 0}}, policy(peft={"r": 0}), "peft.r"),
    "merge": ({"alg.policy.args.merge_on_save": True}, policy(merge_on_save=True), "merge_on_save"),
    "ahead": (
        {"alg.policy.args.engine": {"id": "transformers", "ahead": 1}},
        policy(engine={"id": "transformers", "ahead": 1}),
        "engine.ahead",
    ),
    "top_mask": (NLPO | {"alg.policy.args.top_mask": 0.5}, policy(MASKABLE, top_mask=0.5), "top_mask"),
}
ENVIRONMENTS = {
    "length": ({"env.args.max_episode_length": 0}, environment(max_episode_length=0), "max_episode_length"),
    "side": (
        {"env.args.prompt_truncation_side": "middle"},
        environment(prompt_truncation_side="middle"),
        "prompt_truncation_side",
    ),
    "weights": ({"env.args.priority_scale": -1}, environment(priority_scale=-1), "priority_scale"),
    "n_envs": ({"env.n_envs": 0}, lambda: TextVecEnv(0, None, None, []), "n_envs"),
    "timeout": ({"env.reward_timeout": -1}, lambda: TextVecEnv(1, None, None, [], reward_timeout=-1), "reward_timeout"),
}
OBJECTIVES = {
    "beta": ("dpo", {"beta": -1}, objective("DPO", beta=-1), "beta"),
    "smoothing": (
        "dpo",
        {"loss": "hinge", "label_smoothing": 0.1},
        objective("DPO", loss="hinge", label_smoothing=0.1),
        "label_smoothing",
    ),
    "weight": ("kto", {"desirable_weight": "much"}, objective("KTO", desirable_weight="much"), "desirable_weight"),
    "length": ("simpo", {"max_response_length": 0}, objective("SimPO", max_response_length=0), "max_response_length"),
}
PREFERENCES = {
    "tokenizer": {"model_name": "gpt2"},
    "datapool": {"id": "preferences", "args": {"path": "pairs.jsonl"}},
    "alg": {"id": "dpo", "model_type": "causal", "model_name": "gpt2"},
    "train_evaluation": {"eval_batch_size": 4},
}


@pytest.mark.parametrize(("changes", "build", "name"), (ALGORITHMS | POLICIES | ENVIRONMENTS).values())
def test_a_value_is_refused_with_the_words_of_the_config(changes, build, name):
    blocks, _ = apply_values(run_blocks(), changes, "test")
    in_config = issues_of(lambda: parse_config(blocks))
    path = next(path for path in in_config if path.endswith(name.rpartition(".")[2]))
    assert issues_of(build)[name] == in_config[path]


@pytest.mark.parametrize(("id", "args", "build", "name"), OBJECTIVES.values())
def test_a_value_of_an_objective_is_refused_with_the_words_of_the_config(id, args, build, name):
    blocks = PREFERENCES | {"alg": PREFERENCES["alg"] | {"id": id, "args": args}}
    assert issues_of(build)[name] == issues_of(lambda: parse_config(blocks))[f"alg.args.{name}"]


def test_all_mistakes_are_told_at_once_in_python_too():
    build = algorithm(GRPO, {"critic": "shared", "dtype": "float16"}, gamma=2, scale="median")
    assert set(issues_of(build)) == {"gamma", "scale", "policy_kwargs.dtype"}
    build = algorithm(GRPO, {"critic": "shared"}, gamma=0.5, scale="mean", overlong_buffer=0.1)
    assert set(issues_of(build)) == {"gamma", "overlong_buffer", "policy_kwargs.critic"}


def test_five_mistakes_in_five_blocks_are_told_at_once_in_the_order_of_the_file():
    blocks, _ = apply_values(
        run_blocks(),
        {
            "tokenizer.padding_side": "middle",
            "reward_fn.args.limit": 3,
            "env.args.max_episode_length": 0,
            "alg.kl_div": {"coeff": 0, "target_kl": 0.1},
            "train_evaluation.keep_best": {"metric": "nothing", "mode": "max"},
        },
        "test",
    )
    assert list(issues_of(lambda: parse_config(blocks))) == [
        "tokenizer.padding_side",
        "reward_fn.args.limit",
        "env.args.max_episode_length",
        "alg.kl_div",
        "train_evaluation.keep_best.metric",
    ]
