"""Classes for TRL's `environment_factory`: as the documentation of TRL writes them."""

from __future__ import annotations

import asyncio
import json

import pytest

from rl4lms_like import ENVIRONMENTS
from rl4lms_like.core.sample import Sample
from rl4lms_like.envs.adapters.trl_environment import TrlEnvironment
from rl4lms_like.system.errors import ConfigError


class CounterEnv:
    """A counter that the model increments; the reward is its value."""

    def reset(self, start: int = 0, **kwargs) -> str | None:
        self.value = start
        self.columns = kwargs
        return f" The counter is {self.value}."

    def increment(self, by: int) -> int:
        """Increment the counter.

        Args:
            by: how much is added.
        """
        if by < 0:
            raise ValueError("only positive numbers")
        if by == 7:
            raise RuntimeError("a bug")
        self.value += by
        return self.value

    def get_reward(self) -> float:
        return float(self.value)

    def _secret(self):
        raise AssertionError


class SilentEnv:
    """No observation, an async tool, an async reward."""

    def reset(self, **kwargs) -> None:
        self.n = 0

    async def look(self) -> str:
        """Look."""
        self.n += 1
        return "nothing"

    async def get_reward(self) -> float:
        return self.n / 2


class Unpaid:
    def reset(self, **kwargs):
        return None

    def look(self) -> str:
        """Look."""
        return "nothing"


def call(name: str, **arguments) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_an_episode():
    env = ENVIRONMENTS.get("trl_environment", {"environment": "tests.envs.adapters.test_trl_environment:CounterEnv"})
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Count."}]
    sample = Sample.of_messages("0", messages, meta_data={"start": 2, "topic": "numbers"})
    first, info = env.reset(seed=0, options={"sample": sample})
    assert first == [messages[0], {"role": "user", "content": "Count. The counter is 2."}]
    assert sample.messages == messages
    assert [tool["function"]["name"] for tool in info["tools"]] == ["increment"]
    assert env._wrapped.columns == {"prompt": messages, "topic": "numbers"}

    answer, reward, *_ = env.step(call("increment", by=3))
    assert (answer[0]["content"], reward) == ("5", 5.0)
    answer, reward, *_ = env.step(call("increment", by=-3) + call("_secret") + call("get_reward"))
    assert [message["content"][:7] for message in answer] == ["error: "] * 3 and reward == 0.0
    assert env.step("5")[:4] == ("", 0.0, True, False)
    with pytest.raises(RuntimeError, match="a bug"):
        env.step(call("increment", by=7))


def test_a_text_as_prompt_and_a_second_episode():
    env = TrlEnvironment(CounterEnv)
    for _ in range(2):
        assert env.reset(options={"sample": Sample("0", "Count.")})[0] == "Count. The counter is 0."
        assert env.step(call("increment", by=1))[1] == 1.0


def test_async_methods_and_no_observation():
    env = TrlEnvironment(SilentEnv)
    assert env.reset(options={"sample": Sample("0", "Go.")})[0] == "Go."
    assert env.step(call("look") + call("look"))[1] == 1.0
    assert env.step("done")[1:3] == (0.0, True)


def test_all_async_methods_run_in_one_event_loop():
    class Client(SilentEnv):
        async def look(self) -> str:
            """Look."""
            self.loop = asyncio.get_running_loop()
            return await super().look()

        async def get_reward(self) -> float:
            assert asyncio.get_running_loop() is self.loop
            return await super().get_reward()

    env = TrlEnvironment(Client)
    env.reset()
    assert [env.step(turn)[1] for turn in (call("look"), call("look"), "done")] == [0.5, 0.5, 0.0]
    env.close()


def test_the_tools_are_those_that_trl_finds():
    class Helped(SilentEnv):
        @staticmethod
        def helper(x):
            return x

        @classmethod
        def rules(cls) -> str:
            """Return the rules."""
            return "none"

    assert list(TrlEnvironment(Helped).tools) == ["look", "rules"]


def test_a_class_without_a_reward_leaves_it_to_the_reward_function():
    env = TrlEnvironment(Unpaid)
    env.reset(options={"sample": Sample("0", "Go.")})
    assert env.step("done")[1:3] == (0.0, True)


def test_what_cannot_be_an_environment_is_an_error():
    with pytest.raises(ConfigError, match="cannot import"):
        TrlEnvironment("tests.envs.adapters.test_trl_environment:Missing")
    with pytest.raises(ConfigError, match="no method `reset`"):
        TrlEnvironment(dict)


def test_an_observation_of_another_kind_is_an_error():
    env = TrlEnvironment(CounterEnv)
    env._wrapped.reset = lambda **columns: [{"type": "image"}]
    with pytest.raises(TypeError, match="expected a text or None"):
        env.reset(options={"sample": Sample("0", "Go.")})
