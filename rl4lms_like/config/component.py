"""Block of a component: its id and arguments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Arguments = dict[str, Any]
"""Keyword arguments of a component."""


@dataclass(frozen=True, kw_only=True)
class ComponentConfig:
    """Component given by id.

    Args:
        id: an id of the registry, or an import path `package.module:Name`.
        args: arguments of the component.
    """

    id: str
    args: Arguments = field(default_factory=dict)
