"""Play episodes with an environment in the console: `rl4lms-like play`.

A person types the turns, the scripted player of the environment writes them, or a model generates them. All of them
play by `play_dialogues`, so that the results of the environment are checked as in training. The turns of a person have
one token for each byte, and no limit of length.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from transformers import ByT5Tokenizer, PreTrainedTokenizerBase

from rl4lms_like.config.binding import component_fields
from rl4lms_like.config.run_config import AnyConfig, DialogueConfig, RunConfig
from rl4lms_like.core.chat_template import CHATML_TEMPLATE, ChatTemplate
from rl4lms_like.core.observation import TextLayout
from rl4lms_like.core.sample import Sample
from rl4lms_like.core.turns import Answer
from rl4lms_like.envs import ENVIRONMENTS
from rl4lms_like.envs.dialogues import Dialogue, Dialogues, DialogueSettings, episode_seed
from rl4lms_like.inference import policy_arguments, responder_of, trained_model
from rl4lms_like.rollouts.play_dialogues import play_dialogues
from rl4lms_like.rollouts.written_turns import WrittenTurns
from rl4lms_like.run import silence_libraries
from rl4lms_like.small_models.scripted_turns import has_player, next_turn
from rl4lms_like.system.errors import ConfigError, ConfigIssue
from rl4lms_like.training.evaluation import Responder
from rl4lms_like.training.inputs import NO_LIMIT, build_datapool, chat_template_of, render_prompts, token_limit

SPLIT = "test"
"""Split of the samples and of the seeds, which are those of `rl4lms-like evaluate`."""

BATCH_SIZE = 32
"""Largest number of episodes that a model plays together."""


def _read_line() -> str:
    return input("> ")


def play(
    environment: str,
    model: str | Path | None = None,
    *,
    scripted: bool = False,
    args: Mapping[str, Any] | None = None,
    episodes: int = 1,
    seed: int = 0,
    max_turns: int | None = None,
    trust_remote_code: bool = False,
    read: Callable[[], str] = _read_line,
    show: Callable[[str], None] = print,
) -> list[Dialogue]:
    """Play episodes with an environment, and print them with their rewards.

    Args:
        environment: id or import path.
        model: folder of a run or of a model, a hub id or `embedded/<name>`, which plays; None for a person.
        scripted: the scripted player of the environment plays.
        args: arguments of the environment; default: those of the run, if it was trained with this environment.
        episodes: number of episodes. A person may end earlier, by the end of the input or by Ctrl-C.
        seed: of the environment and of the sampling. Equal episodes have equal seeds, whoever plays.
        max_turns: maximum number of turns of an episode; default: that of the run, else that of `env.dialogue`.
        trust_remote_code: allow code that comes with the model to run, if the config in the run's folder requests it.
        read: returns what a person types.
        show: prints a text.

    Returns:
        The episodes that were played to their ends.

    Raises:
        ConfigError: environment or arguments have errors, or there is no scripted player.
        DialogueError: the environment failed.
    """
    silence_libraries()
    if model is None:
        return _played_by_hand(environment, args, scripted, episodes, seed, max_turns, read, show)

    config, name, tokenizer = trained_model(model, trust_remote_code=trust_remote_code)
    settings = _settings(environment, args, max_turns, config, _template(config, tokenizer))
    responder = _responder(config, name, tokenizer, settings, seed)
    played = []
    for number, response in enumerate(responder.generate(_samples(config, tokenizer, episodes), split=SPLIT)):
        assert response.dialogue is not None
        played.append(response.dialogue)
        show(f"# episode {number + 1}\n{transcript(response.dialogue)}")
    show(_score(played))
    return played


def _played_by_hand(
    environment: str,
    args: Mapping[str, Any] | None,
    scripted: bool,
    episodes: int,
    seed: int,
    max_turns: int | None,
    read: Callable[[], str],
    show: Callable[[str], None],
) -> list[Dialogue]:
    """Play episodes with a person or the scripted player; see `play`."""
    # Any text has bytes. With a template, messages are accepted too; they are shown without it.
    tokenizer = ByT5Tokenizer(extra_ids=0, chat_template=CHATML_TEMPLATE)
    settings = _settings(environment, args, max_turns, None, ChatTemplate(tokenizer, tools_in_system=True))
    dialogues = Dialogues(replace(settings, max_turn_length=NO_LIMIT), TextLayout(tokenizer, NO_LIMIT, NO_LIMIT))

    def write(dialogue: Dialogue) -> str:
        show(shown(dialogue.turns[-1].answer) if dialogue.turns else _opening(dialogue))
        if not scripted:
            return read()
        turn = next_turn(dialogue.env)
        show(f"> {turn}")
        return turn

    generate = WrittenTurns(dialogues, write, int(tokenizer.eos_token_id))
    played: list[Dialogue] = []
    # A person who leaves keeps the score so far; the scripted player is interrupted like any command.
    leaves = () if scripted else (EOFError, KeyboardInterrupt)
    try:
        with suppress(*leaves):
            for number, sample in enumerate(_samples(None, tokenizer, episodes)):
                (dialogue,) = dialogues.start([sample], [episode_seed(seed, SPLIT, number)])
                if scripted and not has_player(dialogue.env):
                    message = f"{environment!r} has no scripted player, which is a method `player`"
                    raise ConfigError([ConfigIssue("--scripted", message)], "the command line")
                show(f"# episode {number + 1}")
                play_dialogues(generate, dialogues)
                show(f"{shown(dialogue.turns[-1].answer)}\n{_result(dialogue)}")
                played.append(dialogue.without_env())
    finally:
        dialogues.close()
    show(_score(played))
    return played


def _settings(
    environment: str,
    args: Mapping[str, Any] | None,
    max_turns: int | None,
    config: AnyConfig | None,
    template: ChatTemplate | None,
) -> DialogueSettings:
    """Return environment and limits: those of the run, if it has dialogues, otherwise the defaults of `env.dialogue`.

    Raises:
        ConfigError: the environment does not exist, or does not accept its arguments.
    """
    of_run = _dialogue_of(config)
    if args is None:
        args = of_run.args if of_run is not None and of_run.id == environment else {}
    fields, errors = component_fields(DialogueConfig, {"id": environment, "args": dict(args)})
    issues = []
    for error in errors:
        path = "ENV" if error.path == "id" else error.path.replace("args.", "--args ", 1)
        issues.append(ConfigIssue(path, error.message))
    if issues:
        raise ConfigError(issues, "the command line")

    limits = of_run or DialogueConfig(**fields)
    max_episode_length = NO_LIMIT
    if isinstance(config, RunConfig) and of_run is not None:
        max_episode_length = config.env.arguments.max_episode_length
    return DialogueSettings(
        environment,
        partial(ENVIRONMENTS.get, environment, fields["args"]),
        max_turns=max_turns or limits.max_turns,
        max_turn_length=limits.max_turn_length,
        max_episode_length=max_episode_length,
        template=template,
        timeout=limits.timeout,
    )


def _dialogue_of(config: AnyConfig | None) -> DialogueConfig | None:
    return config.env.dialogue if isinstance(config, RunConfig) else None


def _template(config: AnyConfig | None, tokenizer: PreTrainedTokenizerBase) -> ChatTemplate | None:
    """Return the chat template of a run, or the model's own without one."""
    if config is not None:
        return chat_template_of(config.tokenizer, tokenizer)
    return ChatTemplate(tokenizer) if tokenizer.chat_template else None


def _responder(
    config: AnyConfig | None, name: str, tokenizer: PreTrainedTokenizerBase, settings: DialogueSettings, seed: int
) -> Responder:
    """Return a model that plays with the decoding of its run; without a run, it samples from its distribution."""
    arguments = policy_arguments(config).get("generation_kwargs") or {"do_sample": True, "top_k": 0}
    lengths = ("max_new_tokens", "max_length")  # of single responses
    arguments = {key: value for key, value in arguments.items() if key not in lengths}
    responder = responder_of(
        config,
        name,
        tokenizer,
        max_prompt_length=NO_LIMIT,
        batch_size=BATCH_SIZE,
        generation_kwargs=arguments,
        seed=seed,
    )

    # Without a run with dialogues, first text and episode have half of the positions each.
    limit = token_limit(tokenizer, responder.model.model.config)
    max_episode_length = min(settings.max_episode_length, limit if _dialogue_of(config) else limit // 2)
    settings = replace(settings, max_episode_length=max_episode_length)
    return replace(responder, dialogue=settings, max_prompt_length=max(limit - max_episode_length, 1))


def _samples(config: AnyConfig | None, tokenizer: PreTrainedTokenizerBase, n: int) -> list[Sample]:
    """Return samples of a run with dialogues, again from the first one where it has fewer; else numbered episodes."""
    if config is None or _dialogue_of(config) is None:
        return [Sample(f"{SPLIT}_{number}", "") for number in range(n)]
    pool = render_prompts({SPLIT: build_datapool(config.datapool, SPLIT)}, config.tokenizer, tokenizer)[SPLIT]
    samples = [sample for sample, _ in pool]
    if not samples:
        raise ConfigError([ConfigIssue("datapool", f"the split {SPLIT!r} has no samples to play")], "the run")
    return [samples[number % len(samples)] for number in range(n)]


# --- texts -----------------------------------------------------------------------------------------------------------


def transcript(dialogue: Dialogue) -> str:
    """Return all texts of an episode, with the turns marked by `>`, and its rewards."""
    lines = [_opening(dialogue)]
    for turn in dialogue.turns:
        lines += [f"> {turn.text}", shown(turn.answer)]
    return "\n".join([*lines, _result(dialogue)])


def shown(answer: Answer) -> str:
    """Return a text of an environment for the console; messages have their roles before them."""
    if isinstance(answer, str):
        return answer.rstrip("\n")
    lines = []
    for message in answer:
        calls = f" {json.dumps(message['tool_calls'], default=str)}" if message.get("tool_calls") else ""
        lines.append(f"{message['role']}: {message.get('content') or ''}{calls}")
    return "\n".join(lines)


def _opening(dialogue: Dialogue) -> str:
    """Return the first text of an episode."""
    sample = dialogue.sample
    messages = sample.messages or []
    if [message["role"] for message in messages] in ([], ["user"]):
        return shown(sample.prompt_or_input_text)
    return shown(messages)


def _result(dialogue: Dialogue) -> str:
    """Return reward, number of turns, end and metrics of an episode in one line."""
    end = "terminated" if dialogue.terminated else "truncated"
    turns = "turn" if len(dialogue.turns) == 1 else "turns"
    metrics = "".join(f", {name} {value:g}" for name, value in dialogue.metrics.items())
    return f"reward {dialogue.reward:g}, {len(dialogue.turns)} {turns}, {end}{metrics}\n"


def _score(played: Sequence[Dialogue]) -> str:
    """Return the mean reward of the episodes that were played to their ends."""
    if not played:
        return "no episode was played to its end"
    episodes = "episode" if len(played) == 1 else "episodes"
    return f"score {fmean(dialogue.reward for dialogue in played):g}, the mean reward of {len(played)} {episodes}"
