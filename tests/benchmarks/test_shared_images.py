"""The benchmark of shared images compares equal work."""

from __future__ import annotations

import pytest

from benchmarks.shared_images import FAMILIES, GROUP_SIZE, N_PROMPTS, compare, make_reader, rollout


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_and_gradients_of_both_ways_are_equal(family):
    row = compare(family, rounds=1, width=96, layers=1)
    assert row["log_prob_difference"] < 1e-5 and row["gradient_difference"] < 1e-4
    assert row["score_ratio"] == pytest.approx(row["score_repeated_s"] / row["score_shared_s"])


def test_each_group_has_an_image_of_its_own():
    episodes = rollout(make_reader("idefics3", width=96, layers=1), seed=0)
    assert len(episodes.pictures.unique()) == N_PROMPTS and len(episodes.pictures) == N_PROMPTS * GROUP_SIZE
    assert (episodes.pictures.reshape(N_PROMPTS, GROUP_SIZE).diff(dim=1) == 0).all()
