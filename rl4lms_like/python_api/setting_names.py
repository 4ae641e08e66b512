"""Flat names of settings: keyword arguments of `Run` -> paths in a config.

    learning_rate=1e-5      alg.args.learning_rate
    max_new_tokens=40       alg.policy.args.generation_kwargs.max_new_tokens
    kl_coeff=0.1            alg.kl_div.coeff
    env={"n_envs": 8}       a block, as in a file

The names are those of the fields of the config's classes. A name that several fields have is decided in `DECIDED`; any
other one is refused with a message that has all of its paths.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rl4lms_like.algorithms import ALGORITHMS, OBJECTIVES
from rl4lms_like.config.binding import RunKind
from rl4lms_like.config.run_config import (
    AlgorithmConfig,
    PreferenceAlgConfig,
    PromptPoolConfig,
    RunConfig,
    RunEnvConfig,
    SupervisedAlgConfig,
    SupervisedEvaluationConfig,
    TokenizerConfig,
    TrainEvaluationConfig,
)
from rl4lms_like.data_pools.files import Columns
from rl4lms_like.data_pools.preferences import PreferenceColumns
from rl4lms_like.envs.arguments import EnvArguments
from rl4lms_like.policies.arguments import GENERATION_TYPES, MaskablePolicyArguments, VisionPolicyArguments
from rl4lms_like.python_api.names_elsewhere import equivalent
from rl4lms_like.rollouts.kl import KLConfig
from rl4lms_like.system.errors import ConfigError, ConfigIssue, MissingExtraError
from rl4lms_like.system.registry import Registry
from rl4lms_like.system.schema import Argument, join, signature_of, unknown_key

Paths = tuple[str, ...]
"""Dotted paths in a config."""

TOP_LEVEL = ("seed", "device", "n_threads", "deterministic")
"""Keys outside of blocks."""

BLOCKS = ("tokenizer", "datapool", "env", "alg", "train_evaluation", "doctor", "distributed", "tiny_model")
"""Blocks of a file, which `Run` accepts as dictionaries."""

WITH_OWN_ARGUMENT = {"model_name", "metrics", "id", "args", "policy", "kl_div", "training_args", "model_type"}
"""Fields that are set by another argument of `Run`, or only within a block."""

GENERATION = "alg.policy.args.generation_kwargs"

DECIDED: dict[str, Paths] = {
    "seed": ("seed",),
    "device": ("device",),
    "trust_remote_code": ("tokenizer.trust_remote_code", "alg.policy.args.trust_remote_code"),
    "prompt_truncation_side": ("env.args.prompt_truncation_side", "alg.policy.args.prompt_truncation_side"),
    "generation_kwargs": (GENERATION,),
    "eval_generation_kwargs": ("train_evaluation.generation_kwargs",),
    "early_stopping": ("train_evaluation.early_stopping",),
}
"""Names that several fields of an RL run have -> the paths that they set."""

DECIDED_OFFLINE: dict[str, Paths] = {
    "seed": ("seed",),
    "max_prompt_length": ("tokenizer.max_length",),
}
"""The same for supervised and preference runs."""

KL_NAMES = {"target_kl": "kl_target"}
"""Fields of `alg.kl_div` whose flat name is not `kl_<field>`."""

REFUSED = {
    "target_kl": (
        "has two meanings: kl_target is the KL that the controller aims at (alg.kl_div.target_kl); "
        "alg={'args': {'target_kl': ...}} ends updates early (alg.args.target_kl)"
    ),
    "max_length": "use max_prompt_length for prompts, and max_new_tokens for responses",
    "model_name": "use model, and tokenizer",
}
"""Names that are no settings -> what to use instead."""


def flat_names(kind: RunKind, algorithm: str) -> dict[str, Paths]:
    """Return the settings of a kind of run by name; a name with more than one meaning has all of its paths.

    Args:
        kind: kind of the run.
        algorithm: id of the algorithm or objective, whose arguments are settings too.
    """
    paths_by_name: dict[str, list[str]] = {}
    known_paths = set()
    for block, arguments in blocks_of(kind, algorithm).items():
        for argument in arguments:
            path = join(block, argument.name)
            known_paths.add(path)
            if argument.name not in WITH_OWN_ARGUMENT:
                name = argument.name
                if block == "alg.kl_div":
                    name = KL_NAMES.get(name, f"kl_{name}")
                paths_by_name.setdefault(name, []).append(path)

    names = {name: tuple(paths) for name, paths in paths_by_name.items() if name not in REFUSED}
    decided = DECIDED if kind == "on_policy" else DECIDED_OFFLINE
    return names | {name: paths for name, paths in decided.items() if known_paths.issuperset(paths)}


def blocks_of(kind: RunKind, algorithm: str) -> dict[str, Sequence[Argument]]:
    """Return the arguments of each block of a config whose keys are settings, by the path of the block."""
    generation = [Argument(name, annotation, None) for name, annotation in GENERATION_TYPES.items()]
    columns = [Argument("prompt_column", str | None, None), *_arguments(Columns)]  # which pools of tables add
    blocks: dict[str, Sequence[Argument]] = {
        "": [argument for argument in _arguments(RunConfig) if argument.name in TOP_LEVEL],
        "tokenizer": _arguments(TokenizerConfig),
    }
    if kind == "on_policy":
        return blocks | {
            "datapool": _arguments(PromptPoolConfig),
            "datapool.args": columns,
            "env": _arguments(RunEnvConfig),
            "env.args": _arguments(EnvArguments),
            "alg": _arguments(AlgorithmConfig),
            "alg.args": _of_algorithm(ALGORITHMS, algorithm),
            "alg.kl_div": _arguments(KLConfig),
            "alg.policy.args": _of_policies(),
            GENERATION: generation,
            "train_evaluation": _arguments(TrainEvaluationConfig),
        }

    is_preference = kind == "preference"
    return blocks | {
        "datapool.args": _arguments(PreferenceColumns) if is_preference else columns,
        "alg": _arguments(PreferenceAlgConfig if is_preference else SupervisedAlgConfig),
        "alg.args": _of_algorithm(OBJECTIVES, algorithm) if is_preference else (),
        "alg.training_args": training_arguments(),
        "alg.generation_kwargs": generation,
        "train_evaluation": _arguments(SupervisedEvaluationConfig),
    }


def _of_policies() -> list[Argument]:
    """Return the arguments of all policies, each once."""
    arguments: dict[str, Argument] = {}
    for policy in (MaskablePolicyArguments, VisionPolicyArguments):
        arguments |= {argument.name: argument for argument in _arguments(policy)}
    return list(arguments.values())


def training_arguments() -> list[Argument]:
    """Return those of transformers' `TrainingArguments` that a config may set."""
    from transformers import TrainingArguments

    from rl4lms_like.offline.settable_arguments import NOT_SETTABLE

    return [argument for argument in _arguments(TrainingArguments) if argument.name not in NOT_SETTABLE]


def _of_algorithm(registry: Registry, algorithm: str) -> Sequence[Argument]:
    """Return the arguments of an algorithm; none if it has no signature, which is reported elsewhere."""
    try:
        target: Any = registry.signature(algorithm)
    except (ConfigError, MissingExtraError):
        return ()
    return _arguments(getattr(target, "arguments_class", target))


def _arguments(target: Any) -> Sequence[Argument]:
    return signature_of(target).arguments


def is_ambiguous(name: str, paths: Paths) -> bool:
    """Return True if a name has several paths and does not stand for all of them."""
    return len(paths) > 1 and paths != DECIDED.get(name)


def merged(
    settings: Mapping[str, Any], names: Mapping[str, Paths], others: Collection[str] = ()
) -> tuple[dict[str, Any], dict[str, str], list[ConfigIssue]]:
    """Merge blocks and flat settings into one mapping.

    Args:
        settings: keyword arguments of `Run`.
        names: result of `flat_names`.
        others: settings of the other kinds of runs.

    Returns:
        The blocks of a config, the flat name of each path that was set by one, and the errors.
    """
    blocks: dict[str, Any] = {}
    issues = []
    for name in BLOCKS:
        block = settings.get(name)
        if isinstance(block, Mapping):
            blocks[name] = _copied(block)
        elif block is not None:
            issues.append(ConfigIssue(name, f"expected a dictionary, the block {name} of a file"))

    # A dictionary before the settings within it, in whichever order they were given.
    flat = [name for name in settings if name not in BLOCKS]
    flat.sort(key=lambda name: min((path.count(".") for path in names.get(name, ())), default=0))

    set_by: dict[str, str] = {}
    for name in flat:
        paths = names.get(name, ())
        if message := _refusal(name, paths, names, others):
            issues.append(ConfigIssue(name, message))
            continue
        for path in paths:
            if is_set(blocks, path):
                around = [by for of_path, by in set_by.items() if f"{path}.".startswith(f"{of_path}.")]
                first = around[0] if around else f"the dictionary {path.partition('.')[0]!r} as {path}"
                issues.append(ConfigIssue(name, f"is given twice, also in {first}; keep one of them"))
                continue
            set_by[path] = name
            put(blocks, path, settings[name])
    return blocks, set_by, issues


def _refusal(name: str, paths: Paths, names: Mapping[str, Paths], others: Collection[str]) -> str | None:
    """Return why a name is no setting, or None."""
    if is_ambiguous(name, paths):
        example = "..."
        for key in reversed(paths[0].split(".")[1:]):
            example = f"{{{key!r}: {example}}}"
        block = paths[0].partition(".")[0]
        return f"has several meanings, {' and '.join(paths)}: set the right one in its block, as {block}={example}"
    if paths:
        return None
    if name in REFUSED:
        return REFUSED[name]

    # A setting of another kind of run, or of another library.
    is_rl = "kl_coeff" in names
    elsewhere = equivalent(name, names, is_rl=is_rl)
    if name in others:
        kind = "given texts" if is_rl else "rollouts"
        hint = f"; {elsewhere}" if elsewhere else ""
        return f"is a setting of runs that learn from {kind}, not of this algorithm{hint}"
    if elsewhere:
        return f"unknown argument; {elsewhere}"
    return unknown_key(name, [*names, *BLOCKS]).replace("unknown key", "unknown argument")


def is_set(blocks: Mapping[str, Any], path: str) -> bool:
    """Return True if a mapping has a value at a path, null included."""
    value: Any = blocks
    for key in path.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return False
        value = value[key]
    return True


def put(blocks: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at a path; what is no mapping on the way there is left to the config's checks."""
    *parents, key = path.split(".")
    block: Any = blocks
    for parent in parents:
        if block.get(parent) is None:  # null is a block without keys, as in a file
            block[parent] = {}
        block = block[parent]
        if not isinstance(block, dict):
            return
    block[key] = _copied(value)


def put_default(blocks: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at a path that has none, see `put`."""
    if not is_set(blocks, path):
        put(blocks, path, value)


def _copied(value: Any) -> Any:
    """Copy nested dictionaries; what they hold stays the same objects, such as functions."""
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    return value
