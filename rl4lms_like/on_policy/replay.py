"""Training on kept rollouts of another run (`train_evaluation.replay`), without generating.

    same config, same starting weights, from iteration 1    stored log-probs and values: the same weights, byte for byte
    otherwise                                               scored again, loss weighted by min(pi / mu, 2)
    another task (`TASK`), tokenizer, family, masks         refused

pi is the policy at the start of the update, mu the one that generated the rollout; see `correction_weights`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rl4lms_like.algorithms import ALGORITHMS
from rl4lms_like.config.binding import with_defaults
from rl4lms_like.config.load import parse_config
from rl4lms_like.config.run_config import AnyConfig, RunConfig
from rl4lms_like.core.sampled_log_probs import impossible_ids
from rl4lms_like.on_policy.assemble import AssembledRun
from rl4lms_like.on_policy.rollout_files import StoredRollout, read_rollout
from rl4lms_like.rollouts.rollout import Rollout
from rl4lms_like.system.disk import with_home
from rl4lms_like.system.errors import CheckpointError, ConfigError, ConfigIssue, RL4LMsLikeError
from rl4lms_like.system.secrets import masked
from rl4lms_like.system.wording import shown
from rl4lms_like.tracking.rollouts import CRITIC, ITERATION, TENSORS, kept_rollouts, ranges, rollout_file
from rl4lms_like.tracking.run_folder import to_json
from rl4lms_like.training.resuming.resume import N_SHOWN, SPEEDUPS, Difference, other_computations, own_config
from rl4lms_like.training.resuming.states import load_random, weights_digest

logger = logging.getLogger(__name__)

KEY = "train_evaluation.replay"
EDITED = "train_evaluation.accept_edited_rollouts"
TASK = ("reward_fn", "datapool", "env")
"""Blocks that determine the stored prompts and rewards."""
_SELECTED = re.compile(r"(?P<folder>.+):(?P<first>\d{1,18})(?:-(?P<last>\d{1,18}))?")


@dataclass(frozen=True)
class ReplayPlan:
    """Replay of a config.

    Args:
        run_folder: the run that kept the rollouts.
        iterations: its selected iterations.
        differences: why the stored log-probs and values do not apply; empty if they do.
    """

    run_folder: Path
    iterations: list[int]
    differences: list[str]

    def __str__(self) -> str:
        """Return the plan as one line of text."""
        selection = f"replay of {self.run_folder}, iterations {ranges(self.iterations)}"
        if not self.differences:
            return f"{selection}: with the stored log-probs and values"
        why = "; ".join(self.differences[:N_SHOWN])
        if len(self.differences) > N_SHOWN:
            why += " ..."
        return f"{selection}: scored again and weighted, because {why}"


def with_replay(config: AnyConfig) -> AnyConfig:
    """Check the replay of a config, if it has one, and complete it.

    `n_iters` becomes at most the number of selected iterations, and the path absolute, since a run may be resumed in
    another folder.

    Raises:
        ConfigError: the rollouts do not exist, or cannot be used with this config.
    """
    if not isinstance(config, RunConfig) or config.train_evaluation.replay is None:
        return config
    schedule = config.train_evaluation
    assert schedule.replay is not None
    folder, iterations = _selection(schedule.replay)
    selected = f"{folder.absolute()}:{iterations[0]}-{iterations[-1]}"
    schedule = replace(schedule, n_iters=min(schedule.n_iters, len(iterations)), replay=selected)
    config = replace(config, train_evaluation=schedule)

    plan = _plan(folder, iterations, config.to_dict())
    if issues := _unusable(plan, config.to_dict()):
        raise ConfigError(issues, f"the replay of {folder}")
    return config


def plan_of(config: Mapping[str, Any]) -> ReplayPlan:
    """Return what a config, which `with_replay` has checked, replays."""
    return _plan(*_selection(config["train_evaluation"]["replay"]), config)


def _selection(value: str) -> tuple[Path, list[int]]:
    """Return the run folder and the iterations of `FOLDER` or `FOLDER:3-7`."""
    # A folder whose name ends like a selection is a folder.
    selection = None if with_home(value).is_dir() else _SELECTED.fullmatch(value)
    folder = with_home(selection["folder"] if selection else value)
    kept = kept_rollouts(folder)
    if not kept:
        hint = "was its train_evaluation.save_rollouts true?" if folder.is_dir() else "there is no such folder"
        raise ConfigError([ConfigIssue(KEY, f"{folder} has no rollouts: {hint}")])

    first = 1
    last = max(kept)
    if selection:
        first = int(selection["first"])
        last = int(selection["last"] or selection["first"])
    if last < first:
        raise ConfigError([ConfigIssue(KEY, f"{first}-{last} ends before it begins: write {last}-{first}")])

    # Counted, not listed: a range may have more numbers than fit into memory.
    iterations = [number for number in kept if first <= number <= last]
    if len(iterations) != last - first + 1:
        selected = str(first) if first == last else f"{first}-{last}"
        message = f"{selected} are not all among the rollouts of {folder}: {ranges(kept)}"
        raise ConfigError([ConfigIssue(KEY, message)])
    return folder, iterations


def _plan(folder: Path, iterations: list[int], config: Mapping[str, Any]) -> ReplayPlan:
    differences = []
    for change in _changes(folder, config):
        differences.append(f"{change.path} is {shown(change.old)} there, {shown(change.new)} here")
    if iterations[0] != 1:
        differences.append(f"iteration {iterations[0]} did not start from the first weights")
    return ReplayPlan(folder, iterations, differences)


def _changes(folder: Path, config: Mapping[str, Any]) -> list[Difference]:
    """Return the keys that affect weights or scores and differ from those of the run that kept the rollouts."""
    try:
        before = parse_config(own_config(folder), source=f"{folder}/config.json").to_dict()
    except (CheckpointError, ConfigError) as error:
        raise ConfigError([ConfigIssue(KEY, str(error))]) from error

    # Lengths, evaluations and the kept rollouts themselves do not change an iteration, unless the learning rate follows
    # the length. Speedups change its rounding only.
    changes = []
    for difference in other_computations(to_json(before), to_json(masked(dict(config)))):
        is_irrelevant = difference.path.startswith(("train_evaluation.", SPEEDUPS))
        if difference.schedule is not None or not is_irrelevant:
            changes.append(difference)
    return changes


def _unusable(plan: ReplayPlan, config: Mapping[str, Any]) -> list[ConfigIssue]:
    """Return why the rollouts cannot be used with this config."""
    issues = []
    for change in _changes(plan.run_folder, config):
        if change.path.partition(".")[0] in TASK:
            values = f"{shown(change.old)} in {plan.run_folder}, {shown(change.new)} here"
            issues.append(ConfigIssue(change.path, f"{values}: the stored rewards are of another task"))
    if issues:
        return issues
    return uncorrectable(plan, config) if plan.differences else _without_critic(plan, config)


def uncorrectable(plan: ReplayPlan, config: Mapping[str, Any]) -> list[ConfigIssue]:
    """Return why rollouts of another policy cannot be used with this config."""
    issues = []
    why = f"these rollouts are of another policy ({'; '.join(plan.differences[:N_SHOWN])})"
    if not getattr(ALGORITHMS.resolve(config["alg"]["id"]), "learns_off_policy", False):
        issues.append(ConfigIssue("alg.id", f"{config['alg']['id']} needs rollouts of its own policy, but {why}"))
    if _pretrains(config):
        hint = f"set it to null and alg.policy.args.critic_model to {plan.run_folder / 'critic'}"
        issues.append(ConfigIssue("alg.args.critic_pretrain", f"it needs rollouts of its policy, but {why}; {hint}"))
    return issues


def _without_critic(plan: ReplayPlan, config: Mapping[str, Any]) -> list[ConfigIssue]:
    if not _pretrains(config) or kept_rollouts(plan.run_folder, CRITIC):
        return []
    return [ConfigIssue("alg.args.critic_pretrain", f"{plan.run_folder} has no rollouts of the critic's pretraining")]


def _pretrains(config: Mapping[str, Any]) -> bool:
    return with_defaults(config)["alg"]["args"].get("critic_pretrain") is not None


def origin_of(run: AssembledRun) -> dict[str, str]:
    """Return digests of the starting weights and of the tokenizer, of a run that was just assembled."""
    tokenizer = run.tokenizer
    tokens = json.dumps([sorted(tokenizer.get_vocab().items()), sorted(tokenizer.all_special_ids)])
    named = run.policy.named_parameters()
    return {"weights": weights_digest(named), "tokenizer": hashlib.sha256(tokens.encode()).hexdigest()}


class Replay:
    """Source of kept rollouts, in place of generating them (`RolloutCollector.replay`).

    Args:
        run: the run, just assembled.
        config: its config as plain data.
        position: returns the number of the next rollout, of the critic's pretraining (True) or of the iterations.
        origin: see `origin_of`.

    Attributes:
        plan: what is replayed, and how.

    Raises:
        ConfigError: the rollouts cannot be used with this tokenizer and these weights.
        RL4LMsLikeError: a file cannot be read.
    """

    def __init__(
        self, run: AssembledRun, config: Mapping[str, Any], position: Callable[[bool], int], origin: Mapping[str, str]
    ) -> None:
        self.run = run
        self.position = position
        self.plan = plan_of(config)
        self._accepts_edited = bool(config["train_evaluation"]["accept_edited_rollouts"])
        self._is_without_digest = False
        stored = self._read(ITERATION, self.plan.iterations[0])
        self._check(stored, origin)

        # The same config may have started from other weights; then the rollouts are of another policy after all.
        if not self.plan.differences and stored.origin.get("weights") != origin["weights"]:
            self.plan = replace(self.plan, differences=["its rollouts are not of these starting weights"])
            if issues := uncorrectable(self.plan, config):
                raise ConfigError(issues, f"the replay of {self.plan.run_folder}")

    @property
    def is_off_policy(self) -> bool:
        """True if the stored log-probs do not apply, so that the rollouts are those of another policy."""
        return bool(self.plan.differences)

    def next_rollout(self, *, updates_policy: bool) -> Rollout:
        """Return the next rollout, with scores that are valid for the current policy.

        Raises:
            ConfigError: the critic's pretraining needs more rollouts than were kept.
            RL4LMsLikeError: a file cannot be read.
        """
        is_critic = not updates_policy
        number = self.position(is_critic)
        if updates_policy:
            kind = ITERATION
            number = self.plan.iterations[number - 1]
        else:
            if number not in kept_rollouts(self.plan.run_folder, CRITIC):
                message = f"{self.plan.run_folder} has no rollout {number} of the critic's pretraining"
                raise ConfigError([ConfigIssue("alg.args.critic_pretrain", message)])
            kind = CRITIC
        file = self._file(kind, number)
        stored = self._read(kind, number)

        for batch in stored.batches:
            for ids in (batch.episodes.prompt_ids, batch.episodes.response_ids):
                problem = impossible_ids(ids, self.run.policy.vocab_size)
                if problem is not None:
                    raise RL4LMsLikeError(f"{file} has {problem}")

        if not self.plan.differences:
            # A reward may have drawn numbers, which dropout then continues.
            try:
                load_random(*stored.random)
            except Exception as error:  # an edited state can be anything
                name = type(error).__name__
                raise RL4LMsLikeError(f"{file} has no valid state of the random generators: {name}: {error}") from error
            return Rollout(stored.batches, stored.batches, updates_policy=updates_policy, is_replayed=True)

        # Of another policy: scored by this one, next to the log-probs of the one that generated the episodes. Batch by
        # batch, as they were generated: another padded width could change the last bit.
        batches = []
        for batch in stored.batches:
            behavior_log_prob = batch.episodes.behavior_log_prob
            if behavior_log_prob is None:
                behavior_log_prob = batch.known_scores().log_prob
            episodes = replace(batch.episodes, behavior_log_prob=behavior_log_prob)
            scores = self.run.algorithm.collector.score(episodes)
            batches.append(replace(batch, episodes=episodes, scores=scores))
        return Rollout(batches, batches, updates_policy=updates_policy, is_replayed=True)

    def _file(self, kind: str, number: int) -> Path:
        return rollout_file(self.plan.run_folder, kind, number, TENSORS)

    def _read(self, kind: str, number: int) -> StoredRollout:
        """Read a rollout; one that was edited is an `RL4LMsLikeError`, unless the config accepts it."""
        file = self._file(kind, number)
        stored = read_rollout(file, self.run.policy.device)

        if stored.is_intact is None and not self._is_without_digest:
            logger.warning("%s was kept without a digest of its content: whether it was edited is not checked", file)
            self._is_without_digest = True
        if stored.is_intact is False:
            if not self._accepts_edited:
                raise RL4LMsLikeError(
                    f"{file} was edited after a run wrote it (its SHA-256 differs). Use the original, or set {EDITED}: "
                    f"true if the change is intended; the config of this run then records it"
                )
            logger.warning("%s was edited after a run wrote it; accepted (%s)", file, EDITED)
        return stored

    def _check(self, stored: StoredRollout, origin: Mapping[str, str]) -> None:
        """Raise a `ConfigError` if the episodes are not those that this policy could generate."""
        policy = self.run.policy
        episodes = stored.batches[0].episodes
        issues = []
        if stored.origin.get("tokenizer") != origin["tokenizer"]:
            issues.append(ConfigIssue("tokenizer.model_name", "the rollouts have the tokens of another tokenizer"))
        if episodes.prompt_side != policy.reader.prompt_side:
            issues.append(ConfigIssue("alg.policy.id", "the rollouts are of a model of the other family"))

        # Masks have one bit for each token of the vocabulary, in whole bytes.
        n_bytes = None if episodes.allowed is None else episodes.allowed.shape[1]
        n_bytes_here = -(-policy.vocab_size // 8) if hasattr(policy, "mask_model") else None
        if n_bytes != n_bytes_here:
            message = "the rollouts have no masks" if n_bytes is None else "the rollouts have masks of another policy"
            issues.append(ConfigIssue("alg.policy.id", message))

        group_size = self.run.algorithm.collector.options.group_size
        stored_size = 1
        if episodes.group_ids is not None:
            stored_size = int(episodes.group_ids.unique(return_counts=True)[1][0])
        if group_size > 1 and stored_size != group_size:
            message = f"{group_size}, but the rollouts have {stored_size} responses to each prompt"
            issues.append(ConfigIssue("alg.args.group_size", message))
        if issues:
            raise ConfigError(issues, f"the replay of {self.plan.run_folder}")
