"""Describe a run's environment before the run: a few episodes are played without a model.

The turns are those of its scripted player, or random texts. They are tokens of the run's tokenizer, and the limits are
those of the run, so lengths are what rollouts will have. Nothing is trained.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby
from statistics import fmean

from transformers import PreTrainedTokenizerBase

from rl4lms_like.config.run_config import RunConfig
from rl4lms_like.core.chat_template import ChatTemplate
from rl4lms_like.core.episodes import EpisodeBatch
from rl4lms_like.core.observation import TextLayout
from rl4lms_like.core.sample import Sample
from rl4lms_like.core.turns import Answer
from rl4lms_like.envs.dialogues import Dialogue, Dialogues, DialogueSettings, episode_seed
from rl4lms_like.rollouts.play_dialogues import play_dialogues
from rl4lms_like.rollouts.written_turns import WrittenTurns
from rl4lms_like.small_models.scripted_turns import has_player, next_turn
from rl4lms_like.system.errors import ConfigError
from rl4lms_like.testing.environments import TURNS
from rl4lms_like.training.inputs import dialogue_settings

N_EPISODES = 8
"""Number of episodes that are played."""

LONGEST = 300
"""Largest number of characters that are shown of an episode."""

_REASONING = "reasoning of an earlier turn"


def environment_lines(
    config: RunConfig, samples: Sequence[Sample], tokenizer: PreTrainedTokenizerBase, max_prompt_length: int
) -> tuple[list[tuple[str, str]], list[str]]:
    """Play a few episodes of `env.dialogue` and return their description, and notices.

    Args:
        config: of the run, with dialogues.
        samples: of the split `train`.
        tokenizer: of the run.
        max_prompt_length: maximum number of tokens of the first text.

    Raises:
        DialogueError: the environment failed, or its first text is too long.
    """
    settings = dialogue_settings(config, tokenizer)
    assert settings is not None
    end_token_id = tokenizer.eos_token_id
    if settings.template is not None and settings.template.end_of_turn is not None:
        end_token_id = settings.template.end_of_turn
    limits = (
        f"up to {settings.max_turns} turns of up to {settings.max_turn_length} tokens, "
        f"episodes of up to {settings.max_episode_length} tokens"
    )
    notices = [*_reasoning_notices(settings), *_credit_notices(config, settings)]
    if end_token_id is None:
        return [(settings.name, limits), ("played", "nothing: the tokenizer has no token that ends a text")], notices

    dialogues = Dialogues(settings, TextLayout(tokenizer, max_prompt_length, settings.max_episode_length))
    try:
        first = [samples[number % len(samples)] for number in range(N_EPISODES)]
        seeds = [episode_seed(config.seed, "train", 0, number) for number in range(N_EPISODES)]
        started = dialogues.start(first, seeds)
        env = getattr(started[0].env, "unwrapped", started[0].env)
        is_scripted = has_player(env)
        texts = random.Random(config.seed)
        write = _scripted if is_scripted else lambda dialogue: texts.choice(TURNS)
        played = play_dialogues(WrittenTurns(dialogues, write, int(end_token_id)), dialogues)
    finally:
        dialogues.close()

    player = "the scripted player" if is_scripted else "random texts"
    rows = [
        (settings.name, f"{type(env).__module__}:{type(env).__qualname__}; {limits}"),
        ("played", f"{N_EPISODES} episodes of 'train' with {player}: {_numbers(started, played)}"),
        ("first episode", _in_one_line(started[0])),
        ("answers", _room(settings, longest_answer(started, played))),
        ("end of turn", _end_of_turn(settings, tokenizer, int(end_token_id))),
    ]
    n_turns = sum(len(dialogue.turns) for dialogue in started)
    n_cut = _n_cut(started, played, int(end_token_id))
    if is_scripted and n_cut:
        notices.append(
            f"{n_cut} of {n_turns} turns of the scripted player are longer than env.dialogue.max_turn_length, "
            f"{settings.max_turn_length}, or than what an episode has left"
        )
    return rows, notices


def _scripted(dialogue: Dialogue) -> str:
    return next_turn(dialogue.env)


def _numbers(dialogues: Sequence[Dialogue], played: EpisodeBatch) -> str:
    """Return means and ranges of the episodes in words."""
    turns = fmean(len(dialogue.turns) for dialogue in dialogues)
    tokens = fmean(played.response_lengths.tolist())
    rewards = [dialogue.reward for dialogue in dialogues]
    n_terminated = sum(dialogue.terminated for dialogue in dialogues)
    return (
        f"{turns:.3g} turns, {tokens:.3g} tokens, rewards {min(rewards):.3g} to {max(rewards):.3g}, "
        f"{n_terminated} of {len(dialogues)} terminated"
    )


def _in_one_line(dialogue: Dialogue) -> str:
    """Return the texts of an episode with who wrote them."""
    sample = dialogue.sample
    parts = [_said(sample.messages or sample.prompt_or_input_text)]
    for turn in dialogue.turns:
        parts += [f"policy: {turn.text}", _said(turn.answer)]
    line = " | ".join(parts).replace("\n", "⏎")
    return line if len(line) <= LONGEST else f"{line[:LONGEST]}…"


def _said(answer: Answer) -> str:
    if isinstance(answer, str):
        return f"env: {answer}"
    return " | ".join(f"{message['role']}: {message.get('content') or ''}" for message in answer)


def longest_answer(dialogues: Sequence[Dialogue], played: EpisodeBatch) -> int:
    """Return the largest number of tokens of an answer that was appended."""
    longest = 0
    is_observed_token = played.response_mask & ~played.action_mask
    for row in range(played.n_episodes):
        flags = is_observed_token[row][played.response_mask[row]].tolist()
        longest = max([longest, *(len(list(run)) for is_observed, run in groupby(flags) if is_observed)])
    return longest


def _room(settings: DialogueSettings, longest: int) -> str:
    """Return whether all turns of an episode fit into its length, at their full lengths with the longest answers."""
    n, turn, limit = settings.max_turns, settings.max_turn_length, settings.max_episode_length
    needed = n * turn + (n - 1) * longest
    text = f"at most {longest} tokens; {needed:,} tokens for {n} turns of {turn} and {n - 1} answers"
    if needed <= limit:
        return f"{text}: all turns fit into max_episode_length {limit:,}"

    # k T + (k - 1) A <= limit, for k turns of T tokens with answers of A tokens between them.
    n_fitting = (limit + longest) // (turn + longest)
    return f"{text}: of turns with their full length, {n_fitting} fit into max_episode_length {limit:,}"


def _end_of_turn(settings: DialogueSettings, tokenizer: PreTrainedTokenizerBase, end_token_id: int) -> str:
    named = f"{tokenizer.convert_ids_to_tokens(end_token_id)!r} ({end_token_id})"
    if settings.template is None:
        return f"{named}; nothing ends a turn that is cut"
    return f"{named}; in a turn that is cut, it is an observed token"


def _n_cut(dialogues: Sequence[Dialogue], played: EpisodeBatch, end_token_id: int) -> int:
    """Return the number of turns that do not end with the end token."""
    actions = iter(played.actions.tolist())
    n_cut = 0
    for dialogue in dialogues:
        for turn in dialogue.turns:
            ids = [next(actions) for _ in range(turn.n_actions)]
            n_cut += ids[-1] != end_token_id
    return n_cut


def _reasoning_notices(settings: DialogueSettings) -> list[str]:
    """Return a notice if the chat template leaves out the reasoning of earlier turns, which episodes keep."""
    if settings.template is None or not drops_reasoning(settings.template):
        return []
    return [
        f"the chat template leaves out <think> of earlier turns; within an episode it stays in the context "
        f"({settings.max_turns} turns of up to {settings.max_turn_length} tokens)"
    ]


def drops_reasoning(template: ChatTemplate) -> bool:
    """Return whether a template leaves `<think>` out of messages of the assistant that others follow."""
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": f"<think>\n{_REASONING}\n</think>\n\nb"},
        {"role": "user", "content": "c"},
    ]
    with suppress(ConfigError):  # a template that rejects such messages renders no conversation of this kind
        return _REASONING not in template.render(messages, add_generation_prompt=True)
    return False


def _credit_notices(config: RunConfig, settings: DialogueSettings) -> list[str]:
    """Return a notice if all turns of an episode have the same advantage."""
    if settings.max_turns == 1 or getattr(config.alg.arguments, "needs_critic", True):
        return []
    return [
        f"{config.alg.id} gives all turns of an episode the same advantage; "
        f"algorithms with a critic, such as ppo, distinguish them by what follows"
    ]
