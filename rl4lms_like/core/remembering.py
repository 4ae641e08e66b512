"""What rewards and metrics of a user remember between calls: asked for by `state_dict()`, given back, in JSON's types.

A component without `state_dict` remembers nothing. That of a `torch.nn.Module` is its weights, which are not meant.
"""

from __future__ import annotations

from typing import Any

from rl4lms_like.core.errors import ComponentError
from rl4lms_like.core.wording import raised


def state_of(component: Any) -> Any:
    """What a component remembers; None if it says nothing of it.

    Raises:
        ComponentError: its `state_dict` failed.
    """
    if not _remembers(component):
        return None
    try:
        return component.state_dict()
    except (ComponentError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise ComponentError(f"the state_dict() of {type(component).__name__} failed: {raised(error)}") from error


def load_state(component: Any, state: Any) -> None:
    """Gives a component back what `state_of` said.

    Raises:
        ValueError: there is a state, and the component remembers nothing, or the other way round.
    """
    if (state is not None) != _remembers(component):
        raise ValueError(f"{type(component).__name__} {'has no' if state is not None else 'lacks its'} state")
    if state is not None:
        component.load_state_dict(state)


def not_json(value: Any, path: str = "state") -> str | None:
    """The first thing in `value` that JSON would not give back as it is, in words; None if there is none."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                return f"{path} has the key {key!r}, which is no text"
            if said := not_json(item, f"{path}[{key!r}]"):
                return said
        return None
    if isinstance(value, list):
        return next((said for index, item in enumerate(value) if (said := not_json(item, f"{path}[{index}]"))), None)
    if value is None or type(value) in (bool, int, float, str):
        return None
    return f"{path} is of type {type(value).__name__}"


def _remembers(component: Any) -> bool:
    method = getattr(type(component), "state_dict", None)
    return method is not None and not str(getattr(method, "__module__", "")).startswith("torch.")
