"""Validation of `alg.training_args` and construction of transformers' `TrainingArguments`.

set in the config       every argument of `TrainingArguments` except those set by the run
set by the run          output_dir, seed, device, reports; refused in the config
other defaults          evaluation after each epoch, at least ten lines of the log, the best model if it is requested
"""

from __future__ import annotations

import math
import os
import typing
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import torch
from stable_baselines3.common.utils import get_device
from transformers import TrainingArguments
from transformers.trainer_utils import IntervalStrategy

from rl4lms_like.config.load import algorithm_settings
from rl4lms_like.config.run_config import OfflineConfig
from rl4lms_like.core.keys_elsewhere import with_equivalent
from rl4lms_like.core.not_included import NOT_INCLUDED
from rl4lms_like.system.errors import ConfigError, ConfigIssue
from rl4lms_like.system.numbers import Count, Fraction, NonNegative, Positive
from rl4lms_like.system.ranks import is_distributed
from rl4lms_like.system.schema import check_arguments, check_value, join
from rl4lms_like.system.wording import shown

PATH = "alg.training_args"

_REASONS = {
    "use the config's own seed": "seed data_seed",
    "use the config's own device": "use_cpu",
    "the run has its own tracker; --log_to_wandb logs to Weights & Biases": "report_to",
    "repeat the same command, or use --resume": (
        "resume_from_checkpoint restore_callback_states_from_checkpoint ignore_data_skip"
    ),
    "metrics are set by train_evaluation.metrics": "include_for_metrics batch_eval_metrics prediction_loss_only",
    "evaluation uses the precision of training; bf16 computes in bfloat16": "bf16_full_eval fp16_full_eval",
    "it is set by the run": "output_dir run_name disable_tqdm remove_unused_columns do_train do_eval do_predict",
    "torchrun starts several processes, and `distributed` has their settings": (
        "fsdp fsdp_config local_rank ddp_backend ddp_timeout"
    ),
    "runs are not uploaded": "push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push",
}
NOT_SETTABLE = {key: why for why, keys in _REASONS.items() for key in keys.split()}
NOT_SETTABLE |= {key: row.sentence for row in NOT_INCLUDED for key in row.keys.split()}
"""Keys of `TrainingArguments` that are set by the run or not supported -> the reason, for the error message."""

_RANGES: dict[str, Any] = {
    **dict.fromkeys(
        ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"), Count
    ),
    "num_train_epochs": Positive,
    "max_steps": Count | Literal[-1],
    **dict.fromkeys(("learning_rate", "weight_decay", "max_grad_norm", "warmup_steps"), NonNegative),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "label_smoothing_factor"), Fraction),
}
"""Valid ranges that the annotations of `TrainingArguments` lack."""


MOST_LOGGING_STEPS = 500
"""Default of `logging_steps` in long runs, that of transformers."""
FEWEST_LOGS = 10
"""Number of lines that the log of a shorter run has by default."""


def make_training_arguments(
    config: OfflineConfig, output_dir: str | Path, *, has_val: bool = True, n_examples: int | None = None
) -> Any:
    """Create the `TrainingArguments` of a run.

    Args:
        config: of the run.
        output_dir: folder of the checkpoints.
        has_val: False if there are no samples for evaluations during training.
        n_examples: number of training examples, on which the default intervals of logs and evaluations depend; None =
            unknown.

    Raises:
        ConfigError: lists every error in `alg.training_args`.
    """
    configured = config.alg.training_args
    settable = {key: value for key, value in configured.items() if key not in NOT_SETTABLE}
    values, issues = check_arguments(TrainingArguments, settable, PATH)
    issues += _further_issues(configured, values)
    if issues:
        settings = algorithm_settings(config.alg.id)
        raise ConfigError(
            [with_equivalent(issue, is_rl=False, algorithm=config.alg.id, settings=settings) for issue in issues]
        )

    values = _defaults(config, values) | values
    values |= {
        "output_dir": str(output_dir),
        "seed": config.seed,
        "data_seed": config.seed,
        "report_to": "none",
        "use_cpu": get_device(config.device).type == "cpu",
        "disable_tqdm": True,
        # The objectives read columns that no model's forward has.
        "remove_unused_columns": False,
    }
    if not has_val:
        values["eval_strategy"] = "no"

    try:
        with _as_one_process(), warnings.catch_warnings():
            # Older versions have no other name for it.
            warnings.filterwarnings("ignore", "`gradient_checkpointing` is deprecated")
            arguments = TrainingArguments(**values)
            device = arguments.device  # the first GPU, if there are GPUs
    except (ValueError, TypeError) as error:
        raise ConfigError([ConfigIssue(PATH, str(error))]) from error
    issues = _best_model_issues(config, arguments)
    if issues:
        raise ConfigError(issues)

    if n_examples is not None:
        _set_intervals(arguments, configured, n_examples)

    # On several GPUs, the Trainer would wrap the model in nn.DataParallel.
    arguments._n_gpu = min(arguments._n_gpu, 1)
    # The device is a cached property. Each process of torchrun has a GPU of its own.
    if is_distributed() and device.type == "cuda":
        arguments.__dict__["_setup_devices"] = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(arguments.device)
    return arguments


def _set_intervals(arguments: TrainingArguments, configured: Mapping[str, Any], n_examples: int) -> None:
    """Set the intervals of logs and evaluations that the config does not set."""
    n_steps = n_steps_of(arguments, n_examples)
    if not {"logging_steps", "logging_strategy"} & configured.keys():
        arguments.logging_steps = min(MOST_LOGGING_STEPS, max(n_steps // FEWEST_LOGS, 1))

    # Once per epoch as a number of steps. With the strategy `epoch`, a checkpoint of the last step of an epoch is
    # written before the evaluation of this epoch, which a run that resumes from it would not make.
    if arguments.eval_strategy == IntervalStrategy.EPOCH and "eval_strategy" not in configured:
        arguments.eval_strategy = IntervalStrategy.STEPS
        arguments.eval_steps = min(steps_per_epoch(arguments, n_examples), n_steps)


def n_steps_of(arguments: TrainingArguments, n_examples: int) -> int:
    """Return the number of optimizer steps of a run with this number of examples, as the Trainer counts them."""
    if arguments.max_steps > 0:
        return int(arguments.max_steps)
    return math.ceil(arguments.num_train_epochs * steps_per_epoch(arguments, n_examples))


def steps_per_epoch(arguments: TrainingArguments, n_examples: int) -> int:
    """Return the number of optimizer steps in a pass over the examples; the last one may have fewer examples."""
    n_batches = n_examples / arguments.per_device_train_batch_size
    n_batches = math.floor(n_batches) if arguments.dataloader_drop_last else math.ceil(n_batches)
    return max(math.ceil(n_batches / arguments.gradient_accumulation_steps), 1)


def _best_model_issues(config: OfflineConfig, arguments: TrainingArguments) -> list[ConfigIssue]:
    """Return what lacks to compare checkpoints, if the run does."""
    compares = (
        config.alg.early_stopping_patience is not None
        or arguments.load_best_model_at_end
        or arguments.save_strategy == "best"
    )
    if not compares:
        return []

    issues = []
    if arguments.metric_for_best_model is None:
        message = "missing; set it to loss or to a metric's key, to compare evaluations"
        issues.append(ConfigIssue(f"{PATH}.metric_for_best_model", message))
    if arguments.eval_strategy == "no":
        message = "without evaluations during training there is no best model; use steps or epoch"
        issues.append(ConfigIssue(f"{PATH}.eval_strategy", message))
    return issues


@contextmanager
def _as_one_process() -> Iterator[None]:
    """Hide the processes of `torchrun`: the Trainer would wrap the model, but `ReferenceTrainer` sums the gradients."""
    hidden = {name: os.environ.pop(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE") if name in os.environ}
    try:
        yield
    finally:
        os.environ |= hidden


def _further_issues(configured: dict[str, Any], values: dict[str, Any]) -> list[ConfigIssue]:
    """Return the errors in the configured keys that their annotations do not cover."""
    issues = []
    for key, why in NOT_SETTABLE.items():
        if key in configured:
            issues.append(ConfigIssue(join(PATH, key), f"cannot be set: {why}"))
    for key, kind in _RANGES.items():
        if values.get(key) is not None:
            issues += check_value(values[key], kind, join(PATH, key))[1]

    # Annotations such as `SchedulerType | str` accept every text, but `TrainingArguments` only the enum's values.
    hints = typing.get_type_hints(TrainingArguments)
    for key, value in configured.items():
        for kind in typing.get_args(hints.get(key)):
            if isinstance(kind, type) and issubclass(kind, Enum) and value not in [item.value for item in kind]:
                choices = ", ".join(str(item.value) for item in kind)
                issues.append(ConfigIssue(join(PATH, key), f"expected one of {choices}; got {shown(value)}"))
    return issues


def _defaults(config: OfflineConfig, values: dict[str, Any]) -> dict[str, Any]:
    """Return defaults that differ from transformers': evaluate after each epoch; save the best model."""
    stops_early = config.alg.early_stopping_patience is not None
    loads_best = values.get("load_best_model_at_end", stops_early)

    # An interval in steps asks for evaluations at these steps. Without it they come with the checkpoints from which the
    # best one is loaded, as transformers requires.
    eval_strategy = "epoch"
    if values.get("eval_steps") is not None:
        eval_strategy = "steps"
    elif loads_best and values.get("save_strategy") in ("steps", "epoch"):
        eval_strategy = values["save_strategy"]

    defaults: dict[str, Any] = {
        "eval_strategy": eval_strategy,
        "load_best_model_at_end": loads_best,
        # It would replace a loss that is not finite in the logs, but the run raises an error instead.
        "logging_nan_inf_filter": False,
    }
    if stops_early:
        defaults["metric_for_best_model"] = "loss"

    # The best model is loaded from a checkpoint, also in a run that saves no others.
    if loads_best:
        defaults["save_strategy"] = "best"
    elif not config.train_evaluation.save_model:
        defaults["save_strategy"] = "no"
    return defaults
