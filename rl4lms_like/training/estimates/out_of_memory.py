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

from rl4lms_like.core.errors import OutOfMemoryError
from rl4lms_like.core.schema import at
from rl4lms_like.core.wording import shown
from rl4lms_like.training.config.binding import with_defaults
from rl4lms_like.training.config.run_config import AnyConfig, RunConfig

logger = logging.getLogger(__name__)

_POLICY = "alg.policy.args"
_LENGTHS = (f"{_POLICY}.generation_kwargs.max_new_tokens", "env.args.max_prompt_length")
_NETWORKS = (f"{_POLICY}.critic: shared", f"{_POLICY}.peft: {{r: 8}}")

KEYS = {
    "loading": (*_NETWORKS, "alg.kl_div.coeff: 0"),
    "generation": ("env.n_envs", *_LENGTHS, *_NETWORKS),
    "scoring": ("alg.args.micro_batch_size", f"{_POLICY}.logits_budget_mb", *_LENGTHS, *_NETWORKS),
    "update": (
        "alg.args.micro_batch_size",
        f"{_POLICY}.gradient_checkpointing: true",
        f"{_POLICY}.logits_budget_mb",
        f"{_POLICY}.dtype: bfloat16",
        *_NETWORKS,
        *_LENGTHS,
    ),
    "evaluation": (
        "train_evaluation.eval_batch_size",
        "train_evaluation.generation_kwargs.max_new_tokens",
        "env.args.max_prompt_length",
    ),
}
"""Part -> settings that need less memory there, cheapest first; a key without a value should be smaller."""

SUPERVISED_KEYS = {
    "loading": ("alg.peft: {r: 8}",),
    "update": (
        "alg.training_args.per_device_train_batch_size",
        "alg.training_args.gradient_checkpointing: true",
        "alg.training_args.bf16: true",
        "tokenizer.max_length",
        "alg.peft: {r: 8}",
    ),
    "evaluation": (
        "train_evaluation.eval_batch_size",
        "alg.training_args.per_device_eval_batch_size",
        "alg.generation_kwargs.max_new_tokens",
    ),
}

_INSTEAD = {
    "alg.args.micro_batch_size": "the gradient stays the same",
    "alg.kl_div.coeff": "without target_kl; no reference model is kept",
    "env.n_envs": "more alg.args.n_steps keep the rollout's size",
    "alg.training_args.per_device_train_batch_size": "more gradient_accumulation_steps keep the batch",
}


@contextmanager
def explaining(config: AnyConfig) -> Iterator[None]:
    """Add advice on the run's config to an `OutOfMemoryError`.

    Raises:
        OutOfMemoryError: raised in the block, with advice.
    """
    try:
        yield
    except OutOfMemoryError as error:
        raise OutOfMemoryError(error.part, error.said, advice(error.part, config)) from error


def advice(part: str, config: AnyConfig) -> list[str]:
    """Return the lines below the message: estimate, torch's numbers, keys."""
    lines = [*_estimate(config), *_by_torch(config.device), _keys(part, config)]
    return [line for line in lines if line]


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

    if torch.cuda.is_initialized():
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
    else:
        yield f"memory of the machine: {gibibytes(main_memory())}"


def _keys(part: str, config: AnyConfig) -> str:
    blocks = with_defaults(config.to_dict())
    table = KEYS if isinstance(config, RunConfig) else SUPERVISED_KEYS
    said = [text for key in table.get(part, ()) if (text := _key(key, blocks)) is not None]
    return f"needs less: {', '.join(said)}" if said else ""


def _key(key: str, blocks: dict[str, object]) -> str | None:
    """Return the advice for a key, with its value and what preserves the run's results; None if it is set already."""
    path, _, wanted = key.partition(": ")
    value = at(blocks, path)
    if wanted:
        is_set = value is not None and (str(value).lower() == wanted or isinstance(value, dict))
        hint = f" ({_INSTEAD[path]})" if path in _INSTEAD else ""
        return None if is_set or (path.endswith("coeff") and not value) else f"{key}{hint}"
    if value == 1 or (path.startswith("train_evaluation.generation") and value is None):
        return None
    hint = f"; {_INSTEAD[path]}" if path in _INSTEAD else ""
    return f"a smaller {path} ({'is' if value is not None else 'now'} {shown(value)}{hint})"
