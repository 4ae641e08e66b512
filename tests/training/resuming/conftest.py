"""A run that was stopped, of the blocks that a module's fixture `mapping` has."""

from __future__ import annotations

import shutil

import pytest

from tests.training.resuming.test_resume import StoppedError, started, stop_after


@pytest.fixture(scope="module")
def ended(mapping, tmp_path_factory):
    """The folder of a run that was stopped in its third iteration. Only to be copied."""
    base = tmp_path_factory.mktemp("ended")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(StoppedError):
        stop_after(patch, 2, "rollout")
        started(mapping, base)
    folder = base / "rl4lm_exps" / "run"
    for path in (folder / "checkpoints").glob("interrupted_*"):
        shutil.rmtree(path)
    return folder


@pytest.fixture
def stopped(ended, tmp_path):
    return shutil.copytree(ended, tmp_path / "rl4lm_exps" / "run")
