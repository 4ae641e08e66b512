"""Global random generators, which a training seeds: it leaves them as they were in the session that it is part of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept_generators() -> Iterator[None]:
    """Restore the states of the generators of Python, NumPy and torch after the block."""
    from rl4lms_like.training.resuming.states import load_random, random_state

    tensors, numbers = random_state()
    try:
        yield
    finally:
        load_random(numbers, {name.removeprefix("random."): tensor for name, tensor in tensors.items()})
