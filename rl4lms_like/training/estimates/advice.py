"""Add advice to out-of-memory errors: the part of the run, the estimate, torch's numbers, and keys to change.

out of memory in the update: CUDA out of memory. Tried to allocate 2.00 GiB ...
  estimate: update 9.61 GiB, rollout 7.20 GiB; activations 4.10 GiB, optimizer state 1.85 GiB ...
  torch: 14.80 GiB allocated, 15.10 GiB reserved of 15.77 GiB
  needs less: alg.args.micro_batch_size (null: minibatches are not split), gradient_checkpointing ...
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rl4lms_like.core.errors import OutOfMemoryError
from rl4lms_like.core.schema import at
from rl4lms_like.core.wording import shown
from rl4lms_like.training.config.binding import with_defaults
from rl4lms_like.training.config.run_config import AnyConfig, RunConfig

logger = logging.getLogger(__name__)

_POLICY, _SUPERVISED = "alg.policy.args", "alg.training_args"
_LENGTHS = (f"{_POLICY}.generation_kwargs.max_new_tokens", "env.args.max_prompt_length")
_NETWORKS = (f"{_POLICY}.critic: shared", f"{_POLICY}.peft: {{r: 8}}")
_MICRO, _BUDGET, _EVALUATED = "alg.args.micro_batch_size", f"{_POLICY}.logits_budget_mb", "train_evaluation"
_HALF = (f"{_POLICY}.gradient_checkpointing: true", f"{_POLICY}.dtype: bfloat16")

KEYS = {
    "loading": (*_NETWORKS, "alg.kl_div.coeff: 0"),
    "generation": ("env.n_envs", *_LENGTHS, *_NETWORKS),
    "scoring": (_MICRO, _BUDGET, *_LENGTHS, *_NETWORKS),
    "update": (_MICRO, _HALF[0], _BUDGET, _HALF[1], *_NETWORKS, *_LENGTHS),
    "evaluation": (f"{_EVALUATED}.eval_batch_size", f"{_EVALUATED}.generation_kwargs.max_new_tokens", _LENGTHS[1]),
}
"""Part -> settings that need less memory there, cheapest first; a key without a value should be smaller."""

_STEP = ("per_device_train_batch_size", "gradient_checkpointing: true", "bf16: true")
SUPERVISED_KEYS: dict[str, tuple[str, ...]] = {
    "loading": ("alg.peft: {r: 8}",),
    "update": (*(f"{_SUPERVISED}.{key}" for key in _STEP), "tokenizer.max_length", "alg.peft: {r: 8}"),
    "evaluation": (
        f"{_EVALUATED}.eval_batch_size",
        f"{_SUPERVISED}.per_device_eval_batch_size",
        "alg.generation_kwargs.max_new_tokens",
    ),
}

_INSTEAD = {
    _MICRO: "the gradient stays the same",
    "alg.kl_div.coeff": "without target_kl; no reference model is kept",
    "env.n_envs": "more alg.args.n_steps keep the rollout's size",
    f"{_SUPERVISED}.per_device_train_batch_size": "more gradient_accumulation_steps keep the batch",
}


@contextmanager
def explaining(config: AnyConfig) -> Iterator[None]:
    """Add advice on the run's config to an `OutOfMemoryError`.

    Raises:
        OutOfMemoryError: raised in the block, with advice: estimate, torch's numbers, keys.
    """
    try:
        yield
    except OutOfMemoryError as error:
        blocks = with_defaults(config.to_dict())
        table = KEYS if isinstance(config, RunConfig) else SUPERVISED_KEYS
        keys = ", ".join(filter(None, (_key(key, blocks) for key in table.get(error.part, ()))))
        lines = [*_estimate(config), *_by_torch(config.device), *([f"needs less: {keys}"] if keys else [])]
        raise OutOfMemoryError(error.part, error.text, lines) from error


def _estimate(config: AnyConfig) -> Iterator[str]:
    if not isinstance(config, RunConfig):
        return
    from rl4lms_like.training.estimates.memory import estimate_memory, gibibytes

    try:
        estimate = estimate_memory(config)
    except Exception as error:  # must not hide the out-of-memory error
        logger.debug("no estimate: %s", error)
        return
    own = {name: size for name, size in estimate.parts.items() if name != "process"}  # includes the run itself by now
    largest = sorted(own.items(), key=lambda item: -item[1])[:4]
    parts = ", ".join(f"{name} {gibibytes(size)}" for name, size in largest if size)
    peaks = f"update {gibibytes(estimate.update)}, rollout {gibibytes(estimate.rollout)}"
    yield f"estimate: {peaks}; the largest parts: {parts} (rl4lms-like check shows all)"


def _by_torch(device: str) -> Iterator[str]:
    import torch

    from rl4lms_like.training.estimates.memory import gibibytes, main_memory

    if not torch.cuda.is_initialized():
        yield f"memory of the machine: {gibibytes(main_memory())}"
        return
    gpu = device if device.startswith("cuda") else None  # None: the current one
    try:
        free, total = torch.cuda.mem_get_info(gpu)
    except RuntimeError as error:  # the query itself may run out of memory
        logger.debug("no memory statistics of the GPU: %s", error)
        return
    allocated, reserved = torch.cuda.max_memory_allocated(gpu), torch.cuda.memory_reserved(gpu)
    yield (
        f"torch: at most {gibibytes(allocated)} allocated so far, {gibibytes(reserved)} reserved now, "
        f"{gibibytes(free)} of {gibibytes(total)} free"
    )


def _key(key: str, blocks: dict[str, Any]) -> str | None:
    """Return the advice for a key, with its value and what preserves the run's results; None if it is set already."""
    path, _, wanted = key.partition(": ")
    value, instead = at(blocks, path), _INSTEAD.get(path)
    if wanted:
        is_set = value is not None and (str(value).lower() == wanted or isinstance(value, dict))
        hint = f" ({instead})" if instead else ""
        return None if is_set or (path.endswith("coeff") and not value) else f"{key}{hint}"
    if value == 1 or (path.startswith("train_evaluation.generation") and value is None):
        return None
    hint = f"; {instead}" if instead else ""
    return f"a smaller {path} ({'is' if value is not None else 'now'} {shown(value)}{hint})"
