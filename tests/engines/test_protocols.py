"""The clients of vLLM's and SGLang's servers: responses, log-probs and weights by requests of each protocol."""

from __future__ import annotations

import re
import time

import pytest
import torch

from rl4lms_like.core.stop_strings import StopStrings
from rl4lms_like.engines.weights import MARKER
from rl4lms_like.rollouts.buffer import EpisodeBuffer
from rl4lms_like.rollouts.collector import RolloutCollector
from rl4lms_like.rollouts.kl import FixedKLController
from rl4lms_like.system.errors import EngineError, ModelError
from tests.builders import SAMPLING, make_policy
from tests.dialogues import dialogue_env
from tests.engines.model_server import send
from tests.engines.responses import gaps, generate, move
from tests.engines.sglang_server import SglangServer
from tests.engines.vllm_server import VllmServer


@pytest.fixture(params=[VllmServer, SglangServer], ids=["vllm", "sglang"])
def server_class(request):
    return request.param


def loads_nothing(handler, body):
    """Answer as if weights were loaded."""
    send(handler, {"success": True, "message": "", "results": [None]})


# --- weights and log-probs ---


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_log_probs_are_those_of_the_policy_before_and_after_its_weights_change(serve, policy_of, family):
    servers = [serve(family), serve(family)]
    policy = policy_of(*servers, family=family)
    before = generate(policy)
    assert gaps(policy, before)["max_gap"] < 1e-5
    move(policy)
    assert float((policy.score(before).log_prob - before.behavior_log_prob).abs().mean()) > 0.1
    difference = gaps(policy, generate(policy))
    assert difference["max_gap"] < 1e-5 and difference["k3"] < 1e-5 and difference["effective_sample_size"] > 0.999

    # Both servers have every tensor.
    whole = policy.model.state_dict()
    for server in servers:
        assert [path for path in server.paths() if path != server.GENERATE] == 2 * server.UPDATE
        assert all(torch.equal(server.model.state_dict()[name], weight) for name, weight in whole.items())


@pytest.mark.parametrize("max_gap", [1e-4, 100.0])
def test_a_skipped_synchronisation_is_an_error(serve, policy_of, max_gap):
    server = serve()
    policy = policy_of(server, max_gap=max_gap)
    generate(policy)
    server.answers[server.UPDATE[0]] = loads_nothing
    move(policy)
    with pytest.raises(EngineError, match=server.url):
        generate(policy)


def test_a_server_that_cannot_load_weights_is_an_error_with_its_message(serve, policy_of):
    server = serve()
    for path in server.UPDATE:
        server.answers = {path: lambda handler, body: send(handler, {"message": "no such shape."}, 400)}
        with pytest.raises(EngineError, match=f"{re.escape(server.url)}.*no such shape"):
            generate(policy_of(server))


def test_adapters_alone_are_passed_on_under_a_new_name_each_time(serve, policy_of, tmp_path):
    pytest.importorskip("peft")
    servers = [serve("llama"), serve("llama")]
    lora = {"peft": {"r": 2, "target_modules": "all-linear"}}
    policy = policy_of(*servers, family="llama", policy=lora, sync="adapters")
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
        paths = (server.UPDATE[0], server.LOAD_ADAPTERS, server.UNLOAD_ADAPTERS)
        assert [server.paths().count(path) for path in paths] == [0, 3, 2]
    assert all(torch.equal(*weights) for weights in zip(base, servers[0].model.parameters(), strict=True))


def test_a_server_releases_its_memory_during_updates(serve, policy_of):
    server = serve()
    policy = policy_of(server, sleep=True)
    generate(policy)
    policy.set_training_mode(True)
    policy.set_training_mode(True)
    move(policy)
    policy.set_training_mode(False)
    assert gaps(policy, generate(policy))["max_gap"] < 1e-5
    paths = [path for path in server.paths() if path != server.GENERATE]
    assert paths == [*server.UPDATE, server.RELEASE, server.RESUME, *server.UPDATE]


# --- sampling ---


def test_a_seed_repeats_a_rollout_in_which_all_responses_differ(serve, policy_of):
    policy = policy_of(serve())
    first, again, other = generate(policy), generate(policy), generate(policy, seed=4)
    assert torch.equal(first.response_ids, again.response_ids)
    rows = {tuple(row) for row in first.response_ids[1:].tolist()}
    assert len(rows) == 5, "the same prompt"
    assert not torch.equal(first.response_ids[:, :1], other.response_ids[:, :1])

    # Without one, a server could use the same for all.
    unseeded = generate(policy, seed=None)
    assert len({tuple(row) for row in unseeded.response_ids[1:].tolist()}) == 5


def test_responses_end_with_their_first_end_token_and_at_the_limit(serve, policy_of):
    server = serve()
    policy = policy_of(server)
    free = generate(policy, n=40, eos_token_ids=())
    assert set(free.lengths.tolist()) == {8} and not free.terminated.any()
    ends = free.response_ids[:, 3].unique().tolist()
    server.n_sampled = 0
    cut = generate(policy, n=40, eos_token_ids=ends)
    assert server.n_sampled == cut.n_tokens, "no tokens after an end"
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
    server = serve()
    policy = policy_of(server, policy={"generation_kwargs": {**SAMPLING, "stop_strings": [letter]}})
    policy.engine.update(policy)
    server.n_sampled = 0
    cut = generate(policy, n=20, eos_token_ids=(), tokenizer=tiny_tokenizer)
    assert server.n_sampled == cut.n_tokens, "no tokens after a stop string"
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
    with pytest.raises(EngineError, match=f"{re.escape(server.url)}.*generation[-_]config"):
        generate(policy)


@pytest.mark.parametrize(
    ("server_class", "truncation"),
    [(VllmServer, {"top_k": 20, "top_p": 0.9}), (SglangServer, {"top_k": 0}), (SglangServer, {"top_k": 20})],
    indirect=["server_class"],
)
def test_log_probs_of_a_rollout_are_those_of_the_distribution_that_is_sampled(serve, policy_of, folders, truncation):
    sampling = {"do_sample": True, "temperature": 0.7, "min_new_tokens": 2, **truncation}
    transformers_policy = make_policy("causal", folders / "gpt2", generation_kwargs=sampling)
    policy = policy_of(serve(), policy={"generation_kwargs": sampling})
    episodes = generate(policy, n=30)
    assert gaps(policy, episodes)["max_gap"] < 1e-5, "of the model's own distribution"

    # All rows but the first have the same prompt, and so the same distribution of the first token.
    ids, mask = episodes.prompt_ids, episodes.prompt_mask
    logits = transformers_policy.policy_model(input_ids=ids[1:2], attention_mask=mask[1:2]).logits[0, -1] / 0.7
    logits[1] = -torch.inf  # too early
    if truncation["top_k"]:
        logits = logits.masked_fill(logits < logits.topk(truncation["top_k"]).values[-1], -torch.inf)
    ranked, order = logits.softmax(-1).sort(descending=True)
    nucleus = order[: int((ranked.cumsum(0) < truncation.get("top_p", 2.0)).sum()) + 1]
    expected = torch.full_like(logits, -torch.inf).index_copy(0, nucleus, logits[nucleus]).log_softmax(-1)
    behavior = episodes.pad(episodes.behavior_log_prob)[:, 0]
    assert torch.allclose(behavior[1:], expected[episodes.response_ids[1:, 0]], atol=1e-5)


def test_a_server_that_returns_log_probs_of_the_model_is_an_error(serve, policy_of):
    server = serve()
    server.returns_model_log_probs = True
    policy = policy_of(server, policy={"generation_kwargs": {"do_sample": True, "top_k": 0, "temperature": 0.7}})
    with pytest.raises(EngineError, match=r"processed_logprobs|SGLANG_RETURN_ORIGINAL_LOGPROB"):
        gaps(policy, generate(policy))


def test_evaluations_are_greedy_if_asked_for(serve, policy_of, folders):
    arguments = {"generation_kwargs": {"do_sample": False, "max_new_tokens": 6}, "record_log_prob": False}
    expected = generate(make_policy("causal", folders / "gpt2"), **arguments)
    episodes = generate(policy_of(serve()), **arguments)
    assert torch.equal(episodes.response_ids, expected.response_ids) and episodes.behavior_log_prob is None


def test_each_turn_of_a_dialogue_is_a_request_and_only_actions_are_compared(serve, policy_of, folders, tiny_tokenizer):
    policy = policy_of(serve())
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


# --- servers that fail ---


def status(code, content):
    return lambda server: lambda handler, body: send(handler, content, code)


def tokens(ids, log_probs):
    """Answer with other tokens."""
    return lambda server: server.changed(lambda content: server.replace_tokens(content, ids, log_probs))


def reason(name):
    """Answer with another reason for the end of the response."""
    return lambda server: server.changed(lambda content: server.replace_reason(content, name))


FAILURES = {
    "status 500": status(500, b"worker died"),
    "status 400": status(400, {"error": {"message": "too long"}}),
    "too slow": lambda server: lambda handler, body: time.sleep(2),
    "not JSON": status(200, b"<html>"),
    "a list": status(200, []),
    "no tokens": tokens([], []),
    "too many tokens": tokens([5] * 9, [-1.0] * 9),
    "ids of 70 bits": tokens([2**70] * 8, [-1.0] * 8),
    "negative ids": tokens([-1] * 8, [-1.0] * 8),
    "ids out of the vocabulary": tokens([10**6] * 8, [-1.0] * 8),
    "tokens are text": tokens(["a"] * 8, [-1.0] * 8),
    "too few log-probs": tokens([5] * 8, [-1.0]),
    "no log-probs": tokens([5] * 8, None),
    "log-prob is null": tokens([5] * 8, [None] * 8),
    "log-prob above 0": tokens([5] * 8, [3.0] * 8),
    "log-prob of -1e30": tokens([5] * 8, [-1e30] * 8),
    "cut off": tokens([5] * 7, [-1.0] * 7),
    "aborted": reason("abort"),
    "not finished": reason(None),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_server_that_fails_is_an_error_with_its_address(serve, policy_of, failure):
    server = serve()
    policy = policy_of(server, timeout=1.0 if failure == "too slow" else 30.0, retries=1)
    generate(policy)
    server.answers[server.GENERATE] = FAILURES[failure](server)
    with pytest.raises(EngineError, match=server.url):
        generate(policy, n=1, eos_token_ids=())
