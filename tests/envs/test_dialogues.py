"""Faulty environments are named with their sample and turn; blocking ones end."""

import threading
import time

import numpy as np
import pytest

from rl4lms_like.core.chat_template import ChatTemplate
from rl4lms_like.core.observation import TextLayout
from rl4lms_like.core.sample import Sample
from rl4lms_like.envs.dialogues import Dialogues, DialogueSettings, episode_seed
from rl4lms_like.system.errors import DialogueError
from tests.chat_models import chat_tokenizer
from tests.dialogues import Scripted

OK = ("go on", 0.5, False, False, {})


def played(tokenizer, make, *, n=2, turns=2, max_prompt_length=12, **options):
    settings = DialogueSettings(
        "guess", make, **({"max_turns": 5, "max_turn_length": 4, "max_episode_length": 40} | options)
    )
    dialogues = Dialogues(settings, TextLayout(tokenizer, max_prompt_length, 40))
    dialogues.start([Sample(str(i), "Count") for i in range(n)], list(range(n)))
    for _ in range(turns):
        dialogues.step(range(n), [[5, 6]] * n)
    return dialogues


class Failing(Scripted):
    """Raises in `reset` or in a turn."""

    def __init__(self, where, error):
        super().__init__(OK)
        self.where, self.error = where, error

    def reset(self, *, seed=None, options=None):
        if self.where == "reset":
            raise self.error
        return super().reset(seed=seed, options=options)

    def step(self, action):
        result = super().step(action)
        if self.where == self.turn:
            raise self.error
        return result


def second(*result):
    return lambda: Scripted(OK, result)


def first(result):
    env = Scripted(OK)
    env.reset = lambda *, seed=None, options=None: result
    return lambda: env


class WithoutSeed(Scripted):
    def reset(self):
        return "a", {}


FAULTS = {
    "no environment": (lambda: object(), "guess' is a object, which has no 'reset'"),
    "constructor": (lambda: 1 / 0, "guess' could not be built: ZeroDivisionError"),
    "reset raises": (lambda: Failing("reset", KeyError("x")), "'guess' with sample '0'.*reset failed: KeyError: 'x'"),
    "reset exits": (lambda: Failing("reset", SystemExit(0)), "'0'.*reset failed: SystemExit"),
    "reset without arguments": (WithoutSeed, "'0'.*reset failed: TypeError"),
    "reset returns a text": (first("guess"), "'0'.*reset returned 'guess'; expected .text or messages, info."),
    "reset returns a number": (first((3, {})), "'0'.*reset returned 3; expected a text, or messages"),
    "reset returns no info": (first(("a", None)), "'0'.*reset returned the info None; expected a mapping"),
    "reset returns nothing to read": (first(("", {})), "'0'.*: its first text is empty"),
    "reset returns too much": (first(("Count " * 20, {})), "'0'.*its first text has .* tokens, more than max_prompt_l"),
    "reset returns messages": (first(([{"role": "user", "content": "x"}], {})), "'0'.*need tokenizer.chat_template"),
    "reset returns tools": (first(("a", {"tools": [{"name": "f"}]})), "'0'.*need tokenizer.chat_template"),
    "reset returns no tools": (first(("a", {"tools": {"f": 1}})), "'0'.*reset returned the tools {'f': 1}; expected"),
    "step raises": (lambda: Failing(2, ValueError("y")), "'0'.*'Count with me'.*step in turn 2 failed: ValueError: y"),
    "step returns four": (second("a", 0.0, True, {}), "'0'.*step in turn 2 returned .*; expected .text or messages, r"),
    "step returns None": (lambda: Scripted(OK, None), "'0'.*step in turn 2 returned None; expected"),
    "reward NaN": (second("a", float("nan"), False, False, {}), "'0'.*turn 2 returned the reward nan; expected one fi"),
    "reward text": (second("a", "0.5", False, False, {}), "'0'.*turn 2 returned the reward '0.5'"),
    "reward None": (second("a", None, False, False, {}), "'0'.*turn 2 returned the reward None"),
    "reward vector": (second("a", np.ones(2), False, False, {}), "'0'.*turn 2 returned the reward"),
    "answer bytes": (second(b"a", 0.0, False, False, {}), "'0'.*turn 2 returned b'a'; expected a text, or messages"),
    "answer None": (second(None, 0.0, False, False, {}), "'0'.*turn 2 returned None; expected a text"),
    "half a character": (second("a\ud800", 0.0, False, False, {}), "'0'.*turn 2 returned .*is no valid Unicode text"),
    "terminated text": (second("a", 0.0, "no", False, {}), "'0'.*turn 2 returned terminated='no'; expected True or F"),
    "truncated None": (second("a", 0.0, False, None, {}), "'0'.*turn 2 returned truncated=None"),
    "info None": (second("a", 0.0, False, False, None), "'0'.*turn 2 returned the info None"),
    "metric": (second("a", 0.0, False, False, {"metrics": {"m": "?"}}), "'0'.*info.'metrics'..'m'. '.'; expected one"),
    "metrics list": (second("a", 0.0, False, False, {"metrics": [1]}), "'0'.*turn 2 returned info.'metrics'. .1.; ex"),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("threads", [0, 2])
def test_a_faulty_environment_is_named_with_sample_and_turn(tiny_tokenizer, name, threads):
    make, message = FAULTS[name]
    with pytest.raises(DialogueError, match=message):
        played(tiny_tokenizer, make, n=1, threads=threads)


def test_each_episode_needs_an_object_of_its_own(tiny_tokenizer):
    env = Scripted(OK)
    with pytest.raises(DialogueError, match="'guess': each episode needs an object of its own"):
        played(tiny_tokenizer, lambda: env)


def test_messages_are_checked(tiny_tokenizer):
    tokenizer = chat_tokenizer()
    for messages in ([], [{"content": "a"}], [{"role": "user"}], ["a"], [{"role": "user", "content": 3}]):
        with pytest.raises(DialogueError, match=r"'0'.*turn 1 returned .*; expected a text, or messages"):
            make = lambda m=messages: Scripted((m, 0.0, False, False, {}))  # noqa: E731
            played(tokenizer, make, template=ChatTemplate(tokenizer), max_prompt_length=40)


def test_the_assistants_next_message_is_the_policys(tiny_tokenizer):
    tokenizer = chat_tokenizer()
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    makes = {"reset": first((messages, {})), "step in turn 1": lambda: Scripted((messages, 0.0, False, False, {}))}
    for where, make in makes.items():
        with pytest.raises(DialogueError, match=f"'0'.*{where} returned messages.*must not be the assistant's"):
            played(tokenizer, make, n=1, template=ChatTemplate(tokenizer), max_prompt_length=40)


def test_turns_keep_the_messages_that_were_returned(tiny_tokenizer):
    """An environment may return the same list each time, and a message that only calls tools has no content."""
    call = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}

    class Growing(Scripted):
        def reset(self, *, seed=None, options=None):
            self.said = [call, {"role": "user", "content": "first"}]
            return self.said, {}

        def step(self, action):
            self.said.append({"role": "user", "content": "more"})
            return self.said, 0.0, False, False, {}

    tokenizer = chat_tokenizer()
    template = ChatTemplate(tokenizer, tools_in_system=True)
    (dialogue,) = played(
        tokenizer, Growing, n=1, template=template, max_prompt_length=200, max_episode_length=500
    ).running
    assert [len(turn.answer) for turn in dialogue.turns] == [3, 4] and len(dialogue.sample.messages) == 2


def test_a_failing_close_is_named_and_the_others_are_closed(tiny_tokenizer):
    closed = []

    class Closing(Scripted):
        def close(self):
            closed.append(self)
            raise OSError("gone")

    dialogues = played(tiny_tokenizer, lambda: Closing(OK))
    with pytest.raises(DialogueError, match="'guess' could not be closed: OSError: gone"):
        dialogues.close()
    assert len(closed) == 2


def test_tools_of_the_sample_stay_unless_the_environment_returns_its_own():
    tokenizer = chat_tokenizer()
    tools = [{"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {}}}]

    class Info(Scripted):
        def __init__(self, info):
            super().__init__(OK)
            self.info = info

        def reset(self, *, seed=None, options=None):
            return options["sample"].messages, self.info

    for info, expected in (({}, True), ({"tools": []}, False)):
        settings = DialogueSettings(
            "guess",
            lambda info=info: Info(info),
            max_turns=1,
            max_turn_length=4,
            max_episode_length=40,
            template=ChatTemplate(tokenizer, tools_in_system=True),
        )
        dialogues = Dialogues(settings, TextLayout(tokenizer, 400, 40))
        sample = Sample.of_messages("0", [{"role": "user", "content": "a"}], tools=tools)
        (dialogue,) = dialogues.start([sample], [0])
        assert ('"name": "look"' in dialogue.sample.rendered_prompt) == expected


@pytest.mark.parametrize("where", ["step", "reset"])
def test_a_blocking_environment_ends_by_the_time_limit(tiny_tokenizer, where):
    release = threading.Event()

    class Blocking(Scripted):
        pass

    setattr(Blocking, where, lambda self, *args, **kwargs: release.wait(20))
    start = time.monotonic()
    turn = r" in turn 1" if where == "step" else ""
    try:
        with pytest.raises(DialogueError, match=rf"'0'.*: {where}{turn} was not done within 0.2 s .env.dialogue.timeo"):
            played(tiny_tokenizer, lambda: Blocking(OK), timeout=0.2)
    finally:
        release.set()
    assert time.monotonic() - start < 10


def test_waiting_environments_wait_together(tiny_tokenizer):
    class Waiting(Scripted):
        def step(self, action):
            time.sleep(0.15)
            return super().step(action)

    start = time.monotonic()
    dialogues = played(tiny_tokenizer, lambda: Waiting(OK), n=8, threads=8)
    assert time.monotonic() - start < 8 * 2 * 0.15 / 2
    assert [len(dialogue.turns) for dialogue in dialogues.running] == [2] * 8


def test_an_interruption_is_not_a_fault(tiny_tokenizer):
    with pytest.raises(KeyboardInterrupt):
        played(tiny_tokenizer, lambda: Failing(1, KeyboardInterrupt()))


def test_the_last_number_of_an_episode_counts(tiny_tokenizer):
    steps = [("a", 1.0, False, False, {"metrics": {"calls": 1, "failed": True}})] * 2
    dialogues = played(tiny_tokenizer, lambda: Scripted(steps[0], ("a", 1.0, True, False, {"metrics": {"calls": 3}})))
    assert dialogues.running[0].numbers == {"calls": 3.0, "failed": 1.0, "reward": 2.0, "turns": 2.0, "terminated": 1.0}


def test_seeds_of_splits_are_disjoint():
    seeds = {split: {episode_seed(7, split, i) for i in range(20_000)} for split in ("train", "val", "test")}
    assert not seeds["train"] & seeds["val"] and not seeds["val"] & seeds["test"]
    assert all(0 <= seed < 2**31 for of_split in seeds.values() for seed in of_split)
    assert len(seeds["train"]) > 19_990
    assert episode_seed(7, "train", 3) != episode_seed(8, "train", 3)
