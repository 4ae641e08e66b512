"""From a YAML file to a run folder: what `rl4lms-like train` and the training script call."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl4lms_like.core.errors import RL4LMsLikeError
from rl4lms_like.training.config import AnyConfig, RunConfig, load_config

if TYPE_CHECKING:
    from rl4lms_like.tracking.base import Tracker

logger = logging.getLogger(__name__)


def train(
    config_path: str | Path,
    *,
    project_name: str = "rl4lm_exps",
    experiment_name: str = "rl4lm_experiment",
    entity_name: str | None = None,
    base_path_to_store_results: str | Path = ".",
    log_to_wandb: bool = False,
    overrides: Sequence[str] = (),
) -> Path:
    """Trains as a YAML file says.

    Returns:
        The run folder.

    Raises:
        RL4LMsLikeError: whatever went wrong, by name; what was logged before stays.
    """
    return train_config(
        load_config(config_path, overrides),
        project_name=project_name,
        experiment_name=experiment_name,
        entity_name=entity_name,
        base_path_to_store_results=base_path_to_store_results,
        log_to_wandb=log_to_wandb,
    )


def resume(
    path: str | Path,
    *,
    overrides: Sequence[str] = (),
    entity_name: str | None = None,
    log_to_wandb: bool = False,
    quiet: bool = False,
) -> Path:
    """Goes on with a run that ended early, from its newest checkpoint or the one named.

    Returns:
        The run folder.

    Raises:
        CheckpointError: there is nothing intact to go on from.
        RL4LMsLikeError: whatever else went wrong, by name.
    """
    from rl4lms_like.training.resume import resumption

    found = resumption(path, overrides)
    folder = found.run_folder.resolve()
    return train_config(
        found.config,
        project_name=folder.parent.name,
        experiment_name=folder.name,
        entity_name=entity_name,
        base_path_to_store_results=folder.parent.parent,
        log_to_wandb=log_to_wandb,
        quiet=quiet,
        resume_from=found.checkpoint,
    )


def train_config(
    config: AnyConfig,
    *,
    project_name: str = "rl4lm_exps",
    experiment_name: str = "rl4lm_experiment",
    entity_name: str | None = None,
    base_path_to_store_results: str | Path = ".",
    log_to_wandb: bool = False,
    quiet: bool = False,
    resume_from: Path | None = None,
) -> Path:
    """Trains as a config says; see `train`. `resume_from` is a checkpoint of the run in that very folder."""
    from rl4lms_like.tracking.base import Tracker
    from rl4lms_like.tracking.report import write_report

    calm_libraries()
    make_trainer, close = _assembled(config)
    try:
        with Tracker(
            base_path_to_store_results,
            config.to_dict(),
            project_name,
            experiment_name,
            entity_name,
            log_to_wandb,
            tensorboard_log=config.alg.args.get("tensorboard_log") if isinstance(config, RunConfig) else None,
            quiet=quiet,
            resume=resume_from is not None,
        ) as tracker:
            for notice in config.notices:
                tracker.log_info(str(notice))
            try:
                make_trainer(tracker, resume_from).train_and_eval()
            except BaseException:
                try:
                    tracker.log_info(f"report: {write_report(tracker.run_path)}")
                except (RL4LMsLikeError, OSError) as error:  # why the run ended is never hidden by it
                    logger.warning("no report: %s", error)
                raise
            tracker.log_info(f"report: {write_report(tracker.run_path)}")
    finally:
        close()
    return tracker.run_path


def _assembled(config: AnyConfig) -> tuple[Callable[[Tracker, Path | None], Any], Callable[[], None]]:
    """What makes the run's trainer, its objects built already, and what closes them."""
    if isinstance(config, RunConfig):
        from rl4lms_like.training.assemble import assemble
        from rl4lms_like.training.trainer import OnPolicyTrainer

        run = assemble(config)
        return lambda tracker, resume_from: OnPolicyTrainer(run, tracker, resume_from=resume_from), run.env.close
    from rl4lms_like.training.assemble_supervised import assemble_supervised
    from rl4lms_like.training.supervised import SupervisedTrainer

    supervised = assemble_supervised(config)
    return lambda tracker, _: SupervisedTrainer(supervised, tracker), lambda: None


def calm_libraries() -> None:
    """Keeps progress bars and advice of other libraries out of ours; their warnings stay."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    logging.getLogger("transformers.modeling_utils").addFilter(_no_advice)


def _no_advice(record: logging.LogRecord) -> bool:
    """What transformers says of its own doings.

    Its decoder drops a mask of ones, then advises to pass one if a pad token was sampled; and it finds no loss by the
    name of some families' classes, then takes the right one.
    """
    message = record.getMessage()
    return "passing in an `attention_mask`" not in message and "`loss_type=None` was set in the config" not in message
