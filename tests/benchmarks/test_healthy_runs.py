"""The doctor is quiet on runs that learn: `benchmarks/healthy_runs.py` in short, and what the long one found."""

from __future__ import annotations

import json

import pytest

from benchmarks.healthy_runs import RESULTS, ROOT, RUNS, summary, what_was_said
from rl4lms_like.config.load import load_config
from rl4lms_like.on_policy.doctor.alerts import ALERTS
from rl4lms_like.run import train_config

SHORTER = (
    "train_evaluation.n_iters=8", "train_evaluation.eval_every=4", "train_evaluation.save_model=false",
    "train_evaluation.max_eval_samples=16", "env.n_envs=16",
)  # fmt: skip


@pytest.mark.parametrize("name", ["ppo/causal", "trpo/causal"])
def test_short_healthy_runs_have_no_alarm(name, tmp_path):
    config = load_config(ROOT / RUNS[name], SHORTER)
    message = what_was_said(train_config(config, base_path_to_store_results=tmp_path, quiet=True))
    assert message["alarms"] == []
    assert message["checks"] == 8 * len(ALERTS) + 3 and message["checks_with_alarm"] == 0


def test_ten_healthy_runs_were_quiet():
    found = json.loads(RESULTS.read_text())
    assert set(found["runs"]) == set(RUNS) and len(RUNS) == 10
    assert found["summary"] == summary(found["runs"])
    assert found["summary"]["runs_with_alarm"] == 0
    assert all(run["reward"][1] > run["reward"][0] for run in found["runs"].values()), "they learned"
