"""Blocks of a config: RL4LMs' YAML as frozen dataclasses, with the defaults of missing keys.

    RunConfig             tokenizer  reward_fn  datapool  env  alg (args, kl_div, policy)  train_evaluation  doctor
    SupervisedConfig      tokenizer             datapool       alg (model, training_args)  train_evaluation
    PreferenceConfig      tokenizer             datapool       alg (args, model, training_args)  train_evaluation

A key is a field of its block, with its type, default and meaning. A rule about one block is its method `issues`; rules
among blocks are in `config.rules`. `config.load` makes the objects. Loads no model and does not import torch.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from annotated_types import Ge, Interval
from pydantic import AfterValidator

from rl4lms_like.algorithms import ALGORITHMS, OBJECTIVES
from rl4lms_like.algorithms.arguments import OnPolicyArguments
from rl4lms_like.algorithms.rules import Algorithm
from rl4lms_like.callbacks import CALLBACKS
from rl4lms_like.config.binding import Arguments, ComponentConfig, checked_post_processing
from rl4lms_like.core.chat_template import CHATML, CHATML_TOKENS
from rl4lms_like.data_pools import DATA_POOLS, SAMPLERS
from rl4lms_like.data_pools.splits import SPLITS
from rl4lms_like.envs import ENVIRONMENTS
from rl4lms_like.envs.arguments import EnvConfig
from rl4lms_like.metrics import METRICS
from rl4lms_like.metrics.base import named_key
from rl4lms_like.policies import POLICIES, is_causal
from rl4lms_like.policies.arguments import (
    GenerationKwargs,
    Peft,
    PolicyArguments,
    TrainVision,
    VisionPolicyArguments,
    shared_arguments,
)
from rl4lms_like.policies.quantization import Quantization, quantization_issues
from rl4lms_like.rewards import REWARDS
from rl4lms_like.rollouts.kl import KLConfig
from rl4lms_like.small_models.embedded import TinyModelConfig
from rl4lms_like.system.disk import with_home
from rl4lms_like.system.errors import ConfigIssue, DataPoolError, Notice
from rl4lms_like.system.numbers import (
    BlockLength,
    Count,
    Day,
    Finite,
    Fraction,
    NonNegative,
    Positive,
    Processes,
    Seed,
    Threads,
    Whole,
)
from rl4lms_like.system.schema import Block, check_arguments, make_block, signature_of
from rl4lms_like.system.secrets import names_variable

Side = Literal["left", "right"]

OfflineGenerationKwargs = Annotated[GenerationKwargs, AfterValidator(checked_post_processing)]
"""Generation arguments of supervised and preference runs, which can have a `post_processing_fn`."""


# --- blocks of all kinds of runs ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class DataPoolConfig(ComponentConfig):
    """The `datapool` block of a supervised or preference run."""

    registry = DATA_POOLS

    @cached_property
    def prepare(self) -> Callable[..., Any] | None:
        """Function that prepares a split, if the pool is one of the library's."""
        prepare = DATA_POOLS.signature(self.id)
        return prepare if str(getattr(prepare, "__module__", "")).startswith("rl4lms_like.data_pools.") else None

    @property
    def reads_file(self) -> bool:
        """True if the pool is one of the library's that read a user's file."""
        if self.prepare is None or self.args.get("dataset") is not None:
            return False
        # `hf_dataset` is excluded: its `path` is required and not a file
        return signature_of(self.prepare).defaults.keys() >= {"path", "data_files"}

    def issues(self) -> Iterator[ConfigIssue]:
        yield from super().issues()
        folder = self.args.get("data_dir")
        if not isinstance(folder, str) or self.prepare is None or names_variable(folder):
            folder = "."  # not of the library's pools, or known only when the pool is prepared
        if not with_home(folder).is_dir():
            yield ConfigIssue("args.data_dir", f"there is no folder {folder!r}{where_from(folder)}")
        if self.reads_file and (self.args.get("path") is None) == (self.args.get("data_files") is None):
            yield ConfigIssue("args", "give either path (one file for all splits) or data_files (one file per split)")

    def file_issues(self) -> Iterator[ConfigIssue]:
        """Yield missing files of the library's own pools, and files without a column that the config names."""
        path = self.args.get("path")
        files = self.args.get("data_files") or {}
        # Environment variables are read when the pool is prepared.
        if not self.reads_file or any(map(names_variable, [*self.args.values(), *files.values()])):
            return

        # One file for all splits is the same for each.
        key_of_split = {"train": "path"}
        if path is None:
            key_of_split = {split: f"data_files.{split}" for split in SPLITS}
        else:
            files = {"train": path}
        assert self.prepare is not None
        for split, key in key_of_split.items():
            file = files.get(split)
            if isinstance(file, str) and not os.path.exists(with_home(file)):
                yield ConfigIssue(f"args.{key}", f"there is no file {file!r}{where_from(file)}")
                continue
            # The first row shows what is wrong with columns. Images may be wrong in any row and are listed together: if
            # that of the first row is, all are read.
            args = {**self.args, "path": None, "data_files": files}
            try:
                self.prepare(split, **{**args, "max_size": 1})
            except DataPoolError as error:
                yield ConfigIssue("args", self._all_errors(split, args) if args.get("image_column") else str(error))

    def _all_errors(self, split: str, args: Mapping[str, Any]) -> str:
        """Return the message of a pool that cannot be prepared."""
        assert self.prepare is not None
        try:
            self.prepare(split, **args)
        except DataPoolError as error:
            return str(error)
        raise AssertionError("the first row has an error")


@dataclass(frozen=True, kw_only=True)
class MetricConfig(ComponentConfig):
    """Metric given by id.

    Args:
        name: appended to its keys, as `key/name`; required if two metrics would report the same keys.
    """

    registry = METRICS

    name: str | None = None

    @property
    def keys(self) -> list[str]:
        """Keys that a metric of the table reports, `{n}` for a part that depends on its arguments; [] for others."""
        if self.id not in METRICS:
            return []
        return [named_key(key, self.name) if self.name else key for key in METRICS.entry(self.id).keys]


@dataclass(frozen=True, kw_only=True)
class CallbackConfig(ComponentConfig):
    """Callback given by id."""

    registry = CALLBACKS


@dataclass(frozen=True, kw_only=True)
class AverageConfig(Block):
    """The `train_evaluation.average` block: averages the trained weights during the run.

    Args:
        decay: weight of the old average in an update. null: new weights have the weight (lag + t)^-ema_power after t
            iterations (supervised and preference runs: optimizer steps).
        every: number of iterations (supervised and preference runs: optimizer steps) between two updates.
        ema_power: with `decay: null`: exponent of the weight of new weights.
        bias_power: exponent of BEMA's correction (arXiv 2508.00180 uses 0.2): (lag + t)^-bias_power times the change of
            the weights since the start is added to the average. null adds none.
        lag: with `decay: null` or `bias_power`: added to the number of iterations.
    """

    decay: Annotated[float, Interval(gt=0, lt=1)] | None = 0.99
    every: Count = 1
    ema_power: Positive = 0.5
    bias_power: Positive | None = None
    lag: Positive = 10.0

    def issues(self) -> Iterator[ConfigIssue]:
        # Compared with the defaults: the config in a run's folder has all keys.
        if self.decay is not None and self.ema_power != AverageConfig.ema_power:
            yield ConfigIssue("ema_power", "has no effect with decay; remove it, or set decay: null")
        if self.decay is not None and self.bias_power is None and self.lag != AverageConfig.lag:
            yield ConfigIssue("lag", "has no effect without decay: null or bias_power; remove it")


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig(Block):
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
        chat_template: render prompts with the tokenizer's chat template (true), with that of ChatML (`chatml`), whose
            tokens are added to the model, or with the Jinja template in this file. It is saved with the tokenizer. A
            text is the message of a user. The token that the template writes after a message of the assistant ends a
            response.
        system_prompt: with `chat_template`: system message put before prompts without one.
        keep_special_tokens: special tokens, such as `<think>`, that stay in the texts of responses for rewards,
            metrics, judges, predictions and stop strings. All others are removed, end and padding tokens always.
        add_tokens: special tokens, such as those of a chat template, that the vocabulary must have. Tokenizer and model
            get those that they lack; the row of a new token is the mean of the others. With `peft` the rows of all of
            these tokens are trained too.
        template_date: with `chat_template`: the day that templates write as today. Default: the day on which the run
            started, which is stored in the `config.json` of the run.
        tools_in_system: with `chat_template`: write tools, their calls and their results as plain messages, for
            templates that do not write them: the schemas into the system message, the results into one of the user. No
            effect without tools.
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
    # Not in the `repr`, of which files of pairs keep a digest; the model and prompts that they change are part of it.
    add_tokens: list[str] | None = field(default=None, repr=False)
    template_date: Day | None = field(default=None, repr=False)
    tools_in_system: bool | None = field(default=None, repr=False)

    def issues(self) -> Iterator[ConfigIssue]:
        template = self.chat_template
        if isinstance(template, str) and template != CHATML and not os.path.isfile(with_home(template)):
            text = f"there is no file {template!r}{where_from(template)}; true uses the template of the tokenizer, and "
            yield ConfigIssue("chat_template", f"{text}chatml that of ChatML")
        for index, token in enumerate(self.add_tokens or ()):
            if not token or token != token.strip():
                yield ConfigIssue(f"add_tokens.{index}", f"{token!r} is empty or begins or ends with a space")
        for key in ("system_prompt", "template_date", "tools_in_system"):
            if not template and getattr(self, key) not in (None, False):
                yield ConfigIssue(key, "has no effect without tokenizer.chat_template")

    @property
    def named_tokens(self) -> tuple[str, ...]:
        """Tokens that the vocabulary must have, and whose rows adapters train."""
        of_template = CHATML_TOKENS if self.chat_template == CHATML else ()
        return tuple(dict.fromkeys([*of_template, *(self.add_tokens or ())]))


@dataclass(frozen=True, kw_only=True)
class DistributedConfig(Block):
    """The `distributed` block, for runs with several processes, which `torchrun` starts.

    Args:
        strategy: `ddp`: each process has all weights. `fsdp`: weights, gradients and moments are split over the
            processes.
        reshard_after_forward: with `fsdp`: free the whole weights of a transformer block after its forward pass, and
            gather them again for its backward pass. False: keep them until then, which communicates less and needs
            more memory (ZeRO-2).
        checkpoint: with `fsdp`: `whole`: the first process gathers and writes the training state. `split`: each process
            writes its rows of weights and moments.
        timeout: seconds that a process waits for the others, for instance while the first one computes metrics.
    """

    strategy: Literal["ddp", "fsdp"] = "ddp"
    reshard_after_forward: bool = True
    checkpoint: Literal["whole", "split"] = "whole"
    timeout: Positive = 1800.0

    def issues(self) -> Iterator[ConfigIssue]:
        if self.strategy == "fsdp":
            return
        if not self.reshard_after_forward:
            yield ConfigIssue("reshard_after_forward", "has no effect without strategy: fsdp; remove it")
        if self.checkpoint == "split":
            yield ConfigIssue("checkpoint", "split has no effect without strategy: fsdp; remove it")


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

    @property
    def is_causal(self) -> bool:
        """True if the model is decoder-only."""
        alg: AlgorithmConfig | SupervisedAlgConfig | PreferenceAlgConfig = self.alg  # type: ignore[attr-defined]
        return alg.is_causal

    @property
    def reads_pictures(self) -> bool:
        """True if the model reads prompts with pictures."""
        alg: AlgorithmConfig | SupervisedAlgConfig | PreferenceAlgConfig = self.alg  # type: ignore[attr-defined]
        return alg.reads_pictures

    def to_dict(self) -> dict[str, Any]:
        """Return the config as plain data, which parses to an equal config; its blocks come first."""
        data = dataclasses.asdict(self)
        del data["notices"]
        shared = {key: data.pop(key) for key in ("seed", "device", "n_threads", "deterministic", "distributed")}
        return data | shared


# --- blocks of RL runs ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RewardConfig(ComponentConfig):
    """The `reward_fn` block."""

    registry = REWARDS


@dataclass(frozen=True, kw_only=True)
class SamplerConfig(ComponentConfig):
    """Sampler of prompts."""

    registry = SAMPLERS


@dataclass(frozen=True, kw_only=True)
class PromptPoolConfig(DataPoolConfig):
    """The `datapool` block of an RL run: a data pool, and the order in which its prompts are drawn.

    Args:
        sampler: sampler of prompts, `id` and `args`; null draws in proportion to the samples' weights, see
            `env.args.priority_scale`.
    """

    sampler: SamplerConfig | None = None


@dataclass(frozen=True, kw_only=True)
class DialogueConfig(ComponentConfig):
    """The `env.dialogue` block: episodes of several turns with an environment that answers.

    Args:
        id: an id of the registry, of Gymnasium, or an import path `package.module:Name`.
        args: arguments of the environment.
        max_turns: maximum number of turns of an episode, which is then truncated.
        max_turn_length: maximum number of tokens of a turn.
        threads: number of environments whose `step` runs at the same time, for those that wait. 0 steps them one after
            the other.
        timeout: time limit in seconds for a `step` or `reset`. null sets no limit.
    """

    registry = ENVIRONMENTS

    max_turns: Count = 8
    max_turn_length: Count = 64
    threads: Processes = 0
    timeout: Positive | None = None


@dataclass(frozen=True, kw_only=True)
class RunEnvConfig(EnvConfig):
    """The `env` block of an RL run.

    Args:
        dialogue: environment that answers what the policy writes: `id`, `args` and limits. null: an episode is one
            response.
    """

    dialogue: DialogueConfig | None = None

    @property
    def max_actions(self) -> int | None:
        """Maximum number of tokens that the policy writes in a dialogue; None without one."""
        if self.dialogue is None:
            return None
        return min(self.dialogue.max_turns * self.dialogue.max_turn_length, self.arguments.max_episode_length)

    def issues(self) -> Iterator[ConfigIssue]:
        yield from super().issues()
        dialogue = self.dialogue
        if dialogue is None:
            return
        yield from (issue.below("dialogue") for issue in dialogue.issues())
        if self.vec_env != "text":
            text = f"{self.vec_env!r} steps single tokens, and env.dialogue has whole turns; set it to text"
            yield ConfigIssue("vec_env", text)
        limit = self.arguments.max_episode_length
        if dialogue.max_turn_length > limit:
            text = f"{dialogue.max_turn_length} tokens are more than an episode has (max_episode_length: {limit})"
            yield ConfigIssue("dialogue.max_turn_length", text)


@dataclass(frozen=True, kw_only=True)
class PolicyConfig(ComponentConfig):
    """The `alg.policy` block: the language model as actor-critic."""

    registry = POLICIES

    @property
    def reads_pictures(self) -> bool:
        """True if the policy is for vision-language models, by the class of its arguments."""
        target = POLICIES.arguments_class(self.id)
        return inspect.isclass(target) and issubclass(target, VisionPolicyArguments)


@dataclass(frozen=True, kw_only=True)
class PtxConfig(Block):
    """The `alg.ptx` block of an RL run: texts on which the policy is trained in every step, as a language model.

    Args:
        data: data pool, `id` and `args`, of which the split `train` is learned: every token of a text without a prompt,
            otherwise the references, as in a supervised run.
        coeff: weight of the loss on the texts, which is a mean over their learned tokens. 0 leaves it out.
        batch_size: number of texts of an optimizer step.
        max_length: maximum number of tokens of a text (of encoder-decoder models, of a reference). Texts without a
            prompt are divided into several, others are truncated.
    """

    data: DataPoolConfig
    coeff: NonNegative
    batch_size: Count = 8
    max_length: BlockLength = 512

    def issues(self) -> Iterator[ConfigIssue]:
        yield from (issue.below("data") for issue in self.data.issues())


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig(ComponentConfig):
    """The `alg` block of an RL run.

    Args:
        id: an id of the registry, or an import path `package.module:Name`.
        args: arguments of the algorithm.
        kl_div: the KL penalty.
        policy: the language model as actor-critic, `id` and `args`.
        ptx: texts on which the policy is also trained, as a language model: `data` and `coeff`. null has none.
    """

    registry = ALGORITHMS

    kl_div: KLConfig
    policy: PolicyConfig
    ptx: PtxConfig | None = None

    @property
    def is_causal(self) -> bool:
        """True if the policy is for decoder-only models."""
        return is_causal(self.policy.id)

    @property
    def reads_pictures(self) -> bool:
        """True if the policy is for vision-language models."""
        return self.policy.reads_pictures

    @cached_property
    def algorithm(self) -> Algorithm:
        """The algorithm, for rules."""
        return algorithm_of(self.id, self.args)


def algorithm_of(id: str, args: Arguments) -> Algorithm:
    """Return a valid algorithm for rules; one of another library has neutral arguments."""
    target = ALGORITHMS.arguments_class(id)
    if inspect.isclass(target) and issubclass(target, OnPolicyArguments):
        arguments = make_block(target, check_arguments(target, args, "")[0])
        return Algorithm(id, arguments, vars(arguments))

    arguments = make_block(OnPolicyArguments, {"learning_rate": 1.0, "n_steps": 1})
    object.__setattr__(arguments, "given", frozenset(args))
    defaults = {} if target is None else signature_of(target).defaults
    return Algorithm(id, arguments, {**defaults, **args})


def policy_arguments_of(id: str, args: Arguments) -> PolicyArguments | None:
    """Return the arguments of a valid policy for rules; of a user's policy those that it shares with the library's.

    None if these have other types, so that they mean something else.
    """
    target = POLICIES.arguments_class(id)
    if inspect.isclass(target) and issubclass(target, PolicyArguments):
        return make_block(target, check_arguments(target, args, "")[0])
    return shared_arguments(args)[0]


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
class TrainEvaluationConfig(Block):
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
        callbacks: list of callbacks of your own: `id`, an import path, and `args`.
        average: average of the trained weights, saved in `average/` and evaluated after the training. null has none.
    """

    eval_batch_size: Count
    n_iters: Whole
    eval_every: Count
    save_every: Count = 20
    keep_last: Count | None = None
    keep_best: KeepBestConfig | None = None
    early_stopping: EarlyStoppingConfig | None = None
    metrics: list[MetricConfig] = field(default_factory=list)
    generation_kwargs: GenerationKwargs | None = None
    max_eval_samples: Count | None = None
    save_model: bool = True
    n_credit_episodes: Whole = 3
    save_rollouts: bool = False
    replay: str | None = None
    accept_edited_rollouts: bool = False
    callbacks: list[CallbackConfig] = field(default_factory=list)
    average: AverageConfig | None = None

    def issues(self) -> Iterator[ConfigIssue]:
        yield from average_issues(self.average)
        if self.average is not None and self.average.every > self.n_iters > 0:
            text = f"{self.average.every} iterations are more than the run has (n_iters: {self.n_iters})"
            yield ConfigIssue("average.every", text)
        if self.accept_edited_rollouts and self.replay is None:
            yield ConfigIssue("", "accept_edited_rollouts has no effect without replay; remove it")
        if self.keep_last is not None and not self.save_model:
            yield ConfigIssue("", "keep_last has no effect with save_model: false, which writes no checkpoints")


@dataclass(frozen=True, kw_only=True)
class HeldOutConfig:
    """Held-out metric that must not get worse while the reward rises.

    Args:
        metric: key of a metric on `val`, such as `lexical/meteor`.
        mode: whether larger (`max`) or smaller (`min`) is better.
    """

    metric: str
    mode: Literal["max", "min"]


@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """The `doctor` block: thresholds of the run doctor. It reports problems and does not change the run.

    null switches one alert off. The defaults are chosen so that healthy runs have no alerts; `python -m
    benchmarks.healthy_runs` measures this.

    Args:
        enabled: check every iteration and every evaluation on `val`.
        patience: number of consecutive iterations in which a condition must hold before it is reported.
        window: number of iterations of the conditions that need a longer history: `max_length_correlation`,
            `min_explained_variance`, `max_value_loss_growth`, and `min_reward_spread` in small rollouts.
        max_ratio_gap: alert if an update's first ratio differs from 1 by more than this; `auto`: 0.001, with `dtype:
            bfloat16` 0.4.
        kl_times_target: with `alg.kl_div.target_kl`: alert if the KL to the reference is above this multiple of it.
        max_kl: without `alg.kl_div.target_kl`: alert if the KL to the reference is above this, in nats per token.
        max_negative_kl: alert if the estimated KL is below minus this value, in nats per token.
        min_entropy: alert if the entropy of the policy is below this, in nats per token, unless the policy has solved
            its task.
        min_entropy_share: alert if the entropy is below this fraction of the first iteration's, unless the policy has
            solved its task.
        min_reward_spread: alert if the range of a rollout's episode rewards, divided by the largest absolute reward, is
            below this or 0, unless the policy improved to the best reward. In rollouts with fewer than 8 episodes this
            must hold for `window` iterations.
        min_differing_groups: alert if the fraction of groups whose rewards differ is below this, without
            `dynamic_sampling`, unless the policy has solved its task.
        min_kept_groups: alert if `dynamic_sampling` keeps less than this fraction of the generated groups.
        max_value_loss_growth: alert if the value loss is above this multiple of its previous median and above the mean
            square of the rewards.
        min_explained_variance: alert if the explained variance of the returns stays below this without improving,
            although rewards differ.
        max_truncated_share: alert if at least this fraction of the responses reaches the length limit and it was less
            in the first iteration; with `env.dialogue`, also if it was so from the first iteration on.
        max_equal_answer_share: with `env.dialogue`: alert if at least this fraction of the environment's answers is the
            same text.
        max_failed_calls: with tools: alert if more than this fraction of the calls fails.
        unused_tools: with tools: alert if one of them is not called for `window` iterations.
        max_empty_share: alert if at least this fraction of the responses ends with its first token.
        max_duplicate_share: alert if the most frequent response to several prompts is more than this fraction of a
            rollout, and by 0.25 more than in the first iteration.
        max_near_duplicate_share: alert if more than this fraction of the responses has a near duplicate with another
            prompt, and by 0.25 more than in the first iteration.
        max_length_correlation: alert if the rank correlation of length and reward, as a mean over `window`, is above
            this or below minus this.
        max_clip_fraction: alert if the fraction of tokens whose ratio is outside the clip range, as a mean over an
            update, is above this.
        max_approx_kl: alert if the KL of an update to the rollout's policy, as a mean over the update, is above this,
            in nats per token.
        min_minibatch_episodes: alert if minibatches have fewer episodes than this, as a mean over an update.
        no_learning: alert if updates have no effect: the gradient is 0, or TRPO's line search accepts no step.
        max_held_out_fall: alert if a metric on `val` has fallen from its best score by more than this fraction while
            the reward rose.
        held_out: metrics for `max_held_out_fall`; default: all metrics for which it is known whether higher is better,
            except the reward itself.
    """

    enabled: bool = True
    patience: Count = 3
    window: Count = 10
    max_ratio_gap: Positive | Literal["auto"] | None = "auto"
    kl_times_target: Positive | None = 3.0
    max_kl: Positive | None = 2.5
    max_negative_kl: NonNegative | None = 0.1
    min_entropy: NonNegative | None = 0.01
    min_entropy_share: Fraction | None = 0.02
    min_reward_spread: NonNegative | None = 1e-5
    min_differing_groups: Fraction | None = 0.1
    min_kept_groups: Fraction | None = 0.1
    max_value_loss_growth: Positive | None = 10.0
    min_explained_variance: Finite | None = -1.0
    max_truncated_share: Fraction | None = 0.99
    max_equal_answer_share: Fraction | None = 1.0
    max_failed_calls: Fraction | None = 0.5
    unused_tools: bool = True
    max_empty_share: Fraction | None = 0.9
    max_duplicate_share: Fraction | None = 0.5
    max_near_duplicate_share: Fraction | None = 0.5
    max_length_correlation: Fraction | None = 0.9
    max_clip_fraction: Fraction | None = 0.5
    max_approx_kl: Positive | None = 0.2
    min_minibatch_episodes: Count | None = 4
    no_learning: bool = True
    max_held_out_fall: Fraction | None = 0.25
    held_out: list[HeldOutConfig] = field(default_factory=list)


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
    reward_fn: RewardConfig
    datapool: PromptPoolConfig
    env: RunEnvConfig = field(default_factory=RunEnvConfig)
    alg: AlgorithmConfig
    train_evaluation: TrainEvaluationConfig
    doctor: DoctorConfig = field(default_factory=DoctorConfig)
    tiny_model: TinyModelConfig | None = None


COMPILE_KEYS = ("torch_compile", "torch_compile_backend", "torch_compile_mode")
"""Keys of `training_args`, each of which compiles the model."""


# --- blocks of supervised and preference runs ----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _OfflineAlgConfig(Block):
    """Keys of `alg` that supervised runs and preference runs have in common.

    Args:
        model_type: family of the model: decoder-only (`causal`), encoder-decoder (`seq2seq`), or a decoder-only model
            that reads prompts with images (`vision`).
        model_name: model of this hub id or local folder.
        generation_kwargs: generation arguments of evaluations.
        training_args: arguments of transformers' `TrainingArguments`. `metric_for_best_model` is `loss` or a key of the
            metrics.
        attn_implementation: attention of transformers: `eager`, `sdpa`, `flash_attention_2` ...; default: transformers'
            choice.
        separator: text inserted between prompt and reference of a causal model; default: a space if neither has white
            space there.
        early_stopping_patience: stop training after this many evaluations on `val` without improvement; null never
            stops early.
        early_stopping_threshold: smallest improvement that counts, in units of `metric_for_best_model`.
        peft: train low-rank adapters instead of the weights. The keys are fields of PEFT's `LoraConfig`, for example
            `{r: 8, lora_alpha: 16}`.
        merge_on_save: with `peft`, save a whole model with the adapters merged into it; otherwise only the adapters.
        train_vision: with `model_type: vision`: what is trained besides the language model: `none`, the `projector`
            that turns features of images into embeddings, or `all`, which is the tower too. With `peft`, the same
            layers get adapters.
        max_pixels: with `model_type: vision`: images with more pixels (width times height) are made smaller before the
            model's processor gets them; null is the processor's own limit.
        quantization: with `peft`: store the linear layers of the model and of a reference model quantized, their heads
            excepted; as in `alg.policy.args`.
        packing: `auto` computes the texts of a batch behind one another, without padding between them, where their
            lengths make it faster and the model stays exact, which is checked when it is loaded; null pads them.
        activation_offload: keep activations and logits in main memory from the forward to the backward pass.
    """

    model_type: Literal["causal", "seq2seq", "vision"]
    model_name: str
    generation_kwargs: OfflineGenerationKwargs = field(default_factory=dict)
    training_args: Arguments = field(default_factory=dict)
    attn_implementation: str | None = None
    separator: str | None = None
    early_stopping_patience: Count | None = None
    early_stopping_threshold: NonNegative = 0.0
    peft: Peft | None = None
    merge_on_save: bool = False
    train_vision: TrainVision = "none"
    max_pixels: Count | None = None
    quantization: Quantization | None = None
    packing: Literal["auto"] | None = None
    activation_offload: bool = False

    @property
    def is_causal(self) -> bool:
        """True if the model is decoder-only."""
        return self.model_type != "seq2seq"

    @property
    def reads_pictures(self) -> bool:
        """True if the model reads prompts with pictures."""
        return self.model_type == "vision"

    def issues(self) -> Iterator[ConfigIssue]:
        yield from super().issues()
        if not self.reads_pictures:
            for key, default in (("train_vision", "none"), ("max_pixels", None)):
                if getattr(self, key) != default:
                    yield ConfigIssue(key, "has no effect without alg.model_type: vision; remove it")
        if not self.is_causal and self.separator is not None:
            text = "separator: a seq2seq model does not join prompt and reference to one text; remove it"
            yield ConfigIssue("", text)
        if self.early_stopping_patience is None and self.early_stopping_threshold:
            yield ConfigIssue("", "early_stopping_threshold has no effect without early_stopping_patience")
        if self.merge_on_save and self.peft is None:
            yield ConfigIssue("merge_on_save", "there are no adapters to merge without peft")
        yield from quantization_issues(self.quantization, self.peft)
        if self.quantization is not None and self.reads_pictures:
            yield ConfigIssue("quantization", "is not supported for vision-language models; remove it")
        if self.quantization is not None and self.training_args.get("torch_compile"):
            yield ConfigIssue("training_args.torch_compile", "is not supported with quantization; remove one of them")
        if self.activation_offload and any(self.training_args.get(key) for key in COMPILE_KEYS):
            text = "is not supported with training_args.torch_compile: remove one of them"
            yield ConfigIssue("activation_offload", text)
        yield from self._attention_issues()
        if self.packing is not None:
            yield from self._packing_issues()

    def _packing_issues(self) -> Iterator[ConfigIssue]:
        if self.model_type != "causal":
            yield ConfigIssue("packing", f"is not supported for {self.model_type} models; remove it")
        if any(self.training_args.get(key) for key in COMPILE_KEYS):
            yield ConfigIssue("packing", "is not supported with training_args.torch_compile: remove one of them")
        if self.training_args.get("neftune_noise_alpha"):
            text = "changes the noise of training_args.neftune_noise_alpha, which depends on a row's length; remove it"
            yield ConfigIssue("packing", text)

    def _attention_issues(self) -> Iterator[ConfigIssue]:
        name = self.attn_implementation or ""
        if "/" in name:
            text = f"{name!r} would run code from the hub, which runs on given texts do not; use eager or sdpa"
            yield ConfigIssue("attn_implementation", text)
            return
        has_16_bits = self.training_args.get("bf16") or self.training_args.get("fp16")
        if "flash" in name and not has_16_bits:
            yield ConfigIssue("attn_implementation", f"{name!r} has no float32; set training_args.bf16: true")


DEFAULT_LOGITS_BUDGET_MB = 512.0  # as it is written to `config.json` and read again


@dataclass(frozen=True, kw_only=True)
class SupervisedAlgConfig(_OfflineAlgConfig):
    """The `alg` block of a supervised run.

    Args:
        id: selects a supervised run.
        loss_on_prompt: for causal models: train on the prompts too, not only on the references.
        block_length: tokens of an example of data that are texts without prompts; longer texts are divided. Default:
            the longest text that model and tokenizer accept.
        logits_budget_mb: limit in MiB for the logits of a forward pass. If those of all tokens of a batch need more
            (4 bytes x tokens x vocabulary size), only those of learned tokens are computed, and recomputed for the
            gradient, in chunks of this size. null has no limit.
    """

    id: Literal["supervised"]
    loss_on_prompt: bool = False
    block_length: BlockLength | None = None
    logits_budget_mb: Annotated[float, Ge(1)] | None = DEFAULT_LOGITS_BUDGET_MB

    def issues(self) -> Iterator[ConfigIssue]:
        yield from super().issues()
        if not self.is_causal and self.loss_on_prompt:
            text = "loss_on_prompt: a seq2seq model reads the prompt and cannot learn to write it; remove it"
            yield ConfigIssue("", text)
        if not self.is_causal and self.block_length is not None:
            yield ConfigIssue("block_length", "only causal models learn texts without prompts; remove it")

        # null is what they mean, and the default cannot be told from no value.
        if self.needs_whole_logits and self.logits_budget_mb not in (None, DEFAULT_LOGITS_BUDGET_MB):
            text = "has no effect with training_args.label_smoothing_factor and torch_compile; remove it"
            yield ConfigIssue("logits_budget_mb", text)

    @property
    def needs_whole_logits(self) -> bool:
        """True if the loss of a batch is computed from the logits of all its tokens, whatever the budget is."""
        return any(self.training_args.get(key) for key in ("label_smoothing_factor", *COMPILE_KEYS))


@dataclass(frozen=True, kw_only=True)
class PreferenceAlgConfig(ComponentConfig, _OfflineAlgConfig):
    """The `alg` block of a preference run.

    Args:
        id: id of the objective.
        args: arguments of the objective.
        training_args: arguments of transformers' `TrainingArguments`. Batch sizes count pairs (for `kto`, responses).
            `metric_for_best_model` is `loss`, a key of the metrics, or one that the objective reports on `val`.
        separator: text inserted between prompt and response of a causal model; default: a space if neither has white
            space there.
    """

    registry = OBJECTIVES

    def issues(self) -> Iterator[ConfigIssue]:
        yield from super().issues()
        if self.args.get("dropout") == "adapters" and not (self.peft or {}).get("lora_dropout"):
            yield ConfigIssue("args.dropout", "'adapters' has no effect without alg.peft.lora_dropout above 0")

        if self.args.get("reference_update_iterations") is not None and self.peft is not None:
            text = "cannot be used with peft, whose reference is the base model of the adapters"
            yield ConfigIssue("args.reference_update_iterations", text)

        # Of supervised runs, with a loss of tokens.
        if self.training_args.get("label_smoothing_factor"):
            text = "smooths labels of tokens, and this objective has none; dpo has alg.args.label_smoothing"
            yield ConfigIssue("training_args.label_smoothing_factor", text)
        if self.training_args.get("train_sampling_strategy") == "group_by_length":
            text = "pairs are not grouped by length; use random"
            yield ConfigIssue("training_args.train_sampling_strategy", text)

        if self.writes_text:
            return
        if self.attn_implementation in ("flash_attention_2", "flash_attention_3"):
            text = f"{self.id} compares its output with the model's own in float32; use sdpa"
            yield ConfigIssue("attn_implementation", text)
        if self.generation_kwargs:
            text = f"{self.id} writes no text; it is evaluated on the preferences of val and test"
            yield ConfigIssue("generation_kwargs", text)
        if self.peft is not None and not self.merge_on_save:
            text = f"must be true with peft: the output layer of {self.id} is not part of the adapters"
            yield ConfigIssue("merge_on_save", text)

    @property
    def writes_text(self) -> bool:
        """True if the trained model is a language model; a reward model is not."""
        return bool(self.arguments.has_language_model)


@dataclass(frozen=True, kw_only=True)
class SupervisedEvaluationConfig(Block):
    """The `train_evaluation` block of a supervised run.

    Args:
        eval_batch_size: number of prompts per generation call.
        metrics: list of metrics: `id`, `args`, and a `name` if two metrics would report the same keys.
        max_eval_samples: evaluate only this many samples of a split, from its beginning; null evaluates all.
        generate: generate texts in evaluations. If false, they only compute the loss, and in preference runs the scores
            of the preferences; there can be no metrics.
        save_model: save the final model. If false, checkpoints are written only if `training_args` sets
            `save_strategy`.
        callbacks: list of callbacks of your own: `id`, an import path, and `args`.
        average: average of the trained weights, saved in `average/` and evaluated after the training. null has none.
    """

    eval_batch_size: Count
    metrics: list[MetricConfig] = field(default_factory=list)
    max_eval_samples: Count | None = None
    generate: bool = True
    save_model: bool = True
    callbacks: list[CallbackConfig] = field(default_factory=list)
    average: AverageConfig | None = None

    def issues(self) -> Iterator[ConfigIssue]:
        yield from average_issues(self.average)
        if self.metrics and not self.generate:
            yield ConfigIssue("", "metrics need generate: true, since they score generated texts")


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
    datapool: DataPoolConfig
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
    datapool: DataPoolConfig
    alg: PreferenceAlgConfig
    train_evaluation: SupervisedEvaluationConfig


OfflineConfig: TypeAlias = SupervisedConfig | PreferenceConfig
AnyConfig: TypeAlias = RunConfig | OfflineConfig


def average_issues(average: AverageConfig | None) -> Iterator[ConfigIssue]:
    """Yield the errors of a `train_evaluation.average` block, with paths relative to the block around it."""
    if average is not None:
        yield from (issue.below("average") for issue in average.issues())


def where_from(name: str) -> str:
    """Return where a file or folder of a config was looked for, for messages; empty for an absolute path."""
    return "" if with_home(name).is_absolute() else f" below {Path.cwd()}"
