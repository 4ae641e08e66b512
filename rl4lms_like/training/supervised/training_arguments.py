"""`alg.training_args` of a supervised run: transformers' `TrainingArguments`, checked and completed.

the config's                 every key that the Trainer has and the run does not decide
the run's                    output_dir, seed, device, reports: refused in the config
defaults of the run's own    evaluation at every log, checkpoints of the best model where it is asked for
"""

from __future__ import annotations

import typing
from enum import Enum
from pathlib import Path
from typing import Any, Literal

from rl4lms_like.core.errors import ConfigError, Mistake
from rl4lms_like.core.numbers import Count, NonNegative, Positive, Share
from rl4lms_like.core.schema import check_arguments, check_value, join
from rl4lms_like.core.wording import shown
from rl4lms_like.training.config.run_config import SupervisedConfig

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
    "resume_from_checkpoint": "the same command goes on with its run; so does --resume",
    "restore_callback_states_from_checkpoint": "a run that goes on restores them",
    "ignore_data_skip": "a run that goes on takes the examples where it was",
    **dict.fromkeys(("do_train", "do_eval", "do_predict"), "a run trains and evaluates"),
    **dict.fromkeys(
        ("deepspeed", "fsdp", "fsdp_config", "parallelism_config", "local_rank", "ddp_backend", "ddp_timeout"),
        "a run takes one device",
    ),
    **dict.fromkeys(
        ("push_to_hub", "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push"),
        "a run uploads nothing",
    ),
    **dict.fromkeys(
        ("bf16_full_eval", "fp16_full_eval"), "the model is evaluated as it is trained; bf16 computes in bfloat16"
    ),
    **dict.fromkeys(("include_for_metrics", "batch_eval_metrics"), "metrics are those of train_evaluation.metrics"),
}
"""Keys of `TrainingArguments` that a run decides, or has no use for -> what to say of them."""

_RANGES: dict[str, Any] = {
    **dict.fromkeys(
        ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"), Count
    ),
    "num_train_epochs": Positive,
    "max_steps": Count | Literal[-1],
    **dict.fromkeys(("learning_rate", "weight_decay", "max_grad_norm", "warmup_steps"), NonNegative),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "label_smoothing_factor"), Share),
}
"""What numbers mean something, which their annotations do not say."""


def make_training_arguments(config: SupervisedConfig, output_dir: str | Path, *, has_val: bool = True) -> Any:
    """The `TrainingArguments` of a run.

    Args:
        config: the run's.
        output_dir: where checkpoints go.
        has_val: there are samples to evaluate on while training.

    Raises:
        ConfigError: with every mistake in `alg.training_args`.
    """
    from transformers import TrainingArguments

    given = config.alg.training_args
    arguments, mistakes = check_arguments(
        TrainingArguments, {key: value for key, value in given.items() if key not in NOT_SETTABLE}, PATH
    )
    mistakes += _further_mistakes(given, arguments)
    if mistakes:
        raise ConfigError(mistakes)
    complete = _defaults(config, arguments) | arguments | _decided(config, output_dir)
    if not has_val:
        complete |= {"eval_strategy": "no"}
    try:
        made = TrainingArguments(**complete)
    except (ValueError, TypeError) as error:
        raise ConfigError([Mistake(PATH, str(error))]) from error
    if mistakes := _choice_mistakes(config, made):
        raise ConfigError(mistakes)
    made._n_gpu = min(made._n_gpu, 1)  # the Trainer would wrap the model in nn.DataParallel on several
    return made


def _further_mistakes(given: dict[str, Any], arguments: dict[str, Any]) -> list[Mistake]:
    """What the annotations do not say of the keys that were given, and of those of them that fit their annotations."""
    from transformers import TrainingArguments

    mistakes = [Mistake(join(PATH, key), f"cannot be set: {why}") for key, why in NOT_SETTABLE.items() if key in given]
    for key, kind in _RANGES.items():
        if arguments.get(key) is not None:
            mistakes += check_value(arguments[key], kind, join(PATH, key))[1]
    hints = typing.get_type_hints(TrainingArguments)
    for key, value in given.items():
        for kind in typing.get_args(hints.get(key)):
            if isinstance(kind, type) and issubclass(kind, Enum) and value not in [item.value for item in kind]:
                choices = ", ".join(str(item.value) for item in kind)
                mistakes.append(Mistake(join(PATH, key), f"expected one of {choices}; got {shown(value)}"))
    return mistakes


def _choice_mistakes(config: SupervisedConfig, made: Any) -> list[Mistake]:
    """What cannot be chosen, or stopped by, with nothing to compare."""
    stops = config.alg.early_stopping_patience is not None
    if not (stops or made.load_best_model_at_end or made.save_strategy == "best"):
        return []
    mistakes = []
    if made.metric_for_best_model is None:
        said = "missing; loss, or a metric's key, says which evaluation is better"
        mistakes.append(Mistake(join(PATH, "metric_for_best_model"), said))
    if made.eval_strategy == "no":
        said = "without evaluations while training none is the best: write steps or epoch"
        mistakes.append(Mistake(join(PATH, "eval_strategy"), said))
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
        "logging_nan_inf_filter": False,
    }
    if config.alg.early_stopping_patience is not None:
        defaults["metric_for_best_model"] = "loss"
    if best:
        defaults["save_strategy"] = "best"
    elif not config.train_evaluation.save_model:
        defaults["save_strategy"] = "no"
    return defaults
