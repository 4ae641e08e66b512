"""Checkpoints that were damaged, left half-written, or are somebody else's: each refused by name, none trained on."""

from __future__ import annotations

import copy
import errno
import json
import os
import random
import shutil
import stat

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rl4lms_like.cli import main
from rl4lms_like.config.load import parse_config
from rl4lms_like.metrics.base import BaseMetric
from rl4lms_like.on_policy.trainer import OnPolicyTrainer
from rl4lms_like.rewards.base import RewardFunction
from rl4lms_like.run import resume
from rl4lms_like.system.component_state import not_json
from rl4lms_like.system.errors import CheckpointError, RewardError, RL4LMsLikeError
from rl4lms_like.system.ranks import Ranks
from rl4lms_like.tracking import run_folder
from rl4lms_like.tracking.run_folder import RunFolder, hold
from rl4lms_like.training.resuming import checkpoints
from rl4lms_like.training.resuming.checkpoints import TrainingState, mark_in, read_checkpoint, write_checkpoint
from rl4lms_like.training.resuming.resume import resumption
from rl4lms_like.training.resuming.states import load_random, random_state
from tests.config_errors import raises_at
from tests.training.resuming.test_resume import Stateful, StoppedError, blocks, files_of, started, stop_after

N_DAMAGES = 25
"""Of `benchmarks/`'s 500; the seeds are 0, 1, 2 ..."""


def save_nothing(folder) -> None:
    folder.mkdir()
    (folder / "config.json").write_text("{}")


def written(base, iteration, tensors=None, keep=None):
    state = TrainingState({"trainer": {"iteration": iteration}}, tensors or {"a": torch.ones(2)})
    base.mkdir(exist_ok=True)
    return write_checkpoint(base, iteration, state, save_nothing, keep=keep)


@pytest.fixture(scope="module")
def ended(tmp_path_factory, tiny_gpt2_dir):
    """The folder of a run that ended in its last iteration; checkpoints after 2 and 4. Only to be copied."""
    base = tmp_path_factory.mktemp("ended")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(StoppedError):
        stop_after(patch, 4, "rollout")
        started(blocks("causal", tiny_gpt2_dir, "ppo"), base)
    return base / "rl4lm_exps" / "run"


@pytest.fixture
def run(ended, tmp_path):
    return shutil.copytree(ended, tmp_path / "project" / "run")


# --- files ------------------------------------------------------------------------------------------------------------


def test_tensors_of_all_kinds_come_back_as_they_were(tmp_path):
    storage = torch.arange(12.0)
    tensors = {
        "whole": storage,
        "part": storage[4:8],
        "turned": storage.view(3, 4).t(),
        "scalar": torch.tensor(3),
        "bool": torch.tensor([True, False]),
        "bfloat16": torch.tensor([1.5, float("nan")], dtype=torch.bfloat16),
        "float16": torch.ones(2, dtype=torch.float16),
        "empty": torch.zeros(0, 3),
        "empty too": torch.zeros(0),
    }
    found = read_checkpoint(written(tmp_path / "checkpoints", 1, tensors)).tensors
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_what_is_saved_may_be_read_by_whom_the_run_s_other_files_may_be(mask, mode, tmp_path):
    def save_model(folder):
        folder.mkdir(parents=True)
        save_file({"w": torch.ones(1)}, folder / "model.safetensors")

    before = os.umask(mask)
    try:
        folder = write_checkpoint(tmp_path / "run", 1, TrainingState({}, {"w": torch.ones(1)}), save_model)
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {mode}


def test_a_checkpoint_of_version_0_1_0_is_refused_by_name(run, capsys):
    """Its updates normalized and clipped otherwise, so it could not end as it would have."""
    for manifest in run.glob("checkpoints/*/manifest.json"):
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 1}))
    with pytest.raises(CheckpointError, match=r"0\.1\.0"):
        resumption(run)
    assert main(["train", "--resume", str(run)]) == 1
    assert "0.1.0" in capsys.readouterr().err


def test_the_global_generators_go_on_where_they_were():
    def drawn():
        return random.random(), random.gauss(0, 1), np.random.standard_normal(), float(torch.rand(()))

    before = random_state()
    try:
        random.gauss(0, 1), np.random.standard_normal()  # both keep a second number for the next call
        tensors, numbers = random_state()
        expected = drawn()
        saved = {name.removeprefix("random."): tensor.clone() for name, tensor in tensors.items()}
        load_random(json.loads(json.dumps(numbers)), saved)
        assert drawn() == expected
    finally:
        load_random(before[1], {name.removeprefix("random."): tensor for name, tensor in before[0].items()})


def test_checkpoints_stand_in_the_order_of_their_numbers(tmp_path):
    base = tmp_path / "checkpoints"
    for iteration in (99_998, 99_999, 100_000):
        written(base, iteration)
    assert [path.name for path in checkpoints.checkpoints_in(base)][-1] == "iteration_100000"
    assert checkpoints.newest_checkpoint(tmp_path).name == "iteration_100000"
    assert not (base / "iteration_99998" / checkpoints.MANIFEST).exists()


def test_a_users_copy_of_a_checkpoint_is_neither_taken_nor_emptied(tmp_path):
    base = tmp_path / "checkpoints"
    copied = shutil.copytree(written(base, 1), base / "iteration_00001_best")
    for iteration in (2, 3):
        written(base, iteration)
    assert checkpoints.newest_checkpoint(tmp_path).name == "iteration_00003"
    assert (base / "iteration_00002" / checkpoints.STATE).is_file()
    read_checkpoint(copied)


def test_what_a_killed_process_was_just_saving_is_removed_when_the_run_goes_on(tmp_path):
    ours = ("interrupted_00003.partial", "iteration_4.partial", "checkpoint-5.partial", "interrupted_00003.replaced")
    for name in (*ours, "interrupted_00003", "mine.partial", "iteration_00004.copy"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"weights")
    checkpoints.delete_later(tmp_path, 3, interrupted=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "interrupted_00003", "iteration_00004.copy", "mine.partial"
    ]  # fmt: skip


def test_a_training_state_that_was_half_taken_away_is_gone_when_the_run_goes_on(tmp_path):
    """Killed in the midst of it: the manifest went first, so that no half passes for a checkpoint."""
    folder = tmp_path / "iteration_00001"
    folder.mkdir()
    for name in (checkpoints.STATE, checkpoints.TENSORS, "model.safetensors"):
        (folder / name).write_text("")
    checkpoints.delete_later(tmp_path, 3)
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]


def test_what_a_link_leads_to_is_neither_written_nor_removed(tmp_path):
    """A run's folder may come from somebody else, and its links lead into one's own."""
    base, own = tmp_path / "run" / "checkpoints", tmp_path / "own"
    base.mkdir(parents=True)
    written(own, 9)
    before = {path: path.read_bytes() for path in own.rglob("*") if path.is_file()}
    names = ("iteration_00001", "iteration_00003.partial", "iteration_00003.replaced", "iteration_00008")
    for name in (*names, "interrupted_00001"):
        (base / name).symlink_to(own / "iteration_00009")
    assert checkpoints.newest_checkpoint(base.parent).name == "iteration_00008"
    checkpoints.delete_later(base, 2)
    assert sorted(path.name for path in base.iterdir()) == ["interrupted_00001", "iteration_00001"]
    for name in ("iteration_00003.partial", "iteration_00003.replaced"):
        (base / name).symlink_to(own / "iteration_00009")
    for iteration in (3, 3, 4, 5):
        written(base, iteration)
    checkpoints.remove_older(base, 5, 1)
    assert [path.name for path in base.iterdir()] == ["iteration_00005"]
    assert {path: path.read_bytes() for path in own.rglob("*") if path.is_file()} == before


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_deletes_no_checkpoints_of_another_run_that_its_folder_leads_to(run, tmp_path):
    """The folder is somebody else's, a copy of one's own: its checkpoints are the originals, behind a link."""
    foreign = shutil.copytree(run, tmp_path / "foreign" / "run")
    shutil.rmtree(foreign / "checkpoints")
    (foreign / "checkpoints").symlink_to(run / "checkpoints")
    before = contents(run / "checkpoints")
    resume(foreign, overrides=["train_evaluation.keep_last=1", "train_evaluation.save_every=1"], quiet=True)
    after = contents(run / "checkpoints")
    assert {path: after[path] for path in before} == before
    assert after.keys() - before.keys(), "a link is followed for writing"


def test_a_run_whose_checkpoints_are_on_another_disk_deletes_its_own_alone(tmp_path):
    disk, other = tmp_path / "disk", tmp_path / "other"
    other.mkdir()
    written(other / "checkpoints", 2)
    base = tmp_path / "run" / "checkpoints"
    base.parent.mkdir()
    disk.mkdir()
    base.symlink_to(disk)
    shutil.copytree(other / "checkpoints" / "iteration_00002", disk / "iteration_00002")
    (disk / "iteration_00003.partial").mkdir()
    kept = contents(disk)
    for iteration in (3, 3, 4, 5):
        written(base, iteration, keep=1)
    assert sorted(path.name for path in disk.iterdir()) == [
        "iteration_00002", "iteration_00003.partial", "iteration_00005"
    ]  # fmt: skip
    assert {path: path.read_bytes() for path in kept} == kept
    with pytest.raises(FileExistsError):
        written(base, 2)
    left = disk / f"iteration_00006.{mark_in(base)}.partial"
    left.mkdir()
    checkpoints.delete_later(base, 4)
    assert not left.exists() and not (disk / "iteration_00005" / checkpoints.MANIFEST).exists()
    with pytest.raises(CheckpointError, match="iteration_00002"):
        checkpoints.delete_later(base, 1)
    assert {path: path.read_bytes() for path in kept} == kept


def test_a_run_whose_folder_is_a_link_writes_its_model_again(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    for text in ("{}", "[]"):
        checkpoints.write_folder(
            tmp_path / "run" / "model",
            lambda folder, text=text: (folder.mkdir(), (folder / "config.json").write_text(text)),
        )
    assert (tmp_path / "disk" / "model" / "config.json").read_text() == "[]"


@pytest.mark.parametrize("first", ["model", "tensors", "rename"])
def test_a_disk_that_fills_while_saving_leaves_the_checkpoint_before_and_no_rest(tmp_path, monkeypatch, first):
    base = tmp_path / "checkpoints"
    before = written(base, 1)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    if first == "rename":
        monkeypatch.setattr(checkpoints.os, "replace", full)
    elif first == "tensors":
        monkeypatch.setattr("rl4lms_like.system.tensor_file.TensorFile.write", full)
    with pytest.raises(OSError) as caught:
        state = TrainingState({"trainer": {"iteration": 2}}, {"a": torch.ones(2)})
        write_checkpoint(base, 2, state, full if first == "model" else save_nothing)
    assert caught.value.errno == errno.ENOSPC
    assert list(base.iterdir()) == [before]
    read_checkpoint(before)


def test_a_stop_while_the_model_is_saved_leaves_no_half_of_it(run, monkeypatch):
    def half(self, folder, tokenizer, *, eos_token_ids):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr("rl4lms_like.policies.base.LMActorCriticPolicy.save_model", half)
    with pytest.raises(KeyboardInterrupt):
        resume(run, quiet=True)
    left = [path.name for path in (run / "checkpoints").iterdir()]
    assert sorted(left) == ["iteration_00002", "iteration_00004"]
    assert not (run / "model").exists()


def test_lines_of_the_user_and_lines_before_are_left_alone(run):
    (run / "notes.jsonl").write_text("mine\n")
    outside = run.parent / "outside.jsonl"
    outside.write_text("mine\n")
    folder = RunFolder(run)
    sizes = folder.file_sizes()
    folder.cut({**sizes, "../outside.jsonl": 1})
    assert (run / "notes.jsonl").read_text() == outside.read_text() == "mine\n"
    assert folder.file_sizes() == sizes


def test_predictions_of_later_iterations_are_taken_away(run):
    later = run / "epoch_4_val_split_predictions.json"
    assert later.is_file()
    resume(run / "checkpoints" / "iteration_00002", overrides=["train_evaluation.eval_every=5"], quiet=True)
    assert not later.exists()


@pytest.mark.parametrize("change", ["shorter", "edited"])
def test_a_log_that_was_changed_is_said_and_nothing_is_cut(run, change, capsys):
    log = run / "rollout_info.jsonl"
    text = log.read_text()
    log.write_text(text[: len(text) // 4] if change == "shorter" else "x" * len(text) + text)
    before = {file: file.read_bytes() for file in run.glob("*.json*")}
    assert main(["train", "--resume", str(run)]) == 1
    error = capsys.readouterr().err
    assert "rollout_info.jsonl" in error and "Traceback" not in error
    assert {file: file.read_bytes() for file in run.glob("*.json*")} == before


class Part(torch.Tensor):
    """A tensor that counts as split over processes, of which this one has all rows."""

    def full_tensor(self):
        raise AssertionError("gathered")

    def to_local(self):
        return self.as_subclass(torch.Tensor)


class FirstOfTwo(Ranks):
    """A process that is told what the other one has written."""

    size = 2

    def __init__(self, other) -> None:
        self.other = other

    def gather(self, item):
        return [item, self.other]


def written_in_parts(base, iteration, other):
    weight = torch.arange(6.0).view(2, 3)
    tensors = {"a": torch.ones(2), "weight": weight.as_subclass(Part)}
    state = TrainingState({"trainer": {"iteration": iteration}}, tensors)
    base.mkdir(exist_ok=True)

    def write_rows(folder):
        name = "training_state-00002-of-00002.safetensors"
        save_file({"weight": weight + 6}, folder / name)
        ranks = FirstOfTwo(other or checkpoints.file_digest(folder / name))
        return checkpoints.write_rows_of_processes(tensors, ranks, folder)

    return write_checkpoint(base, iteration, state, save_nothing, write_rows=write_rows)


def test_rows_of_several_processes_are_read_as_one_tensor(tmp_path):
    folder = written_in_parts(tmp_path / "checkpoints", 1, None)
    tensors = read_checkpoint(folder).tensors
    assert tensors.keys() == {"a", "weight"} and torch.equal(tensors["a"], torch.ones(2))
    assert torch.equal(tensors["weight"].rows(0, 4), torch.arange(12.0).view(4, 3))
    assert torch.equal(tensors["weight"].rows(1, 3), torch.arange(12.0).view(4, 3)[1:3])


def test_rows_that_another_process_cannot_write_are_an_error_of_this_one(tmp_path):
    with pytest.raises(OSError, match="full"):
        written_in_parts(tmp_path / "checkpoints", 1, OSError(errno.ENOSPC, "the disk of the other one is full"))
    assert not list((tmp_path / "checkpoints").iterdir())


def test_older_checkpoints_lose_their_rows_with_their_training_state(tmp_path):
    base = tmp_path / "checkpoints"
    for iteration in (1, 2, 3):
        written_in_parts(base, iteration, None)
    assert [path.name for path in (base / "iteration_00001").iterdir()] == ["config.json"]
    assert len(list((base / "iteration_00002").glob("training_state*.safetensors"))) == 3


# --- where a run is ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "way", ["folder", "slash", "checkpoints", "checkpoint", "inside", "link", "link to checkpoint"]
)
def test_all_ways_to_name_a_run_lead_to_it(run, way, monkeypatch, tmp_path):
    newest = run / "checkpoints" / "iteration_00004"
    (tmp_path / "link").symlink_to(run)
    (tmp_path / "latest").symlink_to(newest)
    monkeypatch.chdir(run / "checkpoints")
    path = {
        "folder": run,
        "slash": f"{run}/",
        "checkpoints": run / "checkpoints",
        "checkpoint": newest,
        "inside": "iteration_00004",
        "link": tmp_path / "link",
        "link to checkpoint": tmp_path / "latest",
    }[way]
    found = resumption(path)
    assert (found.run_folder.resolve(), found.checkpoint.resolve()) == (run, newest)


def test_the_model_of_a_run_that_ended_early_is_no_checkpoint_and_the_way_out_is_said(run):
    shutil.copytree(run / "checkpoints" / "iteration_00004", run / "checkpoints" / "interrupted_00004")
    (run / "checkpoints" / "interrupted_00004" / checkpoints.MANIFEST).unlink()
    with pytest.raises(CheckpointError, match=str(run / "checkpoints" / "iteration_00004")):
        resumption(run / "checkpoints" / "interrupted_00004")


def test_what_a_command_line_asks_for_and_cannot_get_is_said(run, capsys):
    assert main(["train", "--resume", str(run), "--experiment_name", "new"]) == 2
    assert "--experiment_name: a run resumes in its own folder" in capsys.readouterr().err
    with raises_at("train_evaluation.n_iters", mentions="iteration_00004"):
        resumption(run, ["train_evaluation.n_iters=3"])


def test_an_older_checkpoint_by_name_makes_the_later_ones_none(run, monkeypatch):
    """Stopped again before it is where it was, it goes on from what it wrote itself."""
    with monkeypatch.context() as patch, pytest.raises(StoppedError):
        stop_after(patch, 3, "rollout")
        resume(run / "checkpoints" / "iteration_00002", quiet=True)
    assert resumption(run).checkpoint.name == "interrupted_00003"


def test_a_config_that_was_edited_by_hand_is_shown_as_differences(run):
    config = json.loads((run / "config.json").read_text())
    config["alg"]["args"]["learning_rate"] = 0.5
    (run / "config.json").write_text(json.dumps(config))
    with raises_at("alg.args.learning_rate", mentions="0.5"):
        resumption(run)


def test_other_samples_under_the_same_name_are_refused(run, monkeypatch):
    from rl4lms_like.training import inputs

    original = inputs.build_datapool

    def changed(config, split):
        pool = list(original(config, split))
        return [(copy.replace(s, references=["other"]) if hasattr(copy, "replace") else _other(s), w) for s, w in pool]

    monkeypatch.setattr(inputs, "build_datapool", changed)
    with pytest.raises(CheckpointError, match="data pool"):
        resume(run, quiet=True)


def _other(sample):
    import dataclasses

    return dataclasses.replace(sample, references=["other"])


# --- the lock ---------------------------------------------------------------------------------------------------------


def test_a_refused_second_process_changes_no_file(run):
    before = (run / "config.json").read_bytes()
    lock = hold(run)
    try:
        with pytest.raises(RL4LMsLikeError, match=str(run)):
            resume(run, overrides=["train_evaluation.n_iters=9"], quiet=True)
        with pytest.raises(RL4LMsLikeError, match=str(run)):
            started_again(run)
    finally:
        lock.release()
    assert (run / "config.json").read_bytes() == before


def started_again(run):
    from rl4lms_like.tracking.base import Tracker

    return Tracker(run.parent.parent, {"other": 1}, run.parent.name, run.name, quiet=True, resume=True)


@pytest.mark.parametrize("error", [OSError(37, "No locks available"), NotImplementedError("flock")])
def test_a_disk_without_locks_is_said_and_the_run_goes_on(tmp_path, monkeypatch, caplog, error):
    def none(self, *args, **kwargs):
        raise error

    monkeypatch.setattr(run_folder.FileLock, "acquire", none)
    hold(tmp_path).release()
    assert "has no locks" in caplog.text


def test_a_checkpoint_without_a_manifest_is_skipped_and_it_is_said_why(run):
    (run / "checkpoints" / "iteration_00004" / checkpoints.MANIFEST).unlink()
    assert resumption(run).checkpoint.name == "iteration_00002"
    resume(run, quiet=True)
    message = [line for line in (run / "log.txt").read_text().splitlines() if "resuming after 2" in line]
    assert "iteration_00004" in message[0] and checkpoints.MANIFEST in message[0]


def test_a_run_whose_checkpoints_all_lack_a_manifest_says_which(run):
    for path in checkpoints.checkpoints_in(run / "checkpoints"):
        (path / checkpoints.MANIFEST).unlink()
    with pytest.raises(CheckpointError, match=rf"iteration_00002, iteration_00004 .*{checkpoints.MANIFEST}"):
        resumption(run)


def test_checkpoints_that_may_not_be_changed_are_named(run, monkeypatch):
    def refused(self, missing_ok=False):
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(type(run), "unlink", refused)
    with pytest.raises(CheckpointError, match=r"iteration_00004"):
        checkpoints.delete_later(run / "checkpoints", 2)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_is_named(run, capsys):
    (run / ".lock").unlink()
    run.chmod(stat.S_IREAD | stat.S_IEXEC)
    try:
        assert main(["train", "--resume", str(run)]) == 1
    finally:
        run.chmod(stat.S_IRWXU)
    assert "cannot write to the run folder" in capsys.readouterr().err


def test_a_disk_that_refuses_the_lock_file_is_named(tmp_path, monkeypatch):
    def refused(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(run_folder.FileLock, "acquire", refused)
    with pytest.raises(RL4LMsLikeError, match=str(tmp_path)):
        hold(tmp_path)


# --- what components remember -----------------------------------------------------------------------------------------


class Forgetful(RewardFunction):
    """Says what JSON would change."""

    terminal = True

    def __call__(self, prev_observation, action, current_observation, done, meta_info=None) -> float:
        return 0.0

    def state_dict(self):
        return {"counts": {1: 2}}

    def load_state_dict(self, state):
        pass


class Counting(BaseMetric):
    """What it has counted over the whole run."""

    def __init__(self) -> None:
        self.calls = 0

    def compute(self, prompt_texts, generated_texts, reference_texts, meta_infos=None, model=None, split_name=None):
        self.calls += 1
        return {"calls": (None, float(self.calls))}

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


@pytest.mark.parametrize("vec_env", ["text", "subproc"])
def test_parts_of_rewards_and_metrics_remember(vec_env, tmp_path, monkeypatch, tiny_gpt2_dir):
    if vec_env == "subproc":
        pytest.skip("two minutes; done by hand") if not os.environ.get("RL4LMS_LIKE_LONG") else None
    mapping = blocks("causal", tiny_gpt2_dir, "ppo")
    mapping["env"]["vec_env"] = vec_env
    mapping["reward_fn"] = {
        "id": "combine",
        "args": {"rewards": [{"id": "sentiment", "weight": 0.1}, {"id": f"{__name__}:{Stateful.__name__}"}]},
    }
    mapping["train_evaluation"]["metrics"].append({"id": f"{__name__}:Counting"})
    expected = started(mapping, tmp_path, "whole")
    with monkeypatch.context() as patch, pytest.raises(StoppedError):
        stop_after(patch, 3, "files")
        started(mapping, tmp_path)
    assert files_of(resume(tmp_path / "rl4lm_exps" / "run", quiet=True)) == files_of(expected)


def test_a_reward_whose_state_json_would_change_is_named_before_training(tmp_path, tiny_gpt2_dir):
    mapping = blocks("causal", tiny_gpt2_dir, "ppo")
    mapping["reward_fn"] = {"id": f"{__name__}:Forgetful"}
    with pytest.raises(RewardError, match=r"'counts'.* 1,"):
        started(mapping, tmp_path)


@pytest.mark.parametrize("value", [{"a": (1, 2)}, [torch.ones(1)], {"a": {2: 1}}, {"a": [{"b": float}]}])
def test_states_that_json_would_change_are_told(value):
    assert not_json(value) is not None


def test_states_that_json_gives_back_are_fine():
    state = {"a": [1, 2.5, None, True, "x", {"b": []}], "c": 2**200}
    assert not_json(state) is None
    assert json.loads(json.dumps(state)) == state


# --- damage -----------------------------------------------------------------------------------------------------------

GARBAGE = [None, True, -1, 2**70, 1e400, "x", [], {}, [[[]]], {"a": 1}, [1, "2"], float("nan"), -3.5]


def damage(checkpoint, seed: int) -> str:
    """Damages a checkpoint in one way; says which."""
    draw = random.Random(seed)
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    way = draw.choice(["flip", "cut", "swap", "garbage", "manifest", "number", "tensor"])
    if way in ("flip", "cut", "swap", "garbage"):
        file = draw.choice(files)
        content = bytearray(file.read_bytes())
        if way == "flip":
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        elif way == "cut":
            content = content[: draw.randrange(len(content))]
        elif way == "swap":
            content = bytearray(draw.choice([other for other in files if other != file]).read_bytes())
        else:
            content = bytearray(draw.choice([b"", b"[" * 100_000, b"\xff\xfe", b'{"a":' + b"9" * 5000 + b"}", b"null"]))
        file.write_bytes(content)
        return f"{way} {file.name}"
    if way == "tensor":
        tensors = load_file(checkpoint / checkpoints.TENSORS)
        name = draw.choice(sorted(tensors))
        change = draw.choice(["drop", "shape", "dtype", "rename"])
        tensor = tensors.pop(name)
        if change == "shape":
            tensors[name] = torch.zeros(7, 1)
        elif change == "dtype":
            tensors[name] = tensor.to(torch.complex64)
        elif change == "rename":
            tensors[f"{name}x"] = tensor
        save_file(tensors, checkpoint / checkpoints.TENSORS)
        return f"{change} of {name}"
    file = checkpoint / (checkpoints.MANIFEST if way == "manifest" else checkpoints.STATE)
    value = json.loads(file.read_text())
    path = spoil(value, draw)
    file.write_text(json.dumps(value))
    return f"{file.name} at {path}"


def spoil(value, draw) -> str:
    """Puts garbage in the place of one of the values in `value`, or takes it away."""
    path = []
    while True:
        keys = [key for key in (value if isinstance(value, dict) else range(len(value))) if key not in ("versions",)]
        key = draw.choice(keys)
        path.append(str(key))
        inner = value[key]
        if isinstance(inner, dict | list) and len(inner) and draw.random() < 0.8:
            value = inner
            continue
        if draw.random() < 0.3:
            del value[key]
        else:
            value[key] = draw.choice([other for other in GARBAGE if type(other) is not type(inner)])
        return ".".join(path)


@pytest.fixture(scope="module")
def assembled(ended):
    from rl4lms_like.on_policy.assemble import assemble

    return assemble(parse_config(json.loads((ended / "config.json").read_text())))


def outcome(run, assembled) -> str:
    """What resuming comes to, but for the training: the message of a refusal, or that it went through."""
    from rl4lms_like.tracking.base import Tracker

    try:
        found = resumption(run / "checkpoints" / "iteration_00004")
        arguments = (run.parent.parent, found.config.to_dict(), run.parent.name, run.name)
        with Tracker(*arguments, quiet=True, resume=True) as tracker:
            OnPolicyTrainer(assembled, tracker, resume_from=found.checkpoint)
    except RL4LMsLikeError as error:
        return str(error)
    return "taken"


def without_versions(manifest: bytes) -> dict:
    return {key: value for key, value in json.loads(manifest).items() if key != "versions"}


@pytest.mark.parametrize("seed", range(int(os.environ.get("RL4LMS_LIKE_DAMAGES", N_DAMAGES))))
def test_every_damage_is_refused_by_name(seed, ended, assembled, tmp_path):
    folder = tmp_path / "project" / "run"
    (folder / "checkpoints").mkdir(parents=True)
    for file in ended.glob("*.json*"):
        shutil.copy(file, folder)
    checkpoint = shutil.copytree(ended / "checkpoints" / "iteration_00004", folder / "checkpoints" / "iteration_00004")
    before = (checkpoint / checkpoints.MANIFEST).read_bytes()
    way = damage(checkpoint, seed)
    if outcome(folder, assembled) == "taken":
        assert without_versions(before) == without_versions((checkpoint / checkpoints.MANIFEST).read_bytes()), way


@pytest.mark.parametrize("algorithm", ["PPO", "A2C"])
def test_algorithms_of_stable_baselines_go_on_too(algorithm, tmp_path, monkeypatch, tiny_gpt2_dir):
    mapping = blocks("causal", tiny_gpt2_dir, "ppo")
    mapping["alg"] |= {"id": f"stable_baselines3:{algorithm}", "args": {"n_steps": 10, "learning_rate": 1e-3}}
    expected = started(mapping, tmp_path, "whole")
    with monkeypatch.context() as patch, pytest.raises(StoppedError):
        stop_after(patch, 3, "files")
        started(mapping, tmp_path)
    assert files_of(resume(tmp_path / "rl4lm_exps" / "run", quiet=True)) == files_of(expected)


def test_a_full_disk_ends_a_run_with_its_name(run, monkeypatch, capsys):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RunFolder, "append", full)
    assert main(["train", "--resume", str(run)]) == 1
    assert f"cannot write to the run folder {run}: [Errno 28] No space left" in capsys.readouterr().err
