"""The client of an SGLang server: what only its protocol has, the arguments of its config, and whole runs."""

from __future__ import annotations

import json
import re

import pytest
import torch

from rl4lms_like.config.load import parse_config
from rl4lms_like.run import resume, train_config
from rl4lms_like.system.errors import ConfigError, EngineError
from tests.configs import run_blocks
from tests.engines.responses import generate
from tests.engines.sglang_server import SglangServer

GENERATE = "/generate"


@pytest.fixture
def server_class():
    return SglangServer


# --- weights and log-probs ---


def test_a_token_whose_id_a_server_replaces_is_scored(serve, policy_of):
    policy = policy_of(serve())
    episodes = generate(policy, eos_token_ids=())
    episodes.response_ids[:, 2] = policy.vocab_size - 1
    scored = policy.engine.external.score(episodes)
    torch.testing.assert_close(scored, policy.score(episodes).log_prob, atol=1e-5, rtol=0)


# --- sampling ---


def test_a_server_that_ignores_seeds_is_reported(serve, policy_of, caplog):
    servers = [serve(), serve()]
    generate(policy_of(*servers))
    assert "seeds" not in caplog.text
    servers[1].deterministic = False
    generate(policy_of(*servers))
    (warning,) = [record.getMessage() for record in caplog.records if "seeds" in record.getMessage()]
    assert servers[1].url in warning and servers[0].url not in warning
    assert "--enable-deterministic-inference" in warning


def test_without_end_tokens_those_of_a_server_do_not_end_responses(serve, policy_of):
    server = serve()
    policy = policy_of(server)
    server.own_end = int(generate(policy, eos_token_ids=()).response_ids[0, 2])
    assert set(generate(policy, eos_token_ids=()).lengths.tolist()) == {8}


def test_a_top_k_above_the_servers_limit_is_an_error_with_its_message(serve, policy_of):
    server = serve()
    policy = policy_of(server, policy={"generation_kwargs": {"do_sample": True, "top_k": 5000}})
    with pytest.raises(EngineError, match=f"{re.escape(server.url)}.*return_sampling_mask"):
        generate(policy)


# --- servers that fail ---


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.pop("output_ids"), "output_ids"),
        (lambda content: content["output_ids"].reverse(), "log-probs of other tokens"),
    ],
)
def test_tokens_that_do_not_match_their_log_probs_are_an_error(serve, policy_of, change, message):
    server = serve()
    policy = policy_of(server)
    server.answers[GENERATE] = server.changed(change)
    with pytest.raises(EngineError, match=f"{re.escape(server.url)}.*{message}"):
        generate(policy)


def test_log_probs_after_top_k_that_a_server_does_not_have_are_an_error(serve, policy_of):
    server = serve()
    absent = {"output_token_sampling_logprobs": None}
    server.answers[GENERATE] = server.changed(lambda content: content["meta_info"].update(absent))
    policy = policy_of(server, policy={"generation_kwargs": {"do_sample": True, "top_k": 20}})
    with pytest.raises(EngineError, match=f"{re.escape(server.url)}.*0 log-probs"):
        generate(policy)


# --- configs and runs ---


@pytest.mark.parametrize(
    ("path", "changes"),
    [
        ("engine.args.url", {"url": []}),
        ("engine.args.sync", {"sync": "adapters"}),
        ("engine.args.timeout", {"timeout": 0}),
        ("engine.args.max_gapp", {"max_gapp": 1}),
        ("generation_kwargs.top_p", {"generation_kwargs": {"top_p": 0.9}}),
        ("generation_kwargs.min_p", {"generation_kwargs": {"min_p": 0.1}}),
        ("generation_kwargs.num_beams", {"generation_kwargs": {"num_beams": 2}}),
        ("peft.use_rslora", {"sync": "adapters", "peft": {"use_rslora": True}}),
        ("peft.use_dora", {"sync": "adapters", "peft": {"use_dora": True}}),
        ("peft.rank_pattern", {"sync": "adapters", "peft": {"rank_pattern": {"q_proj": 4}}}),
        ("engine.args.sleep", {"sleep": True, "ahead": 1}),
    ],
    ids=str,
)
def test_what_the_engine_cannot_do_is_refused_before_anything_is_loaded(path, changes):
    blocks = run_blocks()
    policy = blocks["alg"]["policy"]["args"]
    policy["engine"] = {"id": "sglang", "args": {"url": "http://127.0.0.1:1", "weights_dir": "w"}}
    policy["generation_kwargs"] |= {"top_p": 1.0}
    parse_config(blocks)
    changes = dict(changes)
    policy["generation_kwargs"] |= changes.pop("generation_kwargs", {})
    policy["engine"]["ahead"] = changes.pop("ahead", 0)
    policy["peft"] = changes.pop("peft", None)
    policy["engine"]["args"] |= changes
    with pytest.raises(ConfigError, match=re.escape(path.removesuffix(".url"))):
        parse_config(blocks)


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_resumed_run_equals_the_uninterrupted_one(ahead, tiny_config, tiny_gpt2_dir, tmp_path):
    server = SglangServer(tiny_gpt2_dir)
    args = {"url": server.url, "weights_dir": str(tmp_path / "weights"), "max_gap": 1e-4, "retries": 0}
    tiny_config["alg"]["policy"]["args"]["engine"] = {"id": "sglang", "args": args, "ahead": ahead}
    tiny_config["alg"]["args"]["importance_correction"] = "tis"
    runs = []
    for name, n_iters in (("whole", 3), ("parts", 2)):
        tiny_config["train_evaluation"] |= {"n_iters": n_iters, "save_every": 1, "eval_every": 3}
        place = {"base_path_to_store_results": tmp_path, "experiment_name": name, "quiet": True}
        folder = train_config(parse_config(tiny_config), **place)
        if n_iters == 2:
            resume(folder, overrides=["train_evaluation.n_iters=3"], quiet=True)

        lines = [json.loads(line) for line in (folder / "rollout_info.jsonl").read_text().splitlines()]
        assert all(line["rollout_info/engine/max_gap"] < 1e-5 for line in lines)
        weights = (folder / "model" / "model.safetensors").read_bytes()
        runs.append((weights, [line["rollout_info/ep_rew"] for line in lines]))
    server.close()
    assert len(runs[0][1]) == 3 and runs[0] == runs[1]
