"""Runs without a file: the options of the command line are arguments of `Run`."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys

import pytest

from rl4lms_like import Run
from rl4lms_like.cli import main
from rl4lms_like.config.load import load_config
from rl4lms_like.system.import_paths import CODE_VARIABLE
from rl4lms_like.tracking.run_folder import CONFIG_FILE

REWARDS = """
def brevity(responses):
    return [-len(response) / 10 for response in responses]

def letters(responses, topic):
    return [float(response.count(name[0])) for response, name in zip(responses, topic)]
"""
STOPPED = """
calls = []

def brevity(responses):
    calls.append(len(responses))
    if len(calls) == 2:
        raise KeyboardInterrupt
    return [-len(response) / 10 for response in responses]
"""
"""The same reward in a session that is interrupted in the second iteration."""

PROMPTS = [{"prompt": f"Count with me: {number}", "topic": "numbers"} for number in range(6)]
PAIRS = [{"prompt": f"{n} is", "chosen": " a number", "rejected": " cold"} for n in range(8)]
TEXTS = [{"prompt": f"{n} is", "completion": " a number of mine"} for n in range(8)]
RL_SETTINGS = {"n_iters": 2, "n_episodes": 16, "max_new_tokens": 6, "learning_rate": 1e-3, "metrics": ["length"]}
OFFLINE_SETTINGS = {"max_steps": 4, "per_device_train_batch_size": 4, "learning_rate": 1e-3, "max_new_tokens": 6}


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with data and rewards, which is the current one."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "short_rewards.py").write_text(REWARDS)
    for name, rows in {"prompts": PROMPTS, "pairs": PAIRS, "texts": TEXTS}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "prompts.csv").write_text("prompt,topic\n" + "".join(f"{n},numbers\n" for n in range(6)))
    (folder / "prompts.txt").write_text("1\n2\n")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv(CODE_VARIABLE, "")
    for module in ("short_rewards", "taken_rewards"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return folder


def sets(settings):
    """The options that set settings."""
    return [part for name, value in settings.items() for part in ("--set", f"{name}={json.dumps(value)}")]


CASES = {
    "grpo": (["--data", "prompts.jsonl", "--reward_fn", "short_rewards.py:brevity"], RL_SETTINGS, PROMPTS),
    "dpo": (["--alg", "dpo", "--data", "pairs.jsonl"], OFFLINE_SETTINGS, PAIRS),
    "sft": (["--alg", "sft", "--data", "texts.jsonl"], OFFLINE_SETTINGS, TEXTS),
}


@pytest.mark.parametrize("algorithm", CASES)
def test_a_short_run_has_the_config_and_the_weights_of_run(algorithm, project, tiny_gpt2_dir):
    options, settings, rows = CASES[algorithm]
    model = str(tiny_gpt2_dir)
    assert main(["train", "--model", model, *options, *sets(settings), "--experiment_name", algorithm]) == 0
    folder = project / "rl4lm_exps" / algorithm

    arguments = {"prompts": rows, "reward": f"{project}/short_rewards.py:brevity"}
    if algorithm != "grpo":
        arguments = {"data": rows}
    in_python = Run(model, algorithm=algorithm, folder=project / "python" / algorithm, **arguments, **settings)
    in_python.train(quiet=True)
    weights = [path / "model" / "model.safetensors" for path in (folder, in_python.folder)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert weights[0].read_bytes() != (tiny_gpt2_dir / "model.safetensors").read_bytes()

    # The rows of Python are in the cache; that is all that differs.
    configs = [json.loads((path / CONFIG_FILE).read_text()) for path in (folder, in_python.folder)]
    files = [config["datapool"]["args"].pop("data_files") for config in configs]
    assert configs[0] == configs[1]
    assert files[0]["train"] == str(project / options[options.index("--data") + 1])


def test_what_is_printed_is_a_file_of_the_same_config_and_nothing_is_written(project, tiny_gpt2_dir, capsys):
    command = ["--model", str(tiny_gpt2_dir), "--data", "prompts.csv", "--eval_data", "prompts.csv"]
    command += [
        "--reward_fn",
        "short_rewards.py:letters",
        "--reward_fn",
        "{id: length_penalty, args: {max_length: 3}}",
    ]
    command += ["--set", "reward_weights=[1, 0.5]", "--set", "env.n_envs=8", "--set", "tokenizer.padding_side=left"]
    for name in ("train", "check"):
        assert main([name, *command, "--print-config"]) == 0
        printed = capsys.readouterr().out
        assert printed.splitlines()[1] == f"#   rl4lms-like train run.yml --code {shlex.quote(str(project))}"
    assert not (project / "rl4lm_exps").exists()

    (project / "run.yml").write_text(printed)
    rewards = [f"{project}/short_rewards.py:letters", {"id": "length_penalty", "args": {"max_length": 3}}]
    tokenizer = {"padding_side": "left"}
    file = str(project / "prompts.csv")
    in_python = Run(
        str(tiny_gpt2_dir), file, rewards, eval_prompts=file, reward_weights=[1, 0.5], n_envs=8, tokenizer=tokenizer
    )
    assert load_config("run.yml").to_dict() == in_python.config.to_dict()
    assert in_python.config.datapool.id == "csv"


def test_other_options_of_the_command_are_printed_too(project, tiny_gpt2_dir, capsys):
    command = ["train", "--model", str(tiny_gpt2_dir), "--data", "pairs.jsonl", "--alg", "dpo", "--print-config"]
    assert main([*command, "--experiment_name", "my run", "--new", "--set", "beta=0.2"]) == 0
    printed = capsys.readouterr().out
    assert "train run.yml --experiment_name 'my run' --new\n" in printed and "beta: 0.2\n" in printed


def test_check_summarises_a_short_run(project, tiny_gpt2_dir, capsys):
    options = ["--data", "prompts.jsonl", "--reward_fn", "short_rewards.py:brevity", "--set", "n_episodes=16"]
    assert main(["check", "--model", str(tiny_gpt2_dir), *options]) == 0
    assert "# batches" in capsys.readouterr().out


@pytest.mark.parametrize("is_elsewhere", [False, True], ids=["by the same command", "from another folder"])
def test_an_interrupted_run_continues(is_elsewhere, project, tiny_gpt2_dir, tmp_path):
    train = ["train", "--model", str(tiny_gpt2_dir), *RL, *sets(RL_SETTINGS | {"metrics": []})]
    assert main([*train, "--experiment_name", "whole"]) == 0

    program = [sys.executable, "-m", "rl4lms_like"]
    command = [*program, *train, "--experiment_name", "stopped"]
    (project / "short_rewards.py").write_text(STOPPED)
    assert subprocess.run(command, capture_output=True).returncode == 130
    (project / "short_rewards.py").write_text(REWARDS)

    # The folder of the reward is code, which a run folder may not choose: the error says how it is named.
    place = {"cwd": project, "env": os.environ | {CODE_VARIABLE: ""}}
    if is_elsewhere:
        place["cwd"] = tmp_path
        command = [*program, "train", "--resume", str(project / "rl4lm_exps" / "stopped")]
        done = subprocess.run(command, capture_output=True, text=True, **place)
        assert done.returncode == 2 and f"--code {project}" in done.stderr
        command += ["--code", str(project)]

    done = subprocess.run(command, capture_output=True, text=True, **place)
    assert done.returncode == 0, done.stderr
    folders = [project / "rl4lm_exps" / name for name in ("whole", "stopped")]
    weights = [folder / "model" / "model.safetensors" for folder in folders]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert sorted(path.name for path in (project / "rl4lm_exps").iterdir()) == ["stopped", "whole"]


def test_other_commands_use_the_run(project, tiny_gpt2_dir, capsys):
    options = ["--data", "prompts.jsonl", "--eval_data", "prompts.jsonl", "--reward_fn", "short_rewards.py:brevity"]
    options += sets(RL_SETTINGS | {"n_iters": 1})
    assert main(["train", "--model", str(tiny_gpt2_dir), *options, "--experiment_name", "first"]) == 0
    capsys.readouterr()
    assert main(["evaluate", "rl4lm_exps/first", "--split", "val"]) == 0
    assert main(["generate", "rl4lm_exps/first", "1", "--max_new_tokens", "3"]) == 0
    assert "1 | " in capsys.readouterr().out


RL = ["--data", "prompts.jsonl", "--reward_fn", "short_rewards.py:brevity"]
# Options besides the model -> errors: what each names, and what it mentions.
MISTAKES = {
    "no data": (["--reward_fn", "short_rewards.py:brevity"], {"--data": "missing; expected a file"}),
    "no reward": (["--data", "prompts.jsonl"], {"--reward_fn": "missing; expected FILE.py:NAME"}),
    "no file of data": (["--data", "promts.jsonl", *RL[2:]], {"--data": "there is no file 'promts.jsonl'"}),
    "plain text": (["--data", "prompts.txt", *RL[2:]], {"--data": "the lines of a text file"}),
    "no file of rewards": ([*RL[:2], "--reward_fn", "rewards.py:score"], {"--reward_fn": "no file 'rewards.py'"}),
    "no function": ([*RL[:2], "--reward_fn", "short_rewards.py:brevty"], {"--reward_fn": "'brevty'"}),
    "misspelled reward": ([*RL[:2], "--reward_fn", "sentimnt"], {"--reward_fn": "'sentiment'"}),
    "argument of a reward": (
        [*RL[:2], "--reward_fn", "{id: increasing_numbers, args: {min_token: 2}}"],
        {"--reward_fn args.min_token": "min_tokens", "--reward_fn args.min_tokens": "missing"},
    ),
    "misspelled algorithm": ([*RL, "--alg", "gropo"], {"--alg": "did you mean 'grpo'?"}),
    "misspelled setting": ([*RL, "--set", "learnig_rate=1"], {"learnig_rate": "did you mean 'learning_rate'?"}),
    "misspelled key": ([*RL, "--set", "alg.args.learnig_rate=1"], {"alg.args.learnig_rate": "'learning_rate'"}),
    "wrong value": ([*RL, "--set", "alg.args.learning_rate=fast"], {"alg.args.learning_rate": "above 0"}),
    "no value": ([*RL, "--set", "seed"], {"--set": "PATH=VALUE"}),
    "model twice": ([*RL, "--set", "alg.policy.args.model_name=x"], {"--set alg.policy.args.model_name": "--model"}),
    "argument besides a reward": (
        [*RL, "--set", "reward_fn.args.size=2"],
        {"--set reward_fn.args.size": "is set by --reward_fn '{id: ..., args: {...}}'"},
    ),
    "reward for dpo": (["--alg", "dpo", "--data", "pairs.jsonl", *RL[2:]], {"--reward_fn": "dpo learns from texts"}),
    "prompts for dpo": (["--alg", "dpo", "--data", "prompts.jsonl"], {"--data": "'chosen'"}),
    "two formats": ([*RL, "--eval_data", "prompts.csv"], {"--data": "one format"}),
    "all at once": (
        ["--alg", "ppo", "--data", "promts.jsonl", "--set", "n_iters=0.5"],
        {"--data": "no file", "--reward_fn": "missing", "n_iters": "whole number"},
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_message_before_a_model_is_loaded(mistake, project, tiny_gpt2_dir, capsys):
    options, expected = MISTAKES[mistake]
    assert main(["train", "--model", str(tiny_gpt2_dir), *options]) == 2
    first, *lines = capsys.readouterr().err.splitlines()
    assert first.endswith("in the command line:") and len(lines) == len(expected)
    for line, (name, mentioned) in zip(sorted(lines), sorted(expected.items()), strict=True):
        assert line.startswith(f"  {name}: ") and mentioned in line
    assert not (project / "rl4lm_exps").exists()


def test_a_model_that_is_not_there_is_named(project, capsys):
    assert main(["check", "--model", "./nowhere", *RL]) == 2
    assert "--model: " in capsys.readouterr().err


def test_the_named_file_is_loaded_and_no_other_module_of_its_name(
    project, tiny_gpt2_dir, tmp_path, monkeypatch, capsys
):
    """Another module of that name is on Python's path, before or after it was imported."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "taken_rewards.py").write_text("raise SystemExit('not this one')")
    (project / "taken_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(other)
    command = ["check", "--model", str(tiny_gpt2_dir), *RL[:2], "--reward_fn", "taken_rewards.py:brevity"]
    assert main(command) == 2
    message = capsys.readouterr().err
    assert "finds another module" in message and "rename 'taken_rewards.py'" in message

    command[-1] = "json.py:brevity"
    (project / "json.py").write_text(REWARDS)
    assert main(command) == 2
    message = capsys.readouterr().err
    assert "another module 'json' is imported already" in message and "rename 'json.py'" in message


@pytest.mark.parametrize("option", [["--alg", "dpo"], ["--data", "x"], ["--reward_fn", "x"], ["--print-config"]])
@pytest.mark.parametrize("command", [["train", "run.yml"], ["train", "--resume", "x"], ["check", "run.yml"]])
def test_options_of_short_runs_are_refused_with_a_file(command, option, capsys):
    assert main([*command, *option]) == 2
    assert f"{option[0]}: it is for a run without a file, with --model" in capsys.readouterr().err


def test_a_file_and_a_model_exclude_each_other(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--config_path", "run.yml", "--model", "gpt2"])
    assert "--model: not allowed with argument --config_path" in capsys.readouterr().err
