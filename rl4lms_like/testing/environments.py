"""Checker for text environments, similar to Gymnasium's `check_env`.

check_text_environment(MyEnv)                             numbered episodes, as without a data pool
check_text_environment(MyEnv, samples, high=7)            episodes with samples; `high` is an argument of MyEnv

Each episode is played several times: by the same object, by another one, and by two objects in turn. All must be equal,
because a group of episodes has one seed, and because a run that is resumed plays its last episodes again.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rl4lms_like.core.sample import Sample
from rl4lms_like.envs import ENVIRONMENTS, returned
from rl4lms_like.small_models.scripted_turns import has_player
from rl4lms_like.system.deadline import deadline
from rl4lms_like.system.wording import excerpt, raised

TURNS = ("yes", "7", "Which one?", "a", " The answer is 42.\n", "Привет, 世界! 😀", "", " \n", "x" * 2000, "{", "<b>")
"""Turns of an environment without a scripted player, in random order: numbers, questions, no text, long texts."""

_N_EPISODES = 6
"""Number of numbered episodes."""

_SEED = 20260101


@dataclass
class _Episode:
    """Parts of an episode, to be compared with another one of the same seed and sample."""

    first: Any
    turns: list[str] = field(default_factory=list)
    answers: list[returned.Answered] = field(default_factory=list)
    has_ended: bool = False


def check_text_environment(
    environment: Any,
    samples: Sequence[Sample] | None = None,
    *,
    max_turns: int = 30,
    timeout: float = 10.0,
    **args: Any,
) -> None:
    """Check an environment that answers; see `rl4lms_like.envs` for what it returns.

    The turns are those of its scripted player (the method `player`), and texts of many kinds.

    Args:
        environment: its class, a function that returns one, or its id.
        samples: samples that `reset` gets; the episodes must depend on them. Default: numbered ones without content.
        max_turns: number of turns after which an episode is given up; at least one episode must end before.
        timeout: seconds that a call of `reset` or `step` may take.
        args: arguments of the environment.

    Raises:
        AssertionError: a check failed. The message names the environment, the sample and the turn.
    """
    checker = _Checker(environment, args, max_turns, timeout)
    chosen = list(samples or [Sample(str(index), "") for index in range(_N_EPISODES)])

    env = checker.made()
    other = checker.made()
    assert env is not other, f"{checker.name}: each episode needs an object of its own, got the same one"
    players = ["texts", "player"] if has_player(env) else ["texts"]

    # Each episode three times: twice in one object, whose state must not outlast an episode, and once in another one.
    episodes: list[_Episode] = []
    for index, sample in enumerate(chosen):
        for player in players:
            seed = _SEED + index
            episode = checker.played(env, sample, seed, player)
            episodes.append(episode)
            again = "an episode with the same seed and sample"
            checker.compare(episode, checker.played(env, sample, seed, player), sample, f"the next time, {again}")
            checker.compare(episode, checker.played(other, sample, seed, player), sample, f"of another object, {again}")
    checker.compare_interleaved(env, other, chosen, players[-1])

    # Over all episodes: some pairs of seed and turns may not end.
    assert any(episode.has_ended for episode in episodes), (
        f"{checker.name}: no episode ends within {max_turns} turns; return terminated=True at its end"
    )
    if samples is not None and len({_prompt_of(sample) for sample in chosen}) > 1:
        checker.require_dependence_on_samples(env, chosen, players[-1])
    for made in (env, other):
        checker.call("close", None, 0, made.close)


def _unwrapped(env: Any) -> Any:
    return getattr(env, "unwrapped", env)


def _prompt_of(sample: Sample) -> tuple[str, tuple[str, ...]]:
    return sample.prompt_or_input_text, tuple(sample.references)


@dataclass
class _Checker:
    """Plays episodes and checks each call.

    Args:
        environment: see `check_text_environment`.
        args: arguments of the environment.
        max_turns: maximum number of turns of an episode.
        timeout: seconds of a call.
    """

    environment: Any
    args: Mapping[str, Any]
    max_turns: int
    timeout: float

    @property
    def name(self) -> str:
        """Name of the environment, for messages."""
        if isinstance(self.environment, str):
            return repr(self.environment)
        return str(getattr(self.environment, "__name__", type(self.environment).__name__))

    def made(self) -> Any:
        """Return a new environment."""
        if isinstance(self.environment, str):
            env = self.call("the constructor", None, 0, lambda: ENVIRONMENTS.get(str(self.environment), self.args))
        else:
            env = self.call("the constructor", None, 0, lambda: self.environment(**self.args))
        for method in ("reset", "step", "close"):
            assert callable(getattr(env, method, None)), (
                f"{self.name} has no method {method!r}; derive it from gymnasium.Env"
            )
        return env

    def call(self, what: str, sample: Sample | None, turn: int, function: Callable[[], Any]) -> Any:
        """Return the result of a call of the environment; check its time and that it leaves global state alone."""
        where = self.where(sample, turn)
        with _global_random_numbers_unchanged(f"{where}: {what}"):
            try:
                with deadline(self.timeout, what):
                    return function()
            except KeyboardInterrupt:
                raise
            except TimeoutError as error:
                raise AssertionError(f"{where}: {error}") from error
            except BaseException as error:
                raise AssertionError(f"{where}: {what} failed: {raised(error)}") from error

    def where(self, sample: Sample | None, turn: int) -> str:
        """Return environment, sample and turn, for messages; turn 0 is before the first one."""
        of_sample = f" with sample {sample.id!r}" if sample is not None else ""
        return f"{self.name}{of_sample}" + (f" in turn {turn}" if turn else "")

    def reset(self, env: Any, sample: Sample, seed: int) -> Any:
        """Return the first text, of a checked result of `reset`."""
        # Only by its copy can a change of the sample be seen: a sample is frozen, but its lists are not.
        before = copy.deepcopy(sample)
        result = self.call("reset", sample, 0, lambda: env.reset(seed=seed, options={"sample": sample}))
        where = self.where(sample, 0)
        assert sample == before, f"{where}: reset changes the sample, which other episodes use"
        try:
            first, _, _ = returned.opened(result)
        except returned.ReturnedError as error:
            raise AssertionError(f"{where}: reset {error}") from error
        assert first, f"{where}: reset returned an empty text; the model would have nothing to continue"
        return first

    def step(self, env: Any, sample: Sample, turn: int, text: str) -> returned.Answered:
        """Return the checked result of `step`."""
        result = self.call(f"step({excerpt(text)})", sample, turn, lambda: env.step(text))
        where = f"{self.where(sample, turn)}: step({excerpt(text)})"
        try:
            return returned.answered(result)
        except returned.ReturnedError as error:
            raise AssertionError(f"{where} {error}") from error

    def played(self, env: Any, sample: Sample, seed: int, player: str) -> _Episode:
        """Return an episode, whose turns are those of a player."""
        *_, episode = self.turns_of(env, sample, seed, player)
        return episode

    def turns_of(self, env: Any, sample: Sample, seed: int, player: str) -> Iterator[_Episode]:
        """Yield the episode after `reset` and after each turn, so that episodes can be played in turn."""
        first = self.reset(env, sample, seed)
        shown = [first]  # the objects themselves, to find those that are used again
        episode = _Episode(copy.deepcopy(first))
        yield episode

        texts = random.Random(seed)
        for turn in range(1, self.max_turns + 1):
            # The turn: by the scripted player, which runs the user's code, or one of the texts.
            if player == "player":
                text = self.call("player", sample, turn, _unwrapped(env).player)
                assert isinstance(text, str), (
                    f"{self.where(sample, turn)}: player returned {excerpt(text)}; expected a text"
                )
            else:
                text = texts.choice(TURNS)

            # A copy of what was returned, besides the object itself.
            answered = self.step(env, sample, turn, text)
            shown.append(answered.answer)
            episode.turns.append(text)
            episode.answers.append(copy.deepcopy(answered))
            episode.has_ended = answered.terminated or answered.truncated
            if episode.has_ended:
                break
            yield episode

        copies = [episode.first, *(answered.answer for answered in episode.answers)]
        assert shown == copies, (
            f"{self.where(sample, 0)}: an answer was changed by a later step; return a new object each time"
        )
        yield episode

    def compare(self, episode: _Episode, other: _Episode, sample: Sample, what: str) -> None:
        """Check that two episodes are equal."""
        hint = "draw from self.np_random, after super().reset(seed=seed), and set all state in reset"

        # The first difference, in the order in which the texts were written: later ones follow from it.
        where = self.where(sample, 0)
        assert other.first == episode.first, (
            f"{where}: {what} begins with another text, {excerpt(other.first)} for {excerpt(episode.first)}; {hint}"
        )
        pairs = zip(episode.turns, episode.answers, other.turns, other.answers, strict=False)
        for turn, (text, answer, other_text, other_answer) in enumerate(pairs, start=1):
            where = self.where(sample, turn)
            assert other_text == text, f"{where}: {what} has another turn of the player, {excerpt(other_text)}; {hint}"
            assert other_answer == answer, (
                f"{where}: {what} has another answer to {excerpt(text)}: {excerpt(tuple(other_answer))} for "
                f"{excerpt(tuple(answer))}; {hint}"
            )
        assert len(episode.answers) == len(other.answers), f"{where}: {what} has another length; {hint}"

    def compare_interleaved(self, env: Any, other: Any, samples: Sequence[Sample], player: str) -> None:
        """Check that two objects can play in turn, as the environments of a batch do."""
        first, second = samples[0], samples[-1]
        alone = self.played(env, first, _SEED, player)

        # After each turn of the one, a turn of the other, as long as it lasts.
        of_env = self.turns_of(env, first, _SEED, player)
        of_other = self.turns_of(other, second, _SEED + 1, player)
        together = next(of_env)
        while (later := next(of_env, None)) is not None:
            together = later
            next(of_other, None)
        self.compare(alone, together, first, "while another object plays, an episode with the same seed and sample")

    def require_dependence_on_samples(self, env: Any, samples: Sequence[Sample], player: str) -> None:
        """Check that episodes with one seed and different samples differ."""
        episodes = [self.played(env, sample, _SEED, player) for sample in samples]
        assert any(episode != episodes[0] for episode in episodes), (
            f"{self.name}: episodes with one seed are equal for all {len(samples)} samples; read options['sample'] in "
            f"reset, or do not pass samples"
        )


@contextmanager
def _global_random_numbers_unchanged(what: str) -> Iterator[None]:
    """Check that a call changes no global random state, which belongs to the run."""
    before = _global_state()
    yield
    after = _global_state()
    for name, state in before.items():
        assert state == after[name], (
            f"{what} uses the global random numbers of {name}; use self.np_random, after super().reset(seed=seed)"
        )


def _global_state() -> dict[str, Any]:
    # Also those of torch: a model within an environment may draw from them.
    import torch

    name, keys, position, *rest = np.random.get_state()
    return {
        "Python": random.getstate(),
        "NumPy": (name, np.asarray(keys).tobytes(), position, *rest),
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
