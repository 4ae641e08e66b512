"""A full disk ends a run by name; what was saved stays whole, and the run goes on once there is room.

The kernel refuses files beyond RLIMIT_FSIZE just as it refuses those that no room is left for.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from rl4lms_like.config.load import parse_config
from rl4lms_like.run import train_config
from rl4lms_like.system.errors import RL4LMsLikeError
from rl4lms_like.training.resuming.checkpoints import read_checkpoint
from tests.conftest import REPOSITORY
from tests.robustness.killed_runs import files_of

resource = pytest.importorskip("resource", reason="limits on files are Unix's")

CHECKPOINT_KB = 300
"""More than any file of the tiny runs but their checkpoints."""


@pytest.fixture(autouse=True)
def room_again():
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def room():
    """Takes the limit away again."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def blocks(tiny_config, tmp_path):
    """A run whose disk is full from its second iteration on, as long as `marker` is there."""

    def make(limit):
        args = {"after": 4, "limit": limit, "marker": str(tmp_path / "marker")}
        tiny_config["reward_fn"] = {"id": "tests.training.failing:FillsTheDisk", "args": args}
        tiny_config["env"]["args"]["terminate_on_eos"] = False
        tiny_config["train_evaluation"]["save_every"] = 1
        return tiny_config

    return make


def run(config, folder):
    return train_config(parse_config(config), base_path_to_store_results=folder, experiment_name="run", quiet=True)


def test_a_checkpoint_that_does_not_fit_leaves_the_one_before_and_the_run_goes_on(blocks, room, tmp_path, capfd):
    config = blocks(CHECKPOINT_KB * 1000)
    whole = files_of(run(config, tmp_path / "whole"))
    (tmp_path / "marker").touch()
    with pytest.raises(RL4LMsLikeError, match=r"checkpoints/iteration_00002.*File too large"):
        run(config, tmp_path / "full")
    room()
    folder = tmp_path / "full" / "rl4lm_exps" / "run"
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["iteration_00001"]
    assert read_checkpoint(folder / "checkpoints" / "iteration_00001").numbers["trainer"]["iteration"] == 1
    assert "Traceback" not in capfd.readouterr().err
    assert files_of(run(config, tmp_path / "full")) == whole


def test_where_nothing_fits_lines_stay_whole_and_the_file_is_named(blocks, room, tmp_path, caplog, capfd):
    (tmp_path / "marker").touch()
    with pytest.raises(RL4LMsLikeError, match=r"[a-z_]+\.jsonl'"):
        run(blocks(100), tmp_path)
    room()
    folder = tmp_path / "rl4lm_exps" / "run"
    lines = [line for file in folder.glob("*.jsonl") for line in file.read_text().splitlines(keepends=True)]
    assert lines and all(line.endswith("\n") and json.loads(line) for line in lines)
    assert not list(folder.glob("*.partial"))
    assert "Traceback" not in capfd.readouterr().err
    assert caplog.text.count("messages are lost") == 1


def test_the_command_line_says_it_without_a_traceback(blocks, tmp_path):
    """Standard output is full too."""
    config = tmp_path / "run.yml"
    config.write_text(json.dumps(blocks(CHECKPOINT_KB * 1000)))
    (tmp_path / "marker").touch()
    command = [sys.executable, "-m", "rl4lms_like", "train", str(config), "--base_path_to_store_results", str(tmp_path)]
    with open("/dev/full" if os.path.exists("/dev/full") else os.devnull, "w") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=300, check=False, cwd=REPOSITORY
        )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr
    assert "File too large" in done.stderr.splitlines()[-1]
    assert (tmp_path / "rl4lm_exps" / "rl4lm_experiment" / "checkpoints" / "iteration_00001").is_dir()
