"""What the time-to-reward benchmark says of curves, and that our side takes the optimizer steps it is compared at."""

from __future__ import annotations

import random

import pytest

from benchmarks import time_to_reward
from benchmarks.systems.sentiment_ours import tokens_per_minibatch
from benchmarks.time_to_reward import OURS, SHAPE, TRL, best, interval, reached, summarise
from rl4lms_like.core.episodes import pack_episodes


def run_of(rewards, *, seed=0, cpu_s=1.0):
    seconds = {"wall_s": 2 * cpu_s, "cpu_s": cpu_s}
    iterations = [{"reward": reward, "kl": 0.1 * number, **seconds} for number, reward in enumerate(rewards)]
    return {"seed": seed, "iterations": iterations, "held_out_reward": rewards[-1]}


def test_a_target_is_reached_by_the_mean_of_two_rollouts_in_a_row():
    run = run_of([0.0, 0.9, 0.1, 0.55, 0.65, 0.9], cpu_s=3.0)
    expected = {"wall_s": 30.0, "cpu_s": 15.0, "iterations": 5, "kl": pytest.approx(0.35)}
    assert reached(run["iterations"], 0.6) == expected
    assert reached(run["iterations"], 0.8) is None


def test_ratios_are_within_a_seed_and_seeds_that_missed_a_target_are_counted_out():
    runs = {
        OURS: [run_of([0.6, 0.6], seed=0, cpu_s=1.0), run_of([0.6, 0.6], seed=1, cpu_s=10.0)],
        TRL: [run_of([0.5, 0.6, 0.6], seed=0, cpu_s=1.0), run_of([0.5, 0.6, 0.6], seed=1, cpu_s=20.0)],
    }
    ratio = summarise(runs)[TRL]["cpu_s to 0.6, times ours"]
    assert (ratio["mean"], ratio["n"]) == (pytest.approx((1.5 + 3.0) / 2), 2)
    runs[OURS][1] = run_of([0.1, 0.1], seed=1)
    summary = summarise(runs)
    assert summary[TRL]["cpu_s to 0.6, times ours"] == {"mean": pytest.approx(1.5), "n": 1}
    assert summary[OURS]["cpu_s to 0.6"]["n"] == 1
    assert "cpu_s to 0.7" not in summary[OURS]


def test_the_interval_is_students():
    assert interval([1.0, 2.0, 3.0])["half_width"] == pytest.approx(4.302653 / 3**0.5, rel=1e-6)
    assert "half_width" not in interval([1.0])


def test_the_best_rate_is_the_fastest_and_a_miss_is_worse_than_slow():
    runs = {
        "trl 0.0002": run_of([0.1, 0.5, 0.5]),
        "trl 0.0005": run_of([0.1, 0.6, 0.6], cpu_s=9.0),
        "trl 0.001": run_of([0.9, 0.1, 0.1], cpu_s=0.1),
        OURS: run_of([0.9, 0.9]),
    }
    assert best(runs, "sentiment_trl") == "trl 0.0005"


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
    with pytest.raises(ValueError, match="too few"):
        tokens_per_minibatch([40, 1, 1], 3)


def test_a_contestant_that_did_other_work_stops_the_benchmark():
    with pytest.raises(time_to_reward.WorkerError, match="took 20 optimizer steps, not 16"):
        time_to_reward.show_progress(0, TRL, 0, {"optimizer_steps": 20})
