"""What the time-to-reward benchmark says of curves, and that our side takes the optimizer steps it is compared at."""

from __future__ import annotations

import random

import pytest

from benchmarks import time_to_reward
from benchmarks.systems.sentiment_ours import tokens_per_minibatch
from benchmarks.time_to_reward import OURS, SHAPE, TRL, interval, reached, summarise
from rl4lms_like.core.episodes import pack_episodes


def run_of(rewards, *, seed=0, cpu_s=1.0):
    seconds = {"wall_s": 2 * cpu_s, "cpu_s": cpu_s, "rollout_cpu_s": cpu_s / 2}
    iterations = [{"reward": reward, "kl": 0.1 * number, **seconds} for number, reward in enumerate(rewards)]
    held_out = {"held_out_reward_before": rewards[0], "held_out_reward": rewards[-1]}
    return {"seed": seed, "iterations": iterations, **held_out}


def test_a_target_is_reached_by_the_mean_of_two_rollouts_in_a_row():
    run = run_of([0.0, 0.9, 0.1, 0.55, 0.65, 0.9], cpu_s=3.0)
    expected = {"s to 0.6": 30.0, "CPU s to 0.6": 15.0, "iterations to 0.6": 5, "KL at 0.6": pytest.approx(0.35)}
    assert reached(run["iterations"], 0.6) == expected
    assert reached(run["iterations"], 0.8) == {}


def test_ratios_are_within_a_seed_and_seeds_that_missed_a_target_are_left_out():
    runs = {
        OURS: [run_of([0.6, 0.6], seed=0, cpu_s=1.0), run_of([0.6, 0.6], seed=1, cpu_s=10.0)],
        TRL: [run_of([0.5, 0.6, 0.6], seed=0, cpu_s=1.0), run_of([0.5, 0.6, 0.6], seed=1, cpu_s=20.0)],
    }
    ratio = summarise(runs)[TRL]["CPU s to 0.6, x ours"]
    assert (ratio["mean"], ratio["n"]) == (pytest.approx((1.5 + 3.0) / 2), 2)
    runs[OURS][1] = run_of([0.1, 0.1], seed=1)
    summary = summarise(runs)
    assert summary[TRL]["CPU s to 0.6, x ours"] == {"mean": pytest.approx(1.5), "n": 1}
    assert summary[OURS]["CPU s to 0.6"]["n"] == 1
    assert "CPU s to 0.7" not in summary[OURS]


def test_a_ratio_is_to_our_run_with_the_same_rate_and_to_the_quickstarts():
    runs = {OURS: [run_of([0.6, 0.6], cpu_s=4.0)], "ours 0.001": [run_of([0.6, 0.6], cpu_s=1.0)]}
    summary = summarise({**runs, "trl 0.001": [run_of([0.6, 0.6], cpu_s=2.0)]})
    assert summary["trl 0.001"]["CPU s to 0.6, x ours"]["mean"] == pytest.approx(2.0)
    assert summary["trl 0.001"][f"CPU s to 0.6, x {OURS}"]["mean"] == pytest.approx(0.5)
    assert summary["ours 0.001"][f"CPU s to 0.6, x {OURS}"]["mean"] == pytest.approx(0.25)
    assert not any("x ours" in key for key in summary[OURS])


def test_the_interval_is_students():
    assert interval([1.0, 2.0, 3.0])["half_width"] == pytest.approx(4.302653 / 3**0.5, rel=1e-6)
    assert "half_width" not in interval([1.0])


@pytest.mark.parametrize("longest", [10, 40])
def test_our_side_takes_as_many_minibatches_as_the_shape_says(longest):
    rng = random.Random(0)
    n_minibatches = SHAPE.episodes // SHAPE.minibatch
    for _ in range(50):
        lengths = [rng.randint(1, longest) for _ in range(SHAPE.episodes)]
        order = rng.sample(range(SHAPE.episodes), SHAPE.episodes)
        groups = pack_episodes(lengths, order, tokens_per_minibatch(lengths, n_minibatches))
        assert len(groups) == n_minibatches
        assert min(len(group) for group in groups) > SHAPE.minibatch // 2


def test_too_few_episodes_for_so_many_minibatches_are_refused():
    with pytest.raises(ValueError):
        tokens_per_minibatch([40, 1, 1], 3)


def test_a_contestant_that_did_other_work_stops_the_benchmark():
    with pytest.raises(time_to_reward.WorkerError):
        time_to_reward.show_progress(0, TRL, 0, {"optimizer_steps": 20})
