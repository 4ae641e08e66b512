"""Which checkpoint a run goes on from, and what of its config may be another one's.

    --resume RUN_FOLDER                               its newest checkpoint
    --resume RUN_FOLDER/checkpoints/iteration_00020   that one

The config is the run's own. `--set` may change how long it goes on and how it reports; what would make it another run
is refused, with the differences.
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
from rl4lms_like.training.config.overrides import apply_overrides
from rl4lms_like.training.config.run_config import AnyConfig, parse_config
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
"""Keys that decide how long a run goes on, how fast, in how much memory, and what it reports; not what it computes.

A block's name stands for all of its keys."""

ROUNDING = (*MEMORY, "n_threads")
"""Those that may change and decide how sums are cut: from there on the last digits may differ."""

_LENGTHS = {
    "train_evaluation.n_iters": ("alg.args.learning_rate_schedule", (None, "constant")),
    "alg.training_args.max_steps": ("alg.training_args.lr_scheduler_type", ("constant",)),
    "alg.training_args.num_train_epochs": ("alg.training_args.lr_scheduler_type", ("constant",)),
}
"""Length of a run -> what its learning rate follows, and which of these do not look at the length."""

Difference = tuple[str, Any, Any]
"""Path of a key, its value in the run, its value now."""


@dataclass(frozen=True)
class Resumption:
    """A run that goes on.

    Args:
        run_folder: its folder.
        checkpoint: what it goes on from.
        config: its own, with what was changed of it.
    """

    run_folder: Path
    checkpoint: Path
    config: AnyConfig


def hold_run(path: str | Path) -> FileLock:
    """The lock of the run that `--resume PATH` means, held from before the first look to the end of the run.

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
    """What `--resume PATH` means.

    Args:
        path: a run's folder, or one of its checkpoints.
        overrides: `train_evaluation.n_iters=200`, in order.

    Raises:
        CheckpointError: there is no such run, or its checkpoint is damaged; then it says which older one is intact.
        ConfigError: the overrides have mistakes, or would make it another run.
    """
    run_folder, named = _places(path)
    mapping = own_config(run_folder)
    checkpoint = named or newest_checkpoint(run_folder)
    state = checked(checkpoint)
    changed, mistakes = apply_overrides(mapping, overrides)
    config = parse_config(changed, source=f"{run_folder}/config.json", mistakes=mistakes)
    refuse_edited(run_folder, state, mapping)
    source = f"going on with {run_folder}"
    before = parse_config(mapping, source=f"{run_folder}/config.json")
    _refuse_another_run(before.to_dict(), config.to_dict(), source)
    if mistake := behind_already(config.to_dict(), state, checkpoint):
        raise ConfigError([mistake], source)
    return Resumption(run_folder, checkpoint, config)


def checked(checkpoint: Path, way_out: str = "") -> TrainingState:
    """The state of a checkpoint that can be gone on from.

    Args:
        checkpoint: its folder.
        way_out: what else could be done, put behind the older checkpoint that is offered.

    Raises:
        CheckpointError: it is damaged, or the run's files are; says which older one is intact.
    """
    try:
        return _sound(checkpoint)
    except CheckpointError as error:
        older = older_intact(checkpoint, _sound)
        offer = f"an older one is intact: --resume {shlex.quote(str(older))}" if older else "no older one is intact"
        raise CheckpointError(f"{error}\n{offer}{way_out}") from error


def refuse_edited(run_folder: Path, state: TrainingState, mapping: Mapping[str, Any]) -> None:
    """Holds a run's `config.json` against the config in its checkpoint.

    Raises:
        ConfigError: with the differences.
    """
    before = parse_config(mapping, source=f"{run_folder}/config.json")
    source = f"{run_folder}: its config.json was changed"
    _refuse_another_run(state.numbers["config"], to_json(before.to_dict()), source)


def behind_already(config: Mapping[str, Any], state: TrainingState, checkpoint: Path) -> Mistake | None:
    """What is wrong with a length that the checkpoint has passed already."""
    done = state.numbers["trainer"]
    counted = {
        "train_evaluation.n_iters": done["iteration"] + ("update" in state.numbers),
        "alg.training_args.max_steps": done["iteration"],
        "alg.training_args.num_train_epochs": done.get("passes", 0),
    }
    for path, behind in counted.items():
        asked = at(config, path)
        if isinstance(asked, int | float) and asked >= 0 and behind > asked:
            return Mistake(path, f"{asked}, and {checkpoint.name} has {behind} behind it")
    return None


def other_computations(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Difference]:
    """The differences of two configs that make them two runs."""
    return [
        (path, old, new)
        for path, old, new in _differences(before, after)
        if not {path, path.partition(".")[0]} & {*MAY_CHANGE} or follows_length(path, after)
    ]


def rounding_notices(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """What the reader of a run should know whose config was another one up to here; see `ROUNDING`."""
    values = {path: (at(before, path), at(after, path)) for path in ROUNDING}
    return [
        f"{path} is {shown(new)} from here on, it was {shown(old)}: from here on numbers may differ, by rounding at "
        f"first, from those of a run that nothing changed"
        for path, (old, new) in values.items()
        if (old or None) != (new or None)
    ]


def follows_length(path: str, config: Mapping[str, Any]) -> str | None:
    """The learning rate's schedule, if it depends on the length of the run and the path names that; else None."""
    schedule, free = _LENGTHS.get(path, ("", ()))
    if path not in _LENGTHS or at(config, schedule) in free:
        return None
    return at(config, schedule) or "linear"  # transformers' own default


def _places(path: str | Path) -> tuple[Path, Path | None]:
    """The run's folder, and the checkpoint in it that is named, if one is."""
    path = Path(os.path.abspath(with_home(path)))
    if path.name == "checkpoints" and not (path / "config.json").exists():
        return path.parent, None
    if path.parent.name != "checkpoints" and path.is_symlink():
        path = path.resolve()
    return (path.parent.parent, path) if path.parent.name == "checkpoints" else (path, None)


def _sound(checkpoint: Path) -> TrainingState:
    """The checkpoint's state, if the run's files still have what they had then."""
    state = read_checkpoint(checkpoint)
    check_sizes(checkpoint.parent.parent, state.numbers.get("files"))
    if not isinstance(state.numbers.get("config"), dict):
        raise CheckpointError(f"{checkpoint}: it does not say which config it belongs to")
    return state


def own_config(run_folder: Path) -> dict[str, Any]:
    """What a run's `config.json` says.

    Raises:
        CheckpointError: there is none that can be read.
    """
    file = run_folder / "config.json"
    try:
        mapping = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{run_folder} is no run's folder: cannot read {file.name}: {error}") from error
    if not isinstance(mapping, dict):
        raise CheckpointError(f"{run_folder} is no run's folder: {file.name} holds {shown(mapping)}")
    return mapping


def _refuse_another_run(before: Mapping[str, Any], after: Mapping[str, Any], source: str) -> None:
    """Raises a `ConfigError` with every difference that may not be."""
    mistakes = []
    for path, old, new in other_computations(before, after):
        said = f"{shown(old)} in the run, {shown(new)} now; what a run computes cannot change on the way"
        if schedule := follows_length(path, after):
            said = f"the learning rate is {schedule} over the run: its length cannot change"
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
