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

from rl4lms_like.config import settings
from rl4lms_like.config.added_tokens import with_created_models
from rl4lms_like.config.binding import build_component, with_defaults
from rl4lms_like.config.rules import learning_rate_notice
from rl4lms_like.config.run_config import AnyConfig, OfflineConfig, RunConfig, SupervisedConfig
from rl4lms_like.config.yaml_file import dump_yaml
from rl4lms_like.core.observation import TextLayout
from rl4lms_like.core.picture_encoder import PictureEncoder
from rl4lms_like.core.sample import Sample
from rl4lms_like.data_pools import DATA_POOLS
from rl4lms_like.envs.arguments import EnvArguments
from rl4lms_like.envs.env import length_limit
from rl4lms_like.estimates.budget import plan_batches
from rl4lms_like.estimates.memory import N_PROCESSES, MemoryEstimate, estimate_memory, gibibytes
from rl4lms_like.estimates.savings import advice
from rl4lms_like.measured_time import measure_iteration
from rl4lms_like.offline import assemble_preferences as preferences
from rl4lms_like.offline import assemble_supervised as supervised
from rl4lms_like.on_policy.assemble import build_sampler
from rl4lms_like.on_policy.replay import plan_of, with_replay
from rl4lms_like.rewards import REWARDS
from rl4lms_like.rewards.audit import AuditedReward, audit_reward, n_calls
from rl4lms_like.rewards.probes import Probes
from rl4lms_like.run import silence_libraries
from rl4lms_like.system.errors import ConfigError, ConfigIssue, ModelError, RewardError, RL4LMsLikeError
from rl4lms_like.system.secrets import with_values
from rl4lms_like.training.components import Components, build_components, chat_lines, check_samples, data_lines
from rl4lms_like.training.environment_preview import environment_lines
from rl4lms_like.training.inputs import (
    build_datapool,
    build_datapools,
    build_tokenizer,
    load_model_config,
    render_prompts,
    stripped_pattern_notices,
    tokenizer_and_pictures,
)

LocalSamples: TypeAlias = Mapping[str, Sequence[Sample]] | None
"""Split -> samples; None if the data are not on this machine."""

NOT_LOCAL = "not checked: the data pool may read from a network"


def preview(config: AnyConfig, *, full: bool = False, gpu_bytes: int | None = None) -> Iterator[str]:
    """Yield the sections of the output, fast ones first.

    Args:
        config: of the run.
        full: add the config with every default filled in.
        gpu_bytes: memory of the GPU that the run is meant for; default: the device of this machine.

    Raises:
        ConfigError: arguments for transformers or PEFT have errors, models and lengths are incompatible, or samples
            lack references that a component needs.
        DataPoolError: the data pool could not be prepared.
        ModelError: the tokenizer has tokens that the model does not have, or a local folder lacks weights.
        RL4LMsLikeError: a component cannot be built on this machine; raised after all other output.
    """
    if config.notices:
        yield "# notices\n" + "".join(f"{notice}\n" for notice in config.notices)

    # Tokenizer and samples are loaded when a section first needs them; one that fails is tried again by the next.
    silence_libraries()
    tokenizer = cache(partial(_tokenizer, config))
    pools = cache(partial(_pools, config))
    samples = cache(partial(_samples, config, pools, tokenizer))
    failures = _Failures()

    # From the config and those of the models, without data.
    models: _Models | None = None
    if isinstance(config, RunConfig):
        yield "# batches\n" + _table(plan_batches(config).lines())
        with failures.collected():
            settings.check_settings(config, here=False)
        with failures.collected():
            description, models = _models(config, tokenizer)
            yield "# models\n" + description
            yield "# memory\n" + _memory(config, gpu_bytes)
        with failures.collected():
            rollout_rows = _rollouts(config, models)
            if rollout_rows:
                yield "# rollouts\n" + _table(rollout_rows)
    else:
        with failures.collected():
            yield "# training\n" + _table(_plan(config, samples, gpu_bytes))
        with failures.collected():
            supervised.check_model(config)

    # Components before data, as in training: a missing package is reported without waiting for the data.
    components: Components | None = None
    with failures.collected():
        components = build_components(config)
    with failures.collected(), suppress(ModelError):  # the tokenizer may be elsewhere, and training will load it
        notices = stripped_pattern_notices(config, tokenizer())
        if notices:
            yield "# special tokens\n" + "".join(f"{notice}\n" for notice in notices)
    with failures.collected():
        formats = {split: getattr(pool, "row_format", None) for split, pool in (pools() or {}).items()}
        yield from _data(config, samples(), formats, tokenizer=tokenizer, models=models, components=components)
    with failures.collected():
        yield from _environment(config, samples, models)

    if full:
        yield "# resolved config\n" + resolved(config)
    failures.raise_together()


def _data(
    config: AnyConfig,
    samples: LocalSamples,
    formats: Mapping[str, str | None],
    *,
    tokenizer: Callable[[], PreTrainedTokenizerBase],
    models: _Models | None,
    components: Components | None,
) -> Iterator[str]:
    """Yield the sections on the data; then raise an error if they do not fit models, sampler or components."""
    if samples is None:
        yield f"# data\n{NOT_LOCAL}\n"
        return

    # Without the models there is no tokenizer to count with, and the section has only the numbers of samples. With a
    # dialogue the prompts are the first texts of the environment.
    is_dialogue = isinstance(config, RunConfig) and config.env.dialogue is not None
    if models is None or is_dialogue:
        rows = data_lines(samples)
    else:
        rows = data_lines(
            samples,
            models.tokenizer,
            models.max_prompt_length,
            is_encoder_decoder=bool(models.config.is_encoder_decoder),
            pictures=models.pictures,
        )
    if len(set(formats.values())) == 1:
        formats = {"all splits": formats["train"]}
    for name, row_format in formats.items():
        if row_format is not None:
            rows.append((f"format of {name}", row_format))
    if is_dialogue and not any(sample.prompt_or_input_text for sample in samples["train"]):
        rows = [(name, value) for name, value in rows if name != "prompt"]
    yield "# data\n" + _table(rows)
    if samples["train"][0].rendered_prompt is not None and not is_dialogue:
        pictures = None if models is None else models.pictures
        yield "# chat template\n" + _table(chat_lines(samples["train"][0], tokenizer(), pictures))

    # What could not be built was reported before; only the others are compared with the samples.
    if isinstance(config, RunConfig) and config.datapool.sampler is not None:
        build_sampler(config.datapool.sampler, samples["train"])
    if components is not None:
        check_samples(config, components, samples)
    if models is not None and not is_dialogue:
        settings.check_prompts(
            samples,
            models.tokenizer,
            models.config,
            pictures=models.pictures,
            max_prompt_length=models.max_prompt_length,
        )


def _environment(config: AnyConfig, samples: Callable[[], LocalSamples], models: _Models | None) -> Iterator[str]:
    """Yield the section on the environment of dialogues, of which a few episodes are played."""
    if not isinstance(config, RunConfig) or config.env.dialogue is None:
        return
    local_samples = samples()
    if local_samples is None or models is None:
        yield "# environment\nnot checked: its episodes need tokenizer and samples\n"
        return
    rows, notices = environment_lines(config, local_samples["train"], models.tokenizer, models.max_prompt_length)
    yield "# environment\n" + _table(rows) + "".join(f"notice: {notice}\n" for notice in notices)


class _Failures:
    """Errors of the library, which are raised together after all sections, so that one check reports all of them."""

    def __init__(self) -> None:
        self.errors: list[RL4LMsLikeError] = []

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Keep an error of the library instead of raising it. An error that two sections run into is kept once."""
        try:
            yield
        except RL4LMsLikeError as error:
            if str(error) not in map(str, self.errors):
                self.errors.append(error)

    def raise_together(self) -> None:
        """Raise one error that combines all, if there are any; a `ConfigError` if the config causes one of them."""
        if not self.errors:
            return
        if len(self.errors) == 1:
            raise self.errors[0]
        if not any(isinstance(error, ConfigError) for error in self.errors):
            raise RL4LMsLikeError("\n".join(map(str, self.errors)))

        # A `ConfigError` has a path for each of its issues; the others get an empty one.
        issues: list[ConfigIssue] = []
        for error in self.errors:
            if isinstance(error, ConfigError):
                issues += error.issues
            else:
                issues.append(ConfigIssue("", str(error)))
        raise ConfigError(issues)


def resolved(config: AnyConfig) -> str:
    """Return the config as YAML with every default filled in; it loads to the same run."""
    return dump_yaml(with_defaults(config.to_dict()))


@dataclass(frozen=True)
class _Models:
    """Facts about the models that are needed to check the data."""

    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    max_prompt_length: int
    pictures: PictureEncoder | None  # of a vision-language model


def _models(config: RunConfig, local_tokenizer: Callable[[], PreTrainedTokenizerBase]) -> tuple[str, _Models | None]:
    """Check that models, tokenizer and lengths fit each other, and describe them; only local files are read."""
    # Models that are not on this machine are not an error of the config: training will download them.
    try:
        config = with_created_models(config, local_files_only=True)
        networks = settings.load_networks(config, partial(load_model_config, local_files_only=True))
        if config.alg.policy.reads_pictures:
            settings.check_families(config, networks)
            tokenizer, pictures = tokenizer_and_pictures(config, local_files_only=True)
        else:
            tokenizer, pictures = local_tokenizer(), None
    except ModelError as error:
        return f"not checked: {error}\n", None

    settings.check_fit(config, tokenizer, networks, local_files_only=True)
    prompt, response = settings.check_lengths(config, tokenizer, networks)
    is_complete = settings.check_weights(config, networks)
    weights = "complete" if is_complete else "compared with the config when they are loaded"
    description = f"fit: {len(tokenizer):,} tokens; up to {prompt:,} in a prompt and {response:,} in a response\n"
    description += f"weights: {weights}\n"
    for notice in settings.speedups_without_effect(config, networks["model_name"]):
        description += f"{notice}\n"
    return description, _Models(networks["model_name"], tokenizer, prompt, pictures)


class _NotLoadedError(RL4LMsLikeError):
    """The data may be read from a network, from which a check reads nothing."""


def _plan(config: OfflineConfig, samples: Callable[[], LocalSamples], gpu_bytes: int | None) -> list[tuple[str, str]]:
    """Return the plan of a supervised or preference run, or what is not on this machine; errors are raised."""

    # Called by the plan after its own checks of the config, which need no data.
    def find() -> Mapping[str, Sequence[Sample]]:
        local_samples = samples()
        if local_samples is None:
            raise _NotLoadedError("the data were not loaded")
        return local_samples

    try:
        if isinstance(config, SupervisedConfig):
            return supervised.plan(config, find, gpu_bytes=gpu_bytes)
        return preferences.plan(config, find)
    except (ModelError, _NotLoadedError) as error:
        return [("no plan", str(error))]


def _tokenizer(config: AnyConfig) -> PreTrainedTokenizerBase:
    return build_tokenizer(with_created_models(config, local_files_only=True).tokenizer, local_files_only=True)


def _pools(config: AnyConfig) -> Mapping[str, Any] | None:
    """Return the data pools of all splits, or None if they may read from a network."""
    if not DATA_POOLS.resolve(config.datapool.id).is_local(**with_values(config.datapool.args)):
        return None
    return build_datapools(config.datapool)


def _samples(
    config: AnyConfig,
    local_pools: Callable[[], Mapping[str, Any] | None],
    tokenizer: Callable[[], PreTrainedTokenizerBase],
) -> LocalSamples:
    """Return the samples of all splits, or None if the data pool may read from a network."""
    pools = local_pools()
    if pools is None:
        return None
    with suppress(ModelError):  # the tokenizer is not on this machine; the section of the models says so
        pools = render_prompts(pools, config.tokenizer, tokenizer())

    samples = {}
    for split, pool in pools.items():
        samples[split] = [sample for sample, _ in pool]
    return samples


def _memory(config: RunConfig, gpu_bytes: int | None) -> str:
    def estimate_of(changed: RunConfig, n_processes: int) -> MemoryEstimate:
        return estimate_memory(changed, n_processes, gpu_bytes=gpu_bytes)

    try:
        estimate = estimate_of(config, 1)
    except ModelError as error:
        return f"no estimate: {error}\n"

    rows = [("trainable parameters", estimate.parameters)]
    rows += [(name, gibibytes(size)) for name, size in estimate.parts.items() if size]
    rows.append(("peak of the update", gibibytes(estimate.update)))
    rows.append(("peak of the rollout", gibibytes(estimate.rollout)))
    if estimate.loading:
        rows.append(("peak of the loading", gibibytes(estimate.loading)))
    # Split weights: the number of processes is only known when `torchrun` starts them.
    if config.distributed.strategy == "fsdp":
        for n in N_PROCESSES:
            rows.append((f"peak of each of {n} processes", gibibytes(estimate_of(config, n).peak)))

    # Whether a learning rate is large depends on the size of the model, which is known here for the first time.
    section = _table(rows) + estimate.verdict + "\n"
    change = advice(config, estimate, estimate_of)
    if change:
        section += f"{change}\n"
    notice = learning_rate_notice(config, estimate.n_parameters)
    return f"{section}{notice}\n" if notice else section


def _rollouts(config: RunConfig, models: _Models | None) -> list[tuple[str, str]]:
    """Return what is replayed, and how large the kept rollouts will be."""
    rows = []
    if config.train_evaluation.replay is not None:
        rows.append(("replay", str(plan_of(with_replay(config).to_dict()))))
    if not config.train_evaluation.save_rollouts:
        return rows
    if models is None:
        return [*rows, ("size", "no estimate without model and tokenizer")]

    # NLPO's masks are kept with one bit for each token of the vocabulary, rounded up to bytes.
    mask_bytes = 0
    if "mask_type" in with_defaults(config.to_dict())["alg"]["policy"]["args"]:
        mask_bytes = -(-int(models.config.get_text_config().vocab_size) // 8)
    size = plan_batches(config).rollout_bytes(models.max_prompt_length, mask_bytes)
    total = config.train_evaluation.n_iters * size
    return [*rows, ("size", f"about {gibibytes(size)} per iteration, {gibibytes(total)} in all, at full length")]


def _table(rows: list[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "".join(f"{name:<{width}}  {value}\n" for name, value in rows)


def time_section(config: AnyConfig) -> str:
    """Return the section on the time of an iteration, which is measured: models are loaded, and the reward is called.

    Raises:
        ConfigError: it is no RL run, or it would send texts to a server.
        RL4LMsLikeError: the run cannot be built, or it fails.
    """
    if not isinstance(config, RunConfig):
        raise ConfigError([ConfigIssue("--time", "only RL runs have iterations")], "the command line")
    is_external = (config.alg.policy.args.get("engine") or {}).get("id", "transformers") != "transformers"
    if is_external or _is_remote({"id": config.reward_fn.id, "args": config.reward_fn.args}):
        message = "the run sends texts to a server, which a check does not"
        raise ConfigError([ConfigIssue("--time", message)], "the command line")
    return "# time\n" + _table(measure_iteration(config).lines())


def reward_audit(config: AnyConfig, *, remote: bool = False) -> Iterator[str]:
    """Yield the number of calls, and after them the results; the policy is not loaded.

    Raises:
        ConfigError: the run is supervised, or the reward is on a server and `remote` is False.
        RewardError: the reward failed for a text; raised after all other output.
        RL4LMsLikeError: reward, data pool or tokenizer cannot be built.
    """
    if not isinstance(config, RunConfig):
        raise ConfigError([ConfigIssue("--reward", "a supervised run has no reward")], "the command line")
    config = with_created_models(config)
    reward = build_component(REWARDS, config.reward_fn)

    # References that are whole messages are the texts that the chat template writes for them.
    tokenizer, pictures = tokenizer_and_pictures(config)
    pool = render_prompts({"train": build_datapool(config.datapool, "train")}, config.tokenizer, tokenizer)["train"]

    # Texts are tokens, as in training: the reward gets what is left of a text after encoding and decoding.
    env = EnvArguments(**config.env.args)
    layout = TextLayout(
        tokenizer,
        max_prompt_length=env.max_prompt_length or length_limit(tokenizer),
        max_context_length=env.max_episode_length,
        context_start_token=env.context_start_token,
        prompt_truncation_side=env.prompt_truncation_side,
        pictures=pictures,
    )
    probes = Probes([sample for sample, _ in pool], layout)

    # Calls of a server may cost money, and send the texts of the data to another machine.
    size = f"{len(probes)} texts from {len(probes.samples)} samples of 'train', at most {n_calls(reward, probes)} calls"
    if not remote and _is_remote({"id": config.reward_fn.id, "args": config.reward_fn.args}):
        message = f"the reward sends texts to a server ({size}); to call it, add --remote"
        raise ConfigError([ConfigIssue("--reward", message)], "the command line")
    yield f"# reward\n{size}\n"

    # The first result is that of the whole reward, the others are of its parts.
    results = audit_reward(reward, probes)
    yield _audit_table(results) + "\n" + _findings(results)
    if any(finding.kind == "failure" for finding in results[0].findings):
        raise RewardError(results[0].errors[0])


def _is_remote(block: Any) -> bool:
    """Return True if a block of a config, or one inside it, is the reward `http`, or `llm_judge` with a server."""
    if isinstance(block, list | tuple):
        return any(map(_is_remote, block))
    if not isinstance(block, Mapping):
        return False

    # By id or by import path. A combined reward has its parts in its arguments.
    id = block.get("id")
    is_class = str(id).endswith((":HttpReward", ":LLMJudgeReward"))
    is_remote = id in ("http", "llm_judge") or is_class
    args = block.get("args")
    if isinstance(args, Mapping) and args.get("model_name") is not None:  # a judge on this machine
        is_remote = False
    return is_remote or any(map(_is_remote, block.values()))


def _audit_table(results: Sequence[AuditedReward]) -> str:
    """Return the mean reward of each text and the times, with a column for each part."""
    rows = [["text", *(result.name or "reward" for result in results)]]
    for name in results[0].rewards:
        rows.append([name, *(f"{result.rewards[name]:.3g}" for result in results)])
    rows.append(["ms alone", *(f"{result.ms_alone:.2f}" for result in results)])
    rows.append(["ms per text together", *(f"{result.ms_together:.2f}" for result in results)])

    # Names are aligned on the left, numbers on the right.
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *numbers in rows:
        cells = [number.rjust(width) for number, width in zip(numbers, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *cells]))
    return "\n".join(lines) + "\n"


def _findings(results: Sequence[AuditedReward]) -> str:
    lines = []
    for result in results:
        for finding in result.findings:
            lines.append(f"{result.name or 'reward'}: {finding.kind}: {finding.message}")
    return "\n".join(lines or ["no findings"]) + "\n"
