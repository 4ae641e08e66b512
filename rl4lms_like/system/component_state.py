"""Save and restore the state of a user's rewards and metrics: `state_dict()` and `load_state_dict()`, in JSON's types.

A component without `state_dict` is stateless. The `state_dict` of `torch.nn.Module` is not used: it returns weights.
"""

from __future__ import annotations

from typing import Any

from rl4lms_like.system.errors import ComponentError
from rl4lms_like.system.wording import raised


def state_of(component: Any) -> Any:
    """Return the `state_dict()` of a component; None if it has no such method.

    Raises:
        ComponentError: its `state_dict` failed.
    """
    if not _has_state(component):
        return None
    try:
        return component.state_dict()
    except (ComponentError, KeyboardInterrupt):
        raise
    except BaseException as error:  # also `SystemExit`, which would end the run and name no component
        raise ComponentError(f"the state_dict() of {type(component).__name__} failed: {raised(error)}") from error


def load_state(component: Any, state: Any) -> None:
    """Restore a state returned by `state_of`.

    Raises:
        ValueError: a state is given for a stateless component, or is missing for a component with state.
    """
    # Not ignored in either case: the component is another one than in the run that saved the state.
    name = type(component).__name__
    if state is not None and not _has_state(component):
        raise ValueError(f"{name} has no `state_dict`, but a saved state")
    if state is None and _has_state(component):
        raise ValueError(f"{name} has no saved state")

    if state is not None:
        component.load_state_dict(state)


def not_json(value: Any, path: str = "state") -> str | None:
    """Describe the first part of `value` that JSON would not restore unchanged; None if there is none."""
    # JSON turns other keys (1, None) into strings, so that the component would not find them again.
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                return f"{path} has the key {key!r}, which is not a string"
            if message := not_json(item, f"{path}[{key!r}]"):
                return message
        return None

    # A tuple would be restored as a list, so it is not accepted.
    if isinstance(value, list):
        for index, item in enumerate(value):
            if message := not_json(item, f"{path}[{index}]"):
                return message
        return None

    # The exact types: a subclass, such as NumPy's float64 or an enum, would be restored as its base class.
    if value is None or type(value) in (bool, int, float, str):
        return None
    return f"{path} is of type {type(value).__name__}"


def _has_state(component: Any) -> bool:
    # A reward or metric may be a `torch.nn.Module`, whose inherited `state_dict` has the weights.
    method = getattr(type(component), "state_dict", None)
    return method is not None and not str(getattr(method, "__module__", "")).startswith("torch.")
