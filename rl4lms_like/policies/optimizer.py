"""Optimizer with separate parameter groups for actor and critic, and weight decay on matrices only."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn


def parameter_groups(
    actor: Iterable[nn.Parameter], critic: Iterable[nn.Parameter], *, weight_decay: float
) -> list[dict[str, Any]]:
    """Return optimizer groups with the extra key `role` (`actor` or `critic`), so that each can have a learning rate.

    Biases and normalisation weights (everything with fewer than two dimensions) have no weight decay. A parameter that
    both use belongs to the actor.
    """
    groups: list[dict[str, Any]] = []
    seen: set[int] = set()
    for role, parameters in (("actor", actor), ("critic", critic)):
        own = [p for p in parameters if p.requires_grad and id(p) not in seen]
        seen.update(id(p) for p in own)
        for decay, members in (
            (weight_decay, [p for p in own if p.ndim >= 2]),
            (0.0, [p for p in own if p.ndim < 2]),
        ):
            if members:
                groups.append({"params": members, "weight_decay": decay, "role": role})
    return groups


def make_optimizer(
    optimizer_class: type[torch.optim.Optimizer],
    groups: list[dict[str, Any]],
    *,
    learning_rate: float,
    optimizer_kwargs: Mapping[str, Any],
) -> torch.optim.Optimizer:
    """Return the optimizer; Adam and AdamW are fused unless `optimizer_kwargs` set `fused` or `foreach`."""
    kwargs = {name: value for name, value in optimizer_kwargs.items() if name != "weight_decay"}
    if optimizer_class in (torch.optim.Adam, torch.optim.AdamW) and not {"fused", "foreach"} & set(kwargs):
        kwargs["fused"] = True
    if "lr" in inspect.signature(optimizer_class).parameters:
        kwargs.setdefault("lr", learning_rate)
    return optimizer_class(groups, **kwargs)
