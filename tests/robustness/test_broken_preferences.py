"""Broken preference files: `python -m tests.robustness.broken_preferences` in short."""

from __future__ import annotations

import pytest

from tests.robustness.broken_preferences import KINDS, made_model, tried


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return made_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("first", range(len(KINDS)), ids=list(KINDS))
def test_a_broken_file_is_refused_with_its_place_or_read(first, model, tmp_path):
    found = [tried(seed, tmp_path, model) for seed in range(first, first + 4 * len(KINDS), len(KINDS))]
    assert [each for each in found if each["verdict"] == "fault"] == []
