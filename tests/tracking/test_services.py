from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from contextvars import ContextVar
from types import SimpleNamespace

import pytest

from rl4lms_like.system.errors import MissingExtraError
from rl4lms_like.tracking import Sink, Tracker
from tests.conftest import REPOSITORY


def record(tracker: Tracker) -> None:
    tracker.start(1)
    tracker.log_values({"rollout_info/ep_rew": 0.5, "ppo/value_loss": 0.25}, timesteps=64)
    tracker.log_metrics(1, "val", {"family/score": 0.75, "family/none": "n/a"})
    tracker.log_predictions(
        1, "val", [{"sample_id": 0, "prompt_text": "p", "generated_text": "g", "family/score": "n/a"}]
    )
    tracker.log_responses(1, [{"sample_id": 0, "prompt_text": "p", "generated_text": "g", "reward": 0.5}])


class FakeRun:
    """What `wandb.init` returns, remembered."""

    def __init__(self, **settings) -> None:
        self.settings = settings
        self.logged: list[dict] = []
        self.axes: dict[str, str] = {}
        self.finished = False
        self.exit_code: int | None = None

    def define_metric(self, name: str, step_metric: str) -> None:
        self.axes[name] = step_metric

    def log(self, values: dict) -> None:
        self.logged.append(values)

    def finish(self, exit_code: int | None = None) -> None:
        self.finished, self.exit_code = True, exit_code


class FakeWandb:
    """The part of wandb that we call."""

    def __init__(self) -> None:
        self.runs: list[FakeRun] = []

    def init(self, **settings) -> FakeRun:
        self.runs.append(FakeRun(**settings))
        self.runs[-1].id = settings.get("id", f"id{len(self.runs)}")
        return self.runs[-1]

    def Table(self, columns, data, allow_mixed_types):  # noqa: N802
        return columns, data


class UnreachableWandb(FakeWandb):
    """A service that cannot be reached."""

    def init(self, **settings) -> FakeRun:
        raise ConnectionError("api.wandb.ai")


def test_wandb_gets_rl4lms_names(tmp_path, monkeypatch):
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with Tracker(tmp_path, {"seed": 0}, "p", "e", "team", wandb_log=True, quiet=True) as tracker:
        record(tracker)
    (run,) = wandb.runs
    assert run.settings["entity"] == "team"
    assert (run.settings["project"], run.settings["name"], run.settings["config"]) == ("p", "e", {"seed": 0})
    values, metrics, predictions, responses = run.logged
    assert values == {"rollout_info/ep_rew": 0.5, "ppo/value_loss": 0.25, "iteration": 1, "timesteps": 64}
    assert metrics == {"epoch": 1, "val/family/score": 0.75, "val/family/none": "n/a"}
    columns = ["sample_id", "prompt_text", "generated_text", "family/score"]
    assert predictions == {"val_predictions_at_epoch_1": (columns, [[0, "p", "g", "n/a"]])}
    columns = ["sample_id", "prompt_text", "generated_text", "reward"]
    assert responses == {"rollout_responses_at_epoch_1": (columns, [[0, "p", "g", 0.5]])}
    assert run.axes["ppo/*"] == "iteration" and run.axes["val/family/score"] == "epoch"
    assert run.finished and run.exit_code == 0


@pytest.mark.parametrize(("error", "exit_code"), [(ValueError(), 1), (KeyboardInterrupt(), 130)])
def test_wandb_hears_that_a_run_ended_early(error, exit_code, tmp_path, monkeypatch):
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with pytest.raises(type(error)), Tracker(tmp_path, {}, "p", "e", wandb_log=True, quiet=True):
        raise error
    assert wandb.runs[0].finished and wandb.runs[0].exit_code == exit_code


def test_a_run_that_goes_on_goes_on_in_wandb_too(tmp_path, monkeypatch):
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for resume in (False, True, True, False):
        with Tracker(tmp_path, {}, "p", "e", wandb_log=True, quiet=True, resume=resume):
            pass
    assert [run.id for run in wandb.runs] == ["id1", "id1", "id1", "id4"]
    assert [run.settings.get("resume") for run in wandb.runs] == [None, "allow", "allow", None]
    assert all(run.settings["reinit"] == "create_new" for run in wandb.runs)


def test_a_copied_run_is_another_one_in_wandb(tmp_path, monkeypatch):
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with Tracker(tmp_path, {}, "p", "e", wandb_log=True, quiet=True) as tracker:
        pass
    shutil.copytree(tracker.run_path, tmp_path / "p" / "copy")
    for _ in range(2):
        with Tracker(tmp_path, {}, "p", "copy", wandb_log=True, quiet=True, resume=True):
            pass
    assert [run.id for run in wandb.runs] == ["id1", "id2", "id2"]


@pytest.mark.parametrize(("project", "experiment"), [("team/p", "e"), ("p", "sweep/e"), ("p", "p/e")])
def test_names_of_several_folders_are_the_same_run_in_wandb(project, experiment, tmp_path, monkeypatch):
    """`--resume` knows the folder alone, and takes its last two names for those of project and experiment."""
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with Tracker(tmp_path, {}, project, experiment, wandb_log=True, quiet=True) as tracker:
        pass
    folder = tracker.run_path
    with Tracker(folder.parents[1], {}, folder.parent.name, folder.name, wandb_log=True, quiet=True, resume=True):
        pass
    assert [(run.id, run.settings["project"]) for run in wandb.runs] == [("id1", project)] * 2


@pytest.mark.parametrize("names", [("", "e"), ("My\xa0Project", "e\t2")])
def test_a_run_that_was_moved_goes_on_whatever_its_folders_are_called_now(names, tmp_path):
    """At the root, where a container mounts a run, there is no project's name."""
    with Tracker(tmp_path, {}, "p", "e", quiet=True) as tracker:
        record(tracker)
    folder = tmp_path.joinpath("new", *names)
    shutil.copytree(tracker.run_path, folder)
    with Tracker(tmp_path / "new", {}, *names, quiet=True, resume=True) as moved:
        record(moved)
    assert moved.run_path == folder
    assert len((folder / "rollout_info.jsonl").read_text().splitlines()) == 2


def test_a_run_that_was_not_sent_before_it_goes_on_is_a_new_one_in_wandb(tmp_path, monkeypatch):
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with Tracker(tmp_path, {}, "p", "e", quiet=True) as tracker:
        pass
    (tracker.run_path / "wandb_run.json").write_text("{")  # damaged
    with Tracker(tmp_path, {}, "p", "e", wandb_log=True, quiet=True, resume=True):
        pass
    (run,) = wandb.runs
    assert "id" not in run.settings


def test_an_unreachable_wandb_is_named_and_the_run_goes_on(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "wandb", UnreachableWandb())
    with Tracker(tmp_path, {}, "p", "e", wandb_log=True, quiet=True) as tracker:
        record(tracker)
    (warning,) = [entry.getMessage() for entry in caplog.records if entry.levelno == logging.WARNING]
    assert warning.startswith("wandb failed in open (ConnectionError: api.wandb.ai)")
    assert (tracker.run_path / "rollout_info.jsonl").exists()


def test_a_missing_package_is_an_error_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtraError) as caught:
        Tracker(tmp_path, {}, "p", "e", wandb_log=True, quiet=True)
    assert caught.value.extra == "wandb"
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_wandb_offline_for_real(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is an extra")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with Tracker(tmp_path, {}, "p", "e", wandb_log=True, quiet=True) as tracker:
        record(tracker)
    first = [path.name.rpartition("-")[2] for path in (tracker.run_path / "wandb").glob("offline-run-*")]
    with Tracker(tmp_path, {"seed": 1}, "p", "e", wandb_log=True, quiet=True, resume=True):
        pass
    assert {path.stem for path in (tracker.run_path / "wandb").glob("offline-run-*/*.wandb")} == {f"run-{first[0]}"}


# --- trackio ----------------------------------------------------------------------------------------------------------


class FakeTrackioRun:
    """What `trackio.init` returns, remembered: the arguments have the names and kinds of trackio's own."""

    def __init__(self, id: str, name: str) -> None:
        self.id, self.name = id, name
        self.logged: list[tuple[int | None, dict]] = []
        self.n_finished = 0

    def log(self, metrics: dict, step: int | None = None) -> None:
        assert json.loads(json.dumps(metrics, allow_nan=False)) is not None
        self.logged.append((step, metrics))

    def finish(self) -> None:
        self.n_finished += 1


class FakeTrackio:
    """The part of trackio that we call. As there, a run is resumed by its name: the latest of this name."""

    def __init__(self) -> None:
        self.context_vars = SimpleNamespace(current_run=ContextVar("current_run", default=None))
        self.runs: list[FakeTrackioRun] = []
        self.calls: list[dict] = []

    def init(self, project, name=None, config=None, resume="never", private=None, embed=True) -> FakeTrackioRun:
        self.calls.append({"project": project, "config": config, "resume": resume, "private": private, "embed": embed})
        same = [run.id for run in self.runs if run.name == name]
        is_resumed = resume == "allow" and same
        self.runs.append(FakeTrackioRun(same[-1] if is_resumed else f"id{len(self.calls)}", name))
        self.context_vars.current_run.set(self.runs[-1])
        return self.runs[-1]

    def Table(self, columns, data, allow_mixed_types):  # noqa: N802
        return [columns, data]


@pytest.fixture
def trackio(monkeypatch) -> FakeTrackio:
    fake = FakeTrackio()
    monkeypatch.setitem(sys.modules, "trackio", fake)
    return fake


def tracked(tmp_path, experiment="e", resume=False, act=lambda tracker: None):
    with Tracker(tmp_path, {"seed": 0}, "p", experiment, trackio_log=True, quiet=True, resume=resume) as tracker:
        act(tracker)
    return tracker.run_path


def test_trackio_gets_numbers_and_tables_at_their_iteration(tmp_path, trackio):
    def act(tracker):
        record(tracker)
        tracker.log_values({"ppo/value_loss": float("nan")}, timesteps=64)

    tracked(tmp_path, act=act)
    (run,) = trackio.runs
    assert trackio.calls == [
        {"project": "p", "config": {"seed": 0}, "resume": "never", "private": True, "embed": False}
    ]
    text = [0, "p", "g"]
    columns = ["sample_id", "prompt_text", "generated_text"]
    assert run.logged == [
        (1, {"rollout_info/ep_rew": 0.5, "ppo/value_loss": 0.25, "timesteps": 64}),
        (1, {"epoch": 1, "val/family/score": 0.75, "val/family/none": "n/a"}),
        (1, {"val_predictions": [[*columns, "family/score"], [[*text, "n/a"]]]}),
        (1, {"rollout_responses": [[*columns, "reward"], [[*text, 0.5]]]}),
        (1, {"ppo/value_loss": None, "timesteps": 64}),
    ]
    assert run.n_finished == 1 and trackio.context_vars.current_run.get() is None


def test_another_run_in_trackio_stays_the_current_one(tmp_path, trackio):
    tracked(tmp_path, act=lambda tracker: trackio.init("mine"))
    ours, other = trackio.runs
    assert (ours.n_finished, other.n_finished) == (1, 0)
    assert trackio.context_vars.current_run.get() is other


def test_scores_before_the_next_iteration_of_a_resumed_run_are_at_the_last_one(tmp_path, trackio):
    def act(tracker):
        tracker.start(9, completed=7)
        tracker.log_metrics(7, "val", {"score": 1.0})

    tracked(tmp_path, act=act)
    assert trackio.runs[0].logged == [(7, {"epoch": 7, "val/score": 1.0})]


def test_a_resumed_run_is_resumed_in_trackio_too(tmp_path, trackio):
    for resume in (False, True, True, False):
        tracked(tmp_path, resume=resume)
    assert [run.id for run in trackio.runs] == ["id1", "id1", "id1", "id4"]


def test_a_copied_run_and_a_run_of_the_same_name_elsewhere_are_others_in_trackio(tmp_path, trackio):
    folder = tracked(tmp_path / "a")
    shutil.copytree(folder, tmp_path / "a" / "p" / "copy")
    tracked(tmp_path / "a", "copy", resume=True)
    assert [run.id for run in trackio.runs] == ["id1", "id2"]

    tracked(tmp_path / "b")  # the latest of this name
    tracked(tmp_path / "a", resume=True)
    assert [run.id for run in trackio.runs] == ["id1", "id2", "id3", "id3", "id5"], "not that of the other folder"
    assert not trackio.runs[3].logged and trackio.runs[3].n_finished == 1


def test_a_missing_trackio_is_an_error_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(MissingExtraError) as caught:
        Tracker(tmp_path, {}, "p", "e", trackio_log=True, quiet=True)
    assert caught.value.extra == "trackio"
    assert not list(tmp_path.iterdir())


def test_trackio_for_real(tmp_path):
    """In a process of its own, since trackio reads the folder of its data when it is imported."""
    pytest.importorskip("trackio", reason="trackio is an extra")
    program = f"""
import trackio
from rl4lms_like.tracking import Tracker
from tests.tracking.test_services import record
for resume in (False, True):
    with Tracker({str(tmp_path)!r}, {{"seed": 0}}, "p", "e", trackio_log=True, quiet=True, resume=resume) as tracker:
        record(tracker)
(run,) = trackio.Api().runs("p")
print(run.name, run.id)
from trackio.sqlite_storage import SQLiteStorage
for line in SQLiteStorage.get_logs("p", "e"):
    print(sorted(key for key in line if "/" in key or "_" in key), line["step"])
"""
    environment = os.environ | {"TRACKIO_DIR": str(tmp_path / "trackio"), "PYTHONPATH": str(REPOSITORY)}
    outcome = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stderr
    run_id = json.loads((tmp_path / "p" / "e" / "trackio_run.json").read_text())["id"]
    assert f"e {run_id}" in outcome.stdout
    assert outcome.stdout.count("Run finished") == 2, "once for each of both runs"
    for keys in (["ppo/value_loss", "rollout_info/ep_rew"], ["rollout_responses"], ["val_predictions"]):
        assert outcome.stdout.count(f"{keys} 1") == 2, outcome.stdout


# --- tensorboard ------------------------------------------------------------------------------------------------------


def test_tensorboard_has_the_numbers_at_their_steps(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is an extra")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Tracker(tmp_path / "runs", {}, "p", "e", tensorboard_log=tmp_path / "tb", quiet=True) as tracker:
        record(tracker)
    events = EventAccumulator(str(tmp_path / "tb" / "e")).Reload()
    scalars = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert scalars["rollout_info/ep_rew"] == [(64, 0.5)]
    assert scalars["val/family/score"] == [(1, 0.75)]
    assert "val/family/none" not in scalars
    assert "val_predictions/0/text_summary" in events.Tags()["tensors"]


class Failing(Sink):
    """Takes nothing, always for the same reason, or each time for another one."""

    name = "mine"

    def __init__(self, same: bool) -> None:
        self.same, self.n = same, 0

    def write(self, *args, **kwargs) -> None:
        self.n += 1
        raise ConnectionError("gone" if self.same else f"gone at {self.n}")

    log_metrics = log_predictions = log_responses = close = write


@pytest.mark.parametrize(("same", "n_warnings"), [(True, 1), (False, 5)], ids=["one reason", "another each time"])
def test_a_sink_that_takes_nothing_is_named_and_nothing_is_lost(same, n_warnings, tmp_path, caplog):
    sink = Failing(same)
    with Tracker(tmp_path, {}, "p", "e", sinks=[sink], quiet=True) as tracker:
        for _ in range(3):
            record(tracker)
    warnings = [entry.getMessage() for entry in caplog.records if entry.levelno == logging.WARNING]
    assert len(warnings) == n_warnings and all("mine failed in " in warning for warning in warnings)
    assert sink.n == 13, "it is asked again: a service may come back"
    for file in ("rollout_info.jsonl", "training_info.jsonl", "val_split_metrics.jsonl"):
        assert len((tracker.run_path / file).read_text().splitlines()) == 3


def test_the_end_of_a_run_does_not_wait_for_ever_for_wandb(tmp_path, monkeypatch):
    wandb = FakeWandb()
    wandb.Settings = lambda **settings: settings
    wandb.Settings.model_fields = {"finish_timeout": None}
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with Tracker(tmp_path, {}, "p", "e", wandb_log=True, quiet=True):
        pass
    assert wandb.runs[0].settings["settings"] == {"finish_timeout": 300.0, "finish_timeout_raises": True}
    monkeypatch.setenv("WANDB_FINISH_TIMEOUT", "7")
    with Tracker(tmp_path, {}, "p", "e", wandb_log=True, quiet=True):
        pass
    assert "settings" not in wandb.runs[1].settings, "wandb reads the variable itself"


def test_wandb_knows_what_it_is_told_about_the_end():
    wandb = pytest.importorskip("wandb", reason="wandb is an extra")
    if "finish_timeout" not in wandb.Settings.model_fields:
        pytest.skip("an older wandb, which waits for ever")
    assert wandb.Settings(finish_timeout=3, finish_timeout_raises=True).finish_timeout == 3


def test_tensorboard_on_a_full_disk_is_said_once_and_without_a_traceback(tmp_path, caplog, capfd):
    pytest.importorskip("tensorboard", reason="tensorboard is an extra")
    resource = pytest.importorskip("resource", reason="limits on files are Unix's")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    hook = threading.excepthook
    tracker = Tracker(tmp_path / "runs", {}, "p", "e", tensorboard_log=tmp_path / "tb", quiet=True)
    with tracker:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
        try:
            for iteration in range(25):
                tracker.log_values({"ppo/loss": 0.5, "time/iteration": iteration})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len((tracker.run_path / "training_info.jsonl").read_text().splitlines()) == 25
    message = [entry.getMessage() for entry in caplog.records if "tensorboard failed" in entry.getMessage()]
    assert len(message) == 1 and "File too large" in message[0]
    assert "Traceback" not in capfd.readouterr().err
    assert threading.excepthook is hook
