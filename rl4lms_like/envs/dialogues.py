"""Episodes of several turns with users' environments.

    reset(seed=..., options={"sample": sample}) -> text or messages, info
    step(text)                                  -> text or messages, reward, terminated, truncated, info

An environment is any object with these methods of a `gymnasium.Env`. Each plays one episode at a time. What they return
is checked, and every exception that they raise is attributed: to the environment, the sample and the turn.

    Dialogues.start     one environment for each sample, and its first text as the prompt
    Dialogues.step      passes turns of the policy to their environments, one after the other or in threads
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from rl4lms_like.core.chat_template import ChatTemplate
from rl4lms_like.core.observation import NO_LIMIT, TextLayout
from rl4lms_like.core.sample import Sample
from rl4lms_like.core.seeding import derived_seed
from rl4lms_like.core.turns import Answer, TurnTexts
from rl4lms_like.data_pools.splits import SPLITS
from rl4lms_like.envs import returned
from rl4lms_like.envs.blocking_calls import StillRunning, outcomes
from rl4lms_like.system.errors import ConfigError, DialogueError
from rl4lms_like.system.wording import beginning, excerpt, raised


def episode_seed(seed: int, split: str, *counters: int) -> int:
    """Return the seed of an environment's `reset`, a 31-bit number; those of different splits are never equal.

    Args:
        seed: of the run.
        split: `train`, `val` or `test`.
        counters: numbers that identify the episode within the split.
    """
    # The last two bits are the split's.
    return derived_seed(seed, f"environment of {split}", *counters) % 2**29 * 4 + SPLITS.index(split)


@dataclass(frozen=True)
class Turn:
    """Turn of an episode.

    Args:
        text: what the policy wrote, without special tokens.
        n_actions: number of its tokens.
        reward: what the environment returned for it.
        answer: what the environment returned to read. After the last turn the policy does not read it.
    """

    text: str
    n_actions: int
    reward: float
    answer: Answer

    def to_dict(self) -> dict[str, Any]:
        """Return text, answer and reward, as rewards, metrics and predictions get them."""
        answer = self.answer if isinstance(self.answer, str) else list(self.answer)
        return {"text": self.text, "answer": answer, "reward": self.reward}


@dataclass
class Dialogue:
    """Episode with an environment.

    Args:
        env: the environment.
        sample: has the environment's first text as its prompt.
        prompt_ids: ids of the prompt `[prompt_length]`.
        turns: the turns so far.
        terminated: the environment has ended the episode.
        is_over: the episode has ended, by the environment or by a limit.
        metrics: last value of each number that the environment reported in this episode.
    """

    env: Any
    sample: Sample
    prompt_ids: np.ndarray
    turns: list[Turn] = field(default_factory=list)
    terminated: bool = False
    is_over: bool = False
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def reward(self) -> float:
        """Sum of the environment's rewards."""
        return sum(turn.reward for turn in self.turns)

    def without_env(self) -> Dialogue:
        """Return the episode without its environment, which the next episode uses, and which may not be picklable."""
        return replace(self, env=None)

    def finished_sample(self) -> Sample:
        """Return the sample with all turns in its `meta_data`, for rewards, metrics and predictions."""
        turns = [turn.to_dict() for turn in self.turns]
        return replace(self.sample, meta_data={**(self.sample.meta_data or {}), "turns": turns})

    @property
    def numbers(self) -> dict[str, float]:
        """Numbers of the episode that are averaged and logged, by name."""
        turns = float(len(self.turns))
        return self.metrics | {"reward": self.reward, "turns": turns, "terminated": float(self.terminated)}


@dataclass(frozen=True)
class DialogueSettings:
    """Environment and limits of dialogues.

    Args:
        name: of the environment, in errors.
        make_env: returns a new environment.
        max_turns: an episode is truncated after this many turns.
        max_turn_length: maximum number of tokens of a turn.
        max_episode_length: maximum number of tokens of an episode after its prompt, of turns and answers together.
        template: renders messages; None = texts are joined as they are.
        threads: number of environments whose `step` runs at the same time; 0: one after the other, in this thread.
        timeout: time limit of a `step` or `reset` in seconds; None for no limit.
    """

    name: str
    make_env: Callable[[], Any]
    max_turns: int
    max_turn_length: int
    max_episode_length: int
    template: ChatTemplate | None = None
    threads: int = 0
    timeout: float | None = None


class Dialogues:
    """Batch of episodes. The environments are built when they are first needed, and used again by the next `start`.

    Args:
        settings: environment and limits of turns.
        layout: tokenizer, and maximum length of prompts.

    Attributes:
        running: the episodes of the last `start`, in the order of its samples; kept when they are over.
    """

    def __init__(self, settings: DialogueSettings, layout: TextLayout) -> None:
        self.settings = settings
        self.layout = layout
        self.texts = TurnTexts(layout, settings.template)
        self.running: list[Dialogue] = []
        self._envs: list[Any] = []

    def start(self, samples: Sequence[Sample], seeds: Sequence[int]) -> list[Dialogue]:
        """Start an episode for each sample.

        Args:
            samples: passed to the environments, as `options["sample"]`.
            seeds: of the environments.

        Raises:
            DialogueError: an environment failed, or its first text is longer than `max_prompt_length`.
        """
        self.build(len(samples))
        envs = self._envs[: len(samples)]

        calls = []
        for env, sample, seed in zip(envs, samples, seeds, strict=True):
            calls.append(partial(env.reset, seed=seed, options={"sample": sample}))
        results = self._results("reset", calls, samples, turns=[0] * len(samples))

        self.running = []
        for env, sample, result in zip(envs, samples, results, strict=True):
            self.running.append(self._opened(env, sample, result))
        return self.running

    def build(self, n: int) -> None:
        """Build the environments of `n` episodes, unless there are as many already.

        Raises:
            ConfigError: the environment does not accept its arguments.
            DialogueError: it could not be built.
        """
        while len(self._envs) < n:
            self._envs.append(self._new_env())

    def _new_env(self) -> Any:
        """Build an environment."""
        name = self.settings.name
        try:
            env = self.settings.make_env()
        except ConfigError as error:
            issues = [issue.below("args" if issue.path else "").below("env.dialogue") for issue in error.issues]
            raise ConfigError(issues) from error
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise DialogueError(f"the environment {name!r} could not be built: {raised(error)}") from error

        missing = [method for method in ("reset", "step") if not callable(getattr(env, method, None))]
        if missing:
            raise DialogueError(f"the environment {name!r} is a {type(env).__name__}, which has no {missing[0]!r}")
        if any(env is other for other in self._envs):
            raise DialogueError(f"the environment {name!r}: each episode needs an object of its own, got the same one")
        return env

    def _opened(self, env: Any, sample: Sample, result: Any) -> Dialogue:
        """Return the episode that an environment has started."""
        try:
            first, tools, metrics = returned.opened(result)
        except returned.ReturnedError as error:
            raise self._error(sample, f"reset {error}") from error
        self._require_template(sample, "reset", first)
        if tools and self.settings.template is None:
            raise self._error(sample, "reset returned tools, which need tokenizer.chat_template")

        # Tools of the sample stay, for an environment that returns the messages of the sample.
        opened = self.texts.opened(sample, copy.deepcopy(first), sample.tools if tools is None else tools)

        # A prompt that is cut would leave out what the environment has asked for.
        (prompt_ids,) = self.layout.encode_all([opened], max_length=NO_LIMIT)
        if len(prompt_ids) > self.layout.max_prompt_length:
            raise self._error(
                sample,
                f"its first text has {len(prompt_ids)} tokens, more than max_prompt_length, "
                f"{self.layout.max_prompt_length}: {beginning(opened.prompt_or_input_text)}",
            )
        if not len(prompt_ids):
            raise self._error(sample, "its first text is empty, which this model cannot continue; return a text")
        return Dialogue(env, opened, prompt_ids, metrics=metrics)

    def step(self, rows: Sequence[int], turn_ids: Sequence[Sequence[int]]) -> list[list[int]]:
        """Pass a turn of the policy to each of some environments.

        Args:
            rows: positions of their episodes in `running`.
            turn_ids: the ids of the turns.

        Returns:
            The ids of their answers, up to the beginning of the next turn; empty where the episode is over.

        Raises:
            DialogueError: an environment failed.
            ConfigError: the chat template does not accept an answer.
        """
        continuations = self.layout.continuations
        dialogues = [self.running[row] for row in rows]
        texts = continuations.texts([dialogue.prompt_ids for dialogue in dialogues], turn_ids)

        calls = []
        for dialogue, text in zip(dialogues, texts, strict=True):
            calls.append(partial(dialogue.env.step, text))
        turns = [len(dialogue.turns) + 1 for dialogue in dialogues]
        results = self._results("step", calls, [dialogue.sample for dialogue in dialogues], turns=turns)

        answers = []
        for dialogue, text, ids, result in zip(dialogues, texts, turn_ids, results, strict=True):
            answers.append(self._answered(dialogue, text, ids, result))
        return answers

    def _answered(self, dialogue: Dialogue, text: str, ids: Sequence[int], result: Any) -> list[int]:
        """Add a turn to its episode; return the ids of the answer, empty if the episode is over."""
        number = len(dialogue.turns) + 1
        sample = dialogue.sample
        where = f"step in turn {number}"
        try:
            answer, reward, terminated, truncated, metrics = returned.answered(result)
        except returned.ReturnedError as error:
            raise self._error(sample, f"{where} {error}") from error
        self._require_template(sample, where, answer)

        # A copy: an environment may return a list of messages that it goes on to extend.
        dialogue.metrics |= metrics
        dialogue.turns.append(Turn(text, len(ids), reward, copy.deepcopy(answer)))
        dialogue.terminated = terminated
        dialogue.is_over = terminated or truncated or number >= self.settings.max_turns
        if dialogue.is_over:
            return []
        return self.texts.answer_ids(
            answer,
            turn_text=text,
            last_token=int(ids[-1]),
            tools=sample.tools,
            where=f"the environment {self.settings.name!r} in turn {number} of sample {sample.id!r}",
        )

    def _results(
        self, method: str, calls: Sequence[Callable[[], Any]], samples: Sequence[Sample], *, turns: Sequence[int]
    ) -> list[Any]:
        """Return the results of calls of the environments; turns are counted from 1."""
        threads, timeout = self.settings.threads, self.settings.timeout
        results = []
        # After a failure there are no further outcomes.
        for sample, turn, outcome in zip(samples, turns, outcomes(calls, threads, timeout), strict=False):
            where = f"{method} in turn {turn}" if turn else method
            if isinstance(outcome.error, StillRunning):
                message = f"{where} was not done within {timeout:g} s (env.dialogue.timeout)"
                raise self._error(sample, message) from outcome.error
            if outcome.error is not None:
                raise self._error(sample, f"{where} failed: {raised(outcome.error)}") from outcome.error
            results.append(outcome.result)
        return results

    def _require_template(self, sample: Sample, where: str, text: Answer) -> None:
        """Raise a `DialogueError` if an environment returned messages, and no template renders them."""
        if self.settings.template is None and not isinstance(text, str):
            raise self._error(sample, f"{where} returned messages, {excerpt(text)}; they need tokenizer.chat_template")

    def _error(self, sample: Sample, message: str) -> DialogueError:
        prompt = f" (prompt {beginning(sample.prompt_or_input_text)})" if sample.prompt_or_input_text else ""
        return DialogueError(f"the environment {self.settings.name!r} with sample {sample.id!r}{prompt}: {message}")

    def close(self) -> None:
        """Close the environments that can be closed.

        Raises:
            DialogueError: one could not be closed; the others are.
        """
        envs, self._envs = self._envs, []
        errors = []
        for env in envs:
            if callable(getattr(env, "close", None)):
                errors += [outcome.error for outcome in outcomes([env.close]) if outcome.error is not None]
        if errors:
            message = f"the environment {self.settings.name!r} could not be closed: {raised(errors[0])}"
            raise DialogueError(message) from errors[0]
