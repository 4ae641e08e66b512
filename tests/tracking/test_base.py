from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rl4lms_like.system.errors import RL4LMsLikeError
from rl4lms_like.tracking import RunDescription, Sink, Tracker
from rl4lms_like.tracking.run_folder import RunFolder, write_whole

CONFIG = {"alg": {"id": "ppo"}, "seed": 0}


@pytest.fixture
def tracker(tmp_path):
    with Tracker(tmp_path, CONFIG, "project", "experiment", quiet=True) as tracker:
        yield tracker


def lines(path: Path) -> list[dict]:
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


class Recorder(Sink):
    """Remembers every event."""

    name = "recorder"

    def __init__(self) -> None:
        self.events: list[tuple] = []

    def open(self, run: RunDescription) -> None:
        self.events.append(("open", run.experiment))

    def start(self, n_iters: int, completed: int = 0) -> None:
        self.events.append(("start", n_iters, completed))

    def write(self, values, *, iteration, timesteps) -> None:
        self.events.append(("write", dict(values), iteration, timesteps))

    def log_metrics(self, epoch, split_name, metrics) -> None:
        self.events.append(("metrics", epoch, split_name, dict(metrics)))

    def close(self) -> None:
        self.events.append(("close",))


class Unreachable(Sink):
    """A service that takes nothing."""

    name = "unreachable"

    def __init__(self, fails_to_open: bool = False) -> None:
        self.fails_to_open = fails_to_open
        self.n_calls = 0

    def open(self, run: RunDescription) -> None:
        if self.fails_to_open:
            raise ConnectionError("no route")

    def write(self, values, *, iteration, timesteps) -> None:
        self.n_calls += 1
        raise ConnectionError("no route")


def test_the_run_folder_is_base_project_experiment_and_holds_the_config(tracker, tmp_path):
    assert tracker.run_path == tmp_path / "project" / "experiment"
    assert json.loads((tracker.run_path / "config.json").read_text()) == CONFIG
    assert tracker.checkpoint_base_path == tracker.run_path / "checkpoints"
    assert tracker.checkpoint_base_path.is_dir()


def test_a_second_run_takes_a_numbered_folder_and_says_so(tracker, tmp_path, capsys):
    tracker.log_rollout_infos({"rollout_info/ep_rew": 1.0})
    with Tracker(tmp_path, CONFIG, "project", "experiment") as second:
        second.log_rollout_infos({"rollout_info/ep_rew": 2.0})
    with Tracker(tmp_path, CONFIG, "project", "experiment", quiet=True) as third:
        assert third.run_path.name == "experiment_3"
    assert second.run_path.name == "experiment_2"
    assert "already contains a run" in capsys.readouterr().out.replace("\n", " ")
    assert [line["rollout_info/ep_rew"] for line in lines(tracker.run_path / "rollout_info.jsonl")] == [1.0]


def test_a_resumed_run_appends_and_drops_the_line_a_crash_left_half_written(tracker, tmp_path):
    tracker.log_rollout_infos({"rollout_info/ep_rew": 1.0})
    with (tracker.run_path / "rollout_info.jsonl").open("a") as stream:
        stream.write('{"iteration": 2, "rollout_inf')
    tracker._lock.release()  # as a process that ends does
    with Tracker(tmp_path, CONFIG, "project", "experiment", quiet=True, resume=True) as resumed:
        resumed.start(5, completed=1)
        resumed.log_rollout_infos({"rollout_info/ep_rew": 2.0})
    assert resumed.run_path == tracker.run_path
    written = lines(tracker.run_path / "rollout_info.jsonl")
    assert [(line["iteration"], line["rollout_info/ep_rew"]) for line in written] == [(1, 1.0), (2, 2.0)]


def test_rollout_and_training_lines_carry_iteration_and_timesteps(tracker):
    for _ in range(2):
        tracker.log_rollout_infos({"rollout_info/ep_rew": 1.0, "rollout_info/n_tokens": 7})
        tracker.log_training_infos({"ppo/value_loss": 2.0})
    rollouts, trainings = (lines(tracker.run_path / f"{name}_info.jsonl") for name in ("rollout", "training"))
    assert [(line["iteration"], line["timesteps"]) for line in rollouts] == [(1, 7), (2, 14)]
    assert trainings[1] == {"iteration": 2, "timesteps": 14, "ppo/value_loss": 2.0}


def test_every_line_is_on_disk_when_the_next_iteration_crashes(tmp_path):
    program = f"""
import os
from rl4lms_like.tracking import Tracker
tracker = Tracker({str(tmp_path)!r}, {{}}, "p", "e", quiet=True)
for iteration in range(1, 8):
    if iteration == 7:
        os._exit(3)
    tracker.log_rollout_infos({{"rollout_info/ep_rew": iteration}})
    tracker.log_training_infos({{"ppo/value_loss": iteration}})
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 3
    for name in ("rollout_info", "training_info"):
        assert [line["iteration"] for line in lines(tmp_path / "p" / "e" / f"{name}.jsonl")] == [1, 2, 3, 4, 5, 6]


def test_numbers_json_cannot_say_become_null_and_are_warned_of_once(tracker, caplog):
    for _ in range(3):
        tracker.log_rollout_infos({"rollout_info/kl_div_mean": float("inf"), "rollout_info/ep_rew": np.float32("nan")})
    tracker.log_metrics(0, "val", {"a": float("nan"), "b": "n/a", "c": 1.5})
    assert lines(tracker.run_path / "rollout_info.jsonl")[0]["rollout_info/kl_div_mean"] is None
    assert lines(tracker.run_path / "val_split_metrics.jsonl") == [
        {"epoch": 0, "metrics": {"a": None, "b": "n/a", "c": 1.5}}
    ]
    warned = [record.getMessage() for record in caplog.records if "written as null" in record.getMessage()]
    assert len(warned) == 3
    assert "rollout_info/kl_div_mean is inf" in warned[0]


def test_numpy_numbers_are_accepted(tracker):
    tracker.log_training_infos({"ppo/loss": np.float32(0.5), "train/n": np.int64(3), "train/x": np.arange(2)})
    assert lines(tracker.run_path / "training_info.jsonl") == [
        {"iteration": 0, "timesteps": 0, "ppo/loss": 0.5, "train/n": 3, "train/x": [0, 1]}
    ]


def test_predictions_are_one_list_of_objects(tracker):
    predictions = [
        {"split_name": "val", "sample_id": "0", "generated_text": "größe", "m/x": np.float64(1), "m/y": "n/a"}
    ]
    tracker.log_predictions(5, "val", predictions)
    content = json.loads((tracker.run_path / "epoch_5_val_split_predictions.json").read_text(encoding="utf-8"))
    assert content == [{"split_name": "val", "sample_id": "0", "generated_text": "größe", "m/x": 1.0, "m/y": "n/a"}]
    assert "größe" in (tracker.run_path / "log.txt").read_text(encoding="utf-8")


def test_the_log_file_has_this_librarys_messages_only(tracker):
    logging.getLogger("rl4lms_like.rollouts").info("ours")
    logging.getLogger("rl4lms_like.rollouts").debug("too fine")
    logging.getLogger("transformers").warning("theirs")
    log = (tracker.run_path / "log.txt").read_text()
    assert "[INFO] ours" in log
    assert "theirs" not in log and "too fine" not in log


@pytest.mark.parametrize(
    "name", ["log.txt", "rollout_info.jsonl", "alarms.jsonl", "val_split_metrics.jsonl", "my_split_metrics.jsonl"]
)
@pytest.mark.parametrize("there", [True, False])
def test_a_run_that_goes_on_writes_through_no_link(tmp_path, name, there):
    """Its folder may come from somebody else, and the link lead to a file of one's own."""
    own = tmp_path / "own.txt"
    folder = tmp_path / "project" / "experiment"
    folder.mkdir(parents=True)
    if there:
        own.write_text("mine, without a last line's end")
    (folder / name).symlink_to(own)
    with pytest.raises(RL4LMsLikeError, match=name):
        Tracker(tmp_path, CONFIG, "project", "experiment", quiet=True, resume=True)
    assert own.exists() == there and (not there or own.read_text() == "mine, without a last line's end")


@pytest.mark.parametrize("name", ["log.txt", "training_info.jsonl", "val_split_metrics.jsonl", ".lock"])
def test_a_run_that_goes_on_writes_through_no_hard_link(tmp_path, name):
    own = tmp_path / "own.txt"
    own.write_text("mine, without a last line's end")
    folder = tmp_path / "project" / "experiment"
    folder.mkdir(parents=True)
    os.link(own, folder / name)
    with pytest.raises(RL4LMsLikeError, match=re.escape(str(folder / name))):
        Tracker(tmp_path, CONFIG, "project", "experiment", quiet=True, resume=True)
    assert own.read_text() == "mine, without a last line's end"


def test_a_place_where_no_tokenizer_can_be_saved_is_told_before_anything_is_computed(tmp_path):
    for resume in (False, True):
        with pytest.raises(RL4LMsLikeError, match=r"udce9"):
            Tracker(tmp_path / "caf\udce9", CONFIG, "p", "e", resume=resume)
    assert not list(tmp_path.iterdir())


def test_a_pipe_in_the_place_of_a_log_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "alarms.jsonl")
    with pytest.raises(RL4LMsLikeError, match=r"alarms\.jsonl"):
        RunFolder(tmp_path)


def test_a_file_that_is_written_whole_is_written_through_no_link(tmp_path):
    own = tmp_path / "own.txt"
    own.write_text("mine")
    for name in ("config.json", "config.json.partial"):
        (tmp_path / name).symlink_to(own)
    write_whole(tmp_path / "config.json", "{}")
    assert own.read_text() == "mine"
    assert (tmp_path / "config.json").read_text() == "{}" and not (tmp_path / "config.json").is_symlink()


def test_a_finished_tracker_hears_nothing_more(tmp_path):
    tracker = Tracker(tmp_path, {}, "p", "e", quiet=True)
    tracker.done()
    tracker.done()
    logging.getLogger("rl4lms_like").info("later")
    assert "later" not in (tracker.run_path / "log.txt").read_text()


def test_an_error_that_ends_the_run_is_in_the_log(tmp_path):
    with pytest.raises(KeyboardInterrupt), Tracker(tmp_path, {}, "p", "e", quiet=True) as tracker:
        raise KeyboardInterrupt
    assert "KeyboardInterrupt" in (tracker.run_path / "log.txt").read_text()


def test_sinks_hear_every_event(tmp_path):
    sink = Recorder()
    with Tracker(tmp_path, {}, "p", "e", quiet=True, sinks=[sink]) as tracker:
        tracker.start(2)
        tracker.log_values({"rollout_info/ep_rew": 1.0, "time/iteration": 1}, timesteps=9)
        tracker.log_metrics(1, "test", {"m": 0.5})
    assert sink.events == [
        ("open", "e"),
        ("start", 2, 0),
        ("write", {"rollout_info/ep_rew": 1.0, "time/iteration": 1}, 1, 9),
        ("metrics", 1, "test", {"m": 0.5}),
        ("close",),
    ]


@pytest.mark.parametrize("fails_to_open", [True, False])
def test_a_sink_that_fails_is_named_once_and_the_run_goes_on(tmp_path, caplog, fails_to_open):
    healthy, broken = Recorder(), Unreachable(fails_to_open)
    with Tracker(tmp_path, {}, "p", "e", quiet=True, sinks=[broken, healthy]) as tracker:
        for _ in range(3):
            tracker.log_rollout_infos({"rollout_info/ep_rew": 1.0})
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "unreachable failed in" in warnings[0] and "ConnectionError: no route" in warnings[0]
    assert broken.n_calls == (0 if fails_to_open else 3)
    assert len(lines(tracker.run_path / "rollout_info.jsonl")) == 3
    assert [event[0] for event in healthy.events].count("write") == 3


def test_the_run_folders_own_errors_end_the_run(tracker):
    (tracker.run_path / "rollout_info.jsonl").mkdir()
    with pytest.raises(RL4LMsLikeError, match=str(tracker.run_path)):
        tracker.log_rollout_infos({"rollout_info/ep_rew": 1.0})


def test_importing_the_package_loads_no_torch_and_no_service():
    program = (
        "import sys, rl4lms_like.tracking\n"
        "heavy = {'torch', 'stable_baselines3', 'wandb', 'tensorboard', 'rich', 'jinja2'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
