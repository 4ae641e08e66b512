"""Makes `gymnasium.make("rl4lms_like/TextGen-v0", ...)` work. Loads nothing but Gymnasium."""

from __future__ import annotations

import gymnasium

ENV_ID = "rl4lms_like/TextGen-v0"


def register_envs() -> None:
    """Registers the environment, once. Runs when `rl4lms_like` is imported; the entry point is imported by `make`."""
    if ENV_ID not in gymnasium.registry:
        gymnasium.register(ENV_ID, entry_point="rl4lms_like.envs.env:TextGenEnv")
