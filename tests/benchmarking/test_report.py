"""Tables, curves, plots, the page and the comparison of a benchmark that is done."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import re
import struct

import numpy as np
import pytest

from rl4lms_like.benchmarking.jobs import jobs_of, read_result, state_of, write_result
from rl4lms_like.benchmarking.report import COLOURS, comparisons, learning_curves, plot_curves, polyline
from rl4lms_like.benchmarking.results import collect, compare, summary_texts
from rl4lms_like.benchmarking.runner import benchmark
from rl4lms_like.benchmarking.spec import load_benchmark
from rl4lms_like.benchmarking.statistics import summarize
from rl4lms_like.system.errors import RL4LMsLikeError
from rl4lms_like.tracking.record import read_run
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
    assert [rows[0][name] for name in ("iqm_low", "iqm_high", "lowest", "highest")] == ["", "", "1.0", "4.0"]


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
    assert "* ppo, seed 2 did not finish" in table and "* slow, seed 4 was not started" in table


def test_a_benchmark_that_has_nothing_yet_has_no_empty_tables(tmp_path):
    spec = write_spec(tmp_path, metrics=["length/words", "test:length/words"])
    assert benchmark(spec, report_only=True) == 0
    table = (tmp_path / "out/table.md").read_text()
    assert "Cost" not in table and table.count("## length/words") == 1
    assert "Cost" not in (tmp_path / "out/report.html").read_text()


def test_a_key_that_no_run_has_is_told_and_not_passed_over(finished, tmp_path, capsys):
    spec = finished.read_text() + "metrics: [length/wrds]\ncurves: ['val:length/words', rollout_info/ep_rwd]\n"
    finished.write_text(spec)
    benchmark(finished, report_only=True)
    printed = capsys.readouterr().out
    assert "metrics: no run has a value for test:length/wrds; available: test:length/words, val:length/words" in printed
    assert "curves: no run has a value for rollout_info/ep_rwd" in printed
    assert "no run has a value for val:length/words" not in printed


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


def test_a_curve_along_tokens_has_its_corners(finished):
    """All seeds have a point at 30; what lies between two points is never drawn instead of one."""
    line = curve(finished, "rollout_info/ep_rew", x="tokens").lines[0]
    assert line.x.tolist() == [30, 70]


def test_seeds_that_share_no_place_on_the_axis_have_no_curve(tmp_path):
    spec = write_spec(tmp_path)
    for job in jobs_of(load_benchmark(spec)):
        finish(job, tokens=[(30, 40), (50, 60)][job.seed])
    assert curve(spec, "rollout_info/ep_rew", x="tokens").lines == ()


@pytest.mark.parametrize(("axis", "places"), [("iterations", [0, 15, 30]), ("tokens", [0, 2640, 5280]),
                                              ("seconds", [0, 3, 5])])  # fmt: skip
def test_evaluations_of_a_supervised_run_stand_at_its_steps(tmp_path, axis, places):
    """They are logged by epoch, everything else by optimizer step."""
    (job,) = jobs_of(load_benchmark(write_spec(tmp_path, seeds=1)))
    finish(job)
    (job.folder / "rollout_info.jsonl").unlink()
    steps = [(15, 2640, 1.0, 5.0), (30, 5280, 2.0, 7.5)]
    lines = [
        {"iteration": i, "timesteps": n, "supervised/epoch": epoch, "time/steps_per_s": rate, "supervised/loss": 2.0}
        for i, n, epoch, rate in steps
    ]
    (job.folder / "training_info.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    scores = [{"epoch": epoch, "metrics": {"length/words": epoch}} for epoch in (0, 1, 2)]
    (job.folder / "val_split_metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in scores))
    run = read_run(job.folder)
    assert list(polyline(run, "val:length/words", axis).values()) == list(zip(places, [0, 1, 2], strict=True))
    assert [place for place, _ in polyline(run, "supervised/loss", axis).values()] == places[1:]


@pytest.mark.parametrize("rewards", [(0.0, 0.0), (0.0, 0.5), (-1.0, 0.5), (0.5, 0.5)])
@pytest.mark.filterwarnings("error")
def test_a_logarithmic_axis_leaves_out_what_it_cannot_show(tmp_path, rewards):
    spec = write_spec(tmp_path, curves=[{"key": "rollout_info/ep_rew", "log": True, "lines": {"none": 0, "aim": 0.1}}])
    for job in jobs_of(load_benchmark(spec)):
        finish(job, rewards=rewards)
    found = collect(load_benchmark(spec))
    (curves,) = learning_curves(found)
    linear = dataclasses.replace(curves, spec=dataclasses.replace(curves.spec, log=False))
    files = tmp_path / "log.png", tmp_path / "linear.png"
    for each, file in zip((curves, linear), files, strict=True):
        plot_curves(each, found.labels, file)
    assert (files[0].read_bytes() == files[1].read_bytes()) == (max(rewards) <= 0)


def test_a_label_that_a_logarithmic_axis_cannot_show_is_named(tmp_path):
    runs = {"exact": {}, "near": {"set": {"alg.args.gamma": 0.5}}}
    spec = write_spec(tmp_path, runs=runs, curves=[{"key": "rollout_info/ep_rew", "log": True}])
    for job in jobs_of(load_benchmark(spec)):
        finish(job, rewards=(0.0, 0.5 * (job.label == "near")))
    found = collect(load_benchmark(spec))
    figure = plot_curves(*learning_curves(found), found.labels, tmp_path / "log.png")
    assert names_in(figure) == ["exact: not above 0", "near"]


def names_in(figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].get_legend().get_texts()]


def test_every_line_has_its_name_in_its_colour(tmp_path):
    spec = write_spec(tmp_path, runs={"a": {}, "_b": {}}, curves=[{"key": "rollout_info/ep_rew", "lines": {"aim": 2}}])
    for job in jobs_of(load_benchmark(spec)):
        finish(job)
    found = collect(load_benchmark(spec))
    figure = plot_curves(*learning_curves(found), found.labels, tmp_path / "curves.png")
    assert names_in(figure) == ["a", "_b", "aim"]
    colours = [text.get_color() for text in figure.axes[0].get_legend().get_texts()]
    assert colours == [line.get_color() for line in figure.axes[0].lines] and colours[:2] == list(COLOURS[:2])


def test_colours_differ():
    assert len(set(COLOURS)) == len(COLOURS) == 8


def test_who_beats_whom_is_told_from_both_sides_alike():
    (_, (_, upper)), (_, (lower, _)) = comparisons({"ppo": [1.0, 2, 3, 4, 5], "slow": [0.0, 1, 2, 3, 4]})
    assert (upper[0], lower[0]) == ("0.68", "0.32")
    (low, high), (other_low, other_high) = (map(float, pair[1].strip("[]").split(", ")) for pair in (upper, lower))
    assert low < 0.68 < high
    assert (round(1 - high, 2), round(1 - low, 2)) == (other_low, other_high)


def test_an_iqm_and_its_interval_have_the_decimals_of_the_mean():
    assert summary_texts(summarize([0.9, 0.94, 0.9, 0.9, 0.9])) == ("0.908 ± 0.018", "0.900", "[0.900, 0.927]")
    assert summary_texts(summarize([0.9, 0.94, 0.9, 0.9]))[2] == "range 0.900 to 0.940"
    assert summary_texts(summarize([0.9]))[2] == ""


@pytest.mark.parametrize(
    ("scores", "mean"),
    [([0.83, 0.85], "0.840 ± 0.014"), ([-3.0, -5.0], "−4.0 ± 1.4"), ([0.25], "0.25"), ([1.0, 1.0], "1 ± 0")],
)
def test_a_mean_has_the_decimals_of_its_spread(scores, mean):
    assert summary_texts(summarize(scores))[0] == mean


# --- compare ---------------------------------------------------------------------------------------------------------


def test_two_labels_are_compared(results):
    text = compare(results / "ppo", results / "runs/slow")
    assert text.startswith("test:length/words\n")
    assert "difference of the means 1;" in text
    assert "P(ppo > slow) = 0.719\n" in text  # 11.5 of 16 pairs
    assert "val:" not in text
    assert compare(results / "ppo", results / "slow", metrics=["val:length/words"]).startswith("val:length/words\n")


def test_two_benchmarks_are_compared_label_by_label(results, tmp_path):
    other = tmp_path / "other"
    for job in jobs_of(load_benchmark(write_spec(tmp_path, seeds=2), results=other)):
        finish(job, 9.0)
    text = compare(results, other)
    assert text.startswith("ppo\n\ntest:length/words\n") and "slow" not in text
    assert "P(out > other) = 0\n" in text


@pytest.mark.parametrize(("n", "has_intervals"), [(2, False), (4, False), (5, True)])
def test_few_seeds_are_compared_by_their_range_and_it_is_said(tmp_path, n, has_intervals):
    runs = {"ppo": {}, "slow": {"set": {"alg.args.gamma": 0.5}}}
    spec = write_spec(tmp_path, runs=runs, seeds=n)
    for job in jobs_of(load_benchmark(spec)):
        finish(job, job.seed + 10.0 * (job.label == "ppo"))
    assert benchmark(spec, report_only=True) == 0
    out = tmp_path / "out"
    text = compare(out / "ppo", out / "slow")
    assert ("P(ppo > slow) = 1 [1, 1]" in text) == has_intervals
    assert ("ewer than 5 seeds" in text and " to " in text) != has_intervals
    assert (" range 1" in (out / "table.md").read_text()) != has_intervals
    assert ("<td>range " in (out / "report.html").read_text()) != has_intervals


def test_one_seed_is_said_to_tell_nothing_of_another(results):
    for seed in (1, 2, 3):
        (results / f"runs/slow/seed_{seed}/result.json").unlink()
    assert "With one seed" in compare(results / "ppo", results / "slow")
    assert "With one seed" not in compare(results / "ppo", results / "ppo")


def test_a_results_folder_has_its_name_from_within_too(results, tmp_path, monkeypatch):
    other = tmp_path / "other"
    for job in jobs_of(load_benchmark(write_spec(tmp_path, seeds=2), results=other)):
        finish(job, 9.0)
    monkeypatch.chdir(results)
    assert "P(out > other)" in compare(".", other)


def test_a_comparison_that_cannot_be_made_says_what_is_there(results, tmp_path):
    with pytest.raises(RL4LMsLikeError, match="pqo"):
        compare(results / "pqo", results / "slow")
    with pytest.raises(RL4LMsLikeError, match=r"test:wrds.*test:length/words"):
        compare(results / "ppo", results / "slow", metrics=["wrds"])
    with pytest.raises(RL4LMsLikeError, match=str(results)):
        compare(results, results / "slow")


@pytest.mark.parametrize(
    "content",
    [
        *("[" * 200_000, "[1]", "\udcff", "9" * 5000, "{}"),
        *({"scores": {"test:x": "<b>"}}, {"scores": [1]}, {"scores": {"test:x": float("nan")}}, {"tokens": "1"}),
        *({"versions": [1]}, {"seed": "x"}),
    ],
)
def test_a_result_that_no_benchmark_wrote_is_named_or_run_again(finished, capsys, content):
    """A folder of results may come from somebody else."""
    (job, *_) = jobs_of(load_benchmark(finished))
    file = job.folder / "result.json"
    text = content if isinstance(content, str) else json.dumps(json.loads(file.read_text()) | content)
    file.write_text(text, encoding="utf-8", errors="surrogateescape")
    if text == "{}" or text[-1] == "}":
        with pytest.raises(RL4LMsLikeError, match=str(file)):
            benchmark(finished, report_only=True)
    else:
        assert state_of(job) == "unfinished"
        benchmark(finished, report_only=True)
        assert "3 of 4" in (job.folder.parents[2] / "table.md").read_text()


@pytest.mark.parametrize("content", ["[" * 200_000, "[1]", "3", "\udcff", '{"config": 3}', '{"config": []}'])
def test_a_job_that_no_benchmark_wrote_is_unfinished(finished, content):
    (job, *_) = jobs_of(load_benchmark(finished))
    (job.folder / "job.json").write_text(content, encoding="utf-8", errors="surrogateescape")
    assert state_of(job) in ("unfinished", "changed")
    benchmark(finished, report_only=True)


def test_a_benchmark_writes_through_no_link(finished, tmp_path):
    own, out = tmp_path / "own.txt", tmp_path / "out"
    own.write_text("mine")
    benchmark(finished, report_only=True)
    (job, *_) = jobs_of(load_benchmark(finished))
    pictures = [path.relative_to(out) for path in (out / "figures").iterdir()]
    for name in ("report.html", "results.json", "table.csv", "table.md", "report.html.partial", *pictures):
        (out / name).unlink(missing_ok=True)
        (out / name).symlink_to(own)
    benchmark(finished, report_only=True)
    (job.folder / "job.json.partial").symlink_to(own)
    (job.folder / "result.json.partial").symlink_to(own)
    write_result(job.folder, read_result(job.folder))
    (out / ".lock").symlink_to(own)
    with pytest.raises(RL4LMsLikeError, match=r"\.lock"):
        benchmark(finished)
    assert own.read_text() == "mine"
