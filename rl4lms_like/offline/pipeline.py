"""Translation of pipeline files, the second format of preference runs, to this library's configs.

    Pipeline ─ one mapping for each model ─ parse_config ─> ModelRun: name and PreferenceConfig

The resulting configs are checked as those of any other run. Errors and notices name the keys of the file. Does not
import torch.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl4lms_like.config.load import parse_config
from rl4lms_like.config.run_config import PreferenceConfig
from rl4lms_like.config.yaml_file import apply_overrides, apply_values, read_yaml
from rl4lms_like.data_pools.formats import PROMPT
from rl4lms_like.offline.pipeline_file import LoraBlock, ModelBlock, Pipeline, PostTrainingBlock, TrainingBlock
from rl4lms_like.system.errors import ConfigError, ConfigIssue, Notice
from rl4lms_like.system.ranks import is_distributed, n_processes
from rl4lms_like.system.schema import at, check_arguments
from rl4lms_like.system.secrets import secret_issues, without_values

VISIBLE = "CUDA_VISIBLE_DEVICES"
_NAME = re.compile(r"(?!\.+$)[^/\\]+")
_FAMILIES = {"CAUSAL_LM": "causal", "SEQ_2_SEQ_LM": "seq2seq"}
_RENAMED_TRAINING = ("output_dir", "num_epochs", "max_seq_length", "max_prompt_length", "max_completion_length")
_SAME_TRAINING = [field.name for field in dataclasses.fields(TrainingBlock) if field.name not in _RENAMED_TRAINING]
_SAME_LORA = [field.name for field in dataclasses.fields(LoraBlock) if field.name != "task_type"]
_OF_BEST = ("metric_for_best_model", "greater_is_better")

SAME = {
    "dataset.prompt_column": "datapool.args.prompt_column",
    "dataset.chosen_column": "datapool.args.chosen_column",
    "dataset.rejected_column": "datapool.args.rejected_column",
    "dataset.max_samples": "datapool.args.max_rows",
    "dataset.subset": "datapool.args.name",
    "dataset.split": "datapool.args.divided_split",
    "dataset.chat_template": "tokenizer.chat_template",
    "post_training.ref_model_id": "alg.args.reference_model",
    **{f"lora.{key}": f"alg.peft.{key}" for key in _SAME_LORA},
    "training.num_epochs": "alg.training_args.num_train_epochs",
    **{f"training.{key}": f"alg.training_args.{key}" for key in _SAME_TRAINING},
    "finetuning.load_best_model_at_end": "alg.training_args.load_best_model_at_end",
    **{f"finetuning.{key}": f"alg.training_args.{key}" for key in _OF_BEST},
    "finetuning.early_stopping_patience": "alg.early_stopping_patience",
    "seed": "seed",
}
"""Key of a pipeline file -> key of our config with the same value."""

_HERE = {
    **{ours: theirs for theirs, ours in SAME.items() if "." in ours},
    **dict.fromkeys(("alg.model_name", "tokenizer.model_name"), "models.{index}.huggingface_id"),
    **dict.fromkeys(("datapool.args.dataset", "datapool.args.path"), "dataset.name"),
    **dict.fromkeys(("alg.args.beta", "alg.args.odds_ratio_weight"), "post_training.beta"),
    **dict.fromkeys(
        ("alg.args.max_response_length", "alg.generation_kwargs.max_new_tokens"), "training.max_completion_length"
    ),
    "tokenizer.max_length": "training.max_prompt_length",
    "datapool.args.split_ratios": "dataset.validation_split",
    "datapool.args": "dataset",
    "Set divided_split": "Set dataset.split",
    "alg.model_type": "models.{index}.task_type",
    "write causal": "write CAUSAL_LM",
    "write seq2seq": "write SEQ_2_SEQ_LM",
    "alg.args.label_smoothing": "post_training.label_smoothing",
    "alg.args.loss": "post_training.loss_type",
    "alg.args.dropout": "lora.lora_dropout",
    "alg.args": "post_training",
    "alg.training_args": "training",
    "alg.peft": "lora",
    "train_evaluation.eval_batch_size": "training.per_device_eval_batch_size",
    "peft.target_modules": "lora.target_modules",
}
"""Text in messages of this library -> the same in terms of a pipeline file."""
# Longest first, so that `alg.args.beta` is not replaced as `alg.args`.
_OURS = re.compile(rf"(?<![\w.])({'|'.join(map(re.escape, sorted(_HERE, key=len, reverse=True)))})(?!\w)")


@dataclass(frozen=True)
class ModelRun:
    """The run of one model of a pipeline file."""

    index: int
    name: str
    config: PreferenceConfig

    def renamed(self, text: str) -> str:
        """Return a message in which keys of our config are replaced by those of the file."""
        return renamed(text, self.index)


def renamed(text: str, index: int) -> str:
    """Return a message about the model at `index`, with the keys of the file instead of those of our config."""
    return _OURS.sub(lambda match: _HERE[match[0]].format(index=index), text)


def load_pipeline(
    path: str | Path, overrides: Sequence[str] = (), *, model_index: int | None = None
) -> tuple[Pipeline, list[ModelRun]]:
    """Read a pipeline file and apply overrides; see `parse_pipeline`."""
    block_names = ", ".join(field.name for field in dataclasses.fields(Pipeline))
    mapping, repeated_keys = read_yaml(path, block_names)
    changed, issues = apply_overrides(mapping, overrides)
    return parse_pipeline(changed, source=str(path), issues=repeated_keys + issues, model_index=model_index)


def parse_pipeline(
    mapping: Mapping[str, Any],
    *,
    source: str = "the file",
    issues: Sequence[ConfigIssue] = (),
    model_index: int | None = None,
) -> tuple[Pipeline, list[ModelRun]]:
    """Check a mapping, and translate it to the configs of its models.

    Args:
        mapping: the blocks of a pipeline file.
        source: name of the mapping in error messages.
        issues: errors found before, to be reported with the others.
        model_index: only the model with this index, from 0.

    Raises:
        ConfigError: lists all errors, with paths of the file.
    """
    blocks, wrong = check_arguments(Pipeline, mapping, "")
    all_issues = [*issues, *secret_issues(mapping), *wrong]
    # Blocks without defaults: without them, there is no pipeline that could be checked further.
    if not {"models", "dataset"} <= blocks.keys():
        raise _config_error(mapping, all_issues, source)
    pipeline = Pipeline(**blocks)
    all_issues += _conflicts(pipeline)

    indices = [index for index in range(len(pipeline.models)) if model_index in (None, index)]
    if not indices:
        message = f"expected at most {len(pipeline.models) - 1}, got {model_index}"
        all_issues.append(ConfigIssue("--model-index", message))

    # The rules of preference runs, whose messages are translated back. An error of `dataset` or `training` is one of
    # every model, and then reported once.
    notices = list(_notices(pipeline, mapping, source))
    runs = []
    for index in indices:
        model = pipeline.models[index]
        try:
            config = parse_config(translated(pipeline, model), source=source, data=True)
        except ConfigError as error:
            for issue in error.issues:
                all_issues.append(ConfigIssue(renamed(issue.path, index), renamed(issue.message, index)))
            continue
        assert isinstance(config, PreferenceConfig)
        notices_of_run = list(notices)
        for notice in config.notices:
            notices_of_run.append(Notice(renamed(notice.path, index), renamed(notice.message, index)))
        runs.append(ModelRun(index, model.name, dataclasses.replace(config, notices=tuple(notices_of_run))))

    if all_issues:
        raise _config_error(mapping, all_issues, source)
    return pipeline, runs


def _config_error(mapping: Mapping[str, Any], issues: Sequence[ConfigIssue], source: str) -> ConfigError:
    """Return the error that lists each issue once, without the values of secrets."""
    return ConfigError(without_values(mapping, list(dict.fromkeys(issues))), source)


def translated(pipeline: Pipeline, model: ModelBlock) -> dict[str, Any]:
    """Return the mapping of the run of a model, in the format of this library."""
    dataset = pipeline.dataset
    post = pipeline.post_training
    lora = pipeline.lora
    training = pipeline.training
    prompt_limit, response_limit = training.limits
    task_type = model.task_type or ("CAUSAL_LM" if lora is None else lora.task_type)
    # Adapters have dropout, the rest of the model has none.
    has_dropout = lora is not None and lora.lora_dropout > 0

    # None stands for a key that is left out, so that the config's own default applies.
    blocks = dataclasses.asdict(pipeline)
    values = {ours: at(blocks, theirs) for theirs, ours in SAME.items()}
    values |= {
        "tokenizer.model_name": model.huggingface_id,
        "tokenizer.max_length": prompt_limit,
        "datapool.id": "preferences",
        f"datapool.args.{'path' if pipeline.is_file else 'dataset'}": dataset.name,
        "datapool.args.split_ratios": [1 - dataset.validation_split, dataset.validation_split, 0.0],
        "datapool.args.seed": pipeline.seed,
        "alg.id": post.objective,
        f"alg.args.{'odds_ratio_weight' if post.objective == 'orpo' else 'beta'}": post.beta,
        "alg.args.max_response_length": response_limit,
        "alg.args.dropout": "adapters" if has_dropout else None,
        "alg.model_type": _FAMILIES[task_type],
        "alg.model_name": model.huggingface_id,
        "alg.generation_kwargs.max_new_tokens": response_limit,
        "alg.training_args.save_strategy": None if training.save_steps is None else "steps",
        "train_evaluation.eval_batch_size": training.per_device_eval_batch_size,
        "train_evaluation.generate": False,
    }

    # In a pipeline file, the number of each process; in our configs, that of all processes together.
    for path in ("alg.training_args.per_device_train_batch_size", "alg.training_args.per_device_eval_batch_size"):
        values[path] *= n_processes()

    if post.objective == "dpo":
        values["alg.args.loss"] = post.loss_type
        values["alg.args.label_smoothing"] = post.label_smoothing
    left_out = _keys_left_out(pipeline)
    set_values = {path: value for path, value in values.items() if value is not None and path not in left_out}
    return apply_values({}, set_values, "")[0]


def _keys_left_out(pipeline: Pipeline) -> set[str]:
    """Return keys of our config that are not set, whatever the file has: they would be errors, or change the run."""
    keys = set()

    if not pipeline.post_training.needs_reference:
        keys.add("alg.args.reference_model")
    # With the default name, the pool accepts that there is no such column.
    if pipeline.dataset.prompt_column == PROMPT:
        keys.add("datapool.args.prompt_column")
    if pipeline.is_file:
        keys |= {"datapool.args.name", "datapool.args.divided_split"}
    # Early stopping alone would make our config load the best model.
    if not pipeline.finetuning.load_best_model_at_end:
        keys.add("alg.early_stopping_patience")
        keys |= {f"alg.training_args.{key}" for key in _OF_BEST}

    return keys


def _conflicts(pipeline: Pipeline) -> Iterator[ConfigIssue]:
    """Yield the errors in the combination of keys, and in values that a preference run cannot have."""
    yield from _model_conflicts(pipeline.models)
    yield from _objective_conflicts(pipeline.post_training, has_adapters=pipeline.lora is not None)

    finetuning = pipeline.finetuning
    if finetuning.load_best_model_at_end and not pipeline.dataset.validation_split:
        text = "there is no validation to compare models; set dataset.validation_split above 0"
        yield ConfigIssue("finetuning.load_best_model_at_end", text)
    resume = finetuning.resume_from_checkpoint
    if isinstance(resume, str):
        text = f"to resume one run, use rl4lms-like train --resume {resume}; true resumes all, as --resume does"
        yield ConfigIssue("finetuning.resume_from_checkpoint", text)


def _model_conflicts(models: Sequence[ModelBlock]) -> Iterator[ConfigIssue]:
    # A name is that of the folder of the model's run.
    names = [model.name for model in models]
    for index, model in enumerate(models):
        if not _NAME.fullmatch(model.name) or not model.name.isprintable():
            yield ConfigIssue(f"models.{index}.name", f"expected the name of a folder, got {model.name!r}")
        elif model.name in names[:index]:
            text = f"{model.name!r} is the name of model {names.index(model.name)} too; use distinct names"
            yield ConfigIssue(f"models.{index}.name", text)
        if model.trust_remote_code:
            text = f"preference runs do not run code that comes with a model; remove it, or the model {model.name!r}"
            yield ConfigIssue(f"models.{index}.trust_remote_code", text)


def _objective_conflicts(post: PostTrainingBlock, *, has_adapters: bool) -> Iterator[ConfigIssue]:
    if post.loss_type not in post.losses:
        text = f"{post.loss_type!r} contradicts method: {post.method}, which has {' or '.join(post.losses)}"
        yield ConfigIssue("post_training.loss_type", text)
    elif post.label_smoothing and post.objective != "dpo":
        yield ConfigIssue("post_training.label_smoothing", f"{post.objective} has none: set it to 0")
    if post.needs_reference and not post.use_ref_model:
        # With adapters, false means that the reference is the model without them, as it is here in any case.
        if not has_adapters:
            text = f"{post.objective} compares with a reference model: set it to true, or use lora or method: orpo"
            yield ConfigIssue("post_training.use_ref_model", text)
        elif post.ref_model_id is not None:
            yield ConfigIssue("post_training.ref_model_id", "contradicts use_ref_model: false; remove one of them")
    if post.ref_model_id is not None and not post.needs_reference:
        yield ConfigIssue("post_training.ref_model_id", f"{post.objective} has no reference model; remove it")


def _notices(pipeline: Pipeline, mapping: Mapping[str, Any], source: str) -> Iterator[Notice]:
    """Yield notices about keys of the file that are ignored, or limited by others."""
    # Only about keys that the file has: a default that has no effect is no surprise.
    for path, reason in _ignored_keys(pipeline).items():
        if at(mapping, path) is not None:
            yield Notice(path, f"ignored: {reason}")

    post = pipeline.post_training
    if post.needs_reference and not post.use_ref_model and pipeline.lora is not None:
        text = "the reference is the base model of the adapters, which needs no further model in memory"
        yield Notice("post_training.use_ref_model", text)

    training = pipeline.training
    prompt_limit, response_limit = training.limits
    limits = {"max_prompt_length": prompt_limit, "max_completion_length": response_limit}
    for key, limit in limits.items():
        if at(mapping, f"training.{key}") is not None and limit < (getattr(training, key) or 0):
            text = f"{limit} instead, since prompt and response have at most max_seq_length {training.max_seq_length}"
            yield Notice(f"training.{key}", text)

    n_gpus = len(pipeline.gpu.device_ids or ())
    if not is_distributed() and (n_gpus > 1 or pipeline.gpu.use_ddp):
        n_processes_shown = n_gpus if n_gpus > 1 else "N"
        command = f"torchrun --nproc_per_node {n_processes_shown} -m rl4lms_like post-train --config"
        yield Notice("gpu", f"one process uses one GPU; to use several: {command} {shlex.quote(source)}")


def _ignored_keys(pipeline: Pipeline) -> dict[str, str]:
    """Return the keys that have no effect with the other values of the file, and the reason for each."""
    post = pipeline.post_training
    ignored: dict[str, str] = {}
    if pipeline.is_file:
        ignored["dataset.split"] = "a file has no splits"
        ignored["dataset.subset"] = "a file has no configurations"
    if post.method not in (None, "dpo") and post.loss_type == "sigmoid":
        ignored["post_training.loss_type"] = f"method: {post.method} selects the objective"
    if not post.needs_reference:
        ignored["post_training.use_ref_model"] = f"{post.objective} has no reference model"
    if not pipeline.dataset.validation_split:
        ignored["training.eval_steps"] = "without dataset.validation_split"

    # The variable wins, since it is set outside of the file, as torchrun's number of processes is.
    visible = os.environ.get(VISIBLE)
    if visible not in (None, pipeline.gpu.visible):
        ignored["gpu.device_ids"] = f"{VISIBLE} is set to {visible!r}"
    if is_distributed() and not pipeline.gpu.use_ddp:
        ignored["gpu.use_ddp"] = "torchrun has started several processes"

    # Without the best model, the final model is the last one.
    if not pipeline.finetuning.load_best_model_at_end:
        for key in (*_OF_BEST, "early_stopping_patience"):
            ignored[f"finetuning.{key}"] = "without load_best_model_at_end"

    services = pipeline.logging.report_to
    if "tensorboard" not in services:
        ignored["logging.logging_dir"] = "without tensorboard in report_to"
    if pipeline.logging.log_level == "debug":
        ignored["logging.log_level"] = "there are no messages below info"
    if "wandb" not in services:
        ignored["wandb.project_name"] = "without wandb in logging.report_to"
    return ignored
