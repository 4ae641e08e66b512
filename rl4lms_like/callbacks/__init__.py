"""Registry of callbacks. `train_evaluation.callbacks` in a config selects them, usually by an import path."""

from rl4lms_like.callbacks.base import Callback, RunContext
from rl4lms_like.system.registry import Entry, Registry, derived_from

CALLBACKS = Registry(
    "callback",
    group="rl4lms_like.callbacks",
    misfit=derived_from("rl4lms_like.callbacks.base:Callback"),
    table={"object": Entry(".built:built_callback", "a callback that was built in Python")},
)
__all__ = ["CALLBACKS", "Callback", "RunContext"]
