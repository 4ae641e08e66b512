"""The doctor in runs: what it tells, where, once; and that a run which goes on tells the same."""

from __future__ import annotations

import json
import logging
import re
from contextlib import ExitStack

import pytest
import torch

from rl4lms_like.algorithms.ppo import PPO
from rl4lms_like.config.load import parse_config
from rl4lms_like.config.run_config import DoctorConfig
from rl4lms_like.metrics.base import BaseMetric
from rl4lms_like.on_policy.assemble import assemble
from rl4lms_like.on_policy.doctor.alerts import ALERTS
from rl4lms_like.on_policy.doctor.callback import Doctor, context_of
from rl4lms_like.rewards.base import RewardFunction
from rl4lms_like.run import resume, train_config
from rl4lms_like.tracking import Tracker
from rl4lms_like.training.alert import Alert
from rl4lms_like.training.evaluation import Evaluation
from rl4lms_like.training.resuming.resume import resumption
from tests.config_errors import raises_at
from tests.robustness.killed_runs import files_of
from tests.training.resuming.test_interruption import After, at_minibatch
from tests.training.resuming.test_interruption import stopped as interrupted
from tests.training.resuming.test_resume import StoppedError, stop_after


class SameForAll(RewardFunction):
    """Half a point for any text."""

    terminal = True

    def __call__(self, prev_observation, action, current_observation, done, meta_info=None) -> float:
        return 0.5 if done else 0.0


class ByLength(RewardFunction):
    """A point for each token."""

    def __call__(self, prev_observation, action, current_observation, done, meta_info=None) -> float:
        return 1.0


class SmallIds(RewardFunction):
    """The smaller the ids of the tokens, the better."""

    def __call__(self, prev_observation, action, current_observation, done, meta_info=None) -> float:
        return -action / 100


@pytest.fixture
def config(tiny_config):
    tiny_config["train_evaluation"] |= {"n_iters": 4, "eval_every": 9, "save_every": 9, "metrics": [{"id": "length"}]}
    tiny_config["train_evaluation"] |= {"save_model": False, "max_eval_samples": 1, "n_credit_episodes": 0}
    tiny_config["doctor"] = {"patience": 2, "window": 3, "min_minibatch_episodes": None}  # two episodes fit here
    return tiny_config


def started(config, folder, name="run"):
    return train_config(parse_config(config), base_path_to_store_results=folder, experiment_name=name, quiet=True)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def without_alarms(content):
    if isinstance(content, bytes):
        return content
    return [{key: value for key, value in line.items() if not key.startswith("doctor/")} for line in content]


def reported(folder):
    return {line["alarm"]: line for line in lines(folder / "alarms.jsonl")}


def test_a_constant_reward_is_told_once_with_an_example_everywhere(config, tmp_path, caplog, capsys):
    config["env"]["n_envs"] = 8
    config["reward_fn"] = {"id": f"{__name__}:SameForAll"}
    with caplog.at_level(logging.WARNING, logger="rl4lms_like"):
        folder = started(config, tmp_path)
    (shown,) = (line for line in capsys.readouterr().out.splitlines() if "reward_constant" in line)
    assert len(shown) < 180 and "log.txt" in shown
    line = reported(folder)["reward_constant"]
    assert line["iteration"] == 2 and line["evidence"]["reward"] == [0.5, 0.5]
    (example,) = line["examples"]
    assert example["reward"] == 0.5 and example["prompt"].startswith("Count") and example["tokens"] > 0
    warned = [record for record in caplog.records if "reward_constant" in record.getMessage()]
    assert len(warned) == 1 and "Check the reward" in warned[0].getMessage()
    assert "reward_constant" in (folder / "log.txt").read_text()
    held = [each.get("doctor/reward_constant") for each in lines(folder / "training_info.jsonl")]
    assert held == [None, 1, 1, 1]
    page = (folder / "report.html").read_text()
    assert "Alerts of the run doctor" in page and "active in 3 of the 3 iterations since" in page


def test_a_reward_that_pays_for_length_is_told_with_the_shortest_and_the_longest(config, tmp_path):
    config["reward_fn"] = {"id": f"{__name__}:ByLength"}
    config["env"]["n_envs"] = 24
    config["alg"]["args"] |= {"n_steps": 1, "n_epochs": 1}
    config["env"]["args"]["max_episode_length"] = 40
    config["alg"]["policy"]["args"]["generation_kwargs"]["max_new_tokens"] = 40
    shortest, longest = reported(started(config, tmp_path))["reward_follows_length"]["examples"]
    assert shortest["tokens"] == shortest["reward"] < longest["tokens"] == longest["reward"]


def test_responses_that_are_cut_from_the_start_are_a_task_of_continuations(config, tmp_path):
    config["doctor"]["max_truncated_share"] = 0.7
    assert "all_truncated" not in reported(started(config, tmp_path))
    shares = [line["rollout_info/truncated_share"] for line in lines(tmp_path / "rl4lm_exps/run/rollout_info.jsonl")]
    assert min(shares) >= 0.7


def test_a_learning_rate_that_is_far_too_high_collapses_the_entropy(config, tmp_path):
    config["alg"]["kl_div"] = {"coeff": 0.0}
    config["alg"]["args"] |= {"learning_rate": 0.02, "n_epochs": 8, "batch_size": 64, "critic_learning_rate": 0.02}
    config["env"]["args"]["terminate_on_eos"] = False
    config["env"]["n_envs"] = 16
    config["reward_fn"] = {"id": f"{__name__}:SmallIds"}
    config["train_evaluation"]["n_iters"] = 12
    # Rounding decides how fast it falls: with other seeds, half of the start is reached after 4 to 7 iterations.
    config["doctor"]["min_entropy_share"] = 0.5
    evidence = reported(started(config, tmp_path))["entropy_collapse"]["evidence"]
    assert max(evidence["entropy"]) < 0.5 * evidence["first"]


class StalePPO(PPO):
    """PPO whose update starts with other weights than the rollout."""

    def train(self):
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for weight in self.policy.model.parameters():
                weight += 0.05 * torch.randn(weight.shape, generator=generator).to(weight.device)
        super().train()


@pytest.mark.parametrize("is_stale", [False, True])
def test_in_bfloat16_rounding_gives_no_alert_and_stale_weights_give_one_that_names_them_on_the_console(
    config, tmp_path, capsys, is_stale
):
    config["alg"]["policy"]["args"]["dtype"] = "bfloat16"
    if is_stale:
        config["alg"]["id"] = f"{__name__}:StalePPO"
    folder = started(config, tmp_path)
    gaps = [line["train/ratio_gap"] for line in lines(folder / "training_info.jsonl")]
    assert ("ratio_gap" in reported(folder)) == is_stale, gaps

    (warning,) = [line for line in capsys.readouterr().out.splitlines() if ", ratio_gap: " in line] or [""]
    assert ("changed weights, or bfloat16 rounding; try dtype: float32" in warning) == is_stale


def test_a_ratio_off_one_is_told_by_the_doctor_alone(config, tmp_path, recwarn):
    config["alg"]["policy"]["args"]["dropout"] = True
    assert "dropout is" in reported(started(config, tmp_path))["ratio_gap"]["advice"]
    assert not [warning for warning in recwarn if "ratio differs from 1" in str(warning.message)]
    config["doctor"]["enabled"] = False
    with pytest.warns(UserWarning) as caught:
        started(config, tmp_path, "without")
    assert len([warning for warning in caught if "ratio differs from 1" in str(warning.message)]) == 1


class OneToken(SameForAll):
    """What it says of answers that are labels."""

    def __call__(self, prev_observation, action, current_observation, done, meta_info=None) -> float:
        return float(action % 2)


def test_answers_of_one_token_are_not_cut(config, tmp_path):
    config["reward_fn"] = {"id": f"{__name__}:OneToken"}
    config["env"]["args"]["max_episode_length"] = 1
    assert "all_truncated" not in reported(started(config, tmp_path))


@pytest.mark.parametrize(
    ("algorithm", "step", "critic"),
    [
        ("ppo", "learning_rate or n_epochs", "critic_learning_rate or vf_coef"),
        ("a2c", "learning_rate", "critic_learning_rate or vf_coef"),
        ("trpo", "target_kl", "critic_learning_rate or vf_coef"),
        ("stable_baselines3:PPO", "learning_rate or n_epochs", "vf_coef"),
        ("stable_baselines3:A2C", "learning_rate", "vf_coef"),
    ],
)
def test_advice_names_keys_that_the_algorithm_has(algorithm, step, critic, config):
    config["alg"] |= {"id": algorithm, "args": {"n_steps": 8}}
    context = context_of(assemble(parse_config(config)))
    assert (context.step_keys, context.critic_keys) == (f"alg.args.{step}", f"alg.args.{critic}")


def test_an_estimator_that_is_never_negative_and_a_normed_reward_are_known(config):
    context = context_of(assemble(parse_config(config)))
    assert context.estimates_kl and not context.norm_reward
    config["alg"]["kl_div"] |= {"estimator": "k3", "norm_reward": True}
    context = context_of(assemble(parse_config(config)))
    assert context.norm_reward and not context.estimates_kl and not context.is_masked


def test_a_policy_that_samples_under_a_mask_is_known(config):
    config["alg"]["id"] = "nlpo"
    config["alg"]["policy"]["id"] = "maskable_causal_lm_actor_critic_policy"
    config["alg"]["policy"]["args"] |= {"mask_type": "learned_top_p", "top_mask": 0.9}
    assert context_of(assemble(parse_config(config))).is_masked


def test_a_doctor_that_fails_says_so_once_and_ends_no_run(config, tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(ALERTS, "all_empty", lambda history, context: 1 / 0)
    with caplog.at_level(logging.WARNING, logger="rl4lms_like"):
        folder = started(config, tmp_path)
    text = [record.getMessage() for record in caplog.records if "doctor failed" in record.getMessage()]
    assert text == ["the run doctor failed in iteration 1: ZeroDivisionError: division by zero"]
    assert len(lines(folder / "training_info.jsonl")) == 4


def test_an_alert_that_cannot_be_written_ends_the_run(config, tmp_path, monkeypatch):
    """The doctor's own failures are only logged, those of the run's folder are not."""

    original = Tracker.log_line

    def full(self, file, line):
        if file == "alarms.jsonl":
            raise OSError(28, "No space left on device")
        original(self, file, line)

    monkeypatch.setattr(Tracker, "log_line", full)
    monkeypatch.setitem(ALERTS, "all_empty", lambda history, context: Alert("found", "do", {}))
    with pytest.raises(OSError, match="28"):
        started(config, tmp_path)


def test_steps_that_are_left_out_are_told_and_counted(config, tmp_path, monkeypatch):
    config["alg"]["args"]["non_finite"] = "skip"
    original, calls = PPO.loss, []

    def loss(self, minibatch):
        calls.append(1)
        terms = original(self, minibatch)
        return terms._replace(policy=terms.policy * float("nan")) if len(calls) == 2 else terms

    monkeypatch.setattr(PPO, "loss", loss)
    folder = started(config, tmp_path)
    assert reported(folder)["non_finite"]["said"].startswith("1 steps of this update were skipped, 1 in total")
    assert {line["train/skipped_steps"] for line in lines(folder / "training_info.jsonl")} == {1}
    assert [line["doctor/non_finite"] for line in lines(folder / "training_info.jsonl")] == [1, 0, 0, 0]


def test_a_healthy_run_leaves_no_alarm_and_no_key(config, tmp_path):
    config["reward_fn"] = {"id": f"{__name__}:SmallIds"}
    config["env"]["args"]["terminate_on_eos"] = False
    folder = started(config, tmp_path)
    assert not (folder / "alarms.jsonl").exists()
    assert not [key for line in lines(folder / "training_info.jsonl") for key in line if key.startswith("doctor/")]
    page = (folder / "report.html").read_text()
    assert "Alerts of the run doctor" not in page and "<dt>Alerts</dt><dd>none</dd>" in page


def test_the_doctor_changes_nothing_of_what_a_run_computes(config, tmp_path):
    config["train_evaluation"]["save_model"] = True
    config["reward_fn"] = {"id": f"{__name__}:SameForAll"}
    watched = started(config, tmp_path)
    config["doctor"] = {"enabled": False}
    alone = started(config, tmp_path, "alone")
    assert reported(watched) and not (alone / "alarms.jsonl").exists()
    assert "<dt>Alerts</dt>" not in (alone / "report.html").read_text()
    for name in ("model/model.safetensors", "rollout_info.jsonl", "training_info.jsonl"):
        assert without_alarms(files_of(watched)[name]) == files_of(alone)[name]


@pytest.mark.parametrize("place", ["after an iteration", "within an update"])
def test_a_run_that_goes_on_while_an_alarm_builds_up_tells_the_same(config, tmp_path, monkeypatch, place):
    config["reward_fn"] = {"id": f"{__name__}:SameForAll"}
    config["doctor"]["patience"] = 3
    config["train_evaluation"] |= {"n_iters": 4, "save_every": 2, "save_model": True}
    expected = started(config, tmp_path, "whole")
    if place == "after an iteration":
        with monkeypatch.context() as patch, pytest.raises(StoppedError):
            stop_after(patch, 2, "files")
            started(config, tmp_path)
    else:
        n_minibatches = lines(expected / "training_info.jsonl")[1]["train/n_updates"]
        interrupted(config, tmp_path, at_minibatch, After(n_minibatches + 2))
    folder = resume(tmp_path / "rl4lm_exps" / "run", quiet=True)
    assert reported(folder)["reward_constant"]["iteration"] == 3
    assert (folder / "alarms.jsonl").read_bytes() == (expected / "alarms.jsonl").read_bytes()
    assert files_of(folder) == files_of(expected)


def test_the_alerts_of_a_resumed_run_are_logged_in_the_order_of_their_reports(config, tmp_path, monkeypatch):
    config["reward_fn"] = {"id": f"{__name__}:SameForAll"}
    config["doctor"] |= {"patience": 1, "window": 1, "min_minibatch_episodes": 100}
    config["train_evaluation"] |= {"n_iters": 3, "save_every": 2, "save_model": True}
    expected = started(config, tmp_path, "whole")
    with monkeypatch.context() as patch, pytest.raises(StoppedError):
        stop_after(patch, 1, "files")
        started(config, tmp_path)
    folder = resume(tmp_path / "rl4lm_exps" / "run", quiet=True)

    logged = [list(line) for line in lines(expected / "training_info.jsonl")]
    alerts = [key for key in logged[1] if key.startswith("doctor/")]
    assert len(alerts) > 1 and alerts != sorted(alerts)
    assert [list(line) for line in lines(folder / "training_info.jsonl")] == logged


def test_a_run_that_goes_on_after_a_left_out_step_leaves_out_and_tells_the_same(config, tmp_path, monkeypatch):
    config["alg"]["args"] |= {"non_finite": "skip", "batch_size": 8}
    config["train_evaluation"] |= {"n_iters": 2, "save_every": 2, "save_model": True}
    original = PPO.loss

    def loss(self, minibatch):
        terms = original(self, minibatch)
        is_spoiled = self._n_updates == 3 and self.guard.skipped < 2
        return terms._replace(value=terms.value * float("nan")) if is_spoiled else terms

    monkeypatch.setattr(PPO, "loss", loss)
    expected = started(config, tmp_path, "whole")
    assert reported(expected)["non_finite"]["evidence"] == {"skipped_steps": 2.0, "new": 2.0}
    interrupted(config, tmp_path, at_minibatch, After(5))  # one of the two is left out
    assert files_of(resume(tmp_path / "rl4lm_exps" / "run", quiet=True)) == files_of(expected)


def test_thresholds_may_change_when_a_run_goes_on(config, tmp_path):
    config["train_evaluation"] |= {"n_iters": 2, "save_every": 2, "save_model": True}
    folder = started(config, tmp_path)
    changes = ["doctor.max_kl=9", "doctor.held_out=[{metric: length/words, mode: max}]", "doctor.enabled=false"]
    assert resumption(folder, changes).config.doctor.max_kl == 9


@pytest.fixture
def doctor_of(tmp_path):
    """Makes a doctor of a run that has not begun."""
    with ExitStack() as trackers:

        def make(config) -> Doctor:
            run = assemble(parse_config(config))
            tracker = Tracker(tmp_path, run.config.to_dict(), "project", "watched", quiet=True)
            return Doctor(run, trackers.enter_context(tracker))

        yield make


# --- evaluations ------------------------------------------------------------------------------------------------------


def test_a_held_out_metric_that_falls_while_the_reward_rises_is_told_with_its_worst_text(config, doctor_of):
    config["train_evaluation"]["metrics"].append({"id": "exact_match"})
    config["datapool"] = {"id": "film_opinions", "args": {"n_train": 8, "n_eval": 2}}  # it has references
    doctor = doctor_of(config)
    assert dict(doctor.context.modes) == {"answers/exact_match": "max"}
    reward = {"reward_std": 0.1, "n_episodes": 100.0}
    for epoch, (score, paid) in enumerate([(0.8, None), (0.5, 0.4), (0.4, 0.6)]):
        if paid:
            doctor.history.add({"iteration": epoch, "reward": paid, **reward}, 5)
        else:
            doctor.history.first |= {"reward": 0.2, **reward}
        texts = [
            {"prompt_text": "p", "generated_text": f"t{k}", "answers/exact_match": float(k < 100 * score)}
            for k in range(100)
        ]
        doctor.on_evaluation_end(epoch, "test", Evaluation({}, []))
        doctor.on_evaluation_end(epoch, "val", Evaluation({"answers/exact_match": score}, texts))
    doctor.tracker.done()
    (line,) = lines(doctor.tracker.run_path / "alarms.jsonl")
    assert (line["alarm"], line["iteration"]) == ("reward_hacking", 2)
    assert line["examples"] == [{"prompt": "p", "response": "t40", "score": 0.0}]


def test_held_out_metrics_are_those_named_or_those_of_known_direction_but_the_rewards_own(config):
    config["train_evaluation"]["metrics"] = [
        {"id": "increasing_numbers", "args": {"min_tokens": 8}}, {"id": "length"}, {"id": "sentiment", "name": "own"},
    ]  # fmt: skip
    run = assemble(parse_config(config))
    assert context_of(run).modes == {"semantic/sentiment/own": "max", "semantic/sentiment_positive/own": "max"}
    config["doctor"]["held_out"] = [{"metric": "length/words", "mode": "min"}]
    assert context_of(assemble(parse_config(config))).modes == {"length/words": "min"}


def test_a_held_out_metric_that_no_metric_reports_is_a_mistake_in_the_config(config):
    wanted = ("length/words", "lexical/meteor", "length/word")
    config["doctor"]["held_out"] = [{"metric": metric, "mode": "max"} for metric in wanted]
    with raises_at("doctor.held_out.2.metric", "doctor.held_out.1.metric", mentions="'length/words'"):
        parse_config(config)


class Own(BaseMetric):
    """One whose keys are not known beforehand."""

    def compute(self, prompt_texts, generated_texts, reference_texts, meta_infos=None, model=None, split_name=None):
        return {"test/own": (None, 1.0)}


def test_of_a_users_own_metric_that_is_said_before_training(config, tmp_path):
    config["train_evaluation"]["metrics"] = [{"id": f"{__name__}:Own"}]
    config["doctor"]["held_out"] = [{"metric": "test/on", "mode": "max"}]
    with raises_at("doctor.held_out.0.metric", mentions="'test/own'"):
        started(config, tmp_path)
    assert not (tmp_path / "rl4lm_exps" / "run" / "training_info.jsonl").exists()


def test_held_out_metrics_need_a_split_that_is_held_out(config, monkeypatch):
    config["doctor"]["held_out"] = [{"metric": "length/words", "mode": "min"}]
    run = assemble(parse_config(config))
    monkeypatch.setitem(run.samples, "val", [])
    with raises_at("doctor.held_out"):
        Doctor(run, None)


def test_a_score_that_is_no_number_is_no_mark(config, doctor_of):
    config["doctor"]["held_out"] = [{"metric": "length/words", "mode": "min"}]
    doctor = doctor_of(config)
    for epoch, score in enumerate([float("inf"), 3.0, float("nan")]):
        doctor.on_evaluation_end(epoch, "val", Evaluation({"length/words": score}, []))
    assert [held_out_score.score for held_out_score in doctor.history.held_out["length/words"].last] == [3.0]
    doctor.tracker.done()


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_has_every_alarm_and_every_threshold(repository):
    page = (repository / "docs" / "doctor.md").read_text()
    explained = (repository / "docs" / "metrics_explained.md").read_text()
    for name in [*ALERTS, "reward_hacking"]:
        assert f"`{name}`" in page and f"`doctor/{name}`" in explained, name
    for key in DoctorConfig.__dataclass_fields__:
        assert re.search(rf"`{key}[`:]", page), key


def test_every_alarm_says_what_it_sees_and_why_it_matters():
    for name, alarm in ALERTS.items():
        assert alarm.__doc__ and len(alarm.__doc__.splitlines()) >= 1, name


def test_no_random_number_is_drawn(config, doctor_of):
    config["alg"]["args"]["n_epochs"] = 1
    doctor = doctor_of(config)
    doctor.run.algorithm.learn_iteration(0, 1)
    before = torch.get_rng_state()
    doctor.on_iteration_end(1)
    assert torch.equal(before, torch.get_rng_state())
    doctor.tracker.done()
