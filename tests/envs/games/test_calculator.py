"""The calculator: its language, the final answer, scores."""

from __future__ import annotations

import random

import pytest

from rl4lms_like.data_pools.sums import Sums, split_of
from rl4lms_like.envs.games.calculator import Calculator, calculated
from tests.envs.games.conftest import mean_score, played, scripted


def test_an_episode():
    env = Calculator()
    pool = Sums.prepare(split_of("263+394="), limit=500)
    (sample,) = [sample for sample, _ in pool if sample.id == "263+394="]
    assert env.reset(seed=0, options={"sample": sample})[0] == "263+394=\n"
    metrics = {"correct": 0.0, "calls": 1.0, "failed_calls": 0.0}
    assert env.step(" c263+394 ") == ("657\n", 0.0, False, False, {"metrics": metrics})
    assert env.step("657") == ("", 1.0, True, False, {"metrics": {**metrics, "correct": 1.0}})


@pytest.mark.parametrize(
    "call", ["c", "c+", "c1+", "c1/2", "c(1)", "c1**2", "c__import__('os')", "c1 +2", "c" + "1" * 10]
)
def test_what_the_calculator_does_not_know_is_an_error_that_is_counted(call):
    env = Calculator()
    env.reset(seed=0)
    answer, reward, terminated, _, info = env.step(call)
    assert (answer, reward, terminated) == ("error\n", 0.0, False)
    assert info["metrics"] == {"correct": 0.0, "calls": 1.0, "failed_calls": 1.0}


def test_values_are_those_of_python():
    rng = random.Random(0)
    for _ in range(2000):
        expression = str(rng.randint(0, 99))
        for _ in range(rng.randint(0, 9)):
            expression += rng.choice("+-*") + str(rng.randint(0, 99))
        assert calculated(expression) == eval(expression)
    assert calculated("1" + "+1" * 10) is None
    assert calculated("007+1") == 8


@pytest.mark.parametrize("answer", ["", "656", "657.", "+657", "0657", "657 658", "c657"])
def test_only_the_exact_answer_counts(answer):
    env = Calculator(tool=False)
    env.reset(seed=0)
    env.answer = "657"
    assert env.step(answer)[1:3] == (0.0, True)
    env.reset(seed=0)
    env.answer = "657"
    assert env.step(" 657\n")[1:3] == (1.0, True)


def test_without_the_tool_each_text_is_the_final_answer():
    env = Calculator(tool=False)
    env.reset(seed=0)
    assert env.step("c1+1")[2] is True


def asks(env: Calculator) -> str:
    return env.result or f"c{env.question.rstrip('=')}"


def test_the_best_player_asks():
    assert mean_score(Calculator(limit=1000), asks, 300) == 1.0


@pytest.mark.parametrize(("tool", "score"), [(True, 0.65), (False, 0.5)])
def test_the_scripted_player(tool, score):
    env = Calculator(tool=tool)
    assert mean_score(env, scripted, 4000) == pytest.approx(score, abs=0.025)  # three standard deviations
    calls = [played(env, scripted, seed)["metrics"]["calls"] for seed in range(2000)]
    assert sum(calls) / 2000 == pytest.approx(0.3 if tool else 0.0, abs=0.035)
