"""Environments that were built in Python."""

from __future__ import annotations

import copy
from typing import Any

from rl4lms_like.scoring.python_function import FunctionName, built_object


def copied_environment(object: FunctionName) -> Any:
    """Return a copy of an environment that was built in Python; each episode of a batch has one of its own.

    Args:
        object: the environment; in a file its name, which cannot be built again.
    """
    return copy.deepcopy(built_object(object, "dialogue"))
