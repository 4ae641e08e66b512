"""A run can resume an update between two of its steps and after the last one, not while weights change."""

from __future__ import annotations

import pytest

from rl4lms_like.rollouts.progress import UpdateProgress, UpdateStage

RESUMABLE = {UpdateStage.BETWEEN_STEPS, UpdateStage.FINISHED}
FINISHED = {UpdateStage.FINISHED, UpdateStage.WEIGHTS_CHANGED}


@pytest.mark.parametrize("stage", UpdateStage)
def test_only_between_steps_and_after_the_last_an_update_is_resumable(stage):
    progress = UpdateProgress()
    progress.stage = stage
    assert progress.is_resumable == (stage in RESUMABLE)
    assert progress.is_finished == (stage in FINISHED)


@pytest.mark.parametrize("stage", UpdateStage)
def test_changing_weights_ends_that_and_a_finished_update_stays_finished(stage):
    progress = UpdateProgress()
    progress.stage = stage
    progress.weights_change()
    assert not progress.is_resumable
    assert progress.is_finished == (stage in FINISHED)


def test_a_restored_progress_is_between_two_steps():
    progress = UpdateProgress()
    progress.load_state_dict({"epoch": 1, "n_done": 2, "order": {}, "n_steps": 2}, {})
    assert progress.stage is UpdateStage.BETWEEN_STEPS and len(progress.steps) == 2
