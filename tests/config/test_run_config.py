"""Configs: what is accepted, what is refused, and what is said of it."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import stable_baselines3
from hypothesis import given, settings
from hypothesis import strategies as st

from rl4lms_like.algorithms import ALGORITHMS, OBJECTIVES
from rl4lms_like.algorithms.arguments import A2CArguments, PPOArguments, TRPOArguments
from rl4lms_like.config import run_config as config_module
from rl4lms_like.config.binding import REGISTRIES, with_defaults
from rl4lms_like.config.load import load_config, parse_config
from rl4lms_like.config.rules import learning_rate_notice
from rl4lms_like.config.run_config import DoctorConfig, HeldOutConfig, RunConfig, SupervisedConfig
from rl4lms_like.config.yaml_file import apply_values, dump_yaml, parse_yaml
from rl4lms_like.core.model_weights import names_folder
from rl4lms_like.envs.arguments import EnvConfig
from rl4lms_like.rollouts.kl import KLConfig
from rl4lms_like.system.errors import ConfigError
from rl4lms_like.system.schema import signature_of
from tests.config_errors import raises_at
from tests.configs import run_blocks, supervised_blocks

ROOT = Path(__file__).parents[2]
THEIRS = ROOT / "../shared/spec/rl4lms_configs.json"
OFFERED = json.loads(THEIRS.read_text()) if THEIRS.exists() else {}
needs_theirs = pytest.mark.skipif(not OFFERED, reason=f"RL4LMs' configs are not at {THEIRS}")


@pytest.fixture
def run():
    return run_blocks()


@pytest.fixture
def supervised():
    return supervised_blocks()


@pytest.fixture
def write(tmp_path):
    def to_file(blocks, name="config.yml"):
        path = tmp_path / name
        path.write_text(blocks if isinstance(blocks, str) else dump_yaml(blocks))
        return path

    return to_file


def mistakes_of(blocks):
    with pytest.raises(ConfigError) as caught:
        parse_config(blocks)
    return [issue.path for issue in caught.value.issues]


# --- RL4LMs' own configs ------------------------------------------------------------------------------------------


@needs_theirs
def test_there_are_44_of_theirs():
    assert len(OFFERED) == 44


@pytest.mark.parametrize("name", OFFERED or [pytest.param("none", marks=needs_theirs)])
def test_their_configs_are_accepted_unchanged(name):
    blocks = OFFERED[name]
    before = copy.deepcopy(blocks)
    config = parse_config(blocks, source=name, components=False)
    assert isinstance(config, SupervisedConfig if "supervised" in blocks["alg"]["id"] else RunConfig)
    assert blocks == before
    assert config.tokenizer.model_name == blocks["tokenizer"]["model_name"]
    assert len(config.train_evaluation.metrics) == len(blocks["train_evaluation"]["metrics"])


@pytest.mark.parametrize("name", OFFERED or [pytest.param("none", marks=needs_theirs)])
def test_their_configs_are_the_same_when_written_and_read(name):
    config = parse_config(OFFERED[name], components=False)
    again, repeated = parse_yaml(dump_yaml(config.to_dict()), name)
    assert not repeated
    assert parse_config(again, components=False) == config


@pytest.mark.parametrize("name", OFFERED or [pytest.param("none", marks=needs_theirs)])
def test_their_components_are_here_and_take_their_arguments(name):
    config = parse_config(OFFERED[name], source=name)
    assert parse_config(with_defaults(config.to_dict()))
    metrics = [(metric.id, metric.args) for metric in config.train_evaluation.metrics]
    given = [(metric["id"], metric.get("args") or {}) for metric in OFFERED[name]["train_evaluation"]["metrics"]]
    assert json.loads(json.dumps(given).replace('"True,"', "true")) == json.loads(json.dumps(metrics))


# --- what is accepted -----------------------------------------------------------------------------------------------


def test_a_run_has_its_defaults(run):
    config = parse_config(run)
    assert config.seed == 0
    assert config.device == "auto"
    assert config.env.vec_env == "text"
    assert config.train_evaluation.save_every == 20
    assert config.alg.kl_div.controller == "adaptive"


def test_without_a_target_the_kl_coefficient_is_fixed(run):
    run["alg"]["kl_div"] = {"coeff": 0.1, "target_kl": None}
    assert parse_config(run).alg.kl_div.controller == "fixed"


def test_numbers_as_text_become_numbers_and_whole_floats_integers(run):
    run["alg"]["args"].update(learning_rate="1e-6", n_steps=128.0)
    run["train_evaluation"]["n_iters"] = "3"
    config = parse_config(run)
    assert config.alg.args["learning_rate"] == 1e-6
    assert config.alg.args["n_steps"] == 128
    assert isinstance(config.alg.args["n_steps"], int)
    assert config.train_evaluation.n_iters == 3


def test_blocks_left_empty_are_empty(run):
    run["reward_fn"] = {"id": "sentences_with_dates", "args": None}
    run["train_evaluation"]["metrics"] = None
    run["env"] = None
    config = parse_config(run)
    assert config.reward_fn.args == {}
    assert config.train_evaluation.metrics == []
    assert config.env.n_envs == 1


def test_a_config_cannot_be_changed(run):
    config = parse_config(run)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1


def test_parsing_leaves_the_mapping_as_it_was(run):
    run["train_evaluation"]["metrics"][0]["args"] = {"min_tokens": "20"}
    before = copy.deepcopy(run)
    parse_config(run)
    assert run == before


def test_the_kind_of_a_run_is_its_id_not_a_word_in_it(run, supervised):
    assert type(parse_config(supervised)) is SupervisedConfig and type(parse_config(run)) is RunConfig
    supervised["alg"]["id"] = "self_supervised"
    assert "alg.id" in mistakes_of(supervised)


def test_a_supervised_run_has_no_reward_and_no_environment(supervised):
    config = parse_config(supervised)
    assert isinstance(config, SupervisedConfig)
    assert config.alg.training_args["learning_rate"] == 1e-5
    supervised["reward_fn"] = {"id": "sentiment"}
    supervised["alg"]["generation_kwargs"]["post_processing_fn"] = "three_sentence_summary"
    supervised["alg"]["model_type"] = "encoder"
    assert mistakes_of(supervised) == [
        "alg.model_type",
        "alg.generation_kwargs.post_processing_fn",
        "reward_fn",
    ]


def test_a_component_by_import_path_is_checked_by_its_constructor(run, tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(
        "from rl4lms_like import RewardFunction\n\n\nclass Short(RewardFunction):\n"
        "    def __init__(self, limit: int = 20): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("RL4LMS_LIKE_CODE", str(tmp_path))
    run["reward_fn"] = {"id": "my_rewards:Short", "args": {"limt": 3}}
    with raises_at("reward_fn.args.limt", mentions="'limit'"):
        parse_config(run)
    run["reward_fn"]["args"] = {"limit": 3}
    assert parse_config(run).reward_fn.args == {"limit": 3}


def test_a_component_whose_extra_is_missing_is_no_mistake(run, tmp_path, monkeypatch):
    (tmp_path / "needy.py").write_text(
        "from rl4lms_like.system.errors import import_extra\n"
        "import_extra('no_such_package', extra='x', needed_by='y')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("RL4LMS_LIKE_CODE", str(tmp_path))
    run["reward_fn"] = {"id": "needy:Reward", "args": {"limit": 3}}
    assert parse_config(run).reward_fn.args == {"limit": 3}


# --- what is refused ------------------------------------------------------------------------------------------------


def test_every_mistake_is_told_at_once_in_the_order_of_the_file(run):
    run["tokenizer"]["padding_sde"] = "left"
    run["reward_fn"] = {"id": "increasing_number"}
    run["datapool"]["args"] = {"split": "val", "n_samples": "many"}
    run["env"]["n_envs"] = 0
    run["env"]["args"]["max_episode_lenght"] = 3
    run["alg"]["args"]["clip_range"] = "wide"
    run["alg"]["policy"]["args"]["critic"] = "both"
    del run["train_evaluation"]["n_iters"]
    run["train_evaluation"]["metrics"] = [{"idd": "x"}, 3, {"id": "sentiment", "args": {"x": 1}}]
    run["seeed"] = 1
    assert mistakes_of(run) == [
        "tokenizer.padding_sde",
        "reward_fn.id",
        "datapool.args.split",
        "datapool.args.n_samples",
        "datapool.args.prompt",
        "env.n_envs",
        "env.args.max_episode_lenght",
        "alg.args.clip_range",
        "alg.policy.args.critic",
        "train_evaluation.metrics.0.idd",
        "train_evaluation.metrics.0.id",
        "train_evaluation.metrics.1",
        "train_evaluation.metrics.2.args.x",
        "train_evaluation.n_iters",
        "seeed",
    ]


@pytest.mark.parametrize("block", ["tokenizer", "reward_fn", "datapool", "alg", "train_evaluation"])
@pytest.mark.parametrize("value", [3, "text", [1], "absent"])
def test_a_block_that_is_none_is_told(run, block, value):
    run[block] = value
    if value == "absent":
        del run[block]
    assert mistakes_of(run) == [block]


@pytest.mark.parametrize(
    ("kl", "path"),
    [
        ({"coeff": 0.1, "controller": "horizon"}, "alg.kl_div"),
        ({"coeff": -1}, "alg.kl_div.coeff"),
        ({"target_kl": 0.1}, "alg.kl_div.coeff"),
        ({"coeff": True}, "alg.kl_div.coeff"),
        ({"coeff": float("nan")}, "alg.kl_div.coeff"),
    ],
)
def test_a_kl_penalty_that_cannot_be_is_told(run, kl, path):
    run["alg"]["kl_div"] = kl
    assert mistakes_of(run) == [path]


@pytest.mark.parametrize(
    ("path", "value", "shown"),
    [
        ("alg.args.learning_rate", float("inf"), "inf"),
        ("alg.args.ent_coef", "inf", "'inf'"),
        ("alg.args.ent_coef", "NaN", "'NaN'"),
        ("seed", 2**32, "4294967296"),
        ("alg.args.seed", -1, "-1"),
        ("n_threads", 10**9, "1000000000"),
        ("env.n_envs", 10**9, "1000000000"),
        ("env.reward_workers", 10**9, "1000000000"),
        ("datapool.args.n_samples", 10**9, "1000000000"),
        ("tokenizer.model_name", b"gpt2", "b'gpt2'"),
        ("reward_fn.args", 0.0, "0.0"),
        ("env.args", "", "''"),
    ],
)
def test_numbers_that_nothing_can_be_made_of_are_told(run, path, value, shown):
    *blocks, key = path.split(".")
    block = run
    for name in blocks:
        block = block[name]
    block[key] = value
    with raises_at(path, mentions=shown):
        parse_config(run)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", {"a": 1}),
        ("num_beams", 0),
        ("top_p", 1.5),
        ("temperature", 0),
        ("repetition_penalty", "much"),
        ("do_sample", 3),
    ],
)
def test_what_generation_cannot_be_given_is_told_wherever_it_stands(run, supervised, key, value):
    run["alg"]["policy"]["args"]["generation_kwargs"][key] = value
    run["train_evaluation"]["generation_kwargs"] = {"max_new_tokens": 5, key: value}
    places = ("alg.policy.args.generation_kwargs", "train_evaluation.generation_kwargs")
    assert mistakes_of(run) == [f"{place}.{key}" for place in places]
    supervised["alg"]["generation_kwargs"][key] = value
    assert mistakes_of(supervised) == [f"alg.generation_kwargs.{key}"]


def test_numbers_of_generation_and_adapters_are_read_as_all_others(run):
    run["alg"]["policy"]["args"]["generation_kwargs"] |= {"temperature": 1, "top_p": "0.9", "max_new_tokens": 20.0}
    run["alg"]["policy"]["args"]["peft"] = {"r": "4", "lora_alpha": 16.0}
    args = parse_config(run).alg.policy.args
    read = {"max_new_tokens": 20, "temperature": 1.0, "top_p": 0.9}
    assert args["generation_kwargs"] == {"do_sample": True, "top_k": 0, **read}
    assert isinstance(args["generation_kwargs"]["temperature"], float)
    assert args["peft"] == {"r": 4, "lora_alpha": 16} and isinstance(args["peft"]["r"], int)


def test_a_seq2seq_length_counts_the_start_token(run):
    run["alg"]["policy"]["id"] = "seq2seq_lm_actor_critic_policy"
    run["alg"]["policy"]["args"]["generation_kwargs"] = {"max_length": 1}
    assert mistakes_of(run) == ["alg.policy.args.generation_kwargs.max_length"]


def test_a_maskable_policy_with_arguments_that_are_none_is_told(run):
    run["alg"]["id"], run["alg"]["policy"] = "nlpo", {"id": "maskable_causal_lm_actor_critic_policy", "args": "none"}
    assert mistakes_of(run) == ["alg.policy.args"]


def test_files_of_a_pool_are_one_for_all_splits_or_one_for_each(run):
    pool = run["datapool"] = {"id": "jsonl", "args": {"prompt_column": "x"}}
    assert mistakes_of(run) == ["datapool.args"]
    pool["args"]["path"] = "b.jsonl"
    assert parse_config(run), "a file that is not here is said by the pool that reads it"
    pool["args"]["data_files"] = {"train": "a.jsonl"}
    assert mistakes_of(run) == ["datapool.args"]
    del pool["args"]["path"]
    assert parse_config(run)


def test_a_metric_to_choose_by_that_nothing_reports_is_told(supervised):
    choose = supervised["alg"]["training_args"]
    for known in ("loss", "eval_loss", "synthetic/dates_in_text", "eval_synthetic/dates_in_text"):
        choose["metric_for_best_model"] = known
        parse_config(supervised)
    choose["metric_for_best_model"] = "synthetic/date_in_text"
    with raises_at("alg.training_args.metric_for_best_model", mentions="'synthetic/dates_in_text'"):
        parse_config(supervised)


def test_a_folder_that_is_not_there_is_named(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    run["tokenizer"]["model_name"] = "./nowhere"
    run["alg"]["policy"]["args"].update(model_name="models/mine", reference_model=str(tmp_path / "models"))
    with raises_at("tokenizer.model_name", "alg.policy.args.model_name", mentions=f"'./nowhere' below {tmp_path}"):
        parse_config(run)


def test_a_local_copy_that_is_not_there_is_named(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    run["datapool"] = {"id": "imdb", "args": {"data_dir": "here"}}
    parse_config(run)
    run["datapool"]["args"]["data_dir"] = "nowhere"
    with raises_at("datapool.args.data_dir", mentions=str(tmp_path)):
        parse_config(run)


@pytest.mark.parametrize(
    ("name", "folder"),
    [("gpt2", False), ("no-such-owner/gpt2", False), ("a/b/c", True), ("./gpt2", True), ("/gpt2", True), ("~/m", True)],
)
def test_hub_ids_and_folders_are_told_apart(name, folder):
    assert names_folder(name) is folder


MASKED = {
    "alg.id": "nlpo",
    "alg.policy.id": "maskable_causal_lm_actor_critic_policy",
    "alg.policy.args.top_mask": 20,
}


@pytest.mark.parametrize(
    ("path", "changes"),
    [
        ("alg.id", {"alg.id": "trpo", "alg.args": {"n_steps": 16}}),
        ("alg.id", MASKED),
        ("alg.policy.args.compile", {"alg.policy.args.compile": True}),
    ],
)
def test_what_needs_whole_weights_is_refused_with_split_ones(run, path, changes):
    blocks, _ = apply_values(run, {**changes, "distributed.strategy": "ddp"}, "the test")
    parse_config(blocks)
    blocks["distributed"]["strategy"] = "fsdp"
    with raises_at(path, mentions="ddp"):
        parse_config(blocks)


@pytest.mark.parametrize(
    ("path", "mentions", "changes"),
    [
        ("distributed.strategy", "ddp", {"alg.model_type": "vision"}),
        ("train_evaluation.average", "ddp", {"train_evaluation.average": {}}),
        ("alg.training_args.torch_compile", "ddp", {"alg.training_args.torch_compile": True}),
        ("alg.training_args.fp16", "bf16", {"alg.training_args.fp16": True}),
        ("alg.training_args.optim", "adamw_torch_fused", {"alg.training_args.optim": "adafactor"}),
        ("alg.training_args.optim", "ddp", {"alg.training_args.optim": "adamw_torch_4bit"}),
    ],
)
def test_what_cannot_be_trained_on_given_texts_with_split_weights_is_refused(supervised, path, mentions, changes):
    blocks, _ = apply_values(supervised, changes, "the test")
    parse_config(blocks)
    with raises_at(path, mentions=mentions):
        parse_config({**blocks, "distributed": {"strategy": "fsdp"}})


def test_whole_weights_are_kept_after_a_forward_pass_only_if_there_are_split_ones(run, supervised):
    for blocks in (run, supervised):
        parse_config({**blocks, "distributed": {"strategy": "fsdp", "reshard_after_forward": False}})
        with raises_at("distributed.reshard_after_forward", mentions="no effect"):
            parse_config({**blocks, "distributed": {"reshard_after_forward": False}})


def test_checkpoints_are_in_parts_only_if_weights_are(run, supervised):
    for blocks in (run, supervised):
        parse_config({**blocks, "distributed": {"strategy": "fsdp", "checkpoint": "split"}})
        with raises_at("distributed.checkpoint", mentions="no effect"):
            parse_config({**blocks, "distributed": {"checkpoint": "split"}})


def test_split_weights_in_one_process_are_a_notice(run, supervised):
    for blocks in (run, supervised):
        config = parse_config({**blocks, "distributed": {"strategy": "fsdp"}})
        assert "distributed.strategy" in [notice.path for notice in config.notices]


@pytest.mark.parametrize("id", ["trpo", "rl4lms_like.algorithms.trpo:TRPO"])
def test_what_trpo_cannot_differentiate_twice_is_told_with_the_way_out(run, id):
    run["alg"]["id"], run["alg"]["args"] = id, {"n_steps": 128, "sub_sampling_factor": 4}
    args = run["alg"]["policy"]["args"]
    for fine in ({}, {"attn_implementation": "eager", "gradient_checkpointing": True}, {"attn_implementation": None}):
        run["alg"]["policy"]["args"] = args | fine
        assert parse_config(run).alg.args["sub_sampling_factor"] == 4
    run["alg"]["policy"]["args"] = args | {"attn_implementation": "sdpa", "compile": True, "dropout": True}
    paths = [f"alg.policy.args.{key}" for key in ("attn_implementation", "compile", "dropout")]
    assert mistakes_of(run) == paths
    run["alg"]["id"], run["alg"]["args"] = "ppo", {}
    assert parse_config(run)


def test_a_file_is_read_overridden_and_checked_as_one(run, write):
    path = write(dump_yaml(run).replace("    n_steps: 128\n", "    n_steps: 128\n    n_steps: 64\n") + "seed: 3\n")
    with raises_at("alg.args.gama", "--set seed.x", "alg.args.n_steps", mentions="'gamma'") as caught:
        load_config(path, ["alg.args.gama=1", "seed.x=1", "alg.args.learning_rate=1e-5"])
    assert caught.value.source == str(path)


def test_an_override_wins_over_the_file(run, write):
    config = load_config(write(run), ["alg.args.learning_rate=1e-5", "train_evaluation.metrics.0.args.min_tokens=7"])
    assert config.alg.args["learning_rate"] == 1e-5
    assert config.train_evaluation.metrics[0].args == {"min_tokens": 7}


# --- what is said besides -------------------------------------------------------------------------------------------


def notices(blocks):
    return {notice.path: notice.message for notice in parse_config(blocks).notices}


def test_what_should_be_known_is_noticed(run):
    kwargs = run["alg"]["policy"]["args"]
    kwargs["apply_model_parallel"] = True
    kwargs["generation_kwargs"] = {"do_sample": True}
    run["env"]["args"].update(context_start_token=0, terminate_on_eos=False)
    run["alg"]["args"]["batch_size"] = 10_000
    run["alg"]["args"]["normalize_advantage"] = "True,"
    assert notices(run) == {
        "alg.args.normalize_advantage": "the text 'True,' is read as true; remove the comma",
        "alg.policy.args.apply_model_parallel": "no longer has an effect and is ignored",
        "env.args.context_start_token": "ignored: a causal model continues its prompt without a start token",
        "alg.policy.args.generation_kwargs.top_k": "transformers' default of 50 applies; 0 samples from the whole "
        "distribution",
        "alg.policy.args.generation_kwargs.max_new_tokens": "not given; responses have at most 20 tokens",
        "env.args.terminate_on_eos": "false: responses continue after the end-of-text token, to the full length",
    }
    assert parse_config(run).alg.args["normalize_advantage"] is True


def test_a_static_cache_needs_a_length_to_be_compiled_once(run):
    run["alg"]["policy"]["args"]["generation_kwargs"] = {"do_sample": True, "top_k": 0, "max_new_tokens": 20}
    kwargs = run["alg"]["policy"]["args"]["generation_kwargs"]
    before = notices(run)
    kwargs["cache_implementation"] = "static"
    (path,) = notices(run).keys() - before.keys()
    assert path == "alg.policy.args.generation_kwargs.max_cache_len"
    kwargs["max_cache_len"] = 50
    assert notices(run) == before


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({}, ""),
        ({"peft": {"r": 2, "lora_dropout": 0.1}}, ""),
        ({"gradient_checkpointing": True, "peft": None}, ""),
        ({"gradient_checkpointing": True, "speedups": {"merged_adapters": False}}, ""),
        ({"gradient_checkpointing": True}, "gradient_checkpointing: true"),
        ({"compile": True}, "compile: true"),
        ({"dtype": "bfloat16"}, "dtype: bfloat16"),
        ({"peft": {"r": 2, "use_dora": True}}, "peft.use_dora: true"),
        ({"peft": {"r": 2, "lora_dropout": 0.1}, "dropout": True}, "dropout: true and peft.lora_dropout"),
    ],
)
def test_adapters_that_stay_separate_are_noticed(run, arguments, reason):
    run["alg"]["policy"]["args"] |= {"peft": {"r": 2}, **arguments}
    path = "alg.policy.args.speedups.merged_adapters"
    expected = f"no effect: with {reason}, adapters stay separate" if reason else None
    assert notices(run).get(path) == expected


@pytest.mark.parametrize(("merges", "is_noticed"), [(True, True), (False, False)])
def test_adapters_of_split_weights_stay_separate(run, merges, is_noticed):
    run["alg"]["policy"]["args"] |= {"peft": {"r": 2}, "speedups": {"merged_adapters": merges}}
    run["distributed"] = {"strategy": "fsdp"}
    notice = notices(run).get("alg.policy.args.speedups.merged_adapters", "")
    assert ("distributed.strategy: fsdp" in notice) == is_noticed


@pytest.mark.parametrize(
    ("kl_div", "noticed"),
    [
        ({"max_coeff": 0.01}, {"coeff": "the run begins with 0.01"}),
        ({"max_coeff": 0.02}, {}),
        ({"target_kl": 2, "controller": "fixed"}, {"target_kl": "stays 0.02"}),
        ({"target_kl": 2, "horizon": 500}, {"horizon": "the run's is adaptive"}),
        ({"target_kl": 2, "controller": "adaptive", "horizon": 10_000, "gain": 0.2}, {}),
        ({"target_kl": 2, "controller": "horizon", "horizon": 500}, {}),
        ({"target_kl": 2, "controller": "horizon", "gain": 0.2}, {"gain": "the run's is horizon"}),
        ({"controller": "fixed", "gain": 0.2}, {"gain": "the run's is fixed"}),
    ],
)
def test_kl_settings_without_effect_are_noticed(run, kl_div, noticed):
    run["alg"]["kl_div"] = {"coeff": 0.02, **kl_div}
    found = {path: message for path, message in notices(run).items() if path.startswith("alg.kl_div")}
    assert found.keys() == {f"alg.kl_div.{key}" for key in noticed}
    for key, mentioned in noticed.items():
        assert mentioned in found[f"alg.kl_div.{key}"]


@pytest.mark.parametrize(
    ("kwargs", "detail"),
    [
        ({"temperature": 0.7}, "temperature 0.7"),
        ({"top_p": 0.9, "top_k": 20}, "top_k 20, top_p 0.9"),
        ({"repetition_penalty": 1.3}, "repetition_penalty 1.3"),
        ({"do_sample": False, "temperature": 0.7}, "do_sample false"),
        ({"temperature": 1.0, "top_k": 0, "top_p": 1.0}, None),
        ({}, None),
    ],
)
def test_rollouts_from_another_distribution_than_the_trained_one_are_noticed(kwargs, detail, run):
    path = "alg.policy.args.generation_kwargs"
    whole = {"do_sample": True, "top_k": 0, "max_new_tokens": 8}
    run["alg"]["policy"]["args"]["generation_kwargs"] = whole | kwargs
    run["train_evaluation"]["generation_kwargs"] = {"do_sample": False, "max_new_tokens": 8}  # as evaluations may be
    found = notices(run)
    assert (detail is not None) == (path in found)
    assert detail is None or f"rollouts have {detail}, but ratios" in found[path]


@pytest.mark.parametrize(
    ("evaluation", "noticed"), [(None, False), ({"num_beams": 2}, True), ({"stop_strings": "."}, False)]
)
def test_stop_strings_that_evaluations_lack_are_noticed(evaluation, noticed, run):
    run["alg"]["policy"]["args"]["generation_kwargs"]["stop_strings"] = ["."]
    run["train_evaluation"]["generation_kwargs"] = evaluation
    assert ("train_evaluation.generation_kwargs.stop_strings" in notices(run)) == noticed


@pytest.mark.parametrize(("kwargs", "noticed"), [({}, True), ({"top_k": None}, False), ({"top_k": 0}, False)])
def test_the_default_of_top_k_is_noticed_only_where_it_applies(kwargs, noticed, run):
    run["alg"]["policy"]["args"]["generation_kwargs"] = {"do_sample": True, "max_new_tokens": 8, **kwargs}
    assert ("alg.policy.args.generation_kwargs.top_k" in notices(run)) == noticed


def test_a_seq2seq_model_has_a_start_token_and_one_token_less(run):
    run["alg"]["policy"]["id"] = "seq2seq_lm_actor_critic_policy"
    run["env"]["args"]["context_start_token"] = 0
    run["train_evaluation"]["generation_kwargs"] = {"num_beams": 4}
    run["alg"]["args"]["batch_size"] = 80
    assert notices(run) == {
        "train_evaluation.generation_kwargs.max_new_tokens": "not given; responses have at most 19 tokens"
    }


@pytest.mark.parametrize(("batch_size", "few"), [(19, True), (64, True), (79, True), (80, False), (1280, False)])
def test_minibatches_of_fewer_than_four_episodes_are_noticed(run, batch_size, few):
    run["alg"]["args"]["batch_size"] = batch_size
    assert ("alg.args.batch_size" in notices(run)) == few


@pytest.mark.parametrize(("alpha", "noticed"), [(0.05, True), (0.19, True), (0.2, False), (None, False)])
def test_an_adaptive_lambda_that_is_small_for_all_responses_is_noticed(run, alpha, noticed):
    run["alg"]["args"]["gae_length_alpha"] = alpha
    paths = [notice.path for notice in parse_config(run).notices]
    assert ("alg.args.gae_length_alpha" in paths) == noticed


def test_a_learning_rate_that_is_left_out_is_noticed(run):
    assert "alg.args.learning_rate" not in notices(run)
    del run["alg"]["args"]["learning_rate"]
    assert "1e-05" in notices(run)["alg.args.learning_rate"]


@pytest.mark.parametrize(
    ("rate", "n_parameters", "changes", "noticed"),
    [
        (3e-4, 124_000_000, {}, True),
        (2e-5, 124_000_000, {}, False),
        (1e-3, 200_000, {}, False),
        (2e-3, 200_000, {}, True),
        (3e-4, 124_000_000, {"alg.policy.args.peft": {"r": 8}}, False),
        (3e-4, 124_000_000, {"alg.id": "a2c", "alg.args": {"n_steps": 16}}, False),
        (1e-2, 124_000_000, {"alg.id": "a2c", "alg.args": {"n_steps": 16}}, True),
        (1e-2, 124_000_000, {"alg.id": "trpo", "alg.args": {"n_steps": 16}}, False),
    ],
)
def test_a_learning_rate_far_above_what_suits_the_model_is_noticed(run, rate, n_parameters, changes, noticed):
    blocks, _ = apply_values(run, {**changes, "alg.args.learning_rate": rate}, "test")
    found = learning_rate_notice(parse_config(blocks), n_parameters)
    assert (found is not None) == noticed
    assert found is None or found.path == "alg.args.learning_rate"


def test_the_resolved_config_has_every_default_and_is_the_same_run(run):
    config = parse_config(run)
    complete = with_defaults(config.to_dict())
    assert complete["alg"]["args"]["gae_lambda"] == 0.95
    assert complete["env"]["args"]["priority_scale"] == 0.0
    again = parse_config(complete)
    assert with_defaults(again.to_dict()) == complete


def test_a_default_is_no_notice(run):
    run["alg"]["args"]["batch_size"] = 80
    complete = with_defaults(parse_config(run).to_dict())
    del complete["alg"]["policy"]["args"]["apply_model_parallel"]
    assert notices(complete) == {}


# --- all of it ------------------------------------------------------------------------------------------------------

PLACES = ["tokenizer", "env", "env.args", "alg", "alg.args", "alg.kl_div", "alg.policy.args", "train_evaluation", ""]


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(PLACES), st.text("abcdefghijklm_", min_size=1, max_size=12), st.integers(-3, 3))
def test_no_key_is_ignored_anywhere(place, key, value):
    from_file = copy.deepcopy(_RUN)
    block = from_file
    for part in filter(None, place.split(".")):
        block = block[part]
    if key in block or key in _KNOWN:
        return
    block[key] = value
    path = f"{place}.{key}" if place else key
    assert path in mistakes_of(from_file)


def blocks_of_configs():
    blocks = [
        item
        for item in vars(config_module).values()
        if dataclasses.is_dataclass(item) and item.__module__ == config_module.__name__
    ]
    return [*blocks, EnvConfig, KLConfig]


def _known_keys():
    blocks = blocks_of_configs()
    components = [registry.signature(id) for registry in REGISTRIES.values() for id in registry]
    return {argument.name for target in blocks + components for argument in signature_of(target).arguments}


_RUN = {
    "tokenizer": {"model_name": "gpt2"},
    "reward_fn": {"id": "sentiment"},
    "datapool": {"id": "dummy_pool", "args": {"prompt": "x"}},
    "env": {"args": {}},
    "alg": {
        "id": "ppo",
        "args": {},
        "kl_div": {"coeff": 0},
        "policy": {"id": "causal_lm_actor_critic_policy", "args": {"model_name": "gpt2"}},
    },
    "train_evaluation": {"eval_batch_size": 1, "n_iters": 1, "eval_every": 1},
}
_KNOWN = _known_keys()


def test_checking_a_config_loads_no_torch(run, write):
    code = f"""
import sys
from rl4lms_like.config.load import load_config
load_config({str(write(run))!r})
print([name for name in ("torch", "transformers", "pandas", "datasets") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_a_sampler_is_checked_like_other_components(run):
    run["datapool"]["sampler"] = {"id": "difficulti", "args": {}}
    with raises_at("datapool.sampler.id", mentions="'difficulty'"):
        parse_config(run)
    run["datapool"]["sampler"] = {"id": "difficulty", "args": {"momentum": 0, "hard_above": 0.2, "weights": [1, 0, 1]}}
    with raises_at(*(f"datapool.sampler.args.{key}" for key in ("momentum", "hard_above", "weights"))):
        parse_config(run)
    run["datapool"]["sampler"] = {"id": "difficulty"}
    run["env"] = {"vec_env": "dummy", "args": {**run["env"]["args"], "priority_scale": 1.0}}
    with raises_at("env.vec_env", "env.args.priority_scale"):
        parse_config(run)


def test_a_supervised_run_draws_no_prompts(run):
    blocks = supervised_blocks()
    blocks["datapool"]["sampler"] = {"id": "difficulty"}
    with raises_at("datapool.sampler"):
        parse_config(blocks)


# --- the page -------------------------------------------------------------------------------------------------------

LEARN_WITHOUT_CRITIC = (
    *("dr_grpo", "dapo", "gspo", "gmpo", "cpgd", "cispo", "rloo", "reinforce_pp", "reinforce_pp_baseline"),
    *("opo", "maxrl", "online_dpo", "opd"),
)
OTHER_DEFAULTS = {"vapo": "ppo", "sao": "ppo"} | dict.fromkeys(LEARN_WITHOUT_CRITIC, "grpo")
"""Algorithm that has the arguments of another one -> that one. Its own page has the defaults that differ."""


def test_the_page_on_configuration_has_every_key_with_its_default():
    page = (ROOT / "docs/configuration.md").read_text()
    for row in documented_rows():
        assert row in page, row


def documented_rows():
    from rl4lms_like.catalogue import table_rows
    from rl4lms_like.envs.arguments import EnvArguments
    from rl4lms_like.policies import POLICIES
    from rl4lms_like.policies.arguments import LoraArguments

    blocks = [block for block in blocks_of_configs() if block not in (DoctorConfig, HeldOutConfig)]  # on their own page
    algorithms = [ALGORITHMS.signature(id) for id in ALGORITHMS if id not in OTHER_DEFAULTS]
    policies = [POLICIES.signature(id) for id in POLICIES]
    targets = [*blocks, EnvArguments, LoraArguments, *algorithms, *policies]
    return [row for target in targets for row in table_rows(target)]


@pytest.mark.parametrize(("id", "usual"), OTHER_DEFAULTS.items())
def test_the_page_of_an_algorithm_has_the_defaults_that_the_page_on_configuration_leaves_to_it(id, usual):
    page = (ROOT / f"docs/algorithms/{id}.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)`[^|]*\| `([^`]+)`", page.partition("## Arguments")[2], re.MULTILINE)
    written = {name: parse_yaml(f"default: {default}", "page")[0]["default"] for name, default in rows}

    usual_defaults = {argument.name: argument.default for argument in arguments_of(usual)}
    for argument in arguments_of(id):
        default = argument.default
        if dataclasses.is_dataclass(default):
            default = {}  # all defaults of the block
        elif isinstance(default, tuple):
            default = list(default)
        if argument.name not in usual_defaults or argument.default != usual_defaults[argument.name]:
            assert written[argument.name] == default, argument.name


@pytest.mark.parametrize("id", list(OBJECTIVES))
def test_every_argument_of_an_objective_has_its_row_on_a_page(id):
    from rl4lms_like.catalogue import table_rows

    of_all = (ROOT / "docs/preferences.md").read_text(encoding="utf-8").partition("### Arguments of all objectives")[2]
    page = (ROOT / f"docs/algorithms/{id}.md").read_text(encoding="utf-8")
    missing = [row for row in table_rows(OBJECTIVES.signature(id)) if row not in of_all and row not in page]
    assert missing == []


def arguments_of(id):
    return signature_of(ALGORITHMS.signature(id)).arguments


@pytest.mark.parametrize(("id", "hint"), [("supervized", "'supervised'"), ("dop", "'dpo'"), (None, "known, with")])
def test_an_unknown_id_of_a_run_that_learns_from_texts_is_the_only_error(id, hint):
    blocks = supervised_blocks()
    blocks["alg"]["id"] = id
    with raises_at("alg.id", mentions=hint):
        parse_config(blocks)


def test_an_engine_that_is_null_is_refused():
    blocks = run_blocks()
    blocks["alg"]["policy"]["args"]["engine"] = None
    with raises_at("alg.policy.args.engine", mentions="expected a mapping with id"):
        parse_config(blocks)


class Automatic(stable_baselines3.PPO):
    """An algorithm of another library, whose arguments mean something else."""

    def __init__(self, policy, env, learning_rate="auto", n_steps=8, batch_size="auto", n_epochs=2):
        super().__init__(policy, env, 1e-3, n_steps, 8, n_epochs)


def test_notices_are_about_numbers_only():
    blocks = run_blocks()
    blocks["alg"] |= {"id": f"{__name__}:Automatic", "args": {}}
    paths = [notice.path for notice in parse_config(blocks).notices]
    assert not {"alg.args.batch_size", "alg.args.learning_rate"} & set(paths)


def test_a_run_that_only_evaluates_has_no_schedules():
    blocks = run_blocks()
    blocks["alg"]["args"]["warmup_iterations"] = 3
    blocks["train_evaluation"]["n_iters"] = 0
    assert "alg.args.warmup_iterations" not in [notice.path for notice in parse_config(blocks).notices]


@pytest.mark.parametrize(("id", "arguments"), [("a2c", A2CArguments), ("trpo", TRPOArguments)])
def test_the_page_says_which_arguments_of_ppo_an_algorithm_lacks(id, arguments):
    page = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    section = page.split(f"### alg.args of `{id}`\n")[1]
    sentence = section.split("The arguments are those of `ppo` without ")[1].split(". The following")[0]
    names = [{field.name for field in dataclasses.fields(each)} for each in (PPOArguments, arguments)]
    assert set(re.findall(r"`(\w+)`", sentence)) == names[0] - names[1]
