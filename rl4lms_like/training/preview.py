"""Collect the output of `check`.

Notices, batches, models, memory and data; with `--full` the config, with `--reward` the audit of the reward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeAlias

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from rl4lms_like.core.errors import ConfigError, ConfigIssue, ModelError, RewardError, RL4LMsLikeError
from rl4lms_like.core.observation import TextLayout
from rl4lms_like.core.sample import Sample
from rl4lms_like.core.secrets import with_values
from rl4lms_like.data_pools import DATA_POOLS
from rl4lms_like.envs.arguments import EnvArguments
from rl4lms_like.envs.env import length_limit
from rl4lms_like.rewards import REWARDS
from rl4lms_like.rewards.audit import AuditedReward, audit_reward, n_calls
from rl4lms_like.rewards.probes import Probes
from rl4lms_like.training.assemble import (
    build_datapool,
    build_datapools,
    build_sampler,
    build_tokenizer,
    load_model_config,
    render_prompts,
)
from rl4lms_like.training.components import Components, build_components, chat_lines, check_references, data_lines
from rl4lms_like.training.config import settings
from rl4lms_like.training.config.binding import build_component, with_defaults
from rl4lms_like.training.config.notices import learning_rate_notice
from rl4lms_like.training.config.run_config import AnyConfig, OfflineConfig, RunConfig, SupervisedConfig
from rl4lms_like.training.config.yaml_file import dump_yaml
from rl4lms_like.training.estimates.budget import plan_batches
from rl4lms_like.training.estimates.memory import estimate_memory, gibibytes
from rl4lms_like.training.preferences import assemble as preferences
from rl4lms_like.training.replay import plan_of, with_replay
from rl4lms_like.training.run import silence_libraries
from rl4lms_like.training.small_models.embedded import with_embedded_models
from rl4lms_like.training.supervised import assemble as supervised

FoundSamples: TypeAlias = Mapping[str, Sequence[Sample]] | None
"""Split -> samples; None if the data are not on this machine."""

N_PROCESSES = (2, 4, 8)
"""Numbers of processes for which `check` estimates the memory of each, if they split the weights."""
NOT_LOCAL = "not checked: the data pool may read from a network"


def preview(config: AnyConfig, *, full: bool = False) -> Iterator[str]:
    """Yield the sections of the output, fast ones first; `full` adds the config with every default filled in.

    Raises:
        ConfigError: arguments for transformers or PEFT have errors, models and lengths are incompatible, or samples
            lack references that a component needs.
        DataPoolError: the data pool could not be prepared.
        ModelError: the tokenizer has tokens that the model does not have, or a local folder lacks weights.
        RL4LMsLikeError: a component cannot be built on this machine; raised after all other output.
    """
    if config.notices:
        yield "# notices\n" + "".join(f"{notice}\n" for notice in config.notices)
    silence_libraries()
    tokenizer = cache(partial(_tokenizer, config))
    samples = cache(partial(_samples, config, tokenizer))
    models: _Models | None = None
    failures: list[RL4LMsLikeError] = []
    if isinstance(config, RunConfig):
        yield "# batches\n" + _table(plan_batches(config).lines())
        with _collected(failures):
            settings.check_settings(config, here=False)
        with _collected(failures):
            text, models = _models(config)
            yield "# models\n" + text
            yield "# memory\n" + _memory(config)
        with _collected(failures):
            if rows := list(_rollouts(config, models)):
                yield "# rollouts\n" + _table(rows)
    else:
        with _collected(failures):
            yield "# training\n" + _table(_plan(config, samples))
        with _collected(failures):
            supervised.check_model(config)
    components: Components | None = None
    with _collected(failures):
        components = build_components(config)
    with _collected(failures):
        found = samples()
        lengths = () if models is None else (models.tokenizer, models.max_prompt_length)
        yield "# data\n" + (NOT_LOCAL + "\n" if found is None else _table(data_lines(found, *lengths)))
        if found is not None and found["train"][0].rendered_prompt is not None:
            yield "# chat template\n" + _table(chat_lines(found["train"][0], tokenizer()))
        if found is not None and isinstance(config, RunConfig) and config.datapool.sampler is not None:
            build_sampler(config.datapool.sampler, found["train"])
        if found is not None and components is not None:
            check_references(config, components, found)
        if found is not None and models is not None:
            settings.check_prompts(found, models.tokenizer, models.config)
    if full:
        yield "# resolved config\n" + resolved(config)
    if failures:
        raise _together(failures)


@contextmanager
def _collected(failures: list[RL4LMsLikeError]) -> Iterator[None]:
    """Add an error of the library to `failures` instead of raising it."""
    try:
        yield
    except RL4LMsLikeError as error:
        if str(error) not in map(str, failures):
            failures.append(error)


def _together(failures: Sequence[RL4LMsLikeError]) -> RL4LMsLikeError:
    """Return one error that combines all failures; a `ConfigError` if one of them is an error in the config."""
    if len(failures) == 1:
        return failures[0]
    if not any(isinstance(failure, ConfigError) for failure in failures):
        return RL4LMsLikeError("\n".join(map(str, failures)))
    issues: list[ConfigIssue] = []
    for failure in failures:
        issues += failure.issues if isinstance(failure, ConfigError) else [ConfigIssue("", str(failure))]
    return ConfigError(issues)


def resolved(config: AnyConfig) -> str:
    """Return the config as YAML with every default filled in; it loads to the same run."""
    return dump_yaml(with_defaults(config.to_dict()))


@dataclass(frozen=True)
class _Models:
    """Facts about the models that are needed to check the data."""

    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    max_prompt_length: int


def _models(config: RunConfig) -> tuple[str, _Models | None]:
    """Check that models, tokenizer and lengths fit each other, and describe them; only local files are read."""
    config = with_embedded_models(config)
    try:
        networks = settings.load_networks(config, partial(load_model_config, local_files_only=True))
        tokenizer = build_tokenizer(config.tokenizer, local_files_only=True)
    except ModelError as error:
        return f"not checked: {error}\n", None
    settings.check_fit(config, tokenizer, networks, local_files_only=True)
    prompt, response = settings.check_lengths(config, tokenizer, networks)
    message = f"fit: {len(tokenizer):,} tokens; up to {prompt:,} in a prompt and {response:,} in a response\n"
    complete = settings.check_weights(config, networks)
    message += f"weights: {'complete' if complete else 'compared with the config when they are loaded'}\n"
    return message, _Models(networks["model_name"], tokenizer, prompt)


class _NotLoadedError(RL4LMsLikeError):
    """The data may be read from a network, from which a check reads nothing."""


def _plan(config: OfflineConfig, samples: Callable[[], FoundSamples]) -> list[tuple[str, str]]:
    """Return the plan of a supervised or preference run, or what is not on this machine; errors are raised."""

    def find() -> Mapping[str, Sequence[Sample]]:
        if (found := samples()) is None:
            raise _NotLoadedError("the data were not loaded")
        return found

    try:
        if isinstance(config, SupervisedConfig):
            return supervised.plan(config, find)
        return preferences.plan(config, find)
    except (ModelError, _NotLoadedError) as error:
        return [("no plan", str(error))]


def _tokenizer(config: AnyConfig) -> PreTrainedTokenizerBase:
    return build_tokenizer(with_embedded_models(config).tokenizer, local_files_only=True)


def _samples(config: AnyConfig, tokenizer: Callable[[], PreTrainedTokenizerBase]) -> FoundSamples:
    """Return the samples of all splits, or None if the data pool may read from a network."""
    if not DATA_POOLS.resolve(config.datapool.id).is_local(**with_values(config.datapool.args)):
        return None
    pools = build_datapools(config.datapool)
    with suppress(ModelError):  # the tokenizer is not on this machine; the section of the models says so
        pools = render_prompts(pools, config.tokenizer, tokenizer())
    return {split: [sample for sample, _ in pool] for split, pool in pools.items()}


def _memory(config: RunConfig) -> str:
    try:
        estimate = estimate_memory(config)
    except ModelError as error:
        return f"no estimate: {error}\n"
    notice = learning_rate_notice(config.to_dict(), estimate.n_parameters)
    rows = [(name, gibibytes(size)) for name, size in estimate.parts.items() if size]
    rows += [("peak of the update", gibibytes(estimate.update)), ("peak of the rollout", gibibytes(estimate.rollout))]
    if config.distributed.strategy == "fsdp":
        peaks = {n: gibibytes(estimate_memory(config, n).peak) for n in N_PROCESSES}
        rows += [(f"peak of each of {n} processes", size) for n, size in peaks.items()]
    return _table(rows) + estimate.verdict + "\n" + (f"{notice}\n" if notice else "")


def _rollouts(config: RunConfig, models: _Models | None) -> Iterator[tuple[str, str]]:
    """Yield what is replayed, and how large the kept rollouts will be."""
    if config.train_evaluation.replay is not None:
        yield "replay", str(plan_of(with_replay(config).to_dict()))
    if not config.train_evaluation.save_rollouts:
        return
    if models is None:
        yield "size", "no estimate without model and tokenizer"
    else:
        is_masked = "mask_type" in with_defaults(config.to_dict())["alg"]["policy"]["args"]
        mask_bytes = -(-int(models.config.get_text_config().vocab_size) // 8) if is_masked else 0
        size = plan_batches(config).rollout_bytes(models.max_prompt_length, mask_bytes)
        n_iters = config.train_evaluation.n_iters
        yield "size", f"about {gibibytes(size)} per iteration, {gibibytes(n_iters * size)} in all, at full length"


def _table(rows: list[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "".join(f"{name:<{width}}  {value}\n" for name, value in rows)


def reward_audit(config: AnyConfig, *, remote: bool = False) -> Iterator[str]:
    """Yield the number of calls, and after them the results; the policy is not loaded.

    Raises:
        ConfigError: the run is supervised, or the reward is on a server and `remote` is False.
        RewardError: the reward failed for a text; raised after all other output.
        RL4LMsLikeError: reward, data pool or tokenizer cannot be built.
    """
    if not isinstance(config, RunConfig):
        raise ConfigError([ConfigIssue("--reward", "a supervised run has no reward")], "the command line")
    config = with_embedded_models(config)
    reward = build_component(REWARDS, config.reward_fn)
    pool = build_datapool(config.datapool, "train")
    tokenizer, env = build_tokenizer(config.tokenizer), EnvArguments(**config.env.args)
    layout = TextLayout(
        tokenizer,
        env.max_prompt_length or length_limit(tokenizer),
        env.max_episode_length,
        env.context_start_token,
        env.prompt_truncation_side,
    )
    probes = Probes([sample for sample, _ in pool], layout)
    size = f"{len(probes)} texts from {len(probes.samples)} samples of 'train', at most {n_calls(reward, probes)} calls"
    if not remote and _is_remote({"id": config.reward_fn.id, "args": config.reward_fn.args}):
        text = f"the reward sends texts to a server ({size}); to call it, add --remote"
        raise ConfigError([ConfigIssue("--reward", text)], "the command line")
    yield f"# reward\n{size}\n"
    results = audit_reward(reward, probes)
    yield _audit_table(results) + "\n" + _findings(results)
    if any(finding.kind == "failure" for finding in results[0].findings):
        raise RewardError(results[0].errors[0])


def _is_remote(block: Any) -> bool:
    """Return True if a block of a config, or one inside it, is the reward `http` or `llm_judge`."""
    if isinstance(block, Mapping):
        id = block.get("id")
        is_class = str(id).endswith((":HttpReward", ":LLMJudgeReward"))
        return id in ("http", "llm_judge") or is_class or any(map(_is_remote, block.values()))
    return isinstance(block, list | tuple) and any(map(_is_remote, block))


def _audit_table(results: Sequence[AuditedReward]) -> str:
    """Return the mean reward of each text and the times, with a column for each part."""
    rows = [["text", *(result.name or "reward" for result in results)]]
    rows += [[name, *(f"{result.rewards[name]:.3g}" for result in results)] for name in results[0].rewards]
    rows.append(["ms alone", *(f"{result.ms_alone:.2f}" for result in results)])
    rows.append(["ms per text together", *(f"{result.ms_together:.2f}" for result in results)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]))
    return "\n".join(lines) + "\n"


def _findings(results: Sequence[AuditedReward]) -> str:
    lines = [
        f"{result.name or 'reward'}: {finding.kind}: {finding.message}"
        for result in results
        for finding in result.findings
    ]
    return "\n".join(lines or ["no findings"]) + "\n"
