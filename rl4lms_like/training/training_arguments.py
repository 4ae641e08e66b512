"""`alg.training_args` of a supervised run: transformers' `TrainingArguments`, checked and completed.

the config's                 every key that the Trainer has and the run does not decide
the run's                    output_dir, seed, device, reports: refused in the config
defaults of the run's own    evaluation at every log, checkpoints without pickled optimizer states
"""

from __future__ import annotations

import typing
from enum import Enum
from pathlib import Path
from typing import Any

from rl4lms_like.algorithms.arguments import Count
from rl4lms_like.core.errors import ConfigError, Mistake, import_extra
from rl4lms_like.core.schema import check_arguments, check_value, join
from rl4lms_like.core.wording import shown
from rl4lms_like.training.config import SupervisedConfig

PATH = "alg.training_args"

NOT_SETTABLE = {
    "output_dir": "checkpoints go to checkpoints/ in the run folder",
    "seed": "is set by the config's own seed",
    "data_seed": "is set by the config's own seed",
    "use_cpu": "is set by the config's own device",
    "report_to": "the run's tracker reports; --log_to_wandb logs to Weights & Biases",
    "run_name": "is the experiment's name",
    "disable_tqdm": "the run's console shows progress",
    "remove_unused_columns": "examples have no unused columns",
    "prediction_loss_only": "metrics read generated texts, see train_evaluation.metrics",
    "resume_from_checkpoint": "supervised runs cannot be resumed",
    **dict.fromkeys(("do_train", "do_eval", "do_predict"), "a run trains and evaluates"),
}
"""Keys of `TrainingArguments` that a run decides -> what does so."""

_COUNTS = ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps")


def make_training_arguments(config: SupervisedConfig, output_dir: str | Path, *, has_val: bool = True) -> Any:
    """The `TrainingArguments` of a run.

    Args:
        config: the run's.
        output_dir: where checkpoints go.
        has_val: there are samples to evaluate on while training.

    Raises:
        ConfigError: with every mistake in `alg.training_args`.
        MissingExtraError: the Trainer's own dependency is not installed.
    """
    from transformers import TrainingArguments

    given = config.alg.training_args
    import_extra("accelerate", extra="supervised", needed_by="a supervised run")
    arguments, mistakes = check_arguments(
        TrainingArguments, {key: value for key, value in given.items() if key not in NOT_SETTABLE}, PATH
    )
    mistakes += _further_mistakes(given)
    if mistakes:
        raise ConfigError(mistakes)
    complete = _defaults(config, arguments) | arguments | _decided(config, output_dir)
    if not has_val:
        complete |= {"eval_strategy": "no"}
    try:
        made = TrainingArguments(**complete)
    except (ValueError, TypeError) as error:
        raise ConfigError([Mistake(PATH, str(error))]) from error
    made._n_gpu = min(made._n_gpu, 1)  # the Trainer would wrap the model in nn.DataParallel on several
    return made


def _further_mistakes(given: dict[str, Any]) -> list[Mistake]:
    """What the annotations do not say."""
    from transformers import TrainingArguments

    mistakes = [Mistake(join(PATH, key), f"cannot be set: {why}") for key, why in NOT_SETTABLE.items() if key in given]
    for key in _COUNTS:
        if key in given:
            mistakes += check_value(given[key], Count, join(PATH, key))[1]
    hints = typing.get_type_hints(TrainingArguments)
    for key, value in given.items():
        for kind in typing.get_args(hints.get(key)):
            if isinstance(kind, type) and issubclass(kind, Enum) and value not in [item.value for item in kind]:
                choices = ", ".join(str(item.value) for item in kind)
                mistakes.append(Mistake(join(PATH, key), f"expected one of {choices}; got {shown(value)}"))
    return mistakes


def _decided(config: SupervisedConfig, output_dir: str | Path) -> dict[str, Any]:
    from stable_baselines3.common.utils import get_device

    return {
        "output_dir": str(output_dir),
        "seed": config.seed,
        "data_seed": config.seed,
        "use_cpu": get_device(config.device).type == "cpu",
        "report_to": "none",
        "disable_tqdm": True,
        "remove_unused_columns": False,
    }


def _defaults(config: SupervisedConfig, given: dict[str, Any]) -> dict[str, Any]:
    """Where they differ from transformers' own: evaluate at every log, as RL4LMs does; keep what can be loaded."""
    best = given.get("load_best_model_at_end", config.alg.early_stopping_patience is not None)
    defaults: dict[str, Any] = {
        "eval_strategy": given.get("logging_strategy", "steps"),
        "load_best_model_at_end": best,
        "save_only_model": True,
        "logging_nan_inf_filter": False,
    }
    if config.alg.early_stopping_patience is not None:
        defaults["metric_for_best_model"] = "loss"
    if best:
        defaults["save_strategy"] = "best"
    elif not config.train_evaluation.save_model:
        defaults["save_strategy"] = "no"
    return defaults
