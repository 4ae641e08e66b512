"""Runs in a notebook: the four of the documentation, progress, interruption, errors and memory."""

from __future__ import annotations

import html
import os
import re
import subprocess
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from tests.browser import CHROMIUM

NOTEBOOKS = Path(__file__).resolve().parents[2] / "docs" / "notebooks"


def executed(notebook, folder: Path, **options):
    """A notebook after all of its cells."""
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources, **options).execute()
    return notebook


def of_cells(*cells: str):
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])


def outputs(notebook, kind: str) -> list[str]:
    """The data of a kind in the outputs of a notebook, in order; `stdout` for printed text."""
    found = []
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if output.get("name") == kind:
                found.append(output.text)
            elif kind in output.get("data", {}):
                found.append(output.data[kind])
    return found


@pytest.mark.parametrize("name", ["first_run", "own_reward", "preferences", "compare_runs"])
def test_a_notebook_of_the_documentation_runs_and_shows_table_and_report_inline(name, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    after = executed(nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4), tmp_path)
    shown = outputs(after, "text/html")
    (report,) = [output for output in shown if output.startswith("<iframe srcdoc")]
    assert any("<table" in output for output in shown if output is not report)
    n_widgets = len(outputs(after, "application/vnd.jupyter.widget-view+json"))
    assert n_widgets == {"first_run": 2, "compare_runs": 0}.get(name, 1)

    if CHROMIUM is None:
        pytest.skip("Chromium is not installed: the outputs are not looked at in a browser")
    look_at(shown, outputs(after, "stdout"), tmp_path / "page", name)


MEASURE = """<script>addEventListener("load", () => setTimeout(() => {
const data = document.body.dataset, frames = [...document.querySelectorAll("iframe")];
data.frames = frames.length; data.tables = document.querySelectorAll("table").length;
data.charts = Math.min(...frames.map(frame => frame.contentDocument.querySelectorAll("svg").length));
}, 500));</script>"""


def look_at(shown: list[str], printed: list[str], folder: Path, name: str) -> None:
    """Open the final outputs of a notebook in a browser, and check that it draws the tables and the report's charts."""
    folder.mkdir()
    body = "".join([*shown, *(f"<pre>{html.escape(text)}</pre>" for text in printed)])
    page = folder / f"{name}.html"
    page.write_text(f"<!doctype html><meta charset='utf-8'><body>{body}{MEASURE}</body>", encoding="utf-8")

    flags = "--headless --no-sandbox --disable-gpu --no-first-run --virtual-time-budget=4000 --window-size=1000,1600"
    command = [str(CHROMIUM), *flags.split(), f"--user-data-dir={folder / 'profile'}"]
    picture = folder / f"{name}.png"
    subprocess.run([*command, f"--screenshot={picture}", page.as_uri()], capture_output=True, timeout=120, check=True)
    done = subprocess.run(
        [*command, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    measured = {key: int(value) for key, value in re.findall(r'data-(frames|tables|charts)="(\d+)"', done.stdout)}
    assert measured["frames"] == 1 and measured["charts"] > 0 and measured["tables"] > 0
    assert picture.stat().st_size > 20_000
    if "RL4LMS_LIKE_PICTURES" in os.environ:
        (Path(os.environ["RL4LMS_LIKE_PICTURES"]) / picture.name).write_bytes(picture.read_bytes())


# --- behaviour in a cell ------------------------------------------------------------------------------------------

START = """
import gc, signal, sys, weakref
import torch
from rl4lms_like import Run
from rl4lms_like.policies.base import CausalLMActorCriticPolicy

policies = []
build = CausalLMActorCriticPolicy.__init__
def remember(self, *args, **kwargs):
    build(self, *args, **kwargs)
    policies.append(weakref.ref(self))
CausalLMActorCriticPolicy.__init__ = remember

handlers, n_threads = signal.getsignal(signal.SIGINT), torch.get_num_threads()
calls = []
sizes = {{"n_episodes": 16, "group_size": 4, "max_new_tokens": 6, "n_iters": 4, "learning_rate": 1e-3}}
def make(reward, name):
    return Run({model!r}, ["Count", "with me"], reward, folder="runs/" + name, **sizes)
"""
FAILS = """
def reward(responses):
    calls.append(len(responses))
    if len(calls) == 3:
        values = {}
        return values["missing"]
    return [float(len(response)) for response in responses]
run = make(reward, "fails")
run.train()
"""
INTERRUPTED = """
import os
def patient(responses):
    calls.append(len(responses))
    if len(calls) == 3:
        os.kill(os.getpid(), signal.SIGINT)
    return [float(len(response)) for response in responses]
calls.clear()
run = make(patient, "interrupted")
run.train()
"""
RESTORED = """
assert signal.getsignal(signal.SIGINT) == handlers and torch.get_num_threads() == n_threads
assert policies, "nothing was built"
del run
gc.collect()
alive = [policy for policy in policies if policy() is not None]
policies.clear()
print("alive:", len(alive))
"""
CONTINUED = """
again = Run.from_folder("runs/interrupted", reward=patient)
assert 0 < again.n_done < 4, again.n_done
again.train(quiet=True)
print("done:", again.n_done)
"""


def test_an_error_shows_the_users_frames_and_keeps_no_model_alive(tmp_path, tiny_gpt2_dir):
    book = of_cells(START.format(model=str(tiny_gpt2_dir)), FAILS, RESTORED)
    executed(book, tmp_path, allow_errors=True)
    (error,) = [output for output in book.cells[1].outputs if output.output_type == "error"]
    assert error.ename == "RewardError"
    traceback = "\n".join(error.traceback)
    assert "missing" in traceback and "run" in traceback
    assert "site-packages" not in traceback and "rl4lms_like" not in traceback.replace("rl4lms_like.system", "")
    assert outputs(book, "stdout")[-1] == "alive: 0\n"


def test_an_interruption_saves_and_stops_the_following_cells(tmp_path, tiny_gpt2_dir):
    book = of_cells(START.format(model=str(tiny_gpt2_dir)), INTERRUPTED, "print('never')")
    with pytest.raises(CellExecutionError, match="KeyboardInterrupt"):
        executed(book, tmp_path)
    assert "never" not in "".join(outputs(book, "stdout"))

    book = of_cells(START.format(model=str(tiny_gpt2_dir)), INTERRUPTED, RESTORED, CONTINUED)
    (tmp_path / "second").mkdir()
    executed(book, tmp_path / "second", allow_errors=True)
    assert [output.ename for output in book.cells[1].outputs if output.output_type == "error"] == ["KeyboardInterrupt"]
    assert outputs(book, "stdout")[-2:] == ["alive: 0\n", "done: 4\n"]


@pytest.mark.parametrize("has_widgets", [True, False])
def test_progress_is_one_widget_or_lines(has_widgets, tmp_path, tiny_gpt2_dir):
    hidden = "" if has_widgets else "import sys; sys.modules['ipywidgets'] = None"
    train = "run = make(lambda responses: [1.0] * len(responses), 'run')\nrun.train();"
    book = executed(of_cells(hidden or "1", START.format(model=str(tiny_gpt2_dir)), train), tmp_path)
    displayed = [output for output in book.cells[2].outputs if output.output_type == "display_data"]
    printed = "".join(output.text for output in book.cells[2].outputs if output.output_type == "stream")
    assert len(displayed) == has_widgets
    assert ("4/4" in printed) == (not has_widgets) and "\x1b" not in printed
