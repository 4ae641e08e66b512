"""Whole runs whose components, samples and environment hold what must not get out, or not get in.

secrets             in none of a run's files, not on the console, not in an error
control characters  of samples and models: not in log.txt, not on a terminal
markup              in no page as markup
names of runs       lead nowhere but below the folder of the results
"""

from __future__ import annotations

import json
import os
import re
import shutil
from types import SimpleNamespace
from typing import ClassVar

import pytest

from rl4lms_like.cli import main
from rl4lms_like.config.load import load_config, parse_config
from rl4lms_like.config.yaml_file import dump_yaml
from rl4lms_like.core.sample import Sample
from rl4lms_like.data_pools.base import TextGenPool
from rl4lms_like.inference import evaluate_run
from rl4lms_like.rewards.base import BatchedRewardFunction
from rl4lms_like.run import train_config
from rl4lms_like.system.errors import ConfigError, RewardError, RL4LMsLikeError
from rl4lms_like.tracking.base import logger
from rl4lms_like.training.resuming.resume import log_resume_hint, resumption
from tests.config_errors import raises_at

SECRET = "correct-horse-battery-staple"
OWN_TOKEN = "the-token-of-whoever-runs-this"
ESCAPE = "\x1b]0;owned\x07\x1b[31m\x9b2J"
MARKUP = "<script>alert('x')</script><img src=x onerror=alert(1)>"


class Judge(BatchedRewardFunction):
    """Needs a key; tells everybody, and fails if asked to."""

    terminal = True

    def __init__(self, api_key: str, url: str = "http://judge.example", fails: bool = False) -> None:
        self.api_key, self.url, self.fails = api_key, url, fails

    def __call__(self, prompt_texts, gen_texts, ref_texts, dones, meta_infos=None):
        assert self.api_key == SECRET
        logger.warning("asking with the key %s at %s; %s", self.api_key, self.url, ESCAPE)
        if self.fails:
            raise ValueError(f"the judge did not like {self.api_key}")
        return [float(done) for done in dones]


class Hostile(TextGenPool):
    """Samples made to be shown."""

    @classmethod
    def prepare(cls, split: str) -> Hostile:
        return cls([Sample(f"../../{MARKUP}{ESCAPE}{i}", f"{MARKUP}{ESCAPE} {i}", [MARKUP + ESCAPE]) for i in range(4)])


@pytest.fixture
def judged(tiny_config, monkeypatch):
    """A run of one iteration with that reward, in a process that has tokens of its own."""
    monkeypatch.setenv("JUDGE_KEY", SECRET)
    monkeypatch.setenv("HF_TOKEN", OWN_TOKEN)
    monkeypatch.setenv("WANDB_API_KEY", OWN_TOKEN[::-1])
    tiny_config["reward_fn"] = {"id": f"{__name__}:Judge", "args": {"api_key": "${JUDGE_KEY}"}}
    tiny_config["datapool"] = {"id": f"{__name__}:Hostile"}
    tiny_config["train_evaluation"] |= {"n_iters": 1, "eval_every": 1, "save_every": 1}
    return tiny_config


def texts_below(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refuse_secrets(text: bytes, where) -> None:
    for secret in (SECRET, OWN_TOKEN, OWN_TOKEN[::-1]):
        assert secret.encode() not in text, where


def test_a_run_s_files_console_and_checkpoints_show_no_secret_and_it_goes_on(judged, tmp_path, capfd, monkeypatch):
    folder = train_config(parse_config(judged), base_path_to_store_results=tmp_path)
    printed = capfd.readouterr()
    files = texts_below(folder)
    assert {"config.json", "log.txt", "report.html", "environment.json"} <= {path.name for path in files}
    for path, content in files.items():
        refuse_secrets(content, path)
    refuse_secrets((printed.out + printed.err).encode(), "the console")
    assert "asking with the key *** at" in (folder / "log.txt").read_text("utf-8")
    assert json.loads((folder / "config.json").read_text("utf-8"))["reward_fn"]["args"]["api_key"] == "${JUDGE_KEY}"
    assert resumption(folder, ["train_evaluation.n_iters=2"]).config.reward_fn.args["api_key"] == "${JUDGE_KEY}"
    capfd.readouterr()
    (tmp_path / "c.yml").write_text(dump_yaml(judged))
    assert main(["check", str(tmp_path / "c.yml"), "--full"]) == 0
    checked = capfd.readouterr().out
    assert "api_key: ${JUDGE_KEY}" in checked
    refuse_secrets(checked.encode(), "check")
    monkeypatch.delenv("JUDGE_KEY")
    assert main(["check", str(tmp_path / "c.yml")]) == 1
    assert "api_key: the environment variable JUDGE_KEY is not set" in capfd.readouterr().err


class Keeps(Judge):
    """Returns its key with what it remembers."""

    def state_dict(self):
        return {"calls": 3, "api_key": self.api_key}

    def load_state_dict(self, state):
        pass


def test_a_reward_that_remembers_its_secret_is_refused_before_anything_is_saved(judged, tmp_path):
    judged["reward_fn"]["id"] = f"{__name__}:Keeps"
    with pytest.raises(RewardError, match=r"'api_key'") as caught:
        train_config(parse_config(judged), base_path_to_store_results=tmp_path)
    refuse_secrets(str(caught.value).encode(), "the error")
    for path, content in texts_below(tmp_path).items():
        refuse_secrets(content, path)


def test_an_error_that_quotes_a_secret_is_told_without_it(judged, tmp_path, capfd):
    judged["reward_fn"]["args"]["fails"] = True
    (tmp_path / "c.yml").write_text(dump_yaml(judged))
    command = ["train", str(tmp_path / "c.yml"), "--base_path_to_store_results", str(tmp_path), "--new"]
    assert main(command) == 1
    printed = capfd.readouterr()
    assert "the judge did not like ***" in printed.err
    refuse_secrets((printed.out + printed.err).encode(), "the console")
    for path, content in texts_below(tmp_path).items():
        refuse_secrets(content, path)
    assert main([*command, "--traceback"]) == 1
    shown = capfd.readouterr().err
    assert "Traceback" in shown and "the judge did not like ***" in shown
    refuse_secrets(shown.encode(), "the traceback")


def test_a_secret_on_the_command_line_is_refused_without_showing_it(judged, tmp_path, capfd):
    (tmp_path / "c.yml").write_text(dump_yaml(judged))
    assert main(["check", str(tmp_path / "c.yml"), "--set", f"reward_fn.args.api_key={SECRET}"]) == 2
    printed = capfd.readouterr()
    assert "reward_fn.args.api_key: a secret would be written to the files of a run" in printed.err
    refuse_secrets((printed.out + printed.err).encode(), "the console")


def test_no_sample_steers_a_terminal_or_writes_markup(judged, tmp_path, capfd):
    folder = train_config(parse_config(judged), base_path_to_store_results=tmp_path)
    printed = capfd.readouterr()
    log = (folder / "log.txt").read_text(encoding="utf-8")
    for text in (printed.out, printed.err, log):
        assert not re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]", text)
    assert "\\x1b]0;owned\\x07" in log
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "alert(" in page and "<script" not in page and "<img" not in page
    outside = [path for path in tmp_path.rglob("*") if folder not in (path, *path.parents) and path.is_file()]
    assert outside == []


def test_an_error_cannot_steer_a_terminal_either(judged, tmp_path, capsys):
    judged["reward_fn"] = {"id": f"no such {ESCAPE} reward", "args": {}}
    (tmp_path / "c.yml").write_text(json.dumps(judged))
    assert main(["check", str(tmp_path / "c.yml")]) == 2
    assert "\x1b" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["../outside", "/absolute", "a/../../b", "..", "", "a//b", "line\nbreak", "..\\outside"]
)
@pytest.mark.parametrize("option", ["project_name", "experiment_name"])
def test_a_run_s_names_lead_nowhere_but_below_the_results(tiny_config, tmp_path, option, name):
    results = tmp_path / "deep" / "results"
    with raises_at(option):
        train_config(parse_config(tiny_config), base_path_to_store_results=results, **{option: name})
    assert list(tmp_path.iterdir()) == []


def test_nested_names_are_names(tiny_config, tmp_path):
    tiny_config["train_evaluation"] |= {"n_iters": 0, "save_model": False}
    folder = train_config(parse_config(tiny_config), base_path_to_store_results=tmp_path, experiment_name="a/b c")
    assert folder == tmp_path / "rl4lm_exps" / "a" / "b c"


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30)
)
BOMB_IN_KEY = "? [&b0 x, " + ", ".join(f"&b{i} [{', '.join([f'*b{i - 1}'] * 9)}]" for i in range(1, 9)) + "]\n: 1"
MERGES = "a0: &a0 {a: 1, b: 2, c: 3}\n" + "".join(
    f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 30)
)


@pytest.mark.parametrize(
    "text",
    [
        *(BOMB, MERGES, f"{BOMB}? *a29\n: 1\n", "a: &a [*a]"),
        BOMB_IN_KEY,
        *(
            "[" * 20_000,
            "{a: " * 5_000,
            "? " * 5_000,
            "x" * 600_000,
            "a: " + "1:" * 200_000 + "1",
            "a: " + "9" * 300_000,
            "a: " + "9" * 300_000 + "x",
        ),
        "a: !!python/object/apply:os.system [true]",
    ],
    ids=[
        *(
            "aliases",
            "merges",
            "key",
            "itself",
            "in_key",
            "lists",
            "mappings",
            "keys",
            "long",
            "base_60",
            "digits",
            "float",
        ),
        "python",
    ],
)
def test_a_file_made_to_fill_time_or_memory_is_refused(text, tmp_path, capsys):
    (tmp_path / "c.yml").write_text(text)
    assert main(["check", str(tmp_path / "c.yml")]) == 2
    assert len(capsys.readouterr().err) < 1200
    with pytest.raises(ConfigError):
        load_config(tmp_path / "c.yml")


def test_of_thousands_of_mistakes_some_are_told(tiny_config):
    args = {f"password{i}": f"{SECRET}{i}" for i in range(2000)}
    tiny_config["reward_fn"] = {"id": "increasing_numbers", "args": args}
    with pytest.raises(ConfigError) as caught:
        parse_config(tiny_config)
    assert len(caught.value.issues) == 501 and caught.value.issues[-1].message.startswith("and 35")
    assert SECRET not in str(caught.value)


def test_a_config_json_made_to_break_its_reader_is_refused(tmp_path, capsys):
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "run" / "config.json").write_text("[" * 100_000)
    assert main(["train", "--resume", str(tmp_path / "run")]) == 1
    assert "Traceback" not in capsys.readouterr().err


def test_an_evaluation_is_not_written_through_a_link_of_the_run_folder(tiny_config, tmp_path):
    tiny_config["train_evaluation"] |= {"n_iters": 0}
    folder = train_config(parse_config(tiny_config), base_path_to_store_results=tmp_path, quiet=True)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (folder / "evaluation").symlink_to(elsewhere)
    with pytest.raises(RL4LMsLikeError, match="evaluation is a symbolic link"):
        evaluate_run(folder, limit=1)
    assert not any(elsewhere.iterdir())
    evaluate_run(folder, limit=1, output=folder / "evaluation")  # which the user names
    assert any(elsewhere.iterdir())


def test_a_component_s_random_numbers_come_from_the_run_s_seed(tiny_config, tmp_path):
    tiny_config["datapool"] = {"id": f"{__name__}:Shuffled"}
    tiny_config["train_evaluation"] |= {"n_iters": 0, "save_model": False}
    runs = []
    for seed, experiment in ((1, "a"), (1, "b"), (2, "c")):
        Shuffled.seen.clear()
        config = parse_config(tiny_config | {"seed": seed})
        train_config(config, base_path_to_store_results=tmp_path, experiment_name=experiment, quiet=True)
        runs.append(list(Shuffled.seen))
    assert runs[0] == runs[1] != runs[2]


class Shuffled(TextGenPool):
    """Draws from the global generators, as people's code does."""

    seen: ClassVar[list] = []

    @classmethod
    def prepare(cls, split: str) -> Shuffled:
        import random

        import numpy as np

        cls.seen.append((random.random(), float(np.random.rand())))
        return cls([Sample(f"{split}_{i}", "Count with me:", []) for i in range(2)])


def test_a_reward_s_failure_is_still_named(judged, tmp_path):
    judged["reward_fn"]["args"]["fails"] = True
    with pytest.raises(RewardError, match=r"Judge .* 4,"):
        train_config(parse_config(judged), base_path_to_store_results=tmp_path)


@pytest.fixture
def with_code(tiny_gpt2_dir, tmp_path, monkeypatch, tiny_config):
    """The folder of a run whose model brings code, and whose config lets it run; the code leaves a mark."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "run" / "model"
    shutil.copytree(tiny_gpt2_dir, folder)
    mark = tmp_path / "was_run"
    (folder / "own.py").write_text(f"open({os.fspath(mark)!r}, 'w').close()\nraise SystemError('stops here')\n")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own_kind", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}}
    (folder / "config.json").write_text(json.dumps(config))
    tiny_config["alg"]["policy"]["args"]["trust_remote_code"] = True
    (tmp_path / "run" / "config.json").write_text(json.dumps(tiny_config))
    return tmp_path / "run", mark


@pytest.mark.parametrize("command", [["generate", "RUN", "hello"], ["evaluate", "RUN"]], ids=["generate", "evaluate"])
def test_a_config_beside_the_model_lets_no_code_run_unless_the_user_does(command, with_code, capsys):
    folder, mark = with_code
    command = [str(folder) if word == "RUN" else word for word in command]
    assert main(command) == 2
    detail = capsys.readouterr().err
    assert "alg.policy.args.trust_remote_code: true in a run's folder" in detail and "--trust_remote_code" in detail
    assert not mark.exists()
    assert main([*command, "--trust_remote_code"]) != 0
    assert "stops here" in capsys.readouterr().err
    assert mark.exists()


def test_the_code_of_a_tokenizer_runs_for_generate_with_the_permission_of_config_and_user(
    tiny_gpt2_dir, tiny_config, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "run" / "model"
    shutil.copytree(tiny_gpt2_dir, folder)
    (folder / "own.py").write_text("raise SystemError('stops here')\n")
    saved = json.loads((folder / "tokenizer_config.json").read_text())
    saved |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(saved))
    tiny_config["tokenizer"]["trust_remote_code"] = True
    (tmp_path / "run" / "config.json").write_text(json.dumps(tiny_config))

    command = ["generate", str(tmp_path / "run"), "hello"]
    assert main(command) == 2
    assert "tokenizer.trust_remote_code: true in a run's folder" in capsys.readouterr().err
    assert main([*command, "--trust_remote_code"]) != 0
    assert "stops here" in capsys.readouterr().err


def test_a_run_that_goes_on_asks_too_and_says_how(tiny_config, tmp_path, capsys):
    tiny_config["alg"]["policy"]["args"]["trust_remote_code"] = True
    tiny_config["train_evaluation"] |= {"n_iters": 1, "save_every": 1}
    folder = train_config(parse_config(tiny_config), base_path_to_store_results=tmp_path, quiet=True)
    command = ["train", "--resume", str(folder), "--set", "train_evaluation.n_iters=2"]
    assert main(command) == 2
    assert "alg.policy.args.trust_remote_code: true in a run's folder" in capsys.readouterr().err
    assert main([*command, "--trust_remote_code"]) == 0
    tracker = SimpleNamespace(run_path=folder, run_config=tiny_config, log_info=print)
    log_resume_hint(tracker)
    assert f"--resume {folder} --code" in (detail := capsys.readouterr().out)
    assert detail.rstrip().endswith(" --trust_remote_code")


def test_a_config_that_the_user_names_says_so_itself(tiny_config, tmp_path, capsys):
    (tmp_path / "run.yml").write_text(dump_yaml(tiny_config))
    assert main(["train", str(tmp_path / "run.yml"), "--trust_remote_code"]) == 2
    assert "--trust_remote_code: it can be used only with --resume" in capsys.readouterr().err
