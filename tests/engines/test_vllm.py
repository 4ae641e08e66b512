"""The client of a vLLM server: log-probs, synchronisation, sampling, and servers that fail or have other weights."""

from __future__ import annotations

import re
import time

import pytest
import torch

from rl4lms_like.config.load import parse_config
from rl4lms_like.core.sample import Sample
from rl4lms_like.core.stop_strings import StopStrings
from rl4lms_like.engines import weight_transfer
from rl4lms_like.engines.arguments import VllmArguments
from rl4lms_like.engines.weights import MARKER
from rl4lms_like.metrics.base import BaseMetric
from rl4lms_like.rollouts.buffer import EpisodeBuffer
from rl4lms_like.rollouts.collector import RolloutCollector
from rl4lms_like.rollouts.kl import FixedKLController
from rl4lms_like.system.errors import ConfigError, EngineError, MetricError, ModelError, RL4LMsLikeError
from rl4lms_like.testing import models
from rl4lms_like.training.evaluation import Responder, evaluate_on_samples
from tests.builders import SAMPLING, make_policy
from tests.configs import run_blocks
from tests.dialogues import dialogue_env
from tests.engines.vllm_server import VllmServer, send

COMPLETIONS, RELOAD = "/v1/completions", "/collective_rpc"


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tiny_tokenizer):
    """Models with tied and with untied weights, and one with another vocabulary."""
    made = tmp_path_factory.mktemp("models")
    for family in ("gpt2", "llama"):
        model = models.make_causal_lm(family, tiny_tokenizer, scale=3.0)
        models.save_model(made / family, model, tiny_tokenizer)
    smaller = models.make_tokenizer(vocab_size=270)
    models.save_model(made / "smaller", models.make_causal_lm("gpt2", smaller, scale=3.0), smaller)
    return made


@pytest.fixture
def serve(folders):
    """Start a server of a model."""
    started = []

    def start(family="gpt2"):
        started.append(VllmServer(folders / family))
        return started[-1]

    yield start
    for server in started:
        server.close()


@pytest.fixture
def policy_of(folders, tmp_path):
    """Build a policy with a server as its engine."""

    def build(server, family="gpt2", *, url=None, policy=None, ahead=0, **arguments):
        args = {"url": url or server.url, "weights_dir": str(tmp_path / "weights"), "max_gap": 1e-4, "backoff": 0.0}
        engine = {"id": "vllm", "args": args | arguments, "ahead": ahead}
        return make_policy("causal", folders / family, engine=engine, **(policy or {}))

    return build


def generate(policy, n=6, seed=3, **arguments):
    ids = torch.randint(2, 250, (1, 5), generator=torch.Generator().manual_seed(0)).repeat(n, 1)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    arguments = {"eos_token_ids": [1], "max_new_tokens": 8, "record_log_prob": True, **arguments}
    return policy.generate(ids, mask, seed=seed, **arguments)


def gaps(policy, episodes):
    return policy.engine.external.gaps(episodes, policy.score(episodes).log_prob)


@torch.no_grad()
def move(policy, by=0.05):
    """Change the weights, as an update does."""
    generator = torch.Generator().manual_seed(1)
    for weight in policy.policy_model.parameters():
        if weight.requires_grad:
            weight += by * torch.randn(weight.shape, generator=generator)


# --- log-probs and weights ---


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_log_probs_are_those_of_the_policy_before_and_after_its_weights_change(serve, policy_of, family):
    policy = policy_of(serve(family), family)
    before = generate(policy)
    assert gaps(policy, before)["max_gap"] < 1e-5
    move(policy)
    assert float((policy.score(before).log_prob - before.behavior_log_prob).abs().mean()) > 0.1
    found = gaps(policy, generate(policy))
    assert found["max_gap"] < 1e-5 and found["k3"] < 1e-5 and found["effective_sample_size"] > 0.999


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
    policy = policy_of(serve("llama"), "llama", policy={"peft": {"r": 4}})
    move(policy, by=0.3)
    episodes = generate(policy)
    assert gaps(policy, episodes)["max_gap"] < 1e-5
    assert float((policy.score(episodes).ref_log_prob - episodes.behavior_log_prob).abs().mean()) > 0.01


@pytest.mark.parametrize(("by", "max_gap"), [(0.05, 1e-4), (0.05, 100.0)])
def test_a_skipped_synchronisation_is_an_error(serve, policy_of, by, max_gap):
    server = serve()
    policy = policy_of(server, max_gap=max_gap)
    generate(policy)
    server.answers[RELOAD] = lambda handler, body: send(handler, {"results": [None]})
    move(policy, by=by)
    with pytest.raises(EngineError, match=server.url):
        generate(policy)


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
        generate(policy_of(server, family))


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


def test_a_seed_repeats_a_rollout_in_which_all_responses_differ(serve, policy_of):
    policy = policy_of(serve())
    first, again, other = generate(policy), generate(policy), generate(policy, seed=4)
    assert torch.equal(first.response_ids, again.response_ids)
    rows = {tuple(row) for row in first.response_ids[1:].tolist()}
    assert len(rows) == 5, "the same prompt"
    assert not torch.equal(first.response_ids[:, :1], other.response_ids[:, :1])


def test_responses_end_with_their_first_end_token_and_at_the_limit(serve, policy_of):
    policy = policy_of(serve())
    free = generate(policy, n=40, eos_token_ids=())
    assert set(free.lengths.tolist()) == {8} and not free.terminated.any()
    ends = free.response_ids[:, 3].unique().tolist()
    cut = generate(policy, n=40, eos_token_ids=ends)
    for row in range(40):
        ids = free.response_ids[row].tolist()
        length = next((i + 1 for i, token in enumerate(ids) if token in ends), 8)
        assert cut.response_ids[row][cut.response_mask[row]].tolist() == ids[:length]
        assert bool(cut.terminated[row]) == (ids[length - 1] in ends)
    assert gaps(policy, cut)["max_gap"] < 1e-5


def test_stop_strings_end_responses_as_in_the_environment(serve, policy_of, tiny_tokenizer):
    policy = policy_of(serve())
    free = generate(policy, n=20, eos_token_ids=())
    letter = tiny_tokenizer.decode(free.response_ids[0, 2:4].tolist(), skip_special_tokens=True)
    policy = policy_of(serve(), policy={"generation_kwargs": {**SAMPLING, "stop_strings": [letter]}})
    cut = generate(policy, n=20, eos_token_ids=(), tokenizer=tiny_tokenizer)
    rule = StopStrings((letter,), tiny_tokenizer)
    assert cut.terminated.any() and gaps(policy, cut)["max_gap"] < 1e-5
    for row in range(20):
        expected = rule.n_tokens(free.response_ids[row].tolist())
        assert int(cut.lengths[row]) == (expected or 8) and bool(cut.terminated[row]) == (expected is not None)
    with pytest.raises(ModelError):
        generate(policy)


def test_an_end_that_is_not_one_of_the_run_is_an_error(serve, policy_of):
    server = serve()
    policy = policy_of(server)
    server.own_end = int(generate(policy, eos_token_ids=()).response_ids[0, 2])
    with pytest.raises(EngineError, match="generation-config"):
        generate(policy, eos_token_ids=())


COLD = {"do_sample": True, "top_k": 20, "temperature": 0.7, "top_p": 0.9, "min_new_tokens": 2}


def test_log_probs_of_a_rollout_are_those_of_the_distribution_that_is_sampled(serve, policy_of, folders):
    own = make_policy("causal", folders / "gpt2", generation_kwargs=COLD)
    policy = policy_of(serve(), policy={"generation_kwargs": COLD})
    episodes = generate(policy, n=30)
    found = gaps(policy, episodes)
    assert found["max_gap"] < 1e-5, "of the model's own distribution"
    behavior = episodes.pad(episodes.behavior_log_prob)[:, 0]
    ids, mask = episodes.prompt_ids, episodes.prompt_mask
    logits = own.policy_model(input_ids=ids[1:2], attention_mask=mask[1:2]).logits[0, -1] / 0.7
    logits[1] = -torch.inf  # too early
    kept = logits >= logits.topk(20).values[-1]
    ranked, order = logits.masked_fill(~kept, -torch.inf).softmax(-1).sort(descending=True)
    nucleus = order[: int((ranked.cumsum(0) < 0.9).sum()) + 1]
    expected = torch.full_like(logits, -torch.inf).index_copy(0, nucleus, logits[nucleus]).log_softmax(-1)
    assert torch.allclose(behavior[1:], expected[episodes.response_ids[1:, 0]], atol=1e-5)


def test_a_server_that_returns_log_probs_of_the_wrong_distribution_is_an_error(serve, policy_of):
    server = serve()
    server.processed = False
    policy = policy_of(server, policy={"generation_kwargs": COLD})
    with pytest.raises(EngineError, match="processed_logprobs"):
        gaps(policy, generate(policy))


def test_evaluations_are_greedy_if_asked_for(serve, policy_of, folders):
    arguments = {"generation_kwargs": {"do_sample": False, "max_new_tokens": 6}, "record_log_prob": False}
    own = make_policy("causal", folders / "gpt2")
    found, expected = (generate(each, **arguments) for each in (policy_of(serve()), own))
    assert torch.equal(found.response_ids, expected.response_ids) and found.behavior_log_prob is None


@pytest.mark.parametrize("kwargs", [{"num_beams": 2}, {"repetition_penalty": 1.3}, {"suppress_tokens": [3]}])
def test_options_that_the_engine_does_not_have_are_refused(serve, policy_of, kwargs):
    with pytest.raises(ConfigError) as caught:
        policy_of(serve(), policy={"generation_kwargs": {**SAMPLING, **kwargs}})
    assert [issue.path for issue in caught.value.issues] == [f"generation_kwargs.{key}" for key in kwargs]


def test_the_server_sleeps_during_updates(serve, policy_of):
    server = serve()
    policy = policy_of(server, sleep=True)
    generate(policy)
    policy.set_training_mode(True)
    policy.set_training_mode(True)
    move(policy)
    policy.set_training_mode(False)
    assert gaps(policy, generate(policy))["max_gap"] < 1e-5
    paths = [path for path in server.paths() if path != COMPLETIONS]
    assert paths == [RELOAD, "/reset_prefix_cache", "/sleep?level=1", "/wake_up", RELOAD, "/reset_prefix_cache"]


# --- servers that fail ---


def changed(change):
    """Answer with a changed completion."""

    def of(server):
        def answer(handler, body):
            completion = server.completion(body)
            change(completion)
            send(handler, completion)

        return answer

    return of


def choice(**fields):
    return changed(lambda completion: completion["choices"][0].update(fields))


FAILURES = {
    "status 500": lambda server: lambda handler, body: send(handler, b"worker died", 500),
    "status 400": lambda server: lambda handler, body: send(handler, b"too long", 400),
    "too slow": lambda server: lambda handler, body: time.sleep(2),
    "not JSON": lambda server: lambda handler, body: send(handler, b"<html>"),
    "no choice": changed(lambda completion: completion.update(choices=[])),
    "two choices": changed(lambda completion: completion["choices"].append(completion["choices"][0])),
    "no tokens": choice(token_ids=[]),
    "too many tokens": choice(token_ids=[5] * 9, logprobs={"token_logprobs": [-1.0] * 9}),
    "ids of 70 bits": choice(token_ids=[2**70] * 8, logprobs={"token_logprobs": [-1.0] * 8}),
    "negative ids": choice(token_ids=[-1] * 8, logprobs={"token_logprobs": [-1.0] * 8}),
    "ids out of the vocabulary": choice(token_ids=[10**6] * 8, logprobs={"token_logprobs": [-1.0] * 8}),
    "tokens are text": choice(token_ids=["a"]),
    "too few log-probs": choice(logprobs={"token_logprobs": [-1.0]}),
    "no log-probs": choice(logprobs=None),
    "log-prob is null": choice(logprobs={"token_logprobs": [None] * 8}),
    "log-prob above 0": choice(logprobs={"token_logprobs": [3.0] * 8}),
    "log-prob of -1e30": choice(logprobs={"token_logprobs": [-1e30] * 8}),
    "cut off": choice(token_ids=[5] * 7, logprobs={"token_logprobs": [-1.0] * 7}),
    "aborted": choice(finish_reason="abort"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_server_that_fails_is_an_error_with_its_address(serve, policy_of, failure):
    server = serve()
    policy = policy_of(server, timeout=1.0 if failure == "too slow" else 30.0, retries=1)
    generate(policy)
    server.answers[COMPLETIONS] = FAILURES[failure](server)
    with pytest.raises(EngineError, match=server.url):
        generate(policy, n=1, eos_token_ids=())


def test_a_passing_failure_is_retried(serve, policy_of):
    server = serve()
    policy = policy_of(server, retries=2)
    left = [lambda handler, body: send(handler, b"busy", 503)] * 2

    def answer(handler, body):
        (left.pop() if left else server.answer)(handler, body)

    server.answers[COMPLETIONS] = answer
    assert generate(policy).n_episodes == 6 and not left


@pytest.mark.parametrize("path", [RELOAD, "/reset_prefix_cache"])
def test_a_server_that_cannot_load_weights_is_an_error(serve, policy_of, path):
    server = serve()
    server.answers[path] = lambda handler, body: send(handler, b"Not Found", 404)
    with pytest.raises(EngineError, match=server.url):
        generate(policy_of(server))


def test_a_server_that_is_not_there_is_an_error_with_its_address(policy_of):
    url = "http://127.0.0.1:9"
    with pytest.raises(EngineError, match=url):
        generate(policy_of(None, url=url, retries=1))


# --- dialogues ---


def test_each_turn_of_a_dialogue_is_a_request_and_only_actions_are_compared(serve, policy_of, folders, tiny_tokenizer):
    server = serve()
    policy = policy_of(server)
    env = dialogue_env(tiny_tokenizer, folders / "gpt2", n_envs=6)
    collector = RolloutCollector(env, policy, kl=FixedKLController(0.1), seed=5)
    buffer = EpisodeBuffer(gamma=0.9, gae_lambda=0.8)
    info = collector.collect(buffer, 1)
    episodes = buffer.episodes
    assert episodes.observed.sum() > 10
    assert info["rollout_info/engine/max_gap"] < 1e-5
    assert len(episodes.behavior_log_prob) == episodes.n_tokens
    torch.testing.assert_close(episodes.behavior_log_prob, policy.score(episodes).log_prob, atol=1e-5, rtol=0)
    scored = policy.engine.external.score(episodes)
    torch.testing.assert_close(scored, policy.score(episodes).log_prob, atol=1e-5, rtol=0)


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
    policy = policy_of(servers[0], url=[server.url for server in servers])
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
    policy = policy_of(servers[0], url=[server.url for server in servers], retries=0)
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

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
PEFT = {"peft": {"r": 2, "target_modules": "all-linear"}}


def test_adapters_alone_are_passed_on_under_a_new_name_each_time(serve, policy_of, tmp_path):
    pytest.importorskip("peft")
    servers = [serve("llama"), serve("llama")]
    policy = policy_of(servers[0], "llama", policy=PEFT, url=[server.url for server in servers], sync="adapters")
    base = [weight.clone() for weight in servers[0].model.parameters()]
    names = []
    for step in (0, 1, 1, 2):
        with torch.no_grad():
            for name, weight in policy.policy_model.named_parameters():
                if "lora_B" in name:
                    weight.fill_(0.05 * step)
        assert gaps(policy, generate(policy))["max_gap"] < 1e-5
        (name,) = servers[0].adapters
        assert servers[1].adapters.keys() == {name}
        names.append(name)
        assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == [f"adapters-{name}", MARKER]
    assert names[1] == names[2] and len(set(names)) == 3

    # The base stays as it is.
    for server in servers:
        assert RELOAD not in server.paths()
        assert (server.paths().count(LOAD), server.paths().count(UNLOAD)) == (3, 2)
    assert all(torch.equal(*weights) for weights in zip(base, servers[0].model.parameters(), strict=True))


def test_adapters_of_another_base_are_an_error(serve, policy_of):
    """The log-probs of the policy are those of its own base."""
    pytest.importorskip("peft")
    server = serve("llama")
    with torch.no_grad():
        server.base.get_output_embeddings().weight.mul_(0.5)
    with pytest.raises(EngineError, match=server.url):
        generate(policy_of(server, "llama", policy=PEFT, sync="adapters"))


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
