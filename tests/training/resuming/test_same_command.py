"""The same command again goes on with the run that it began, or says why it begins another one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from rl4lms_like import run as running
from rl4lms_like.cli import main
from rl4lms_like.config.load import parse_config
from rl4lms_like.config.yaml_file import dump_yaml
from rl4lms_like.on_policy.resume_point import ResumePoint
from rl4lms_like.run import resume, train_config
from rl4lms_like.system.errors import CheckpointError
from rl4lms_like.tracking.run_folder import FINISHED_FILE, hold
from rl4lms_like.training.resuming.resume import find_unfinished
from tests.conftest import REPOSITORY
from tests.forked import forked
from tests.robustness.killed_runs import files_of
from tests.training.resuming.test_resume import StoppedError, blocks, started, stop_after

FEW = {"train_evaluation": {"eval_batch_size": 6, "n_iters": 3, "eval_every": 9, "save_every": 1, "metrics": []}}


@pytest.fixture(scope="module")
def mapping(tiny_gpt2_dir):
    return blocks("causal", tiny_gpt2_dir, "ppo") | FEW


@pytest.fixture(scope="module")
def whole(mapping, tmp_path_factory):
    """The folder of a run that nothing stopped. Only to be read or copied."""
    return started(mapping, tmp_path_factory.mktemp("whole"))


def found(mapping, folder):
    """What the command comes to: the checkpoint that it goes on from, the reasons why not."""
    run, reasons = find_unfinished(parse_config(mapping), folder)
    if run is not None:
        run.lock.release()
    return run and run.checkpoint, reasons


def changed(mapping, **keys):
    return {**mapping, "train_evaluation": {**mapping["train_evaluation"], **keys}}


# --- real runs --------------------------------------------------------------------------------------------------------


def test_it_goes_on_to_the_same_end_and_says_so(mapping, stopped, whole, tmp_path, capsys):
    config = tmp_path / "config.yml"
    config.write_text(dump_yaml(mapping))
    command = ["train", str(config), "--experiment_name", "run", "--base_path_to_store_results", str(tmp_path)]
    assert main(command) == 0
    message = "".join(capsys.readouterr().out.split())
    assert "runisnotfinished:thisrunresumesit;--newstartsanewrun" in message
    assert "resumingafter2" in message
    assert files_of(stopped) == files_of(whole)
    assert json.loads((stopped / FINISHED_FILE).read_text()) == {"iterations": 3}


def test_two_at_once_are_two_runs_and_nothing_is_mixed(mapping, stopped, whole, tmp_path):
    config = tmp_path / "config.yml"
    config.write_text(dump_yaml(mapping))
    command = ["train", str(config), "--experiment_name", "run"]
    outputs = [tmp_path / "first.txt", tmp_path / "second.txt"]
    both = [forked(command, tmp_path, output) for output in outputs]
    for process in both:
        process.join(600)
    message = ["".join(output.read_text().split()) for output in outputs]  # wherever lines were broken
    assert [process.exitcode for process in both] == [0, 0], message
    late = "itisfinished"  # where the other one has had the machine for itself
    assert sum("anotherprocessiswritingtoit" in text or late in text for text in message) == 1, message
    assert files_of(stopped) == files_of(whole) == files_of(stopped.with_name("run_2"))
    assert not stopped.with_name("run_3").exists()


CLAIMING = """
import pathlib, sys
from rl4lms_like.tracking.run_folder import claim_folder
print("ready", flush=True); sys.stdin.readline()
path, lock = claim_folder(pathlib.Path(sys.argv[1]), {"seed": 0})
print(path.name, lock.is_locked, flush=True); sys.stdin.readline()
"""


def test_processes_that_start_at_once_each_claim_and_hold_a_folder(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", CLAIMING, str(tmp_path / "run")], env=environment, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True,
        )
        for _ in range(4)
    ]  # fmt: skip
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        print(file=process.stdin, flush=True)
    message = [process.stdout.readline().split() for process in processes]
    for process in processes:
        process.communicate("\n")
    assert len({name for name, _ in message}) == len(processes)
    assert {is_locked for _, is_locked in message} == {"True"}


# --- what it goes on with ---------------------------------------------------------------------------------------------


def test_a_finished_run_is_left_alone_and_the_next_one_says_so(mapping, whole):
    assert found(mapping, whole) == (None, [f"{whole}: it is finished"])
    longer = changed(mapping, n_iters=9)
    assert found(longer, whole) == (None, [f"{whole}: it is finished"])


def test_a_finished_run_that_goes_on_is_unfinished_until_its_end(whole, tmp_path, monkeypatch):
    copy = shutil.copytree(whole, tmp_path / "rl4lm_exps" / "run")
    with monkeypatch.context() as patch, pytest.raises(StoppedError):
        stop_after(patch, 3, "rollout")
        resume(copy, overrides=["train_evaluation.n_iters=4"], quiet=True)
    assert not (copy / FINISHED_FILE).exists()
    resume(copy, quiet=True)
    assert json.loads((copy / FINISHED_FILE).read_text()) == {"iterations": 4}


def test_what_may_change_takes_the_value_of_the_command(mapping, stopped):
    longer = changed(mapping, n_iters=5, keep_last=1)
    assert found(longer, stopped)[0] == stopped / "checkpoints" / "iteration_00002"
    assert json.loads((stopped / "config.json").read_text())["train_evaluation"]["n_iters"] == 3
    folder = started(changed(mapping, keep_last=1), stopped.parents[1])
    assert folder == stopped
    assert json.loads((stopped / "config.json").read_text())["train_evaluation"]["keep_last"] == 1
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["iteration_00003"]


def test_another_config_is_another_run_and_the_differences_are_named_in_short(mapping, stopped):
    other = {**mapping, "seed": 4, "device": "auto", "env": {**mapping["env"], "n_envs": 9}}
    other["alg"] = {**mapping["alg"], "args": {**mapping["alg"]["args"], "learning_rate": 0.5, "n_epochs": 3}}
    checkpoint, (reason,) = found(other, stopped)
    assert checkpoint is None
    assert "env.n_envs is 8 there, 9 here" in reason and reason.endswith("and 2 more")


def test_where_the_learning_rate_follows_the_length_that_is_said(mapping, stopped):
    file = stopped / "config.json"
    written = json.loads(file.read_text())
    written["alg"]["args"]["learning_rate_schedule"] = "linear"
    file.write_text(json.dumps(written))
    longer = changed(mapping, n_iters=5)
    longer["alg"] = {**mapping["alg"], "args": {**mapping["alg"]["args"], "learning_rate_schedule": "linear"}}
    _, (reason,) = found(longer, stopped)
    assert "n_iters is 3 there, 5 here (the learning rate is linear over the run)" in reason


def test_a_run_with_more_behind_it_than_is_asked_for_is_left_alone(mapping, stopped):
    checkpoint, (reason,) = found(changed(mapping, n_iters=1), stopped)
    assert checkpoint is None
    assert "train_evaluation.n_iters is 1, but iteration_00002 has already completed 2" in reason


def test_a_run_without_a_checkpoint_is_left_alone_and_the_first_that_fits_is_taken(mapping, stopped, ended, whole):
    shutil.rmtree(stopped / "checkpoints")
    shutil.copytree(whole, stopped.with_name("run_2"))
    third = shutil.copytree(ended, stopped.with_name("run_3"))
    shutil.copytree(ended, stopped.with_name("run_4"))
    checkpoint, reasons = found(mapping, stopped)
    assert checkpoint == third / "checkpoints" / "iteration_00002"
    assert reasons == [
        f"{stopped}: it has no checkpoint to resume from; the first one is written after 1 iterations (save_every)",
        f"{stopped.with_name('run_2')}: it is finished",
    ]


def test_a_run_that_was_killed_before_its_first_iteration_begins_again_in_its_folder(mapping, whole, tmp_path):
    with pytest.MonkeyPatch.context() as patch, pytest.raises(StoppedError):
        stop_after(patch, 0, "rollout")
        patch.setattr(ResumePoint, "rescue", lambda *arguments: None)  # as by SIGKILL
        started(mapping, tmp_path)
    folder = tmp_path / "rl4lm_exps" / "run"
    with (folder / "val_split_metrics.jsonl").open("a") as file:
        file.write('{"epo')
    assert started(mapping, tmp_path) == folder
    assert files_of(folder) == files_of(whole)


@pytest.mark.parametrize(
    "trace", ["rollout_info.jsonl", "checkpoints/iteration_00001", "notes.txt", "failed_batch.json"]
)
def test_a_folder_with_anything_that_would_be_lost_is_not_begun_again(trace, mapping, whole, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("config.json", "log.txt", "environment.json"):
        shutil.copyfile(whole / name, folder / name)
    begun_again, _ = find_unfinished(parse_config(mapping), folder)
    assert begun_again.run_folder == folder and begun_again.checkpoint is None
    begun_again.lock.release()
    (folder / trace).parent.mkdir(exist_ok=True)
    (folder / trace).write_text("{}\n")
    reason = "it has no checkpoint to resume from; the first one is written after 1 iterations (save_every)"
    assert found(mapping, folder) == (None, [f"{folder}: {reason}"])


def test_a_run_that_somebody_writes_to_is_left_alone(mapping, stopped):
    lock = hold(stopped)
    try:
        assert found(mapping, stopped) == (None, [f"{stopped}: another process is writing to it"])
    finally:
        lock.release()
    assert found(mapping, stopped)[0] is not None


def test_new_begins_another_run_in_any_case(mapping, stopped, monkeypatch):
    taken = []

    def record(config, destinations, resumed, **_):
        taken.append((destinations.experiment_name, resumed))

    monkeypatch.setattr(running, "_train", record)
    config = parse_config(mapping)
    train_config(config, base_path_to_store_results=stopped.parents[1], experiment_name="run", new=True)
    train_config(config, base_path_to_store_results=stopped.parents[1], experiment_name="run")
    assert taken[0] == ("run", None)
    assert taken[1][1].checkpoint.name == "iteration_00002"


def test_new_and_resume_exclude_each_other(stopped, capsys):
    assert main(["train", "--resume", str(stopped), "--new"]) == 2
    assert "--new: a run resumes in its own folder" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_refused_and_the_way_out_is_a_command(mapping, stopped):
    newest = stopped / "checkpoints" / "iteration_00002"
    (newest / "training_state.json").write_text("{")
    before = {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError) as caught:
        started(mapping, stopped.parents[1])
    older = stopped / "checkpoints" / "iteration_00001"
    assert f"an older one is intact: --resume {older}; --new starts a new run" in str(caught.value)
    assert "iteration_00002: training_state.json has 1 bytes" in str(caught.value)
    assert {path: path.read_bytes() for path in before} == before
    assert not stopped.with_name("run_2").exists()


def test_the_quickstart_goes_on_too(tmp_path, monkeypatch):
    from rl4lms_like import quickstart

    monkeypatch.setattr(quickstart, "STEPS", {"gpt2": 8})
    settings = ["env.n_envs=4", "alg.args.n_epochs=1", "alg.args.n_steps=1", "train_evaluation.max_eval_samples=6"]
    settings += ["train_evaluation.n_iters=2", "train_evaluation.save_every=1"]
    with monkeypatch.context() as patch, pytest.raises(StoppedError):
        stop_after(patch, 1, "rollout")
        quickstart.quickstart(tmp_path, overrides=settings)
    result = quickstart.quickstart(tmp_path, overrides=settings)
    assert result["run_folder"] == str(tmp_path / "gpt2_ppo_seed_0")
    assert "resuming after 1" in (tmp_path / "gpt2_ppo_seed_0" / "log.txt").read_text()
