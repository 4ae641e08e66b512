"""Choice of the checkpoint from which a run resumes, and check of the changes to its config.

    --resume RUN_FOLDER                               the newest checkpoint of the run
    --resume RUN_FOLDER/checkpoints/iteration_00020   this checkpoint

The config is that of the run. `--set` may change the length of the run and what it reports. Changes to what the run
computes are refused, with a list of the differences.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from rl4lms_like.core.disk import with_home
from rl4lms_like.core.errors import CheckpointError, ConfigError, Mistake
from rl4lms_like.core.schema import at, join
from rl4lms_like.core.wording import shown
from rl4lms_like.tracking.run_folder import check_sizes, hold, to_json
from rl4lms_like.training.config.run_config import AnyConfig, parse_config
from rl4lms_like.training.config.yaml_file import apply_overrides
from rl4lms_like.training.resuming.checkpoints import (
    TrainingState,
    newest_checkpoint,
    older_intact,
    put_names_back,
    read_checkpoint,
)

MEMORY = (
    "alg.args.micro_batch_size",
    "alg.policy.args.gradient_checkpointing",
    "alg.training_args.gradient_checkpointing",
)
"""Keys that decide how much memory an update needs."""

MAY_CHANGE = (
    *MEMORY,
    "train_evaluation.n_iters",
    "train_evaluation.eval_every",
    "train_evaluation.save_every",
    "train_evaluation.save_model",
    "train_evaluation.keep_last",
    "train_evaluation.n_credit_episodes",
    "env.reward_workers",
    "env.reward_timeout",
    "alg.args.verbose",
    "alg.args.tensorboard_log",
    "alg.training_args.max_steps",
    "alg.training_args.num_train_epochs",
    "alg.training_args.save_total_limit",
    "doctor",
    "n_threads",
)
"""Keys that affect a run's length, speed, memory and reports, but not what it computes.

The name of a block stands for all of its keys."""

ROUNDING = (*MEMORY, "n_threads")
"""Keys that may change and affect the order of summation: results may then differ by rounding."""

_LENGTHS = {
    "train_evaluation.n_iters": ("alg.args.learning_rate_schedule", (None, "constant")),
    "alg.training_args.max_steps": ("alg.training_args.lr_scheduler_type", ("constant",)),
    "alg.training_args.num_train_epochs": ("alg.training_args.lr_scheduler_type", ("constant",)),
}
"""Key of a run's length -> key of its learning rate schedule, and the schedules independent of the length."""

Difference = tuple[str, Any, Any]
"""Path of a key, its value in the run, and its new value."""


@dataclass(frozen=True)
class Resumption:
    """Run to be resumed.

    Args:
        run_folder: folder of the run.
        checkpoint: checkpoint to resume from.
        config: config of the run with the overrides applied.
    """

    run_folder: Path
    checkpoint: Path
    config: AnyConfig


def hold_run(path: str | Path) -> FileLock:
    """Acquire the lock of the run that `--resume PATH` names. The caller holds it until the run ends.

    Raises:
        CheckpointError: there is no such run.
        RL4LMsLikeError: another process is writing to it.
    """
    run_folder, _ = _places(path)
    own_config(run_folder)
    lock = hold(run_folder)
    put_names_back(run_folder)
    return lock


def resumption(path: str | Path, overrides: Sequence[str] = ()) -> Resumption:
    """Resolve `--resume PATH` and check its overrides.

    Args:
        path: a run's folder, or one of its checkpoints.
        overrides: assignments such as `train_evaluation.n_iters=200`, applied in order.

    Raises:
        CheckpointError: there is no such run, or its checkpoint is damaged. The message names the newest older
            checkpoint that is intact.
        ConfigError: the overrides are invalid, or would change what the run computes.
    """
    run_folder, named = _places(path)
    mapping = own_config(run_folder)
    checkpoint = named or newest_checkpoint(run_folder)
    state = checked(checkpoint)
    changed, mistakes = apply_overrides(mapping, overrides)
    config = parse_config(changed, source=f"{run_folder}/config.json", mistakes=mistakes)
    refuse_edited(run_folder, state, mapping)
    source = f"the config to resume {run_folder}"
    before = parse_config(mapping, source=f"{run_folder}/config.json")
    _refuse_another_run(before.to_dict(), config.to_dict(), source)
    if mistake := behind_already(config.to_dict(), state, checkpoint):
        raise ConfigError([mistake], source)
    return Resumption(run_folder, checkpoint, config)


def checked(checkpoint: Path, way_out: str = "") -> TrainingState:
    """Read the state of a checkpoint after checking it and the run's files.

    Args:
        checkpoint: its folder.
        way_out: another solution, appended to the message after the older checkpoint.

    Raises:
        CheckpointError: the checkpoint or the run's files are damaged. The message names the newest older checkpoint
            that is intact.
    """
    try:
        return _sound(checkpoint)
    except CheckpointError as error:
        older = older_intact(checkpoint, _sound)
        offer = f"an older one is intact: --resume {shlex.quote(str(older))}" if older else "no older one is intact"
        raise CheckpointError(f"{error}\n{offer}{way_out}") from error


def refuse_edited(run_folder: Path, state: TrainingState, mapping: Mapping[str, Any]) -> None:
    """Compare a run's `config.json` with the config in its checkpoint.

    Raises:
        ConfigError: they differ; the message lists the differences.
    """
    before = parse_config(mapping, source=f"{run_folder}/config.json")
    source = f"{run_folder}: its config.json was changed"
    _refuse_another_run(state.numbers["config"], to_json(before.to_dict()), source)


def behind_already(config: Mapping[str, Any], state: TrainingState, checkpoint: Path) -> Mistake | None:
    """Return a mistake if the checkpoint has already passed the configured length of the run."""
    done = state.numbers["trainer"]
    counted = {
        "train_evaluation.n_iters": done["iteration"] + ("update" in state.numbers),
        "alg.training_args.max_steps": done["iteration"],
        "alg.training_args.num_train_epochs": done.get("passes", 0),
    }
    for path, behind in counted.items():
        asked = at(config, path)
        if isinstance(asked, int | float) and asked >= 0 and behind > asked:
            return Mistake(path, f"{asked}, but {checkpoint.name} has already completed {behind}")
    return None


def other_computations(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Difference]:
    """Return the differences of two configs that change what the run computes."""
    return [
        (path, old, new)
        for path, old, new in _differences(before, after)
        if not {path, path.partition(".")[0]} & {*MAY_CHANGE} or follows_length(path, after)
    ]


def rounding_notices(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return log lines about changed keys that affect rounding; see `ROUNDING`."""
    values = {path: (at(before, path), at(after, path)) for path in ROUNDING}
    return [
        f"{path} changes from {shown(old)} to {shown(new)}: from here on, results may differ from those of an "
        f"unchanged run, at first by rounding"
        for path, (old, new) in values.items()
        if (old or None) != (new or None)
    ]


def follows_length(path: str, config: Mapping[str, Any]) -> str | None:
    """Return the learning rate schedule if `path` is a length on which it depends; else None."""
    schedule, free = _LENGTHS.get(path, ("", ()))
    if path not in _LENGTHS or at(config, schedule) in free:
        return None
    return at(config, schedule) or "linear"  # transformers' own default


def _places(path: str | Path) -> tuple[Path, Path | None]:
    """Return the run's folder, and the checkpoint if the path names one."""
    path = Path(os.path.abspath(with_home(path)))
    if path.name == "checkpoints" and not (path / "config.json").exists():
        return path.parent, None
    if path.parent.name != "checkpoints" and path.is_symlink():
        path = path.resolve()
    return (path.parent.parent, path) if path.parent.name == "checkpoints" else (path, None)


def _sound(checkpoint: Path) -> TrainingState:
    """Read the checkpoint's state after checking that the run's files were not shortened since."""
    state = read_checkpoint(checkpoint)
    check_sizes(checkpoint.parent.parent, state.numbers.get("files"))
    if not isinstance(state.numbers.get("config"), dict):
        raise CheckpointError(f"{checkpoint}: it has no config of its run")
    return state


def own_config(run_folder: Path) -> dict[str, Any]:
    """Read a run's `config.json`.

    Raises:
        CheckpointError: the file is missing or cannot be read.
    """
    file = run_folder / "config.json"
    try:
        mapping = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{run_folder} is not a run folder: cannot read {file.name}: {error}") from error
    if not isinstance(mapping, dict):
        raise CheckpointError(f"{run_folder} is not a run folder: {file.name} contains {shown(mapping)}")
    return mapping


def _refuse_another_run(before: Mapping[str, Any], after: Mapping[str, Any], source: str) -> None:
    """Raise a `ConfigError` with every difference that changes what the run computes."""
    mistakes = []
    for path, old, new in other_computations(before, after):
        said = f"{shown(old)} in the run, {shown(new)} now; it affects results and cannot change on resuming"
        if schedule := follows_length(path, after):
            said = f"the learning rate is {schedule} over the run, so its length cannot change"
        mistakes.append(Mistake(path, said))
    if mistakes:
        raise ConfigError(mistakes, source)


def _differences(before: Any, after: Any, path: str = "") -> Iterator[Difference]:
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in dict.fromkeys([*before, *after]):
            yield from _differences(before.get(key), after.get(key), join(path, key))
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (old, new) in enumerate(zip(before, after, strict=True)):
            yield from _differences(old, new, join(path, index))
    elif before != after:
        yield path, before, after
