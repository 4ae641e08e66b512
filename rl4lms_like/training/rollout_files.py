"""Rollouts on disk: all tensors of a rollout, and its texts; see `tracking.rollouts` for the names of the files.

0.episodes.prompt_ids  0.scores.values  0.rewards  0.reward_parts.<name>    of the first generation batch
random.torch ...                                                            of the generators after the rollout
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from rl4lms_like.core.disk import flush, refuse_links, remove_path, saving
from rl4lms_like.core.episodes import EpisodeBatch
from rl4lms_like.core.errors import RL4LMsLikeError
from rl4lms_like.policies.teacher_forcing import EpisodeScores
from rl4lms_like.rollouts.collector import ScoredEpisodes, episode_sums
from rl4lms_like.tracking.rollouts import CRITIC, ITERATION, TENSORS, TEXTS, kept_rollouts, rollout_file
from rl4lms_like.tracking.run_folder import ROLLOUTS, to_json, write_whole
from rl4lms_like.training.assemble import Run
from rl4lms_like.training.resuming.checkpoints import write_tensors
from rl4lms_like.training.resuming.states import random_state
from rl4lms_like.training.token_credit import listed

_KEY = "rollout"
"""The only key of the metadata: the order of several keys in the file would be random."""
_OF_EPISODES = tuple(field.name for field in fields(EpisodeBatch) if field.name != "prompt_side")


@dataclass(frozen=True)
class StoredRollout:
    """Rollout as read from its file.

    Args:
        parts: generation batches.
        origin: digests of what the rollout was generated with, see `Recorder`.
        random: state of the global random generators after the rollout: numbers and tensors.
    """

    parts: list[ScoredEpisodes]
    origin: dict[str, str]
    random: tuple[dict[str, Any], dict[str, Tensor]]


class Recorder:
    """Keeps every rollout of a run (`RolloutCollector.on_rollout`).

    Args:
        run: the run.
        folder: folder of the run.
        position: returns the number of the current rollout, of the iterations or of the critic's pretraining.
        origin: digests of the tokenizer's vocabulary and, if the rollouts are of this run's policy, of its starting
            weights.

    Raises:
        RL4LMsLikeError: `rollouts` is a link.
    """

    def __init__(self, run: Run, folder: Path, position: Callable[[bool], int], origin: dict[str, str]) -> None:
        self.run, self.folder, self.position, self.origin = run, folder, position, origin
        if (folder / ROLLOUTS).is_symlink():
            refuse_links([folder / ROLLOUTS])
        (folder / ROLLOUTS).mkdir(exist_ok=True)

    def __call__(self, parts: Sequence[ScoredEpisodes], is_critic: bool) -> None:
        """Write the files of a rollout; those with the tensors last."""
        kind, number = CRITIC if is_critic else ITERATION, self.position(is_critic)
        tensors, random_numbers = random_state()
        for index, part in enumerate(parts):
            tensors |= {f"{index}.{name}": tensor for name, tensor in _tensors_of(part).items()}
        batches = [{"prompt_side": part.episodes.prompt_side, "sample_ids": list(part.sample_ids)} for part in parts]
        header = json.dumps({"origin": self.origin, "batches": batches, "random": random_numbers})
        file = rollout_file(self.folder, kind, number, TENSORS)
        partial = file.with_name(f"{file.name}.partial")
        with saving(f"the rollout to {file}"):
            lines = [json.dumps(to_json(line), ensure_ascii=False) + "\n" for line in self._lines(parts, number)]
            write_whole(file.with_suffix(TEXTS), "".join(lines))
            remove_path(partial)
            write_tensors(tensors, partial, {_KEY: header})
            flush(partial)
            os.replace(partial, file)

    def _lines(self, parts: Sequence[ScoredEpisodes], number: int) -> list[dict[str, Any]]:
        lines: list[dict[str, Any]] = []
        for part in parts:
            episodes, scores = part.episodes, part.scores
            per_episode = {"reward": part.rewards}
            if self.run.policy.has_reference:
                per_episode["kl"] = scores.raw_log_prob - scores.ref_log_prob
            sums = {name: listed(episode_sums(episodes, field)) for name, field in per_episode.items()}
            shares = {name: listed(episode_sums(episodes, field)) for name, field in part.reward_parts.items()}
            for row, sample_id in enumerate(part.sample_ids):
                line: dict[str, Any] = {"iteration": number, "episode": len(lines), "sample_id": sample_id}
                line["prompt"] = self._decode(episodes.prompt_ids[row][episodes.prompt_mask[row]])
                line["response"] = self._decode(episodes.response_ids[row][episodes.response_mask[row]])
                line |= {name: values[row] for name, values in sums.items()}
                line["reward_parts"] = {name: values[row] for name, values in shares.items()}
                line["length"] = int(episodes.lengths[row])
                line["terminated"] = bool(episodes.terminated[row])
                lines.append(line)
        return lines

    def _decode(self, ids: Tensor) -> str:
        return str(self.run.tokenizer.decode(ids.tolist(), skip_special_tokens=True))


def delete_later_rollouts(folder: Path, done: Mapping[str, int]) -> None:
    """Delete the rollouts that a resumed run repeats or never reaches, and incomplete files.

    Args:
        folder: folder of the run.
        done: `ITERATION` and `CRITIC` -> number of rollouts that stay.
    """
    if (folder / ROLLOUTS).is_symlink() or not (folder / ROLLOUTS).is_dir():
        return
    with saving(f"rollouts to {folder}"):
        for kind, n_done in done.items():
            for ending in (TENSORS, TEXTS):
                for number in kept_rollouts(folder, kind, ending):
                    if number > n_done:
                        rollout_file(folder, kind, number, ending).unlink()
        for partial in (folder / ROLLOUTS).glob("*.partial"):
            partial.unlink()


def _tensors_of(part: ScoredEpisodes) -> dict[str, Tensor]:
    found = {f"episodes.{name}": getattr(part.episodes, name) for name in _OF_EPISODES}
    found = {name: tensor for name, tensor in found.items() if tensor is not None} | {"rewards": part.rewards}
    found |= {f"scores.{name}": tensor for name, tensor in part.scores._asdict().items()}
    return found | {f"reward_parts.{name}": tensor for name, tensor in part.reward_parts.items()}


def read_rollout(file: Path, device: torch.device | str = "cpu") -> StoredRollout:
    """Read a rollout; its tensors are put on a device.

    Raises:
        RL4LMsLikeError: the file cannot be read, or was not written by a run.
    """
    try:
        with safe_open(file, framework="pt") as stored:
            header = json.loads(stored.metadata()[_KEY])
            named: dict[str, dict[str, Tensor]] = {}
            for name in stored.keys():  # noqa: SIM118  (not a mapping)
                part, _, rest = name.partition(".")
                named.setdefault(part, {})[rest] = stored.get_tensor(name)
        parts = [_part_of(named[str(index)], each, device) for index, each in enumerate(header["batches"])]
        return StoredRollout(parts, dict(header["origin"]), (header["random"], named["random"]))
    except Exception as error:  # damaged bytes can cause any exception while they are parsed
        raise RL4LMsLikeError(f"{file} cannot be read: {type(error).__name__}: {error}") from error


def _part_of(tensors: dict[str, Tensor], batch: dict[str, Any], device: torch.device | str) -> ScoredEpisodes:
    groups: dict[str, dict[str, Any]] = {"episodes": {}, "scores": {}, "reward_parts": {}, "rewards": {}}
    for name, tensor in tensors.items():
        group, _, rest = name.partition(".")
        groups[group][rest] = tensor.to(device)
    episodes = EpisodeBatch(**groups["episodes"], prompt_side=batch["prompt_side"])
    part = ScoredEpisodes(
        episodes,
        groups["rewards"][""],
        EpisodeScores(**groups["scores"]),
        dict(groups["reward_parts"]),
        [str(sample_id) for sample_id in batch["sample_ids"]],
    )
    flat = [part.rewards, *part.scores, *part.reward_parts.values()]
    if any(field.shape != (episodes.n_tokens,) for field in flat) or len(part.sample_ids) != episodes.n_episodes:
        raise ValueError("its tensors do not match each other")
    return part
