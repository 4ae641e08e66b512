from __future__ import annotations

import logging
import sys

import pytest

from rl4lms_like.core.errors import MissingExtraError
from rl4lms_like.tracking import Tracker


def record(tracker: Tracker) -> None:
    tracker.start(1)
    tracker.log_values({"rollout_info/ep_rew": 0.5, "ppo/value_loss": 0.25}, timesteps=64)
    tracker.log_metrics(1, "val", {"family/score": 0.75, "family/none": "n/a"})
    tracker.log_predictions(
        1, "val", [{"sample_id": 0, "prompt_text": "p", "generated_text": "g", "family/score": "n/a"}]
    )


class FakeRun:
    """What `wandb.init` returns, remembered."""

    def __init__(self, **settings) -> None:
        self.settings = settings
        self.logged: list[dict] = []
        self.axes: dict[str, str] = {}
        self.finished = False

    def define_metric(self, name: str, step_metric: str) -> None:
        self.axes[name] = step_metric

    def log(self, values: dict) -> None:
        self.logged.append(values)

    def finish(self) -> None:
        self.finished = True


class FakeWandb:
    """The part of wandb that we call."""

    def __init__(self) -> None:
        self.runs: list[FakeRun] = []

    def init(self, **settings) -> FakeRun:
        self.runs.append(FakeRun(**settings))
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
    values, metrics, predictions = run.logged
    assert values == {"rollout_info/ep_rew": 0.5, "ppo/value_loss": 0.25, "iteration": 1, "timesteps": 64}
    assert metrics == {"epoch": 1, "val/family/score": 0.75, "val/family/none": "n/a"}
    columns = ["sample_id", "prompt_text", "generated_text", "family/score"]
    assert predictions == {"val_predictions_at_epoch_1": (columns, [[0, "p", "g", "n/a"]])}
    assert run.axes["ppo/*"] == "iteration" and run.axes["val/family/score"] == "epoch"
    assert run.finished


def test_an_unreachable_wandb_is_named_and_the_run_goes_on(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "wandb", UnreachableWandb())
    with Tracker(tmp_path, {}, "p", "e", wandb_log=True, quiet=True) as tracker:
        record(tracker)
    (warning,) = [entry.getMessage() for entry in caplog.records if entry.levelno == logging.WARNING]
    assert warning.startswith("wandb failed in open (ConnectionError: api.wandb.ai)")
    assert (tracker.run_path / "rollout_info.jsonl").exists()


def test_a_missing_package_is_an_error_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtraError, match=r"rl4lms_like\[wandb\]"):
        Tracker(tmp_path, {}, "p", "e", wandb_log=True, quiet=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_wandb_offline_for_real(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is an extra")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with Tracker(tmp_path, {}, "p", "e", wandb_log=True, quiet=True) as tracker:
        record(tracker)
    assert list((tracker.run_path / "wandb").glob("offline-run-*/*.wandb"))


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
