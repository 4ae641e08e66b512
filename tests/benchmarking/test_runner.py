"""Jobs in processes: real runs once, light stand-ins for the rest."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rl4lms_like.benchmarking import jobs, processes, runner, worker
from rl4lms_like.benchmarking.jobs import at_work, claimed, jobs_of, prepare_folder, read_result, state_of
from rl4lms_like.benchmarking.runner import Display, benchmark
from rl4lms_like.benchmarking.spec import load_benchmark
from rl4lms_like.system.errors import RL4LMsLikeError
from tests.benchmarking.conftest import finish, write_spec

CLI = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n" \
      "from rl4lms_like.cli import main; sys.exit(main(sys.argv[1:]))"  # fmt: skip


# --- real runs -------------------------------------------------------------------------------------------------------


def test_runs_train_in_processes_of_their_own_and_a_broken_one_stops_no_other(tmp_path, tiny_gpt2_dir, capsys):
    broken = {"set": {"alg.policy.args.model_name": "no-such-owner/model"}}
    spec = write_spec(tmp_path, model=tiny_gpt2_dir, runs={"broken": broken, "good": {}}, processes=2, seeds=[3])
    assert benchmark(spec) == 1
    printed = capsys.readouterr().out
    assert "broken, seed 3: FAILED with status 1" in printed
    assert "no-such-owner/model" in printed
    assert f"full output: {tmp_path / 'out/runs/broken/seed_3/output.txt'}" in printed
    assert "0 of 1" in printed and "1 of 1" in printed
    assert (tmp_path / "out/report.html").is_file()

    folder = tmp_path / "out/runs/good/seed_3"
    result = read_result(folder)
    assert (result.label, result.seed, result.iterations) == ("good", 3, 2)
    assert result.tokens >= 2 * 8 and result.seconds > 0 and 0 < result.model_mb < 10
    assert result.peak_memory_mb is None or 100 < result.peak_memory_mb < 4000
    assert set(result.scores) == {"test:length/words", "val:length/words"}
    config = json.loads((folder / "config.json").read_text())
    assert (config["seed"], config["n_threads"]) == (3, 1)
    assert (folder / "model/model.safetensors").is_file()

    began = (folder / "result.json").stat().st_mtime_ns
    assert benchmark(spec, only=["good"]) == 0
    assert (folder / "result.json").stat().st_mtime_ns == began  # not run again


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="signals as on POSIX")
def test_ctrl_c_ends_the_runs_cleanly_and_reports_what_is_there(tmp_path, tiny_gpt2_dir):
    spec = write_spec(
        tmp_path, model=tiny_gpt2_dir, base={"train_evaluation.n_iters": 100_000}, runs={"long": {}}, seeds=1
    )
    with subprocess.Popen(
        [sys.executable, "-c", CLI, "benchmark", str(spec)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        folder = tmp_path / "out/runs/long/seed_0"
        wait_for(lambda: (folder / "training_info.jsonl").is_file())
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=60)
    assert process.returncode == 130, printed
    assert "interrupted: saving the state of 1 run" in printed
    assert "long, seed 0 did not finish, and is resumed when the benchmark is started again" in printed
    assert (tmp_path / "out/report.html").is_file()
    assert list((folder / "checkpoints").glob("*/model.safetensors"))
    (job,) = jobs_of(load_benchmark(spec))
    assert state_of(job) == "stopped"


def wait_for(condition, seconds=60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


# --- the pipe that ends a run ----------------------------------------------------------------------------------------

HANGING = """
import sys, time
from rl4lms_like.benchmarking.worker import end_with_the_runner
end_with_the_runner()
try:
    print("ready", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    sys.exit(7)
"""


def test_a_run_ends_when_its_runner_dies_even_where_sigint_is_ignored():
    process = subprocess.Popen(
        [sys.executable, "-c", "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + HANGING],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout.readline() == b"ready\n"
    process.stdin.close()  # as the system does for a runner that was killed
    assert process.wait(timeout=20) == 7
    process.stdout.close()


def test_a_run_that_does_not_end_is_killed_with_those_it_started(monkeypatch):
    monkeypatch.setattr(processes, "GRACE_S", 0.2)
    code = "import subprocess, sys, time; subprocess.Popen(['sleep', '60']); print('ready', flush=True); time.sleep(60)"
    process = processes.LocalProcess(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout.readline() == b"ready\n"
    began = time.monotonic()
    processes.end([process])
    assert process.returncode == -signal.SIGKILL
    assert process.stdout.read() == b""  # read until nobody holds the other end any more
    assert time.monotonic() - began < 30
    process.stdout.close()


# --- what has to be run ----------------------------------------------------------------------------------------------


@pytest.fixture
def started(monkeypatch):
    """Stand-ins for the runs: each writes its result in a blink, or fails if its seed is 9. No plots."""
    names = []

    def start(job, threads):
        names.append(job.name)
        if job.seed == 9:
            prepare_folder(job)
            (job.folder / "output.txt").write_text("going\nthe reward failed\n")
            return processes.LocalProcess([sys.executable, "-c", "raise SystemExit(1)"], stdin=subprocess.PIPE)
        finish(job)
        return processes.LocalProcess([sys.executable, "-c", ""], stdin=subprocess.PIPE)

    monkeypatch.setattr(runner, "start", start)
    monkeypatch.setattr(runner, "learning_curves", lambda found: [])
    monkeypatch.setattr(runner, "write_report", lambda found, curves: found.benchmark.results / "report.html")
    return names


def test_what_is_done_is_not_run_again(tmp_path, started):
    spec = write_spec(tmp_path, runs={"a": {}, "b": {}})
    assert benchmark(spec) == 0
    assert started == ["a, seed 0", "b, seed 0", "a, seed 1", "b, seed 1"]
    started.clear()
    assert benchmark(spec) == 0
    assert benchmark(spec, report_only=True) == 0
    assert started == []
    (tmp_path / "out/runs/b/seed_0/result.json").unlink()
    assert benchmark(spec, seeds=3) == 0
    assert started == ["b, seed 0", "a, seed 2", "b, seed 2"]


def test_a_changed_config_is_run_again_and_the_old_result_is_set_aside(tmp_path, started):
    benchmark(write_spec(tmp_path, seeds=1))
    marker = tmp_path / "out/runs/ppo/seed_0/marker"
    marker.touch()
    started.clear()
    benchmark(write_spec(tmp_path, seeds=1, base={"alg.args.gamma": 0.5}))
    assert started == ["ppo, seed 0"]
    assert not marker.exists()
    assert (tmp_path / "out/replaced/ppo/seed_0_1/marker").is_file()


def test_a_key_that_came_later_makes_no_old_result_void(tmp_path, started):
    spec = write_spec(tmp_path, seeds=1)
    benchmark(spec)
    (job,) = jobs_of(load_benchmark(spec))
    stored = json.loads((job.folder / "job.json").read_text())
    assert stored["config"]["env"].pop("reward_workers") == 0
    (job.folder / "job.json").write_text(json.dumps(stored))
    assert state_of(job) == "done"
    stored["config"]["env"]["reward_workers"] = 1  # what it was run with is not today's default
    (job.folder / "job.json").write_text(json.dumps(stored))
    assert state_of(job) == "changed"


def test_an_unfinished_run_starts_over_in_a_fresh_folder(tmp_path):
    (job,) = jobs_of(load_benchmark(write_spec(tmp_path, seeds=1)))
    assert state_of(job) == "new"
    prepare_folder(job)
    (job.folder / "rollout_info.jsonl").write_text('{"iteration": 1}\n')
    assert state_of(job) == "unfinished"
    (job.folder / "result.json").write_text('{"label": "p')  # cut off
    assert state_of(job) == "unfinished"
    prepare_folder(job)
    assert [file.name for file in job.folder.iterdir()] == ["job.json"]


def test_a_failure_is_shown_with_its_last_words_and_the_others_go_on(tmp_path, started, capsys):
    assert benchmark(write_spec(tmp_path, seeds=[9, 1])) == 1
    assert started == ["ppo, seed 9", "ppo, seed 1"]
    printed = capsys.readouterr().out
    assert "ppo, seed 9: FAILED with status 1\n    going\n    the reward failed\n" in printed
    assert "1 of 2" in printed


def test_not_more_than_asked_for_go_on_side_by_side(tmp_path, started, monkeypatch):
    spec = write_spec(tmp_path, seeds=5)
    going, most = [], 0

    def start(job, threads):
        nonlocal most
        going[:] = [process for process in going if process.poll() is None]
        finish(job)
        going.append(
            processes.LocalProcess([sys.executable, "-c", "import time; time.sleep(0.3)"], stdin=subprocess.PIPE)
        )
        most = max(most, len(going))
        return going[-1]

    monkeypatch.setattr(runner, "start", start)
    assert benchmark(spec, processes=2) == 0
    assert most == 2


def test_two_benchmarks_do_not_share_a_folder(tmp_path, started):
    with claimed(tmp_path / "out"), pytest.raises(RL4LMsLikeError, match=str(tmp_path / "out")):
        benchmark(write_spec(tmp_path))
    assert started == []


def test_a_run_that_is_still_at_work_is_waited_for(tmp_path):
    """Its benchmark was killed and started again at once, while it saves what it has."""
    (job,) = jobs_of(load_benchmark(write_spec(tmp_path, seeds=1)))
    prepare_folder(job)
    with at_work(job.folder):
        later = threading.Thread(target=prepare_folder, args=(job,))
        later.start()
        time.sleep(0.3)
        (job.folder / "saved").touch()  # the folder is still the earlier run's
        assert later.is_alive()
    later.join(timeout=20)
    assert [file.name for file in job.folder.iterdir()] == ["job.json"]


def test_a_run_that_does_not_end_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "GRACE_S", 0.0)
    (job,) = jobs_of(load_benchmark(write_spec(tmp_path, seeds=1)))
    prepare_folder(job)
    with at_work(job.folder), pytest.raises(RL4LMsLikeError, match="seed_0"):
        prepare_folder(job)


def test_a_results_folder_that_cannot_be_written_is_named(tmp_path, started):
    (tmp_path / "file").touch()
    for report_only in (False, True):
        with pytest.raises(RL4LMsLikeError, match=r"file/out"):
            benchmark(write_spec(tmp_path), results=tmp_path / "file/out", report_only=report_only)
    assert started == []


def test_nothing_starts_where_the_report_could_not_be_made(tmp_path, started, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RL4LMsLikeError, match="benchmark"):
        benchmark(write_spec(tmp_path))
    assert started == []


def test_the_time_left_comes_from_the_runs_that_ended(tmp_path):
    five = jobs_of(load_benchmark(write_spec(tmp_path, seeds=5)))
    display = Display("x")
    display.start(["new"] * 5, 2)
    for job in five[:2]:
        display.started(job)
    assert display.left() == "-"
    display.ended(five[0], None, 60.0)
    assert display.left() == "2:00"  # four are left, two at a time
    assert Path(tmp_path / "out").exists() is False


def test_what_nobody_expected_is_written_to_the_output_without_secrets(tmp_path, tiny_gpt2_dir, monkeypatch, capsys):
    def fail(*_, **__):
        raise RuntimeError("the server does not know correct-horse-battery-staple")

    monkeypatch.setenv("JUDGE_API_KEY", "correct-horse-battery-staple")
    monkeypatch.setattr("rl4lms_like.run.train_config", fail)
    (job,) = jobs_of(load_benchmark(write_spec(tmp_path, model=tiny_gpt2_dir, runs={"a": {}}, seeds=1)))
    prepare_folder(job)
    monkeypatch.setattr(worker, "end_with_the_runner", lambda: None)
    with pytest.raises(SystemExit) as ended:
        worker.start(str(job.folder))
    assert ended.value.code == 1
    message = capsys.readouterr().err
    assert "Traceback" in message and "RuntimeError: the server does not know ***" in message
