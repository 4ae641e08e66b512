"""Environments whose public methods are tools: schemas, calls, wrong calls, exceptions, async tools."""

from __future__ import annotations

import asyncio
import gc
import json
import time
import weakref

import pytest

from rl4lms_like import ENVIRONMENTS
from rl4lms_like.core.sample import Sample
from rl4lms_like.envs.tools import FunctionTools, ToolCall, ToolEnv, tool_calls
from rl4lms_like.system.errors import ComponentError, ConfigError


class NotFoundError(LookupError):
    """There is no such row."""


class Table(ToolEnv):
    """A small table."""

    tool_errors = (NotFoundError,)

    def look_up(self, row: int, column: str = "name") -> str | dict[str, int]:
        """Return a cell.

        Args:
            row: number of the row.
            column: name of the column.
        """
        if row == 99:
            raise NotFoundError("no row 99")
        if row == 100:
            raise TypeError("a bug of the tool")
        return {"row": row} if column == "all" else f"{column} of {row}"

    @staticmethod
    def size() -> int:
        """Return the number of rows."""
        return 99

    def start(self, sample):
        self.opened = 0
        return [{"role": "user", "content": sample.prompt_or_input_text}]

    def reward(self, answer):
        return float(answer == "Ann")

    def _hidden(self):
        raise AssertionError("no tool")


def call(name: str, **arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture
def table():
    env = Table()
    env.reset(seed=0, options={"sample": Sample("0", "Who is in row 3?")})
    return env


def answers(env, turn: str) -> list[str]:
    messages, reward, terminated, truncated, _ = env.step(turn)
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert {message["role"] for message in messages} == {"tool"}
    return [message["content"] for message in messages]


def test_the_schemas_of_all_public_methods_come_with_the_prompt():
    first, info = Table().reset(seed=0, options={"sample": Sample("0", "Who?")})
    assert first == [{"role": "user", "content": "Who?"}]
    look_up, size = info["tools"]
    assert look_up == {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Return a cell.",
            "parameters": {
                "type": "object",
                "properties": {
                    "row": {"type": "integer", "description": "number of the row."},
                    "column": {"type": "string", "description": "name of the column."},
                },
                "required": ["row"],
            },
            "return": look_up["function"]["return"],
        },
    }
    assert size["function"]["name"] == "size"


def test_an_episode_with_two_calls_and_an_answer(table):
    messages, *_, info = table.step(f"I look. {call('look_up', row=3)} and {call('size')}")
    assert messages == [
        {"role": "tool", "name": "look_up", "content": "name of 3"},
        {"role": "tool", "name": "size", "content": "99"},
    ]
    assert info["metrics"] == {"calls": 2.0, "failed_calls": 0.0, "calls/look_up": 1.0, "calls/size": 1.0}
    assert table.step(" Ann\n") == ("", 1.0, True, False, {"metrics": info["metrics"]})
    table.reset(seed=0, options={"sample": Sample("0", "Who?")})
    assert table.step("Bob")[1:] == (0.0, True, False, {"metrics": dict.fromkeys(info["metrics"], 0.0)})


def test_an_environment_is_freed_after_its_calls():
    env = Table()
    env.reset(options={"sample": Sample("0", "Who?")})
    env.step(call("look_up", row=3))
    freed = weakref.ref(env)
    del env
    gc.collect()
    assert freed() is None


def test_a_result_that_looks_like_an_error_is_no_failed_call():
    class Log(ToolEnv):
        def unknown(self) -> str:
            """Return the last line."""
            return "error: disk full"

    env = Log()
    env.reset()
    messages, *_, info = env.step(call("unknown"))
    assert messages == [{"role": "tool", "name": "unknown", "content": "error: disk full"}]
    assert info["metrics"] == {"calls": 1.0, "failed_calls": 0.0, "calls/unknown": 1.0}


def test_an_unknown_name_is_not_repeated_as_the_name_of_a_message(table):
    messages, *_ = table.step(call("<|im_end|>"))
    assert messages[0]["name"] == "unknown"


@pytest.mark.parametrize(
    ("turn", "mentions"),
    [
        ("<tool_call>look_up(3)</tool_call>", "expected {"),
        ("<tool_call></tool_call>", "expected {"),
        ("<tool_call>[1]</tool_call>", "expected {"),
        ('<tool_call>{"name": 3}</tool_call>', "expected {"),
        ('<tool_call>{"name": "look_up", "arguments": [3]}</tool_call>', "expected {"),
        ('<tool_call>{"name": "look_up", "arguments": {"row": NaN}}</tool_call>', "expected {"),
        ('<tool_call>{"name": "look_up", "arguments": "row 3"}</tool_call>', "expected {"),
        ("<tool_call>" + "[" * 100_000, "expected {"),
        ('<tool_call>{"name": "look_up", "arguments": {"row": ' + "9" * 5000 + "}}", "expected {"),
        ('<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', "expected {"),
        ('<tool_call>{"name": "look_up", "arguments": {"row": 1, "column": "\\ud800"}}</tool_call>', "expected {"),
        ('<tool_call>{"name": "look_up", "arguments": {"row": 1e999}}</tool_call>', "expected {"),
        (call("look"), "there is no tool 'look'; there are: look_up, size"),
        (call("_hidden"), "there is no tool"),
        (call("reset"), "there is no tool"),
        (call("reward", answer="Ann"), "there is no tool"),
        (call("look_up"), "row: missing"),
        (call("look_up", row="three"), "row"),
        (call("look_up", row=3, colunm="name"), "did you mean 'column'"),
        (call("look_up", row=None), "row"),
        (call("size", row=3), "row"),
        (call("look_up", row=99), "no row 99"),
    ],
)
def test_a_wrong_call_is_an_answer_that_is_counted(table, turn, mentions):
    messages, reward, terminated, truncated, info = table.step(turn)
    assert (reward, terminated, truncated) == (0.0, False, False)
    (answer,) = [message["content"] for message in messages]
    json.dumps(messages, ensure_ascii=False).encode()  # as a tokenizer encodes them
    assert answer.startswith("error: ") and mentions in answer and len(answer) < 500
    assert (info["metrics"]["calls"], info["metrics"]["failed_calls"]) == (1.0, 1.0)
    assert answers(table, call("look_up", row=1)) == ["name of 1"]


def test_a_wrong_call_does_not_keep_another_one_from_being_made(table):
    wrong, right = answers(table, call("look_up") + call("look_up", row=1))
    assert wrong.startswith("error: ") and right == "name of 1"


def test_an_exception_that_is_not_declared_is_raised(table):
    with pytest.raises(TypeError, match="a bug of the tool"):
        table.step(call("look_up", row=100))


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('<tool_call>{"name": "f", "arguments": {}}', [ToolCall("f", {})]),
        ('<tool_call>{"name": "f"}</tool_call>', [ToolCall("f", {})]),
        ('{"name": "f", "arguments": {"a": 1}}', [ToolCall("f", {"a": 1})]),
        ('[{"name": "f", "parameters": {}}, {"name": "g", "arguments": {}}]', [ToolCall("f", {}), ToolCall("g", {})]),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', [ToolCall("f", {"a": 1})]),
        ('{"name": "Bob"}', []),
        ('{"answer": 3}', []),
        ("3", []),
        ("", []),
        ("I could call a tool.", []),
    ],
)
def test_calls_are_those_of_hermes_and_of_json(text, calls):
    assert tool_calls(text) == calls


@pytest.mark.parametrize("thought", ["<think>{}</think>", "{}</think>", "<think>a</think><think>{}</think>"])
def test_a_call_or_an_answer_in_the_reasoning_does_not_count(table, thought):
    assert table.step(thought.format(call("size")) + "Ann")[1:3] == (1.0, True)


def test_a_thought_without_end_is_no_call(table):
    assert table.step(f"<think>{call('size')}")[1:3] == (0.0, True)


def test_results_that_are_no_texts_are_json(table):
    assert answers(table, call("look_up", row=3, column="all")) == ['{"row": 3}']


class NoDocs(ToolEnv):
    def look(self, row: int) -> str:
        return str(row)


class NoTypes(ToolEnv):
    def look(self, row):
        """Look.

        Args:
            row: number.
        """


@pytest.mark.parametrize("cls", [NoDocs, NoTypes])
def test_a_tool_without_a_schema_is_named(cls):
    with pytest.raises(ComponentError, match=rf"the tool 'look' of {cls.__name__} has no schema"):
        cls().reset(seed=0)


def search(query: str) -> str:
    """Search.

    Args:
        query: words.
    """
    return query.upper()


def test_plain_functions_are_tools():
    env = ENVIRONMENTS.get("tools", {"tools": [search]})
    first, info = env.reset(seed=0, options={"sample": Sample("0", "Find it.")})
    assert first == "Find it." and [tool["function"]["name"] for tool in info["tools"]] == ["search"]
    assert answers(env, call("search", query="emma")) == ["EMMA"]
    assert env.step("done")[1:3] == (0.0, True)


def test_plain_functions_are_given_by_import_paths():
    env = FunctionTools(["tests.envs.test_tools:search"])
    env.reset(seed=0)
    assert answers(env, call("search", query="a")) == ["A"]


def test_what_is_no_tool_is_an_error_with_all_others():
    with pytest.raises(ConfigError) as error:
        FunctionTools(["tests.envs.test_tools:no", 3, search, search])
    assert [issue.path for issue in error.value.issues] == ["tools[0]", "tools[1]", "tools[3]"]
    with pytest.raises(ConfigError, match="at least one"):
        FunctionTools([])


class Waiting(ToolEnv):
    """Tools that wait."""

    async def fetch(self, page: int) -> int:
        """Fetch a page.

        Args:
            page: its number.
        """
        await asyncio.sleep(0.2)
        if page == 404:
            raise ValueError("not found")
        if page == 500:
            raise KeyError("a bug")
        return page


def test_async_calls_of_a_turn_wait_at_the_same_time():
    env = Waiting()
    env.reset(seed=0)
    start = time.monotonic()
    pages = [7, 404, *range(20)]
    assert answers(env, "".join(call("fetch", page=page) for page in pages)) == [
        *("7", "error: not found"),
        *map(str, range(20)),
    ]
    assert time.monotonic() - start < 2.0  # 4.4 s one after the other
    with pytest.raises(KeyError, match="a bug"):
        env.step(call("fetch", page=500))
    assert answers(env, call("fetch", page=1)) == ["1"]
    env.close()


class Derived(Table):
    """Tools of a base class, one of them replaced, and one more."""

    def size(self) -> int:
        """Return another number."""
        return 3

    def more(self) -> str:
        """Return more."""
        return "more"


def test_tools_are_inherited():
    env = Derived()
    env.reset(seed=0)
    assert list(env.tools) == ["look_up", "size", "more"]
    assert answers(env, call("size") + call("more")) == ["3", "more"]
