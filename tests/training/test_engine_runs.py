"""Runs whose responses come from an engine: what a config may ask for, training, evaluation, and a server that dies."""

from __future__ import annotations

import json

import pytest

from rl4lms_like.cli import main
from rl4lms_like.config.load import parse_config
from rl4lms_like.config.yaml_file import apply_values
from rl4lms_like.on_policy.assemble import assemble
from rl4lms_like.run import resume, train_config
from rl4lms_like.system.errors import EngineError
from rl4lms_like.training.resuming.checkpoints import read_checkpoint
from tests.config_errors import raises_at
from tests.configs import run_blocks
from tests.engines.model_server import send
from tests.engines.vllm_server import VllmServer

ENGINE = "alg.policy.args.engine"
VLLM = {"id": "vllm", "args": {"url": "http://127.0.0.1:9", "weights_dir": "weights"}}
COMPLETIONS, RELOAD = "/v1/completions", "/collective_rpc"
SAMPLING = {"do_sample": True, "top_k": 0, "max_new_tokens": 8}


@pytest.fixture
def server(tiny_gpt2_dir):
    started = VllmServer(tiny_gpt2_dir)
    yield started
    started.close()


@pytest.fixture
def config(tiny_config, server, tmp_path):
    args = {"url": server.url, "weights_dir": str(tmp_path / "weights"), "max_gap": 1e-4, "retries": 0}
    tiny_config["alg"]["policy"]["args"]["engine"] = {"id": "vllm", "args": args}
    return tiny_config


def run(config, folder):
    return train_config(parse_config(config), base_path_to_store_results=folder, experiment_name="run", quiet=True)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- configs ---


@pytest.mark.parametrize(
    ("path", "changes"),
    [
        (f"{ENGINE}.id", {ENGINE: {"id": "vlm"}}),
        (ENGINE, {ENGINE: {"args": {}}}),
        (ENGINE, {ENGINE: {**VLLM, "arg": 1}}),
        (f"{ENGINE}.args.url", {ENGINE: {"id": "vllm", "args": {"weights_dir": "w"}}}),
        (f"{ENGINE}.args.max_gapp", {ENGINE: {"id": "vllm", "args": {**VLLM["args"], "max_gapp": 1}}}),
        (f"{ENGINE}.args.timeout", {ENGINE: {"id": "vllm", "args": {**VLLM["args"], "timeout": 0}}}),
        (f"{ENGINE}.args", {ENGINE: {"id": "vllm", "args": {**VLLM["args"], "url": "127.0.0.1:8000"}}}),
        (f"{ENGINE}.args", {f"{ENGINE}.args.headers_from_env": {"Authorization": "A_VARIABLE_THAT_IS_NOT_SET"}}),
        (f"{ENGINE}.args.weights_dir", {f"{ENGINE}.args.weights_dir": "gpt2"}),
        (f"{ENGINE}.args.beams", {ENGINE: {"id": "transformers", "args": {"beams": 1}}}),
        (f"{ENGINE}.id", {"alg.policy.id": "seq2seq_lm_actor_critic_policy"}),
        ("alg.policy.args.generation_kwargs.num_beams", {"alg.policy.args.generation_kwargs.num_beams": 4}),
        ("alg.policy.args.generation_kwargs.typical_p", {"alg.policy.args.generation_kwargs.typical_p": 0.9}),
        ("train_evaluation.generation_kwargs.num_beams", {"train_evaluation.generation_kwargs": {"num_beams": 4}}),
        (f"{ENGINE}.id", {
            "alg.id": "nlpo", "alg.policy.id": "maskable_causal_lm_actor_critic_policy",
            "alg.policy.args.top_mask": 5,
        }),
        ("alg.args.first_token_temperature", {
            "alg": {**run_blocks()["alg"], "id": "grpo", "args": {"group_size": 5, "first_token_temperature": 10.0}},
            ENGINE: VLLM,
        }),
        ("alg.args.importance_correction", {"alg.id": "trpo", "alg.args": {"importance_correction": "tis"}}),
    ],
)  # fmt: skip
def test_what_an_engine_cannot_do_is_refused_before_anything_is_loaded(path, changes):
    blocks = run_blocks()
    blocks["alg"]["policy"]["args"]["engine"] = {"id": "vllm", "args": dict(VLLM["args"])}
    parse_config(blocks)
    blocks, issues = apply_values(blocks, changes, "test")
    with raises_at(path):
        parse_config(blocks, issues=issues)


def test_arguments_without_effect_are_accepted():
    blocks = run_blocks()
    blocks["alg"]["policy"]["args"]["engine"] = VLLM
    blocks["alg"]["policy"]["args"]["generation_kwargs"] |= {"num_beams": 1, "repetition_penalty": 1.0, "min_length": 2}
    assert parse_config(blocks).alg.policy.args["engine"]["id"] == "vllm"


# --- runs ---


@pytest.mark.parametrize("id", ["ppo", "grpo", "a2c", "trpo"])
def test_a_run_trains_and_evaluates_with_the_weights_of_each_iteration(id, config, server, tmp_path):
    config["alg"]["id"], config["reward_fn"] = id, {"id": "tests.builders:LowTokens"}
    config["env"]["n_envs"] = 16
    args = {"n_steps": 8, "learning_rate": 1e-3}
    args |= {"group_size": 4} if id == "grpo" else {}
    args |= {"importance_correction": "tis"} if id != "trpo" else {}
    config["alg"]["args"] = args
    config["train_evaluation"]["eval_every"] = 1
    folder = run(config, tmp_path)
    rollouts, updates = (lines(folder / f"{name}_info.jsonl") for name in ("rollout", "training"))
    assert len(rollouts) == 3
    assert all(line["rollout_info/engine/max_gap"] < 1e-5 for line in rollouts)
    assert all(line["rollout_info/engine/effective_sample_size"] > 0.999 for line in rollouts)
    assert all(line["train/ratio_gap"] < 1e-5 for line in updates)
    assert all(line["rollout_info/importance_weight"] == pytest.approx(1, abs=1e-4) for line in rollouts)
    assert server.paths().count("/collective_rpc") == 4, "the first weights, and those of each iteration"
    texts = [json.loads((folder / f"epoch_{n}_val_split_predictions.json").read_text()) for n in (0, 3)]
    assert [each["generated_text"] for each in texts[0]] != [each["generated_text"] for each in texts[1]]


def test_the_reward_rises(config, tmp_path):
    config["reward_fn"] = {"id": "tests.builders:LowTokens"}
    config["env"]["n_envs"] = 16
    args = {"n_steps": 8, "batch_size": 64, "learning_rate": 1e-2, "group_size": 8, "n_epochs": 4}
    config["alg"] |= {"id": "grpo", "args": args, "kl_div": {"coeff": 0.0}}
    config["train_evaluation"] |= {"n_iters": 6, "eval_every": 100, "save_every": 100}
    rewards = [line["rollout_info/ep_rew"] for line in lines(run(config, tmp_path) / "rollout_info.jsonl")]
    assert rewards[-1] > 2 * rewards[0], rewards


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.3}, {"top_k": 40}, {"min_length": 2}], ids=str)
def test_log_probs_of_exactly_0_are_refused_where_the_policy_is_not_sure(sampling, config, server, tmp_path):
    config["alg"]["policy"]["args"]["generation_kwargs"] |= {"do_sample": True, "top_k": 0, **sampling}
    config["alg"]["policy"]["args"]["engine"]["args"]["max_gap"] = 100.0

    def without_log_probs(handler, body):
        completion = server.completion(body)
        for choice in completion["choices"]:
            if "logprobs" in choice and body["temperature"] != 0.5:  # the check of the engine's start
                choice["logprobs"]["token_logprobs"] = [0.0] * len(choice["token_ids"])
        send(handler, completion)

    server.answers[COMPLETIONS] = without_log_probs
    with pytest.raises(EngineError, match=f"{server.url} returned the log-prob 0"):
        run(config, tmp_path)


@pytest.mark.parametrize("sampling", [{"top_k": 1}, {"temperature": 1e-4}, {"top_p": 1e-6}], ids=str)
def test_log_probs_of_exactly_0_are_those_of_a_sampling_that_is_certain(sampling, config, server, tmp_path):
    config["alg"]["policy"]["args"]["generation_kwargs"] |= {"do_sample": True, "top_k": 0, **sampling}
    config["train_evaluation"] |= {"n_iters": 1}
    (line,) = lines(run(config, tmp_path) / "rollout_info.jsonl")
    assert line["rollout_info/log_prob"] < -1, "the policy's own log-probs, at temperature 1"


def test_a_run_whose_server_dies_is_saved_and_resumed_with_another(config, server, tiny_gpt2_dir, tmp_path):
    whole = run(config, tmp_path / "whole")
    reloads = []

    def dies(handler, body):
        reloads.append(body)
        if len(reloads) == 3:
            server.answers["/v1/completions"] = lambda handler, body: send(handler, b"dead", 500)
        server.answer(handler, body)

    server.answers["/collective_rpc"] = dies
    with pytest.raises(EngineError, match=server.url):
        run(config, tmp_path / "dead")
    (folder,) = (tmp_path / "dead" / "rl4lm_exps").iterdir()
    (saved,) = sorted((folder / "checkpoints").glob("interrupted_*"))
    assert read_checkpoint(saved).numbers
    other = VllmServer(tiny_gpt2_dir)
    try:
        resume(folder, overrides=[f"{ENGINE}.args.url={other.url}"], quiet=True)
    finally:
        other.close()
    ends = [json.loads((each / "epoch_3_test_split_predictions.json").read_text()) for each in (whole, folder)]
    assert ends[0] == ends[1]


def test_a_users_engine_is_used_for_rollouts_and_evaluations(tiny_config, tmp_path):
    tiny_config["alg"]["policy"]["args"]["engine"] = {"id": "tests.engines.constant:Constant", "args": {"token": 7}}
    built = assemble(parse_config(tiny_config))
    built.algorithm.learn_iteration(0, 3)
    assert set(built.algorithm.rollout_buffer.episodes.actions.tolist()) == {7}
    logged = built.algorithm.logger.name_to_value
    assert 0 < logged["rollout_info/engine/probability"] < 1
    engine = built.policy.engine.external
    assert engine.updates > 0 and engine.rests > 0
    assert set(built.algorithm.rollout_buffer.episodes.behavior_log_prob.tolist()) == {0.0}


def test_evaluate_generate_and_pairs_use_an_engine(config, server, tmp_path):
    folder = run(config, tmp_path)
    engine = config["alg"]["policy"]["args"]["engine"]
    options = ["--engine", json.dumps(engine)]
    for arguments in (
        ["evaluate", str(folder), "--limit", "2", "--output", str(tmp_path / "evaluation")],
        ["generate", str(folder), "Count with me"],
    ):
        server.requests.clear()
        assert main(arguments) == 0
        assert not server.requests
        assert main([*arguments, *options]) == 0
        assert COMPLETIONS in server.paths() and RELOAD in server.paths()
    server.requests.clear()
    file = tmp_path / "config.yml"
    file.write_text(json.dumps(config))
    assert main(["pairs", str(file), "--out", str(tmp_path / "pairs.jsonl"), "--max_prompts", "1"]) == 0
    assert COMPLETIONS in server.paths()


@pytest.mark.parametrize("engine", ["vllm", "{id: vllm", "{id: vlm}", "{id: vllm, arg: 1}"])
def test_an_engine_that_is_none_ends_a_command(engine, tiny_gpt2_dir, capsys):
    assert main(["generate", str(tiny_gpt2_dir), "Count", "--engine", engine]) == 2
    assert "engine" in capsys.readouterr().err


def test_an_engine_that_cannot_generate_ends_a_command(tiny_t5_dir, tmp_path):
    engine = json.dumps({"id": "vllm", "args": {"url": "http://127.0.0.1:9", "weights_dir": str(tmp_path)}})
    assert main(["generate", str(tiny_t5_dir), "Count", "--engine", engine]) == 2


def test_the_engine_may_be_the_models_own(tiny_t5_dir):
    assert main(["generate", str(tiny_t5_dir), "Count", "--engine", "{id: transformers}"]) == 0
