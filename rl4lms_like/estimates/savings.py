"""Find the cheapest change of a config with which a run fits its device, by the memory estimate.

Changes are tried in order of their cost in time; from `critic: shared` on, they also change which weights are trained,
or on how many devices. Each one is added to those before it, if it lowers the estimate, until the run fits. Then each
one that is not needed is removed again, the costliest first.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import yaml

from rl4lms_like.config.binding import with_defaults
from rl4lms_like.config.load import parse_config
from rl4lms_like.config.run_config import AnyConfig, RunConfig, SupervisedConfig
from rl4lms_like.config.yaml_file import apply_values
from rl4lms_like.estimates.budget import plan_batches
from rl4lms_like.estimates.memory import N_PROCESSES, MemoryEstimate, gibibytes
from rl4lms_like.system.errors import ConfigError, ModelError
from rl4lms_like.system.schema import at

EstimateOf: TypeAlias = Callable[[Any, int], MemoryEstimate]
"""Memory of a config on a number of processes."""

POLICY = "alg.policy.args"
TRAINING = "alg.training_args"
LORA = {"r": 16, "target_modules": "all-linear"}
NF4 = {"id": "nf4"}


@dataclass(frozen=True)
class Change:
    """Values of keys, and the number of processes that they are for."""

    keys: Mapping[str, Any]
    n_processes: int = 1


@dataclass(frozen=True)
class Trial:
    """A config with changes.

    Args:
        estimate: of each process.
        keys: keys -> values that the config does not have.
        n_processes: that divide the run.
    """

    estimate: MemoryEstimate
    keys: Mapping[str, Any] = field(default_factory=dict)
    n_processes: int = 1

    @property
    def fits(self) -> bool:
        """True if the upper number of the estimate is available."""
        return self.estimate.upper <= self.estimate.available

    @property
    def options(self) -> str:
        """The keys as options of the command line, and the command that starts several processes."""
        options = []
        for key, value in self.keys.items():
            text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=1000)
            written = text.removesuffix("\n").removesuffix("\n...")  # the end of a plain value
            options.append(f"--set {shlex.quote(f'{key}={written}')}")
        if self.n_processes > 1:
            options.append(f"on {self.n_processes} GPUs (torchrun --nproc_per_node {self.n_processes})")
        return " ".join(options)


def advice(config: RunConfig | SupervisedConfig, estimate: MemoryEstimate, estimate_of: EstimateOf) -> str:
    """Return a line with the cheapest change of a run that does not fit; empty if it fits.

    Args:
        config: of the run.
        estimate: of the config.
        estimate_of: estimates changed configs.
    """
    if estimate.upper <= estimate.available:
        return ""
    trial = cheapest_change(config, estimate, estimate_of)
    if trial.estimate is estimate:
        return "no change of the settings that were tried needs less memory"

    size = f"{gibibytes(trial.estimate.lower)} to {gibibytes(trial.estimate.upper)}"
    prefix = "cheapest change that fits" if trial.fits else "no change fits; the least memory is needed with"
    return f"{prefix}: {trial.options}: {size}"


def cheapest_change(config: RunConfig | SupervisedConfig, estimate: MemoryEstimate, estimate_of: EstimateOf) -> Trial:
    """Return the cheapest changes with which a run fits; if there are none, those with the smallest estimate.

    Args:
        config: of the run.
        estimate: of the config.
        estimate_of: estimates changed configs.
    """
    is_on_gpu = estimate.device == "cuda"
    candidates = _changes(config, is_on_gpu) if isinstance(config, RunConfig) else _offline_changes(config, is_on_gpu)

    # Each change with those before it that need less.
    kept: list[Change] = []
    best = Trial(estimate)
    for change in candidates:
        trial = _trial(config, [*kept, change], estimate_of)
        if trial is None or trial.estimate.upper >= best.estimate.upper:
            continue
        kept.append(change)
        best = trial
        if best.fits:
            break
    if not best.fits:
        return best

    # Without those that are not needed. The last one is: nothing fitted without it.
    for change in reversed(kept[:-1]):
        others = [other for other in kept if other is not change]
        trial = _trial(config, others, estimate_of)
        if trial is not None and trial.fits:
            kept = others
            best = trial
    return best


def _trial(config: AnyConfig, changes: Sequence[Change], estimate_of: EstimateOf) -> Trial | None:
    """Return the config with some changes, later ones in place of earlier ones; None if it is not valid."""
    keys: dict[str, Any] = {}
    for change in changes:
        keys |= change.keys
    n_processes = max(change.n_processes for change in changes)

    # What the config has already, or by default, is no change.
    blocks = with_defaults(config.to_dict())
    keys = {key: value for key, value in keys.items() if at(blocks, key) != value}

    mapping, issues = apply_values(config.to_dict(), keys, "the change")
    try:
        estimate = estimate_of(parse_config(mapping, issues=issues), n_processes)
    except (ConfigError, ModelError):  # refused together, or for this model
        return None
    return Trial(estimate, keys, n_processes)


def _changes(config: RunConfig, is_on_gpu: bool) -> Iterator[Change]:
    """Yield changes of an RL run, in order of their cost in time."""
    blocks = with_defaults(config.to_dict())
    arguments = blocks["alg"]["policy"]["args"]

    # Smaller passes: only the time of their start, and on a GPU that they do not fill.
    plan = plan_batches(config)
    whole = plan.minibatch_episodes * ((plan.prompt_tokens or 0) + plan.response_tokens)
    tokens = min(blocks["alg"]["args"].get("micro_batch_size") or whole, whole)
    for divisor in (2, 4, 8, 16):
        yield Change({"alg.args.micro_batch_size": max(tokens // divisor, 1)})
    yield Change({f"{POLICY}.logits_budget_mb": 64})
    if plan.is_in_episodes:
        for divisor in (2, 4):
            yield Change({"env.n_envs": max(config.env.n_envs // divisor, 1)})
    if arguments.get("peft") is not None:
        yield Change({f"{POLICY}.speedups": {**(arguments.get("speedups") or {}), "merged_adapters": False}})

    # A second forward pass.
    yield Change({f"{POLICY}.gradient_checkpointing": True})

    # Copies to main memory and back. Those of moments make rollouts smaller, after what makes updates smaller.
    if is_on_gpu:
        yield Change({f"{POLICY}.activation_offload": True})
        yield Change({f"{POLICY}.offload": "moments"})

    # Coarser numbers.
    yield Change({f"{POLICY}.dtype": "bfloat16"})
    yield Change({f"{POLICY}.reference_dtype": "bfloat16"})
    yield Change({f"{POLICY}.optimizer": {"id": "adamw_8bit"}})

    # Other networks.
    if arguments.get("critic") != "none":
        yield Change({f"{POLICY}.critic": "shared"})
    lora: dict[str, Any] = {f"{POLICY}.reference_dtype": "float32"}  # adapters share the reference
    if arguments.get("peft") is None:
        lora[f"{POLICY}.peft"] = LORA
        yield Change(lora)
    yield Change({**lora, f"{POLICY}.quantization": NF4})

    # With split weights, the reference is in float32, and activations stay on the device.
    if is_on_gpu:
        of_parts = {f"{POLICY}.reference_dtype": "float32", f"{POLICY}.activation_offload": False}
        for n in N_PROCESSES:
            yield Change({"distributed.strategy": "fsdp", **of_parts}, n_processes=n)


def _offline_changes(config: SupervisedConfig, is_on_gpu: bool) -> Iterator[Change]:
    """Yield changes of a supervised run, in order of their cost in time."""
    training = config.alg.training_args
    size = int(training.get("per_device_train_batch_size") or 8)
    n_passes = int(training.get("gradient_accumulation_steps") or 1)

    # Smaller passes of the same step.
    for divisor in (2, 4, 8, 16, 32):
        if size % divisor == 0:
            passes = {
                f"{TRAINING}.per_device_train_batch_size": size // divisor,
                f"{TRAINING}.gradient_accumulation_steps": n_passes * divisor,
            }
            yield Change(passes)
    yield Change({"train_evaluation.eval_batch_size": max(config.train_evaluation.eval_batch_size // 4, 1)})
    yield Change({"alg.logits_budget_mb": 64})

    yield Change({f"{TRAINING}.gradient_checkpointing": True})
    if is_on_gpu:
        yield Change({"alg.activation_offload": True})
    yield Change({f"{TRAINING}.bf16": True})
    yield Change({f"{TRAINING}.optim": "adamw_torch_8bit"})

    lora: dict[str, Any] = {}
    if config.alg.peft is None:
        lora = {"alg.peft": LORA}
        yield Change(lora)
    yield Change({**lora, "alg.quantization": NF4})

    if is_on_gpu:
        for n in N_PROCESSES:
            yield Change({"distributed.strategy": "fsdp", "alg.activation_offload": False}, n_processes=n)
