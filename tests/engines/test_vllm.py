"""The client of vLLM servers, and what all clients have in common: folders, checks of weights, several servers."""

from __future__ import annotations

import re
import time

import pytest
import torch

from rl4lms_like.config.load import parse_config
from rl4lms_like.core.sample import Sample
from rl4lms_like.engines import weight_transfer
from rl4lms_like.engines.arguments import VllmArguments
from rl4lms_like.engines.weight_transfer import WeightTransfer
from rl4lms_like.metrics.base import BaseMetric
from rl4lms_like.system.errors import ConfigError, EngineError, MetricError, RL4LMsLikeError
from rl4lms_like.training.evaluation import Responder, evaluate_on_samples
from tests.builders import SAMPLING, make_policy
from tests.configs import run_blocks
from tests.engines.model_server import send
from tests.engines.responses import gaps, generate, move
from tests.engines.vllm_server import VllmServer

COMPLETIONS, RELOAD = "/v1/completions", "/collective_rpc"


@pytest.fixture
def server_class():
    return VllmServer


# --- log-probs and weights ---


def test_weights_are_passed_on_only_if_they_changed(serve, policy_of):
    server = serve()
    policy = policy_of(server)
    for _ in range(3):
        generate(policy)
    assert server.paths().count(RELOAD) == 1
    move(policy, by=1e-7)
    assert [generate(policy), generate(policy)] and server.paths().count(RELOAD) == 2


def test_adapters_are_merged(serve, policy_of):
    pytest.importorskip("peft")
    policy = policy_of(serve("llama"), family="llama", policy={"peft": {"r": 4}})
    move(policy, by=0.3)
    episodes = generate(policy)
    assert gaps(policy, episodes)["max_gap"] < 1e-5
    assert float((policy.score(episodes).ref_log_prob - episodes.behavior_log_prob).abs().mean()) > 0.01


def test_weights_that_change_behind_the_engines_back_are_found_in_the_rollout(serve, policy_of):
    server = serve()
    policy = policy_of(server)
    generate(policy)
    with torch.no_grad():
        server.model.get_output_embeddings().weight.mul_(0.5)
    with pytest.raises(EngineError, match=server.url):
        gaps(policy, generate(policy))


def test_weights_that_change_while_the_server_generates_ahead_are_found_at_the_next_synchronisation(serve, policy_of):
    server = serve()
    policy = policy_of(server, ahead=1)
    policy.engine.update(policy)
    move(policy)
    policy.engine.update(policy)  # the server still has the weights that it was given
    with torch.no_grad():
        server.model.get_output_embeddings().weight.mul_(0.5)
    move(policy)
    with pytest.raises(EngineError, match=server.url):
        policy.engine.update(policy)


def test_an_engine_creates_no_folder_before_it_has_weights(serve, policy_of, tmp_path):
    policy = policy_of(serve())
    assert not (tmp_path / "weights").exists()
    policy.engine.update(policy)
    assert (tmp_path / "weights").exists()


@pytest.mark.parametrize(("family", "served"), [("gpt2", "llama"), ("llama", "gpt2"), ("smaller", "gpt2")])
def test_a_server_with_another_model_is_an_error(serve, policy_of, family, served):
    server = serve(served)
    server.answers[RELOAD] = lambda handler, body: send(handler, {"results": [None]})
    with pytest.raises(EngineError, match=server.url):
        generate(policy_of(server, family=family))


def test_weights_of_another_run_are_replaced_with_a_warning(serve, policy_of, caplog):
    server = serve()
    with torch.no_grad():
        server.model.get_output_embeddings().weight.mul_(0.5)
    policy = policy_of(server)
    assert gaps(policy, generate(policy))["max_gap"] < 1e-5
    assert server.url in caplog.text


@pytest.mark.parametrize("name", ["config.json", "engine_weights.txt", "model.safetensors"])
@pytest.mark.parametrize("comes", ["before the run", "after the first weights"])
def test_weights_are_not_written_through_a_link(name, comes, serve, policy_of, tmp_path):
    target = tmp_path / "of_another_user"
    target.write_text("kept")
    folder = tmp_path / "weights"
    if comes == "before the run":
        folder.mkdir()
        (folder / "engine_weights.txt").touch()
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)
        with pytest.raises(RL4LMsLikeError, match="symbolic link"):
            generate(policy_of(serve()))
    else:
        policy = policy_of(serve())
        generate(policy)
        (folder / name).unlink()
        (folder / name).symlink_to(target)
        move(policy)
        with pytest.raises(RL4LMsLikeError, match="symbolic link"):
            generate(policy)
    assert target.read_text() == "kept"


def test_a_folder_with_other_files_is_not_overwritten(serve, policy_of, tmp_path):
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "model.safetensors").write_text("mine")
    with pytest.raises(EngineError, match="weights"):
        policy_of(serve())
    assert (tmp_path / "weights" / "model.safetensors").read_text() == "mine"


# --- sampling ---


@pytest.mark.parametrize("kwargs", [{"num_beams": 2}, {"repetition_penalty": 1.3}, {"suppress_tokens": [3]}])
def test_options_that_the_engine_does_not_have_are_refused(serve, policy_of, kwargs):
    with pytest.raises(ConfigError) as caught:
        policy_of(serve(), policy={"generation_kwargs": {**SAMPLING, **kwargs}})
    assert [issue.path for issue in caught.value.issues] == [f"generation_kwargs.{key}" for key in kwargs]


# --- servers that fail ---


@pytest.mark.parametrize("change", [lambda choices: choices.clear(), lambda choices: choices.append(choices[0])])
def test_another_number_of_completions_is_an_error(serve, policy_of, change):
    server = serve()
    policy = policy_of(server)
    server.answers[COMPLETIONS] = server.changed(lambda completion: change(completion["choices"]))
    with pytest.raises(EngineError, match=f"{re.escape(server.url)}.*choices"):
        generate(policy)


def test_a_passing_failure_is_retried(serve, policy_of):
    server = serve()
    policy = policy_of(server, retries=2)
    left = [lambda handler, body: send(handler, b"busy", 503)] * 2

    def answer(handler, body):
        (left.pop() if left else server.answer)(handler, body)

    server.answers[COMPLETIONS] = answer
    assert generate(policy).n_episodes == 6 and not left


def test_a_server_that_is_not_there_is_an_error_with_its_address(policy_of):
    url = "http://127.0.0.1:9"
    with pytest.raises(EngineError, match=url):
        generate(policy_of(url=url, retries=1))


class ReadsModel(BaseMetric):
    def compute(self, prompt_texts, generated_texts, reference_texts, meta_infos=None, model=None, split_name=None):
        return {"reads_model": (None, float(model.num_parameters()))}


def test_a_metric_that_reads_a_model_which_stays_split_is_named(serve, policy_of, tiny_tokenizer, monkeypatch):
    policy = policy_of(serve())
    responder = Responder(policy, tiny_tokenizer, batch_size=2, max_prompt_length=8, eos_token_ids=[1], dialogue=None)
    samples = [Sample(str(i), text, [""]) for i, text in enumerate(("Once", "A film"))]
    evaluation = evaluate_on_samples(responder, samples, [ReadsModel()], split_name="val")
    assert evaluation.scores == {"reads_model": policy.n_parameters}

    monkeypatch.setattr(type(policy), "stays_split", True)
    with pytest.raises(MetricError, match=r"ReadsModel.*num_parameters.*weights are split.*ddp"):
        evaluate_on_samples(responder, samples, [ReadsModel()], split_name="val")


# --- several servers --------------------------------------------------------------------------------------------------


def test_several_servers_divide_the_requests_and_have_the_same_weights(serve, policy_of):
    servers = [serve(), serve(), serve()]
    policy = policy_of(*servers)
    prompts = torch.randint(2, 300, (7, 3))
    for step in range(2):
        for weight in policy.policy_model.parameters():
            weight.data += 0.01 * step
        for server in servers:
            server.requests.clear()
        episodes = policy.generate(prompts, torch.ones_like(prompts), eos_token_ids=(), seed=step)
        whole = policy.model.state_dict()
        for server in servers:
            assert server.paths().count(RELOAD) == 1
            assert all(torch.equal(server.model.state_dict()[name], weight) for name, weight in whole.items())

    # Consecutive prompts have the same server: 3, 2 and 2 of 7. Each also scores the texts of a comparison.
    of_rollout = []
    for server in servers:
        bodies = [body for path, body in server.requests if path == COMPLETIONS and body.get("seed") is not None]
        of_rollout.append(sorted(prompts.tolist().index(body["prompt"]) for body in bodies))
    assert of_rollout == [[0, 1, 2], [3, 4], [5, 6]]

    # The responses are those of one server.
    alone = policy_of(servers[0])
    alone.load_state_dict(policy.state_dict())
    expected = alone.generate(prompts, torch.ones_like(prompts), eos_token_ids=(), seed=1)
    assert torch.equal(expected.response_ids, episodes.response_ids)


@pytest.mark.parametrize("failing", [0, 1])
def test_the_one_of_several_servers_that_fails_is_named(serve, policy_of, failing):
    servers = [serve(), serve()]
    policy = policy_of(*servers, retries=0)
    prompts = torch.randint(2, 300, (4, 3))
    servers[failing].answers[RELOAD] = lambda handler, body: send(handler, {"results": [None]})  # loads nothing
    servers[failing].model.lm_head.weight.data *= 1.5
    with pytest.raises(EngineError, match=re.escape(servers[failing].url)) as caught:
        policy.generate(prompts, torch.ones_like(prompts), eos_token_ids=())
    assert servers[1 - failing].url not in str(caught.value)

    servers[failing].answers[RELOAD] = lambda handler, body: send(handler, {"error": "out of memory"}, 500)
    with pytest.raises(EngineError, match=f"{re.escape(servers[failing].url)}.*500"):
        policy.generate(prompts, torch.ones_like(prompts), eos_token_ids=())


@pytest.mark.parametrize("url", [[], ["http://127.0.0.1:1", "http://127.0.0.1:1/"], ["127.0.0.1"]])
def test_addresses_of_servers_are_checked_with_the_config(url):
    with pytest.raises((ConfigError, ValueError), match=r"url|http"):
        VllmArguments(url=url, weights_dir="weights")


# --- adapters alone ---------------------------------------------------------------------------------------------------

PEFT = {"peft": {"r": 2, "target_modules": "all-linear"}}


def test_adapters_of_another_base_are_an_error(serve, policy_of):
    """The log-probs of the policy are those of its own base."""
    pytest.importorskip("peft")
    server = serve("llama")
    with torch.no_grad():
        server.base.get_output_embeddings().weight.mul_(0.5)
    with pytest.raises(EngineError, match=server.url):
        generate(policy_of(server, family="llama", policy=PEFT, sync="adapters"))


@pytest.mark.parametrize(
    ("path", "peft"),
    [
        ("engine.args.sync", None),
        ("peft.use_dora", {"use_dora": True}),
        ("peft.rank_pattern", {"rank_pattern": {"q_proj": 4}}),
        ("peft.alpha_pattern", {"alpha_pattern": {"q_proj": 4}}),
        ("peft.trainable_token_indices", {"trainable_token_indices": [3]}),
    ],
)
def test_adapters_that_a_server_does_not_load_are_refused(path, peft):
    blocks = run_blocks()
    args = {"url": "http://127.0.0.1:1", "weights_dir": "w", "sync": "adapters"}
    blocks["alg"]["policy"]["args"] |= {"engine": {"id": "vllm", "args": args}, "peft": {"r": 4}}
    parse_config(blocks)
    blocks["alg"]["policy"]["args"]["peft"] = peft
    with pytest.raises(ConfigError, match=re.escape(f"alg.policy.args.{path}")):
        parse_config(blocks)


# --- weights without files --------------------------------------------------------------------------------------------

GLOO = "tests.engines.vllm_server:GlooEngine"


def transferring(servers, folder, **arguments):
    """Build a policy whose weights are transferred to servers."""
    args = {"url": [server.url for server in servers], "sync": "transfer", "max_gap": 1e-4, "backoff": 0.0}
    return make_policy("causal", folder, engine={"id": GLOO, "args": args | arguments})


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_every_tensor_is_transferred_to_all_servers_in_buckets(serve, folders, family, monkeypatch, tmp_path):
    monkeypatch.setattr(weight_transfer, "BUCKET", 50_000)
    servers = [serve(family), serve(family)]
    policy = transferring(servers, folders / family)
    for step in range(2):
        move(policy, by=0.05 * step)
        for server in servers:
            server.requests.clear()
            server.received.clear()
        assert gaps(policy, generate(policy))["max_gap"] < 1e-5
        whole = dict(policy.full_weights())
        for server in servers:
            assert all(torch.equal(server.model.state_dict()[name], weight) for name, weight in whole.items())

            # Each once, in several requests, of which none has much more than a bucket.
            assert [name for names in server.received for name in names] == list(whole)
            sizes = [[whole[name].nbytes for name in names] for names in server.received]
            assert len(sizes) > 2 and all(sum(of_request[:-1]) < 50_000 for of_request in sizes)
            paths = [path for path in server.paths() if path != COMPLETIONS]
            join = ["/shutdown_weight_transfer_engine", "/init_weight_transfer_engine"] if step == 0 else []
            update = ["/start_weight_update", *["/update_weights"] * len(sizes), "/finish_weight_update"]
            assert paths == [*join, *update, "/reset_prefix_cache"]
    assert list(tmp_path.iterdir()) == []


def test_a_resumed_run_joins_the_servers_of_the_interrupted_one_again(serve, folders):
    server = serve()
    generate(transferring([server], folders / "gpt2"))
    again = transferring([server], folders / "gpt2")
    move(again)
    assert gaps(again, generate(again))["max_gap"] < 1e-5


@pytest.mark.parametrize(
    "path", ["/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"]
)
def test_a_server_that_fails_to_receive_weights_is_an_error_without_waiting_or_a_retry(serve, folders, path):
    servers = [serve(), serve()]
    servers[1].answers[path] = lambda handler, body: send(handler, {"error": "no transfer engine"}, 500)
    policy = transferring(servers, folders / "gpt2", timeout=30.0)
    with pytest.raises(EngineError, match=f"{re.escape(servers[1].url)}.*no transfer engine"):
        generate(policy)
    assert servers[1].paths().count(path) == 1


def test_weights_that_a_server_does_not_keep_are_an_error(serve, folders):
    server = serve()
    policy = transferring([server], folders / "gpt2")
    generate(policy)
    server.load_transferred = False
    move(policy)
    with pytest.raises(EngineError, match=f"{re.escape(server.url)}.*transferred weights"):
        generate(policy)


def test_a_policy_without_a_gpu_cannot_use_nccl(serve, folders):
    args = {"url": serve().url, "sync": "transfer"}
    policy = make_policy("causal", folders / "gpt2", engine={"id": "vllm", "args": args})
    with pytest.raises(EngineError, match="GPU"):
        generate(policy)


def test_a_failure_of_nccl_is_reported_without_waiting_for_the_timeout(monkeypatch):
    def fails(device):
        raise RuntimeError("no network interface")

    monkeypatch.setattr(torch.cuda, "set_device", fails)
    gpu = torch.device("cuda:0")
    start = time.monotonic()
    with pytest.raises(EngineError, match=r"NCCL.*no network interface"):
        WeightTransfer(lambda path, bodies: None, n_servers=1, n_workers=1, backend="nccl", device=gpu, timeout_s=20.0)
    assert time.monotonic() - start < 10


@pytest.mark.parametrize(
    ("id", "arguments", "message"),
    [
        ("vllm", {}, "weights_dir"),
        ("vllm", {"sync": "adapters"}, "weights_dir"),
        ("vllm", {"sync": "transfer", "weights_dir": "w"}, "weights_dir"),
        ("vllm", {"sync": "transfer", "n_workers": 0}, "n_workers"),
        ("sglang", {"sync": "transfer"}, "sync"),
        ("sglang", {"weights_dir": "w", "n_workers": 2}, "n_workers"),
    ],
)
def test_a_folder_of_weights_is_for_files_alone(id, arguments, message):
    blocks = run_blocks()
    engine = {"id": id, "args": {"url": "http://127.0.0.1:1", **arguments}}
    blocks["alg"]["policy"]["args"]["engine"] = engine
    with pytest.raises(ConfigError, match=message):
        parse_config(blocks)
