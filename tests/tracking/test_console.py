from __future__ import annotations

import io
import json
import logging
import math
import os
import subprocess
import sys

import pytest
from rich.console import Console

from rl4lms_like.tracking.base import IN_SHORT, Tracker
from rl4lms_like.tracking.charts import duration
from rl4lms_like.tracking.console import ConsoleHandler, ConsoleSink, sparkline
from rl4lms_like.tracking.sink import RunDescription

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


def sink_to(stream: io.StringIO, *, terminal: bool, quiet: bool = False, width: int = 110) -> ConsoleSink:
    console = Console(file=stream, force_terminal=terminal, width=width, highlight=False, legacy_windows=False)
    return ConsoleSink(quiet=quiet, console=console)


def iterate(sink: ConsoleSink, tmp_path, n_iters: int = 3) -> None:
    sink.open(RunDescription(tmp_path, "p", "my_run"))
    sink.start(n_iters)
    for iteration in range(1, n_iters + 1):
        values = {"rollout_info/ep_rew": 0.1 * iteration, "rollout_info/kl_div_mean": 0.05, "time/tokens_per_s": 3120.4}
        sink.write(values, iteration=iteration, timesteps=iteration)


def test_elsewhere_than_on_a_terminal_an_iteration_is_one_aligned_line(tmp_path):
    stream = io.StringIO()
    iterate(sink_to(stream, terminal=False, width=40), tmp_path)
    header, *rows = [line for line in stream.getvalue().splitlines() if line]
    assert header.split()[:3] == ["iteration", "reward", "KL"]
    assert [row.split()[0] for row in rows] == ["1/3", "2/3", "3/3"]
    assert rows[2].split()[1:3] == ["0.300", "0.0500"]
    assert "3,120" in rows[0]
    assert {len(row) for row in rows} == {len(header)}
    assert "\x1b" not in stream.getvalue()


def test_a_terminal_shows_a_bar_and_gets_its_cursor_back(tmp_path):
    stream = io.StringIO()
    sink = sink_to(stream, terminal=True)
    iterate(sink, tmp_path)
    assert HIDE in stream.getvalue() and SHOW not in stream.getvalue()
    sink.close()
    sink.close()
    assert stream.getvalue().count(SHOW) == 1
    for part in ("my_run", "3/3", "0.300", "3,120"):
        assert part in stream.getvalue()


def test_a_terminal_shows_the_rewards_so_far_without_those_that_are_no_number(tmp_path):
    stream = io.StringIO()
    sink = sink_to(stream, terminal=True)
    iterate(sink, tmp_path)
    sink.write({"rollout_info/ep_rew": math.nan}, iteration=4, timesteps=4)
    sink.write({"train/loss": 0.5}, iteration=5, timesteps=5)
    sink.write({"rollout_info/ep_rew": 0.0}, iteration=6, timesteps=6)
    sink.close()
    assert sparkline([0.1, 0.2, 0.3, 0.0]) in stream.getvalue()


def test_a_terminal_gets_its_cursor_back_from_a_run_that_nobody_closed(tmp_path):
    program = """
from rich.console import Console
from rl4lms_like.tracking.console import ConsoleSink
sink = ConsoleSink(console=Console(force_terminal=True))
sink.start(3)
raise KeyboardInterrupt
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert "KeyboardInterrupt" in done.stderr
    assert done.stdout.count(HIDE) == done.stdout.count(SHOW) == 1


def test_quiet_shows_warnings_only(tmp_path):
    stream = io.StringIO()
    sink = sink_to(stream, terminal=True, quiet=True)
    iterate(sink, tmp_path)
    sink.log_metrics(0, "val", {"m": 1.0})
    sink.print("table")
    assert stream.getvalue() == ""
    ConsoleHandler(sink).handle(
        logging.makeLogRecord({"levelno": logging.WARNING, "levelname": "WARNING", "msg": "hot"})
    )
    assert "warning: hot" in stream.getvalue()


def test_an_evaluation_is_a_table_beside_the_first_one():
    stream = io.StringIO()
    sink = sink_to(stream, terminal=False)
    sink.log_metrics(0, "val", {"a/b": 0.25, "c": "n/a"})
    assert "at first" not in stream.getvalue()
    sink.log_metrics(5, "val", {"a/b": 0.75, "c": "n/a"})
    row = next(line for line in stream.getvalue().splitlines() if "0.75" in line)
    assert row.split() == ["a/b", "0.75", "0.25"]


def test_an_evaluation_of_dialogues_shows_one_with_the_texts_of_the_environment_in_grey():
    turns = [{"text": "4", "answer": "higher\n", "reward": 0.0}, {"text": "[b]6[/b]", "answer": "", "reward": 1.0}]
    predictions = [{"prompt_text": "Guess:\n", "generated_text": "[b]6[/b]", "turns": turns}, {"prompt_text": "other"}]
    shown = {}
    for terminal in (False, True):
        stream = io.StringIO()
        sink_to(stream, terminal=terminal).log_predictions(3, "val", predictions)
        shown[terminal] = stream.getvalue()
    assert shown[False] == " first episode   env: Guess: | 4 | env: higher | [b]6[/b]\n"
    grey, end = "\x1b[90m", "\x1b[0m"
    assert f"{grey}env: Guess:{end}" in shown[True] and f"{grey}env: higher{end}" in shown[True]
    assert grey not in shown[True].partition(f"{grey}env: higher{end}")[2]

    # A text of many turns is cut; single responses and quiet runs show nothing.
    long = [{"prompt_text": "Guess:", "turns": turns * 500}]
    for chosen, quiet, length in ((long, False, 801), ([{"prompt_text": "a"}], False, 0), (predictions, True, 0)):
        stream = io.StringIO()
        sink_to(stream, terminal=False, quiet=quiet).log_predictions(3, "val", chosen)
        assert len(stream.getvalue()) == length


def test_of_a_run_that_goes_on_the_first_one_is_that_before_training(tmp_path):
    lines = [json.dumps({"epoch": epoch, "metrics": {"a/b": score}}) for epoch, score in ((0, 0.25), (3, 0.5))]
    (tmp_path / "val_split_metrics.jsonl").write_text("\n".join(lines))
    (tmp_path / "test_split_metrics.jsonl").write_text("half a li")
    stream = io.StringIO()
    sink = sink_to(stream, terminal=False)
    sink.open(RunDescription(tmp_path, "p", "my_run"))
    for split in ("val", "test"):
        sink.log_metrics(6, split, {"a/b": 0.75})
    rows = [line.split() for line in stream.getvalue().splitlines() if "0.75" in line]
    assert rows == [["a/b", "0.75", "0.25"], ["a/b", "0.75"]]


def test_markup_in_a_message_is_text():
    stream = io.StringIO()
    ConsoleHandler(sink_to(stream, terminal=False)).handle(
        logging.makeLogRecord({"levelno": 20, "msg": "[bold]x[/] [0]"})
    )
    assert stream.getvalue() == "[bold]x[/] [0]\n"


def test_a_run_outlives_the_program_that_reads_its_output(tmp_path):
    program = f"""
from rl4lms_like.tracking import Tracker
with Tracker({str(tmp_path)!r}, {{}}, "p", "e") as tracker:
    tracker.start(2000)
    for _ in range(2000):
        tracker.log_rollout_infos({{"rollout_info/ep_rew": 1.0}})
"""
    reading, writing = os.pipe()
    run = subprocess.Popen([sys.executable, "-c", program], stdout=writing)
    os.close(writing)
    os.read(reading, 10)
    os.close(reading)
    assert run.wait(timeout=60) == 0
    assert len((tmp_path / "p" / "e" / "rollout_info.jsonl").read_text().splitlines()) == 2000


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
@pytest.mark.parametrize("terminal", [False, True])
def test_letters_that_the_output_lacks_end_no_run(encoding, terminal, tmp_path):
    program = r"""
import logging, sys
from rl4lms_like.tracking import Tracker
with Tracker(sys.argv[1], {}, "p", "e") as tracker:
    tracker.start(2)
    tracker.log_rollout_infos({"rollout_info/ep_rew": 1.0})
    tracker.log_metrics(0, "val", {"a/\u65e5\ud83d": 1.0})
    logging.getLogger("rl4lms_like.doctor").warning("\u65e5\ud83d")
    tracker.print("\xe9")
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    environment = {**os.environ, "PYTHONIOENCODING": encoding} | ({"FORCE_COLOR": "1"} if terminal else {})
    run = subprocess.run(command, capture_output=True, env=environment, timeout=60)
    assert run.returncode == 0, run.stderr.decode()
    assert b"failed" not in run.stdout + run.stderr
    shown = run.stdout.decode(encoding)
    assert (r"warning: \u65e5\ud83d" if encoding != "utf-8" else r"warning: 日\ud83d") in shown


def test_a_long_alert_is_two_lines_on_the_console_and_whole_in_the_log(tmp_path, capsys):
    found, advice = "all episodes got the same reward, 0.5 " * 5, "See what reward_fn pays " * 10
    with Tracker(tmp_path, {}, "p", "e") as tracker:
        logging.getLogger("rl4lms_like.doctor").warning("iteration 2, %s. %s", found, advice, extra=IN_SHORT)
        logging.getLogger("rl4lms_like.other").warning("other %s", advice)
    alert, other = (line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: "))
    assert alert.startswith("warning: iteration 2, all episodes got the same reward, 0.5")
    assert len(alert) <= 2 * 88 and "log.txt" in alert and "report.html" in alert
    assert other == f"warning: other {advice}"
    assert f"iteration 2, {found}. {advice}" in (tracker.run_path / "log.txt").read_text()


def test_a_short_alert_is_shown_as_it_is(tmp_path, capsys):
    with Tracker(tmp_path, {}, "p", "e"):
        logging.getLogger("rl4lms_like.doctor").warning("iteration 2, ratio_gap: 1.5", extra=IN_SHORT)
    assert "warning: iteration 2, ratio_gap: 1.5\n" in capsys.readouterr().out


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (725, "12:05"), (11232, "3:07:12")])
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_a_sparkline_spans_lowest_to_highest():
    assert sparkline([0.0, 1.0, 0.5]) == "▁█▅"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([]) == ""
