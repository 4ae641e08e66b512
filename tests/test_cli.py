"""The command line, in this process where that is enough, in one of its own where start-up counts."""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest

from rl4lms_like.cli import main
from rl4lms_like.cli.commands import build_parser
from rl4lms_like.cli.list_components import KINDS
from rl4lms_like.config.binding import REGISTRIES
from rl4lms_like.config.yaml_file import dump_yaml, parse_yaml
from rl4lms_like.system.errors import RewardError
from tests.conftest import REPOSITORY

RUN = {
    "tokenizer": {"model_name": "no-such-owner/gpt2"},
    "reward_fn": {"id": "increasing_numbers", "args": {"min_tokens": 20}},
    "datapool": {"id": "dummy_pool", "args": {"prompt": "x"}},
    "env": {"n_envs": 10, "args": {"max_episode_length": 20, "terminate_on_eos": True}},
    "alg": {
        "id": "ppo",
        "args": {"n_steps": 128, "batch_size": 64},
        "kl_div": {"coeff": 0.02, "target_kl": 2},
        "policy": {
            "id": "causal_lm_actor_critic_policy",
            "args": {
                "model_name": "no-such-owner/gpt2",
                "generation_kwargs": {"do_sample": True, "max_new_tokens": 20},
            },
        },
    },
    "train_evaluation": {"eval_batch_size": 100, "n_iters": 100, "eval_every": 10},
}
BROKEN = """
tokenizer: {model_name: gpt2, padding_sde: left}
reward_fn: {id: increasing_numbers}
datapool: {id: dummy_pool, args: {prompt: x}}
env: {n_envs: 0}
alg:
  id: ppo
  args: {clip_range: wide}
  kl_div: {coeff: 0.1}
  policy: {id: causal_lm_actor_critic_policy, args: {model_name: gpt2}}
train_evaluation: {eval_batch_size: 1, eval_every: 1}
"""
MISTAKES = """  tokenizer.padding_sde: unknown key; did you mean 'padding_side'?
  reward_fn.args.min_tokens: missing; expected a whole number
  env.n_envs: expected a whole number from 1 to 65536, got 0
  alg.args.clip_range: expected a number above 0, got 'wide'
  train_evaluation.n_iters: missing; expected a whole number of at least 0
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "run.yml"
    path.write_text(dump_yaml(RUN))
    return str(path)


@pytest.fixture
def broken(tmp_path):
    path = tmp_path / "broken.yml"
    path.write_text(BROKEN)
    return str(path)


@pytest.fixture
def calls(monkeypatch):
    """What the commands that need a model were asked for."""
    made = []

    def recorder(name, result):
        def record(*args, **kwargs):
            made.append((name, args, kwargs))
            if isinstance(result, BaseException):
                raise result
            return result

        return record

    def replace(module, **results):
        fake = ModuleType(module)
        for name, result in results.items():
            setattr(fake, name, recorder(name, result))
        monkeypatch.setitem(sys.modules, module, fake)
        return made

    return replace


def in_a_process(*arguments, **kwargs):
    return subprocess.run(
        [sys.executable, "-m", "rl4lms_like", *arguments], capture_output=True, text=True, timeout=120, **kwargs
    )


# --- start-up ---------------------------------------------------------------------------------------------------------


def timed(*arguments):
    """A run of the command line, and the CPU seconds it took: a busy machine changes those little."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = in_a_process(*arguments)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize("command", ["check", "train"])
def test_five_mistakes_are_told_at_once_with_status_2_within_two_seconds(command, broken):
    done, seconds = timed(command, broken)
    assert done.returncode == 2
    assert done.stderr == f"5 errors in {broken}:\n{MISTAKES}"
    assert done.stdout == ""
    assert seconds < 2


def test_a_list_is_there_within_a_second():
    done, seconds = timed("list", "rewards")
    assert done.returncode == 0
    assert "increasing_numbers" in done.stdout
    assert seconds < 1


@pytest.mark.parametrize(
    "code",
    [
        "import rl4lms_like, rl4lms_like.cli, rl4lms_like.config.run_config",
        "from rl4lms_like.cli import main; main(['list', 'algorithms']); main(['show', 'ppo'])",
        "from rl4lms_like.cli.commands import build_parser; build_parser().parse_args(['check', 'x.yml'])",
    ],
)
def test_light_commands_load_nothing_heavy(code):
    heavy = ("torch", "transformers", "pandas", "datasets", "stable_baselines3", "wandb")
    code += f"\nimport sys; print('heavy:', [name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "heavy: []", done.stdout + done.stderr


# --- check ------------------------------------------------------------------------------------------------------------


def test_check_shows_what_a_config_amounts_to(config, capsys, tmp_path):
    assert main(["check", config, "--set", "env.n_envs=5", "--full"]) == 0
    printed = capsys.readouterr().out
    assert printed.index("# notices") < printed.index("# data") < printed.index("# resolved config")
    assert "generation_kwargs.top_k: transformers' default of 50 applies" in printed
    assert "tokens per rollout     at least 640" in printed
    assert "no estimate: 'no-such-owner/gpt2' is neither a folder" in printed
    resolved, _ = parse_yaml(printed.split("# resolved config")[1], "printed")
    assert resolved["env"]["n_envs"] == 5
    assert resolved["alg"]["args"]["gae_lambda"] == 0.95
    again = tmp_path / "resolved.yml"
    again.write_text(dump_yaml(resolved))
    assert main(["check", str(again)]) == 0


def test_check_prints_the_whole_config_only_where_it_is_asked_for(config, capsys):
    assert main(["check", config]) == 0
    printed = capsys.readouterr().out
    assert "# data" in printed and "# resolved config" not in printed and "gae_lambda" not in printed


@pytest.mark.parametrize("command", ["check", "train"])
def test_a_data_file_or_column_that_is_not_there_is_told_with_the_other_issues(command, config, tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"question": "Why?"}\n')
    for path, args, message in (
        ("datapool.args.path", {"path": "no.jsonl", "prompt_column": "question"}, "there is no file 'no.jsonl'"),
        ("datapool.args", {"path": str(file), "prompt_column": "qestion"}, "did you mean 'question'"),
        ("datapool.args.data_files.val", {"data_files": {"train": str(file), "val": "no.jsonl", "test": str(file)},
                                          "prompt_column": "question"}, "there is no file 'no.jsonl'"),
    ):  # fmt: skip
        pool = json.dumps({"id": "jsonl", "args": args})
        assert main([command, config, "--set", f"datapool={pool}", "--set", "env.n_envs=0"]) == 2
        written = capsys.readouterr()
        assert written.out == "" and written.err.startswith("2 errors in")
        assert f"  {path}: " in written.err and message in written.err and "  env.n_envs: " in written.err


def test_a_data_file_may_be_named_by_a_variable(config, tmp_path, monkeypatch, capsys):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"question": "Why?"}\n' * 9)
    monkeypatch.setenv("ROWS", str(file))
    pool = json.dumps({"id": "jsonl", "args": {"path": "${ROWS}", "prompt_column": "question"}})
    assert main(["check", config, "--set", f"datapool={pool}"]) == 0
    assert "Why?" in capsys.readouterr().out


def test_check_estimates_memory_for_a_model_at_hand(config, capsys, tiny_gpt2_dir):
    assert main(["check", "--config_path", config, "--set", f"alg.policy.args.model_name={tiny_gpt2_dir}"]) == 0
    printed = capsys.readouterr().out
    for part in ("policy weights", "critic weights", "optimizer state", "activations", "KV cache", "fits: "):
        assert part in printed


def test_a_config_is_needed_once(config):
    for arguments in (["check"], ["check", config, "--config_path", config]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2


# --- the commands that need a model ---------------------------------------------------------------------------------


def test_train_takes_the_flags_of_rl4lms(calls):
    made = calls("rl4lms_like.python_api.python_run", train=None)
    assert main(["train", "--config_path", "c.yml", "--experiment_name", "e", "--log_to_wandb", "--set", "seed=3"]) == 0
    assert main(["train", "c.yml"]) == 0
    expected = {
        "project_name": "rl4lm_exps",
        "experiment_name": "e",
        "entity_name": None,
        "base_path_to_store_results": ".",
        "log_to_wandb": True,
        "log_to_trackio": False,
        "overrides": ["seed=3"],
        "replay": None,
        "new": False,
    }
    plain = expected | {"experiment_name": "rl4lm_experiment", "log_to_wandb": False, "overrides": []}
    assert made == [("train", ("c.yml",), expected), ("train", ("c.yml",), plain)]


def test_evaluate_hands_on_how_to_decode(calls):
    made = calls("rl4lms_like.inference", evaluate_run={})
    assert main(["evaluate", "runs/x", "--split", "val", "--decoding", "beam", "--num_beams", "3", "--limit", "9"]) == 0
    (_, args, kwargs) = made[0]
    assert args == ("runs/x",)
    assert {name: kwargs[name] for name in ("split", "decoding", "num_beams", "limit", "seed")} == {
        "split": "val",
        "decoding": "beam",
        "num_beams": 3,
        "limit": 9,
        "seed": 0,
    }


def test_a_folder_that_may_not_be_read_is_told_with_the_way_out(capsys, tmp_path, monkeypatch):
    def refused(self, **named):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "is_file", refused)
    assert main(["report", str(tmp_path)]) == 1
    message = capsys.readouterr().err
    assert str(tmp_path) in message and "permissions" in message and "PermissionError" not in message


@pytest.mark.parametrize("command", [["generate", "rl4lm_exps/nowhere", "x"], ["evaluate", "rl4lm_exps/nowhere"]])
def test_a_folder_that_is_not_there_is_not_looked_for_on_the_hub(command, capsys, tmp_path, monkeypatch):
    (tmp_path / "rl4lm_exps").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("socket.socket.connect", lambda *arguments: pytest.fail("the network was asked"))
    monkeypatch.setattr("socket.getaddrinfo", lambda *arguments, **named: pytest.fail("the network was asked"))
    assert main(command) == 1
    assert "there is no folder 'rl4lm_exps/nowhere'" in capsys.readouterr().err


def test_generate_takes_prompts_from_arguments_a_file_or_standard_input(calls, capsys, tmp_path, monkeypatch):
    made = calls("rl4lms_like.inference", generate_texts=[["ä1", "ä2"]])
    (tmp_path / "prompts.txt").write_text("from a file\n\n")
    assert main(["generate", "m", "a prompt", "--n", "2", "--top_k", "0"]) == 0
    assert capsys.readouterr().out == "a prompt | ä1\na prompt | ä2\n"
    assert main(["generate", "m", "--file", str(tmp_path / "prompts.txt"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"prompt": "from a file", "texts": ["ä1", "ä2"]}
    monkeypatch.setattr("sys.stdin", open(tmp_path / "prompts.txt"))  # noqa: SIM115
    assert main(["generate", "m"]) == 0
    assert [args[1] for _, args, _ in made] == [["a prompt"], ["from a file"], ["from a file"]]
    assert made[0][2]["top_k"] == 0
    assert main(["generate", "m", "--file", str(tmp_path / "none.txt")]) == 1
    assert "cannot read the prompts in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "given", "message"),
    [
        ("", "<&-", "standard input is closed"),
        ("", "< {place}", "the prompts in standard input are not text in"),
        ("--file {place}", "", "are not text in UTF-8"),
        ('"$(cat {place})"', "", "the prompts in the command line are not text in"),
    ],
)
def test_prompts_that_cannot_be_read_are_named(arguments, given, message, tmp_path):
    (tmp_path / "prompts.txt").write_bytes(b"caf\xe9\n")
    line = f"{shlex.quote(sys.executable)} -m rl4lms_like generate m {arguments} {given}"
    line = line.replace("{place}", shlex.quote(str(tmp_path / "prompts.txt")))
    environment = {**os.environ, "PYTHONUTF8": "1"}
    done = subprocess.run(line, shell=True, capture_output=True, text=True, cwd=REPOSITORY, env=environment, timeout=60)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_letters_that_the_output_lacks_are_escaped(encoding):
    program = r"""
import sys, types
from rl4lms_like import cli
inference = sys.modules["rl4lms_like.inference"] = types.ModuleType("inference")  # without torch
inference.generate_texts = lambda *args, **kwargs: [["\xe9 \u65e5 \U0001f600"]]
cli.sys.argv = ["rl4lms-like", "generate", "m", "p", "--json"]
assert cli.main() == 0
cli.sys.argv = ["rl4lms-like", "generate", "m", "p"]
inference.generate_texts = lambda *args, **kwargs: [["\u65e5\ud83d"]]
assert cli.main() == 0
"""
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, cwd=REPOSITORY, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    first, second = done.stdout.decode(encoding).splitlines()
    assert json.loads(first)["texts"] == ["é 日 \U0001f600"]
    assert second == ("p | 日" if encoding == "utf-8" else r"p | \u65e5") + r"\ud83d"


def test_quickstart_has_options_of_its_own(calls):
    made = calls("rl4lms_like.quickstart", main=0)
    assert main(["quickstart", "--seed", "3", "--help"]) == 0
    assert made == [("main", (["--seed", "3", "--help"],), {})]


def test_report_prints_where_it_is(calls, capsys, tmp_path):
    calls("rl4lms_like.tracking.report", write_report=tmp_path / "report.html")
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'report.html'}\n"


# --- what goes wrong ------------------------------------------------------------------------------------------------


def test_an_error_of_the_library_is_a_message_and_status_1(calls, capsys):
    calls("rl4lms_like.python_api.python_run", train=RewardError("Short failed on a batch of 3"))
    assert main(["train", "c.yml"]) == 1
    assert capsys.readouterr().err == "Short failed on a batch of 3\n"
    assert main(["train", "c.yml", "--traceback"]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback") and shown.endswith("RewardError: Short failed on a batch of 3\n")


def test_an_error_of_ours_is_shown_in_full(monkeypatch):
    monkeypatch.setattr("rl4lms_like.cli.use_code_from", None)
    with pytest.raises(TypeError):
        main(["train", "c.yml"])


def test_an_error_of_a_library_is_named_without_its_way_through_the_code(calls, capsys):
    calls("rl4lms_like.python_api.python_run", train=ZeroDivisionError("of a library"))
    assert main(["train", "c.yml"]) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first == "ZeroDivisionError: of a library" and "--traceback" in second and "log.txt" in second
    assert main(["train", "c.yml", "--traceback"]) == 1
    assert capsys.readouterr().err.startswith("Traceback")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(28, "No space left on device", "x"), "No space left on device: 'x'. Free some space there"),
        (BrokenPipeError(32, "Broken pipe"), "BrokenPipeError: [Errno 32] Broken pipe"),
    ],
    ids=["full disk", "pipe of another process"],
)
def test_what_the_system_refuses_is_no_success(error, message, calls, capsys):
    calls("rl4lms_like.python_api.python_run", train=error)
    assert main(["train", "c.yml"]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("command", [["list", "rewards"], ["list", "samplers"]], ids=" ".join)
def test_output_that_cannot_be_written_is_one_error_without_a_log_that_does_not_exist(command):
    with open("/dev/full", "w") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "rl4lms_like", *command],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            check=False,
        )
    assert ran.returncode == 1
    (line,) = ran.stderr.splitlines()
    assert line.startswith("cannot write to standard output: ") and "No space left" in line


def test_an_interruption_is_status_130(calls, capsys):
    calls("rl4lms_like.python_api.python_run", train=KeyboardInterrupt())
    assert main(["train", "c.yml"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize(
    ("error", "status"),
    [("KeyboardInterrupt()", 130), ("RL4LMsLikeError('the reward failed')", 1), ("OSError(5, 'of the system')", 1)],
    ids=["interrupted", "an error of ours", "an error of the system"],
)
def test_the_status_counts_where_nobody_reads_the_output_too(error, status):
    """As after `train ... 2>&1 | tee log.txt`, where Ctrl-C ends both."""
    code = (
        "import sys; from rl4lms_like import cli; from rl4lms_like.system.errors import RL4LMsLikeError\n"
        f"def failing(options): raise {error}\n"
        "print('begun', flush=True); sys.stdin.read()\n"
        "cli.COMMANDS['list'].run = failing; sys.exit(cli.main(['list', 'rewards']))"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen([sys.executable, "-u", "-c", code], **pipes) as process:
        assert process.stdout.readline() == b"begun\n"
        process.stdout.close()
        process.stdin.close()
        assert process.wait(60) == status


@pytest.mark.parametrize(("is_ignored", "status"), [(False, 130), (True, 0)], ids=["", "nohup"])
def test_a_hangup_interrupts_a_command_unless_it_is_ignored(is_ignored, status):
    """Sent twice: by the shell and by the system."""
    code = (
        "import os, signal, sys, time; from rl4lms_like import cli\n"
        "def hung_up(options):\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGHUP); time.sleep(0.1)\n"
        "    except KeyboardInterrupt:\n"
        "        os.kill(os.getpid(), signal.SIGHUP); time.sleep(0.1); print('saved', flush=True); raise\n"
        "cli.COMMANDS['list'].run = hung_up; sys.argv = ['rl4lms-like', 'list', 'rewards']; sys.exit(cli.main())"
    )
    disposition = signal.SIG_IGN if is_ignored else signal.SIG_DFL
    code = f"import signal; signal.signal(signal.SIGHUP, signal.{disposition.name})\n{code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    output = ("", "") if is_ignored else ("saved\n", "interrupted\n")
    assert (done.returncode, done.stdout, done.stderr) == (status, *output)


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_a_second_signal_ends_a_program_that_does_not_come_to_its_end(second):
    """A thread of somebody's keeps it, for instance; nothing is left to save."""
    code = (
        "import sys, threading, time; from rl4lms_like import cli\n"
        "def stopped(options): raise KeyboardInterrupt\n"
        "threading.Thread(target=time.sleep, args=(300,)).start()\n"
        "cli.COMMANDS['list'].run = stopped; sys.argv = ['rl4lms-like', 'list', 'rewards']; sys.exit(cli.main())"
    )
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE) as process:
        assert process.stderr.readline() == b"interrupted\n"
        process.send_signal(second)
        assert process.wait(60) == 130


def test_a_missing_file_is_status_2(capsys):
    assert main(["check", "none.yml"]) == 2
    assert capsys.readouterr().err == "1 error in none.yml:\n  there is no such file\n"


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("imdb_text_continuation/gpt2_ppo.yml", "in this repository it is task_configs/imdb_text_continuation/gpt2"),
        ("synthetic_generate_dates/gpt2_trpo.yml", "the configs of this repository are in task_configs/"),
    ],
)
def test_a_path_of_rl4lms_names_ours(name, place, capsys, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    assert main(["check", f"scripts/training/task_configs/{name}"]) == 2
    assert f"there is no such file; {place}" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["trian"], [], ["check", "x.yml", "--sett", "a=1"], ["list", "reward"]])
def test_a_wrong_command_line_is_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: rl4lms-like" in capsys.readouterr().err


@pytest.mark.parametrize("buffered", [True, False])
def test_a_reader_that_leaves_early_is_no_error(buffered):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, *([] if buffered else ["-u"]), "-m", "rl4lms_like", "list", "rewards"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    try:
        done = subprocess.run(
            command, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY, env=environment, timeout=60
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("closed", "status"), [(">&-", 0), ("2>&-", 0), (">&- 2>&-", 0), ("2>&-; exit $?", 2)])
def test_without_standard_output_a_command_ends_as_with_one(closed, status):
    asked = "list rewards" if status == 0 else "list nothing"
    line = f"{shlex.quote(sys.executable)} -m rl4lms_like {asked} {closed}"
    done = subprocess.run(line, shell=True, capture_output=True, text=True, cwd=REPOSITORY, timeout=60)
    assert (done.returncode, done.stderr) == (status, "")


# --- list and show ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_list_has_one_line_an_id(kind, capsys):
    assert main(["list", kind]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == REGISTRIES[kind].ids()
    assert all(len(line.split()) > 2 for line in lines)


def test_all_kinds_can_be_listed():
    assert set(KINDS) == REGISTRIES.keys()


def test_show_has_types_defaults_and_help(capsys):
    assert main(["show", "ppo"]) == 0
    printed = capsys.readouterr().out
    assert "ppo (algorithm)" in printed
    assert re.search(r"clip_range: a number above 0 \(default 0\.2\)\n        \w", printed)


def test_show_finds_an_id_in_every_registry_and_hides_what_is_filled_in(capsys):
    assert main(["show", "increasing_numbers"]) == 0
    printed = capsys.readouterr().out
    assert "increasing_numbers (reward)" in printed
    assert "increasing_numbers (metric)" in printed
    assert main(["show", "dummy_pool"]) == 0
    printed = capsys.readouterr().out
    assert "prompt: text (required)" in printed
    assert "split" not in printed.split("arguments:")[1]


def test_show_takes_an_import_path_of_a_folder_that_is_named(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from rl4lms_like import RewardFunction\n\n\n"
        'class Short(RewardFunction):\n    """Short answers.\n\n    Args:\n        limit: in words.\n    """\n\n'
        "    def __init__(self, limit: int = 20): ...\n"
    )
    for place in ([], ["--code", "."]):
        command = [sys.executable, "-m", "rl4lms_like", "show", "mine:Short", *place]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
        if place:
            assert "limit: a whole number (default 20)\n        in words." in done.stdout, done.stderr
        else:
            assert done.returncode == 2
            assert "the module 'mine' is in the current folder" in done.stderr and "--code ." in done.stderr


def test_show_suggests(capsys):
    assert main(["show", "pp0"]) == 2
    assert "did you mean 'ppo'?" in capsys.readouterr().err


@pytest.mark.parametrize("id", sorted({id for registry in REGISTRIES.values() for id in registry}))
def test_every_id_can_be_shown_and_every_argument_has_help(id, capsys):
    assert main(["show", id]) == 0
    lines = capsys.readouterr().out.splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if line.startswith("    ") and line[4] != " " and ": " in line:
            assert following.startswith(" " * 8), f"{id}: no help for {line.strip()}"


def test_every_command_has_help():
    parser = build_parser()
    for command in ("train", "check", "evaluate", "generate", "list", "show", "report", "benchmark", "compare"):
        with pytest.raises(SystemExit) as caught:
            parser.parse_args([command, "--help"])
        assert caught.value.code == 0
    for status in ("0 success", "1 a run failed", "2 errors", "130 interrupted"):
        assert status in " ".join(parser.format_help().split())


# --- benchmarks -------------------------------------------------------------------------------------------------------


def test_benchmark_passes_its_options_on(calls):
    made = calls("rl4lms_like.benchmarking.runner", benchmark=130)
    options = ["--processes", "3", "--seeds", "0,4", "--only", "a", "--only", "b", "--results", "x", "--report-only"]
    options += ["--ray", "auto"]
    assert main(["benchmark", "spec.yml", *options]) == 130
    expected = {"processes": 3, "seeds": [0, 4], "only": ["a", "b"], "results": Path("x"), "report_only": True}
    expected["ray"] = "auto"
    assert made == [("benchmark", (Path("spec.yml"),), expected)]


def test_benchmark_tells_mistakes_of_spec_and_configs_with_status_2(tmp_path, config, capsys):
    spec = tmp_path / "spec.yml"
    spec.write_text(dump_yaml({"runs": {"a": {"config": config, "set": {"alg.args.gama": 1}}}, "seds": 3}))
    assert main(["benchmark", str(spec)]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"2 errors in {spec}:\n  seds: unknown key; did you mean 'seeds'?\n  runs.a: ")
    assert "alg.args.gama: unknown key; did you mean 'gamma'?" in message


def test_compare_prints_what_it_finds(calls, capsys):
    made = calls("rl4lms_like.benchmarking.results", compare="text")
    assert main(["compare", "x/a", "x/b", "--metric", "m", "--split", "val"]) == 0
    assert made == [("compare", (Path("x/a"), Path("x/b")), {"metrics": ["m"], "split": "val"})]
    assert capsys.readouterr().out == "text\n"


@pytest.mark.parametrize("seeds", ["0", "a", "1,", "-1,2"])
def test_seeds_are_a_number_or_a_list_of_them(seeds, capsys):
    with pytest.raises(SystemExit):
        main(["benchmark", "spec.yml", f"--seeds={seeds}"])
    assert "--seeds" in capsys.readouterr().err


def test_env_prints_what_a_bug_report_needs(capsys):
    assert main(["env"]) == 0
    printed = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert {"rl4lms-like", "Python", "platform", "GPUs", "torch", "transformers", "stable-baselines3"} <= printed.keys()
    assert printed["torch"] == version("torch")
    assert not {"mkdocs-material", "pytest"} & printed.keys()
