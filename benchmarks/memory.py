"""Systems that sleep still hold memory: how many can wait for their turn at once?

    held      weights of policy, critic, reference + their gradients + Adam's moments + imports
    working   activations of one minibatch through policy and critic, once: only one system works at a time

Where not all fit, they are measured in groups one after the other. Each group has the yardstick in it, so a ratio to
it is always one within a round.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from benchmarks.workload import Shape

MIB = 2**20
COPIES = 3 + 2 + 4  # weights, gradients, moments, in networks
IMPORTS_MB = 450
ACTIVATIONS = 38  # numbers of the width that a GPT-2 layer keeps for one position; measured: 31
LOGITS = 4  # copies, for prompt positions too: TRL's PPO has them
SPARE = 0.05  # of what is available


def available_mb() -> float:
    """Memory that can be used without swapping, MiB."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) / 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / MIB


def held_mb(shape: Shape) -> float:
    """What a sleeping system holds, MiB; an estimate for PPO with a separate critic."""
    return IMPORTS_MB + 4 * COPIES * shape.parameters / MIB


def working_mb(shape: Shape) -> float:
    """What a working system needs on top, MiB; an estimate."""
    positions = shape.minibatch * (shape.prompt_len + shape.response_len)
    activations = 2 * ACTIVATIONS * positions * shape.n_layer * shape.n_embd
    logits = LOGITS * positions * shape.vocab_size
    return 4 * (activations + logits) / MIB


def groups(names: Sequence[str], yardstick: str, shape: Shape, available: float) -> list[list[str]]:
    """Systems in groups that fit into memory together.

    Args:
        names: of the systems; none twice.
        yardstick: is in every group, and first, if it is among them.
        shape: of the work.
        available: MiB.

    Raises:
        MemoryError: not even one comparison fits.
    """
    places = int((available * (1 - SPARE) - working_mb(shape)) // held_mb(shape))
    if places >= len(names):
        return [list(names)]
    first = [yardstick] if yardstick in names else []
    others = [name for name in names if name not in first]
    size = places - len(first)
    if size < 1:
        raise MemoryError(
            f"shape {shape.name} needs about {held_mb(shape):.0f} MiB for each system and {working_mb(shape):.0f} MiB "
            f"for the one that works; {available:.0f} MiB are available"
        )
    return [first + others[start : start + size] for start in range(0, len(others), size)]
