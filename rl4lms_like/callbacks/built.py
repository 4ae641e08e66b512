"""Callbacks that were built in Python."""

from __future__ import annotations

from typing import Any

from rl4lms_like.scoring.python_function import FunctionName, built_object


def built_callback(object: FunctionName) -> Any:
    """Return a callback that was built in Python.

    Args:
        object: the callback; in a file its name, which cannot be built again.
    """
    return built_object(object, "callbacks")
