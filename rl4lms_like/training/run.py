"""Train a run from a YAML file to its results folder: used by `rl4lms-like train` and the training script.

    deterministic: true     operations without a deterministic implementation are an error; no cuDNN benchmarking
    environment.json        software versions, processor and threads of a run; one entry for each change

On the CPUs of one machine, runs are bitwise reproducible without the key too; docs/reproducibility.md lists the limits.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rl4lms_like.core.errors import ConfigError, ConfigIssue, RL4LMsLikeError, installed_version
from rl4lms_like.core.ranks import Ranks, is_main_process, process_ranks
from rl4lms_like.tracking.run_folder import experiment_folder
from rl4lms_like.training.config.run_config import AnyConfig, RunConfig, SupervisedConfig, load_config

if TYPE_CHECKING:
    from filelock import FileLock

    from rl4lms_like.tracking.base import Tracker
    from rl4lms_like.training.resuming.resume import Resumption

logger = logging.getLogger(__name__)

PACKAGES = ("rl4lms-like", "torch", "transformers", "tokenizers", "stable-baselines3", "numpy", "peft", "datasets")
"""Packages whose versions may change a run's numbers."""

_VARIABLE, _WORKSPACES = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")
"""cuBLAS reads this variable when it starts; either value makes its results deterministic."""


class Destinations(NamedTuple):
    """Destinations of a run's numbers and messages besides its folder; see `Tracker`."""

    entity_name: str | None = None
    log_to_wandb: bool = False
    quiet: bool = False
    tensorboard_log: str | Path | None = None
    wandb_project: str | None = None


def train(
    config_path: str | Path,
    *,
    project_name: str = "rl4lm_exps",
    experiment_name: str = "rl4lm_experiment",
    entity_name: str | None = None,
    base_path_to_store_results: str | Path = ".",
    log_to_wandb: bool = False,
    overrides: Sequence[str] = (),
    replay: str | Path | None = None,
    new: bool = False,
) -> Path:
    """Train a model as configured in a YAML file; after an interruption, the same call resumes the run.

    Args:
        config_path: the YAML file.
        project_name: second folder of the results.
        experiment_name: third folder; if it holds another run, or a finished one, `<experiment_name>_2` is used.
        entity_name: of Weights & Biases.
        base_path_to_store_results: first folder.
        log_to_wandb: log to Weights & Biases.
        overrides: `train_evaluation.n_iters=200`, applied in order.
        replay: value of `train_evaluation.replay`; default: the config's.
        new: start a new run in any case.

    Returns:
        The run folder.

    Raises:
        RL4LMsLikeError: the run failed; subclasses name the cause. Files written before remain.
    """
    if replay is not None:
        overrides = [*overrides, f"train_evaluation.replay={json.dumps(str(replay))}"]
    return train_config(
        load_config(config_path, overrides),
        project_name=project_name,
        experiment_name=experiment_name,
        entity_name=entity_name,
        base_path_to_store_results=base_path_to_store_results,
        log_to_wandb=log_to_wandb,
        new=new,
    )


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
    if config.alg.args.get("critic_pretrain") is None:
        config = load_config(config_path, [*overrides, "alg.args.critic_pretrain={}"])
        assert isinstance(config, RunConfig)
    from rl4lms_like.core.disk import saving
    from rl4lms_like.training.assemble import assemble
    from rl4lms_like.training.estimates.memory import explaining
    from rl4lms_like.training.resuming.checkpoints import write_folder

    silence_libraries()
    with deterministic_operations(config.deterministic), explaining(config):
        run = assemble(config)
        try:
            pretraining: Any = run.algorithm.pretraining
            for explained in run.algorithm.pretrain_critic():
                yield pretraining.progress(explained)
        finally:
            run.env.close()
        with saving(f"the critic to {folder}"):
            write_folder(Path(folder), run.policy.save_critic)
    yield f"critic: {folder}"


def resume(
    path: str | Path,
    *,
    overrides: Sequence[str] = (),
    entity_name: str | None = None,
    log_to_wandb: bool = False,
    quiet: bool = False,
    trust_remote_code: bool = False,
) -> Path:
    """Resume a run that ended early, from its newest checkpoint or a given one.

    Args:
        path: the run's folder, or one of its checkpoints.
        overrides: `train_evaluation.n_iters=200`, applied in order.
        entity_name: of Weights & Biases.
        log_to_wandb: as for `train`.
        quiet: print only warnings.
        trust_remote_code: allow code that comes with models to run, if the config in the run's folder requests it.

    Returns:
        The run folder.

    Raises:
        CheckpointError: there is no intact checkpoint to resume from.
        ConfigError: the overrides have errors or would change the results of the run; or the config requests code to
            run that is not trusted.
        RL4LMsLikeError: the run failed; subclasses name the cause.
    """
    from rl4lms_like.core.import_paths import refuse_unless_trusted
    from rl4lms_like.training.replay import with_replay
    from rl4lms_like.training.resuming.resume import hold_run, resumption

    with ExitStack() as stack:
        if is_main_process():  # the others only read
            lock = hold_run(path)
            stack.callback(lock.release)
        found = resumption(path, overrides)
        asked = found.config.to_dict()
        refuse_unless_trusted(asked, trust_remote_code, f"the config of {found.run_folder}", tuple(asked))
        folder = found.run_folder.resolve()
        place = folder.parent.parent, folder.parent.name, folder.name
        ranks = stack.enter_context(process_ranks(found.config.distributed.timeout))
        stack.enter_context(deterministic_operations(found.config.deterministic))
        found = replace(found, lock=lock) if ranks.is_main else found
        destinations = Destinations(entity_name, log_to_wandb, quiet)
        return _train(with_replay(found.config), place, found, destinations, ranks=ranks)


def train_config(
    config: AnyConfig,
    *,
    project_name: str = "rl4lm_exps",
    experiment_name: str = "rl4lm_experiment",
    entity_name: str | None = None,
    base_path_to_store_results: str | Path = ".",
    log_to_wandb: bool = False,
    quiet: bool = False,
    tensorboard_log: str | Path | None = None,
    wandb_project: str | None = None,
    new: bool = False,
    ranks: Ranks | None = None,
) -> Path:
    """Train a model as configured in `config`; see `train`, and `Tracker` for `quiet` and the arguments after it.

    `ranks` are the processes that train together, if the caller has connected them already.
    """
    from rl4lms_like.training.replay import with_replay
    from rl4lms_like.training.resuming.resume import find_unfinished

    config = with_replay(config)
    base = os.path.abspath(base_path_to_store_results)  # a component may change the current folder
    wanted = experiment_folder(base, project_name, experiment_name)
    with ExitStack() as stack:
        ranks = ranks or stack.enter_context(process_ranks(config.distributed.timeout))
        locks: list[FileLock] = []

        def find() -> tuple[Resumption | None, list[str]]:
            found, text = find_unfinished(config, wanted)
            if found is None or found.lock is None:
                return found, text
            stack.callback(found.lock.release)
            locks.append(found.lock)
            return replace(found, lock=None), text  # a lock cannot be sent to other processes

        found, text = (None, []) if new else ranks.from_main(find)
        if found is not None:
            experiment_name = str(Path(experiment_name).with_name(found.run_folder.name))
            how = "resumes it" if found.checkpoint else "starts again in it, since it ended before its first iteration"
            text = [*text, f"{found.run_folder} is not finished: this run {how}; --new starts a new run"]
            found = replace(found, lock=locks[0]) if locks else found
        place = base, project_name, experiment_name
        destinations = Destinations(entity_name, log_to_wandb, quiet, tensorboard_log, wandb_project)
        stack.enter_context(deterministic_operations(config.deterministic))
        return _train(config, place, found, destinations, text, ranks=ranks)


def _train(
    config: AnyConfig,
    place: tuple[str | Path, str, str],
    found: Resumption | None,
    destinations: Destinations,
    text: Sequence[str] = (),
    *,
    ranks: Ranks,
) -> Path:
    """Train in the folder `base/project/experiment`, or continue the unfinished run that was found; log `text`."""
    from stable_baselines3.common.utils import get_device

    from rl4lms_like.tracking.base import SilentTracker, Tracker
    from rl4lms_like.training.estimates.memory import explaining

    silence_libraries()
    with explaining(config):
        make_trainer, close = _assembled(config, ranks)
    trackers: list[Tracker] = []
    own_log = config.alg.args.get("tensorboard_log") if isinstance(config, RunConfig) else None

    def open_tracker() -> Path:
        tracker = Tracker(
            place[0],
            config.to_dict(),
            *place[1:],
            destinations.entity_name,
            destinations.log_to_wandb,
            tensorboard_log=own_log or destinations.tensorboard_log,
            wandb_project=destinations.wandb_project,
            quiet=destinations.quiet,
            resume=found is not None,
            held=None if found is None else found.lock,
        )
        trackers.append(tracker)
        return tracker.run_path

    try:
        run_path = ranks.from_main(open_tracker)
        with trackers[0] if trackers else SilentTracker(run_path, config.to_dict()) as tracker:
            if found is not None and found.checkpoint is None:
                tracker.cut_files({})
            for notice in [*text, *config.notices]:
                tracker.log_info(str(notice))
            tracker.log_environment(environment(get_device(config.device)))
            try:
                with explaining(config):
                    make_trainer(tracker, None if found is None else found.checkpoint).train_and_eval()
            finally:
                if ranks.is_main:
                    _write_report(tracker)
            tracker.finish()
    finally:
        close()
    return tracker.run_path


def _write_report(tracker: Tracker) -> None:
    """Write the report of a run; a failure is only logged, to not hide why the run ended."""
    from rl4lms_like.tracking.report import write_report

    try:
        tracker.log_info(f"report: {write_report(tracker.run_path)}")
    except Exception as error:
        logger.warning("the report could not be written: %s", error)


def _assembled(config: AnyConfig, ranks: Ranks) -> tuple[Callable[[Tracker, Path | None], Any], Callable[[], None]]:
    """Build the objects of a run; return a function that creates its trainer and one that closes the objects."""
    if isinstance(config, RunConfig):
        from rl4lms_like.training.assemble import assemble
        from rl4lms_like.training.trainer import OnPolicyTrainer

        run = assemble(config, ranks)
        return lambda tracker, resume_from: OnPolicyTrainer(run, tracker, resume_from=resume_from), run.env.close
    from rl4lms_like.training.preferences.assemble import assemble_preferences
    from rl4lms_like.training.supervised.assemble import assemble_supervised
    from rl4lms_like.training.supervised.trainer import SupervisedTrainer

    if isinstance(config, SupervisedConfig):
        offline = assemble_supervised(config, ranks)
    else:
        offline = assemble_preferences(config, ranks)
    return lambda tracker, resume_from: SupervisedTrainer(offline, tracker, resume_from=resume_from), lambda: None


def silence_libraries() -> None:
    """Silence progress bars and irrelevant advice of other libraries; their warnings stay."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    for name in ("modeling_utils", "training_args"):
        logging.getLogger(f"transformers.{name}").addFilter(_no_advice)


def _no_advice(record: logging.LogRecord) -> bool:
    """Return False for messages of transformers about its own internals.

    Its decoder drops a mask of ones, and then advises to pass a mask if a pad token was sampled. For some model classes
    it finds no loss by name, and then uses the right one. Its Trainer does not know that gradients are summed by us.
    """
    internal = ("passing in an `attention_mask`", "`loss_type=None` was set in the config", "parallel_mode !=")
    return not any(part in record.getMessage() for part in internal)


@contextmanager
def deterministic_operations(wanted: bool) -> Iterator[None]:
    """Use torch's deterministic algorithms inside the block if `wanted`; restore all settings of torch on exit.

    They include the number of threads: a run may set it, and the next run may need torch's default.

    Raises:
        ConfigError: CUDA has started already, with a setting that is not deterministic.
        RL4LMsLikeError: an operation has no deterministic implementation.
    """
    import torch

    n_threads, workspace = torch.get_num_threads(), os.environ.get(_VARIABLE)
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    if wanted and torch.cuda.is_initialized() and workspace not in _WORKSPACES:
        message = f"CUDA has started already: set {_VARIABLE}={_WORKSPACES[0]} before anything uses CUDA"
        raise ConfigError([ConfigIssue("deterministic", message)])
    if wanted:
        os.environ[_VARIABLE] = workspace if workspace in _WORKSPACES else _WORKSPACES[0]
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    try:
        yield
    except Exception as error:
        if not wanted or "does not have a deterministic implementation" not in str(error):
            raise
        hint = "set it to false, or avoid the operation (attn_implementation, device, the component that uses it)"
        raise RL4LMsLikeError(f"deterministic: true: {hint}\n{error}") from error
    finally:
        torch.set_num_threads(n_threads)
        if wanted:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
            torch.backends.cudnn.benchmark = benchmark
            if workspace is None:
                os.environ.pop(_VARIABLE, None)
            else:
                os.environ[_VARIABLE] = workspace


def environment(device: Any) -> dict[str, Any]:
    """Return what a run's numbers depend on besides its config, without paths or names of machines and users."""
    import torch

    found: dict[str, Any] = {
        "python": platform.python_version(),
        "packages": {name: installed_version(name) for name in PACKAGES},
        "system": f"{platform.system()} {platform.machine()}",
        "processor": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "device": str(device),
        "float32_matmul": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "hash_seed": os.environ.get("PYTHONHASHSEED", "random") if sys.flags.hash_randomization else "0",
    }
    if torch.device(device).type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
        found["cuda"], found["cudnn"] = torch.version.cuda, torch.backends.cudnn.version()
    return found
