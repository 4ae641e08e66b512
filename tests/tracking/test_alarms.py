"""The report shows what the doctor found, in order, whatever the texts hold."""

from __future__ import annotations

import json

import pytest

from rl4lms_like.tracking import Tracker
from rl4lms_like.tracking.record import read_run
from rl4lms_like.tracking.report import alarms_of
from tests.tracking.test_report import CONFIG, HOSTILE, page_of

LINE = {
    "alarm": "entropy_collapse",
    "iteration": 2,
    "said": "the entropy is 0.01",
    "advice": "Raise alg.args.ent_coef",
    "evidence": {"entropy": [0.01]},
    "examples": [{"prompt": HOSTILE, "response": " ", "reward": 0.51234, "tokens": 7}],
}


@pytest.fixture
def tracker(tmp_path):
    with Tracker(tmp_path, {**CONFIG, "doctor": {"enabled": True}}, "project", "experiment", quiet=True) as tracker:
        yield tracker


def test_each_alarm_has_its_finding_its_advice_and_the_iterations_in_which_it_held(tracker):
    tracker.log_line("alarms.jsonl", LINE)
    tracker.log_line(
        "alarms.jsonl", {"alarm": "ratio_gap", "iteration": 3, "said": "it is 2", "advice": "", "examples": []}
    )
    for iteration, held in enumerate((None, 1, 1, 0), start=1):
        logged = {} if held is None else {"doctor/entropy_collapse": held}
        tracker.log_values({"train/n_updates": iteration, "time/iteration": iteration, **logged})
    first, second = alarms_of(read_run(tracker.run_path))
    assert (first["title"], first["when"]) == ("entropy collapse", "iteration 2; active in 2 of the 3 iterations since")
    assert (first["said"], first["advice"]) == ("The entropy is 0.01.", "Raise alg.args.ent_coef.")
    assert first["examples"] == [(HOSTILE, " ", "reward 0.5123, tokens 7")]
    assert (second["when"], second["advice"]) == ("iteration 3", "")
    page = page_of(tracker.run_path)
    assert "Alerts of the run doctor" in page.text and HOSTILE in page.text and "Alerts2" in page.text.replace("\n", "")
    assert page.count("script") == 0


def test_without_alarms_there_is_no_section(tracker):
    page = page_of(tracker.run_path)
    assert "Alerts of the run doctor" not in page.text and "Alertsnone" in page.text.replace("\n", "")
    config = json.loads((tracker.run_path / "config.json").read_text())
    (tracker.run_path / "config.json").write_text(json.dumps({**config, "doctor": {"enabled": False}}))
    assert "Alerts" not in page_of(tracker.run_path).text
