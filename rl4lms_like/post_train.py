"""Preference training of the models of a pipeline file, one after the other: used by `rl4lms-like post-train`.

    <output_dir>/<name>/                 run folder of a model
        checkpoint-<n>                   link to checkpoints/checkpoint-<n>
        final                            link to model, the final model

A model that fails does not stop the others, unless several processes train together.
"""

from __future__ import annotations

import gc
import logging
import os
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

from rl4lms_like.config.run_config import DistributedConfig
from rl4lms_like.offline.pipeline import VISIBLE, ModelRun, load_pipeline
from rl4lms_like.offline.pipeline_file import Pipeline
from rl4lms_like.system.disk import reason, refuse_links_to_folders, with_home
from rl4lms_like.system.errors import ConfigError, ConfigIssue, Notice, RL4LMsLikeError, require_extra
from rl4lms_like.system.ranks import Ranks, is_main_process, process_ranks
from rl4lms_like.tracking.run_folder import CHECKPOINTS, CONFIG_FILE, FINISHED_FILE, numbered

logger = logging.getLogger(__name__)

FINAL = "final"
MODEL = "model"


def post_train(
    config_path: str | Path,
    *,
    overrides: Sequence[str] = (),
    model_index: int | None = None,
    output_dir: str | Path | None = None,
    resume: bool = False,
    dry_run: bool = False,
    with_traceback: bool = False,
    say: Callable[[str], None] = print,
) -> int:
    """Train the models of a pipeline file, and print where each final model is or why there is none.

    Args:
        config_path: the YAML file.
        overrides: `training.num_epochs=1`, applied in order.
        model_index: only the model with this index, from 0.
        output_dir: folder of the results; default: `training.output_dir`.
        resume: skip finished models, and resume one that ended early.
        dry_run: print for each model the output of `check`, and train none.
        with_traceback: print the tracebacks of errors.
        say: prints a text.

    Returns:
        Exit status: 1 if a model failed; in a dry run, 2 if the config of one has errors.

    Raises:
        ConfigError: the file has errors; no model was trained.
        MissingExtraError: the package of a service or of the adapters is not installed.
    """
    pipeline, runs = load_pipeline(config_path, overrides, model_index=model_index)

    # torch reads the variable when it first uses a GPU. A value that the environment has already takes precedence.
    if pipeline.gpu.visible is not None:
        os.environ.setdefault(VISIBLE, pipeline.gpu.visible)
    results = Path(os.path.abspath(with_home(output_dir or pipeline.training.output_dir)))
    resume = resume or pipeline.finetuning.resume_from_checkpoint is True

    # Errors of all models are reported before the first one is trained; in a dry run, each model reports its own.
    if not dry_run:
        runs = _checked(pipeline, runs, str(config_path))

    # One process group for all models: the processes that torchrun has started connect once. A dry run needs none.
    status = 0
    lines = []
    with nullcontext(Ranks()) if dry_run else process_ranks(DistributedConfig().timeout) as ranks:
        for run in runs:
            say(f"# {run.name}")
            try:
                if dry_run:
                    _preview(run, say)
                else:
                    lines.append(f"{run.name}: {_train(run, pipeline, results, resume=resume, ranks=ranks)}")
            except KeyboardInterrupt:
                say(f"{run.name} is not finished: the same command with --resume continues it")
                raise
            except Exception as error:
                if ranks.size > 1:  # processes that wait for one that failed cannot continue
                    error.args = (run.renamed(str(error)),)
                    raise
                if with_traceback:
                    say(traceback.format_exc())
                lines.append(f"{run.name}: failed: {_reason(run, error)}")
                status = max(status, 2 if dry_run and isinstance(error, ConfigError) else 1)
            _free_memory()

    # Last, so that the results are together, below the messages of all runs.
    for line in lines:
        say(line)
    return status


def _reason(run: ModelRun, error: Exception) -> str:
    """Return why a run failed, with the keys of the file; an error that is not the library's gets its type, too."""
    message = str(error)
    if not isinstance(error, RL4LMsLikeError):
        message = f"{type(error).__name__}: {error} (--traceback shows where)"
    return run.renamed(message)


def _checked(pipeline: Pipeline, runs: Sequence[ModelRun], source: str) -> list[ModelRun]:
    """Check what needs torch and further packages, and report GPUs that do not exist."""
    for service in pipeline.logging.report_to:
        require_extra(service, extra=service, needed_by="logging.report_to")
    import torch

    from rl4lms_like.offline.assemble_supervised import check_settings
    from rl4lms_like.run import silence_libraries

    # All models together: what is wrong in a block of the file is an issue of each of them, and is listed once.
    silence_libraries()
    issues: list[ConfigIssue] = []
    for run in runs:
        try:
            check_settings(run.config)
        except ConfigError as error:
            for issue in error.issues:
                issues.append(ConfigIssue(run.renamed(issue.path), run.renamed(issue.message)))
    if issues:
        raise ConfigError(list(dict.fromkeys(issues)), source)

    # Not an error: a file that was written for a machine with GPUs also runs on one without.
    if not pipeline.gpu.device_ids or torch.cuda.is_available():
        return list(runs)
    notice = Notice("gpu.device_ids", "ignored: no GPU is available")
    return [replace(run, config=replace(run.config, notices=(*run.config.notices, notice))) for run in runs]


def _preview(run: ModelRun, say: Callable[[str], None]) -> None:
    from rl4lms_like.preview import preview

    for section in preview(run.config):
        say(section)


def _train(run: ModelRun, pipeline: Pipeline, results: Path, *, resume: bool, ranks: Ranks) -> Path:
    """Train a model in `<results>/<name>`, or resume its run; return the path of the final model."""
    from rl4lms_like.run import train_config
    from rl4lms_like.training.resuming.resume import newest_alike

    # The results' folder is the user's choice, also behind a link; what is in it may be another user's.
    refuse_links_to_folders(takewhile(os.path.lexists, numbered(results / run.name)))

    # With `resume`, the newest run of the same config. A finished one is skipped, apart from links that it lacks.
    first_folder = results / run.name  # later runs of this name are in `<name>_2` ...
    run_folder = newest_alike(run.config, first_folder) if resume else None
    if run_folder is not None and (run_folder / FINISHED_FILE).exists():
        _link_all(first_folder)
        return run_folder / FINAL

    services = pipeline.logging.report_to
    tensorboard_log = None
    if "tensorboard" in services:
        tensorboard_log = os.path.abspath(with_home(pipeline.logging.logging_dir))
    try:
        run_folder = train_config(
            run.config,
            base_path_to_store_results=results.parent,
            project_name=results.name,
            experiment_name=(run_folder or first_folder).name,
            log_to_wandb="wandb" in services,
            log_to_trackio="trackio" in services,
            wandb_project=pipeline.wandb.project_name,
            tensorboard_log=tensorboard_log,
            quiet=pipeline.logging.log_level in ("warning", "error", "critical"),
            new=not resume,
            ranks=ranks,
        )
        return run_folder / FINAL
    finally:
        _link_all(first_folder)  # also of a run that failed, which may have checkpoints


def _link_all(first_folder: Path) -> None:
    """Update the links in all run folders of a model."""
    if not is_main_process():
        return
    for run_folder in takewhile(lambda folder: (folder / CONFIG_FILE).is_file(), numbered(first_folder)):
        try:
            _link(run_folder)
        except OSError as error:  # a file system without links
            logger.warning("the links in %s could not be created: %s", run_folder, reason(error))


def _link(run_folder: Path) -> None:
    """Update the links `checkpoint-<n>` and `final` of a run."""
    targets = {}  # name of a link -> the folder that it leads to
    for folder in (run_folder / CHECKPOINTS).glob("checkpoint-*"):
        if folder.is_dir():
            targets[folder.name] = folder
    if (run_folder / MODEL).is_dir():
        targets[FINAL] = run_folder / MODEL

    # Links to checkpoints that were deleted since (`save_total_limit`). Folders of that name are the user's.
    for link in run_folder.glob("checkpoint-*"):
        if link.is_symlink() and link.name not in targets:
            link.unlink()

    # Relative, so that the links still lead there after the results were moved. `exists` follows links, `lexists` does
    # not: a link whose target is missing is there, too.
    for name, target in targets.items():
        if not os.path.lexists(run_folder / name):
            (run_folder / name).symlink_to(target.relative_to(run_folder), target_is_directory=True)


def _free_memory() -> None:
    """Free the memory of a model that was trained."""
    import torch

    # Objects of a run that refer to each other are freed by the collector alone. Until then the next model would need
    # memory in addition to theirs.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
