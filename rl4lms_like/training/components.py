"""Build the reward, metrics, callbacks and post-processor of a run, before any data or weights are read.

Constructors check that their packages, word lists and programs are available. Everything that is missing is reported at
once. After the data are loaded, `check_samples` checks that components have the references and columns that they need,
and `data_lines` describes the samples for `check`:

    train   1,000 samples; 12 prompts are longer than 64 tokens (up to 93) and cut; 3 without references
    val     100 samples; all prompts within 64 tokens (up to 60)
    prompt  'Summarise: ...'
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from rl4lms_like.callbacks import CALLBACKS
from rl4lms_like.callbacks.base import Callback
from rl4lms_like.config.binding import POST_PROCESSING, ComponentConfig, build_component
from rl4lms_like.config.run_config import AnyConfig, MetricConfig, RunConfig, SupervisedConfig
from rl4lms_like.core.chat_template import ChatTemplate
from rl4lms_like.core.observation import NO_LIMIT, TextLayout
from rl4lms_like.core.picture_encoder import PictureEncoder
from rl4lms_like.core.sample import Sample
from rl4lms_like.data_pools import DATA_POOLS
from rl4lms_like.data_pools.base import TextGenPool
from rl4lms_like.envs.dialogue_vec_env import token_reward_issues
from rl4lms_like.metrics import METRICS
from rl4lms_like.metrics.base import BaseMetric, NamedMetric
from rl4lms_like.post_processors import POST_PROCESSORS, try_post_processor
from rl4lms_like.rewards import REWARDS
from rl4lms_like.rewards.python_function import column_issues
from rl4lms_like.system.errors import (
    ComponentError,
    ConfigError,
    ConfigIssue,
    DataPoolError,
    NotReadyError,
    RL4LMsLikeError,
)
from rl4lms_like.training.run_reward import with_run_reward

REWARD = "reward_fn"
POOL = "datapool"
METRIC = "train_evaluation.metrics"
CALLBACK = "train_evaluation.callbacks"
"""Paths of the components in a config."""
N_COUNTED = 10_000
"""Number of prompts per split whose tokens are counted, which takes some seconds. Later prompts are not counted."""
N_PROMPTS = 2
"""Number of `train` prompts that are shown."""
SHOWN_START = 300
SHOWN_END = 100
"""Number of characters shown of a long prompt, from its start and its end, where a pool adds its suffix."""


@dataclass(frozen=True)
class Components:
    """Reward, metrics, post-processor and callbacks of a run."""

    reward_fn: Any  # of an RL run; None in supervised runs, and if it was not requested
    metrics: list[BaseMetric]
    post_processor: Callable[[str], str] | None  # applied by supervised runs to each response before it is scored
    callbacks: list[Callback] = field(default_factory=list)  # of the user


def build_components(config: AnyConfig, *, with_reward: bool = True, with_callbacks: bool = True) -> Components:
    """Build all components, or report everything that prevents it. An evaluation needs no reward and no callbacks.

    Raises:
        ConfigError: a constructor rejected its arguments.
        NotReadyError: several components could not be built.
        RL4LMsLikeError: one component could not be built.
    """
    # All are tried: a user installs everything that is missing at once, instead of one package per attempt.
    built: dict[str, Any] = {}
    errors: dict[str, RL4LMsLikeError] = {}
    for path, build in _builders(config):
        if path == REWARD and not with_reward:
            continue
        if path.startswith(CALLBACK) and not with_callbacks:
            continue
        try:
            built[path] = build()
        except RL4LMsLikeError as error:
            errors[path] = error

    # If one of them is an error of the config, all are reported as issues of the config, with the keys to change.
    if any(_is_issue(error) for error in errors.values()):
        issues = []
        for path, failure in errors.items():
            issues.append(ConfigIssue(f"{path}.args" if _is_issue(failure) else path, str(failure)))
        raise ConfigError(issues)
    if len(errors) == 1:
        raise next(iter(errors.values()))
    if errors:
        raise NotReadyError(errors)

    metrics = [component for path, component in built.items() if path.startswith(f"{METRIC}.")]
    if with_reward:
        metrics = with_run_reward(config, metrics, built.get(REWARD))
    callbacks = [component for path, component in built.items() if path.startswith(f"{CALLBACK}.")]
    return Components(built.get(REWARD), metrics, built[POST_PROCESSING], callbacks)


def check_samples(config: AnyConfig, components: Components, samples: Mapping[str, Sequence[Sample]]) -> None:
    """Check that the samples have the references and columns that a run trains on, compares with or passes on.

    A reward needs references for every training sample. A metric or a supervised run needs at least one sample with
    references. Every parameter of a user's function must be a column.

    Raises:
        ConfigError: the reward would fail, or metrics would be NaN.
        DataPoolError: a supervised run has no references to train on.
    """
    _check_references(config, components, samples)

    evaluated = [*samples["val"], *samples["test"]]
    issues = []
    if isinstance(config, RunConfig):
        issues += column_issues(components.reward_fn, samples["train"], REWARD)
        if config.env.dialogue is not None:
            issues += token_reward_issues(components.reward_fn)
    for index, metric in zip(_metrics_to_build(config), components.metrics, strict=False):
        inner = metric.metric if isinstance(metric, NamedMetric) else metric
        issues += column_issues(inner, evaluated or samples["train"], f"{METRIC}.{index}")
    if issues:
        raise ConfigError(issues)


def _check_references(config: AnyConfig, components: Components, samples: Mapping[str, Sequence[Sample]]) -> None:
    if isinstance(config, SupervisedConfig) and not any(sample.references for sample in samples["train"]):
        raise DataPoolError(f"data pool {config.datapool.id!r}: no sample of the split 'train' has a reference")
    issues = []

    # A reward scores every prompt of `train`, so one sample without a reference would end the run.
    if isinstance(config, RunConfig) and getattr(components.reward_fn, "needs_references", False):
        without = [sample.id for sample in samples["train"] if not sample.references]
        if without:
            n_samples = len(samples["train"])
            lacking = f"{len(without):,} of {n_samples:,} samples of 'train' lack (the first is {without[0]!r})"
            message = f"{config.reward_fn.id!r} compares with references, which {lacking}; {_HINT}"
            issues.append(ConfigIssue(REWARD, message))

    # A metric is a mean over the samples that have references; without any it would be NaN.
    evaluated = [*samples["val"], *samples["test"]]
    if evaluated and not any(sample.references for sample in evaluated):
        message = f"compares with references, and no sample of 'val' or 'test' has any; {_HINT}"
        for index, metric in zip(_metrics_to_build(config), components.metrics, strict=False):
            if getattr(metric, "needs_references", False):
                id = config.train_evaluation.metrics[index].id
                issues.append(ConfigIssue(f"{METRIC}.{index}", f"{id!r} {message}"))

    if issues:
        raise ConfigError(issues)


_HINT = "add references (`reference_column` of jsonl, csv and hf_dataset), or choose one that does not need them"


def _metrics_to_build(config: AnyConfig) -> list[int]:
    """Return the indices of the metrics, of equal ones only the first: RL4LMs' files list some twice."""
    metrics = config.train_evaluation.metrics
    return [index for index, metric in enumerate(metrics) if metric not in metrics[:index]]


def _is_issue(error: RL4LMsLikeError) -> bool:
    """Return whether the config caused the error: constructors reject the value of an argument with `ValueError`."""
    return isinstance(error, ComponentError) and isinstance(error.__cause__, ValueError)


def build_post_processor(config: AnyConfig) -> Callable[[str], str] | None:
    """Return the function that `post_processing_fn` names, after a test on one text; None if it is not set.

    Raises:
        RL4LMsLikeError: the function failed, or a requirement is missing.
    """
    # Of supervised and preference runs, whose generation arguments are a part of `alg`. RL runs have no such key.
    if isinstance(config, RunConfig):
        return None
    block = config.alg.generation_kwargs.get("post_processing_fn")
    if block is None:
        return None

    function: Callable[[str], str] = POST_PROCESSORS.get(block["id"], block.get("args"))
    try_post_processor(function)
    return function


def _require_pool(config: ComponentConfig) -> None:
    """Check the requirements of a data pool now, because its splits are only prepared later."""
    pool = DATA_POOLS.resolve(config.id)
    if isinstance(pool, type) and issubclass(pool, TextGenPool):
        pool.require(f"the data pool {config.id!r}", **config.args)


def _build_metric(config: MetricConfig) -> BaseMetric:
    metric: BaseMetric = build_component(METRICS, config)
    return metric if config.name is None else NamedMetric(metric, config.name)


def _builders(config: AnyConfig) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the config path of each component and the function that builds it."""
    if isinstance(config, RunConfig):
        yield REWARD, partial(build_component, REWARDS, config.reward_fn)
    yield POOL, partial(_require_pool, config.datapool)
    for index in _metrics_to_build(config):
        yield f"{METRIC}.{index}", partial(_build_metric, config.train_evaluation.metrics[index])
    yield POST_PROCESSING, partial(build_post_processor, config)
    for index, callback in enumerate(config.train_evaluation.callbacks):
        yield f"{CALLBACK}.{index}", partial(build_component, CALLBACKS, callback)


def data_lines(
    samples: Mapping[str, Sequence[Sample]],
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_prompt_length: int = 0,
    *,
    is_encoder_decoder: bool = False,
    pictures: PictureEncoder | None = None,
) -> list[tuple[str, str]]:
    """Return the contents of each split, and the first prompts; without a tokenizer, tokens are not counted."""
    rows = []
    for split, members in samples.items():
        facts = [f"{len(members):,} samples"]
        if tokenizer is not None and members:
            lengths = prompt_lengths(
                members, tokenizer, max_prompt_length, is_encoder_decoder=is_encoder_decoder, pictures=pictures
            )
            facts.append(lengths)
        if pictures is not None and any(sample.images for sample in members[:N_COUNTED]):
            facts.append(image_sizes(members[:N_COUNTED], pictures))
        n_without = sum(not sample.references for sample in members)
        if n_without:
            amount = "all" if n_without == len(members) else f"{n_without:,}"
            facts.append(f"{amount} without references")
        rows.append((split, "; ".join(facts)))

    for sample in samples["train"][:N_PROMPTS]:
        rows.append(("prompt", shortened(sample.prompt_or_input_text)))
    return rows


def chat_lines(
    sample: Sample, tokenizer: PreTrainedTokenizerBase, pictures: PictureEncoder | None = None
) -> list[tuple[str, str]]:
    """Return the rendered prompt of a sample, its token ids, and the token after a message of the assistant."""
    (ids,) = TextLayout(tokenizer, NO_LIMIT, 1, pictures=pictures).encode_all([sample])

    # The token that ends a turn also ends a response; a template without one leaves only the end-of-text token.
    end = ChatTemplate(tokenizer).end_of_turn
    end_of_turn = "none"
    if end is not None:
        end_of_turn = f"{tokenizer.convert_ids_to_tokens(end)!r} ({end})"
    return [
        ("rendered prompt", repr(sample.rendered_prompt)),
        ("ids", " ".join(map(str, ids))),
        ("end of turn", end_of_turn),
    ]


def prompt_lengths(
    samples: Sequence[Sample],
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_length: int,
    *,
    is_encoder_decoder: bool,
    pictures: PictureEncoder | None = None,
) -> str:
    """Return how many prompts are longer than `max_prompt_length` tokens, and the length of the longest, in words.

    The end token that is removed from the prompts of a causal model, if any, is named.
    """
    counted = samples[:N_COUNTED]
    layout = TextLayout(tokenizer, NO_LIMIT, 1, is_encoder_decoder=is_encoder_decoder, pictures=pictures)
    lengths = [len(ids) for ids in layout.encode_all(counted)]
    n_longer = sum(length > max_prompt_length for length in lengths)

    scope = "" if len(counted) == len(samples) else f" of the first {len(counted):,}"
    text = f"all prompts{scope} within {max_prompt_length:,} tokens (up to {max(lengths):,})"
    if n_longer:
        text = (
            f"{n_longer:,} prompts{scope} are longer than {max_prompt_length:,} tokens (up to {max(lengths):,}) and cut"
        )
    removed = layout.continuations.appended_ids
    if removed and samples[0].rendered_prompt is None:
        text += f"; without the end token {tokenizer.decode(removed)!r}, which the tokenizer appends"
    return text


def image_sizes(samples: Sequence[Sample], pictures: PictureEncoder) -> str:
    """Return the numbers of tokens of images, and the memory that the model's input of one prompt needs, in words.

    One of the samples has images.
    """
    counted = [sample for sample in samples if sample.images]
    n_tokens = []  # of an image, the mean of its prompt
    n_of_prompts = []
    for sample in counted:
        n_of_prompt = int((pictures.encode(sample, NO_LIMIT) == pictures.image_token_id).sum())
        n_tokens.append(n_of_prompt // len(sample.images))
        n_of_prompts.append(n_of_prompt)

    # The prompt with the most tokens of images has the largest tensors. Those of all would be made once more.
    largest = counted[n_of_prompts.index(max(n_of_prompts))]
    n_bytes = sum(tensor.nbytes for tensor in pictures.tensors([pictures.number(largest)]).values())
    amount = "all" if len(counted) == len(samples) else f"{len(counted):,}"
    tokens = f"{min(n_tokens):,} to {max(n_tokens):,}" if min(n_tokens) < max(n_tokens) else f"{n_tokens[0]:,}"
    return f"{amount} with images, of {tokens} tokens each, up to {n_bytes / 2**20:.2f} MiB in a prompt"


def shortened(text: str) -> str:
    """Return the `repr` of a text, of a long one of its beginning and its end."""
    if len(text) <= SHOWN_START + SHOWN_END:
        return repr(text)
    return f"{text[:SHOWN_START]!r} ... {text[-SHOWN_END:]!r}"
