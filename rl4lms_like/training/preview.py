"""What `check` prints: the resolved config, notices, the arithmetic of its batches and, of RL runs, their memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from rl4lms_like.core.errors import ConfigError, ModelError
from rl4lms_like.training.components import build_components
from rl4lms_like.training.config.binding import with_defaults
from rl4lms_like.training.config.notices import learning_rate_notice
from rl4lms_like.training.config.run_config import AnyConfig, RunConfig
from rl4lms_like.training.config.yaml_file import dump_yaml
from rl4lms_like.training.estimates.budget import plan_batches
from rl4lms_like.training.run import calm_libraries
from rl4lms_like.training.supervised.plan import check_supervised_weights, described


def preview(config: AnyConfig) -> Iterator[str]:
    """The parts of the answer, the quick ones first.

    Raises:
        ConfigError: what goes to transformers or PEFT has mistakes; or models and lengths do not fit each other.
        ModelError: the tokenizer has tokens that the model does not have, or a local folder lacks weights.
        RL4LMsLikeError: a component cannot be built on this machine; raised after all that can be said.
    """
    yield "# resolved config\n" + resolved(config)
    if config.notices:
        yield "# notices\n" + "".join(f"{notice}\n" for notice in config.notices)
    calm_libraries()
    if isinstance(config, RunConfig):
        yield "# batches\n" + _table(plan_batches(config).lines())
        _check_settings(config)
        yield "# models\n" + _models(config)
        yield "# memory\n" + _memory(config)
    else:
        yield "# training\n" + _table(described(config))
        check_supervised_weights(config)
    build_components(config)


def resolved(config: AnyConfig) -> str:
    """The config as YAML, every default filled in; it loads to the same run."""
    return dump_yaml(with_defaults(config.to_dict()))


def _check_settings(config: RunConfig) -> None:
    from rl4lms_like.training.config.settings import settings_mistakes

    if mistakes := settings_mistakes(config):
        raise ConfigError(mistakes)


def _models(config: RunConfig) -> str:
    """What fits what; only local files are looked at."""
    from rl4lms_like.training.assemble import build_tokenizer, load_model_config
    from rl4lms_like.training.config.fit import check_fit, check_lengths, check_weights, load_networks
    from rl4lms_like.training.small_models.embedded import with_embedded_models

    config = with_embedded_models(config)
    try:
        networks = load_networks(config, partial(load_model_config, local_files_only=True))
        tokenizer = build_tokenizer(config.tokenizer, local_files_only=True)
    except ModelError as error:
        return f"not looked at: {error}\n"
    check_fit(config, tokenizer, networks)
    prompt, response = check_lengths(config, tokenizer, networks)
    fit = f"fit: {len(tokenizer):,} tokens; {prompt:,} of a prompt and {response:,} of a response\n"
    complete = check_weights(config, networks)
    return fit + f"weights: {'complete' if complete else 'compared with the config when they are loaded'}\n"


def _memory(config: RunConfig) -> str:
    from rl4lms_like.training.estimates.memory import estimate_memory, gibibytes

    try:
        estimate = estimate_memory(config)
    except ModelError as error:
        return f"no estimate: {error}\n"
    notice = learning_rate_notice(config.to_dict(), estimate.n_parameters)
    rows = [(name, gibibytes(size)) for name, size in estimate.parts.items() if size]
    rows += [("peak of the update", gibibytes(estimate.update)), ("peak of the rollout", gibibytes(estimate.rollout))]
    return _table(rows) + estimate.verdict + "\n" + (f"{notice}\n" if notice else "")


def _table(rows: list[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "".join(f"{name:<{width}}  {value}\n" for name, value in rows)
