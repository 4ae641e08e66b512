"""Train a run from its config to its results folder: used by `Run` and by the commands.

    train_config    config ─ an unfinished run of it? ─────────────┐
    resume          run folder ─ its config, its newest checkpoint ┴─ _train ─ objects, folder, trainer, report

    deterministic: true     operations without a deterministic implementation are an error; no cuDNN benchmarking
    environment.json        software versions, processor and threads of a run; one entry for each change

On the CPUs of one machine, runs are bitwise reproducible without the key too; docs/reproducibility.md lists the limits.
"""

from __future__ import annotations

import logging
import os
import platform
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl4lms_like.config.load import load_config
from rl4lms_like.config.run_config import AnyConfig, RunConfig, SupervisedConfig
from rl4lms_like.system.closing import closed_after
from rl4lms_like.system.errors import ConfigError, ConfigIssue, RL4LMsLikeError, installed_version
from rl4lms_like.system.ranks import Ranks, is_main_process, process_ranks
from rl4lms_like.tracking.run_folder import experiment_folder

if TYPE_CHECKING:
    from filelock import FileLock

    from rl4lms_like.tracking.base import Tracker
    from rl4lms_like.training.resuming.resume import Resumption

logger = logging.getLogger(__name__)

PACKAGES = ("rl4lms-like", "torch", "transformers", "tokenizers", "stable-baselines3", "numpy", "peft", "datasets")
"""Packages whose versions may change a run's numbers."""

_CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
_DETERMINISTIC_WORKSPACES = (":4096:8", ":16:8")
"""cuBLAS reads this variable when it starts; either value makes its results deterministic."""


@dataclass(frozen=True)
class Destinations:
    """Folder of a run, `<base>/<project_name>/<experiment_name>`, and where else its numbers go; see `Tracker`."""

    base: str | Path
    project_name: str
    experiment_name: str
    entity_name: str | None = None
    log_to_wandb: bool = False
    log_to_trackio: bool = False
    quiet: bool = False
    tensorboard_log: str | Path | None = None
    wandb_project: str | None = None


def train_config(
    config: AnyConfig,
    *,
    project_name: str = "rl4lm_exps",
    experiment_name: str = "rl4lm_experiment",
    entity_name: str | None = None,
    base_path_to_store_results: str | Path = ".",
    log_to_wandb: bool = False,
    log_to_trackio: bool = False,
    quiet: bool = False,
    tensorboard_log: str | Path | None = None,
    wandb_project: str | None = None,
    new: bool = False,
    ranks: Ranks | None = None,
    on_folder: Callable[[Path], None] | None = None,
    keep_last_state: bool = False,
) -> Path:
    """Train a model as configured in `config`; after an interruption, the same call resumes the run.

    Args:
        config: config of the run.
        project_name: second folder of the results.
        experiment_name: third folder; if it holds another run, or a finished one, `<experiment_name>_2` is used.
        entity_name: of Weights & Biases.
        base_path_to_store_results: first folder.
        log_to_wandb: log to Weights & Biases.
        log_to_trackio: log to Trackio.
        quiet: print only warnings.
        tensorboard_log: folder for TensorBoard's files.
        wandb_project: project of Weights & Biases; default: `project_name`.
        new: start a new run in any case.
        ranks: the processes that train together, if the caller has connected them already.
        on_folder: called with the run folder once it is known, before the training.
        keep_last_state: keep the state of an RL run after its last iteration, to continue it to more iterations.

    Returns:
        The run folder.

    Raises:
        RL4LMsLikeError: the run failed; subclasses name the cause. Files written before remain.
    """
    from rl4lms_like.on_policy.replay import with_replay
    from rl4lms_like.training.resuming.resume import as_started, find_unfinished

    config = with_replay(config)
    base = os.path.abspath(base_path_to_store_results)  # a component may change the current folder
    folder = experiment_folder(base, project_name, experiment_name)

    with ExitStack() as stack:
        ranks = ranks or stack.enter_context(process_ranks(config.distributed.timeout))
        lock: FileLock | None = None

        # Only the main process looks for an unfinished run, so that all processes train the same one. It alone locks
        # the folder: a lock cannot be sent to other processes.
        def find() -> tuple[Resumption | None, list[str]]:
            nonlocal lock
            unfinished, reasons = find_unfinished(config, folder)
            if unfinished is not None and unfinished.lock is not None:
                lock = unfinished.lock
                stack.callback(lock.release)
                unfinished = replace(unfinished, lock=None)
            return unfinished, reasons

        resumed: Resumption | None = None
        messages: list[str] = []  # which runs are skipped and which one is resumed; logged once there is a log
        if not new:
            resumed, messages = ranks.from_main(find)

        # The unfinished run may be `<experiment_name>_2`: its folder is used, instead of the next free name.
        if resumed is not None:
            experiment_name = str(Path(experiment_name).with_name(resumed.run_folder.name))
            action = "resumes it"
            if resumed.checkpoint is None:
                action = "starts again in it, since it ended before its first iteration"
            messages = [*messages, f"{resumed.run_folder} is not finished: this run {action}; --new starts a new run"]
            resumed = replace(resumed, lock=lock)
            config = resumed.config

        # A resumed run writes the date of its start into its prompts, also on another day.
        else:
            config = as_started(config, ranks.from_main(lambda: date.today().isoformat()))

        destinations = Destinations(
            base,
            project_name,
            experiment_name,
            entity_name=entity_name,
            log_to_wandb=log_to_wandb,
            log_to_trackio=log_to_trackio,
            quiet=quiet,
            tensorboard_log=tensorboard_log,
            wandb_project=wandb_project,
        )
        stack.enter_context(deterministic_operations(config.deterministic))
        return _train(
            config,
            destinations,
            resumed,
            ranks=ranks,
            messages=messages,
            on_folder=on_folder,
            keep_last_state=keep_last_state,
        )


def resume(
    path: str | Path,
    *,
    overrides: Sequence[str] = (),
    values: Mapping[str, Any] | None = None,
    accepted: Collection[str] = (),
    entity_name: str | None = None,
    log_to_wandb: bool = False,
    log_to_trackio: bool = False,
    quiet: bool = False,
    tensorboard_log: str | Path | None = None,
    wandb_project: str | None = None,
    trust_remote_code: bool = False,
    keep_last_state: bool = False,
) -> Path:
    """Resume a run that ended early or is to become longer, from its newest checkpoint or a given one.

    Args:
        path: the run's folder, or one of its checkpoints.
        overrides: `train_evaluation.n_iters=200`, applied in order.
        values: config path -> value that replaces that of the run, such as a function of this process.
        accepted: config paths, of keys or blocks, whose values may differ from those of the run, although that affects
            its results; the run folder lists the changes.
        entity_name: of Weights & Biases.
        log_to_wandb: as for `train_config`.
        log_to_trackio: as for `train_config`.
        quiet: print only warnings.
        tensorboard_log: as for `train_config`.
        wandb_project: as for `train_config`.
        trust_remote_code: allow code that comes with models to run, if the config in the run's folder requests it.
        keep_last_state: as for `train_config`.

    Returns:
        The run folder.

    Raises:
        CheckpointError: there is no intact checkpoint to resume from.
        ConfigError: the overrides have errors or would change the results of the run; or the config requests code to
            run that is not trusted.
        RL4LMsLikeError: the run failed; subclasses name the cause.
    """
    from rl4lms_like.on_policy.replay import with_replay
    from rl4lms_like.system.import_paths import refuse_unless_trusted
    from rl4lms_like.training.resuming.resume import hold_run, resumption

    with ExitStack() as stack:
        # Locked before its checkpoints are read, and until the run ends: two processes never resume the same run.
        lock: FileLock | None = None
        if is_main_process():  # the others only read
            lock = hold_run(path)
            stack.callback(lock.release)
        resumed = resumption(path, overrides, values=values, accepted=accepted)

        # The config is a file of the run's folder, which may be of another user: no code is trusted because of it.
        blocks = resumed.config.to_dict()
        refuse_unless_trusted(blocks, trust_remote_code, f"the config of {resumed.run_folder}", tuple(blocks))

        # The tracker resumes in this folder, which is addressed by its names as any other.
        folder = resumed.run_folder.resolve()
        destinations = Destinations(
            folder.parent.parent,
            folder.parent.name,
            folder.name,
            entity_name=entity_name,
            log_to_wandb=log_to_wandb,
            log_to_trackio=log_to_trackio,
            quiet=quiet,
            tensorboard_log=tensorboard_log,
            wandb_project=wandb_project,
        )

        ranks = stack.enter_context(process_ranks(resumed.config.distributed.timeout))
        stack.enter_context(deterministic_operations(resumed.config.deterministic))
        config = with_replay(resumed.config)
        resumed = replace(resumed, lock=lock)
        return _train(config, destinations, resumed, ranks=ranks, keep_last_state=keep_last_state)


def _train(
    config: AnyConfig,
    destinations: Destinations,
    resumed: Resumption | None,
    *,
    ranks: Ranks,
    messages: Sequence[str] = (),
    on_folder: Callable[[Path], None] | None = None,
    keep_last_state: bool = False,
) -> Path:
    """Train a new run, or continue the unfinished run that is to be resumed; return its folder."""
    from stable_baselines3.common.utils import get_device

    from rl4lms_like.estimates.memory import explaining
    from rl4lms_like.tracking.base import SilentTracker, Tracker
    from rl4lms_like.training.model_card import write_model_card
    from rl4lms_like.training.resuming.accepted_changes import record_changes, undone_on_failure

    # The objects come before the folder: a config that cannot be built leaves no folder behind.
    silence_libraries()
    config_to_run = config
    if resumed is not None and not isinstance(config, RunConfig):
        from rl4lms_like.offline.settable_arguments import without_unused_keys

        # An earlier version may have started the run with keys that are refused by now. Its files keep them.
        config_to_run, notices = without_unused_keys(config)
        messages = [*messages, *notices]
    with explaining(config):
        make_trainer, close = _assembled(config_to_run, ranks, keep_last_state=keep_last_state)

    tensorboard_log = destinations.tensorboard_log
    if isinstance(config, RunConfig):  # Stable-Baselines3's algorithms have this argument
        tensorboard_log = config.alg.args.get("tensorboard_log") or tensorboard_log

    # Files and messages are those of the main process; `SilentTracker` has the same interface and writes nothing.
    tracker: Tracker | None = None

    def open_tracker() -> Path:
        nonlocal tracker
        # Before `config.json` has the new values: if the process is killed in between, the run still has the old ones.
        if resumed is not None and resumed.checkpoint is not None:
            record_changes(resumed.run_folder, resumed.changes)
        tracker = Tracker(
            base_path_to_store_results=destinations.base,
            run_config=config.to_dict(),
            project_name=destinations.project_name,
            experiment_name=destinations.experiment_name,
            entity_name=destinations.entity_name,
            wandb_log=destinations.log_to_wandb,
            trackio_log=destinations.log_to_trackio,
            tensorboard_log=tensorboard_log,
            wandb_project=destinations.wandb_project,
            quiet=destinations.quiet,
            resume=resumed is not None,
            held=None if resumed is None else resumed.lock,
        )

        # A tracker has open files, so only the path is sent. The folder may be numbered (`run_2`), if `run` is taken.
        return tracker.run_path

    # The changes of a run whose checkpoint cannot be loaded with them are undone.
    loading = ExitStack()
    if resumed is not None and ranks.is_main:
        loading.enter_context(undone_on_failure(resumed.run_folder))

    with closed_after(close):
        run_path = ranks.from_main(open_tracker)
        if tracker is None:
            tracker = SilentTracker(run_path, config.to_dict())
        if on_folder is not None:
            on_folder(run_path)

        with tracker:
            # With a checkpoint, the trainer cuts the files to their sizes at the checkpoint. Without one the run
            # starts again, and all lines that it has written would otherwise appear twice.
            checkpoint = None if resumed is None else resumed.checkpoint
            if resumed is not None and checkpoint is None:
                tracker.cut_files({})
            changes = () if resumed is None else resumed.changes
            for message in [*messages, *(f"accepted change: {change}" for change in changes), *config.notices]:
                tracker.log_info(str(message))
            tracker.log_environment(environment(get_device(config.device), has_images=config.reads_pictures))

            # The report is most useful for a run that failed, so it is written in any case. Only a run that is complete
            # is marked as finished: another start of the same command resumes every other run.
            try:
                with explaining(config):
                    with loading:
                        trainer = make_trainer(tracker, resume_from=checkpoint)
                    trainer.train_and_eval()
            finally:
                if ranks.is_main:
                    _write_report(tracker)
            if ranks.is_main:
                write_model_card(tracker.run_path)
            tracker.finish()

        # The other processes may read the folder as soon as they return, so they wait for the main one.
        ranks.from_main(lambda: None)
    return run_path


def _write_report(tracker: Tracker) -> None:
    """Write the report of a run; a failure is only logged, to not hide why the run ended."""
    from rl4lms_like.tracking.report import write_report

    try:
        tracker.log_info(f"report: {write_report(tracker.run_path)}")
    except Exception as error:
        logger.warning("the report could not be written: %s", error)


def _assembled(
    config: AnyConfig, ranks: Ranks, *, keep_last_state: bool
) -> tuple[Callable[..., Any], Callable[[], None]]:
    """Build the objects of a run; return a function that creates its trainer and one that closes the objects."""
    if isinstance(config, RunConfig):
        from rl4lms_like.on_policy.assemble import assemble
        from rl4lms_like.on_policy.trainer import OnPolicyTrainer

        run = assemble(config, ranks)
        # The environment may have worker processes.
        return partial(OnPolicyTrainer, run, keep_last_state=keep_last_state), run.env.close

    from rl4lms_like.offline.assemble_preferences import assemble_preferences
    from rl4lms_like.offline.assemble_supervised import assemble_supervised
    from rl4lms_like.offline.trainer import SupervisedTrainer

    # Preference runs have the same trainer: transformers', with another loss.
    if isinstance(config, SupervisedConfig):
        offline = assemble_supervised(config, ranks)
    else:
        offline = assemble_preferences(config, ranks)
    return partial(SupervisedTrainer, offline), lambda: None


def pretrain_critic(config_path: str | Path, folder: str | Path, *, overrides: Sequence[str] = ()) -> Iterator[str]:
    """Train the critic of a config on rollouts of its starting policy, and save it for `critic_model`.

    Args:
        config_path: YAML file of an RL run; without `alg.args.critic_pretrain` the defaults apply.
        folder: target folder.
        overrides: `alg.args.critic_pretrain.max_rollouts=5`, applied in order.

    Yields:
        Lines that describe the progress.

    Raises:
        ConfigError: the config has errors, or its algorithm has no separate critic.
        RL4LMsLikeError: a rollout failed, or the folder cannot be written.
    """
    config = load_config(config_path, overrides)
    if not isinstance(config, RunConfig):
        raise ConfigError([ConfigIssue("alg.id", "has no critic: a supervised run learns no values")], str(config_path))

    # Loaded again with an empty block: its defaults, and an error if the algorithm has no such argument.
    if config.alg.args.get("critic_pretrain") is None:
        config = load_config(config_path, [*overrides, "alg.args.critic_pretrain={}"])
        assert isinstance(config, RunConfig)

    from rl4lms_like.estimates.memory import explaining
    from rl4lms_like.on_policy.assemble import assemble
    from rl4lms_like.system.disk import saving
    from rl4lms_like.training.resuming.checkpoints import write_folder

    silence_libraries()
    with deterministic_operations(config.deterministic), explaining(config):
        run = assemble(config)
        with closed_after(run.env.close):
            pretraining: Any = run.algorithm.pretraining
            for explained in run.algorithm.pretrain_critic():
                yield pretraining.progress(explained)
        with saving(f"the critic to {folder}"):
            write_folder(Path(folder), run.policy.save_critic)
    yield f"critic: {folder}"


def silence_libraries() -> None:
    """Silence progress bars and irrelevant advice of other libraries; their warnings stay."""
    # The tokenizers library prints advice if a process is forked after its threads were used.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers.utils import logging as transformers_logging

    # A logger adds a filter once, however often this is called, since it is the same function each time.
    transformers_logging.disable_progress_bar()
    for name in ("modeling_utils", "training_args"):
        logging.getLogger(f"transformers.{name}").addFilter(_no_advice)


def _no_advice(record: logging.LogRecord) -> bool:
    """Return False for messages of transformers about its own internals.

    Its decoder drops a mask of ones, and then advises to pass a mask if a pad token was sampled. For some model classes
    it finds no loss by name, and then uses the right one. Its Trainer does not know that gradients are summed by us.
    """
    internal = ("passing in an `attention_mask`", "`loss_type=None` was set in the config", "parallel_mode !=")
    return not any(phrase in record.getMessage() for phrase in internal)


@contextmanager
def deterministic_operations(is_enabled: bool) -> Iterator[None]:
    """Use torch's deterministic algorithms inside the block if enabled; restore all settings of torch on exit.

    They include the number of threads: a run may set it, and the next run may need torch's default.

    Raises:
        ConfigError: CUDA has started already, with a setting that is not deterministic.
        RL4LMsLikeError: an operation has no deterministic implementation.
    """
    import torch

    # All that the block changes, to be restored on exit.
    n_threads = torch.get_num_threads()
    workspace = os.environ.get(_CUBLAS_VARIABLE)
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    was_warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    had_benchmark = torch.backends.cudnn.benchmark

    # cuBLAS has read the variable by now: setting it here would have no effect, and no error would say so.
    if is_enabled and torch.cuda.is_initialized() and workspace not in _DETERMINISTIC_WORKSPACES:
        setting = f"{_CUBLAS_VARIABLE}={_DETERMINISTIC_WORKSPACES[0]}"
        message = f"CUDA has started already: set {setting} before anything uses CUDA"
        raise ConfigError([ConfigIssue("deterministic", message)])

    # cuDNN's benchmark chooses the fastest convolution by its time, so two runs may use different ones.
    if is_enabled:
        if workspace not in _DETERMINISTIC_WORKSPACES:
            os.environ[_CUBLAS_VARIABLE] = _DETERMINISTIC_WORKSPACES[0]
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False

    try:
        yield
    except Exception as error:
        # torch names the operation, but neither the key that requires it nor what to do.
        if not is_enabled or "does not have a deterministic implementation" not in str(error):
            raise
        hint = "set it to false, or avoid the operation (attn_implementation, device, the component that uses it)"
        raise RL4LMsLikeError(f"deterministic: true: {hint}\n{error}") from error
    finally:
        torch.set_num_threads(n_threads)
        if is_enabled:
            torch.use_deterministic_algorithms(was_deterministic, warn_only=was_warn_only)
            torch.backends.cudnn.benchmark = had_benchmark
            if workspace is None:
                os.environ.pop(_CUBLAS_VARIABLE, None)
            else:
                os.environ[_CUBLAS_VARIABLE] = workspace


def environment(device: Any, *, has_images: bool = False) -> dict[str, Any]:
    """Return what a run's numbers depend on besides its config, without paths or names of machines and users.

    Args:
        device: device of the run.
        has_images: whether the prompts may have images, whose pixels depend on what resizes them.
    """
    import torch

    from rl4lms_like.core.products import why_mkl

    # Strings are hashed with a random seed unless this variable sets it; the order of a set of strings depends on it.
    hash_seed = "0"
    if sys.flags.hash_randomization:
        hash_seed = os.environ.get("PYTHONHASHSEED", "random")

    # The instruction set of the processor (AVX2, AVX512) and the number of threads decide in which order sums are
    # taken, so they may change the last bits of every number.
    conditions: dict[str, Any] = {
        "python": platform.python_version(),
        "packages": {name: installed_version(name) for name in PACKAGES},
        "system": f"{platform.system()} {platform.machine()}",
        "processor": torch.backends.cpu.get_cpu_capability(),
        "float32_products": "MKL" if why_mkl() else "oneDNN",  # where the speedup `onednn` is on
        "threads": torch.get_num_threads(),
        "device": str(device),
        "float32_matmul": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "hash_seed": hash_seed,
    }
    if has_images:
        conditions["images"] = f"pillow {installed_version('pillow')}"
    if torch.device(device).type == "cuda":
        conditions["gpu"] = torch.cuda.get_device_name(device)
        conditions["cuda"] = torch.version.cuda
        conditions["cudnn"] = torch.backends.cudnn.version()
    return conditions
