"""A preference run that was stopped and resumed leaves the files of one that was not."""

from __future__ import annotations

import signal

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from rl4lms_like.offline.preference_objectives import REFERENCE_FILE, ReferenceObjective
from rl4lms_like.run import resume
from rl4lms_like.system.errors import CheckpointError
from tests.offline.preferences.preference_runs import blocks, run, written
from tests.offline.supervised.test_resume import stopped
from tests.robustness.killed_runs import files_of
from tests.training.resuming.test_resume import StoppedError


def mapping_of(id, tmp_path, model):
    """A log every three steps and a checkpoint every two: sums of what is logged are part of the state."""
    return blocks(id, model, written(tmp_path), save_steps=2, logging_steps=3, gradient_accumulation_steps=1)


@pytest.mark.parametrize("id", ["reward_model", "dpo", "kto"])
@pytest.mark.parametrize(("step", "how"), [(3, StoppedError), (4, signal.SIGTERM)])
def test_a_stopped_run_is_resumed_to_the_same_files(id, step, how, tmp_path, monkeypatch, tiny_gpt2_dir):
    mapping = mapping_of(id, tmp_path, tiny_gpt2_dir)
    expected = run(mapping, tmp_path, "whole")
    folder = stopped(mapping, tmp_path, step, monkeypatch, how)
    monkeypatch.setattr(ReferenceObjective, "_read_all", lambda *_: pytest.fail("the reference was read again"))
    assert resume(folder, quiet=True) == folder
    assert files_of(folder) == files_of(expected)


@pytest.mark.parametrize("changed", ["weights of the reference model", "tokens of the preferences", "log-probs"])
def test_log_probs_of_another_reference_are_refused(changed, tmp_path, monkeypatch, tiny_gpt2_dir):
    folder = stopped(mapping_of("dpo", tmp_path, tiny_gpt2_dir), tmp_path, 3, monkeypatch)
    file = folder / REFERENCE_FILE
    with safe_open(file, framework="pt") as stored:
        metadata = stored.metadata()
    tensors = load_file(file)
    if changed == "log-probs":
        tensors["train"] += 1e-3
    else:
        digests = metadata["digests"]
        start = digests.index(changed) + len(changed) + 4
        metadata["digests"] = f"{digests[:start]}{'0' * 64}{digests[start + 64 :]}"
    save_file(tensors, file, metadata=metadata)
    with pytest.raises(CheckpointError, match=changed):
        resume(folder, quiet=True)


def test_a_damaged_file_is_refused(tmp_path, monkeypatch, tiny_gpt2_dir):
    folder = stopped(mapping_of("dpo", tmp_path, tiny_gpt2_dir), tmp_path, 3, monkeypatch)
    (folder / REFERENCE_FILE).write_bytes(b"nothing")
    with pytest.raises(CheckpointError):
        resume(folder, quiet=True)
