"""Rollouts on disk: all tensors of a rollout, and its texts; see `tracking.rollouts` for the names of the files.

0.episodes.prompt_ids  0.scores.values  0.rewards  0.reward_parts.<name>    of the first generation batch
random.torch ...                                                            of the generators after the rollout

The header has a digest of all of it, so that a rollout that was edited is not taken for what a policy generated.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from rl4lms_like.core.continuation import Continuations
from rl4lms_like.core.episodes import EpisodeBatch, real_ids
from rl4lms_like.core.sampled_log_probs import impossible_log_probs
from rl4lms_like.on_policy.assemble import AssembledRun
from rl4lms_like.on_policy.token_credit import listed
from rl4lms_like.policies.teacher_forcing import EpisodeScores
from rl4lms_like.rollouts.rollout import Rollout, RolloutBatch
from rl4lms_like.system.disk import flush, refuse_links_to_folders, remove_path, saving
from rl4lms_like.system.errors import RL4LMsLikeError
from rl4lms_like.system.regular_files import require_regular_file
from rl4lms_like.tracking.rollouts import CRITIC, ITERATION, TENSORS, TEXTS, kept_rollouts, rollout_file
from rl4lms_like.tracking.run_folder import ROLLOUTS, to_json, write_whole
from rl4lms_like.tracking.thumbnails import KEY, images_by_id, keep_thumbnails
from rl4lms_like.training.resuming.checkpoints import write_tensors
from rl4lms_like.training.resuming.states import random_state

_KEY = "rollout"
"""The only key of the metadata: the order of several keys in the file would be random."""
_EPISODE_FIELDS = tuple(field.name for field in fields(EpisodeBatch) if field.name != "prompt_side")
_INTEGERS = ("prompt_ids", "response_ids", "group_ids", "prompt_rows", "turn_position", "pictures")
_MASKS = ("prompt_mask", "response_mask", "terminated", "observed")
_DTYPES = {**dict.fromkeys(_INTEGERS, torch.int64), **dict.fromkeys(_MASKS, torch.bool), "allowed": torch.uint8}
"""Type of each field of the episodes; all other tensors of a rollout are float32."""


@dataclass(frozen=True)
class StoredRollout:
    """Rollout as read from its file.

    Args:
        batches: generation batches, scored.
        origin: digests of what the rollout was generated with, see `Recorder`.
        random: state of the global random generators after the rollout: numbers and tensors.
        is_intact: True if its content is the one that the run wrote, False if it was edited since; None if it is of a
            version that wrote no digest, so that this is unknown.
    """

    batches: list[RolloutBatch]
    origin: dict[str, str]
    random: tuple[dict[str, Any], dict[str, Tensor]]
    is_intact: bool | None


class Recorder:
    """Keeps each rollout on disk, with the state of the random generators after it.

    Args:
        run: the run.
        folder: folder of the run.
        position: returns the number of the current rollout, of the critic's pretraining (True) or of the iterations.
        origin: digests of the tokenizer's vocabulary and, if the rollouts are of this run's policy, of its starting
            weights.

    Raises:
        RL4LMsLikeError: `rollouts` is a link.
    """

    def __init__(
        self, run: AssembledRun, folder: Path, position: Callable[[bool], int], origin: dict[str, str]
    ) -> None:
        self.run = run
        self.folder = folder
        self.position = position
        self.origin = origin
        refuse_links_to_folders([folder / ROLLOUTS])
        (folder / ROLLOUTS).mkdir(exist_ok=True)

    def record(self, rollout: Rollout) -> None:
        """Write the files of a rollout."""
        is_critic = not rollout.updates_policy
        number = self.position(is_critic)
        file = rollout_file(self.folder, CRITIC if is_critic else ITERATION, number, TENSORS)

        # A reward may have drawn from the global generators: a replay continues with the state after the rollout.
        tensors, random_numbers = random_state()
        batches = []
        for index, batch in enumerate(rollout.batches):
            tensors |= {f"{index}.{name}": tensor for name, tensor in _tensors_of(batch).items()}
            batches.append({"prompt_side": batch.episodes.prompt_side, "sample_ids": list(batch.sample_ids)})
        described = {"origin": self.origin, "batches": batches, "random": random_numbers}
        header = json.dumps({**described, "digest": _digest(tensors, described)})

        # The tensors last, under their own name only once they are whole: a rollout without them does not count.
        partial = file.with_name(f"{file.name}.partial")
        with saving(f"the rollout to {file}"):
            lines = [json.dumps(to_json(line), ensure_ascii=False) + "\n" for line in self._lines(rollout, number)]
            write_whole(file.with_suffix(TEXTS), "".join(lines))
            remove_path(partial)
            write_tensors(tensors, partial, {_KEY: header})
            flush(partial)
            os.replace(partial, file)

    def _lines(self, rollout: Rollout, number: int) -> list[dict[str, Any]]:
        """Return what is written of each episode, to be read by people."""
        continuations = self.run.continuations
        images = images_by_id(self.run.samples["train"])
        lines: list[dict[str, Any]] = []
        for batch in rollout.batches:
            episodes = batch.episodes
            fields = {"reward": batch.rewards}
            if self.run.policy.has_reference:
                fields["kl"] = batch.ref_log_ratio
            sums = {name: listed(batch.episode_sums(field)) for name, field in fields.items()}
            part_sums = {name: listed(batch.episode_sums(field)) for name, field in batch.reward_parts.items()}

            prompt_ids = real_ids(episodes.prompt_ids, episodes.prompt_mask)
            response_ids = real_ids(episodes.response_ids, episodes.response_mask)
            responses = continuations.texts(prompt_ids, response_ids)

            # One line for each episode, in the order of the tensors' rows.
            for row, sample_id in enumerate(batch.sample_ids):
                line: dict[str, Any] = {"iteration": number, "episode": len(lines), "sample_id": sample_id}
                line["prompt"] = continuations.decode(prompt_ids[row])
                line["response"] = responses[row]
                if sample_id in images:
                    line[KEY] = keep_thumbnails(self.folder, images[sample_id])
                if episodes.observed is not None:
                    flags = episodes.observed[row][episodes.response_mask[row]].tolist()
                    line["turns"] = turns_of(continuations, prompt_ids[row], response_ids[row], flags)
                line |= {name: values[row] for name, values in sums.items()}
                line["reward_parts"] = {name: values[row] for name, values in part_sums.items()}
                line["length"] = int(episodes.lengths[row])
                line["terminated"] = bool(episodes.terminated[row])
                lines.append(line)
        return lines


def turns_of(
    continuations: Continuations, prompt_ids: Sequence[int], response_ids: Sequence[int], observed: Sequence[bool]
) -> list[dict[str, str]]:
    """Return text and answer of each turn of a dialogue. Turns between which the answer was empty are one turn.

    Args:
        continuations: decodes ids.
        prompt_ids: of the prompt.
        response_ids: of all turns and answers.
        observed: for each of them, whether it is of an answer.
    """
    turns: list[dict[str, str]] = []
    before = list(prompt_ids)
    ids = iter(response_ids)
    for is_observed, flags in groupby(observed):
        part = [next(ids) for _ in flags]
        text = continuations.text(before, part)
        before += part
        if is_observed:
            turns[-1]["answer"] = text
        else:
            turns.append({"text": text, "answer": ""})
    return turns


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


def _tensors_of(batch: RolloutBatch) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name in _EPISODE_FIELDS:
        tensor = getattr(batch.episodes, name)
        if tensor is not None:
            tensors[f"episodes.{name}"] = tensor
    tensors["rewards"] = batch.rewards
    tensors |= {f"scores.{name}": tensor for name, tensor in batch.known_scores()._asdict().items()}
    return tensors | {f"reward_parts.{name}": tensor for name, tensor in batch.reward_parts.items()}


def _digest(tensors: Mapping[str, Tensor], described: Mapping[str, Any]) -> str:
    """Return the SHA-256 of all tensors of a rollout, with their names and shapes, and of the rest of its header."""
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        content: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        digest.update(content)
    return digest.hexdigest()


def read_rollout(file: Path, device: torch.device | str = "cpu") -> StoredRollout:
    """Read a rollout; its tensors are put on a device.

    Raises:
        RL4LMsLikeError: the file cannot be read, was not written by a run, or has numbers that cannot be.
    """
    require_regular_file(file)
    try:
        with safe_open(file, framework="pt") as stored:
            header = json.loads(stored.metadata()[_KEY])
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118  (not a mapping)

        # Of a version before 0.3 there is no digest.
        digest = header.pop("digest", None)
        is_intact = None if digest is None else digest == _digest(tensors, header)

        by_batch: dict[str, dict[str, Tensor]] = {}  # the number of the batch, or `random`
        for name, tensor in tensors.items():
            number, _, rest = name.partition(".")
            by_batch.setdefault(number, {})[rest] = tensor
        batches = []
        for index, described in enumerate(header["batches"]):
            batches.append(_batch_of(by_batch[str(index)], described, device))
        if not batches:
            raise ValueError("it has no episodes")
        random_state_after = (dict(header["random"]), by_batch["random"])
        return StoredRollout(batches, dict(header["origin"]), random_state_after, is_intact)
    except Exception as error:  # damaged bytes can cause any exception while they are parsed
        raise RL4LMsLikeError(f"{file} cannot be read: {type(error).__name__}: {error}") from error


def _batch_of(tensors: dict[str, Tensor], described: dict[str, Any], device: torch.device | str) -> RolloutBatch:
    """Return the generation batch of these tensors, whose header has its padding side and samples."""
    groups: dict[str, dict[str, Any]] = {"episodes": {}, "scores": {}, "reward_parts": {}, "rewards": {}}
    for name, tensor in tensors.items():
        group, _, rest = name.partition(".")
        groups[group][rest] = tensor.to(device)

    for name, tensor in groups["episodes"].items():
        _check_dtype(f"episodes.{name}", tensor, _DTYPES.get(name, torch.float32))
    episodes = EpisodeBatch(**groups["episodes"], prompt_side=described["prompt_side"])
    scores = EpisodeScores(**groups["scores"])
    rewards = groups["rewards"][""]
    sample_ids = [str(sample_id) for sample_id in described["sample_ids"]]
    batch = RolloutBatch(episodes, rewards, reward_parts=groups["reward_parts"], sample_ids=sample_ids, scores=scores)

    flat: dict[str, Tensor] = {"rewards": rewards, **scores._asdict(), **groups["reward_parts"]}
    if episodes.behavior_log_prob is not None:
        flat["behavior_log_prob"] = episodes.behavior_log_prob
    for name, tensor in flat.items():
        _check_dtype(name, tensor, torch.float32)
        # A part of a reward is NaN where it left out an episode.
        is_valid = ~tensor.isinf() if name in groups["reward_parts"] else tensor.isfinite()
        if not bool(is_valid.all()):
            raise ValueError(f"{name} has values that are not finite")
        problem = impossible_log_probs(tensor) if name.endswith("log_prob") else None
        if problem is not None:
            raise ValueError(f"{name}: {problem}")

    if any(field.shape != (episodes.n_tokens,) for field in flat.values()) or len(sample_ids) != episodes.n_episodes:
        raise ValueError("its tensors do not match each other")
    return batch


def _check_dtype(name: str, tensor: Tensor, expected: torch.dtype) -> None:
    if tensor.dtype != expected:
        raise ValueError(f"{name} is {tensor.dtype}, expected {expected}")
