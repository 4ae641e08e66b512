"""Makes `gymnasium.make("rl4lms_like/TextGen-v0", ...)` work once `rl4lms_like` is imported, before or after Gymnasium.

    gymnasium is imported         registered at once
    gymnasium is not yet          registered when it is: importing it here would load numpy for every command line

Gymnasium looks for no plugins itself since its version 1.0.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

ENV_ID = "rl4lms_like/TextGen-v0"


def register_envs() -> None:
    """Registers the environment, or has it registered when Gymnasium is imported. Runs when `rl4lms_like` is."""
    if "gymnasium" in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _AfterGymnasium())


def _register() -> None:
    import gymnasium

    if ENV_ID not in gymnasium.registry:
        gymnasium.register(ENV_ID, entry_point="rl4lms_like.envs.env:TextGenEnv")


class _AfterGymnasium:
    """Finder that waits for the import of Gymnasium, and leaves the import itself to the other finders."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "gymnasium":
            return None
        sys.meta_path.remove(self)  # for the others to be asked
        try:
            spec = find_spec(name)
        finally:
            sys.meta_path.insert(0, self)  # who only looks does not import
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                sys.meta_path.remove(self)
                _register()

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
