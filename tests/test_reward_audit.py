"""`check --reward` prints what the audit of a config's reward finds."""

from __future__ import annotations

import json

import pytest

from rl4lms_like.cli import main
from rl4lms_like.config.yaml_file import dump_yaml
from tests.arguments.rewards_of_rules import scorer_of
from tests.chat_models import REASONING, save_chat_model
from tests.configs import run_blocks, supervised_blocks
from tests.judge_server import judge_server


def fails_for_empty_texts(*, prompts, responses, references, meta_infos):
    return [1 / len(text) for text in responses]


def wants_a_rendered_call(*, prompts, responses, references, meta_infos):
    assert all("<tool_call>" in text for texts in references for text in texts), references
    return [float(len(text)) for text in responses]


@pytest.fixture
def check(tmp_path, tiny_gpt2_dir, capsys):
    """Run `check --reward` on a reward and a small data file; return exit status, output and errors."""
    rows = tmp_path / "rows.jsonl"
    numbers = range(9)
    rows.write_text("".join(json.dumps({"text": f"{n} and 4?", "answer": str(n + 4)}) + "\n" for n in numbers))

    def run(reward, *options):
        blocks = run_blocks()
        blocks["tokenizer"]["model_name"] = str(tiny_gpt2_dir)
        blocks["alg"]["policy"]["args"]["model_name"] = str(tiny_gpt2_dir)
        blocks["datapool"] = {
            "id": "jsonl",
            "args": {"path": str(rows), "prompt_column": "text", "reference_column": "answer"},
        }
        blocks["env"]["args"]["max_prompt_length"] = 20
        blocks["reward_fn"] = reward
        file = tmp_path / "run.yml"
        file.write_text(dump_yaml(blocks))
        status = main(["check", str(file), *options])
        return status, *capsys.readouterr()

    return run


def test_findings_of_the_sum_and_its_parts_are_printed_after_the_check(check):
    parts = [{"id": "exact_match"}, {"id": "length_penalty", "name": "short", "args": {"max_length": 3}}]
    reward = {"id": "combine", "args": {"rewards": parts}}
    status, printed, _ = check(reward, "--reward")
    assert status == 0
    audit = printed[printed.index("# reward\n") :]
    assert printed.index("# data") < printed.index("# reward\n") < printed.index("\nshort: empty: ")
    (header,) = [line for line in audit.splitlines() if line.startswith("text ")]
    assert header.split() == ["text", "reward", "exact_match", "short"]
    (row,) = [line for line in audit.splitlines() if line.startswith("reference ")]
    assert row.split() == ["reference", "1", "1", "0"]
    assert "\nexact_match: " not in audit and "\nreward: " not in audit
    assert "# reward\n" not in check(reward)[1]


def test_a_reward_without_findings_is_said_to_have_none(check):
    status, printed, _ = check({"id": "exact_match"}, "--reward")
    assert status == 0 and printed.endswith("no findings\n\n")


def test_a_reward_that_fails_is_an_error_after_the_report(check):
    reward = {"id": "python", "args": {"function": f"{__name__}:fails_for_empty_texts"}}
    status, printed, error = check(reward, "--reward")
    assert status == 1 and "ZeroDivisionError" in error
    assert "\nreward: failure: " in printed and "\nempty" in printed


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_server_is_called_only_on_request_and_at_most_as_often_as_announced(wrapped, check):
    with scorer_of() as scorer:
        reward = {"id": "http", "args": {"url": scorer.url}}
        if wrapped:
            reward = {"id": "exact_match", "args": {"shaping_fn": reward}}
        status, printed, error = check(reward, "--reward")
        assert status == 2 and "--remote" in error and scorer.asked == []
        status, printed, _ = check(reward, "--reward", "--remote")
    assert status == 0
    announced = int(printed.split("at most ")[1].split()[0])
    assert 0 < len(scorer.asked) <= announced
    assert f"{announced} calls" in error


def test_a_judge_is_called_only_on_request(check):
    with judge_server() as judge:
        reward = {"id": "llm_judge", "args": {"url": judge.url, "model": "judge"}}
        status, _, error = check(reward, "--reward")
        assert status == 2 and "--remote" in error and judge.bodies == []
        status, _, _ = check(reward, "--reward", "--remote")
        assert status == 0 and judge.bodies


def test_remote_without_reward_is_refused(check):
    status, _, error = check({"id": "exact_match"}, "--remote")
    assert status == 2 and "--remote" in error


def test_a_supervised_run_has_no_reward(tmp_path, capsys, tiny_t5_dir):
    blocks = supervised_blocks()
    blocks["tokenizer"]["model_name"] = blocks["alg"]["model_name"] = str(tiny_t5_dir)
    blocks["datapool"] = {"id": "film_opinions", "args": {"n_train": 20, "n_eval": 2}}
    file = tmp_path / "run.yml"
    file.write_text(dump_yaml(blocks))
    assert main(["check", str(file)]) == 0
    assert main(["check", str(file), "--reward"]) == 2
    assert "no reward" in capsys.readouterr().err


def test_a_reference_that_is_a_whole_message_is_what_the_template_writes(tmp_path, capsys):
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    turns = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    rows = tmp_path / "rows.jsonl"
    rows.write_text((json.dumps({"turns": turns}) + "\n") * 9)
    blocks = run_blocks()
    folder = str(save_chat_model(tmp_path / "chat", REASONING))
    blocks["tokenizer"] = {"model_name": folder, "chat_template": True}
    blocks["alg"]["policy"]["args"]["model_name"] = folder
    args = {"prompt_column": "turns", "last_message_as_reference": True}
    blocks["datapool"] = {"id": "jsonl", "args": {"path": str(rows), **args}}
    blocks["reward_fn"] = {"id": "python", "args": {"function": f"{__name__}:wants_a_rendered_call"}}
    file = tmp_path / "run.yml"
    file.write_text(dump_yaml(blocks))
    status = main(["check", str(file), "--reward"])
    assert status == 0, capsys.readouterr().err
