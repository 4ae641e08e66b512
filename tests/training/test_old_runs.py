"""Runs that version 0.1.0 wrote are read by the commands of today."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import pytest

from rl4lms_like.cli import main
from tests.conftest import REPOSITORY


@pytest.fixture
def runs(tmp_path):
    """Two labels of a benchmark, one run each; the first with its model."""
    return shutil.copytree(REPOSITORY / "tests" / "data" / "run_0_1_0", tmp_path / "results") / "runs"


def test_its_model_is_evaluated_with_the_metrics_of_its_config(runs):
    run = runs / "ppo" / "seed_0"
    before = json.loads((run / "test_split_metrics.jsonl").read_text().splitlines()[-1])["metrics"]
    assert main(["evaluate", str(run)]) == 0
    after = json.loads((run / "evaluation" / "test_split_metrics.jsonl").read_text())["metrics"]
    assert after.keys() == before.keys()
    assert all(isinstance(score, int | float) for score in after.values())


def test_where_no_evaluation_can_be_written_is_told_before_the_model_is_loaded(runs, monkeypatch, capsys):
    def refused(self, *arguments, **named):
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", refused)
    monkeypatch.setattr("rl4lms_like.policies.loading.load_model", lambda *a, **b: pytest.fail("it was loaded"))
    assert main(["evaluate", str(runs / "ppo" / "seed_0")]) == 1
    message = capsys.readouterr().err
    assert str(runs / "ppo" / "seed_0" / "evaluation") in message and "--output" in message


def test_its_model_writes_as_its_rollouts_did(runs, capsys):
    assert main(["generate", str(runs / "ppo" / "seed_0"), "1 2 3", "--n", "2", "--json"]) == 0
    texts = json.loads(capsys.readouterr().out)["texts"]
    assert len(texts) == 2 and all(len(text.split()) <= 4 for text in texts)  # its max_new_tokens


def test_its_files_become_a_report(runs):
    run = runs / "ppo" / "seed_0"
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    assert "length/words" in page and "increasing_numbers_in_text" in page


def test_two_of_them_are_compared(runs, capsys):
    assert main(["compare", str(runs / "ppo"), str(runs / "slow"), "--metric", "length/words"]) == 0
    assert "P(ppo > slow) = " in capsys.readouterr().out
