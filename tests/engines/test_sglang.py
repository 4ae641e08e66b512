"""The client of an SGLang server: what its protocol decides. What all servers share is tested with vLLM's."""

from __future__ import annotations

import json
import re

import pytest
import torch

from rl4lms_like.config.load import parse_config
from rl4lms_like.core.stop_strings import StopStrings
from rl4lms_like.engines.weights import MARKER
from rl4lms_like.rollouts.buffer import EpisodeBuffer
from rl4lms_like.rollouts.collector import RolloutCollector
from rl4lms_like.rollouts.kl import FixedKLController
from rl4lms_like.run import resume, train_config
from rl4lms_like.system.errors import ConfigError, EngineError
from rl4lms_like.testing import models
from tests.builders import SAMPLING, make_policy
from tests.configs import run_blocks
from tests.dialogues import dialogue_env
from tests.engines.model_server import send
from tests.engines.sglang_server import SglangServer

GENERATE, RELOAD = "/generate", "/update_weights_from_disk"


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tiny_tokenizer):
    """Models with tied and with untied weights."""
    made = tmp_path_factory.mktemp("models")
    for family in ("gpt2", "llama"):
        models.save_model(made / family, models.make_causal_lm(family, tiny_tokenizer, scale=3.0), tiny_tokenizer)
    return made


@pytest.fixture
def serve(folders):
    """Start a server of a model."""
    started = []

    def start(family="gpt2"):
        started.append(SglangServer(folders / family))
        return started[-1]

    yield start
    for server in started:
        server.close()


@pytest.fixture
def policy_of(folders, tmp_path):
    """Build a policy with servers as its engine."""

    def build(*servers, family="gpt2", policy=None, ahead=0, **arguments):
        urls = [server.url for server in servers]
        args = {"url": urls, "weights_dir": str(tmp_path / "weights"), "max_gap": 1e-4, "backoff": 0.0}
        engine = {"id": "sglang", "args": args | arguments, "ahead": ahead}
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


# --- weights and log-probs ---


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_servers_have_every_tensor_of_the_policy_and_its_log_probs(serve, policy_of, family):
    servers = [serve(family), serve(family)]
    policy = policy_of(*servers, family=family)
    for step in range(2):
        move(policy, by=0.05 * step)
        episodes = generate(policy)
        whole = policy.model.state_dict()
        for server in servers:
            assert server.paths().count(RELOAD) == step + 1
            assert all(torch.equal(server.model.state_dict()[name], weight) for name, weight in whole.items())

        found = gaps(policy, episodes)
        assert found["max_gap"] < 1e-5 and found["effective_sample_size"] > 0.999
    assert policy.engine.external.name == f"the engine {servers[0].url}, {servers[1].url}"


def test_a_token_whose_id_a_server_replaces_is_scored(serve, policy_of):
    policy = policy_of(serve())
    episodes = generate(policy, eos_token_ids=())
    episodes.response_ids[:, 2] = policy.vocab_size - 1
    scored = policy.engine.external.score(episodes)
    torch.testing.assert_close(scored, policy.score(episodes).log_prob, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("by", "max_gap"), [(0.05, 1e-4), (0.05, 100.0)])
def test_a_skipped_synchronisation_is_an_error(serve, policy_of, by, max_gap):
    server = serve()
    policy = policy_of(server, max_gap=max_gap)
    generate(policy)
    server.answers[RELOAD] = lambda handler, body: send(handler, {"success": True, "message": "", "num": 0})
    move(policy, by=by)
    with pytest.raises(EngineError, match=server.url):
        generate(policy)


def test_a_server_that_cannot_load_weights_is_an_error_with_its_message(serve, policy_of):
    server = serve()
    answer = {"success": False, "message": "Failed to update weights: no such shape."}
    server.answers[RELOAD] = lambda handler, body: send(handler, answer, 400)
    with pytest.raises(EngineError, match=f"{re.escape(server.url)}.*no such shape"):
        generate(policy_of(server))


PEFT = {"peft": {"r": 2, "target_modules": "all-linear"}}


def test_adapters_alone_are_passed_on_under_a_new_name_each_time(serve, policy_of, tmp_path):
    pytest.importorskip("peft")
    servers = [serve("llama"), serve("llama")]
    policy = policy_of(*servers, family="llama", policy=PEFT, sync="adapters")
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
        assert servers[0].requests[-1][1]["lora_path"] == name
        names.append(name)
        assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == [f"adapters-{name}", MARKER]
    assert names[1] == names[2] and len(set(names)) == 3

    # The base stays as it is.
    for server in servers:
        counts = [server.paths().count(path) for path in (RELOAD, "/load_lora_adapter", "/unload_lora_adapter")]
        assert counts == [0, 3, 2]
    assert all(torch.equal(*weights) for weights in zip(base, servers[0].model.parameters(), strict=True))


def test_the_server_releases_its_memory_during_updates(serve, policy_of):
    server = serve()
    policy = policy_of(server, sleep=True)
    generate(policy)
    policy.set_training_mode(True)
    move(policy)
    policy.set_training_mode(False)
    assert gaps(policy, generate(policy))["max_gap"] < 1e-5
    paths = [path for path in server.paths() if path != GENERATE]
    assert paths == [RELOAD, "/release_memory_occupation", "/resume_memory_occupation", RELOAD]


# --- sampling ---


def test_a_seed_repeats_a_rollout_in_which_all_responses_differ(serve, policy_of, caplog):
    policy = policy_of(serve())
    first, again, other = generate(policy), generate(policy), generate(policy, seed=4)
    assert torch.equal(first.response_ids, again.response_ids)
    rows = {tuple(row) for row in first.response_ids[1:].tolist()}
    assert len(rows) == 5, "the same prompt"
    assert not torch.equal(first.response_ids[:, :1], other.response_ids[:, :1])
    assert "seeds" not in caplog.text

    # Without one, the server would use the same for all.
    unseeded = generate(policy, seed=None)
    assert len({tuple(row) for row in unseeded.response_ids[1:].tolist()}) == 5


def test_a_server_that_ignores_seeds_is_reported(serve, policy_of, caplog):
    servers = [serve(), serve()]
    servers[1].deterministic = False
    generate(policy_of(*servers))
    (warning,) = [record.getMessage() for record in caplog.records if "seeds" in record.getMessage()]
    assert servers[1].url in warning and servers[0].url not in warning
    assert "--enable-deterministic-inference" in warning


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


def test_an_end_that_is_not_one_of_the_run_is_an_error(serve, policy_of):
    server = serve()
    policy = policy_of(server)
    server.own_end = int(generate(policy, eos_token_ids=()).response_ids[0, 2])
    assert set(generate(policy, eos_token_ids=()).lengths.tolist()) == {8}, "without end tokens the server's do not end"
    with pytest.raises(EngineError, match=r"generation_config\.json"):
        generate(policy, eos_token_ids=[1])


@pytest.mark.parametrize("top_k", [0, 20])
def test_log_probs_of_a_rollout_are_those_of_the_distribution_that_is_sampled(serve, policy_of, folders, top_k):
    sampling = {"do_sample": True, "top_k": top_k, "temperature": 0.7, "min_new_tokens": 2}
    own = make_policy("causal", folders / "gpt2", generation_kwargs=sampling)
    policy = policy_of(serve(), policy={"generation_kwargs": sampling})
    episodes = generate(policy, n=30)
    assert gaps(policy, episodes)["max_gap"] < 1e-5, "of the model's own distribution"

    behavior = episodes.pad(episodes.behavior_log_prob)[:, 0]
    ids, mask = episodes.prompt_ids, episodes.prompt_mask
    logits = own.policy_model(input_ids=ids[1:2], attention_mask=mask[1:2]).logits[0, -1] / 0.7
    logits[1] = -torch.inf  # too early
    if top_k:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
    expected = logits.log_softmax(-1)[episodes.response_ids[1:, 0]]
    assert torch.allclose(behavior[1:], expected, atol=1e-5)


def test_a_top_k_above_the_servers_limit_is_an_error_with_its_message(serve, policy_of):
    server = serve()
    policy = policy_of(server, policy={"generation_kwargs": {"do_sample": True, "top_k": 5000}})
    with pytest.raises(EngineError, match=f"{re.escape(server.url)}.*return_sampling_mask"):
        generate(policy)


def test_a_server_that_returns_log_probs_of_the_model_is_an_error(serve, policy_of):
    server = serve()
    server.original = True
    policy = policy_of(server, policy={"generation_kwargs": {"do_sample": True, "top_k": 0, "temperature": 0.7}})
    with pytest.raises(EngineError, match="SGLANG_RETURN_ORIGINAL_LOGPROB"):
        gaps(policy, generate(policy))


def test_evaluations_are_greedy_if_asked_for(serve, policy_of, folders):
    arguments = {"generation_kwargs": {"do_sample": False, "max_new_tokens": 6}, "record_log_prob": False}
    own = make_policy("causal", folders / "gpt2")
    found, expected = (generate(each, **arguments) for each in (policy_of(serve()), own))
    assert torch.equal(found.response_ids, expected.response_ids) and found.behavior_log_prob is None


def test_each_turn_of_a_dialogue_is_a_request_and_only_actions_are_compared(serve, policy_of, folders, tiny_tokenizer):
    policy = policy_of(serve())
    env = dialogue_env(tiny_tokenizer, folders / "gpt2", n_envs=6)
    collector = RolloutCollector(env, policy, kl=FixedKLController(0.1), seed=5)
    buffer = EpisodeBuffer(gamma=0.9, gae_lambda=0.8)
    info = collector.collect(buffer, 1)
    episodes = buffer.episodes
    assert episodes.observed.sum() > 10
    assert info["rollout_info/engine/max_gap"] < 1e-5
    torch.testing.assert_close(episodes.behavior_log_prob, policy.score(episodes).log_prob, atol=1e-5, rtol=0)
    scored = policy.engine.external.score(episodes)
    torch.testing.assert_close(scored, policy.score(episodes).log_prob, atol=1e-5, rtol=0)


# --- servers that fail ---


def changed(change):
    """Answer with a changed response."""

    def of(server):
        def answer(handler, body):
            content, status = server.generated(body)
            change(content)
            send(handler, content, status)

        return answer

    return of


def meta(**fields):
    return changed(lambda content: content["meta_info"].update(fields))


def entries(*tokens, log_prob=-1.0):
    return [[log_prob, token, None] for token in tokens]


def ids(*tokens, log_prob=-1.0):
    def change(content):
        content["output_ids"] = list(tokens)
        content["meta_info"]["output_token_logprobs"] = entries(*tokens, log_prob=log_prob)

    return changed(change)


FAILURES = {
    "status 500": lambda server: lambda handler, body: send(handler, b"worker died", 500),
    "status 400": lambda server: lambda handler, body: send(handler, {"error": {"message": "too long"}}, 400),
    "not JSON": lambda server: lambda handler, body: send(handler, b"<html>"),
    "a list": lambda server: lambda handler, body: send(handler, []),
    "no ids": changed(lambda content: content.pop("output_ids")),
    "no tokens": ids(),
    "too many tokens": ids(*[5] * 9),
    "ids of 70 bits": ids(*[2**70] * 8),
    "negative ids": ids(*[-1] * 8),
    "ids out of the vocabulary": ids(*[10**6] * 8),
    "too few log-probs": meta(output_token_logprobs=entries(5)),
    "log-probs of other tokens": meta(output_token_logprobs=entries(*range(2, 10))),
    "no log-probs": meta(output_token_logprobs=None),
    "log-prob is null": ids(*[5] * 8, log_prob=None),
    "log-prob above 0": ids(*[5] * 8, log_prob=3.0),
    "cut off": ids(*[5] * 7),
    "aborted": meta(finish_reason={"type": "abort", "message": "Aborted", "status_code": None}),
    "not finished": meta(finish_reason=None),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_server_that_fails_is_an_error_with_its_address(serve, policy_of, failure):
    server = serve()
    policy = policy_of(server)
    generate(policy)
    server.answers[GENERATE] = FAILURES[failure](server)
    with pytest.raises(EngineError, match=server.url):
        generate(policy, n=1, eos_token_ids=())


def test_log_probs_after_top_k_that_a_server_does_not_have_are_an_error(serve, policy_of):
    server = serve()
    server.answers[GENERATE] = meta(output_token_sampling_logprobs=None)(server)
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
