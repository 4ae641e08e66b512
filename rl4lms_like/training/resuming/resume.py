"""Resuming of runs: which run and checkpoint, which changes to its config, and what is removed and logged.

    --resume RUN_FOLDER                               the newest checkpoint of the run
    --resume RUN_FOLDER/checkpoints/iteration_00020   this checkpoint
    --change alg.args.ent_coef=0.01                   from there on with another value, which the run folder lists

The config is that of the run. `--set` may change the length of the run and what it reports. Changes to what the run
computes are refused, with a list of the differences, unless the user accepts them (`accepted_changes`). The command
that started a run resumes it, too:

    first      finished                              skipped
    first_2    unfinished, another config            skipped
    first_3    unfinished, the same config, not locked, has a checkpoint             resumed
               the same, without a checkpoint, ended before its first iteration      restarted in this folder
    first_4    does not exist                        a new run, if no earlier folder matches

The lock is held from the first check of a folder to the end of the run, so two processes never resume the same run.
"""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from filelock import FileLock

from rl4lms_like.config.load import parse_config
from rl4lms_like.config.run_config import DEFAULT_LOGITS_BUDGET_MB, AnyConfig, RunConfig, SupervisedConfig
from rl4lms_like.config.yaml_file import apply_overrides, apply_values
from rl4lms_like.policies import POLICIES, speedups
from rl4lms_like.system.disk import with_home
from rl4lms_like.system.errors import CheckpointError, ConfigError, ConfigIssue, OutOfMemoryError, RL4LMsLikeError
from rl4lms_like.system.import_paths import code_options, trust_option
from rl4lms_like.system.ranks import is_distributed
from rl4lms_like.system.regular_files import read_json
from rl4lms_like.system.schema import at, join
from rl4lms_like.system.secrets import masked
from rl4lms_like.system.wording import shown
from rl4lms_like.tracking.run_folder import (
    CONFIG_FILE,
    FINISHED_FILE,
    check_sizes,
    hold,
    is_untrained,
    numbered,
    to_json,
    try_hold,
)
from rl4lms_like.training.resuming.accepted_changes import (
    AcceptedChange,
    changes_until,
    is_covered,
    is_original,
    is_recorded,
    read_changes,
)
from rl4lms_like.training.resuming.checkpoints import (
    FOLDER,
    INTERRUPTED,
    MANIFEST,
    TrainingState,
    delete_later,
    ended_early,
    newest_checkpoint,
    older_intact,
    put_names_back,
    read_checkpoint,
    skipped,
    write_folder,
)

if TYPE_CHECKING:
    from rl4lms_like.tracking.base import Tracker

logger = logging.getLogger(__name__)

ConfigT = TypeVar("ConfigT", bound=AnyConfig)

MEMORY = (
    "alg.args.micro_batch_size",
    "alg.policy.args.gradient_checkpointing",
    "alg.training_args.gradient_checkpointing",
)
"""Keys that decide how much memory an update needs."""

TEMPLATE_DATE = "tokenizer.template_date"
"""Key that a new run sets to the day of its start."""

POLICY_ARGS = "alg.policy.args"
SPEEDUPS = speedups.PATH
"""Block in which a new run stores all speedups."""

LOGITS_BUDGET = "alg.logits_budget_mb"
"""Key of a supervised run that runs of older versions do not have."""

_ENGINE = f"{POLICY_ARGS}.engine.args"
MAY_CHANGE = (
    *MEMORY,
    "train_evaluation.n_iters",
    "train_evaluation.eval_every",
    "train_evaluation.save_every",
    "train_evaluation.save_model",
    "train_evaluation.keep_last",
    "train_evaluation.early_stopping",
    "train_evaluation.n_credit_episodes",
    "train_evaluation.save_rollouts",
    "train_evaluation.accept_edited_rollouts",
    "train_evaluation.callbacks",
    "env.reward_workers",
    "env.reward_timeout",
    f"{_ENGINE}.url",
    f"{_ENGINE}.weights_dir",
    f"{_ENGINE}.sync",
    f"{_ENGINE}.n_workers",
    f"{_ENGINE}.timeout",
    f"{_ENGINE}.retries",
    f"{_ENGINE}.backoff",
    f"{_ENGINE}.max_gap",
    f"{_ENGINE}.sleep",
    f"{_ENGINE}.max_connections",
    f"{_ENGINE}.headers_from_env",
    f"{SPEEDUPS}.keep_freed_memory",
    f"{POLICY_ARGS}.offload",
    f"{POLICY_ARGS}.activation_offload",
    "alg.activation_offload",
    "alg.args.verbose",
    "alg.args.tensorboard_log",
    "alg.training_args.max_steps",
    "alg.training_args.num_train_epochs",
    "alg.training_args.save_total_limit",
    "doctor",
    "n_threads",
    "distributed",
)
"""Keys that affect a run's length, speed, memory and reports, but not what it computes.

The name of a block stands for all of its keys."""

ROUNDING = (*MEMORY, "n_threads", "distributed.strategy")
"""Keys that may change and affect the order of summation: results may then differ by rounding."""

_LENGTHS = {
    "train_evaluation.n_iters": ("alg.args.learning_rate_schedule", (None, "constant")),
    "alg.training_args.max_steps": ("alg.training_args.lr_scheduler_type", ("constant",)),
    "alg.training_args.num_train_epochs": ("alg.training_args.lr_scheduler_type", ("constant",)),
}
"""Key of a run's length -> key of its learning rate schedule, and the schedules independent of the length."""

N_SHOWN = 3
"""Largest number of differences in the reason why a run does not match a command."""


@dataclass(frozen=True)
class Resumption:
    """Run to be resumed.

    Args:
        run_folder: the run's folder.
        checkpoint: where it resumes; None = the run ended before its first iteration and is restarted.
        config: the run's config, with the overrides applied.
        lock: of the folder, if it is already acquired.
        changes: what has changed since the run began and affects results, including what changes now.
    """

    run_folder: Path
    checkpoint: Path | None
    config: AnyConfig
    lock: FileLock | None = None
    changes: tuple[AcceptedChange, ...] = ()


@dataclass(frozen=True)
class Difference:
    """Key in which two configs compute something different.

    Args:
        path: dotted path of the key.
        old: value in the run, as JSON data.
        new: value in the other config.
        schedule: learning rate schedule over the run, if the key is a length that it follows.
    """

    path: str
    old: Any
    new: Any
    schedule: str | None = None


def hold_run(path: str | Path) -> FileLock:
    """Acquire the lock of the run that `--resume PATH` names. The caller holds it until the run ends.

    Raises:
        CheckpointError: there is no such run.
        RL4LMsLikeError: another process is writing to it.
    """
    run_folder, _ = _run_and_checkpoint(path)
    own_config(run_folder)
    lock = hold(run_folder)
    put_names_back(run_folder)
    return lock


def resumption(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    values: Mapping[str, Any] | None = None,
    accepted: Collection[str] = (),
) -> Resumption:
    """Resolve `--resume PATH`, the folder of a run or of one of its checkpoints, and check its overrides.

    Args:
        path: the folder.
        overrides: `train_evaluation.n_iters=200`, applied in order.
        values: config path -> value that replaces that of the run, such as a function of this process.
        accepted: config paths, of keys or blocks, whose values may differ from those of the run.

    Raises:
        CheckpointError: there is no such run, or its checkpoint is damaged. The message names the newest older
            checkpoint that is intact.
        ConfigError: the overrides are invalid, or would change what the run computes.
    """
    run_folder, named = _run_and_checkpoint(path)
    mapping = own_config(run_folder)
    checkpoint = named or newest_checkpoint(run_folder)
    state = _checked(checkpoint)

    changed, issues = apply_overrides(mapping, overrides)
    changed, value_issues = apply_values(changed, values or {}, "the value of")
    config = parse_config(changed, source=f"{run_folder}/{CONFIG_FILE}", issues=issues + value_issues)

    # Two comparisons: the file with the checkpoint, since it may have been edited by hand; the overrides with the file.
    recorded = read_changes(run_folder)
    before = _refuse_edited(run_folder, state, mapping, recorded)
    source = f"the config to resume {run_folder}"
    differences = other_computations(to_json(before.to_dict()), to_json(masked(config.to_dict())))
    refused = [difference for difference in differences if not is_covered(difference.path, accepted)]
    _refuse(refused, source, hint="; to change it from here on: --change {path}=VALUE instead of --set")
    if issue := _too_short(config, state, checkpoint):
        raise ConfigError([issue], source)
    return Resumption(run_folder, checkpoint, config, changes=_changes_at(state, config, recorded))


def find_unfinished(config: AnyConfig, first: Path) -> tuple[Resumption | None, list[str]]:
    """Find the first run of this config in `first`, `first_2` ... that can be resumed.

    Returns:
        The first matching run, with its lock, and for each run before it the reason why it does not match.

    Raises:
        CheckpointError: as for `resumption`.
        ConfigError: the `config.json` of the matching run was edited by hand.
    """
    reasons: list[str] = []
    for folder in numbered(first):
        if not (folder / CONFIG_FILE).is_file():
            break
        reason = _unlike(config, folder)  # needs no lock, so a run that another process writes to is read only
        if reason is None:
            match = _locked(config, folder)
            if isinstance(match, Resumption):
                return match, reasons
            reason = match
        reasons.append(f"{folder}: {reason}")
    return None, reasons


def newest_alike(config: AnyConfig, first: Path) -> Path | None:
    """Return the last of the folders `first`, `first_2` ... with a run of this config, finished or not."""
    newest = None
    for folder in numbered(first):
        if not (folder / CONFIG_FILE).is_file():
            break
        if _difference(config, folder) is None:
            newest = folder
    return newest


def unfinished_others(config: AnyConfig, first: Path, until: Path) -> Iterator[tuple[Path, list[Difference]]]:
    """Yield the unfinished runs of other configs in `first`, `first_2` ... before a folder, with the differences."""
    for folder in numbered(first):
        if folder == until or not (folder / CONFIG_FILE).is_file():
            return
        if (folder / FINISHED_FILE).exists():
            continue
        with suppress(CheckpointError, ConfigError):
            if differences := differences_to(config, folder):
                yield folder, differences


def _unlike(config: AnyConfig, folder: Path) -> str | None:
    """Return why the run in a folder does not match, or None. This check needs no lock."""
    if (folder / FINISHED_FILE).exists():
        return "it is finished"
    return _difference(config, folder)


def _difference(config: AnyConfig, folder: Path) -> str | None:
    """Return why the config of the run in a folder does not match, or None."""
    try:
        differences = differences_to(config, folder)
    except (CheckpointError, ConfigError):
        return f"its {CONFIG_FILE} cannot be read"
    return f"its config differs: {in_short(differences)}" if differences else None


def differences_to(config: AnyConfig, folder: Path) -> list[Difference]:
    """Return where a config computes something else than the run in a folder, also before its accepted changes.

    Raises:
        CheckpointError: this is not the folder of a run.
        ConfigError: the config in the folder has errors.
    """
    before = parse_config(own_config(folder), source=str(folder / CONFIG_FILE))
    recorded = read_changes(folder)

    # The stored config has no secrets: those of the command's config are masked in the same way.
    config = _with_start_of(folder, config)
    differences = other_computations(to_json(before.to_dict()), to_json(masked(config.to_dict())))

    # The command that started a run has the values that were changed later; it resumes the run with the new ones.
    return [change for change in differences if not is_original(change.path, change.new, recorded)]


def in_short(differences: Sequence[Difference]) -> str:
    """Return the first differences of a config to that of a run as one line."""
    messages = []
    for difference in differences[:N_SHOWN]:
        message = f"{difference.path} is {shown(difference.old)} there, {shown(difference.new)} here"
        if difference.schedule is not None:
            message += f" ({_follows_length(difference.schedule)})"
        messages.append(message)
    if len(differences) > N_SHOWN:
        messages.append(f"and {len(differences) - N_SHOWN} more")
    return "; ".join(messages)


def _locked(config: AnyConfig, folder: Path) -> Resumption | str:
    """Lock the folder and return the run in it; or release the lock, and return why the run cannot be resumed."""
    lock = try_hold(folder)
    if lock is None:
        return "another process is writing to it"
    with ExitStack() as stack:
        stack.callback(lock.release)
        match = _resumable(config, folder, lock)
        if isinstance(match, Resumption):
            stack.pop_all()  # the caller holds the lock from here
        return match


def _first_checkpoint(config: AnyConfig) -> str:
    """Return when a run writes its first checkpoint, for users whose run was killed before."""
    if isinstance(config, RunConfig) and config.train_evaluation.save_model:
        return f"; the first one is written after {config.train_evaluation.save_every} iterations (save_every)"
    return ""


def _resumable(config: AnyConfig, folder: Path, lock: FileLock) -> Resumption | str:
    """Return the run in a locked folder, or why it cannot be resumed."""
    if (folder / FINISHED_FILE).exists():  # finished since the check without the lock
        return "it is finished"
    put_names_back(folder)
    try:
        checkpoint = newest_checkpoint(folder)
    except CheckpointError:
        if is_untrained(folder):
            return Resumption(folder, None, _with_start_of(folder, config), lock)
        return f"it has no checkpoint to resume from{_first_checkpoint(config)}{skipped(folder / FOLDER)}"

    # A damaged checkpoint or an edited config is an error, not another reason to start a new run: the user decides.
    state = _checked(checkpoint, "; --new starts a new run")
    recorded = read_changes(folder)
    _refuse_edited(folder, state, own_config(folder), recorded)
    config = _with_changes(_with_start_of(folder, config), recorded)
    if issue := _too_short(config, state, checkpoint):
        return f"{issue.path} is {issue.message}"
    return Resumption(folder, checkpoint, config, lock, _changes_at(state, config, recorded))


def _with_changes(config: AnyConfig, recorded: Sequence[AcceptedChange]) -> AnyConfig:
    """Return the config of a run's first command with the values that were changed since."""
    blocks = to_json(masked(config.to_dict()))
    values = {}
    for change in recorded:
        if is_original(change.path, at(blocks, change.path), recorded):
            values[change.path] = change.new  # of several changes the last
    if not values:
        return config
    changed, _ = apply_values(config.to_dict(), values, "")
    return parse_config(changed, source="the config with the accepted changes")


def _changes_at(
    state: TrainingState, config: AnyConfig, recorded: Sequence[AcceptedChange]
) -> tuple[AcceptedChange, ...]:
    """Return the changes of a run that resumes from a checkpoint with this config: earlier ones, and those of now."""
    n_done = state.numbers["trainer"]["iteration"]
    before = state.numbers["config"]
    changes = changes_until(n_done, before, recorded)
    differences = other_computations(before, to_json(masked(config.to_dict())))
    return (*changes, *(AcceptedChange(n_done, change.path, change.old, change.new) for change in differences))


def as_started(config: ConfigT, day: str) -> ConfigT:
    """Return the config of a new run with what its `config.json` keeps of its start.

    These are the day that chat templates write as today, and the speedups, whose defaults a later version may change.
    """
    if config.tokenizer.template_date is None:
        config = with_template_date(config, day)
    if isinstance(config, RunConfig) and _has_speedups(config.alg.policy.id):
        config = with_speedups(config, speedups.all_speedups(config.alg.policy.args.get(speedups.KEY)))
    return config


def _with_start_of(folder: Path, config: ConfigT) -> ConfigT:
    """Return the config with what the run in a folder has of its start, where the config does not set it itself.

    These are the day, the speedups, and for a supervised run of a version without a budget of logits whole logits.
    """
    stored = own_config(folder)
    if config.tokenizer.template_date is None:
        config = with_template_date(config, at(stored, TEMPLATE_DATE))

    # The block of a command may set some of the speedups; one of them may change.
    stored_speedups = at(stored, SPEEDUPS)
    if isinstance(config, RunConfig) and stored_speedups is not None:
        chosen = config.alg.policy.args.get(speedups.KEY) or {}
        config = with_speedups(config, {**stored_speedups, **chosen})

    # A command has the default if it does not name the key. The run may have been changed since to have a budget.
    if isinstance(config, SupervisedConfig):
        is_default = config.alg.logits_budget_mb == DEFAULT_LOGITS_BUDGET_MB
        began_with_whole = at(stored, LOGITS_BUDGET) is None or is_original(LOGITS_BUDGET, None, read_changes(folder))
        if is_default and began_with_whole:
            config = replace(config, alg=replace(config.alg, logits_budget_mb=None))
    return config


def with_speedups(config: ConfigT, block: Mapping[str, bool]) -> ConfigT:
    """Return the config of a run with this `speedups` block of the policy."""
    assert isinstance(config, RunConfig)
    policy = replace(config.alg.policy, args={**config.alg.policy.args, speedups.KEY: dict(block)})
    return replace(config, alg=replace(config.alg, policy=policy))


def with_template_date(config: ConfigT, day: str | None) -> ConfigT:
    """Return the config with the day that chat templates write as today; without a template it is unchanged."""
    if not config.tokenizer.chat_template:
        return config
    return replace(config, tokenizer=replace(config.tokenizer, template_date=day))


def save_interrupted(tracker: Tracker, save: Callable[[Path], Path], n_done: int, unit: str) -> None:
    """Save the model to `checkpoints/interrupted_<n_done>`, unless that folder holds a checkpoint to resume from.

    `n_done` counts iterations or steps, as `unit` says.
    """
    folder = tracker.checkpoint_base_path / INTERRUPTED.format(n_done)
    if not (folder / MANIFEST).is_file():  # else the run ended again before a newer state was saved
        try_to_save(tracker, f"{n_done} {unit}", "current model", lambda: write_folder(folder, save))


def try_to_save(tracker: Tracker, done: str, what: str, save: Callable[[], Path]) -> None:
    """Save what an interrupted run has; a failure is only logged, to not hide the error that ended the run."""
    try:
        folder = save()
    except Exception as error:
        logger.warning("interrupted after %s; %s could not be saved: %s", done, what, error)
    else:
        tracker.log_info(f"interrupted after {done}; {what}: {folder}")


def log_resume_hint(tracker: Tracker, error: BaseException | None = None) -> None:
    """Log the command that resumes a run, if there is one. After running out of memory, add options that need less."""
    try:
        checkpoint = newest_checkpoint(tracker.run_path)
    except CheckpointError:
        return

    # A command that can be pasted into the shell that started the run.
    where = "where it was interrupted" if ended_early(checkpoint) else f"after {checkpoint.name}"
    program = "torchrun ... -m rl4lms_like" if is_distributed() else "rl4lms-like"
    tracker.log_info(
        f"to resume {where}: {program} train --resume {shlex.quote(str(tracker.run_path))}{code_options()}"
        f"{trust_option(tracker.run_config)}"
    )

    # Only the keys that may change on resuming, of blocks that the config has.
    if isinstance(error, OutOfMemoryError):
        options = []
        for key in MEMORY:
            block = key.rpartition(".")[0]
            if at(tracker.run_config, block) is not None:
                options.append(f"--set {key}=...")
        tracker.log_info(f"to use less memory: add {' or '.join(options)}; other keys that save memory need a new run")


def remove_later(
    tracker: Tracker, checkpoint: Path, state: TrainingState, where: str, *, keep: int | None = None
) -> None:
    """Remove the logs and checkpoints later than the checkpoint from which a run resumes, and log that it resumes.

    The message says `where`, "in iteration 3"; `keep` is that of `write_checkpoint`.

    Raises:
        CheckpointError: a file of the run is shorter than at the checkpoint, or a later checkpoint cannot be removed.
    """
    base = tracker.checkpoint_base_path
    n_done = state.numbers["trainer"]["iteration"]
    sizes = state.numbers["files"]
    check_sizes(tracker.run_path, sizes)
    others = skipped(base, n_done)
    delete_later(base, n_done, keep, interrupted=ended_early(checkpoint))
    tracker.cut_files(sizes)  # last, because the later checkpoints removed above refer to the lines

    tracker.log_info(f"resuming {where}, from {checkpoint}{others}")
    for notice in rounding_notices(state.numbers["config"], tracker.run_config):
        tracker.log_info(notice)


def _checked(checkpoint: Path, hint: str = "") -> TrainingState:
    """Read a checkpoint after checking it and the run's files; an error names the newest older one that is intact."""
    try:
        return _sound(checkpoint)
    except CheckpointError as error:
        older = older_intact(checkpoint, _sound)
        offer = f"an older one is intact: --resume {shlex.quote(str(older))}" if older else "no older one is intact"
        raise CheckpointError(f"{error}\n{offer}{hint}") from error


def _too_short(config: AnyConfig, state: TrainingState, checkpoint: Path) -> ConfigIssue | None:
    """Return an error if the checkpoint has already passed the configured length of the run."""
    progress = state.numbers["trainer"]
    n_done = {
        "train_evaluation.n_iters": progress["iteration"] + ("update" in state.numbers),
        "alg.training_args.max_steps": progress["iteration"],
        "alg.training_args.num_train_epochs": progress.get("passes", 0),
    }
    for path, done in n_done.items():
        length = at(config.to_dict(), path)
        if isinstance(length, int | float) and length >= 0 and done > length:  # max_steps -1 is no limit
            return ConfigIssue(path, f"{length}, but {checkpoint.name} has already completed {done}")
    return None


def other_computations(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Difference]:
    """Return the differences of two configs, as JSON data, that change what the run computes."""
    differences = []
    for path, old, new in _differences(before, after):
        # A command does not name what the run has stored at its start, and runs of older versions have not stored it.
        is_of_start = path in (TEMPLATE_DATE, SPEEDUPS) or path.startswith(f"{SPEEDUPS}.")
        if is_of_start and None in (old, new):
            continue

        # A length may change, unless the learning rate follows it.
        schedule = None
        if path in _LENGTHS:
            key, independent = _LENGTHS[path]
            schedule = at(after, key)
            if schedule in independent:
                schedule = None
            elif schedule is None:
                schedule = "linear"  # transformers' own default

        may_change = any(path == key or path.startswith(f"{key}.") for key in MAY_CHANGE)
        if schedule is not None or not may_change:
            differences.append(Difference(path, old, new, schedule))
    return differences


def _follows_length(schedule: str) -> str:
    return f"the learning rate is {schedule} over the run"


def rounding_notices(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return log lines about changed keys that affect rounding; see `ROUNDING`."""
    text = "from here on, results may differ from those of an unchanged run, at first by rounding"
    notices = []
    for path in ROUNDING:
        old = at(before, path)
        new = at(after, path)
        if (old or None) != (new or None):  # false, 0 and null are the same default
            notices.append(f"{path} changes from {shown(old)} to {shown(new)}: {text}")
    return notices


def _run_and_checkpoint(path: str | Path) -> tuple[Path, Path | None]:
    """Return the run's folder, and the checkpoint if the path names one."""
    path = Path(os.path.abspath(with_home(path)))
    if path.name == "checkpoints" and not (path / "config.json").exists():
        return path.parent, None

    # A link to a checkpoint is followed, but not a link at the place of one: its run is where the link is.
    if path.parent.name != "checkpoints" and path.is_symlink():
        path = path.resolve()
    if path.parent.name == "checkpoints":
        return path.parent.parent, path
    return path, None


def _sound(checkpoint: Path) -> TrainingState:
    """Read the checkpoint's state after checking that the run's files were not shortened since."""
    state = read_checkpoint(checkpoint)
    check_sizes(checkpoint.parent.parent, state.numbers.get("files"))
    if not isinstance(state.numbers.get("config"), dict):
        raise CheckpointError(f"{checkpoint}: it has no config of its run")
    return state


def own_config(run_folder: Path) -> dict[str, Any]:
    """Read a run's `config.json`; raise a `CheckpointError` if there is none.

    A run of a version without speedups has all of them turned off. A supervised run of a version without a budget of
    logits computed whole ones.
    """
    file = run_folder / CONFIG_FILE
    try:
        mapping = read_json(file)
        if not isinstance(mapping, dict):
            raise ValueError(f"it contains {shown(mapping)}")
    except (OSError, ValueError, RL4LMsLikeError) as error:
        raise CheckpointError(f"{run_folder} is not a run folder: cannot read {file.name}: {error}") from error

    # The `config.json` of a model has no `alg`.
    policy_args = at(mapping, POLICY_ARGS)
    if isinstance(policy_args, dict) and _has_speedups(at(mapping, "alg.policy.id")):
        policy_args[speedups.KEY] = speedups.stored_speedups(policy_args.get(speedups.KEY))
    if at(mapping, "alg.id") == "supervised":
        mapping["alg"].setdefault("logits_budget_mb", None)
    return mapping


def _has_speedups(policy_id: Any) -> bool:
    """Return whether a policy has the argument `speedups`; False for an id that does not exist."""
    if not isinstance(policy_id, str):
        return False
    try:
        return speedups.has_speedups(POLICIES.arguments_class(policy_id))
    except ConfigError:  # reported by `parse_config`, together with all other errors
        return False


def _refuse_edited(
    run_folder: Path, state: TrainingState, mapping: Mapping[str, Any], recorded: Sequence[AcceptedChange]
) -> AnyConfig:
    """Return a run's parsed `config.json`; raise a `ConfigError` if it differs from the config in the checkpoint.

    Changes that the run has recorded since the checkpoint are no such difference.
    """
    before = parse_config(mapping, source=f"{run_folder}/{CONFIG_FILE}")
    source = f"{run_folder}: its {CONFIG_FILE} was changed"
    differences = other_computations(state.numbers["config"], to_json(before.to_dict()))
    _refuse([change for change in differences if not is_recorded(change.path, change.new, recorded)], source)
    return before


def _refuse(differences: Sequence[Difference], source: str, hint: str = "") -> None:
    """Raise a `ConfigError` with every difference that changes what the run computes.

    Each message ends with the hint, in which `{path}` is the difference's.
    """
    issues = []
    for difference in differences:
        if difference.schedule is not None:
            message = f"{_follows_length(difference.schedule)}, so its length cannot change"
        else:
            values = f"{shown(difference.old)} in the run, {shown(difference.new)} now"
            message = f"{values}; it affects results and cannot change on resuming"
        issues.append(ConfigIssue(difference.path, message + hint.format(path=difference.path)))
    if issues:
        raise ConfigError(issues, source)


def _differences(before: Any, after: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Iterate over the keys whose values differ: path, old value, new value."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in dict.fromkeys([*before, *after]):
            yield from _differences(before.get(key), after.get(key), join(path, key))
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (old, new) in enumerate(zip(before, after, strict=True)):
            yield from _differences(old, new, join(path, index))
    elif before != after:
        yield path, before, after
