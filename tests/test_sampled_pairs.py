"""Pairs that a policy samples: their scores, files, interruptions, and training on them."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest

from rl4lms_like.cli import main
from rl4lms_like.config.load import parse_config
from rl4lms_like.config.yaml_file import dump_yaml
from rl4lms_like.data_pools import DATA_POOLS
from rl4lms_like.rewards.base import BatchedRewardFunction
from rl4lms_like.sampled_pairs import write_pairs
from rl4lms_like.system.errors import DataPoolError, RewardError
from rl4lms_like.training.inputs import build_datapool, build_tokenizer, render_prompts
from tests.chat_models import REASONING, save_chat_model
from tests.config_errors import raises_at
from tests.configs import supervised_blocks
from tests.judge_server import judge_server
from tests.offline.preferences.preference_runs import blocks as preference_blocks
from tests.offline.preferences.preference_runs import lines, run

PROMPTS = [f"Say {word}:" for word in ("one", "two", "three", "four and five", "six", "seven", "eight")]
CALLS: list[list[str]] = []
FAILS_AT: list[int] = []


def vowels(*, prompts, responses, references, meta_infos):
    """Score responses by their vowels; fail in the call that a test chose."""
    CALLS.append(list(responses))
    if FAILS_AT and len(CALLS) == FAILS_AT[0]:
        raise KeyboardInterrupt if len(FAILS_AT) > 1 else ZeroDivisionError
    return [sum(character in "aeiou" for character in text) / 8 for text in responses]


def constant(*, prompts, responses, references, meta_infos):
    return [0.5] * len(responses)


class Alternating(BatchedRewardFunction):
    """Reward whose sign changes with each call."""

    terminal = True

    def __init__(self):
        self.n_calls = 0

    def __call__(self, prompt_texts, gen_texts, ref_texts, dones, meta_infos=None):
        self.n_calls += 1
        return [score * (-1) ** self.n_calls for score in vowels(**EMPTY | {"responses": gen_texts})]

    def state_dict(self):
        return {"n_calls": self.n_calls}

    def load_state_dict(self, state):
        self.n_calls = state["n_calls"]


EMPTY = {"prompts": [], "references": [], "meta_infos": []}


def one_for_each(steps):
    return [1.0] * len(steps)


@pytest.fixture(scope="module")
def tiny_gpt2_dir(deeper_gpt2_dir):
    """The model of `tiny_config`; one with a single layer writes texts that are too much alike."""
    return deeper_gpt2_dir


@pytest.fixture(autouse=True)
def no_calls():
    CALLS.clear()
    FAILS_AT.clear()


@pytest.fixture
def blocks(tiny_config, tmp_path):
    """An RL config with seven prompts, of which two are processed together."""
    rows = tmp_path / "prompts.jsonl"
    rows.write_text("".join(json.dumps({"prompt": text, "answer": "yes"}) + "\n" for text in PROMPTS))
    files = dict.fromkeys(("train", "val", "test"), str(rows))
    tiny_config["datapool"] = {"id": "jsonl", "args": {"data_files": files, "prompt_column": "prompt"}}
    tiny_config["reward_fn"] = {"id": "python", "args": {"function": f"{__name__}:vowels"}}
    tiny_config["env"]["n_envs"] = 6
    return tiny_config


@pytest.fixture
def config(blocks):
    """Return a config with other blocks."""
    return lambda **changes: parse_config(copy.deepcopy(blocks) | changes)


def pairs(config, out, **options):
    """Write pairs; return the lines of the file and those of the report."""
    report: list[str] = []
    write_pairs(config, out, **{"n_samples": 3, **options}, report=report.append)
    return lines(out), report


def test_pairs_are_the_best_and_the_worst_response_to_a_prompt(config, tmp_path):
    found, report = pairs(config(), tmp_path / "pairs.jsonl")
    assert [len(call) for call in CALLS] == [6, 6, 6, 3]
    responses = [text for call in CALLS for text in call]
    groups = dict(zip(PROMPTS, (responses[i : i + 3] for i in range(0, 21, 3)), strict=True))
    score = lambda text: vowels(responses=[text], **EMPTY)[0]  # noqa: E731
    differ = [prompt for prompt, texts in groups.items() if len({score(text) for text in texts}) > 1]
    assert [pair["prompt"] for pair in found] == differ and len(differ) > 3
    for pair in found:
        texts = groups[pair["prompt"]]
        assert {pair["chosen"], pair["rejected"]} <= set(texts)
        assert pair["chosen_score"] == score(pair["chosen"]) == max(map(score, texts))
        assert pair["rejected_score"] == score(pair["rejected"]) == min(map(score, texts))
    assert report[0].startswith(f"{len(found)} pairs of 7 prompts")


def test_truncated_responses_are_marked(config, tmp_path):
    found, report = pairs(config(), tmp_path / "pairs.jsonl")
    for name in ("chosen", "rejected"):
        n_truncated = sum(pair[f"{name}_truncated"] for pair in found)
        (line,) = [line for line in report if line.startswith(f"{name} responses: ")]
        assert line.endswith(f", {n_truncated} reached the length limit") and n_truncated > 0

    files = {"train": str(tmp_path / "pairs.jsonl")}
    samples = DATA_POOLS.get("preferences", {"split": "train", "data_files": files}).samples
    for sample, pair in zip(samples, found, strict=True):
        marked = {pair[name] for name in ("chosen", "rejected") if pair[f"{name}_truncated"]}
        assert sample.truncated == marked


def test_the_seed_alone_decides(config, tmp_path):
    first, _ = pairs(config(), tmp_path / "first.jsonl")
    assert pairs(config(), tmp_path / "second.jsonl")[0] == first
    assert pairs(config(seed=1), tmp_path / "third.jsonl")[0] != first


def test_prompts_without_a_pair_are_counted(config, tmp_path):
    found, _ = pairs(config(), tmp_path / "all.jsonl")
    differences = [pair["chosen_score"] - pair["rejected_score"] for pair in found]
    limit = sorted(differences)[len(differences) // 2]
    kept, report = pairs(config(), tmp_path / "some.jsonl", min_difference=limit)
    assert kept == [pair for pair, each in zip(found, differences, strict=True) if each >= limit]
    assert f"{len(found) - len(kept)} prompts without a pair: the difference is below {limit:g}" in report
    reward = {"id": "python", "args": {"function": f"{__name__}:constant"}}
    found, report = pairs(config(reward_fn=reward), tmp_path / "none.jsonl", max_prompts=3)
    assert found == [] and report[1:] == ["3 prompts without a pair: all scores are equal"]


@pytest.mark.parametrize("interrupted", [True, False])
def test_the_same_call_continues_to_the_same_file(interrupted, config, tmp_path):
    expected, whole = pairs(config(), tmp_path / "whole.jsonl")
    out = tmp_path / "pairs.jsonl"
    for call in (3, 2):
        CALLS.clear()
        FAILS_AT[:] = [call, 0] if interrupted else [call]
        report: list[str] = []
        with pytest.raises(KeyboardInterrupt if interrupted else RewardError):
            write_pairs(config(), out, n_samples=3, report=report.append)
        assert "the same command continues" in report[-1]
    kept = lines(out)
    assert kept == expected[: len(kept)] and kept
    with out.open("a") as file:
        file.write('{"prompt": "half a line')
    CALLS.clear()
    FAILS_AT.clear()
    found, report = pairs(config(), out)
    assert found == expected and len(CALLS) == 1
    assert "6 of 7 prompts are done" in report[0]
    assert report[1:] == [line.replace("whole.jsonl", "pairs.jsonl") for line in whole]
    CALLS.clear()
    assert pairs(config(), out) == (expected, [f"{out}: 7 of 7 prompts are done", *report[1:]]) and not CALLS


def test_a_file_of_an_earlier_version_continues_without_speedups(config, tmp_path):
    given = config().alg.policy.args
    without = {"args": {**given, "speedups": {"fast_decoding": False}}}
    started = config()
    started = replace(started, alg=replace(started.alg, policy=replace(started.alg.policy, **without)))
    expected, _ = pairs(started, tmp_path / "whole.jsonl")
    today, _ = pairs(config(), tmp_path / "today.jsonl")
    assert today != expected
    CALLS.clear()
    FAILS_AT[:] = [2]
    out = tmp_path / "pairs.jsonl"
    with pytest.raises(RewardError):
        pairs(started, out)
    FAILS_AT.clear()

    # Such a version knew no speedups, neither in the progress nor in the digest of the config, and marked nothing.
    progress = tmp_path / "pairs.jsonl.progress.json"
    digest = json.loads((tmp_path / "today.jsonl.progress.json").read_text())["digest"]
    stored = json.loads(progress.read_text()) | {"digest": digest}
    for name in ("speedups", "marks_truncated"):
        stored.pop(name)
    progress.write_text(json.dumps(stored))
    n_before = len(lines(out))
    for pair in expected[n_before:]:
        for name in ("chosen", "rejected"):
            pair.pop(f"{name}_truncated")
    assert pairs(config(), out)[0] == expected and 0 < n_before < len(expected)


def test_the_state_of_the_reward_is_kept(config, tmp_path):
    reward = {"id": f"{__name__}:Alternating"}
    expected, _ = pairs(config(reward_fn=reward), tmp_path / "whole.jsonl")
    CALLS.clear()
    FAILS_AT[:] = [4]
    with pytest.raises(RewardError):
        pairs(config(reward_fn=reward), tmp_path / "pairs.jsonl")
    FAILS_AT.clear()
    assert pairs(config(reward_fn=reward), tmp_path / "pairs.jsonl")[0] == expected
    assert min(pair["rejected_score"] for pair in expected) < 0 < max(pair["chosen_score"] for pair in expected)


def test_prompts_of_messages_are_rendered_alike_in_the_preference_run(config, blocks, tmp_path):
    chat = str(save_chat_model(tmp_path / "chat", REASONING))
    tools = [{"type": "function", "function": {"name": "f"}}]
    messages = [
        [
            {"role": "user", "content": f"{n} films?"},
            {"role": "assistant", "content": "No."},
            {"role": "user", "content": "?"},
        ]
        for n in range(4)
    ]
    rows = tmp_path / "turns.jsonl"
    rows.write_text("".join(json.dumps({"turns": each, "tools": tools}) + "\n" for each in messages))
    tokenizer = {"model_name": chat, "chat_template": True, "system_prompt": "Be brief."}
    pool = {
        "id": "jsonl",
        "args": {"data_files": dict.fromkeys(("train", "val", "test"), str(rows)), "prompt_column": "turns"},
    }
    blocks["alg"]["policy"]["args"]["model_name"] = chat
    blocks["env"]["args"]["max_prompt_length"] = 200
    own = config(tokenizer=tokenizer, datapool=pool)
    found, _ = pairs(own, tmp_path / "pairs.jsonl")
    system = {"role": "system", "content": "Be brief."}
    assert found and all(pair["prompt"] in [[system, *each] for each in messages] for pair in found)
    assert all(pair["tools"] == tools for pair in found)
    read = DATA_POOLS.get("preferences", {"split": "train", "data_files": {"train": str(tmp_path / "pairs.jsonl")}})
    pools = render_prompts(
        {"train": read, "all": build_datapool(own.datapool, "train")}, own.tokenizer, build_tokenizer(own.tokenizer)
    )
    rendered = [{sample.rendered_prompt for sample, _ in pools[name]} for name in ("train", "all")]
    assert rendered[0] <= rendered[1]


def test_a_file_of_other_pairs_is_not_changed(config, tmp_path):
    out = tmp_path / "pairs.jsonl"
    pairs(config(), out, max_prompts=2)
    before = out.read_bytes()
    for options in ({"n_samples": 4}, {"split": "val"}, {"min_difference": 0.5}, {"max_prompts": 3}):
        with raises_at("--out"):
            pairs(config(), out, **{"max_prompts": 2, **options})
    with raises_at("--out"):
        pairs(config(seed=5), out, max_prompts=2)
    (tmp_path / "own.jsonl").write_text("mine\n")
    with raises_at("--out"):
        pairs(config(), tmp_path / "own.jsonl")
    assert out.read_bytes() == before and (tmp_path / "own.jsonl").read_text() == "mine\n"


def test_errors_are_reported_before_a_model_is_loaded(config, blocks, tmp_path):
    out = tmp_path / "pairs.jsonl"
    with raises_at("--n_samples", "--min_difference"):
        pairs(config(), out, n_samples=1, min_difference=-1.0)
    greedy = copy.deepcopy(blocks["alg"])
    greedy["policy"]["args"]["generation_kwargs"] = {"do_sample": False}
    with raises_at("alg.policy.args.generation_kwargs.do_sample"):
        pairs(config(alg=greedy), out)
    with raises_at("reward_fn"):
        pairs(config(reward_fn={"id": "exact_match"}), out)
    with raises_at("reward_fn.args"):
        pairs(config(reward_fn={"id": "regex", "args": {"pattern": "("}}), out)
    steps = {"id": "step_function", "args": {"function": f"{__name__}:one_for_each"}}
    with raises_at("reward_fn.args.aggregate"):
        pairs(config(reward_fn=steps), out)
    with raises_at("reward_fn"):
        pairs(parse_config(supervised_blocks()), out)
    one_file = {"path": blocks["datapool"]["args"]["data_files"]["train"], "split_ratios": [1.0, 0.0, 0.0]}
    pool = {"id": "jsonl", "args": {**one_file, "prompt_column": "prompt"}}
    with pytest.raises(DataPoolError):
        pairs(config(datapool=pool), out, split="val")
    assert not out.exists()


def test_encoder_decoders_write_pairs_too(config, tiny_seq2seq_config, blocks, tmp_path):
    parts = {key: tiny_seq2seq_config[key] for key in ("tokenizer", "alg", "env")}
    found, _ = pairs(config(**parts), tmp_path / "pairs.jsonl", max_prompts=4)
    of_both = {f"{name}{of}" for name in ("chosen", "rejected") for of in ("", "_score", "_truncated")}
    assert found and all(set(pair) == {"prompt", *of_both} for pair in found)


def test_a_judge_compares_the_responses_to_a_prompt(config, tmp_path):
    def answer(body):
        a, b = (part.split("\n\n")[0] for part in body["messages"][0]["content"].split("[Response ")[1:])
        return f"Winner: {'A' if len(a) > len(b) else 'B'}"

    with judge_server(answer) as judge:
        args = {"url": judge.url, "model": "judge", "compare_with": "responses", "cache": str(tmp_path / "answers")}
        found, _ = pairs(config(reward_fn={"id": "llm_judge", "args": args}), tmp_path / "pairs.jsonl")
        n_requests = len(judge.bodies)
        again, _ = pairs(config(reward_fn={"id": "llm_judge", "args": args}), tmp_path / "again.jsonl")
    assert again == found and len(judge.bodies) == n_requests
    assert len(found) > 3 and all(len(pair["chosen"]) > len(pair["rejected"]) for pair in found)
    assert {pair["chosen_score"] for pair in found} <= {1.0, 0.75}


def test_the_command_writes_what_a_preference_run_reads(blocks, tmp_path, capsys, tiny_gpt2_dir):
    out, file = tmp_path / "pairs.jsonl", tmp_path / "run.yml"
    file.write_text(dump_yaml(blocks))
    command = ["pairs", str(file), "-n", "3", "--out", str(out), "--max_prompts", "6", "--set", "seed=4"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert f"pairs of 6 prompts in {out}" in printed and "mean score" in printed
    samples = DATA_POOLS.get("preferences", {"split": "train", "data_files": {"train": str(out)}}).samples
    assert [(sample.prompt_or_input_text, sample.chosen, sample.rejected) for sample in samples] == [
        (pair["prompt"], pair["chosen"], pair["rejected"]) for pair in lines(out)
    ]
    mapping = preference_blocks("dpo", tiny_gpt2_dir, str(out), max_steps=1)
    folder = run(mapping, tmp_path)
    assert lines(folder / "training_info.jsonl") and (folder / "model" / "config.json").is_file()
