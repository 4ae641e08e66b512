"""Runs in a notebook: the four of the documentation, progress, interruption, errors and memory."""

from __future__ import annotations

import html
import os
import subprocess
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from tests.browser import CHROMIUM, needs_chromium

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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("notebooks")


@pytest.fixture(scope="module", params=["first_run", "own_reward", "preferences", "compare_runs"])
def notebook(request, folder):
    """One of the documentation's notebooks, executed on one thread."""
    place = folder / request.param
    place.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        return request.param, executed(nbformat.read(NOTEBOOKS / f"{request.param}.ipynb", as_version=4), place)


def test_a_notebook_of_the_documentation_runs_and_shows_its_report(notebook):
    name, after = notebook
    tables = outputs(after, "text/html")
    assert any(shown.startswith("<iframe srcdoc") for shown in tables), name
    assert any("<table" in shown and "<iframe" not in shown for shown in tables) or name == "own_reward"
    assert len(outputs(after, "application/vnd.jupyter.widget-view+json")) >= (name != "compare_runs")


@needs_chromium
def test_a_browser_shows_table_and_report_inline(notebook, tmp_path):
    name, after = notebook
    parts = []
    for shown in outputs(after, "text/html"):
        parts.append(f'<div class="output">{shown}</div>')
    for shown in outputs(after, "stdout"):
        parts.append(f"<pre>{html.escape(shown)}</pre>")
    page = tmp_path / f"{name}.html"
    check = (
        "<script>addEventListener('load', () => setTimeout(() => {"
        "const frames = [...document.querySelectorAll('iframe')];"
        "const charts = frames.map(frame => frame.contentDocument.querySelectorAll('svg').length);"
        "document.body.dataset.frames = frames.length; document.body.dataset.charts = Math.min(...charts);"
        "document.body.dataset.tables = document.querySelectorAll('table').length;"
        "}, 500));</script>"
    )
    page.write_text(f"<!doctype html><meta charset='utf-8'><body>{''.join(parts)}{check}</body>", encoding="utf-8")

    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--virtual-time-budget=4000"]
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    picture = tmp_path / f"{name}.png"
    command = [str(CHROMIUM), *flags, profile, "--window-size=1000,1600"]
    subprocess.run([*command, f"--screenshot={picture}", page.as_uri()], capture_output=True, timeout=120, check=True)
    done = subprocess.run([*command, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120)
    assert 'data-frames="1"' in done.stdout and 'data-charts="0"' not in done.stdout
    assert picture.stat().st_size > 20_000
    if name != "own_reward":
        assert 'data-tables="0"' not in done.stdout
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
