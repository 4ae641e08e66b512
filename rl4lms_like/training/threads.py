"""Number of threads that torch uses in a run."""

from __future__ import annotations

from typing import Any

import torch

from rl4lms_like.config.run_config import AnyConfig

SMALL_MODEL = 20_000_000
"""Largest number of parameters of actor and critic for which `n_threads: auto` uses one thread; a second thread made
tiny models up to 40 times slower."""


def n_parameters(policy: Any) -> int:
    """Return the number of parameters of actor and critic, including frozen ones but not the reference model."""
    named = policy.named_parameters()
    return sum(parameter.numel() for name, parameter in named if not name.startswith("ref_model."))


def set_n_threads(config: AnyConfig, model: Any = None) -> None:
    """Set torch's number of threads; with `auto`, use one for a small model."""
    if config.n_threads != "auto":
        torch.set_num_threads(int(config.n_threads))
    elif model is not None and n_parameters(model) <= SMALL_MODEL:
        torch.set_num_threads(1)
