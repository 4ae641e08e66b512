"""Find the components in a config, and the targets of their `args`. Loads no model and imports no torch.

    reward_fn                  REWARDS
    datapool                   DATA_POOLS
    train_evaluation.metrics   METRICS
    alg, alg.policy            ALGORITHMS, POLICIES
    post_processing_fn         POST_PROCESSORS, in supervised runs

Works on the raw mapping. Blocks that are not mappings are left to the check of the blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rl4lms_like.algorithms import ALGORITHMS
from rl4lms_like.core.errors import ConfigError, MissingExtraError
from rl4lms_like.core.registry import Registry
from rl4lms_like.core.schema import at
from rl4lms_like.data_pools import DATA_POOLS
from rl4lms_like.metrics import METRICS
from rl4lms_like.policies import POLICIES
from rl4lms_like.post_processors import POST_PROCESSORS
from rl4lms_like.rewards import REWARDS

REGISTRIES: dict[str, Registry] = {
    "data_pools": DATA_POOLS,
    "rewards": REWARDS,
    "metrics": METRICS,
    "post_processors": POST_PROCESSORS,
    "policies": POLICIES,
    "algorithms": ALGORITHMS,
}
"""Registries by their name on the command line."""

POST_PROCESSING = "alg.generation_kwargs.post_processing_fn"
"""Config path of the post-processor of a supervised run's texts."""

GENERATION = ("alg.policy.args.generation_kwargs", "train_evaluation.generation_kwargs", "alg.generation_kwargs")
"""Config paths of arguments for transformers' `generate`; the last is for supervised runs."""

FILLED_IN: dict[str, tuple[str, ...]] = {
    "data pool": ("split",),
    "policy": (
        *("observation_space", "action_space", "lr_schedule", "tokenizer", "optimizer_class", "use_sde"),
        *("use_reference", "device", "special_token_ids", "state_dict"),
    ),
    "algorithm": (*("policy", "env", "policy_kwargs", "kl_controller", "norm_reward", "tracker", "_init_setup_model"),),
}
"""Arguments that the library passes to components itself, by the registry's kind."""


@dataclass(frozen=True)
class Slot:
    """Component in a config.

    Args:
        path: config path of the component.
        block: its `id` and `args`.
        registry: registry of its kind.
    """

    path: str
    block: dict[str, Any]
    registry: Registry

    def takes(self) -> Callable[..., Any]:
        """Return the class or function that receives the `args`: the target's `arguments_class` if it has one.

        Raises:
            ConfigError: the id is unknown, or its import path is invalid.
            MissingExtraError: the component's module needs a package that is not installed.
        """
        target = self.registry.signature(self.block["id"])
        return getattr(target, "arguments_class", target)


RunKind = Literal["on_policy", "supervised"]


def run_kind(blocks: Mapping[str, Any]) -> RunKind:
    """Return the kind of run of a raw mapping: supervised if `alg.id` is `supervised`, otherwise on-policy."""
    alg = blocks.get("alg")
    return "supervised" if isinstance(alg, Mapping) and alg.get("id") == "supervised" else "on_policy"


def slots(blocks: dict[str, Any]) -> Iterator[Slot]:
    """Yield the components of a raw mapping, except the environment, which is always `TextGenEnv`."""
    alg = blocks.get("alg")
    places = [("reward_fn", blocks.get("reward_fn"), REWARDS), ("datapool", blocks.get("datapool"), DATA_POOLS)]
    if run_kind(blocks) == "supervised":
        places.append((POST_PROCESSING, at(blocks, POST_PROCESSING), POST_PROCESSORS))
    elif isinstance(alg, dict):
        places += [("alg", alg, ALGORITHMS), ("alg.policy", alg.get("policy"), POLICIES)]
    evaluation = blocks.get("train_evaluation")
    metrics = evaluation.get("metrics") if isinstance(evaluation, dict) else None
    for index, metric in enumerate(metrics if isinstance(metrics, list) else []):
        places.append((f"train_evaluation.metrics.{index}", metric, METRICS))
    for path, block, registry in places:
        if isinstance(block, dict):
            yield Slot(path, block, registry)


def targets(blocks: dict[str, Any]) -> dict[str, Any]:
    """Return the target of each component's `args` by config path; components without a known target are left out."""
    found = {}
    for slot in slots(blocks):
        if not isinstance(slot.block.get("id"), str):
            continue
        try:
            found[slot.path] = slot.takes()
        except (ConfigError, MissingExtraError):  # reported where its `args` are bound, or where it is built
            continue
    return found
