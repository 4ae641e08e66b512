"""Playing of dialogues: turns of a policy and answers of environments, until all episodes are over.

contexts   [prompt]                        [prompt | turn 1 | answer 1]
turn       generated for all episodes      generated for those that continue  ...
answer     of each environment             ...

Keys and values of contexts are kept from turn to turn where the generating model can do that (`new_contexts`): it reads
only what is new. Otherwise it reads each context as a whole. The tokens are the same.

Rollouts, evaluations, `rl4lms-like evaluate`, `generate` and `pairs` all play by this function, with whatever generates
the responses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from rl4lms_like.core.episodes import EpisodeBatch, padded, real_ids
from rl4lms_like.core.seeding import derived_seed
from rl4lms_like.envs.dialogues import Dialogues
from rl4lms_like.policies.decoding import Contexts

FLAT = ("allowed", "behavior_log_prob", "behavior_entropy", "turn_position")
"""Fields of episodes with one row for each action."""


class TurnGenerator(Protocol):
    """Model that generates turns: a policy with its engine, or a `TextGenerator`."""

    @property
    def generate(self) -> Callable[..., EpisodeBatch]:
        """Return `GenerationEngine.generate`, with an argument `contexts` if `new_contexts` returns some."""

    def new_contexts(self) -> Contexts | None:
        """Return what keeps the keys and values of a batch of contexts; None if each turn reads them again."""


@dataclass
class _Episode:
    """Tokens of an episode so far.

    Args:
        prompt_ids: ids of its prompt.
        response_ids: ids of actions and answers.
        observed: True for the ids of answers.
        flat: field of `FLAT` -> its rows for each turn.
    """

    prompt_ids: list[int]
    response_ids: list[int] = field(default_factory=list)
    observed: list[bool] = field(default_factory=list)
    flat: dict[str, list[Tensor]] = field(default_factory=lambda: {name: [] for name in FLAT})

    @property
    def context_ids(self) -> list[int]:
        """All ids that the policy reads before its next turn."""
        return self.prompt_ids + self.response_ids

    def append(self, ids: Sequence[int], *, observed: bool) -> None:
        """Append the ids of a turn or an answer."""
        self.response_ids += ids
        self.observed += [observed] * len(ids)


def play_dialogues(
    model: TurnGenerator,
    dialogues: Dialogues,
    *,
    seed: int | None = None,
    **sampling: Any,
) -> EpisodeBatch:
    """Play the episodes of `dialogues` to their ends.

    An episode ends when its environment ends it, after `max_turns`, or when no action would fit into its length after
    an answer, which is then left out. Only the environment can terminate it; otherwise it is truncated.

    Args:
        model: generates the turns.
        dialogues: started; afterwards they have the turns with their rewards.
        seed: seed of the sampling; None uses torch's global generator.
        sampling: other arguments of `generate`, with the `generation_kwargs`.

    Returns:
        The episodes, in the order of `dialogues.running`. Tokens of answers are `observed`. Every episode ends with an
        action.

    Raises:
        DialogueError: an environment failed.
    """
    max_episode_length = dialogues.settings.max_episode_length
    episodes = [_Episode(dialogue.prompt_ids.tolist()) for dialogue in dialogues.running]
    device: torch.device | str = "cpu"

    contexts = model.new_contexts()
    rows_of_contexts: list[int] = []
    turn_number = 0
    while rows := [row for row, dialogue in enumerate(dialogues.running) if not dialogue.is_over]:
        # The keys of episodes that are over are no longer needed.
        if contexts is not None and len(rows) < len(rows_of_contexts):
            contexts.select(torch.tensor([rows_of_contexts.index(row) for row in rows]))
        rows_of_contexts = rows

        # Tokens that each episode has left; the longest turn of all is generated, and cut where an episode has less.
        room = [max_episode_length - len(episodes[row].response_ids) for row in rows]
        generated = _generated_turn(
            model,
            [episodes[row].context_ids for row in rows],
            contexts,
            max_new_tokens=min(dialogues.settings.max_turn_length, max(room)),
            turn_number=turn_number,
            seed=seed,
            sampling=sampling,
        )
        device = generated.response_ids.device

        turn_ids = []
        ids_of_rows = real_ids(generated.response_ids, generated.response_mask)
        for ids, n_left in zip(ids_of_rows, room, strict=True):
            turn_ids.append(ids[:n_left])
        _append_turns([episodes[row] for row in rows], turn_ids, generated)

        # An answer after which no action fits would end the episode with tokens that nothing follows.
        for row, answer_ids in zip(rows, dialogues.step(rows, turn_ids), strict=True):
            episode = episodes[row]
            if dialogues.running[row].is_over:
                continue
            if len(episode.response_ids) + len(answer_ids) >= max_episode_length:
                dialogues.running[row].is_over = True
            else:
                episode.append(answer_ids, observed=True)
        turn_number += 1

    terminated = [dialogue.terminated for dialogue in dialogues.running]
    return _batch(episodes, terminated).to(device)


def _generated_turn(
    model: TurnGenerator,
    texts: Sequence[Sequence[int]],
    contexts: Contexts | None,
    *,
    max_new_tokens: int,
    turn_number: int,
    seed: int | None,
    sampling: Mapping[str, Any],
) -> EpisodeBatch:
    """Generate a turn after each text.

    Args:
        model: generates the turns.
        texts: ids of prompts, turns and answers so far.
        contexts: what was read of these texts in earlier turns; None: they are read as a whole.
        max_new_tokens: maximum length of a turn.
        turn_number: from 0.
        seed: seed of the sampling of the episodes.
        sampling: other arguments of `generate`.
    """
    arguments = dict(sampling)

    # The limit is that of a turn, whatever the arguments of a single response say.
    kwargs = {key: value for key, value in (arguments.get("generation_kwargs") or {}).items() if key != "max_length"}
    arguments["generation_kwargs"] = kwargs | {"max_new_tokens": max_new_tokens}

    # With the same seed, every turn would repeat the random numbers of the first.
    if seed is not None and turn_number:
        seed = derived_seed(seed, "turn", turn_number)
    if turn_number:
        arguments.pop("first_token_temperature", None)

    # Engines do not have this argument.
    if contexts is not None:
        arguments["contexts"] = contexts
    prompt_ids, prompt_mask = padded(texts, side="left")
    return model.generate(prompt_ids, prompt_mask, max_new_tokens=max_new_tokens, seed=seed, **arguments)


def _append_turns(episodes: Sequence[_Episode], turn_ids: Sequence[Sequence[int]], generated: EpisodeBatch) -> None:
    """Append the turns to their episodes, with the flat fields of their actions.

    Args:
        episodes: `n` episodes.
        turn_ids: the ids of their turns, perhaps shorter than they were generated.
        generated: the turns as they were generated.
    """
    device = generated.response_ids.device
    for episode, ids in zip(episodes, turn_ids, strict=True):
        episode.append(ids, observed=False)
        episode.flat["turn_position"].append(torch.arange(len(ids), device=device))

    lengths = generated.lengths.tolist()
    for name in FLAT:
        rows_of_actions = getattr(generated, name)
        if rows_of_actions is None:
            continue
        of_turns = rows_of_actions.split(lengths)
        for episode, ids, of_turn in zip(episodes, turn_ids, of_turns, strict=True):
            episode.flat[name].append(of_turn[: len(ids)])


def _batch(episodes: Sequence[_Episode], terminated: Sequence[bool]) -> EpisodeBatch:
    """Return the episodes as tensors."""
    prompt_ids, prompt_mask = padded([episode.prompt_ids for episode in episodes], side="left")
    response_ids, response_mask = padded([episode.response_ids for episode in episodes])
    observed = torch.zeros_like(response_mask)
    observed[response_mask] = torch.tensor([flag for episode in episodes for flag in episode.observed])

    # Of all actions in the order of the episodes, and within each in the order of its turns.
    flat: dict[str, Any] = {}
    for name in FLAT:
        rows = [rows_of_turn for episode in episodes for rows_of_turn in episode.flat[name]]
        if rows:
            flat[name] = torch.cat(rows)
    return EpisodeBatch(
        prompt_ids,
        prompt_mask,
        response_ids,
        response_mask,
        torch.tensor(terminated),
        observed=observed if bool(observed.any()) else None,
        **flat,
    )


def prompt_rows_within(groups: Tensor, episodes: EpisodeBatch) -> Tensor:
    """Return numbers `[n]`, equal for episodes of the same group with the same prompt.

    Args:
        groups: number of each episode's group `[n]`.
        episodes: the episodes.
    """
    # With the mask: the id of padding may also be that of a real token.
    prompts = torch.cat([groups[:, None], episodes.prompt_ids, episodes.prompt_mask.long()], dim=1)
    return prompts.unique(dim=0, return_inverse=True)[1]
