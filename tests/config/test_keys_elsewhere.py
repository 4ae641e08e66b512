"""A key of another library is answered with the key here, and the page has the same table."""

from __future__ import annotations

import json

import pytest

from rl4lms_like.algorithms import OBJECTIVES
from rl4lms_like.algorithms.ppo import PPO
from rl4lms_like.cli.commands import build_parser
from rl4lms_like.config.load import parse_config
from rl4lms_like.core import not_included
from rl4lms_like.core.keys_elsewhere import OFFLINE_KEYS, RL_KEYS, by_name, with_equivalent, with_tables
from rl4lms_like.core.sample import Sample
from rl4lms_like.envs.vec_env import TextVecEnv
from rl4lms_like.offline.training_arguments import make_training_arguments
from rl4lms_like.policies.base import CausalLMActorCriticPolicy
from rl4lms_like.rewards.synthetic import RewardIncreasingNumbers
from rl4lms_like.system.errors import ConfigError, ConfigIssue
from rl4lms_like.system.schema import signature_of
from tests.configs import run_blocks, supervised_blocks
from tests.conftest import REPOSITORY
from tests.offline.preferences import preference_runs


def preference_blocks(folder):
    return preference_runs.blocks("dpo", "gpt2", preference_runs.written(folder))


def mistakes_of(blocks):
    with pytest.raises(ConfigError) as caught:
        parse_config(blocks)
    return {issue.path: issue.message for issue in caught.value.issues}


@pytest.mark.parametrize(("block", "key", "here"), [
    ("alg.args", "cliprange", "alg.args.clip_range"),
    ("alg.args", "num_ppo_epochs", "alg.args.n_epochs"),
    ("alg.args", "kl_coef", "alg.kl_div.coeff"),
    ("alg.kl_div", "init_kl_coef", "alg.kl_div.coeff"),
    ("alg.policy.args", "actor_learning_rate", "alg.args.learning_rate"),
    ("env", "rollout_batch_size", "env.n_envs"),
    ("", "vf_coef", "alg.args.vf_coef"),
    ("alg.policy.args", "lora", "alg.policy.args.peft"),
    ("", "lora", "alg.policy.args.peft"),
    ("alg.args", "num_generations", "alg.args.group_size"),
    ("alg.args", "loss_type", "alg.args.loss_aggregation, grpo is seq_mean_token_mean"),
    ("alg.args", "scale_rewards", "alg.args.scale, group, batch or none"),
    ("alg.args", "epsilon_high", "alg.args.clip_range_high"),
    ("alg.args", "importance_sampling_level", "alg.args.ratio_level"),
    ("alg.args", "delta", "alg.args.dual_clip"),
    ("alg.args", "steps_per_generation", "alg.args.minibatch_episodes"),
    ("alg.args", "use_vllm", "alg.policy.args.engine, {id: vllm"),
    ("alg.args", "reward_weights", "reward_fn, {id: combine}"),
    ("alg.args", "temperature", "alg.policy.args.generation_kwargs, of the sampling only"),
    ("alg.args", "n_samples_per_prompt", "alg.args.group_size"),
    ("alg.args", "filter_groups", "alg.args.dynamic_sampling"),
    ("alg.args", "mask_truncated_completions", "there is no equivalent"),
    ("alg.args", "vllm_tensor_parallel_size", "unknown key; not included: vLLM within the training process; start"),
    ("alg.args", "judge", "the reward llm_judge with compare_with: responses compares"),
    ("alg.args", "deepspeed", "unknown key; not included: DeepSpeed; torchrun starts"),
    ("", "critic.adam.lr", "alg.args.critic_learning_rate"),
    ("", "train.batch_size", "alg.args.batch_size, tokens of a minibatch"),
    ("", "actor", "the page has each option of OpenRLHF by its whole name"),
])  # fmt: skip
def test_a_key_of_another_library_is_answered_with_the_key_here(block, key, here):
    blocks = run_blocks()
    blocks["alg"] |= {"id": "grpo", "args": {}} if block == "alg.args" else {}
    inner = blocks
    for name in filter(None, block.split(".")):
        inner = inner[name]
    inner[key] = 1
    ((path, message),) = mistakes_of(blocks).items()
    assert path == f"{block}.{key}".lstrip(".") and here in message


@pytest.mark.parametrize("key", ["num_generations", "epsilon_high", "mini_batch_size", "cliprange"])
def test_a_setting_that_the_algorithm_has_is_named(key):
    blocks = run_blocks()
    blocks["alg"] |= {"id": "ppo", "args": {key: 1}}
    assert "the equivalent is alg.args." in mistakes_of(blocks)[f"alg.args.{key}"]


@pytest.mark.parametrize(("algorithm", "key"), [
    ("ppo", "scale_rewards"),
    ("ppo", "filter_groups"),
    ("grpo", "cliprange_value"),
    ("a2c", "mini_batch_size"),
])  # fmt: skip
def test_a_setting_that_the_algorithm_lacks_has_no_equivalent(algorithm, key):
    blocks = run_blocks()
    blocks["alg"] |= {"id": algorithm, "args": {key: 1}}
    message = mistakes_of(blocks)[f"alg.args.{key}"]
    assert message == f"unknown key; {algorithm} has no such setting (docs/coming_from_trl.md)"


@pytest.mark.parametrize(("objective", "message"), [
    ("reward_model", "unknown key; reward_model has no such setting (docs/coming_from_trl.md)"),
    ("orpo", "unknown key; orpo has no such setting: alg.args.odds_ratio_weight of orpo (docs/coming_from_trl.md)"),
])  # fmt: skip
def test_a_key_is_not_its_own_equivalent(objective, message, tmp_path):
    blocks = preference_runs.blocks(objective, "gpt2", preference_runs.written(tmp_path))
    blocks["alg"].setdefault("args", {})["beta"] = 0.1
    assert mistakes_of(blocks)["alg.args.beta"] == message
    issue = ConfigIssue("alg.args.beta", "unknown key; known: a, b")
    assert with_equivalent(issue, is_rl=False) == issue


def test_a_supervised_run_has_no_settings_of_objectives():
    blocks = supervised_blocks()
    blocks["alg"]["beta"] = 0.1
    assert "supervised has no such setting" in mistakes_of(blocks)["alg.beta"]


def test_arguments_of_components_and_supervised_runs_have_keys_of_their_own():
    blocks = run_blocks()
    blocks["reward_fn"]["args"]["target"] = 1
    blocks["train_evaluation"]["callbacks"] = [{"id": "tests.callbacks.test_callbacks:Counting", "args": {"target": 1}}]
    blocks["alg"]["ptx"] = {"coeff": 0.1, "data": {"id": "jsonl", "args": {"path": "x", "target": 1}}}
    mistakes = mistakes_of(blocks)
    for path in ("reward_fn.args", "train_evaluation.callbacks.0.args", "alg.ptx.data.args"):
        assert "kl_div" not in mistakes[f"{path}.target"]
    blocks = supervised_blocks() | {"learning_rate": 1e-5}
    assert "alg.args" not in mistakes_of(blocks)["learning_rate"]


@pytest.mark.parametrize("key", ["lora", "lora_config", "peft_config"])
def test_the_adapters_of_a_supervised_run_have_their_key_in_alg(key):
    blocks = supervised_blocks()
    blocks["alg"][key] = {"r": 4}
    assert "the equivalent is alg.peft, " in mistakes_of(blocks)[f"alg.{key}"]


@pytest.mark.parametrize(("block", "key", "here"), [
    ("", "learning_rate", "alg.training_args"),
    ("alg", "per_device_train_batch_size", "alg.training_args"),
    ("alg.args", "learning_rate", "alg.training_args"),
    ("alg.args", "loss_type", "alg.args.loss, sigmoid"),
    ("alg.args", "rpo_alpha", "alg.args.sft_weight"),
    ("alg.args", "max_completion_length", "alg.args.max_response_length"),
    ("alg", "truncation_mode", "tokenizer.truncation_side"),
    ("alg.args", "packing", "alg.packing, "),
    ("alg.args", "precompute_ref_log_probs", "there is no equivalent: the log-probs of the reference are always"),
])  # fmt: skip
def test_so_is_a_key_of_a_preference_run(block, key, here, tmp_path):
    blocks = inner = preference_blocks(tmp_path)
    for name in filter(None, block.split(".")):
        inner = inner[name]
    inner[key] = 1
    path = f"{block}.{key}".lstrip(".")
    assert here in mistakes_of(blocks)[path]


@pytest.mark.parametrize(("key", "message"), [
    ("beta", "the equivalent is alg.args.beta"),
    ("max_prompt_length", "the equivalent is tokenizer.max_length"),
    ("warmup_stepps", "did you mean 'warmup_steps'"),
    ("logging_stepss", "did you mean 'logging_steps'"),
])  # fmt: skip
def test_so_is_one_among_the_arguments_of_the_trainer(key, message, tmp_path):
    blocks = preference_blocks(tmp_path)
    blocks["alg"]["training_args"][key] = 1
    with pytest.raises(ConfigError) as caught:
        make_training_arguments(parse_config(blocks), "checkpoints")
    ((path, answer),) = [(issue.path, issue.message) for issue in caught.value.issues]
    assert path == f"alg.training_args.{key}" and message in answer


def test_a_key_that_its_own_block_lacks_is_not_answered_with_that_block():
    issue = ConfigIssue("alg.training_args.warmup_steps", "unknown key; known: a, b")
    assert with_equivalent(issue, is_rl=False) == issue


def test_in_python_too(tiny_gpt2_dir, tiny_tokenizer):
    env = TextVecEnv(
        2, tiny_tokenizer, RewardIncreasingNumbers(2), [Sample("0", "one")], max_prompt_length=8, max_episode_length=4
    )
    policy_kwargs = {"model_name": str(tiny_gpt2_dir)}
    with pytest.raises(TypeError, match=r"^PPO got an unexpected keyword argument 'cliprange'; .* is clip_range "):
        PPO(CausalLMActorCriticPolicy, env, cliprange=0.1, policy_kwargs=policy_kwargs)
    with pytest.raises(TypeError, match=r"'use_vllm'; the equivalent is alg\.policy\.args\.engine, "):
        PPO(CausalLMActorCriticPolicy, env, use_vllm=True, policy_kwargs=policy_kwargs)
    with pytest.raises(TypeError, match="'scale_rewards'; PPO has no such setting "):
        PPO(CausalLMActorCriticPolicy, env, scale_rewards=True, policy_kwargs=policy_kwargs)
    with pytest.raises(TypeError, match="'lora_config'; the equivalent is peft, "):
        PPO(CausalLMActorCriticPolicy, env, policy_kwargs={**policy_kwargs, "lora_config": {}})


ELSEWHERE = json.loads((REPOSITORY / "tests" / "data" / "keys_elsewhere.json").read_text())
TRAINER = ELSEWHERE["transformers 5.23.0"]["TrainingArguments"]


def is_explained(message: str) -> bool:
    """Whether an error has more than a guess: the equivalent, a reason, or what is not included."""
    reasons = ("the equivalent is ", "there is no equivalent: ", "not included: ", "cannot be set: ")
    return any(reason in message for reason in reasons)


@pytest.mark.parametrize("library", ["GRPOConfig", "train_ppo_ray"])
def test_every_key_of_rl_elsewhere_is_accepted_or_explained(library):
    names = ELSEWHERE["OpenRLHF 0.11.0"].get(library)
    if names is None:
        names = {*ELSEWHERE["TRL 1.16.0"][library], *TRAINER}

    # Each name where its users would write it first; values of a wrong type are no matter here.
    blocks = run_blocks()
    blocks["alg"] |= {"id": "grpo", "args": dict.fromkeys(names, object)}
    unexplained = {}
    for path, message in mistakes_of(blocks).items():
        if path.removeprefix("alg.args.") in names and message.startswith("unknown key") and not is_explained(message):
            unexplained[path] = message
    # Those of PPO's critic, which grpo lacks.
    assert {message for message in unexplained.values()} <= {
        "unknown key; grpo has no such setting (docs/coming_from_trl.md)"
    }
    for path in unexplained:
        blocks["alg"] |= {"id": "ppo", "args": {path.removeprefix("alg.args."): object}}
        (message,) = [message for at, message in mistakes_of(blocks).items() if at == path]
        assert is_explained(message), path


@pytest.mark.parametrize("library", ["SFTConfig", "DPOConfig", "train_sft", "train_dpo", "train_rm"])
def test_so_is_every_key_of_runs_that_learn_from_texts(library, tmp_path):
    names = ELSEWHERE["OpenRLHF 0.11.0"].get(library)
    if names is None:
        names = {*ELSEWHERE["TRL 1.16.0"][library], *TRAINER}
    blocks = preference_blocks(tmp_path) if library in ("DPOConfig", "train_dpo", "train_rm") else supervised_blocks()
    with pytest.raises(ConfigError) as caught:
        if library.startswith("train_"):
            blocks["alg"] |= {name: object for name in names}
            parse_config(blocks)
        else:
            blocks["alg"]["training_args"] = dict.fromkeys(names, object)
            make_training_arguments(parse_config(blocks), "checkpoints")

    for issue in caught.value.issues:
        if issue.message.startswith("unknown key"):
            has_objective = "has no such setting" in issue.message  # beta, of the loss of another objective
            assert is_explained(issue.message) or has_objective, f"{issue}"


def test_the_page_of_what_is_not_included_is_made_from_its_table(repository):
    page = (repository / "docs" / "not_included.md").read_text(encoding="utf-8")
    assert not_included.with_table(page) == page, "run: python -m rl4lms_like.core.not_included docs/not_included.md"
    keys = [key for row in not_included.NOT_INCLUDED for key in row.keys.split()]
    others = {name for row in (*RL_KEYS, *OFFLINE_KEYS) for name in row.names.split()}
    assert len(keys) == len(set(keys)) and others.isdisjoint(keys)


def keys_of(rows) -> set[str]:
    return {row.key for row in rows if row.key and not row.key.startswith("--")}


def is_unknown(blocks, key) -> bool:
    """Whether a key is unknown, seen by its message for a value of another type than it has."""
    inner = blocks
    *names, last = key.split(".")
    for name in names:
        inner = inner.setdefault(name, {})
    inner[last] = object
    found = {path: message for path, message in mistakes_of(blocks).items() if path.startswith(key)}
    assert found, key
    return any("unknown" in message for message in found.values())


def test_the_keys_here_are_keys(tmp_path):
    for key in keys_of(RL_KEYS):
        blocks = run_blocks()
        if key in (
            "alg.args.group_size",
            "alg.args.scale",
            "alg.args.ratio_level",
            "alg.args.dynamic_sampling",
            "alg.args.overlong_buffer",
            "alg.args.reference_update_iterations",
            "alg.args.reference_mixing",
        ):
            blocks["alg"] |= {"id": "grpo", "args": {}}
        if key == "alg.policy.args.train_vision":
            blocks["alg"]["policy"]["id"] = "vision_lm_actor_critic_policy"
        assert not is_unknown(blocks, key), key

    arguments = set()
    for id in OBJECTIVES:
        arguments |= {argument.name for argument in signature_of(OBJECTIVES.signature(id)).arguments}
    for key in keys_of(OFFLINE_KEYS):
        if key.startswith("alg.args."):
            assert key.removeprefix("alg.args.") in arguments, key
        elif key != "alg.loss_on_prompt":  # of supervised runs
            assert not is_unknown(preference_blocks(tmp_path), key), key
    assert not is_unknown(supervised_blocks(), "alg.loss_on_prompt")


def test_options_of_the_command_line_exist():
    options = build_parser()._actions[-1].choices["train"]._option_string_actions
    assert {row.key for row in (*RL_KEYS, *OFFLINE_KEYS) if row.key.startswith("--")} <= set(options)


@pytest.mark.parametrize("rows", [RL_KEYS, OFFLINE_KEYS], ids=["rl", "offline"])
def test_no_name_has_two_answers(rows):
    names = [name for row in rows for name in row.names.split()]
    assert len(names) == len(set(names)) == len(by_name(rows))


def test_the_page_is_made_from_the_table(repository):
    page = (repository / "docs" / "coming_from_trl.md").read_text(encoding="utf-8")
    assert with_tables(page) == page, "run: python -m rl4lms_like.core.keys_elsewhere docs/coming_from_trl.md"
    row = "| `num_generations`, `n_samples_per_prompt` | `alg.args.group_size`: responses to one prompt |"
    assert page.splitlines().count(row) == 1
