from __future__ import annotations

import json

import pytest
from stable_baselines3.common.logger import Logger

from rl4lms_like.tracking import Sink, Tracker


class Keys(Sink):
    """Remembers which keys it was given."""

    name = "tensorboard"

    def __init__(self) -> None:
        self.keys: list[list[str]] = []

    def write(self, values, *, iteration, timesteps) -> None:
        self.keys.append(sorted(values))


def read(tracker: Tracker, name: str) -> list[dict]:
    return [json.loads(line) for line in (tracker.run_path / f"{name}_info.jsonl").read_text().splitlines()]


@pytest.fixture
def tracker(tmp_path):
    with Tracker(tmp_path, {}, "p", "e") as tracker:
        yield tracker


def test_a_dump_becomes_one_line_in_each_file(tracker):
    logger = tracker.make_sb3_logger()
    assert isinstance(logger, Logger)
    for iteration in (1, 2):
        logger.record("rollout_info/ep_rew", 0.5 * iteration)
        logger.record("time/rollout_s", 1.0)
        logger.record("ppo/value_loss", 0.25)
        logger.record("train/ratio_gap", 0.0)
        logger.record("mine/anything", "text")
        logger.dump(step=100 * iteration)
    head = {"iteration": 2, "timesteps": 200}
    assert read(tracker, "rollout")[1] == {**head, "rollout_info/ep_rew": 1.0, "time/rollout_s": 1.0}
    update = {"ppo/value_loss": 0.25, "train/ratio_gap": 0.0, "mine/anything": "text"}
    assert read(tracker, "training")[1] == {**head, **update}


def test_the_time_of_an_update_without_a_rollout_is_the_updates(tracker):
    logger = tracker.make_sb3_logger()
    logger.record("train/loss", 1.0)
    logger.record("time/iteration", 7)
    logger.dump(step=3)
    assert read(tracker, "training") == [{"iteration": 7, "timesteps": 3, "train/loss": 1.0, "time/iteration": 7}]
    assert not (tracker.run_path / "rollout_info.jsonl").exists()


def test_an_empty_dump_writes_nothing(tracker):
    tracker.make_sb3_logger().dump(step=5)
    assert not list(tracker.run_path.glob("*.jsonl"))


def test_a_key_can_be_kept_from_a_sink(tmp_path):
    sink = Keys()
    with Tracker(tmp_path, {}, "p", "e", quiet=True, sinks=[sink]) as tracker:
        logger = tracker.make_sb3_logger()
        logger.record("train/a", 1)
        logger.record("train/b", 2, exclude="tensorboard")
        logger.dump()
    assert sink.keys == [["train/a"]]
    assert read(tracker, "training")[0]["train/b"] == 2


def test_verbose_prints_sb3s_table(tracker, capsys):
    logger = tracker.make_sb3_logger(verbose=1)
    logger.record("ppo/value_loss", 0.25)
    logger.dump()
    assert "|    value_loss | 0.25" in capsys.readouterr().out
