"""The registry of environments that answer."""

from __future__ import annotations

import gymnasium
import pytest

from rl4lms_like import ENVIRONMENTS
from rl4lms_like.config.binding import check_component
from rl4lms_like.envs.games.guess_number import GuessNumber
from rl4lms_like.system.errors import ConfigError

ID = "rl4lms_like_tests/Guess-v0"


@pytest.fixture
def registered():
    gymnasium.register(ID, entry_point="rl4lms_like.envs.games.guess_number:GuessNumber", kwargs={"high": 3})
    yield
    del gymnasium.registry[ID]


@pytest.mark.parametrize("id", ["guess_number", "rl4lms_like.envs.games.guess_number:GuessNumber"])
def test_an_environment_is_built_by_id_and_by_import_path(id):
    env = ENVIRONMENTS.get(id, {"high": 5})
    assert isinstance(env, GuessNumber)
    assert env.high == 5


def test_an_environment_is_built_by_the_id_of_gymnasium(registered):
    env = ENVIRONMENTS.get(ID)
    assert env.unwrapped.high == 3 and env.spec.id == ID
    assert env.reset(seed=0)[0] == "Guess a number from 1 to 3:\n"
    assert ENVIRONMENTS.get(ID, {"high": 9}).unwrapped.high == 9
    assert ENVIRONMENTS.resolve(ID) is GuessNumber


def test_the_arguments_of_an_environment_of_gymnasium_are_checked(registered):
    checked, issues = check_component(ENVIRONMENTS, ENVIRONMENTS.signature(ID), {"high": 4}, "args")
    assert (checked["high"], issues) == (4, [])
    _, issues = check_component(ENVIRONMENTS, ENVIRONMENTS.signature(ID), {"hihg": 4}, "args")
    assert [issue.path for issue in issues] == ["args.hihg"]


def test_a_class_of_another_kind_and_an_unknown_id_are_refused():
    with pytest.raises(ConfigError, match="not derived from Env"):
        ENVIRONMENTS.resolve("rl4lms_like.core.seeding:SeedStream")
    with pytest.raises(ConfigError, match="did you mean 'guess_number'"):
        ENVIRONMENTS.resolve("gues_number")


def test_an_environment_whose_actions_are_no_texts_is_refused():
    with pytest.raises(ConfigError, match=r"actions of 'CartPole-v1' are Discrete\(2\)"):
        ENVIRONMENTS.get("CartPole-v1")


def test_an_environment_of_gymnasium_that_cannot_be_imported_is_an_error_of_its_id():
    gymnasium.register("rl4lms_like_tests/Missing-v0", entry_point="rl4lms_like.no_module:Nobody")
    try:
        for call in (ENVIRONMENTS.signature, ENVIRONMENTS.resolve):
            with pytest.raises(
                ConfigError, match=r"cannot import 'rl4lms_like.no_module:Nobody', the environment 'rl4l"
            ):
                call("rl4lms_like_tests/Missing-v0")
    finally:
        del gymnasium.registry["rl4lms_like_tests/Missing-v0"]
