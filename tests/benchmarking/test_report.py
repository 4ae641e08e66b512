"""Tables, curves, plots, the page and the comparison of a benchmark that is done."""

from __future__ import annotations

import csv
import io
import json
import re
import struct

import numpy as np
import pytest

from rl4lms_like.benchmarking.comparison import compare
from rl4lms_like.benchmarking.curves import learning_curves
from rl4lms_like.benchmarking.jobs import jobs_of
from rl4lms_like.benchmarking.main import benchmark
from rl4lms_like.benchmarking.plots import COLOURS, _apart
from rl4lms_like.benchmarking.results import collect, mean_text
from rl4lms_like.benchmarking.spec import load_benchmark
from rl4lms_like.benchmarking.statistics import summarize
from rl4lms_like.core.errors import RL4LMsLikeError
from tests.benchmarking.conftest import finish, write_spec


@pytest.fixture
def results(finished, tmp_path):
    assert benchmark(finished, report_only=True) == 0
    return tmp_path / "out"


def test_the_table_has_every_label_and_metric(results):
    table = (results / "table.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| ppo")]
    assert rows[0][:4] == ["ppo", "4 of 4", "2.5 ± 1.3", "2.5"]
    assert rows[1] == ["ppo", "71.5", "12", "400", "0.2"]  # tokens, seconds, peak memory, model
    assert "## length/words" in table and "Missing" not in table


def test_the_csv_has_the_numbers_in_full(results):
    rows = list(csv.DictReader(io.StringIO((results / "table.csv").read_text())))
    assert [(row["label"], row["metric"], row["n"]) for row in rows] == [
        ("ppo", "test:length/words", "4"),
        ("slow", "test:length/words", "4"),
    ]
    assert float(rows[0]["std"]) == pytest.approx(np.sqrt(5 / 3))
    assert 1 <= float(rows[0]["iqm_low"]) < 2.5 < float(rows[0]["iqm_high"]) <= 4


def test_the_json_has_every_run(results):
    data = json.loads((results / "results.json").read_text())
    assert len(data["runs"]) == 8 and data["missing"] == []
    assert data["summary"]["slow"]["test:length/words"]["mean"] == 1.5
    assert data["changes"]["slow"] == {"alg.args.learning_rate": 1e-5}


def test_the_page_needs_nothing_beside_it(results):
    page = (results / "report.html").read_text()
    assert not re.findall(r"https?://|<script|@import|url\(", page)
    assert set(re.findall(r'src="([^"]{0,21})', page)) == {"data:image/png;base64"}
    assert "2 labels × 4 seeds, all 8 runs done" in page
    assert "alg.args.learning_rate: 1.0e-05" in page and "python" in page
    assert 'href="runs/ppo/seed_0/report.html"' in page


def test_plots_are_pictures_of_a_readable_size(results):
    files = sorted((results / "figures").iterdir())
    assert [file.name for file in files] == [
        "curve_rollout_info_ep_rew.png",
        "curve_val_length_words.png",
        "scores_test_length_words.png",
    ]
    for file in files:
        head = file.read_bytes()[:24]
        assert head.startswith(b"\x89PNG")
        width, height = struct.unpack(">II", head[16:24])
        assert 900 < width < 1800 and 250 < height < 1000, file


def test_the_same_results_make_the_same_files(results, finished):
    before = {file: file.read_bytes() for file in results.rglob("*") if file.suffix in {".md", ".csv", ".json", ".png"}}
    benchmark(finished, report_only=True)
    assert {file: file.read_bytes() for file in before} == before


def test_seeds_that_are_missing_are_counted_and_named(finished, tmp_path):
    (tmp_path / "out/runs/ppo/seed_2/result.json").unlink()
    (tmp_path / "out/runs/ppo/seed_2/output.txt").write_text("going\nthe <b>reward</b> failed\n")
    benchmark(finished, seeds=5, report_only=True)
    assert "the &lt;b&gt;reward&lt;/b&gt; failed" in (tmp_path / "out/report.html").read_text()
    table = (tmp_path / "out/table.md").read_text()
    assert "| 3 of 5 |" in table and "| 4 of 5 |" in table
    assert "* ppo, seed 2 did not end well" in table and "* slow, seed 4 was not started" in table


def test_a_key_that_no_run_has_is_told_and_not_passed_over(finished, tmp_path, capsys):
    spec = finished.read_text() + "metrics: [length/wrds]\ncurves: ['val:length/words', rollout_info/ep_rwd]\n"
    finished.write_text(spec)
    benchmark(finished, report_only=True)
    printed = capsys.readouterr().out
    assert "metrics: no run has a number for test:length/wrds; there are test:length/words, val:length/words" in printed
    assert "curves: no run has a number for rollout_info/ep_rwd" in printed
    assert "no run has a number for val:length/words" not in printed


# --- curves ----------------------------------------------------------------------------------------------------------


def curve(spec, key, **keys):
    spec.write_text(spec.read_text() + f"curves: ['{key}']\n" + "".join(f"{k}: {v}\n" for k, v in keys.items()))
    (curves,) = learning_curves(collect(load_benchmark(spec)))
    return curves


def test_along_iterations_the_points_are_the_iterations(finished):
    curves = curve(finished, "rollout_info/ep_rew")
    assert (curves.title, curves.unit) == ("Reward", "task reward of an episode")
    ppo, slow = curves.lines
    assert ppo.x.tolist() == [1, 2] and ppo.n_seeds == 4
    assert ppo.center == pytest.approx([0.1, 2.5])  # the second rewards are 1, 2, 3, 4
    assert slow.center == pytest.approx([0.1, 1.5])
    low, high = ppo.band
    assert low[0] == pytest.approx(0.1) and low[1] < 2.5 < high[1]


def test_an_evaluation_stands_at_the_iterations_done_before_it(finished):
    assert curve(finished, "val:length/words").lines[0].x.tolist() == [0, 2]


@pytest.mark.parametrize(("axis", "start", "stop"), [("tokens", 30, 70), ("seconds", 2, 4)])
def test_other_axes_end_where_the_first_seed_ends(finished, axis, start, stop):
    """The seeds' last iterations end at 70, 71, 72 and 73 tokens."""
    line = curve(finished, "rollout_info/ep_rew", x=axis).lines[0]
    assert (line.x[0], line.x[-1]) == (start, stop)
    if axis == "tokens":  # seed 3 rises from 0.1 at 30 to 4 at 73; a quarter is trimmed at each end: seeds 1 and 2
        at_70 = [0.1 + (reward - 0.1) * 40 / (40 + seed) for seed, reward in ((1, 2), (2, 3))]
        assert line.center[-1] == pytest.approx(np.mean(at_70))


def test_names_at_the_ends_of_lines_do_not_overlap():
    places = _apart([10.0, 11.0, 12.0, 50.0, 99.0, 100.0], 8.0, 0.0, 100.0)
    gaps = np.diff(places)
    assert min(gaps) >= 8 - 1e-9
    assert places[3] == 50 and sum(places[:3]) / 3 == pytest.approx(11)


def test_colours_differ():
    assert len(set(COLOURS)) == len(COLOURS) == 8


def test_a_mean_has_the_decimals_of_its_spread():
    assert mean_text(summarize([0.83, 0.85])) == "0.840 ± 0.014"
    assert mean_text(summarize([-3.0, -5.0])) == "−4.0 ± 1.4"
    assert mean_text(summarize([0.25])) == "0.25"
    assert mean_text(summarize([1.0, 1.0])) == "1 ± 0"


# --- compare ---------------------------------------------------------------------------------------------------------


def test_two_labels_are_compared(results):
    text = compare(results / "ppo", results / "runs/slow")
    assert text.startswith("test:length/words\n")
    assert "difference of the means 1 [" in text
    assert "P(ppo > slow) = 0.719 [" in text  # 11.5 of 16 pairs
    assert "val:" not in text
    assert compare(results / "ppo", results / "slow", metrics=["val:length/words"]).startswith("val:length/words\n")


def test_two_benchmarks_are_compared_label_by_label(results, tmp_path):
    other = tmp_path / "other"
    for job in jobs_of(load_benchmark(write_spec(tmp_path, seeds=2), results=other)):
        finish(job, 9.0)
    text = compare(results, other)
    assert text.startswith("ppo\n\ntest:length/words\n") and "slow" not in text
    assert "P(out > other) = 0 [0, 0]" in text


def test_a_comparison_that_cannot_be_made_says_what_is_there(results, tmp_path):
    with pytest.raises(RL4LMsLikeError, match="no finished run"):
        compare(results / "pqo", results / "slow")
    with pytest.raises(RL4LMsLikeError, match="test:wrds: not a metric of both; they have test:length/words"):
        compare(results / "ppo", results / "slow", metrics=["wrds"])
    with pytest.raises(RL4LMsLikeError, match="give RESULTS/LABEL twice"):
        compare(results, results / "slow")
