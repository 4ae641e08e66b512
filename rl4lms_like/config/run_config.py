"""Config of a run: RL4LMs' YAML blocks as frozen dataclasses, with the defaults of missing keys.

    RunConfig             tokenizer  reward_fn  datapool  env  alg (args, kl_div, policy)  train_evaluation
    SupervisedConfig      tokenizer             datapool       alg (model, training_args)  train_evaluation
    PreferenceConfig      tokenizer             datapool       alg (args, model, training_args)  train_evaluation

`load_config` reads a file, applies overrides, checks everything including the `args` of components, and raises one
`ConfigError` with all errors. It loads no model and does not import torch.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from rl4lms_like.config.binding import RunKind, bind, run_kind
from rl4lms_like.config.component import Arguments, ComponentConfig
from rl4lms_like.config.cross_checks import cross_check, data_issues, with_key_of_here
from rl4lms_like.config.doctor import DoctorConfig
from rl4lms_like.config.functions import with_function_blocks
from rl4lms_like.config.notices import Notice, notices_of, without_stray_commas
from rl4lms_like.config.yaml_file import apply_overrides, read_yaml
from rl4lms_like.core.kl_estimators import Estimator, Placement, estimator_error
from rl4lms_like.small_models.embedded import TinyModelConfig
from rl4lms_like.system.errors import ConfigError, ConfigIssue
from rl4lms_like.system.numbers import Count, Day, NonNegative, Positive, Processes, Prompts, Seed, Threads, Whole
from rl4lms_like.system.schema import check_arguments
from rl4lms_like.system.secrets import secret_issues, without_values

MAX_ISSUES = 500
"""Number of errors of a config that are reported; the others are only counted."""

Side = Literal["left", "right"]


@dataclass(frozen=True, kw_only=True)
class PromptPoolConfig(ComponentConfig):
    """The `datapool` block of an RL run: a data pool, and the order in which its prompts are drawn.

    Args:
        sampler: sampler of prompts, `id` and `args`; null draws in proportion to the samples' weights, see
            `env.args.priority_scale`.
    """

    sampler: ComponentConfig | None = None


@dataclass(frozen=True, kw_only=True)
class MetricConfig(ComponentConfig):
    """Metric given by id.

    Args:
        name: appended to its keys, as `key/name`; required if two metrics would report the same keys.
    """

    name: str | None = None


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """The `tokenizer` block.

    Args:
        model_name: tokenizer of this hub id or local folder; it may differ from the policy's.
        pad_token_as_eos_token: use the end-of-text token as the pad token if the tokenizer has none.
        padding_side: setting of the tokenizer that is saved with the model. It does not affect training: every run pads
            on the side that its model needs.
        truncation_side: side on which supervised runs truncate prompts. It is saved with the tokenizer; RL runs
            truncate on `prompt_truncation_side`.
        max_length: maximum number of tokens of a prompt in a supervised run; default: the limit of tokenizer and model.
        trust_remote_code: allow running code that comes with the tokenizer.
        chat_template: render prompts with the tokenizer's chat template (true), or with the Jinja template in this
            file, which is saved with the tokenizer. A text is the message of a user. The token that the template writes
            after a message of the assistant ends a response.
        system_prompt: with `chat_template`: system message put before prompts without one.
        keep_special_tokens: special tokens, such as `<think>`, that stay in the texts of responses for rewards,
            metrics, judges, predictions and stop strings. All others are removed, end and padding tokens always.
        template_date: with `chat_template`: the day that templates write as today. Default: the day on which the run
            started, which is stored in the `config.json` of the run.
    """

    model_name: str
    pad_token_as_eos_token: bool = True
    padding_side: Side = "left"
    truncation_side: Side = "left"
    max_length: Count | None = None
    trust_remote_code: bool = False
    chat_template: bool | str = False
    system_prompt: str | None = None
    keep_special_tokens: list[str] | None = None
    # Not in the `repr`, of which files of pairs keep a digest; the rendered prompts that it changes are part of it.
    template_date: Day | None = field(default=None, repr=False)


@dataclass(frozen=True, kw_only=True)
class EnvConfig:
    """The `env` block.

    Args:
        n_envs: number of prompts that are generated together.
        vec_env: `text` generates whole episodes in this process. `dummy` and `subproc` are vectorized environments of
            Stable-Baselines3, which step token by token.
        reward_workers: number of processes that compute rewards; 0 computes them in this process.
        reward_timeout: time limit in seconds for computing the rewards of `n_envs` episodes; with `reward_workers`, of
            the part that one worker gets. null sets no limit.
        args: arguments of `TextGenEnv`.
    """

    n_envs: Prompts = 1
    vec_env: Literal["text", "dummy", "subproc"] = "text"
    reward_workers: Processes = 0
    reward_timeout: Positive | None = None
    args: Arguments = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class KLConfig:
    """The `alg.kl_div` block: the KL penalty against the reference model.

    Args:
        coeff: initial KL coefficient. 0 disables the penalty, and no reference model is loaded.
        target_kl: KL that the controller aims at, in nats per token (with `horizon`, per sequence). null leaves the
            coefficient constant.
        norm_reward: divide the task rewards of a rollout by the standard deviation of its episodes' totals.
        controller: how the coefficient follows the KL: `adaptive` (that of RL4LMs), `horizon` (arXiv 1909.08593) or
            `fixed`; default: `adaptive` if `target_kl` is given, else `fixed`.
        gain: for `adaptive`: step size of the coefficient per iteration; 0.1 changes it by at most 2 %.
        horizon: for `horizon`: number of episodes over which the coefficient may change by 20 %.
        estimator: how a token's KL is estimated. `k1`, `k2`, `k3`: from its log-ratio. In the loss also `top_k`: the
            exact KL over the most probable tokens of the policy and the sum of all others; `full`: over the whole
            vocabulary. Default: `k3` in the loss (`k2` for `reinforce_pp_baseline`), else `k1`. `k1` in the loss is an
            error, because its expected gradient is 0.
        top_k: number of tokens of the estimator `top_k`; default: 64.
        max_coeff: upper limit of the coefficient; null sets none.
        placement: subtract the penalty from the `reward` of each token. For algorithms without a critic also
            `advantage`: subtract it from the advantage of the same token only; `loss`: add it to the loss. Default:
            `loss` for these, except for `rloo`, `reinforce_pp` (`reward`) and `opd` (`advantage`, or `loss` if the
            estimator needs it).
    """

    coeff: NonNegative
    target_kl: Positive | None = None
    norm_reward: bool = False
    controller: Literal["adaptive", "horizon", "fixed"] | None = None
    gain: Positive = 0.1
    horizon: Count = 10_000
    estimator: Estimator | None = None
    top_k: Count | None = None
    max_coeff: Positive | None = None
    placement: Placement | None = None

    def __post_init__(self) -> None:
        if self.controller is None:
            object.__setattr__(self, "controller", "fixed" if self.target_kl is None else "adaptive")
        if error := estimator_error(self.placement or "reward", self.estimator, self.top_k):
            raise ValueError(error)
        if self.controller != "fixed" and self.target_kl is None:
            raise ValueError(f"controller {self.controller!r} needs target_kl; or set controller to 'fixed'")
        if self.coeff == 0 and self.target_kl is not None:
            raise ValueError("a coefficient of 0 stays 0 and target_kl has no effect: start above 0, e.g. 0.001")


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """The `alg` block of an RL run.

    Args:
        id: an id of the registry, or an import path `package.module:Name`.
        args: arguments of the algorithm.
        kl_div: the KL penalty.
        policy: the language model as actor-critic, `id` and `args`.
    """

    id: str
    args: Arguments = field(default_factory=dict)
    kl_div: KLConfig
    policy: ComponentConfig


@dataclass(frozen=True, kw_only=True)
class KeepBestConfig:
    """The `train_evaluation.keep_best` block: keeps the model of the best evaluation on `val` in `best/`.

    Args:
        metric: key of a metric on `val`, such as `lexical/meteor`.
        mode: `max` if larger is better, `min` if smaller is better.
    """

    metric: str
    mode: Literal["max", "min"]


@dataclass(frozen=True, kw_only=True)
class EarlyStoppingConfig:
    """The `train_evaluation.early_stopping` block: ends the training when evaluations on `val` no longer improve.

    Args:
        metric: key of a metric on `val`, such as `lexical/meteor`.
        mode: `max` if larger is better, `min` if smaller is better.
        patience: number of evaluations in a row without a better score than the best one before, after which the
            training ends; the evaluation before training counts as the first score.
    """

    metric: str
    mode: Literal["max", "min"]
    patience: Count


@dataclass(frozen=True, kw_only=True)
class TrainEvaluationConfig:
    """The `train_evaluation` block of an RL run.

    Args:
        eval_batch_size: number of prompts per generation call.
        n_iters: number of iterations; each is one rollout and one update. 0 only evaluates.
        eval_every: number of iterations between evaluations on `val`.
        save_every: number of iterations between checkpoints.
        keep_last: number of newest checkpoints that are not deleted. null deletes none, but then only the newest two
            contain the state that is needed to resume; the older ones contain only the model.
        keep_best: save the model with the best score on `val` in `best/`: `metric` and `mode`. null saves none.
        early_stopping: end the training when the score on `val` no longer improves: `metric`, `mode` and `patience`.
            null trains for `n_iters` iterations.
        metrics: list of metrics: `id`, `args`, and a `name` if two metrics would report the same keys.
        generation_kwargs: generation arguments of evaluations; null uses those of the rollouts.
        max_eval_samples: evaluate only this many samples of a split, from its beginning; null evaluates all.
        save_model: save the final model and write checkpoints. If false, only `keep_best` saves a model, and the run
            cannot be resumed.
        n_credit_episodes: number of episodes per recorded rollout whose tokens the report shows with advantage, KL,
            ratio and reward. 0 records none.
        save_rollouts: keep every rollout in `rollouts/`, for `replay` and for `rl4lms-like rollouts`.
        replay: train on the kept rollouts of this run folder instead of generating; `FOLDER:3-7` selects iterations.
            Training ends at the latest with the last of them.
        accept_edited_rollouts: with `replay`: train also on rollouts that were edited after a run wrote them, for
            instance with other rewards. If false, they are an error.
    """

    eval_batch_size: Count
    n_iters: Whole
    eval_every: Count
    save_every: Count = 20
    keep_last: Count | None = None
    keep_best: KeepBestConfig | None = None
    early_stopping: EarlyStoppingConfig | None = None
    metrics: list[MetricConfig] = field(default_factory=list)
    generation_kwargs: dict[str, Any] | None = None
    max_eval_samples: Count | None = None
    save_model: bool = True
    n_credit_episodes: Whole = 3
    save_rollouts: bool = False
    replay: str | None = None
    accept_edited_rollouts: bool = False

    def __post_init__(self) -> None:
        if self.accept_edited_rollouts and self.replay is None:
            raise ValueError("accept_edited_rollouts has no effect without replay; remove it")
        if self.keep_last is not None and not self.save_model:
            raise ValueError("keep_last has no effect with save_model: false, which writes no checkpoints")


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """The `distributed` block, for runs with several processes, which `torchrun` starts.

    Args:
        strategy: `ddp`: each process has all weights. `fsdp`: weights, gradients and moments are split over the
            processes (RL runs only).
        timeout: seconds that a process waits for the others, for instance while the first one computes metrics.
    """

    strategy: Literal["ddp", "fsdp"] = "ddp"
    timeout: Positive = 1800.0


@dataclass(frozen=True, kw_only=True)
class _AnyRunConfig:
    """Keys of the top level that RL and supervised runs have in common.

    Args:
        seed: seed of all random numbers of the run.
        device: device of the models: `auto` (a GPU if there is one), `cpu`, `cuda`, `cuda:1` ...
        n_threads: number of CPU threads of torch. `auto`: one thread for a small actor and critic (at most 20M
            parameters together), otherwise torch's default.
        deterministic: use only operations with bitwise reproducible results. They may be slower on a GPU.
        distributed: settings of several processes.
        notices: messages about the config; not a key of the file.
    """

    seed: Seed = 0
    device: str = "auto"
    n_threads: Threads | Literal["auto"] = "auto"
    deterministic: bool = False
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    notices: tuple[Notice, ...] = field(default=(), compare=False, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Return the config as plain data, which parses to an equal config; its blocks come first."""
        data = dataclasses.asdict(self)
        del data["notices"]
        shared = {key: data.pop(key) for key in ("seed", "device", "n_threads", "deterministic", "distributed")}
        return data | shared


@dataclass(frozen=True, kw_only=True)
class RunConfig(_AnyRunConfig):
    """Config of an RL run.

    Args:
        tokenizer: the tokenizer.
        reward_fn: the reward function, `id` and `args`.
        datapool: the data pool of prompts, `id`, `args` and `sampler`.
        env: the environment.
        alg: algorithm, KL penalty and policy.
        train_evaluation: schedule and metrics.
        doctor: thresholds of the run doctor.
        tiny_model: the model `embedded/tiny_model`, trained on the data pool.
    """

    tokenizer: TokenizerConfig
    reward_fn: ComponentConfig
    datapool: PromptPoolConfig
    env: EnvConfig = field(default_factory=EnvConfig)
    alg: AlgorithmConfig
    train_evaluation: TrainEvaluationConfig
    doctor: DoctorConfig = field(default_factory=DoctorConfig)
    tiny_model: TinyModelConfig | None = None


@dataclass(frozen=True, kw_only=True)
class _OfflineAlgConfig:
    """Keys of `alg` that supervised runs and preference runs have in common.

    Args:
        model_type: family of the model.
        model_name: model of this hub id or local folder.
        generation_kwargs: generation arguments of evaluations.
        training_args: arguments of transformers' `TrainingArguments`. `metric_for_best_model` is `loss` or a key of the
            metrics.
        separator: text inserted between prompt and reference of a causal model; default: a space if neither has white
            space there.
        early_stopping_patience: stop training after this many evaluations on `val` without improvement; null never
            stops early.
        early_stopping_threshold: smallest improvement that counts, in units of `metric_for_best_model`.
        peft: train low-rank adapters instead of the weights. The keys are fields of PEFT's `LoraConfig`, for example
            `{r: 8, lora_alpha: 16}`.
        merge_on_save: with `peft`, save a whole model with the adapters merged into it; otherwise only the adapters.
    """

    model_type: Literal["causal", "seq2seq"]
    model_name: str
    generation_kwargs: Arguments = field(default_factory=dict)
    training_args: Arguments = field(default_factory=dict)
    separator: str | None = None
    early_stopping_patience: Count | None = None
    early_stopping_threshold: NonNegative = 0.0
    peft: Arguments | None = None
    merge_on_save: bool = False

    def __post_init__(self) -> None:
        if self.model_type == "seq2seq" and self.separator is not None:
            raise ValueError("separator: a seq2seq model does not join prompt and reference to one text; remove it")
        if self.early_stopping_patience is None and self.early_stopping_threshold:
            raise ValueError("early_stopping_threshold has no effect without early_stopping_patience")


@dataclass(frozen=True, kw_only=True)
class SupervisedAlgConfig(_OfflineAlgConfig):
    """The `alg` block of a supervised run.

    Args:
        id: selects a supervised run.
        loss_on_prompt: for causal models: train on the prompts too, not only on the references.
    """

    id: Literal["supervised"]
    loss_on_prompt: bool = False

    def __post_init__(self) -> None:
        if self.model_type == "seq2seq" and self.loss_on_prompt:
            raise ValueError("loss_on_prompt: a seq2seq model reads the prompt and cannot learn to write it; remove it")
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class PreferenceAlgConfig(_OfflineAlgConfig):
    """The `alg` block of a preference run.

    Args:
        id: id of the objective.
        args: arguments of the objective.
        training_args: arguments of transformers' `TrainingArguments`. Batch sizes count pairs (for `kto`, responses).
            `metric_for_best_model` is `loss`, a key of the metrics, or one that the objective reports on `val`.
        separator: text inserted between prompt and response of a causal model; default: a space if neither has white
            space there.
    """

    id: str
    args: Arguments = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SupervisedEvaluationConfig:
    """The `train_evaluation` block of a supervised run.

    Args:
        eval_batch_size: number of prompts per generation call.
        metrics: list of metrics: `id`, `args`, and a `name` if two metrics would report the same keys.
        max_eval_samples: evaluate only this many samples of a split, from its beginning; null evaluates all.
        generate: generate texts in evaluations. If false, they only compute the loss, and in preference runs the scores
            of the preferences; there can be no metrics.
        save_model: save the final model. If false, checkpoints are written only if `training_args` sets
            `save_strategy`.
    """

    eval_batch_size: Count
    metrics: list[MetricConfig] = field(default_factory=list)
    max_eval_samples: Count | None = None
    generate: bool = True
    save_model: bool = True

    def __post_init__(self) -> None:
        if self.metrics and not self.generate:
            raise ValueError("metrics need generate: true, since they score generated texts")


@dataclass(frozen=True, kw_only=True)
class SupervisedConfig(_AnyRunConfig):
    """Config of a supervised run.

    Args:
        tokenizer: the tokenizer.
        datapool: the data pool to train on, `id` and `args`.
        alg: model and training arguments.
        train_evaluation: batch size and metrics.
    """

    tokenizer: TokenizerConfig
    datapool: ComponentConfig
    alg: SupervisedAlgConfig
    train_evaluation: SupervisedEvaluationConfig


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig(_AnyRunConfig):
    """Config of a preference run.

    Args:
        tokenizer: the tokenizer.
        datapool: the data pool of preferences, `id` and `args`.
        alg: objective, model and training arguments.
        train_evaluation: batch size and metrics.
    """

    tokenizer: TokenizerConfig
    datapool: ComponentConfig
    alg: PreferenceAlgConfig
    train_evaluation: SupervisedEvaluationConfig


OfflineConfig: TypeAlias = SupervisedConfig | PreferenceConfig
AnyConfig: TypeAlias = RunConfig | OfflineConfig
KINDS: dict[RunKind, type[AnyConfig]] = {
    "on_policy": RunConfig,
    "supervised": SupervisedConfig,
    "preference": PreferenceConfig,
}
"""Kind of a run -> class of its config."""


def load_config(path: str | Path, overrides: Sequence[str] = (), *, data: bool = True) -> AnyConfig:
    """Read a YAML file, apply overrides, and check it, including the first rows of the data files that it names.

    Args:
        path: the file.
        overrides: `alg.args.learning_rate=1e-5`, applied in order.
        data: see `parse_config`; an evaluation only needs the files of one split.

    Raises:
        ConfigError: lists all errors in the file, the overrides and the components' arguments.
    """
    mapping, repeated = read_yaml(path)
    if "alg" not in mapping and not {"models", "post_training"}.isdisjoint(mapping):
        text = f"this file has another format: rl4lms-like post-train --config {shlex.quote(str(path))}"
        raise ConfigError([ConfigIssue("", text)], str(path))
    changed, issues = apply_overrides(mapping, overrides)
    return parse_config(changed, source=str(path), issues=repeated + issues, data=data)


def parse_config(
    mapping: Mapping[str, Any],
    *,
    source: str = "the config",
    components: bool = True,
    issues: Sequence[ConfigIssue] = (),
    data: bool = False,
) -> AnyConfig:
    """Check a mapping without changing it, and return its config.

    Args:
        mapping: the six blocks of an RL run, or the four of a supervised or preference run.
        source: name of the mapping in error messages.
        components: look up ids and check their `args`; if false, only the blocks themselves are checked.
        issues: errors found before, to be reported with the others.
        data: check that the files of the data pool exist, and that their first rows have the configured columns.

    Raises:
        ConfigError: lists all errors.
    """
    mapping, function_issues = with_function_blocks(mapping, imports=components)
    blocks, comma_notices = without_stray_commas(mapping)
    found = [*issues, *function_issues]
    if components:
        blocks, wrong = bind(blocks)
        found += secret_issues(mapping) + wrong + cross_check(blocks)
    if data and not any(issue.path.startswith("datapool") for issue in found):
        found += data_issues(blocks)
    kind = KINDS[run_kind(mapping)]
    fields, wrong = check_arguments(kind, blocks, "", exclude=("notices",))
    refused = {issue.path for issue in function_issues}  # not a second time, as a block that is no mapping
    found = list(dict.fromkeys([*found, *(issue for issue in wrong if issue.path not in refused)]))
    found = [with_key_of_here(issue, is_rl=kind is RunConfig) for issue in found]
    if found:
        reported = _in_order_of(mapping, found)[:MAX_ISSUES]
        more = [ConfigIssue("", f"and {len(found) - len(reported)} more")] if len(found) > len(reported) else []
        raise ConfigError([*without_values(mapping, reported), *more], source)
    config: AnyConfig = kind(**fields, notices=tuple(comma_notices + notices_of(blocks)))
    return config


def _in_order_of(mapping: Mapping[str, Any], issues: list[ConfigIssue]) -> list[ConfigIssue]:
    """Sort errors by the order of their blocks in the file; those outside its blocks come first."""
    rank = {str(block): index for index, block in enumerate(mapping)}
    return sorted(issues, key=lambda issue: rank.get(issue.path.partition(".")[0], -1))
