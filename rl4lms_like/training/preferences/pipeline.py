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

from rl4lms_like.core.errors import ConfigError, ConfigIssue
from rl4lms_like.core.ranks import is_distributed, n_processes
from rl4lms_like.core.schema import at, check_arguments
from rl4lms_like.core.secrets import secret_issues, without_values
from rl4lms_like.data_pools.preferences import PROMPT
from rl4lms_like.training.config.notices import Notice
from rl4lms_like.training.config.run_config import PreferenceConfig, parse_config
from rl4lms_like.training.config.yaml_file import apply_overrides, apply_values, read_yaml
from rl4lms_like.training.preferences.pipeline_file import LoraBlock, ModelBlock, Pipeline, TrainingBlock

VISIBLE = "CUDA_VISIBLE_DEVICES"
_NAME = re.compile(r"(?!\.+$)[^/\\]+")
_FAMILIES = {"CAUSAL_LM": "causal", "SEQ_2_SEQ_LM": "seq2seq"}
_RENAMED_TRAINING = ("output_dir", "num_epochs", "max_seq_length", "max_prompt_length", "max_completion_length")
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
    **{
        f"lora.{each.name}": f"alg.peft.{each.name}"
        for each in dataclasses.fields(LoraBlock)
        if each.name != "task_type"
    },
    "training.num_epochs": "alg.training_args.num_train_epochs",
    **{
        f"training.{each.name}": f"alg.training_args.{each.name}"
        for each in dataclasses.fields(TrainingBlock)
        if each.name not in _RENAMED_TRAINING
    },
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
    return _OURS.sub(lambda found: _HERE[found[0]].format(index=index), text)


def load_pipeline(
    path: str | Path, overrides: Sequence[str] = (), *, model_index: int | None = None
) -> tuple[Pipeline, list[ModelRun]]:
    """Read a pipeline file and apply overrides; see `parse_pipeline`."""
    mapping, repeated = read_yaml(path, ", ".join(each.name for each in dataclasses.fields(Pipeline)))
    changed, issues = apply_overrides(mapping, overrides)
    return parse_pipeline(changed, source=str(path), issues=repeated + issues, model_index=model_index)


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
    fields, wrong = check_arguments(Pipeline, mapping, "")
    found, runs = [*issues, *secret_issues(mapping), *wrong], []
    if not {"models", "dataset"} <= fields.keys():
        raise ConfigError(without_values(mapping, list(dict.fromkeys(found))), source)
    pipeline = Pipeline(**fields)
    found += _conflicts(pipeline)
    chosen = [index for index in range(len(pipeline.models)) if model_index in (None, index)]
    if not chosen:
        found.append(ConfigIssue("--model-index", f"expected at most {len(pipeline.models) - 1}, got {model_index}"))
    notices = tuple(_notices(pipeline, mapping, source))
    for index in chosen:
        model = pipeline.models[index]
        try:
            config = parse_config(translated(pipeline, model), source=source, data=True)
        except ConfigError as error:
            found += [
                ConfigIssue(*(renamed(text, index) for text in (each.path, each.message))) for each in error.issues
            ]
            continue
        assert isinstance(config, PreferenceConfig)
        own = (Notice(renamed(each.path, index), renamed(each.message, index)) for each in config.notices)
        runs.append(ModelRun(index, model.name, dataclasses.replace(config, notices=(*notices, *own))))
    if found:
        raise ConfigError(without_values(mapping, list(dict.fromkeys(found))), source)
    return pipeline, runs


def translated(pipeline: Pipeline, model: ModelBlock) -> dict[str, Any]:
    """Return the mapping of the run of a model, in the format of this library."""
    dataset, post, lora, training = pipeline.dataset, pipeline.post_training, pipeline.lora, pipeline.training
    objective, (prompt_limit, response_limit) = post.objective, training.limits
    given = dataclasses.asdict(pipeline)
    values = {ours: at(given, theirs) for theirs, ours in SAME.items()}
    values |= {
        "tokenizer.model_name": model.huggingface_id,
        "tokenizer.max_length": prompt_limit,
        "datapool.id": "preferences",
        f"datapool.args.{'path' if pipeline.is_file else 'dataset'}": dataset.name,
        "datapool.args.split_ratios": [1 - dataset.validation_split, dataset.validation_split, 0.0],
        "datapool.args.seed": pipeline.seed,
        "alg.id": objective,
        f"alg.args.{'odds_ratio_weight' if objective == 'orpo' else 'beta'}": post.beta,
        "alg.args.max_response_length": response_limit,
        "alg.args.dropout": "adapters" if lora is not None and lora.lora_dropout else None,
        "alg.model_type": _FAMILIES[model.task_type or ("CAUSAL_LM" if lora is None else lora.task_type)],
        "alg.model_name": model.huggingface_id,
        "alg.generation_kwargs.max_new_tokens": response_limit,
        "alg.training_args.save_strategy": None if training.save_steps is None else "steps",
        "train_evaluation.eval_batch_size": training.per_device_eval_batch_size,
        "train_evaluation.generate": False,
    }
    for path in ("alg.training_args.per_device_train_batch_size", "alg.training_args.per_device_eval_batch_size"):
        values[path] *= n_processes()  # in our configs, a number of all processes together
    if objective == "dpo":
        values |= {"alg.args.loss": post.loss_type, "alg.args.label_smoothing": post.label_smoothing}
    if not post.needs_reference:
        values["alg.args.reference_model"] = None
    if dataset.prompt_column == PROMPT:
        values["datapool.args.prompt_column"] = None  # the pool then accepts that there is no such column
    if pipeline.is_file:
        values |= dict.fromkeys(("datapool.args.name", "datapool.args.divided_split"))
    if not pipeline.finetuning.load_best_model_at_end:
        values |= dict.fromkeys(("alg.early_stopping_patience", *(f"alg.training_args.{key}" for key in _OF_BEST)))
    return apply_values({}, {path: value for path, value in values.items() if value is not None}, "")[0]


def _conflicts(pipeline: Pipeline) -> Iterator[ConfigIssue]:
    """Yield the errors in the combination of keys, and in values that a preference run cannot have."""
    names = [model.name for model in pipeline.models]
    for index, model in enumerate(pipeline.models):
        if not _NAME.fullmatch(model.name) or not model.name.isprintable():
            yield ConfigIssue(f"models.{index}.name", f"expected the name of a folder, got {model.name!r}")
        elif model.name in names[:index]:
            text = f"{model.name!r} is the name of model {names.index(model.name)} too; use distinct names"
            yield ConfigIssue(f"models.{index}.name", text)
        if model.trust_remote_code:
            text = f"preference runs do not run code that comes with a model; remove it, or the model {model.name!r}"
            yield ConfigIssue(f"models.{index}.trust_remote_code", text)
    post, resume = pipeline.post_training, pipeline.finetuning.resume_from_checkpoint
    if post.loss_type not in post.losses:
        text = f"{post.loss_type!r} contradicts method: {post.method}, which has {' or '.join(post.losses)}"
        yield ConfigIssue("post_training.loss_type", text)
    elif post.label_smoothing and post.objective != "dpo":
        yield ConfigIssue("post_training.label_smoothing", f"{post.objective} has none: set it to 0")
    if post.needs_reference and not post.use_ref_model:
        text = f"{post.objective} compares with a reference model: set it to true, or use method: orpo"
        yield ConfigIssue("post_training.use_ref_model", text)
    if post.ref_model_id is not None and not post.needs_reference:
        yield ConfigIssue("post_training.ref_model_id", f"{post.objective} has no reference model; remove it")
    if pipeline.finetuning.load_best_model_at_end and not pipeline.dataset.validation_split:
        text = "there is no validation to compare models; set dataset.validation_split above 0"
        yield ConfigIssue("finetuning.load_best_model_at_end", text)
    if isinstance(resume, str):
        text = f"to resume one run, use rl4lms-like train --resume {resume}; true resumes all, as --resume does"
        yield ConfigIssue("finetuning.resume_from_checkpoint", text)


def _notices(pipeline: Pipeline, mapping: Mapping[str, Any], source: str) -> Iterator[Notice]:
    """Yield notices about keys of the file that are ignored, or limited by others."""
    post, training, services = pipeline.post_training, pipeline.training, pipeline.logging.report_to
    is_method = post.method not in (None, "dpo") and post.loss_type == "sigmoid"
    is_last = not pipeline.finetuning.load_best_model_at_end and "without load_best_model_at_end"
    visible = os.environ.get(VISIBLE)
    ignored = {
        "dataset.split": pipeline.is_file and "a file has no splits",
        "dataset.subset": pipeline.is_file and "a file has no configurations",
        "post_training.loss_type": is_method and f"method: {post.method} selects the objective",
        "post_training.use_ref_model": not post.needs_reference and f"{post.objective} has no reference model",
        "training.eval_steps": not pipeline.dataset.validation_split and "without dataset.validation_split",
        "gpu.device_ids": visible not in (None, pipeline.gpu.visible) and f"{VISIBLE} is set to {visible!r}",
        "gpu.use_ddp": is_distributed() and not pipeline.gpu.use_ddp and "torchrun has started several processes",
        **dict.fromkeys((f"finetuning.{key}" for key in (*_OF_BEST, "early_stopping_patience")), is_last),
        "logging.logging_dir": "tensorboard" not in services and "without tensorboard in report_to",
        "logging.log_level": pipeline.logging.log_level == "debug" and "there are no messages below info",
        "wandb.project_name": "wandb" not in services and "without wandb in logging.report_to",
    }
    for path, why in ignored.items():
        if why and at(mapping, path) is not None:
            yield Notice(path, f"ignored: {why}")
    for path, limit in zip(("max_prompt_length", "max_completion_length"), training.limits, strict=True):
        if at(mapping, f"training.{path}") is not None and limit < (getattr(training, path) or 0):
            text = f"{limit} instead, since prompt and response have at most max_seq_length {training.max_seq_length}"
            yield Notice(f"training.{path}", text)
    n_gpus = len(pipeline.gpu.device_ids or ())
    if not is_distributed() and (n_gpus > 1 or pipeline.gpu.use_ddp):
        n, path = n_gpus if n_gpus > 1 else "N", shlex.quote(source)
        command = f"torchrun --nproc_per_node {n} -m rl4lms_like post-train --config {path}"
        yield Notice("gpu", f"one process uses one GPU; to use several: {command}")
