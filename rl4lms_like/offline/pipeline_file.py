"""Blocks of a pipeline file, the second format of preference runs, with the defaults of their keys.

models  dataset  post_training  lora  training  gpu  finetuning  logging  wandb  seed
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Lt, MinLen

from rl4lms_like.algorithms import OBJECTIVES
from rl4lms_like.algorithms.preference_arguments import Swapped
from rl4lms_like.data_pools.formats import PROMPT
from rl4lms_like.data_pools.tables import READERS
from rl4lms_like.system.numbers import Count, NonNegative, Positive, Seed, Whole

METHODS = {
    "dpo": {"sigmoid": "dpo", "hinge": "dpo", "ipo": "ipo", "kto_pair": "kto"},
    "ipo": {"sigmoid": "ipo", "ipo": "ipo"},
    "kto": {"sigmoid": "kto", "kto_pair": "kto"},
    "orpo": {"sigmoid": "orpo"},
}
"""`method` -> `loss_type` -> the objective. Other methods than dpo win over the default `loss_type`, sigmoid."""
LONGEST_RESPONSE = 256
"""Default limit of responses, in tokens."""


@dataclass(frozen=True, kw_only=True)
class ModelBlock:
    """An item of `models`.

    Args:
        name: name of the folder of its run.
        huggingface_id: hub id or local folder of the model.
        trust_remote_code: must be false: preference runs do not run code that comes with a model.
        task_type: family of the model; default: `lora.task_type`.
    """

    name: str
    huggingface_id: str
    trust_remote_code: bool = False
    task_type: Literal["CAUSAL_LM", "SEQ_2_SEQ_LM"] | None = None


@dataclass(frozen=True, kw_only=True)
class DatasetBlock:
    """The `dataset` block.

    Args:
        name: hub id of a dataset, a folder written by `save_to_disk`, or a JSON Lines, JSON, CSV, TSV or parquet file.
        split: split of the dataset that is divided for training and validation.
        subset: configuration of the dataset.
        prompt_column: column with the prompt. If there is no column `prompt`, the prompt is the common beginning of
            both responses.
        chosen_column: column with the better response.
        rejected_column: column with the worse response.
        max_samples: use only the first rows.
        validation_split: fraction of the rows for validation.
        chat_template: render prompts with the tokenizer's chat template.
    """

    name: str
    split: str = "train"
    subset: str | None = None
    prompt_column: str = PROMPT
    chosen_column: str = "chosen"
    rejected_column: str = "rejected"
    max_samples: Count | None = None
    validation_split: Annotated[float, Ge(0), Lt(1)] = 0.1
    chat_template: bool = False


@dataclass(frozen=True, kw_only=True)
class PostTrainingBlock:
    """The `post_training` block.

    Args:
        method: objective; null is `dpo`.
        loss_type: with the method `dpo`: its loss, or another objective. `kto_pair` is `kto` on pairs.
        beta: weight of the log-ratio in the rewards; for `orpo`, of the odds ratio.
        label_smoothing: for `dpo`: probability that the labels of a pair are swapped.
        use_ref_model: false is only possible for `orpo`, which has no reference model, and with `lora`, where the
            reference is the base model of the adapters.
        ref_model_id: hub id or local folder of the reference model; default: the initial model.
    """

    method: Literal["dpo", "ipo", "kto", "orpo"] | None = None
    loss_type: Literal["sigmoid", "hinge", "ipo", "kto_pair"] = "sigmoid"
    beta: Positive = 0.1
    label_smoothing: Swapped = 0.0
    use_ref_model: bool = True
    ref_model_id: str | None = None

    @property
    def losses(self) -> dict[str, str]:
        """Objective by the values of `loss_type` that are possible with the method."""
        return METHODS[self.method or "dpo"]

    @property
    def objective(self) -> str:
        """Id of the objective; that of the method if it contradicts the loss."""
        return self.losses.get(self.loss_type, self.losses["sigmoid"])

    @property
    def needs_reference(self) -> bool:
        """True if the objective has a reference model."""
        # The class has it: no arguments are needed.
        arguments: Any = OBJECTIVES.signature(self.objective)
        return bool(arguments.needs_reference)


@dataclass(frozen=True, kw_only=True)
class LoraBlock:
    """The `lora` block. Without it, all weights are trained.

    Args:
        r: rank of the adapters.
        lora_alpha: adapters are scaled by `lora_alpha / r`.
        lora_dropout: dropout on the input of the adapters; the model's own dropout is off.
        bias: which biases are trained: none.
        target_modules: layers that get adapters: a list of names, a regular expression, or `all-linear`; default:
            PEFT's choice for the model's family.
        task_type: family of the models.
        use_rslora: scale by `lora_alpha / sqrt(r)`.
        use_dora: train magnitude and direction of the weights separately.
    """

    r: Count = 8
    lora_alpha: Count = 16
    lora_dropout: Annotated[float, Ge(0), Lt(1)] = 0.05
    bias: Literal["none"] = "none"
    target_modules: list[str] | str | None = None
    task_type: Literal["CAUSAL_LM", "SEQ_2_SEQ_LM"] = "CAUSAL_LM"
    use_rslora: bool = False
    use_dora: bool = False


@dataclass(frozen=True, kw_only=True)
class TrainingBlock:
    """The `training` block.

    Args:
        output_dir: folder of the results; each model has a folder of its name in it.
        num_epochs: number of passes over the pairs.
        per_device_train_batch_size: number of pairs (for `kto`, responses) per forward pass, of each process.
        per_device_eval_batch_size: the same in evaluations.
        gradient_accumulation_steps: number of forward passes per optimizer step.
        learning_rate: maximum learning rate; it decays linearly.
        warmup_steps: number of optimizer steps in which the learning rate grows.
        max_seq_length: maximum number of tokens of prompt and response together.
        max_prompt_length: maximum number of tokens of a prompt.
        max_completion_length: maximum number of tokens of a response; default: 256, at most half of `max_seq_length`.
        logging_steps: number of optimizer steps between two lines of the training log.
        save_steps: number of optimizer steps between checkpoints; default: after each evaluation with a better result
            with `load_best_model_at_end`, else 500.
        eval_steps: number of optimizer steps between evaluations; default: after each epoch.
        save_total_limit: number of checkpoints that are kept; null keeps all.
        fp16: compute in float16.
        bf16: compute in bfloat16.
        gradient_checkpointing: recompute activations in the backward pass, which saves memory.
        optim: optimizer, one of transformers' names.
        weight_decay: weight decay.
        max_grad_norm: maximum norm of the gradient.
    """

    output_dir: str = "./outputs"
    num_epochs: Positive = 3
    per_device_train_batch_size: Count = 4
    per_device_eval_batch_size: Count = 4
    gradient_accumulation_steps: Count = 4
    learning_rate: NonNegative = 5e-7
    warmup_steps: Whole = 100
    max_seq_length: Annotated[int, Ge(2)] = 512
    max_prompt_length: Count = 256
    max_completion_length: Count | None = None
    logging_steps: Count = 10
    save_steps: Count | None = None
    eval_steps: Count | None = None
    save_total_limit: Count | None = 3
    fp16: bool = False
    bf16: bool = False
    gradient_checkpointing: bool = True
    optim: str = "adamw_torch"
    weight_decay: NonNegative = 0.01
    max_grad_norm: NonNegative = 1.0

    @property
    def limits(self) -> tuple[int, int]:
        """Maximum numbers of tokens of a prompt and of a response; responses are truncated last."""
        configured = self.max_completion_length or min(LONGEST_RESPONSE, self.max_seq_length // 2)
        # At least one token of the prompt is left, and a prompt is truncated before a response is.
        response = min(configured, self.max_seq_length - 1)
        prompt = min(self.max_prompt_length, self.max_seq_length - response)
        return prompt, response


@dataclass(frozen=True, kw_only=True)
class GpuBlock:
    """The `gpu` block.

    Args:
        device_ids: GPUs that are visible to the runs, unless the variable CUDA_VISIBLE_DEVICES is set.
        use_ddp: train with several processes, which `torchrun` starts.
    """

    device_ids: list[Whole] | None = None
    use_ddp: bool = False

    @property
    def visible(self) -> str | None:
        """Value of CUDA_VISIBLE_DEVICES; None if no GPUs are selected."""
        return ",".join(map(str, self.device_ids)) if self.device_ids else None


@dataclass(frozen=True, kw_only=True)
class FinetuningBlock:
    """The `finetuning` block.

    Args:
        resume_from_checkpoint: true is the option `--resume`.
        load_best_model_at_end: the final model is that of the checkpoint with the best evaluation, and training stops
            early. The other keys need it.
        metric_for_best_model: `eval_loss`, or `eval_` and a key that the objective reports on `val`.
        greater_is_better: larger is better; default: false for losses.
        early_stopping_patience: stop after this many evaluations without improvement; null never stops early.
    """

    resume_from_checkpoint: bool | str | None = None
    load_best_model_at_end: bool = False
    metric_for_best_model: str = "eval_loss"
    greater_is_better: bool | None = None
    early_stopping_patience: Count | None = 3


@dataclass(frozen=True, kw_only=True)
class LoggingBlock:
    """The `logging` block.

    Args:
        report_to: services that receive the numbers of the runs, besides their folders.
        logging_dir: folder for TensorBoard; each model has a folder of its name in it.
        log_level: `warning`, `error` and `critical` print only warnings; `debug` is the same as `info`.
    """

    report_to: list[Literal["tensorboard", "trackio", "wandb"]] = field(default_factory=list)
    logging_dir: str = "./logs"
    log_level: Literal["debug", "info", "warning", "error", "critical"] = "info"


@dataclass(frozen=True, kw_only=True)
class WandbBlock:
    """The `wandb` block.

    Args:
        project_name: project in Weights & Biases; default: the name of the folder of the results.
    """

    project_name: str | None = None


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A pipeline file.

    Args:
        models: the models, which are trained in this order.
        dataset: pairs of a better and a worse response.
        post_training: objective.
        lora: adapters that are trained instead of the weights.
        training: schedule, lengths, optimizer.
        gpu: devices.
        finetuning: best model, early stopping, resuming.
        logging: destinations of numbers.
        wandb: settings of Weights & Biases.
        seed: seed of all random numbers of each run.
    """

    models: Annotated[list[ModelBlock], MinLen(1)]
    dataset: DatasetBlock
    post_training: PostTrainingBlock = field(default_factory=PostTrainingBlock)
    lora: LoraBlock | None = None
    training: TrainingBlock = field(default_factory=TrainingBlock)
    gpu: GpuBlock = field(default_factory=GpuBlock)
    finetuning: FinetuningBlock = field(default_factory=FinetuningBlock)
    logging: LoggingBlock = field(default_factory=LoggingBlock)
    wandb: WandbBlock = field(default_factory=WandbBlock)
    seed: Seed = 42

    @property
    def is_file(self) -> bool:
        """True if the preferences are those of a file, which has no splits."""
        return Path(self.dataset.name.lower().removesuffix(".gz")).suffix[1:] in READERS
