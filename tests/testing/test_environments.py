"""`check_text_environment` accepts good environments and names what is wrong with each kind of faulty ones."""

from __future__ import annotations

import random
import time

import gymnasium
import numpy as np
import pytest
import torch

from rl4lms_like import ENVIRONMENTS
from rl4lms_like.core.sample import Sample
from rl4lms_like.envs.tools import ToolEnv
from rl4lms_like.testing import check_text_environment

SAMPLES = [Sample("one", "Say one.", ["one"]), Sample("two", "Say two.", ["two"])]


class Good(gymnasium.Env):
    """Guess one of three letters, in at most three turns; the base of the faulty ones."""

    def __init__(self, n_turns: int = 3) -> None:
        self.n_turns = n_turns

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.letter = "abc"[self.np_random.integers(3)]
        self.turn = 0
        self.sample = options["sample"]
        return f"{self.sample.prompt_or_input_text} Which letter?", {}

    def step(self, action):
        self.turn += 1
        is_over = self.turn >= self.n_turns or self.letter in action
        answer = "" if is_over else f"not {action[:5]!r}"
        return answer, float(self.letter in action), is_over, False, {"metrics": {"turn": self.turn}}


def test_a_good_environment_passes():
    check_text_environment(Good)
    check_text_environment(Good, SAMPLES)
    check_text_environment(Good, n_turns=1)
    check_text_environment(lambda: Good(2))


@pytest.mark.parametrize("id", ["guess_number", "calculator", "word_game", "shop"])
def test_the_shipped_games_pass(id):
    check_text_environment(id)


def test_the_shipped_games_pass_with_samples():
    check_text_environment("calculator", [Sample("0", "3+4=", ["7"]), Sample("1", "3+5=", ["8"])])
    check_text_environment("guess_number", [Sample("0", "", ["3"]), Sample("1", "", ["4"])], high=7)
    check_text_environment("reasoning_gym", SAMPLES)


def returning(**results):
    """A class whose `reset` or `step` returns something else."""

    class Returning(Good):
        def reset(self, *, seed=None, options=None):
            result = super().reset(seed=seed, options=options)
            return results.get("reset", result)

        def step(self, action):
            result = super().step(action)
            return results.get("step", result)

    Returning.__name__ = "Faulty"
    return Returning


OVER = (True, False, {})


@pytest.mark.parametrize(
    ("results", "mentions"),
    [
        ({"reset": "guess"}, "'0': reset returned 'guess'; expected (text or messages, info)"),
        ({"reset": (3, {})}, "'0': reset returned 3; expected a text, or messages with role"),
        ({"reset": ("", {})}, "'0': reset returned an empty text"),
        ({"reset": ([{"content": "a"}], {})}, "returned [{'content': 'a'}]"),
        ({"reset": ([{"role": "user", "content": 3}], {})}, "returned [{'content': 3, 'role': 'user'}]"),
        ({"reset": ("a", None)}, "returned the info None"),
        ({"reset": ("a", {"tools": {}})}, "returned the tools {}"),
        ({"reset": ("a", {"tools": [{"function": {}}]})}, "expected a list of JSON schemas of functions with names"),
        ({"reset": ("a\ud800", {})}, "reset returned 'a\\ud800', which is no valid Unicode text"),
        ({"step": ("a", 0.0, True, {})}, "'0' in turn 1: step("),
        ({"step": ("a", 0.0, True, {})}, "expected (text or messages, reward, terminated, truncated, info)"),
        ({"step": (None, 0.0, *OVER)}, "returned None; expected a text"),
        ({"step": (b"a", 0.0, *OVER)}, "expected a text"),
        ({"step": ("a", float("nan"), *OVER)}, "returned the reward nan; expected one finite number"),
        ({"step": ("a", "1", *OVER)}, "returned the reward '1'"),
        ({"step": ("a", np.ones(2), *OVER)}, "one finite number"),
        ({"step": ("a", 0.0, 1, False, {})}, "returned terminated=1; expected True or False"),
        ({"step": ("a", 0.0, True, None, {})}, "returned truncated=None; expected True or False"),
        ({"step": ("a", 0.0, True, False, [])}, "returned the info []"),
        ({"step": ("a", 0.0, True, False, {"metrics": 3})}, "returned info['metrics'] 3"),
        ({"step": ("a", 0.0, True, False, {"metrics": {"won": "no"}})}, "returned info['metrics']['won'] 'no'"),
    ],
)
def test_wrong_results_are_named_with_environment_sample_and_turn(results, mentions):
    with pytest.raises(AssertionError) as error:
        check_text_environment(returning(**results))
    assert str(error.value).startswith("Faulty with sample '0'") and mentions in str(error.value)


class CannotBeBuilt(Good):
    def __init__(self):
        raise OSError("no file")


class TakesNoOptions(Good):
    def reset(self, *, seed=None):
        return super().reset(seed=seed)


class FailsInReset(Good):
    def reset(self, *, seed=None, options=None):
        raise KeyError("x")


class FailsInStep(Good):
    def step(self, action):
        if self.turn == 1:
            raise KeyError("x")
        return super().step(action)


class ExpectsANumber(Good):
    def step(self, action):
        int(action)
        return super().step(action)


class Exits(Good):
    def step(self, action):
        raise SystemExit(3)


class NoStep:
    def reset(self, *, seed=None, options=None):
        return "a", {}

    def close(self):
        pass


class KeepsItsState(Good):
    n_episodes = 0

    def reset(self, *, seed=None, options=None):
        text, info = super().reset(seed=seed, options=options)
        self.n_episodes += 1
        return f"{text} {self.n_episodes}", info


class KeepsItsStateInTheClass(Good):
    n_episodes = 0

    def reset(self, *, seed=None, options=None):
        text, info = super().reset(seed=seed, options=options)
        type(self).n_episodes += 1
        return f"{text} {self.n_episodes}", info


class DrawsWithoutASeed(Good):
    def reset(self, *, seed=None, options=None):
        result = super().reset(seed=seed, options=options)
        self.letter = str(np.random.default_rng().integers(10**6))
        return result

    def step(self, action):
        return self.letter, *super().step(action)[1:]


class DrawsFromPython(Good):
    def step(self, action):
        random.random()
        return super().step(action)


class SeedsNumPy(Good):
    def reset(self, *, seed=None, options=None):
        np.random.seed(seed)
        return super().reset(seed=seed, options=options)


class DrawsFromTorch(Good):
    def step(self, action):
        torch.rand(1)
        return super().step(action)


class SharesItsTurns(Good):
    shared: list[int] = []  # noqa: RUF012  (the fault)

    def reset(self, *, seed=None, options=None):
        type(self).shared = []
        return super().reset(seed=seed, options=options)

    def step(self, action):
        self.shared.append(self.turn)
        answer, *rest = super().step(action)
        return f"{answer} {len(self.shared)}", *rest


class ReturnsOneObject(Good):
    def reset(self, *, seed=None, options=None):
        text, info = super().reset(seed=seed, options=options)
        self.messages = [{"role": "user", "content": text}]
        return self.messages, info

    def step(self, action):
        answer, *rest = super().step(action)
        self.messages.append({"role": "user", "content": answer})
        return self.messages, *rest


class ChangesTheSample(Good):
    def reset(self, *, seed=None, options=None):
        options["sample"].references.append("x")
        return super().reset(seed=seed, options=options)


class NeverEnds(Good):
    def step(self, action):
        return "go on", 0.0, False, False, {}


class Blocks(Good):
    def step(self, action):
        time.sleep(60)
        return super().step(action)


class PlayerWithoutText(Good):
    def player(self):
        return 3


class PlayerFails(Good):
    def player(self):
        raise KeyError("x")


class PlayerDraws(Good):
    def player(self):
        return "abcdefgh"[np.random.default_rng().integers(8)] * 3


class ToolWithoutDocs(ToolEnv):
    def look(self, row: int) -> str:
        return "nothing"


class FailsInClose(Good):
    def close(self):
        raise OSError("cannot close")


@pytest.mark.parametrize(
    ("environment", "mentions"),
    [
        (CannotBeBuilt, "the constructor failed: OSError: no file"),
        (TakesNoOptions, "with sample '0': reset failed: TypeError"),
        (FailsInReset, "with sample '0': reset failed: KeyError: 'x'"),
        (FailsInStep, "with sample '0' in turn 2: step("),
        (ExpectsANumber, "failed: ValueError"),
        (Exits, "in turn 1: step("),
        (NoStep, "has no method 'step'"),
        (KeepsItsState, "the next time, an episode with the same seed and sample begins with another text"),
        (KeepsItsStateInTheClass, "begins with another text"),
        (DrawsWithoutASeed, "has another answer to"),
        (DrawsFromPython, "uses the global random numbers of Python"),
        (SeedsNumPy, "reset uses the global random numbers of NumPy"),
        (DrawsFromTorch, "uses the global random numbers of torch"),
        (SharesItsTurns, "while another object plays"),
        (ReturnsOneObject, "an answer was changed by a later step"),
        (ChangesTheSample, "reset changes the sample"),
        (NeverEnds, "no episode ends within 30 turns"),
        (PlayerWithoutText, "player returned 3; expected a text"),
        (PlayerFails, "player failed: KeyError"),
        (PlayerDraws, "has another turn of the player"),
        (ToolWithoutDocs, "the tool 'look' of ToolWithoutDocs has no schema"),
        (FailsInClose, "close failed: OSError: cannot close"),
    ],
)
def test_faulty_environments_are_named(environment, mentions):
    with pytest.raises(AssertionError) as error:
        check_text_environment(environment)
    assert str(error.value).startswith(environment.__name__) and mentions in str(error.value)


def test_a_blocking_step_ends_by_the_time_limit():
    start = time.monotonic()
    with pytest.raises(AssertionError, match=r"Blocks with sample '0' in turn 1: step\(.* took longer than 0.3 s"):
        check_text_environment(Blocks, timeout=0.3)
    assert time.monotonic() - start < 30


def test_one_object_for_all_episodes_is_an_error():
    env = Good()
    with pytest.raises(AssertionError, match="needs an object of its own"):
        check_text_environment(lambda: env)


def test_an_environment_that_ignores_the_samples_is_an_error():
    class Ignores(Good):
        def reset(self, *, seed=None, options=None):
            return "Which letter?", super().reset(seed=seed, options=options)[1]

    check_text_environment(Ignores)
    with pytest.raises(AssertionError, match="equal for all 2 samples"):
        check_text_environment(Ignores, SAMPLES)


def test_global_random_numbers_of_the_caller_are_left_alone():
    before = random.getstate()
    check_text_environment(Good)
    assert random.getstate() == before


def test_an_id_is_the_name_in_messages():
    ENVIRONMENTS.add("never_ends", NeverEnds)
    try:
        with pytest.raises(AssertionError, match=r"^'never_ends': no episode ends"):
            check_text_environment("never_ends")
    finally:
        del ENVIRONMENTS._table["never_ends"]
