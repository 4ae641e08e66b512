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

from rl4lms_like.core.errors import CheckpointError, ConfigError, Mistake
from rl4lms_like.core.schema import at, join
from rl4lms_like.core.wording import shown
from rl4lms_like.tracking.run_folder import check_sizes, hold, to_json
from rl4lms_like.training.checkpoints import TrainingState, newest_checkpoint, older_intact, read_checkpoint
from rl4lms_like.training.config import RunConfig, is_supervised, parse_config
from rl4lms_like.training.overrides import apply_overrides

MAY_CHANGE = (
    "train_evaluation.n_iters",
    "train_evaluation.eval_every",
    "train_evaluation.save_every",
    "train_evaluation.save_model",
    "env.reward_workers",
    "alg.args.verbose",
    "alg.args.tensorboard_log",
    "n_threads",
)
"""Keys that decide how long a run goes on, how fast, and what it reports; not what it computes."""


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
    config: RunConfig


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
    mapping = _own_config(run_folder)
    if is_supervised(mapping):
        raise CheckpointError(f"{run_folder} is a supervised run; only reinforcement learning can go on so far")
    hold(run_folder).release()
    checkpoint = named or newest_checkpoint(run_folder)
    try:
        state = _sound(checkpoint)
    except CheckpointError as error:
        older = older_intact(checkpoint, _sound)
        offer = f"an older one is intact: --resume {shlex.quote(str(older))}" if older else "no older one is intact"
        raise CheckpointError(f"{error}\n{offer}") from error
    changed, mistakes = apply_overrides(mapping, overrides)
    config = parse_config(changed, source=f"{run_folder}/config.json", mistakes=mistakes)
    before = parse_config(mapping, source=f"{run_folder}/config.json")
    assert isinstance(config, RunConfig)
    _refuse_another_run(
        state.numbers["config"], to_json(before.to_dict()), f"{run_folder}: its config.json was changed"
    )
    _refuse_another_run(before.to_dict(), config.to_dict(), f"going on with {run_folder}")
    done, n_iters = state.numbers["trainer"]["iteration"], config.train_evaluation.n_iters
    if done > n_iters:
        mistake = Mistake("train_evaluation.n_iters", f"{n_iters}, and {checkpoint.name} has {done} behind it")
        raise ConfigError([mistake], f"going on with {run_folder}")
    return Resumption(run_folder, checkpoint, config)


def _places(path: str | Path) -> tuple[Path, Path | None]:
    """The run's folder, and the checkpoint in it that is named, if one is."""
    path = Path(os.path.abspath(Path(path).expanduser()))
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


def _own_config(run_folder: Path) -> dict[str, Any]:
    file = run_folder / "config.json"
    try:
        mapping = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{run_folder} is no run's folder: cannot read {file.name}: {error}") from error
    if not isinstance(mapping, dict):
        raise CheckpointError(f"{run_folder} is no run's folder: {file.name} holds {shown(mapping)}")
    return mapping


def _refuse_another_run(before: Mapping[str, Any], after: Mapping[str, Any], source: str) -> None:
    """Raises a `ConfigError` with every difference that may not be."""
    mistakes = [
        Mistake(path, f"{shown(old)} in the run, {shown(new)} now; what a run computes cannot change on the way")
        for path, old, new in _differences(before, after)
        if path not in MAY_CHANGE
    ]
    n_iters = "train_evaluation.n_iters"
    schedule = at(after, "alg.args.learning_rate_schedule")
    if at(before, n_iters) != at(after, n_iters) and schedule not in (None, "constant"):
        mistakes.append(Mistake(n_iters, f"the learning rate is {schedule} over the run: its length cannot change"))
    if mistakes:
        raise ConfigError(mistakes, source)


def _differences(before: Any, after: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in dict.fromkeys([*before, *after]):
            yield from _differences(before.get(key), after.get(key), join(path, key))
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (old, new) in enumerate(zip(before, after, strict=True)):
            yield from _differences(old, new, join(path, index))
    elif before != after:
        yield path, before, after
