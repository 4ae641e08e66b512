"""A change that affects results is refused on resuming, or accepted and listed in the run folder."""

from __future__ import annotations

import json

import pytest

from rl4lms_like.cli import main
from rl4lms_like.run import resume
from rl4lms_like.system.errors import CheckpointError, RL4LMsLikeError
from rl4lms_like.training.resuming.accepted_changes import AcceptedChange, read_changes
from rl4lms_like.training.resuming.resume import resumption
from tests.config_errors import raises_at
from tests.offline.supervised.test_resume import blocks as supervised_blocks
from tests.offline.supervised.test_resume import stopped as supervised_stopped
from tests.training.resuming.test_resume import StoppedError, blocks, started, stop_after

RATE = "alg.args.learning_rate"
FIRST = AcceptedChange(2, RATE, 0.001, 0.01)


@pytest.fixture(scope="module")
def mapping(tiny_gpt2_dir):
    mapping = blocks("causal", tiny_gpt2_dir, "ppo")
    evaluation = {"eval_batch_size": 6, "n_iters": 4, "eval_every": 9, "save_every": 1, "keep_last": 4}
    return mapping | {"train_evaluation": evaluation | {"metrics": [{"id": "length"}]}}


def resumed_with_rate(folder, monkeypatch, rate, until):
    """Resume with another learning rate, and stop again in the iteration after `until`."""
    with monkeypatch.context() as patch, pytest.raises(StoppedError):
        stop_after(patch, until, "rollout")
        resume(folder, values={RATE: rate}, accepted=[RATE], quiet=True)


def test_a_change_is_refused_unless_it_is_accepted(stopped):
    with raises_at(RATE, mentions=f"--change {RATE}=VALUE"):
        resumption(stopped, values={RATE: 0.01})
    with raises_at("seed"):
        resumption(stopped, values={RATE: 0.01, "seed": 4}, accepted=[RATE])
    assert resumption(stopped, values={RATE: 0.01}, accepted=["alg"]).changes == (FIRST,)


def test_an_accepted_change_is_listed_once_and_kept_on_the_next_resumption(stopped, monkeypatch):
    resumed_with_rate(stopped, monkeypatch, 0.01, until=3)
    assert read_changes(stopped) == (FIRST,)
    assert json.loads((stopped / "config.json").read_text())["alg"]["args"]["learning_rate"] == 0.01
    assert (
        "accepted change: alg.args.learning_rate is 0.01 instead of 0.001 after 2" in (stopped / "log.txt").read_text()
    )

    resume(stopped, quiet=True)
    assert read_changes(stopped) == (FIRST,)
    assert (stopped / "finished.json").exists()


def test_a_run_that_resumes_before_its_change_has_it_from_there_on(stopped, monkeypatch):
    resumed_with_rate(stopped, monkeypatch, 0.01, until=3)
    earlier = resumption(stopped / "checkpoints" / "iteration_00001")
    assert earlier.config.alg.args["learning_rate"] == 0.01
    assert earlier.changes == (AcceptedChange(1, RATE, 0.001, 0.01),)


def test_a_second_change_is_added_to_the_list(stopped, monkeypatch):
    resumed_with_rate(stopped, monkeypatch, 0.01, until=3)
    resume(stopped, values={RATE: 0.1}, accepted=[RATE], quiet=True)
    assert read_changes(stopped) == (FIRST, AcceptedChange(3, RATE, 0.01, 0.1))


def test_the_first_command_resumes_the_changed_run_with_the_new_value(stopped, mapping, monkeypatch):
    resumed_with_rate(stopped, monkeypatch, 0.01, until=3)
    assert started(mapping, stopped.parent.parent) == stopped
    assert json.loads((stopped / "config.json").read_text())["alg"]["args"]["learning_rate"] == 0.01
    assert read_changes(stopped) == (FIRST,)


def test_an_edited_config_is_still_refused(stopped, monkeypatch):
    resumed_with_rate(stopped, monkeypatch, 0.01, until=3)
    config = json.loads((stopped / "config.json").read_text())
    config["alg"]["args"]["learning_rate"] = 0.5
    (stopped / "config.json").write_text(json.dumps(config))
    with raises_at(RATE):
        resumption(stopped)


def test_a_damaged_list_is_an_error_that_names_it(stopped):
    (stopped / "accepted_changes.json").write_text('[{"iteration": 1}]')
    with pytest.raises(CheckpointError, match="accepted_changes"):
        resumption(stopped)


def logged(folder, key):
    """The values of a key, by iteration, of rollouts or of updates."""
    lines = []
    for file in ("rollout_info.jsonl", "training_info.jsonl"):
        lines += [json.loads(line) for line in (folder / file).read_text().splitlines()]
    return [line[key] for line in lines if key in line]


def test_the_command_line_changes_a_setting_from_the_checkpoint_on(stopped, capsys):
    assert main(["train", "--resume", str(stopped), "--change", f"{RATE}=0.01"]) == 0
    assert read_changes(stopped) == (FIRST,)
    assert logged(stopped, "train/learning_rate") == [0.001, 0.001, 0.01, 0.01]


def test_a_setting_that_may_not_change_is_refused_with_the_option_that_changes_it(stopped, capsys):
    assert main(["train", "--resume", str(stopped), "--set", f"{RATE}=0.01"]) == 2
    assert f"--change {RATE}=VALUE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--change", "alg.args.gamma"], "PATH=VALUE"),
        (["--change", "alg.args.gamma=[1"], "--change alg.args.gamma"),
        (["--change", "alg.args.gama=1"], "alg.args.gama"),
        (["--change", "alg.args.gamma=7"], "alg.args.gamma"),
    ],
)
def test_a_change_is_checked_like_any_setting(arguments, words, stopped, capsys):
    before = (stopped / "config.json").read_text()
    assert main(["train", "--resume", str(stopped), *arguments]) == 2
    assert words in capsys.readouterr().err
    assert (stopped / "config.json").read_text() == before


def test_a_new_run_is_not_changed(tmp_path, capsys):
    assert main(["train", str(tmp_path / "run.yml"), "--change", "seed=1"]) == 2
    assert "--resume" in capsys.readouterr().err


def test_a_changed_kl_coefficient_is_where_the_controller_continues(stopped):
    resume(stopped, values={"alg.kl_div.coeff": 0.7}, accepted=["alg.kl_div.coeff"], quiet=True)
    coefficients = logged(stopped, "rollout_info/kl_coeff")
    assert all(coefficient < 0.2 for coefficient in coefficients[:2])
    assert coefficients[2] == 0.7


def test_another_model_is_an_error(stopped, tiny_t5_dir):
    values = {"alg.policy.args.model_name": str(tiny_t5_dir), "alg.policy.id": "seq2seq_lm_actor_critic_policy"}
    with pytest.raises(RL4LMsLikeError):
        resume(stopped, values=values, accepted=list(values), quiet=True)


@pytest.mark.parametrize("schedule", ["linear", "constant"])
def test_a_changed_learning_rate_of_a_supervised_run_holds_from_the_next_step_on(
    schedule, tmp_path, tiny_gpt2_dir, monkeypatch
):
    arguments = {"lr_scheduler_type": schedule, "logging_steps": 1, "save_steps": 1}
    mapping = supervised_blocks("causal", tiny_gpt2_dir, **arguments)
    folder = supervised_stopped(mapping, tmp_path, 3, monkeypatch)
    path = "alg.training_args.learning_rate"
    resume(folder, values={path: 1e-3}, accepted=[path], quiet=True)

    lines = [json.loads(line) for line in (folder / "training_info.jsonl").read_text().splitlines()]
    rates = [line["train/learning_rate"] for line in lines]
    factors = [1 - step / 6 if schedule == "linear" else 1.0 for step in range(6)]
    assert len(rates) == 6
    expected = [(1e-2 if step < 3 else 1e-3) * factor for step, factor in enumerate(factors)]
    assert rates == pytest.approx(expected)
